"""The command `tune`: proposals, stopping, records, resumption, refused input."""

import json
import math
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml

from lightning_rob.commands.tune.space import Budget, Space, replaced, value_at
from lightning_rob.commands.tune.study import Record, Search, Study, read_trials
from lightning_rob.runtime import spread
from tests.forked import Forked, forked_child
from tests.pieces import ROOT, lines_of, spec
from tests.tiny import arc, exit_code, pgd, recipe, refused, robust_eval, run

LR = "model.init_args.optimizer.init_args.lr"
WIDTH = "model.init_args.net.init_args.width"
SHORT = {"trainer.max_epochs": 2, "model.init_args.epochs": 1, "data.init_args.train_size": 48}
EVALUATION = robust_eval({"apgd": pgd()})
SPACE = {
    "variables": {LR: [0.001, 0.1], WIDTH: [2, 8, "int"]},
    "objective": {"val/robust/apgd": 1.0, "val/acc": 0.5},
    "trial": SHORT,
    "budget": {"trials": 2, "random": 1},
}
SQUARE = {"variables": {"x": [-1, 1], "y": [0, 4]}, "objective": {"height": 1.0}}


def hill(number, point):
    """Highest, 3, at x = 0.3 and y = 1."""
    return {"height": 3 - (point["x"] - 0.3) ** 2 - (point["y"] - 1) ** 2, "other": 0.0}


def heights(xs, ys):
    """The heights of a grid of points, as trials that have ended."""
    places = [{"x": x, "y": y} for x in xs for y in ys]
    return [(place, hill(0, place)["height"]) for place in places]


def study(folder, evaluate=hill, content=SQUARE, own=None, **budget):
    space = Space.read(content)
    own = own or dict.fromkeys(space.variables, 1.0)
    search = Search(space, own, Budget(**budget), 2020)
    return Study(search, Record(folder / "trials.jsonl", "key"), evaluate)


def points(of):
    return [trial.values for trial in of.record.ended]


def test_it_finds_the_top_of_a_hill_and_random_search_does_not(tmp_path):
    found = study(tmp_path / "bo", trials=25, random=6)
    found.run()
    best = found.record.best
    assert best.objective > 3 - 1e-3
    assert (best.values["x"], best.values["y"]) == pytest.approx((0.3, 1), abs=0.03)
    blind = study(tmp_path / "random", trials=25, random=25)
    blind.run()
    assert blind.record.best.objective < best.objective


def test_it_starts_at_the_recipes_values_stays_in_bounds_and_whole_numbers_stay_whole(tmp_path):
    content = {"variables": {"x": [-1, 1], "y": [0, 4, "int"]}, "objective": {"height": 1}}
    made = study(tmp_path, content=content, own={"x": 0.5, "y": 2}, trials=9, random=3)
    made.run()
    tried = points(made)
    assert tried[0] == {"x": 0.5, "y": 2}
    assert made.search.initial == 4
    assert all(-1 <= p["x"] <= 1 and 0 <= p["y"] <= 4 for p in tried)
    assert len({tuple(p.items()) for p in tried}) == 9 and {type(p["y"]) for p in tried} == {int}
    assert made.record.best.values["y"] == 1


def study_with_a_kill(folder, last):
    def evaluate(number, point):
        if number == last:
            os.kill(os.getpid(), signal.SIGKILL)
        with (folder / "done").open("a") as file:
            file.write(f"{number}\n")
        return hill(number, point)

    study(folder, evaluate, trials=7, random=2).run()


def test_trials_of_parts_that_were_run_alone_count(tmp_path):
    """As in an array of jobs, after which the command itself does the rest."""
    tried = []

    def noted(number, point):
        tried.append(number)
        return hill(number, point)

    for place in (1, 2):
        study(tmp_path, noted, trials=3, random=3).run_part(place, 2)
    whole = study(tmp_path, noted, trials=3, random=3)
    whole.run()
    assert tried == [0, 1, 2] and len(points(whole)) == 3


def test_sigkill_loses_no_trial_and_repeats_none_and_the_budget_may_grow(tmp_path):
    assert Forked(study_with_a_kill, tmp_path, 4).wait().returncode == -signal.SIGKILL
    assert (tmp_path / "done").read_text().split() == ["0", "1", "2", "3"]
    resumed, whole = (study(folder, trials=9, random=2) for folder in (tmp_path, tmp_path / "all"))
    resumed.run()
    whole.run()
    assert [t.number for _, t in read_trials(tmp_path / "trials.jsonl")] == [*range(9)]
    assert points(resumed) == points(whole)
    other = Search(whole.search.space, whole.search.own, whole.search.budget, 2021)
    assert other.propose(1, []) != whole.search.propose(1, [])


def test_a_failed_trial_is_recorded_and_counts_as_the_worst(tmp_path):
    def fragile(number, point):
        if point["x"] > 0:
            raise RuntimeError("diverged\nat length")
        return {"height": math.nan} if point["y"] > 3 else hill(number, point)

    made = study(tmp_path, fragile, own={"x": -0.5, "y": 3.5}, trials=14, random=6)
    made.run()
    errors = [trial.error for trial in made.record.ended]
    assert errors[0] == "the objective is nan" and "RuntimeError: diverged" in errors
    assert made.record.best.objective > 2
    after = [t for t in made.record.ended[7:] if t.values["x"] > 0.3]
    assert len(after) < 7
    place = {"x": 0.0, "y": 1.0}
    worse = [(place, None), ({"x": 1.0, "y": 2.0}, 0.5), ({"x": 0.5, "y": 0.0}, 2.0)]
    assert (place, 0.5) in made.search.observations(worse, [])


def test_all_failing_is_an_error(tmp_path):
    def fails(number, point):
        raise RuntimeError("no luck")

    made = study(tmp_path, fails, trials=9, random=3)
    with pytest.raises(ValueError, match="all 4 trials failed, the last by RuntimeError: no luck"):
        made.run()
    assert len(made.record.ended) == 4


def test_rounds_of_parts_are_the_same_search(tmp_path):
    runs = []

    def evaluate(number, point):
        runs.append(number)
        if number == 4:
            raise SystemExit  # which ends a process
        return hill(number, point)

    def start():
        problems = []
        for place in (1, 2):
            try:
                study(tmp_path, evaluate, trials=9, random=5).run_part(place, 2)
                problems.append("")
            except SystemExit:
                problems.append("died")
        return problems

    start()  # a round that was killed before its trials were recorded: they are not run again
    made = study(tmp_path, trials=9, random=5)
    made.run_rounds(2, start)
    assert runs == [*range(9)]
    assert [trial.error for trial in made.record.ended] == [None] * 4 + ["died"] + [None] * 4
    alone = study(tmp_path / "alone", trials=9, random=5)
    alone.run()
    assert points(made)[:6] == points(alone)[:6]
    assert len({tuple(point.items()) for point in points(made)}) == 9


@pytest.mark.parametrize("kind", ["workers", pytest.param("ray", marks=pytest.mark.slow)])
def test_the_command_in_rounds(kind, tmp_path, monkeypatch, capfd):
    if kind == "ray":
        pytest.importorskip("ray")
    monkeypatch.setattr(spread, "run_child", forked_child)
    run("tune", *files(tmp_path), "--trials=2", f"--{kind}=2", "--allow-import=tests")
    assert "of 2; untuned: " in capfd.readouterr().out
    trials = [trial for _, trial in read_trials(tmp_path / "out/trials.jsonl")]
    assert [(t.number, t.error) for t in trials] == [(0, None), (1, None)]
    run("tune", *files(tmp_path), "--trials=2", "--allow-import=tests")
    assert f"of 2; untuned: {trials[0].objective:.4g}" in capfd.readouterr().out
    assert len([*read_trials(tmp_path / "out/trials.jsonl")]) == 2


def test_the_same_point_twice_counts_by_its_mean_and_pending_ones_as_average(tmp_path):
    search = study(tmp_path).search
    one, two, far = {"x": 0.0, "y": 1.0}, {"x": 0.5, "y": 1.0}, {"x": 0.0, "y": 9.0}
    known = search.observations([(one, 1.0), (one, 2.0), (far, 6.0)], [two])
    assert known == [(one, 1.5), (two, 3.0)]
    tried = heights((-0.75, 0, 0.75), (0, 2, 4))
    first = search.propose(20, tried)
    apart = search.propose(20, tried, [first])
    assert math.dist(first.values(), apart.values()) > 0.01


def test_it_stops_after_more_than_patience_trials_without_improvement():
    budget = Budget(trials=160, min_trials=80, patience=40)
    flat = [1.0] * 80
    assert not budget.is_finished(flat)  # a tie is an improvement
    assert not budget.is_finished([1.0] * 50 + [0.5] * 40)
    assert budget.is_finished([1.0] * 50 + [0.5] * 41)
    assert not budget.is_finished([1.0] * 30 + [0.5] * 49)  # 79 trials
    assert budget.is_finished([1.0] * 30 + [0.5] * 50)
    assert not budget.is_finished([1.0] * 50 + [0.5] * 40 + [1.0] + [0.5] * 40)
    assert budget.is_finished([1.0] * 50 + [None] * 41)
    assert not budget.is_finished([0.1 * i for i in range(159)])
    assert budget.is_finished([0.1 * i for i in range(160)])


DRAWN = {"Affine": {"alpha": 0.2}, "Salt": {"alpha": 0.2}, "Sobel": {"p": 0.5}}
MODEL = {"defense": {"size": 3, "transforms": DRAWN}, "lr": 0.1, "list": [{"a": 1}, {"a": 2}]}
TRANSFORMED = {"model": MODEL}
KEYS = {name: f"model.defense.transforms.{name}" for name in ("Affine", "Salt", "Sobel")}


def transformed(prune):
    bounds = {KEYS["Affine"] + ".alpha": [0, 0.5], KEYS["Salt"] + ".alpha": [0, 0.5]}
    bounds |= {KEYS["Sobel"] + ".p": [0, 1], "model.lr": [0, 1]}
    return Space.read({"variables": bounds, "objective": {"a": 1}, "prune": prune})


@pytest.mark.parametrize(
    ("prune", "left"),
    [(False, ["Affine", "Salt", "Sobel"]), (True, ["Sobel"]), (0.001, ["Salt", "Sobel"])],
)
def test_pruning_drops_transforms_near_zero_and_fits_the_size(prune, left):
    space = transformed(prune)
    best = dict(zip(space.variables, (0.0, 0.008, 0.4, 0.0), strict=True))
    recipe, dropped = space.pruned(replaced(TRANSFORMED, best), best)
    defense = recipe["model"]["defense"]
    assert list(defense["transforms"]) == left and defense["size"] == len(left)
    assert sorted([*dropped, *left]) == ["Affine", "Salt", "Sobel"]
    assert recipe["model"]["lr"] == 0.0
    assert len(TRANSFORMED["model"]["defense"]["transforms"]) == 3
    if prune:  # never all of them
        nothing = dict.fromkeys(space.variables, 0.0)
        assert space.pruned(TRANSFORMED, nothing) == (TRANSFORMED, [])


def test_dotted_keys_reach_into_lists_and_a_wrong_one_is_named():
    assert value_at(TRANSFORMED, "model.list.1.a") == 2
    assert replaced(TRANSFORMED, {"model.list.0.a": 5})["model"]["list"] == [{"a": 5}, {"a": 2}]
    for wrong in ("model.lrr", "model.list.2.a"):
        with pytest.raises(ValueError, match=f"the recipe has no {wrong!r}: at "):
            value_at(TRANSFORMED, wrong)
    lists = Space.read({"variables": {"model.list": [0, 1]}, "objective": {"a": 1}})
    with pytest.raises(ValueError, match="must be a number, got"):
        lists.initial(TRANSFORMED)


def test_the_shipped_space_fits_its_recipe(capsys):
    assert exit_code("fit", "--config", "rt_digits", "--print_config") == 0
    whole = yaml.safe_load(capsys.readouterr().out)
    space = Space.read(yaml.safe_load((ROOT / "configs/spaces/tune_digits.yaml").read_text()))
    assert space.contains(space.initial(whole))
    attacks = value_at(replaced(whole, space.trial), "trainer.callbacks+.1.init_args.attacks")
    assert {f"val/robust/{name}" for name in attacks} == {*space.objective}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variables": {"x": [1, 1]}}, r"must be \[low, high\]"),
        ({"variables": {"x": [1, "two"]}}, "must be a number, got 'two'"),
        ({"variables": {}}, "needs variables"),
        ({"objective": {"a": 0}}, "needs variables and an objective"),
        ({"variable": {}}, "unexpected keyword argument 'variable'"),
        ({"budget": {"trials": 0}}, "trials must be whole and at least 1, got 0"),
    ],
)
def test_invalid_spaces(change, message):
    with pytest.raises(ValueError, match=message):
        Space.read(SQUARE | change)


def files(folder, space=SPACE, **overrides):
    """A recipe and a space for it, on the command line."""
    evaluation = robust_eval({"apgd": pgd(), "arc": arc()})
    overrides.setdefault("trainer__callbacks+", ["ModelCheckpoint", evaluation])
    file = folder / "space.yaml"
    file.write_text(yaml.safe_dump(space))
    given = ["--config", recipe(folder, **overrides), "--space", file]
    return [*given, "--out", folder / "out"]


def test_tune_end_to_end(tmp_path, capsys):
    run("tune", *files(tmp_path))
    printed, out = capsys.readouterr().out, tmp_path / "out"
    trials = [trial for _, trial in read_trials(out / "trials.jsonl")]
    assert [t.number for t in trials] == [0, 1] and trials[0].values == {LR: 0.01, WIDTH: 16}
    assert trials[1].values[WIDTH] in range(2, 9)
    for t in trials:
        score = t.metrics["val/robust/apgd"] + 0.5 * t.metrics["val/acc"]
        assert t.objective == pytest.approx(score) and set(t.versions) >= {"torch", "lightning-rob"}
        trial_recipe = yaml.safe_load((out / f"trials/000{t.number}/config.yaml").read_text())
        assert value_at(trial_recipe, LR) == t.values[LR]
    best = max(trials, key=lambda t: t.objective)
    assert f"{best.objective:.4g} at trial {best.number} of 2; untuned: " in printed
    assert f"[2/2] trial 1: {trials[1].objective:.4g} (" in printed
    # The recipe names code of the tests, which this process allows.
    assert f"lightning-rob fit --config {out}/best.yaml --allow-import tests\n" in printed
    assert not list(tmp_path.glob("**/*.ckpt"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "recipe.yaml", "space.yaml"]
    final = yaml.safe_load((out / "best.yaml").read_text())
    assert value_at(final, WIDTH) == best.values[WIDTH]
    assert value_at(final, "trainer.max_epochs") == 4
    assert value_at(final, "trainer.callbacks+.0.class_path").endswith("ModelCheckpoint")
    # The recipe in a trial's folder, run by `fit`, gives the metrics in the record.
    logger = spec("CSVLogger", save_dir=".", version=0)
    config = ["--config", out / "trials/0001/config.yaml"]
    run("fit", *config, f"--trainer.logger={json.dumps(logger)}")
    lines = lines_of(Path("lightning_logs/version_0/robust.jsonl"))
    found = [line for line in lines if line["name"] == "apgd"]
    assert found[-1]["accuracy"] == pytest.approx(trials[1].metrics["val/robust/apgd"])

    before = (out / "trials.jsonl").read_bytes()
    run("tune", *files(tmp_path))
    assert (out / "trials.jsonl").read_bytes() == before
    line = refused(capsys, "tune", *files(tmp_path), "--data.init_args.test_size=20")
    assert "of another recipe, space or seed" in line
    run("tune", *files(tmp_path), "--trials=3")
    assert len([*read_trials(out / "trials.jsonl")]) == 3


def with_(**sections):
    return {name: SPACE[name] | sections.get(name, {}) for name in SPACE}


@pytest.mark.parametrize(
    ("space", "args", "message"),
    [
        (with_(variables={LR.replace("lr", "rl"): [0, 1]}), [], "rl'"),
        (with_(trial={"trainer.epochs": 3}), [], "has no 'trainer.epochs'"),
        (SPACE, ["--space=none.yaml"], "none.yaml cannot be read as a search space: "),
        (SPACE, ["--config={ckpt_path: last.ckpt}"], "leave out the ckpt_path last.ckpt"),
        (SPACE, ["--ray=2"], "pip install 'lightning-rob[ray]'"),
    ],
)
def test_bad_input_is_one_line(space, args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert exit_code("tune", *files(tmp_path, space), *args) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert message in error
