"""The active test: does an attack find adversarial images that exist by construction?"""

import json
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_rob import evaluate
from lightning_rob.attacks import (
    APGD,
    FAB,
    PGD,
    AutoAttack,
    LatticeClimber,
    NoAttack,
    OnMember,
    RandomMember,
    Square,
    Targeted,
)
from lightning_rob.attacks.decorators import AttackDecorator
from lightning_rob.audit import Power, power
from lightning_rob.audit.auditor import audit
from lightning_rob.defenses import (
    Defense,
    Ensemble,
    Mixture,
    RandomTransforms,
    Single,
    Smoothing,
    TransformEnsemble,
)
from lightning_rob.defenses.copies import working_copy
from lightning_rob.evaluation.power import _Trial, counted, found_by
from lightning_rob.objectives import ce_of_mean_probs, expected_dlr
from lightning_rob.rules import abstaining
from lightning_rob.threat import Threat
from tests.audit.conftest import images
from tests.audit.planted import PLANTED, THREAT, Through, trained
from tests.schema import checked
from tests.tiny import TinyNet

N = 40
PGD20 = PGD(THREAT, 20, THREAT.eps / 4)
TINY = PGD(THREAT, 20, THREAT.eps / 200)


def made(net, seed, threat=None):
    x, y = images(True, 128)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in net.modules():
            getattr(module, "reset_parameters", lambda: None)()
        return trained(net, x, y, threat, steps=40, batch=64)


@pytest.fixture(scope="module")
def batch():
    return images(False, N)


@pytest.fixture(scope="module")
def nets():
    """Two standard nets and an adversarially trained one."""
    return [made(TinyNet(64), seed, threat) for seed, threat in enumerate((None, None, THREAT))]


class WinnersOnly(nn.Module):
    """k-WTA (Xiao et al. 2020): of the features only the largest twentieth is kept."""

    def forward(self, h):
        return torch.where(h >= h.topk(h.shape[1] // 20).values[:, -1:], h, 0.0)


def naive(logits, weights, y):
    """Cross-entropy in single precision, whose gradient vanishes where logits are large."""
    return cross_entropy(logits[0], y, reduction="none")


def test_a_good_attack_passes_on_honest_networks(nets, batch):
    for net in nets[1:]:
        found = power(net, PGD20, *batch)
        assert found.passed, str(found)
        assert found.random_rate < 0.1
        assert found.images + found.left_out == N
        assert found.images > 0.9 * N
        assert found.interval[0] <= found.rate <= found.interval[1]


def test_a_weak_attack_fails(nets, batch):
    for net in nets[1:]:
        found = power(net, TINY, *batch)
        assert found.passed is False
        assert found.rate < 0.5
        assert str(found).endswith("failed")
    assert power(nets[0], NoAttack(THREAT), *batch).rate == 0


def test_masked_gradients_fail(nets, batch):
    net = nets[0]
    steep = Through(net, after=lambda z: 1e4 * z)
    winners = nn.Sequential(nn.Flatten(), nn.Linear(192, 400), WinnersOnly(), nn.Linear(400, 4))
    cases = {
        "k winners": (made(winners, 0), PGD20),
        "rounded input": (Through(net, lambda x: (8 * x).round() / 8), PGD20),
        "softmax": (Through(net, after=lambda z: (1e4 * z).softmax(1)), PGD20),
        "logit scale": (steep, PGD(THREAT, 20, THREAT.eps / 4, objective=naive)),
        **{name: (PLANTED[name][0](net), PGD20) for name in ("misleading", "rows_detached")},
    }
    for name, (defense, attack) in cases.items():
        found = power(defense, attack, *batch)
        assert found.passed is False, name
        assert found.images > N / 2, name


def test_where_random_search_succeeds_the_test_says_nothing():
    """With a single feature no corner stands out much."""
    x, y = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 1, bias=False), nn.Linear(1, 2))
    found = power(net, PGD(Threat("linf", 0.1), 20, 0.05), x, y)
    assert found.rate == 1
    assert found.random_rate > 0.1
    assert found.passed is None
    assert "random search" in found.why
    harder = power(net, PGD(Threat("linf", 0.1), 20, 0.05), x, y, points=400)
    assert harder.random_rate < found.random_rate


def test_a_network_that_takes_a_gradient_inside():
    """Its last layer may not lose its slope while it is looked for."""

    class Purifying(nn.Sequential):
        def forward(self, x):
            with torch.enable_grad():
                moved = x.detach().requires_grad_()
                slope = torch.autograd.grad(super().forward(moved).logsumexp(1).sum(), moved)[0]
            return super().forward(x - 0.01 * slope.sign())

    x, y = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Purifying(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)).eval()
    assert power(net, PGD(Threat("linf", 0.1), 20, 0.025), x, y).images > 0


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.1), ("l2", 0.8)])
def test_a_linear_network_in_closed_form(norm, eps, monkeypatch):
    """The planted image is in ball and box, and the optimum of the readout fools it too."""
    x = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    y, every = torch.arange(30) % 3, torch.arange(30)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.Linear(100, 3)).eval()
    threat = Threat(norm, eps)
    seen, made, own = [], [], _Trial.fooled

    def fooled(self, readouts, images):
        seen.append(images)
        made.append(readouts)
        return own(self, readouts, images)

    monkeypatch.setattr(_Trial, "fooled", fooled)
    trial = _Trial(PGD(threat, 20, eps / 4), working_copy(Single(net)), x, y, every, (0,))
    found = trial.outcome()
    planted, clean, attacked, _ = seen
    (readout,) = made[0].made
    first = net[1]
    slope = (readout.weight @ first.weight).view_as(x)  # of the readout by the image

    def value(images):
        return readout(first(images.flatten(1)), every)

    assert (threat.distance(planted, x) <= eps * (1 + 1e-5)).all()
    assert planted.min() >= 0
    assert planted.max() <= 1
    assert torch.equal(clean, x)
    assert (value(x) < 0).all()
    assert (value(planted) > 0).all()
    optimum = threat.project(x + eps * threat.steepest(slope), x)
    assert (value(optimum) > value(planted)).all()
    assert (value(attacked) > 0).all()
    assert (found[:, 0] == 1).all()


@pytest.mark.rounding
def test_an_image_has_the_same_outcome_in_any_batch(nets, batch):
    x, y = batch
    defenses = {
        "single": Single(nets[2]),
        "random": RandomTransforms(nets[2], {"GaussianNoise": {"alpha": 0.02}}, size=1, draws=3),
    }
    weak = replace(PGD20, steps=3, step_size=THREAT.eps / 6)  # finds some, not all
    for name, defense in defenses.items():
        index = torch.arange(N) + 7
        whole = found_by(weak, defense, x, y, index, 0)
        order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
        parts = [found_by(weak, defense, x[p], y[p], index[p], 0) for p in order.split(15)]
        again = torch.empty_like(whole)
        again[order] = torch.cat(parts)
        assert torch.equal(whole.nan_to_num(-1), again.nan_to_num(-1)), name
        assert 0 < whole[:, 0].nansum() < N, name
    assert power(nets[2], weak, x, y) == power(nets[2], weak, x, y)
    found = [found_by(weak, Single(nets[2]), x, y, torch.arange(N), seed) for seed in (0, 1)]
    assert not torch.equal(*(one.nan_to_num(-1) for one in found))


def test_attacks_that_drop_images_reorder_them_or_need_more_classes(nets, batch):
    """Each has to know which image it looks at, and to find three classes or more."""
    strong = [
        replace(PGD20, early_stop=True),
        replace(PGD20, objective=expected_dlr),
        Targeted(PGD20),
        APGD(THREAT, 20, targets=3),
        FAB(THREAT, 10),
        AutoAttack(THREAT, version="custom", attacks=("apgd-ce", "fab-t")),
    ]
    for attack in strong:
        found = power(nets[2], attack, *batch)
        assert found.rate >= 0.95, f"{attack}: {found}"
    assert power(nets[2], Square(THREAT, 10), *batch).rate < 0.95


def test_attacks_on_the_runner_up_see_the_class_of_the_planted_image(nets, batch, monkeypatch):
    """All other classes stay below it, also at the clean images."""
    seen, own = [], _Trial.planted

    def planted(self, *args):
        seen.append(own(self, *args))
        return seen[-1]

    monkeypatch.setattr(_Trial, "planted", planted)
    power(nets[0], PGD20, *batch)
    readouts, (x, y), defense = seen[0][0], batch, working_copy(Single(nets[0]))
    with readouts(defense), torch.no_grad():
        others = defense.logits(x)[0].scatter(1, y[:, None], -torch.inf)
    first, second = others.topk(2).values.T
    assert torch.equal(others.argmax(1), readouts.target)
    assert ((first - second) / readouts.made[0].size > 0.5).all()


def test_ensembles(nets, batch):
    """The planted image fools all members at once: an attack on one of them does not find it."""
    ensemble = Ensemble(nets, [0.5, 0.3, 0.2])
    climb = power(ensemble, LatticeClimber(THREAT, 20), *batch)
    assert climb.rate >= 0.95, str(climb)
    assert climb.random_rate < 0.1
    for weak in (OnMember(PGD20, 0), RandomMember(PGD20), TINY):
        assert power(ensemble, weak, *batch).passed is False
    mixture = Mixture([Single(nets[0]), Single(nets[2])])
    assert power(mixture, PGD20, *batch).rate > power(mixture, TINY, *batch).rate


@pytest.mark.parametrize("kind", ["transforms", "smoothing"])
def test_random_defenses(kind, nets, batch):
    """Flipped copies are told apart by their place: another image may look more like them."""
    transforms = {"HorizontalFlip": {"p": 1.0}, "GaussianNoise": {"alpha": 0.02}}
    defense = {
        "transforms": RandomTransforms(nets[2], transforms, size=2, draws=3),
        "smoothing": Smoothing(nets[2], 0.02, draws=3),
    }[kind]
    strong, weak = power(defense, PGD20, *batch), power(defense, TINY, *batch)
    assert strong.rate >= 0.95, str(strong)
    assert strong.images > N / 2
    assert weak.passed is False


def test_transformation_ensembles_through_members(nets, batch):
    ensemble = TransformEnsemble(nets, ["clean", "rotate_90", "rotate_180"])
    attack = replace(PGD20, objective=ce_of_mean_probs)
    strong, weak = power(ensemble, attack, *batch), power(ensemble, TINY, *batch)
    assert strong.rate >= 0.9, str(strong)
    assert weak.passed is False


class Detecting(nn.Module):
    """A network with a class for images that are unlike a smooth one."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        logits = self.net(x)
        rough = (x[..., 1:] - x[..., :-1]).square().mean((1, 2, 3))
        return torch.cat([logits, (logits.amax(1) + 300 * (rough - 0.16))[:, None]], 1)


@dataclass(frozen=True)
class Ignoring(AttackDecorator):
    """An attack on the classes of labels alone, which does not look at rejection."""

    def perturb(self, defense, x, y, generator):
        return self.attack.perturb(defense.defense, x, y, generator)


def of_labels(logits, weights, y):
    return cross_entropy(logits.mean(0)[:, :4], y, reduction="none")


def test_a_rejecting_defense_and_the_inverted_test(nets, batch):
    defense = Single(Detecting(nets[2]), rejects=4)
    attack = PGD(THREAT, 20, THREAT.eps / 6)
    x, y = (part[:24] for part in batch)
    adaptive = power(defense, attack, x, y)
    assert adaptive.passed, str(adaptive)
    assert adaptive.inverted.images > 12
    ignoring = power(defense, Ignoring(replace(attack, objective=of_labels)), x, y)
    assert ignoring.inverted.passed is False
    assert ignoring.passed is False
    assert ignoring.inverted.rate < ignoring.rate


def test_a_rule_that_abstains(nets, batch):
    @abstaining
    def unsure(logits, weights):
        p = logits.softmax(-1).mean(0)
        return nn.functional.one_hot(p.argmax(-1), 4) * (p.amax(-1) > 0.6)[:, None].float()

    defense = Single(nets[2], unsure)
    assert power(defense, PGD20, *batch).rate >= 0.95
    assert power(defense, TINY, *batch).passed is False
    assert power(defense, PGD20, *batch).inverted is None


def test_where_the_test_is_not_applicable(nets, batch):
    class Hidden(Defense):
        """A defense that names no networks."""

        def logits(self, x, generator=None):
            return nets[0](x)[None]

    class Adapting(Single):
        def adapt(self, x, generator=None):
            return self

    cases = {
        "adapts": (Adapting(nets[0]), PGD20),
        "not a fixed set": (Hidden(torch.ones(1), Single(nets[0]).rule), PGD20),
        "the ball must be": (Single(nets[0]), NoAttack(Threat("linf", 0.0))),
    }
    for why, (defense, attack) in cases.items():
        found = power(defense, attack, *batch)
        assert found.passed is None
        assert math.isnan(found.rate)
        assert str(found).startswith("not applicable: ")
        assert why in str(found)


def test_counts_and_their_interval():
    nan = math.nan
    found = torch.tensor([[1.0, 0.0]] * 8 + [[0.5, 1.0], [nan, nan]])
    assert counted(found).tolist() == [[9, 1, 8.5, 1]]
    one = Power.of(counted(found))
    assert (one.images, one.left_out, one.passed) == (9, 1, False)
    assert one.rate == pytest.approx(8.5 / 9)
    # Clopper and Pearson: of 8 of 9 below, of 9 of 9 above.
    assert one.interval == (pytest.approx(0.5175, abs=1e-4), 1.0)
    both = torch.cat([torch.ones(30, 1), torch.zeros(30, 1), found[:1].expand(30, 2)], 1)
    assert Power.of(counted(both)).passed
    both[:3, 2] = 0
    assert Power.of(counted(both)).passed is False
    assert Power.of(counted(both)).inverted.rate == 0.9


def test_an_evaluation_tests_its_attacks(nets, batch):
    x, y = batch
    attacks = {"pgd": PGD20, "tiny": TINY}
    batches = [(x[:13], y[:13]), (x[13:], y[13:])]
    result = evaluate(nets[2], attacks, batches, power=N, progress=False, checks=False)
    for name, attack in attacks.items():
        expected = power(nets[2], attack, x, y)
        assert result.power[name] == expected
        record = checked(json.dumps(result.measurement(name).record()))
        assert record["power"]["rate"] == expected.rate
        assert record["power"]["text"] == str(expected)
        assert f"power   {name} {expected}"[:60] in result.table()
    (finding,) = result.findings
    assert (finding.name, finding.severity) == ("power", "severe")
    assert finding.values["attack"] == "tiny"
    some = evaluate(nets[2], attacks, batches, power=10, progress=False, checks=False)
    assert some.power["pgd"].images + some.power["pgd"].left_out == 10
    assert not evaluate(nets[2], attacks, batches, progress=False, checks=False).power


def test_an_audit_tests_its_attacks(nets, batch):
    report = audit(Single(nets[2]), *batch, THREAT, steps=5, queries=5, power=True)
    shown = {row.name: row.details["power"] for row in report.results if "power" in row.details}
    assert {"pgd", "margin", "square"} <= shown.keys()
    assert not {"noise", "fgsm", "unbounded"} & shown.keys()
    assert shown["margin"]["rate"] > shown["square"]["rate"]
    (finding,) = (one for one in report.findings if one.name == "power")
    assert finding.severity == "severe"
    assert "square finds" in finding.text
    quiet = audit(Single(nets[2]), *batch, THREAT, steps=5, queries=5)
    assert not any("power" in row.details for row in quiet.results)
