"""RMC: a network that learns from the neighbours of what it is to answer."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_rob.defenses.learning import Transductive, learning, shown, shuffled, trainable
from lightning_rob.defenses.memory import Attacker, FeatureSet, FeatureStore, features, nearest
from lightning_rob.defenses.source import Augment, SourceData
from lightning_rob.randomness import Generator, Streams, generator_from
from lightning_rob.rules import Rule, mean_probs

Stop = Literal["either", "both"]
CALIBRATION_HELD_OUT = 0.125  # as released


class RMC(Transductive):
    """Runtime masking and cleansing (Wu et al. 2020), as Chen et al. 2022 play against it.

    D' is the training set with attacked copies. The K images of D' whose features are nearest to
    those of the test image train the network before it answers; some of the very nearest validate.
    After each answer the network is calibrated on clean images drawn at random. Weights and the
    optimizer's moments are carried on from image to image.

    The paper's game has batches of one image. A larger batch trains on all its images' neighbours.

    Args:
        net: [B, C, H, W] -> [B, K] logits, the static model, by whose features neighbours are told.
        source: labelled images to learn from, see `Transductive`.
        attack: makes the copies, (defense, x, y, generator) -> x_adv: on MNIST PGD of 100 steps of
            0.01 within linf 0.3, on CIFAR-10 40 of 1/255 within 8/255, keeping the best; None
            leaves them clean.
        copies: attacked copies of the training set in D': the paper has 1 for MNIST (D' is twice
            as large as the training set), 4 for CIFAR-10.
        neighbours: K.
        share: how many of the neighbours, the nearest, may validate, in (0, 1).
        validation: how many of these do, drawn at random, in (0, 1).
        epochs: at most so many passes over the neighbours.
        batch_size: images of a step.
        optimizer: parameters -> optimizer; None is the paper's for MNIST, Adam of rate 2e-4 (for
            CIFAR-10 2.5e-5).
        target_loss: mean training loss of an epoch that is low enough to stop.
        patience: epochs without a new lowest validation loss that are enough to stop.
        stop: "either" condition is enough, as the paper says, or it takes "both", as in its code:
            then training goes on for several times as long.
        stateful: go on with what was learnt for the image before; else begin with `net` each time.
        calibrate: whether a stateful defense calibrates after each answer.
        augment: what is done to the images of D' before the attack, see `Source.take`.
        layer: name of the module whose input are the features; None is the last linear layer.
        seed: of D', which is the same for all that is learnt from it.
        cache: folder where D' is kept for other runs; None keeps it while the process runs.
        rule: any; there is one draw.

    Raises:
        ValueError: a number out of range; when adapting, fewer images in D' than neighbours.
    """

    def __init__(
        self,
        net: nn.Module,
        source: SourceData | None = None,
        attack: Attacker | None = None,
        copies: int = 1,
        neighbours: int = 1024,
        share: float = 0.2,
        validation: float = 0.25,
        epochs: int = 100,
        batch_size: int = 128,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        target_loss: float = 0.01,
        patience: int = 5,
        stop: Stop = "either",
        stateful: bool = True,
        calibrate: bool = True,
        augment: Sequence[Augment] = (),
        layer: str | None = None,
        seed: int = 0,
        cache: str | None = None,
        rule: Rule = mean_probs,
    ) -> None:
        super().__init__(net, rule, source)
        for name, count in {"epochs": epochs, "batch_size": batch_size}.items():
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if copies < 0:
            raise ValueError(f"copies must not be negative, got {copies}")
        for name, part in {"share": share, "validation": validation}.items():
            if not 0 < part < 1:
                raise ValueError(f"{name} must be in (0, 1), got {part}")
        if int(share * neighbours) < 1:
            raise ValueError(
                f"neighbours must be at least {math.ceil(1 / share)}, for a share of {share} of "
                f"them validates, got {neighbours}"
            )
        self.neighbours = neighbours
        self.share = share
        self.validation = validation
        self.epochs = epochs
        self.batch_size = batch_size
        self.optimizer = optimizer or _adam
        self.stopping = Stopping(target_loss, patience, stop)
        self.stateful = stateful
        self.calibrate = calibrate
        self.memory = FeatureStore(attack, copies, augment, layer, seed, cache)
        self.moments: dict[str, Any] | None = None

    def fit_to_batch(self, x: Tensor, chance: torch.Generator) -> Self:
        """The defense with a network trained on the neighbours of the images [B, C, H, W]."""
        images = self._remembered(x.device)
        given = features(self.net, x, self.memory.layer)
        found = nearest(images.features, given, self.neighbours).cpu()
        train, held = split(found, self.share, self.validation, chance)
        return self._trained(images, train, held, x.device, chance)

    def after_batch(self, generator: Generator = None) -> Self:
        """The defense that the next round begins with, calibrated if it is stateful.

        Args:
            generator: the defender's private randomness.
        """
        if not self.stateful:
            return self.copy_with(adapted=None, moments=None)
        if not self.calibrate:
            return self
        device = next(self.net.parameters()).device
        count = len(generator) if isinstance(generator, Streams) else 1
        chance = generator_from(torch.zeros(count, device=device), generator)
        with learning(chance, device):
            drawn = torch.randint(len(self.source), (self.neighbours,), generator=chance)
            held = math.ceil(CALIBRATION_HELD_OUT * self.neighbours)
            images = self._remembered(device)
            return self._trained(images, drawn[held:], drawn[:held], device, chance)

    def _remembered(self, device: torch.device) -> FeatureSet:
        return self.memory.of(self.net, self.source, device)

    def _trained(
        self,
        images: FeatureSet,
        train: Tensor,
        held: Tensor,
        device: torch.device,
        chance: torch.Generator,
    ) -> Self:
        """Training from where the defense stands, on the images at some places until it stops."""
        net, optimizer = self._resumed()
        x, y = images.take(train, device)
        unseen = images.take(held, device)
        lay_out(net, x[:1])
        losses: list[tuple[float, float]] = []
        for _ in shown(range(self.epochs), "RMC"):
            order = shuffled(len(train), self.batch_size, chance)
            trained = train_epoch(net, optimizer, x, y, order)
            losses.append((trained, mean_loss(net, *unseen, self.batch_size)))
            if self.stopping.over(losses):
                break
        optimizer.zero_grad()
        net.eval().requires_grad_(False)
        return self.copy_with(adapted=net, moments=optimizer.state_dict())

    def _resumed(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A copy of the network as it stands, and an optimizer as it stands."""
        learnt = self.adapted if self.stateful else None
        net = trainable(learnt or self.net)
        optimizer = self.optimizer(net.parameters())
        if learnt and self.moments:
            # Loading shares tensors with what is loaded, and a step writes to them.
            optimizer.load_state_dict(copy.deepcopy(self.moments))
        return net, optimizer


@dataclass(frozen=True)
class Stopping:
    """When a training is over.

    Args:
        target_loss: mean training loss of an epoch that is low enough.
        patience: epochs without a new lowest validation loss that are enough.
        stop: whether "either" is enough or it takes "both".

    Raises:
        ValueError: patience below 1, or another word for `stop`.
    """

    target_loss: float
    patience: int
    stop: Stop

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}")
        if self.stop not in ("either", "both"):
            raise ValueError(f"stop must be 'either' or 'both', got {self.stop!r}")

    def over(self, losses: Sequence[tuple[float, float]]) -> bool:
        """Whether it is, after epochs with these mean losses (training, validation)."""
        trained, held = zip(*losses, strict=True)
        since_best = len(held) - 1 - held.index(min(held))
        conditions = trained[-1] < self.target_loss, since_best >= self.patience
        return all(conditions) if self.stop == "both" else any(conditions)


def split(
    found: Tensor, share: float, validation: float, chance: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Neighbours into training and validation, which is some of the nearest of each image.

    Args:
        found: [B, K] positions, nearest first.
        share: of K, the nearest, that may validate.
        validation: how much of these do, rounded up as released; drawn at random.
        chance: draws them.

    Returns:
        The positions [T] and [V], none of them twice; for B = 1 there are K.
    """
    near = torch.unique(found[:, : int(share * found.shape[1])])
    others = torch.unique(found)
    others = others[~torch.isin(others, near)]
    near = near[torch.randperm(len(near), generator=chance)]
    held = math.ceil(validation * len(near))
    return torch.cat([near[held:], others]), near[:held]


@torch.no_grad()
def lay_out(net: nn.Module, x: Tensor) -> None:
    """Order a network's weights as a processor trains fastest, which changes rounding only.

    Worth 10 to 30 % with convolutions; one that views its activations cannot be ordered so.

    Args:
        net: changed in place.
        x: [B, C, H, W] some images, to try it on.
    """
    if x.device.type != "cpu":
        return
    try:
        net.eval().to(memory_format=torch.channels_last)(x)
    except RuntimeError:
        net.to(memory_format=torch.contiguous_format)


def train_epoch(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    order: Sequence[Tensor],
) -> float:
    """A step on each batch of the images [N, C, H, W] and labels [N]; the mean loss on the way."""
    net.train()
    total = torch.zeros((), device=x.device)
    for index in order:
        optimizer.zero_grad()
        loss = cross_entropy(net(x[index]), y[index])
        torch.autograd.backward(loss)
        optimizer.step()
        total += loss.detach() * len(index)
    return float(total) / len(x)


@torch.no_grad()
def mean_loss(net: nn.Module, x: Tensor, y: Tensor, size: int) -> float:
    """The loss on images [N, C, H, W] with labels [N] in evaluation mode, so many at a time."""
    net.eval()
    parts = zip(torch.split(x, size), torch.split(y, size), strict=True)
    return sum(float(cross_entropy(net(a), b, reduction="sum")) for a, b in parts) / len(x)


def _adam(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(weights, 2e-4)
