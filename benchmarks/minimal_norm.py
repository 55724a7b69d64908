"""CW and DeepFool on a digits network, beside foolbox: the same images, steps and constants.

    pip install -e ".[bench]"
    OMP_WAIT_POLICY=PASSIVE python benchmarks/minimal_norm.py

The network is trained here on Digits5k for a few seconds. All attack the same images without a
budget, in one process, in turn; an image that an attack does not fool has an infinite
norm, and so has the black one that foolbox's CW returns where it found nothing. The accuracies are
what is left within a budget: the share of larger norms. Seconds are of CPU time.
"""

import argparse
import platform
import statistics
import time
import warnings

import torch
from rich.console import Console
from rich.table import Table

from lightning_rob.attacks import CW, DeepFool
from lightning_rob.data import Digits5k
from lightning_rob.defenses import Single
from lightning_rob.nets import MNISTNet
from lightning_rob.threat import Threat

L2, LINF = Threat("l2", 100), Threat("linf", 1)
RADII = {"l2": (0.5, 1.0, 2.0), "linf": (0.05, 0.1, 0.2)}


def digits(train):
    data = Digits5k(val_size=0)
    data.setup("fit" if train else "test")
    items = data.parts["train" if train else "test"]
    rows = [items[i] for i in range(len(items))]
    return torch.stack([row[0] for row in rows]), torch.tensor([int(row[1]) for row in rows])


def trained_net(epochs):
    x, y = digits(train=True)
    net = MNISTNet()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    return net.eval()


def foolbox_attack(net, attack):
    import foolbox

    model = foolbox.PyTorchModel(net, bounds=(0, 1), device="cpu")
    return lambda x, y: attack(model, x, y, epsilons=None)[0]


def contenders(net, options):
    from foolbox.attacks import L2CarliniWagnerAttack, L2DeepFoolAttack, LinfDeepFoolAttack

    cw = CW(L2, options.steps, 0.01, options.binary_steps, initial_const=0.01)
    theirs, faster = (
        L2CarliniWagnerAttack(options.binary_steps, options.steps, step_size, 0.0, 0.01)
        for step_size in (0.01, 0.1)  # its tanh needs the larger one on black and white pixels
    )
    fool = {"steps": 50, "candidates": 10, "overshoot": 0.02}
    ours = {"steps": 50, "candidates": 9, "overshoot": 0.02}
    return {
        "CW": {
            "lightning-rob": lambda x, y: cw(Single(net), x, y),
            "foolbox": foolbox_attack(net, theirs),
            "foolbox, step 0.1": foolbox_attack(net, faster),
        },
        "DeepFool l2": {
            "lightning-rob": lambda x, y: DeepFool(L2, **ours)(Single(net), x, y),
            "foolbox": foolbox_attack(net, L2DeepFoolAttack(**fool)),
        },
        "DeepFool linf": {
            "lightning-rob": lambda x, y: DeepFool(LINF, **ours)(Single(net), x, y),
            "foolbox": foolbox_attack(net, LinfDeepFoolAttack(**fool)),
        },
    }


def norms(net, threat, x_adv, x, y):
    with torch.no_grad():
        failed = (net(x_adv).argmax(1) == y) | (x_adv.flatten(1).amax(1) == 0)
    return torch.where(failed, torch.inf, threat.size(x_adv - x))


def measured(net, attacks, threat, x, y, rounds):
    """Return each attack's norms [B] and its seconds of each round, run in turn."""
    sizes, seconds = {}, {name: [] for name in attacks}
    for _ in range(rounds):
        for name, attack in attacks.items():
            start = time.process_time()
            x_adv = attack(x, y)
            seconds[name].append(time.process_time() - start)
            sizes[name] = norms(net, threat, x_adv, x, y)
    return sizes, seconds


def rows(label, threat, sizes, seconds):
    for name, size in sizes.items():
        ratio = [a / b for a, b in zip(seconds[name], seconds["foolbox"], strict=True)]
        finite = size[size.isfinite()]
        yield (
            f"{label}, {name}",
            f"{size.median():.4f}",
            f"{finite.mean():.4f}",
            f"{size.isfinite().float().mean():.2%}",
            f"{statistics.median(seconds[name]):.2f}",
            f"{statistics.median(ratio):.2f}",
            " ".join(f"{(size > r).float().mean():.3f}" for r in RADII[threat.norm]),
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--binary-steps", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    net = trained_net(options.epochs)
    x, y = (part[: options.images] for part in digits(train=False))
    with torch.no_grad():
        clean = float((net(x).argmax(1) == y).float().mean())
    table = Table(
        title=f"Smallest perturbations of {len(x)} digits, clean accuracy {clean:.3f}, "
        f"torch {torch.__version__}, {platform.machine()}"
    )
    columns = ("", "median norm", "mean norm", "success", "CPU s", "/ foolbox", "accuracy within")
    for column in columns:
        table.add_column(column, justify="right")
    for label, attacks in contenders(net, options).items():
        threat = LINF if "linf" in label else L2
        for row in rows(label, threat, *measured(net, attacks, threat, x, y, options.rounds)):
            table.add_row(*row)
        table.add_section()
    Console(width=110).print(table)
    print(f"accuracy within l2 {RADII['l2']}, linf {RADII['linf']}")


if __name__ == "__main__":
    main()
