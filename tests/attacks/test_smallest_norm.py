"""The attacks that search the smallest perturbation: what holds for each of them."""

import pytest
import torch

from lightning_rob.attacks import APGD, DDN, PDGD, PGD, MinimalNorm
from lightning_rob.defenses import RandomTransforms, Single
from lightning_rob.objectives import expected_margin
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise
from tests.attacks.common import images, seeded, streams, trained_net
from tests.attacks.test_apgd import Recording
from tests.attacks.test_fab import Hyperplane

LINF, L2, FREE = Threat("linf", 0.4), Threat("l2", 1.0), Threat("l2", 100)
INSIDE = {
    "pgd": PGD(LINF, 10, 0.1),
    "pgd-l2": PGD(L2, 30, 0.2, early_stop=True),
    "pgd-restarts": PGD(LINF, 10, 0.1, expected_margin, restarts=2, early_stop=True),
    "apgd": APGD(LINF, 15),
    "apgd-l2": APGD(L2, 15, expected_margin, restarts=2, early_stop=False),
}
PLANES = {  # name -> attack, gain of the logits, and the excess in share and in length
    "pdgd": (PDGD(Threat("linf", 1), 2000), 10.0, 0.01, 0.0),
    "pdgd-l2": (PDGD(FREE, 2000), 10.0, 0.01, 0.0),
    "ddn": (DDN(FREE, 300), 1.0, 0.01, 0.0),
    "ddn-huge-logits": (DDN(FREE, 300), 1e6, 0.01, 0.0),  # where the cross-entropy underflows
} | {
    f"radius-{name}": (MinimalNorm(attack, 12), 1.0, 0.0, attack.threat.eps / 2**11 + 1e-9)
    for name, attack in INSIDE.items()
}


def plane(norm, gain=1.0):
    """A hyperplane, images on both sides of it, their labels and distances (of the dual norm)."""
    net = Hyperplane(gain * torch.randn(12, generator=seeded(1), dtype=torch.float64)).double()
    x = 0.3 + 0.4 * torch.rand((40, 3, 2, 2), generator=seeded(2), dtype=torch.float64)
    y, f = net(x).argmax(1), net(x)[:, 1].detach().abs()
    return net, x, y, f / torch.linalg.vector_norm(net.w.detach(), 1 if norm == "linf" else 2)


@pytest.mark.parametrize(("attack", "gain", "share", "length"), PLANES.values(), ids=PLANES)
def test_finds_the_distance_of_a_hyperplane(attack, gain, share, length):
    net, x, y, distance = plane(attack.threat.norm, gain)
    assert (distance < attack.threat.eps).all()
    x_adv = attack(Single(net), x, y, streams(x))
    found = attack.threat.size(x_adv - x)
    assert (net(x_adv).argmax(1) != y).all()
    assert (found >= distance).all()
    assert (found <= (1 + share) * distance + length).all()


@pytest.mark.parametrize("attack", [PDGD(FREE, 5), DDN(FREE, 5)])
def test_fooled_images_stay_as_they_are_and_cost_nothing(attack):
    net, (x, y) = Recording(trained_net(1).eval()), images(20, seed=3)
    with torch.no_grad():
        y = net.net(x).argmax(1)
    y[::2] = (y[::2] + 1) % 4
    x_adv = attack(Single(net), x, y)
    assert torch.equal(x_adv[::2], x[::2])
    assert [len(seen) for seen in net.seen][:6] == [20] + 5 * [10]
    assert all(len(seen) <= 10 for seen in net.seen[6:])


@pytest.mark.parametrize("attack", [PDGD(FREE, 2), DDN(FREE, 2), MinimalNorm(PGD(L2, 2, 0.1))])
def test_random_defense_is_refused(attack):
    defense = RandomTransforms(trained_net(1), [GaussianNoise(alpha=0.1)], size=1, draws=2)
    message = f"{type(attack).__name__} is for fixed classifiers, not for RandomTransforms"
    with pytest.raises(TypeError, match=message):
        attack(defense, *images(2), seeded())
