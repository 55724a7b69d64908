"""Networks whose gradient stands in for a transform's (BPDA, Athalye et al. 2018)."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from lightning_rob.files import atomic_save
from lightning_rob.transforms.base import Transform, clip

WIDTHS = (16, 22, 32, 45, 64)
NOTHING = 1e-9  # the range of a parameter that is always the same


class BPDANet(nn.Module):
    """The network that learns a transform in Sitawarin et al. (ICML 2022), six layers (CoordConv).

    It sees the image, the row and the column of each pixel, and the transform's parameters as
    further planes; each layer but the last sees all of that again beside the layer before it.

    Args:
        channels: C of the images.
        planes: P, how many planes `planes_of` makes of the transform's parameters.
    """

    low: Tensor
    high: Tensor

    def __init__(self, channels: int, planes: int) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(planes))
        self.register_buffer("high", torch.ones(planes))
        seen = channels + 2 + planes
        ins = (seen, *(width + seen for width in WIDTHS))
        outs, sizes = (*WIDTHS, channels), (5, 5, 5, 5, 5, 3)
        self.layers = nn.ModuleList(map(_layer, ins, outs, sizes))
        self.to(memory_format=torch.channels_last)  # faster, by a third in training on a CPU

    def forward(self, x: Tensor, *params: Tensor) -> Tensor:
        """An estimate of `transform(x, *params)`.

        Args:
            x: [B, C, H, W] images in [0, 1], of any size.
            *params: the transform's, as its `sample` returns them.

        Returns:
            [B, C, H, W] in [0, 1].

        Raises:
            ValueError: it was trained on images of other channels.
        """
        channels = self.layers[-1][0].out_channels  # type: ignore[index]
        if x.shape[1] != channels:
            raise ValueError(f"this network is of {channels} channels, got images {list(x.shape)}")
        planes = (planes_of(x, params) - self.low[:, None, None]) / self._span[:, None, None]
        seen = torch.cat([x, *_coordinates(x), planes], 1)
        seen = seen.to(self.low.dtype, memory_format=torch.channels_last)
        y = seen
        for layer in self.layers[:-1]:
            y = torch.cat([layer(y), seen], 1)
        return clip(self.layers[-1](y), 0, 1).to(x.dtype)

    def learn_ranges(self, x: Tensor, params: Sequence[Tensor]) -> None:
        """Take the smallest and largest value of each plane for 0 and 1."""
        planes = planes_of(x, params)
        self.low.copy_(planes.amin((0, 2, 3)))
        self.high.copy_(planes.amax((0, 2, 3)))

    @property
    def _span(self) -> Tensor:
        return (self.high - self.low).clamp_min(NOTHING)


def _layer(ins: int, outs: int, size: int) -> nn.Module:
    conv = nn.Conv2d(ins, outs, size, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outs), nn.ReLU())


def _coordinates(x: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each pixel, [B, 1, H, W] from -1 to almost 1."""
    rows, columns = (torch.arange(n, device=x.device).to(x) * 2 / n - 1 for n in x.shape[2:])
    shape = (len(x), 1, *x.shape[2:])
    return rows[:, None].expand(shape), columns.expand(shape)


def planes_of(x: Tensor, params: Sequence[Tensor]) -> Tensor:
    """The parameters of a transform as planes beside the images.

    Whatever is [B, …, h, w] of four dimensions is resized to the images' size; of all else, such
    as the matrix of `Affine`, each number becomes a plane of its own.

    Args:
        x: [B, C, H, W] images.
        params: tensors of first dimension B.

    Returns:
        [B, P, H, W] of x's dtype.
    """
    planes = [x.new_empty(len(x), 0, *x.shape[2:])]
    for param in params:
        shaped = param.to(x) if param.dim() == 4 else param.to(x).reshape(len(x), -1, 1, 1)
        planes.append(interpolate(shaped, x.shape[2:]) if shaped.shape[1] else shaped)
    return torch.cat(planes, 1)


class _Seen(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, shown: Tensor, learnt: Tensor) -> Tensor:
        return shown.view_as(shown)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, Tensor]:
        return None, grads[0]


def approximated(
    transform: Transform, x: Tensor, params: Sequence[Tensor], net: nn.Module | None = None
) -> Tensor:
    """A transform's own images with the gradient of something else.

    Args:
        transform: any, whether it has a gradient or not.
        x: [B, C, H, W] images in [0, 1].
        params: what the transform's `sample` returned.
        net: whose vector-Jacobian product at (x, params) is the gradient, in evaluation mode;
            None: the identity.

    Returns:
        [B, C, H, W], `transform(x, *params)` to the bit.
    """
    with torch.no_grad():
        y = transform(x, *params)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return y
    shown: Tensor = _Seen.apply(y, x if net is None else net(x, *params))
    return shown


def place_of(folder: Path | str, transform: Transform, shape: Sequence[int] | None) -> Path:
    """The file of a transform's network: it names transform, arguments and [C, H, W], None for all.

    The probability p is none of the arguments: the network is of what happens if it happens.
    """
    told = _told(transform)
    digest = hashlib.sha256(told.encode()).hexdigest()[:8]
    size = "x".join(map(str, shape)) if shape else "*"
    return Path(folder) / f"{type(transform).__name__}_{digest}_{size}.pt"


def _told(transform: Transform) -> str:
    """A transform with its arguments, but for p, as one would write it."""
    names = [field.name for field in fields(transform) if field.name != "p"]
    arguments = ", ".join(f"{name}={_plain(getattr(transform, name))}" for name in names)
    return f"{type(transform).__name__}({arguments})"


def _plain(value: Any) -> str:
    """The same text for 1 and 1.0, and for a list and a tuple."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def save_approximation(
    folder: Path | str, transform: Transform, shape: Sequence[int], net: BPDANet, **about: Any
) -> Path:
    """Write a network to its file, which is never there in part.

    Args:
        folder: made if it is not there.
        transform: what the network was trained on.
        shape: [C, H, W] of the images it was trained on.
        net: the network.
        **about: plain values to keep beside it.
    """
    path = place_of(folder, transform, shape)
    about = {"transform": _told(transform), "shape": list(shape), **about}
    atomic_save({"weights": net.state_dict(), "about": about}, path)
    return path


def load_approximation(path: Path | str) -> tuple[BPDANet, dict[str, Any]]:
    """A network, in evaluation mode and frozen, and what was saved about it.

    Raises:
        ValueError: the file is of another kind.
    """
    try:
        with torch.inference_mode(False):
            content = torch.load(path, map_location="cpu", weights_only=True)
            weights, about = content["weights"], dict(content["about"])
            net = BPDANet(about["shape"][0], len(weights["low"]))
            net.load_state_dict(weights)
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever another file makes torch do
        raise ValueError(
            f"{path} is no network of lightning-rob bpda ({type(error).__name__}): delete it"
        ) from error
    return net.eval().requires_grad_(False), about


def load_approximations(
    folder: Path | str, transforms: Iterable[Transform], shape: Sequence[int] | None = None
) -> dict[str, nn.Module]:
    """The networks that `lightning-rob bpda` has put into a folder.

    Args:
        folder: the folder.
        transforms: whose networks are wanted; those trained with other arguments do not count.
        shape: [C, H, W] of the images they were trained on; None where the folder has only one.

    Returns:
        The networks by the names of the transforms' classes.

    Raises:
        FileNotFoundError: one is not there.
        ValueError: there are several, for images of different shapes.
    """
    return {
        type(transform).__name__: load_approximation(_found(Path(folder), transform, shape))[0]
        for transform in transforms
    }


def _found(folder: Path, transform: Transform, shape: Sequence[int] | None) -> Path:
    pattern = place_of(folder, transform, shape).name
    found = sorted(folder.glob(pattern))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ValueError(f"{folder} has several networks of {_told(transform)}: {names}; say shape")
    if not found:
        others = sorted(path.name for path in folder.glob(f"{type(transform).__name__}_*.pt"))
        beside = f", only {', '.join(others)} of other arguments or images" if others else ""
        raise FileNotFoundError(
            f"{folder} has no {pattern}, the network of {_told(transform)}{beside}: "
            f"train it with lightning-rob bpda --out {folder}"
        )
    return found[0]
