"""The checks inside `evaluate`: false findings on honest defenses, and what they cost.

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/checks.py

Trains small networks on digits (14x14 pixels), with and without adversarial training, and evaluates
more than thirty honest defenses of them under PGD: layers, norms, seeds, ensembles, random
transforms, half precision; and the two networks of the package at full size. Prints the findings of
each; every flag is a false one.

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/checks.py --cost

Evaluates PGD with 20 steps on 1,000 digits and on 1,000 images of the size of small photographs,
and prints the CPU time of the checks as a share of the rest: the median over repetitions. The
network for photographs is not trained; its checks take more passes than those of a trained one.
"""

import argparse
import statistics
import time
from copy import deepcopy

import torch
from torch import nn
from torch.nn.functional import avg_pool2d, cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_rob import PGD, Ensemble, RandomTransforms, Single, Threat, evaluate, load
from lightning_rob.data import Digits5k
from lightning_rob.evaluation.evaluator import Evaluator
from lightning_rob.nets import MNISTNet, ResNet20, SmallCNN
from lightning_rob.objectives import expected_ce
from lightning_rob.rules import mean_logits, mean_probs

LINF, L2 = Threat("linf", 0.15), Threat("l2", 1.0)
IMAGES = 100
ZOO = ("digits_robust", "digits_standard")


def digits(train, count):
    """Return `count` images [B, 1, 28, 28] and labels."""
    pairs = Digits5k().source(train)
    x, y = zip(*(pairs[i] for i in range(count)), strict=True)
    return torch.stack(x), torch.tensor([int(label) for label in y])


class MLP(nn.Sequential):
    def __init__(self, activation=nn.ReLU):
        super().__init__(nn.Flatten(), nn.Linear(196, 64), activation(), nn.Linear(64, 10))


def convolutional(norm, activation=nn.ReLU, width=16):
    """Return a small network with a normalisation layer behind each convolution."""
    layers = []
    for before, after in ((1, width), (width, 2 * width)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), norm(after), activation()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * width, 10))


class Attention(nn.Module):
    """Patches of 7x7 as four tokens, one transformer layer."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 32, 7, 7)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.last = nn.Linear(128, 10)

    def forward(self, x):
        return self.last(self.layer(self.patches(x).flatten(2).mT).flatten(1))


class Half(nn.Module):
    """A network that computes in half precision."""

    def __init__(self, net, dtype):
        super().__init__()
        self.net, self.dtype = deepcopy(net).to(dtype), dtype

    def forward(self, x):
        return self.net(x.to(self.dtype))


class Scaled(nn.Module):
    """A network with another temperature."""

    def __init__(self, net, factor):
        super().__init__()
        self.net, self.factor = net, factor

    def forward(self, x):
        return self.factor * self.net(x)


NETS = {
    "MLP": MLP,
    "MLP, tanh": lambda: MLP(nn.Tanh),
    "SmallCNN": lambda: SmallCNN(width=8),
    "BatchNorm": lambda: convolutional(nn.BatchNorm2d),
    "InstanceNorm": lambda: convolutional(lambda n: nn.InstanceNorm2d(n, affine=True)),
    "GroupNorm, SiLU": lambda: convolutional(lambda n: nn.GroupNorm(4, n), nn.SiLU),
    "LeakyReLU": lambda: convolutional(nn.BatchNorm2d, nn.LeakyReLU),
    "transformer": Attention,
    "dropout": lambda: nn.Sequential(convolutional(nn.BatchNorm2d), nn.Dropout(0.2)),
}


def trained(net, x, y, threat, steps, seed):
    """Train a network, on images of an attack of five steps where a threat is given."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    attack = threat and PGD(threat, 5, threat.eps / 3)
    for _ in range(steps):
        rows = torch.randint(len(x), (64,), generator=generator)
        images = attack(Single(net), x[rows], y[rows]) if attack else x[rows]
        net.train()
        optimizer.zero_grad()
        cross_entropy(net(images), y[rows]).backward()
        optimizer.step()
    return net.eval()


def defenses(x, y):
    """Yield name, threat and defense."""
    nets = {}
    for seed in range(2):
        for name, make in NETS.items():
            for threat in (None, LINF):
                torch.manual_seed(seed)
                key = f"{name}, {'adversarial' if threat else 'standard'}, seed {seed}"
                nets[key] = trained(make(), x, y, threat, 150 if threat else 300, seed)
                if seed == 0 or threat:
                    yield key, LINF, Single(nets[key])
    robust = [nets[f"{name}, adversarial, seed 0"] for name in ("SmallCNN", "BatchNorm")]
    for net, name in zip(robust, ("SmallCNN", "BatchNorm"), strict=True):
        yield f"{name}, l2", L2, Single(net)
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            yield f"{name}, {dtype}", LINF, Single(Half(net, dtype))
        yield f"{name}, logits x 3", LINF, Single(Scaled(net, 3.0))
        yield f"{name}, logits / 3", LINF, Single(Scaled(net, 1 / 3))
    yield "randomized ensemble", LINF, Ensemble(robust, [0.6, 0.4])
    yield "ensemble, mean of probabilities", LINF, Ensemble(robust, rule=mean_probs)
    yield "ensemble, mean of logits", LINF, Ensemble(robust, rule=mean_logits)
    noise = {"GaussianNoise": {"alpha": 0.1}, "Gamma": {"alpha": 0.1}, "UniformNoise": {}}
    moved = {"Affine": {}, "GaussianBlur": {}}
    for name, transforms in (("noise", noise), ("geometric", moved)):
        yield (
            f"random transforms, {name}",
            LINF,
            RandomTransforms(robust[1], transforms, size=2, draws=5),
        )


def false_findings():
    (x, y), test = digits(True, 4000), digits(False, IMAGES)
    halved = DataLoader(TensorDataset(avg_pool2d(test[0], 2), test[1]), 100)
    shipped = [(zoo, Threat("linf", 0.1), load(f"zoo:{zoo}")) for zoo in ZOO]
    cases = [(halved, *case) for case in defenses(avg_pool2d(x, 2), y)]
    cases += [(DataLoader(TensorDataset(*test), 100), *case) for case in shipped]
    flagged, count = [], 0
    for loader, name, threat, defense in cases:
        pgd = PGD(threat, 20, threat.eps / 4, objective=expected_ce)
        result = evaluate(defense, {"pgd": pgd}, loader, progress=False)
        names = [finding.name for finding in result.findings if finding.flagged]
        count += 1
        flagged += [name] if names else []
        print(
            f"{name:45} clean {result.accuracy('clean'):.0%} PGD {result.accuracy('pgd'):.0%} "
            f"{', '.join(names) or '-'}",
            flush=True,
        )
        for finding in result.findings:
            if finding.flagged:
                print(f"    {finding.text}")
    print(f"{len(flagged)} of {count} honest defenses have a false finding: {flagged}")


def photographs(count):
    """Return random images [B, 3, 32, 32], for time only, and labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 3, 32, 32, generator=generator)
    return x, torch.randint(10, (count,), generator=generator)


def cost(repetitions, images):
    """Print CPU seconds of an evaluation, and of the checks within it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = trained(MNISTNet(), *digits(True, 4000), None, 200, 0)
    cases = {
        "digits, MNISTNet": (net, digits(False, images), Threat("linf", 0.3)),
        "photographs, ResNet-20": (ResNet20(), photographs(images), Threat("linf", 8 / 255)),
    }
    within = []
    check = Evaluator._check

    def timed(*args):
        began = time.process_time()
        check(*args)
        within.append(time.process_time() - began)

    Evaluator._check = timed
    for name, (net, (x, y), threat) in cases.items():
        # Labels as predicted, so that all images are attacked and none is left out.
        with torch.no_grad():
            y = torch.cat([net.eval()(part).argmax(1) for part in x.split(100)])
        loader = DataLoader(TensorDataset(x, y), 100)
        whole, share = [], []
        for _ in range(repetitions):
            within.clear()
            began = time.process_time()
            evaluate(Single(net), {"pgd": PGD(threat, 20, threat.eps / 4)}, loader, progress=False)
            whole.append(time.process_time() - began)
            share.append(sum(within) / (whole[-1] - sum(within)))
        print(
            f"{name}: {statistics.median(whole):.1f} CPU s, the checks "
            f"{statistics.median(share):.1%} of the rest ({min(share):.1%} to {max(share):.1%})",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cost", action="store_true", help="measure CPU time")
    parser.add_argument("--repetitions", type=int, default=5, help="of each measurement of time")
    parser.add_argument("--images", type=int, default=1000, help="that PGD attacks, for the time")
    options = parser.parse_args()
    if options.cost:
        cost(options.repetitions, options.images)
    else:
        false_findings()
