"""The command line as a user meets it."""

import re
import subprocess
import sys

import pytest
import torch
import yaml

from lightning_rob.cli import main
from tests.tiny import (
    ROOT,
    arc,
    pgd,
    recipe,
    records,
    robust_eval,
    run,
    same_weights,
    shell,
    weights,
)

CKPT = "run/version_0/checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    checkpoint = {"class_path": "ModelCheckpoint", "init_args": {"save_last": True}}
    evaluation = robust_eval({"apgd": pgd(), "arc": arc()})
    callbacks = {"trainer__callbacks+": [checkpoint, evaluation]}
    run("fit", "--config", recipe(folder, **callbacks), "--test_after_fit=true")
    return folder


def fails(capsys, *args) -> str:
    with pytest.raises(SystemExit) as exit_:
        run(*args)
    assert exit_.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1
    assert len(lines[0]) < 400
    return lines[0]


def test_help_names_every_command_without_heavy_imports():
    told = shell("--help")
    assert all(word in told.stdout for word in ("fit", "validate", "test", "predict"))
    code = (
        "import sys; from lightning_rob.cli import main; "
        "main(['--help']); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.splitlines()[-1] == "False"


def test_version(capsys):
    main(["--version"])
    assert re.fullmatch(r"lightning-rob \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_fit_logs_every_epoch_and_test_comes_last(trained):
    lines = records(trained)
    assert [r["epoch"] for r in lines if r["name"] == "arc" and r["stage"] == "val"] == [0, 1, 2, 3]
    assert {r["name"] for r in lines if r["stage"] == "test"} == {"clean", "apgd", "arc", "worst"}
    for r in lines:
        low, high = r["interval"]
        assert 0 <= low <= r["accuracy"] <= high <= 1
        assert r["n"] == (32 if r["stage"] == "val" else 33)
        assert set(r["versions"]) >= {"torch", "lightning", "lightning-rob"}
    by_name = {r["name"]: r["accuracy"] for r in lines if r["stage"] == "test"}
    assert by_name["worst"] <= min(by_name["apgd"], by_name["arc"]) + 1e-9


def test_the_checkpoint_alone_rebuilds_the_ensemble(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    after_fit = [r for r in records(trained) if r["stage"] == "test"]
    callback = yaml.safe_dump(robust_eval({"apgd": pgd(), "arc": arc()}), default_flow_style=True)
    plugin = f"--trainer.callbacks+={callback}"
    run(
        "test",
        "--ckpt_path",
        trained / CKPT,
        plugin,
        "--trainer.logger=true",
        "--trainer.accelerator=cpu",
    )
    again = next(tmp_path.rglob("robust.jsonl")).read_text().splitlines()
    accuracies = [yaml.safe_load(line)["accuracy"] for line in again]
    assert accuracies == [r["accuracy"] for r in after_fit]
    assert "worst" in capsys.readouterr().out


def test_the_checkpoint_holds_no_live_objects(trained):
    checkpoint = torch.load(trained / CKPT, weights_only=True)
    recipe_text = checkpoint["lightning_rob_recipe"]
    assert yaml.safe_load(recipe_text)["model"]["class_path"] == "lightning_rob.modules.BAT"


def test_the_best_checkpoint_is_tested_if_one_is_kept_by_a_figure(tmp_path):
    """Here the one of the lowest validation accuracy, which is not the last."""
    net = {"class_path": "tests.tiny.TinyNet"}
    adam = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.003}}
    kept = {"monitor": "val/acc", "mode": "min", "save_last": True, "filename": "lowest"}
    plain = {
        "model": {
            "class_path": "AdversarialTraining",
            "init_args": {"net": net, "optimizer": adam},
        },
        "trainer__callbacks+": [
            {"class_path": "RobustCheckpoint", "init_args": kept},
            robust_eval({"pgd": pgd(steps=1)}),
        ],
    }
    config = recipe(tmp_path, **plain)
    run("fit", "--config", config, "--test_after_fit=true")
    tested = [r["accuracy"] for r in records(tmp_path) if r["stage"] == "test"]
    found, logger = {}, "--trainer.logger.init_args.save_dir={}"
    for name in ("lowest", "last"):
        logs = tmp_path / name
        path = tmp_path / f"run/version_0/checkpoints/{name}.ckpt"
        run("test", "--config", config, "--ckpt_path", path, logger.format(logs))
        found[name] = [r["accuracy"] for r in records(logs)]
    assert tested == found["lowest"]
    assert tested != found["last"]


def test_the_saved_configuration_runs_again(trained, tmp_path):
    config = trained / "run/version_0/config.yaml"
    folder = f"--trainer.logger.init_args.save_dir={tmp_path}"
    run("fit", "--config", config, folder, "--test_after_fit=false")
    assert same_weights(weights(trained / CKPT), weights(tmp_path / CKPT))


def test_predict_writes_probabilities_of_answers(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("predict", "--ckpt_path", trained / CKPT, "--trainer.accelerator=cpu")
    head, *rows = next(tmp_path.rglob("predictions.csv")).read_text().splitlines()
    assert head == "index,answer,p0,p1,p2,p3"
    table = torch.tensor([[float(cell) for cell in row.split(",")] for row in rows])
    assert table[:, 0].tolist() == list(range(33))
    torch.testing.assert_close(table[:, 2:].sum(1), torch.ones(33))
    assert torch.equal(table[:, 1], table[:, 2:].argmax(1).float())


BAD = {
    "probs": (["--model.init_args.probs=[0.9, 0.3]"], "probs must sum to 1, got 1.2"),
    "eps": (
        ["--model.init_args.attack.init_args.threat.eps=-1"],
        "eps must be a finite radius >= 0, got -1.0",
    ),
    "norm": (
        ["--model.init_args.attack.init_args.threat.norm=l7x"],
        "norm must be 'linf', 'l2' or a number >= 1, got 'l7x'",
    ),
    "epochs": (["--trainer.max_epochs=3"], "trainer.max_epochs must be 4"),
    "option": (["--model.init_args.foo=1"], "Option 'foo' is not accepted"),
    "labels": (["--data.init_args.labels=9"], "labels must be 0 … 3 for 4 classes"),
    "data": (["--data=CIFAR10", "--data.root=nowhere"], "CIFAR10 is not in"),
    "attacks": (
        ["--trainer.callbacks+={class_path: RobustEval, init_args: {attacks: {}}}"],
        "at least one attack, got an empty dict",
    ),
    "checkpoint": (["--ckpt_path=nowhere.ckpt"], "there is no checkpoint nowhere.ckpt"),
    "callbacks": (
        [f"--trainer.callbacks={ROOT}/callbacks/arc.yaml"],
        "write --trainer.callbacks+=",
    ),
    "fraction": (
        ["--model.attack.threat.eps=-1/255"],
        "eps must be a finite radius >= 0, got -0.00",
    ),
    "monitor": (
        ["--model.init_args.monitor=val/robust/nothing"],
        "no evaluation logged 'val/robust/nothing'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line(case, tmp_path, capsys):
    args, message = BAD[case]
    assert message in fails(capsys, "fit", "--config", recipe(tmp_path), *args)


def test_what_says_nothing_about_the_model(tmp_path, capsys):
    assert "say what to run: --config RECIPE" in fails(capsys, "test")
    torch.save({"state_dict": {}}, tmp_path / "x.ckpt")
    line = fails(capsys, "test", "--ckpt_path", tmp_path / "x.ckpt")
    assert "does not say what it is a checkpoint of" in line


def test_unknown_command(capsys):
    assert "unknown command 'fti'" in fails(capsys, "fti")


def test_images_out_of_range(tmp_path, capsys):
    data = {"class_path": "tests.tiny.Bright", "init_args": {}}
    line = fails(capsys, "fit", "--config", recipe(tmp_path, data=data))
    assert "images must lie in [0.0, 1.0], got values in" in line


def test_a_checkpoint_of_another_architecture(trained, capsys):
    line = fails(
        capsys, "test", "--ckpt_path", trained / CKPT, "--model.init_args.net.init_args.width=8"
    )
    assert "the checkpoint is of another architecture" in line


@pytest.mark.parametrize("content", ["", "<html>no</html>", "PK"])
def test_what_is_no_checkpoint(tmp_path, content, capsys):
    (tmp_path / "x.ckpt").write_text(content)
    assert "is not a PyTorch checkpoint" in fails(
        capsys, "test", "--ckpt_path", tmp_path / "x.ckpt"
    )


def test_a_plain_callbacks_fragment_is_refused(tmp_path, capsys):
    fragment = tmp_path / "fragment.yaml"
    fragment.write_text(f"trainer:\n  callbacks:\n    - {ROOT}/callbacks/arc.yaml\n")
    line = fails(capsys, "fit", "--config", recipe(tmp_path), "--config", fragment)
    assert "write `callbacks+:`" in line


def test_lengths_may_be_fractions_on_the_command_line(tmp_path):
    from lightning_rob.run import Command

    args = ["--model.attack.threat.eps=4/255", "--model.attack.step_size", "1/255"]
    built = Command(["--config", str(recipe(tmp_path)), *args], run=False)
    assert built.model.attack.threat.eps == 4 / 255
    assert built.model.attack.step_size == 1 / 255
