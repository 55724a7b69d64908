"""How many neighbouring classes ARC has to search (Dbouk and Shanbhag 2022, Table 5): 100 classes.

    python benchmarks/papers/classes.py --seeds 3

A class is a number of two digits: the left half of an image is one of the digits of `Digits5k`, the
right half another, each squeezed to half its width. A first network is trained adversarially, a
second one on the adversarial images of the first (BAT); the probabilities are 0.9 and 0.1. ARC
within linf 0.05 searches the G classes nearest to the predicted one.
"""

import argparse
import json
import time

import torch
from ensembles import cell
from torch.nn.functional import avg_pool2d, cross_entropy

from lightning_rob import ARC, PGD, Ensemble, Single, Threat, evaluate
from lightning_rob.data import Digits5k
from lightning_rob.nets import MNISTNet

THREAT = Threat("linf", 0.05)


def digits(part):
    data = Digits5k(val_size=0)
    data.setup("fit" if part == "train" else "test")
    rows = data.parts[part]
    images, labels, _ = zip(*(rows[i] for i in range(len(rows))), strict=True)
    return avg_pool2d(torch.stack(images), (1, 2)), torch.tensor(labels)


def pairs(images, labels, count, generator):
    """Draw images of two digits and their numbers, 0 … 99."""
    left, right = torch.randint(len(images), (2, count), generator=generator)
    return torch.cat([images[left], images[right]], 3), 10 * labels[left] + labels[right]


def trained(target, images, labels, options, generator):
    """Train a network on PGD images of `target`, or on its own; the radius grows at first."""
    net = MNISTNet(classes=100, width=8)
    optimizer = torch.optim.Adam(net.parameters(), 0.005)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    for step in range(options.steps):
        x, y = pairs(images, labels, 128, generator)
        eps = THREAT.eps * min(1.0, (step + 1) / (0.5 * options.steps))
        attack = PGD(Threat("linf", eps), 2, eps / 1.5)
        x_adv = attack(target or Single(net), x, y, generator)
        optimizer.zero_grad()
        cross_entropy(net.train()(x_adv), y).backward()
        optimizer.step()
        schedule.step()
    return net.eval()


def measured(seed, options):
    """Return accuracies in per cent, and seconds, by attack."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    source = digits("train")
    first = trained(None, *source, options, generator)
    second = trained(Single(first), *source, options, generator)
    defense = Ensemble([first, second], [0.9, 0.1])
    test = pairs(*digits("test"), options.images, torch.Generator().manual_seed(0))
    attacks = {"PGD": PGD(THREAT, 20, 0.025, random_start=False)}
    for count in options.neighbours:
        attacks[f"ARC, G = {count}"] = ARC(THREAT, 20, neighbours=count, early_stop=True)
    result = evaluate(defense, attacks, [test], progress=False)
    alone = evaluate(Single(first), {"PGD": attacks["PGD"]}, [test], progress=False)
    found = {name: 100 * result.accuracy(name) for name in ["clean", *attacks]}
    found["PGD, first member"] = 100 * alone.accuracy("PGD")
    return found, dict(result.seconds)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--steps", type=int, default=600, help="of training, 128 images each")
    parser.add_argument("--neighbours", type=int, nargs="+", default=[1, 2, 4, 10, 50, 99])
    options = parser.parse_args()
    began, runs = time.perf_counter(), []
    for seed in range(options.seeds):
        runs.append(measured(seed, options))
        print(json.dumps(runs[-1][0]), flush=True)
    print("| attack | accuracy | seconds |\n|---|---|---|")
    for name in runs[0][0]:
        seconds = cell([run[1][name] for run in runs]) if name in runs[0][1] else ""
        print(f"| {name} | {cell([run[0][name] for run in runs])} | {seconds} |")
    covers = "; 95 % t over seeds" if options.seeds > 1 else ", one seed, no interval"
    print(f"{options.images} images, {time.perf_counter() - began:.0f} s{covers}")


if __name__ == "__main__":
    main()
