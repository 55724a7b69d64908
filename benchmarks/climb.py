"""Attacks on randomized ensembles side by side: what they leave, and what they cost.

    for s in 0 1 2 3 4; do
        lightning-rob fit --config dverge_digits --seed_everything=$s --trainer.logger.name=dverge
    done
    python benchmarks/climb.py logs/dverge/version_*/checkpoints/last.ckpt
    python benchmarks/climb.py benchmarks/papers/checkpoints/*linf.ckpt --data cifar10

Attacks the first digits within linf 0.1 or l2 1.0, those of MNIST within linf 0.2 or l2 2.0, and
photographs of all classes within the paper's radii. Prints a Markdown table for each checkpoint:
expected accuracy, the paired difference to the climb with its 95 % t interval over images, passes
and CPU seconds. Of several checkpoints, trainings of one recipe, a last table has the means with
95 % t intervals over the trainings.
"""

import argparse
import time

import torch

from lightning_rob import ARC, PGD, Ensemble, LatticeClimber, OnMember, Strongest, Threat, load
from lightning_rob.attacks.arc import expected_accuracy
from lightning_rob.data import MNIST, Digits5k, Images
from lightning_rob.metrics import student

RADII = {
    "digits": {"linf": 0.1, "l2": 1.0},
    "mnist": {"linf": 0.2, "l2": 2.0},
    "cifar10": {"linf": "8/255", "l2": "128/255"},
}


def attacks(threat):
    pgd = PGD(threat, 20, threat.eps / 4, random_start=False)
    radii = [ARC(threat, 20, threat.eps / share, early_stop=True) for share in (1, 2, 4, 8)]
    first = Strongest((pgd, OnMember(pgd, 0), radii[0], radii[2]))
    return {
        "adaptive PGD": pgd,
        **{f"ARC, eta = eps / {share}": a for share, a in zip((1, 2, 4, 8), radii, strict=True)},
        "ARC from four attacks": ARC(threat, 20, threat.eps / 8, None, False, first, True),
        "climb": LatticeClimber(threat),
    }


def counted(nets):
    """Count the images of forward and backward passes through some networks."""
    passes = [0]

    def forward(net, inputs, logits):
        passes[0] += len(logits)
        if logits.requires_grad:
            logits.register_hook(lambda g: passes.__setitem__(0, passes[0] + len(g)))

    for net in nets:
        net.register_forward_hook(forward)
    return passes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--data", choices=["digits", "mnist", "cifar10"], default="digits")
    parser.add_argument("--root", default="cifar10", help="folder of CIFAR-10 or MNIST")
    parser.add_argument("--norm", choices=["linf", "l2"], default="linf")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--steps", type=int, nargs="+", help="of the climb; then no other attack")
    parser.add_argument("--equal", action="store_true", help="make the members equally probable")
    options = parser.parse_args()
    photographs = options.data == "cifar10"
    if photographs:
        data = Images(options.root, resize=32, crop=32)
    else:
        data = Digits5k() if options.data == "digits" else MNIST(options.root)
    data.prepare_data()
    data.setup("test")
    samples = data.parts["test"]
    every = len(samples) // options.images if photographs else 1
    chosen = [samples[every * i] for i in range(options.images)]
    x, y = torch.stack([one[0] for one in chosen]), torch.tensor([one[1] for one in chosen])
    trainings = []
    for path in options.checkpoints:
        threat = Threat(options.norm, RADII[options.data][options.norm])
        defense = load(path)
        if options.equal:
            defense = Ensemble(defense.members)
        passes, rows = counted(defense.members), {"clean": (x, 0, 0.0)}
        tried = attacks(threat)
        if options.steps:
            longer = {f"climb, {n} steps": LatticeClimber(threat, n) for n in options.steps}
            tried = {"climb": tried["climb"], **longer}
        for name, attack in tried.items():
            passes[0], begin = 0, time.process_time()
            x_adv = attack(defense, x, y, torch.Generator().manual_seed(0))
            rows[name] = x_adv, passes[0] / len(x), time.process_time() - begin
        scores = {
            name: expected_accuracy(defense.members, defense.weights, z, y).double()
            for name, (z, *_) in rows.items()
        }
        gaps = {name: (score - scores["climb"]).tolist() for name, score in scores.items()}
        costs = {name: cost for name, (_, *cost) in rows.items()}
        print(f"\n{path}, {len(x)} images, {threat}\n")
        table({n: [score.mean()] for n, score in scores.items()}, gaps, costs)
        trainings.append((scores, costs))
    if len(trainings) > 1:
        means = {n: [scores[n].mean() for scores, _ in trainings] for n in trainings[0][0]}
        gaps = {
            n: [(a - b).item() for a, b in zip(of, means["climb"], strict=True)]
            for n, of in means.items()
        }
        costs = {n: torch.tensor([c[n] for _, c in trainings]).mean(0).tolist() for n in means}
        print(f"\n{len(trainings)} trainings, {len(x)} images each, {threat}\n")
        table(means, gaps, costs)


def table(accuracies, gaps, costs):
    """Print means in per cent, with 95 % t intervals where there are several values."""
    print("| attack | accuracy | minus climb | passes | CPU s |\n|---|---|---|---|---|")
    for name, found in accuracies.items():
        cells = [interval(found, ""), interval(gaps[name], "+")]
        count, seconds = costs[name]
        print(f"| {name} | {' | '.join(cells)} | {count:.0f} | {seconds:.1f} |", flush=True)


def interval(values, sign):
    values = [100 * float(value) for value in values]
    mean = f"{sum(values) / len(values):{sign}.1f}"
    if len(values) == 1 or min(values) == max(values):
        return mean
    low, high = student(values)
    return f"{mean} [{low:{sign}.1f}, {high:{sign}.1f}]"


if __name__ == "__main__":
    main()
