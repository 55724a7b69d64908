"""The active test on the thirteen defenses: the attack of each paper, and the one by hand.

    python benchmarks/broken/power.py                    # a quarter of an hour on an idle core

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

from broken.parts import EPS, THREAT, digits
from broken.tramer import TRAMER

from lightning_rob import PGD, Attack, Defense, Single, Threat
from lightning_rob.audit import power
from lightning_rob.defenses.rejection import unwrapped
from lightning_rob.rules import mean_logits

CASES = {case.__name__: case for case in TRAMER}
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--images", type=int, default=50)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    x, y = digits("test", options.images)
    print("| defense | attack | planted images found | inverted |\n|---|---|---|---|")
    for name in options.only:
        net = CASES[name]().load()
        defense = Drawn(net) if net.random else net.defense()
        for attack in (Weak(THREAT), Hand(THREAT)):
            torch.manual_seed(0)
            found = power(defense, attack, x, y)
            inverted = cell(found.inverted) if found.inverted else ""
            kind = type(attack).__name__.lower()
            print(f"| {name} | {kind} | {cell(found)} | {inverted} |", flush=True)


if __name__ == "__main__":
    main()
