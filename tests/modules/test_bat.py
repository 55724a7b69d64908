"""BAT, BARRE and IAT: what each member is trained on, and starts from."""

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from lightning_rob import PGD, Ensemble, Threat, optimal_sampling
from lightning_rob.modules import BARRE, BAT, DVERGE, IAT
from tests.modules.support import Spy, batch
from tests.tiny import Blobs, TinyNet, quiet_trainer


def test_each_bat_member_is_trained_on_images_of_the_members_before_it():
    spy = Spy()
    module = BAT(TinyNet, spy, epochs=1, members=3, probs=[0.6, 0.3, 0.1])
    for module.stage in range(3):
        module.loss(*batch())
    targets = [target for target, _ in spy.calls]
    members = list(module.members)
    assert [t.classifiers for t in targets] == [members[:1], members[:1], members[:2]]
    torch.testing.assert_close(targets[2].weights, torch.tensor([2 / 3, 1 / 3]))


def test_each_iat_member_is_trained_on_its_own_images():
    spy = Spy()
    module = IAT(TinyNet, spy, epochs=1, members=2)
    for module.stage in range(2):
        module.loss(*batch())
        assert spy.calls[-1][0].classifiers == [module.members[module.stage]]


class Recording(Callback):
    """Keeps what a member starts from, and the probabilities at each epoch's end."""

    def __init__(self):
        self.starts, self.probs = [], []

    def on_train_batch_start(self, trainer, module, _, index):
        if index == 0:  # after the module's own start of the epoch
            self.starts.append([module.members[i].last.weight.clone() for i in range(2)])

    def on_train_epoch_end(self, trainer, module):
        self.probs.append(module.probs.clone())  # callbacks come before the module


def test_barre_goes_on_from_the_member_before_and_searches_the_probabilities():
    torch.manual_seed(1)
    seen, attack = Recording(), PGD(Threat("linf", 0.1), 3, 0.05, random_start=False)
    options = {"monitor": None, "search": attack, "search_from": 2, "search_every": 1}
    adam = partial(torch.optim.Adam, lr=0.01)
    module = BARRE(TinyNet, attack, 2, members=2, optimizer=adam, **options)
    assert module.attack_target().classifiers == list(module.members)[:1]
    data = Blobs()
    quiet_trainer(seen, max_epochs=4).fit(module, data)
    assert module.attack_target().classifiers == list(module.members)
    first, second = seen.starts[2]
    assert torch.equal(first, second) and not torch.equal(*seen.starts[0])
    assert seen.probs[0].tolist() == seen.probs[2].tolist() == [0.5, 0.5]
    images = DataLoader(data.labelled(), 128)
    optimal = optimal_sampling(Ensemble(module.members), attack, images)
    assert optimal.accuracy > optimal.trail[0, -1]  # equal ones are not the best
    torch.testing.assert_close(module.defense.weights, optimal.probs.float(), atol=0.02, rtol=0)
    saved = {}
    module.on_save_checkpoint(saved)
    again = BARRE(TinyNet, attack, epochs=2, members=2)
    again.on_load_checkpoint(saved)
    assert torch.equal(again.defense.weights, module.defense.weights)


@pytest.mark.parametrize(
    "build",
    [
        lambda **o: BAT(TinyNet, Spy(), epochs=[1, 2], members=2, monitor=None, **o),
        lambda **o: DVERGE(TinyNet, members=2, layers=["first"], steps=1, warmup_epochs=1, **o),
    ],
)
def test_one_cycle_must_last_for_the_longest_training_of_one_optimizer(build):
    """Blobs of 96 - 32 images: four batches an epoch."""
    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.01)
    module = build(lr_scheduler=partial(cycle, total_steps=8))
    quiet_trainer(max_epochs=3).fit(module, Blobs())
    module = build(lr_scheduler=partial(cycle, total_steps=7))
    with pytest.raises(MisconfigurationException, match=r"after 7 batches, .* takes 8: "):
        quiet_trainer(max_epochs=3).fit(module, Blobs())
    module = build(lr_scheduler=partial(cycle, total_steps=12))  # those of the run
    with pytest.warns(match="cut off before its 12 batches: .* takes 8: give it total_steps=8"):
        quiet_trainer(max_epochs=3).fit(module, Blobs())


def test_barre_without_images_to_search_is_refused():
    module = BARRE(TinyNet, Spy(), epochs=1, members=2, monitor=None, search_from=2)
    loader = DataLoader(list(zip(*batch(), strict=True)), 4)
    with pytest.raises(MisconfigurationException, match="use a data module of"):
        quiet_trainer(max_epochs=2).fit(module, loader, loader)


def test_members_start_from_checkpoints(tmp_path):
    net = TinyNet()
    nn.init.constant_(net.last.bias, 5.0)
    state = {f"defense.net.{key}": value for key, value in net.state_dict().items()}
    path = str(tmp_path / "a.ckpt")
    torch.save({"state_dict": state}, path)
    module = BAT(TinyNet, Spy(), epochs=[0, 2], members=2, checkpoints=[path, None])
    torch.testing.assert_close(module.members[0].last.bias, torch.full((4,), 5.0))
    assert module.stage == 1  # the first member is not trained


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": [1]}, "epochs must be a count for each of 2 members"),
        ({"epochs": [0, 1]}, "members \\[0\\] .* 0 epochs and no checkpoint"),
        ({"checkpoints": [None]}, "checkpoints must be one per member"),
        ({"probs": [0, 1]}, "begins with have no probability"),
    ],
)
def test_arguments_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        BAT(TinyNet, Spy(), **({"epochs": 1} | options))


def test_what_training_would_not_use_is_refused(tmp_path):
    """Weights of a member that starts from the one before; an average over earlier epochs."""
    path = str(tmp_path / "b.ckpt")
    torch.save({"state_dict": TinyNet().state_dict()}, path)
    second = BARRE(TinyNet, Spy(), epochs=1, checkpoints=[None, path])
    with pytest.raises(MisconfigurationException, match=r"leave out \[.*b.ckpt'\]"):
        second.check_fit(quiet_trainer(max_epochs=2))
    module, loader = BAT(TinyNet, Spy(), epochs=1), DataLoader(list(zip(*batch(), strict=True)), 4)
    with pytest.raises(MisconfigurationException, match="WeightAveraging would save"):
        quiet_trainer(EMAWeightAveraging(), max_epochs=2).fit(module, loader, loader)
