"""What every data module shares: the split, the loaders, the errors."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_rob.data.samples import Augment, Part, Source
from lightning_rob.data.sampling import (
    EpochSampler,
    ResumableLoader,
    every_image_once,
    resumption,
)
from lightning_rob.randomness import derive_seed


def at_least(minimum: int, **values: int | None) -> None:
    """Raise a ValueError that names the first of the values to be below the minimum."""
    for name, value in values.items():
        if value is not None and value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}")


class ImageData(LightningDataModule, ABC):
    """Images in [0, 1] with their labels and indices, for training, validation and test.

    A batch is x [B,C,H,W] float32, y [B] int64 and index [B] int64, the image's number in its
    source: training and validation images are numbered together, test images by themselves.
    Prediction is on the test images.

    Args:
        batch_size: training images a process takes at a time.
        eval_batch_size: the same for evaluation; `batch_size` if None.
        val_size: training images held out for validation; 0 for no validation.
        workers: loader processes; the batches are the same for any number.
        seed: names the order of the training images and their augmentation.
        augment: what is done to a training image [C,H,W], a callable or a list of them drawing from
            torch's global stream; None is the data set's own, an empty list is nothing.
        limit_train: train on so many images at most.
        split_seed: names the split, which repeats under another `seed` have in common.

    Raises:
        ValueError: a size is out of range.
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
        seed: int = 0,
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
        self.seed = seed
        self.augment = [augment] if callable(augment) else augment
        self.limit_train = limit_train
        self.split_seed = split_seed
        self.parts: dict[str, Part] = {}
        self._epoch: int | None = None
        self._sampler: EpochSampler | None = None

    @abstractmethod
    def source(self, train: bool) -> Source:
        """All images for training and validation, or those for test."""

    def default_augment(self) -> list[Augment]:
        """The augmentation that is usual for these images."""
        return []

    def fixed_steps(self) -> list[Augment]:
        """What is done to an image that is not augmented."""
        return []

    def hold_out(self, count: int) -> tuple[Tensor, Tensor]:
        """The indices for training and those for validation, of a source of so many images."""
        if self.val_size >= count:
            raise ValueError(f"val_size must be below the {count} images, got {self.val_size}")
        order = torch.randperm(count, generator=self.split_generator())
        return order[self.val_size :], order[: self.val_size]

    def test_order(self, count: int) -> Tensor:
        """The indices of the test images, in the order of evaluation."""
        return torch.arange(count)

    def split_generator(self, *keys: int) -> torch.Generator:
        """A stream for the split, which `seed` has no part in."""
        return torch.Generator().manual_seed(derive_seed(self.split_seed, *keys))

    def setup(self, stage: str | None = None) -> None:
        """Load what the stage needs, once."""
        self._epoch = self._sampler = None  # Lightning loads a checkpoint after this
        if stage in ("fit", "validate", None) and "train" not in self.parts:
            source = self.source(train=True)
            train, val = self.hold_out(len(source))
            augment = self.default_augment() if self.augment is None else self.augment
            steps = augment or self.fixed_steps()
            self.parts["train"] = Part(source, train[: self.limit_train], steps, self.seed)
            self.parts["val"] = Part(source, val, self.fixed_steps())
            self._check_first(source, train)
        if stage in ("test", "predict", None) and "test" not in self.parts:
            source = self.source(train=False)
            order = self.test_order(len(source))
            self.parts["test"] = Part(source, order, self.fixed_steps())
            self._check_first(source, order)

    def _check_first(self, source: Source, indices: Tensor) -> None:
        """That there are images, and the first is what a network here is made for.

        Raises:
            ValueError: it is not.
        """
        kind, wanted = type(self).__name__, [self.channels, self.size, self.size]
        if not len(indices):
            raise ValueError(f"{kind} has none of the images that are asked for")
        x = Part(source, indices[:1], self.fixed_steps())[0][0]
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            told = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"images of {kind} must be floating point in [0, 1], got {told}: divide by 255"
            )
        if list(x.shape) != wanted:
            raise ValueError(f"images of {kind} must be {wanted}, got {list(x.shape)}")

    def labelled(self) -> Part:
        """The training images, not augmented: what a transductive defense learns from."""
        if "train" not in self.parts:
            self.setup("fit")
        part = self.parts["train"]
        return Part(part.source, part.indices, self.fixed_steps())

    def train_dataloader(self) -> DataLoader[Any]:
        """This process's shuffled share of the training images, from where training goes on.

        Where the shares would be unequal, a few images are in two of them. A module whose processes
        train different networks (`trains_apart`) has all images on each.
        """
        part = self.parts["train"]
        start = resumption(self.trainer, self.state_dict().get("epoch", self._epoch))
        apart = getattr(self.trainer and self.trainer.lightning_module, "trains_apart", False)
        share = {} if apart else self._share()
        self._sampler = EpochSampler(part, self.batch_size, self.seed, start, **share)
        return ResumableLoader(part, sampler=self._sampler, **self._options(self.batch_size))

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """This process's share of the validation images; an empty list if none are held out."""
        return self._evaluation("val") if len(self.parts["val"]) else []

    def test_dataloader(self) -> DataLoader[Any]:
        """This process's share of the test images."""
        return self._evaluation("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """The test images."""
        return self._evaluation("test")

    def state_dict(self) -> dict[str, Any]:
        """The epoch that training is in, by the sampler's number; Lightning's own can run ahead."""
        return {} if self._sampler is None else {"epoch": self._sampler.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the epoch up again."""
        self._epoch = state_dict["epoch"]

    def _evaluation(self, name: str) -> DataLoader[Any]:
        part = self.parts[name]
        sampler = every_image_once(part, **self._share())
        return DataLoader(part, sampler=sampler, **self._options(self.eval_batch_size))

    def _share(self) -> dict[str, int]:
        return (self.trainer and self.trainer.distributed_sampler_kwargs) or {}

    def _options(self, batch_size: int) -> dict[str, Any]:
        return {  # by name, for Lightning may have to build the loader anew
            "batch_size": batch_size,
            "num_workers": self.workers,
            "persistent_workers": self.workers > 0,
            "pin_memory": torch.cuda.is_available(),
            "generator": torch.Generator(),  # else each pass draws from the global stream
        }
