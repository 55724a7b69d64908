from itertools import pairwise

import pytest
import torch
from scipy import stats

from lightning_rob.randomness import Streams, derive_seed, normal, uniform

ALL = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(z):
    """SplitMix64's finaliser in Python's integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & ALL
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & ALL
    return z ^ (z >> 31)


def splitmix(seed, count):
    return [mix((seed + (i + 1) * GOLDEN) & ALL) for i in range(count)]


def streams(*indices, keys=(0,)):
    return Streams.from_index(torch.tensor(indices), *keys)


# seeds
@pytest.mark.parametrize(
    "keys", [(), (0,), (1, 2, 3), (-1,), (2**63 - 1, -(2**63)), (2**64 + 5, 9)]
)
def test_derive_seed_in_integers(keys):
    state = 0
    for key in keys:
        state = mix((state + GOLDEN) & ALL) ^ mix(key & ALL)
    assert derive_seed(*keys) == mix(state) & (2**63 - 1)


def test_splitmix_is_the_published_one():
    """First outputs for seed 1234567, as in the reference C code's well-known test."""
    assert splitmix(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    ours = Streams(torch.tensor([1234567])).uniform((3,))[0].tolist()
    assert ours == [(z >> 40) * 2.0**-24 for z in splitmix(1234567, 3)]


# streams
def test_a_draw_depends_on_the_image_alone():
    whole = streams(10, 11, 12, 13, 14, keys=(7, 1)).uniform((4,))
    assert torch.equal(streams(14, 10, 12, keys=(7, 1)).uniform((4,)), whole[[4, 0, 2]])
    assert torch.equal(streams(13, keys=(7, 1)).uniform((4,)), whole[3:4])


@pytest.mark.parametrize(
    "chosen",
    [torch.tensor([False, True, True]), torch.tensor([1, 2]), slice(1, 3)],
    ids=["mask", "indices", "slice"],
)
def test_some_of_the_streams(chosen):
    parent, same = streams(0, 1, 2), streams(0, 1, 2)
    parent.uniform((3,))
    part = parent[chosen]
    expected = same.uniform((8,))
    assert len(part) == 2
    assert torch.equal(part.uniform((5,)), expected[1:, 3:])
    # the part's draws are its own: the whole goes on where it stood
    assert torch.equal(parent.uniform((5,)), expected[:, 3:])


def test_streams_are_uniform_across_images_and_along_them():
    drawn = Streams.from_index(torch.arange(3000), 0).uniform((4,)).double()
    for column in drawn.T:
        assert stats.kstest(column.numpy(), "uniform").pvalue > 1e-3
    along = Streams.from_index(torch.arange(4), 0).uniform((3000,)).double()
    for row in along:
        assert stats.kstest(row.numpy(), "uniform").pvalue > 1e-3
        assert abs(stats.pearsonr(row[1:].numpy(), row[:-1].numpy()).statistic) < 0.07
    for a, b in pairwise(along):
        assert abs(stats.pearsonr(a.numpy(), b.numpy()).statistic) < 0.07


def test_every_bit_is_fair():
    """Of 24 bits drawn for 4000 neighbouring images, none leans and no two go together."""
    drawn = Streams.from_index(torch.arange(4000), 5).uniform(())
    numbers = (drawn.double() * 2**24).long()
    bits = torch.stack([(numbers >> i) & 1 for i in range(24)]).double()
    assert (bits.mean(1) - 0.5).abs().max() < 0.035
    correlation = torch.corrcoef(bits) - torch.eye(24)
    assert correlation.abs().max() < 0.075


# uniform and normal
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_never_one_and_never_infinite(dtype):
    x, many = torch.zeros(4, 1, dtype=dtype), streams(0, 1, 2, 3)
    drawn = uniform(x, 50_000, generator=many)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert normal(x, 50_000, generator=many).isfinite().all()


@pytest.mark.parametrize("generator", [torch.Generator().manual_seed(3), streams(0)])
def test_normal_is_normal(generator):
    drawn = normal(torch.zeros(1, 1).double(), 20_000, generator=generator)[0]
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-3
    assert drawn.abs().max() > 3.5
    assert abs(stats.pearsonr(drawn[1:].numpy(), drawn[:-1].numpy()).statistic) < 0.03


@pytest.mark.parametrize("make", [uniform, normal])
def test_as_many_streams_as_images(make):
    with pytest.raises(ValueError, match="3 random streams for 2 images"):
        make(torch.zeros(2, 1), 4, generator=streams(0, 1, 2))
