"""DDN walks as its paper's code does."""

import pytest
import torch

from lightning_rob.attacks import DDN
from lightning_rob.defenses import Single
from lightning_rob.threat import Threat
from tests.attacks.common import images, trained_net
from tests.attacks.test_apgd import Recording, double  # noqa: F401 (a fixture)

FREE = Threat("l2", 100)


def test_iterates_are_those_of_adv_lib(double):  # noqa: F811
    attacks = pytest.importorskip("adv_lib.attacks")
    x, y = images(6, seed=1)
    x, ours, theirs = x.double(), *(Recording(trained_net(1).double().eval()) for _ in "ab")
    x_adv = DDN(FREE, 60)(Single(ours), x, y)
    expected = attacks.ddn(theirs, x, y, steps=60, levels=None)
    for image, other in zip(ours.seen[1:61], theirs.seen, strict=True):  # ours checks the start
        torch.testing.assert_close(image, other, rtol=0, atol=1e-6)
    assert (ours.net(x_adv).argmax(1) != y).all()
    share = FREE.size(x_adv - x) / FREE.size(expected - x)  # ours projects at the end
    assert (share < 1 + 1e-6).all()
    assert share.min() < 0.999


def test_steps_scale_with_the_bounds():
    near, far = (trained_net(1).double() for _ in "ab")
    far.conv.weight.data /= 255
    x, y = images(6, seed=1)
    x = x.double()
    expected = DDN(FREE, 40)(Single(near), x, y)
    wide = Threat("l2", 255 * FREE.eps, (0.0, 255.0))
    x_adv = DDN(wide, 40, first_norm=255.0)(Single(far), 255 * x, y)
    torch.testing.assert_close(x_adv / 255, expected, rtol=0, atol=1e-9)


def test_a_zero_gradient_leaves_finite_images():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 4))
    torch.nn.init.zeros_(net[1].weight)
    x, _ = images(6)
    y = net(x).argmax(1)
    assert torch.equal(DDN(FREE, 3)(Single(net), x, y), x)


WRONG = {
    "steps": (lambda: DDN(FREE, 0), "steps must be at least 1, got 0"),
    "gamma": (lambda: DDN(FREE, 5, 1.0), r"gamma must be in \(0, 1\), got 1.0"),
    "norm": (lambda: DDN(FREE, 5, first_norm=0.0), "first_norm must be positive, got 0.0"),
    "threat": (lambda: DDN(Threat("linf", 1)), "DDN is for l2, not for norm linf"),
}


@pytest.mark.parametrize(("build", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()
