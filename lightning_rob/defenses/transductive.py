"""The contract of defenses that adapt to the unlabelled test batch, and the tools they share."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, TensorDataset
from tqdm import tqdm

from lightning_rob.defenses.base import Defense, Single, check_network
from lightning_rob.defenses.network import network_logits
from lightning_rob.randomness import Generator, generator_from, seeded_global_rng
from lightning_rob.rules import mean_probs
from lightning_rob.runtime.errors import at_least

T = TypeVar("T")
SourceData = tuple[Tensor, Tensor] | Dataset[Any]
Augment = Callable[[Tensor], Any]
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Losses = Iterator[tuple[Tensor, bool]]  # of each step, and whether it is the last of its epoch


class Source:
    """Labelled images by position: (x [N, C, H, W] in [0, 1], y [N]) or a data set of (x, y, …)."""

    def __init__(self, data: "SourceData | Source") -> None:
        self.data: Any = data.data if isinstance(data, Source) else data
        if isinstance(self.data, Tensor | str):
            raise TypeError(
                "source must be two tensors (x, y) or a data set of items (x, y, …), got "
                f"{type(data).__name__}"
            )
        if isinstance(self.data, list | tuple) and hasattr(self.data[0], "__array__"):
            x, y = map(torch.as_tensor, self.data)
            if len(x) != len(y) or not len(x):
                raise ValueError(
                    f"source must have a label for each image, got {len(x)} and {len(y)}"
                )
            self.data = TensorDataset(x, y)
        if isinstance(self.data, TensorDataset):
            _check_range(self.data.tensors[0])

    def __len__(self) -> int:
        return len(self.data)

    def gather(self, index: Tensor, augment: Sequence[Augment] = ()) -> tuple[Tensor, Tensor]:
        """Return images [B, C, H, W], each augmented, and labels [B] at positions [B]."""
        if isinstance(self.data, TensorDataset):
            x, y, *_ = self.data[index]
        else:
            places, fetch = index.tolist(), getattr(self.data, "__getitems__", None)
            items = fetch(places) if fetch else [self.data[place] for place in places]
            x = torch.stack([item[0] for item in items])
            y = torch.as_tensor([item[1] for item in items])
            _check_range(x)
        for step in augment:
            x = torch.stack([step(image) for image in x])
        return x, y


def _check_range(x: Tensor) -> None:
    low, high = float(x.min()), float(x.max())
    if not (low >= -1e-4 and high <= 1 + 1e-4):
        raise ValueError(
            f"source must have images in [0, 1], got values in [{low:.4g}, {high:.4g}]"
        )


def progress_bar(steps: Iterable[T], name: str) -> Iterator[T]:
    """Yield the steps, with a progress bar in a terminal if they take longer than 3 seconds."""
    yield from tqdm(steps, name, leave=False, delay=3, mininterval=0.5, disable=None)


class Transductive(Defense):
    """A network that is fitted to the test batch: `adapt` returns a defense with a fitted copy.

    `net` is never changed, and neither is anything else that a defense returned by `adapt` shares
    with this one: an attacker's rehearsals leave no trace in the defender.

    Args:
        net: [B, C, H, W] -> [B, K] logits, the static model.
        source: labelled images to learn from, (x, y) or a data set; an evaluation from the command
            line passes the training images of the run.
    """

    needs_source = True  # whether `adapt` needs labelled images

    def __init__(self, net: nn.Module, source: SourceData | None = None) -> None:
        check_network(net)
        super().__init__(torch.ones(1), mean_probs)
        self.net = net
        self.adapted: nn.Module | None = None
        self.source_data = None if source is None else Source(source)

    @property
    def source(self) -> Source:
        """The labelled images; ValueError if there are none."""
        # Not at creation: an evaluation gives the training images later.
        if self.source_data is None:
            raise ValueError(
                f"{type(self).__name__} learns from labelled images: give it source=(x, y), or "
                "evaluate it with one of the data modules of lightning_rob.data"
            )
        return self.source_data

    @property
    def foldable_networks(self) -> list[nn.Module]:
        raise TypeError(f"{type(self).__name__} copies its network: it has to stay as it is")

    @property
    def base_model(self) -> Defense:
        return Single(self.net, self.rule, self.rejects)

    @property
    def adapted_model(self) -> Defense:
        return Single(self.adapted or self.net, self.rule, self.rejects)

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        return network_logits(self.adapted or self.net, x).unsqueeze(0)

    def adapt(self, x: Tensor, generator: Generator = None) -> Self:
        private = generator_from(x, generator)
        with learning(private, x.device):
            return self.fit_to_batch(x.detach().clone(), private)

    @abstractmethod
    def fit_to_batch(self, x: Tensor, generator: torch.Generator) -> Self:
        """Return the defense adapted to images [B, C, H, W]; called with gradients enabled."""

    def copy_with(self, **changed: Any) -> Self:
        """Return this defense with some attributes replaced and all others shared."""
        other = copy.copy(self)
        # A shallow copy shares these tables: assigning a module would change this defense too.
        for table in ("_modules", "_parameters", "_buffers"):
            object.__setattr__(other, table, dict(getattr(self, table)))
        for name, value in changed.items():
            setattr(other, name, value)
        return other


class Retraining(Transductive):
    """A defense whose network is drawn and trained anew for each test batch.

    Args:
        epochs: passes over the source.
        batch_size: images of the source per step.
        optimizer: parameters -> optimizer.
        lr_scheduler: optimizer -> schedule, stepped once an epoch; None keeps the rate.
        augment: applied to an image [C, H, W] in training, drawing from torch's global stream;
            predictions are of the unchanged images.
    """

    def __init__(
        self,
        net: nn.Module,
        source: SourceData | None = None,
        epochs: int = 100,
        batch_size: int = 128,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.Adam,
        lr_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        augment: Sequence[Augment] = (),
    ) -> None:
        super().__init__(net, source)
        at_least(1, epochs=epochs, batch_size=batch_size)
        self.epochs = epochs
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.augment = augment

    def fit_to_batch(self, x: Tensor, generator: torch.Generator) -> Self:
        net = reinitialized(self.net, generator).train()
        optimizer = self.optimizer(net.parameters())
        schedule = self.lr_scheduler and self.lr_scheduler(optimizer)
        for loss, ends_epoch in self.losses(net, x, generator):
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if schedule and ends_epoch:
                schedule.step()
        optimizer.zero_grad()
        return self.copy_with(adapted=net.eval().requires_grad_(False))

    @abstractmethod
    def losses(self, net: nn.Module, x: Tensor, generator: torch.Generator) -> Losses:
        """Yield the loss of each step, and whether the step is the last one of its epoch."""


def give_source(defense: nn.Module, labelled: Callable[[], SourceData | None]) -> None:
    """Give labelled images to the parts of a defense that need them and have none yet."""
    for part in defense.modules():
        if isinstance(part, Transductive) and part.needs_source and part.source_data is None:
            part.source_data = None if (data := labelled()) is None else Source(data)


@contextmanager
def learning(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Enable gradients of the weights in any caller's mode; dropout draws from `generator`."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        seeded_global_rng(generator, device),
    ):
        yield


def trainable(net: nn.Module) -> nn.Module:
    """Return a copy of a network whose weights are all trainable, without other processes."""
    with torch.no_grad():  # else the copied weights of TorchScript would be no leaves
        own = copy.deepcopy(net)
    own.requires_grad_()
    for module in own.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.__class__ = LocalBatchNorm  # type: ignore[assignment]
    return own


class LocalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A SyncBatchNorm that waits for no other process: each process adapts to its own batches."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept images and features alike."""


def reinitialized(net: nn.Module, generator: torch.Generator) -> nn.Module:
    """Return a copy of a network with all weights drawn anew by its modules' `reset_parameters`."""
    fresh = trainable(net)
    weights = dict(fresh.named_parameters())
    device = next(iter(weights.values()), torch.zeros(0)).device
    with torch.no_grad(), seeded_global_rng(generator, device):
        for weight in weights.values():
            weight.fill_(torch.nan)  # weights that are still NaN afterwards were not drawn
        # Parts before the whole: a network with an initialisation of its own has the last word.
        for module in reversed(list(fresh.modules())):
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
    if kept := [name for name, weight in weights.items() if weight.isnan().any()]:
        raise TypeError(
            f"{type(net).__name__} cannot be trained anew: no reset_parameters draws "
            f"{', '.join(kept[:3])}{' …' if len(kept) > 3 else ''}; give it one"
        )
    return fresh


def shuffled(count: int, size: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Return one epoch of index batches: a fresh order of [count], split into batches of `size`."""
    parts = list(torch.split(torch.randperm(count, generator=generator), size))
    if len(parts) > 1 and len(parts[-1]) == 1:  # BatchNorm has no variance of one value
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts
