"""The attacks that each kind of defense calls for."""

import pytest
import torch
from torch import nn

from lightning_rob.attacks import ARC, GMSA
from lightning_rob.defenses import DENT, Ensemble, RandomTransforms, Single, TransformEnsemble
from lightning_rob.evaluation.suites import Auto, default_attacks, suite_for, suite_kind
from lightning_rob.nets import SmallCNN
from lightning_rob.rules import mean_logits
from lightning_rob.threat import Threat
from lightning_rob.transforms import HorizontalFlip
from tests.counting import Counting
from tests.tiny import ROOT, TinyNet

THREAT = Threat("linf", 0.15)


def test_the_suite_fits_the_defense():
    net = TinyNet()
    rt = RandomTransforms(net, {"GaussianNoise": {}}, 1, 3)
    moved = TransformEnsemble([net, net], ["flip_horizontal", "quantize_4_colors"])
    kinds = {
        "single": (Single(net), ()),
        "ensemble": (Ensemble([net, net], rule=mean_logits), ()),
        "randomized": (Ensemble([net, net]), ("arc", "arc_two_radii")),
        "random": (rt, ("linear_aggmo",)),
        "transformed": (moved, ("adaptive_pgd", "taa", "paa")),
        "transductive": (DENT(SmallCNN(4, 3, 4)), ("gmsa_avg",)),
    }
    for kind, (defense, names) in kinds.items():
        suite = suite_for(defense, THREAT)
        assert (suite_kind(defense), suite.kind, suite.adaptive) == (kind, kind, names)
        assert (ROOT / suite.recipe).exists()


@pytest.mark.parametrize("threat", [Threat(1), Threat("l2", 0.3, relative=True), Threat(eps=0)])
def test_a_threat_that_attacks_are_not_made_for(threat):
    with pytest.raises(ValueError, match="the suite needs linf or l2 and eps > 0"):
        suite_for(Single(TinyNet()), threat)


def test_default_attacks():
    plain, ensemble = Single(TinyNet()), Ensemble([TinyNet(), TinyNet()])
    names = ["adaptive_pgd", "adaptive_pgd_logits", "adaptive_pgd_restarts"]
    assert list(default_attacks(plain, THREAT)) == names
    found = default_attacks(ensemble, THREAT)
    assert list(found) == [*names, "arc", "arc_two_radii"]
    assert isinstance(found["arc"], ARC)
    random = default_attacks(RandomTransforms(TinyNet(), {"GaussianNoise": {}}, 1, 3), THREAT)
    assert random["adaptive_pgd"].draws == 10
    with pytest.raises(ValueError, match="a DENT adapts to its attacker"):
        default_attacks(DENT(SmallCNN(4, 3, 4)), THREAT)


def defenses():
    torch.manual_seed(0)
    nets = [Counting(SmallCNN(4, 3, 4)).eval() for _ in range(2)]
    moved = TransformEnsemble(nets, ["flip_horizontal", "quantize_4_colors"])
    rt = RandomTransforms(nets[0], {"GaussianNoise": {}}, 1, 3)
    few = Single(Counting(SmallCNN(3, 3, 4)).eval())
    rules = Ensemble(nets, rule=mean_logits), Ensemble(nets)
    return {
        "few": few,
        "single": Single(nets[0]),
        "pooled": rules[0],
        "drawn": rules[1],
        "random": rt,
        "moved": moved,
    }


@pytest.mark.parametrize("passes", [90, 700])
@pytest.mark.parametrize("name", ["few", "single", "pooled", "drawn", "random", "moved"])
def test_auto_stays_within_its_passes(name, passes):
    """A radius within which nothing is fooled; the labels are the predictions."""
    defense, attack = defenses()[name], Auto(Threat("linf", 1e-6), passes)
    x = torch.rand(1, 3, 16, 16)
    y = defense(x, torch.Generator().manual_seed(0)).argmax(1)
    nets = [net for net in defense.modules() if isinstance(net, Counting)]
    for net in nets:
        net.clear()
    x_adv = attack(defense, x, y, torch.Generator().manual_seed(0))
    assert attack.threat.distance(x_adv, x) <= 1.1e-6
    used = sum(net.images() + sum(net.backwards) for net in nets)
    assert 0.7 * passes <= used <= passes


def test_auto_leaves_the_rounds_to_the_evaluation():
    defense, auto = DENT(SmallCNN(4, 3, 4)), Auto(THREAT, 100)
    schedule = auto.schedule(defense)
    assert isinstance(schedule, GMSA)
    assert schedule.inner.passes * schedule.rounds == 100
    with pytest.raises(TypeError, match=r"DENT adapts to whole batches: attack it by Auto"):
        auto(defense, torch.rand(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize(("passes", "steps"), [(40, 2), (100, 5)])
def test_the_few_steps_of_a_small_budget_lead_across_the_ball(passes, steps):
    defense = RandomTransforms(nn.Flatten(), [HorizontalFlip()], size=1, draws=2)
    found = Auto(Threat("linf", 0.1), passes).schedule(defense)
    assert steps * found.attack.step_size >= 2 * 0.1
