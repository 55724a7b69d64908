import copy
import math
import pickle

import pytest
import torch
from torch.nn import functional as F

from lightning_rob import objectives as ob
from lightning_rob.rules import top2_majority

CROSS_ENTROPIES = [ob.expected_ce, ob.worst_ce, ob.ce_of_mean_probs, ob.ce_of_mean_logits]
OF_VOTES = [ob.ce_of_votes, ob.margin_of_votes, ob.margin_of_two_votes]
SCALED = [ob.ce_of_capped_probs, ob.margin_of_capped_probs, *OF_VOTES]
OBJECTIVES = [*CROSS_ENTROPIES, *SCALED, ob.linear, ob.expected_margin, ob.confident]
OBJECTIVES += [ob.expected_probability_margin]
WEIGHTS = torch.tensor([0.5, 0.3, 0.2])
every_objective = pytest.mark.parametrize("objective", OBJECTIVES)


def draws(s=3, b=5, k=4, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = 6 * torch.randn((s, b, k), generator=generator, dtype=dtype)
    return logits, torch.randint(k, (b,), generator=generator)


def reference(objective, logits, weights, y):
    """Each objective for one image, in scalars: logits [S][K], weights [S], y."""
    if objective in SCALED:
        leads = [max(row) - sorted(row)[max(len(row) - 3, 0)] for row in logits]
        leads = [lead + (len(logits[0]) == 2) for lead in leads]
        capped = objective in (ob.ce_of_capped_probs, ob.margin_of_capped_probs)
        scales = [min(8 / lead, 1) if capped else 4 / lead for lead in leads]
        logits = [[scale * z for z in row] for scale, row in zip(scales, logits, strict=True)]
    probs = []
    for row in logits:
        total = sum(math.exp(z - max(row)) for z in row)
        probs.append([math.exp(z - max(row)) / total for z in row])
    s, k = len(logits), len(logits[0])
    mean_probs = [sum(weights[i] * probs[i][c] for i in range(s)) for c in range(k)]
    mean_logits = [sum(weights[i] * logits[i][c] for i in range(s)) for c in range(k)]
    wrong = [c for c in range(k) if c != y]

    def votes(of_each, c):
        bars = [sorted(z for i, z in enumerate(row) if i != c)[-of_each] for row in logits]
        odds = [math.exp(row[c] - bar) for row, bar in zip(logits, bars, strict=True)]
        return sum(w * odd / (1 + odd) for w, odd in zip(weights, odds, strict=True))

    ties = {c: weights[0] / 2 * math.exp(z - max(logits[0])) for c, z in enumerate(logits[0])}
    one = {c: votes(1, c) + (tie if s == 2 else 0) for c, tie in ties.items()}
    two = {c: tie + (votes(2, c) if k > 2 else 0) for c, tie in ties.items()}
    return {
        ob.expected_ce: sum(-weights[i] * math.log(probs[i][y]) for i in range(s)),
        ob.worst_ce: min(-math.log(p[y]) for p in probs),
        ob.ce_of_mean_probs: -math.log(mean_probs[y]),
        ob.ce_of_mean_logits: math.log(sum(math.exp(z) for z in mean_logits)) - mean_logits[y],
        ob.linear: max(mean_logits[c] for c in wrong) - mean_logits[y],
        ob.ce_of_capped_probs: -math.log(mean_probs[y]),
        ob.margin_of_capped_probs: math.log(max(mean_probs[c] for c in wrong) / mean_probs[y]),
        ob.ce_of_votes: -math.log(mean_probs[y]),
        ob.margin_of_votes: max(one[c] for c in wrong) - one[y],
        ob.margin_of_two_votes: max(two[c] for c in wrong) - two[y],
        ob.expected_margin: sum(
            weights[i] * (max(z[c] for c in wrong) - z[y]) for i, z in enumerate(logits)
        ),
        ob.confident: sum(weights[i] * max(probs[i][c] for c in wrong) for i in range(s)),
        ob.expected_probability_margin: 1
        + sum(weights[i] * (max(p[c] for c in wrong) - p[y]) for i, p in enumerate(probs)),
    }[objective]


@every_objective
@pytest.mark.parametrize(("s", "k"), [(1, 2), (3, 4), (2, 10)])
def test_by_hand(objective, s, k):
    logits, y = draws(s, 6, k, seed=s, dtype=torch.float64)
    weights = WEIGHTS[:s].double() / WEIGHTS[:s].double().sum()
    value = objective(logits, weights, y)
    assert value.shape == (6,)
    for b in range(6):
        expected = reference(objective, logits[:, b].tolist(), weights.tolist(), int(y[b]))
        assert value[b].item() == pytest.approx(expected, abs=1e-12)


@every_objective
def test_a_class_that_all_draws_exclude(objective):
    """It has no gradient, and that of the other classes is as without it."""
    logits, y = draws(k=4)
    y = y % 3
    excluded = logits.index_fill(-1, torch.tensor([3]), -torch.inf).requires_grad_()
    fewer = logits[..., :3].clone().requires_grad_()
    found, expected = (
        torch.autograd.grad(objective(z, WEIGHTS, y).sum(), z)[0] for z in (excluded, fewer)
    )
    torch.testing.assert_close(found[..., :3], expected)
    assert not found[..., 3].any()


@pytest.mark.parametrize("objective", SCALED)
def test_the_scale_of_members(objective):
    """It changes no objective of votes; excluded classes and equal logits leave finite slopes."""
    logits, y = draws()
    louder = logits * torch.tensor([1.0, 50.0, 0.02])[:, None, None]
    same = torch.allclose(objective(louder, WEIGHTS, y), objective(logits, WEIGHTS, y))
    assert same == (objective in OF_VOTES)
    logits[0, :, 0], logits[1] = -torch.inf, 1.0
    logits[2, :, 2:] = -torch.inf
    logits[..., 3] = -torch.inf  # of all members
    y = torch.ones_like(y)
    (gradient,) = torch.autograd.grad(objective(logits.requires_grad_(), WEIGHTS, y).sum(), logits)
    assert gradient.isfinite().all() and gradient.any()


@pytest.mark.parametrize("gap", [-1e4, -200.0, -60.0, -49.0, 49.0, 51.0, 60.0, 200.0, 1e4])
def test_cross_entropy_far_from_the_boundary(gap):
    """Around and far beyond where softplus changes its formula."""
    logits = torch.tensor([[gap, 0.0]], dtype=torch.float64, requires_grad=True)
    value = ob.cross_entropy(logits, torch.tensor([0]))
    expected = math.exp(-gap) if gap > 40 else -gap
    assert value.item() == pytest.approx(expected, rel=1e-9)
    gradient = torch.autograd.grad(value.sum(), logits)[0][0]
    expected = math.exp(-gap) if gap > 40 else 1.0
    assert gradient.tolist() == [pytest.approx(-expected), pytest.approx(expected)]


@pytest.mark.parametrize("objective", CROSS_ENTROPIES)
@pytest.mark.parametrize("margin", [30.0, 60.0, 80.0])
def test_gradient_survives_confidence(objective, margin):
    """In float32, where that of torch's cross-entropy is exactly zero."""
    logits = torch.zeros(2, 1, 3)
    logits[:, :, 1] = margin
    logits[:, :, 2] = 1.0
    logits.requires_grad_()
    y = torch.tensor([1])
    (usual,) = torch.autograd.grad(F.cross_entropy(logits[0], y), logits)
    assert (usual[..., 1] == 0).all()
    value = objective(logits, torch.tensor([0.5, 0.5]), y)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    total = gradient.sum(0)[0].double()
    share = 0.5 if objective is ob.worst_ce else 1.0
    odds = math.exp(-margin) + math.exp(1 - margin)
    assert total[1].item() == pytest.approx(-odds, rel=1e-4)
    assert total[2].item() == pytest.approx(math.exp(1 - margin), rel=1e-4)
    assert share * total[0].item() == pytest.approx(share * math.exp(-margin), rel=1e-4)


@pytest.mark.parametrize("objective", [*CROSS_ENTROPIES, ob.expected_probability_margin])
def test_a_small_objective_is_continued_by_its_logarithm(objective):
    """In double precision, which holds it, by the formula; in single it has the same gradient."""
    weights, y = torch.tensor([0.75, 0.25]), torch.tensor([1, 1])
    logits = torch.zeros(2, 2, 3, dtype=torch.float64)
    logits[..., 2] = 1
    logits[:, 0, 1], logits[:, 1, 1] = torch.tensor([[60.0, 62.0], [200.0, 203.0]])
    logits.requires_grad_()
    value, found = objective(logits, weights, y), ob.climbed(objective, logits, weights, y)
    assert found[0] == value[0] > 1e-30
    torch.testing.assert_close(found[1], 1e-30 * (1 + (value[1] / 1e-30).log()))
    expected, gradient = (
        torch.autograd.grad(v.sum(), logits, retain_graph=True)[0] for v in (value, found)
    )
    torch.testing.assert_close(gradient[:, 0], expected[:, 0], rtol=1e-9, atol=0)
    scaled = expected[:, 1] * (1e-30 / value[1])
    torch.testing.assert_close(gradient[:, 1], scaled, rtol=1e-9, atol=0)
    single = logits.detach().float().requires_grad_()
    assert not torch.autograd.grad(objective(single, weights, y)[1], single)[0].any()
    ob.climbed(objective, single, weights, y)[1].backward()
    torch.testing.assert_close(single.grad[:, 1].double(), scaled, rtol=1e-4, atol=0)


def test_the_first_choice_that_decides_a_tie_outweighs_no_vote():
    """Class 1 has a vote of all three draws, class 0 of two of them and the first choice of one."""
    logits = torch.tensor([[9.0, 8, -9, -8], [8, 9, -9, -8], [-9, 9, 8, -8]])[:, None]
    margin = ob.margin_of_two_votes(logits, torch.full((3,), 1 / 3), torch.tensor([0]))
    assert top2_majority(logits, torch.full((3,), 1 / 3)).argmax() == 1 and margin > 0


def test_boosted_cross_entropy():
    logits, y = draws(1, 50, 10, seed=1, dtype=torch.float64)
    probs = logits[0].softmax(-1)
    right = probs.gather(1, y[:, None])[:, 0]
    rival = probs.scatter(1, y[:, None], 0).amax(1)
    expected = -right.log() - (1 - rival).log()
    torch.testing.assert_close(
        ob.boosted_cross_entropy(logits[0], y), expected, rtol=1e-9, atol=1e-12
    )
    two = torch.tensor([[1e4, 0.0], [-1e4, 0.0], [60.0, 0.0]])  # of two classes twice the usual
    zero = torch.zeros(3, dtype=torch.int64)
    torch.testing.assert_close(ob.boosted_cross_entropy(two, zero), 2 * ob.cross_entropy(two, zero))


@every_objective
def test_draw_of_no_weight_changes_nothing(objective):
    logits, y = draws(3, 40, 4, seed=7)
    logits.requires_grad_()
    value = objective(logits, torch.tensor([0.6, 0.4, 0.0]), y)
    torch.testing.assert_close(value, objective(logits[:2], torch.tensor([0.6, 0.4]), y))
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert gradient.isfinite().all()
    assert (gradient[2] == 0).all()
    assert (gradient[:2].abs().amax((0, 2)) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_equal_logits_have_a_ratio_in_any_precision(dtype):
    y = torch.tensor([0, 1])
    for objective in (ob.expected_dlr, ob.targeted_dlr(torch.tensor([1, 2]))):
        value = objective(torch.zeros(1, 2, 4, dtype=dtype), torch.ones(1), y)
        assert value.tolist() == [0.0, 0.0]


def test_labels_are_classes():
    for y in ([0, 3], [], [2]):
        ob.check_labels(torch.tensor(y, dtype=torch.int64), 4)
    for y in ([0, 4], [-1, 0], [100, 1]):
        with pytest.raises(ValueError, match=rf"labels must be 0 … 3 for 4 classes, got {min(y)} "):
            ob.check_labels(torch.tensor(y), 4)


@pytest.mark.parametrize(
    "objective",
    [
        *OBJECTIVES,
        ob.worst_margin,
        ob.min_confidence,
        ob.TargetedMargin(1),
        ob.TargetedMargin(1, "min"),
    ],
)
def test_an_objective_reduces_single_draws_as_it_declares(objective):
    logits, y = draws(3, 30, 4, seed=6, dtype=torch.float64)
    one, weights = torch.ones(1, dtype=torch.float64), WEIGHTS.double()
    alone = torch.stack([objective(draw[None], one, y) for draw in logits])
    made = {"mean": (weights[:, None] * alone).sum(0), "min": alone.amin(0)}
    value = objective(logits, weights, y)
    same = [name for name, expected in made.items() if torch.allclose(value, expected)]
    assert same == ([ob.reduction_of(objective)] if ob.reduction_of(objective) else [])


def test_an_objective_is_named_as_its_function_and_copied_by_this_name():
    assert repr(ob.worst_ce) == "worst_ce"
    assert copy.deepcopy(ob.worst_ce) is ob.worst_ce
    assert pickle.loads(pickle.dumps(ob.worst_ce)) is ob.worst_ce


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_check_logits_refuses_non_finite_ones(bad):
    """But a class may be ruled out."""
    ob.check_logits(torch.tensor([[[-torch.inf, 1.0, 0.0]]]), torch.tensor([1]))
    with pytest.raises(ob.NonFiniteLogitsError, match="not numbers on 1 of 2 images"):
        ob.check_logits(torch.tensor([[[0.0, 1.0], [bad, 0.0]]]), torch.tensor([0, 1]))


@every_objective
def test_full_precision_under_autocast(objective):
    """Restarts and best iterates are compared by this number."""
    logits, y = draws(3, 8, 4, seed=10)
    with torch.autocast("cpu", torch.bfloat16):
        value = objective(logits, WEIGHTS, y)
    torch.testing.assert_close(value.float(), objective(logits, WEIGHTS, y), rtol=1e-5, atol=1e-6)
