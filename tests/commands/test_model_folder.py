"""A defense as a folder for the hub: the same logits, and the accuracies of exactly its weights."""

import importlib
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants

import lightning_rob
from lightning_rob.recipes.trust import VARIABLE
from lightning_rob.runtime.errors import InputError
from tests.pieces import ROOT, lines_of, plugged
from tests.tiny import blobs, pgd, recipe, refused, robust_eval, run

MONITOR = {"model__init_args__monitor": "val/robust/apgd"}


X, _ = blobs(train=False)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder of a BAT ensemble that was tested, its checkpoint, and the records of the test."""
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("fit", "--config", recipe(folder, **MONITOR))
        (checkpoint,) = folder.rglob("checkpoints/*.ckpt")
        cpu = "--trainer.accelerator=cpu"
        run("test", "--ckpt_path", checkpoint, *plugged(robust_eval({"apgd": pgd()})), cpu)
        out = ["--format", "safetensors", "--out", "model"]
        run("export", "--ckpt_path", checkpoint, *out, cpu)
        records = lines_of(Path("logs/version_0/robust.jsonl"))
    return folder / "model", checkpoint, records


def test_the_same_logits(exported):
    folder, checkpoint, _ = exported
    names = {"model.safetensors", "config.json", "README.md"}
    assert {path.name for path in folder.iterdir()} == names
    defense, expected = lightning_rob.load(folder), lightning_rob.load(checkpoint)
    assert torch.equal(defense.logits(X), expected.logits(X))
    assert torch.equal(defense(X), expected(X)) and len(defense.classifiers) == 2
    module, trained = lightning_rob.load_module(folder), lightning_rob.load_module(checkpoint)
    assert module.best["value"] == trained.best["value"]
    for name, tensor in trained.best["weights"].items():
        assert torch.equal(module.best["weights"][name], tensor)


def test_the_same_defense_by_torch_hub(exported):
    defense = torch.hub.load(str(ROOT), "load", exported[0], source="local")
    assert torch.equal(defense(X), lightning_rob.load(exported[0])(X))


def test_without_an_installation(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", missing)
        assert importlib.reload(lightning_rob).__version__ == "unknown"
    assert importlib.reload(lightning_rob).__version__ == metadata.version("lightning-rob")


def test_no_code_of_others_is_imported(exported, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(InputError, match="runs only with --allow-import tests"):
        lightning_rob.load(exported[0])
    assert len(lightning_rob.load(exported[0], allow_import="tests").classifiers) == 2


def test_a_repository_of_the_hub(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    place = tmp_path / "models--org--net"
    shutil.copytree(exported[0], place / "snapshots" / ("5" * 40))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("5" * 40)
    defense = lightning_rob.load("hf-hub:org/net")
    assert torch.equal(defense(X), lightning_rob.load(exported[1])(X))
    with pytest.raises(InputError, match="hf-hub:org/other cannot be fetched"):
        lightning_rob.load("hf-hub:org/other")


def test_the_card_has_the_accuracies_of_these_weights(exported):
    folder, _, records = exported
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: lightning-rob\n")
    assert "allow_import=['tests']" in card and "BAT on Blobs" in card
    assert "Of Blobs, 33 images:" in card
    assert {record["name"] for record in records} == {"clean", "apgd", "worst"}
    for record in records:
        low, high = record["interval"]
        row = f"| {record['name']} | full defense | {record['accuracy']:.1%} "
        assert row in card.replace("*", "")
        assert f"{low:.1%} … {high:.1%}" in card
    assert "linf 16/255" in card
    from huggingface_hub import ModelCard  # takes a third of a second

    (model,) = yaml.safe_load(card.split("---\n")[1])["model-index"]  # as the hub lists it
    (result,) = ModelCard(card).data.to_dict()["model-index"][0]["results"]
    assert result == model["results"][0] and model["name"] == "BAT on Blobs"
    shown = {metric["name"]: metric["value"] for metric in result["metrics"]}
    names = {"clean": "accuracy", "apgd": "robust accuracy (apgd, linf 16/255)"}
    for record in records[:2]:
        assert shown[names[record["name"]]] == pytest.approx(record["accuracy"], abs=1e-4)
    assert f"| torch | {metadata.version('torch')} |" in card


def test_accuracies_of_other_weights_are_left_out(exported, tmp_path, monkeypatch):
    monkeypatch.chdir(exported[0].parent)
    other = torch.load(exported[1], weights_only=True)
    other["state_dict"]["members.0.last.bias"] += 1
    place = exported[1].with_name("other.ckpt")
    torch.save(other, place)
    foreign = place.parents[2] / "photographs" / "images" / "labels.json"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("[1, 2]")  # no card
    run("export", "--ckpt_path", place, "--format=safetensors", f"--out={tmp_path / 'm'}")
    assert "No evaluation of these weights is recorded" in (tmp_path / "m/README.md").read_text()
    place.unlink()


def test_commands_read_the_folder(exported):
    options = ["--data=tests.tiny.Blobs", "--trainer.accelerator=cpu"]
    run("test", "--ckpt_path", exported[0], *options, *plugged(robust_eval({"apgd": pgd()})))
    lines = lines_of(Path("logs/version_0/robust.jsonl"))
    found = {record["name"]: record["accuracy"] for record in lines}
    assert found == {record["name"]: record["accuracy"] for record in exported[2]}


def test_folders_that_are_none(tmp_path):
    with pytest.raises(InputError, match=r"a folder without config\.json: name a checkpoint"):
        lightning_rob.load(tmp_path)
    for text, message in (
        ("<html>", r"config\.json is no JSON"),
        ('{"architecture": "resnet18"}', r"no 'lightning_rob'; a network of timm is .*ZooNet"),
        ('{"lightning_rob": {"model": {}, "checkpoint": []}}', "no 'lightning_rob'"),
        ("[" * 100_000, r"config\.json is no JSON"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match=message):
            lightning_rob.load(tmp_path)


def test_a_folder_that_would_not_be_whole_is_refused(exported, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("")
    export = ["export", "--ckpt_path", exported[1], "--format=safetensors", "--out=m"]
    error = refused(capsys, *export, "--model.monitor=./a.txt")
    assert "model.init_args.monitor is a file, './a.txt'" in error
    assert "add --model.init_args.monitor=null" in error
    inputs = "--trainer.callbacks.preprocess=tests.cli.test_load.brighter"
    line = refused(capsys, *export, "--trainer.callbacks+=pgd", inputs)
    assert "preprocess is an option of a plug-in" in line
    assert not (tmp_path / "m").exists()
