"""PGD-20 on ResNet-20, batch 128, beside torchattacks and foolbox: interleaved, medians.

    pip install -e ".[bench]"
    OMP_WAIT_POLICY=PASSIVE python benchmarks/attacks.py

All attack the same network with trainable weights, as users pass it, with the same threat, steps
and batch, in one process, in turn; "floor" is steps x (forward + backward to the image, weights
frozen). Ratios are of CPU time to the floor of the same round.
"""

import argparse
import platform
import statistics
import time
import warnings

import torch
from rich.console import Console
from rich.table import Table

from lightning_rob.attacks import PGD
from lightning_rob.cli import _keep_freed_memory
from lightning_rob.defenses import Single
from lightning_rob.nets import ResNet20
from lightning_rob.threat import Threat

EPS, STEP = 8 / 255, 2 / 255


def floor(net, x, y, steps):
    for weight in net.parameters():
        weight.requires_grad_(False)
    for _ in range(steps):
        image = x.clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(net(image), y)
        torch.autograd.grad(loss, image)
    for weight in net.parameters():
        weight.requires_grad_(True)
    return x


def torchattacks_pgd(net, steps):
    import torchattacks

    attack = torchattacks.PGD(net, eps=EPS, alpha=STEP, steps=steps, random_start=False)
    return lambda x, y: attack(x, y)


def foolbox_pgd(net, steps):
    import foolbox

    model = foolbox.PyTorchModel(net, bounds=(0, 1), device="cpu")
    attack = foolbox.attacks.LinfPGD(abs_stepsize=STEP, steps=steps, random_start=False)
    return lambda x, y: attack(model, x, y, epsilons=EPS)[1]


def contenders(net, steps):
    attack = PGD(Threat("linf", EPS), steps, STEP, random_start=False)
    return {
        "floor": lambda x, y: floor(net, x, y, steps),
        "lightning-rob": lambda x, y: attack(Single(net), x, y),
        "torchattacks": torchattacks_pgd(net, steps),
        "foolbox": foolbox_pgd(net, steps),
    }


def timed(attack, x, y):
    wall, cpu = time.perf_counter(), time.process_time()
    x_adv = attack(x, y)
    return time.perf_counter() - wall, time.process_time() - cpu, x_adv


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    _keep_freed_memory()
    torch.manual_seed(0)
    net = ResNet20().eval()
    x, y = torch.rand(options.batch, 3, 32, 32), torch.randint(0, 10, (options.batch,))
    attacks = contenders(net, options.steps)
    times = {name: [] for name in attacks}
    reached = {}
    for round_ in range(options.rounds + 1):
        for name, attack in attacks.items():
            wall, cpu, x_adv = timed(attack, x, y)
            if round_:  # the first round warms up
                times[name].append((wall, cpu))
            with torch.no_grad():
                reached[name] = float(torch.nn.functional.cross_entropy(net(x_adv), y))
    table = Table(
        title=f"PGD-{options.steps}, ResNet-20, batch {options.batch}, "
        f"torch {torch.__version__}, {platform.machine()}"
    )
    for column in ("", "wall s (median)", "CPU s (median)", "CPU / floor (median)", "loss reached"):
        table.add_column(column, justify="right")
    for name, rows in times.items():
        ratios = [
            cpu / floor_cpu for (_, cpu), (_, floor_cpu) in zip(rows, times["floor"], strict=True)
        ]
        walls, cpus = zip(*rows, strict=True)
        medians = [statistics.median(v) for v in (walls, cpus, ratios)]
        table.add_row(name, *[f"{m:.2f}" for m in medians], f"{reached[name]:.4f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
