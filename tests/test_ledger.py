"""The record image by image: what is in it, and that nothing of it is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from zlib import crc32

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rob import Ensemble, Mixture, RandomTransforms, Single, TransformEnsemble
from lightning_rob.attacks import (
    PGD,
    TAA,
    CommonCorruption,
    PartialBatchAttack,
    Strongest,
    TransferFromStatic,
)
from lightning_rob.callbacks import RobustEval
from lightning_rob.ledger import (
    PerImageRows,
    card_of,
    fingerprint,
    predicted_class,
    read_ledger,
    save_images,
    write_per_image,
)
from lightning_rob.ledger.identity import HERE, told
from lightning_rob.ledger.journal import Journal
from lightning_rob.rules import majority
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise, HorizontalFlip
from tests.tiny import ROOT, Blobs, TinyNet, arc, pgd, recipe, records, robust_eval, run

CSV = "run/version_0/images/test-apgd+arc.csv"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run("fit", "--config", recipe(folder))
    return next(folder.glob("run/version_0/checkpoints/*.ckpt"))


def evaluated(folder, checkpoint, *args, **options):
    folder.mkdir(exist_ok=True)
    callbacks = [robust_eval({"apgd": pgd(), "arc": arc(random_start=True)}, **options)]
    file = recipe(folder, **{"trainer__callbacks+": callbacks})
    run("test", "--config", file, "--ckpt_path", checkpoint, *args)
    return read_ledger(folder / CSV)


@pytest.fixture(scope="module")
def ledger(trained, tmp_path_factory):
    return evaluated(tmp_path_factory.mktemp("ledger"), trained)


def test_it_has_every_image_and_adds_up_to_the_figures(ledger):
    figures = {r["name"]: r["accuracy"] for r in records(ledger.path.parents[3])}
    assert ledger.index.tolist() == list(range(33))
    assert ledger.label.tolist() == [y for _, y in Blobs().source(False)]
    assert {"apgd", "arc"} == set(ledger.attacks)
    for name in ("clean", "apgd", "arc"):
        assert float(ledger.scores[name].mean()) == pytest.approx(figures[name], abs=1e-6)
    lows = torch.stack([ledger.scores[name] for name in ("clean", "apgd", "arc")]).amin(0)
    assert torch.equal(ledger.scores["worst"], lows)
    assert 0 < lows.mean() < 1


def test_the_columns_say_who_broke_an_image_and_how_far_it_went(ledger):
    head, *lines = [line.split(",") for line in ledger.path.read_text().splitlines()]
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    assert {row["draws"] for row in rows} == {"2"}
    assert all(0 <= float(row[f"{name}_size"]) < 0.0628 for row in rows for name in ("apgd", "arc"))
    seen = set()
    for row in rows:
        clean, *attacked = (float(row[name]) for name in ("clean", "apgd", "arc"))
        low = min(clean, *attacked)
        expected = ("apgd", "arc")[attacked.index(min(attacked))] if low < clean else ""
        assert row["broken_by"] == (expected if clean > 0 else "clean")
        seen.add(row["broken_by"])
    assert len(seen) > 1


def test_the_card_says_what_the_attacker_might_do(ledger):
    card = ledger.card
    assert card["attacks"]["arc"]["norm"] == "linf"
    assert card["attacks"]["arc"]["eps"] == pytest.approx(16 / 255)
    assert card["attacks"]["apgd"]["steps"] == 3
    assert "private randomness" in card["attacks"]["arc"]["knows"]
    assert (card["defense"], card["stage"], card["seed"]) == ("Ensemble", "test", 0)
    assert len(card["weights"]) == 16


WHITE_BOX = PGD(Threat("linf", 0.1), 3, 0.05, draws=5, restarts=2)


def test_the_card_is_that_of_all_parts_of_an_attack():
    card = card_of(TransferFromStatic(WHITE_BOX))
    assert [card[name] for name in ("steps", "restarts", "draws")] == [3, 2, 5]
    assert card["knows"] == "the defense before it adapts"


def test_the_card_does_not_tell_less_than_an_attacker_knows():
    """A part that knows nothing does not speak for another that knows all."""
    assert card_of(WHITE_BOX)["knows"] == PGD.knowledge
    assert card_of(PartialBatchAttack(WHITE_BOX, natural=WHITE_BOX))["knows"] == PGD.knowledge
    partly = PartialBatchAttack(WHITE_BOX, natural=CommonCorruption(GaussianNoise(0.1)))
    assert card_of(partly)["knows"] == f"{PGD.knowledge}; {CommonCorruption.knowledge}"
    both = Strongest((TAA(WHITE_BOX), WHITE_BOX))
    assert card_of(both)["knows"] == f"{TAA.knowledge}; {PGD.knowledge}"


def test_batches_of_any_size_give_the_same_bytes(ledger, trained, tmp_path):
    for size in (1, 7, 64):
        option = f"--data.init_args.eval_batch_size={size}"
        other = evaluated(tmp_path / str(size), trained, option)
        assert other.path.read_bytes() == ledger.path.read_bytes()


def test_several_inferences_have_a_column_each(trained, tmp_path):
    found = evaluated(tmp_path, trained, inferences=3)
    head = found.path.read_text().split("\n")[0].split(",")
    assert [name for name in head if name.startswith("arc_")] == [
        "arc_answer",
        "arc_size",
        "arc_1",
        "arc_2",
        "arc_3",
    ]


class Slow(Callback):
    """Takes its time after each group of images, so that there is one to be killed in."""

    def on_test_start(self, trainer, *_) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, RobustEval):
                callback.after_group = lambda: time.sleep(0.1)


def slow_test(folder, checkpoint):
    """A test of 17 groups that takes seconds, as another process."""
    folder.mkdir(exist_ok=True)
    slow = {"class_path": "tests.test_ledger.Slow"}
    attacks = {"apgd": pgd(), "arc": arc(random_start=True)}
    callbacks = [robust_eval(attacks, group_size=2), slow]
    file = recipe(folder, **{"trainer__callbacks+": callbacks})
    command = ["test", "--config", file, "--ckpt_path", checkpoint]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "lightning_rob", *map(str, command)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_test_that_was_killed_goes_on_and_ends_in_the_same_bytes(trained, tmp_path):
    through = evaluated(tmp_path / "through", trained, group_size=2)
    tmp_path /= "killed"
    killed = slow_test(tmp_path, trained)
    limit = time.monotonic() + 300
    while not (left := list(tmp_path.glob("unfinished/*/*.csv"))) and time.monotonic() < limit:
        time.sleep(0.02)
    assert left, killed.communicate()
    while left[0].read_text().count("whole") < 5 and time.monotonic() < limit:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    known = left[0].read_text().count("whole")
    assert known >= 5
    assert not (tmp_path / CSV).exists()
    out, error = slow_test(tmp_path, trained).communicate()
    (found,) = tmp_path.glob("run/version_*/images/test-*.csv")
    assert f"{2 * known} images are scored already" in out, out + error
    assert found.read_bytes() == through.path.read_bytes()
    assert not list(tmp_path.glob("unfinished/*"))


def test_a_killed_write_counts_for_nothing(tmp_path):
    x, index = torch.rand(4, 3, 2, 2), torch.arange(4)
    rows, y = torch.rand(4, 5), torch.zeros(4, dtype=torch.int64)
    Journal(tmp_path, 2, 3).add(x[:2], y[:2], index[:2], rows[:2], [1.0])
    Journal(tmp_path, 2, 3).add(x[2:], y[2:], index[2:], rows[2:], [1.0])
    (path,) = tmp_path.glob("*.csv")
    content = path.read_text()
    for cut in range(len(content)):
        path.write_text(content[:cut])
        journal = Journal(tmp_path, 2, 3)
        first = content.index("whole")
        lines = content.index("\n", first) + 1
        assert len(journal) == (2 if cut >= lines else 0)
        assert (journal.recall(x[:2], y[:2], index[:2]) is None) == (cut < lines)
    path.write_text(content[:-9] + content)  # torn, and then grown over by another
    grown = Journal(tmp_path, 2, 3)
    assert torch.equal(grown.recall(x[:2], y[:2], index[:2]), rows[:2])


def test_rows_are_of_these_pixels_and_exact(tmp_path):
    x, index, rows = torch.rand(3, 1, 4, 4), torch.tensor([5, 2, 9]), torch.rand(3, 4)
    y = torch.tensor([1, 0, 1])
    Journal(tmp_path, 3, 1).add(x, y, index, rows, [0.5, 2.0])
    journal = Journal(tmp_path, 3, 1)
    assert torch.equal(journal.recall(x, y, index), rows)
    assert torch.equal(journal.recall(x[1:], y[1:], index[1:]), rows[1:])
    assert journal.taken(["a", "b"]) == {"a": 0.5, "b": 2.0}
    assert journal.recall(x + 1e-6, y, index) is None
    assert journal.recall(x, 1 - y, index) is None
    assert journal.recall(x, y, index + 1) is None
    assert len(Journal(tmp_path, 3, 2)) == 0  # of another evaluation's width


@pytest.mark.parametrize("cell", ["nan", "1e30", "-5", "x", "inf"])
def test_rows_that_cannot_be_are_not_believed(tmp_path, cell):
    x, y, index = torch.rand(1, 1, 4, 4), torch.zeros(1, dtype=torch.int64), torch.tensor([0])
    Journal(tmp_path, 2, 1).add(x, y, index, torch.tensor([[1.0, 0.5, 3.0]]), [1.0])
    (path,) = tmp_path.glob("*.csv")
    (tmp_path / "folder.csv").mkdir()
    assert len(Journal(tmp_path, 2, 1)) == 1
    path.write_text(path.read_text().replace("0.5,3", f"{cell},3"))
    assert len(Journal(tmp_path, 2, 1)) == 0


def test_what_another_process_is_writing_stays(tmp_path):
    x, y, index = torch.rand(1, 1, 4, 4), torch.zeros(1, dtype=torch.int64), torch.tensor([0])
    mine = Journal(tmp_path, 2, 1)
    mine.add(x, y, index, torch.ones(1, 3), [1.0])
    other = tmp_path / "elsewhere-1.csv"
    other.write_text("begun")
    mine.remove()
    assert other.exists()
    assert not mine.path.exists()


DEFENSES = {
    "net": lambda net: Single(net),
    "ensemble": lambda net: Ensemble([net, net]),
    "majority": lambda net: Ensemble([net, net], rule=majority),
    "noise": lambda net: RandomTransforms(net, [GaussianNoise(alpha=0.1)], 1, 2),
    "more": lambda net: RandomTransforms(net, [GaussianNoise(alpha=0.9)], 1, 2),
    "flip": lambda net: RandomTransforms(net, [HorizontalFlip()], 1, 2),
    "identity": lambda net: RandomTransforms(
        net, [GaussianNoise(alpha=0.1)], 1, 2, gradients="identity"
    ),
    "draws": lambda net: RandomTransforms(net, [GaussianNoise(alpha=0.1)], 1, 3),
    "flips": lambda net: TransformEnsemble([net, net], ["flip_both", "clean"]),
    "turns": lambda net: TransformEnsemble([net, net], ["rotate_180", "clean"]),
    "mixture": lambda net: Mixture([Single(net), Ensemble([net, net])]),
    "mixture of majority": lambda net: Mixture([Single(net), Ensemble([net, net], rule=majority)]),
}


def test_a_fingerprint_tells_defenses_of_the_same_weights_apart():
    net = TinyNet()
    prints = {name: fingerprint(make(net)) for name, make in DEFENSES.items()}
    assert len(set(prints.values())) == len(prints)
    assert prints == {name: fingerprint(make(net)) for name, make in DEFENSES.items()}
    net.strength = 2.0
    assert fingerprint(Single(net)) != prints["net"]


def test_what_cannot_be_described_is_equal_to_nothing_elsewhere():
    class Opaque:
        __slots__ = ()

    assert HERE in str(told(Opaque()))
    assert told(lambda x: x + 1) == told(lambda x: x + 1)
    assert told(lambda x: x + 1) != told(lambda x: x + 2)
    assert told({"a": 1, "b": (2, None)}) == told({"b": (2, None), "a": 1})


def test_what_is_no_answer_is_no_class():
    answers = torch.tensor([[0.0, 0.0], [torch.nan, torch.nan], [0.4, 0.6]])
    assert predicted_class(answers).tolist() == [-1, -1, 1]


def test_a_row_by_hand(tmp_path):
    pixels = f"{crc32(bytes(16)):08x}"
    scores = torch.tensor([[[1.0], [0.25], [0.125]]])
    sizes = torch.tensor([[0.0, 0.031, 0.0314]])
    predicted = torch.tensor([[3, 3, 1]])
    rows = PerImageRows(torch.tensor([7]), torch.tensor([3]), scores, predicted, sizes, [pixels])
    card = {"attacks": {"pgd": {}, "arc": {}}}
    names, worst = ("clean", "pgd", "arc"), torch.tensor([0.125])
    write_per_image(tmp_path / "a.csv", names, rows, 4, card, worst)
    assert (tmp_path / "a.csv").read_text().split("\n")[1] == (
        f"7,3,1,3,0.25,3,0.031,0.125,1,0.0314,0.125,arc,4,{crc32(bytes(16)):08x}"
    )
    read = read_ledger(tmp_path / "a.csv")
    assert (read.index.tolist(), read.label.tolist()) == ([7], [3])
    assert read.scores["arc"].tolist() == [0.125]


@pytest.mark.parametrize(
    ("text", "card"),
    [("<html>", "{}"), ("index,label\n1,2\n", '{"attacks": {}}'), ("", '{"attacks": {}}')],
)
def test_another_file_is_no_record(tmp_path, text, card):
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "a.json").write_text(card)
    with pytest.raises(ValueError, match=r"a\.csv is not a record"):
        read_ledger(tmp_path / "a.csv")


def test_images_are_saved_without_loss(tmp_path):
    import numpy as np
    from PIL import Image

    x = torch.rand(2, 3, 5, 5)
    x[1] = (x[1] * 255).round() / 255
    save_images(tmp_path, torch.tensor([3, 8]), x)
    assert torch.equal(torch.from_numpy(np.load(tmp_path / "3.npy")), x[0])
    pixels = torch.from_numpy(np.array(Image.open(tmp_path / "8.png"))).permute(2, 0, 1)
    assert torch.equal(pixels.float() / 255, x[1])


def test_perturbed_images_can_be_kept(trained, tmp_path):
    evaluated(tmp_path, trained, save_images=True)
    kept = sorted(path.stem for path in (tmp_path / "run/version_0/images/test-arc").iterdir())
    assert kept == sorted(str(number) for number in range(33))
    assert json.loads((tmp_path / CSV).with_suffix(".json").read_text())["attacks"].keys() == {
        "apgd",
        "arc",
    }
