"""A training set with attacked copies and the features of all its images, kept on disk."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from torch import Tensor, nn

from lightning_rob.defenses.base import Defense, Single
from lightning_rob.defenses.learning import shown
from lightning_rob.defenses.source import Augment, Source
from lightning_rob.randomness import Generator, Streams, derive_seed, seeded_global_rng

Attacker = Callable[[Defense, Tensor, Tensor, Generator], Any]  # to a Tensor, see `data.base`
FORMAT = 1  # of the files and of how they are made: another number makes all of them anew
BATCH = 256  # images attacked at a time
CHUNK = 1 << 14  # features that distances are computed to at a time
SAMPLED = 64  # images that tell a source from another of the same length


@dataclass(frozen=True)
class FeatureSet:
    """Labelled images with their features, on the CPU, mapped from files.

    Args:
        x: [N, C, H, W] float32 in [0, 1].
        y: [N] int64.
        features: [N, F] float32.
    """

    x: Tensor
    y: Tensor
    features: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """The images [B, C, H, W] and labels [B] at these positions [B]."""
        return self.x[index].to(device), self.y[index].to(device)


class FeatureStore:
    """D' of RMC: the source once as it is, then attacked, all with the features of a network.

    Made when first asked for, and anew for a network of other weights. Every pass over the source
    is augmented afresh, once and for all.

    Args:
        attack: (defense, x, y, generator) -> x_adv, on the network by itself; None attacks nothing.
        copies: attacked passes behind the one of clean images.
        augment: what is done to a source image [C, H, W], drawing from torch's global stream.
        layer: name of the module whose input the features are; None is the last linear layer.
        seed: of the augmentation and the attack.
        cache: folder where files are kept, by what they were made of; None keeps them as long as
            the process needs them.
    """

    def __init__(
        self,
        attack: Attacker | None = None,
        copies: int = 1,
        augment: Sequence[Augment] = (),
        layer: str | None = None,
        seed: int = 0,
        cache: str | None = None,
    ) -> None:
        self.attack = attack
        self.copies = copies
        self.augment = tuple(augment)
        self.layer = layer
        self.seed = seed
        self.cache = cache
        self._last: tuple[Source, str, FeatureSet] | None = None

    def of(self, net: nn.Module, source: Source, device: torch.device) -> FeatureSet:
        """The images and features for a network; its modes and weights are left as they are.

        Args:
            net: [B, C, H, W] -> [B, K], the static model.
            source: N labelled images.
            device: where the network is.

        Returns:
            (copies + 1) * N images, of which the first N are not attacked.
        """
        network = fingerprint(net)
        if self._last is None or self._last[0] is not source or self._last[1] != network:
            self._last = None  # what it has mapped can go before there is more
            self._last = source, network, self._found(net, network, source, device)
        return self._last[2]

    def _found(
        self, net: nn.Module, network: str, source: Source, device: torch.device
    ) -> FeatureSet:
        place = Path(self.cache) / f"rmc-{self._key(network, source)}" if self.cache else None
        if place and place.is_dir():
            return _read(place)
        if place:
            place.parent.mkdir(parents=True, exist_ok=True)
        parts = self._parts(net, source, device)
        with TemporaryDirectory(
            dir=place and place.parent, prefix="rmc-unfinished-", ignore_cleanup_errors=True
        ) as folder:
            whole = Path(folder) / "whole"
            whole.mkdir()
            _write(whole, parts, (self.copies + 1) * len(source))
            if not place:
                return _read(whole)  # mapped files outlive their names
            _rename(whole, place)
        return _read(place)

    def _parts(
        self, net: nn.Module, source: Source, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Images, labels and features, batch by batch."""
        batches = torch.split(torch.arange(len(source)), BATCH)
        todo = [(turn, index) for turn in range(self.copies + 1) for index in batches]
        for turn, index in shown(todo, "RMC's training set"):
            x, y = self._images(net, source, turn, index, device)
            yield x, y, features(net, x, self.layer)

    def _images(
        self, net: nn.Module, source: Source, turn: int, index: Tensor, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The images and labels at these positions [B]: clean in the first turn, else attacked."""
        chance = torch.Generator().manual_seed(derive_seed(self.seed, turn, int(index[0])))
        with seeded_global_rng(chance, device):
            x, y = source.take(index, self.augment)
            x, y = x.to(device, torch.float32), y.to(device, torch.int64)
            if turn and self.attack:
                noise = Streams.from_index(index.to(device), self.seed, turn)
                x = self.attack(Single(net), x, y, noise)
        return x, y

    def _key(self, network: str, source: Source) -> str:
        """What tells these files from all others.

        Raises:
            ValueError: an attack or augmentation that cannot be told from others of its kind.
        """
        some = torch.unique(torch.linspace(0, len(source) - 1, SAMPLED).long())
        images = [(str(len(source)), part) for part in source.take(some)]
        settings = [told(self.attack), *map(told, self.augment)]
        numbers = [FORMAT, BATCH, self.copies, self.layer, self.seed]
        return _digest(f"{network} {numbers} {settings}", images)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: copies of a defense share what is already made."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_last": None}


@torch.no_grad()
def nearest(features: Tensor, query: Tensor, count: int) -> Tensor:
    """The nearest rows by Euclidean distance, nearest first; of equal ones those that come first.

    Args:
        features: [N, F], perhaps mapped from a file: read in parts.
        query: [B, F]; distances are computed where it is.
        count: K, how many rows are wanted.

    Returns:
        [B, K] positions.

    Raises:
        ValueError: there are not as many rows.
    """
    if not 1 <= count <= len(features):
        raise ValueError(f"cannot have {count} nearest neighbours among {len(features)} images")
    best = query.new_empty(len(query), 0)
    where = torch.empty(len(query), 0, dtype=torch.int64, device=query.device)
    for first in range(0, len(features), CHUNK):
        part = features[first : first + CHUNK].to(query)
        # Differences, not a product of matrices: that would tell equal images apart by rounding.
        far = torch.cdist(query, part, compute_mode="donot_use_mm_for_euclid_dist")
        here = torch.arange(first, first + len(part), device=query.device).expand(len(query), -1)
        best, order = torch.cat([best, far], 1).sort(dim=1, stable=True)
        where = torch.cat([where, here], 1).gather(1, order[:, :count])
        best = best[:, :count]
    return where


@torch.no_grad()
def features(net: nn.Module, x: Tensor, layer: str | None = None) -> Tensor:
    """What a network's last linear layer is given, in evaluation mode.

    Args:
        net: its modes are left as they are.
        x: [B, C, H, W] images in [0, 1].
        layer: name of another module whose input is wanted.

    Returns:
        [B, F] float32.

    Raises:
        ValueError: there is no such layer, or the network does not call it.
    """
    given: list[Tensor] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        given[:] = inputs[:1]

    modes = [(module, module.training) for module in net.modules()]
    hooks = [module.register_forward_pre_hook(note) for module in _listened(net, layer)]
    try:
        net.eval()(x)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode
    if not given:
        wanted = f"layer {layer!r}" if layer else "linear layer, name another one by layer="
        raise ValueError(f"{type(net).__name__} calls no {wanted}")
    return given[0].detach().flatten(1).float()


def _listened(net: nn.Module, layer: str | None) -> list[nn.Module]:
    if layer is None:
        return [module for module in net.modules() if isinstance(module, nn.Linear)]
    return [module for name, module in net.named_modules() if name == layer]


def fingerprint(net: nn.Module) -> str:
    """What tells a network from all others: its layers and their weights."""
    return _digest(repr(net), [*net.named_parameters(), *net.named_buffers()])


def told(setting: object) -> str:
    """A setting with all its arguments, functions by name and not by address.

    Raises:
        ValueError: it does not say what it is.
    """
    text = re.sub(r"<function ([\w.]+) at 0x[0-9a-f]+>", r"\1", repr(setting))
    if " at 0x" in text:
        raise ValueError(
            f"files in a cache are told apart by repr, and that of {text} does not tell what it "
            "does: make it a frozen dataclass or a named function, or give no cache"
        )
    return text


def _digest(text: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256(text.encode())
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _write(folder: Path, parts: Iterable[Sequence[Tensor]], count: int) -> None:
    """Batches of so many rows in all into one .npy file for each of `FeatureSet`'s tensors."""
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        for batch in parts:
            for name, part in zip(FeatureSet.__annotations__, batch, strict=True):
                array = part.cpu().contiguous().numpy()
                if name not in files:
                    files[name] = stack.enter_context(open(folder / f"{name}.npy", "wb"))
                    shape = (count, *array.shape[1:])
                    head = {"descr": array.dtype.str, "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(files[name], head)
                files[name].write(array.data)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())


def _read(folder: Path) -> FeatureSet:
    arrays = (np.load(folder / f"{name}.npy", mmap_mode="c") for name in FeatureSet.__annotations__)
    return FeatureSet(*map(torch.from_numpy, arrays))


def _rename(folder: Path, place: Path) -> None:
    try:
        folder.rename(place)
    except OSError:
        if not place.is_dir():  # else another process has made the same meanwhile
            raise
