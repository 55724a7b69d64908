"""The trainings behind DANN and TADV: under attack, resumed, on two processes."""

import copy
import json
import signal

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import nn

from lightning_rob.attacks import PGD
from lightning_rob.data.source_target import SourceTargetData
from lightning_rob.defenses.tadv import TADV, half_adversarial
from lightning_rob.defenses.transductive import Source
from lightning_rob.modules import AdversarialTraining
from lightning_rob.modules.dann import DANN as DANNTraining
from lightning_rob.modules.tadv import TADV as TADVTraining
from lightning_rob.randomness import Streams
from lightning_rob.run import Command
from lightning_rob.threat import Threat
from tests.defenses.test_dann import TinyDANN
from tests.defenses.test_tadv import Spy, batch, blobs, chance
from tests.tiny import (
    Blobs,
    TinyNet,
    arc,
    pgd,
    recipe,
    records,
    robust_eval,
    run,
    same_weights,
    shell,
    weights,
)

TWO = ["--trainer.strategy=ddp", "--trainer.devices=2"]


class Relabelled(Blobs):
    """The same images with other labels."""

    def source(self, train):
        return [(x, (3 * y + 1) % 4) for x, y in super().source(train)]


# DANN


def shift(image):
    """An augmentation that draws."""
    return (image + 0.1 * torch.rand(3, 1, 1)).clamp(0, 1)


class AugmentedBlobs(Blobs):
    def default_augment(self):
        return [shift]


def dann(folder, target=None, **overrides):
    model = {
        "class_path": "lightning_rob.modules.dann.DANN",
        "init_args": {
            "net": {"class_path": "tests.defenses.test_dann.TinyDANN", "init_args": {"width": 8}},
            "scale": 0.5,
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        },
    }
    target = target or {"class_path": "tests.tiny.Blobs", "init_args": {"test_size": 40}}
    data = {
        "class_path": "lightning_rob.data.source_target.SourceTargetData",
        "init_args": {
            "source": {"class_path": "tests.test_transductive_modules.AugmentedBlobs"},
            "target": target,
        },
    }
    folder.mkdir(exist_ok=True)
    callbacks = [robust_eval({"apgd": pgd()})]
    settings = {"model": model, "data": data, "trainer__callbacks+": callbacks}
    return recipe(folder, **settings | overrides)


CHECKPOINTS = [
    "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: "
    "{filename: 'at-{step}', every_n_train_steps: 2, save_top_k: -1, save_last: true}}",
    "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: "
    "{filename: 'end-{epoch}', save_top_k: -1}}",
]
FOLDER = "run/version_0/checkpoints"
END = f"{FOLDER}/end-epoch=3.ckpt"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 4 epochs of 3 steps."""
    folder = tmp_path_factory.mktemp("whole")
    run("fit", "--config", dann(folder), *CHECKPOINTS)
    return folder


def test_a_run_is_attacked_every_epoch(whole):
    found = [r for r in records(whole) if r["name"] == "apgd"]
    assert [(r["epoch"], r["step"], r["n"]) for r in found] == [
        (epoch, 3 * epoch + 3, 32) for epoch in range(4)
    ]
    clean = [r["accuracy"] for r in records(whole) if r["name"] == "clean"]
    assert clean[-1] > 0.6
    assert all(key.startswith("defense.net.") for key in weights(whole / END))


def test_the_targets_labels_never_reach_the_weights(whole, tmp_path):
    target = {
        "class_path": "tests.test_transductive_modules.Relabelled",
        "init_args": {"test_size": 40},
    }
    run("fit", "--config", dann(tmp_path, target), *CHECKPOINTS)
    assert same_weights(weights(whole / END), weights(tmp_path / END))


def test_the_targets_images_do(whole, tmp_path):
    target = {"class_path": "tests.tiny.Blobs", "init_args": {"test_size": 41}}
    run("fit", "--config", dann(tmp_path, target), *CHECKPOINTS)
    assert not same_weights(weights(whole / END), weights(tmp_path / END))


def test_monitoring_changes_nothing(whole, tmp_path):
    run("fit", "--config", dann(tmp_path, **{"trainer__callbacks+": []}), *CHECKPOINTS)
    assert same_weights(weights(whole / END), weights(tmp_path / END))


@pytest.mark.parametrize("name", ["at-step=4", "at-step=6", "end-epoch=0", "end-epoch=2"])
def test_resuming_from_any_checkpoint_gives_the_same_weights(whole, tmp_path, name):
    start = whole / FOLDER / f"{name}.ckpt"
    run("fit", "--config", dann(tmp_path), *CHECKPOINTS, "--ckpt_path", start)
    assert same_weights(weights(whole / END), weights(tmp_path / END))


def test_sigkill_and_resume_gives_the_same_weights(whole, tmp_path):
    """By number of steps and with a loader process, where Lightning counts epochs otherwise."""
    length = ["--trainer.max_steps=12", "--trainer.max_epochs=-1", "--data.source.workers=1"]
    args = [dann(tmp_path), *CHECKPOINTS, *length]
    killer = "--trainer.callbacks+={class_path: tests.tiny.KillAt, init_args: {step: 7}}"
    threads = {
        "OMP_NUM_THREADS": str(torch.get_num_threads())
    }  # sums are rounded as in this process
    killed = shell("fit", "--config", *args, killer, **threads)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    last = tmp_path / FOLDER / "last.ckpt"
    resumed = shell("fit", "--config", *args, "--ckpt_path", last, **threads)
    assert resumed.returncode == 0, resumed.stderr
    one, other = (weights(folder / FOLDER / "at-step=12.ckpt") for folder in (whole, tmp_path))
    assert same_weights(one, other)


def run_on_two(folder):
    done = shell("fit", "--config", dann(folder), *TWO, *CHECKPOINTS)
    assert done.returncode == 0, done.stderr


def test_two_processes_fit_it_under_attack(tmp_path):
    run_on_two(tmp_path)
    found = records(tmp_path)
    assert {r["n"] for r in found} == {32}
    assert [r["step"] for r in found if r["name"] == "apgd"] == [2, 4, 6, 8]  # 20 images each


@pytest.mark.slow
def test_two_processes_resume_it(tmp_path):
    run_on_two(tmp_path / "a")
    start = tmp_path / "a" / FOLDER / "end-epoch=1.ckpt"
    again = shell("fit", "--config", dann(tmp_path / "b"), *TWO, *CHECKPOINTS, "--ckpt_path", start)
    assert again.returncode == 0, again.stderr
    one, other = (weights(tmp_path / name / END) for name in "ab")
    assert same_weights(one, other)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_checkpoint_can_be_tested_by_itself(whole, tmp_path):
    logger = {"class_path": "TensorBoardLogger"} | {
        "init_args": {"save_dir": str(tmp_path), "name": "run", "version": 0}
    }
    attacked = f"--trainer.callbacks+={json.dumps(robust_eval({'apgd': pgd()}))}"
    given = ["--ckpt_path", whole / END, attacked, f"--trainer.logger={json.dumps(logger)}"]
    run("test", *given, "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false")
    found = {r["name"]: (r["stage"], r["n"]) for r in records(tmp_path)}
    assert found["apgd"] == ("test", 33)


def test_plain_data_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("fit", "--config", dann(tmp_path, data={"class_path": "tests.tiny.Blobs"}))
    assert "DANN needs unlabelled images beside the labelled ones" in capsys.readouterr().err


def fit(module, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False}
    data = SourceTargetData(Blobs(), Blobs(test_size=40))
    Trainer(**quiet, **settings, **options).fit(module, datamodule=data)


@pytest.mark.parametrize("length", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 9}])
def test_the_weight_grows_over_the_whole_run(length):
    module, seen = DANNTraining(TinyDANN, scale=0.3), []
    loss = module.loss
    module.loss = lambda x, y: seen.append(module.reversal_weight()) or loss(x, y)
    fit(module, **length)
    steps = [(i + epoch * 3) / 3 / 3 for epoch in range(3) for i in range(3)]
    assert seen == pytest.approx([0.3 * (2 / (1 + np.exp(-10 * p)) - 1) for p in steps])


def test_a_run_without_an_end_is_refused():
    with pytest.raises(MisconfigurationException, match=r"set trainer\.max_epochs or max_steps"):
        fit(DANNTraining(TinyDANN), max_epochs=-1)


def test_the_module_refuses_what_the_defense_does():
    with pytest.raises(ValueError, match="scale must not be negative, got -1"):
        DANNTraining(TinyDANN, scale=-1)
    with pytest.raises(TypeError, match="such as DANNNet: Identity has no features"):
        DANNTraining(nn.Identity)


def test_the_defense_is_played_from_a_recipe(tmp_path):
    """F(0) is trained by plain cross-entropy, then DANN adapts to each attacked batch."""
    defense = {
        "class_path": "lightning_rob.defenses.dann.DANN",
        "init_args": {
            "epochs": 6,
            "batch_size": 16,
            "scale": 0.1,
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        },
    }
    model = {
        "class_path": "AdversarialTraining",
        "init_args": {
            "net": {"class_path": "tests.defenses.test_dann.TinyDANN"},
            "defense": defense,
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        },
    }
    file = recipe(tmp_path, model=model, **{"trainer__callbacks+": [robust_eval({"apgd": pgd()})]})
    run("fit", "--config", file)
    last = [r for r in records(tmp_path) if r["name"] == "apgd"][-1]
    assert last["n"] == 32
    assert last["accuracy"] > 0.5


# TADV


def test_the_modules_loss_is_the_defenses():
    spy, (x, y) = Spy(), batch(7)
    module = TADVTraining(TinyNet, spy).train()
    twin = copy.deepcopy(module.defense)
    module.noise = Streams.from_index(torch.arange(7), 1)
    torch.testing.assert_close(module.loss(x, y), half_adversarial(twin, x, y, Spy()))
    assert torch.equal(spy.seen[0][3].keys, Streams.from_index(torch.arange(7), 1).keys[3:])


def test_it_is_adversarial_training_with_the_halves_in_another_order():
    (x, y), net = batch(), TinyNet()
    other = AdversarialTraining(lambda: net, Spy(), fraction=0.5)
    swapped = torch.arange(8).roll(4)
    expected = other.loss(x[swapped], y[swapped])
    torch.testing.assert_close(TADVTraining(lambda: net, Spy()).loss(x, y), expected)


def test_a_fraction_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\], got 0"):
        TADVTraining(TinyNet, Spy(), fraction=0)


def fitting(folder, callbacks):
    net = {"class_path": "tests.tiny.TinyNet", "init_args": {"width": 16}}
    options = {
        "net": net,
        "attack": pgd(keep_best=True),
        "fraction": 0.5,
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
    }
    model = {"class_path": "lightning_rob.modules.tadv.TADV", "init_args": options}
    shown = {"model": model, "trainer__callbacks+": callbacks, "trainer__max_epochs": 2}
    return recipe(folder, **shown)


def last(folder):
    return next((folder / "run/version_0/checkpoints").glob("epoch=1-*.ckpt"))


def test_it_fits_from_a_recipe_and_callbacks_change_nothing(tmp_path):
    for name, callbacks in {"with": [robust_eval({"apgd": pgd()})], "without": []}.items():
        (tmp_path / name).mkdir()
        run("fit", "--config", fitting(tmp_path / name, callbacks))
    found = [(r["name"], r["epoch"]) for r in records(tmp_path / "with")]
    assert found == [(name, epoch) for epoch in (0, 1) for name in ("clean", "apgd", "worst")]
    one, other = (weights(last(tmp_path / name)) for name in ("with", "without"))
    assert same_weights(one, other)
    assert {"defense.net.first.weight"} <= one.keys()


@pytest.mark.slow
def test_two_processes_fit_it_with_an_attack_each_epoch(tmp_path):
    config = fitting(tmp_path, [robust_eval({"apgd": pgd(), "arc": arc()})])
    done = shell("fit", "--config", config, *TWO)
    assert done.returncode == 0, done.stderr
    found = [(r["name"], r["epoch"], r["n"]) for r in records(tmp_path)]
    names = ("clean", "apgd", "arc", "worst")
    assert found == [(name, epoch, 32) for epoch in (0, 1) for name in names]


def test_a_recipe_makes_the_defense_of_the_network_it_trains(tmp_path):
    defense = {
        "class_path": "lightning_rob.defenses.tadv.TADV",
        "init_args": {
            "attack": pgd(keep_best=True),
            "epochs": 1,
            "batch_size": 32,
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.02}},
            "lr_scheduler": {
                "class_path": "torch.optim.lr_scheduler.StepLR",
                "init_args": {"step_size": 1},
            },
        },
    }
    options = {"net": {"class_path": "tests.tiny.TinyNet"}, "attack": pgd(), "defense": defense}
    model = {"class_path": "AdversarialTraining", "init_args": options}
    file = recipe(tmp_path, model=model, **{"trainer__callbacks+": []})
    built = Command(["--config", str(file)], run=False).model.defense
    assert type(built) is TADV
    assert built.attack == PGD(Threat("linf", 16 / 255), 3, 8 / 255, keep_best=True)
    optimizer = built.optimizer(built.net.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert built.lr_scheduler(optimizer).step_size == 1
    run("fit", "--config", file, "--trainer.max_epochs=1")
    built.source_data = Source(blobs())
    assert built.adapt(batch()[0], chance()).adapted is not None
