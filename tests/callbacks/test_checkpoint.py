"""Robust figures choose checkpoints and stop training in the epochs in which they are new."""

from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch

from tests.pieces import adam, records, spec
from tests.schema import checked
from tests.tiny import pgd, recipe, refused, robust_eval, run, same_weights, weights

CHECKPOINTS = "run/version_0/checkpoints"
EVERY_OTHER = robust_eval({"apgd": pgd()}, every_n_epochs=2)
PARTS = {"net": spec("tests.tiny.TinyNet"), "attack": pgd(random_start=True), "optimizer": adam()}
PLAIN_MODEL = spec("AdversarialTraining", **PARTS)


def fit(folder, *callbacks, resume=None, evaluation=EVERY_OTHER, **overrides):
    """Seven epochs of four steps, the robust figure measured in epochs 1, 3 and 5."""
    watched = {"trainer__callbacks+": [evaluation, *callbacks], "trainer__max_epochs": 7}
    file = recipe(folder, model=PLAIN_MODEL, **watched | overrides)
    run("fit", "--config", file, *(["--ckpt_path", resume] if resume else []))
    return folder / CHECKPOINTS


def worst(folder):
    lines = [r for r in records(folder) if r["name"] == "worst"]
    return {r["epoch"]: r["accuracy"] for r in lines}


def state(path, name):
    callbacks = torch.load(path, weights_only=True)["callbacks"]
    return next(value for key, value in callbacks.items() if key.startswith(name))


WATCHED = [
    spec("RobustCheckpoint", save_top_k=-1, save_last=True),
    spec("RobustEarlyStopping", patience=4, min_delta=0.001),
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The folder of a run; what it printed is in `printed`."""
    folder = tmp_path_factory.mktemp("kept")
    with redirect_stdout(StringIO()) as out:
        fit(folder, *WATCHED)
    (folder / "printed").write_text(out.getvalue())
    return folder


def test_a_checkpoint_is_of_an_epoch_that_was_measured(kept):
    figures = worst(kept)
    assert list(figures) == [1, 3, 5]
    names = {path.name for path in (kept / CHECKPOINTS).glob("epoch*.ckpt")}
    assert names == {f"epoch={e}-val-robust-worst={v:.3f}.ckpt" for e, v in figures.items()}
    last = kept / CHECKPOINTS / "last.ckpt"
    best = state(last, "RobustCheckpoint")["best_model_path"]
    assert f"epoch={max(figures, key=figures.get)}-" in best
    assert torch.load(last, weights_only=True)["epoch"] == 6  # measured or not


def test_worst_of_a_cheap_attack_alone_keeps_no_checkpoint(tmp_path):
    """One step in each epoch, beside an attack in every other one."""
    quick = robust_eval({"quick": pgd(steps=1)})
    checkpoint = spec("RobustCheckpoint", save_top_k=-1)
    folder = fit(tmp_path, quick, checkpoint, trainer__max_epochs=4)
    assert [r["epoch"] for r in records(tmp_path) if r["name"] == "quick"] == [*range(4)]
    assert list(worst(tmp_path)) == [*range(4)]
    assert {p.name[:7] for p in folder.glob("epoch*.ckpt")} == {"epoch=1", "epoch=3"}


def test_patience_counts_epochs_that_were_measured(tmp_path):
    stopping = spec("RobustEarlyStopping", patience=2, min_delta=2.0)
    folder = fit(tmp_path, stopping, spec("ModelCheckpoint", save_last=True))
    assert torch.load(folder / "last.ckpt", weights_only=True)["epoch"] == 5


@pytest.mark.parametrize("epoch", [1, 3])
def test_resuming_from_its_checkpoints_is_exact(kept, tmp_path, epoch):
    start = next((kept / CHECKPOINTS).glob(f"epoch={epoch}-*.ckpt"))
    resumed = fit(tmp_path, *WATCHED, resume=start) / "last.ckpt"
    expected = kept / CHECKPOINTS / "last.ckpt"
    assert same_weights(weights(expected), weights(resumed))
    a, b = (state(path, "RobustEarlyStopping") for path in (expected, resumed))
    assert a["wait_count"] == b["wait_count"] and torch.equal(a["best_score"], b["best_score"])
    a, b = (state(path, "RobustCheckpoint")["best_model_score"] for path in (expected, resumed))
    assert torch.equal(a, b)  # also of an epoch before, in another folder
    verdicts = [
        checked((folder / "run/version_0/overfitting.jsonl").read_text())
        for folder in (kept, tmp_path)
    ]
    assert verdicts[0] == verdicts[1]


NEVER = robust_eval({"apgd": pgd()}, every_n_epochs=9)
PARTIAL = robust_eval({"apgd": pgd()}, target="lightning_rob.defenses.ensemble.first_member")
BAD = {  # message -> options of the checkpoint, evaluation
    "with an attack named 'square'": ({"monitor": "val/robust/square"}, EVERY_OTHER),
    "would never be measured": ({}, NEVER),
    "set every_n_epochs": ({"every_n_train_steps": 2}, EVERY_OTHER),
    "on the whole defense": ({}, PARTIAL),
}


@pytest.mark.parametrize("message", BAD)
def test_a_figure_that_never_comes(message, tmp_path, capsys):
    options, evaluation = BAD[message]
    callbacks = {"trainer__callbacks+": [evaluation, spec("RobustCheckpoint", **options)]}
    line = refused(capsys, "fit", "--config", recipe(tmp_path, model=PLAIN_MODEL, **callbacks))
    assert message in line


def test_the_fit_ends_with_a_verdict_on_robust_overfitting(kept):
    found = checked((kept / "run/version_0/overfitting.jsonl").read_text())
    figures = worst(kept)
    assert (found["last"], found["images"]) == (5, 32) and {*found["best"]} <= {*figures}
    shown = (kept / "printed").read_text().splitlines()
    line = next(x for x in shown if "robust overfitting" in x)
    assert line.startswith("val/robust/worst: no robust overfitting")
    assert f"Kept: epoch={max(figures, key=figures.get)}-" in line
