"""Transformed inference for 72 members on 128 digits: image by image, and all at once.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/pool.py

Each of the 72 transformations of the pool stands before a small network of its own, as in a
transformation ensemble. Both ways take turns; times are medians over the rounds, those of a group
and of the slowest members are parts of the same measurement.
"""

import argparse
import platform
import statistics
import time

import kornia
import skimage
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from lightning_rob.data import Digits5k
from lightning_rob.nets import SmallCNN
from lightning_rob.randomness import Streams
from lightning_rob.transforms.pool import GROUPS, pool

SLOWEST = 10


def digits(count):
    data = Digits5k()
    data.setup()
    rows = [data.parts["test"][i] for i in range(count)]
    return torch.stack([row[0] for row in rows])


def batched(transform, net, x, index):
    streams = Streams.from_index(index, 0)
    return net(transform(x, *transform.sample(x, streams)))


def one_by_one(transform, net, x, index):
    parts = zip(x.split(1), index.split(1), strict=True)
    return torch.cat([batched(transform, net, *part) for part in parts])


def seconds(way, *arguments):
    start = time.perf_counter()
    with torch.no_grad():
        logits = way(*arguments)
    return time.perf_counter() - start, logits


def measure(transform, net, x, index, rounds):
    """Return the median times of both ways, after checking that their predictions agree."""
    times = []
    batched(transform, net, x[:2], index[:2])
    for _ in range(rounds):
        (alone, one), (together, all_) = (
            seconds(way, transform, net, x, index) for way in (one_by_one, batched)
        )
        torch.testing.assert_close(one, all_, rtol=1e-3, atol=1e-3)
        times.append((alone, together))
    return [1000 * statistics.median(column) for column in zip(*times, strict=True)]


def row(table, name, before, after):
    table.add_row(name, f"{before:,.0f}", f"{after:,.0f}", f"{before / after:.1f}")


def table_of(times, title):
    table = Table(title=title)
    for column in ("", "image by image, ms", "all at once, ms", "ratio"):
        table.add_column(column, justify="right")
    for group, members in GROUPS.items():
        sums = [sum(times[name][way] for name in members) for way in (0, 1)]
        row(table, f"{group} ({len(members)})", *sums)
    table.add_section()
    for name in sorted(times, key=lambda name: -times[name][1])[:SLOWEST]:
        row(table, name, *times[name])
    table.add_section()
    row(table, f"all {len(times)}", *(sum(column) for column in zip(*times.values(), strict=True)))
    return table


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=128)
    options = parser.parse_args()
    x, index = digits(options.images), torch.arange(options.images)
    torch.manual_seed(0)
    times = {}
    for name, transform in tqdm(pool().items(), leave=False):
        net = SmallCNN(width=8).eval()
        times[name] = measure(transform, net, x, index, options.rounds)
    title = (
        f"{options.images} digits, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"kornia {kornia.__version__}, scikit-image {skimage.__version__}, {platform.machine()}"
    )
    Console(width=100).print(table_of(times, title))


if __name__ == "__main__":
    main()
