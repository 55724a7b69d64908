"""GMSA on scripted defenses, and PGD on several models, against hand-written references."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_rob.attacks import GMSA, PGD, Attack
from lightning_rob.attacks.contexts import attacking
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.defenses import Defense, Ensemble, Mixture, RandomTransforms, Single
from lightning_rob.defenses.copies import original
from lightning_rob.objectives import (
    TargetedMargin,
    ce_of_mean_probs,
    ce_of_votes,
    confident,
    expected_ce,
    min_confidence,
    worst_ce,
)
from lightning_rob.randomness import Streams
from lightning_rob.rules import majority, mean_probs
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise

LINF = Threat("linf", 0.1)
PLAIN = PGD(LINF, 6, 0.03, random_start=False, keep_best=True)


def net(seed, channels=3):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(channels * 64, 12), nn.ReLU(), nn.Linear(12, 5)
        )


def batch(count=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, 8, 8, generator=generator), torch.arange(count) % 5


def authors_loop(nets, x, y, steps, least):
    """Best iterate of sign ascent on the sum, or per image the least, of the models' losses."""

    def losses(images):
        return torch.stack([cross_entropy(model(images), y, reduction="none") for model in nets])

    def objective(images):
        return losses(images).amin(0) if least else losses(images).sum(0)

    best, best_value, x_adv = x, objective(x), x
    for _ in range(steps):
        leaf = x_adv.clone().requires_grad_()
        value = objective(leaf)
        (gradient,) = torch.autograd.grad(value.mean(), leaf)
        wins = (value > best_value)[:, None, None, None]
        best = torch.where(wins, x_adv, best)
        best_value = torch.maximum(value, best_value)
        x_adv = (x + (x_adv + 0.03 * gradient.sign() - x).clamp(-0.1, 0.1)).clamp(0, 1).detach()
    wins = (objective(x_adv) > best_value)[:, None, None, None]
    return torch.where(wins, x_adv, best).detach()


@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_model_space_by_hand(count, least):
    nets, (x, y) = [net(seed) for seed in range(count)], batch()
    space = Mixture([Single(model) for model in nets])
    attack = replace(PLAIN, objective=worst_ce if least else expected_ce)
    torch.testing.assert_close(
        attack(space, x, y), authors_loop(nets, x, y, 6, least), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    "objective",
    [expected_ce, worst_ce, confident, min_confidence, TargetedMargin(2, "min"), ce_of_mean_probs],
)
def test_part_by_part_is_the_same_as_all_at_once(objective):
    """With parts that draw, too: they draw the same."""
    noisy = RandomTransforms(net(3), [GaussianNoise(alpha=0.3)], size=1, draws=3)
    space = Mixture([Single(net(1)), noisy, Single(net(2))], [0.2, 0.5, 0.3])
    x, y = batch()
    index = torch.arange(len(x))
    with attacking(space) as space:
        part_by_part = ObjectiveGradient(objective)(space, x, y, Streams.from_index(index, 1))
        leaf = x.clone().requires_grad_()
        expected = ObjectiveGradient(objective).value(space, leaf, y, Streams.from_index(index, 1))
        (whole,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(part_by_part.value, expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(part_by_part.gradient, whole, rtol=1e-4, atol=1e-6)


def test_the_loss_of_a_vote_is_one_of_each_model():
    """Adapted ensembles vote by themselves: their votes are not counted together."""
    x, y = batch()
    voters = [Ensemble([net(i), net(i + 1), net(i + 2)], rule=majority) for i in (0, 3)]
    space, objective = Mixture(voters, [0.25, 0.75]), ObjectiveGradient(ce_of_votes)
    with attacking(space) as space:
        first, second = (objective(part, x, y, None) for part in space.defenses)
        found, value = objective(space, x, y, None), objective.value(space, x, y, None)
    expected = 0.25 * first.value + 0.75 * second.value
    torch.testing.assert_close(found.value, expected)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(found.gradient, 0.25 * first.gradient + 0.75 * second.gradient)


class Scripted(Defense):
    """Becomes the next of given networks, and records what it saw."""

    def __init__(self, first, others):
        super().__init__(torch.ones(1), mean_probs)
        self.net, self.others, self.saw, self.drew = first, list(others), [], []

    @property
    def foldable_networks(self):
        raise TypeError

    def logits(self, x, generator=None):
        return self.net(x)[None]

    def adapt(self, x, generator=None):
        self.saw.append(x.clone())
        self.drew.append(torch.rand(1, generator=generator).item())
        return Single(self.others[(len(self.saw) - 1) % len(self.others)])


class Fixed(nn.Module):
    """Right on the first `right` images, whatever they show."""

    def __init__(self, right, margin=3.0):
        super().__init__()
        self.right, self.margin = right, margin

    def forward(self, x):
        predicted = (torch.arange(len(x)) + (torch.arange(len(x)) >= self.right)) % 5
        out = self.margin * nn.functional.one_hot(predicted, 5).to(x)
        return out + 0 * x.flatten(1).sum(1)[:, None]


@dataclass(frozen=True)
class Spy(Attack):
    """Returns images of a brightness that counts its calls; records what it attacked."""

    threat: Threat = LINF
    attacked_nets: list = field(default_factory=list)

    def perturb(self, defense, x, y, generator):
        self.attacked_nets.append([original(part.net) for part in defense.defenses])
        return torch.full_like(x, len(self.attacked_nets) / 100)


def play(rights, clean=9, **options):
    x, y = batch()
    models = [Fixed(right) for right in rights]
    first = Fixed(9)
    before = [Fixed(clean)] if options.get("from_clean", True) else []
    defense, spy = Scripted(first, [*before, *models]), Spy(attacked_nets=[])
    with attacking(defense) as defense:
        x_adv = GMSA(spy, rounds=len(models), **options).perturb(defense, x, y, None)
    return x_adv, spy.attacked_nets, defense, [first, *models]


def test_all_models_met_so_far_are_attacked_and_fpa_attacks_the_last():
    _, attacked_nets, defense, models = play([8, 7, 6, 8])
    assert len(set(defense.drew)) == 5  # each rehearsal has randomness of its own
    assert attacked_nets == [models[:1], models[:2], models[:3], models[:4]]
    _, attacked_nets, _, models = play([8, 7, 6, 8], memory=False)
    assert attacked_nets == [[model] for model in models[:4]]


@pytest.mark.parametrize(
    ("rights", "clean", "chosen"),
    [
        ([8, 5, 6, 5], 9, 0.02),  # the first of equals
        ([9, 9, 9], 9, 0.01),  # attacked images rather than clean ones that are as good
        ([9, 9, 9], 8, None),  # none is as good as the clean images
        ([4, 6, 3], 4, 0.03),
        ([0, 9, 9], 9, 0.01),
        ([9, 1, 0], 0, 0.03),  # one lucky rehearsal on clean images does not stop the attack
    ],
)
def test_the_images_with_the_lowest_rehearsed_accuracy_are_returned(rights, clean, chosen):
    x_adv, attacked_nets, _, _ = play(rights, clean)
    expected = batch()[0] if chosen is None else torch.full_like(x_adv, chosen)
    assert torch.equal(x_adv, expected)
    stop = rights.index(0) + 1 if 0 in rights else len(rights)
    assert len(attacked_nets) == stop  # nothing is lower than 0


@pytest.mark.parametrize(
    ("right", "margins", "chosen"),
    [
        (1, [9.0, 8.0, 5.0, 0.01], 0.03),  # right each time, and the last is all but fooled
        (1, [9.0, 5.0, 0.01, 8.0], 0.02),
        (1, [0.01, 8.0, 5.0, 9.0], None),  # clean images have the largest loss
        (1, [40.0, 39.0, 38.0, 37.0], 0.03),  # where probabilities are 1 in float32
        (0, [9.0, 0.1, 5.0, 8.0], 0.01),  # wrong: nothing is tried after a success
    ],
)
@pytest.mark.parametrize("memory", [False, True])
def test_equals_are_settled_by_the_larger_loss(right, margins, chosen, memory):
    """In rounds of one image the accuracy is 0 or 1."""
    clean, *attacked = (Fixed(right, margin) for margin in margins)
    clean.right = 1
    x, y = batch(1)
    defense = Scripted(Fixed(1), [clean, *attacked])
    x_adv = GMSA(Spy(attacked_nets=[]), rounds=3, memory=memory)(defense, x, y)
    assert torch.equal(x_adv, x if chosen is None else torch.full_like(x, chosen))


def test_without_the_clean_rehearsal_the_first_images_are_taken():
    x_adv, _, defense, _ = play([9, 9, 9], from_clean=False)
    assert torch.equal(x_adv, torch.full_like(x_adv, 0.01))
    assert [float(saw.mean()) for saw in defense.saw] == pytest.approx([0.01, 0.02, 0.03])


@pytest.mark.parametrize(("objective", "steps"), [(expected_ce, [2, 2, 2]), (worst_ce, [2, 4, 6])])
def test_the_minimum_takes_steps_for_each_model(objective, steps, monkeypatch):
    taken = []
    original = PGD.perturb

    def counting(self, *args):
        taken.append(self.steps)
        return original(self, *args)

    monkeypatch.setattr(PGD, "perturb", counting)
    x, y = batch()
    inner = PGD(LINF, 2, 0.05, objective=objective)
    nets = [net(seed) for seed in range(3)]
    attack = GMSA(inner, rounds=3, from_clean=False)
    attack(Scripted(net(9), nets), x, y, torch.Generator().manual_seed(0))
    assert taken == steps


def test_a_part_of_no_weight_is_not_attacked():
    x, y = batch()
    space = Mixture([Single(net(1)), Single(net(2))], [0.0, 1.0])
    with attacking(space) as space:
        value = ObjectiveGradient(worst_ce)(space, x, y, None).value
        expected = cross_entropy(net(2)(x), y, reduction="none")
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
