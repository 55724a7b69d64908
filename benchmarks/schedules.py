"""Which attacks to run within a number of passes: candidate schedules at equal cost.

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/schedules.py

A SmallCNN and three of them as an ensemble are trained adversarially on Digits5k, where schedules
are chosen, and on Patches10, where the choice is checked. The table is the accuracy that a schedule
leaves on the same images, at most `passes` forward and backward passes an image and network.
"""

import argparse
import time

import torch

from lightning_rob.attacks import APGD, ARC, FAB, PGD, AutoAttack, Budgeted, Square, Strongest
from lightning_rob.data import Digits5k, Patches10
from lightning_rob.defenses import Ensemble, Single
from lightning_rob.nets import SmallCNN
from lightning_rob.objectives import (
    classification_loss,
    expected_dlr,
    expected_margin,
    expected_probability_margin,
)
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat

DATA = {  # name -> data, channels, threat
    "digits": (Digits5k, 1, Threat("linf", 0.2)),
    "patches": (Patches10, 3, Threat("linf", 8 / 255)),
}


def shares(passes, *parts):
    """Return the attacks in turn, each with its share of the passes."""
    free = passes - 3 * len(parts)  # Strongest evaluates each, on up to three networks
    return Strongest(tuple(Budgeted(attack, int(share * free)) for share, attack in parts))


def for_network(threat, passes):
    """Return candidate schedules for a single network."""
    ce, targeted = APGD(threat), APGD(threat, targets=9)
    dlr, margin, pma = (
        APGD(threat, objective=objective)
        for objective in (expected_dlr, expected_margin, expected_probability_margin)
    )
    square = Square(threat)
    return {
        "PGD": Budgeted(PGD(threat, 1, threat.eps / 10), passes),
        "APGD, cross-entropy": Budgeted(ce, passes),
        "APGD, DLR": Budgeted(dlr, passes),
        "APGD, margin": Budgeted(margin, passes),
        "APGD, PMA": Budgeted(pma, passes),
        "1/2 cross-entropy, 1/2 margin": shares(passes, (0.5, ce), (0.5, margin)),
        "1/2 cross-entropy, 1/2 PMA": shares(passes, (0.5, ce), (0.5, pma)),
        "APGD, nine targets": Budgeted(targeted, passes),
        "1/4 margin, 3/4 nine targets": shares(passes, (0.25, margin), (0.75, targeted)),
        "1/4 margin, 3/4 three targets": shares(
            passes, (0.25, margin), (0.75, APGD(threat, targets=3))
        ),
        "1/4 margin, 1/2 nine targets, 1/4 Square": shares(
            passes, (0.25, margin), (0.5, targeted), (0.25, square)
        ),
        "1/2 nine targets, 1/2 FAB": shares(passes, (0.5, targeted), (0.5, FAB(threat))),
        "AutoAttack": AutoAttack(threat, passes=passes),
    }


def for_ensemble(threat, passes):
    """Return candidate schedules for a randomized ensemble."""
    large, small = (ARC(threat, 1, radius, 4) for radius in (threat.eps, threat.eps / 4))
    pgd, ce = PGD(threat, 1, threat.eps / 10), APGD(threat, early_stop=False)
    margin = APGD(threat, objective=expected_margin, early_stop=False)
    return {
        "PGD": Budgeted(pgd, passes),
        "APGD, cross-entropy": Budgeted(ce, passes),
        "APGD, margin": Budgeted(margin, passes),
        "ARC": Budgeted(large, passes),
        "ARC, eps / 4": Budgeted(small, passes),
        "ARC, two radii": shares(passes, (0.5, large), (0.5, small)),
        "1/2 cross-entropy, 1/2 ARC, eps / 4": shares(passes, (0.5, ce), (0.5, small)),
        "1/2 margin, 1/2 ARC, eps / 4": shares(passes, (0.5, margin), (0.5, small)),
    }


def arrays(kind, train, count):
    data = kind(val_size=0) if kind is Digits5k else kind()
    source = data.source(train)
    rows = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[:count].tolist()
    x, y = zip(*(source[row] for row in rows), strict=True)
    return torch.stack(x), torch.tensor(y)


def trained(channels, threat, x, y, epochs, seed):
    torch.manual_seed(seed)
    net = SmallCNN(channels=channels)
    attack, optimizer = PGD(threat, 3, threat.eps / 2), torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            loss = classification_loss(net(attack(Single(net), x[part], y[part])), y[part])
            loss.backward()
            optimizer.step()
    return net.eval().requires_grad_(False)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--passes", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--data", nargs="+", default=list(DATA))
    parser.add_argument("--kinds", nargs="+", default=["single", "randomized"])
    options = parser.parse_args()
    for name in options.data:
        kind, channels, threat = DATA[name]
        x, y = arrays(kind, True, options.train)
        nets = 3 if "randomized" in options.kinds else 1
        nets = [trained(channels, threat, x, y, options.epochs, seed) for seed in range(nets)]
        x, y = arrays(kind, False, options.images)
        for of in options.kinds:
            defense = Single(nets[0]) if of == "single" else Ensemble(nets)
            candidates = for_network if of == "single" else for_ensemble
            clean = float(defense(x).gather(1, y[:, None]).mean())
            print(f"\n{name}, {of}, {threat}, clean {100 * clean:.1f} %", flush=True)
            for passes in options.passes:
                each = passes * len(defense.weights)
                for title, attack in candidates(threat, each).items():
                    began = time.process_time()
                    try:
                        x_adv = attack(defense, x, y, Streams.from_index(torch.arange(len(x)), 0))
                    except ValueError as error:
                        print(f"| {title} | {passes} | {error} |", flush=True)
                        continue
                    right = float(defense(x_adv).gather(1, y[:, None]).mean())
                    seconds = time.process_time() - began
                    print(
                        f"| {title} | {passes} | {100 * right:.1f} | {seconds:.1f} s |", flush=True
                    )


if __name__ == "__main__":
    main()
