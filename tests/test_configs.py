"""Every YAML that is shipped runs."""

import pytest
import yaml

from tests.tiny import ROOT, recipe, records, run

RECIPES = sorted(p for p in (ROOT / "configs").glob("*.yaml") if p.stem not in ("ddp", "debug"))
CALLBACKS = sorted((ROOT / "callbacks").glob("*.yaml"))
# Data that a fresh machine lacks is replaced by embedded images of the same size.
TINY = "{train_size: 10, test_size: 2, val_size: 2, workers: 0}"
EMBEDDED = f"--data={{class_path: Patches10, init_args: {TINY}}}"
SMALL = [
    "--trainer.fast_dev_run=true",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]


@pytest.mark.parametrize("file", RECIPES, ids=lambda p: p.stem)
def test_recipe_runs(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("fit", "--config", file, EMBEDDED, "--data.init_args.batch_size=10", *SMALL)


@pytest.mark.parametrize("file", RECIPES, ids=lambda p: p.stem)
def test_recipe_builds_with_its_own_data(file, tmp_path, monkeypatch):
    from lightning_rob.run import Command

    monkeypatch.chdir(tmp_path)
    built = Command(["--config", str(file), "--trainer.accelerator=cpu"], run=False)
    assert built.datamodule.classes == built.model.members[0].linear.out_features


@pytest.mark.parametrize("file", CALLBACKS, ids=lambda p: p.stem)
def test_callback_plugs_into_a_recipe(file, tmp_path):
    plain = recipe(tmp_path, **{"trainer__callbacks+": [], "model__init_args__monitor": None})
    small = ["--trainer.max_epochs=2", "--model.epochs=1", "--data.train_size=64"]
    run("fit", "--config", plain, *small, f"--trainer.callbacks+={file}")
    names = set(yaml.safe_load(file.read_text())["init_args"]["attacks"])
    assert names <= {r["name"] for r in records(tmp_path)}


def test_callbacks_add_up_and_what_is_there_twice_runs_once(tmp_path):
    plain = recipe(tmp_path, **{"trainer__callbacks+": [], "model__init_args__monitor": None})
    plugins = [f"--trainer.callbacks+={ROOT}/callbacks/{n}.yaml" for n in ("apgd", "rec_suite")]
    run("fit", "--config", plain, "--trainer.max_epochs=2", "--model.epochs=1", *plugins)
    found = [r["name"] for r in records(tmp_path) if r["epoch"] == 0]
    names = [name for name in found if name != "clean"]
    assert sorted(names) == sorted({*names})
    assert {"apgd", "apgd_logits", "arc", "worst"} <= set(names)
    worst = next(r for r in records(tmp_path) if r["name"] == "worst")
    assert worst["over"][0] == "apgd"
    assert "arc" in worst["over"]


@pytest.mark.parametrize("mix_in", ["ddp", "debug"])
def test_mix_in_parses(mix_in, tmp_path):
    from lightning_rob.run import Command

    args = ["--config", str(recipe(tmp_path)), "--config", str(ROOT / f"configs/{mix_in}.yaml")]
    built = Command([*args, "--trainer.devices=1", "--trainer.accelerator=cpu"], run=False)
    strategy = type(built.trainer.strategy).__name__
    assert strategy == ("DDPStrategy" if mix_in == "ddp" else "SingleDeviceStrategy")


def test_no_yaml_drops_callbacks():
    for file in [*(ROOT / "configs").glob("*.yaml"), *CALLBACKS]:
        assert "callbacks:" not in file.read_text()
