"""A defense's answers as a graph of `torch.export`, for any number of images."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightning_rob.defenses import Defense
from lightning_rob.randomness import Streams
from lightning_rob.transforms import Transform

MOST_IMAGES = 4096  # torch chooses other kernels from some size on, so there has to be a bound
FEW = 8

Inputs = tuple[Tensor, ...]


class Answers(nn.Module):
    """What is exported: the rule's answer, its chance keyed by a second input.

    Args:
        defense: what answers.
        seed: the one that `lightning-rob predict` was given.
    """

    def __init__(self, defense: Defense, seed: int) -> None:
        super().__init__()
        self.defense = defense
        self.seed = seed

    def forward(self, images: Tensor, keys: Tensor | None = None) -> Tensor:
        """[B, C, H, W] in [0, 1] and [B] int64 -> [B, K]; no keys where there is no chance."""
        chance = None if keys is None else Streams.from_index(keys, self.seed)
        answers: Tensor = self.defense(images, chance)
        return answers


class Seen(nn.Module):
    """An image behind one transform, to find out which of several cannot be exported.

    Args:
        transform: the one.
    """

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, images: Tensor, keys: Tensor) -> Tensor:
        """[B, C, H, W] and [B] -> [B, C, H, W]."""
        return self.transform(images, *self.transform.sample(images, Streams.from_index(keys, 0)))


def traced(net: Answers, inputs: Inputs, batch: int | None) -> tuple[ExportedProgram, Inputs]:
    """The program, and what it takes: keys only where the answers hang on them.

    Args:
        net: in evaluation mode.
        inputs: images [N, C, H, W] and keys [N].
        batch: so many images at a time; None for any number.

    Raises:
        ValueError: there is no such program; names the transforms at fault, if it is they.
    """
    try:
        if not draws(net.defense, inputs[0]):
            inputs = inputs[:1]
        return graph(net, inputs, batch), inputs
    except Exception as error:  # of whatever kind tracing meets
        culprits = [n for n, kind in _transforms(net.defense) if not _exports(kind, inputs)]
        blamed = f"because of {', '.join(culprits)} " if culprits else ""
        raise ValueError(
            f"{type(net.defense).__name__} cannot be exported {blamed}"
            f"({type(error).__name__}: {(str(error).strip() or 'no reason').splitlines()[0][:200]})"
        ) from error


def graph(net: nn.Module, inputs: Inputs, batch: int | None) -> ExportedProgram:
    """Trace a module on a few of the inputs."""
    some = tuple(part[: batch or FEW] for part in inputs)
    shape = None if batch else {0: Dim("batch", min=1, max=MOST_IMAGES)}
    with torch.no_grad():
        net(*some)  # what is kept from a first call must not be kept from a traced one
        return torch.export.export(net, some, dynamic_shapes=(shape,) * len(some), strict=True)


def draws(defense: Defense, images: Tensor) -> bool:
    """Whether there is chance in the answers."""
    chance = torch.Generator()
    before = chance.get_state()
    with torch.no_grad():
        defense(images[:1], chance)
    return not torch.equal(before, chance.get_state())


def _transforms(defense: Defense) -> Iterator[tuple[str, Transform]]:
    for part in defense.modules():
        if isinstance(part, Defense):
            yield from part.transforms.items()


def _exports(transform: Transform, inputs: Inputs) -> bool:
    keys = torch.arange(len(inputs[0]))
    try:
        graph(Seen(transform), (inputs[0], keys), None)
    except Exception:  # whatever tracing makes of it
        return False
    return True
