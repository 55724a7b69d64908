"""One fit trains a sub-model for each transformation, and can be stopped and gone on with."""

import json
import math
import signal
from itertools import pairwise

import pytest
import torch
import yaml

from lightning_rob.data.samples import Part, Pixels
from lightning_rob.data.transformed import Shown
from lightning_rob.errors import InputError
from lightning_rob.modules import TransformTraining
from lightning_rob.transforms.pool import pool
from tests.tiny import TinyNet, pgd, run, same_weights, shell, weights
from tests.tiny import recipe as bat

NAMES = ["clean", "rotate_90", "noise_gaussian"]
LAST = "run/version_0/checkpoints/last.ckpt"
SAVED = {
    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
    "init_args": {"save_last": True, "save_top_k": -1, "filename": "end-{epoch}"},
}


def recipe(place, callbacks=(), trainer=None, **options):
    place.mkdir(exist_ok=True)
    init = {
        "net": {"class_path": "tests.tiny.TinyNet", "init_args": {"width": 8}},
        "transforms": NAMES,
        "epochs": 3,
        "patience": 1,
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
    }
    model = {"class_path": "TransformTraining", "init_args": init | options}
    file = bat(place, model=model, **{"trainer__callbacks+": [SAVED, *callbacks]})
    content = yaml.safe_load(file.read_text())
    content["trainer"] |= {"max_epochs": 9} | (trainer or {})
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    done = shell("fit", "--config", recipe(folder))
    assert done.returncode == 0, done.stderr
    return folder


def turns(folder):
    return torch.load(folder / LAST, weights_only=True)["turns"]


def losses(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run/version_0")).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("val/loss/")]
    return {tag.removeprefix("val/loss/"): [e.value for e in events.Scalars(tag)] for tag in tags}


def test_every_sub_model_is_trained_in_turn_and_ends_with_its_best_weights(whole):
    found = losses(whole)
    assert list(found) == NAMES or set(found) == set(NAMES)
    assert turns(whole)["waiting"] == []
    model = TransformTraining(lambda: TinyNet(8), NAMES)
    model.load_state_dict(weights(whole / LAST))
    data = blobs()
    for member, name in enumerate(NAMES):
        images = Shown(data.parts["val"])
        seen = images.through(pool().get(name) or model.transforms[name], name, 0)
        with torch.no_grad():
            logits = model.members[member].eval()(seen)
        loss = torch.nn.functional.cross_entropy(logits, images.y).item()
        assert loss == pytest.approx(min(found[name]), rel=1e-4)


def blobs():
    from tests.tiny import Blobs

    data = Blobs()
    data.setup("fit")
    return data


def test_early_stopping_ends_a_turn(whole):
    """With a patience of 1 all but the last loss of a turn fall, or its epochs are used up."""
    for values in losses(whole).values():
        falling = [b < a for a, b in pairwise(values)]
        assert all(falling[:-1])
        assert len(values) == 3 or not falling[-1]


@pytest.mark.parametrize("epoch", [0, 2, 3])
def test_resuming_from_any_epoch_gives_the_same_weights(whole, tmp_path, epoch):
    start = whole / f"run/version_0/checkpoints/end-epoch={epoch}.ckpt"
    resumed = shell("fit", "--config", recipe(tmp_path), "--ckpt_path", start)
    assert resumed.returncode == 0, resumed.stderr
    assert same_weights(weights(whole / LAST), weights(tmp_path / LAST))


def test_sigkill_then_resume_gives_the_same_weights(whole, tmp_path):
    kill = {"class_path": "tests.tiny.KillAt", "init_args": {"step": 22}}
    killed = shell("fit", "--config", recipe(tmp_path, [kill]))
    assert killed.returncode == -signal.SIGKILL
    resumed = shell("fit", "--config", recipe(tmp_path), "--ckpt_path", tmp_path / LAST)
    assert resumed.returncode == 0, resumed.stderr
    assert same_weights(weights(whole / LAST), weights(tmp_path / LAST))


def test_a_fit_that_was_over_has_nothing_left_to_do(whole, tmp_path):
    again = shell("fit", "--config", recipe(tmp_path), "--ckpt_path", whole / LAST)
    assert again.returncode == 0, again.stderr
    assert not losses(tmp_path)


def test_what_is_in_the_folder_is_not_trained_again(tmp_path):
    folder = str(tmp_path / "subs")
    run("fit", "--config", recipe(tmp_path / "a", transforms=["clean", "rotate_90"], folder=folder))
    run(
        "fit",
        "--config",
        recipe(tmp_path / "b", transforms=["rotate_90", "flip_both"], folder=folder),
    )
    assert set(losses(tmp_path / "b")) == {"flip_both"}
    first, second = weights(tmp_path / "a" / LAST), weights(tmp_path / "b" / LAST)
    for key in ("first.weight", "norm.running_mean", "last.bias"):
        assert torch.equal(first[f"members.1.{key}"], second[f"members.0.{key}"])
    run("fit", "--config", recipe(tmp_path / "c", transforms=["clean", "flip_both"], folder=folder))
    assert not losses(tmp_path / "c")


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ("--data.train_size=80", "images"),
        ("--data.labels=3", "images"),  # as many images, of other labels
        ("--model.epochs=2", "training"),
        ("--trainer.limit_train_batches=0.5", "training"),
        ("--model.net.width=9", "net"),
    ],
)
def test_a_sub_model_of_another_training_is_not_taken_over(tmp_path, capsys, other, what):
    folder = str(tmp_path / "subs")
    options = {"transforms": ["clean"], "folder": folder}
    run("fit", "--config", recipe(tmp_path / "a", **options))
    with pytest.raises(SystemExit):
        run("fit", "--config", recipe(tmp_path / "b", **options), other)
    assert f"clean.pt was trained otherwise ({what})" in capsys.readouterr().err


def test_a_checkpoint_of_other_transformations_is_refused(whole, tmp_path, capsys):
    file = recipe(tmp_path, transforms=[*NAMES[1:], NAMES[0]])
    with pytest.raises(SystemExit):
        run("test", "--config", file, "--ckpt_path", whole / LAST)
    assert "behind other transformations: clean, rotate_90" in capsys.readouterr().err


def test_two_processes_train_two_at_a_time_and_both_have_all(tmp_path):
    trainer = {"strategy": "ddp", "devices": 2}
    votes = {
        "class_path": "lightning_rob.callbacks.VotingRuleEval",
        "init_args": {"attacks": {"pgd": pgd()}},
    }
    file = recipe(tmp_path, [votes], trainer)
    done = shell("fit", "--config", file, "--test_after_fit=true")
    assert done.returncode == 0, done.stderr
    found = losses(tmp_path)
    assert set(found) == set(NAMES)
    assert len(found["clean"]) == len(found["rotate_90"])
    assert turns(tmp_path)["processes"] == 2
    lines = (tmp_path / "run/version_0/votes.jsonl").read_text().splitlines()
    tested = [r for r in map(json.loads, lines) if r["stage"] == "test"]
    assert {r["n"] for r in tested} == {33}
    clean = [r["accuracy"] for r in tested if (r["name"], r["rule"]) == ("clean", "RD")]
    assert clean[0] > 0.8  # a member that only one process had would be at one in four


def test_two_processes_train_each_sub_model_on_all_images(whole, tmp_path):
    """The first epoch of the first sub-model is that of one process, to rounding."""
    trainer = {"strategy": "ddp", "devices": 2, "max_epochs": -1}
    done = shell("fit", "--config", recipe(tmp_path, trainer=trainer))
    assert done.returncode == 0, done.stderr
    one, two = losses(whole), losses(tmp_path)
    assert two["clean"][0] == pytest.approx(one["clean"][0], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "args", "message"),
    [
        ({"epochs": 0}, [], "epochs must be at least 1, got 0"),
        ({"patience": 0}, [], "patience must be at least 1, got 0"),
        ({"transforms": ["rotate_91"]}, [], "no transformation 'rotate_91', did you mean"),
        ({}, ["--trainer.max_epochs=4"], "trainer.max_epochs must be at least 9"),
        ({}, ["--trainer.limit_val_batches=0"], "validate after every epoch"),
        ({}, ["--trainer.val_check_interval=0.5"], "leave trainer.check_val_every_n_epoch and"),
    ],
)
def test_bad_arguments(tmp_path, options, args, message):
    from lightning_rob.cli.lightning_cli import RobustCLI

    with pytest.raises(InputError, match=message):
        RobustCLI(["fit", "--config", str(recipe(tmp_path, **options)), *args])


def grey(count):
    images = torch.randint(0, 256, (count, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    return Part(Pixels(images.byte(), torch.arange(count) % 4), torch.arange(count).flip(0)[2:])


def test_images_are_transformed_once_and_kept(tmp_path):
    part, noise = grey(20), pool()["noise_gaussian"]
    shown, told = Shown(part, str(tmp_path)), []
    first = shown.through(noise, "noise_gaussian", 0, told.append)
    assert sum(told) == 18
    told.clear()
    again = Shown(part, str(tmp_path)).through(noise, "noise_gaussian", 0, told.append)
    assert torch.equal(first, again)
    assert told == []
    other = shown.through(noise, "noise_gaussian", 1, told.append)
    assert sum(told) == 18
    assert not torch.equal(first, other)
    assert len(list(tmp_path.iterdir())) == 2


def test_an_image_is_found_by_its_index_and_transformed_by_itself():
    part, noise = grey(20), pool()["noise_gaussian"]
    shown = Shown(part)
    rows = shown.rows(torch.tensor([5, 17]))
    assert shown.index[rows].tolist() == [5, 17]
    whole = shown.through(noise, "noise_gaussian", 0)
    half = Shown(Part(part.source, part.indices[:7])).through(noise, "noise_gaussian", 0)
    torch.testing.assert_close(whole[:7], half)
    assert not math.isclose(float((whole - shown.x).abs().max()), 0)
