"""Certificates from the command line, and as a callback."""

import csv
import json

from PIL import Image

from lightning_rob.evaluation.result_file import read_result_file
from tests.pieces import lines_of, spec
from tests.schema import checked
from tests.tiny import fit, run, same_weights, weights

SMALL = ["--draws", "100", "--images", "8", "--steps", "2"]


def test_the_command(trained, tmp_path, capsys):
    run("certify", trained, "--sigma", "0.1", "--radii", "1/10,0.05", *SMALL)
    (folder,) = tmp_path.glob("certificates/last_*_0.1")
    record = checked((folder / "certified.jsonl").read_text())
    assert record["radii"] == [0.0, 0.05, 0.1] and record["n"] == 8 and record["violations"] == []
    assert record["accuracy"] == sorted(record["accuracy"], reverse=True)
    assert record["accuracy"][0] > 0.2
    rows = list(csv.DictReader((folder / "certified.csv").read_text().splitlines()))
    for radius, share in zip(record["radii"], record["accuracy"], strict=True):
        held = [
            row["certified_prediction"] == row["label"] and float(row["certified_radius"]) >= radius
            for row in rows
        ]
        assert sum(held) / 8 == share
    found = read_result_file(folder / "certified.csv")
    assert found.attacks == ["pgd_0.05", "pgd_0.1"]
    assert found.scores["pgd_0.1"].mean() >= record["accuracy"][2]
    assert checked((folder / "certified.json").read_text())["inferences"] == 10
    with Image.open(folder / "certified.png") as picture:
        assert picture.width > 400
    shown = capsys.readouterr().out
    assert (
        "certified_0.05" in shown
        and "No attacks succeeded within a certified radius" in shown
        and "pgd_0.1" in shown
    )


def test_the_callback_logs_and_leaves_training_as_it_is(trained, tmp_path):
    certified = spec("CertifiedEval", sigma=0.1, radii=[0.0, 0.05], draws=60)
    watched = {"monitor": "val/certified/0.05", "mode": "max", "patience": 9}
    stopping = spec("RobustEarlyStopping", **watched)
    again = fit(tmp_path, callbacks=[certified, stopping], model__init_args__monitor=None)
    assert same_weights(weights(trained), weights(again))
    folder = tmp_path / "run/version_0"
    records = lines_of(folder / "certified.jsonl")
    assert [record["epoch"] for record in records] == [0, 1, 2, 3]
    assert [record["n"] for record in records] == [32] * 4
    assert records[3]["accuracy"][0] >= records[3]["accuracy"][1] > 0
    card = json.loads((folder / "images/val-epoch0003-certified.json").read_text())
    assert card["kind"] == "certificates" and card["sigma"] == 0.1
