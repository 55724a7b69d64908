"""Does Bayesian optimization find more robust random transforms? (Sitawarin et al. 2022, section 5)

    python benchmarks/papers/tuning.py --trials 80 --seeds 3

Searches the strengths of the 20 transforms of `configs/rt_patches.yaml`, of which each copy of an
image passes 8, by Bayesian optimization and at random: --trials short trainings of a SmallCNN on
`Patches10` each, scored under a fast attack. Then trains the untuned recipe (alpha 0.25, p 0.5)
and the two best ones in full and attacks the same test images within linf 8/255. Prints accuracies
over ten predictions of each image and differences to the untuned recipe, with 95 % t intervals over
seeds; those of one seed are over images. The same command resumes, and more --trials go on.
"""

import argparse
import json
from pathlib import Path

import yaml
from ensembles import trained
from random_transforms import gap, score
from torch.utils.data import DataLoader

from lightning_rob import PGD, SurrogateTransforms, Threat, evaluate
from lightning_rob.attacks import aggmo
from lightning_rob.cli import main as command_line
from lightning_rob.objectives import linear

RECIPE = Path(__file__).parents[2] / "configs/rt_patches.yaml"
TRANSFORMS = "model.init_args.defense.init_args.transforms"
START = {"alpha": 0.25, "p": 0.5}
BOUNDS = {"alpha": [0, 0.5], "p": [0, 1]}
THREAT = Threat("linf", 8 / 255)
FAST = {
    "class_path": "PGD",
    "init_args": {
        "threat": {"norm": "linf", "eps": THREAT.eps},
        "steps": 10,
        "step_size": THREAT.eps / 4,
        "draws": 4,
        "objective": "lightning_rob.objectives.linear",
        "momentum": [0.0, 0.9, 0.99],
    },
}
TRIAL = {
    "data.init_args.limit_train": 800,
    "trainer.max_epochs": 4,
    "model.init_args.lr_scheduler.init_args.T_max": 4,
    "model.init_args.defense.init_args.draws": 10,
}


def recipe(options):
    """Return the options of `fit` for the untuned recipe, and the search space."""
    own = yaml.safe_load(RECIPE.read_text())["model"]["init_args"]["defense"]["init_args"]
    kinds = {name: next(iter(arguments)) for name, arguments in own["transforms"].items()}
    untuned = {name: {kind: START[kind]} for name, kind in kinds.items()}
    args = [
        f"--config={RECIPE}",
        "--model.net={class_path: SmallCNN, init_args: {channels: 3}}",
        "--model.optimizer={class_path: torch.optim.Adam, init_args: {lr: 0.01}}",
        "--model.lr_scheduler.init_args.T_max=10",
        f"--model.defense.transforms={json.dumps(untuned)}",
        "--trainer.max_epochs=10",
        "--data.train_size=3000",
        "--data.val_size=100",
        *options.fit,
    ]
    variables = {f"{TRANSFORMS}.{n}.{kind}": BOUNDS[kind] for n, kind in kinds.items()}
    objective = {"val/robust/fast": 1.0}
    return args, {"variables": variables, "objective": objective, "trial": TRIAL, "prune": True}


def tuned(kind, seed, options):
    """Return the best recipe of a search, which goes on where it stopped."""
    args, space = recipe(options)
    folder = options.folder / f"{kind}{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "space.yaml").write_text(yaml.safe_dump(space))
    scored = {"every_n_epochs": 4, "max_images": 100, "attacks": {"fast": FAST}}
    callback = {"class_path": "RobustEval", "init_args": scored}
    args += [f"--trainer.callbacks+={json.dumps(callback)}"]
    random = options.trials if kind == "random" else options.random
    budget = [f"--trials={options.trials}", f"--min_trials={options.trials}"]
    place = [f"--space={folder}/space.yaml", f"--out={folder}", f"--seed={seed}"]
    command_line(["tune", *args, f"--data.seed={seed}", *place, *budget, f"--random={random}"])
    return folder / "best.yaml"


def scores(kind, seed, options):
    """Return the scores of the test images by attack, of a recipe trained in full."""
    run = options.folder / f"{kind}{seed}-{options.trials}"
    record = options.folder / f"{run.name}-{options.images}-{options.steps}.json"
    own, _ = recipe(options)
    args = own if kind == "untuned" else [f"--config={tuned(kind, seed, options)}"]
    args += [f"--seed_everything={seed}"]
    defense, data = trained(run, args)
    if record.exists():
        return json.loads(record.read_text())
    common = {"steps": options.steps, "step_size": THREAT.eps / 8, "draws": 5}
    mine = {"objective": linear, "momentum": aggmo(6), "backward": SurrogateTransforms()}
    result = evaluate(
        defense,
        {"EoT": PGD(THREAT, **common), "linear, AggMo": PGD(THREAT, **common, **mine)},
        DataLoader(data.parts["test"], 100),
        inferences=10,
        max_images=options.images,
        resume=options.folder / "resume",
        progress=False,
    )
    found = {each: result.per_image(each).tolist() for each in ("clean", "EoT", "linear, AggMo")}
    record.write_text(json.dumps(found))
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=80, help="of each search")
    parser.add_argument("--random", type=int, default=12, help="before the optimizer proposes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=200, help="test images")
    parser.add_argument("--steps", type=int, default=40, help="of the attacks on full trainings")
    parser.add_argument("--folder", type=Path, default=Path("logs/tuning"))
    options, options.fit = parser.parse_known_args()
    kinds = ("untuned", "random", "bayesian")
    found = {k: [scores(k, seed, options) for seed in range(options.seeds)] for k in kinds}
    names = list(found["untuned"][0])
    heads = [*names, *(f"{name} - untuned" for name in names)]
    print(f"| | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    columns = {k: {n: [each[n] for each in found[k]] for n in names} for k in kinds}
    for kind, row in columns.items():
        cells = [score(row[name]) for name in names]
        if kind != "untuned":
            cells += [gap(row[name], columns["untuned"][name]) for name in names]
        print(f"| {kind} | {' | '.join(cells)} |")
    gaps = [f"{name} {gap(columns['bayesian'][name], columns['random'][name])}" for name in names]
    print(f"bayesian - random: {', '.join(gaps)}")
    print(f"{options.seeds} seeds, {options.trials} trials, {options.images} images")


if __name__ == "__main__":
    main()
