"""Which loss fools an ensemble that averages its members or lets them vote, at equal passes.

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/ensemble_losses.py CHECKPOINT...

Each checkpoint holds an ensemble of digits; those of folders that differ in the number at their end
are trainings of one method. Its members predict by each rule in turn, and APGD climbs each loss on
the same images, within the same passes. A cell is the accuracy left in per cent, the mean over the
trainings. `Auto` and its difference to the expected loss have a 95 % t interval over them. With
--scale the members' logits are that many times as large.
"""

import argparse
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from torch.nn import Module

from lightning_rob import Ensemble, Threat, evaluate, load, objectives
from lightning_rob.attacks import APGD, Auto, Budgeted
from lightning_rob.data import Digits5k
from lightning_rob.metrics.intervals import student
from lightning_rob.rules import VOTING_RULES, random_member

LOSSES = [
    *("expected_ce", "ce_of_mean_probs", "ce_of_mean_logits", "linear"),
    *("ce_of_capped_probs", "margin_of_capped_probs", "ce_of_votes", "margin_of_votes"),
    "margin_of_two_votes",
]


class Scaled(Module):
    """A network whose logits are scaled, which changes its confidence, not its vote."""

    def __init__(self, net, scale):
        super().__init__()
        self.net, self.scale = net, scale

    def forward(self, x):
        return self.scale * self.net(x)


def interval(values):
    if len(values) < 2:
        return ""
    low, high = student(values)
    return f" [{100 * low:.1f}, {100 * high:.1f}]"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--passes", type=int, default=300)
    parser.add_argument("--eps", type=float, default=0.1)
    parser.add_argument("--scale", type=float, default=1)
    options = parser.parse_args()
    test, threat = Digits5k().source(train=False), Threat("linf", options.eps)
    batch = test.images[: options.images] / 255, test.labels[: options.images]
    attacks = {
        name: Budgeted(APGD(threat, objective=getattr(objectives, name)), options.passes)
        for name in LOSSES
    } | {"Auto": Auto(threat, options.passes)}
    found = defaultdict(lambda: defaultdict(list))  # method and rule -> attack -> trainings
    for path in options.checkpoints:
        members = [Scaled(net, options.scale) for net in load(path).classifiers]
        for rule in VOTING_RULES.values():
            if rule is random_member:
                continue
            result = evaluate(Ensemble(members, rule=rule), attacks, [batch], progress=False)
            method = re.sub(r"_\d+$", "", path.parent.name), rule.__name__
            for name in ("clean", *attacks):
                found[method][name].append(result.accuracy(name))
            print(path, rule.__name__, flush=True)
    columns = ("clean", *attacks)
    print(f"\n| method | rule | trainings | {' | '.join(columns)} | minus expected_ce |")
    print("|---|---|--:" + "|--:" * (len(columns) + 1) + "|")
    for (method, rule), values in found.items():
        cells = [f"{100 * fmean(values[name]):.1f}" for name in columns]
        cells[-1] += interval(values["Auto"])
        less = [a - b for a, b in zip(values["Auto"], values["expected_ce"], strict=True)]
        cells.append(f"{100 * fmean(less):+.1f}{interval(less)}")
        print(f"| {method} | `{rule}` | {len(less)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
