"""The command `sweep`: its accuracies, record and table, and the input that it refuses."""

import os
import signal
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rob.attacks import ARC, PGD
from lightning_rob.callbacks.robust_eval import full_defense
from lightning_rob.cli.options import read_command_line
from lightning_rob.commands.sweep import parse_values
from lightning_rob.commands.sweep.study import changed
from lightning_rob.defenses import Ensemble, first_member
from lightning_rob.evaluation.evaluator import Evaluator
from lightning_rob.evaluation.result_file import read_result_file
from lightning_rob.metrics import robust_accuracy
from lightning_rob.runtime.files import read_json_lines
from lightning_rob.runtime.identity import fingerprint
from lightning_rob.threat import Threat
from tests.commands.test_monitor import built
from tests.forked import forked
from tests.pieces import lines_of, plugged, spec
from tests.tiny import TinyNet, arc, fit, pgd, refused, robust_eval, run

THREAT = Threat("linf", 16 / 255)
APGD = PGD(THREAT, 3, 8 / 255, random_start=False)
ATTACKS = {"apgd": (APGD, full_defense), "arc": (ARC(THREAT, 3, 16 / 255), full_defense)}
ATTACKS["alone"] = (APGD, first_member)
PLAIN = pgd(random_start=False)
ALONE = robust_eval({"alone": PLAIN}, target="lightning_rob.defenses.first_member")
CALLBACKS = [robust_eval({"apgd": PLAIN, "arc": arc()}), ALONE]


class AtTest(Callback):
    """Kills its process, or fails, at the start of the test of this number."""

    def __init__(self, number: int, fails: bool = False) -> None:
        self.left, self.fails = number, fails

    def on_test_start(self, *_) -> None:
        self.left -= 1
        if not self.left and self.fails:
            raise LookupError("odd")
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Other files test the checks of each evaluation, which take longer than its attacks."""
    monkeypatch.setattr(Evaluator, "_check", lambda *_: None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three members, the second of which is rarely drawn."""
    options = {"model__init_args__members": 3, "model__init_args__probs": [0.6, 0.1, 0.3]}
    return fit(tmp_path_factory.mktemp("trained"), trainer__max_epochs=6, **options)


def sweep(trained, out, over, values, *args, callbacks=CALLBACKS):
    where = ["--ckpt_path", trained, "--trainer.accelerator=cpu", "--out", out]
    run("sweep", *where, "--over", over, "--values", values, *plugged(*callbacks), *args)
    return lines(out)


def lines(out):
    studies = out / "sweep_studies.jsonl"
    assert not studies.exists() or lines_of(studies)
    return lines_of(out / "sweep.jsonl")


def accuracies(records):
    return {(r["name"], round(r["value"], 6)): r["accuracy"] for r in records}


@pytest.fixture(scope="module")
def loaded(trained):
    """The defense and the test images, without the command."""
    return built(trained.parents[3] / "recipe.yaml", trained)


def by_hand(attack, defense, x, y):
    """Each image's score by direct calls."""
    defense.eval()
    x_adv = attack(defense, x, y) if attack else x
    return robust_accuracy(defense(x_adv).detach(), y)


def counted(name):
    def change(attack, value):
        return replace(attack, **{name: int(value)}) if hasattr(attack, name) else attack

    return change


def longer(attack, eps):
    share = attack.step_size / attack.threat.eps
    return replace(attack, threat=Threat("linf", eps), step_size=share * eps)


def unchanged(part, value):
    """Leave an attack or a defense as it is."""
    return part


def first_is(defense, p):
    return Ensemble(defense.classifiers, [p, (1 - p) * 0.25, (1 - p) * 0.75])


def first_members(defense, count):
    probs = torch.tensor([0.6, 0.1, 0.3])[: int(count)]
    return Ensemble(defense.classifiers[: int(count)], probs / probs.sum())


CASES = {
    "probability": ("1,0.75:0.25:-0.25", [1, 0.75, 0.5, 0.25], unchanged, first_is),
    "members": ("1:3:1", [1, 2, 3], unchanged, first_members),
    "eps": ("24/255,8/255", [24 / 255, 8 / 255], longer, unchanged),
    "steps": ("1,4", [1, 4], counted("steps"), unchanged),
    "neighbours": ("1,3", [1, 3], counted("neighbours"), unchanged),
}


@pytest.fixture(scope="module")
def swept(trained, tmp_path_factory):
    """Return the folder of a case, its records and what it printed; run once."""

    @cache
    def of(over):
        folder = tmp_path_factory.mktemp(over)
        best = ["--best", "apgd"] if over == "probability" else []
        with redirect_stdout(StringIO()) as printed:
            records = sweep(trained, folder, over, CASES[over][0], *best)
        return folder, records, printed.getvalue()

    return of


@pytest.mark.parametrize("over", CASES)
def test_figures_are_those_of_direct_calls(over, swept, loaded):
    _, values, of_attack, of_defense = CASES[over]
    _, records, printed = swept(over)
    found = accuracies(records)
    assert len(found) == 5 * len(values)
    for value in values:
        scores = {}
        for name, (attack, target) in {"clean": (None, full_defense), **ATTACKS}.items():
            changed = attack and of_attack(attack, value)
            score = by_hand(changed, target(of_defense(loaded[0], value)), *loaded[1:])
            scores[name] = score
            mine = found[name, round(value, 6)]
            assert mine == pytest.approx(score.mean().item(), abs=1e-6), (name, value)
        lowest = torch.minimum(scores["apgd"], scores["arc"]).mean().item()
        assert found["worst", round(value, 6)] == pytest.approx(lowest, abs=1e-6)
    shown = [line for line in printed.splitlines() if line.startswith("[")]
    assert len(shown) == len(values)
    assert len({accuracy for (name, _), accuracy in found.items() if name != "clean"}) > 2


def test_killed_and_run_again_it_ends_with_the_same_table(trained, swept, tmp_path, capsys):
    kill = spec("tests.commands.test_sweep.AtTest", number=2)
    where = ["--ckpt_path", trained, "--trainer.accelerator=cpu", "--out", tmp_path]
    where += ["--over", "steps", "--values", CASES["steps"][0]]
    killed = forked("sweep", *where, *plugged(*CALLBACKS, kill))
    assert killed.returncode == -signal.SIGKILL
    assert {r["value"] for r in lines(tmp_path)} == {1}
    with (tmp_path / "sweep.jsonl").open("a") as file:
        file.write('{"name": "apgd", "variable": "steps", "val')  # a crash while writing
    run("sweep", *where, *plugged(*CALLBACKS))
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert ["(recorded)" in line for line in shown] == [True, False]
    _, records, _ = swept("steps")
    assert accuracies(read_json_lines(tmp_path / "sweep.jsonl")) == accuracies(records)


def test_only_other_circumstances_are_measured_anew(trained, tmp_path, capsys):
    """Neither the name of a file nor the batch size is a reason; scores are result files."""
    few, copy = {"attacks": {"apgd": PLAIN}, "max_images": 12}, tmp_path / "renamed.ckpt"
    copy.write_bytes(trained.read_bytes())
    for path, args, options in (
        (trained, [], {}),
        (copy, ["--data.eval_batch_size=5"], {}),
        (trained, ["--data.test_size=20"], {}),
        (trained, ["--model.probs=[0.5, 0.2, 0.3]"], {}),
        (trained, [], {"seed": 1}),
        (trained, [], {"attacks": {"apgd": pgd(random_start=False, step_size="4/255")}}),
    ):
        suite = [robust_eval(**few | options)]
        records = sweep(path, tmp_path, "steps", "1", *args, callbacks=suite)
        assert ("(recorded)" in capsys.readouterr().out) == (path == copy)
        for record in records:
            found = read_result_file(tmp_path / record["reuse"]["scores"])
            assert len(found.index) == 12 and max(found.index) < 33
            score = found.scores[record["name"]].mean()
            assert score == pytest.approx(record["accuracy"], abs=1e-6)


def test_table_figure_and_the_best_value(swept):
    folder, records, printed = swept("probability")
    found = accuracies(records)
    best = max(CASES["probability"][1], key=lambda p: found["apgd", p])
    sentence = (
        f"best probability under apgd: {best:g} ({100 * found['apgd', best]:.1f} %); "
        f"clean there: {100 * found['clean', best]:.1f} %, "
        f"arc there: {100 * found['arc', best]:.1f} %"
    )
    assert sentence in printed and "Sweep over probability" in printed
    assert (folder / "sweep.png").stat().st_size > 10_000
    assert (folder / "sweep.md").read_text().count("\n|") >= 4  # heads, line and values


def test_members_without_a_share_get_equal_ones():
    nets = [TinyNet(), TinyNet(), TinyNet()]
    alone = Ensemble(nets, [1.0, 0, 0])
    assert changed(alone, "probability", 0.5).weights.tolist() == [0.5, 0.25, 0.25]
    defense = Ensemble(nets, [0.6, 0.1, 0.3], rejects=3)
    assert changed(defense, "members", 1).rejects == 3
    assert fingerprint(changed(defense, "probability", 0.6)) == fingerprint(defense)
    two = changed(defense, "members", 2)
    assert two.rule is defense.rule
    assert len({fingerprint(d) for d in (defense, two, alone, changed(alone, "members", 1))}) == 4


def test_lists_of_values():
    for text, labels in (
        ("1/255,2/255", ["1/255", "2/255"]),
        ("0.5:1:0.25", ["0.5", "0.75", "1"]),
        ("1:0.9:-0.05,0.9, 0.8", ["1", "0.95", "0.9", "0.8"]),
        ("2/255:8/255:3/255", ["2/255", "5/255", "8/255"]),
    ):
        assert [value.label for value in parse_values("eps", text)] == labels
    (value,) = read_command_line("sweep", "--over=eps", "--values=8/255").options.points
    assert (value.number, value.label) == (8 / 255, "8/255")


def test_bad_input_gets_one_line_before_anything_runs(trained, tmp_path, capsys):
    steps, neighbours = (["--over", name, "--values", "1"] for name in ("steps", "neighbours"))
    checkpoint, alone = ["--ckpt_path", trained], [robust_eval({"apgd": PLAIN})]
    best = "choose --best from clean, apgd, arc, alone, worst, got 'apdg'"
    for args, callbacks, message in (
        ([*checkpoint, "--over=members", "--values=2,4"], CALLBACKS, "members must be 1 … 3"),
        ([*checkpoint, *steps, "--best=apdg"], CALLBACKS, best),
        ([*checkpoint, *neighbours], [], "add --trainer.callbacks+="),
        ([*checkpoint, *neighbours], alone, "has neighbours to sweep over: add callbacks/arc.yaml"),
        (neighbours, CALLBACKS, "say what to run"),
    ):
        line = refused(capsys, "sweep", "--out", tmp_path, *args, *plugged(*callbacks))
        assert message in line and len(line) < 400
        assert not (tmp_path / "sweep.jsonl").exists()
