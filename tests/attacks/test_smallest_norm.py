"""The attacks that search the smallest perturbation: what holds for each of them."""

from dataclasses import replace

import pytest
import torch

from lightning_rob.attacks import APGD, DDN, PDGD, PGD, MinimalNorm
from lightning_rob.attacks.pdgd import shrink_largest
from lightning_rob.defenses import Single
from lightning_rob.objectives import expected_margin
from lightning_rob.threat import Threat, ThreatPerImage
from tests.attacks.common import Recording, images, plane, right, seeded, streams, trained_net

LINF, L2, FREE = Threat("linf", 0.4), Threat("l2", 1.0), Threat("l2", 100)
RADII = {"linf": 0.13, "l2": 0.65, "l1": 2.0}  # at which a part of the images stands
INSIDE = {
    "pgd": PGD(LINF, 10, 0.1),
    "pgd-l2": PGD(L2, 30, 0.2, early_stop=True),
    "pgd-restarts": PGD(LINF, 10, 0.1, expected_margin, restarts=2, early_stop=True),
    "apgd": APGD(LINF, 15),
    "apgd-l2": APGD(L2, 15, expected_margin, restarts=2, early_stop=False),
}
PLANES = {  # name -> attack, gain of the logits, and the excess in share and in length
    "pdgd": (PDGD(Threat("linf", 1), 1000), 10.0, 0.02, 0.0),
    "pdgd-l2": (PDGD(FREE, 1000), 10.0, 0.03, 0.0),
    "ddn": (DDN(FREE, 300), 1.0, 0.01, 0.0),
    "ddn-huge-logits": (DDN(FREE, 300), 1e6, 0.01, 0.0),  # where the cross-entropy underflows
} | {
    f"radius-{name}": (MinimalNorm(attack, 12), 1.0, 0.0, attack.threat.eps / 2**11 + 1e-9)
    for name, attack in INSIDE.items()
}


WALKS = {  # adv-lib has the authors' code in torch
    "ddn": (DDN(FREE, 60), lambda lib, *given: lib.ddn(*given, steps=60, levels=None)),
    "pdgd-l2": (PDGD(FREE, 60), lambda lib, *given: lib.pdgd(*given, num_steps=60)),
    "pdgd": (
        PDGD(Threat("linf", 1), 60),
        lambda lib, *given: lib.pdpgd(*given, norm=float("inf"), num_steps=60),
    ),
}


@pytest.mark.parametrize(("attack", "authors"), WALKS.values(), ids=WALKS)
def test_iterates_are_those_of_adv_lib(attack, authors, double):
    lib = pytest.importorskip("adv_lib.attacks")
    x, y = images(6, seed=1)
    x, ours, theirs = x.double(), *(Recording(trained_net(1).double().eval()) for _ in "ab")
    x_adv = attack(Single(ours), x, y)
    expected = authors(lib, theirs, x, y)
    for image, other in zip(ours.seen[1:61], theirs.seen, strict=True):  # ours checks the start
        torch.testing.assert_close(image, other, rtol=0, atol=1e-6)
    assert (ours.net(x_adv).argmax(1) != y).all()
    share = attack.threat.size(x_adv - x) / attack.threat.size(expected - x)
    assert (share < 1 + 1e-6).all()
    assert share.min() < 0.999  # ours projects at the end


def test_proximal_operator_by_its_conditions():
    """delta - z is a subgradient: of 1-norm `weight`, on the largest entries; or all are zero."""
    delta = torch.randn((50, 3, 4), generator=seeded(), dtype=torch.float64)
    weight = 12 * torch.rand(50, generator=seeded(1), dtype=torch.float64)
    z = shrink_largest(delta, weight)
    zero = delta.abs().sum((1, 2)) <= weight
    assert 3 < zero.sum() < 47
    assert torch.equal(zero, (z == 0).all(2).all(1))
    moved, level = (delta - z)[~zero], z[~zero].abs().amax((1, 2))
    torch.testing.assert_close(moved.abs().sum((1, 2)), weight[~zero])
    assert (z[~zero].abs()[moved != 0] > 0).all()
    reached = (z[~zero].abs() - level[:, None, None]).abs() < 1e-12
    assert (reached | (moved == 0)).all()


def test_steps_scale_with_the_bounds():
    near, far = (trained_net(1).double() for _ in "ab")
    far.conv.weight.data /= 255
    x, y = images(6, seed=1)
    x = x.double()
    expected = DDN(FREE, 40)(Single(near), x, y)
    wide = Threat("l2", 255 * FREE.eps, (0.0, 255.0))
    x_adv = DDN(wide, 40, first_norm=255.0)(Single(far), 255 * x, y)
    torch.testing.assert_close(x_adv / 255, expected, rtol=0, atol=1e-9)
    for norm, longest in (("linf", 0.5), ("l2", 1.5)):
        x_adv = PDGD(Threat(norm, 255 * longest, (0.0, 255.0)), 40)(Single(far), 255 * x, y)
        assert (far.eval()(x_adv).argmax(1) != y).all()


@pytest.mark.rounding
@pytest.mark.parametrize(("attack", "gain", "share", "length"), PLANES.values(), ids=PLANES)
def test_finds_the_distance_of_a_hyperplane(attack, gain, share, length):
    net, x, y, distance = plane(attack.threat.norm, gain)
    assert (distance < attack.threat.eps).all()
    x_adv = attack(Single(net), x, y, streams(x))
    found = attack.threat.size(x_adv - x)
    assert (net(x_adv).argmax(1) != y).all()
    assert (found >= distance).all()
    assert (found <= (1 + share) * distance + length).all()


# the search of a radius at which the attack inside succeeds
@pytest.mark.parametrize("attack", [*INSIDE.values(), PGD(Threat("l1", 12), 20, 3.0)])
def test_within_eps_it_is_the_attack_inside(attack):
    """One radius: the images of the attack itself, from the noise of that radius."""
    attack = replace(attack, steps=4).rescaled(RADII[attack.threat.norm])
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


def test_a_zero_gradient_leaves_finite_images():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 4))
    torch.nn.init.zeros_(net[1].weight)
    x, _ = images(6)
    y = net(x).argmax(1)
    assert torch.equal(DDN(FREE, 3)(Single(net), x, y), x)


def test_radii_of_other_images_are_an_error():
    threat = ThreatPerImage("linf", 0.5, radii=torch.tensor([0.5, 1.0]))
    x, far = torch.full((2, 1, 2, 2), 0.5), torch.ones(2, 1, 2, 2)
    assert threat.size(threat.project(far, x) - x).tolist() == [0.25, 0.5]
    assert threat.of(torch.tensor([1])).unit(x[:1]).tolist() == [1.0]
    with pytest.raises(ValueError, match="2 radii for 1 images: take `of` these rows"):
        threat.project(far[:1], x[:1])
