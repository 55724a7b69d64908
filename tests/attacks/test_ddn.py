"""DDN walks as its paper's code does, and finds the distance of a hyperplane."""

import pytest
import torch

from lightning_rob.attacks import DDN
from lightning_rob.defenses import RandomTransforms, Single
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise
from tests.attacks.common import images, trained_net
from tests.attacks.test_apgd import Recording, double  # noqa: F401 (a fixture)
from tests.attacks.test_pdgd import plane

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


def test_finds_the_distance_of_a_hyperplane():
    net, x, y, distance = plane("l2")
    x_adv = DDN(FREE, 300)(Single(net), x, y)
    found = FREE.size(x_adv - x)
    assert (net(x_adv).argmax(1) != y).all()
    assert (found >= distance).all()
    assert (found <= 1.01 * distance).all()


def test_finds_the_distance_where_the_cross_entropy_underflows():
    net, x, y, distance = plane("l2")
    with torch.no_grad():
        for weight in net.parameters():
            weight *= 1e6 / net(x).abs().max()
    x_adv = DDN(FREE, 300)(Single(net), x, y)
    assert (net(x_adv).argmax(1) != y).all()
    assert (FREE.size(x_adv - x) <= 1.01 * distance).all()


def test_fooled_images_stay_as_they_are_and_cost_nothing():
    net, (x, y) = Recording(trained_net(1).eval()), images(20, seed=3)
    with torch.no_grad():
        y = net.net(x).argmax(1)
    y[::2] = (y[::2] + 1) % 4
    x_adv = DDN(FREE, 5)(Single(net), x, y)
    assert torch.equal(x_adv[::2], x[::2])
    assert [len(seen) for seen in net.seen][:6] == [20] + 5 * [10]


def test_a_zero_gradient_leaves_finite_images():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 4))
    torch.nn.init.zeros_(net[1].weight)
    x, _ = images(6)
    y = net(x).argmax(1)
    assert torch.equal(DDN(FREE, 3)(Single(net), x, y), x)


def test_random_defense_is_refused():
    defense = RandomTransforms(trained_net(1), [GaussianNoise(alpha=0.1)], size=1, draws=2)
    with pytest.raises(TypeError, match="DDN is for fixed classifiers, not for RandomTransforms"):
        DDN(FREE, 2)(defense, *images(2))


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
