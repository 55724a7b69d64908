"""RMC: a network that learns from the neighbours of the images it is about to classify."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_rob.defenses.base import Defense, Single
from lightning_rob.defenses.network import network_logits
from lightning_rob.defenses.transductive import (
    Augment,
    Optimizer,
    Source,
    SourceData,
    Transductive,
    learning,
    progress_bar,
    shuffled,
    trainable,
)
from lightning_rob.randomness import Generator, Streams, derive_seed, generator_from, own_streams
from lightning_rob.runtime.errors import at_least
from lightning_rob.runtime.identity import cache_key

Attacker = Callable[[Defense, Tensor, Tensor, Generator], Any]  # to a Tensor, see `data.samples`
Stop = Literal["either", "both"]
NEAREST = 0.2  # share of the neighbours that may validate
HELD_OUT = 0.25  # share of these that validates
CALIBRATION_HELD_OUT = 0.125  # as released
BATCH = 256  # images attacked at a time
CHUNK = 1 << 14  # rows of features whose distances are computed at a time


class RMC(Transductive):
    """Runtime masking and cleansing (Wu et al. 2020), in the protocol of Chen et al. 2022.

    D' is the training set with attacked copies. The K images of D' whose features are nearest to
    those of the test image train the network before it predicts; some of the very nearest
    validate. After each prediction the network is calibrated on clean images drawn at random.
    Weights and the optimizer's moments are carried on from image to image. The paper has batches of
    one image; a larger batch trains on the neighbours of all its images.

    Args:
        net: [B, C, H, W] -> [B, K] logits, the static model; its features define the neighbours.
        attack: makes the copies, (defense, x, y, generator) -> x_adv: on MNIST PGD of 100 steps of
            0.01 within linf 0.3, on CIFAR-10 40 of 1/255 within 8/255, keeping the best; None
            leaves them clean.
        copies: attacked copies of the training set in D': in the paper 1, for CIFAR-10 4.
        neighbours: K, at least 5: of the nearest fifth a quarter validates.
        epochs: largest number of passes over the neighbours.
        optimizer: parameters -> optimizer; None is the paper's for MNIST, Adam of rate 2e-4 (for
            CIFAR-10 2.5e-5).
        target_loss: training stops below this mean training loss of an epoch.
        patience: training stops after this number of epochs without a new lowest validation loss.
        stop: "either" condition is enough, as the paper says, or "both" have to hold, as in its
            code: then training takes several times as long.
        stateful: continue from the adaptation to the image before; else begin with `net` each time.
        augment: applied to the images of D' before the attack, see `Source.gather`.
        seed: seed of D', which is shared by all adaptations.
    """

    def __init__(
        self,
        net: nn.Module,
        source: SourceData | None = None,
        attack: Attacker | None = None,
        copies: int = 1,
        neighbours: int = 1024,
        epochs: int = 100,
        batch_size: int = 128,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        target_loss: float = 0.01,
        patience: int = 5,
        stop: Stop = "either",
        stateful: bool = True,
        augment: Sequence[Augment] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(net, source)
        at_least(1, epochs=epochs, batch_size=batch_size, patience=patience)
        at_least(5, neighbours=neighbours)  # of the nearest fifth some validate
        if stop not in ("either", "both"):
            raise ValueError(f"stop must be 'either' or 'both', got {stop!r}")
        at_least(0, copies=copies)
        self.neighbours = neighbours
        self.epochs = epochs
        self.batch_size = batch_size
        self.optimizer: Optimizer = optimizer or partial(torch.optim.Adam, lr=2e-4)
        self.target_loss = target_loss
        self.patience = patience
        self.stop: Stop = stop
        self.stateful = stateful
        self.store = FeatureStore(attack, copies, augment, seed)
        self.moments: dict[str, Any] | None = None

    def fit_to_batch(self, x: Tensor, generator: torch.Generator) -> Self:
        images = self.store.build(self.net, self.source, x.device)
        query = features(self.net, x)
        found = nearest(images.features, query, self.neighbours).cpu()
        train, held_out = split(found, generator)
        return self._trained(images, train, held_out, x.device, generator)

    def after_batch(self, generator: Generator = None) -> Self:
        if not self.stateful:
            # Without a state each batch starts from the static model.
            return self.copy_with(adapted=None, moments=None)
        device = next(self.net.parameters()).device
        count = len(generator) if isinstance(generator, Streams) else 1
        private = generator_from(torch.zeros(count, device=device), generator)
        with learning(private, device):
            # The first len(source) images of D' are the clean ones.
            # With replacement, for the source may have fewer images than are drawn.
            drawn = torch.randint(len(self.source), (self.neighbours,), generator=private)
            held_out = math.ceil(CALIBRATION_HELD_OUT * self.neighbours)
            images = self.store.build(self.net, self.source, device)
            return self._trained(images, drawn[held_out:], drawn[:held_out], device, private)

    def _trained(
        self,
        images: "FeatureSet",
        train: Tensor,
        held_out: Tensor,
        device: torch.device,
        generator: torch.Generator,
    ) -> Self:
        """Return the defense trained on the images at some positions until it stops."""
        adapted = self.adapted if self.stateful else None
        net = trainable(adapted or self.net)
        optimizer = self.optimizer(net.parameters())
        if adapted and self.moments:
            # Loading shares tensors with what is loaded, and a step writes to them.
            optimizer.load_state_dict(copy.deepcopy(self.moments))
        x, y = images.gather(train, device)
        unseen = images.gather(held_out, device)
        if device.type == "cpu":
            # It saves 10 to 30 % of the time with convolutions and changes rounding only. A
            # network that views its activations fails in it.
            try:
                with torch.no_grad():
                    network_logits(net.eval().to(memory_format=torch.channels_last), x[:1])
            except RuntimeError:
                net.to(memory_format=torch.contiguous_format)
        losses: list[tuple[float, float]] = []
        for _ in progress_bar(range(self.epochs), "RMC"):
            net.train()
            total = torch.zeros((), device=device)  # read once an epoch: each look waits for a GPU
            for index in shuffled(len(train), self.batch_size, generator):
                optimizer.zero_grad()
                loss = cross_entropy(network_logits(net, x[index]), y[index])
                torch.autograd.backward(loss)
                optimizer.step()
                total += loss.detach() * len(index)
            net.eval()
            with torch.no_grad():
                parts = zip(*(torch.split(t, self.batch_size) for t in unseen), strict=True)
                sums = [cross_entropy(network_logits(net, a), b, reduction="sum") for a, b in parts]
            losses.append((float(total) / len(x), sum(map(float, sums)) / len(held_out)))
            if stops(losses, self.target_loss, self.patience, self.stop):
                break
        optimizer.zero_grad()
        net.eval().requires_grad_(False)
        return self.copy_with(adapted=net, moments=optimizer.state_dict())


def stops(
    losses: Sequence[tuple[float, float]], target_loss: float, patience: int, stop: Stop
) -> bool:
    """Return whether to stop after epochs of these mean (training, validation) losses."""
    training, validation = zip(*losses, strict=True)
    since_best = len(validation) - 1 - validation.index(min(validation))
    conditions = training[-1] < target_loss, since_best >= patience
    return all(conditions) if stop == "both" else any(conditions)


def split(found: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Split neighbours [B, K], nearest first, into positions [T] to train and [V] to validate."""
    # An image that is near to one test image may validate, however far it is from others.
    near = torch.unique(found[:, : int(NEAREST * found.shape[1])])
    others = torch.unique(found)
    others = others[~torch.isin(others, near)]
    near = near[torch.randperm(len(near), generator=generator)]
    held_out = math.ceil(HELD_OUT * len(near))  # rounded up as released
    return torch.cat([near[held_out:], others]), near[:held_out]


@torch.no_grad()
def nearest(features: Tensor, query: Tensor, count: int) -> Tensor:
    """Return the nearest rows [B, count] of features [N, F] to a query [B, F], nearest first."""
    if not 1 <= count <= len(features):
        raise ValueError(f"cannot have {count} nearest neighbours among {len(features)} images")
    best = query.new_empty(len(query), 0)
    where = torch.empty(len(query), 0, dtype=torch.int64, device=query.device)
    for first in range(0, len(features), CHUNK):
        part = features[first : first + CHUNK].to(query)
        # Differences, not a matrix product: its rounding would make equal images differ.
        distances = torch.cdist(query, part, compute_mode="donot_use_mm_for_euclid_dist")
        here = torch.arange(first, first + len(part), device=query.device).expand(len(query), -1)
        best, order = torch.cat([best, distances], 1).sort(dim=1, stable=True)
        where = torch.cat([where, here], 1).gather(1, order[:, :count])
        best = best[:, :count]
    return where


@torch.no_grad()
def features(net: nn.Module, x: Tensor) -> Tensor:
    """Return the input [B, F] of a network's last linear layer, in eval mode."""
    inputs: list[Tensor] = []

    def record(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs[:] = given[:1]  # of several layers the last one called is kept

    layers = [module for module in net.modules() if isinstance(module, nn.Linear)]
    modes = [(module, module.training) for module in net.modules()]
    try:
        with ExitStack() as hooks:
            for layer in layers:
                hooks.enter_context(layer.register_forward_pre_hook(record))
            network_logits(net.eval(), x)
    finally:
        for module, mode in modes:
            module.training = mode
    if not inputs:
        raise ValueError(f"{type(net).__name__} calls no linear layer, whose input RMC compares")
    return inputs[0].detach().flatten(1).float()


@dataclass(frozen=True)
class FeatureSet:
    """Labelled images on the CPU, and their features; see `FeatureStore`."""

    x: Tensor  # [N, C, H, W] float32 in [0, 1]
    y: Tensor  # [N] int64
    features: Tensor  # [N, F] float32

    def gather(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the images [B, C, H, W] and labels [B] at positions [B]."""
        return self.x[index].to(device), self.y[index].to(device)


@dataclass(eq=False)
class FeatureStore:
    """D' of RMC: the source images clean, then attacked, all with the features of a network.

    It is built at the first use, and again for a network of other weights. Each pass over the
    source is augmented once.
    """

    attack: Attacker | None = None
    copies: int = 1
    augment: Sequence[Augment] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        self._last: tuple[Source, str, FeatureSet] | None = None

    def build(self, net: nn.Module, source: Source, device: torch.device) -> FeatureSet:
        """Return (copies + 1) * N images with features for a network; the first N are clean."""
        # By the content of the weights, for another object may have the same ones. Not by its code,
        # of which that of a notebook is in no file.
        network = cache_key(**dict([*net.named_parameters(), *net.named_buffers()]))
        if self._last is None or self._last[0] is not source or self._last[1] != network:
            self._last = None  # frees their memory before others are made
            self._last = source, network, self._made(net, source, device)
        return self._last[2]

    def _made(self, net: nn.Module, source: Source, device: torch.device) -> FeatureSet:
        """Make the images batch by batch: clean in turn 0, then attacked."""
        batches = torch.split(torch.arange(len(source)), BATCH)
        todo = [(turn, index) for turn in range(self.copies + 1) for index in batches]
        parts: list[Tensor] = []
        end, count = 0, (self.copies + 1) * len(source)
        for turn, index in progress_bar(todo, "RMC's training set"):
            # Keyed by turn and position: the same images in every process.
            with own_streams(derive_seed(self.seed, turn, int(index[0])), device):
                x, y = source.gather(index, self.augment)
                x, y = x.to(device, torch.float32), y.to(device, torch.int64)
                if turn and self.attack:
                    noise = Streams.from_index(index.to(device), self.seed, turn)
                    x = self.attack(Single(net), x, y, noise)
            batch = x, y, features(net, x)
            # In place: for a moment, parts that are put together would take their memory twice.
            parts = parts or [
                part.new_empty(count, *part.shape[1:], device="cpu") for part in batch
            ]
            begin, end = end, end + len(x)
            for whole, part in zip(parts, batch, strict=True):
                whole[begin:end] = part
        x, y, found = parts
        # All features are compared with each batch, of the images only neighbours are needed.
        return FeatureSet(x, y, found.to(device))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # copies of a defense share the images

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_last": None}
