"""Lightning's finders of a learning rate and of a batch size, on modules of this package."""

from functools import partial

import pytest
import torch
from lightning.pytorch.tuner import Tuner

from lightning_rob.attacks import PGD
from lightning_rob.modules import BAT, FreeTraining
from lightning_rob.threat import Threat
from tests.tiny import Blobs, TinyNet, quiet_trainer, same_weights

THREAT = Threat("linf", 16 / 255)
ATTACK = PGD(THREAT, 2, 8 / 255)
ADAM = partial(torch.optim.Adam, lr=0.01)
MODULES = {
    "FreeTraining": lambda: FreeTraining(TinyNet, THREAT, 2, optimizer=ADAM),
    "BAT": lambda: BAT(TinyNet, ATTACK, 4, monitor=None, optimizer=ADAM),
}


def find_rate(tuner, module, data):
    found = tuner.lr_find(module, datamodule=data, update_attr=False, num_training=15)
    assert len(found.results["lr"]) == 15
    assert 1e-8 < found.suggestion() < 1


def find_batch(tuner, module, data):
    assert tuner.scale_batch_size(module, datamodule=data, max_trials=2, init_val=4) == 8
    data.batch_size = 16


def trained(name, folder, *finders):
    torch.manual_seed(0)
    module, data = MODULES[name](), Blobs()
    trainer = quiet_trainer(max_epochs=8 if name == "BAT" else 5, default_root_dir=folder)
    for find in finders:
        find(Tuner(trainer), module, data)
    trainer.fit(module, data)
    return module.state_dict()


@pytest.mark.parametrize("name", MODULES)
def test_the_finders_leave_the_training_as_it_was(name, tmp_path):
    found = trained(name, tmp_path, find_rate, find_batch)
    assert same_weights(found, trained(name, tmp_path))
    assert list(tmp_path.iterdir()) == []
