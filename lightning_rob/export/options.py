"""What a user may ask of `lightning-rob export`; nothing heavy is imported."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_rob.sweep.options import Arguments

HELP = """usage: lightning-rob export --ckpt_path CHECKPOINT --out FILE.pt2 [options]

Write a whole defense, its rule and its draws included, as one program that runs
without this package. It is loaded back and has to give the same answers.

  --out FILE.pt2   the program, of torch.export
  --batch N        so many images at a time, or dynamic (default: dynamic)
  --images N       test images on which the answers are compared (default: 64)

All other options are those of `lightning-rob test`, see there.

  lightning-rob export --ckpt_path last.ckpt --out defense.pt2

and then, where torch is all that is installed:

  defense = torch.export.load("defense.pt2").module()
  answers = defense(images)        # [B, C, H, W] in [0, 1] -> [B, classes]
  answers = defense(images, keys)  # a defense with chance in it: keys [B] int64

Equal keys draw equal noise: the images' indices give the answers of `predict`.
Where an attacker asks, draw them anew: torch.randint(2**62, (B,))."""


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Args:
        out: the file.
        batch: so many images at a time; None for any number.
        images: how many test images are compared on.

    Raises:
        ValueError: no such file, or a number below 1.
    """

    out: Path
    batch: int | None = None
    images: int = 64

    def __post_init__(self) -> None:
        if self.out.suffix != ".pt2":
            raise ValueError(f"--out must name a file.pt2, got {str(self.out)!r}")
        for name in ("batch", "images"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"--{name} must be at least 1, got {number}")


def help_text() -> str:
    """What `lightning-rob export --help` prints."""
    return HELP


def parse(args: Sequence[str]) -> tuple[Request, list[str]]:
    """What is asked for, and the arguments that are for `test`.

    Raises:
        ValueError: it cannot be meant.
    """
    options = Arguments(add_help=False, allow_abbrev=False)
    options.add_argument("--out")
    options.add_argument("--batch", default="dynamic")
    options.add_argument("--images", type=int, default=64)
    own, rest = options.parse_known_args(list(args))
    if not own.out:
        raise ValueError("say where the program goes to: --out FILE.pt2")
    if own.batch != "dynamic" and not own.batch.isdigit():
        raise ValueError(f"--batch must be a number or dynamic, got {own.batch!r}")
    batch = None if own.batch == "dynamic" else int(own.batch)
    return Request(Path(own.out), batch, own.images), rest
