"""Defenses that learn from the unlabelled test batch before they answer."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lightning_rob.defenses.base import Defense, Single, check_network
from lightning_rob.defenses.source import Source, SourceData
from lightning_rob.randomness import Generator, generator_from, seeded_global_rng
from lightning_rob.rules import Rule, mean_probs

T = TypeVar("T")


class Transductive(Defense):
    """A network that is made to fit the test batch: `adapt` returns a defense with another one.

    `net` stays what it was; nothing that a defense returned by `adapt` shares with this one is ever
    written to, so that an attacker's rehearsals cannot be seen by the defender.

    Args:
        net: [B, C, H, W] -> [B, K] logits, the static model.
        rule: any; there is one draw.
        source: labelled images to learn from, (x, y) or a data set; an evaluation by the command
            line gives those that the run was trained on.
    """

    needs_source = True  # whether `adapt` needs labelled images

    def __init__(
        self, net: nn.Module, rule: Rule = mean_probs, source: SourceData | None = None
    ) -> None:
        check_network(net)
        super().__init__(torch.ones(1), rule)
        self.net = net
        self.adapted: nn.Module | None = None
        self.source_data = None if source is None else Source(source)

    @property
    def source(self) -> Source:
        """The labelled images.

        Raises:
            ValueError: nobody has given any.
        """
        if self.source_data is None:
            raise ValueError(
                f"{type(self).__name__} learns from labelled images: give it source=(x, y)"
            )
        return self.source_data

    @property
    def foldable_networks(self) -> list[nn.Module]:
        """None that an attack may fold: the defense calls parts of them, and copies them."""
        raise TypeError(f"{type(self).__name__} copies its network: it has to stay as it is")

    @property
    def base_model(self) -> Defense:
        """The network before it has seen any test image."""
        return Single(self.net, self.rule)

    @property
    def adapted_model(self) -> Defense:
        """The network as it stands."""
        return Single(self.adapted or self.net, self.rule)

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        """[B, C, H, W] -> [1, B, K], of the network as it stands."""
        return torch.as_tensor((self.adapted or self.net)(x)).unsqueeze(0)

    def adapt(self, x: Tensor, generator: Generator = None) -> Self:
        """The defense after it has seen the unlabelled test batch; this one stays as it was.

        Args:
            x: [B, C, H, W] images in [0, 1].
            generator: the defender's private randomness.

        Returns:
            A defense whose network has learnt from x. What else it holds is shared with this one.
        """
        chance = generator_from(x, generator)
        with learning(chance, x.device):
            return self.fit_to_batch(x.detach().clone(), chance)

    @abstractmethod
    def fit_to_batch(self, x: Tensor, chance: torch.Generator) -> Self:
        """`adapt`, with gradients for weights and with chance of its own.

        Args:
            x: [B, C, H, W] images in [0, 1].
            chance: the defender's; torch's global streams are seeded from it too.
        """

    def copy_with(self, **changed: Any) -> Self:
        """This defense with other attributes, all else shared."""
        other = copy.copy(self)
        for table in ("_modules", "_parameters", "_buffers"):
            object.__setattr__(other, table, dict(getattr(self, table)))
        for name, value in changed.items():
            setattr(other, name, value)
        return other


def give_source(defense: nn.Module, labelled: Callable[[], SourceData | None]) -> None:
    """Give labelled images to the parts of a defense that need them and have none yet.

    Args:
        defense: the defense; defenses inside it are found too.
        labelled: returns the labelled images, None if there are none; called only if needed.

    Raises:
        ValueError: a part needs labelled images, and there are none.
    """
    for part in defense.modules():
        if isinstance(part, Transductive) and part.needs_source and part.source_data is None:
            data = labelled()
            if data is None:
                raise ValueError(
                    f"{type(part).__name__} learns from labelled images: give it source=(x, y), or "
                    "evaluate it with one of the data modules of lightning_rob.data"
                )
            part.source_data = Source(data)


@contextmanager
def learning(chance: torch.Generator, device: torch.device) -> Iterator[None]:
    """Gradients for weights whatever the caller forbids; dropout draws from `chance`."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        seeded_global_rng(chance, device),
    ):
        yield


def trainable(net: nn.Module) -> nn.Module:
    """A copy of a network whose weights can all be trained, by this process alone."""
    own = copy.deepcopy(net).requires_grad_()
    for module in own.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.__class__ = LocalBatchNorm  # type: ignore[assignment]
    return own


class LocalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A SyncBatchNorm that waits for no other process: each adapts to a round of its own."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Images or features, whatever it was made for."""


class OwnBatch(nn.Module):
    """A layer that holds something for each image of one batch and answers that batch only.

    `asked` says which of its images the next batches are, [b] positions in its own order; None is
    all of them.
    """

    separable = True  # whether it answers an image by itself, whatever other images there are
    asked: Tensor | None = None


@contextmanager
def asking(defense: nn.Module, index: Tensor) -> Iterator[None]:
    """Ask a defense that has adapted to a batch about some of its images only.

    Inside another such context the positions are those in the part that is asked there.

    Args:
        defense: as it was before, afterwards.
        index: [b] positions in the batch, of the images that it will be given.
    """
    layers = [layer for layer in defense.modules() if isinstance(layer, OwnBatch)]
    before = [layer.asked for layer in layers]
    try:
        for layer, rows in zip(layers, before, strict=True):
            layer.asked = index if rows is None else rows[index]
        yield
    finally:
        for layer, rows in zip(layers, before, strict=True):
            layer.asked = rows


def reinitialized(net: nn.Module, chance: torch.Generator) -> nn.Module:
    """A copy of a network with all weights drawn anew, by the `reset_parameters` of its modules.

    That of a module comes after those of its parts, so that a network with an initialisation of its
    own can have the last word. BatchNorm forgets its statistics.

    Args:
        net: stays as it is.
        chance: where the weights come from; torch's global streams are left as they are.

    Raises:
        TypeError: some weights are drawn by no `reset_parameters`.
    """
    fresh = trainable(net)
    weights = dict(fresh.named_parameters())
    device = next(iter(weights.values()), torch.zeros(0)).device
    with torch.no_grad(), seeded_global_rng(chance, device):
        for weight in weights.values():
            weight.fill_(torch.nan)  # what is still there afterwards has not been drawn
        for module in reversed(list(fresh.modules())):
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
    if kept := [name for name, weight in weights.items() if weight.isnan().any()]:
        raise TypeError(
            f"{type(net).__name__} cannot be trained anew: no reset_parameters draws "
            f"{', '.join(kept[:3])}{' …' if len(kept) > 3 else ''}; give it one"
        )
    return fresh


# Told how far an adaptation is, in place of a progress bar of its own.
listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


def shown(steps: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The steps, with a progress bar in a terminal if they take longer than three seconds."""
    tell = listener.get()
    if tell is None:
        yield from tqdm(steps, what, total, leave=False, delay=3, mininterval=0.5, disable=None)
        return
    if total is None and isinstance(steps, Sized):
        total = len(steps)
    for number, step in enumerate(steps, start=1):
        tell(f"{what} {number}/{total}" if total else f"{what} {number}")
        yield step


def shuffled(count: int, size: int, chance: torch.Generator) -> Sequence[Tensor]:
    """One epoch of index batches: [count] in a fresh order, cut into parts of so many.

    A last one of a single image joins the one before: BatchNorm could not tell its variance.
    """
    parts = list(torch.split(torch.randperm(count, generator=chance), size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts
