"""URejectron against PGD, CW and brightness: the study of Fig. 1 of Chen et al. (ICLR 2022).

    OMP_WAIT_POLICY=PASSIVE python benchmarks/rejection.py --out rejection.png
    OMP_WAIT_POLICY=PASSIVE python benchmarks/rejection.py --data Patches10 --eps 8/255

A SmallCNN is trained on embedded images. In each setting x~ is the test images z, clean or
brighter, and behind them the same images attacked: on the classifier alone as in the paper, or by
GMSA, which trains discriminators of its own and attacks them together with the classifier. A
discriminator of training images against x~ is trained, with a new seed for each of --repeats. It
rejects images whose probability of being a test image is above the threshold. The table has the
mean at --tau, the figure all thresholds of the first repeat. The error is a share of all x~, as in
eq. 1, or of the accepted images with `--per prediction`, as in the authors' code. AUC measures how
well the discriminator separates the attacked images, and z, from held-out training images: 0.5 is
random.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
from figures import Setting, rejection
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy
from torchmetrics.functional.classification import binary_auroc
from tqdm import tqdm

from lightning_rob.attacks import CW, GMSA, PGD, CommonCorruption, PartialBatchAttack
from lightning_rob.data import Digits5k, Patches10
from lightning_rob.defenses import Single
from lightning_rob.defenses.urejectron import URejectron
from lightning_rob.metrics.selective import rejection_curves, selective_error
from lightning_rob.nets import SmallCNN
from lightning_rob.plots import save
from lightning_rob.randomness import derive_seed
from lightning_rob.threat import Threat
from lightning_rob.transforms.corruptions import Brightness

POOLS = {Digits5k: ("train", "val", "test"), Patches10: ("train",)}  # of one distribution each


def images(kind, seed):
    """Split one pool: 3500 training images, 500 held out and unused, 1000 test images."""
    data = kind(val_size=500)
    data.setup()
    rows = [data.parts[name][i] for name in POOLS[kind] for i in range(len(data.parts[name]))]
    x, y = torch.stack([row[0] for row in rows]), torch.tensor([int(row[1]) for row in rows])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return [(x[part], y[part]) for part in order.split([3500, 500, 1000])]


def trained(x, y, epochs):
    net = SmallCNN(channels=x.shape[1])
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
        schedule.step()
    return net.eval()


def attacks(options):
    threat = Threat("linf", options.eps)
    pgd = PGD(threat, steps=40, step_size=threat.eps / 8)
    gmsa = GMSA(PartialBatchAttack(replace(pgd, random_start=False, keep_best=True)), rounds=5)
    cw = CW(Threat("l2", 100), 100, 0.01, options.binary_steps, initial_const=1.0)
    brighter = CommonCorruption(Brightness(options.severity))
    return {
        f"PGD, {pgd.threat}": PartialBatchAttack(pgd),
        f"GMSA, {pgd.threat}": gmsa,
        "CW, l2": PartialBatchAttack(cw),
        f"brightness {options.severity}, PGD": PartialBatchAttack(pgd, natural=brighter),
    }


@torch.no_grad()
def auc(defense, held_out, x):
    scores = torch.cat([defense.scores(held_out), defense.scores(x)])
    return float(binary_auroc(scores, torch.arange(len(scores)) >= len(held_out)))


def shares(answers, y, z):
    """Return the accuracies on z and on the attacked images."""
    right = answers.gather(1, y[:, None])[:, 0]
    return [float(right[z].mean()), float(right[~z].mean())]


def played(defense, attack, x, y, held_out, options):
    """Return the mean row of numbers of a round and the curves of the first repeat."""
    x, y = torch.cat([x, x]), torch.cat([y, y])
    z, net = torch.arange(len(y)) < len(y) // 2, defense.base_model
    target = defense if attack.rehearses else net
    x_adv = attack(target, x, y, torch.Generator().manual_seed(options.seed))
    with torch.no_grad():
        answers = net(x_adv)
    wrong = 1 - answers.gather(1, y[:, None])[:, 0]
    rows, curves = [], None
    for repeat in range(options.repeats):
        final = defense.adapt(
            x_adv, torch.Generator().manual_seed(derive_seed(options.seed, repeat))
        )
        with torch.no_grad():
            errors = selective_error(final(x_adv), y, z, options.per)
            curves = curves or rejection_curves(final.scores(x_adv), wrong, z, per=options.per)
        attacked, natural = auc(final, held_out, x_adv[~z]), auc(final, held_out, x_adv[z])
        rows.append([*shares(answers, y, z), *map(float, errors), attacked, natural])
    distance = (x_adv - x)[~z].flatten(1).norm(dim=1).median()
    return [float(distance), *torch.tensor(rows).mean(0).tolist()], curves


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", choices=("Digits5k", "Patches10"), default="Digits5k")
    parser.add_argument("--eps", default="0.1", help="of PGD, in pixel units; 8/255 is accepted")
    parser.add_argument("--binary-steps", type=int, default=1, help="of CW, the paper has one")
    parser.add_argument("--severity", type=int, default=1)
    parser.add_argument("--tau", type=float, default=0.5)
    parser.add_argument("--per", choices=("image", "prediction"), default="image")
    parser.add_argument("--epochs", type=int, default=10, help="of the discriminator")
    parser.add_argument("--classifier-epochs", type=int, default=15)
    parser.add_argument("--source-size", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    kinds = ("PGD", "GMSA", "CW", "brightness")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="settings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the figure; none without it")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    began = time.perf_counter()
    kind = {"Digits5k": Digits5k, "Patches10": Patches10}[options.data]
    source, (held_out, _), (x, y) = images(kind, options.seed)
    net = trained(*source, options.classifier_epochs)
    defense = URejectron(
        net, options.tau, epochs=options.epochs, source_size=options.source_size, source=source
    )
    with torch.no_grad():
        clean = Single(net)(x).gather(1, y[:, None]).mean()
    table = Table(
        title=f"{options.data}, threshold {options.tau:g}, {len(source[0])} training images, "
        f"classifier {float(clean):.3f} right on {len(x)} test images, error per {options.per}"
    )
    names = ("", "median l2", "right on z", "on attacked", "rejected z", "rejected x~", "error")
    for column in (*names, "AUC attacked", "AUC z"):
        table.add_column(column, justify="right")
    panels, limits = [], torch.linspace(0, 1, 100).tolist()
    chosen = {k: v for k, v in attacks(options).items() if k.startswith(tuple(options.only))}
    for label, attack in tqdm(chosen.items(), leave=False):
        row, (of_z, of_all, error) = played(defense, attack, x, y, held_out, options)
        table.add_row(label, *(f"{value:.3f}" for value in row))
        panels.append(Setting(label, limits, of_all.tolist(), of_z.tolist(), error.tolist()))
    Console(width=120).print(table)
    if options.out:
        print(save(rejection(panels, options.tau, f"error, per {options.per}"), options.out))
    print(f"torch {torch.__version__}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
