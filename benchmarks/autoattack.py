"""AutoAttack by the packages that offer it: the same network, images, radius and version.

    pip install -e ".[bench,autoattack]"
    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/autoattack.py

Trains a SmallCNN adversarially on Digits5k for seconds, then prints a Markdown table. Every package
gets the whole batch at once and its own defaults for the standard version; all are judged by the
same network. "only it" and "only pyautoattack" count images that one fools and the other does not.
A package that is not installed is left out.
"""

import argparse
import contextlib
import importlib.util
import io
import time

import torch

from lightning_rob.attacks import PGD, AutoAttack
from lightning_rob.data import Digits5k
from lightning_rob.defenses import Single
from lightning_rob.nets import SmallCNN
from lightning_rob.objectives import classification_loss
from lightning_rob.threat import Threat

SEED = 0


def digits(train):
    samples = Digits5k().source(train)
    x, y = zip(*(samples[i] for i in range(len(samples))), strict=True)
    return torch.stack(x), torch.tensor(y)


def trained(threat, epochs):
    torch.manual_seed(SEED)
    net, (x, y) = SmallCNN(), digits(train=True)
    attack = PGD(threat, 5, threat.eps / 3)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(64):
            loss = classification_loss(net(attack(Single(net), x[part], y[part])), y[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.eval().requires_grad_(False)


def ours(net, threat):
    attack = AutoAttack(threat)
    return lambda x, y: attack(Single(net), x, y, torch.Generator().manual_seed(SEED))


def pyautoattack(net, threat):
    import pyautoattack

    norm = {"linf": "Linf", "l2": "L2"}[threat.norm]
    suite = pyautoattack.AutoAttack(net, norm=norm, eps=threat.eps, seed=SEED)
    return lambda x, y: suite.run_standard_evaluation(x, y, batch_size=len(x))[0]


def torchattacks(net, threat):
    import torchattacks

    norm = {"linf": "Linf", "l2": "L2"}[threat.norm]
    return torchattacks.AutoAttack(net, norm=norm, eps=threat.eps, seed=SEED)


PACKAGES = {
    "pyautoattack": pyautoattack,
    "lightning_rob": ours,
    "torchattacks": torchattacks,
}


def measured(build, net, threat, x, y):
    """Return one row: accuracy, seconds, largest perturbation and side effects."""
    talk = io.StringIO()
    with contextlib.redirect_stdout(talk), contextlib.redirect_stderr(talk):
        attack = build(net, threat)
        torch.manual_seed(SEED + 1)
        before, wall, cpu = torch.get_rng_state(), time.perf_counter(), time.process_time()
        x_adv = attack(x.clone(), y.clone())
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    x_adv = x_adv.detach()
    with torch.no_grad():
        right = net(x_adv).argmax(1) == y
    left_alone = torch.equal(before, torch.get_rng_state())
    return right, seconds, float(threat.size(x_adv - x).max()), left_alone, len(talk.getvalue())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--norm", default="linf", choices=["linf", "l2"])
    parser.add_argument("--eps", type=float, default=0.2)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    threat = Threat(options.norm, options.eps)
    net = trained(threat, options.epochs)
    x, y = (part[: options.images] for part in digits(train=False))
    print(f"{threat}, {options.images} images, torch {torch.__version__}")
    clean = float((net(x).argmax(1) == y).float().mean())
    columns = ["", "right", "only it", "only pyautoattack", "wall s", "CPU s", "largest"]
    columns += ["torch's RNG kept", "characters printed"]
    print(f"| {' | '.join(columns)} |\n|" + "---|" * len(columns))
    print(f"| clean | {100 * clean:.1f} |" + " |" * 7)
    reference = None
    for name, build in PACKAGES.items():
        if not importlib.util.find_spec(name):
            continue
        right, seconds, largest, kept, printed = measured(build, net, threat, x, y)
        reference = right if reference is None else reference
        cells = [f"{100 * right.float().mean():.1f}", int((reference & ~right).sum())]
        cells += [int((~reference & right).sum()), *[f"{s:.1f}" for s in seconds]]
        cells += [f"{largest:.6f}", "yes" if kept else "no", printed]
        print(f"| {name} | " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
