"""What fools one member and another: orientation, expectation, ranking."""

import math
import pickle

import pytest
import torch

from lightning_rob.metrics import (
    Transfer,
    Transferability,
    transfer_matrix,
    transfer_ranking,
    transferability,
)
from tests.test_transfer_matrix import answers


def sure(told, members, classes=3):
    """Answers without chance, by (member that answers, member attacked)."""
    count = len(next(iter(told.values())))
    answered = torch.zeros(members, members, count, classes)
    for (i, j), labels in told.items():
        answered[i, j, range(count), labels] = 1
    return answered


def test_rows_are_the_sources_and_count_only_what_fools_them():
    y = torch.tensor([0, 1, 2, 0])
    told = {
        (0, 0): [1, 0, 2, 1],  # the attack on member 0 fools it three times
        (1, 0): [0, 0, 0, 2],  # member 1 twice of these, and where it fails
        (0, 1): [0, 1, 1, 0],
        (1, 1): [0, 1, 1, 1],  # the attack on member 1 fools it twice
    }
    matrix, counts = transferability(sure(told, 2), y)
    assert counts.tolist() == [3, 2]
    assert matrix.tolist() == [[1.0, pytest.approx(2 / 3)], [0.5, 1.0]]


def test_a_source_that_is_never_fooled_has_no_share():
    y = torch.tensor([0, 1])
    told = {(0, 0): [0, 1], (1, 0): [1, 1], (0, 1): [1, 1], (1, 1): [1, 0]}
    matrix, counts = transferability(sure(told, 2), y)
    assert matrix[0].isnan().all()
    assert matrix[1].tolist() == [0.5, 1.0]
    assert counts.tolist() == [0, 2]


def test_members_that_answer_by_chance_are_expectations():
    """The mean over many plays, in which each member draws for itself."""
    p, y = answers(members=3, count=6, classes=3)
    found = transferability(p, y)
    chance = torch.Generator().manual_seed(1)
    plays = torch.multinomial(p.flatten(0, 2), 20000, True, generator=chance)
    fooled = (plays.reshape(3, 3, 6, -1) != y[:, None]).double()
    for source in range(3):
        own = fooled[source, source]
        assert found.counts[source] == pytest.approx(own.mean(-1).sum().item(), rel=0.01)
        for target in range(3):
            share = (own * fooled[target, source]).sum() / own.sum()
            assert found.matrix[source, target].item() == pytest.approx(share.item(), abs=0.01)
    assert found.matrix.diagonal().tolist() == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("sizes", [[40], [1] * 40, [7, 30, 3], [0, 39, 1, 0]])
def test_metric_is_the_function_whatever_the_batches(sizes):
    p, y = answers()
    metric = Transferability(3)
    for part, labels in zip(p.split(sizes, 2), y.split(sizes), strict=True):
        metric.update(part, labels)
    for found, expected in zip(metric.compute(), transferability(p, y), strict=True):
        torch.testing.assert_close(found, expected)


def test_merges_copies_and_resets():
    p, y = answers()
    first, second = Transferability(3), Transferability(3)
    first.update(p[:, :, :13], y[:13])
    second.update(p[:, :, 13:], y[13:])
    first.merge_state(second)
    again = pickle.loads(pickle.dumps(first)).compute()
    assert isinstance(again, Transfer)
    torch.testing.assert_close(again.matrix, transferability(p, y).matrix)
    first.reset()
    assert float(first.fooled.sum()) == 0
    first.update(p, y)
    torch.testing.assert_close(first.compute().matrix, again.matrix)


def test_one_member():
    p, y = answers(members=1)
    metric = Transferability(1)
    metric.update(p, y)
    assert transferability(p, y).matrix.tolist() == [[1.0]]
    assert metric.compute().matrix.item() == 1
    assert transfer_ranking(torch.tensor([[0.5]])) == [0]


def test_no_images_are_no_number():
    metric = Transferability(2)
    metric.update(torch.zeros(2, 2, 0, 3), torch.zeros(0, dtype=torch.long))
    assert all(math.isnan(value) for value in metric.compute().matrix.flatten().tolist())


def test_another_number_of_members():
    p, y = answers(2)
    with pytest.raises(ValueError, match=r"must be \[3, 3, B, K\], got \[2, 2, 40, 5\]"):
        Transferability(3).update(p, y)


def test_ranked_by_the_accuracy_of_the_others():
    """Not by a member's own, which is the lowest for the first one here."""
    accuracy = [[0.0, 0.2, 0.9], [0.8, 0.1, 0.5], [0.7, 0.2, 0.6]]
    assert transfer_ranking(torch.tensor(accuracy)) == [1, 2, 0]


def test_equals_are_ranked_by_their_order():
    """Though the order of a sum changes its last digit."""
    equal = torch.tensor([0.1, 0.2, 0.7])
    accuracy = torch.zeros(4, 4)
    for j in range(4):
        others = [i for i in range(4) if i != j]
        accuracy[others, j] = equal.roll(j)
    assert transfer_ranking(accuracy) == [0, 1, 2, 3]
    accuracy[0, 3] -= 0.01
    assert transfer_ranking(accuracy) == [3, 0, 1, 2]


def test_ranks_what_a_transfer_matrix_measures():
    p, y = answers(members=5)
    accuracy = transfer_matrix(p, y)
    others = [sum(accuracy[i, j] for i in range(5) if i != j).item() / 4 for j in range(5)]
    assert transfer_ranking(accuracy) == sorted(range(5), key=others.__getitem__)


@pytest.mark.parametrize("wrong", [torch.zeros(2, 3), torch.zeros(2), torch.full((2, 2), math.nan)])
def test_what_cannot_be_ranked(wrong):
    with pytest.raises(ValueError, match=r"accuracy must be \[M, M\] and known, got \["):
        transfer_ranking(wrong)
