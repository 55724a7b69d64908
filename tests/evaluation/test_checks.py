"""What an evaluation says of figures that mislead, and that it leaves everything as it was."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import lightning_rob
from lightning_rob.attacks import ARC, CW, DDN, FAB, PGD, DeepFool, RandomStart, Square
from lightning_rob.audit.auditor import audit
from lightning_rob.data import Digits5k
from lightning_rob.defenses import Ensemble, RandomTransforms, Single
from lightning_rob.evaluation import evaluate
from lightning_rob.nets import Normalize
from lightning_rob.rules import random_member
from lightning_rob.runtime.errors import FindingWarning
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise
from tests.attacks.common import images, trained_net

THREAT = Threat("linf", 0.1)
PLAIN = {"pgd": PGD(THREAT, 10, 0.03)}
COUNT = 60


class Around(nn.Module):
    """A network behind a function of its images, with a function of its logits."""

    def __init__(self, before=None, after=None):
        super().__init__()
        self.net = trained_net(1).float().eval()
        self.before, self.after = before or (lambda x: x), after or (lambda z, x: z)

    def forward(self, x):
        return self.after(self.net(self.before(x)), x)


class Turned(torch.autograd.Function):
    """The identity, with a gradient of the wrong sign, or none."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class Adapting(nn.Module):
    """A network that trains its last layer while it predicts."""

    def __init__(self):
        super().__init__()
        self.net = trained_net(1).float().eval()

    def forward(self, x):
        with torch.no_grad():
            self.net.linear.bias += 0.01 * self.net(x).mean(0)
        return self.net(x)


class Training(nn.Module):
    """BatchNorm that eval() does not reach."""

    def __init__(self):
        super().__init__()
        self.net, self.norm = trained_net(1).float().eval(), nn.BatchNorm2d(1)

    def train(self, mode=True):
        self.training = mode
        self.norm.train()
        return self

    def forward(self, x):
        return self.net(self.norm(x) * 0.3 + 0.5)


class Remembering(nn.Module):
    """A network that keeps what it has seen in an object, and draws from numpy and Python."""

    def __init__(self):
        super().__init__()
        self.net, self.seen = trained_net(1).float().eval(), SimpleNamespace(count=np.zeros(1))

    def forward(self, x):
        self.seen.count += len(x)
        return self.net(x) + 1e-9 * (np.random.rand() + random.random())


def at_random(x):
    stream = torch.Generator().manual_seed(0)
    return Turned.apply(x, torch.randn(x[0].shape, generator=stream))


def in_float32_only(x):
    if x.dtype != torch.float32:
        raise ValueError("float32 images only")
    return at_random(x)


def in_pairs(x):
    if len(x) < 2:
        raise ValueError("two images at least")
    return x


def detecting(z, x):
    """An eleventh class for images about which the network is not sure."""
    sure = z.softmax(1).amax(1, keepdim=True) > 0.97
    return torch.cat([z, torch.where(sure, -1e3, 1e3)], 1)


def python_noise(x):
    return x + torch.tensor([random.gauss(0, 0.1) for _ in range(x[0].numel())]).view_as(x[0])


BROKEN = {
    "gradients that are not numbers": (lambda x: Turned.apply(x, float("nan")), None, "blind"),
    "gradients of zero": (lambda x: Turned.apply(x, 0.0), None, "blind"),
    "a turned gradient": (lambda x: Turned.apply(x, -1.0), None, "above_clean"),
    "a gradient at random": (at_random, None, "slope"),
    "a gradient at random, float32 only": (in_float32_only, None, "slope"),
    "a gradient at random in large batches": (
        lambda x: at_random(x) if len(x) > 16 else x,
        None,
        "slope",
    ),
    "a network that fails on one image": (in_pairs, None, "batches"),
    "requires_grad": (None, lambda z, x: z.flip(1) if x.requires_grad else z, "gradients_seen"),
    "grad mode": (
        None,
        lambda z, x: z.roll(1, 1) if torch.is_grad_enabled() else z,
        "gradients_seen",
    ),
    "logits that are huge": (None, lambda z, x: z * 1e30, "saturation"),
    "logits that are tiny": (None, lambda z, x: z * 1e-30, "small_logits"),
    "rounded logits": (None, lambda z, x: z + ((0.1 * z).round() - z).detach(), "ties"),
    "probabilities": (None, lambda z, x: (1e3 * z).softmax(1), "outputs"),
    "noise of Python": (python_noise, None, "randomness"),
    "noise of torch": (lambda x: x + 0.1 * torch.randn_like(x), None, "randomness"),
    "other images of the batch": (None, lambda z, x: z + z.mean(0), "batches"),
    "a class of rejection": (None, detecting, "only_one_class"),
    "labels in another order": (None, lambda z, x: z.roll(1, 1), "below_guessing"),
}


def batch(count=COUNT):
    """Images, one label in ten of which is wrong."""
    x, y = images(count, seed=9)
    y[::10] = (y[::10] + 1) % 4
    return x.float(), y


def names(found):
    return {finding.name for finding in found.findings if finding.flagged}


@pytest.mark.parametrize("name", BROKEN)
def test_a_figure_that_misleads_has_a_finding(name):
    before, after, finding = BROKEN[name]
    net = Around(before, after)
    with pytest.warns(FindingWarning):
        found = evaluate(net, PLAIN, [batch()])
    assert finding in names(found)
    assert finding in found.table()
    recorded = {one["name"]: one for one in found.measurement("worst").details["findings"]}
    condition = "Only if class 4 means that" if finding == "only_one_class" else ""
    assert condition in recorded[finding]["advice"]


@pytest.mark.parametrize("sample", ["few images of each class", "images of one class"])
def test_a_class_that_a_sample_may_lack_is_no_finding(sample):
    x, y = batch(400)
    with torch.no_grad():
        y = Around()(x).argmax(1)  # all are right, so that the attack breaks enough of them
    order = y.argsort(stable=True)
    each = {"few images of each class": 4, "images of one class": 40}[sample]
    kept = [order[y[order] == label][:each] for label in range(4)]
    rows = torch.cat(kept) if each == 4 else kept[0]
    found = evaluate(Around(after=detecting), PLAIN, [(x[rows], y[rows])])
    broken = (found.per_image("clean") > 0.5) & (found.per_image("pgd") < 0.5)
    assert broken.sum() >= 10
    assert "only_one_class" not in names(found)


def test_a_network_made_for_normalized_images_says_so():
    """As timm's networks declare it; their accuracy on other images is wrong without a sign."""
    net = Around()
    net.pretrained_cfg = {"mean": (0.5,), "std": (0.2,)}
    normalize = Normalize(*net.pretrained_cfg.values())
    with pytest.warns(FindingWarning, match="Around was made for images normalized by mean"):
        assert "normalization" in names(evaluate(net, PLAIN, [batch()]))
    random = RandomTransforms(net, {"HorizontalFlip": {"p": 0.5}}, 1, 3)
    with pytest.warns(FindingWarning, match="normalized"):
        assert "normalization" in names(evaluate(random, PLAIN, [batch()], inferences=2))
    assert "normalization" not in names(evaluate(net, PLAIN, [batch()], preprocess=normalize))
    net.pretrained_cfg = {"mean": None, "std": 1.0}  # says nothing
    assert "normalization" not in names(evaluate(net, PLAIN, [batch()]))
    net.pretrained_cfg = {"mean": (0.0,), "std": (1.0,)}
    assert "normalization" not in names(evaluate(net, PLAIN, [batch()]))


def test_dropout_that_was_left_on_is_not_switched_off_without_a_word():
    net = nn.Sequential(nn.Dropout(0.3), Around())
    assert "modes" not in names(evaluate(net, PLAIN, [batch()]))  # a network that forgot eval()
    assert "modes" not in names(evaluate(net.eval(), PLAIN, [batch()]))
    net[0].train()
    with pytest.warns(FindingWarning, match="Dropout was on in a network in eval mode"):
        found = evaluate(net, PLAIN, [batch()])
    assert "severe" in [one.severity for one in found.findings if one.name == "modes"]
    assert net[0].training
    whole = Around().eval()
    whole.attention = nn.MultiheadAttention(4, 1, dropout=0.5)  # in training mode
    with pytest.warns(FindingWarning, match=r"attention \(MultiheadAttention\)"):
        evaluate(whole, PLAIN, [batch()])


def test_randomness_that_is_averaged_over_is_no_finding():
    noisy, attack = Around(lambda x: x + 0.1 * torch.randn_like(x)), PLAIN["pgd"]
    averaged = {"pgd": replace(attack, draws=5)}
    assert "randomness" not in names(evaluate(noisy, averaged, [batch()], inferences=2))
    undrawn = {"start": RandomStart(attack.threat)}  # it has no draws
    for attacks in ("suite", "auto", "autoattack"):
        found = evaluate(noisy, attacks, [batch(12)], eps=float(attack.threat.eps), inferences=2)
        assert "randomness" not in names(found)
        if attacks == "suite":  # that of a random defense
            assert "linear_aggmo" in found.attacks
    for attacks, inferences in ((averaged, 1), (PLAIN, 2), (undrawn, 2)):
        with pytest.warns(FindingWarning):
            found = evaluate(noisy, attacks, [batch()], inferences=inferences)
        assert "randomness" in names(found)


def test_few_images_have_the_same_findings():
    with pytest.warns(FindingWarning):
        assert "slope" in names(evaluate(Around(at_random), PLAIN, [batch(5)]))
        assert "slope" in names(evaluate(Around(at_random), PLAIN, [batch()], group_size=4))


@pytest.mark.filterwarnings("ignore::lightning_rob.runtime.errors.FindingWarning")
@pytest.mark.parametrize(
    "net", [Adapting(), Training(), Remembering()], ids=lambda net: net._get_name()
)
def test_a_network_that_changes_itself_is_left_as_it_was(net):
    before = {name: value.clone() for name, value in net.state_dict().items()}
    (x, y), streams = batch(), (torch.get_rng_state(), random.getstate())
    drawn = np.random.get_state()[2]
    given = x.clone()
    found = evaluate(net, PLAIN | {"square": Square(THREAT, 20)}, [(x, y)])
    report = audit(Single(net), x[:20], y[:20], THREAT, queries=10)
    PGD(THREAT, 2, 0.03)(Single(net), x, y, torch.Generator().manual_seed(0))
    assert "itself" in names(found)
    assert "itself" in {finding.name for finding in report.flags}
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(x, given)
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert np.random.get_state()[2] == drawn
    assert not hasattr(net, "seen") or net.seen.count == 0


HONEST = {
    "a network": lambda: Around(),
    "half precision": lambda: trained_net(1).bfloat16().eval(),
    "an ensemble": lambda: Ensemble([trained_net(1).float(), trained_net(2).float()]),
    "a randomized one": lambda: Ensemble(
        [trained_net(1).float(), trained_net(2).float()], rule=random_member
    ),
    "random transforms": lambda: RandomTransforms(
        trained_net(1).float(), [GaussianNoise(0.1)], 1, 2
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_defense_has_no_finding(name):
    found = evaluate(HONEST[name](), PLAIN, [batch()])
    assert names(found) == set()
    assert found.blind("pgd") == 0


def test_a_pooling_of_a_uniform_background_has_no_finding():
    pairs = [Digits5k().source(train=False)[i] for i in range(16)]
    x, y = torch.stack([image for image, _ in pairs]), torch.tensor([y for _, y in pairs])
    assert (x == 0).float().mean() > 0.5
    assert names(evaluate(lightning_rob.load("zoo:digits_standard"), PLAIN, [(x, y)])) == set()


def log_of_exp(x):
    return torch.where(x > 0, x.log().exp(), torch.zeros_like(x))


L2 = Threat("l2", 0.5)
ATTACKS = {
    "pgd": PGD(THREAT, 10, 0.03),
    "arc": ARC(THREAT, 10),
    "cw": CW(L2, 20, 0.05, 2),
    "ddn": DDN(L2, 20),
    "deepfool": DeepFool(L2),
    "fab": FAB(L2, 10),
}


def test_attacks_recover_where_gradients_fail_at_the_bounds():
    """Black pixels have no gradient: taken just inside, no attack leaves more."""
    x, y = batch()
    x = (3 * x - 1).clamp(0, 1)
    plain = evaluate(Around(), ATTACKS, [(x, y)])
    assert not plain.findings
    for before in (lambda x: x.sqrt() ** 2, log_of_exp, lambda x: x.clamp(0.0, 1.0)):
        found = evaluate(Around(before), ATTACKS, [(x, y)])
        for name in ATTACKS:
            assert found.accuracy(name) <= plain.accuracy(name) + 0.02
            assert found.blind(name) == 0
        notes = [finding.name for finding in found.findings if finding.severity == "note"]
        assert notes == ["recovered"] or torch.equal(found.scores, plain.scores)


def test_blindness_is_counted_on_every_image():
    """Also in small groups, and only of images that are right without an attack."""
    x, y = batch()
    half = torch.arange(COUNT) % 2 == 0
    x[half, 0, 0, 0] = 1.0
    x[~half, 0, 0, 0] = 0.0

    def cut(x):
        seen = x[:, :, :1, :1] > 0.5
        return torch.where(seen, x.detach(), x)

    found = evaluate(Around(cut), PLAIN | {"square": Square(THREAT, 5)}, [(x, y)], group_size=10)
    right = found.per_image("clean") > 0
    assert found.blind("pgd") == pytest.approx(float(half[right].float().mean()))
    assert found.blind("worst") == found.blind("pgd")
    assert np.isnan(found.blind("square"))
    with pytest.raises(KeyError, match="no attack is called"):
        found.blind("clean")
