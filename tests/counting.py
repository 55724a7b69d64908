"""What attacks ask of a network, counted."""

import torch
from torch import nn


class Shared(list):
    """What a network records of its calls, in a list that its working copies share."""

    def __copy__(self):
        return self


class Tap(torch.autograd.Function):
    """The identity; tells of every gradient that passes, and of how many images."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.append(len(gradient))
        return gradient, None


class Counting(nn.Module):
    """A network that counts, in images: what it evaluates, linearises, and gradients asked for.

    Only what an attack asks: passes in train mode are `trained`. Gradients of weights during an
    attack are an error.
    """

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.clear()

    def clear(self):
        self.evaluated, self.linearised = Shared(), Shared()
        self.backwards, self.trained = Shared(), Shared()

    def counts(self):
        """Calls to evaluate, calls to linearise, gradients."""
        return len(self.evaluated), len(self.linearised), len(self.backwards)

    def images(self):
        """Images of all the calls that are not training."""
        return sum(self.evaluated) + sum(self.linearised)

    def forward(self, x):
        if self.training:
            self.trained.append(len(x))
        elif torch.is_grad_enabled() and x.requires_grad:
            assert not any(weight.requires_grad for weight in self.parameters())
            self.linearised.append(len(x))
            x = Tap.apply(x, self.backwards)
        else:
            self.evaluated.append(len(x))
        return self.inner(x)


def kept_for_gradients(work):
    """Run work to its end and return the bytes that autograd keeps for its first gradient."""
    storages, counting = {}, True

    def pack(value):
        if counting:
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return value

    def unpack(value):
        nonlocal counting
        counting = False  # the first backward pass has begun
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        work()
    return sum(storages.values())
