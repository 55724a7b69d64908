"""The attacks that each kind of defense calls for."""

import pytest

from lightning_rob.attacks import ARC
from lightning_rob.defenses import DENT, Ensemble, RandomTransforms, Single, TransformEnsemble
from lightning_rob.evaluation.suites import default_attacks, suite_for, suite_kind
from lightning_rob.nets import SmallCNN
from lightning_rob.rules import mean_logits
from lightning_rob.threat import Threat
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
    with pytest.raises(ValueError, match="an audit needs linf or l2 and eps > 0"):
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
