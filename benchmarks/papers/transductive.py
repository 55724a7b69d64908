"""Defenses that adapt, beyond their recipes: base, order of images, radius (Chen et al. 2022).

    python benchmarks/papers/transductive.py --table madry --images 20

Tables: `madry`, RMC on an adversarially trained base beside that base, linf --eps, from --seeds
training seeds (the paper's Tables 1 and 6); `dent`, DENT on CIFAR-10 as image files in the folder
`cifar10`, linf 8/255 (Table 2); `dann`, DANN at the paper's radius, linf 0.3, with a weight of the
discriminator of 0.1 (Table 3); `tadv`, TADV beside its base at linf 0.3 (Table 4); `order`, DENT on
`Patches10`, linf 8/255, where rounds of 128 images come in natural order or sorted by label (Table
5); `stability`, RMC on an undefended base, likewise; `leak`, the same under PGD-skip, which attacks
the state after the round before (Example 1). Data are digits where nothing else is said. With
`--base CHECKPOINT` the DENT of `dent` and `order` is on the first member of an ensemble of
ResNet-20, such as those in the folder `checkpoints`, on CIFAR-10. Differences are paired, with 95 %
t intervals over images or, of several seeds, over seeds; accuracies over seeds have their standard
deviation. --private-draws defenders adapt to each perturbed round. The same command goes on where
it was stopped: results that ended stay in --folder, and so do attacked images, but for those of
RMC, which keeps a state from image to image.
"""

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import torch
from ensembles import trained
from torch.utils.data import DataLoader

from lightning_rob import (
    GMSA,
    PGD,
    AutoAttack,
    HighConfidence,
    Threat,
    ThroughAdaptation,
    TransferFromStatic,
    evaluate,
)
from lightning_rob.data import Images
from lightning_rob.defenses import DENT, base_model
from lightning_rob.defenses.transductive import give_source
from lightning_rob.evaluation.protocol import RoundProtocol
from lightning_rob.metrics import paired, student
from lightning_rob.nets import ResNet20, load_weights
from lightning_rob.objectives import worst_ce
from lightning_rob.runtime.identity import cache_key, fingerprint

CONFIGS = Path(__file__).parents[2] / "configs"
AGAINST = (
    "{{class_path: PGD, init_args: {{threat: {{norm: linf, eps: {}}}, steps: 5, step_size: {}}}}}"
)


def madry(options):
    eps, threat = options.eps, Threat("linf", options.eps)
    pgd = PGD(threat, 40, 0.01, keep_best=True)
    static = {"PGD": pgd, "AutoAttack": AutoAttack(threat, early_stop=False)}
    played = {"PGD, transferred": TransferFromStatic(pgd), "GMSA-AVG": GMSA(pgd, rounds=5)}
    played["GMSA-MIN"] = GMSA(replace(pgd, objective=worst_ce), rounds=5)
    robust = f"--model.attack={AGAINST.format(eps, eps / 4)}"
    for defense, loader in rmc_by_seed("madry", [robust], options):
        whole = DataLoader(loader.dataset, options.images)
        yield "base", base_model(defense), static, whole, None
        yield "RMC", defense, played, loader, RoundProtocol(images=1)


def stability(options):
    pgd = PGD(Threat("linf", options.eps), 40, 0.01, keep_best=True)
    hardest = replace(pgd, objective=worst_ce)
    played = {"PGD, transferred": TransferFromStatic(pgd)}
    played["FPA"] = GMSA(pgd, rounds=5, memory=False)
    played |= {"GMSA-AVG": GMSA(pgd, rounds=5), "GMSA-MIN": GMSA(hardest, rounds=5)}
    for defense, loader in rmc_by_seed("stability", [], options):
        yield "RMC", defense, played, loader, RoundProtocol(images=1)


def leak(options):
    pgd = PGD(Threat("linf", options.eps), 40, 0.01, keep_best=True)
    for defense, loader in rmc_by_seed("stability", [], options):
        played = {"PGD, transferred": TransferFromStatic(pgd)}
        yield "RMC, secret state", defense, played, loader, RoundProtocol(images=1)
        leaking = RoundProtocol(images=1, attacker_sees_state=True)
        yield "RMC, state leaks", defense, {"PGD-skip": pgd}, loader, leaking


def rmc_by_seed(name, training, options):
    """Yield RMC and a loader of single test images, from each training seed of its network."""
    for seed in range(options.seeds):
        recipe = ["rmc_digits", f"--seed_everything={seed}", *training]
        recipe.append(f"--model.defense.attack.threat.eps={options.eps}")
        yield built(f"{name}{seed}", recipe, 1, options)


def order(options):
    threat = Threat("linf", 8 / 255)
    pgd = PGD(threat, 20, 2 / 255, keep_best=True)
    recipe = ["dent_digits", f"--model.attack={AGAINST.format('8/255', '3/255')}"]
    recipe += ["--model.net.init_args.channels=3", "--data=Patches10", "--data.train_size=5000"]
    defense, loader = behind_dent("order", [*recipe, "--data.batch_size=128"], options)
    yield "base", base_model(defense), {"PGD": pgd}, loader, None
    confident = TransferFromStatic(HighConfidence(pgd, untargeted=2, targeted=4))
    played = {"PGD, transferred": TransferFromStatic(pgd), "confident": confident}
    for name in ("natural", "by_label"):
        yield f"DENT, {name}", defense, played, loader, RoundProtocol(name, images=128)


def dent(options):
    threat = Threat("linf", 8 / 255)
    apgd = {"version": "custom", "attacks": ["apgd-ce", "apgd-t"], "early_stop": False}
    autoattack = AutoAttack(threat, **apgd)
    confident = HighConfidence(PGD(threat, 20, 2 / 255, keep_best=True), untargeted=2, targeted=4)
    recipe = ["dent_digits", f"--model.attack={AGAINST.format('8/255', '10/255')}"]
    recipe += ["--model.attack.steps=1", "--model.net=ResNet20", "--model.net.widths=[8, 16, 32]"]
    recipe += ["--trainer.max_epochs=8", "--model.lr_scheduler.T_max=8"]
    recipe += ["--data=Images", "--data.root=cifar10", "--data.resize=32", "--data.crop=32"]
    recipe += ["--data.batch_size=128", "--data.eval_batch_size=128", "--data.val_size=200"]
    defense, loader = behind_dent("dent", recipe, options)
    yield "base", base_model(defense), {"AutoAttack": autoattack}, loader, None
    if options.confident:
        confident = HighConfidence(PGD(threat, 100, 1 / 255, keep_best=True), 5, 9)
    played = {"confident, transferred": TransferFromStatic(confident)}
    if not options.confident:
        played["DENT-AA"] = ThroughAdaptation(autoattack)
        played["AutoAttack, transferred"] = TransferFromStatic(autoattack)
        played["FPA"] = GMSA(confident, rounds=3, memory=False)
        played["GMSA-AVG"] = GMSA(confident, rounds=3)
    yield "DENT", defense, played, loader, RoundProtocol(images=128)


def dann(options):
    pgd = PGD(Threat("linf", 0.3), 40, 0.01, keep_best=True)
    hardest = replace(pgd, objective=worst_ce)
    recipe = ["dann_digits", "--model.defense.scale=0.1"]
    defense, loader = built("dann", recipe, options.images, options)
    yield "base", base_model(defense), {"PGD": pgd}, loader, None
    played = {"PGD, transferred": TransferFromStatic(pgd)}
    played["FPA"] = GMSA(pgd, rounds=options.rounds, memory=False, from_clean=False)
    played["GMSA-AVG"] = GMSA(pgd, rounds=options.rounds, from_clean=False)
    played["GMSA-MIN"] = GMSA(hardest, rounds=options.rounds, from_clean=False)
    yield "DANN", defense, played, loader, RoundProtocol(images=options.images)


def tadv(options):
    pgd = PGD(Threat("linf", 0.3), 100, 0.01, keep_best=True)
    autoattack = AutoAttack(Threat("linf", 0.3), early_stop=False)
    defense, loader = built("tadv", ["tadv_digits"], options.images, options)
    yield "base", base_model(defense), {"PGD": pgd, "AutoAttack": autoattack}, loader, None
    played = {"AutoAttack, transferred": TransferFromStatic(autoattack)}
    played["FPA"] = GMSA(pgd, rounds=options.rounds, memory=False, from_clean=False)
    played["GMSA-AVG"] = GMSA(pgd, rounds=options.rounds, from_clean=False)
    hardest = replace(pgd, objective=worst_ce)
    played["GMSA-MIN"] = GMSA(hardest, rounds=options.rounds, from_clean=False)
    yield "TADV", defense, played, loader, RoundProtocol(images=options.images)


def behind_dent(name, recipe, options):
    """Return DENT on the first member of --base, or on the recipe's network, and test images."""
    if not options.base:
        return built(name, recipe, 128, options)
    net = load_weights(ResNet20(), str(options.base), prefix="members.0")
    data = Images(root="cifar10", resize=32, crop=32)
    data.setup("test")
    return DENT(net).eval(), DataLoader(data.parts["test"], 128)


def built(name, recipe, size, options):
    """Return the trained recipe's defense with its labelled images, and a loader of test images."""
    config, *rest = recipe
    args = ["--config", str(CONFIGS / f"{config}.yaml"), *rest, *options.fit]
    defense, data = trained(options.folder / name, args)
    give_source(defense, data.labelled)
    return defense, DataLoader(data.parts["test"], size)


def kept(name, defense, played, loader, protocol, options):
    """Return the result of an evaluation that ended before, or evaluate and keep the result."""
    how = {key: str(value) for key, value in vars(options).items()}
    key = cache_key(name=name, attack_code=played, weights=fingerprint(defense), options=how)
    path = options.folder / "ended" / f"{key}.pt"
    if path.exists():
        return torch.load(path, weights_only=False)
    torch.manual_seed(0)
    result = evaluate(
        defense,
        played,
        loader,
        max_images=options.images,
        private_draws=options.private_draws if protocol else 1,
        protocol=protocol,
        resume=None if defense.stateful else options.folder / "resume",
        progress=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(result, path)
    return result


# Pairs of (defense, attack) by table: the second is compared with the first.
GAPS = {
    "madry": [
        (("base", "AutoAttack"), ("RMC", attack))
        for attack in ("PGD, transferred", "GMSA-AVG", "GMSA-MIN")
    ],
    "order": [
        *(
            (("DENT, natural", attack), ("DENT, by_label", attack))
            for attack in ("clean", "PGD, transferred", "confident")
        ),
        (("base", "clean"), ("DENT, by_label", "clean")),
        (("base", "PGD"), ("DENT, natural", "PGD, transferred")),
        (("base", "PGD"), ("DENT, by_label", "PGD, transferred")),
    ],
    "dent": [
        (("DENT", "DENT-AA"), ("DENT", "confident, transferred")),
        (("DENT", "AutoAttack, transferred"), ("DENT", "confident, transferred")),
        (("base", "AutoAttack"), ("DENT", "AutoAttack, transferred")),
        (("base", "AutoAttack"), ("DENT", "confident, transferred")),
        (("base", "AutoAttack"), ("DENT", "GMSA-AVG")),
    ],
    "dann": [
        (("DANN", "PGD, transferred"), ("DANN", attack))
        for attack in ("FPA", "GMSA-AVG", "GMSA-MIN")
    ],
    "tadv": [
        (("base", known), ("TADV", attack))
        for known in ("AutoAttack", "PGD")
        for attack in ("AutoAttack, transferred", "FPA", "GMSA-AVG", "GMSA-MIN")
    ],
    "stability": [],
    "leak": [],
}


def gap(first, second):
    """Return second minus first with an interval: over images of one seed, or over seeds."""
    if len(first) == 1:
        return paired(first[0], second[0])
    gaps = [100 * float((b - a).mean()) for a, b in zip(first, second, strict=True)]
    low, high = student(gaps)
    return f"{mean(gaps):+.1f} [{low:+.1f}, {high:+.1f}] over {len(gaps)} seeds"


def main():
    tables = {f.__name__: f for f in (madry, order, dent, dann, tadv, stability, leak)}
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", choices=tables, required=True)
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=7, help="rehearsals of GMSA on DANN, TADV")
    parser.add_argument("--private-draws", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5, help="of the tables of RMC")
    parser.add_argument("--eps", type=float, default=0.2, help="linf, of RMC")
    parser.add_argument(
        "--base", type=Path, help="checkpoint of ResNet-20: DENT on its first member, no training"
    )
    parser.add_argument(
        "--confident", action="store_true", help="of `dent`: only the paper's 14 runs of 100 steps"
    )
    parser.add_argument("--folder", type=Path, default=Path("logs/transductive"))
    options, options.fit = parser.parse_known_args()
    print("| defense | attack | accuracy | 95 % interval |\n|---|---|---|---|")
    found, scores = defaultdict(list), defaultdict(list)
    for name, defense, attacks, loader, protocol in tables[options.table](options):
        # One attack at a time: those that ended are left alone by the same command.
        alone = [{attack: attacks[attack]} for attack in attacks]
        for number, played in enumerate([attacks] if defense.stateful else alone):
            result = kept(name, defense, played, loader, protocol, options)
            for attack in played if number else ["clean", *played]:
                low, high = (f"{100 * end:.1f}" for end in result.interval(attack))
                accuracy = 100 * result.accuracy(attack)
                found[name, attack].append(accuracy)
                scores[name, attack].append(result.per_image(attack))
                print(f"| {name} | {attack} | {accuracy:.1f} | {low} to {high} |", flush=True)
                if protocol and options.private_draws > 1:
                    by_draw = 100 * result.scores[:, result.names.index(attack)].mean(0)
                    print(f"{attack}, by defender: {by_draw.min():.1f} to {by_draw.max():.1f}")
        print(f"intervals cover {result.covers}")
    for first, second in GAPS[options.table]:
        if {first, second} <= scores.keys():
            print(f"{', '.join(second)} - {', '.join(first)}: {gap(scores[first], scores[second])}")
    for (name, attack), values in found.items():
        if len(values) > 1:
            print(f"| {name} | {attack} | {mean(values):.1f} ± {stdev(values):.1f} | over seeds |")


if __name__ == "__main__":
    main()
