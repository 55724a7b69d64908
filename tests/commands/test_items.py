"""One item never stops the others: broken checkpoints, odd names, files of strangers."""

import json
import os
import shutil
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch
import yaml
from torch import nn

import lightning_rob
from lightning_rob.attacks import PGD
from lightning_rob.cli.load import load_module
from lightning_rob.commands import report as reports
from lightning_rob.commands.monitor import folder
from lightning_rob.commands.monitor.scores import ScoreFiles
from lightning_rob.commands.report import report
from lightning_rob.evaluation.result_file import as_text, name_of
from lightning_rob.modules import AdversarialTraining
from lightning_rob.nets import weights
from lightning_rob.nets.weights import read_file
from lightning_rob.runtime.errors import InputError, visible
from lightning_rob.threat import Threat
from tests.cli.hostile import CANARY, evil
from tests.pieces import lines_of, plugged, spec
from tests.tiny import exit_code, pgd, robust_eval


@pytest.fixture
def content(trained):
    """Content of a checkpoint."""
    return torch.load(trained, weights_only=True)


def saved(content, path, step):
    torch.save(content | {"global_step": step}, path)


NAMES = [b"caf\xe9.ckpt", b"\x1b]0;title\x07.ckpt", b"a\nlightning-rob: alarm: forged.ckpt"]


def test_odd_names_are_escaped_everywhere(content, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(folder, "SETTLE", 0.0)
    place = tmp_path / "checkpoints"
    place.mkdir()
    for step, name in enumerate(NAMES):
        weights = {k: v + 1e-3 * step for k, v in content["state_dict"].items()}
        saved(content | {"state_dict": weights}, place / os.fsdecode(name), step)
        (place / os.fsdecode(b"x" + name)).write_text("no checkpoint")
    suite = tmp_path / "suite.yaml"
    suite.write_text(yaml.safe_dump(robust_eval({"pgd": pgd(random_start=False)})))
    options = ("--once", "--suite", suite, "--trainer.accelerator=cpu", "--every=0.1")
    assert exit_code("monitor", tmp_path, *options) == 1
    events = lines_of(tmp_path / "monitor.jsonl")
    for kind, prefix in (("evaluated", ""), ("broken", "x")):
        found = {event["checkpoint"] for event in events if event.get("event") == kind}
        assert found == {f"checkpoints/{prefix}{visible(os.fsdecode(name))}" for name in NAMES}
    _, beside = report([tmp_path], tmp_path / "report.html")
    out, err = capfd.readouterr()
    for text in (out, err, beside.read_text(), (tmp_path / "report.html").read_text()):
        assert "\x1b]" not in text and "\x07" not in text
        assert "\nlightning-rob: alarm: forged" not in text


def test_no_name_is_a_formula():
    for name in ("=HYPERLINK(1)", "+1", "-1", "@a", "\tx", "\rx", "'=a", "'", "pgd"):
        assert not as_text(name).startswith(("=", "+", "-", "@", "\t", "\r"))
        assert name_of(as_text(name)) == name


def test_a_record_reads_only_scores_of_its_own_folder(tmp_path):
    home = tmp_path / "run"
    files = ScoreFiles(home, "scores")
    files.write("k", (torch.arange(3), torch.ones(3, 1)))
    line = {"n": 3, "reuse": files.reference("k")}
    assert files.read(line) is not None
    shutil.copy(home / "scores/k.npz", tmp_path / "k.npz")
    for place in (str(tmp_path / "k.npz"), "../k.npz", str(home / "scores/k.npz")):
        assert files.read(line | {"reuse": {"key": "k", "scores": place}}) is None
    os.mkfifo(home / "scores/fifo.npz")
    assert files.read(line | {"reuse": {"key": "k", "scores": "scores/fifo.npz"}}) is None


def test_a_file_that_never_ends_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo.ckpt")
    with pytest.raises(ValueError, match="not a regular file"):
        read_file(tmp_path / "fifo.ckpt")
    with pytest.raises(ValueError, match="not a regular file"):
        read_file("/dev/zero")


def test_a_run_with_broken_records_does_not_stop_the_report(tmp_path, monkeypatch, capsys):
    fields = {"schema": 1, "kind": "accuracy", "name": "pgd", "stage": "test", "accuracy": 0.5}
    for name in ("good", "nested", "odd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "robust.jsonl").write_text(json.dumps(fields) + "\n")
    with (tmp_path / "nested/robust.jsonl").open("a") as file:
        file.write("[" * 200_000 + "\n")
    (tmp_path / "nested/config.yaml").write_text("[" * 5000)
    os.mkfifo(tmp_path / "nested/votes.jsonl")
    os.mkfifo(tmp_path / "nested/audit.json")
    os.mkfifo(tmp_path / "nested/x.png")
    (tmp_path / "odd/robust.jsonl").write_text(json.dumps(fields | {"n": 1, "seed": [{}]}) + "\n")
    _, beside = report([tmp_path], tmp_path / "report.html")
    text = beside.read_text()
    assert all(name in text for name in ("good", "nested", "odd"))

    def fails(found, *args):
        if found.folder.name == "odd":
            raise LookupError("odd \x1b[2J")
        yield from run_section(found, *args)

    run_section = reports.run_section
    monkeypatch.setattr(reports, "run_section", fails)
    _, beside = report([tmp_path], tmp_path / "report.html")
    assert "its records cannot be shown: LookupError: odd" in beside.read_text()
    assert beside.read_text().count("50.0%") >= 2
    error = capsys.readouterr().err
    assert "odd \\x1b[2J" in error and "\x1b" not in error


DOORS = {
    "load": lightning_rob.load,
    "load_module": load_module,
    "load_weights": lambda path: weights.load_weights(nn.Linear(1, 1), path),
    "members": lambda path: weights.member_prefixes([nn.Linear(1, 1)], path),
    "stage": weights.started_members,
    "load_from_checkpoint": lambda path: AdversarialTraining.load_from_checkpoint(path),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_checkpoint_with_code_is_refused_at_every_door(door):
    Path("evil.ckpt").write_bytes(evil())
    with pytest.raises((ValueError, InputError, UnpicklingError)):
        DOORS[door]("evil.ckpt")
    assert not Path(CANARY).exists()


def test_a_failed_value_of_a_sweep_is_named(content, tmp_path, capsys):
    saved(content, tmp_path / "a.ckpt", 1)
    fails = spec("tests.commands.test_sweep.AtTest", number=2, fails=True)
    callbacks = plugged(fails, robust_eval({"pgd": pgd(random_start=False)}))
    options = ("--over=eps", "--values=1/255,2/255,4/255", "--out=swept", *callbacks)
    assert exit_code("sweep", "--ckpt_path=a.ckpt", "--trainer.accelerator=cpu", *options) == 1
    out, err = capsys.readouterr()
    assert "[2/3] eps 2/255: failed, LookupError: odd" in out
    assert "1 of 3 values failed, 2/255: LookupError: odd" in err
    assert len({line["value"] for line in lines_of(Path("swept/sweep.jsonl"))}) == 2


def test_the_attack_that_fails_is_named():
    class Fails(PGD):
        def perturb(self, *_, **__):
            raise LookupError("odd")

    threat, x, y = Threat("linf", 0.1), torch.rand(2, 3, 8, 8), torch.tensor([0, 1])
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 4)).eval()
    attacks = {"fine": PGD(threat, 1, 0.1), "bad": Fails(threat, 1, 0.1)}
    with pytest.raises(LookupError, match="odd") as failed:
        lightning_rob.evaluate(net, attacks, [(x, y)])
    assert failed.value.__notes__ == ["under the attack 'bad'"]
