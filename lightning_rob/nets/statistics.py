"""The mean and std of images that a checkpoint was trained with."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_rob.nets.normalize import Normalize


def statistics_in(tensors: Mapping[str, Tensor], under: str | None = None) -> dict[str, Tensor]:
    """Find `mean` and `std` of one shape beside each other: where -> [2, C].

    Args:
        tensors: a checkpoint's, by dotted names.
        under: where they must be, or the end of that; None finds all.
    """
    places = [name.removesuffix("mean") for name in tensors if f".{name}".endswith(".mean")]
    pairs = {place: (tensors[f"{place}mean"], tensors.get(f"{place}std")) for place in places}
    return {
        place.removesuffix("."): torch.stack([mean.flatten(), std.flatten()])
        for place, (mean, std) in pairs.items()
        if std is not None and std.shape == mean.shape and mean.ndim
        if under is None or f".{place}".endswith(f".{under}.")
    }


def without_statistics(tensors: dict[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """All the others, unless the network itself has weights of these names."""
    places = {} if statistics_in(net.state_dict()) else statistics_in(tensors)
    names = {f"{place}.{name}".strip(".") for place in places for name in ("mean", "std")}
    return {name: entry for name, entry in tensors.items() if name not in names}


def check_statistics(net: nn.Module, tensors: dict[str, Tensor], path: object) -> None:
    """Refuse a checkpoint that normalises images otherwise than the network does."""
    found = {} if statistics_in(net.state_dict()) else statistics_in(tensors)
    layers = _layers(net)
    for place, numbers in found.items():
        owns = [torch.stack([layer.mean, layer.std]).flatten(1) for layer in layers]
        if owns and not any(_differ(own, numbers) for own in owns):
            continue
        does = f"normalises by {_words(owns[0])}" if owns else "has no Normalize"
        last = f"{place}.".rpartition(".")[0].rpartition(".")[2]
        drop = [f"{last}.{name}".strip(".") for name in ("mean", "std")]
        raise ValueError(
            f"{path} normalises by {_words(numbers)} ({place}), {type(net).__name__} {does}:"
            f" pass normalizer={place!r} to take the file's, or drop={drop} to ignore them"
        )


def take_statistics(
    net: nn.Module, tensors: dict[str, Tensor], path: object, normalizer: str
) -> None:
    """Normalise images from now on as the checkpoint says."""
    layers, found = _layers(net), statistics_in(tensors, normalizer)
    if not layers:
        raise ValueError(f"{type(net).__name__} has no Normalize, got normalizer={normalizer!r}")
    if not found:
        known = ", ".join(map(repr, statistics_in(tensors))) or "nowhere"
        raise ValueError(f"{path} has no mean and std under {normalizer!r}, they are: {known}")
    first, *others = found.values()
    if not all(torch.equal(first, other) for other in others):
        several = ", ".join(map(repr, found))
        raise ValueError(f"{path} holds several that differ: pass normalizer= one of {several}")
    for layer in layers:
        layer.take(first)


def _layers(net: nn.Module) -> list[Normalize]:
    return [layer for layer in net.modules() if isinstance(layer, Normalize)]


def _differ(own: Tensor, other: Tensor) -> bool:
    """Whether they are for the same channels, but other numbers."""
    return own.shape == other.shape and not torch.allclose(own, other.to(own), atol=1e-6)


def _words(statistics: Tensor) -> str:
    return " / ".join(str([round(x, 4) for x in row]) for row in statistics.tolist())
