"""Base of joint training: networks, attack target, and gradients of the members' losses."""

import pytest
import torch

from lightning_rob.defenses import Ensemble
from lightning_rob.modules import ADP, GAL, TRS
from lightning_rob.threat import Threat
from tests.modules.support import Spy, batch
from tests.tiny import TinyNet


def test_the_defense_is_the_ensemble_and_all_members_are_trained():
    module = ADP(TinyNet, members=3, probs=[0.5, 0.3, 0.2])
    assert isinstance(module.defense, Ensemble)
    torch.testing.assert_close(module.defense.weights, torch.tensor([0.5, 0.3, 0.2]))
    trained = module.configure_optimizers()["optimizer"].param_groups[0]["params"]
    assert len(trained) == 3 * len(list(TinyNet().parameters()))


def trs(net, **options):
    return TRS(net, Threat("linf", 0), **options)


@pytest.mark.parametrize("kind", [ADP, GAL, trs])
def test_the_attack_is_on_the_ensemble_and_the_loss_on_its_images(kind):
    spy = Spy()
    module = kind(TinyNet, attack=spy, members=2).eval()
    x, y = batch()
    loss = module.loss(x, y)
    assert [defense for defense, _ in spy.calls] == [module.defense]
    module.attack = None
    torch.testing.assert_close(loss, module.loss(torch.ones_like(x), y))
