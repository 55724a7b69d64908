"""Adam with an upper bound on each step (Ding et al. 2019)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class AdaMod(torch.optim.Optimizer):
    """Adam whose step sizes, parameter by parameter, are bounded by their own moving average.

    Ding et al. 2019, Algorithm 1; the average starts at 0 and is not corrected for it.

    Args:
        params: what is optimised.
        lr: learning rate.
        betas: of the moving averages of the gradient and of its square.
        beta3: of the moving average of the step size.
        eps: added to the root of the second average.
        weight_decay: decoupled from the gradient, times the learning rate.

    Raises:
        ValueError: a rate that is not positive, or a beta outside [0, 1).
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not lr > 0:
            raise ValueError(f"lr must be positive, got {lr}")
        if not all(0 <= beta < 1 for beta in (*betas, beta3)):
            raise ValueError(f"betas must be in [0, 1), got {(*betas, beta3)}")
        defaults = {"lr": lr, "betas": tuple(betas), "beta3": beta3}
        super().__init__(params, defaults | {"eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; parameters without a gradient stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, weight.grad, group)
        return loss

    def _move(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = 0
            for name in ("mean", "square", "size"):
                state[name] = torch.zeros_like(weight)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["mean"].lerp_(gradient, 1 - beta1)
        state["square"].lerp_(gradient.square(), 1 - beta2)
        unbiased = (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
        size = group["lr"] * unbiased / (state["square"].sqrt() + group["eps"])
        state["size"].lerp_(size, 1 - group["beta3"])
        if group["weight_decay"]:
            weight.mul_(1 - group["weight_decay"] * group["lr"])
        weight.sub_(torch.minimum(state["size"], size) * state["mean"])
