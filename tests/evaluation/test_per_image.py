"""Results image by image: their content, and that a kill loses none of them."""

import csv
import time
from zlib import crc32

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rob.callbacks import RobustEval
from lightning_rob.evaluation.result_file import read_result_file, write_result_file
from lightning_rob.evaluation.resume_log import BatchOutcome, ResumeLog
from lightning_rob.evaluation.store import PerImageResults, predicted_class
from tests.forked import start
from tests.tiny import Blobs, arc, pgd, recipe, records, robust_eval, run

CSV = "run/version_0/images/test-apgd+arc.csv"


def evaluated(folder, checkpoint, *args, **options):
    folder.mkdir(exist_ok=True)
    callbacks = [robust_eval({"apgd": pgd(), "arc": arc(random_start=True)}, **options)]
    file = recipe(folder, **{"trainer__callbacks+": callbacks})
    run("test", "--config", file, "--ckpt_path", checkpoint, *args)
    return read_result_file(folder / CSV)


@pytest.fixture(scope="module")
def results(trained, tmp_path_factory):
    return evaluated(tmp_path_factory.mktemp("results"), trained)


def test_every_image_is_there_and_their_means_are_the_accuracies(results):
    accuracies = {r["name"]: r["accuracy"] for r in records(results.path.parents[3])}
    assert results.index.tolist() == list(range(33))
    assert results.label.tolist() == [y for _, y in Blobs().source(False)]
    assert {"apgd", "arc"} == set(results.attacks)
    for name in ("clean", "apgd", "arc"):
        assert float(results.scores[name].mean()) == pytest.approx(accuracies[name], abs=1e-6)
    lows = torch.stack([results.scores[name] for name in ("clean", "apgd", "arc")]).amin(0)
    assert torch.equal(results.scores["worst"], lows)
    assert 0 < lows.mean() < 1


class Slow(Callback):
    """Waits after each group of images, so that there is time for a kill."""

    def on_test_start(self, trainer, *_) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, RobustEval):
                callback.advance = lambda *_: time.sleep(0.05)


def slow_test(folder, checkpoint):
    """Start a test of 17 groups as another process."""
    folder.mkdir(exist_ok=True)
    slow = {"class_path": "tests.evaluation.test_per_image.Slow"}
    attacks = {"apgd": pgd(), "arc": arc(random_start=True)}
    callbacks = [robust_eval(attacks, group_size=2), slow]
    file = recipe(folder, **{"trainer__callbacks+": callbacks})
    return start("test", "--config", file, "--ckpt_path", checkpoint)


def test_a_test_that_was_killed_goes_on_and_ends_in_the_same_bytes(trained, tmp_path):
    through = evaluated(tmp_path / "through", trained, group_size=2)
    tmp_path /= "killed"
    killed = slow_test(tmp_path, trained)
    limit = time.monotonic() + 300
    while not (left := list(tmp_path.glob("unfinished/*/*.jsonl"))) and time.monotonic() < limit:
        time.sleep(0.02)
    assert left, killed.wait(0)
    while left[0].read_text().count('"name": "arc"') < 5 and time.monotonic() < limit:
        time.sleep(0.02)
    killed.process.kill()
    killed.wait()
    apgd, arc = (left[0].read_text().count(f'"name": "{name}"') for name in ("apgd", "arc"))
    assert apgd >= arc >= 5
    assert not (tmp_path / CSV).exists()
    resumed = slow_test(tmp_path, trained).wait()
    (found,) = tmp_path.glob("run/version_*/images/test-*.csv")
    assert f"scored already: apgd {2 * apgd}, arc {2 * arc}." in resumed.stdout, resumed
    assert found.read_bytes() == through.path.read_bytes()
    assert not list(tmp_path.glob("unfinished/*"))


def rows(count):
    """Images, labels and indices of a batch, and its outcome under an attack."""
    generator, number = torch.Generator().manual_seed(0), torch.arange(count)
    x = torch.rand(count, 1, 4, 4, generator=generator)
    scores, sizes = torch.rand(2, count, generator=generator)
    outcome = BatchOutcome(scores[:, None], number, sizes, 1 - scores[:, None], number % 3 - 1)
    return (x, number % 2, 10 * number + 3), outcome


def log_of(folder):
    return ResumeLog(folder, ["pgd"])


def part_of(batch, outcome, part):
    return [tensor[part] for tensor in batch], BatchOutcome(*(tensor[part] for tensor in outcome))


def same(log, batch, outcome):
    return all(map(torch.equal, log.load(*batch)["pgd"], outcome))


def test_a_log_is_exact_and_of_these_images(tmp_path):
    batch, outcome = rows(3)
    log_of(tmp_path).add(*batch, "pgd", outcome, 0.5)
    log_of(tmp_path).add(*batch, "foreign", outcome, 2.0)
    log = log_of(tmp_path)
    assert same(log, batch, outcome)
    assert log.seconds == {"pgd": 0.5}
    x, y, index = batch
    for other in ((x + 1e-6, y, index), (x, 1 - y, index), (x, y, index + 1)):
        assert not log.load(*other)


def test_a_line_that_a_kill_broke_off_is_ignored(tmp_path):
    batch, outcome = rows(4)
    parts = [part_of(batch, outcome, part) for part in (slice(2), slice(2, 4))]
    for some, found in parts:
        log_of(tmp_path).add(*some, "pgd", found, 1.0)
    (path,) = tmp_path.glob("*.jsonl")
    content = path.read_text()
    first = content.index("\n")
    for cut in (0, 1, first - 1, first, first + 1, len(content) - 1, len(content)):
        path.write_text(content[:cut])
        assert len(log_of(tmp_path).known) == (cut >= first) + (cut == len(content))
    path.write_text(content[: first - 9])
    log_of(tmp_path).add(*parts[1][0], "pgd", parts[1][1], 1.0)
    assert same(log_of(tmp_path), *parts[1])


def test_the_log_of_another_process_is_kept(tmp_path):
    batch, outcome = rows(1)
    log = log_of(tmp_path)
    log.add(*batch, "pgd", outcome, 1.0)
    other = tmp_path / "elsewhere-1.jsonl"
    other.write_text("{")
    log.delete()
    assert other.exists()
    assert not log.path.exists()


def test_a_rejection_has_no_class():
    predictions = torch.tensor([[0.0, 0.0], [torch.nan, torch.nan], [0.4, 0.6]])
    assert predicted_class(predictions).tolist() == [-1, -1, 1]


def outcome(scores, prediction, size, rejected=0.0):
    each = (torch.tensor([value]) for value in (prediction, size, [rejected] * len(scores), -1.0))
    return BatchOutcome(torch.tensor([scores]), *each)


@pytest.mark.parametrize("inferences", [1, 2])
def test_a_row_by_hand(tmp_path, inferences):
    results = PerImageResults(("clean", "pgd", "a,b"), inferences)
    pgd, last = ([0.25], [0.125]) if inferences == 1 else ([0.5, 0.0], [0.0, 0.25])
    outcomes = [outcome([1.0] * inferences, 3, 0.0), outcome(pgd, 3, 0.031, 0.125)]
    batch = torch.zeros(1, 1, 2, 2), torch.tensor([3]), torch.tensor([7])
    results.add_batch(*batch, [*outcomes, outcome(last, 1, 0.0314)])
    path, worst = tmp_path / "a.csv", torch.tensor([0.125])
    card = {"attacks": {"pgd": {}, "a,b": {}}}
    write_result_file(path, results.names, results.rows(), 4, card, worst)
    with path.open(newline="") as file:
        head, row = csv.reader(file)
    expected = {
        **{"index": "7", "label": "3", "clean": "1", "clean_prediction": "3"},
        **{"pgd": "0.25", "pgd_prediction": "3", "pgd_size": "0.031", "pgd_blind": ""},
        **{"a,b": "0.125", "a,b_prediction": "1", "a,b_size": "0.0314", "a,b_blind": ""},
        **{"clean_rejected": "0", "pgd_rejected": "0.125", "a,b_rejected": "0"},
        **{"worst": "0.125", "broken_by": "a,b", "draws": "4", "checksum": str(crc32(bytes(16)))},
    }
    if inferences == 2:
        expected |= {"clean_inference_1": "1", "clean_inference_2": "1", "pgd_inference_1": "0.5"}
        expected |= {"pgd_inference_2": "0", "a,b_inference_1": "0", "a,b_inference_2": "0.25"}
    assert dict(zip(head, row, strict=True)) == expected
    assert head[:4] == ["index", "label", "clean", "clean_prediction"] and head[-1] == "checksum"
    read = read_result_file(path)
    assert (read.index.tolist(), read.label.tolist()) == ([7], [3])
    assert read.checksum.tolist() == [crc32(bytes(16))]
    assert read.scores["a,b"].tolist() == [0.125]
    wrong = PerImageResults(("clean", "pgd"), 1)
    wrong.add_batch(*batch, [outcome([0.0], 1, 0.0)] * 2)
    write_result_file(path, wrong.names, wrong.rows(), 1, {"attacks": {}}, worst)
    assert path.read_text().splitlines()[1].split(",")[-3] == "clean"


def test_another_file_is_no_record(tmp_path):
    none = '{"schema": 1, "attacks": {}}'
    for text, card in (("<html>", "{}"), ("index,label\n1,2\n", none), ("", none)):
        (tmp_path / "a.csv").write_text(text)
        (tmp_path / "a.json").write_text(card)
        with pytest.raises(ValueError, match=r"a\.csv is not a record"):
            read_result_file(tmp_path / "a.csv")
    head, row = "index,label,clean,worst,checksum\n", "1,2,{},0,3\n"
    (tmp_path / "a.json").write_text(none)
    for rows, why in ((row.format(1) * 2, "each once"), (row.format(7.5), "got 7.5")):
        (tmp_path / "a.csv").write_text(head + rows)
        with pytest.raises(ValueError, match=why):
            read_result_file(tmp_path / "a.csv")
    (tmp_path / "a.json").write_text(none.replace("1", "2"))
    with pytest.raises(ValueError, match="its schema is 2, this version reads 1"):
        read_result_file(tmp_path / "a.csv")


def test_an_image_that_no_attack_breaks_is_broken_by_none(results):
    with results.path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    held = [r for r in rows if 0 < float(r["clean"]) <= min(float(r["apgd"]), float(r["arc"]))]
    assert held and {row["broken_by"] for row in held} == {""}
