"""What attacks leave of broken defenses: the paper's, one by hand, and Auto.

    python benchmarks/broken/table.py                    # all, half an hour on an idle core
    python benchmarks/broken/table.py --only KWTA EMPIR --images 100 --trail
    python benchmarks/broken/table.py --attacks auto autoattack schedule --only Honest CrossMax

Digits within linf 0.15. Networks are trained once and kept in `logs/broken`. The attacks by hand
know the defense; Auto is given a network, or the class by which it rejects, and nothing else. The
table has the share of images in percent that are right, or under attack right or rejected; of
random defenses the mean of ten predictions; and the passes of an image through the defense. The
steps inside a defense, of a purifier, do not count.
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from broken.later import GUARDED, HONEST, LATER
from broken.parts import EPS, THREAT, digits, left, trained
from broken.tramer import TRAMER
from climb import counted

from lightning_rob import Auto, AutoAttack
from lightning_rob.runtime.errors import NoGradientError

CASES = {case.__name__: case for case in (*TRAMER, *LATER, *GUARDED, *HONEST)}


def weak(net, x, y, passes):
    return net.weak(x, y)


def hand(net, x, y, passes):
    return net.hand(x, y)


def auto(net, x, y, passes):
    found = Auto(THREAT, passes).find(net.defense(), x, y, torch.Generator().manual_seed(0))
    net.trail = str(found)
    return found.x_adv


def schedule(net, x, y, passes):
    """Auto without a search."""
    attack = Auto(THREAT, passes).schedule(net.defense())
    return attack(net.defense(), x, y, torch.Generator().manual_seed(0))


def autoattack(net, x, y, passes):
    """AutoAttack at the same passes."""
    attack = AutoAttack(THREAT, passes=passes)
    return attack(net.defense(), x, y, torch.Generator().manual_seed(0))


def standard(net, x, y, passes):
    """AutoAttack as published, with as many passes as it takes: "rand" on random defenses.

    Where no gradient leads to the images only its Square Attack can run; "rand" has none, and does
    nothing.
    """
    attack = AutoAttack(THREAT, "rand" if net.random else "standard")
    try:
        return attack(net.defense(), x, y, torch.Generator().manual_seed(0))
    except NoGradientError:
        if net.random:
            return x
        square = AutoAttack(THREAT, "custom", attacks=("square",))
        return square(net.defense(), x, y, torch.Generator().manual_seed(0))


ATTACKS = {f.__name__: f for f in (weak, hand, auto, schedule, autoattack, standard)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--attacks", nargs="+", choices=list(ATTACKS), default=["weak", "hand", "auto"]
    )
    parser.add_argument("--images", type=int, default=30)
    parser.add_argument("--passes", type=int, default=1000)
    parser.add_argument("--trail", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    x, y = digits("test", options.images)
    print("| defense | clean |", " | ".join(f"{a} | passes" for a in options.attacks), "|")
    print("|---|--:|" + "--:|--:|" * len(options.attacks), flush=True)
    for name in options.only:
        net = trained(CASES[name])
        passes = counted([net])
        torch.manual_seed(1)
        clean = torch.stack([net(x).argmax(1) == y for _ in range(10 if net.random else 1)])
        clean = clean.float().mean()
        cells, net.trail = [name, f"{100 * clean:.1f}"], ""
        for attack in options.attacks:
            torch.manual_seed(0)
            passes[0] = 0
            x_adv = ATTACKS[attack](net, x, y, options.passes)
            assert (x_adv - x).abs().max() <= EPS * 1.0001
            used = passes[0] / len(x)
            cells += [f"{100 * left(net, x_adv, y).mean():.1f}", f"{used:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
        if options.trail:
            print(net.trail, flush=True)


if __name__ == "__main__":
    main()
