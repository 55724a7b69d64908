"""Which random transforms, how many, which rule and which attack (Sitawarin et al. 2022).

    python benchmarks/papers/random_transforms.py --table groups --seeds 3

Trains a SmallCNN on `Patches10` behind the transforms of `configs/rt_patches.yaml`, and in two
tables behind others, and attacks the same test images within linf 8/255. Tables: `groups`, one
group of transforms at a time (the paper's Table 5); `sizes`, the number S of transforms (Fig. 13);
`rules`, decision rule and draws of a prediction (Fig. 11, 12); `parts`, one order of all draws,
the loss and AggMo beside EoT (Table 4); `autoattack`, two of its four parts (Table 2); `advrt`,
adversarial training with the transforms and without (Table 3), by EoT as in the paper's code or by
the paper's own attack, five steps each. Prints accuracies over ten predictions of each image, also
under the attack that is stronger on it ("worst", chosen on half of the predictions, scored on the
other half), and differences to EoT or, by attack, to the row --against, with 95 % t intervals over
seeds; those of one seed are over images. Checkpoints and finished rows stay in --folder: the same
command resumes.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

from ensembles import cell, trained
from torch.utils.data import DataLoader

from lightning_rob import PGD, AutoAttack, RandomTransforms, SurrogateTransforms, Threat, evaluate
from lightning_rob.attacks import aggmo
from lightning_rob.objectives import linear
from lightning_rob.rules import majority, mean_logits, mean_probs

CONFIGS = Path(__file__).parents[2] / "configs"
GROUPS = ("noise", "blur", "color", "edge", "compress", "geometric", "stylize")
SIZES = (1, 2, 4, 8)
RULES = {rule.__name__: rule for rule in (mean_probs, majority, mean_logits)}
DRAWS = (1, 5, 20)
THREAT = Threat("linf", 8 / 255)
TRAINING = {
    "class_path": "PGD",
    "init_args": {
        "threat": {"norm": "linf", "eps": THREAT.eps},
        "steps": 5,
        "step_size": THREAT.eps / 4,
    },
}
EOT = {"draws": 2, "objective": "lightning_rob.objectives.ce_of_mean_probs"}
OWN = {
    "draws": 2,
    "objective": "lightning_rob.objectives.linear",
    "momentum": list(aggmo(6)),
    "backward": "SurrogateTransforms",
}


def suites(options, random=True):
    """Return the attacks of a table by name; SmallCNN has no residual branches for SGM."""
    common = {"steps": options.steps, "step_size": THREAT.eps / 8}
    common["draws"] = options.draws if random else 1
    surrogate = SurrogateTransforms(gradients=options.gradients)
    order, six = {"backward": surrogate if random else None}, {"momentum": aggmo(6)}
    loss = {"objective": linear, **order}
    tried = {"EoT": PGD(THREAT, **common), "linear, AggMo": PGD(THREAT, **common, **loss, **six)}
    if options.table == "parts":
        tried["EoT, one order"] = PGD(THREAT, **common, **order)
        tried["linear"] = PGD(THREAT, **common, **loss)
        tried["EoT, AggMo"] = PGD(THREAT, **common, **six)
    if options.table == "autoattack":
        parts = ("apgd-ce", "apgd-t")
        tried["AutoAttack's APGD"] = AutoAttack(THREAT, "custom", parts, options.draws)
    return tried


def against(**attack):
    """Return the options that train on the images of an attack."""
    init_args = TRAINING["init_args"] | attack
    return [f"--model.attack={json.dumps(TRAINING | {'init_args': init_args})}"]


def recipes(table):
    """Return the options of `fit` by the name of the training run."""
    if table == "advrt":
        plain = ["--model.defense=Single", "--model.draws=null"]
        plain += ["--model.criterion=lightning_rob.objectives.expected_ce"]
        advrt = {"AdvRT, EoT": against(**EOT), "AdvRT, own attack": against(**OWN)}
        advrt = {name: [*extra, "--model.draws=2"] for name, extra in advrt.items()}
        return {"Madry": [*against(), *plain], "RT": [], **advrt}
    if table == "groups":
        return {group: ["--config", f"group_{group}"] for group in GROUPS}
    if table == "sizes":
        return {f"S = {size}": [f"--model.defense.size={size}"] for size in SIZES}
    return {"S = 8": []}


def variants(table, defense):
    """Return the defenses that one trained network is evaluated as, by name."""
    if table != "rules":
        return {"": defense}
    kinds = list(defense.transforms.values())
    return {
        f"{name}, {draws} draws": RandomTransforms(defense.net, kinds, defense.size, draws, rule)
        for name, rule in RULES.items()
        for draws in DRAWS
    }


def rows(options):
    """Return scores of images by row and attack: a list over seeds."""
    record = options.folder / "rows.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    done = {line["key"]: line["scores"] for line in map(json.loads, lines)}
    table = {}
    budget = f"{options.images} {options.steps} {options.draws} {options.gradients or ''}".strip()
    for seed in range(options.seeds):
        for run, extra in recipes(options.table).items():
            if options.only and options.table != "rules" and run not in options.only:
                continue
            args = ["--config", str(CONFIGS / "rt_patches.yaml"), *extra, *options.fit]
            args += [f"--seed_everything={seed}"]
            defense, data = trained(options.folder / f"{run} seed{seed}", args)
            tried = suites(options, isinstance(defense, RandomTransforms))
            tried = {n: tried[n] for n in tried if n in ("EoT", *(options.attacks or tried))}
            names = ["clean", *tried, "worst"]
            for name, variant in variants(options.table, defense).items():
                if options.only and options.table == "rules" and name not in options.only:
                    continue
                key = f"{run} {name} {seed} {budget} {' '.join(names)}"
                if key not in done:
                    result = evaluate(
                        variant.eval(),
                        tried,
                        DataLoader(data.parts["test"], 100),
                        inferences=10,
                        max_images=options.images,
                        resume=options.folder / "resume",
                        progress=False,
                    )
                    done[key] = {each: result.per_image(each).tolist() for each in names}
                    with record.open("a") as file:
                        file.write(json.dumps({"key": key, "scores": done[key]}) + "\n")
                for each, value in done[key].items():
                    table.setdefault(name or run, {}).setdefault(each, []).append(value)
    return table


def score(runs, sign=""):
    """Return a mean of scores in per cent, over seeds, or over the images of a single seed."""
    points = [[100 * score for score in run] for run in runs]
    return cell([fmean(run) for run in points] if len(points) > 1 else points[0], sign)


def gap(one, other):
    """Return the difference in points, over seeds, or over the images of a single seed."""
    pairs = zip(one, other, strict=True)
    return score([[a - b for a, b in zip(*pair, strict=True)] for pair in pairs], "+")


def main():
    parser = argparse.ArgumentParser()
    tables = ("groups", "sizes", "rules", "parts", "autoattack", "advrt")
    parser.add_argument("--table", choices=tables, required=True)
    parser.add_argument("--only", nargs="+", metavar="RUN", help="these rows alone")
    parser.add_argument("--attacks", nargs="+", metavar="COLUMN", help="beside EoT, these alone")
    parser.add_argument("--gradients", choices=("identity",), help="of transforms, linear loss")
    parser.add_argument("--against", metavar="ROW", help="print differences to this row")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--draws", type=int, default=5, help="of a step of an attack")
    parser.add_argument("--folder", type=Path, default=Path("logs/random_transforms"))
    options, fit = parser.parse_known_args()
    runs = [*recipes(options.table)]
    if options.table == "rules":
        runs = [f"{rule}, {draws} draws" for rule in RULES for draws in DRAWS]
    asked = [("only", run, runs) for run in options.only or ()]
    asked += [("attacks", name, [*suites(options)]) for name in options.attacks or ()]
    shown = options.only or runs
    if options.against:
        asked.append(("against", options.against, shown))
    for option, name, allowed in asked:
        if name not in allowed:
            parser.error(f"--{option}: choose from {', '.join(map(repr, allowed))}, not {name!r}")
    options.fit = [
        "--model.net={class_path: SmallCNN, init_args: {channels: 3}}",
        "--model.optimizer={class_path: torch.optim.Adam, init_args: {lr: 0.01}}",
        "--model.lr_scheduler.init_args.T_max=10",
        "--trainer.max_epochs=10",
        *fit,
    ]
    table = rows(options)
    names = list(next(iter(table.values())))
    other = options.against
    minus = {name: f"{name} - {other or 'EoT'}" for name in names if other or name in names[2:-1]}
    heads = [*names, *minus.values()]
    print(f"| | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for key, row in table.items():
        cells = [score(row[name]) for name in names]
        if key != other:
            cells += [gap(row[n], table[other][n] if other else row["EoT"]) for n in minus]
        print(f"| {key} | {' | '.join(cells)} |")
    over = "seeds" if options.seeds > 1 else "images"
    print(f"seeds: {options.seeds}, images: {options.images}; 95 % t intervals over {over}")


if __name__ == "__main__":
    main()
