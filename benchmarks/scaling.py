"""How an attack's time and memory grow with images, steps, members, classes and draws.

    python benchmarks/scaling.py --figure scaling.png

ResNet-20 of random weights, 3x32x32. Each line is one argument made larger, the others held; all
its values are timed in turn, medians over rounds, and a straight line is fitted. Units are forward
and backward passes of one network on 32 images ("passes"), timed in the same rounds.
"""

import argparse

import matplotlib as mpl
import numpy as np
import timing
import torch

from lightning_rob.attacks import ARC, PGD
from lightning_rob.defenses import Ensemble, RandomTransforms, Single
from lightning_rob.nets import ResNet20
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from lightning_rob.transforms import Affine, GaussianNoise, HorizontalFlip

LINF = Threat("linf", 8 / 255)


def batch(count):
    chance = torch.Generator().manual_seed(0)
    x = torch.rand(count, 3, 32, 32, generator=chance).to(timing.device())
    return x, torch.zeros(count, dtype=torch.int64, device=x.device)


def lines(nets):
    """Yield label, growing argument, its values, and the work for a value."""
    x, y = batch(32)
    noise = Streams.from_index(torch.arange(32, device=x.device), 0)

    def pgd(steps, count=32):
        images, labels = batch(count)
        return lambda: PGD(LINF, steps, 2 / 255)(Single(nets[0]), images, labels)

    def members(count):
        return lambda: PGD(LINF, 5, 2 / 255)(Ensemble(nets[:count]), x, y)

    def arc(count, neighbours, steps):
        return lambda: ARC(LINF, steps, 8 / 255, neighbours)(Ensemble(nets[:count]), x, y)

    def draws(count):
        kinds = [GaussianNoise(0.05), HorizontalFlip(), Affine(0.1)]
        defense = RandomTransforms(nets[0], kinds, 3, count)
        return lambda: PGD(LINF, 2, 2 / 255)(defense, x[:8], y[:8], noise[torch.arange(8)])

    return [
        ("PGD-5", "images", (8, 16, 32, 64, 128), lambda n: pgd(5, n)),
        ("PGD", "steps", (2, 5, 10, 20), pgd),
        ("adaptive PGD-5", "members", (1, 2, 3, 4, 5), members),
        ("ARC, G = 4, K = 2", "members", (1, 2, 3, 4, 5), lambda n: arc(n, 4, 2)),
        ("ARC, two members, K = 2", "classes searched", (1, 3, 5, 7, 9), lambda n: arc(2, n, 2)),
        ("ARC, two members, G = 4", "iterations", (1, 2, 4, 8), lambda n: arc(2, 4, n)),
        ("EoT-2, 8 images, S = 3", "draws", (1, 2, 5, 10, 20), draws),
    ]


def one_pass(net, x, y):
    for weight in net.parameters():
        weight.requires_grad_(False)

    def work():
        image = x.clone().requires_grad_()
        torch.autograd.grad(torch.nn.functional.cross_entropy(net(image), y), image)

    return work


def measured(nets, values, make, rounds):
    """Return for each value its cost in passes [P] and the MiB kept for gradients."""
    contenders = {"pass": one_pass(nets[0], *batch(32))} | {n: make(n) for n in values}
    _, times, kept = timing.in_turn(contenders, rounds)
    passes = [timing.ratio(times[n], times["pass"]) for n in values]
    return np.array(passes), np.array([kept[n] / 2**20 for n in values])


def fitted(values, passes):
    """Return slope, intercept and the share of variance that the line explains."""
    slope, start = np.polyfit(values, passes, 1)
    rest = passes - (slope * np.array(values) + start)
    return slope, start, 1 - (rest**2).sum() / ((passes - passes.mean()) ** 2).sum()


def drawn(found, path):
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(13, 6), layout="constrained")
    for axis, (label, grows, values, passes, _) in zip(axes.flat, found, strict=False):
        slope, start, _ = fitted(values, passes)
        axis.plot(values, passes, "o", color="#2a6f97")
        ends = np.array([0, max(values)])
        axis.plot(ends, slope * ends + start, color="#2a6f97", linewidth=1)
        axis.set(title=label, xlabel=grows, ylim=(0), xlim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
        axis.text(0.05, 0.9, f"{slope:.2g} passes each", transform=axis.transAxes)
    for axis in axes[:, 0]:
        axis.set_ylabel("forward + backward passes")
    last = axes.flat[len(found)]
    for label, grows, values, _, kept in found:
        if grows != "iterations":
            last.plot(
                np.array(values) / max(values), kept, "o-", markersize=3, label=f"{label}: {grows}"
            )
    last.set(
        title="kept for gradients", xlabel="share of the largest value", ylabel="MiB", yscale="log"
    )
    last.legend(fontsize=6)
    last.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--figure")
    options = parser.parse_args()
    torch.manual_seed(0)
    nets = [ResNet20().to(timing.device()).eval() for _ in range(5)]
    found, rows = [], []
    for label, grows, values, make in lines(nets):
        passes, kept = measured(nets, values, make, options.rounds)
        found.append((label, grows, values, passes, kept))
        slope, start, explained = fitted(values, passes)
        told = " ".join(f"{p:.1f}" for p in passes)
        memory = " ".join(f"{k:.0f}" for k in kept)
        rows.append(
            (
                label,
                f"{grows} {values}",
                told,
                f"{slope:.2f}",
                f"{start:.1f}",
                f"{explained:.3f}",
                memory,
            )
        )
    columns = ("", "grows", "passes of 32 images", "slope", "start", "R2", "MiB kept")
    timing.printed(f"medians of {options.rounds}", columns, rows)
    if options.figure:
        drawn(found, options.figure)


if __name__ == "__main__":
    main()
