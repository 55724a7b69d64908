"""Adversarial weight perturbation."""

from collections.abc import Callable

import torch
from torch import Tensor, distributed, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lightning_rob.threat import divisor

TINY = 1e-20


def loss_at_perturbed_weights(
    defense: nn.Module, loss: Callable[..., Tensor], batch: tuple[Tensor, ...], gamma: float
) -> Tensor:
    """Return the loss at weights that were moved to raise it (Wu et al. 2020, eq. 10, one step).

    A layer's weights w become w + v with v = gamma ||w|| g / ||g||, where g is the gradient of the
    loss, the mean over all processes. Biases and the weights of normalization layers are not
    perturbed; of a parametrized weight (spectral norm, weight norm) the parameters that it is
    computed from are. The optimizer decays w; the authors' code decays w + v.
    """
    module, weights = _LossModule(defense, loss), {}
    for name, weight in module.named_parameters():
        path = name.split(".")
        if "parametrizations" in path:  # layer.parametrizations.weight.original0
            path = path[: len(path) - path[::-1].index("parametrizations") + 1]
        if weight.requires_grad and weight.dim() > 1 and "weight" in path[-1]:
            weights[name] = weight
    if not weights:
        raise ValueError("awp found no weights to perturb: all are frozen, or of biases and norms")
    # BatchNorm counts the batch once, at w + v: this pass updates copies of its statistics.
    statistics = {name: buffer.clone() for name, buffer in module.named_buffers()}
    value = functional_call(module, statistics, batch)
    gradients = torch.autograd.grad(
        value, list(weights.values()), allow_unused=True, materialize_grads=True
    )
    if distributed.is_available() and distributed.is_initialized():  # as DDP does in backward
        joined = parameters_to_vector(gradients)
        distributed.all_reduce(joined)
        vector_to_parameters(joined / distributed.get_world_size(), gradients)
    # v is a constant to autograd: the gradient by w is the one at w + v, and w never changes.
    moved = {
        name: weight + gamma * weight.detach().norm() / divisor(gradient.norm(), TINY) * gradient
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
    }
    return functional_call(module, moved, batch)


class _LossModule(nn.Module):
    def __init__(self, defense: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.defense = defense
        self.loss = loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self.loss(*batch)
