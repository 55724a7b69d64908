"""Attacks on all sub-models of a transformation ensemble, against the algorithm written out."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_rob.attacks import CW, PAA, PGD, Attack, DeepFool, ranking_weights
from lightning_rob.attacks.base import is_batch_separable
from lightning_rob.attacks.transform_ensemble import AGGREGATES
from lightning_rob.defenses import Single, TransformEnsemble
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from lightning_rob.transforms.pool import chosen
from tests.attacks.common import ConvNet, assert_inside, seeded
from tests.attacks.test_taa import images, members_right, trained

LINF = Threat("linf", 0.05)
FGSM = PGD(LINF, 1, LINF.eps, random_start=False)
INNER = {
    "fgsm": FGSM,
    "bim": PGD(LINF, 4, 0.02, random_start=False),
    "pgd": PGD(LINF, 4, 0.02),
    "deepfool": DeepFool(Threat("l2", 0.7), 5, overshoot=0.1),
    "cw": CW(Threat("l2", 0.7), 10, 0.1, binary_steps=2, initial_const=1.0),
}
FIVE = ["shift_right", "rotate_180", "filter_gaussian", "flip_both", "seg_gradient"]


@pytest.fixture(scope="module")
def five():
    """Two that can be undone, one that is attacked through, and one that is no candidate."""
    return trained(FIVE).eval()


@pytest.fixture(scope="module")
def in_colour():
    return trained(FIVE[:4], channels=3, steps=20).double().eval()


def dissimilarity(x_adv, x):
    delta, norm = ((z.double().flatten(1)).norm(dim=1) for z in (x_adv - x, x))
    return torch.where(delta > 0, delta / norm, 0)


# by hand
class Linear(nn.Module):
    """Right on label 0 as long as w.x + b > 0."""

    def __init__(self, w, b=10.0):
        super().__init__()
        self.w, self.b = torch.tensor(w), b

    def forward(self, x):
        margin = (x.flatten(1) * self.w.to(x)).sum(1) + self.b
        return torch.stack([margin, torch.zeros_like(margin)], 1)


def moves(nets, names, aggregate, **options):
    """Return the perturbation of one round on a grey image of 1x4 pixels, in step sizes."""
    ensemble = TransformEnsemble(nets, chosen(names))
    x, y = torch.full((1, 1, 1, 4), 0.5), torch.zeros(1, dtype=torch.long)
    attack = PAA(FGSM, aggregate, max_dissimilarity=1, rounds=1, **options)
    return ((attack(ensemble, x, y) - x) / 0.05).flatten().tolist()


def test_two_linear_members_by_hand():
    """The second sees the image from right to left: its gradient is turned round again."""
    nets = [Linear([1.0, -2.0, 0.0, 0.0]), Linear([3.0, 1.0, 1.0, 0.0])]
    names = ["rotate_180", "clean"]  # carried back: (0, 0, 1, -1), and (-1, -1, -1, 0)
    assert moves(nets, names, "AvgP") == pytest.approx([-0.5, -0.5, 0.0, -0.5], abs=1e-4)
    assert moves(nets, names, "MaxP") == pytest.approx([-1, -1, 1, -1], abs=1e-4)
    first = moves(nets, names, "MaxP", ranking=("clean",))
    assert first == pytest.approx([-1, -1, -1, -1], abs=1e-4)
    assert moves(nets, names, "WSumP") == pytest.approx([-0.5, -0.5, 0.0, -0.5], abs=1e-4)
    assert moves(nets, names, "MVoteP") == pytest.approx([0, 0, 1, -1], abs=1e-4)
    assert moves(nets, names, "MVoteP", ranking=(1, 0)) == [*first[:3], 0.0]


def test_weights_of_the_ranks():
    weights = ranking_weights(14)
    assert weights.dtype == torch.float64
    expected = [0.135282] * 2 + [0.060786] * 12
    assert weights.tolist() == pytest.approx(expected, abs=5e-7)
    for count in range(1, 11):
        assert ranking_weights(count).tolist() == pytest.approx([1 / count] * count)
    for count in (11, 15, 72):
        weights = ranking_weights(count)
        assert weights.sum().item() == pytest.approx(1)
        assert weights[0] == weights[1] > weights[2]
        assert (weights.diff() <= 0).all()


def test_weighted_sum_of_fourteen_and_of_those_left():
    """One pixel for each member; two of them are fooled before anything begins."""
    names = list(chosen("reversible"))
    nets = [Linear([float(i == j) for j in range(16)]) for i in range(14)]
    ensemble = TransformEnsemble(nets, {name: chosen("clean")["clean"] for name in names})
    x, y = torch.full((1, 1, 4, 4), 0.5), torch.zeros(1, dtype=torch.long)
    attack = PAA(FGSM, "WSumP", max_dissimilarity=2, ranking=(5, 3), rounds=1)
    order = [5, 3, 0, 1, 2, 4, *range(6, 14)]
    expected = torch.zeros(16)
    expected[order] = ranking_weights(14).float()
    torch.testing.assert_close(
        (x - attack(ensemble, x, y)).flatten() / 0.05, expected, rtol=0, atol=1e-4
    )
    nets[5].b = nets[0].b = -10.0  # fooled: they count in the first round and never again
    second = replace(attack, rounds=2)(ensemble, x, y) - attack(ensemble, x, y)
    expected[[5, 0]] = 0
    torch.testing.assert_close(
        -second.flatten() / 0.05, expected / expected.sum(), rtol=0, atol=1e-4
    )


# Algorithm 3
def written_out(inner, ensemble, aggregate, bound, x, y, order, rounds=30):
    """Image by image and candidate by candidate."""
    weights = ranking_weights(len(order)).to(x)
    x_adv, x_tmp, left, taken = x, x, list(range(len(order))), 0
    while left and (x_tmp - x).norm() <= bound * x.norm() and taken < rounds:
        x_adv, added, taken = x_tmp, [], taken + 1
        for rank in left:
            i = order[rank]
            transform, name = ensemble.transforms[ensemble.names[i]], ensemble.names[i]
            if transform.reversible:
                seen = transform(x_adv)
                there = inner(Single(Returning(transform, ensemble.members[i])), seen, y)
                added.append(transform.undo(there - seen))
            else:
                added.append(inner(TransformEnsemble([ensemble.members[i]], [name]), x_adv, y))
                added[-1] = added[-1] - x_adv
        p = torch.stack(added)
        if aggregate == "AvgP":
            total = p.mean(0)
        elif aggregate == "WSumP":
            shares = weights[left] / weights[left].sum()
            total = sum(w * each for w, each in zip(shares, p, strict=True))
        else:
            often = ((p[:, None] - p).abs() <= 1e-6).double().sum(1)
            scores = p.abs() if aggregate == "MaxP" else often
            first = (scores >= scores.amax(0) - 1e-6).int().argmax(0)  # of equal ones
            total = p.gather(0, first[None])[0]
        x_tmp = (x_adv + total).clamp(0, 1)
        left = [rank for rank in left if prediction(ensemble, order[rank], x_adv) == int(y)]
    return x_tmp if taken == rounds else x_adv


class Returning(nn.Module):
    """A network blind to perturbations that cannot be carried back."""

    def __init__(self, transform, net):
        super().__init__()
        self.transform, self.net = transform, net

    def forward(self, z):
        return self.net(self.transform(self.transform.undo(z)))


@torch.no_grad()
def prediction(ensemble, i, x):
    transform = ensemble.transforms[ensemble.names[i]]
    return int(ensemble.members[i](transform(x)).argmax(-1))


@pytest.mark.parametrize(
    ("aggregate", "inner", "bound"),
    [
        *((name, "bim", 0.2) for name in AGGREGATES),
        ("MaxP", "fgsm", 0.5),
        ("WSumP", "deepfool", 0.5),
    ],
)
def test_is_the_algorithm_image_by_image(aggregate, inner, bound, in_colour):
    ensemble = in_colour
    x, y = images(3, channels=3, seed=3)
    x[2], order = 1.0 - x[2], [3, 0, 1, 2]
    x = x.double()
    attack = PAA(INNER[inner], aggregate, bound, ranking=("flip_both", 0))
    found = attack(ensemble, x, y)
    assert (found != x).any()
    for b in range(3):
        one = x[b : b + 1], y[b : b + 1]
        expected = written_out(INNER[inner], ensemble, aggregate, bound, *one, order)
        torch.testing.assert_close(found[b : b + 1], expected, rtol=0, atol=1e-6)


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    aggregate=st.sampled_from(list(AGGREGATES)),
    inner=st.sampled_from(list(INNER)),
    bound=st.floats(0, 1.5),
    channels=st.sampled_from([1, 3]),
    project_last=st.booleans(),
)
def test_never_leaves_the_bound(seed, aggregate, inner, bound, channels, project_last):
    chance = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        nets = [ConvNet(channels=channels, side=8) for _ in range(4)]
    ensemble = TransformEnsemble(nets, ["shift_top_left", "rotate_90", "filter_gaussian", "clean"])
    x = (
        torch.rand(3, channels, 8, 8, generator=chance)
        * torch.tensor([1.0, 0.1, 0.0])[torch.randperm(3, generator=chance), None, None, None]
    )
    y = torch.randint(4, (3,), generator=chance)
    attack = PAA(INNER[inner], aggregate, bound, project_last=project_last)
    x_adv = attack(ensemble, x, y, seeded(seed))
    assert (dissimilarity(x_adv, x) <= bound + 1e-6).all()
    assert_inside(attack.threat, x_adv, x)
    black = x.flatten(1).amax(1) == 0
    assert torch.equal(x_adv[black], x[black])


def test_a_round_that_leaves_the_bound_is_not_made_or_brought_back(five):
    x, y = images(30, seed=6)
    attack = PAA(replace(FGSM, threat=Threat("linf", 0.3), step_size=0.3), "MaxP", 0.2)
    assert torch.equal(attack(five, x, y), x)
    back = replace(attack, project_last=True)(five, x, y)
    counts = [members_right(five, z, y).sum(0) for z in (x, back)]
    assert (counts[1] <= counts[0]).all()
    assert counts[1].sum() < 0.7 * counts[0].sum()
    moved = (back != x).flatten(1).any(1)
    assert (counts[1] < counts[0])[moved].all()
    reached = dissimilarity(back, x)[moved]
    torch.testing.assert_close(reached, torch.full_like(reached, 0.2), rtol=0, atol=1e-6)


def batch_written_out(inner, ensemble, aggregate, bound, x, y):
    """All images move round by round, each by the algorithm, until their mean leaves the bound."""
    order, x_adv = [0, 1, 2, 3], x
    for rounds in range(1, 30):
        alone = zip(x.split(1), y.split(1), strict=True)
        x_tmp = torch.cat(
            [written_out(inner, ensemble, aggregate, 1e9, *one, order, rounds) for one in alone]
        )
        if dissimilarity(x_tmp, x).mean() > bound or torch.equal(x_tmp, x_adv):
            return x_adv, rounds
        x_adv = x_tmp
    raise AssertionError("no end")


def dimmed(count, channels=1):
    """The darker an image, the larger a share of its norm a move is."""
    x, y = images(count, seed=3, channels=channels)
    return x * torch.linspace(0.4, 1, count).view(-1, 1, 1, 1), y


@pytest.mark.parametrize(
    ("aggregate", "inner", "bound"), [("MaxP", "fgsm", 0.2), ("MVoteP", "deepfool", 0.15)]
)
def test_the_mean_of_a_batch_within_the_bound(aggregate, inner, bound, in_colour):
    """As in the paper: some images go beyond the bound, as others do not."""
    x, y = dimmed(4, 3)
    x = x.double()
    attack = PAA(INNER[inner], aggregate, max_dissimilarity=5.0, mean_bound=bound)
    expected, rounds = batch_written_out(INNER[inner], in_colour, aggregate, bound, x, y)
    x_adv = attack(in_colour, x, y)
    torch.testing.assert_close(x_adv, expected, rtol=0, atol=1e-6)
    reached = dissimilarity(x_adv, x)
    assert rounds > 1
    assert reached.mean() <= bound < reached.max()
    each = replace(attack, max_dissimilarity=bound, mean_bound=None)(in_colour, x, y)
    assert not torch.allclose(each, x_adv, atol=1e-3)


@dataclass(frozen=True)
class Scripted(Attack):
    """Adds so much to every pixel, one number after the other and again."""

    amounts: tuple
    threat: Threat = LINF
    calls: list = field(default_factory=list)

    def perturb(self, defense, x, y, generator):
        self.calls.append(len(x))
        return x + self.amounts[(len(self.calls) - 1) % len(self.amounts)]


def stubborn(count=1):
    nets = [Linear([0.0] * 64) for _ in range(count)]
    return TransformEnsemble(nets, ["clean", "flip_both"][:count])


def test_images_without_progress_stop():
    x, y = torch.full((2, 1, 8, 8), 0.5), torch.zeros(2, dtype=torch.long)
    for amounts, calls in [((0.0,), 10), ((0.1, -0.1), 11)]:
        inner = Scripted(amounts, calls=[])
        PAA(inner, max_dissimilarity=0.5)(stubborn(), x, y)
        assert len(inner.calls) == calls


def test_a_defense_that_cannot_be_attacked(five):
    with pytest.raises(TypeError, match="none of seg_gradient can be undone or has a gradient"):
        PAA(FGSM)(five.one(4), *images(2))
    with pytest.raises(TypeError, match="PAA is an attack on a TransformEnsemble, got Single"):
        PAA(FGSM)(Single(five.members[0]), *images(2))


def test_images_that_stand_still_count_and_each_keeps_to_its_own_bound():
    """Two images of grey 0.5 move 0.04 a round, a share of 0.08; a third is fooled already."""
    x, y = torch.full((3, 1, 8, 8), 0.5), torch.tensor([0, 0, 1])
    attack = PAA(Scripted((0.04,), calls=[]), max_dissimilarity=1.0, mean_bound=0.3)
    x_adv = attack(stubborn(), x, y)  # (2 x 0.4 + 0) / 3 = 0.27, and 0.32 after one more round
    assert dissimilarity(x_adv, x).tolist() == pytest.approx([0.4, 0.4, 0], abs=1e-5)
    x[1] = 0.1  # goes 0.4 a round: leaves its bound with the third, and stays at 0.8
    x_adv = attack(stubborn(), x, y)  # (0.08 + 0.8) / 3 = 0.29 already after the second
    assert dissimilarity(x_adv, x).tolist() == pytest.approx([0.08, 0.4, 0], abs=1e-5)
    far = replace(attack, mean_bound=0.45, inner=Scripted((0.04,), calls=[]))
    x_adv = far(stubborn(), x, y)  # (0.48 + 0.8) / 3 = 0.43
    assert dissimilarity(x_adv, x).tolist() == pytest.approx([0.48, 0.8, 0], abs=1e-5)


def test_a_bound_on_the_mean_depends_on_the_batch_and_says_so(five):
    mean = PAA(FGSM, "AvgP", 1.0, mean_bound=0.3)
    assert is_batch_separable(PAA(FGSM, "AvgP", 0.3), five) and not is_batch_separable(mean, five)
    expected = replace(mean, max_dissimilarity=0.5, mean_bound=0.15)
    assert mean.rescaled(0.5) == mean.rescaled(0.5, "l2") == expected


def test_every_candidate_and_round_has_noise_of_its_own():
    keys = []

    @dataclass(frozen=True)
    class Listening(Attack):
        threat: Threat = LINF

        def perturb(self, defense, x, y, generator):
            keys.extend(generator.keys.tolist())
            return x + 0.01

    x, y = torch.full((2, 1, 8, 8), 0.5), torch.zeros(2, dtype=torch.long)
    PAA(Listening(), rounds=3)(stubborn(2), x, y, Streams.from_index(torch.arange(2)))
    assert len(keys) == len({*keys}) == 2 * 2 * 3
