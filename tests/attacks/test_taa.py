"""Attacks on one sub-model of a transformation ensemble, carried back."""

import copy

import pytest
import torch

from lightning_rob.attacks import CW, PGD, TAA, DeepFool, OnDifferentiable, OnMember, RandomMember
from lightning_rob.defenses import Ensemble
from lightning_rob.objectives import ce_of_mean_probs
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from lightning_rob.transforms.pool import chosen
from tests.attacks.common import images as small_images
from tests.attacks.common import seeded, trained_transforms

LINF, L2 = Threat("linf", 0.1), Threat("l2", 0.8)
FGSM = PGD(LINF, 1, LINF.eps, random_start=False)
INNER = {
    "fgsm": FGSM,
    "bim": PGD(LINF, 5, 0.03, random_start=False),
    "pgd-l2": PGD(L2, 5, 0.2, random_start=False),
    "deepfool": DeepFool(LINF),
    "deepfool-l2": DeepFool(L2, 20, candidates=3, overshoot=1e-6),
    "cw": CW(L2, 20, 0.05, binary_steps=3, initial_const=0.1),
}
every_inner = pytest.mark.parametrize("inner", INNER.values(), ids=INNER.keys())
REVERSIBLE = list(chosen("reversible"))
# every transformation with another attack, so that shifts, the hard ones, meet all of them
PAIRS = [(name, list(INNER.values())[i % len(INNER)]) for i, name in enumerate(REVERSIBLE)]
every_pair = pytest.mark.parametrize(
    ("name", "inner"), PAIRS, ids=[f"{n}-{list(INNER)[i % 6]}" for i, n in enumerate(REVERSIBLE)]
)
NAMES = ["rotate_90", "shift_left", "filter_gaussian", "flip_both", "seg_gradient"]


def images(count, channels=1, seed=0):
    return small_images(count, seed, channels, side=8)


def trained(names, channels=1, steps=30):
    return trained_transforms(names, steps, channels, side=8)


@pytest.fixture(scope="module")
def all_reversible():
    return trained(REVERSIBLE).eval()


@pytest.fixture(scope="module")
def exact(all_reversible):
    return copy.deepcopy(all_reversible).double()


@pytest.fixture(scope="module")
def mixed():
    return trained(NAMES).eval()


def members_right(ensemble, x, y):
    """Return the members that are correct, [M, B], with the same noise in every call."""
    modes = [module.training for module in ensemble.modules()]
    with torch.no_grad():
        right = (
            ensemble.eval().logits(x, Streams.from_index(torch.arange(len(x)), 9)).argmax(-1) == y
        )
    for module, mode in zip(ensemble.modules(), modes, strict=True):
        module.training = mode
    return right


@every_pair
def test_is_the_attack_through_the_transformation(name, inner, exact):
    """The target's network on images of its own space; nothing is spent on what a shift fills."""
    x, y = images(8, seed=6)
    x = x.double()
    through = inner(exact.one(exact.place(name)), x, y, seeded())
    x_adv = TAA(inner, name)(exact, x, y, seeded())
    torch.testing.assert_close(x_adv, through, rtol=0, atol=1e-6)
    assert not torch.equal(x_adv, x)


@every_inner
def test_transformations_that_cannot_be_undone_are_attacked_through(inner, mixed):
    x, y = images(6, seed=7)
    expected = inner(mixed.one(2), x, y, seeded())
    assert torch.equal(TAA(inner, "filter_gaussian")(mixed, x, y, seeded()), expected)
    assert not torch.equal(expected, x)


def test_the_target_falls(all_reversible):
    """And with no limits all of it, however its images are transformed."""
    ensemble = all_reversible
    x, y = images(40, seed=8)
    clean = members_right(ensemble, x, y).float().mean(1)
    assert clean.min() > 0.9
    free = PGD(Threat("linf", 1.0), 20, 0.1)
    for i, name in enumerate(REVERSIBLE):
        left = members_right(ensemble, TAA(FGSM, name)(ensemble, x, y), y)[i].float().mean()
        assert left < clean[i] - 0.2
        assert not members_right(ensemble, TAA(free, name)(ensemble, x, y, seeded()), y)[i].any()


@pytest.mark.parametrize("inner", [FGSM, INNER["deepfool-l2"]], ids=["fgsm", "deepfool-l2"])
def test_without_a_target_the_best_of_all_for_each_image(inner, mixed):
    x, y = images(60, seed=9)
    each = [TAA(inner, i)(mixed, x, y, seeded()) for i in (0, 1, 2, 3)]
    right = torch.stack([members_right(mixed, x_adv, y).sum(0) for x_adv in each])
    assert (right.amin(0) < right[0]).any()
    x_adv = TAA(inner)(mixed, x, y, seeded())
    assert torch.equal(members_right(mixed, x_adv, y).sum(0), right.amin(0))
    earliest = (right == right.amin(0)).int().argmax(0)
    expected = torch.stack(each)[earliest, torch.arange(60)]
    torch.testing.assert_close(x_adv, expected, rtol=0, atol=1e-6)


def test_a_target_that_cannot_be_attacked(mixed):
    x, y = images(2)
    with pytest.raises(RuntimeError, match="seg_gradient has no gradient: attack the members"):
        TAA(FGSM, "seg_gradient")(mixed, x, y)
    with pytest.raises(TypeError, match="none of seg_gradient can be undone or has a gradient"):
        TAA(FGSM)(mixed.one(4), x, y)
    with pytest.raises(ValueError, match="no member is behind 'flip_vertical'"):
        TAA(FGSM, "flip_vertical")(mixed, x, y)
    with pytest.raises(ValueError, match="no member is behind 5"):
        TAA(FGSM, 5)(mixed, x, y)
    for attack in (TAA(FGSM), OnDifferentiable(FGSM)):
        with pytest.raises(TypeError, match="attack on a TransformEnsemble, got Ensemble"):
            attack(Ensemble(mixed.members), x, y)


def test_members_with_a_gradient_are_attacked_all_at_once(mixed):
    x, y = images(40, seed=10)
    adaptive = PGD(LINF, 5, 0.03, objective=ce_of_mean_probs, random_start=False)
    x_adv = OnDifferentiable(adaptive)(mixed, x, y)
    assert torch.equal(x_adv, adaptive(mixed.part([0, 1, 2, 3]), x, y))
    fewer, more = (members_right(mixed, z, y).float().mean() for z in (x_adv, x))
    assert fewer < more - 0.3
    with pytest.raises(TypeError, match="no member has a gradient, of seg_gradient"):
        OnDifferentiable(adaptive)(mixed.one(4), x, y)


def test_strategies_are_those_on_the_members_with_a_gradient(mixed):
    played = OnDifferentiable(RandomMember(FGSM)).strategies(mixed)
    assert [(p, a) for p, a in played] == [
        (pytest.approx(0.25), OnDifferentiable(OnMember(FGSM, i))) for i in range(4)
    ]
