"""The active test on the thirteen defenses: the attack of each paper, and the one by hand.

    python benchmarks/broken/power.py --plot docs/images/power.png   # half an hour on an idle core

Digits within linf 0.15, the networks of `table.py`. A planted defense has other classes than the
digits, so both attacks climb its margin. All else is theirs: what they leave out of the defense,
what they pass gradients through, noise, draws, steps and starts. The paper's attack does not look
at rejection, as in the papers. The table has the share of planted images that an attack finds, in
percent with its 95 % interval, and the same of random search; "inverted" is the test of a defense
that rejects, in which it accepts exactly what it rejects otherwise.
"""

import argparse
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from broken.parts import EPS, THREAT, digits, trained
from broken.tramer import TRAMER

from lightning_rob import PGD, Attack, Defense, Single, Threat
from lightning_rob.audit import power
from lightning_rob.defenses.rejection import unwrapped
from lightning_rob.plots import COLORS, blank, save
from lightning_rob.rules import mean_logits

CASES = {case.__name__: case for case in TRAMER}
POINTS = 240  # inside each ball: with 48 random search finds the planted images too
# Other than PGD of 20 steps of an eighth of the radius: steps, step size.
SCHEDULES = {"MaxMahalanobis": (10, EPS / 4), "Diversity": (10, EPS / 10)}


class Drawn(Defense):
    """A network that draws its noise itself, and predicts by the mean of ten draws."""

    def __init__(self, net):
        super().__init__(torch.full((10,), 0.1), mean_logits)
        self.net = net

    @property
    def foldable_networks(self):
        return [self.net]

    def logits(self, x, generator=None):
        return torch.stack([self.net(x) for _ in self.weights])


class Accepted(nn.Module):
    """A defense without its class of rejection."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)[:, :10]


@dataclass(frozen=True)
class Weak(Attack):
    """The attack of a defense's paper."""

    threat: Threat

    def perturb(self, defense, x, y, generator):
        net = unwrapped(defense).net
        steps, step = SCHEDULES.get(type(net).__name__, (20, EPS / 8))
        with net.seen_as("paper"):
            return PGD(self.threat, steps, step)(Single(Accepted(net)), x, y, generator)


@dataclass(frozen=True)
class Hand(Attack):
    """The attack by hand; runs towards five classes are as many starts, as two classes are left."""

    threat: Threat

    def perturb(self, defense, x, y, generator):
        return unwrapped(defense).net.climb_margin(x, y)


def cell(found):
    low, high = found.interval
    verdict = {True: "passed", False: "failed", None: found.why}[found.passed]
    rates = f"{100 * found.rate:.0f} [{100 * low:.0f}, {100 * high:.0f}]"
    return f"{rates} of {found.images}, random {100 * found.random_rate:.0f}: {verdict}"


def picture(rows):
    """Draw the share that both attacks find, of a defense that rejects in the harder test."""
    figure = blank(6.4, 4.2)
    axes = figure.subplots()
    names = list(dict.fromkeys(name for name, _, _ in rows))
    axes.axvline(95, color="0.6", lw=1, ls="--")
    for name, kind, found in rows:
        tests = [one for one in (found, found.inverted) if one and one.images]
        if not tests:
            continue
        one = min(tests, key=lambda test: test.rate)
        rate, low, high = (100 * part for part in (one.rate, *one.interval))
        place = names.index(name) + (-0.15 if kind == "weak" else 0.15)
        color, marker = (COLORS[1], "v") if kind == "weak" else (COLORS[0], "o")
        axes.errorbar(rate, place, xerr=[[rate - low], [high - rate]], fmt=marker, color=color)
        axes.plot(100 * one.random_rate, place, marker="x", color="0.5", ls="")
    entries = [((COLORS[1], "v"), "the paper's attack"), ((COLORS[0], "o"), "the attack by hand")]
    for (color, marker), text in (*entries, (("0.5", "x"), "random search")):
        axes.plot([], [], color=color, marker=marker, ls="", label=text)
    axes.set(yticks=range(len(names)), yticklabels=names, xlim=(-3, 103))
    axes.set_xlabel("planted images found, % (95 % interval; 95 % passes)")
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    x, y = digits("test", options.images)
    print("| defense | attack | planted images found | inverted |\n|---|---|---|---|")
    rows = []
    for name in options.only:
        net = trained(CASES[name])
        defense = Drawn(net) if net.random else net.defense()
        for attack in (Weak(THREAT), Hand(THREAT)):
            torch.manual_seed(0)
            found = power(defense, attack, x, y, points=None if net.random else POINTS)
            inverted = cell(found.inverted) if found.inverted else ""
            kind = type(attack).__name__.lower()
            rows.append((name, kind, found))
            print(f"| {name} | {kind} | {cell(found)} | {inverted} |", flush=True)
        if options.plot:
            save(picture(rows), options.plot)


if __name__ == "__main__":
    main()
