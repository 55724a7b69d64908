"""Networks whose BatchNorm adapts to each image of the test batch."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from lightning_rob.defenses.adamod import AdaMod
from lightning_rob.defenses.learning import (
    LocalBatchNorm,
    OwnBatch,
    Transductive,
    shown,
    trainable,
)
from lightning_rob.rules import Rule, mean_probs

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Statistics = Literal["static", "batch"]
BatchNorm = nn.modules.batchnorm._BatchNorm
EPS = 1e-5  # in the logarithms of DENT+, as released
KINDS = (nn.BatchNorm2d, nn.SyncBatchNorm, LocalBatchNorm)


class DENT(Transductive):
    """Minimise the entropy of the answers, keep their mean diverse (Wang et al. 2021, DENT+).

    Each image has scales and shifts of its own in every BatchNorm2d; they start from the network's
    and take some steps on the loss of Chen et al. 2022, eq. 8. Nothing else learns, and nothing is
    kept for the next batch. The adapted defense answers the batch that it has seen, image by image
    in the same order.

    Args:
        net: [B, C, H, W] -> [B, K] logits, with BatchNorm2d anywhere in it.
        steps: how many.
        optimizer: parameters -> optimizer; None is the paper's AdaMod.
        statistics: means and variances of BatchNorm: "static", those of training, or "batch",
            those of the test batch.
        diversity: weight of the term that keeps the mean answer diverse; 0 is entropy alone, the
            objective of Tent (Wang et al. 2021).
        rule: any; there is one draw.

    Raises:
        ValueError: no steps, unknown statistics, or a network without BatchNorm2d.
    """

    needs_source = False

    def __init__(
        self,
        net: nn.Module,
        steps: int = 6,
        optimizer: Optimizer | None = None,
        statistics: Statistics = "static",
        diversity: float = 1.0,
        rule: Rule = mean_probs,
    ) -> None:
        super().__init__(net, rule)
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        if statistics not in ("static", "batch"):
            raise ValueError(f"statistics must be 'static' or 'batch', got {statistics!r}")
        if not any(isinstance(module, KINDS) for module in net.modules()):
            raise ValueError(f"DENT adapts BatchNorm2d, and a {type(net).__name__} has none")
        self.steps = steps
        self.optimizer = optimizer or partial(AdaMod, lr=0.006, betas=(0.99, 0.999), beta3=0.6)
        self.statistics = statistics
        self.diversity = diversity

    def fit_to_batch(self, x: Tensor, chance: torch.Generator) -> Self:
        """The defense with scales and shifts for each of the images [B, C, H, W]."""
        net = trainable(self.net).requires_grad_(False)
        layers = _per_image(net, len(x), self.statistics)
        weights = [weight for layer in layers for weight in layer.parameters()]
        optimizer = self.optimizer(weights)
        net.train()
        for module in net.modules():
            if isinstance(module, BatchNorm):
                module.eval()
        for _ in shown(range(self.steps), "DENT"):
            loss = information(net(x), self.diversity)
            gradients = torch.autograd.grad(loss, weights, allow_unused=True)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            optimizer.step()
        for weight in weights:
            weight.grad = None
            weight.requires_grad_(False)
        return self.copy_with(adapted=net.eval())


def information(logits: Tensor, diversity: float = 1.0) -> Tensor:
    """The mean entropy of the answers minus the entropy of their mean: logits [B, K] -> scalar.

    Chen et al. 2022, eq. 8, divided by B, the logarithm of B aside (Liang et al. 2020, SHOT). As in
    the released code its logarithms are of p + 1e-5; entropy alone, as in Tent, has none of that.
    """
    probs = logits.softmax(-1)
    if not diversity:
        return -(probs * logits.log_softmax(-1)).sum(-1).mean()
    mean = probs.mean(0)
    entropy = -(probs * (probs + EPS).log()).sum(-1).mean()
    return entropy + diversity * (mean * (mean + EPS).log()).sum()


class PerImageNorm(OwnBatch):
    """A BatchNorm2d with a scale and a shift for each image and channel.

    Args:
        norm: whose statistics it uses, and where the scales and shifts start from.
        count: B, how many images.
        statistics: "static", those of training, or "batch".
    """

    def __init__(self, norm: BatchNorm, count: int, statistics: Statistics) -> None:
        super().__init__()
        self.mean: Tensor | None
        self.var: Tensor | None
        scale, shift = (
            torch.full((norm.num_features,), start) if given is None else given.detach()
            for given, start in ((norm.weight, 1.0), (norm.bias, 0.0))
        )
        self.weight = nn.Parameter(scale.repeat(count, 1))
        self.bias = nn.Parameter(shift.repeat(count, 1))
        self.eps = norm.eps
        self.separable = statistics == "static"
        known = statistics == "static"
        for name, value in (("mean", norm.running_mean), ("var", norm.running_var)):
            self.register_buffer(name, value.clone() if known and value is not None else None)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], for the B images it was made for, in their order."""
        rows = slice(None) if self.asked is None else self.asked
        weight, bias = self.weight[rows], self.bias[rows]
        if len(x) != len(weight):
            raise ValueError(
                f"a network that has adapted to {len(weight)} images was given {len(x)}: it "
                "answers its own batch, from which an attack must not drop images (PGD does not)"
            )
        if self.mean is None or self.var is None:
            plain = batch_norm(x, None, None, training=True, eps=self.eps)
            return plain * weight[..., None, None] + bias[..., None, None]
        scale = weight * (self.var + self.eps).rsqrt()
        shift = bias - self.mean * scale
        return torch.addcmul(shift[..., None, None], x, scale[..., None, None])


def _per_image(net: nn.Module, count: int, statistics: Statistics) -> list[PerImageNorm]:
    """Put a `PerImageNorm` in the place of each BatchNorm2d; the new layers."""
    norms = {name: m for name, m in net.named_modules() if isinstance(m, KINDS)}
    device = next(net.parameters()).device
    layers = {}
    for name, norm in norms.items():
        layers[name] = PerImageNorm(norm, count, statistics).to(device)
        net.set_submodule(name, layers[name])
    return list(layers.values())
