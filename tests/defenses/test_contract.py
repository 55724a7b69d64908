import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_rob.defenses import (
    Defense,
    Ensemble,
    Mixture,
    RandomTransforms,
    Single,
    Smoothing,
    TransformEnsemble,
    is_transform_ensemble,
    random_transforms_in,
)
from lightning_rob.defenses.urejectron import URejectron
from lightning_rob.randomness import Streams, normal
from lightning_rob.rules import VOTING_RULES, mean_probs

RULES = [*VOTING_RULES.values()]


def net(seed, classes=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, classes))


def images(batch=20, seed=0):
    return torch.rand((batch, 3, 2, 2), generator=torch.Generator().manual_seed(seed))


class Jitter(Defense):
    """A random defense: S noisy looks at each image."""

    def __init__(self, inner, looks, rule=mean_probs):
        super().__init__(torch.full((looks,), 1 / looks), rule)
        self.inner = inner

    def logits(self, x, generator=None):
        looks = [x + 0.3 * normal(x, *x.shape[1:], generator=generator) for _ in self.weights]
        return torch.stack([self.inner(look) for look in looks])


# one network
def test_single():
    inner, x = net(0), images()
    for rule in RULES:
        defense = Single(inner, rule)
        assert defense.weights.tolist() == [1.0]
        assert torch.equal(defense.logits(x)[0], inner(x))
        assert torch.equal(defense(x).argmax(1), inner(x).argmax(1)), rule
        assert defense.classifiers == [inner]
        assert defense.rule is rule


# ensembles
def test_ensemble_predicts_with_its_members_probabilities():
    members, x = [net(s) for s in range(3)], images()
    probs = [0.5, 0.3, 0.2]
    defense = Ensemble(members, probs)
    logits = defense.logits(x)
    assert logits.shape == (3, 20, 3)
    for member, draw in zip(members, logits, strict=True):
        assert torch.equal(draw, member(x))
    answers = defense(x)
    for b in range(20):
        expected = [0.0, 0.0, 0.0]
        for i, member in enumerate(members):
            expected[int(member(x[b : b + 1]).argmax())] += probs[i]
        assert answers[b].tolist() == pytest.approx(expected, abs=1e-6)
    assert len({tuple(row) for row in answers.tolist()}) > 3


def test_ensemble_predicts_by_its_rule():
    members, x = [net(s) for s in range(3)], images()
    for rule in RULES:
        defense = Ensemble(members, [0.5, 0.3, 0.2], rule)
        assert torch.equal(defense(x), rule(defense.logits(x), torch.tensor([0.5, 0.3, 0.2])))


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        ([0.5, 0.6], "probs must sum to 1, got 1.1"),
        ([float("nan"), 1.0], "probs must not be negative, got"),
        ([[0.5, 0.5]], "2 members need 2 probs, got"),
    ],
)
@pytest.mark.parametrize("kind", [Ensemble, Mixture])
def test_wrong_probabilities(kind, probs, message):
    parts = [net(0), net(1)] if kind is Ensemble else [Single(net(0)), Single(net(1))]
    with pytest.raises(ValueError, match=message):
        kind(parts, probs)


# mixtures
def test_mixture_lays_draws_side_by_side():
    pair, x = Ensemble([net(0), net(1)], [0.9, 0.1], mean_probs), images()
    one = Single(net(2))
    defense = Mixture([pair, one], [0.4, 0.6])
    assert defense.weights.tolist() == pytest.approx([0.36, 0.04, 0.6])
    assert torch.equal(defense.logits(x), torch.cat([pair.logits(x), one.logits(x)]))
    assert defense.classifiers == [*pair.classifiers, *one.classifiers]
    expected = 0.4 * pair(x) + 0.6 * one(x)
    torch.testing.assert_close(defense(x), expected)


def test_only_the_drawn_part_of_a_mixture_may_reject():
    rejecting = URejectron(net(0), source=(images(), torch.zeros(len(images())).long()))
    Mixture([rejecting, rejecting])
    with pytest.raises(ValueError, match="which only the rule random_member uses"):
        Mixture([rejecting, rejecting], rule=mean_probs)


def test_mixture_hands_the_generator_on():
    jitter = Jitter(net(0), 4)
    defense, x = Mixture([jitter, Single(net(1))], [0.5, 0.5]), images()
    one = defense.logits(x, torch.Generator().manual_seed(0))
    assert one.shape == (5, 20, 3)
    assert torch.equal(defense.logits(x, torch.Generator().manual_seed(0)), one)
    assert not torch.allclose(defense.logits(x, torch.Generator().manual_seed(1))[:4], one[:4])
    assert torch.equal(defense.logits(x)[4], one[4])


# what holds for every defense
FLIPS = {"HorizontalFlip": {"p": 0.5}, "VerticalFlip": {}}
DEFENSES = {
    "single": lambda: Single(net(0)),
    "ensemble": lambda: Ensemble([net(0), net(1)], [0.9, 0.1]),
    "mixture": lambda: Mixture([Single(net(0)), Ensemble([net(1), net(2)])]),
    "random_transforms": lambda: RandomTransforms(net(0), FLIPS, 2, 5),
    "smoothing": lambda: Smoothing(net(0), 0.2, 5),
    "transform_ensemble": lambda: TransformEnsemble([net(0), net(1)], ["clean", "noise_gaussian"]),
    "other": lambda: Jitter(net(0), 5),
}
every_defense = pytest.mark.parametrize("build", DEFENSES.values(), ids=DEFENSES.keys())


@pytest.mark.parametrize("name", DEFENSES)
def test_a_defense_says_what_others_need_to_know(name):
    defense = DEFENSES[name]()
    assert len(defense.names) == len(set(defense.names)) == len(defense.weights)
    assert sum(p for p, _ in defense.components()) == pytest.approx(1)
    assert [part for _, part in defense.components()] == getattr(defense, "defenses", [defense])
    known = {"random_transforms": list(FLIPS), "transform_ensemble": ["clean", "noise_gaussian"]}
    assert list(defense.transforms) == known.get(name, [])
    assert random_transforms_in(Mixture([defense])) == [defense] * (name == "random_transforms")
    assert is_transform_ensemble(defense) == (name == "transform_ensemble")


@every_defense
def test_predictions_are_probabilities_of_each_image_alone(build):
    defense, x = build().eval(), images(8)
    answers = defense(x, Streams.from_index(torch.arange(8)))
    torch.testing.assert_close(answers.sum(1), torch.ones(8))
    order = torch.tensor([5, 0, 7])
    torch.testing.assert_close(defense(x[order], Streams.from_index(order)), answers[order])
    assert defense(x[:0]).shape == (0, 3)


@every_defense
def test_weights_are_no_part_of_the_checkpoint(build):
    defense = build()
    assert not [name for name in defense.state_dict() if "weights" in name]
    assert not defense.weights.requires_grad
    assert all(p is not defense.weights for p in defense.parameters())
    moved = defense.to("meta")  # and yet they travel with the network
    assert {p.device.type for p in (*moved.parameters(), moved.weights)} == {"meta"}


@every_defense
def test_copies_predict_alike(build):
    defense, x = build(), images()
    answers = defense(x, torch.Generator().manual_seed(0))
    for other in (copy.deepcopy(defense), pickle.loads(pickle.dumps(defense))):
        assert torch.equal(other(x, torch.Generator().manual_seed(0)), answers)
        assert other.rule is defense.rule


@pytest.mark.parametrize("build", [DEFENSES["ensemble"], DEFENSES["other"]])
def test_weights_still_sum_to_one_in_half_precision(build):
    weights = build().bfloat16().weights.float()
    assert weights.sum().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Mixture([Single(net(0)), d])])
def test_random_defense_has_no_fixed_classifiers(wrap):
    with pytest.raises(TypeError, match=r"Jitter is not a fixed set of classifiers: .*PGD"):
        wrap(Jitter(net(0), 3)).classifiers  # noqa: B018


@pytest.mark.parametrize(
    "wrap", [Single, lambda rt: Ensemble([rt, rt]), lambda rt: RandomTransforms(rt, FLIPS, 1, 1)]
)
def test_a_defense_in_the_place_of_a_network_is_refused(wrap):
    """Its predictions are one-hot, from the global random stream: no gradient, no seed."""
    with pytest.raises(TypeError, match="is a defense, not a network"):
        wrap(RandomTransforms(net(0), FLIPS, 1, 2))
