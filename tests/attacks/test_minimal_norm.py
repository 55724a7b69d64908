"""The search finds the smallest radius at which the attack inside succeeds."""

from dataclasses import replace

import pytest
import torch

from lightning_rob.attacks import ARC, PGD, MinimalNorm
from lightning_rob.defenses import Ensemble, Single
from lightning_rob.threat import Threat, ThreatPerImage
from tests.attacks.common import images, right, streams, trained_net
from tests.attacks.test_apgd import Recording
from tests.attacks.test_smallest_norm import INSIDE

LINF, L2 = Threat("linf", 0.4), Threat("l2", 1.0)
inside = pytest.mark.parametrize("attack", INSIDE.values(), ids=INSIDE.keys())


@inside
def test_radii_of_an_image_are_those_it_has_alone(attack):
    """Also where images leave the attack inside, and an image has other neighbours."""
    defense, (x, y) = Single(trained_net(1).double()), images(12, seed=4)
    x = x.double()
    attack = MinimalNorm(replace(attack, steps=4), 5)
    whole = attack(defense, x, y, streams(x))
    for i in range(len(x)):
        rows = torch.tensor([i])
        alone = attack(defense, x[rows], y[rows], streams(x)[rows])
        torch.testing.assert_close(alone, whole[rows], rtol=0, atol=1e-9)
    assert len((attack.threat.size(whole - x) * 1e6).round().unique()) > 3


@inside
def test_within_eps_it_is_the_attack_inside(attack):
    """One radius: the images of the attack itself, from the noise of that radius."""
    attack = replace(attack, steps=4).rescaled(0.13 if attack.threat.norm == "linf" else 0.65)
    defense, (x, y) = Single(trained_net(1).double()), images(40, seed=5)
    x = x.double()
    correct = right(defense, x, y) > 0
    noise = streams(x).fold_in(0)[correct].fold_in(1)
    expected = attack(defense, x[correct], y[correct], noise)
    x_adv = MinimalNorm(attack, 1)(defense, x, y, streams(x))
    torch.testing.assert_close(x_adv[correct], expected, rtol=0, atol=1e-9)
    assert torch.equal(x_adv[~correct], x[~correct])
    standing = right(defense, expected, y[correct]) > 0
    assert 0 < standing.sum() < len(standing)
    further = MinimalNorm(attack, 6)(defense, x, y, streams(x))
    assert torch.equal(right(defense, further, y), right(defense, x_adv, y))
    torch.testing.assert_close(further[correct][standing], expected[standing])
    smaller, before = (attack.threat.size(z - x)[correct][~standing] for z in (further, x_adv))
    assert (smaller <= before).all()
    assert smaller.sum() < 0.95 * before.sum()


def test_ensemble_is_fooled_when_no_member_is_right():
    defense, (x, y) = Ensemble([trained_net(1), trained_net(2)], [0.6, 0.4]), images(20, seed=6)
    x_adv = MinimalNorm(PGD(LINF, 10, 0.1), 6)(defense, x, y, streams(x))
    assert (right(defense, x_adv, y) == 0).all()
    single = MinimalNorm(PGD(LINF, 10, 0.1), 6)(Single(defense.members[0]), x, y, streams(x))
    assert LINF.size(x_adv - x).mean() > LINF.size(single - x).mean()


def test_images_that_stand_at_eps_leave():
    net, (x, y) = Recording(trained_net(1).eval()), images(30, seed=7)
    MinimalNorm(PGD(Threat("linf", 0.08), 3, 0.03), 4)(Single(net), x, y, streams(x))
    first, *others = (len(seen) for seen in net.seen)
    assert first == 30
    assert len(set(others[:4])) == 1
    assert len(set(others[4:])) == 1
    assert 0 < others[-1] < others[0] < 31
    assert len(others) == 4 * (3 + 1)


def test_radii_of_other_images_are_an_error():
    threat = ThreatPerImage("linf", 0.5, radii=torch.tensor([0.5, 1.0]))
    x, far = torch.full((2, 1, 2, 2), 0.5), torch.ones(2, 1, 2, 2)
    assert threat.size(threat.project(far, x) - x).tolist() == [0.25, 0.5]
    assert threat.of(torch.tensor([1])).unit(x[:1]).tolist() == [1.0]
    with pytest.raises(ValueError, match="2 radii for 1 images: take `of` these rows"):
        threat.project(far[:1], x[:1])


def test_wrong_arguments():
    with pytest.raises(ValueError, match="radii must be at least 1, got 0"):
        MinimalNorm(PGD(L2, 2, 0.1), 0)
    with pytest.raises(TypeError, match="searches the radius of PGD or APGD, not of ARC"):
        MinimalNorm(ARC(LINF, 3, 0.1))
