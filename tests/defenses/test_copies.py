"""Working copies: the same predictions, and nothing that the original would notice."""

import random
from collections import OrderedDict, deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lightning_rob.defenses import Single
from lightning_rob.defenses.copies import (
    SHARED_FROM,
    changes,
    fresh,
    keep_changes,
    original,
    own_copy,
    working_copy,
)


class Kept:
    """State outside of a module, in all that may hold some."""

    def __init__(self, layer):
        self.layer, self.me = layer, self
        self.array, self.queue = np.zeros(2), deque([torch.zeros(1)])
        self.inner = SimpleNamespace(table=OrderedDict(a=[[{"b": torch.zeros(1)}]]))
        self.stream, self.draws = torch.Generator(), random.Random(0)


class Parts(nn.Module):
    """Modules in lists, closures, hooks and bound methods, and a plain tensor."""

    def __init__(self):
        super().__init__()
        self.net, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.order = [self.net, self.norm]
        self.scale = torch.ones(4)
        self.step, self.call = partial(self._step, self.net), lambda x: self.norm(x)
        self.net.register_forward_hook(lambda module, given, out: out * self.scale)
        self.calls = 0
        self.kept = Kept(self.norm)

    def _step(self, layer, x):
        return layer(x)

    def forward(self, x):
        self.calls += 1
        return self.call(self.step(x)) + sum(layer(x) for layer in (*self.order, self.kept.layer))


def test_everything_inside_refers_to_the_copy():
    net = Parts().eval()
    x = torch.rand(3, 4)
    expected, copied = net(x), working_copy(net)
    assert torch.equal(copied(x), expected)
    for name in ("net", "norm"):
        for weight in copied.get_submodule(name).parameters():
            weight.mul_(2)
    copied.scale.add_(1)
    assert not torch.equal(copied(x), expected)
    assert torch.equal(net(x), expected)
    assert original(copied) is net
    assert not any(weight.requires_grad for weight in copied.parameters())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda net: net.norm.running_mean.add_(1), "norm.running_mean"),
        (lambda net: net.net.weight.mul_(2), "net.weight"),
        (lambda net: net.order.append(1), "order"),
        (lambda net: net.scale.add_(1), "scale"),
        (lambda net: net.kept.array.__iadd__(1), "kept"),
        (lambda net: net.kept.queue[0].add_(1), "kept"),
        (lambda net: net.kept.inner.table["a"][0][0]["b"].add_(1), "kept"),
        (lambda net: torch.rand(1, generator=net.kept.stream), "kept"),
        (lambda net: net.kept.draws.random(), "kept"),
    ],
)
def test_what_a_copy_changes_is_told_and_undone(change, name):
    net = Parts().eval()
    copied = working_copy(net)
    copied.new = 3  # a constant that a first forward stores
    assert changes(copied) == []
    assert fresh(copied) is copied
    change(copied)
    assert changes(copied) == [name]
    assert net.kept.draws.getstate() == random.Random(0).getstate()
    assert not any(value.any() for value in (net.kept.array, net.kept.queue[0]))
    assert changes(fresh(copied)) == []
    keep_changes(copied)
    assert fresh(copied) is copied
    assert original(copied) is net


def test_objects_of_a_script_are_copied(monkeypatch):
    monkeypatch.setattr(Kept, "__module__", "__main__")
    net = Parts()
    assert working_copy(net).kept is not net.kept


def test_what_is_made_of_copies_is_private():
    defense = Single(nn.Linear(4, 4))
    copied = own_copy(defense)
    assert copied is not defense
    assert own_copy(copied) is copied
    assert own_copy(wrapped := Single(copied.net)) is wrapped


def test_a_large_buffer_is_copied_and_a_plain_tensor_of_its_size_is_shared():
    net = nn.Linear(1, 1)
    net.data = torch.zeros(SHARED_FROM + 1, dtype=torch.uint8)
    net.register_buffer("large", net.data.clone())
    copied = working_copy(net)
    assert copied.data is net.data
    assert copied.large is not net.large


def test_tensors_of_inference_mode_become_ordinary_ones():
    net = nn.BatchNorm1d(4)
    with torch.inference_mode():
        net.running_mean = torch.ones(4)
        assert not working_copy(net).running_mean.is_inference()


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_code_is_shared():
    net = torch.jit.trace(nn.Linear(4, 4), torch.rand(2, 4))
    copied = working_copy(Single(net))
    assert copied.net is net
