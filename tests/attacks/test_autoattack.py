"""AutoAttack is as strong as its authors' code; what it attacks of a random defense."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_rob.attacks import (
    APGD,
    ARC,
    FAB,
    AutoAttack,
    Square,
    ThroughAdaptation,
    attacking,
    autoattack,
)
from lightning_rob.defenses import DENT, Ensemble, Single
from lightning_rob.nets import SmallCNN
from lightning_rob.objectives import expected_dlr
from lightning_rob.randomness import Streams
from lightning_rob.rules import majority, random_member
from lightning_rob.threat import Threat
from tests.attacks.common import (
    Noisy,
    assert_inside,
    assert_same,
    images,
    right,
    seeded,
    snapshot,
    trained_net,
)
from tests.counting import Counting

LINF, L2, L1 = Threat("linf", "24/255"), Threat("l2", 0.5), Threat("l1", 1.0)
OWN = AutoAttack(LINF, "custom", ("apgd-ce",))


@pytest.fixture
def nets():
    return [trained_net(1), trained_net(2)]


@pytest.fixture
def single(nets):
    return Single(nets[0])


def left_by_the_package(attack, defense, x, y):
    """The images that the authors' code leaves right, by the stages and settings of the attack."""
    package = pytest.importorskip("pyautoattack")
    with attacking(defense) as defense, torch.random.fork_rng(devices=[]):
        suite = package.AutoAttack(
            defense.net,
            attacks=attack.attacks and list(attack.attacks),
            eps=attack.threat.eps,
            norm=attack.threat.norm.capitalize(),
            seed=1,
            version=attack.version,
        )
        suite.apgd_targeted.n_target_classes = suite.fab.n_target_classes = 3
        if attack.version == "custom":
            suite.apgd.n_restarts = suite.fab.n_restarts = 1
            largest = attack.threat.p == 1
            suite.apgd.use_largereps = suite.apgd_targeted.use_largereps = largest
        suite.square.n_queries = attack.queries
        x_adv, _ = suite.run_standard_evaluation(x, y, batch_size=len(x))
    return right(defense, x_adv, y)


# The iterates of APGD and FAB are those of the package in every norm (test_apgd.py, test_fab.py).
STAGES = [(LINF, "square"), (L2, "square"), (L1, "square")]
STAGES += [(L2, "apgd-dlr"), (L1, "apgd-t"), (L2, "fab-t")]


@pytest.mark.parametrize(("threat", "name"), STAGES)
def test_each_stage_is_as_strong_as_that_of_the_package(threat, name, single):
    """On 100 images, where a part is fooled. Of one run, its random start decides several."""
    x, y = images(100, seed=1)
    attack = AutoAttack(threat, "custom", (name,), queries=200)
    if name == "square":
        attack = attack.rescaled(2 * threat.eps)
    x_adv = attack(single, x, y, seeded())
    assert_inside(attack.threat, x_adv, x)
    ours, theirs = right(single, x_adv, y), left_by_the_package(attack, single, x, y)
    one_run = name == "apgd-dlr"
    assert ours.sum() <= theirs.sum() + (8 if one_run else 2)
    assert one_run or name == "square" or (ours != theirs).sum() <= 3
    assert 0 < ours.sum() < right(single, x, y).sum() - 10


@pytest.mark.slow
@pytest.mark.parametrize("threat", [LINF, L2, L1], ids=["linf", "l2", "l1"])
def test_the_standard_version_is_as_strong_as_that_of_the_package(threat, single):
    x, y = images(200, seed=1)
    attack = AutoAttack(Threat(threat.norm, 0.7 * threat.eps))
    ours = right(single, attack(single, x, y, seeded()), y)
    assert torch.equal(ours, left_by_the_package(attack, single, x, y))


def test_versions_have_the_settings_of_the_paper():
    standard, rand = (AutoAttack(LINF, v).stages(10) for v in ("standard", "rand"))
    assert standard == [APGD(LINF), APGD(LINF, targets=9), FAB(LINF), Square(LINF)]
    assert rand == [APGD(LINF, draws=20), APGD(LINF, objective=expected_dlr, draws=20)]
    in_l1 = [APGD(L1, restarts=5), APGD(L1, targets=5), FAB(L1), Square(L1)]
    assert AutoAttack(L1).stages(10) == in_l1
    three, two = (AutoAttack(LINF).stages(classes) for classes in (3, 2))
    assert three == [APGD(LINF), APGD(LINF, objective=expected_dlr), *standard[2:]]
    assert two == [APGD(LINF), *standard[2:]]
    assert AutoAttack(LINF, "rand").stages(2) == rand[:1]


def test_two_classes_are_attacked():
    torch.manual_seed(1)
    net, (x, _) = nn.Sequential(nn.Flatten(), nn.Linear(36, 2)), images(4)
    y = net(x).argmax(1)
    x_adv = AutoAttack(LINF, queries=5)(Single(net), x, y, seeded())
    assert not right(Single(net), x_adv, y).all()


def test_robust_and_wrong_images_are_returned_unchanged(single):
    x, y = images(30, seed=3)
    y[:5] = (y[:5] + 1) % 4
    x_adv = OWN(single, x, y, seeded())
    kept = right(single, x_adv, y) == 1
    kept[:5] = True
    assert 5 < kept.sum() < 30
    assert torch.equal(x_adv[kept], x[kept])


def test_what_a_stage_leaves_is_put_together_for_the_next(nets):
    """Fewer calls than where each chunk goes through all stages, and the same images fooled."""
    net, (x, y) = Counting(nets[0]).eval(), images(18, seed=9)
    noise = Streams.from_index(torch.arange(18), 1)
    attack = replace(OWN, attacks=("apgd-ce", "apgd-t"), batch_size=6)
    pooled = attack(Single(net), x, y, noise)
    calls = len(net.linearised)
    net.clear()
    parts = [attack(Single(net), x[i], y[i], noise[i]) for i in torch.arange(18).split(6)]
    assert calls < 0.8 * len(net.linearised)
    left = right(Single(net), pooled, y)
    assert torch.equal(left, right(Single(net), torch.cat(parts), y))
    assert 3 < left.sum() < 15


# several draws
@pytest.mark.parametrize("rule", [random_member, majority])
def test_ensemble(nets, rule):
    defense, (x, y) = Ensemble(nets, [0.6, 0.4], rule=rule), images(30, seed=10)
    for attack in (OWN, replace(OWN, threat=L2)):
        x_adv = attack(defense, x, y, seeded())
        assert_inside(attack.threat, x_adv, x)
        assert right(defense, x_adv, y).mean() < right(defense, x, y).mean() - 0.05


def test_stops_at_half_an_error(nets):
    """Right four times in ten, and it stays so: the mean predicts wrongly."""
    for parameter in nets[0].linear.parameters():
        parameter.data *= -50  # never right, and sure of it
    defense, (x, y) = Ensemble(nets, [0.6, 0.4]), images(20, seed=11)
    left = right(defense, x, y)
    assert left.mean() > 0.3
    assert torch.equal(OWN(defense, x, y, seeded()), x)
    assert right(defense, ARC(LINF, 10, LINF.eps)(defense, x, y), y).mean() < left.mean() - 0.05


def test_random_defense(single):
    """By the mean gradient of its draws; and again the same images."""
    defense, (x, y) = Noisy(single.net, 0.1, (0.75, 0.25)), images(4, seed=12)
    before, attack = snapshot(defense), replace(OWN, draws=3)
    x_adv = attack(defense, x, y, Streams.from_index(torch.arange(4)))
    assert_same(before, snapshot(defense))
    assert_inside(LINF, x_adv, x)
    assert not torch.equal(x_adv, x)
    assert torch.equal(attack(defense, x, y, Streams.from_index(torch.arange(4))), x_adv)


def test_images_that_belong_together_are_not_cut(monkeypatch):
    """Whatever the number of threads, by which batches are cut elsewhere."""
    torch.manual_seed(0)
    x, y = torch.rand(8, 3, 8, 8), torch.arange(8) % 4
    defense, found = DENT(SmallCNN(4, 3, 4), steps=1), []
    attack = ThroughAdaptation(AutoAttack(LINF, "custom", ("apgd-ce",), passes=40))
    for most in (3, 8):
        monkeypatch.setattr(autoattack, "images_at_once", lambda *_, most=most: most)
        found.append(attack(defense, x, y, seeded()))
    assert torch.equal(*found)
