"""The published tables are copied without a slip, and records are compared with the right cells."""

import json
import runpy
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from lightning_rob.transforms.pool import chosen

ROOT = Path(__file__).parents[1]
ATHENA = runpy.run_path(str(ROOT / "benchmarks/papers/athena.py"))
ATTACKS = ("fgsm", "pgd", "cw", "deepfool")
SOURCES = ("clean", *chosen("reversible"))


@pytest.mark.parametrize("table", [3, 4])
def test_published_means_are_those_of_their_rows(table):
    rows = {}
    for (attack, row, column), value in ATHENA["published"](table).items():
        if column not in (row, "dissimilarity") and attack != "clean":  # 98.98 printed as 98.81
            rows.setdefault((attack, row), {})[column] = value
    assert len(rows) == 60
    for row in rows.values():
        assert row.pop("average") == pytest.approx(fmean(row.values()), abs=0.011)


def plug_in(name):
    return yaml.safe_load((ROOT / f"callbacks/{name}.yaml").read_text())["init_args"]


@pytest.mark.parametrize("table", [3, 4, 5, 6, 7])
def test_each_published_row_is_one_of_the_plug_in(table):
    rows = {(attack, row) for attack, row, _ in ATHENA["published"](table)}
    columns = {column for *_, column in ATHENA["published"](table)}
    if table < 5:
        made = {(attack, source) for attack in ATTACKS for source in SOURCES}
    elif table == 5:
        made = {tuple(name.split("_")) for name in plug_in("votes_paa")["attacks"]}
    else:
        ensembles = plug_in("compositions_original")["ensembles"]
        made = {(attack, name) for attack in ("clean", *ATTACKS) for name in ensembles}
    assert rows - {("clean", "")} == made
    rules = {"RD", "MV", "T2MV", "AVEP", "AVEL"}
    assert columns - {"average", "dissimilarity"} == (set(SOURCES) if table == 3 else rules)


def test_votes_are_found_by_target_and_rule(tmp_path):
    shared = {"ensemble": "14r", "interval": [0.2, 0.6], "dissimilarity": 0.5}
    votes = [
        {"name": "cw_on_shift_up", "rule": "MV", "accuracy": 0.4},
        {"name": "cw_on_shift_up", "rule": "RD", "accuracy": 0.3},
    ]
    lines = "\n".join(json.dumps(vote | shared) for vote in votes)
    (tmp_path / "votes.jsonl").write_text(lines)
    found = ATHENA["measured"](4, [tmp_path])
    assert found["cw", "shift_up", "MV"] == pytest.approx((40, 20, 60))
    assert found["cw", "shift_up", "average"].value == pytest.approx(35)
    assert found["cw", "shift_up", "dissimilarity"].value == 0.5
