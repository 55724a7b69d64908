"""How often the verdict on robust overfitting errs: simulated validations, 10 minutes.

    python benchmarks/overfitting.py

Simulated: each image has a margin, a part of which moves from epoch to epoch with correlation rho;
it is right where the margin is positive. "naive" compares the epoch that is best on all images with
the last one on the same images; "half" chooses on the even images and compares on the odd ones;
"pooled" takes the differences of both halves as independent, at 95 %; "ours" is `Overfitting`.
"""

import argparse
from itertools import product

import numpy as np
import torch
from scipy.stats import norm

from lightning_rob.evaluation.overfitting import EpochScores, Overfitting, better
from lightning_rob.metrics import paired, wilson

MOVING = 0.3  # share of a margin's variance that moves between epochs


def validations(rng, accuracies, n, rho):
    """Scores [epochs, n] of networks with these accuracies."""
    fixed, moving = rng.standard_normal(n), rng.standard_normal(n)
    rows = []
    for accuracy in accuracies:
        rows.append(np.sqrt(1 - MOVING) * fixed + np.sqrt(MOVING) * moving < norm.ppf(accuracy))
        moving = rho * moving + np.sqrt(1 - rho**2) * rng.standard_normal(n)
    return torch.tensor(np.array(rows)).float()


def ours(scores):
    best = ()
    for epoch, val in enumerate(scores):
        last = EpochScores(epoch, 0, val)
        best = better(best, last)
    return Overfitting.of(best, last)


def verdicts(scores):
    """Method -> the epochs that were compared with the last one, and the interval of the change."""
    top, even, odd = (int(scores[:, part].mean(1).argmax()) for part in PARTS)
    last = scores[-1]
    mixed = scores[even].clone()
    mixed[::2] = scores[odd][::2]
    found = ours(scores)
    return {
        "naive": ((top, top), paired(scores[top], last).interval),
        "half": ((even, even), paired(scores[even][1::2], last[1::2]).interval),
        "pooled": ((even, odd), paired(mixed, last).interval),
        "ours": (found.best, found.val[1:]),
    }


PARTS = (slice(None), slice(0, None, 2), slice(1, None, 2))


def simulate(repetitions):
    rng = np.random.default_rng(0)
    print("| true fall | images | epochs | rho | naive | half | pooled | ours |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    settings = list(product((0.0,), (200, 1000), (2, 5, 30), (0.0, 0.9)))
    settings += product((0.03, 0.06), (200, 1000), (30,), (0.0, 0.9))
    for fall, n, epochs, rho in settings:
        accuracies = np.full(epochs, 0.5)
        if fall:
            rise = np.linspace(0.4, 0.5, epochs // 3)
            accuracies = np.append(rise, np.linspace(0.5, 0.5 - fall, epochs - len(rise)))
        fell, covered = {}, {}
        for _ in range(repetitions):
            scores = validations(rng, accuracies, n, rho)
            for name, (chosen, (low, high)) in verdicts(scores).items():
                truth = accuracies[-1] - accuracies[list(chosen)].mean()
                fell.setdefault(name, []).append(high < 0)
                covered.setdefault(name, []).append(low <= truth + 1e-9 and truth <= high + 1e-9)
        cells = [f"{100 * np.mean(fell[k]):.1f} / {100 * np.mean(covered[k]):.1f}" for k in fell]
        setting = [f"{100 * fall:g} points", str(n), str(epochs), str(rho)]
        print("|", " | ".join([*setting, *cells]), "|", flush=True)
    low, high = wilson(0.025, repetitions)
    print(f"\nfell / covered in % of {repetitions}; 2.5 % is drawn as {low:.1%} to {high:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=1000)
    torch.set_num_threads(1)
    simulate(parser.parse_args().repetitions)
