"""AutoAttack of this package and by the packages that offer it: same network, images and radius.

    pip install -e ".[bench,autoattack]"
    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/autoattack.py

Trains a SmallCNN on Digits5k, or on the photographs of Patches10, adversarially unless
`--standard`, or takes a trained one, `--net zoo:digits_robust`, then prints a Markdown table. Every
package gets the whole batch at once and its own
defaults for the standard version; all are judged by the same network. "only it" and "only the
package" count images that one fools and pyautoattack, called directly, does not, or the other way
round. Passes are per image. A package that is not installed or not for the norm is left out.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import time

import torch
from torch import nn

import lightning_rob
from lightning_rob.attacks import PGD, Auto, AutoAttack
from lightning_rob.data import Digits5k, Patches10
from lightning_rob.defenses import Single
from lightning_rob.nets import SmallCNN
from lightning_rob.objectives import classification_loss
from lightning_rob.threat import Threat

SEED = 0  # of the training
PASSES = 2800  # of Auto by default: half of those that AutoAttack takes on robust networks
DATA = {"Digits5k": (Digits5k, 1), "Patches10": (Patches10, 3)}  # name -> images, channels


class Counted(nn.Module):
    """A network that counts the images of its passes, also where attacks copy it."""

    def __init__(self, net):
        super().__init__()
        self.net, self.passes = net, {"forwards": 0, "backwards": 0}
        passes = self.passes  # a closure, for copies of a network copy its hooks' objects

        def add(kind, images):
            passes[kind] += len(images)

        def count(net, inputs, logits):
            add("forwards", logits)
            if logits.requires_grad:
                logits.register_hook(lambda gradient: add("backwards", gradient))

        self.handle = net.register_forward_hook(count)

    def forward(self, x):
        return self.net(x)


def images(data, train, most):
    samples = DATA[data][0]().source(train)
    x, y = zip(*(samples[i] for i in range(min(len(samples), most))), strict=True)
    return torch.stack(x), torch.tensor(y)


def two_layers(pixels):
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 64), nn.ReLU(), nn.Linear(64, 10))


def trained(data, threat, epochs, standard, small=False):
    torch.manual_seed(SEED)
    x, y = images(data, train=True, most=5000)
    net = two_layers(x[0].numel()) if small else SmallCNN(channels=DATA[data][1])
    attack = PGD(threat, 5, threat.eps / 3)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(64):
            z = x[part] if standard else attack(Single(net), x[part], y[part])
            loss = classification_loss(net(z), y[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.eval().requires_grad_(False)


def own(counted, threat, seed, **options):
    attack, defense = AutoAttack(threat, **options), Single(counted.net)
    return lambda x, y: attack(defense, x, y, torch.Generator().manual_seed(seed))


def auto(counted, threat, seed, passes=PASSES):
    attack, defense = Auto(threat, passes), Single(counted.net)
    return lambda x, y: attack(defense, x, y, torch.Generator().manual_seed(seed))


def pyautoattack(counted, threat, seed):
    import pyautoattack

    norm = threat.norm.capitalize()
    suite = pyautoattack.AutoAttack(counted, norm=norm, eps=threat.eps, seed=seed)
    return lambda x, y: suite.run_standard_evaluation(x, y, batch_size=len(x))[0]


def torchattacks(counted, threat, seed):
    import torchattacks

    norm = threat.norm.capitalize()
    return torchattacks.AutoAttack(counted, norm=norm, eps=threat.eps, seed=seed)


PACKAGES = {  # row -> package, and how its attack is built
    "pyautoattack": ("pyautoattack", pyautoattack),
    "`AutoAttack`": ("lightning_rob", own),
    "`Auto`": ("lightning_rob", auto),
    "torchattacks": ("torchattacks", torchattacks),
}
NOT_L1 = ("torchattacks",)


def measured(build, net, threat, x, y, seed):
    """Return one row: accuracy, passes, seconds, largest perturbation and side effects."""
    talk, counted = io.StringIO(), Counted(net).eval()  # torchattacks restores the mode it finds
    with contextlib.redirect_stdout(talk), contextlib.redirect_stderr(talk):
        build(counted, threat, seed)(x.clone(), y.clone())
        # Timed without the hook that counts, with which networks are not folded.
        counted.handle.remove()
        attack = build(counted, threat, seed)
        torch.manual_seed(SEED + 1)
        before, wall, cpu = torch.get_rng_state(), time.perf_counter(), time.process_time()
        x_adv = attack(x.clone(), y.clone())
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    x_adv = x_adv.detach()
    with torch.no_grad():
        right = net(x_adv).argmax(1) == y
    left_alone = torch.equal(before, torch.get_rng_state())
    passes = [n / len(x) for n in counted.passes.values()]
    return right, passes, seconds, float(threat.size(x_adv - x).max()), left_alone


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="Digits5k", choices=list(DATA))
    parser.add_argument("--norm", default="linf", choices=["linf", "l2", "l1"])
    parser.add_argument("--eps", type=float, default=0.2)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--standard", action="store_true")
    parser.add_argument("--two_layers", action="store_true", help="in place of the SmallCNN")
    parser.add_argument("--net")
    parser.add_argument("--passes", type=int, default=PASSES, help="of Auto")
    parser.add_argument("--seed", type=int, default=0, help="of the attacks; the training has 0")
    parser.add_argument("--only", nargs="+", default=list(PACKAGES), choices=list(PACKAGES))
    options = parser.parse_args()
    threat = Threat(options.norm, options.eps)
    if options.net:
        net = lightning_rob.load(options.net).net.eval().requires_grad_(False)
    else:
        net = trained(options.data, threat, options.epochs, options.standard, options.two_layers)
    x, y = images(options.data, train=False, most=options.images)
    print(f"{options.data}, {threat}, {len(x)} images, torch {torch.__version__}")
    clean = float((net(x).argmax(1) == y).float().mean())
    columns = ["", "right", "only it", "only the package", "forwards", "backwards", "wall s"]
    columns += ["CPU s", "largest", "torch's RNG kept"]
    print(f"| {' | '.join(columns)} |\n|" + "---|" * len(columns))
    print(f"| clean | {100 * clean:.1f} |" + " |" * 8)
    reference = None
    for name, (package, build) in PACKAGES.items():
        if name not in options.only or not importlib.util.find_spec(package):
            continue
        if threat.norm == "l1" and name in NOT_L1:
            continue
        if name == "`Auto`":
            build = functools.partial(auto, passes=options.passes)
        right, passes, seconds, largest, kept = measured(build, net, threat, x, y, options.seed)
        reference = right if reference is None else reference
        cells = [f"{100 * right.float().mean():.1f}", int((reference & ~right).sum())]
        cells += [int((~reference & right).sum()), *[f"{n:.0f}" for n in passes]]
        cells += [*[f"{s:.1f}" for s in seconds], f"{largest:.6f}", "yes" if kept else "no"]
        print(f"| {name} | " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
