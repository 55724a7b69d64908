"""A run that is killed and resumed ends where an uninterrupted one does."""

import signal

import pytest
import torch

from tests.tiny import recipe, records, same_weights, shell, weights

KILLER = "--trainer.callbacks+={{class_path: tests.tiny.KillAt, init_args: {{step: {}}}}}"
CHECKPOINTS = [
    "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: "
    "{filename: 'at-{step}', every_n_train_steps: 3, save_top_k: -1, save_last: true}}",
    "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: "
    "{filename: 'end-{epoch}', save_top_k: -1}}",
]
FOLDER = "run/version_0/checkpoints"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run: 4 epochs of 4 steps, a checkpoint every 3."""
    folder = tmp_path_factory.mktemp("whole")
    assert shell("fit", "--config", recipe(folder), *CHECKPOINTS).returncode == 0
    return folder


@pytest.mark.parametrize("step", [11, 13])
def test_sigkill_in_member_two_then_resume_gives_the_same_weights(whole, tmp_path, step):
    file = recipe(tmp_path)
    killed = shell("fit", "--config", file, *CHECKPOINTS, KILLER.format(step))
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / FOLDER / "at-step=15.ckpt").exists()
    last = tmp_path / FOLDER / "last.ckpt"
    resumed = shell("fit", "--config", file, *CHECKPOINTS, "--ckpt_path", last)
    assert resumed.returncode == 0, resumed.stderr
    expected, got = (weights(folder / FOLDER / "end-epoch=3.ckpt") for folder in (whole, tmp_path))
    assert same_weights(expected, got)


@pytest.mark.parametrize("name", ["at-step=3", "end-epoch=1", "at-step=9", "end-epoch=2"])
def test_resuming_from_any_checkpoint_gives_the_same_weights(whole, tmp_path, name):
    start = whole / FOLDER / f"{name}.ckpt"
    resumed = shell("fit", "--config", recipe(tmp_path), *CHECKPOINTS, "--ckpt_path", start)
    assert resumed.returncode == 0, resumed.stderr
    expected, got = (weights(folder / FOLDER / "end-epoch=3.ckpt") for folder in (whole, tmp_path))
    assert same_weights(expected, got)


def test_each_member_ends_with_its_best_weights(whole):
    final = torch.load(whole / FOLDER / "end-epoch=3.ckpt", weights_only=True)
    worst = {r["epoch"]: r["accuracy"] for r in records(whole) if r["name"] == "worst"}
    best = final["staged"]["best"]
    assert best["value"] == pytest.approx(max(worst[2], worst[3]))
    assert worst[best["epoch"]] == best["value"]
    kept = {
        k.removeprefix("members.1."): v for k, v in final["state_dict"].items() if "members.1." in k
    }
    assert same_weights(kept, best["weights"])
