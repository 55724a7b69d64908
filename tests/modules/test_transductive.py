"""DANN and TADV as ordinary runs: the data they train on, their losses, and how they resume."""

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_rob.data.source_target import SourceTargetData
from lightning_rob.defenses import Single
from lightning_rob.defenses.tadv import half_adversarial
from lightning_rob.modules import DANN, AdversarialTraining
from tests.modules.support import FOLDER, Spy, batch, saving
from tests.tiny import (
    Blobs,
    TinyDANN,
    TinyNet,
    quiet_trainer,
    recipe,
    refused,
    run,
    same_weights,
    weights,
)


class Relabelled(Blobs):
    """The same images with other labels."""

    def source(self, train):
        return [(x, (3 * y + 1) % 4) for x, y in super().source(train)]


def shift(image):
    """Brighten an image by a random amount: an augmentation that draws."""
    return (image + 0.1 * torch.rand(3, 1, 1)).clamp(0, 1)


class AugmentedBlobs(Blobs):
    def default_augment(self):
        return [shift]


def dann(folder, target="tests.tiny.Blobs", test_size=40, **overrides):
    init = {
        "net": {"class_path": "tests.tiny.TinyDANN", "init_args": {"width": 8}},
        "scale": 0.5,
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
    }
    domains = {
        "source": {"class_path": "tests.modules.test_transductive.AugmentedBlobs"},
        "target": {"class_path": target, "init_args": {"test_size": test_size}},
    }
    settings = {
        "model": {"class_path": "lightning_rob.modules.DANN", "init_args": init},
        "data": {
            "class_path": "lightning_rob.data.source_target.SourceTargetData",
            "init_args": domains,
        },
        "trainer__callbacks+": [],
    }
    folder.mkdir(exist_ok=True)
    return recipe(folder, **settings | overrides)


SAVE = saving(2)
END = f"{FOLDER}/end-epoch=3.ckpt"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run of 4 epochs of 3 steps."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run("fit", "--config", dann(folder), *SAVE)
    return folder


def test_dann_saves_a_plain_network(uninterrupted):
    assert all(key.startswith("defense.net.") for key in weights(uninterrupted / END))


@pytest.mark.parametrize(
    ("target", "same"),
    [
        ({"target": "tests.modules.test_transductive.Relabelled"}, True),
        ({"test_size": 41}, False),
    ],
)
def test_the_targets_images_change_the_weights_and_its_labels_do_not(
    uninterrupted, tmp_path, target, same
):
    run("fit", "--config", dann(tmp_path, **target), *SAVE)
    assert same_weights(weights(uninterrupted / END), weights(tmp_path / END)) == same


def test_data_without_a_target_are_refused(tmp_path, capsys):
    file = dann(tmp_path, data={"class_path": "tests.tiny.Blobs"})
    line = refused(capsys, "fit", "--config", file)
    assert "DANN needs unlabelled images beside the labelled ones" in line


def fit(module, **options):
    quiet_trainer(**options).fit(module, datamodule=SourceTargetData(Blobs(), Blobs(test_size=40)))


@pytest.mark.parametrize("length", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 9}])
def test_the_reversal_weight_grows_over_the_run(length):
    module, seen = DANN(TinyDANN, scale=0.3), []
    loss = module.loss
    module.loss = lambda x, y: seen.append(module.reversal_weight()) or loss(x, y)
    fit(module, **length)
    steps = [(i + epoch * 3) / 3 / 3 for epoch in range(3) for i in range(3)]
    assert seen == pytest.approx([0.3 * (2 / (1 + np.exp(-10 * p)) - 1) for p in steps])


def test_a_run_of_unknown_length_is_refused():
    with pytest.raises(MisconfigurationException, match=r"set trainer\.max_epochs or max_steps"):
        fit(DANN(TinyDANN), max_epochs=-1)


def test_tadv_is_adversarial_training_with_the_halves_in_the_other_order():
    (x, y), net = batch(), TinyNet()
    other = AdversarialTraining(lambda: net, Spy(), fraction=0.5)
    swapped = torch.arange(8).roll(4)
    expected = other.loss(x[swapped], y[swapped])
    torch.testing.assert_close(half_adversarial(Single(net), x, y, Spy()), expected)
