"""PDGD walks as the code of its authors does."""

import pytest
import torch

from lightning_rob.attacks import PDGD
from lightning_rob.attacks.pdgd import shrink_largest
from lightning_rob.defenses import Single
from lightning_rob.threat import Threat
from tests.attacks.common import images, seeded, trained_net
from tests.attacks.test_apgd import Recording, double  # noqa: F401 (a fixture)

FREE = {"linf": Threat("linf", 1), "l2": Threat("l2", 100)}
both_norms = pytest.mark.parametrize("threat", FREE.values(), ids=FREE.keys())


@both_norms
def test_iterates_are_those_of_adv_lib(threat, double):  # noqa: F811
    """adv-lib has the authors' code in torch; it keeps the weights in single precision."""
    attacks = pytest.importorskip("adv_lib.attacks")
    x, y = images(6, seed=1)
    x, ours, theirs = x.double(), *(Recording(trained_net(1).double().eval()) for _ in "ab")
    x_adv = PDGD(threat, 60)(Single(ours), x, y)
    if threat.norm == "l2":
        expected = attacks.pdgd(theirs, x, y, num_steps=60)
    else:
        expected = attacks.pdpgd(theirs, x, y, norm=threat.p, num_steps=60)
    for image, other in zip(ours.seen[1:61], theirs.seen, strict=True):  # ours checks the start
        torch.testing.assert_close(image, other, rtol=0, atol=1e-6)
    assert (ours.net(x_adv).argmax(1) != y).all()
    share = threat.size(x_adv - x) / threat.size(expected - x)  # ours projects at the end
    assert (share < 1 + 1e-6).all()
    assert share.min() < 0.99


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


WRONG = {
    "steps": (lambda: PDGD(FREE["l2"], 0), "steps must be at least 1, got 0"),
    "step": (lambda: PDGD(FREE["l2"], 5, 0.0), "step_size must be positive, got 0.0"),
    "norm": (lambda: PDGD(Threat(3)), "PDGD is for linf and l2, not for norm 3"),
}


@pytest.mark.parametrize(("build", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()
