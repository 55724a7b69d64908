"""`lightning-rob export`: a defense as a program, or as a folder of the Hugging Face hub."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

from lightning_rob.commands.config import CommandConfig, at_least

ONNX = ("onnx", "onnxscript", "onnxruntime")  # the packages of the extra


@dataclass(frozen=True)
class ExportConfig(CommandConfig):
    """Write a defense, its rule and its draws included, as a program of torch.export or ONNX.

    The program is loaded back and has to give the same predictions.

      lightning-rob export last.ckpt --out defense.pt2
      lightning-rob export last.ckpt --out defense.onnx

    and then, without this package:

      defense = torch.export.load("defense.pt2").module()
      probabilities = defense(images)        # [B, C, H, W] in [0, 1] -> [B, classes]
      probabilities = defense(images, keys)  # a randomized defense: keys [B] int64

    Equal keys draw equal noise: the images' indices give the predictions of `predict`.
    Under attack draw new keys for every query: torch.randint(2**62, (B,)).
    ONNX is for defenses that do not predict at random; it needs lightning-rob[onnx].

    For lightning_rob.load and the Hugging Face hub, as model.safetensors, config.json and
    a model card with the accuracies recorded for these weights:

      lightning-rob export last.ckpt --format safetensors --out FOLDER

    Args:
        out: FILE.pt2 or FILE.onnx, the program; or the folder
        images: N test images on which predictions are compared; of a program
        format: pt2, onnx or safetensors; default: that of the file's name
    """

    usage: ClassVar[str] = "CHECKPOINT --out FILE [options of test]"
    module: ClassVar[str] = "program"

    out: Path | None = None
    images: int = 64
    format: Literal["pt2", "onnx", "safetensors"] | None = None

    def __post_init__(self) -> None:
        if self.format == "safetensors":
            if self.out is None or self.out.suffix in (".pt2", ".onnx", ".safetensors"):
                raise ValueError(f"--out must name a folder for safetensors, got {self.out}")
            return
        if self.out is None:
            raise ValueError("say where the program goes to: --out FILE.pt2")
        formats = [self.format] if self.format else ["pt2", "onnx"]
        if self.out.suffix.removeprefix(".") not in formats:
            wanted = " or ".join(f"file.{name}" for name in formats)
            raise ValueError(f"--out must name a {wanted}, got {str(self.out)!r}")
        if self.out.suffix == ".onnx" and not all(map(find_spec, ONNX)):
            raise ModuleNotFoundError("ONNX files need pip install 'lightning-rob[onnx]'")
        at_least(1, images=self.images)
