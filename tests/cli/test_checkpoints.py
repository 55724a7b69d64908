"""Checkpoints: written whole, and refused where they are damaged or none."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from lightning_rob.cli import checkpoints
from lightning_rob.runtime.errors import InputError
from lightning_rob.runtime.files import atomic_write, check_file
from tests.cli.bad_inputs import trained
from tests.tiny import recipe, refused


def test_no_fit_goes_on_from_a_damaged_checkpoint(tmp_path, capsys):
    path = tmp_path / "net.ckpt"
    content = bytearray(trained())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    line = refused(capsys, "fit", "--config", recipe(tmp_path), "--ckpt_path", path)
    assert "net.ckpt is damaged (" in line


def test_a_requeued_job_finds_the_checkpoint_that_lightning_has_written(tmp_path):
    """Lightning takes all digits in a name with "ckpt_" for the number of a checkpoint."""
    next_path = _CheckpointConnector.hpc_save_path
    checkpoints.SafeCheckpointIO().save_checkpoint({"state_dict": {}}, next_path(tmp_path))
    found = []

    def write(draft):
        draft.write_text("half")
        found.append(Path(next_path(tmp_path)).name)  # as after a kill

    atomic_write(tmp_path / "hpc_ckpt_2.ckpt", write)
    check_file(tmp_path / "hpc_ckpt_1.ckpt")
    assert [*found, Path(next_path(tmp_path)).name] == ["hpc_ckpt_2.ckpt", "hpc_ckpt_3.ckpt"]


def test_hyper_parameters_that_are_objects_are_left_out(tmp_path):
    """Nothing would read the checkpoint; the recipe in it builds them."""
    found = {"act": torch.nn.GELU(), "make": lambda: 0, "folder": tmp_path, "lr": 0.1}
    saved = {"state_dict": {"x": torch.ones(3)}, "hyper_parameters": found}
    checkpoints.SafeCheckpointIO().save_checkpoint(saved, tmp_path / "last.ckpt")
    content = checkpoints.read_checkpoint(str(tmp_path / "last.ckpt"))
    assert content["hyper_parameters"] == {"lr": 0.1} and content["state_dict"]["x"].sum() == 3
    assert saved["hyper_parameters"] is found


def test_a_checkpoint_that_nothing_could_read_is_not_written(tmp_path):
    saved = {"state_dict": {}, "words": {"all": [torch.nn.GELU()]}}
    with pytest.raises(InputError, match=r"'words' holds a torch\.nn\.\S+GELU, which torch\.load"):
        checkpoints.SafeCheckpointIO().save_checkpoint(saved, tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())


def test_what_is_plainly_no_checkpoint(tmp_path):
    page, pointer = b"\xef\xbb\xbf\n<!DOCTYPE HTML>", b"version https://git-lfs.github.com/spec/v1"
    contents = {b"": "it is empty", page: "it is an HTML page", pointer: "git lfs pull"}
    for content, message in contents.items():
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            check_file(tmp_path / "x")
    with pytest.raises(ValueError, match="is a folder"):
        check_file(tmp_path)
