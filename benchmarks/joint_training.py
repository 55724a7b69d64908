"""Ensembles of three on the digits, trained in five ways: how well do attacks transfer?

    OMP_WAIT_POLICY=PASSIVE python benchmarks/joint_training.py --figure transfer.png

Trains `configs/{iat,adp,gal,trs,dverge}_digits.yaml` unless --folder has their checkpoints, then
attacks each with adaptive PGD, ARC and the climb, and each member alone with PGD, within linf 0.1.
Prints a Markdown table and draws the transfer matrices.
"""

import argparse
import json
from pathlib import Path

import torch

from lightning_rob.cli import main as command_line
from lightning_rob.plots import blank, save, shade

ROOT = Path(__file__).parent.parent
METHODS = ("iat", "adp", "gal", "trs", "dverge")
PLUGINS = ("adaptive_pgd", "arc", "climb", "members")


def trained(method, folder):
    """Return the last checkpoint of a method's recipe."""
    checkpoint = folder / method / "version_0/checkpoints/last.ckpt"
    if not checkpoint.exists():
        command_line(
            [
                *("fit", "--config", str(ROOT / f"configs/{method}_digits.yaml")),
                *(f"--trainer.logger.save_dir={folder}", f"--trainer.logger.name={method}"),
                *("--trainer.logger.version=0", "--test_after_fit=false"),
            ]
        )
    return checkpoint


def attacked(method, folder, images):
    """Return the records of the evaluation: accuracies by name, and the matrix."""
    run = folder / f"{method}_attacked"
    if not (run / "version_0/transfer.jsonl").exists():
        plugins = []
        for name in PLUGINS:
            plugins += [f"--trainer.callbacks+={ROOT}/callbacks/{name}.yaml"]
            plugins += ["--trainer.callbacks.eps=0.1", f"--trainer.callbacks.max_images={images}"]
        command_line(
            [
                *("test", "--ckpt_path", str(trained(method, folder)), *plugins),
                *(f"--trainer.logger.save_dir={folder}", f"--trainer.logger.name={run.name}"),
                "--trainer.logger.version=0",
            ]
        )
    lines = [
        json.loads(line)
        for file in ("robust.jsonl", "transfer.jsonl")
        for line in (run / "version_0" / file).read_text().splitlines()
    ]
    figures = {line["name"]: line for line in lines if "accuracy" in line and line["n"] == images}
    matrix = next(line["matrix"] for line in lines if line["name"] == "pgd" and "matrix" in line)
    return figures, torch.tensor(matrix)


def drawn(matrices):
    """Draw the transfer matrices of the methods side by side."""
    figure = blank(9.6, 2.4)
    for place, axes in enumerate(figure.subplots(1, len(matrices))):
        title, matrix = list(matrices.items())[place]
        members = [str(i + 1) for i in range(len(matrix))]
        shade(axes, 100 * matrix.double(), members, members)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("attacked member")
        if place == 0:
            axes.set_ylabel("answering member")
    return figure


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("logs/joint"))
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--figure", type=Path, help="of the matrices; none without it")
    options = parser.parse_args()
    names, matrices = ("clean", "adaptive_pgd", "arc", "climb"), {}
    print(f"| method | {' | '.join(names)} | PGD on the member itself | on another |")
    print(f"|---|{'---|' * (len(names) + 2)}")
    for method in METHODS:
        figures, matrix = attacked(method, options.folder, options.images)
        matrices[method.upper()] = matrix
        own, count = matrix.diagonal().mean(), len(matrix)
        other = (matrix.sum() - matrix.trace()) / (count * (count - 1))
        cells = [f"{100 * figures[name]['accuracy']:.1f}" for name in names]
        cells += [f"{100 * own:.1f}", f"{100 * other:.1f}"]
        print(f"| {method.upper()} | {' | '.join(cells)} |", flush=True)
    if options.figure:
        save(drawn(matrices), options.figure)


if __name__ == "__main__":
    main()
