"""How often the verdict on robust overfitting errs, and what it says of a real training.

    python benchmarks/overfitting.py                # simulated validations, 10 minutes
    python benchmarks/overfitting.py --fit          # digits, 5 minutes
    python benchmarks/overfitting.py --fit --train 500 --epochs 40

Simulated: each image has a margin, a part of which moves from epoch to epoch with correlation rho;
it is right where the margin is positive. "naive" compares the epoch that is best on all images with
the last one on the same images; "half" chooses on the even images and compares on the odd ones;
"pooled" takes the differences of both halves as independent, at 95 %; "ours" is `Overfitting`.
"""

import argparse
import logging
from functools import partial
from itertools import product
from tempfile import mkdtemp

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


def ours(scores, train=None):
    best = ()
    for epoch, val in enumerate(scores):
        last = EpochScores(epoch, 0, val, None if train is None else train[epoch])
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


def fit(train, epochs, seeds, width):
    from lightning.pytorch import Trainer, seed_everything

    from lightning_rob import PGD, AdversarialTraining, RobustCheckpoint, RobustEval, Threat
    from lightning_rob.data import Digits5k
    from lightning_rob.nets import SmallCNN

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    threat = Threat("linf", 0.2)
    for seed in range(seeds):
        seed_everything(seed, verbose=False)
        module = AdversarialTraining(
            partial(SmallCNN, width=width),
            PGD(threat, 5, 0.06, random_start=True),
            optimizer=lambda weights: torch.optim.Adam(weights, 0.002),
        )
        attacks = {"pgd": PGD(threat, 10, 0.05)}
        evaluation = RobustEval(attacks, every_n_epochs=4, train_images=True)
        folder = mkdtemp()
        checkpoint = RobustCheckpoint(dirpath=folder)
        trainer = Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            callbacks=[evaluation, checkpoint],
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = Digits5k(
            batch_size=64, eval_batch_size=250, limit_train=train, augment=[], seed=seed
        )
        trainer.fit(module, data)
        gap = [float(one.accuracy("pgd")) for one in (evaluation.train_result, evaluation.result)]
        print(
            f"seed {seed}: at the end {gap[0]:.1%} on training, {gap[1]:.1%} on validation images"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--train", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--width", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.fit:
        fit(args.train, args.epochs, args.seeds, args.width)
    else:
        simulate(args.repetitions)
