"""Randomness as an argument: a generator for a batch, or one stream for each of its images."""

import math
import os
import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _mix(z: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood 2014) to int64 as if unsigned."""
    z = ((z >> 30).bitwise_and_(2**34 - 1)).bitwise_xor_(z).mul_(_signed(0xBF58476D1CE4E5B9))
    z = ((z >> 27).bitwise_and_(2**37 - 1)).bitwise_xor_(z).mul_(_signed(0x94D049BB133111EB))
    return ((z >> 31).bitwise_and_(2**33 - 1)).bitwise_xor_(z)


def _mix_one(z: int) -> int:
    """Apply `_mix` to an integer; without tensors, `torch.export` sees a constant."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def global_seed() -> int:
    """Return the seed of `seed_everything`, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def derive_seed(*keys: int) -> int:
    """Mix integers (a seed, an epoch, an image's index …) into one seed of 63 bits."""
    state = 0
    for key in keys:
        state = _mix_one((state + GOLDEN) % 2**64) ^ _mix_one(int(key) % 2**64)
    return _mix_one(state) % 2**63


class Streams:
    """One counter-based random stream per image: a draw never depends on batch or rank.

    Args:
        keys: [B] int64, one key per image.
        batch_key: key of the draws that all images share, the same in any batch.
        rows: [B] places of the images in the batch that is attacked; None for all in their order.
    """

    def __init__(self, keys: Tensor, batch_key: int = 0, rows: Tensor | None = None) -> None:
        self.keys = keys
        self.batch_key = batch_key
        self.rows = rows
        self.counter = 0  # numbers drawn of each stream

    @classmethod
    def from_index(cls, index: Tensor, *keys: int) -> "Streams":
        """Return the streams of images by their indices [B] and by keys, such as a seed."""
        batch_key = derive_seed(*keys)
        return cls(_mix(_mix(index.to(torch.int64)) ^ batch_key), batch_key)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, chosen: Tensor) -> "Streams":
        """Return the streams of some images, a mask [B] or indices, at their current position."""
        rows = self.rows
        if rows is None:
            rows = torch.arange(len(self.keys), device=self.keys.device)
        part = Streams(self.keys[chosen], self.batch_key, rows[chosen])
        part.counter = self.counter
        return part

    def fold_in(self, key: int) -> "Streams":
        """Return other streams for the same images, derived from these by a key."""
        # The counter takes part, so that the same key later gives other streams.
        derived = derive_seed(key, self.counter)
        keys = _mix(self.keys ^ derived)
        return Streams(keys, derive_seed(self.batch_key, derived), self.rows)

    def split(self, count: int) -> "Streams":
        """Return [count * B] new streams, `count` for each image; another call returns others."""
        parts = [self.fold_in(key) for key in range(count)]
        self.counter += 1
        rows = None if self.rows is None else self.rows.repeat(count)
        return Streams(torch.cat([part.keys for part in parts]), parts[0].batch_key, rows)

    def shared(self) -> "Streams":
        """Return one stream shared by all images, independent of the composition of the batch."""
        part = Streams(torch.full_like(self.keys, self.batch_key), self.batch_key, self.rows)
        part.counter = self.counter
        return part

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Draw [B, *shape] float32 in [0, 1)."""
        count = math.prod(shape)
        # Number i of a stream is a hash of its key and of i: there is no state but the counter.
        steps = torch.arange(self.counter + 1, self.counter + count + 1, device=self.keys.device)
        self.counter += count
        # The upper 24 bits, for float32 represents no more.
        bits = _mix(self.keys[:, None] + steps * _signed(GOLDEN))
        unit = (bits >> 40).bitwise_and_(2**24 - 1).to(torch.float32).mul_(2.0**-24)
        return unit.reshape(len(self), *shape)


Generator = torch.Generator | Streams | None


def uniform(x: Tensor, *shape: int, generator: Generator = None) -> Tensor:
    """Draw uniform numbers for each image of a batch.

    Args:
        x: [B, …] the batch: gives length, device and dtype.
        *shape: shape of the numbers for each image.
        generator: a `torch.Generator`, `Streams` of B images, or None for torch's global stream.

    Returns:
        [B, *shape] in [0, 1), of x's dtype.
    """
    # Numbers are below 1 in every type, for an index made of them must not be out of range.
    below_one = 1 - torch.finfo(x.dtype).eps / 2  # half precision would round up to 1
    if isinstance(generator, Streams):
        if len(generator) != len(x):
            raise ValueError(f"{len(generator)} random streams for {len(x)} images")
        return generator.uniform(shape).to(x).clamp_max(below_one)
    device = x.device if generator is None else generator.device
    u = torch.rand((len(x), *shape), generator=generator, dtype=x.dtype, device=device)
    return u.to(x).clamp_max(below_one)


def normal(x: Tensor, *shape: int, generator: Generator = None) -> Tensor:
    """Draw standard normal numbers for each image (Box and Muller 1958); see `uniform`."""
    u = uniform(x, 2, *shape, generator=generator)
    return (-2 * torch.log1p(-u[:, 0])).sqrt() * torch.cos(2 * math.pi * u[:, 1])


def generator_from(x: Tensor, generator: Generator = None) -> torch.Generator:
    """Return a generator for the draws that a batch x shares, seeded by a draw for each image."""
    drawn = uniform(torch.zeros(len(x), device=x.device), generator=generator)
    # `Streams` count this draw, so that the next call returns another generator.
    return torch.Generator().manual_seed(seed_from(drawn))


def seed_from(drawn: Tensor) -> int:
    """Mix numbers [B] in [0, 1) into one seed."""
    return derive_seed(*(drawn * 2**24).long().tolist())


@contextmanager
def seeded_global_rng(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Seed the global streams of torch, numpy and Python by one draw; restore them afterwards."""
    seed = int(torch.randint(2**62, (), generator=generator))
    on_gpu = device.type == "cuda"
    of_numpy, of_python = np.random.get_state(), random.getstate()
    try:
        # `fork_rng` restores torch's streams alone.
        with torch.random.fork_rng([device] if on_gpu else []):
            torch.default_generator.manual_seed(seed)
            if on_gpu:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def generator_of(*keys: int) -> torch.Generator:
    """Return a generator that these numbers seed."""
    return torch.Generator().manual_seed(derive_seed(*keys))


def own_streams(seed: int, device: torch.device | None = None) -> AbstractContextManager[None]:
    """Seed the global streams as `seeded_global_rng`, by a number."""
    return seeded_global_rng(torch.Generator().manual_seed(seed), device or torch.device("cpu"))


def seed_of(generator: torch.Generator | Streams) -> int:
    """Return a seed that the state of a source of noise determines; nothing is drawn."""
    if isinstance(generator, Streams):
        return derive_seed(generator.batch_key, generator.counter, *generator.keys.tolist())
    return zlib.crc32(generator.get_state().numpy().tobytes())
