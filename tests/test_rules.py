from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rob import rules as by

RULES = [*by.VOTING_RULES.values(), by.top2_majority_as_released]
NAN = float("nan")


def draws(s, b, k, seed):
    """[S, B, K] logits without ties within a draw."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((s, b, k), generator=generator)


def ballots(*choices, classes=3):
    """[S, 1, K] logits of draws with these rankings, the best class first."""
    rows = [[-float(ranking.index(c)) for c in range(classes)] for ranking in choices]
    return torch.tensor(rows).unsqueeze(1)


def count_votes(rankings, weights, seats):
    """The winner by scalar counting: most weight, ties to the class named first."""
    total, order = defaultdict(float), []
    for ranking, weight in zip(rankings, weights, strict=True):
        for choice in ranking[:seats]:
            total[choice] += weight
            if choice not in order:
                order.append(choice)
    most = max(total.values())
    return next(choice for choice in order if total[choice] > most - 1e-9)


def one_hot(k, classes):
    return [[float(c == k) for c in range(classes)]]


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    s=st.integers(1, 6),
    k=st.integers(2, 4),
    parts=st.lists(st.integers(1, 3), min_size=6, max_size=6),
)
def test_votes_by_hand(seed, s, k, parts):
    logits = draws(s, 1, k, seed)
    weights = torch.tensor(parts[:s], dtype=torch.float32) / sum(parts[:s])
    rankings = logits[:, 0].argsort(1, descending=True).tolist()
    winner = count_votes(rankings, parts[:s], 1)
    assert by.majority(logits, weights).tolist() == one_hot(winner, k)
    winner = count_votes(rankings, parts[:s], 2)
    assert by.top2_majority(logits, weights).tolist() == one_hot(winner, k)
    expected = [
        sum(p for p, r in zip(parts, rankings, strict=False) if r[0] == c) for c in range(k)
    ]
    answer = by.random_member(logits, weights)
    torch.testing.assert_close(answer, torch.tensor([expected]) / sum(parts[:s]))


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**31), s=st.integers(1, 6), k=st.integers(2, 5))
def test_means_by_hand(seed, s, k):
    logits = draws(s, 3, k, seed).double()
    weights = torch.rand(s, generator=torch.Generator().manual_seed(seed)).double() + 0.1
    weights /= weights.sum()
    probs = logits.exp() / logits.exp().sum(-1, keepdim=True)
    for b in range(3):
        p = [sum(float(weights[i] * probs[i, b, c]) for i in range(s)) for c in range(k)]
        z = [sum(float(weights[i] * logits[i, b, c]) for i in range(s)) for c in range(k)]
        assert by.mean_probs(logits, weights)[b].tolist() == one_hot(p.index(max(p)), k)[0]
        assert by.mean_logits(logits, weights)[b].tolist() == one_hot(z.index(max(z)), k)[0]


@pytest.mark.parametrize("rule", RULES)
def test_predictions_are_probabilities_and_independent_of_the_batch(rule):
    logits, weights = draws(5, 9, 4, 0), torch.tensor([0.1, 0.3, 0.2, 0.15, 0.25])
    predictions = rule(logits, weights)
    assert predictions.shape == (9, 4)
    assert predictions.min() >= 0
    torch.testing.assert_close(predictions.sum(1), torch.ones(9))
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rule(logits[:, order], weights), predictions[order])
    for b in range(9):
        torch.testing.assert_close(rule(logits[:, b : b + 1], weights), predictions[b : b + 1])
    assert rule(logits[:, :0], weights).shape == (0, 4)


@pytest.mark.parametrize("count", [2, 3, 6, 7, 30, 99, 1000])
def test_equal_weights_tie_in_any_number(count):
    """1/n added up in float32 is not exact; the tie has to be seen all the same."""
    choices = [[1, 0], [0, 1]] * (count // 2)
    weights = torch.full((len(choices),), 1 / len(choices))
    assert by.majority(ballots(*choices, classes=2), weights).tolist() == one_hot(1, 2)


# logits that are not numbers
@pytest.mark.parametrize("rule", [by.random_member, by.majority, by.top2_majority])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_nan_draw_never_votes(rule, where):
    """Wherever the NaN is, the weight of the non-finite draw goes to no class."""
    logits = ballots([2, 0, 1], [0, 2, 1], [0, 1, 2])
    logits[0, 0, where] = NAN
    weights = torch.tensor([0.5, 0.3, 0.2])
    answer = rule(logits, weights)
    assert not answer.isnan().any()
    assert answer[0, 0] == (1.0 if rule is not by.random_member else 0.5)
    assert answer[0, 1:].tolist() == [0, 0]


# weights
@pytest.mark.parametrize("rule", RULES)
def test_draw_of_no_weight_changes_nothing(rule):
    logits, weights = draws(3, 50, 4, 5), torch.tensor([0.7, 0.3, 0.0])
    torch.testing.assert_close(rule(logits, weights), rule(logits[:2], weights[:2]))


# half precision
def test_ties_of_two_votes_as_released_go_to_the_second_choice():
    """Two draws that agree on both classes: each class has two votes."""
    logits = torch.tensor([[[1.0, 3.0, 2.0]], [[0.0, 5.0, 4.0]]])
    weights = torch.full((2,), 0.5)
    assert by.top2_majority(logits, weights).argmax().item() == 1
    assert by.top2_majority_as_released(logits, weights).argmax().item() == 2
    clear = torch.tensor([[[1.0, 3.0, 2.0]], [[4.0, 5.0, 0.0]]])
    assert by.top2_majority_as_released(clear, weights).argmax().item() == 1


@pytest.mark.parametrize("bad", [NAN, torch.inf, -torch.inf])
def test_non_finite_draws_never_vote_for_class_0(bad):
    for rule in by.VOTING_RULES.values():
        logits = torch.full((3, 4, 5), bad)
        assert torch.equal(rule(logits, torch.full((3,), 1 / 3)), torch.zeros(4, 5))
        logits[:, 1:] = torch.eye(5)[2]
        predicted = rule(logits, torch.full((3,), 1 / 3))
        assert predicted[0].sum() == 0
        assert predicted[1:].argmax(1).tolist() == [2, 2, 2]


def test_a_rule_that_abstains_does_not_reject_what_is_not_finite():
    rule = by.abstaining(lambda logits, weights: 0 * by.mean_probs(logits, weights))
    logits = torch.zeros(2, 3, 4)
    logits[:, 0], logits[0, 1] = NAN, NAN
    rows = rule(logits, torch.full((2,), 0.5))
    assert by.rejected_share(rows, None, True).tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("rule", [by.mean_probs, by.mean_logits])
def test_small_logits_of_several_draws_are_no_ties(rule):
    """To first order in small logits both means are the mean logit, here in exact integers."""
    whole = torch.randint(-1000, 1000, (3, 200, 5), generator=torch.Generator().manual_seed(0))
    exact = whole.sum(0).argmax(-1)
    sole = whole.sum(0).topk(2).values.diff().ne(0)[:, 0]
    found = rule(1e-20 * whole.float(), torch.full((3,), 1 / 3)).argmax(-1)
    assert torch.equal(found[sole], exact[sole])


def test_differences_below_single_precision_decide_between_confident_draws():
    """The mean probabilities are 1/2 up to 4.5e-10: float32 has a tie."""
    logits = torch.tensor([[[1.0, 1e-9]], [[1e-10, 1.0]]], dtype=torch.float64).log().float()
    exact = logits.double().softmax(-1).mean(0).argmax(-1)
    assert by.mean_probs(logits, torch.full((2,), 0.5)).argmax(-1) == exact == 1


@pytest.mark.parametrize("rule", [by.majority, by.top2_majority])
def test_leading_draw_of_no_weight_breaks_no_tie(rule):
    logits = ballots([2, 0, 1], [1, 0, 2], [2, 0, 1])
    weights = torch.tensor([0.0, 0.5, 0.5])
    assert torch.equal(rule(logits, weights), rule(logits[1:], weights[1:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_random_member_is_exact_in_half_precision(dtype, autocast):
    logits = ballots([0, 1, 2], [1, 0, 2]).to(torch.float32 if autocast else dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        answer = by.random_member(logits, torch.tensor([0.9, 0.1])).float()
    torch.testing.assert_close(answer, torch.tensor([[0.9, 0.1, 0.0]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_vote_in_a_thousand_decides(dtype):
    choices = [[1, 0]] * 500 + [[0, 1]] * 501
    logits, weights = ballots(*choices, classes=2).to(dtype), torch.full((1001,), 1 / 1001)
    assert by.majority(logits, weights).tolist() == one_hot(0, 2)
