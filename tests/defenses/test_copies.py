"""Working copies: the same predictions, and nothing that the original would notice."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_rob.defenses import Single
from lightning_rob.defenses.copies import (
    changes,
    fresh,
    keep_changes,
    original,
    private,
    working_copy,
)


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

    def _step(self, layer, x):
        return layer(x)

    def forward(self, x):
        self.calls += 1
        return self.call(self.step(x)) + sum(layer(x) for layer in self.order)


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
        (lambda net: setattr(net, "calls", 7), "calls"),
        (lambda net: net.order.append(1), "order"),
        (lambda net: net.scale.add_(1), "scale"),
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
    assert changes(fresh(copied)) == []
    keep_changes(copied)
    assert fresh(copied) is copied
    assert original(copied) is net


def test_what_is_made_of_copies_is_private():
    defense = Single(nn.Linear(4, 4))
    copied = private(defense)
    assert copied is not defense
    assert private(copied) is copied
    assert private(wrapped := Single(copied.net)) is wrapped


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
