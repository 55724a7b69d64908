"""Options without a meaning: each is refused, with the reason in one line."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_rob.cli.options import parse_own, parse_records
from lightning_rob.cli.seeds import SeedsConfig
from lightning_rob.commands.audit import AuditConfig, audited_threat
from lightning_rob.commands.certify import CertifyConfig
from lightning_rob.commands.export import ExportConfig
from lightning_rob.commands.sweep import SweepConfig
from lightning_rob.threat import Threat
from tests.tiny import refused


def audit(**options):
    return audited_threat(AuditConfig(**options), SimpleNamespace(threat=Threat("linf", 0.1)))


def compare(args):
    return parse_records("compare", args.split())


program = partial(ExportConfig, out=Path("x.pt2"))
over_eps = partial(SweepConfig, over="eps")
REFUSED = [
    (audit, {"eps": 0.0}, "--eps must be above 0, got 0"),
    (audit, {"eps": 8.0, "norm": "linf"}, "--eps 8 holds every image, .* did you mean 8/255"),
    (audit, {"eps": 8.0}, "--eps 8 holds every image"),  # of the training's norm
    (audit, {"norm": "3"}, "--norm must be linf, l2 or l1, got 3"),
    (audit, {"images": 0}, "images must be at least 1, got 0"),
    (audit, {"seed": -1}, "seed must be at least 0, got -1"),
    (CertifyConfig, {"sigma": 0.0}, "--sigma must be above 0, got 0"),
    (CertifyConfig, {"failure": 1.0}, r"--failure is a probability in \(0, 1\), got 1"),
    (CertifyConfig, {"images": 0}, "images must be at least 1, got 0"),
    (CertifyConfig, {"draws": 0}, "draws must be at least 1, got 0"),
    (CertifyConfig, {"radii": "0,0.1"}, "--radii must be above 0, got 0: 0 is always among them"),
    (SeedsConfig, {"seeds": "a"}, "--seeds"),
    (CertifyConfig, {"radii": "a"}, "--radii takes numbers and fractions, got 'a'"),
    (ExportConfig, {}, "say where the program goes to"),
    (program, {"out": Path("x.pt")}, "say where the program goes to: --out FILE.pt2, got x.pt"),
    (program, {"images": 0}, "images must be at least 1, got 0"),
    (program, {"format": "safetensors"}, "must name a folder for safetensors, got x.pt2"),
    (over_eps, {"over": "epsilon", "values": "1"}, "--over must be one of probability"),
    (over_eps, {"values": ""}, "--values must name at least one value"),
    (over_eps, {"values": "2:1:0.5"}, "names 0 values"),
    (over_eps, {"over": "probability", "values": "0.5,1.5"}, r"must be in \[0, 1\], got 1.5"),
    (over_eps, {"values": "1", "best": "apgd"}, "no meaning over eps"),
    (compare, {"args": "a.csv --pairs x=y"}, "--pairs is for two records"),
    (compare, {"args": "a.csv b.csv --pairs x"}, "--pairs is NAME=NAME, several separated by"),
    (compare, {"args": ""}, "one or two records, got 0"),
    (compare, {"args": "a.csv b.csv --fail-if-worse 2"}, "--fail_if_worse is a share .*got 2"),
    (compare, {"args": "a.csv --fail-if-worse 0.02"}, "--fail_if_worse is for two records"),
    *((SeedsConfig, {"seeds": s}, "--seeds") for s in ("-1..1", "1..2..3", "0,0", "2..1", "0..")),
    (SeedsConfig, {"seeds": "0..20000"}, "--seeds are such as .* at most 10000, got '0..20000'"),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_a_value_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_values_are_read():
    assert SeedsConfig(seeds="1,0..2").numbers == [1, 0, 2]
    sweep = parse_own("sweep", SweepConfig, ["--over=eps", "--values=8/255", "--out=2026/11"])
    assert sweep.out == Path("2026/11")
    assert CertifyConfig(radii=0.5).lengths(0.1) == (0.5,)
    assert CertifyConfig().lengths(0.25) == (0.125, 0.25, 0.375, 0.5)


MODELS = "monitor --once --models models.yaml"
COLOUR = "--out . --data tests.tiny.Blobs --data.train_size=40"
LINES = {  # reason -> command line, and the models of a file
    "say first which run": ("monitor --once",),
    "no folder": ("monitor nowhere --once",),
    "--notify takes a URL": ("monitor . --notify=example.com",),
    "no checkpoint in": ("monitor . --once",),
    "leave out --ckpt_path": ("monitor . --ckpt_path=x.ckpt",),
    "--drop takes": ("monitor . --drop=often",),
    "--serve 70000": ("monitor . --serve=70000",),
    "--serve_host is for --serve": ("monitor . --serve_host=0.0.0.0",),
    "needs --out FOLDER": ("monitor memory://bucket/run",),
    "user info": ("monitor s3://key:hidden@bucket/run --out=x",),
    "a registered model is mlflow:models/NAME@ALIAS": ("monitor mlflow:net --out=x",),
    "there is no checkpoint in memory:": ("monitor memory://bucket/run --out=x --once",),
    "the history cannot be written": ("monitor . --once --out=file/folder",),
    "a threshold is": ("monitor . --alarm=robust/worst",),
    "must name models": (MODELS, "[]"),
    "must have options such as run, got 3": (MODELS, "a: 3"),
    "once is of the process: --once": (MODELS, "a: {run: ., once: true}"),
    "template is of the process: --template": (MODELS, "a: {run: ., template: page.html}"),
    "say first which run to watch": (MODELS, "a: {drop: 0.1}"),
    "a and b have one history": (MODELS, "{a: {run: .}, b: {run: .}}"),
    "there is no option --nosuch": (MODELS, "a: {run: ., nosuch: 1}"),
    "say where the networks go to: --out FOLDER": ("bpda",),
    "data": ("bpda --out .",),
    "no transform 'Affin', did you mean": (f"bpda {COLOUR} --transforms Affin",),
    "epochs must be at least 1, got 0": (f"bpda {COLOUR} --epochs 0",),
    "there is no recipe nothing.yaml": ("bpda --out . --config nothing.yaml",),
}


@pytest.mark.parametrize("reason", LINES)
def test_a_command_line_is_refused(reason, tmp_path, capsys):
    line, *models = LINES[reason]
    for name, text in {"file": "", "models.yaml": "".join(models)}.items():
        (tmp_path / name).write_text(text)
    told = refused(capsys, *line.split())
    assert reason in told and "hidden" not in told
    assert "bpda" not in line or len([*tmp_path.iterdir()]) == 2
