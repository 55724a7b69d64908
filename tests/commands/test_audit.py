"""The audit as a callback and as a command."""

from types import SimpleNamespace

import yaml

from lightning_rob.attacks import PGD
from lightning_rob.commands.audit import AuditConfig, audited_threat
from lightning_rob.threat import Threat
from tests.pieces import records, spec
from tests.schema import checked
from tests.tiny import exit_code, pgd, recipe, robust_eval, run


def audited(**options):
    small = {"steps": 3, "queries": 20, "max_images": 20}
    small["threat"] = {"norm": "linf", "eps": "40/255"}
    return spec("RobustAudit", **small | options)


def test_the_callback_writes_what_it_found(trained, tmp_path, capsys):
    callbacks = [robust_eval({"apgd": pgd()}, power=5), audited()]
    file = recipe(tmp_path, **{"trainer__callbacks+": callbacks})
    run("test", "--config", file, "--ckpt_path", trained)
    record = checked((tmp_path / "run/version_0/audit.json").read_text())
    powers = {row["name"]: row.get("power") for row in records(tmp_path)}
    assert powers["apgd"]["images"] + powers["apgd"]["left_out"] == 5 and powers["clean"] is None
    accuracy = {row["name"]: row["accuracy"] for row in record["attacks"]}
    assert {"clean", "noise", "pgd", "arc", "climb", "square", "worst"} <= accuracy.keys()
    assert {row["n"] for row in record["attacks"]} == {20}
    assert accuracy["worst"] <= accuracy["climb"] <= accuracy["arc"]
    findings = {finding["name"]: finding for finding in record["findings"]}
    assert findings["adaptive"]["severity"] in ("warning", "severe")
    assert "but not ARC" in findings["adaptive"]["text"]
    shown = capsys.readouterr().out
    assert "Audit · Ensemble · a randomized ensemble" in shown
    assert "callbacks/climb.yaml" in " ".join(shown.split())


def test_the_command(trained, tmp_path, capsys):
    options = ["--images", "10", "--steps", "2", "--queries", "5", "--strict", "--power"]
    code = exit_code("audit", trained, "--trainer.accelerator=cpu", *options)
    (file,) = (tmp_path / "logs").rglob("audit.json")
    record = checked(file.read_text())
    severe = any(finding["severity"] == "severe" for finding in record["findings"])
    tested = {row["name"] for row in record["attacks"] if "power" in row}
    assert {"pgd", "arc", "climb", "square"} <= tested and not {"clean", "noise", "worst"} & tested
    assert any(finding["name"] == "power" for finding in record["findings"])
    assert code == int(severe)
    config = yaml.safe_load((file.parent / "config.yaml").read_text())
    assert "model" in config and not {"eps", "norm", "images", "strict"} & set(config)
    assert {row["n"] for row in record["attacks"]} == {10}
    out = capsys.readouterr().out
    assert "power   climb finds" in out
    assert "Radius: linf 16/255, that of the training; --eps takes another\n" in out
    assert "Test metric" not in out  # Lightning's table of the same accuracies
    assert {row["ball"] for row in record["attacks"] if row["name"] == "pgd"} == {"linf 16/255"}


def test_strict_ends_with_code_1_where_the_defense_is_broken(trained, tmp_path):
    net = spec("tests.audit.planted.Rounding", width=16)
    file = recipe(tmp_path, **{"model__init_args__net": net, "trainer__callbacks+": []})
    args = ["audit", "--config", file, "--ckpt_path", trained]
    args += ["--images", "8", "--steps", "1", "--queries", "1"]
    assert [exit_code(*args, *more) for more in ([], ["--strict"])] == [0, 1]
    record = checked((tmp_path / "run/version_0/audit.json").read_text())
    severe = {f["name"] for f in record["findings"] if f["severity"] == "severe"}
    assert {"zero_gradients", "steps_inside"} <= severe


def test_the_radius_is_that_of_the_training():
    for options, trained, threat in (
        ({}, Threat("linf", 0.1), Threat("linf", 0.1)),
        ({}, Threat("l2", 1.0), Threat("l2", 1.0)),
        ({}, None, Threat("linf", 8 / 255)),
        ({}, Threat(3, 2.0), Threat("linf", 8 / 255)),  # the audit has no attacks for it
        ({}, Threat("l1", 5.0), Threat("l1", 5.0)),
        ({"norm": "l1"}, Threat("linf", 0.1), Threat("l1", 12.0)),
        ({}, Threat("l2", 0.3, relative=True), Threat("linf", 8 / 255)),
        ({"norm": "l2"}, Threat("linf", 0.1), Threat("l2", 128 / 255)),
        ({"eps": 0.7}, Threat("l2", 1.0), Threat("l2", 0.7)),
        ({"eps": 0.2}, Threat("linf", 0.1), Threat("linf", 0.2)),
    ):
        attack = trained and PGD(trained, 1, 0.1)
        for module in (SimpleNamespace(attack=attack), SimpleNamespace(threat=trained)):
            assert audited_threat(AuditConfig(**options), module)[0] == threat
