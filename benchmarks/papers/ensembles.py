"""A recipe's randomized ensemble over training seeds and radii, beside its first member alone.

    python benchmarks/papers/ensembles.py --config configs/dverge_digits.yaml --eps 0.02 0.05 0.1

Trains the recipe once per seed and attacks the same test images within each radius. "PGD" is
adaptive PGD on the ensemble and PGD on the first member; "ARC" has the paper's local radius, and
"climb" is `LatticeClimber`. --attacks also has PGD with ten restarts, on the expected logits, on
the first member and on a drawn one. Prints means over seeds with 95 % t intervals over seeds.
Further options are those of `lightning-rob fit`. Checkpoints and finished rows stay in --folder:
the same command resumes.
"""

import argparse
import json
from pathlib import Path
from zlib import crc32

import torch
from torch.utils.data import DataLoader

from lightning_rob import ARC, PGD, Ensemble, LatticeClimber, OnMember, Threat, evaluate
from lightning_rob.attacks import RandomMember
from lightning_rob.cli import main as command_line
from lightning_rob.cli.lightning_cli import RobustCLI
from lightning_rob.defenses import first_member
from lightning_rob.metrics import student
from lightning_rob.objectives import ce_of_mean_logits
from lightning_rob.recipes.shipped import find_recipe


def attacks(threat, neighbours):
    """Return the attacks within a threat by name."""
    eps, steps = threat.eps, 20
    pgd = PGD(threat, steps, eps / 4, random_start=False)
    radius = eps if threat.norm == "linf" else eps / 4
    return {
        "PGD": pgd,
        "ARC": ARC(threat, steps, radius, neighbours, early_stop=True),
        "climb": LatticeClimber(threat),
        "restarts": PGD(threat, steps, eps / 4, restarts=10),
        "logits": PGD(threat, steps, eps / 4, objective=ce_of_mean_logits, random_start=False),
        "first member": OnMember(pgd, 0),
        "drawn member": RandomMember(pgd),
    }


def trained(run, args):
    """Train by `lightning-rob fit`, or go on where it stopped; return defense and data module.

    Epochs are not evaluated: recipes that select an epoch by validation need `monitor: null`.
    """
    args = [
        *args,
        *(f"--trainer.logger.save_dir={run.parent}", f"--trainer.logger.name={run.name}"),
        "--trainer.logger.version=0",
    ]
    checkpoint, given = run / "version_0/checkpoints/last.ckpt", run / "options.json"
    run.mkdir(parents=True, exist_ok=True)
    recipes = (find_recipe(arg.removeprefix("--config=")) for arg in args)
    asked = [*args, *(f"{f.name} of checksum {crc32(f.read_bytes()):x}" for f in recipes if f)]
    found, done = json.loads(given.read_text()) if given.exists() else asked, run / "trained"
    if found != asked:
        here, there = (sorted({*a} - {*b}) for a, b in ((asked, found), (found, asked)))
        raise SystemExit(f"{run} has other options, {there}, not {here}: give another --folder")
    given.write_text(json.dumps(asked))
    if not done.exists():
        resumed = [f"--ckpt_path={checkpoint}"] if checkpoint.exists() else []
        unwatched = ["--test_after_fit=false", "--trainer.limit_val_batches=0"]
        command_line(["fit", *args, *unwatched, *resumed])
        done.touch()
    built = RobustCLI(args, run=False)
    saved = torch.load(checkpoint, weights_only=True)
    built.model.load_state_dict(saved["state_dict"])
    built.model.on_load_checkpoint(saved)
    built.datamodule.setup("test")
    return built.model.defense.eval(), built.datamodule


def measured(defense, batches, eps, options, resume):
    """Return accuracies in per cent by name, of the defense and of its first member alone."""
    found, tries = {}, attacks(Threat(options.norm, eps), options.neighbours)
    chosen = {name: tries[name] for name in options.attacks}
    for label, target in {"": defense, "first: ": first_member(defense)}.items():
        result = evaluate(
            target, chosen, batches, max_images=options.images, resume=resume, progress=False
        )
        found |= {label + name: 100 * result.accuracy(name) for name in ["clean", *chosen]}
    return found


def rows(options):
    """Return accuracies by (radius, members) and name: a list over seeds."""
    record = options.folder / "rows.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    done = {line["key"]: line["accuracy"] for line in map(json.loads, lines)}
    table = {}
    for seed in range(options.seeds):
        args = ["--config", options.config, f"--seed_everything={seed}"]
        defense, data = trained(options.folder / f"seed{seed}", [*args, *options.fit])
        batches = DataLoader(data.parts["test"], 500)
        for count in options.members or [len(defense.classifiers)]:
            part = Ensemble(defense.classifiers[:count]) if options.members else defense
            for eps in options.eps:
                key = f"{seed} {count} {options.norm} {eps} {options.images} {options.neighbours}"
                key += " " + " ".join(options.attacks) + (" equal" if options.members else "")
                if key not in done:
                    done[key] = measured(part, batches, eps, options, options.folder / "resume")
                    with record.open("a") as file:
                        file.write(json.dumps({"key": key, "accuracy": done[key]}) + "\n")
                for name, value in done[key].items():
                    table.setdefault((eps, count), {}).setdefault(name, []).append(value)
    return table


def cell(values, sign=""):
    mean = f"{sum(values) / len(values):{sign}.1f}"
    if min(values) == max(values):  # a single run, or no difference: no interval
        return mean
    low, high = student(values)
    return f"{mean} [{low:{sign}.1f}, {high:{sign}.1f}]"


def difference(row, first, second):
    return cell([a - b for a, b in zip(row[first], row[second], strict=True)], "+")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--norm", default="linf")
    parser.add_argument("--eps", type=float, nargs="+", default=[0.1])
    parser.add_argument("--members", type=int, nargs="+", help="first members, equally probable")
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--neighbours", type=int, default=4, help="classes that ARC searches, G")
    parser.add_argument("--attacks", nargs="+", default=["PGD", "ARC", "climb"], metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("logs/ensembles"))
    options, options.fit = parser.parse_known_args()
    options.folder = options.folder / Path(options.config).stem
    table = rows(options)
    names = list(next(iter(table.values())))
    gaps = [("PGD", name) for name in options.attacks[1:]]
    gaps += [(f"first: {name}", name) for name in options.attacks]
    heads = ["radius", "members", *names, *(f"{one} - {other}" for one, other in gaps)]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for (eps, count), row in table.items():
        cells = [f"{eps:g}", str(count), *(cell(row[name]) for name in names)]
        print(f"| {' | '.join([*cells, *(difference(row, *gap) for gap in gaps)])} |")
    over = "95 % t over seeds" if options.seeds > 1 else "no interval over one seed"
    print(f"seeds: {options.seeds}, images: {options.images}, {options.norm}; {over}")


if __name__ == "__main__":
    main()
