"""Two sets of images at once: labelled ones to learn from, and unlabelled ones to adapt to."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_rob.data.image_data import ImageData
from lightning_rob.data.samples import Augment, Part, Source
from lightning_rob.data.sampling import EpochSampler, ResumableLoader, resumption
from lightning_rob.nets.weights import read_file
from lightning_rob.randomness import derive_seed

NO_LABEL = -1  # no loss takes it for a class


class Unlabelled:
    """The images of a source, all with the label -1.

    Args:
        source: images with labels, or with nothing else.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.source[index][0], NO_LABEL


def read_images(path: str) -> Tensor:
    """Images from a file, e.g. those of an attack.

    Args:
        path: a tensor or an array [N, C, H, W] (`.pt`, `.npy`), or several (`.pt`, `.npz`), of
            which it is the one called x; floating point in [0, 1], or uint8.

    Returns:
        [N, C, H, W] float32 in [0, 1].

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it does not hold such images.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file of images {path}")
    held = read_file(path) if path.endswith(".pt") else _arrays(path)
    if not isinstance(held, Tensor):
        if not (isinstance(held, dict) and isinstance(held.get("x"), Tensor)):
            raise ValueError(f"{path} must hold a tensor, or one called x among others")
        held = held["x"]
    images = held.float() / 255 if held.dtype == torch.uint8 else held.float()
    if images.ndim != 4 or not len(images):
        raise ValueError(f"{path} must hold images [N, C, H, W], got {list(images.shape)}")
    if not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(
            f"images in {path} must lie in [0, 1], got values in "
            f"[{float(images.min()):.4g}, {float(images.max()):.4g}]"
        )
    return images


def _arrays(path: str) -> Tensor | dict[str, Tensor]:
    try:
        held: Any = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path} is not a file of images: .pt, .npy or .npz") from error
    if isinstance(held, np.ndarray):
        return torch.from_numpy(held)
    return {name: torch.from_numpy(held[name]) for name in held.files if name == "x"}


class SourceTargetData(ImageData):
    """Labelled training images of one data set beside unlabelled ones of another, for `DANN`.

    A training batch is {"source": x, y and index, "target": likewise, with labels -1}. An epoch has
    as many as the smaller of the two sets; each epoch shuffles both. Validation and test are those
    of the source.

    Args:
        source: whose training images are labelled; all its options hold here, also for the target.
        target: whose test images are unlabelled; None: those of the source.
        images: a file of unlabelled images instead, see `read_images`; a round of the game trains
            on the attacked test images.

    Raises:
        ValueError: target and images, or images of another shape than the source's.
    """

    def __init__(
        self, source: ImageData, target: ImageData | None = None, images: str | None = None
    ) -> None:
        if target is not None and images is not None:
            raise ValueError(f"the unlabelled images are those of target or of {images}, not both")
        super().__init__(
            batch_size=source.batch_size,
            eval_batch_size=source.eval_batch_size,
            val_size=source.val_size,
            workers=source.workers,
            seed=source.seed,
            augment=source.augment,
            limit_train=source.limit_train,
            split_seed=source.split_seed,
        )
        self.base = source
        self.target = target or source
        self.images = images
        self.classes, self.mean, self.std = source.classes, source.mean, source.std
        self.channels, self.size = source.channels, source.size
        if target is not None:
            self._check(type(target).__name__, (target.channels, target.size, target.size))

    def prepare_data(self) -> None:
        """Download both, or see that there is no need to."""
        self.base.prepare_data()
        self.target.prepare_data()

    def source(self, train: bool) -> Source:
        """The labelled data set's."""
        return self.base.source(train)

    def default_augment(self) -> list[Augment]:
        """The labelled data set's."""
        return self.base.default_augment()

    def fixed_steps(self) -> list[Augment]:
        """The labelled data set's."""
        return self.base.fixed_steps()

    def hold_out(self, count: int) -> tuple[Tensor, Tensor]:
        """The labelled data set's split."""
        return self.base.hold_out(count)

    def test_order(self, count: int) -> Tensor:
        """The labelled data set's."""
        return self.base.test_order(count)

    def setup(self, stage: str | None = None) -> None:
        """Load what the stage needs, once."""
        super().setup(stage)
        if stage in ("fit", None) and "target" not in self.parts:
            self.parts["target"] = self._target()

    def train_dataloader(self) -> Any:
        """This process's shuffled shares of both, from where training goes on."""
        start = resumption(self.trainer, self.state_dict().get("epoch", self._epoch))
        part = self.parts["target"]
        # Of its own seed: else two sets of one size would be in the same order.
        sampler = EpochSampler(part, self.batch_size, part.seed, start, **self._share())
        target = ResumableLoader(part, sampler=sampler, **self._options(self.batch_size))
        return CombinedLoader({"source": super().train_dataloader(), "target": target}, "min_size")

    def _target(self) -> Part:
        """All unlabelled images, augmented as the others are, for that should not tell them."""
        augment = self.default_augment() if self.augment is None else self.augment
        if self.images is None:
            images: Source = self.target.source(train=False)
            steps = augment or self.target.fixed_steps()
        else:
            pixels = read_images(self.images)
            self._check(self.images, tuple(pixels.shape[1:]))
            images, steps = TensorDataset(pixels), augment
        indices = torch.arange(len(images))
        return Part(Unlabelled(images), indices, steps, derive_seed(self.seed, 1))

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        wanted = (self.channels, self.size, self.size)
        if shape != wanted:
            raise ValueError(f"unlabelled images must be {list(wanted)}, {name} has {list(shape)}")
