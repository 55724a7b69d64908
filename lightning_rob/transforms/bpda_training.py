"""How a network learns a transform, for BPDA."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from lightning_rob.transforms.base import Transform
from lightning_rob.transforms.bpda import BPDANet, planes_of

HELD_OUT = 0.1
RANGED = 1024  # images whose parameters tell the ranges
Estimate = Callable[..., Tensor]
Task = tuple[Tensor, tuple[Tensor, ...], Tensor]


@dataclass(frozen=True)
class Trained:
    """A network after its training.

    Args:
        net: in evaluation mode, its weights frozen.
        error: mean squared error on the images held out, in squared pixel units.
        identity: that of the untransformed images.
    """

    net: BPDANet
    error: float
    identity: float


def train_bpda(
    transform: Transform,
    images: Tensor,
    epochs: int = 10,
    batch_size: int = 32,
    lr: float = 0.01,
    generator: torch.Generator | None = None,
    progress: Callable[[int], object] = lambda images: None,
) -> Trained:
    """Train a network on a transform (mean squared error, Adam); the best epoch is kept.

    Each epoch draws the parameters of its images anew. The best is found on images held out, see
    `held_out`, which keep theirs.

    Args:
        transform: what to learn.
        images: [N, C, H, W] in [0, 1], where the training is to be.
        epochs: passes over the images.
        batch_size: images a step.
        lr: learning rate.
        generator: where the first weights, the order and the parameters come from.
        progress: called after each step with its number of images.

    Returns:
        The network and its errors.

    Raises:
        ValueError: fewer than two images, a count below 1, or a transform not for such images.
    """
    count = held_out(len(images))
    if min(epochs, batch_size, len(images) - count) < 1:
        raise ValueError(
            f"epochs and batch_size must be at least 1 and some of the images left to train on, "
            f"got {epochs}, {batch_size} and {len(images) - count} of {len(images)} images"
        )
    images = images[torch.randperm(len(images), generator=generator).to(images.device)]
    train, exam = images[count:], torch.split(images[:count], batch_size)
    tasks = [_task(transform, x, generator) for x in exam]
    net = _untrained(transform, train[:RANGED], generator)
    optimizer = torch.optim.Adam(net.parameters(), lr)
    best, error = net.state_dict(), float("inf")
    for _ in range(epochs):
        net.train()
        order = torch.randperm(len(train), generator=generator).to(train.device)
        for chosen in torch.split(order, batch_size):
            optimizer.zero_grad()
            loss = _error(net, _task(transform, train[chosen], generator))
            torch.autograd.backward(loss)
            optimizer.step()
            progress(len(chosen))
        if (now := _mean_error(net.eval(), tasks)) < error:
            best, error = {key: value.clone() for key, value in net.state_dict().items()}, now
    net.load_state_dict(best)
    return Trained(net.eval().requires_grad_(False), error, _mean_error(_same, tasks))


def held_out(count: int) -> int:
    """How many of so many images the training leaves aside to find the best epoch."""
    return max(1, round(HELD_OUT * count))


@torch.no_grad()
def _task(transform: Transform, x: Tensor, generator: torch.Generator | None) -> Task:
    """Images, parameters drawn for them, and what the transform makes of both."""
    params = transform.sample(x, generator)
    return x, params, transform(x, *params)


def _error(net: Estimate, task: Task) -> Tensor:
    x, params, y = task
    return mse_loss(net(x, *params), y)


@torch.no_grad()
def _mean_error(net: Estimate, tasks: Sequence[Task]) -> float:
    total = sum(float(_error(net, task)) * len(task[0]) for task in tasks)
    return total / sum(len(task[0]) for task in tasks)


def _same(x: Tensor, *params: Tensor) -> Tensor:
    return x


def _untrained(transform: Transform, x: Tensor, generator: torch.Generator | None) -> BPDANet:
    """A network that knows the parameters' ranges; torch's global stream is only borrowed."""
    params = transform.sample(x, generator)
    seed = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net = BPDANet(x.shape[1], planes_of(x[:1], [p[:1] for p in params]).shape[1])
    net.to(x.device).learn_ranges(x, params)
    return net
