"""AutoAttack of this package and of its authors; what it attacks of a random defense."""

import copy
import sys
from dataclasses import replace

import pytest
import torch

from lightning_rob.attacks import APGD, ARC, FAB, AutoAttack, Square, attacking
from lightning_rob.attacks.foreign import scores
from lightning_rob.defenses import Ensemble, Single
from lightning_rob.objectives import expected_dlr
from lightning_rob.randomness import Streams, seed_from, uniform
from lightning_rob.rules import majority, mean_logits, mean_probs, random_member
from lightning_rob.threat import Threat
from tests.attacks.common import (
    Hyperplane,
    Noisy,
    assert_inside,
    assert_same,
    images,
    plane,
    right,
    seeded,
    snapshot,
    trained_net,
)
from tests.counting import Counting

pyautoattack = pytest.importorskip("pyautoattack")

LINF, L2, L1 = Threat("linf", "24/255"), Threat("l2", 0.5), Threat("l1", 1.0)
FIRST = AutoAttack(LINF, "custom", ("apgd-ce",), reference=True)
OWN = replace(FIRST, reference=False)
ATTACKS = {
    "apgd-ce": FIRST,
    "apgd-ce-l2": replace(FIRST, threat=L2),
    "apgd-dlr": replace(FIRST, attacks=("apgd-dlr",)),
    "apgd-t-fab-t": replace(FIRST, attacks=("apgd-t", "fab-t")),
    "fab-l2": replace(FIRST, threat=L2, attacks=("fab",)),
}
every_norm = pytest.mark.parametrize("threat", [LINF, L2, L1], ids=["linf", "l2", "l1"])
every_attack = pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())


def as_package(attack):
    return replace(attack, reference=True)


@pytest.fixture
def nets():
    return [trained_net(1), trained_net(2)]


@pytest.fixture
def single(nets):
    return Single(nets[0])


def seed(x, generator):
    """The seed that a generator's numbers for all images make."""
    return seed_from(uniform(torch.zeros(len(x)), generator=generator))


def package(attack, defense, x, y, number):
    """The package by itself, on the network as an attack sees it."""
    norm = attack.threat.norm.capitalize()
    with attacking(defense) as defense, torch.random.fork_rng(devices=[]):
        suite = pyautoattack.AutoAttack(
            defense.net,
            attacks=attack.attacks and list(attack.attacks),
            eps=attack.threat.eps,
            norm=norm,
            seed=number,
            version=attack.version,
        )
        suite.apgd_targeted.n_target_classes = suite.fab.n_target_classes = 3
        if attack.version == "custom":
            suite.apgd.n_restarts = suite.fab.n_restarts = 1
        return suite.run_standard_evaluation(x, y, batch_size=len(x))


# what it returns


def is_the_package(attack, defense, x, y):
    x_adv = attack(defense, x, y, seeded(1))
    expected, predicted = package(attack, defense, x, y, seed(x, seeded(1)))
    torch.testing.assert_close(x_adv, expected, rtol=0, atol=1e-6)
    left = right(defense, x_adv, y)
    assert torch.equal(left == 1, predicted == y)
    assert_inside(attack.threat, x_adv, x)
    return left


@every_attack
def test_is_the_package(attack, single):
    x, y = images(12, seed=1)
    left = is_the_package(attack, single, x, y).mean()
    assert 0 < left < right(single, x, y).mean() - 0.2


@pytest.mark.slow
@pytest.mark.parametrize("version", ["standard", "plus", "rand"])
@every_norm
def test_version_is_the_package(version, threat, single):
    x, y = images(60, seed=1)
    attack = AutoAttack(threat, version, reference=True)
    whole = is_the_package(attack, single, x, y)
    first = right(single, replace(FIRST, threat=threat)(single, x, y, seeded()), y)
    assert whole.sum() <= first.sum() + 1


# The iterates of APGD and FAB are those of the package in every norm (test_apgd.py, test_fab.py).
STAGES = [(LINF, "square"), (L2, "square"), (L1, "square")]
STAGES += [(LINF, "apgd-ce"), (L2, "apgd-dlr"), (L1, "apgd-t"), (LINF, "fab"), (L2, "fab-t")]


@pytest.mark.parametrize(("threat", "name"), STAGES)
def test_each_stage_is_as_strong_as_that_of_the_package(threat, name, single):
    """On 100 images, where a part is fooled. Of one run, its random start decides several."""
    x, y = images(100, seed=1)
    attack = AutoAttack(threat, "custom", (name,), queries=200)
    if name == "square":
        attack = attack.rescaled(2 * threat.eps)
    x_adv = attack(single, x, y, seeded())
    assert_inside(attack.threat, x_adv, x)
    ours = right(single, x_adv, y)
    theirs = right(single, as_package(attack)(single, x, y, seeded()), y)
    one_run = name in ("apgd-ce", "apgd-dlr")
    assert ours.sum() <= theirs.sum() + (8 if one_run else 2)
    assert one_run or name == "square" or (ours != theirs).sum() <= 3
    assert 0 < ours.sum() < right(single, x, y).sum() - 10


@pytest.mark.slow
@pytest.mark.parametrize("version", ["standard", "plus"])
@every_norm
def test_a_version_is_as_strong_as_that_of_the_package(version, threat, single):
    x, y = images(200, seed=1)
    attack = AutoAttack(Threat(threat.norm, 0.7 * threat.eps), version)
    ours = right(single, attack(single, x, y, seeded()), y)
    theirs = right(single, as_package(attack)(single, x, y, seeded()), y)
    assert torch.equal(ours, theirs)


def test_versions_have_the_settings_of_the_paper():
    standard, plus, rand = (AutoAttack(LINF, v).stages(10) for v in ("standard", "plus", "rand"))
    assert standard == [APGD(LINF), APGD(LINF, targets=9), FAB(LINF), Square(LINF)]
    dlr = APGD(LINF, objective=expected_dlr, restarts=5)
    assert plus[:3] == [APGD(LINF, restarts=5), dlr, FAB(LINF, targets=0, restarts=5)]
    assert plus[3:] == [Square(LINF), APGD(LINF, targets=9), FAB(LINF)]
    assert rand == [APGD(LINF, draws=20), APGD(LINF, objective=expected_dlr, draws=20)]
    assert AutoAttack(L1).stages(10) == [
        APGD(L1, restarts=5),
        APGD(L1, targets=5),
        FAB(L1),
        Square(L1),
    ]
    assert AutoAttack(L1, "plus").stages(10)[4] == APGD(L1, targets=9)


@pytest.mark.parametrize("name", ["apgd-ce", "fab", "fab-t"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("reference", [False, True])
def test_fools_those_whose_distance_is_within_the_radius(norm, name, reference):
    net, x, y, distance = plane(norm)
    net, x, distance = net.float(), x.float(), distance.float()
    eps = distance.median().item() + 1e-3
    attack = AutoAttack(Threat(norm, eps), "custom", (name,), reference=reference)
    fooled = right(Single(net), attack(Single(net), x, y, seeded()), y) == 0
    assert torch.equal(fooled, distance < eps)
    assert 15 <= fooled.sum() <= 25


@pytest.mark.parametrize("attack", [OWN, FIRST], ids=["own", "package"])
def test_robust_and_wrong_images_are_returned_unchanged(attack, single):
    x, y = images(30, seed=3)
    y[:5] = (y[:5] + 1) % 4
    x_adv = attack(single, x, y, seeded())
    kept = right(single, x_adv, y) == 1
    kept[:5] = True
    assert 5 < kept.sum() < 30
    assert torch.equal(x_adv[kept], x[kept])
    double = attack(single.double(), x.double() * 0.999, y, seeded())
    kept = right(single, double, y) == 1
    kept[:5] = True
    single.float()
    assert torch.equal(double[kept], x.double()[kept] * 0.999)
    assert_inside(LINF, double, x.double() * 0.999)


# what it leaves behind


def test_tracing_goes_on(single):
    def trace(*_):
        return None

    x, y = images(3, seed=6)
    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        FIRST(single, x, y, seeded())
        assert sys.gettrace() is trace
    finally:
        sys.settrace(outer)


# randomness


def test_the_package_one_at_a_time_does_not_depend_on_the_batch(single):
    attack, (x, y) = replace(FIRST, batch_size=1), images(4, seed=8)
    index = torch.arange(100, 104)
    whole = attack(single, x, y, Streams.from_index(index, 7))
    for part in torch.tensor([2, 0, 3, 1]).split([1, 3]):
        again = attack(single, x[part], y[part], Streams.from_index(index[part], 7))
        torch.testing.assert_close(again, whole[part], rtol=0, atol=1e-6)
    assert (whole != x).flatten(1).any(1).sum() > 0


@pytest.mark.parametrize("attack", [OWN, FIRST], ids=["own", "package"])
def test_batches_of_a_size(attack, single):
    x, y = images(4, seed=8)
    noise = Streams.from_index(torch.arange(4), 1)
    parts = torch.arange(4).split(3)
    expected = [attack(single, x[part], y[part], noise[part]) for part in parts]
    found = replace(attack, batch_size=3)(single, x, y, noise)
    assert torch.equal(found, torch.cat(expected))


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


@pytest.mark.parametrize("rule", [mean_probs, mean_logits])
@pytest.mark.parametrize("draws", [None, 3])
def test_scores_are_those_of_the_rule(nets, rule, draws):
    sure = copy.deepcopy(nets[0])
    sure.linear.weight.data *= 8
    nets = [sure, nets[1]]
    defense = Ensemble(nets, [0.3, 0.7], rule=rule).eval()
    x = torch.rand((300, 1, 6, 6), generator=seeded())
    found = scores(defense, x, None, draws)
    assert torch.equal(found.argmax(1), defense(x).argmax(1))
    other = Ensemble(nets, [0.3, 0.7], rule=mean_probs if rule is mean_logits else mean_logits)
    assert not torch.equal(found.argmax(1), other.eval()(x).argmax(1))


def test_single_network_is_seen_by_its_logits(single):
    x, _ = images(4)
    assert torch.equal(scores(single.eval(), x, None, None), single.net(x))


def test_member_of_no_weight_does_not_count(nets):
    x, y = images(8, seed=9)
    idle = Ensemble(nets, [1.0, 0.0], rule=mean_probs)
    x_adv = OWN(idle, x, y, seeded())
    torch.testing.assert_close(x_adv, OWN(Single(nets[0]), x, y, seeded()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", [random_member, majority])
def test_ensemble(nets, rule):
    defense, (x, y) = Ensemble(nets, [0.6, 0.4], rule=rule), images(30, seed=10)
    for attack in (FIRST, OWN, replace(OWN, threat=L2)):
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
    for attack in (FIRST, OWN):
        assert torch.equal(attack(defense, x, y, seeded()), x)
    assert right(defense, ARC(LINF, 10, LINF.eps)(defense, x, y), y).mean() < left.mean() - 0.05


def assert_is_reproducible(attack, defense):
    x, y = images(4, seed=12)
    before = snapshot(defense)
    x_adv = attack(defense, x, y, Streams.from_index(torch.arange(4)))
    assert_same(before, snapshot(defense))
    assert_inside(LINF, x_adv, x)
    assert not torch.equal(x_adv, x)
    assert torch.equal(attack(defense, x, y, Streams.from_index(torch.arange(4))), x_adv)


@pytest.mark.parametrize("attack", [OWN, FIRST], ids=["own", "package"])
def test_random_defense(attack, single):
    assert_is_reproducible(attack, Noisy(single.net, 0.1, (0.75, 0.25)))


@pytest.mark.slow
def test_random_defense_by_its_mean_gradient(single):
    defense = Noisy(single.net, 0.1, (0.75, 0.25))
    assert_is_reproducible(AutoAttack(LINF, "rand"), defense)
    calls = len(defense.calls)
    defense.calls.clear()
    assert_is_reproducible(AutoAttack(LINF, "rand", reference=True), defense)
    assert len(defense.calls) >= 2 * 20 * 100
    assert calls == pytest.approx(len(defense.calls), rel=0.02)


# errors


@pytest.mark.parametrize("reference", [False, True])
def test_too_few_classes(reference):
    net, (x, y) = Hyperplane(torch.ones(36)), images(4)
    message = r"apgd-t needs 4 classes .* has 2: .*\('apgd-ce', 'fab-t', 'square'\)"
    with pytest.raises(ValueError, match=message):
        AutoAttack(LINF, reference=reference)(Single(net), x, y % 2, seeded())


def test_without_the_package(single, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    x, y = images(2)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "lightning-rob\[autoattack\]"'):
        FIRST(single, x, y, seeded())
    assert OWN(single, x, y, seeded()).shape == x.shape
