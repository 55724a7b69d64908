"""The demo over several training seeds: is the ensemble better than its first member alone?

    OMP_WAIT_POLICY=PASSIVE python benchmarks/demo_seeds.py --seeds 5

Trains `configs/demo.yaml` once per seed (same photographs, same test crops), attacks all test
images with the recipe's own attacks, each on the ensemble and on its first member alone, and prints
two Markdown tables: accuracies, and differences, paired by image within a seed and by seed in the
last row.
"""

import argparse
from pathlib import Path

import torch

from lightning_rob.callbacks import RobustEval
from lightning_rob.cli import main as command_line
from lightning_rob.metrics import robust_accuracy, student

RECIPE = Path(__file__).parent.parent / "configs/demo.yaml"
GAPS = (
    ("adaptive_pgd", "arc"),
    ("adaptive_pgd", "climb"),
    ("arc", "climb"),
    # The same attack on the first member and on the ensemble: above 0 the ensemble is worse.
    ("member_1", "adaptive_pgd"),
    ("member_1_arc", "arc"),
    ("member_1_climb", "climb"),
)


def trained(seed, folder):
    """Build the recipe and train its ensemble with this seed."""
    from lightning_rob.cli.lightning_cli import RobustCLI

    options = [
        *("--config", str(RECIPE), f"--seed_everything={seed}", f"--data.init_args.seed={seed}"),
        f"--trainer.logger.init_args.save_dir={folder}/seed{seed}",
        "--trainer.logger.init_args.version=0",
    ]
    checkpoint, done = (
        folder / f"seed{seed}/version_0/checkpoints/last.ckpt",
        folder / f"done{seed}",
    )
    if not done.exists():
        resumed = [f"--ckpt_path={checkpoint}"] if checkpoint.exists() else []
        # Monitoring changes no weight, so it can be left out.
        unwatched = ["--test_after_fit=false", "--trainer.limit_val_batches=0"]
        command_line(["fit", *options, *unwatched, *resumed])
        done.touch()
    built = RobustCLI(options, run=False)
    saved = torch.load(checkpoint, weights_only=True)
    built.model.load_state_dict(saved["state_dict"])
    built.model.on_load_checkpoint(saved)
    return built


@torch.no_grad()
def scores(defense, x, y):
    return robust_accuracy(defense(x), y).double()


def evaluate(seed, folder):
    """Return scores of the test images by name: clean, and under each attack of the recipe."""
    built = trained(seed, folder)
    ensemble = built.model.defense.eval()
    built.datamodule.setup("test")
    samples = built.datamodule.parts["test"]
    images, labels, _ = zip(*(samples[i] for i in range(len(samples))), strict=True)
    x, y = torch.stack(images), torch.tensor(labels)
    found = {"clean": scores(ensemble, x, y)}
    for evaluation in built.trainer.callbacks:
        if isinstance(evaluation, RobustEval):
            defense = evaluation.target(ensemble)
            for name, attack in evaluation.attacks.items():
                found[name] = scores(defense, attack(defense, x, y), y)
    return found


def percent(run, name):
    return f"{100 * run[name].mean():.1f}"


def paired(values):
    low, high = student(values)
    return f"{100 * sum(values) / len(values):+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def table(heads, rows):
    print(f"| seed | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")
    print()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("logs/demo_seeds"))
    options = parser.parse_args()
    runs = {seed: evaluate(seed, options.folder) for seed in range(options.seeds)}
    names = list(runs[0])
    means = {name: torch.stack([run[name].mean() for run in runs.values()]) for name in names}
    figures = {**runs, "mean": means}
    table(names, {seed: [percent(run, name) for name in names] for seed, run in figures.items()})
    gaps = {
        seed: [paired((run[one] - run[other]).tolist()) for one, other in GAPS]
        for seed, run in figures.items()
    }
    table([f"{one} - {other}" for one, other in GAPS], gaps)
    print(f"{len(runs[0]['clean'])} test images; intervals are 95 % t intervals.")


if __name__ == "__main__":
    main()
