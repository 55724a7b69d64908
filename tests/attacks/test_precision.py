"""Attacks and evaluations compute in full float32; TF32 is for those who ask for it."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from lightning_rob.attacks import GMSA, PGD, Accelerated, evaluating
from lightning_rob.defenses import DENT, Single
from lightning_rob.nets import SmallCNN
from lightning_rob.runtime.precision import OPERATIONS, float32_precision, in_float32
from lightning_rob.threat import Threat
from tests.counting import Shared

FULL, REDUCED = "ieee", "cudnn.conv tf32, cudnn.rnn tf32, cuda.matmul tf32"
PGD_STEP = PGD(Threat("linf", 0.1), 1, 0.1, random_start=False)
SET = {
    "as torch has it": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "older, on": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "newer, all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "newer, one": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "newer, the CPU's": lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
}


def or_error(flag):
    try:
        return flag()
    except RuntimeError:  # the two interfaces disagree
        return "error"


def flags():
    """All flags of torch, by both of its interfaces."""
    backends = torch.backends
    parents = [backends.fp32_precision, backends.cudnn.fp32_precision]
    older = [
        or_error(lambda: backends.cudnn.allow_tf32),
        or_error(lambda: backends.cuda.matmul.allow_tf32),
        or_error(torch.get_float32_matmul_precision),
    ]
    return [*parents, *(operation.fp32_precision for operation in OPERATIONS.values()), *older]


@pytest.fixture
def fresh():
    """The flags as torch has them when it starts, before and after."""

    def reset():
        torch.backends.fp32_precision = torch.backends.cudnn.fp32_precision = "none"
        for operation in OPERATIONS.values():
            operation.fp32_precision = "none"
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.backends.mkldnn.matmul.fp32_precision = "none"

    reset()
    yield
    reset()


class Recording(nn.Module):
    """A network that records the precision of its calls."""

    def __init__(self, net=None):
        super().__init__()
        self.net = net or nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
        self.seen = Shared()

    def forward(self, x):
        self.seen.append(float32_precision())
        return self.net(x)


def batch():
    return torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4


@pytest.mark.parametrize("name", SET)
def test_full_precision_or_tf32_where_it_is_asked_for(fresh, name):
    SET[name]()
    before, net = flags(), Recording()
    PGD_STEP(Single(net), *batch())
    assert flags() == before
    with evaluating(net) as net:
        net(batch()[0])
        assert flags()[-3:] == [False, False, "highest"]  # no error, which is what compilers meet
    assert set(net.seen) == {FULL}
    assert flags() == before
    net.seen.clear()
    with in_float32(tf32=True):  # an evaluation that asks: its attacks too
        assert flags()[-3:] == [True, True, "high"]
        PGD_STEP(Single(net), *batch())
    assert set(net.seen) == {REDUCED}
    assert flags() == before


def test_attacks_within_attacks_keep_what_the_outer_one_asks_for(fresh):
    net = Recording(SmallCNN(4, 3))
    rehearsing = GMSA(PGD_STEP, rounds=2)
    x, y = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4
    with in_float32(tf32=True):
        rehearsing(DENT(net, steps=1), x, y)
    assert set(net.seen) == {REDUCED}
    net.seen.clear()
    rehearsing(DENT(net, steps=1), x, y)
    assert set(net.seen) == {FULL}
    Accelerated(PGD_STEP, autocast="bfloat16")(Single(net), x, y)
    assert set(net.seen) == {FULL}
    with in_float32(tf32=True), in_float32(tf32=False):
        assert float32_precision() == FULL


FIRST = """
import torch
from lightning_rob.runtime.precision import float32_precision, in_float32
assert float32_precision() == "cudnn.conv tf32, cudnn.rnn tf32"
torch.backends.fp32_precision = "ieee"
before = float32_precision()
with in_float32():
    pass
assert float32_precision() == before, (before, float32_precision())
"""


def test_the_first_context_of_a_process():
    """Only then is cuDNN's TF32 a default of torch, which gives way to what is set for all."""
    subprocess.run([sys.executable, "-c", FIRST], check=True)
