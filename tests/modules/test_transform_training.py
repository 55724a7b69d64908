"""TransformTraining: early stopping of each sub-model, resumption, and two processes."""

import json
import signal
from itertools import pairwise

import pytest
import torch
import yaml

from lightning_rob.data.base import IndexedSubset, InMemoryImages
from lightning_rob.modules import TransformTraining
from lightning_rob.modules.transform_training import TransformedImages
from lightning_rob.runtime.errors import InputError
from lightning_rob.transforms.pool import pool
from tests.forked import forked, two_ranks
from tests.tiny import Blobs, TinyNet, pgd, refused, run, same_weights, weights
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
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    run("fit", "--config", recipe(folder))
    return folder


def saved_state(folder):
    return torch.load(folder / LAST, weights_only=True)["transform_training"]


def losses(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run/version_0")).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("val/loss/")]
    return {tag.removeprefix("val/loss/"): [e.value for e in events.Scalars(tag)] for tag in tags}


def test_every_sub_model_is_trained_in_turn_and_ends_with_its_best_weights(uninterrupted):
    found = losses(uninterrupted)
    assert set(found) == set(NAMES)
    assert saved_state(uninterrupted)["pending"] == []
    model = TransformTraining(lambda: TinyNet(8), NAMES)
    model.load_state_dict(weights(uninterrupted / LAST))
    data = Blobs()
    data.setup("fit")
    for member, name in enumerate(NAMES):
        images = TransformedImages(data.parts["val"])
        changed = images.transformed(model.transforms[name], name, 0)
        with torch.no_grad():
            logits = model.members[member].eval()(changed)
        loss = torch.nn.functional.cross_entropy(logits, images.y).item()
        assert loss == pytest.approx(min(found[name]), rel=1e-4)


def test_early_stopping_ends_a_sub_models_training(uninterrupted):
    """With a patience of 1 all losses fall but the last, or all epochs are used."""
    for values in losses(uninterrupted).values():
        falling = [b < a for a, b in pairwise(values)]
        assert all(falling[:-1])
        assert len(values) == 3 or not falling[-1]


@pytest.mark.parametrize("epoch", [0, 3])
def test_resuming_from_any_epoch_gives_the_same_weights(uninterrupted, tmp_path, epoch):
    start = uninterrupted / f"run/version_0/checkpoints/end-epoch={epoch}.ckpt"
    run("fit", "--config", recipe(tmp_path), "--ckpt_path", start)
    assert same_weights(weights(uninterrupted / LAST), weights(tmp_path / LAST))


def test_a_killed_run_that_is_resumed_gives_the_same_weights(uninterrupted, tmp_path):
    kill = {"class_path": "tests.tiny.KillAt", "init_args": {"step": 22}}
    killed = forked("fit", "--config", recipe(tmp_path, [kill]))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run("fit", "--config", recipe(tmp_path), "--ckpt_path", tmp_path / LAST)
    assert same_weights(weights(uninterrupted / LAST), weights(tmp_path / LAST))


def test_a_checkpoint_of_other_transformations_is_refused(uninterrupted, tmp_path, capsys):
    file = recipe(tmp_path, transforms=[*NAMES[1:], NAMES[0]])
    line = refused(capsys, "test", "--config", file, "--ckpt_path", uninterrupted / LAST)
    assert "behind other transformations: clean, rotate_90" in line


def test_two_processes_train_together_and_a_test_has_all_sub_models(tmp_path):
    trainer = {"strategy": "ddp_find_unused_parameters_true", "devices": 2}
    votes = {
        "class_path": "lightning_rob.callbacks.VotingRuleEval",
        "init_args": {"attacks": {"pgd": pgd()}},
    }
    done = two_ranks("fit", "--config", recipe(tmp_path, [votes], trainer), "--test_after_fit=true")
    assert done.returncode == 0, done.stderr
    assert set(losses(tmp_path)) == set(NAMES)
    lines = (tmp_path / "run/version_0/votes.jsonl").read_text().splitlines()
    tested = [r for r in map(json.loads, lines) if r["stage"] == "test"]
    assert {r["n"] for r in tested} == {33}
    clean = [r["accuracy"] for r in tested if (r["name"], r["rule"]) == ("clean", "RD")]
    assert clean[0] > 0.8


@pytest.mark.parametrize(
    ("options", "args", "message"),
    [
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
    return IndexedSubset(
        InMemoryImages(images.byte(), torch.arange(count) % 4), torch.arange(count).flip(0)[2:]
    )


def test_images_are_transformed_each_by_itself_and_found_by_their_index():
    part, noise = grey(20), pool()["noise_gaussian"]
    shown = TransformedImages(part)
    first = shown.transformed(noise, "noise_gaussian", 0)
    assert not torch.equal(first, shown.transformed(noise, "noise_gaussian", 1))
    half = TransformedImages(IndexedSubset(part.source, part.indices[:7]))
    torch.testing.assert_close(half.transformed(noise, "noise_gaussian", 0), first[:7])
    assert not torch.equal(first, shown.x)
    assert shown.index[shown.positions(torch.tensor([5, 17]))].tolist() == [5, 17]
