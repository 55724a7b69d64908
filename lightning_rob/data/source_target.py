"""Labelled source images beside unlabelled target images, for domain adaptation."""

from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lightning_rob.data.base import ImageData, IndexedSubset, Source
from lightning_rob.data.sampling import EpochSampler, ResumableLoader
from lightning_rob.randomness import derive_seed

NO_LABEL = -1  # every loss refuses it


class Unlabelled:
    """Images of a source of (x, y) or (x,), all with the label -1."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.source[index][0], NO_LABEL


class SourceTargetData(ImageData):
    """Labelled training images of one data set beside unlabelled images of another, for `DANN`.

    A training batch is {"source": (x, y, index), "target": (x, y, index)}, with labels -1 in the
    target. An epoch ends with the smaller of the two sets; each epoch shuffles both. Validation and
    test images are those of the source.

    Args:
        source: data set of the labelled training images; its options hold for the target too.
        target: data set of the unlabelled images, which are its test images; None: the source.
    """

    def __init__(self, source: ImageData, target: ImageData | None = None) -> None:
        names = "batch_size eval_batch_size val_size workers seed augment limit_train split_seed"
        super().__init__(**{name: getattr(source, name) for name in names.split()})
        self.base = source
        self.target = target or source
        self.classes, self.mean, self.std = source.classes, source.mean, source.std
        self.channels, self.size = source.channels, source.size
        for name in ("default_augment", "preprocessing", "hold_out", "test_order"):
            setattr(self, name, getattr(source, name))  # all are those of the source
        shapes = [[one.channels, one.size, one.size] for one in (source, self.target)]
        if shapes[0] != shapes[1]:
            name = type(target).__name__
            raise ValueError(f"unlabelled images must be {shapes[0]}, {name} has {shapes[1]}")

    def prepare_data(self) -> None:
        self.base.prepare_data()
        self.target.prepare_data()

    def source(self, train: bool) -> Source:
        return self.base.source(train)

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if stage in ("fit", None) and "target" not in self.parts:
            # Augmented like the source's, to keep the domains alike.
            augment = self.default_augment() if self.augment is None else self.augment
            images = Unlabelled(self.target.source(train=False))
            steps, seed = augment or self.target.preprocessing(), derive_seed(self.seed, 1)
            self.parts["target"] = IndexedSubset(images, torch.arange(len(images)), steps, seed)

    def train_dataloader(self) -> Any:
        start, part = self._resume_point(), self.parts["target"]
        # A seed of its own: else two sets of one size would be in the same order.
        sampler = EpochSampler(part, self.batch_size, part.seed, start, **self._share())
        target = ResumableLoader(part, sampler=sampler, **self._options(self.batch_size))
        return CombinedLoader({"source": super().train_dataloader(), "target": target}, "min_size")
