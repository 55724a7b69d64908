"""The command that compares records of the same images."""

import pytest
import torch

from lightning_rob.commands.compare.records import compared
from lightning_rob.evaluation.result_file import write_result_file
from lightning_rob.evaluation.resume_log import BatchOutcome
from lightning_rob.evaluation.store import PerImageResults
from tests.metrics.test_intervals import bits
from tests.tiny import exit_code, refused, run


def record(path, scores, labels=None, brightness=0.0, findings=()):
    results = PerImageResults(tuple(scores), 1)
    count = len(scores["clean"])
    zeros = torch.zeros(count)
    each = scores.values()
    outcomes = [BatchOutcome(s[:, None], zeros, zeros, zeros[:, None], zeros) for s in each]
    images = torch.arange(count).float().view(-1, 1, 1, 1) + brightness
    y = zeros if labels is None else labels
    results.add_batch(images, y, torch.arange(count), outcomes)
    attack = {"class_path": "lightning_rob.PGD", "init_args": {"steps": len(scores)}}
    card = {"attacks": {name: {"attack": attack} for name in list(scores)[1:]}}
    card |= {"findings": list(findings)} if findings else {}
    worst = torch.stack(list(scores.values()), 1).amin(1)
    write_result_file(path, results.names, results.rows(), 1, card, worst)
    return path


def cells(printed):
    """The rows of a table."""
    lines = [line.strip("│").split("│") for line in printed.splitlines() if "│" in line]
    return [[cell.strip() for cell in line] for line in lines]


def test_the_command_compares_attacks_and_checkpoints(tmp_path, capsys):
    one = record(tmp_path / "a.csv", {"clean": bits("1111"), "x": bits("1110"), "y": bits("1000")})
    other = record(tmp_path / "b.csv", {"clean": bits("1111"), "x": bits("0000")})
    run("compare", one)
    out = capsys.readouterr().out
    assert "x → y" in out
    assert "-50.0" in out and "interval: McNemar, 95 %; p: two-sided; lost" in " ".join(out.split())
    assert "Holm" not in out  # of one comparison
    run("compare", one, other)
    out = capsys.readouterr().out
    assert "-75.0" in out and "two-sided, by Holm over 3" in " ".join(out.split())
    assert "They differ in the attack x: steps (3 and 2)" in " ".join(out.split())
    by_figure = {row[0]: row[-1] for row in cells(out)}
    assert by_figure["x"] == "0.75"  # 2 / 2**3, three times
    assert "y" not in by_figure


def test_an_ensemble_is_compared_with_its_first_member(tmp_path, capsys):
    """Rows of other names, image by image."""
    three = {"clean": bits("1111"), "x": bits("1000"), "z": bits("1110")}
    whole = record(tmp_path / "a.csv", three)
    alone = record(tmp_path / "b.csv", {"clean": bits("1111"), "y": bits("1101")})
    run("compare", whole, alone, "--pairs", "x=y")
    (row,) = cells(capsys.readouterr().out)
    assert row[:4] == ["x", "25.0%", "75.0%", "+50.0"] and row[5:7] == ["0", "2"]


def gate(tmp_path, old, new, *args) -> int:
    """The exit code of the gate on scores under one attack; 0 lost, 1 kept."""
    for name, scores in (("old", old), ("new", new)):
        record(tmp_path / f"{name}.csv", {"clean": torch.ones(len(scores)), "x": bits(scores)})
    return exit_code("compare", tmp_path / "old.csv", tmp_path / "new.csv", *args)


@pytest.mark.parametrize(
    ("lost", "limit", "code"),
    [
        (7, 0.07, 1),  # p = 2 / 2**7 for x and for worst, times 3 by Holm: 0.047
        (7, 0.0701, 0),  # significant, but smaller than the limit
        (6, 0.01, 0),  # p = 0.094: larger than the limit, but not significant
        (7, 0, 1),  # any significant fall
    ],
)
def test_the_gate_fails_on_a_significant_large_fall(tmp_path, lost, limit, code, capsys):
    new = "0" * lost + "1" * (100 - lost)
    file = tmp_path / "x.md"
    assert gate(tmp_path, "1" * 100, new, "--fail-if-worse", limit, "--markdown", file) == code
    line = f"x changed by -{lost}.0 points, from 100.0% to {100 - lost}.0%"
    assert (f"lightning-rob: worse: {line}" in capsys.readouterr().err) == bool(code)
    text = file.read_text()
    assert text.count("worse:") == 2 * code  # x and worst
    assert f"| x | 100.0% | {100 - lost}.0% | -{lost}.0 |" in text
    assert text.startswith("- **worse:** x changed") == bool(code)
    assert gate(tmp_path, new, "1" * 100, "--fail-if-worse", limit) == 0  # it rose


def test_a_fall_by_exactly_the_limit_counts_for_float32_scores():
    """0.9 and 0.7 of float32 differ by 0.19999999."""
    (found,) = compared([("x", torch.full((500, 1), 0.9), torch.full((500, 1), 0.7))])
    assert found.is_worse(0.2) and not found.is_worse(0.2001)


def test_the_gate_refuses_what_means_something_else(tmp_path, capsys):
    assert gate(tmp_path, "1" * 9, "0" * 9, "--fail-if-worse=0.1") == 2
    assert "needs 10 images" in capsys.readouterr().err
    assert gate(tmp_path, "1" * 12, "0" * 10, "--fail-if-worse=0.1") == 2
    assert "lacks 2 of the images" in capsys.readouterr().err
    ones = torch.ones(20)
    old = record(tmp_path / "old.csv", {"clean": ones, "x": ones, "y": ones})
    for scores, reason in (
        ({"clean": ones, "x": ones}, "lacks y: evaluate the same attacks"),
        ({"clean": ones, "x": ones, "y": ones, "z": ones}, "differ in x, y, z;"),
    ):
        new = record(tmp_path / "new.csv", scores)
        assert reason in refused(capsys, "compare", old, new, "--fail-if-worse=0.1")
        run("compare", old, new, "--fail-if-worse=0.1", "--pairs", "x=x")


def test_errors_are_one_line(tmp_path, capsys):
    one = record(tmp_path / "a.csv", {"clean": bits("11"), "x": bits("10")})
    other = record(tmp_path / "b.csv", {"clean": bits("11"), "x": bits("10")}, labels=bits("01"))
    foggy = record(tmp_path / "c.csv", {"clean": bits("11"), "x": bits("10")}, brightness=0.5)
    none, pair = [tmp_path / "none.csv"], [one, one, "--pairs", "x=zzz"]
    for args in ([one], [one, other], [one, foggy], none, pair):
        refused(capsys, "compare", *args)


def test_of_a_folder_its_records_are_named(tmp_path, capsys):
    (tmp_path / "run/images").mkdir(parents=True)
    (tmp_path / "run/metrics.csv").write_text("a")
    assert "has left none there" in refused(capsys, "compare", tmp_path / "run")
    for name in ("test-x", "test-y"):
        record(tmp_path / f"run/images/{name}.csv", {"clean": bits("11"), "x": bits("10")})
    error = refused(capsys, "compare", tmp_path / "run")
    assert f"a record in it, {tmp_path}/run/images/test-x.csv or " in error


def test_the_gate_refuses_a_record_whose_accuracies_hide_a_fall(tmp_path, capsys):
    scores = {"clean": bits("1" * 20), "x": bits("10" * 10)}
    slope = {"severity": "severe", "name": "slope", "text": "cut off"}
    one = record(tmp_path / "a.csv", scores)
    other = record(tmp_path / "b.csv", scores, findings=[slope])
    gate = ("--fail_if_worse", "0.02")
    assert "b.csv has severe findings, slope" in refused(capsys, "compare", one, other, *gate)
    run("compare", one, other)
    out = " ".join(capsys.readouterr().out.split())
    assert "Do not trust" in out and "severe findings, slope" in out
    run("compare", other, other, *gate)  # both have them
