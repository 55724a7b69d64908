"""Measurements of scaling and export for `docs/running.md`.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/reliability_scale.py

Every row is (promise, target, result) and is measured by running the promise: minutes.
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("LIGHTNING_ROB_ALLOW_IMPORT", "tests")

import torch

from lightning_rob.commands.export.program import export
from lightning_rob.defenses import Defense, Ensemble, Mixture, RandomTransforms, TransformEnsemble
from lightning_rob.rules import VOTING_RULES, majority
from lightning_rob.transforms import (
    Affine,
    ColorJitter,
    GaussianNoise,
    HorizontalFlip,
    PoissonNoise,
)
from tests.commands.test_export import nets
from tests.test_torchrun import by_slurm, by_torchrun, one_and_two

Row = tuple[str, str, str]
SETS, IMAGES = 3, 24


def figures() -> list[Row]:
    """Return the rows."""
    starts = {"torchrun": by_torchrun, "variables of SLURM": by_slurm}
    rows = [agree(name, start) for name, start in starts.items()]
    return [*rows, *exported()]


def agree(name, start) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        one, two = one_and_two(Path(folder), start)
    same = sum(two.get(key) == value for key, value in one.items())
    return (f"accuracies of two nodes ({name}, gloo) that equal one process's", "3/3", f"{same}/3")


def defenses() -> dict[str, Defense]:
    kinds = [GaussianNoise(0.1), Affine(), HorizontalFlip(p=0.5), PoissonNoise(0.1), ColorJitter()]
    members, (net,) = nets(3), nets(1)
    return {
        **{
            f"Ensemble, {name}": Ensemble(members, [0.5, 0.3, 0.2], r)
            for name, r in VOTING_RULES.items()
        },
        "RandomTransforms": RandomTransforms(net, kinds, size=2, draws=4),
        "RandomTransforms, majority": RandomTransforms(net, kinds[:3], 2, 4, rule=majority),
        "TransformEnsemble": TransformEnsemble(members, ["clean", "rotate_90", "noise_gaussian"]),
        "Mixture": Mixture([Ensemble(members), RandomTransforms(net, kinds[:1], 1, 3)]),
    }


def exported() -> list[Row]:
    """Compare each exported defense on several sets of images and keys after loading it."""
    kinds, equal, worst = defenses(), 0, 0.0
    for number in range(SETS):
        chance = torch.Generator().manual_seed(number)
        images = torch.rand(IMAGES, 3, 8, 8, generator=chance)
        keys = torch.randint(2**62, (IMAGES,), generator=chance)
        for defense in kinds.values():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    difference = export(defense, Path(folder) / "x.pt2", images, keys, seed=number)
                except ValueError as error:
                    print(error)
                    continue
            equal += 1
            worst = max(worst, difference)
    total = SETS * len(kinds)
    what = f"exported defenses that predict alike after loading (largest difference {worst:.1e})"
    return [(what, f"{total}/{total}", f"{equal}/{total}")]


if __name__ == "__main__":
    for row in figures():
        print(" | ".join(row))
