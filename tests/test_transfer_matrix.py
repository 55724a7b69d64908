"""The cross-robustness matrix: its orientation, its sums, its reduction over processes."""

import json
import math
import pickle
import subprocess
import sys

import pytest
import torch

from lightning_rob.metrics import TransferMatrix, transfer_matrix


def answers(members=3, count=40, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand((members, members, count, classes), generator=generator)
    return p / p.sum(-1, keepdim=True), torch.randint(classes, (count,), generator=generator)


def test_entry_is_the_answering_member_on_images_that_attack_the_other():
    sure = torch.zeros(2, 2, 4, 3)
    y = torch.tensor([0, 1, 2, 0])
    told = {(0, 0): [1, 0, 0, 1], (0, 1): [0, 1, 2, 1], (1, 0): [0, 1, 2, 0], (1, 1): [1, 1, 1, 1]}
    for (i, j), classes in told.items():
        sure[i, j, range(4), classes] = 1
    assert transfer_matrix(sure, y).tolist() == [[0.0, 0.75], [1.0, 0.25]]


def test_expected_accuracy_by_hand():
    p, y = answers()
    found = transfer_matrix(p, y)
    assert found.dtype == torch.float64
    for i in range(3):
        for j in range(3):
            mean = sum(float(p[i, j, b, y[b]]) for b in range(40)) / 40
            assert found[i, j].item() == pytest.approx(mean, abs=1e-7)


@pytest.mark.parametrize("sizes", [[40], [1] * 40, [7, 30, 3], [0, 39, 1, 0]])
def test_metric_is_the_function_whatever_the_batches(sizes):
    p, y = answers()
    metric = TransferMatrix(3)
    for part, labels in zip(p.split(sizes, 2), y.split(sizes), strict=True):
        metric.update(part, labels)
    torch.testing.assert_close(metric.compute(), transfer_matrix(p, y))
    assert int(metric.count) == 40


def test_merges_copies_and_resets():
    p, y = answers()
    first, second = TransferMatrix(3), TransferMatrix(3)
    first.update(p[:, :, :13], y[:13])
    second.update(p[:, :, 13:], y[13:])
    first.merge_state(second)
    torch.testing.assert_close(pickle.loads(pickle.dumps(first)).compute(), transfer_matrix(p, y))
    first.reset()
    assert float(first.right.sum()) == int(first.count) == 0


def test_no_images_are_no_number():
    p, y = answers(2)
    metric = TransferMatrix(2)
    metric.update(p[:, :, :0], y[:0])
    assert all(math.isnan(value) for value in metric.compute().flatten().tolist())


def test_another_number_of_members():
    p, y = answers(2)
    with pytest.raises(ValueError, match=r"must be \[3, 3, B, K\], got \[2, 2, 40, 5\]"):
        TransferMatrix(3).update(p, y)


RANK = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from lightning_rob.metrics import TransferMatrix
from tests.test_transfer_matrix import answers
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), 2, rank)
p, y = answers()
metric, mine = TransferMatrix(3), slice(rank, None, 2) if rank < 1 else slice(rank, 20, 2)
metric.update(p[:, :, mine], y[mine])
print(metric.compute().tolist())
"""


def test_two_processes_with_unequal_shares(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], **pipes)
        for rank in range(2)
    ]
    found = [rank.communicate(timeout=120) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), found
    p, y = answers()
    seen = torch.cat([torch.arange(0, 40, 2), torch.arange(1, 20, 2)])
    expected = transfer_matrix(p[:, :, seen], y[seen])
    for text, _ in found:
        torch.testing.assert_close(
            torch.tensor(json.loads(text)).double(), expected, atol=1e-6, rtol=0
        )
