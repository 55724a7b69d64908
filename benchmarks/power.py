"""The active test on honest and on broken digit networks: rates, random search, and its cost.

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/power.py

Tests the default attack of the audit, and the attacks made for the kind of defense, on networks of
the package (28x28 digits, linf 0.1) and on defenses of them, 100 test images; with --demo on the
checkpoint of the demo alone (photographs, linf 8/255). "cost" is the CPU
time of the test over that of the attack alone on the same images, the least of --rounds each.
"""

import argparse
import time
from dataclasses import replace

import torch
from torch import nn

from lightning_rob import Ensemble, RandomTransforms, Single, Threat, load
from lightning_rob.audit import power
from lightning_rob.data import Digits5k, Patches10
from lightning_rob.evaluation.suites import suite_for
from lightning_rob.rules import mean_probs

IMAGES, THREAT = 100, Threat("linf", 0.1)


class Rounded(nn.Module):
    """A network of images with nine grey levels, which have no gradient."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net((8 * x).round() / 8)


def least(work, rounds):
    """Return what work returns, and the least CPU seconds that it takes."""
    taken = []
    for _ in range(rounds):
        began = time.process_time()
        found = work()
        taken.append(time.process_time() - began)
    return found, min(taken)


def demo(checkpoint):
    """Test three attacks on the ensemble of the demo."""
    threat, samples, defense = Threat("linf", "8/255"), Patches10().source(False), load(checkpoint)
    x, y = zip(*(samples[i] for i in range(IMAGES)), strict=True)
    attacks = suite_for(defense, threat).attacks
    for name in ("pgd", "arc", "climb"):
        print(f"{name}: {power(defense, attacks[name], torch.stack(x), torch.tensor(y))}")


def main(rounds):
    test = Digits5k().source(train=False)
    x, y = test.images[:IMAGES] / 255, test.labels[:IMAGES]
    standard, robust = (load(f"zoo:digits_{kind}").net for kind in ("standard", "robust"))
    noise = {"GaussianNoise": {"alpha": 0.05}}
    honest = {
        "standard": Single(standard),
        "adversarially trained": Single(robust),
        "ensemble, mean probabilities": Ensemble([standard, robust], rule=mean_probs),
        "randomized ensemble": Ensemble([standard, robust]),
        "random noise": RandomTransforms(robust, noise, size=1, draws=5),
    }
    pgd = suite_for(honest["standard"], THREAT).attacks["pgd"]
    tiny = replace(pgd, step_size=THREAT.eps / 200)
    cases = []
    for name, defense in honest.items():
        suite = suite_for(defense, THREAT)
        adaptive = () if suite.kind == "random" else suite.adaptive  # EoT takes minutes
        names = [suite.default, *adaptive]
        cases += [(name, defense, attack, suite.attacks[attack]) for attack in names]
    cases += [
        ("rounded input", Single(Rounded(standard)), "pgd", pgd),
        ("standard", honest["standard"], "pgd, steps of eps / 200", tiny),
        ("adversarially trained", honest["adversarially trained"], "pgd, steps of eps / 200", tiny),
    ]
    print(f"{IMAGES} images, {THREAT}")
    for name, defense, attack_name, attack in cases:
        generator = torch.Generator().manual_seed(0)
        _, alone = least(lambda: attack(defense, x, y, generator), rounds)  # noqa: B023
        found, seconds = least(lambda: power(defense, attack, x, y), rounds)  # noqa: B023
        print(f"{name}, {attack_name}, cost {seconds / alone:.2f}: {found}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--demo", help="checkpoint of the demo")
    options = parser.parse_args()
    demo(options.demo) if options.demo else main(options.rounds)
