"""Networks whose gradient replaces that of a transform (BPDA, Athalye et al. 2018)."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss

from lightning_rob.nets.weights import read_file
from lightning_rob.runtime.files import atomic_save
from lightning_rob.transforms.base import Transform, clip

WIDTHS = (16, 22, 32, 45, 64)
MIN_RANGE = 1e-9  # of a parameter that is constant
HELD_OUT = 0.1
RANGE_IMAGES = 1024  # enough images to estimate the ranges of the parameters
Task = tuple[Tensor, tuple[Tensor, ...], Tensor]


class BPDANet(nn.Module):
    """The network that learns a transform in Sitawarin et al. (ICML 2022), six layers (CoordConv).

    Its input is the image, the row and the column of each pixel, and the planes that `planes_of`
    makes of the transform's parameters. Each layer but the last passes the input on, concatenated
    to its own output.
    """

    low: Tensor
    high: Tensor

    def __init__(self, channels: int, planes: int) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(planes))
        self.register_buffer("high", torch.ones(planes))
        inputs = channels + 2 + planes
        ins = (inputs, *(width + inputs for width in WIDTHS))
        self.layers = nn.ModuleList()
        for i, o, size in zip(ins, (*WIDTHS, channels), (5, 5, 5, 5, 5, 3), strict=True):
            conv = nn.Conv2d(i, o, size, padding=size // 2, bias=False)
            self.layers.append(nn.Sequential(conv, nn.BatchNorm2d(o), nn.ReLU()))
        self.to(memory_format=torch.channels_last)  # faster, by a third in training on a CPU

    def forward(self, x: Tensor, *params: Tensor) -> Tensor:
        """Estimate `transform(x, *params)` in [0, 1]."""
        channels = self.layers[-1][0].out_channels  # type: ignore[index]
        if x.shape[1] != channels:
            raise ValueError(f"this network is of {channels} channels, got images {list(x.shape)}")
        # A constant parameter has no range to divide by.
        span = (self.high - self.low).clamp_min(MIN_RANGE)
        planes = (planes_of(x, params) - self.low[:, None, None]) / span[:, None, None]
        row, column = (torch.arange(n, device=x.device).to(x) * 2 / n - 1 for n in x.shape[2:])
        shape = (len(x), 1, *x.shape[2:])
        places = row[:, None].expand(shape), column.expand(shape)  # from -1 to almost 1
        inputs = torch.cat([x, *places, planes], 1)
        inputs = inputs.to(self.low.dtype, memory_format=torch.channels_last)
        y = inputs
        for layer in self.layers[:-1]:
            y = torch.cat([layer(y), inputs], 1)
        return clip(self.layers[-1](y), 0, 1).to(x.dtype)

    def learn_ranges(self, x: Tensor, params: Sequence[Tensor]) -> None:
        """Scale the input so that the smallest value of each plane is 0 and the largest 1."""
        planes = planes_of(x, params)
        self.low.copy_(planes.amin((0, 2, 3)))
        self.high.copy_(planes.amax((0, 2, 3)))


def planes_of(x: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Return the parameters of a transform as planes [B, P, H, W] beside the images."""
    planes = [x.new_empty(len(x), 0, *x.shape[2:])]
    for param in params:
        # Planes are resized to the images; any other number makes a constant plane.
        shaped = param.to(x) if param.dim() == 4 else param.to(x).reshape(len(x), -1, 1, 1)
        planes.append(interpolate(shaped, x.shape[2:]) if shaped.shape[1] else shaped)
    return torch.cat(planes, 1)


def approximated(
    transform: Transform, x: Tensor, params: Sequence[Tensor], net: nn.Module | None = None
) -> Tensor:
    """Apply a transform exactly, with a network's gradient at (x, params) or the identity's."""
    with torch.no_grad():
        # The images are those of the transform, to the bit.
        y = transform(x, *params)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return y
    learned = x if net is None else net(x, *params)
    return y + (learned - learned.detach())


@dataclass(frozen=True)
class Trained:
    """A network after its training."""

    net: BPDANet  # in evaluation mode, its weights frozen
    error: float  # mean squared error on the held-out images, in squared pixel units
    identity: float  # the same error of the untransformed images


def train_bpda(
    transform: Transform,
    images: Tensor,
    epochs: int = 10,
    batch_size: int = 32,
    lr: float = 0.01,
    generator: torch.Generator | None = None,
) -> Trained:
    """Train a network on a transform (mean squared error, Adam); return its best epoch.

    Each epoch samples new parameters for its images. The best epoch is selected on a held-out tenth
    of the images, whose parameters stay.

    Args:
        images: [N, C, H, W] in [0, 1], on the device of the training.
        generator: source of the initial weights, the order and the parameters.
    """
    count = max(1, round(HELD_OUT * len(images)))
    if min(epochs, batch_size, len(images) - count) < 1:
        raise ValueError(
            "epochs and batch_size must be at least 1 and some of the images left to train on, "
            f"got {epochs}, {batch_size} and {len(images) - count} of {len(images)} images"
        )

    @torch.no_grad()
    def task(x: Tensor) -> Task:
        """Return images, parameters sampled for them, and the transformed images."""
        params = transform.sample(x, generator)
        return x, params, transform(x, *params)

    # Shuffled first, for a data set may be sorted by class.
    images = images[torch.randperm(len(images), generator=generator).to(images.device)]
    train, validation = images[count:], torch.split(images[:count], batch_size)
    tasks = [task(x) for x in validation]
    net = _initial_net(transform, train[:RANGE_IMAGES], generator)
    optimizer = torch.optim.Adam(net.parameters(), lr)
    best, error = net.state_dict(), float("inf")
    for _ in range(epochs):
        net.train()
        order = torch.randperm(len(train), generator=generator).to(train.device)
        for chosen in torch.split(order, batch_size):
            optimizer.zero_grad()
            x, params, y = task(train[chosen])
            torch.autograd.backward(mse_loss(net(x, *params), y))
            optimizer.step()
        if (current := _mean_error(net.eval(), tasks)) < error:
            best, error = {key: value.clone() for key, value in net.state_dict().items()}, current
    net.load_state_dict(best)
    identity = _mean_error(lambda x, *params: x, tasks)
    return Trained(net.eval().requires_grad_(False), error, identity)


@torch.no_grad()
def _mean_error(net: Callable[..., Tensor], tasks: Sequence[Task]) -> float:
    total = sum(float(mse_loss(net(x, *params), y)) * len(x) for x, params, y in tasks)
    return total / sum(len(x) for x, _, _ in tasks)


def _initial_net(transform: Transform, x: Tensor, generator: torch.Generator | None) -> BPDANet:
    """Return an untrained network with the parameters' ranges; restore torch's global stream."""
    params = transform.sample(x, generator)
    seed = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net = BPDANet(x.shape[1], planes_of(x[:1], [p[:1] for p in params]).shape[1])
    net.to(x.device).learn_ranges(x, params)
    return net


def place_of(folder: Path | str, transform: Transform, shape: Sequence[int] | None) -> Path:
    """Return the file of a transform's network for images [C, H, W]; `*` stands for any shape."""
    # Arguments are hashed, for a file's name could not hold them all.
    digest = hashlib.sha256(_spec(transform).encode()).hexdigest()[:8]
    size = "x".join(map(str, shape)) if shape else "*"
    return Path(folder) / f"{transform.class_name}_{digest}_{size}.pt"


def _spec(transform: Transform) -> str:
    """Return a transform with its arguments, except p, as text: the same for 1 and 1.0."""

    def canonical(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(canonical, value))}]"
        return f"{value:.9g}" if isinstance(value, float) else str(value)

    # The network learns the transform itself, however probable it is.
    names = [field.name for field in fields(transform) if field.name != "p"]
    arguments = ", ".join(f"{name}={canonical(getattr(transform, name))}" for name in names)
    return f"{transform.class_name}({arguments})"


def save_approximation(
    folder: Path | str, transform: Transform, shape: Sequence[int], net: BPDANet, **about: Any
) -> Path:
    """Write a network to its file, atomically, and return the file."""
    path = place_of(folder, transform, shape)
    about = {"transform": _spec(transform), "shape": list(shape), **about}
    atomic_save({"weights": net.state_dict(), "about": about}, path)
    return path


def load_approximation(path: Path | str) -> tuple[BPDANet, dict[str, Any]]:
    """Load a network, in evaluation mode and frozen, and the values saved beside it."""
    with torch.inference_mode(False):
        content = read_file(path)
        if not isinstance(content, dict) or content.keys() != {"weights", "about"}:
            raise ValueError(f"{path} is no network of lightning-rob bpda: delete it")
        weights, about = content["weights"], dict(content["about"])
        net = BPDANet(about["shape"][0], len(weights["low"]))
        net.load_state_dict(weights)
    return net.eval().requires_grad_(False), about


def load_approximations(
    folder: Path | str, transforms: Iterable[Transform]
) -> dict[str, nn.Module]:
    """Load the networks that `lightning-rob bpda` has saved in a folder.

    Args:
        transforms: transforms whose networks are wanted, trained with the same arguments.

    Returns:
        The networks by the names of the transforms.
    """
    nets: dict[str, nn.Module] = {}
    for transform in transforms:
        spec, pattern = _spec(transform), place_of(folder, transform, None).name
        found = sorted(Path(folder).glob(pattern))
        if not found:
            raise FileNotFoundError(
                f"{folder} has no {pattern}, the network of {spec}: "
                f"train it with lightning-rob bpda --out {folder}"
            )
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise ValueError(f"{folder} has several networks of {spec}, keep one: {names}")
        nets[transform.class_name] = load_approximation(found[0])[0]
    return nets
