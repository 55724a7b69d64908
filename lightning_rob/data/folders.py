"""Images from folders with a subfolder per class (ImageNet, Imagenette …), and from one file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset

from lightning_rob.data.base import Augment, ImageData, Source
from lightning_rob.nets.weights import read_file
from lightning_rob.runtime.errors import at_least


def _pixels(image: Image.Image) -> Tensor:
    from torchvision.transforms.v2 import functional

    pixels: Tensor = functional.pil_to_tensor(image)
    return pixels.float() / 255


def read_images(path: str) -> Tensor:
    """Read images from a file, such as those of an attack, as [N, C, H, W] float32 in [0, 1].

    The file is a tensor or an array [N, C, H, W] (`.pt`, `.npy`), or a dict or archive with one
    called x (`.pt`, `.npz`); floating point in [0, 1], or uint8.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file of images {path}")
    content: Any
    if path.endswith(".pt"):
        content = read_file(path)
    else:
        try:
            content = np.load(path, allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"{path} is not a file of images: .pt, .npy or .npz") from error
    if not isinstance(content, Tensor | np.ndarray):
        content = content.get("x") if isinstance(content, Mapping) else None
        if not isinstance(content, Tensor | np.ndarray):
            raise ValueError(f"{path} must hold a tensor, or one called x among others")
    images = torch.as_tensor(content)
    images = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    if images.ndim != 4 or not len(images):
        raise ValueError(f"{path} must hold images [N, C, H, W], got {list(images.shape)}")
    if not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(
            f"images in {path} must lie in [0, 1], got values in "
            f"[{float(images.min()):.4g}, {float(images.max()):.4g}]"
        )
    return images


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
        return torch.arange(first), first + self.test_order(count - first)

    def test_order(self, count: int) -> Tensor:
        # Files are sorted by class, and an evaluation may stop early.
        return torch.randperm(count, generator=self.split_generator(1))

    def _folder(self, part: str) -> Any:
        from torchvision.datasets import ImageFolder

        return ImageFolder(str(self.root / part), transform=_pixels)
