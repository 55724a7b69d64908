"""Square searches as its authors' code does, image by image."""

import pytest
import torch
from torch import nn

from lightning_rob.attacks import PGD, Square
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.square import SCHEDULE, pyramids
from lightning_rob.defenses import Ensemble, Single
from lightning_rob.randomness import Streams
from lightning_rob.rules import majority, top2_majority
from lightning_rob.threat import Threat
from tests.attacks.common import assert_inside, images, right, seeded, trained_net
from tests.counting import Counting

LINF, L2, L1 = Threat("linf", "24/255"), Threat("l2", 0.7), Threat("l1", 3.5)
every_norm = pytest.mark.parametrize("threat", [LINF, L2, L1], ids=["linf", "l2", "l1"])


def package_of(threat, queries, number=0):
    """The authors' code, with windows in the last row and column too, as in the paper."""
    square = pytest.importorskip("pyautoattack.square")
    norm = threat.norm.capitalize()
    options = {"norm": norm, "n_queries": queries, "eps": threat.eps, "seed": number}

    class OfThePaper(square.SquareAttack):
        def random_int(self, low=0, high=1, shape=(1,)):
            return super().random_int(low, high + 1, shape)

    return lambda net: OfThePaper(net, **options, device="cpu", resc_schedule=False)


@pytest.mark.parametrize("side", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("threat", [L2, L1], ids=["l2", "l1"])
def test_pyramids_are_those_of_the_package(threat, side):
    attack = package_of(threat, 1)(None)
    attack.device = "cpu"
    theirs = attack.eta(side)  # turned or not
    ours = pyramids(side, threat.p)
    assert torch.allclose(ours, theirs, atol=1e-6) or torch.allclose(ours.T, theirs, atol=1e-6)


def test_schedule_is_that_of_the_package():
    """p halves after the same queries."""
    attack = package_of(LINF, 10_000)(None)
    for query in (0, 10, 11, 50, 51, 200, 201, 500, 501, 1001, 2001, 4001, 6001, 8001, 9999):
        expected = 0.8 / 2 ** sum(query > last for last in SCHEDULE)
        assert attack.p_selection(query) == pytest.approx(expected)


@every_norm
def test_windows_reach_every_pixel(threat):
    """Uniformly placed, the last row and column included, where no pixel counts more."""
    x, small = torch.full((200, 1, 6, 6), 0.5), Threat(threat.norm, 1e-3)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 2))
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[1.0], [0.0]]).expand(2, 36))
    first, last = (
        Square(small, queries)(Single(net), x, torch.zeros(200).long(), seeded())
        for queries in (1, 30)
    )
    assert_inside(small, last, x)
    changed = (last != first).float().mean((0, 1))
    assert changed.min() > 0.3 * changed.max()


@pytest.mark.parametrize("size", [(3, 5, 5), (1, 12, 9), (2, 4, 3), (3, 1, 1)])
@every_norm
def test_images_of_any_size(threat, size):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(torch.Size(size).numel(), 4))
    x = torch.rand((9, *size), generator=seeded())
    y = net(x).argmax(1)
    x_adv = Square(threat, 60)(Single(net), x, y, seeded())
    assert_inside(threat, x_adv, x)
    assert (threat.distance(x_adv, x) > 0).all()


@every_norm
def test_a_kept_change_lowers_the_margin(threat):
    """More queries are never weaker, image by image, and finished images cost no pass."""
    net, (x, y) = Counting(trained_net(1)).eval(), images(60, seed=2)
    left, before = [], right(Single(net), x, y)
    for queries in (1, 30, 300):
        net.clear()
        noise = Streams.from_index(torch.arange(60), 1)
        left.append(right(Single(net), Square(threat, queries)(Single(net), x, y, noise), y))
        assert (left[-1] <= before).all()
        before = left[-1]
    assert left[2].sum() < left[1].sum() and left[2].sum() < left[0].sum() - 3
    assert not net.linearised
    assert sum(net.evaluated) < 60 * 301


@every_norm
def test_a_start_is_an_attack_whose_images_it_goes_on_from(threat):
    """It is never weaker, keeps what fools, and its passes are those of both."""
    x, y = images(40, seed=4)
    net = Counting(trained_net(1)).eval()
    defense, first = Single(net), PGD(threat, 3, threat.eps / 4)
    before = first(defense, x, y, seeded())
    net.clear()
    attack = Square(threat, 50, p=0.2, start=first)
    after = attack(defense, x, y, seeded())
    assert net.images() + sum(net.backwards) <= attack.cost(PassCount(defense, x, 4)) * 40
    assert_inside(threat, after, x)
    fooled = right(defense, before, y) == 0
    assert fooled.any() and torch.equal(after[fooled], before[fooled])
    assert right(defense, after, y).sum() < right(defense, before, y).sum()


@pytest.mark.slow
@every_norm
def test_success_by_queries_is_that_of_the_package(threat):
    """600 images: after each number of queries the shares agree within three standard errors."""
    net, (x, y) = trained_net(1).eval(), images(700, seed=5)
    keep = (net(x).argmax(1) == y).nonzero()[:, 0][:600]
    x, y, threat = x[keep], y[keep], Threat(threat.norm, threat.eps * 0.8)
    for queries in (1, 10, 100, 1000):
        x_adv = Square(threat, queries)(Single(net), x, y, seeded(1))
        ours = right(Single(net), x_adv, y).mean().item()
        with torch.random.fork_rng(devices=[]):
            # the package draws one window for a batch: many batches make images independent
            parts = zip(x.split(10), y.split(10), range(60), strict=True)
            found = [package_of(threat, queries, i)(net).perturb(a, b) for a, b, i in parts]
        theirs = right(Single(net), torch.cat(found), y).mean().item()
        error = (2 * max(theirs * (1 - theirs), 0.01) / 600) ** 0.5
        assert abs(ours - theirs) < 3 * error, f"{queries}: {ours:.3f}, {theirs:.3f}"


class Loud(nn.Module):
    """A network of larger logits, which change no vote."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return 16 * self.net(x)


def own_rule(logits, weights):
    return majority(logits, weights)


@pytest.mark.parametrize("rule", [majority, top2_majority, own_rule])
def test_votes_decide_and_not_the_most_confident_member(rule):
    nets, (x, y) = [trained_net(seed) for seed in (1, 2, 3)], images(20, seed=4)
    square = Square(Threat("linf", 0.16), 60)
    found, louder = (
        square(Ensemble(members, rule=rule), x, y, seeded())
        for members in (nets, [Loud(nets[0]), *nets[1:]])
    )
    assert torch.equal(found, louder)
    assert right(Ensemble(nets, rule=rule), found, y).mean() < 0.92
