"""Images: any folder of images, a subfolder to each class (ImageNet, Imagenette, GTSRB …)."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset

from lightning_rob.data.image_data import ImageData, at_least
from lightning_rob.data.samples import Augment, Source


def _pixels(image: Image.Image) -> Tensor:
    from torchvision.transforms.v2 import functional

    pixels: Tensor = functional.pil_to_tensor(image)
    return pixels.float() / 255


class Images(ImageData):
    """Images in `root/train/<class>/` and in `root/test/<class>/` or `root/val/<class>/`.

    The test images are those of `test`, or of `val` where there is no `test`. With both, `val` has
    the validation images and `val_size` is unused; else they are held out of `train`.

    Args:
        root: folder that has `train`, and `test` or `val` or both.
        resize: shorter side for evaluation, in pixels, before cropping.
        crop: side of the square, in pixels: cut from the centre for evaluation.
        **options: see `ImageData`; training images are random crops, resized and flipped, unless
            `augment` is given, which must then bring them to one size.

    Raises:
        FileNotFoundError: a folder is missing.
        ValueError: the folders do not have the same classes.
    """

    channels = 3
    mean = (0.485, 0.456, 0.406)  # of ImageNet, usual for photographs
    std = (0.229, 0.224, 0.225)

    def __init__(self, root: str, resize: int = 256, crop: int = 224, **options: Any) -> None:
        super().__init__(**options)
        at_least(1, resize=resize, crop=crop)
        self.root = Path(root)
        self.resize = resize
        self.size = crop
        names = {part: self._names(part) for part in ("train", "test", "val")}
        self.test = "test" if names["test"] else "val"
        self.held_apart = bool(names["test"] and names["val"])
        for part in ("train", self.test, "val" if names["val"] else "train"):
            self._check(part, names)
        self.classes = len(names["train"])

    def fixed_steps(self) -> list[Augment]:
        """Resize, then crop the centre."""
        from torchvision.transforms import v2

        return [v2.Resize(self.resize), v2.CenterCrop(self.size)]

    def default_augment(self) -> list[Augment]:
        """A random crop resized to the size wanted, and a flip."""
        from torchvision.transforms import v2

        return [v2.RandomResizedCrop(self.size), v2.RandomHorizontalFlip()]

    def source(self, train: bool) -> Source:
        """All training images, behind them those for validation if held apart; or the test's."""
        learn = ("train", "val") if self.held_apart else ("train",)
        return ConcatDataset([self._folder(part) for part in (learn if train else (self.test,))])

    def hold_out(self, count: int) -> tuple[Tensor, Tensor]:
        """Validation images are drawn, unless they have a folder."""
        if not self.held_apart:
            return super().hold_out(count)
        first = count - len(self._folder("val"))
        return torch.arange(first), first + self.test_order(count - first)

    def test_order(self, count: int) -> Tensor:
        """Shuffled, for the folders have class after class and an evaluation may stop early."""
        return torch.randperm(count, generator=self.split_generator(1))

    def _folder(self, part: str) -> Any:
        from torchvision.datasets import ImageFolder

        return ImageFolder(str(self.root / part), transform=_pixels)

    def _names(self, part: str) -> list[str]:
        folder = self.root / part
        return sorted(f.name for f in folder.iterdir() if f.is_dir()) if folder.is_dir() else []

    def _check(self, part: str, names: dict[str, list[str]]) -> None:
        if not names[part]:
            raise FileNotFoundError(
                f"no folders of images in {self.root.absolute() / part}: put one there for each"
                " class, or pass --data.root=… if they are elsewhere"
            )
        if names[part] != names["train"]:
            odd = sorted({*names[part]} ^ {*names["train"]})
            raise ValueError(f"{part} and train do not have the same classes: {odd} in one only")
