"""The attacks that each kind of defense calls for."""

import copy

import pytest
import torch
import yaml
from torch import nn

from lightning_rob import evaluate, load, objectives
from lightning_rob.attacks import (
    APGD,
    ARC,
    GMSA,
    PGD,
    Budgeted,
    OnDifferentiable,
    TransferFromStatic,
)
from lightning_rob.attacks.auto import AGGMO, Auto, suite_kind
from lightning_rob.attacks.contexts import evaluating
from lightning_rob.data import Digits5k
from lightning_rob.defenses import (
    DENT,
    Defense,
    Ensemble,
    RandomTransforms,
    Single,
    TransformEnsemble,
    URejectron,
)
from lightning_rob.evaluation.suites import attacks_by_name, default_attacks, plug_in_for, suite_for
from lightning_rob.nets import SmallCNN
from lightning_rob.objectives import ce_of_votes, linear
from lightning_rob.randomness import uniform
from lightning_rob.rules import (
    VOTING_RULES,
    abstaining,
    majority,
    mean_logits,
    mean_probs,
    random_member,
)
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise, HorizontalFlip, UniformNoise
from tests.attacks.common import images, right, streams, trained_net
from tests.audit.planted import Through
from tests.counting import Counting, Shared
from tests.tiny import ROOT, TinyNet

THREAT = Threat("linf", 0.15)


def test_the_suite_fits_the_defense():
    net = TinyNet()
    rt = RandomTransforms(net, {"GaussianNoise": {}}, 1, 3)
    moved = TransformEnsemble([net, net], ["flip_horizontal", "quantize_4_colors"])
    kinds = {
        "single": (Single(net), ()),
        "ensemble": (Ensemble([net, net], rule=mean_logits), ()),
        "randomized": (Ensemble([net, net]), ("arc", "climb")),
        "random": (rt, ("linear_aggmo",)),
        "transformed": (moved, ("adaptive_pgd", "taa", "paa")),
        "transductive": (DENT(SmallCNN(4, 3, 4)), ("gmsa_avg",)),
    }
    for kind, (defense, names) in kinds.items():
        suite = suite_for(defense, THREAT)
        assert (suite_kind(defense), suite.kind, suite.adaptive) == (kind, kind, names)
        assert (ROOT / plug_in_for(defense)).exists()
    dent = DENT(SmallCNN(4, 3, 4))
    dent.rejects = 3
    for rejecting in (URejectron(net), dent):
        assert suite_for(rejecting, THREAT).adaptive == ("gmsa_avg", "one_attacked")
    assert suite_for(kinds["randomized"][0], Threat("l1", 3.0)).adaptive == ("climb",)
    assert "apgd" in suite_for(Single(net), Threat("l1", 3.0)).within(Threat("l1", 3.0))
    for threat in (Threat(3), Threat("l2", 0.3, relative=True), Threat(eps=0)):
        with pytest.raises(ValueError, match="the suite needs linf, l2 or l1 and eps > 0"):
            suite_for(Single(TinyNet()), threat)


@pytest.mark.parametrize("rule", [r for r in VOTING_RULES.values() if r is not random_member])
def test_the_plug_in_that_is_advised_for_an_ensemble_is_made_for_its_rule(rule):
    defense = Ensemble([TinyNet(), TinyNet()], rule=rule)
    content = yaml.safe_load((ROOT / plug_in_for(defense)).read_text())
    names = [
        attack["init_args"]["objective"] for attack in content["init_args"]["attacks"].values()
    ]
    losses = [getattr(objectives, name.rpartition(".")[2]) for name in names]
    pgds = [PGD(THREAT, 1, 0.1, objective=loss) for loss in losses]
    assert any(pgd.is_made_for("ensemble", rule) for pgd in pgds)
    attacks = default_attacks(defense, THREAT).values()  # of the monitor
    assert any(attack.is_made_for("ensemble", rule) for attack in attacks)


def test_auto_fools_the_vote_of_members_of_unequal_confidence():
    """The logits of the confident member hide those of the others from the margin of the mean."""
    nets = [load("zoo:digits_standard").net, load("zoo:digits_robust").net]
    digits = Digits5k().source(train=False)
    x, y = digits.images[:60] / 255, digits.labels[:60]
    defense, threat = Ensemble(nets, rule=mean_probs), Threat("linf", 0.1)
    attacks = {"auto": Auto(threat, 100), "margin": Budgeted(APGD(threat, objective=linear), 100)}
    result = evaluate(defense, attacks, [(x, y)], progress=False)
    assert result.accuracy("auto") < result.accuracy("margin") - 0.1


def test_default_attacks():
    plain, ensemble = Single(TinyNet()), Ensemble([TinyNet(), TinyNet()])
    names = ["adaptive_pgd", "adaptive_pgd_logits", "adaptive_pgd_restarts"]
    assert list(default_attacks(plain, THREAT)) == names
    assert [*default_attacks(plain, Threat("l1", 3))] == [*names, "apgd"]
    found = default_attacks(ensemble, THREAT)
    assert list(found) == [*names, "arc", "climb"]
    assert isinstance(found["arc"], ARC)
    random = default_attacks(RandomTransforms(TinyNet(), {"GaussianNoise": {}}, 1, 3), THREAT)
    assert random["adaptive_pgd"].draws == 10
    with pytest.raises(ValueError, match="a DENT adapts to its attacker"):
        default_attacks(DENT(SmallCNN(4, 3, 4)), THREAT)


class Adapting(Single):
    """Its rehearsals are copies of the network, which are kept."""

    def __init__(self, net):
        super().__init__(net)
        self.rehearsed = Shared()

    def adapt(self, x, generator=None):
        net = copy.deepcopy(self.net)
        net.clear()
        self.rehearsed.append(net)
        return Single(net)


def nets_of(defense):
    return [net for net in defense.modules() if isinstance(net, Counting)]


PNG = "compress_png_compression_1"
KINDS = {
    "few": lambda nets: Single(Counting(SmallCNN(3, 3, 4)).eval()),  # of three classes
    "single": lambda nets: Single(nets[0]),
    "pooled": lambda nets: Ensemble(nets, rule=mean_logits),
    "drawn": Ensemble,
    "random": lambda nets: RandomTransforms(nets[0], {"GaussianNoise": {}}, 1, 3),
    "moved": lambda nets: TransformEnsemble(nets, ["flip_horizontal", PNG]),
    "adapting": lambda nets: Adapting(nets[0]),
}


def counted(name):
    torch.manual_seed(0)
    return KINDS[name]([Counting(SmallCNN(4, 3, 4)).eval() for _ in range(2)])


MANY = [(name, 700, "linf") for name in ("pooled", "drawn", "random", "moved", "adapting")]
MANY += [("adapting", passes, "linf") for passes in (60, 1000)]
FEW = [(name, 90, norm) for name in list(KINDS)[1:] for norm in ("linf", "l1")]


@pytest.mark.parametrize(("name", "passes", "norm"), [("few", 390, "linf"), *MANY, *FEW])
def test_auto_stays_within_its_passes(name, passes, norm):
    """A radius within which nothing is fooled; the labels are the predictions."""
    defense, attack = counted(name), Auto(Threat(norm, 1e-6), passes)
    x = torch.rand(1, 3, 16, 16)
    y = defense(x, torch.Generator().manual_seed(0)).argmax(1)
    rehearsed = defense.rehearsed if defense.transductive else []
    for net in nets_of(defense):
        net.clear()
    schedule = attack.schedule(defense) if defense.transductive else attack
    x_adv = schedule(defense, x, y, torch.Generator().manual_seed(0))
    assert attack.threat.distance(x_adv, x) <= (3e-6 if norm == "l1" else 1.1e-6)  # rounding
    used = sum(net.images() + sum(net.backwards) for net in [*nets_of(defense), *rehearsed])
    used -= 2 * len(rehearsed)  # of each, the prediction and the loss
    # The climb tries no set with a member that nothing fools.
    assert (0.4 if name == "drawn" else 0.7) * passes <= used <= passes


def test_auto_on_many_networks():
    """ARC on five costs 55 passes and more: APGD alone gets fewer."""
    defense, (x, y) = Ensemble([trained_net(seed) for seed in range(1, 6)]), images(20, seed=4)
    found = Auto(THREAT, 60)(defense, x, y, streams(x))
    assert right(defense, found, y).mean() < right(defense, x, y).mean() - 0.3
    with pytest.raises(ValueError, match="Auto needs 35 passes for 5 networks, and has 34"):
        Auto(THREAT, 34).schedule(defense, classes=4)
    passes = [
        attacks_by_name("auto", one, threat)["auto"].passes
        for one, threat in (
            (defense, THREAT),
            (defense, Threat("l1", 3.0)),
            (RandomTransforms(TinyNet(), {"GaussianNoise": {}}, 1, 3), THREAT),
        )
    ]
    assert passes == [5000, 10000, 1000]  # the search needs 400 for each network


@pytest.mark.parametrize("norm", ["linf", "l1"])
def test_auto_spends_passes_on_steps_where_images_are_transformed(norm):
    """Ten draws for each step, and PGD in l1, leave more at the same passes."""
    net, (x, y) = trained_net(1), images(60, seed=9)
    defense = RandomTransforms(net, [GaussianNoise(0.15), UniformNoise()], 2, 1)
    threat = Threat(norm, 0.12 if norm == "linf" else 2.0)
    pgd = PGD(threat, 1, threat.eps / 10, linear, 10, momentum=AGGMO)
    left = [
        mean_right(defense, attack(defense, x, y, streams(x)), y)
        for attack in (Auto(threat, 200), Budgeted(pgd, 200))
    ]
    assert left[0] < left[1] - 0.03


def test_auto_without_a_gradient_and_a_search():
    x, y = images(20, seed=4)
    net = Through(trained_net(1), before=torch.no_grad()(lambda x: 1 * x))
    for defense in (
        RandomTransforms(net, [GaussianNoise(0.05)], 1, 2),
        Ensemble([net] * 3, rule=majority),
    ):
        found = Auto(THREAT, 600).find(defense, x, y, streams(x))
        assert found.findings == ("no gradient leads to the images",)
        assert right(defense, found.x_adv, y).mean() < right(defense, x, y).mean() - 0.04


class Voting(Ensemble):
    """Members that adapt, in name, and vote."""

    def adapt(self, x, generator=None):
        return self


def test_auto_leaves_the_rounds_to_the_evaluation():
    defense, auto = DENT(SmallCNN(4, 3, 4)), Auto(THREAT, 100)
    schedule = auto.schedule(defense)
    assert isinstance(schedule, GMSA)
    assert schedule.inner.passes * schedule.rounds == 100
    voting = Voting([SmallCNN(4, 3, 4) for _ in range(3)], rule=majority)
    inner = auto.schedule(voting).inner.attack, suite_for(voting, THREAT).attacks["gmsa_avg"].inner
    assert [attack.objective for attack in inner] == [ce_of_votes] * 2
    with pytest.raises(TypeError, match=r"DENT adapts to whole batches: attack it by Auto"):
        auto(defense, torch.rand(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))


def small(kind):
    """A defense of trained networks, and a radius at which PGD leaves some images."""
    nets = [trained_net(seed).eval() for seed in (1, 2, 3)]
    if kind == "random":
        return RandomTransforms(nets[0], [GaussianNoise(0.15), UniformNoise()], 2, 10), 0.12
    if kind == "transformed":
        return TransformEnsemble(nets, ["clean", "shift_left", "shift_up"]), 0.09
    return DENT(nets[0]), 0.1


@torch.no_grad()
def mean_right(defense, x, y):
    """The accuracy after adaptation to these images, mean over draws of a random defense."""
    adapted, found = defense.adapt(x), []
    with evaluating(adapted) as adapted:
        for seed in range(4):
            generator = streams(x).fold_in(seed)
            found.append(float(adapted(x, generator).gather(1, y[:, None]).mean()))
    return sum(found) / len(found)


@pytest.mark.parametrize(
    ("kind", "passes"),
    [("random", 30), *((k, n) for k in ("transformed", "transductive") for n in (30, 100))],
)
def test_auto_is_as_strong_as_pgd_at_equal_passes(kind, passes):
    """PGD does not rehearse. Random starts alone make a difference of up to three images."""
    (defense, eps), (x, y) = small(kind), images(100, seed=9)
    threat, passes = Threat("linf", eps), passes * len(defense.weights)
    pgd = Budgeted(PGD(threat, 1, eps / 10, keep_best=kind == "transductive"), passes)
    if kind == "transductive":
        pgd = TransferFromStatic(pgd)
    left = [
        mean_right(defense, attack(defense, x, y, streams(x)), y)
        for attack in (Auto(threat, passes).schedule(defense, classes=4), pgd)
    ]
    assert 0.1 < left[0] <= left[1] + 0.03


def test_auto_follows_the_identity_through_what_has_no_gradient():
    defense = TransformEnsemble([trained_net(1)] * 2, ["quantize_4_colors", "quantize_8_colors"])
    x, y = images(20, seed=4)
    x_adv = Auto(Threat("linf", 0.1), 40)(defense, x, y)
    assert right(defense, x_adv, y).mean() < right(defense, x, y).mean() - 0.3
    with pytest.raises(TypeError, match=r"no member has a gradient, of quantize.*or Square"):
        OnDifferentiable(PGD(Threat("linf", 0.1), 1, 0.1))(defense, x, y)


@abstaining
def unanimous(logits, weights):
    votes = random_member(logits, weights)
    return votes * (votes > 0.999)


def test_members_behind_transformations_that_reject_are_attacked():
    defense = TransformEnsemble([trained_net(1)] * 2, ["shift_left", "clean"], unanimous)
    x, y = images(40, seed=4)
    threat = Threat("linf", 0.1)
    suite = suite_for(defense, threat)
    assert "taa" not in suite.attacks
    for attack in (Auto(threat, 200), suite.attacks["adaptive_pgd"]):
        wrong = defense(attack(defense, x, y)).scatter(1, y[:, None], 0).sum(1)
        assert wrong.mean() > 0.3  # accepted, and of a wrong class


def test_gradients_that_a_defense_hides_are_taken_from_its_transforms():
    """Noise declared as the identity has the same slope; a flip declared so has another."""
    net, kinds = TinyNet(), [HorizontalFlip(p=1.0), GaussianNoise(alpha=0.1)]
    exact, hiding = (
        RandomTransforms(net, kinds, 2, 4, gradients=how) for how in ("exact", "identity")
    )
    suites = [suite_for(one, Threat("linf", 0.1)) for one in (exact, hiding)]
    x, y = images(6, channels=3, side=8)
    found = [
        suite.attacks["pgd"](one, x, y, streams(x))
        for suite, one in zip(suites, (exact, hiding), strict=True)
    ]
    assert torch.equal(*found)
    assert "declared" in suites[1].attacks and "declared" not in suites[0].attacks
    own = default_attacks(hiding, Threat("linf", 0.1))["adaptive_pgd"]  # of the monitor
    assert own.backward == suites[1].attacks["pgd"].backward is not None
    declared = suites[1].attacks["declared"](hiding, x, y, streams(x))
    assert not torch.equal(declared, found[1])


def test_an_evaluation_says_that_it_lacks_the_attack_for_its_kind():
    pgd, x, y = PGD(THREAT, 1, 0.1), torch.rand(4, 3, 8, 8), torch.arange(4)
    drawn = Ensemble([TinyNet(), TinyNet()])
    found = [
        [one.text for one in evaluate(defense, attacks, [(x, y)], progress=False).findings]
        for defense, attacks in (
            (drawn, {"pgd": pgd}),
            (drawn, {"pgd": pgd, "arc": ARC(THREAT, 1, 0.1)}),
            (drawn, {"auto": Auto(THREAT, 100)}),
            (Single(TinyNet()), {"pgd": pgd}),
        )
    ]
    lacking = "made for a randomized ensemble: ARC or the climb may leave less."
    assert [any(text.endswith(lacking) for text in texts) for texts in found] == [
        *(True, False, False, False)
    ]
    adapting = attacks_by_name("auto", DENT(SmallCNN(4, 3, 4)), THREAT)["auto"]
    assert isinstance(adapting, GMSA)


class Drawing(Defense):
    """A prediction is the majority of five draws of a network; the first one is loud."""

    def __init__(self):
        super().__init__(torch.full((5,), 0.2), majority)
        self.nets = nn.ModuleList(trained_net(seed) for seed in (1, 2, 3))

    @property
    def foldable_networks(self):
        return list(self.nets)

    def logits(self, x, generator=None):
        every = torch.stack([self.nets[0](x) * 30, *(net(x) for net in self.nets[1:])])
        drawn = [(3 * uniform(x, generator=generator)).long() for _ in self.weights]
        return torch.stack([every[one, torch.arange(len(x))] for one in drawn])


def test_auto_follows_all_draws_where_one_is_loud():
    defense, threat, (x, y) = Drawing(), Threat("linf", 0.1), images(60, seed=9)
    pgd = PGD(threat, 1, threat.eps / 10, linear, 1, momentum=AGGMO)
    left = [
        mean_right(defense, attack(defense, x, y, streams(x)), y)
        for attack in (Auto(threat, 500), Budgeted(pgd, 500))
    ]
    assert left[0] < left[1] - 0.03
