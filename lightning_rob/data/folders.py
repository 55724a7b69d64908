"""Images from folders with a subfolder per class (ImageNet, Imagenette …)."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset

from lightning_rob.data.base import Augment, ImageData, Source
from lightning_rob.runtime.errors import InputError, at_least


def _rgb(path: str) -> Image.Image:
    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF":  # which `convert` would cut at 255: a white image
                raise ValueError(f"mode {image.mode} has more than 8 bits: save it with 8")
            return image.convert("RGB")
    except Exception as error:  # a damaged file may raise any
        raise InputError(f"{path} cannot be read as an image: {error}") from error


def _pixels(image: Image.Image) -> Tensor:
    from torchvision.transforms.v2 import functional

    pixels: Tensor = functional.pil_to_tensor(image)
    return pixels.float() / 255


class Images(ImageData):
    """Images in `root/train/<class>/` and in `root/test/<class>/` or `root/val/<class>/`.

    Test images are those of `test`, or of `val` without a folder `test`. With both, `val` holds
    the validation images and `val_size` is unused; else these are held out of `train`.

    Training images are random crops, resized and flipped, unless `augment` is given, which must
    then bring them to one size.

    Args:
        root: folder with `train`, and `test` or `val` or both.
        resize: shorter side for evaluation, in pixels, before cropping.
        crop: side of the square crop in pixels, at the centre for evaluation.
        **options: see `ImageData`.
    """

    channels = 3
    mean = (0.485, 0.456, 0.406)  # ImageNet's, usual for photographs
    std = (0.229, 0.224, 0.225)

    def __init__(self, root: str, resize: int = 256, crop: int = 224, **options: Any) -> None:
        super().__init__(**options)
        at_least(1, resize=resize, crop=crop)
        self.root = Path(root)
        self.resize = resize
        self.size = crop
        names = {}
        for part in ("train", "test", "val"):
            folder = self.root / part
            inside = folder.iterdir() if folder.is_dir() else ()
            names[part] = sorted(file.name for file in inside if file.is_dir())
        # ImageNet's test images have no labels: `val` is the test then.
        self.test = "test" if names["test"] else "val"
        self.has_val_folder = bool(names["test"] and names["val"])
        self.classes = len(names["train"])
        for part in dict.fromkeys(["train", self.test, "val" if names["val"] else "train"]):
            if not names[part]:
                raise FileNotFoundError(
                    f"no folders of images in {self.root.absolute() / part}: put one there for each"
                    " class, or pass --data.root=… if they are elsewhere"
                )
            if odd := sorted({*names[part]} ^ {*names["train"]}):
                raise ValueError(
                    f"{part} and train do not have the same classes: {odd} in one only"
                )

    def preprocessing(self) -> list[Augment]:
        from torchvision.transforms import v2

        return [v2.Resize(self.resize), v2.CenterCrop(self.size)]

    def default_augment(self) -> list[Augment]:
        from torchvision.transforms import v2

        return [v2.RandomResizedCrop(self.size), v2.RandomHorizontalFlip()]

    def source(self, train: bool) -> Source:
        names = [self.test]
        if train:
            names = ["train", "val"] if self.has_val_folder else ["train"]
        return ConcatDataset([self._folder(name) for name in names])

    def hold_out(self, count: int) -> tuple[Tensor, Tensor]:
        if not self.has_val_folder:
            return super().hold_out(count)
        first = count - len(self._folder("val"))  # `source` puts them last
        # Files are sorted by class, and `limit_train` takes the first ones.
        train = torch.randperm(first, generator=self.split_generator(2))
        return train, first + self.test_order(count - first)

    def test_order(self, count: int) -> Tensor:
        # Files are sorted by class, and an evaluation may stop early.
        return torch.randperm(count, generator=self.split_generator(1))

    def _folder(self, part: str) -> Any:
        from torchvision.datasets import ImageFolder

        return ImageFolder(str(self.root / part), transform=_pixels, loader=_rgb)
