"""DENT: networks whose BatchNorm adapts to each image of the test batch."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from lightning_rob.defenses.network import network_logits
from lightning_rob.defenses.per_image import PerImageLayer
from lightning_rob.defenses.transductive import (
    LocalBatchNorm,
    Optimizer,
    Transductive,
    progress_bar,
    trainable,
)
from lightning_rob.runtime.errors import at_least

BatchNorm = nn.modules.batchnorm._BatchNorm
EPS = 1e-5  # in the logarithms of DENT+, as released
ADAPTED = (nn.BatchNorm2d, nn.SyncBatchNorm, LocalBatchNorm)


class DENT(Transductive):
    """Minimise the entropy of predictions, keep their mean diverse (Wang et al. 2021, DENT+).

    Each image has scales and shifts of its own in every BatchNorm2d; they start from the network's
    and take some steps on the loss of Chen et al. 2022, eq. 8. All other weights and the statistics
    of training are fixed, and each batch starts from the network again. The adapted defense
    predicts the batch that it has adapted to, in the same order.

    Args:
        net: [B, C, H, W] -> [B, K] logits, with BatchNorm2d anywhere in it.
        optimizer: parameters -> optimizer; None is the paper's AdaMod.
        diversity: weight of the term that keeps the mean prediction diverse; 0 is entropy alone,
            the objective of Tent (Wang et al. 2021).
    """

    needs_source = False

    def __init__(
        self,
        net: nn.Module,
        steps: int = 6,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        diversity: float = 1.0,
    ) -> None:
        super().__init__(net)
        at_least(1, steps=steps)
        if not any(isinstance(module, ADAPTED) for module in net.modules()):
            raise ValueError(f"DENT adapts BatchNorm2d, and a {type(net).__name__} has none")
        self.steps = steps
        default = partial(AdaMod, lr=0.006, betas=(0.99, 0.999), beta3=0.6)
        self.optimizer: Optimizer = optimizer or default
        self.diversity = diversity

    def fit_to_batch(self, x: Tensor, generator: torch.Generator) -> Self:
        net = trainable(self.net).requires_grad_(False)
        device = next(net.parameters()).device
        norms = {name: m for name, m in net.named_modules() if isinstance(m, ADAPTED)}
        weights: list[nn.Parameter] = []
        for name, norm in norms.items():
            layer = PerImageNorm(norm, len(x)).to(device)
            net.set_submodule(name, layer)
            weights += [layer.weight, layer.bias]
        optimizer = self.optimizer(weights)
        net.train()  # as released: dropout is active while adapting
        for module in net.modules():
            if isinstance(module, BatchNorm):
                module.eval()
        for _ in progress_bar(range(self.steps), "DENT"):
            loss = information(network_logits(net, x), self.diversity)
            if not loss.requires_grad:
                kind = type(self.net).__name__
                raise TypeError(f"DENT adapts by gradients, and the logits of a {kind} have none")
            gradients = torch.autograd.grad(loss, weights, allow_unused=True)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            optimizer.step()
        for weight in weights:
            weight.grad = None
            weight.requires_grad_(False)
        return self.copy_with(adapted=net.eval())


def information(logits: Tensor, diversity: float = 1.0) -> Tensor:
    """Compute the mean entropy of predictions [B, K] minus the entropy of their mean, a scalar."""
    # Chen et al. 2022, eq. 8, divided by B, up to the constant log B (Liang et al. 2020, SHOT).
    probs = logits.softmax(-1)
    if not diversity:  # Tent, exactly
        return -(probs * logits.log_softmax(-1)).sum(-1).mean()
    # As in the released code the logarithms are of p + 1e-5.
    mean = probs.mean(0)
    entropy = -(probs * (probs + EPS).log()).sum(-1).mean()
    return entropy + diversity * (mean * (mean + EPS).log()).sum()


class PerImageNorm(PerImageLayer):
    """A BatchNorm2d with a scale and a shift for each image and channel."""

    mean: Tensor
    var: Tensor

    def __init__(self, norm: BatchNorm, count: int) -> None:
        super().__init__()
        if norm.running_mean is None or norm.running_var is None:
            raise ValueError("DENT needs the statistics of training: track_running_stats=True")
        scale, shift = (
            torch.full((norm.num_features,), start) if given is None else given.detach()
            for given, start in ((norm.weight, 1.0), (norm.bias, 0.0))
        )
        self.weight = nn.Parameter(scale.repeat(count, 1))
        self.bias = nn.Parameter(shift.repeat(count, 1))
        # A SyncBatchNorm takes features too, where a BatchNorm1d would not be adapted.
        self.plain = None if isinstance(norm, nn.BatchNorm2d) else norm
        self.eps = norm.eps
        self.register_buffer("mean", norm.running_mean.clone())
        self.register_buffer("var", norm.running_var.clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.plain is not None and x.dim() == 2:
            unadapted: Tensor = self.plain(x)
            return unadapted
        rows = slice(None) if self.rows is None else self.rows
        weight, bias = self.weight[rows], self.bias[rows]
        # An image that an attack has dropped would shift the others to the wrong rows.
        if len(x) != len(weight):
            raise ValueError(
                f"a network that has adapted to {len(weight)} images was given {len(x)}: it "
                "answers its own batch, from which an attack must not drop images (PGD does not)"
            )
        # One multiplication and addition per pixel: statistics and scales are merged first.
        scale = weight * (self.var + self.eps).rsqrt()
        shift = bias - self.mean * scale
        return torch.addcmul(shift[..., None, None], x, scale[..., None, None])


class AdaMod(torch.optim.Optimizer):
    """Adam with step sizes bounded by their own moving average (Ding et al. 2019, Algorithm 1)."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float = 0.999,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "beta3": beta3, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = 0
                    for name in ("mean", "square", "size"):
                        state[name] = torch.zeros_like(weight)
                state["step"] += 1
                state["mean"].lerp_(weight.grad, 1 - beta1)
                state["square"].lerp_(weight.grad.square(), 1 - beta2)
                unbiased = (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
                size = group["lr"] * unbiased / (state["square"].sqrt() + group["eps"])
                # The average starts at 0 and, as in the paper, is not corrected for it.
                state["size"].lerp_(size, 1 - group["beta3"])
                weight.sub_(torch.minimum(state["size"], size) * state["mean"])
