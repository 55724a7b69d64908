"""The command `monitor`: no checkpoint twice, none missed, the images by name, alarms."""

import csv
import json
import os
import re
import resource
import shutil
import signal
import time
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger
from scipy.special import zeta
from scipy.stats import binomtest

from lightning_rob.attacks import ARC, PGD
from lightning_rob.cli.lightning_cli import RobustCLI
from lightning_rob.commands.checkpoints import load_weights, read_checkpoint
from lightning_rob.commands.monitor import MonitorConfig, comparison, folder, history, loop
from lightning_rob.commands.monitor.comparison import CheckpointResults, alarms, drops
from lightning_rob.commands.monitor.figures import FigureLog
from lightning_rob.commands.monitor.history import History, finding_count, scalars
from lightning_rob.commands.monitor.suite import Suite
from lightning_rob.commands.report import report
from lightning_rob.metrics import holm, robust_accuracy
from lightning_rob.threat import Threat
from tests.commands.test_notify import Receiver, code_of, evaluation, forked
from tests.pieces import lines_of, spec
from tests.tiny import TinyNet, arc, exit_code, fit, images_of, pgd, robust_eval, run

THREAT = Threat("linf", 16 / 255)
ATTACKS = (PGD(THREAT, 3, 8 / 255, random_start=False), ARC(THREAT, 3, 16 / 255))
EPOCHS = [f"epoch={i}-step={4 * (i + 1)}.ckpt" for i in range(4)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of four epochs' checkpoints; last.ckpt has the weights of the fourth; suites."""
    torch.set_num_threads(1)  # a forked process hangs in a pool of threads that it has not
    kept = spec("ModelCheckpoint", save_top_k=-1, save_last=True)
    place = fit(tmp_path_factory.mktemp("trained"), **{"trainer__callbacks+": [kept]}).parent
    suite = [robust_eval({"apgd": pgd(random_start=False)}), robust_eval({"arc": arc()})]
    for i, callback in enumerate(suite):
        (place / f"suite{i}.yaml").write_text(yaml.safe_dump(callback))
    return place


@pytest.fixture
def watched(trained, tmp_path):
    """A run's folder without checkpoints."""
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def put(trained, watched):
    """Puts checkpoints of the fit into the watched folder, under their names or another."""

    def some(*names, under=None):
        for name in names:
            shutil.copy(trained / name, watched / "checkpoints" / (under or name))

    return some


@pytest.fixture
def settled(monkeypatch):
    """A file that cannot be read is broken at once, not after ten seconds."""
    monkeypatch.setattr(folder, "SETTLE", 0.0)
    monkeypatch.setattr(loop.time, "sleep", lambda _: None)


def monitor(trained, watched, *args, suites=2) -> int:
    """The exit code."""
    suite = [arg for i in range(suites) for arg in ("--suite", trained / f"suite{i}.yaml")]
    return exit_code("monitor", watched, *suite, "--trainer.accelerator=cpu", *args)


def lines(watched) -> list[dict]:
    return lines_of(watched / "monitor.jsonl")


def events(watched, kind) -> list[dict]:
    return [line for line in lines(watched) if line.get("event") == kind]


def evaluated(watched) -> list[str]:
    return [Path(line["checkpoint"]).name for line in events(watched, "evaluated")]


def changed(source: Path, target: Path, change, step=None) -> None:
    """A copy of a checkpoint with other weights."""
    content = torch.load(source, weights_only=True)
    content["state_dict"] = {k: change(k, v) for k, v in content["state_dict"].items()}
    content["global_step"] = step or content["global_step"]
    torch.save(content, target)


class Odd(TinyNet):
    """A network that fails in a way of its own."""

    def forward(self, x):
        raise KeyError("odd")


def swapped(key, value):
    """Two classes exchanged: images of both are lost."""
    return value[[1, 0, 2, 3]] if "last" in key else value


def built(file, checkpoint):
    """The defense of a checkpoint and the test images, without a command."""
    made = RobustCLI([f"--config={file}", "--trainer.logger=false"], run=False)
    load_weights(made.model, read_checkpoint(str(checkpoint)))
    made.datamodule.setup("test")
    return made.model.defense.eval(), *images_of(made.datamodule)


def by_hand(trained, path) -> dict[str, torch.Tensor]:
    """Each image's scores, by direct calls."""
    defense, x, y = built(trained.parents[2] / "recipe.yaml", path)
    perturbed = {"clean": x, "apgd": ATTACKS[0](defense, x, y), "arc": ATTACKS[1](defense, x, y)}
    scores = {k: robust_accuracy(defense(v).detach(), y) for k, v in perturbed.items()}
    return scores | {"worst": torch.stack([*scores.values()]).amin(0)}


@pytest.fixture(scope="module")
def judged(trained, tmp_path_factory):
    """The folder of a monitor that alarmed of two checkpoints, and what it printed."""
    watched = tmp_path_factory.mktemp("judged") / "run"
    place = watched / "checkpoints"
    place.mkdir(parents=True)
    for name in (EPOCHS[0], EPOCHS[3], "last.ckpt"):
        shutil.copy(trained / name, place / name)
    for step, name in ((20, "swapped.ckpt"), (24, "again.ckpt")):  # as bad as each other, unequal
        scale = 1 + step / 1000
        changed(place / EPOCHS[3], place / name, lambda k, v, s=scale: swapped(k, v) * s, step)
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        assert monitor(trained, watched, "--once", "--drop=0.5") == 1
    return watched, out.getvalue(), err.getvalue()


def test_figures_and_images_are_those_of_direct_calls(trained, judged):
    watched, out, err = judged
    assert evaluated(watched) == [EPOCHS[0], EPOCHS[3], "swapped.ckpt", "again.ckpt"]
    hands = [by_hand(trained, watched / "checkpoints" / name) for name in evaluated(watched)]
    found = [line for line in lines(watched) if "event" not in line]
    assert [line["name"] for line in found] == ["clean", "apgd", "arc", "worst"] * 4
    for line, hand in zip(found, [hand for hand in hands for _ in range(4)], strict=True):
        assert line["accuracy"] == pytest.approx(hand[line["name"]].mean().item(), abs=1e-6)
        assert line["n"] == 33
    robust = [hand["worst"] >= 0.5 for hand in hands]
    for i, event in enumerate(events(watched, "evaluated")[1:], start=1):
        both = robust[i - 1 : i + 1]
        lost, won = ((a & ~b).nonzero()[:, 0].tolist() for a, b in (both, both[::-1]))
        assert event["change"]["since"] == f"checkpoints/{evaluated(watched)[i - 1]}"
        assert event["change"]["newly_vulnerable"] == lost and event["change"]["won_back"] == won
        p = binomtest(len(lost), len(lost) + len(won)).pvalue if lost or won else 1.0
        assert event["change"]["p"] == pytest.approx(p) and event["change"]["test"] == "McNemar"
    _, first, second, third = events(watched, "evaluated")
    lost = second["change"]["newly_vulnerable"]
    assert len(lost) > 5
    assert [drop["to"] for drop in first["drops"]] == ["last"]
    for drop in second["drops"]:
        assert drop["p"] <= drop["p_adjusted"] <= 1
    alarms = [event["alarm"] for event in events(watched, "evaluated")]
    assert [len(alarm) for alarm in alarms] == [0, 0, 1, len(third["drops"])]
    assert alarms[2][0].startswith("robust/worst fell from ")
    for alarm in alarms[2:]:  # both against the last that had not fallen
        assert any(f"(last: checkpoints/{EPOCHS[3]})" in line for line in alarm)
    swapped = events(watched, "evaluated")[2]["checkpoint"]
    assert f"lightning-rob: alarm: {swapped}: {alarms[2][0]}" in err.splitlines()
    assert f"newly vulnerable: {', '.join(map(str, lost[:12]))}" in out
    row = next(line for line in out.splitlines() if line.startswith("swapped"))
    assert row.split()[1:4] == ["3", "20", f"{100 * hands[2]['clean'].mean():.1f}"]
    assert row.endswith("ALARM")


def past(step, right, count=40):
    scores = torch.zeros(count, dtype=torch.float64)
    scores[right] = 1.0
    return CheckpointResults(
        f"{step}.ckpt", step, {"worst": float(scores.mean())}, (torch.arange(count), scores)
    )


def test_drops_are_judged_by_p_adjusted_over_all_comparisons_of_a_lifetime():
    """Of images 0 to 39 the checkpoint has lost 20 and won none since the best, 19 since the last.

    It is the third one that is judged, and the best of three.
    """
    earlier = [past(1, range(30)), past(2, range(28)), past(3, range(29))]
    now = past(4, range(10))
    last, best = drops(now, earlier)
    p = {"last": 2 / 2**19, "best": 2 / 2**20}
    assert (last.to, last.since, last.p) == ("last", "3.ckpt", pytest.approx(p["last"]))
    assert (best.to, best.since, best.p) == ("best", "1.ckpt", pytest.approx(p["best"]))
    times = 2 * 3.94 * 3**1.3
    assert last.p_adjusted == pytest.approx(times * p["last"])
    assert best.p_adjusted == pytest.approx(3 * times * p["best"])
    for level, count in ((1e-4, 0), (1.5e-4, 1), (0.05, 2)):
        told = alarms(MonitorConfig(Path(), drop=level), now, [last, best])
        assert len(told) == count
    assert told[0] == (
        "robust/worst fell from 72.5% (last: 3.ckpt) to 25.0%, adjusted p = 0.00013, "
        "below 0.05 (Gaffke, over the history)"
    )
    later = drops(now, earlier, judged_before=99)[0]
    assert later.p_adjusted == pytest.approx(2 * 3.94 * 100**1.3 * p["last"])
    (only,) = drops(now, earlier[:1])
    assert (only.to, only.since) == ("last", "1.ckpt")
    assert only.p_adjusted == pytest.approx(3.94 * only.p)
    assert drops(past(5, range(40)), earlier)[0].p_adjusted > 0
    assert not drops(past(5, range(40)), earlier)[0].significant(0.99)  # it rose


def test_a_checkpoint_is_not_compared_with_one_that_fell():
    """Else the alarm would end with the second checkpoint of a bad model."""
    good, bad = past(1, range(30)), past(2, range(10))
    assert drops(past(3, range(10)), [good, bad])[0].p == 1
    still = drops(past(3, range(10)), [good, replace(bad, fell=True)])[0]
    assert (still.since, still.significant(0.05)) == ("1.ckpt", True)
    assert 0.99 < zeta(comparison.FADING) / comparison.SHARES < 1  # the shares of all judgements


@pytest.mark.parametrize("random", [False, True])
def test_healthy_streams_rarely_ring_and_a_fall_rings_at_once(random):
    """A small version of benchmarks/monitor_drop.py: 5 % of 1,000 images are redrawn each time."""
    draws, early, at_once = np.random.default_rng(0), 0, 0
    index = torch.arange(1000)
    for _ in range(20):
        state, lost = draws.random(1000) < 0.6, draws.random(1000) < 5 / 60
        earlier, rang = [], []
        for place in range(20):
            state = np.where(draws.random(1000) < 0.05, draws.random(1000) < 0.6, state)
            right = torch.tensor(state & ~lost if place == 19 else state).double()
            scores = right * (1 - random * torch.tensor(draws.uniform(0, 0.1, 1000)))
            accuracies = {"worst": float(scores.mean())}
            now = CheckpointResults(str(place), place, accuracies, (index, scores))
            rang.append(any(drop.significant(0.05) for drop in drops(now, earlier)))
            earlier.append(now)
        early, at_once = early + any(rang[:-1]), at_once + rang[-1]
    assert early <= 2  # the level allows one stream of forty
    assert at_once >= 18


def rewritten(source: Path, target: Path, change) -> None:
    """A copy of a checkpoint with the same weights and another recipe."""
    content = torch.load(source, weights_only=True)
    told = yaml.safe_load(content["lightning_rob_recipe"])
    change(told["model"]["init_args"])
    content["lightning_rob_recipe"] = yaml.safe_dump(told)
    torch.save(content, target)


def watch(trained, watched, *args) -> int:
    """The exit code with only the attack that any defense takes."""
    return monitor(trained, watched, "--once", *args, suites=1)


def test_weights_and_model_count_and_nothing_is_evaluated_twice(trained, watched, put):
    """Neither a copy nor another way of training or batch size is a reason to begin anew."""
    put(EPOCHS[1])
    assert watch(trained, watched) == 0
    put(EPOCHS[1], under=f"copy_of_{EPOCHS[1]}")
    slower = lambda model: model["optimizer"].update(init_args={"lr": 0.02})  # noqa: E731
    rewritten(trained / EPOCHS[0], watched / "checkpoints" / EPOCHS[0], slower)
    assert watch(trained, watched, "--data.eval_batch_size=5") == 0
    found = [EPOCHS[1], EPOCHS[0]]
    assert evaluated(watched) == found
    # Later checkpoints are compared with one whose scores are missing.
    worst = next(line for line in lines(watched) if line.get("name") == "worst")
    (watched / worst["reuse"]["scores"]).unlink()
    assert watch(trained, watched) == 0 and evaluated(watched) == (found := [*found, EPOCHS[1]])
    assert events(watched, "evaluated")[2]["change"]["since"] == f"checkpoints/{EPOCHS[0]}"
    options = watched / "m.yaml"
    options.write_text(yaml.safe_dump({"model": {"init_args": {"probs": [0.9, 0.1]}}}))
    assert watch(trained, watched, "--config", options) == 0
    assert evaluated(watched) == (found := [*found, *EPOCHS[:2]])
    options.rename(watched / "renamed.yaml")
    assert watch(trained, watched, f"--config={watched / 'renamed.yaml'}") == 0
    assert evaluated(watched) == found


def noisy(alpha):
    """Puts uniform noise before the net of a recipe."""
    init = {"size": 1, "draws": 3, "transforms": {"UniformNoise": {"alpha": alpha}}}
    defense = spec("lightning_rob.defenses.RandomTransforms", **init)
    return lambda model: model.update(defense=defense)


def test_each_checkpoint_is_evaluated_by_the_model_of_its_own_recipe(trained, watched, tmp_path):
    """As `test` evaluates it; the same weights with another recipe are another checkpoint."""
    init = {"net": spec("tests.tiny.TinyNet", width=16), "attack": pgd(random_start=False)}
    noisy(0.01)(init)
    module = spec("lightning_rob.modules.AdversarialTraining", **init)
    place = watched / "checkpoints"
    shutil.copy(fit(tmp_path, model=module, trainer__max_epochs=2), place / "a.ckpt")
    rewritten(place / "a.ckpt", place / "b.ckpt", noisy(1.0))
    assert watch(trained, watched) == 0 and evaluated(watched) == ["a.ckpt", "b.ckpt"]
    found = [line for line in lines(watched) if line.get("name") in ("clean", "apgd")]
    for i, name in enumerate(("a.ckpt", "b.ckpt")):
        shutil.rmtree("logs", ignore_errors=True)
        plugged = f"--trainer.callbacks+={trained}/suite0.yaml"
        run("test", "--ckpt_path", place / name, plugged, "--trainer.accelerator=cpu")
        tested = lines_of(Path("logs/version_0/robust.jsonl"))
        wanted = {line["name"]: line["accuracy"] for line in tested}
        told = {line["name"]: line["accuracy"] for line in found[2 * i : 2 * i + 2]}
        assert told == pytest.approx({key: wanted[key] for key in told}, abs=1e-6)
    assert found[0]["accuracy"] > found[2]["accuracy"]
    # They are compared all the same, and the later of two of the same step counts at the end.
    assert events(watched, "evaluated")[1]["change"]["since"] == "checkpoints/a.ckpt"
    assert watch(trained, watched, f"--alarm=acc={found[0]['accuracy'] - 1e-4}") == 1


def test_alarms_and_exit_codes(trained, watched, put, settled, capsys):
    put(EPOCHS[0])
    assert watch(trained, watched, "--alarm", "robust/worst=0.999,acc=0") == 1
    (event,) = events(watched, "evaluated")
    (worst,) = (line["accuracy"] for line in lines(watched) if line.get("name") == "worst")
    assert event["alarm"] == [f"robust/worst is {worst:.2%}, below 99.9%"]
    said = f"lightning-rob: alarm: {event['checkpoint']}: {event['alarm'][0]}"
    assert said in capsys.readouterr().err
    # There is nothing new, and yet the last accuracies are judged by the options of today.
    for asked, code in (("", 0), ("--alarm=robust/apgd=0.999", 1), ("--alarm=robust/apgd=0.01", 0)):
        assert watch(trained, watched, *filter(None, [asked])) == code
    assert evaluated(watched) == [EPOCHS[0]]
    # Even after the alarm of another file, which does not repeat those of the first run.
    (page := watched / "checkpoints/page.ckpt").write_text("<!DOCTYPE html>")
    assert watch(trained, watched, "--alarm=robust/worst=0.999") == 1
    first, *_, last = (ended["alarm"] for ended in events(watched, "ended"))
    assert first == [] and last == event["alarm"] and events(watched, "broken")
    page.unlink()
    assert watch(trained, watched, "--alarm=robust/pgd=0.4") == 2
    assert "no figure robust/pgd" in capsys.readouterr().err
    # Nine images are too few to judge a drop; by the way it is another suite.
    for images, code in ((9, 1), (9, 1), (10, 0)):
        assert watch(trained, watched, f"--data.test_size={images}", "--drop=1e-9") == code
        told = capsys.readouterr().err
        assert (f"needs at least 10 images, there are {images}" in told) == bool(code)
    # A figure that is asked for and not there is an alarm.
    shutil.rmtree(watched / "checkpoints")
    for asked in ("--alarm=robust/worst=0.01", "--drop=0.01"):
        assert watch(trained, watched, asked) == 1
        told = "no checkpoint was evaluated: no figure for "
        assert told + asked.removeprefix("--alarm=").partition("=")[0] in capsys.readouterr().err
    assert watch(trained, watched) == 0
    record = watched / "monitor.jsonl"
    seen = [line for line in record.read_text().splitlines() if '"seen"' in line]
    record.write_text("\n".join(seen) + "\n")
    assert watch(trained, watched) == 0
    assert f"missed: checkpoints/{EPOCHS[0]}" in capsys.readouterr().err
    assert MonitorConfig(watched, drop="significant").level == 0.05


def test_following_it_finds_what_comes_and_what_is_overwritten(trained, watched, put, monkeypatch):
    """Between two looks something happens; at the end a file says that no more will come."""
    last = watched / "checkpoints/last.ckpt"
    end = watched / "done"

    def same_weights_other_bytes():
        changed(trained / EPOCHS[1], last, lambda _, v: v, step=9)

    def half():
        whole = (trained / EPOCHS[3]).read_bytes()
        (watched / "checkpoints" / EPOCHS[3]).write_bytes(whole[: len(whole) // 2])

    happens = [
        lambda: put(EPOCHS[0], under="last.ckpt"),
        lambda: put(EPOCHS[0]),
        lambda: put(EPOCHS[1], under="last.ckpt"),
        same_weights_other_bytes,
        half,
        lambda: None,
        lambda: put(EPOCHS[3]),
        end.touch,
    ]
    monkeypatch.setattr(loop.time, "sleep", lambda _: happens.pop(0)())
    assert monitor(trained, watched, "--until", end) == 0
    assert not happens
    assert evaluated(watched) == ["last.ckpt", "last.ckpt", EPOCHS[3]]
    assert [line["step"] for line in events(watched, "evaluated")] == [4, 8, 16]
    assert not events(watched, "broken") and not events(watched, "missed")


def test_broken_checkpoints_stop_no_others(trained, watched, put, settled, capsys):
    place = watched / "checkpoints"
    put(*EPOCHS[:3])
    whole = (place / EPOCHS[1]).read_bytes()
    (place / EPOCHS[1]).write_bytes(whole[:900])
    (place / "page.ckpt").write_text("<!DOCTYPE html>")
    torch.save({"state_dict": {1: torch.ones(1), "a": torch.ones(1)}}, place / "keys.ckpt")
    flipped = bytearray((place / EPOCHS[2]).read_bytes())
    flipped[5000] ^= 4
    (place / EPOCHS[2]).write_bytes(flipped)
    start = trained / EPOCHS[3]
    changed(start, place / "narrow.ckpt", lambda k, v: v[:2] if "last" in k else v, step=30)
    wide, odd = spec("tests.tiny.TinyNet", width=17), spec(f"{__name__}.Odd")
    recipes = {"unknown.ckpt": spec("tests.tiny.NoSuchNet"), "wide.ckpt": wide, "odd.ckpt": odd}
    for name, net in recipes.items():
        rewritten(start, place / name, lambda model, net=net: model.update(net=net))
    changed(start, place / "nan.ckpt", lambda _, v: v * torch.nan if v.dim() else v, step=31)
    put("last.ckpt")
    with Receiver() as receiver:
        options = ("--once", "--notify", receiver.url)
        assert monitor(trained, watched, *options) == 1
        receiver.shutdown()
    assert evaluated(watched) == [EPOCHS[0], "last.ckpt"]
    reasons = {Path(e["checkpoint"]).name: e["alarm"][0] for e in events(watched, "broken")}
    other = "another architecture"
    said = {"unknown": "NoSuchNet", "wide": other, "narrow": other, "page": "HTML", "keys": ""}
    said |= {"nan": "not finite", "odd": "KeyError: 'odd'", EPOCHS[1][:-5]: ""}
    said[EPOCHS[2][:-5]] = "is damaged"
    assert reasons.keys() == {f"{name}.ckpt" for name in said}
    assert all(text in reasons[f"{name}.ckpt"] for name, text in said.items())
    assert capsys.readouterr().err.count("lightning-rob: alarm:") == len(said) == 9
    posts = [post["checkpoint"] for post in receiver.posts if post["kind"] == "alarm"]
    assert sorted(posts) == sorted(f"checkpoints/{name}" for name in reasons)
    before = lines(watched)
    assert monitor(trained, watched, "--once") == 0
    assert [line["event"] for line in lines(watched)[len(before) :]] == ["ended"]


def test_one_that_goes_too_early_is_missed(trained, watched, put, monkeypatch, capsys):
    put(*EPOCHS[:3])
    evaluate = Suite.evaluate

    def and_delete(suite, meanwhile):
        for name in EPOCHS[:2]:  # the one that is being evaluated, and one that waits
            (watched / "checkpoints" / name).unlink(missing_ok=True)
        return evaluate(suite, meanwhile)

    monkeypatch.setattr(Suite, "evaluate", and_delete)
    assert monitor(trained, watched, "--once", "--every=0.001") == 0
    assert evaluated(watched) == [EPOCHS[0], EPOCHS[2]]
    assert [e["checkpoint"] for e in events(watched, "missed")] == [f"checkpoints/{EPOCHS[1]}"]
    kinds = [line.get("event") for line in lines(watched)]
    assert kinds.index("missed") < kinds.index("evaluated")
    assert f"missed: checkpoints/{EPOCHS[1]}" in capsys.readouterr().err


def test_attacks_that_had_no_gradient_ring(trained, watched, put):
    """Logits that are constant have a gradient of zero."""
    place = watched / "checkpoints"
    put(EPOCHS[0])
    assert watch(trained, watched, "--alarm", "blind=0.02,findings=0") == 0
    flat = lambda key, value: value * 0 if "last.weight" in key else value  # noqa: E731
    changed(place / EPOCHS[0], place / "flat.ckpt", flat, 20)
    assert watch(trained, watched, "--alarm", "blind=0.02,findings=0") == 1
    honest, constant = events(watched, "evaluated")
    assert honest["alarm"] == []
    blind, number = constant["alarm"]
    assert blind == "blind is 100.00%, above 2%" and "above 0" in number
    assert all(line["session"] for line in lines(watched))
    found = {one["name"] for line in lines(watched) for one in line.get("findings", ())}
    assert {"zero_gradients", "blind"} <= found
    with closing(History(watched)) as kept:
        found = [scalars(group) for group in kept.groups() if group[-1]["event"] == "evaluated"]
    assert [one["monitor/robust/blind"] for one in found] == [0, 1]
    assert [one["monitor/robust/findings"] > 0 for one in found] == [False, True]
    assert finding_count([{"findings": [{"text": "", "severity": "note"}]}]) == 0


def test_killed_at_any_write_it_evaluates_none_twice_and_misses_none(trained, watched, put):
    put(*EPOCHS[:2])
    append = history.append_whole

    def dying(at, part):
        """Append whole lines `at` times; then only a part gets to the disk."""
        count = iter(range(at))

        def killed(file, content):
            if next(count, None) is None:
                os.write(file.fileno(), content[: int(part * len(content))])
                os.kill(os.getpid(), signal.SIGKILL)
            append(file, content)

        return killed

    for at, part in ((1, 0.5), (0, 1.0), (0, 0.4)):
        with patch.object(history, "append_whole", dying(at, part)):
            child = forked(lambda: monitor(trained, watched, "--once"))
        assert code_of(child) == -signal.SIGKILL
    assert monitor(trained, watched, "--once") == 0 and evaluated(watched) == EPOCHS[:2]
    shutil.copytree(watched / "checkpoints", watched.parent / "whole/checkpoints")
    assert monitor(trained, watched.parent / "whole", "--once") == 0
    figures = [
        [(line["weights"], line["name"], line["accuracy"]) for line in lines(f) if "name" in line]
        for f in (watched, watched.parent / "whole")
    ]
    assert figures[0] == figures[1]


def test_a_full_disk_ends_it_with_2_and_the_next_start_goes_on(trained, watched, put):
    """A limit on the size of files in place of a full disk."""
    put(EPOCHS[0])
    assert watch(trained, watched) == 0
    record = watched / "monitor.jsonl"
    before = record.read_bytes()
    put(EPOCHS[1])

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 3000, resource.RLIM_INFINITY))
        return watch(trained, watched)

    assert code_of(forked(limited)) == 2
    (seen,) = map(json.loads, record.read_bytes().removeprefix(before).splitlines())
    assert seen["event"] == "seen"
    assert watch(trained, watched) == 0 and evaluated(watched) == EPOCHS[:2]


def test_ctrl_c_ends_it_with_130_and_a_second_monitor_is_refused(trained, watched, put, capsys):
    put(EPOCHS[0])
    child = forked(lambda: monitor(trained, watched, "--every", 60))
    record = watched / "monitor.jsonl"
    deadline = time.monotonic() + 60
    while not (record.exists() and "evaluated" in record.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert monitor(trained, watched, "--once") == 2
    assert "another monitor writes to" in capsys.readouterr().err
    os.kill(child, signal.SIGINT)
    assert code_of(child) == 130
    assert monitor(trained, watched, "--once") == 0 and evaluated(watched) == [EPOCHS[0]]
    record.write_text(record.read_text().replace('"schema": 1', '"schema": 2'))
    before = record.read_bytes()
    assert monitor(trained, watched, "--once") == 2 and record.read_bytes() == before
    assert "has schema 2, this version writes 1" in capsys.readouterr().err


def test_a_suite_of_its_own_where_none_is_given(trained, watched, put):
    put(EPOCHS[3])
    # What a fit has saved has a `ckpt_path`, here that of another run.
    saved = yaml.safe_load((trained.parent / "config.yaml").read_text())
    (watched / "config.yaml").write_text(yaml.safe_dump(saved | {"ckpt_path": "gone.ckpt"}))
    options = ("--config", watched / "config.yaml", "--trainer.logger=false")
    run("monitor", watched, "--once", "--trainer.accelerator=cpu", "--data.test_size=8", *options)
    found = {line["name"]: line for line in lines(watched) if "name" in line}
    pgds = [f"adaptive_pgd{kind}" for kind in ("", "_logits", "_restarts")]
    assert list(found) == ["clean", *pgds, "arc", "climb", "worst"]
    assert found["arc"]["attack"]["class_path"] == "lightning_rob.ARC"
    # The step is eps, as in the paper, and eps the radius of the training.
    assert found["arc"]["attack"]["init_args"]["step_size"] == pytest.approx(16 / 255)
    assert found["adaptive_pgd"]["threat"]["init_args"]["eps"] == pytest.approx(16 / 255)
    weaker = min(line["accuracy"] for line in found.values() if line["name"] != "worst")
    assert found["worst"]["accuracy"] <= weaker + 1e-9


def test_a_suite_of_its_own_is_within_the_threat_of_a_training_against_several(tmp_path):
    attack = [pgd(threat={"norm": "l2", "eps": 0.7}), pgd()]
    model = spec("AdversarialTraining", net=spec("tests.tiny.TinyNet"), attack=attack)
    folder = fit(tmp_path, model=model, trainer__max_epochs=1).parents[1]
    options = ("--trainer.accelerator=cpu", "--data.test_size=8", "--trainer.logger=false")
    run("monitor", folder, "--once", *options)
    threats = [line["threat"]["init_args"] for line in lines(folder) if "threat" in line]
    assert threats and all(of["norm"] == "l2" and of["eps"] == 0.7 for of in threats)


def test_the_report_shows_the_curve(judged):
    watched, *_ = judged
    page, beside = report([watched], watched / "report.html")
    html, text = page.read_text(), beside.read_text()
    assert "Checkpoint by checkpoint" in html
    worst = [line["accuracy"] for line in lines(watched) if line.get("name") == "worst"]
    assert f"worst <b>{worst[-1]:.1%}</b>" in html[html.index("test images by step") :]
    assert ">step</text>" in html
    for name, share in zip(evaluated(watched), worst, strict=True):
        row = next(line for line in text.splitlines() if line.startswith("| ") and name in line)
        assert f"{share:.1%}" in row
    event, _ = (event for event in events(watched, "evaluated") if event["alarm"])
    lost = len(event["change"]["newly_vulnerable"])
    assert re.search(rf"swapped.*\| \**{lost}\** \| \**0\** \|", text)
    assert "**Caution:** alarm of the monitor: checkpoints/swapped.ckpt: robust/worst fell" in text
    changes = [event["change"]["p"] for event in events(watched, "evaluated")[1:]]
    assert "p: McNemar's exact test, Holm over 3 comparisons" in text
    for p, adjusted in zip(changes, holm(changes), strict=True):
        assert re.search(rf"\| \**{p:.3g}\** \| \**{adjusted:.3g}\** \|", text)
    assert changes != holm(changes)


def test_a_part_of_the_defense_is_named_and_a_logger_gets_the_figures(trained, watched, put):
    put(*EPOCHS[:2])
    part = robust_eval({"member": pgd()}, target="lightning_rob.defenses.first_member")
    (watched / "part.yaml").write_text(yaml.safe_dump(part))
    logger = spec("CSVLogger", save_dir=str(watched), name="csv")
    options = ("--suite", watched / "part.yaml", f"--trainer.logger={json.dumps(logger)}")
    assert watch(trained, watched, *options) == 0
    targets = {line["name"]: line["target"] for line in lines(watched) if "name" in line}
    names = ("clean", "apgd", "worst")
    assert targets == dict.fromkeys(names, "full_defense") | {"member": "first_member"}
    (file,) = watched.glob("csv/*/metrics.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    found = [line for line in lines(watched) if line.get("name") in ("clean", "worst")]
    names = {"clean": "monitor/acc", "worst": "monitor/robust/worst"}
    logged = [float(rows[i // 2][names[line["name"]]]) for i, line in enumerate(found)]
    assert logged == pytest.approx([line["accuracy"] for line in found])
    assert [row["step"] for row in rows] == ["4", "8"]
    won = events(watched, "evaluated")[1]["change"]["won_back"]
    assert float(rows[1]["monitor/won_back"]) == len(won)


def test_a_logger_that_hangs_takes_a_tenth_of_the_time_and_loses_no_figure(tmp_path, capsys):
    """Evaluations do not wait for it, nor do other loggers."""

    class Hanging(CSVLogger):
        hangs, calls = True, 0

        def log_metrics(self, *args):
            self.calls += 1
            if self.hangs:
                time.sleep(0.2)
                raise ConnectionError("POST http://me:hidden@host/log?key=hidden")
            super().log_metrics(*args)

    hanging, good = Hanging(tmp_path, "bad"), CSVLogger(tmp_path, "good")
    logs = [FigureLog(hanging), FigureLog(good)]
    began = time.monotonic()
    for step in range(1, 9):
        for log in logs:
            log.add(evaluation(step))
            log.write()
    assert time.monotonic() - began < 1
    assert hanging.calls == 1
    assert logs[0].due - began >= 9 * 0.2
    hanging.hangs = False
    for log in logs:
        log.close(patient=True)
    for file in tmp_path.glob("*/*/metrics.csv"):
        rows = list(csv.DictReader(file.read_text().splitlines()))
        assert [row["step"] for row in rows] == list("12345678")
    error = capsys.readouterr().err
    assert error.count("figures could not be logged") == 1 and "hidden" not in error


def test_a_single_file_is_compared_in_the_order_of_deployment(trained, watched, put, capsys):
    """A worse model of fewer steps takes the place of another, and is rolled back."""
    put(EPOCHS[3], under="production.ckpt")
    path = watched / "checkpoints/production.ckpt"
    good = path.read_bytes()
    home = watched / "checkpoints/production_monitor"
    assert watch(trained, path, "--drop=significant") == 0
    changed(trained / EPOCHS[3], path, swapped, step=2)
    put(EPOCHS[0])  # it is not looked at
    assert watch(trained, path, "--drop=significant") == 1
    path.write_bytes(good)
    assert watch(trained, path, "--drop=significant") == 0
    found = events(home, "evaluated")
    assert [event["step"] for event in found] == [16, 2, 16]
    assert [len(event["alarm"]) for event in found] == [0, 1, 0]
    lost = found[1]["change"]["newly_vulnerable"]
    assert lost and found[2]["change"]["won_back"] == lost
    # An alarm ends by another suite as well.
    put(EPOCHS[1], under="production.ckpt")
    assert watch(trained, path, "--alarm=robust/worst=0.999") == 1
    with closing(History(home)) as opened:
        assert opened.alarm()
    assert watch(trained, path, "--data.test_size=16") == 0
    with closing(History(home)) as opened:
        assert not opened.alarm()
    assert [event["position"] for event in events(home, "evaluated")] == [0, 1, 2, 3, 4]
