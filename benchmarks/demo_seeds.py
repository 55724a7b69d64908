"""The demo over several training seeds: does ARC go below adaptive PGD, image by image?

    OMP_WAIT_POLICY=PASSIVE python benchmarks/demo_seeds.py --seeds 5

Trains `configs/demo.yaml` once per seed (same photographs, same test crops), then attacks all test
images with adaptive PGD and with ARC at two local radii, full search, and prints a Markdown table.
Differences are paired by image within a seed, and by seed in the last row.
"""

import argparse
from pathlib import Path

import torch

from lightning_rob.attacks import ARC, PGD
from lightning_rob.cli import main as command_line
from lightning_rob.defenses import first_member
from lightning_rob.metrics import robust_accuracy, student
from lightning_rob.threat import Threat

RECIPE = Path(__file__).parent.parent / "configs/demo.yaml"
THREAT = Threat("linf", "8/255")
GREEDY = PGD(THREAT, steps=20, step_size="2/255", random_start=False)
LOCAL = {
    name: ARC(THREAT, steps=20, step_size=radius, drop_fooled=True)
    for name, radius in {"arc": "8/255", "arc_quarter": "2/255"}.items()
}


def trained(seed, folder):
    """The demo's ensemble and test images after training with this seed."""
    from lightning_rob.run import Command

    options = [
        *("--config", str(RECIPE), f"--seed_everything={seed}", f"--data.init_args.seed={seed}"),
        f"--trainer.logger.init_args.save_dir={folder}/seed{seed}",
        "--trainer.logger.init_args.version=0",
    ]
    checkpoints = folder / f"seed{seed}/version_0/checkpoints"
    if not checkpoints.exists():
        # Monitoring changes no weight, so it can be left out.
        command_line(["fit", *options, "--test_after_fit=false", "--trainer.limit_val_batches=0"])
    built = Command(options, run=False)
    checkpoint = torch.load(next(checkpoints.glob("*.ckpt")), weights_only=True)
    built.model.load_state_dict(checkpoint["state_dict"])
    built.model.on_load_checkpoint(checkpoint)
    built.datamodule.setup("test")
    samples = built.datamodule.parts["test"]
    x, y, _ = zip(*(samples[i] for i in range(len(samples))), strict=True)
    return built.model.defense.eval(), torch.stack(x), torch.tensor(y)


@torch.no_grad()
def scores(defense, x, y):
    return robust_accuracy(defense(x), y).double()


def evaluate(seed, folder):
    ensemble, x, y = trained(seed, folder)
    single = first_member(ensemble)
    found = {
        "clean": scores(ensemble, x, y),
        "member_1": scores(single, GREEDY(single, x, y), y),
        "apgd": scores(ensemble, GREEDY(ensemble, x, y), y),
        **{name: scores(ensemble, arc(ensemble, x, y), y) for name, arc in LOCAL.items()},
    }
    found["arc_min"] = torch.minimum(found["arc"], found["arc_quarter"])
    return found


def paired(values):
    low, high = student(values)
    return f"{100 * sum(values) / len(values):+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("logs/demo_seeds"))
    options = parser.parse_args()
    runs = [evaluate(seed, options.folder) for seed in range(options.seeds)]
    names = list(runs[0])
    gaps = {"apgd - arc_min": ("apgd", "arc_min"), "member_1 - arc_min": ("member_1", "arc_min")}
    print("| seed | " + " | ".join([*names, *gaps]) + " |")
    print("|---|" + "---|" * (len(names) + len(gaps)))
    for seed, run in enumerate(runs):
        cells = [f"{100 * run[name].mean():.1f}" for name in names]
        cells += [paired((run[a] - run[b]).tolist()) for a, b in gaps.values()]
        print(f"| {seed} | " + " | ".join(cells) + " |")
    means = [
        f"{100 * sum(float(run[name].mean()) for run in runs) / len(runs):.1f}" for name in names
    ]
    means += [paired([float((r[a] - r[b]).mean()) for r in runs]) for a, b in gaps.values()]
    print("| mean | " + " | ".join(means) + " |")
    print(f"\n{len(runs[0]['clean'])} test images; intervals are 95 % t intervals.")


if __name__ == "__main__":
    main()
