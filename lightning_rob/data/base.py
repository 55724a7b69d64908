"""The base of all data modules: split, loaders, and samples (x, y, index) of their subsets."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_rob.data.sampling import (
    EpochSampler,
    ResumableLoader,
    ResumePoint,
    every_image_once,
    resume_point,
)
from lightning_rob.randomness import Streams, generator_of, global_seed
from lightning_rob.runtime.errors import at_least

Augment = Callable[[Tensor], Any]  # to a Tensor; jsonargparse takes Tensor to mean a factory
Sample = tuple[Tensor, int, int]


class Source(Protocol):
    """All images of a data set with their labels: `source[index]` is ([C, H, W] in [0, 1], y)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class InMemoryImages:
    """A source in memory: images [N, C, H, W] uint8 and labels [N]."""

    def __init__(self, images: Tensor, labels: Any) -> None:
        self.images = images
        self.labels = torch.as_tensor(labels)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].float() / 255, int(self.labels[index])


class IndexedSubset(Dataset[Sample]):
    """Some images of a source, each with its index there.

    The key of an image is `epoch * len(subset) + position` (a plain position is epoch 0). Its
    augmentation is a function of (seed, epoch, index): the same in any worker, any batch and after
    any resumption. The state of torch's global stream is restored.
    """

    def __init__(
        self, source: Source, indices: Tensor, augmentations: Sequence[Augment] = (), seed: int = 0
    ) -> None:
        self.source = source
        self.indices = indices
        self.augmentations = tuple(augmentations)
        self.seed = seed

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, key: int) -> Sample:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[int]) -> list[Sample]:
        """Return the samples of a batch, as a `DataLoader` requests them."""
        key = torch.tensor(keys)
        index = self.indices[key % len(self)]
        if not self.augmentations:
            return [(*self.source[i], i) for i in index.tolist()]
        image_in_epoch = key // len(self) * len(self.source) + index
        seeds = Streams.from_index(image_in_epoch, self.seed).keys
        samples = []
        with torch.random.fork_rng(devices=[]):
            for i, seed in zip(index.tolist(), seeds.tolist(), strict=True):
                x, y = self.source[i]
                torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds the GPU too
                for augment in self.augmentations:
                    x = augment(x)
                samples.append((x, y, i))
        return samples


class ImageData(LightningDataModule, ABC):
    """Images in [0, 1] with their labels and indices, for training, validation and test.

    A batch is (x, y, index): x [B, C, H, W] float32, y [B] int64 and index [B] int64, the image's
    number in its source: training and validation images are numbered together, test images
    separately. Prediction is on the test images.

    Args:
        batch_size: training images per batch and process.
        eval_batch_size: the same for evaluation; `batch_size` if None.
        val_size: training images held out for validation; 0 for no validation.
        workers: loader processes; the batches are the same for any number.
        seed: seed of the order of training images and of their augmentation; None is that of
            `seed_everything`, or 0.
        augment: augmentation of a training image [C, H, W], a callable or a list of callables that
            draw from torch's global stream; None is the data set's own, an empty list is none.
        limit_train: maximum number of training images.
        split_seed: seed of the split, so that runs with different `seed` share the split.
    """

    classes: int
    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __init__(
        self,
        batch_size: int = 128,
        eval_batch_size: int | None = None,
        val_size: int = 1000,
        workers: int = 0,
        seed: int | None = None,
        augment: list[Augment] | Augment | None = None,
        limit_train: int | None = None,
        split_seed: int = 0,
    ) -> None:
        super().__init__()
        at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size, limit_train=limit_train)
        at_least(0, val_size=val_size, workers=workers)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.val_size = val_size
        self.workers = workers
        self.seed = global_seed() if seed is None else seed
        self.augment = [augment] if callable(augment) else augment
        self.limit_train = limit_train
        self.split_seed = split_seed
        self.parts: dict[str, IndexedSubset] = {}
        self._epoch: int | None = None
        self._sampler: EpochSampler | None = None

    @abstractmethod
    def source(self, train: bool) -> Source:
        """Return all images for training and validation, or all test images."""

    def default_augment(self) -> list[Augment]:
        """Return the usual augmentation of these images."""
        return []

    def preprocessing(self) -> list[Augment]:
        """Return the steps for images that are not augmented."""
        return []

    def hold_out(self, count: int) -> tuple[Tensor, Tensor]:
        """Split a source of `count` images into indices for training and for validation."""
        if self.val_size >= count:
            raise ValueError(f"val_size must be below the {count} images, got {self.val_size}")
        order = torch.randperm(count, generator=self.split_generator())
        return order[self.val_size :], order[: self.val_size]

    def test_order(self, count: int) -> Tensor:
        """Return the indices of the test images, in the order of evaluation."""
        return torch.arange(count)

    def split_generator(self, *keys: int) -> torch.Generator:
        """Return a generator for the split; it depends on `split_seed`, not on `seed`."""
        return generator_of(self.split_seed, *keys)

    def setup(self, stage: str | None = None) -> None:
        self._epoch = self._sampler = None  # Lightning loads a checkpoint after this
        if stage in ("fit", "validate", None) and "train" not in self.parts:
            source = self.source(train=True)
            train, val = self.hold_out(len(source))
            steps = self.default_augment() if self.augment is None else self.augment
            steps = steps or self.preprocessing()
            self.parts["train"] = IndexedSubset(source, train[: self.limit_train], steps, self.seed)
            self.parts["val"] = IndexedSubset(source, val, self.preprocessing())
            self._check_first(source, train)
        if stage in ("test", "predict", None) and "test" not in self.parts:
            source = self.source(train=False)
            order = self.test_order(len(source))
            self.parts["test"] = IndexedSubset(source, order, self.preprocessing())
            self._check_first(source, order)

    def _check_first(self, source: Source, indices: Tensor) -> None:
        kind, wanted = type(self).__name__, [self.channels, self.size, self.size]
        if not len(indices):
            raise ValueError(f"{kind} has none of the images that are asked for")
        # One image is enough to see a wrong type or size before hours of training.
        x = IndexedSubset(source, indices[:1], self.preprocessing())[0][0]
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            found = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"images of {kind} must be floating point in [0, 1], got {found}: divide by 255"
            )
        if list(x.shape) != wanted:
            raise ValueError(f"images of {kind} must be {wanted}, got {list(x.shape)}")

    def labelled(self) -> IndexedSubset:
        """Return the training images without augmentation, the source of transductive defenses."""
        if "train" not in self.parts:
            self.setup("fit")
        part = self.parts["train"]
        return IndexedSubset(part.source, part.indices, self.preprocessing())

    def train_dataloader(self) -> DataLoader[Any]:
        # Where shares would be unequal, a few images are in two of them.
        part = self.parts["train"]
        start = self._resume_point()
        self._sampler = EpochSampler(part, self.batch_size, self.seed, start, **self._share())
        return ResumableLoader(part, sampler=self._sampler, **self._options(self.batch_size))

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        return self._evaluation("val") if len(self.parts["val"]) else []

    def test_dataloader(self) -> DataLoader[Any]:
        return self._evaluation("test")

    predict_dataloader = test_dataloader

    def state_dict(self) -> dict[str, Any]:
        # Lightning's own count of epochs can run ahead of the sampler's.
        return {} if self._sampler is None else {"epoch": self._sampler.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epoch = state_dict["epoch"]

    def _resume_point(self) -> ResumePoint:
        # A run may build its loader again (`reload_dataloaders_every_n_epochs`): where it began
        # stays what it was.
        return self._sampler.start if self._sampler else resume_point(self.trainer, self._epoch)

    def _evaluation(self, name: str) -> DataLoader[Any]:
        part = self.parts[name]
        sampler = every_image_once(part, **self._share())
        return DataLoader(part, sampler=sampler, **self._options(self.eval_batch_size))

    def _share(self) -> dict[str, int]:
        return (self.trainer and self.trainer.distributed_sampler_kwargs) or {}

    def _options(self, batch_size: int) -> dict[str, Any]:
        return {  # by name, because Lightning may have to build the loader again
            "batch_size": batch_size,
            "num_workers": self.workers,
            "persistent_workers": self.workers > 0,
            "pin_memory": torch.cuda.is_available(),
            "generator": torch.Generator(),  # else each pass draws from the global stream
        }


def labelled_images(trainer: Trainer) -> IndexedSubset | None:
    """Return the training images of a run, not augmented; None without a module of this package."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    return data.labelled() if isinstance(data, ImageData) else None
