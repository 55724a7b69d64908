"""Manifests beside checkpoints: written, removed and checked with them."""

import subprocess
from pathlib import Path

import pytest
import torch
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from lightning_rob.cli import checkpoints
from lightning_rob.runtime.errors import InputError
from lightning_rob.runtime.files import (
    atomic_write,
    check_file,
    check_manifest,
    manifest_path,
    write_manifest,
)
from tests.cli.bad_inputs import flipped, trained
from tests.tiny import recipe, refused, run

MONITOR = "--model.init_args.monitor=null"
FOLDER = "run/version_0/checkpoints"
EVERY_EPOCH = {
    "class_path": "ModelCheckpoint",
    "init_args": {"monitor": "val/acc", "mode": "max", "save_top_k": 2, "save_last": "link"},
}


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "net.ckpt"
    path.write_bytes(trained())
    write_manifest(path)
    return path


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Four epochs, of which the best two are kept, and a link to the last."""
    folder = tmp_path_factory.mktemp("fitted")
    run("fit", "--config", recipe(folder, **{"trainer__callbacks+": [EVERY_EPOCH]}), MONITOR)
    return folder


def test_sha256sum_reads_it(checkpoint):
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", "net.ckpt.sha256"],
        cwd=checkpoint.parent,
        capture_output=True,
        text=True,
    )
    assert (checked.returncode, checked.stdout) == (0, "net.ckpt: OK\n")


@pytest.mark.parametrize("place", range(4))
def test_any_flipped_bit_is_found(checkpoint, place):
    content = checkpoint.read_bytes()
    check_manifest(checkpoint)
    checkpoint.write_bytes(flipped(content, place * (len(content) - 1) // 3))
    with pytest.raises(
        ValueError, match=r"net\.ckpt is not the file that was written: its SHA-256"
    ):
        check_manifest(checkpoint)


@pytest.mark.parametrize("content", ["", "\ufffd"])
def test_a_manifest_that_says_nothing_is_no_pass(checkpoint, content):
    manifest_path(checkpoint).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="is not the file that was written"):
        check_manifest(checkpoint)


def test_a_file_replaced_while_it_is_read_is_looked_at_again(checkpoint, monkeypatch):
    from lightning_rob.runtime import files

    digest, looks = files.digest, []

    def replaced_meanwhile(path):
        looks.append(path)
        if len(looks) == 1:
            path.write_bytes(b"new")
            monkeypatch.setattr(files, "digest", digest)
            write_manifest(path)
            monkeypatch.setattr(files, "digest", replaced_meanwhile)
            return "of neither"
        return digest(path)

    monkeypatch.setattr(files, "digest", replaced_meanwhile)
    check_manifest(checkpoint)
    assert len(looks) == 2


def test_fit_writes_one_for_each_checkpoint_that_is_kept(fitted):
    files = {path.name for path in (fitted / FOLDER).iterdir()}
    kept = {name for name in files if name.startswith("epoch=") and name.endswith(".ckpt")}
    assert len(kept) == 2
    assert files == kept | {f"{name}.sha256" for name in kept} | {"last.ckpt"}
    for path in (fitted / FOLDER).glob("*.ckpt"):
        check_manifest(path)
        assert manifest_path(path).exists()


def test_a_link_is_checked_as_what_it_points_at(fitted, tmp_path, capsys):
    target = tmp_path / "epoch.ckpt"
    target.write_bytes((fitted / FOLDER / "last.ckpt").read_bytes())
    write_manifest(target)
    (tmp_path / "last.ckpt").symlink_to("epoch.ckpt")
    target.write_bytes(flipped(target.read_bytes(), 999))
    line = refused(capsys, "test", "--ckpt_path", tmp_path / "last.ckpt")
    assert "last.ckpt is not the file that was written" in line
    assert "epoch.ckpt.sha256 says" in line


def test_no_fit_goes_on_from_a_changed_checkpoint(checkpoint, tmp_path, capsys):
    checkpoint.write_bytes(flipped(checkpoint.read_bytes(), 12345))
    line = refused(capsys, "fit", "--config", recipe(tmp_path), "--ckpt_path", checkpoint)
    assert "is not the file that was written" in line


def test_a_kill_between_checkpoint_and_manifest_is_no_false_alarm(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    checkpoints.SafeCheckpointIO().save_checkpoint({"state_dict": {"x": torch.zeros(3)}}, path)
    for name in ("atomic_write", "write_manifest"):
        with monkeypatch.context() as patched:
            patched.setattr(checkpoints, name, killed)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.SafeCheckpointIO().save_checkpoint({"state_dict": {}}, path)
        assert isinstance(checkpoints.read_checkpoint(str(path))["state_dict"], dict)


def test_a_requeued_job_finds_the_checkpoint_that_lightning_has_written(tmp_path):
    """Lightning takes all digits in a name with "ckpt_" for the number of a checkpoint."""
    next_path = _CheckpointConnector.hpc_save_path
    checkpoints.SafeCheckpointIO().save_checkpoint({"state_dict": {}}, next_path(tmp_path))
    found = []

    def write(draft):
        draft.write_text("half")
        found.append(Path(next_path(tmp_path)).name)  # as after a kill

    atomic_write(tmp_path / "hpc_ckpt_2.ckpt", write)
    check_manifest(tmp_path / "hpc_ckpt_1.ckpt")
    assert manifest_path(tmp_path / "hpc_ckpt_1.ckpt").exists()
    assert [*found, Path(next_path(tmp_path)).name] == ["hpc_ckpt_2.ckpt", "hpc_ckpt_3.ckpt"]


def test_hyper_parameters_that_are_objects_are_left_out(tmp_path):
    """Nothing would read the checkpoint; the recipe in it builds them."""
    found = {"act": torch.nn.GELU(), "make": lambda: 0, "folder": tmp_path, "lr": 0.1}
    saved = {"state_dict": {"x": torch.ones(3)}, "hyper_parameters": found}
    checkpoints.SafeCheckpointIO().save_checkpoint(saved, tmp_path / "last.ckpt")
    content = checkpoints.read_checkpoint(str(tmp_path / "last.ckpt"))
    assert content["hyper_parameters"] == {"lr": 0.1}
    assert content["state_dict"]["x"].sum() == 3
    assert saved["hyper_parameters"] is found


def test_a_checkpoint_that_nothing_could_read_is_not_written(tmp_path):
    saved = {"state_dict": {}, "words": {"all": [torch.nn.GELU()]}}
    with pytest.raises(InputError, match=r"its 'words' holds a torch\.nn\.\S+GELU, which loading"):
        checkpoints.SafeCheckpointIO().save_checkpoint(saved, tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())


def killed(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"\xef\xbb\xbf\n<!DOCTYPE HTML>", "it is an HTML page"),
        (b"  <HTML><head>", "it is an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
    ],
)
def test_what_is_plainly_no_checkpoint(content, message, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        check_file(tmp_path / "x")
    with pytest.raises(ValueError, match="is a folder"):
        check_file(tmp_path)
