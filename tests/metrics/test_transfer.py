"""Transfer between members: orientation, expectation, ranking."""

import pytest
import torch

from lightning_rob.metrics import transfer_matrix, transfer_ranking, transferability


def predictions(members=3, count=40, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand((members, members, count, classes), generator=generator)
    return p / p.sum(-1, keepdim=True), torch.randint(classes, (count,), generator=generator)


def test_expected_accuracy_by_hand():
    p, y = predictions()
    found = transfer_matrix(p, y)
    assert found.dtype == torch.float64
    for i in range(3):
        for j in range(3):
            mean = sum(float(p[i, j, b, y[b]]) for b in range(40)) / 40
            assert found[i, j].item() == pytest.approx(mean, abs=1e-7)


def sure(predicted, members, classes=3):
    """Certain predictions, by (predicting member, attacked member)."""
    count = len(next(iter(predicted.values())))
    found = torch.zeros(members, members, count, classes)
    for (i, j), labels in predicted.items():
        found[i, j, range(count), labels] = 1
    return found


def test_rows_are_the_sources_and_count_only_what_fools_them():
    y = torch.tensor([0, 1, 2, 0])
    predicted = {
        (0, 0): [1, 0, 2, 1],  # the attack on member 0 fools it three times
        (1, 0): [0, 0, 0, 2],  # member 1 twice of these, and where it fails
        (0, 1): [0, 1, 1, 0],
        (1, 1): [0, 1, 1, 1],  # the attack on member 1 fools it twice
    }
    matrix, counts = transferability(sure(predicted, 2), y)
    assert counts.tolist() == [3, 2]
    assert matrix.tolist() == [[1.0, pytest.approx(2 / 3)], [0.5, 1.0]]


def test_random_members_are_expectations():
    """The mean over many plays, in which each member draws for itself."""
    p, y = predictions(members=3, count=6, classes=3)
    found = transferability(p, y)
    generator = torch.Generator().manual_seed(1)
    plays = torch.multinomial(p.flatten(0, 2), 20000, True, generator=generator)
    fooled = (plays.reshape(3, 3, 6, -1) != y[:, None]).double()
    for source in range(3):
        own = fooled[source, source]
        assert found.counts[source] == pytest.approx(own.mean(-1).sum().item(), rel=0.01)
        for target in range(3):
            share = (own * fooled[target, source]).sum() / own.sum()
            assert found.matrix[source, target].item() == pytest.approx(share.item(), abs=0.01)
    assert found.matrix.diagonal().tolist() == pytest.approx([1.0] * 3)


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
