import copy
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from lightning_rob.metrics import (
    PerImage,
    RobustAccuracy,
    robust_accuracy,
    student,
    wilson,
)


def answers(count=40, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand((count, classes), generator=generator)
    return p / p.sum(1, keepdim=True), torch.randint(classes, (count,), generator=generator)


# robust accuracy


def test_robust_accuracy_by_hand():
    p = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    right = robust_accuracy(p, torch.tensor([0, 1, 2, 1]))
    assert right.tolist() == pytest.approx([0.9, 0.3, 0.0, 1.0])
    assert robust_accuracy(p[:0], torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_mean_over_all_images_whatever_the_batches():
    p, y = answers()
    expected = sum(float(p[b, y[b]]) for b in range(40)) / 40
    for sizes in ([40], [1] * 40, [7, 30, 3], [0, 39, 1, 0]):
        metric = RobustAccuracy()
        for part, labels in zip(p.split(sizes), y.split(sizes), strict=True):
            metric.update(part, labels)
        assert metric.compute().item() == pytest.approx(expected, abs=1e-7)


def test_is_plain_accuracy_for_sure_answers():
    p, y = answers(200, 3)
    sure = F.one_hot(p.argmax(1), 3).float()
    metric = RobustAccuracy()
    metric.update(sure, y)
    assert metric.compute().item() == pytest.approx((p.argmax(1) == y).float().mean().item())


def test_many_images_are_not_lost_in_rounding():
    """In single precision the sum would stop at 2^24 and drift long before."""
    metric = RobustAccuracy()
    metric.update(torch.tensor([[0.9, 0.1]]).expand(1000, 2), torch.zeros(1000, dtype=torch.int64))
    metric.right += 0.9 * 99_999_000
    metric.count += 99_999_000
    metric.update(torch.tensor([[0.9, 0.1]]), torch.ones(1, dtype=torch.int64))
    assert metric.right.item() == pytest.approx(90_000_000.1, abs=1e-4)
    assert metric.count.item() == 100_000_001


def test_forward_gives_the_batch_and_keeps_the_epoch():
    p, y = answers()
    metric = RobustAccuracy()
    for part, labels in zip(p.split(8), y.split(8), strict=True):
        batch = metric(part, labels)
        assert batch.item() == pytest.approx(robust_accuracy(part, labels).mean().item())
    assert metric.compute().item() == pytest.approx(robust_accuracy(p, y).mean().item())


def test_merges():
    p, y = answers()
    first, second = RobustAccuracy(), RobustAccuracy()
    first.update(p[:13], y[:13])
    second.update(p[13:], y[13:])
    first.merge_state(second)
    assert first.compute().item() == pytest.approx(robust_accuracy(p, y).mean().item())


def test_resets_clones_pickles():
    p, y = answers()
    metric = RobustAccuracy()
    metric.update(p, y)
    value = metric.compute()
    for other in (metric.clone(), copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        assert torch.equal(other.compute(), value)
        other.update(p, (y + 1) % 5)
        assert not torch.equal(other.compute(), value)
        assert torch.equal(metric.compute(), value)
    metric.reset()
    metric.update(p[:1], y[:1])
    assert metric.compute().item() == pytest.approx(p[0, y[0]].item())


def test_nobody_is_no_number():
    metric = RobustAccuracy()
    p, y = answers()
    metric.update(p[:0], y[:0])
    assert math.isnan(metric.compute().item())


def test_counts_in_inference_mode_and_goes_on_outside():
    p, y = answers()
    metric = RobustAccuracy()
    with torch.inference_mode():
        metric.update(p[:20].clone(), y[:20].clone())
    metric.update(p[20:], y[20:])
    assert metric.compute().item() == pytest.approx(robust_accuracy(p, y).mean().item())


# the table of images


def test_table_is_sorted_by_image():
    table = PerImage(2)
    table.update(torch.tensor([7, 3]), torch.tensor([[0.7, 0.07], [0.3, 0.03]]))
    table.update(torch.tensor([5]), torch.tensor([[0.5, 0.05]]))
    index, scores = table.compute()
    assert index.tolist() == [3, 5, 7]
    assert scores.dtype == torch.float64
    expected = torch.tensor([[0.3, 0.03], [0.5, 0.05], [0.7, 0.07]]).double()
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-7)


def test_image_seen_twice_counts_once():
    """As when a sampler pads the last batch; the first scores stand."""
    table = PerImage(1)
    table.update(torch.tensor([4, 2, 4]), torch.tensor([[0.25], [0.5], [0.75]]))
    table.update(torch.tensor([2, 9, 4]), torch.tensor([[1.0], [0.125], [1.0]]))
    index, scores = table.compute()
    assert index.tolist() == [2, 4, 9]
    assert scores.tolist() == [[0.5], [0.25], [0.125]]


def test_table_of_one_batch_of_many_and_of_none():
    generator = torch.Generator().manual_seed(0)
    order, scores = torch.randperm(101, generator=generator), torch.rand(101, 3)
    for size in (101, 1, 10):
        table = PerImage(3)
        for part in order.split(size):
            table.update(part, scores[part])
        index, found = table.compute()
        assert torch.equal(index, torch.arange(101))
        assert torch.equal(found, scores.double())
    empty = PerImage(3)
    empty.update(order[:0], scores[:0])
    index, found = empty.compute()
    assert index.shape == (0,)
    assert found.shape == (0, 3)


def test_table_never_written():
    index, scores = PerImage(4).rows()
    assert index.shape == (0,)
    assert scores.shape == (0, 4)


def test_rows_are_what_compute_gives():
    table = PerImage(2)
    table.update(torch.tensor([3, 1]), torch.tensor([[0.5, 1.0], [0.25, 0.0]]))
    for found, expected in zip(table.rows(), table.compute(), strict=True):
        assert torch.equal(found, expected)


def test_tables_merge_reset_and_copy():
    first, second = PerImage(1), PerImage(1)
    first.update(torch.tensor([1, 5]), torch.tensor([[0.1], [0.5]]))
    second.update(torch.tensor([3, 5]), torch.tensor([[0.3], [0.9]]))
    copied = pickle.loads(pickle.dumps(first))
    first.merge_state(second)
    assert first.compute()[0].tolist() == [1, 3, 5]
    assert copied.compute()[0].tolist() == [1, 5]
    first.reset()
    first.update(torch.tensor([8, 2]), torch.tensor([[0.8], [0.2]]))
    assert first.compute()[0].tolist() == [2, 8]


def test_table_keeps_what_is_changed_afterwards():
    table, scores = PerImage(1), torch.tensor([[0.25], [0.5]])
    table.update(torch.tensor([0, 1]), scores)
    found = table.compute()[1]
    found += 1
    assert scores.tolist() == [[0.25], [0.5]]


@pytest.mark.parametrize("columns", [1, 2])
def test_table_of_a_single_image(columns):
    table = PerImage(columns)
    table.update(torch.tensor([8]), torch.full((1, columns), 0.5))
    index, scores = table.rows()
    assert index.tolist() == [8]
    assert scores.tolist() == [[0.5] * columns]


RANK = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from lightning_rob.metrics import PerImage, RobustAccuracy
rank, store, idle = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "idle"
dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=20), 2, rank)
table, accuracy = PerImage(1), RobustAccuracy()
if rank == 0 or not idle:
    mine = torch.tensor([0, 2, 4] if rank == 0 else [1, 3, 4])
    table.update(mine, mine[:, None] / 8)
    accuracy.update(torch.tensor([[0.75, 0.25]]), torch.tensor([rank]))
index, scores = table.rows()
print(index.tolist(), scores.flatten().tolist(), accuracy.compute().item())
"""


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ("busy", "[0, 1, 2, 3, 4] [0.0, 0.125, 0.25, 0.375, 0.5] 0.5"),
        ("idle", "[0, 2, 4] [0.0, 0.25, 0.5] 0.75"),
    ],
)
def test_two_processes(tmp_path, second, expected):
    """The second has as many images as the first, or none: fewer images than processes."""
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), second],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert [rank.communicate(timeout=120)[0].strip() for rank in ranks] == [expected] * 2
    finally:
        for rank in ranks:
            rank.kill()


# intervals


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize(("right", "n"), [(0, 1), (1, 1), (0, 50), (50, 50), (7, 10), (123, 1000)])
def test_wilson_is_scipys(right, n, level):
    expected = stats.binomtest(right, n).proportion_ci(level, "wilson")
    low, high = wilson(right / n, n, level)
    assert low == pytest.approx(expected.low, abs=1e-12)
    assert high == pytest.approx(expected.high, abs=1e-12)


@pytest.mark.parametrize("mean", [0.0, 1.0, 0.3, 1 + 2e-7, -1e-9])
@pytest.mark.parametrize("n", [1, 100, 50_000])
def test_wilson_stays_a_proportion(mean, n):
    """Also where the mean of float32 scores came out a little above one."""
    low, high = wilson(mean, n)
    assert 0 <= low <= high <= 1
    assert low - 1e-6 <= mean <= high + 1e-6


def test_wilson_never_rounds_out_of_the_proportions():
    assert min(wilson(0.0, n)[0] for n in range(1, 2000)) == 0
    assert max(wilson(1.0, n)[1] for n in range(1, 2000)) == 1


def test_wilson_of_nothing():
    assert wilson(0.5, 0) == (0.0, 1.0)
    assert wilson(float("nan"), 0) == (0.0, 1.0)


@pytest.mark.parametrize("truth", [0.02, 0.3, 0.5, 0.95])
def test_wilson_covers_the_truth(truth):
    """Coverage of the 95 % interval: exact, over the distribution of the number right."""
    n = 200
    weights = stats.binom.pmf(np.arange(n + 1), n, truth)
    inside = [low <= truth <= high for low, high in (wilson(k / n, n) for k in range(n + 1))]
    assert 0.92 < weights[inside].sum() < 0.98


def test_wilson_covers_in_simulation():
    draws = np.random.default_rng(0).binomial(100, 0.8, 2000)
    inside = [low <= 0.8 <= high for low, high in (wilson(k / 100, 100) for k in draws)]
    assert 0.93 < np.mean(inside) < 0.975


def test_wilson_is_wide_enough_for_expected_accuracies():
    """Scores of 0, 0.1, 0.9 and 1 vary less than answers of 0 and 1 with the same mean."""
    scores = np.random.default_rng(1).choice([0, 0.1, 0.9, 1], (2000, 100), p=[0.2, 0.3, 0.3, 0.2])
    inside = [low <= 0.5 <= high for low, high in (wilson(m, 100) for m in scores.mean(1))]
    assert np.mean(inside) > 0.95


@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
@pytest.mark.parametrize("values", [[0.4, 0.5], [0.1, 0.2, 0.35, 0.1], list(range(30))])
def test_student_is_scipys(values, level):
    expected = stats.t.interval(
        level, len(values) - 1, loc=np.mean(values), scale=stats.sem(values)
    )
    assert student(values, level) == pytest.approx(expected, abs=1e-12)


def test_student_of_equal_numbers():
    assert student([0.25, 0.25, 0.25]) == (0.25, 0.25)


def test_student_covers_in_simulation():
    samples = np.random.default_rng(2).normal(3.0, 2.0, (1500, 5))
    inside = [low <= 3 <= high for low, high in (student(list(s)) for s in samples)]
    assert 0.935 < np.mean(inside) < 0.965


def test_student_needs_two_numbers():
    with pytest.raises(ValueError, match="two"):
        student([0.5])
