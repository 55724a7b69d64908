"""A defense is a distribution over classifiers, and a rule that turns its draws into an answer."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from lightning_rob.randomness import Generator
from lightning_rob.rules import Rule, mean_probs


class Defense(nn.Module, ABC):
    """Whatever answers, at the moment it answers.

    `weights` [S] sums to one, `logits(x)` is [S, B, K], `rule` makes [B, K] of them: the
    probability that the system answers k.
    """

    rule: Rule
    weights: Tensor
    stateful = False  # whether the next round goes on with what this one has adapted to

    def __init__(self, weights: Tensor, rule: Rule) -> None:
        super().__init__()
        self.register_buffer("weights", weights, persistent=False)
        self.rule = rule

    @abstractmethod
    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        """The draws' logits.

        Args:
            x: [B, C, H, W] images in [0, 1].
            generator: where the draws come from, if there is chance in them.

        Returns:
            [S, B, K].
        """

    @property
    def classifiers(self) -> list[nn.Module]:
        """The S networks [B, C, H, W] -> [B, K] the weights are for, where they are a fixed set.

        Raises:
            TypeError: the defense draws its classifiers anew.
        """
        raise TypeError(
            f"{type(self).__name__} is not a fixed set of classifiers: "
            "attack its expected loss (PGD) instead"
        )

    @property
    def foldable_networks(self) -> list[nn.Module]:
        """The networks that see images, and nothing else calls a part of: an attack may fold them.

        Raises:
            TypeError: there are none to name, or the defense adapts, and may copy them.
        """
        if self.transductive:
            raise TypeError(f"{type(self).__name__} adapts: its network has to stay as it is")
        return self.classifiers

    def sample_logits(
        self, x: Tensor, generator: Generator = None, draws: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The logits of repeated draws, and their weights.

        Args:
            x: [B, C, H, W] images in [0, 1].
            generator: where the draws come from.
            draws: how often a defense that has chance in it is asked; None for as often as it
                is for an answer.

        Returns:
            [S, B, K] and [S].
        """
        logits = torch.cat([self.logits(x, generator) for _ in range(draws or 1)])
        return logits, self.weights.repeat(draws or 1) / (draws or 1)

    def forward(self, x: Tensor, generator: Generator = None) -> Tensor:
        """[B, C, H, W] -> [B, K], the probability of each answer."""
        return self.rule(self.logits(x, generator), self.weights)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move with the network, but keep the weights' precision: they must sum to one."""
        weights = self.weights
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weights = weights.to(self.weights.device)
        return self

    def adapt(self, x: Tensor, generator: Generator = None) -> "Defense":
        """The defense after it has seen the unlabelled test batch; this one stays as it was."""
        return self

    def after_batch(self, generator: Generator = None) -> "Defense":
        """What a stateful defense goes on with after it has answered; this one stays as it was."""
        return self

    @property
    def transductive(self) -> bool:
        """Whether it adapts to the test batch, so that its answers depend on the whole batch."""
        return type(self).adapt is not Defense.adapt

    @property
    def base_model(self) -> "Defense":
        """The defense before it has seen any test image: what a transfer attack attacks."""
        return self

    @property
    def adapted_model(self) -> "Defense":
        """What answers at this moment, without what it adapts by: a point of GMSA's model space."""
        return self


def check_network(net: nn.Module) -> None:
    """Raise TypeError for a defense in the place of a network: its answers have no gradient."""
    if isinstance(net, Defense):
        raise TypeError(
            f"{type(net).__name__} is a defense, not a network: put defenses together by Mixture"
        )


class Single(Defense):
    """A plain network.

    Args:
        net: [B, C, H, W] -> [B, K] logits.
        rule: any; with one draw all five give its class.
    """

    def __init__(self, net: nn.Module, rule: Rule = mean_probs) -> None:
        check_network(net)
        super().__init__(torch.ones(1), rule)
        self.net = net

    @property
    def classifiers(self) -> list[nn.Module]:
        """The network."""
        return [self.net]

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        """[B, C, H, W] -> [1, B, K]."""
        return torch.as_tensor(self.net(x)).unsqueeze(0)


def base_model(defense: Defense) -> Defense:
    """The defense before it has seen any test image, for an evaluation's target."""
    return defense.base_model
