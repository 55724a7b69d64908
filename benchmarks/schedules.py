"""Which attacks to run within a number of passes: candidate schedules at equal cost.

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/schedules.py

SmallCNNs are trained adversarially on Digits5k, where schedules are chosen, and on Patches10, where
the choice is checked; with another `--seed` on other crops. The table is the accuracy that a
schedule leaves on the same images, at most `passes` forward and backward passes an image and
network; random defenses predict each image ten times.
"""

import argparse
import time
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial

import torch

from lightning_rob import load
from lightning_rob.attacks import (
    APGD,
    ARC,
    FAB,
    GMSA,
    PGD,
    TAA,
    AutoAttack,
    Budgeted,
    OnDifferentiable,
    Square,
    Strongest,
    TransferFromStatic,
)
from lightning_rob.attacks.auto import AGGMO, Auto
from lightning_rob.attacks.contexts import evaluating
from lightning_rob.data import Digits5k, Patches10
from lightning_rob.defenses import DENT, Ensemble, RandomTransforms, Single, TransformEnsemble
from lightning_rob.nets import SmallCNN
from lightning_rob.objectives import (
    classification_loss,
    expected_dlr,
    expected_margin,
    expected_probability_margin,
    linear,
    losses_of_rule,
)
from lightning_rob.randomness import Streams
from lightning_rob.rules import mean_probs
from lightning_rob.threat import Threat

DATA = {  # name -> data, channels, threat
    "digits": (Digits5k, 1, Threat("linf", 0.2)),
    "patches": (Patches10, 3, Threat("linf", 8 / 255)),
}


def shares(passes, *parts):
    """Return the attacks in turn, each with its share of the passes."""
    free = passes - 3 * len(parts)  # Strongest evaluates each, on up to three networks
    return Strongest(tuple(Budgeted(attack, int(share * free)) for share, attack in parts))


def alone(passes, attacks):
    """Return each attack with all of the passes."""
    return {name: Budgeted(attack, passes) for name, attack in attacks.items()}


def for_network(threat, passes):
    """Return candidate schedules for a single network."""
    ce, targeted = APGD(threat), APGD(threat, targets=9)
    dlr, margin, pma = (
        APGD(threat, objective=objective)
        for objective in (expected_dlr, expected_margin, expected_probability_margin)
    )
    square, pgd = Square(threat), PGD(threat, 1, threat.eps / 10)
    apgd = {"cross-entropy": ce, "DLR": dlr, "margin": margin, "PMA": pma}
    single = {"PGD": pgd} | {f"APGD, {loss}": attack for loss, attack in apgd.items()}
    return alone(passes, single) | {
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
    single = {"PGD": pgd, "APGD, cross-entropy": ce, "APGD, margin": margin}
    single |= {"ARC": large, "ARC, eps / 4": small}
    return alone(passes, single) | {
        "ARC, two radii": shares(passes, (0.5, large), (0.5, small)),
        "1/2 cross-entropy, 1/2 ARC, eps / 4": shares(passes, (0.5, ce), (0.5, small)),
        "1/2 margin, 1/2 ARC, eps / 4": shares(passes, (0.5, margin), (0.5, small)),
    }


def for_random(threat, passes):
    """Return candidate schedules for a defense that transforms images at random."""
    pgd, apgd = PGD(threat, 1, threat.eps / 10), APGD(threat)
    smooth = replace(pgd, objective=linear, momentum=AGGMO)
    single = {
        "PGD, draws of a prediction": pgd,
        "PGD, 10 draws": replace(pgd, draws=10),
        "PGD, 3 draws": replace(pgd, draws=3),
        "PGD, linear, 10 draws": replace(smooth, draws=10, momentum=(0.0,)),
        "momentum 0.9, linear, 10 draws": replace(smooth, draws=10, momentum=(0.9,)),
        "APGD, margin, 10 draws": replace(apgd, objective=expected_margin, draws=10),
    }
    single |= {f"AggMo, linear, {n} draws": replace(smooth, draws=n) for n in (1, 2, 3, 10)}
    return alone(passes, single)


def for_transformed(threat, passes):
    """Return candidate schedules for an ensemble behind transformations."""
    pgd, rule = PGD(threat, 1, threat.eps / 10), losses_of_rule(mean_probs)[1]
    margins = {"margin of the rule": rule, "expected margin": expected_margin}
    return {
        "PGD": OnDifferentiable(Budgeted(pgd, passes)),
        "PGD, all members": OnDifferentiable(Budgeted(pgd, passes), straight_through=True),
        "TAA": TAA(Budgeted(pgd, passes // 3 - 3)),
        "Square": Budgeted(Square(threat), passes),
    } | {
        f"APGD, {name}": OnDifferentiable(
            Budgeted(APGD(threat, objective=margin, early_stop=False), passes)
        )
        for name, margin in margins.items()
    }


def for_transductive(threat, passes):
    """Return candidate schedules for a defense that adapts; the first three do not rehearse."""
    pgd = PGD(threat, 1, threat.eps / 10, keep_best=True)
    apgd = APGD(threat, early_stop=False)
    margin = replace(apgd, objective=expected_margin)
    inner = {"PGD": pgd, "APGD": apgd, "APGD, margin": margin}
    static = {
        f"{name} on the static network": TransferFromStatic(Budgeted(attack, passes))
        for name, attack in inner.items()
    }
    return static | {
        f"GMSA of {name}, {rounds} rounds": GMSA(Budgeted(attack, passes // rounds), rounds=rounds)
        for rounds in (1, 2, 3, 5)
        for name, attack in inner.items()
    }


def entropy(nets, threat):
    return DENT(nets[0], 10, partial(torch.optim.Adam, lr=0.01), diversity=0)


def noisy(nets, threat):
    noise = {"GaussianNoise": {"alpha": threat.eps}, "UniformNoise": {"alpha": threat.eps}}
    return RandomTransforms(nets[0], noise, 2, 10)


def transformed(nets, threat):
    return TransformEnsemble(nets, ["filter_median", "shift_left", "shift_up"])


def quantized(nets, threat):
    return TransformEnsemble(nets, ["filter_median", "shift_left", "quantize_4_colors"])


KINDS = {  # name -> networks, defense, candidates
    "single": (1, lambda nets, threat: Single(nets[0]), for_network),
    "randomized": (3, lambda nets, threat: Ensemble(nets), for_ensemble),
    "random": (1, noisy, for_random),
    "transformed": (3, transformed, for_transformed),
    "quantized": (3, quantized, for_transformed),
    "transductive": (1, lambda nets, threat: DENT(nets[0]), for_transductive),
    "entropy": (1, entropy, for_transductive),
}


def arrays(kind, train, count, seed):
    options = {"val_size": 0} if kind is Digits5k else {}
    source = kind(split_seed=seed, **options).source(train)
    rows = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[:count].tolist()
    x, y = zip(*(source[row] for row in rows), strict=True)
    return torch.stack(x), torch.tensor(y)


def trained(width, channels, threat, x, y, epochs, seed):
    torch.manual_seed(seed)
    net = SmallCNN(channels=channels, width=width)
    attack, optimizer = PGD(threat, 3, threat.eps / 2), torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            loss = classification_loss(net(attack(Single(net), x[part], y[part])), y[part])
            loss.backward()
            optimizer.step()
    return net.eval().requires_grad_(False)


@torch.no_grad()
def percent_right(defense, x, y, draws=10):
    """Return the accuracy after adaptation to these images, mean over draws of a random defense."""
    found = []
    for seed in range(draws):
        generator = Streams.from_index(torch.arange(len(x)), 1000 + seed)
        adapted = defense.adapt(x, torch.Generator().manual_seed(seed))
        with evaluating(adapted) as adapted:
            found.append(adapted(x, generator).gather(1, y[:, None]).mean())
    return f"{100 * float(torch.stack(found).mean()):.1f}"


def report(title, passes, attack, defense, x, y):
    began = time.process_time()
    try:
        x_adv = attack(defense, x, y, Streams.from_index(torch.arange(len(x)), 0))
    except ValueError as error:
        print(f"| {title} | {passes} | {error} |", flush=True)
        return
    seconds = time.process_time() - began
    print(
        f"| {title} | {passes} | {percent_right(defense, x_adv, y)} | {seconds:.1f} s |", flush=True
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--width", type=int, default=16, help="of the networks")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, and of Patches10")
    parser.add_argument("--passes", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--data", nargs="+", default=list(DATA))
    parser.add_argument("--kinds", nargs="+", default=["single", "randomized"], choices=KINDS)
    parser.add_argument(
        "--only", nargs="+", default=["*"], help="names of schedules, with wildcards"
    )
    parser.add_argument("--eps", type=float, help="another radius")
    parser.add_argument("--load", help="attack this network, such as zoo:digits_standard")
    options = parser.parse_args()
    for name in options.data:
        kind, channels, threat = DATA[name]
        threat = replace(threat, eps=options.eps or threat.eps)
        x, y = arrays(kind, True, options.train, options.seed)
        seeds = range(options.seed, options.seed + max(KINDS[of][0] for of in options.kinds))
        nets = (
            [load(options.load).net]
            if options.load
            else [
                trained(options.width, channels, threat, x, y, options.epochs, seed)
                for seed in seeds
            ]
        )
        x, y = arrays(kind, False, options.images, options.seed)
        for of in options.kinds:
            _, build, candidates = KINDS[of]
            defense = build(nets, threat)
            print(f"\n{name}, {of}, {threat}, clean {percent_right(defense, x, y)} %", flush=True)
            for passes in options.passes:
                each = passes * len(defense.weights)
                auto = Auto(threat, each).schedule(defense)  # no search
                for title, attack in (candidates(threat, each) | {"schedule": auto}).items():
                    if any(fnmatch(title, chosen) for chosen in options.only):
                        report(title, passes, attack, defense, x, y)


if __name__ == "__main__":
    main()
