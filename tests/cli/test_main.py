"""The command line as a user meets it."""

import re

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_rob.attacks import Attack
from lightning_rob.cli.lightning_cli import Parser, without_secrets
from lightning_rob.cli.options import read_command_line
from tests.commands.test_report import made
from tests.pieces import CKPT, lines_of, plugged, records, spec
from tests.tiny import (
    arc,
    exit_code,
    fit,
    pgd,
    recipe,
    refused,
    robust_eval,
    run,
    same_weights,
    weights,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    fit(folder, "--test_after_fit=true", callbacks=[robust_eval({"apgd": pgd(), "arc": arc()})])
    return folder


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


def test_the_report_shows_the_run(trained, tmp_path):
    _, text, markdown = made(trained, out=tmp_path / "report.html")
    assert "BAT on Blobs" in text and "class_path: tests.tiny.Blobs" in text
    assert "trained against linf 16/255" in text
    assert all(f"{found['accuracy']:.1%}" in markdown for found in records(trained))


def test_the_checkpoint_alone_rebuilds_the_ensemble(trained, tmp_path, capsys):
    after_fit = [r for r in records(trained) if r["stage"] == "test"]
    plugin = plugged(robust_eval({"apgd": pgd(), "arc": arc()}))
    options = ("--trainer.logger=true", "--trainer.accelerator=cpu")
    run("test", "--ckpt_path", trained / CKPT, *plugin, *options)
    again = lines_of(next(tmp_path.rglob("robust.jsonl")))
    assert [r["accuracy"] for r in again] == [r["accuracy"] for r in after_fit]
    assert "worst" in capsys.readouterr().out


def test_the_best_checkpoint_is_tested_if_a_metric_chooses_it(tmp_path, monkeypatch):
    """Here that of the lowest validation accuracy, which is not the last one."""
    tested = []
    monkeypatch.setattr(Trainer, "test", lambda *_, ckpt_path, **__: tested.append(ckpt_path))
    kept = {"monitor": "val/acc", "mode": "min", "save_last": True, "filename": "lowest"}
    checkpoint = spec("ModelCheckpoint", **kept)
    fit(tmp_path, "--test_after_fit=true", **{"trainer__callbacks+": [checkpoint]})
    assert tested == [str(tmp_path / CKPT).replace("last", "lowest")]


def test_the_saved_configuration_runs_again(trained, tmp_path, capsys):
    config = trained / "run/version_0/config.yaml"
    folder = f"--trainer.logger.init_args.save_dir={tmp_path}"
    run("fit", "--config", config, folder, "--test_after_fit=false")
    assert same_weights(weights(trained / CKPT), weights(tmp_path / CKPT))
    out = capsys.readouterr().out
    assert f"Checkpoint: {CKPT}\n" in out
    steps = [line.removeprefix("Next:").split() for line in out.splitlines()[-2:]]
    radius = ["--trainer.callbacks+=climb", "--trainer.callbacks.eps=16/255"]
    allowed = ["--allow-import", "tests"]  # of conftest.py; foreign code is refused without it
    test, audit = ["lightning-rob", "test", CKPT], ["lightning-rob", "audit", CKPT]
    assert steps == [[*test, *allowed, *radius], [*audit, *allowed]]
    for _, *command in steps:
        read_command_line(*command)


SAID = r"^(No checkpoint is given|Radius): .*"  # before a test


def said(capsys, *args) -> list[str]:
    options = ["--trainer.logger=false", "--trainer.accelerator=cpu", "--data.test_size=4"]
    run("test", *args, *options)
    return [m[0] for m in re.finditer(SAID, capsys.readouterr().out, re.M)]


def test_a_test_reports_another_radius_than_that_of_the_training(trained, tmp_path, capsys):
    pgd = "--trainer.callbacks+=pgd"
    (line,) = said(capsys, trained / CKPT, pgd)
    assert line == (
        "Radius: the attacks are at linf 8/255; the training was at linf 16/255, "
        "taken by --trainer.callbacks.eps=16/255"
    )
    assert said(capsys, trained / CKPT, pgd, "--trainer.callbacks.eps=16/255") == []
    in_l2 = "--trainer.callbacks+={pgd: {norm: l2, eps: 0.5}}"
    (line,) = said(capsys, trained / CKPT, in_l2)
    assert line.endswith("by --trainer.callbacks.norm=linf --trainer.callbacks.eps=16/255")
    # Another one has that radius, though both are called pgd.
    assert said(capsys, trained / CKPT, pgd, "--trainer.callbacks.eps=16/255", in_l2) == []
    assert said(capsys, trained / CKPT) == []
    assert not list(tmp_path.iterdir())  # a run without a logger writes no configuration


def test_a_threshold_may_name_every_figure_of_a_test(trained):
    options = ("--trainer.callbacks+=pgd", "--trainer.accelerator=cpu", "--data.test_size=4")
    limits = "--fail_under=robust/worst=0,test/acc=0,robust/blind=0,robust/findings=0"
    assert exit_code("test", trained / CKPT, *options, limits) in (0, 1)
    assert exit_code("test", trained / CKPT, *options, f"{limits},robust/blind_=0") == 2


def test_a_test_without_a_checkpoint_says_so(tmp_path, capsys):
    (line,) = said(capsys, "--config", recipe(tmp_path))
    assert line.startswith("No checkpoint is given: ")
    assert exit_code("attack", "--config", recipe(tmp_path)) == 2
    out, error = capsys.readouterr()
    assert "attack needs a checkpoint" in error and 'evaluate(net, "auto", loader' in error
    assert "No checkpoint is given" not in out


def test_predict_writes_class_probabilities(trained, tmp_path):
    run("predict", "--ckpt_path", trained / CKPT, "--trainer.accelerator=cpu")
    head, *rows = next(tmp_path.rglob("predictions.csv")).read_text().splitlines()
    assert head == "index,prediction,p0,p1,p2,p3"
    table = torch.tensor([[float(cell) for cell in row.split(",")] for row in rows])
    assert table[:, 0].tolist() == list(range(33))
    torch.testing.assert_close(table[:, 2:].sum(1), torch.ones(33))
    assert torch.equal(table[:, 1], table[:, 2:].argmax(1).float())


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("test", "--trainer.limit_test_batches=0"),
        ("validate", "--trainer.limit_val_batches=0"),
        ("predict", "--trainer.limit_predict_batches=0"),
    ],
)
def test_a_run_without_images_is_an_error(trained, command, option, capsys):
    args = ("--ckpt_path", str(trained / CKPT), "--trainer.accelerator=cpu")
    assert "there were no images" in refused(capsys, command, *args, option)


def test_null_reaches_the_parts_of_parts():
    parser = Parser()
    parser.add_subclass_arguments(Attack, "of")
    inner = "{class_path: Accelerated, init_args: {attack: CW, autocast: bfloat16}}"
    kinds = ("--of=Accelerated", f"--of.attack={inner}", "--of.attack.autocast=null")
    assert parser.parse_args(kinds).of.init_args.attack.init_args.autocast is None


def test_keys_of_loggers_are_in_no_file():
    recipe = "trainer:\n  logger:\n    init_args:\n      api_key: abc\n      name: x\n"
    recipe += "  max_epochs: 1\nmodel:\n  init_args:\n    secret_size: 8\n"
    assert without_secrets(recipe) == recipe.replace("abc", "null")
    several = "trainer:\n  logger:\n  - init_args:\n      api_key: abc\n  - api_key: abc\n"
    assert without_secrets(several) == several.replace("abc", "null")


def test_limits_without_a_test_are_refused(tmp_path, capsys):
    args = "--test_after_fit=false", "--fail_under=worst=0.9"
    assert "judges a test" in refused(capsys, "fit", "--config", recipe(tmp_path), *args)
