"""Mixed precision is for training: an evaluation is in float32."""

import math

import pytest
import torch
from torch import Tensor

from lightning_rob.objectives import expected_ce
from tests.tiny import arc, pgd, recipe, records, robust_eval, run, weights

CHECKPOINT = "run/version_0/checkpoints/epoch=3-step=8.ckpt"
SEEN: list[tuple[torch.dtype, bool]] = []


def witness(logits: Tensor, shares: Tensor, y: Tensor) -> Tensor:
    """The usual objective, which records the precision of its logits."""
    SEEN.append((logits.dtype, torch.is_autocast_enabled("cpu")))
    return expected_ce(logits, shares, y)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    mixed = ["--trainer.accumulate_grad_batches=2", "--trainer.precision=bf16-mixed"]
    run("fit", "--config", recipe(folder), *mixed)
    return folder


def test_a_mixed_accumulated_fit_gives_finite_accuracies(trained):
    figures = [r["accuracy"] for r in records(trained)]
    assert len(figures) >= 12 and all(0 <= figure <= 1 for figure in figures)
    saved = weights(trained / CHECKPOINT)  # 4 batches an epoch are 2 steps
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())
    assert {t.dtype for t in saved.values() if t.is_floating_point()} == {torch.float32}


def test_accuracies_do_not_depend_on_the_precision(trained, tmp_path):
    found = []
    for name in ("32-true", "bf16-mixed"):
        objective = "tests.test_precision.witness"
        suite = robust_eval({"apgd": pgd(objective=objective), "arc": arc(random_start=True)})
        file = recipe(tmp_path / name, **{"trainer__callbacks+": [suite]})
        SEEN.clear()
        args = ["--ckpt_path", trained / CHECKPOINT, f"--trainer.precision={name}"]
        run("test", "--config", file, *args)
        assert set(SEEN) == {(torch.float32, False)}
        robust = [r for r in records(tmp_path / name) if r["name"] != "clean"]
        found.append({r["name"]: r["accuracy"] for r in robust})
    assert found[0] == found[1] and all(math.isfinite(figure) for figure in found[0].values())
    assert 0 < found[0]["apgd"] < 1
