"""What a user may ask of `lightning-rob audit`; nothing heavy is imported."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NoReturn

HELP = """usage: lightning-rob audit --ckpt_path CHECKPOINT [options]

Look for what makes a defense seem more robust than it is: gradients that are
zero, infinite or cut off; attacks that grow weaker with more steps, or that
noise and black-box attacks beat; chance that nobody averages over; answers
that are no numbers; an attack for this kind of defense that was not run.

  --eps RADIUS     in pixel units, images span [0, 1] (default: 8/255)
  --norm NORM      linf or l2 (default: linf)
  --images N       a random choice of the test images (default: 100)
  --steps N        of the usual PGD, others take a multiple (default: 20)
  --queries N      of the black-box Square Attack, per image (default: 1000)
  --seed N         of all noise, and of the choice (default: 0)
  --strict         exit code 1 when something severe was found

All other options are those of `lightning-rob test`, see there.

  lightning-rob audit --ckpt_path last.ckpt --eps 8/255 --strict

Attacks plugged in with --trainer.callbacks+=callbacks/… run too, and the audit
says whether the one made for this kind of defense is among them. It writes
audit.json into the run's folder."""


class Arguments(argparse.ArgumentParser):
    """Parser that raises a ValueError for an argument that it cannot read."""

    def error(self, message: str) -> NoReturn:
        """Raise it, where argparse would end the program."""
        raise ValueError(message)


@dataclass(frozen=True)
class Wish:
    """An audit as it was asked for; see `RobustAudit`.

    Args:
        eps: radius in pixel units.
        norm: "linf" or "l2".
        images: how many.
        steps: of the usual PGD.
        queries: of the Square Attack.
        seed: of all noise.
        strict: whether something severe ends the command with code 1.
    """

    eps: float
    norm: str
    images: int
    steps: int
    queries: int
    seed: int
    strict: bool


def help_text() -> str:
    """What `lightning-rob audit --help` prints."""
    return HELP


def parse(args: Sequence[str]) -> tuple[Wish, list[str]]:
    """The audit that is asked for, and the arguments that are for `test`.

    Raises:
        ValueError: it cannot be meant.
    """
    options = Arguments(add_help=False, allow_abbrev=False)
    options.add_argument("--eps", default="8/255")
    options.add_argument("--norm", default="linf")
    for name, default in {"images": 100, "steps": 20, "queries": 1000, "seed": 0}.items():
        options.add_argument(f"--{name}", default=str(default))
    options.add_argument("--strict", action="store_true")
    own, rest = options.parse_known_args(list(args))
    counts = {name: _count(name, getattr(own, name)) for name in ("images", "steps", "queries")}
    if own.norm not in ("linf", "l2"):
        raise ValueError(f"--norm must be linf or l2, got {own.norm}")
    seed = _count("seed", own.seed, least=0)
    return Wish(_radius(own.eps, own.norm), own.norm, seed=seed, strict=own.strict, **counts), rest


MOST = 0.5  # a gray image is in the linf ball of every other


def _radius(text: str, norm: str) -> float:
    try:
        radius = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"--eps must be a number or a fraction as 8/255, got {text!r}") from None
    if not radius > 0:
        raise ValueError(f"--eps must be above 0, got {text}")
    if norm == "linf" and radius >= MOST:
        raise ValueError(
            f"--eps {text} holds every image, for images span [0, 1]: did you mean {text}/255?"
        )
    return radius


def _count(name: str, text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"--{name} must be a whole number of at least {least}, got {text!r}")
    return int(text)
