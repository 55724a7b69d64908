"""DANN and TADV as ordinary runs: the data that they train on, and their losses."""

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_rob.data.source_target import SourceTargetData
from lightning_rob.defenses.dann import domain_adversarial_loss
from lightning_rob.modules import DANN
from tests.modules.support import FOLDER, saving
from tests.modules.test_contract import method
from tests.tiny import Blobs, TinyDANN, blobs, quiet_trainer, refused, run, weights

NAME = "lightning_rob.modules.DANN"


def test_dann_saves_a_plain_network(tmp_path):
    run("fit", "--config", method(tmp_path, NAME), "--trainer.max_epochs=1", *saving(2))
    saved = weights(tmp_path / FOLDER / "end-epoch=0.ckpt")
    assert saved and all(key.startswith("defense.net.") for key in saved)


def test_data_without_a_target_are_refused(tmp_path, capsys):
    file = method(tmp_path, NAME, {"class_path": "tests.tiny.Blobs"})
    line = refused(capsys, "fit", "--config", file)
    assert "DANN needs unlabelled images beside the labelled ones" in line


def fit(module, **options):
    quiet_trainer(**options).fit(module, datamodule=SourceTargetData(Blobs(), Blobs(test_size=40)))


@pytest.mark.parametrize("length", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 9}])
def test_it_learns_from_the_targets_images_by_a_weight_that_grows(length, monkeypatch):
    """Of the target the loss is given the images alone."""
    seen = []

    def loss(*given):
        seen.append(given)
        return domain_adversarial_loss(*given)

    monkeypatch.setattr("lightning_rob.modules.dann.domain_adversarial_loss", loss)
    fit(module := DANN(TinyDANN, scale=0.3), **length)
    nets, x, _, target, found = zip(*seen, strict=True)
    assert set(nets) == {module.defense.net}
    steps = [(i + epoch * 3) / 3 / 3 for epoch in range(3) for i in range(3)]
    assert found == pytest.approx([0.3 * (2 / (1 + np.exp(-10 * p)) - 1) for p in steps])
    known = {image.numpy().tobytes() for image in blobs(False, test_size=40)[0]}
    for epoch in range(3):
        images = torch.cat(target[3 * epoch : 3 * epoch + 3])
        assert {image.numpy().tobytes() for image in images} == known
    assert not known & {image.numpy().tobytes() for image in torch.cat(x)}


def test_a_run_of_unknown_length_is_refused():
    with pytest.raises(MisconfigurationException, match=r"set trainer\.max_epochs or max_steps"):
        fit(DANN(TinyDANN), max_epochs=-1)
