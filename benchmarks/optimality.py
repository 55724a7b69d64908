"""Attacks of smallest norm beside those of other libraries, by the protocol of AttackBench.

    pip install -e ".[bench]"
    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/optimality.py

Two SmallCNN are trained on Digits5k, one normally and one adversarially (PGD-5, linf 0.2). Every
attack gets the same images, in one batch, and at most `--passes` forward and backward passes an
image in all, by its number of steps. Local optimality is eq. 5 of Cinà et al. (2025): with d the
distance an attack finds for an image, d* the smallest one that any attack of the table finds, e the
largest d*, and sums over the images that are right without attack,
sum(max(e - d, 0)) / sum(e - d*). An image that is not fooled has an infinite distance. Peers that
are not installed are left out.
"""

import argparse
import time
import warnings
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from autoattack import SEED, Counted, images, trained

from lightning_rob import Single
from lightning_rob.attacks import APGD, CW, DDN, PDGD, DeepFool, MinimalNorm
from lightning_rob.objectives import expected_margin
from lightning_rob.threat import Threat

FREE = {"l2": Threat("l2", 28.0), "linf": Threat("linf", 1.0)}  # every image is within
LARGEST = {"l2": 8.0, "linf": 0.8}  # where a search for the radius starts
RADIUS_STEPS = 25  # of each attack within a search for the radius


def own(threat, passes):
    """Return this package's attacks, as functions of a counted network, images and labels."""
    ball = replace(threat, eps=LARGEST[threat.norm])
    radii = (passes - 1) // (2 * (RADIUS_STEPS + 2) + 1)
    search = MinimalNorm(APGD(ball, RADIUS_STEPS, expected_margin), radii)
    attacks = {"PDGD": PDGD(threat, (passes - 9) // 2), "MinimalNorm, APGD": search}
    attacks["DeepFool"] = DeepFool(threat)
    if threat.norm == "l2":
        attacks["DDN"] = DDN(threat, (passes - 9) // 2)
        attacks["CW"] = CW(threat, passes // 10, binary_steps=5, initial_const=1.0)

    def run(attack, net, x, y):
        return attack(Single(net.net), x, y, torch.Generator().manual_seed(SEED))

    return {f"**{name}**": partial(run, attack) for name, attack in attacks.items()}


def adv_lib(threat, passes):
    from adv_lib import attacks
    from adv_lib.attacks.auto_pgd import minimal_apgd

    steps, norm, largest = passes // 2, threat.p, LARGEST[threat.norm]
    radii = passes // 2 // (RADIUS_STEPS + 1)
    search = {"max_eps": largest, "binary_search_steps": radii, "n_iter": RADIUS_STEPS}
    found = {
        "FMN": partial(attacks.fmn, norm=norm, steps=steps),
        "PDPGD": partial(attacks.pdpgd, norm=norm, num_steps=steps),
        "APGD, search": partial(minimal_apgd, norm=norm, **search),
    }
    if norm == 2:
        alma = partial(attacks.alma, num_steps=steps, distance="l2", init_lr_distance=1)
        found |= {"PDGD": partial(attacks.pdgd, num_steps=steps), "ALMA": alma}
        found["DDN"] = partial(attacks.ddn, steps=steps, levels=None)
    return {f"adv-lib {name}": attack for name, attack in found.items()}


def foolbox(threat, passes):
    import foolbox
    from foolbox import attacks

    def run(attack, net, x, y):
        model = foolbox.PyTorchModel(net, bounds=(0, 1), device="cpu")
        return attack(model, x, y, epsilons=None)[0]

    steps = passes // 2
    if threat.norm == "l2":
        cw = attacks.L2CarliniWagnerAttack(5, steps // 5, 0.01, 0.0, 1.0)
        found = {"CW": cw, "FMN": attacks.L2FMNAttack(steps=steps)}
        found |= {"DDN": attacks.DDNAttack(steps=steps), "DeepFool": attacks.L2DeepFoolAttack()}
    else:
        found = {
            "FMN": attacks.LInfFMNAttack(steps=steps),
            "DeepFool": attacks.LinfDeepFoolAttack(),
        }
    return {f"foolbox {name}": partial(run, attack) for name, attack in found.items()}


def torchattacks(threat, passes):
    import torchattacks

    if threat.norm != "l2":
        return {}
    return {
        "torchattacks CW": lambda net, x, y: torchattacks.CW(net, steps=passes // 2)(x, y),
        "torchattacks DeepFool": lambda net, x, y: torchattacks.DeepFool(net)(x, y),
    }


LIBRARIES = {
    "lightning_rob": own,
    "adv_lib": adv_lib,
    "foolbox": foolbox,
    "torchattacks": torchattacks,
}


def measured(attack, net, threat, x, y):
    """Return distances [B], infinite without success, passes an image, and CPU seconds."""
    counted, began = Counted(net).eval(), time.process_time()  # some packages set it back
    torch.manual_seed(SEED)
    x_adv = attack(counted, x.clone(), y.clone()).detach()
    seconds = time.process_time() - began
    counted.handle.remove()
    with torch.no_grad():
        fooled = (net(x_adv).argmax(1) != y) & x_adv.isfinite().flatten(1).all(1)
    fooled &= x_adv.flatten(1).amax(1) > 0  # foolbox returns black images where it finds none
    fooled &= (x_adv.flatten(1).amin(1) >= -1e-6) & (x_adv.flatten(1).amax(1) <= 1 + 1e-6)
    size = torch.where(fooled, threat.size(x_adv - x), torch.inf)
    return size, sum(counted.passes.values()) / len(x), seconds


def optimality(distances):
    """Return the local optimality of each attack, from distances [B] of images that are right."""
    best = torch.stack(list(distances.values())).amin(0)
    largest = best[best.isfinite()].max()
    area = {name: (largest - d).clamp_min(0).sum() for name, d in distances.items()}
    whole = (largest - best).clamp_min(0).sum()
    return {name: float(value / whole) for name, value in area.items()}


def table(net, threat, x, y, passes):
    results = {}
    for package, attacks in LIBRARIES.items():
        if find_spec(package):
            for name, attack in attacks(threat, passes).items():
                results[name] = measured(attack, net, threat, x, y)
                print(".", end="", flush=True)
    with torch.no_grad():
        right = net(x).argmax(1) == y
    optimal = optimality({name: size[right] for name, (size, *_) in results.items()})
    print("\n| attack | fooled | median | local optimality | passes | CPU s |\n" + "|---" * 6 + "|")
    for name in sorted(results, key=lambda name: -optimal[name]):
        size, used, seconds = results[name]
        size = size[right]
        cells = [f"{100 * size.isfinite().float().mean():.0f} %", f"{size.median():.4f}"]
        cells += [f"{optimal[name]:.3f}", f"{used:.0f}", f"{seconds:.1f}"]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    return {name: size for name, (size, *_) in results.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--passes", type=int, default=1000)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    x, y = images("Digits5k", train=False, most=options.images)
    for standard in (False, True):
        net = trained("Digits5k", Threat("linf", 0.2), 5 if standard else 14, standard)
        for threat in FREE.values():
            print(f"\n{'standard' if standard else 'robust'} network, {threat.norm}")
            print(f"clean {(net(x).argmax(1) == y).float().mean():.3f}, torch {torch.__version__}")
            table(net, threat, x, y, options.passes)


if __name__ == "__main__":
    main()
