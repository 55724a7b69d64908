"""BAT and IAT: what each member is trained on."""

import pytest
import torch
from torch import nn

from lightning_rob.modules import BAT, IAT
from tests.modules.support import Spy, batch
from tests.tiny import TinyNet


def test_each_bat_member_is_trained_on_images_of_the_members_before_it():
    spy = Spy()
    module = BAT(TinyNet, spy, epochs=1, members=3, probs=[0.6, 0.3, 0.1])
    for module.stage in range(3):
        module.loss(*batch())
        module.loss(*batch())
    targets, again = ([target for target, _ in spy.calls[start::2]] for start in (0, 1))
    assert all(a is b for a, b in zip(targets, again, strict=True))  # built once a stage
    members = list(module.members)
    assert [t.classifiers for t in targets] == [members[:1], members[:1], members[:2]]
    torch.testing.assert_close(targets[2].weights, torch.tensor([2 / 3, 1 / 3]))


def test_each_iat_member_is_trained_on_its_own_images():
    spy = Spy()
    module = IAT(TinyNet, spy, epochs=1, members=2)
    for module.stage in range(2):
        module.loss(*batch())
        assert spy.calls[-1][0].classifiers == [module.members[module.stage]]


def test_attack_targets_and_defenses_share_the_members_and_are_not_saved():
    spy = Spy()
    module = BAT(TinyNet, spy, epochs=1, members=2)
    module.loss(*batch())
    assert spy.calls[0][0].members[0] is module.defense.classifiers[0] is module.members[0]
    assert all(key.startswith("members.") for key in module.state_dict())


def test_only_the_member_in_training_is_optimised():
    module = BAT(TinyNet, Spy(), epochs=[1, 1], members=2)
    module.stage = 1
    optimizer = module.configure_optimizers()["optimizer"]
    assert set(optimizer.param_groups[0]["params"]) == set(module.members[1].parameters())
    module.loss(*batch()).backward()
    assert all(p.grad is None for p in module.members[0].parameters())
    assert all(p.grad is not None for p in module.members[1].parameters())


def test_the_defense_is_the_ensemble_of_the_members_started():
    module = BAT(TinyNet, Spy(), epochs=1, members=2, probs=[0.8, 0.2])
    assert module.defense.classifiers == [module.members[0]]
    module.stage = 1
    assert module.defense.classifiers == list(module.members)
    torch.testing.assert_close(module.defense.weights, torch.tensor([0.8, 0.2]))


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
        ({"epochs": 0}, "epochs must be"),
        ({"probs": [1.0]}, "2 members need 2 probs"),
        ({"probs": [1.2, -0.2]}, "must not be negative"),
        ({"checkpoints": [None]}, "checkpoints must be one per member"),
    ],
)
def test_arguments_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        BAT(TinyNet, Spy(), **({"epochs": 1} | options))
