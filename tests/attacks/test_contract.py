"""One contract for every attack: `ENTRIES` holds each class once or twice."""

import copy
import importlib
import inspect
import pkgutil
import re
from dataclasses import FrozenInstanceError, fields, replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import lightning_rob
from lightning_rob import attacks, objectives, transforms
from lightning_rob.attacks import (
    APGD,
    ARC,
    CW,
    DDN,
    FAB,
    GMSA,
    PAA,
    PDGD,
    PGD,
    SGM,
    TAA,
    Accelerated,
    Adam,
    AggMo,
    Attack,
    Auto,
    AutoAttack,
    Budgeted,
    Chunked,
    CommonCorruption,
    DeepFool,
    DoublePrecision,
    FewAttacked,
    FewPixels,
    Foreign,
    HighConfidence,
    InsideBounds,
    LatticeClimber,
    LinBP,
    MinimalNorm,
    Nesterov,
    NoAttack,
    OnDifferentiable,
    OnMember,
    PartialBatchAttack,
    Quantized8Bit,
    RandomCorners,
    RandomMember,
    RandomStart,
    Square,
    Strongest,
    SurrogateGradient,
    Targeted,
    ThroughAdaptation,
    TransferFromStatic,
    Unmasked,
    WithBackward,
    attacking,
)
from lightning_rob.attacks.nested import map_attacks
from lightning_rob.defenses import DENT, Ensemble, RandomTransforms, Single
from lightning_rob.objectives import ce_of_mean_probs, expected_dlr, linear
from lightning_rob.randomness import Streams
from lightning_rob.runtime.errors import NoGradientError
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise
from tests.attacks.common import (
    ConvNet,
    Noisy,
    NonFinite,
    accuracy,
    assert_inside,
    assert_same,
    half_frozen,
    images,
    right,
    seeded,
    snapshot,
    streams,
    trained_net,
    trained_transforms,
)

LINF, L2, L1 = Threat("linf", "32/255"), Threat("l2", 0.7), Threat("l1", 3.5)
STEPS = PGD(LINF, 5, "8/255")
FIXED = replace(STEPS, random_start=False)


def sign_step(model, x, y):
    (gradient,) = torch.autograd.grad(cross_entropy(model(x.requires_grad_()), y), x)
    return (x + LINF.eps * gradient.sign()).clamp(0, 1).detach()


# name -> attack, and the defense of `defense_for` that it is tried on
ENTRIES = {
    "pgd": (STEPS, "ensemble"),
    "pgd-l2": (PGD(L2, 3, 0.25, linear, 2, 2, keep_best=True, momentum=(0, 0.9)), "random"),
    "pgd-l1": (PGD(L1, 10, 1.0), "ensemble"),
    "arc": (ARC(LINF, 3, LINF.eps), "ensemble"),
    "arc-l2": (ARC(L2, 3, 0.4, neighbours=1, random_start=True, early_stop=True), "ensemble"),
    "climb": (LatticeClimber(LINF, 4, LINF.eps / 4), "ensemble"),
    "climb-l2": (LatticeClimber(L2, 8, 0.2), "ensemble"),
    "climb-l1": (LatticeClimber(L1, 8, 1.0), "ensemble"),
    "cw": (CW(L2, 20, 0.05, binary_steps=3, initial_const=0.1), "ensemble"),
    "cw-random": (CW(L2, 20, 0.05, binary_steps=3, initial_const=0.1, draws=2), "random"),
    "deepfool": (DeepFool(LINF), "ensemble"),
    "deepfool-l2": (DeepFool(L2, 20, candidates=1, overshoot=0.1, draws=2), "random"),
    "apgd": (APGD(LINF, 10), "ensemble"),
    "apgd-l2": (APGD(L2, 5, targets=2, restarts=2, draws=2), "random"),
    "apgd-l1": (APGD(L1, 10), "ensemble"),
    "fab": (FAB(LINF, 5, 2), "ensemble"),
    "fab-l2": (FAB(L2, 5, 2), "ensemble"),
    "fab-l1": (FAB(L1, 5, 2), "ensemble"),
    "pdgd": (PDGD(LINF, 20), "ensemble"),
    "ddn": (DDN(L2, 20), "ensemble"),
    "pdgd-l2": (PDGD(L2, 20, objective=linear), "ensemble"),
    "minimal-norm": (MinimalNorm(PGD(LINF, 5, "8/255", early_stop=True), 3), "ensemble"),
    "minimal-norm-l2": (MinimalNorm(APGD(L2, 5, restarts=2), 3), "transformed"),
    "minimal-norm-l1": (MinimalNorm(APGD(L1, 5), 3), "ensemble"),
    "few-pixels": (FewPixels(L2, 8), "ensemble"),
    "few-pixels-l1": (FewPixels(L1, 8), "ensemble"),
    "square": (Square(LINF, 150), "ensemble"),
    "square-l2": (Square(L2, 60), "ensemble"),
    "square-l1": (Square(L1, 60), "ensemble"),
    "autoattack": (
        AutoAttack(LINF, "custom", ("apgd-ce", "square"), queries=10, passes=30),
        "ensemble",
    ),
    "foreign": (Foreign(LINF, sign_step), "ensemble"),
    "taa": (TAA(FIXED), "transformed"),
    "taa-target": (TAA(DeepFool(L2), "rotate_180"), "transformed"),
    "on-differentiable": (OnDifferentiable(STEPS), "transformed"),
    "paa": (PAA(PGD(Threat("linf", 0.1), 2, 0.05)), "transformed"),
    "paa-mean": (PAA(FIXED, "AvgP", 0.5, rounds=3, mean_bound=0.3), "transformed"),
    "gmsa": (GMSA(STEPS, rounds=2), "adapting"),
    "through-adaptation": (ThroughAdaptation(STEPS), "adapting"),
    "transfer": (TransferFromStatic(STEPS), "adapting"),
    "few": (FewAttacked(STEPS, 2), "adapting"),
    "partial-batch": (PartialBatchAttack(STEPS, 0.25), "ensemble"),
    "on-member": (OnMember(STEPS, 1), "ensemble"),
    "random-member": (RandomMember(STEPS), "ensemble"),
    "strongest": (Strongest((STEPS, ARC(LINF, 2, LINF.eps))), "ensemble"),
    "targeted": (Targeted(STEPS), "ensemble"),
    "targeted-random": (Targeted(PGD(LINF, 3, "16/255", draws=2, restarts=2), 2), "random"),
    "high-confidence": (HighConfidence(STEPS, 1, 1), "ensemble"),
    "budgeted": (Budgeted(STEPS, 24), "ensemble"),
    "chunked": (Chunked(STEPS, images=2), "ensemble"),
    "accelerated": (Accelerated(STEPS, autocast="bfloat16"), "ensemble"),
    "8-bit": (Quantized8Bit(STEPS), "ensemble"),
    "corruption": (CommonCorruption(GaussianNoise(alpha=0.8)), "ensemble"),
    "with-backward": (WithBackward(DeepFool(LINF), InsideBounds()), "ensemble"),
    "surrogate": (
        SurrogateGradient(APGD(LINF, 10), ("saturating",), noise=0.01, copies=2),
        "ensemble",
    ),
}

# of the suites and the audit, not searches of their own, so that only some tests are of them
OTHERS = {
    "no-attack": (NoAttack(LINF), "ensemble"),
    "random-corners": (RandomCorners(LINF, 3), "ensemble"),
    "random-start": (RandomStart(L2), "ensemble"),
    "double-precision": (DoublePrecision(STEPS), "ensemble"),
    "auto": (Auto(LINF, 60), "ensemble"),
    "auto-search": (Auto(LINF, 900), "ensemble"),
    "auto-l1": (Auto(L1, 900), "ensemble"),
    "unmasked": (Unmasked(APGD(LINF, early_stop=False), 80), "ensemble"),
    "auto-transformed": (Auto(LINF, 60), "transformed"),
}


def entries(*names, where=lambda attack: True):
    """Parametrise a test by the named entries, or by all of them."""
    listed = ENTRIES | OTHERS
    return pytest.mark.parametrize(
        ("attack", "kind"),
        [
            pytest.param(*listed[name], id=name)
            for name in names or ENTRIES
            if where(listed[name][0])
        ],
    )


# each has a loop of its own
FAMILIES = ("pgd", "apgd", "arc", "climb", "cw", "deepfool", "fab", "pdgd", "square")
IN_L1 = ("apgd-l1", "fab-l1", "square-l1", "pgd-l1", "climb-l1")
IN_L2 = ("apgd-l2", "fab-l2", "square-l2", "deepfool-l2", "arc-l2", "pgd-l2")
OWN_CHECKS = (*FAMILIES, "minimal-norm", "autoattack", "targeted", "high-confidence")


def defense_for(kind):
    """A trained defense of a kind, in training mode, with parameters of its own."""
    first, second = trained_net(1), trained_net(2)
    if kind == "ensemble":
        return Ensemble([first, second], [0.6, 0.4])
    if kind == "random":
        return RandomTransforms(first, [GaussianNoise(alpha=0.1)], size=1, draws=2)
    if kind == "adapting":
        return DENT(first, steps=2)
    return copy.deepcopy(transformed())


@cache
def transformed():
    return trained_transforms(("rotate_180", "filter_gaussian", "flip_both"))


@pytest.fixture
def defense(kind):
    return defense_for(kind)


@pytest.fixture
def pair():
    return defense_for("ensemble")


def test_every_attack_is_in_the_list():
    """Each concrete class of the package, also one defined outside of `attacks`."""
    found, waiting = set(), [Attack]
    for module in pkgutil.walk_packages(lightning_rob.__path__, "lightning_rob."):
        if module.name != "lightning_rob.__main__":
            importlib.import_module(module.name)
    while waiting:
        found |= (new := set(waiting.pop().__subclasses__()) - found)
        waiting += new
    ours = {cls for cls in found if cls.__module__.startswith("lightning_rob.")}
    ours = {cls for cls in ours if not inspect.isabstract(cls)}
    assert ours == {type(attack) for attack, _ in (ENTRIES | OTHERS).values()}
    assert {cls.__name__ for cls in ours} <= vars(attacks).keys()


# images
@entries()
def test_lowers_accuracy_in_the_threat_leaves_nothing_behind_and_repeats_itself(
    attack, defense, capfd
):
    """The second time in inference mode, and another number drawn between."""
    x, y = images(40, seed=6)
    clean = accuracy(defense, x, y)
    assert clean > 0.8
    before = snapshot(half_frozen(defense))
    x[0, 0, 0] = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    given = x.clone(), y.clone()
    x_adv = attack(defense, x, y, seeded(3))
    assert_inside(attack.threat, x_adv, x)
    assert not torch.equal(x_adv, x)
    assert not x_adv.requires_grad
    assert_same(before, snapshot(defense))
    assert torch.equal(x, given[0])
    assert torch.equal(y, given[1])
    assert x.grad is None
    assert capfd.readouterr() == ("", "")
    torch.rand(5)
    with torch.inference_mode():
        again = attack(defense, x.clone(), y.clone(), seeded(3))
        assert accuracy(defense, again, y) == accuracy(defense, x_adv, y)
    assert torch.equal(again, x_adv)
    assert not again.is_inference()
    assert accuracy(defense.adapt(x_adv, seeded()), x_adv, y) < clean - 0.1


@entries(where=lambda attack: not attack.batch_dependent)
def test_result_depends_on_the_image_alone(attack, defense):
    """However a data set is cut, ordered or spread over processes: the same images."""
    x, y = images(5, seed=10)
    # In float64, where an image's arithmetic hardly depends on the shape of its batch.
    defense, x, index = defense.double(), x.double(), torch.arange(100, 105)
    whole = attack(defense, x, y, Streams.from_index(index, 7))
    assert whole.dtype == torch.float64
    for part in torch.tensor([3, 0, 2, 4, 1]).split([1, 4]):
        alone = attack(defense, x[part], y[part], Streams.from_index(index[part], 7))
        torch.testing.assert_close(alone, whole[part], rtol=0, atol=1e-9)


@entries("apgd", "cw", "deepfool", "fab", "pdgd", "ddn", "square", "minimal-norm")
def test_misclassified_images_stay(attack, defense):
    """Of attacks that stop at the first success."""
    defense, (x, y) = Single(defense.members[0]), images(12, seed=3)
    y[::2] = (defense.eval()(x).argmax(1)[::2] + 1) % 4
    x_adv = attack(defense, x, y, seeded())
    assert torch.equal(x_adv[::2], x[::2])
    assert not torch.equal(x_adv[1::2], x[1::2])


SMALL = Threat("linf", 0.08)
ONCE, HALF, HALF_L2 = PGD(LINF, 1, "8/255"), Threat("linf", "12/255"), Threat("l2", 0.25)
MORE = {
    "restarts": (APGD(SMALL, 1), APGD(SMALL, 1, restarts=9)),
    "targets": (APGD(SMALL, 1, targets=1), APGD(SMALL, 1, targets=3)),
    "targets of FAB": (FAB(HALF, 10, 1), FAB(HALF, 10, 3)),
    "targets of FAB in l2": (FAB(HALF_L2, 10, 1), FAB(HALF_L2, 10, 3)),
    "queries": (Square(LINF, 30), Square(LINF, 300)),
    "queries in l2": (Square(L2, 30), Square(L2, 300)),
    "attacks": (
        AutoAttack(HALF, "custom", ("square",), queries=30),
        AutoAttack(HALF, "custom", ("apgd-ce", "square"), queries=30),
    ),
    "the same thrice": (ONCE, Strongest((ONCE, ONCE, ONCE))),
}


@pytest.mark.parametrize("name", MORE)
def test_more_is_never_weaker(name):
    """Image by image: what is added attacks the images that are left, with noise of its own."""
    defense, (x, y) = Single(trained_net(1)), images(100, seed=2)
    left = [right(defense, attack(defense, x, y, streams(x)), y) for attack in MORE[name]]
    assert (left[1] <= left[0]).all()
    assert left[1].sum() < right(defense, x, y).sum()
    # on these images further targets and restarts of FAB find nothing
    assert "FAB" in name or name == "targets" or left[1].sum() < left[0].sum()


def of_radius(attack, eps):
    """The attack and its parts within a ball of another radius, with the same steps."""
    return map_attacks(
        attack,
        lambda part: (
            {"threat": replace(part.threat, eps=eps)}
            if any(field.name == "threat" for field in fields(part))
            else {}
        ),
    )


@entries(*FAMILIES, *IN_L1, *IN_L2, "taa-target", "high-confidence", "8-bit")
def test_no_radius_no_change(attack, defense):
    x, y = images(5, seed=8)
    x = (x * 255).round() / 255
    assert torch.equal(attack.rescaled(0.0)(defense, x, y, seeded()), x)


@entries(*FAMILIES)
def test_without_limits_nothing_is_left(attack, defense):
    """A radius that reaches every image: an attack that is not blind gets to zero."""
    eps = 1.0 if attack.threat.norm == "linf" else 6.0
    steps = {name: eps if isinstance(attack, ARC) else eps / 8 for name in attack.lengths}
    steps |= {"queries": 150} if isinstance(attack, Square) else {"steps": 40}
    if isinstance(attack, CW | DDN | DeepFool | FAB | PDGD | Square):
        defense = Single(defense.members[0])  # these stop at the boundary of the members' mean
        steps = {} if isinstance(attack, CW | DeepFool) else steps
    x, y = images(40, seed=7)
    x_adv = replace(of_radius(attack, eps), **steps)(defense, x, y, seeded())
    assert accuracy(defense, x_adv, y) == 0


@entries(*FAMILIES, *IN_L1, *IN_L2)
def test_stays_inside_other_bounds(attack, defense):
    """Bounds whose differences are not exact in single precision."""
    x, y = images(16, seed=5)
    low, high = (torch.tensor(value).item() for value in (-0.1, 0.7))
    shifted = low + (high - low) * (3 * x - 1).clamp(0.03, 0.97)
    threat = replace(attack.threat, bounds=(low, high))
    assert_inside(threat, replace(attack, threat=threat)(defense, shifted, y, seeded()), shifted)


# type of the images, of the network, of its logits, torch's default; the images' strides, output
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
MIXTURES = {
    "double network": (F32, F64, F64, F32, "transposed", lambda logits: {"logits": logits}),
    "double images": (F64, F32, F32, F32, "sliced", lambda logits: SimpleNamespace(logits=logits)),
    "double logits": (F32, F32, F64, F32, "plain", torch.clone),
    "default double": (F32, F32, F32, F64, "transposed", torch.clone),
    "bfloat16 network": (F32, BF16, BF16, F32, "sliced", torch.clone),
}
STRIDES = {
    "plain": lambda x: x,
    "sliced": lambda x: torch.stack([x, x], -1)[..., 0],
    "transposed": lambda x: x.mT.contiguous().mT,  # as of channels last, no `view` flattens it
}


# Each attack with a loop of its own in every mixture, the others in one.
MIXED = [
    (name, mixture)
    for i, name in enumerate(ENTRIES | OTHERS)
    for j, mixture in enumerate(MIXTURES)
    if name in FAMILIES or j == i % 5
]


@pytest.mark.parametrize(("name", "mixture"), MIXED)
def test_any_mixture_of_types_strides_and_outputs(name, mixture):
    attack, kind = (ENTRIES | OTHERS)[name]
    defense = defense_for(kind)
    dtype, network, logits, default, strides, output = MIXTURES[mixture]
    x, y = images(4, seed=31)
    x = STRIDES[strides](x.to(dtype))
    for net in defense.to(network).modules():
        if isinstance(net, ConvNet):
            net.register_forward_hook(lambda net, x, found: output(found.to(logits)))
    torch.set_default_dtype(default)
    try:
        x_adv = attack(defense, x, y, seeded())
    finally:
        torch.set_default_dtype(torch.float32)
    assert_inside(attack.threat, x_adv, x)
    assert isinstance(attack, NoAttack) == torch.equal(x_adv, x)


@pytest.mark.parametrize(
    "attack",
    [ENTRIES[name][0] for name in (*FAMILIES, "arc-l2", "climb-l2", "pdgd-l2", "minimal-norm")]
    + [PGD(L2, 3, 0.25), APGD(L2, 5), APGD(L2, 5, targets=2), FAB(L2, 5, 2)]
    + [DeepFool(L2, 5), Square(L2, 20), Auto(LINF, 60), PGD(L2, 3, 0.25, random_start=False)],
    ids=lambda attack: type(attack).__name__,
)
def test_images_in_half_precision_without_a_gradient(attack, pair):
    """Guards of divisions such as 1e-30 are 0 in float16."""
    x, y = images(4, seed=31)
    for net in pair.half().modules():
        if isinstance(net, ConvNet):
            net.register_forward_hook(lambda net, x, found: 0 * found - torch.arange(4))
    x_adv = attack(pair, x.half(), torch.zeros_like(y), seeded())
    assert x_adv.dtype == torch.float16
    assert (x_adv - x.half()).isfinite().all()
    assert ((x_adv >= 0) & (x_adv <= 1)).all()


@entries(*FAMILIES)
def test_member_of_no_weight_is_not_attacked(attack, defense):
    """A member that never predicts changes nothing: alpha = (1, 0) is one network."""
    x, y = images(30, seed=22)
    defense, x = defense.double(), x.double()
    idle = Ensemble([*defense.members], [1.0, 0.0])
    expected = attack(Single(defense.members[0]), x, y, seeded())
    torch.testing.assert_close(attack(idle, x, y, seeded()), expected, rtol=0, atol=1e-9)


def test_no_images(pair):
    x, y = images(2)
    assert STEPS(pair, x[:0], y[:0], seeded()).shape == (0, 1, 6, 6)


# randomness
@entries("pgd", "apgd", "arc-l2", "autoattack")
def test_randomness_is_the_generator(attack, defense):
    x, y = images(6, seed=9)
    assert not torch.equal(attack(defense, x, y, seeded(3)), attack(defense, x, y, seeded(4)))
    torch.manual_seed(3)  # without a generator it is torch's global one
    first = attack(defense, x, y)
    torch.manual_seed(3)
    assert torch.equal(attack(defense, x, y), first)
    with pytest.raises(ValueError, match="3 random streams for 6 images"):
        attack(defense, x, y, Streams.from_index(torch.arange(3)))


# what an attack leaves behind
@entries(where=lambda attack: not isinstance(attack, CommonCorruption))
def test_leaves_nothing_behind_when_it_fails(attack, defense, monkeypatch):
    """The network raises at the second call: every attack needs more than one."""
    half_frozen(defense)
    x, y = images(4, seed=15)
    before, calls, forward = snapshot(defense), [], ConvNet.forward

    def fails(net, x):
        calls.append(len(x))
        if len(calls) > 1:
            raise ArithmeticError("on purpose")
        return forward(net, x)

    monkeypatch.setattr(ConvNet, "forward", fails)
    with pytest.raises(ArithmeticError):
        attack(defense, x, y, seeded())
    assert_same(before, snapshot(defense))


@entries(*(name for name in ENTRIES if not name.endswith(("-l1", "-l2", "-mean", "-target"))))
def test_training_step_under_autocast(attack, defense):
    x, y = images(16, seed=19)
    with torch.autocast("cpu", torch.bfloat16):
        before = snapshot(defense)
        x_adv = attack(defense, x, y, seeded())
        assert_same(before, snapshot(defense))
        logits = defense.logits(x_adv, seeded())
        assert logits.dtype == torch.float32
        assert torch.equal(logits, logits.bfloat16().float())  # what autocast's layers return
        loss = sum(cross_entropy(z, y) for z in logits)
    assert_inside(attack.threat, x_adv, x)
    loss.backward()
    for name, parameter in defense.named_parameters():
        assert parameter.grad is not None, name


def test_weights_cast_before_the_attack_keep_their_gradient(pair):
    """Clean and adversarial images in one step under autocast, as TRADES and TADV have it."""
    net, (x, y) = pair.eval().members[0], images(16, seed=20)
    with torch.autocast("cpu", torch.bfloat16):
        clean = cross_entropy(net(x), y)
        x_adv = STEPS(pair, x, y, seeded())
        adversarial = cross_entropy(net(x_adv), y)
    (clean + adversarial).backward()
    both = net.linear.weight.grad.clone()
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        total = sum(cross_entropy(net(z), y) for z in (x, x_adv))
    total.backward()
    torch.testing.assert_close(both, net.linear.weight.grad, rtol=0.02, atol=1e-3)


def test_attacking_can_be_nested(pair):
    before = snapshot(half_frozen(pair))
    with attacking(pair) as attacked:
        assert not any(m.training for m in attacked.modules() if type(m) is not nn.Identity)
        assert not any(p.requires_grad for p in attacked.parameters())
        with torch.no_grad(), attacking(attacked.members[0]) as inner:
            assert inner is attacked.members[0]
            assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert not any(p.requires_grad for p in attacked.parameters())
        assert any(m.training for m in pair.modules())
        assert any(p.requires_grad for p in pair.parameters())
    assert_same(before, snapshot(pair))


# attacks as values
@entries()
def test_is_a_frozen_value_and_its_repr_builds_it(attack, kind):
    same = replace(attack)
    assert same == attack
    assert hash(same) == hash(attack)
    with pytest.raises(FrozenInstanceError):
        setattr(attack, fields(attack)[0].name, None)
    names = vars(attacks) | vars(objectives) | vars(transforms)
    names |= {"Threat": Threat, "sign_step": sign_step}
    recipe = re.sub(r"<function (\w+) at 0x\w+>", r"\1", repr(attack))
    assert eval(recipe, names) == attack


@entries(where=lambda attack: not isinstance(attack, CommonCorruption | Foreign))
def test_another_radius(attack, defense):
    x, y = images(4, seed=18)
    half = attack.rescaled(attack.threat.eps / 2)
    assert half.threat == replace(attack.threat, eps=attack.threat.eps / 2)
    assert_inside(half.threat, half(defense, x, y, seeded()), x)
    again = half.rescaled(attack.threat.eps)
    assert again == attack
    for name in attack.lengths:
        assert getattr(half, name) == pytest.approx(getattr(attack, name) / 2)


# errors
@entries(*OWN_CHECKS)
def test_what_no_attack_can_take_is_refused_and_leaves_nothing_behind(attack, defense):
    """One member of NaN would shield the others; one logit can only be right."""
    x, y = images(4, seed=26)
    nan = Ensemble([defense.members[0], NonFinite(defense.members[1])])
    one = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 1))
    for refused, labels, message in (
        (nan, y, "logits are not numbers on 4 of 4 images"),
        (Ensemble([one, one]), 0 * y, "two logits or more, got 1: of a single logit z make"),
        (defense, y - 4 * (y == y[1]), r"labels must be 0 … 3 for 4 classes, got"),
        (defense, y + 4 * (y == y[1]), r"labels must be 0 … 3 for 4 classes, got"),
    ):
        before = snapshot(refused)
        with pytest.raises(ValueError, match=message):
            attack(refused, x, labels, seeded())
        assert_same(before, snapshot(refused))


NO_GRADIENT = {
    "numpy": lambda z: torch.tensor(z.detach().numpy()),
    "one-hot": lambda z: nn.functional.one_hot(z.argmax(-1), 4).float(),
}


@pytest.mark.parametrize("cut", NO_GRADIENT.values(), ids=NO_GRADIENT.keys())
@entries(
    *(name for name in OWN_CHECKS if not name.startswith("square")), "ddn", "foreign", "fab-l2"
)
def test_no_gradient_at_all(attack, defense, cut):
    """What cannot work says what can."""
    x, _ = images(4, seed=24)
    for net in defense.members:
        net.register_forward_hook(lambda net, x, logits: cut(logits))
    with pytest.raises(NoGradientError, match=r"^no gradient leads .* Square.*BPDA.*audit"):
        attack(defense, x, defense.adapt(x)(x).argmax(1), seeded())


X, Y = images(4, seed=25)
BAD_INPUT = {
    "above": (STEPS, X + 0.6, Y, r"images must lie in \[0.0, 1.0\], got values in \["),
    "normalised": (STEPS, (X - 0.5) / 0.25, Y, r"images must lie in \[0.0, 1.0\]"),
    "nan": (STEPS, X / 0 * 0, Y, r"images must lie in \[0.0, 1.0\]"),
    "bytes": (STEPS, (X * 255).byte(), Y, "images must be floating point .* torch.uint8"),
    "no batch": (STEPS, X[0, 0, 0], Y, r"images must be a batch \[B, …\], got shape \[6\]"),
    "labels": (STEPS, X, Y[:-1], r"4 images need labels \[4\], got \[3\]"),
    "column": (STEPS, X, Y[:, None], r"4 images need labels \[4\], got \[4, 1\]"),
    "one label": (STEPS, X, Y[0], r"4 images need labels \[4\], got \[\]"),
    "twice": (STEPS, X, Y.repeat(2), r"4 images need labels \[4\], got \[8\]"),
    "norm": (PGD(Threat(3, 0.1), 2, 0.1), X, Y, "for linf, l2 and l1, not for norm l3"),
}


@pytest.mark.parametrize(("attack", "x", "y", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input(pair, attack, x, y, message):
    """Images and labels are checked once for all attacks, before any begins."""
    with pytest.raises(ValueError, match=message):
        attack(pair, x, y, seeded())


@entries(where=lambda attack: not isinstance(attack, Foreign))
def test_counts_lengths_and_norms_are_checked_as_an_attack_is_built(attack, kind):
    for name in {field.name for field in fields(attack)} & {"steps", "restarts", "draws"}:
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            replace(attack, **{name: 0})
    for name in attack.lengths:
        with pytest.raises(ValueError, match=f"{name} must be positive, got -1"):
            replace(attack, **{name: -1})
    own = APGD | ARC | AutoAttack | CW | DDN | DeepFool | FAB | LatticeClimber | PDGD | Square
    if isinstance(attack, own):
        with pytest.raises(ValueError, match=f"{type(attack).__name__} is for .*l2.*, not l3"):
            replace(attack, threat=Threat(3))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CW(LINF), "CW is for l2, not linf"),
        (lambda: ARC(L2, 1, 0.1, start=STEPS), "start must be an attack within l2 0.7, got"),
        (lambda: Square(SMALL, start=STEPS), "start must be an attack within linf 0.08, got"),
        (lambda: PGD(LINF, 1, 0.1, restarts=2, random_start=False), "2 restarts without random_"),
        (lambda: PGD(LINF, 1, 0.1, momentum=(0.9,), ascent=Adam()), "or Adam.*, not both"),
        (lambda: AggMo(variant="sum"), "variant must be of .*'paper'.* got 'sum'"),
        (lambda: LatticeClimber(Threat("l2", 0.1, relative=True)), "a radius in pixel units"),
        (lambda: AutoAttack(LINF, "best"), "version must be of .* got 'best'"),
        (lambda: AutoAttack(LINF, attacks=("fab-t",)), r"for version 'custom', .*'fab-t'"),
        (lambda: AutoAttack(LINF, "custom", ("pgd", "fab-t")), r"must be of .*, got \['pgd'\]"),
        (lambda: Targeted(Chunked(STEPS, 3)), "put Chunked around Targeted"),
        (lambda: CW(L2, step_size=-1), "step_size must be at least 0"),
        (lambda: CW(L2, confidence=-1), "confidence must be at least 0"),
        (lambda: DDN(L2, gamma=2), "gamma must be in"),
        (lambda: DeepFool(L2, overshoot=-0.1), "overshoot must be at least 0"),
        (lambda: HighConfidence(STEPS, untargeted=0, targeted=0), "must be at least 1: no run"),
        (lambda: Square(LINF, p=1.5), "p must be in"),
        (lambda: PGD(LINF, 5, 0.05, momentum=(2.0,)), "momentum must be in"),
        (lambda: AggMo((0.9, -0.1)), "momentum must be in"),
        (lambda: Nesterov(1.5), "momentum must be in"),
        (lambda: Adam((0.9, 1.1)), "betas must be in"),
        (lambda: SGM(-1), "gamma must be in"),
        (lambda: LinBP(1.5), "start must be in"),
        (lambda: InsideBounds(0.7), "hair must be in"),
        (lambda: SurrogateGradient(STEPS, noise=0.1), "give noise with copies or pairs"),
        (lambda: SurrogateGradient(STEPS, slopes=("round",)), r"slopes must be of .*'round'"),
        (lambda: PAA(FIXED, "SumP"), r"aggregate must be of \['MaxP'.*got 'SumP'"),
        (lambda: PGD(Threat(), 20, 2), r"a step of 2 crosses all images: did you mean 2/255"),
        (lambda: HighConfidence(replace(STEPS, objective=ce_of_mean_probs)), "a mean or a least"),
    ],
)
def test_wrong_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("attack", "classes", "message"),
    [
        (APGD(LINF, 5, expected_dlr), 2, "DLR needs three classes or more, the defense has 2"),
        (APGD(LINF, 5, targets=1), 3, "targeted DLR needs four classes or more, the defense has 3"),
        (
            AutoAttack(LINF, "custom", ("apgd-ce", "apgd-t", "square")),
            2,
            r"apgd-t needs 4 classes .* 2: .*\('apgd-ce', 'square'\)",
        ),
        (Targeted(STEPS, 5), 5, "rank must be 1 … 4 of 5 classes, got 5"),
    ],
)
def test_too_few_classes(attack, classes, message):
    net, (x, _) = nn.Sequential(nn.Flatten(), nn.Linear(36, classes)), images(4)
    with pytest.raises(ValueError, match=message):
        attack(Single(net), x, net(x).argmax(1), seeded())


def test_what_an_attack_cannot_take(pair):
    with pytest.raises(TypeError, match=r"attacks are on a Defense, got ConvNet: wrap .* Single"):
        STEPS(trained_net(1), *images(2))
    with pytest.raises(TypeError, match=r"Noisy is not a fixed set of classifiers.*PGD"):
        ARC(LINF, 3, LINF.eps)(Noisy(pair.members[0]), *images(2))
    for attack in (PDGD(L2, 2), DDN(L2, 2), MinimalNorm(PGD(L2, 2, 0.1))):
        message = f"{type(attack).__name__} is for fixed classifiers, not for RandomTransforms"
        with pytest.raises(TypeError, match=message):
            attack(defense_for("random"), *images(2), seeded())
