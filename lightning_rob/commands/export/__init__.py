"""`lightning-rob export`: a defense as a program, or as a folder of the Hugging Face hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from lightning_rob.commands.config import CommandConfig, at_least


@dataclass(frozen=True)
class ExportConfig(CommandConfig):
    """Write a defense, its rule and its draws included, as a program of torch.export.

    The program is loaded back and has to give the same predictions.

      lightning-rob export last.ckpt --out defense.pt2

    and then, without this package:

      defense = torch.export.load("defense.pt2").module()
      probabilities = defense(images)        # [B, C, H, W] in [0, 1] -> [B, classes]
      probabilities = defense(images, keys)  # a randomized defense: keys [B] int64

    Equal keys draw equal noise: the images' indices give the predictions of `predict`.
    Under attack draw new keys for every query: torch.randint(2**62, (B,)).

    For lightning_rob.load and the Hugging Face hub, as model.safetensors, config.json and
    a model card with the accuracies recorded for these weights:

      lightning-rob export last.ckpt --format safetensors --out FOLDER

    Args:
        out: FILE.pt2, the program; or the folder
        images: N test images on which predictions are compared; of a program
        format: pt2 or safetensors
    """

    usage: ClassVar[str] = "CHECKPOINT --out FILE [options of test]"
    module: ClassVar[str] = "program"

    out: Path | None = None
    images: int = 64
    format: Literal["pt2", "safetensors"] = "pt2"

    def __post_init__(self) -> None:
        if self.format == "safetensors":
            if self.out is None or self.out.suffix in (".pt2", ".safetensors"):
                raise ValueError(f"--out must name a folder for safetensors, got {self.out}")
        elif self.out is None or self.out.suffix != ".pt2":
            raise ValueError(f"say where the program goes to: --out FILE.pt2, got {self.out}")
        at_least(1, images=self.images)
