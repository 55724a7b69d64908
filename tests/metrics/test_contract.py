"""The contract of every metric: the function, in any batches and processes; copies; a plot."""

import copy
import math
import pickle
from datetime import timedelta

import pytest
import torch

from lightning_rob.metrics import (
    GradientSpread,
    PerImage,
    RobustAccuracy,
    SelectiveError,
    Transferability,
    TransferMatrix,
    gradient_spread,
    robust_accuracy,
    selective_error,
    transfer_matrix,
    transferability,
)
from tests.forked import Forked

COUNT = 40


def pairs(members=3, seed=0):
    """Predictions [M, M, B, K] of members on images that attack members, and labels [B]."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand((members, members, COUNT, 5), generator=generator)
    return p / p.sum(-1, keepdim=True), torch.randint(5, (COUNT,), generator=generator)


def single():
    p, y = pairs()
    return p[0, 1], y


def selective():
    """Certain predictions, some of them rejections, labels, and a mask of the clean images."""
    p, y = single()
    hard = torch.eye(5)[p.argmax(1)]
    hard[::7] = 0
    return hard, y, torch.arange(COUNT) % 3 == 0


def gradients():
    generator = torch.Generator().manual_seed(1)
    return (torch.randn((4, COUNT, 3, 4, 4), generator=generator),)


def table():
    generator = torch.Generator().manual_seed(2)
    return torch.randperm(COUNT, generator=generator), torch.rand((COUNT, 2), generator=generator)


def sorted_by_index(index, scores):
    order = index.argsort()
    return index[order], scores[order].double()


# metric, a batch, the dimension of images in each of its tensors, and the functional twin
METRICS = {
    "robust_accuracy": (RobustAccuracy, single, (0, 0), lambda *b: robust_accuracy(*b).mean()),
    "selective": (SelectiveError, selective, (0, 0, 0), selective_error),
    "selective_of_predictions": (
        lambda: SelectiveError("prediction"),
        selective,
        (0, 0, 0),
        lambda *batch: selective_error(*batch, "prediction"),
    ),
    "gradient_spread": (
        GradientSpread,
        gradients,
        (1,),
        lambda g: [each.mean() for each in gradient_spread(g)],
    ),
    "transfer_matrix": (lambda: TransferMatrix(3), pairs, (2, 0), transfer_matrix),
    "transferability": (lambda: Transferability(3), pairs, (2, 0), transferability),
    "per_image": (lambda: PerImage(2), table, (0, 0), sorted_by_index),
}
every_metric = pytest.mark.parametrize("name", METRICS)


def numbers(result):
    """The numbers of a result, however it is structured."""
    if isinstance(result, dict):
        result = result.values()
    parts = [result] if isinstance(result, torch.Tensor) else result
    return torch.cat([torch.as_tensor(part).flatten().double() for part in parts])


def part_of(name, rows):
    _, batch, dims, _ = METRICS[name]
    return [each.index_select(d, rows) for each, d in zip(batch(), dims, strict=True)]


def updated(name, *parts):
    metric = METRICS[name][0]()
    for rows in parts:
        metric.update(*part_of(name, rows))
    return metric


def expected(name, rows):
    return numbers(METRICS[name][3](*part_of(name, rows)))


ALL = torch.arange(COUNT)


def check(metric, wanted):
    torch.testing.assert_close(numbers(metric.compute()), wanted, rtol=1e-6, atol=1e-7)


@every_metric
@pytest.mark.parametrize("sizes", [[1] * 40, [0, 39, 1, 0]])
def test_metric_is_the_function_in_any_batches(name, sizes):
    check(updated(name, *ALL.split(sizes)), expected(name, ALL))


@every_metric
def test_merges_copies_and_resets(name):
    first, second = updated(name, ALL[:13]), updated(name, ALL[13:])
    copies = [first.clone(), copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    first.merge_state(second)
    check(first, expected(name, ALL))
    for other in copies:
        check(other, expected(name, ALL[:13]))
        other.update(*part_of(name, ALL[13:]))
        check(other, expected(name, ALL))
    first.reset()
    first.update(*part_of(name, ALL[5:9]))
    check(first, expected(name, ALL[5:9]))


@pytest.mark.parametrize("name", [name for name in METRICS if name != "per_image"])
def test_without_images_it_is_nan(name):
    found = numbers(updated(name, ALL[:0]).compute()).tolist()
    found = found[:-3] if name == "transferability" else found  # the counts are 0
    assert all(math.isnan(value) for value in found)


SHARES = (torch.arange(0, COUNT, 2), torch.arange(1, 20, 2))


def check_rank(rank, store):
    """Join the other rank and check what this one computes."""
    limit = timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", f"file://{store}", limit, 2, rank)
    for name in METRICS:
        wanted = expected(name, torch.cat(SHARES))
        found = numbers(updated(name, SHARES[rank]).compute())
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    table = PerImage(1)  # a rank without images, and an image that both ranks have seen
    if rank == 0:
        table.update(torch.tensor([0, 2, 4]), torch.tensor([[0.0], [0.25], [0.5]]))
    assert [part.flatten().tolist() for part in table.rows()] == [[0, 2, 4], [0.0, 0.25, 0.5]]
    both = PerImage(1)
    both.update(torch.tensor([4, rank]), torch.tensor([[0.5], [rank / 4]]))
    assert [part.flatten().tolist() for part in both.rows()] == [[0, 1, 4], [0.0, 0.25, 0.5]]
    print("done")


def test_two_processes_with_unequal_shares(tmp_path):
    """All metrics in one launch; each rank checks what it has computed."""
    ranks = [Forked(check_rank, rank, tmp_path / "store") for rank in range(2)]
    found = [rank.wait(120) for rank in ranks]
    assert [rank.stdout.strip() for rank in found] == ["done"] * 2, found
