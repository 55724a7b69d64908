"""A defense is a distribution over classifiers, and a rule that predicts from its draws."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from lightning_rob.defenses.network import Preprocessed, network_logits
from lightning_rob.randomness import Generator
from lightning_rob.rules import Rule, abstains, mean_probs
from lightning_rob.transforms import Transform


class Defense(nn.Module, ABC):
    """A distribution over S classifiers, at the moment of prediction.

    `weights` [S] sums to one, `logits(x)` is [S, B, K], and `rule` turns both into [B, K]: the
    probability that the system predicts each class.

    A defense may reject images: by a class of its own, the index `rejects`, or by rows of zeros,
    which `abstains` declares. An attack then succeeds where the defense accepts and is wrong.
    """

    transforms: Mapping[str, Transform] = MappingProxyType({})  # of its inputs, by name
    resamples: ClassVar[bool] = False  # whether an attack may take any number of its draws
    rule: Rule
    weights: Tensor
    stateful = False  # whether the next round starts from the current adaptation
    rejects: int | None = None  # the class that stands for rejection, counted from 0

    def __init__(self, weights: Tensor, rule: Rule, rejects: int | None = None) -> None:
        super().__init__()
        self.register_buffer("weights", weights, persistent=False)
        self.rule = rule
        if rejects is not None:
            if isinstance(rejects, bool) or rejects < 0:
                raise ValueError(f"rejects must be a class 0 … K, got {rejects}")
            self.rejects = rejects

    @abstractmethod
    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        """Compute the logits [S, B, K] of the draws for images [B, C, H, W] in [0, 1]."""

    @property
    def classifiers(self) -> list[nn.Module]:
        """The S networks [B, C, H, W] -> [B, K] of the weights; TypeError if drawn anew."""
        raise TypeError(
            f"{type(self).__name__} is not a fixed set of classifiers: "
            "attack its expected loss (PGD) instead"
        )

    @property
    def foldable_networks(self) -> list[nn.Module]:
        """Networks that are only ever called as a whole, so an attack may fold their BatchNorm.

        TypeError if there are none, or the defense adapts and may copy them.
        """
        if self.transductive:
            raise TypeError(f"{type(self).__name__} adapts: its network has to stay as it is")
        return self.classifiers

    @property
    def names(self) -> list[str]:
        """Names of the S draws, for tables and figures."""
        return [str(i + 1) for i in range(len(self.weights))]

    @property
    def abstains(self) -> bool:
        """Whether it rejects by rows of zeros among its predictions."""
        return abstains(self.rule)

    @property
    def may_reject(self) -> bool:
        """Whether some of its predictions are rejections."""
        return self.rejects is not None or self.abstains

    def components(self) -> list[tuple[float, "Defense"]]:
        """Return (probability, defense) of each part of a mixture, or of this defense alone."""
        return [(1.0, self)]

    def sample_logits(
        self, x: Tensor, generator: Generator = None, draws: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the logits [S, B, K] of repeated draws, and their weights [S].

        Args:
            draws: how often a random defense is sampled; None samples it as for a prediction.
        """
        if draws is None or draws == 1:
            return self.logits(x, generator), self.weights
        logits = torch.cat([self.logits(x, generator) for _ in range(draws)])
        return logits, self.weights.repeat(draws) / draws

    def forward(self, x: Tensor, generator: Generator = None) -> Tensor:
        """Predict: [B, C, H, W] -> [B, K], the probability of each class."""
        return self.rule(self.logits(x, generator), self.weights)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move with the network, but keep the precision of the weights: they must sum to one."""
        weights = self.weights
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weights = weights.to(self.weights.device)
        return self

    def adapt(self, x: Tensor, generator: Generator = None) -> "Defense":
        """Return the defense adapted to an unlabelled test batch; this one is not changed."""
        return self

    def after_batch(self, generator: Generator = None) -> "Defense":
        """Return the defense that starts the next batch; this one is not changed."""
        return self

    @property
    def transductive(self) -> bool:
        """Whether it adapts to the test batch, so that predictions depend on the whole batch."""
        # A defense adapts exactly if it overrides `adapt`.
        return type(self).adapt is not Defense.adapt

    @property
    def base_model(self) -> "Defense":
        """The defense before any adaptation: the target of a transfer attack."""
        return self

    @property
    def adapted_model(self) -> "Defense":
        """The current classifier without its adaptation: a point of GMSA's model space."""
        return self


def check_network(net: nn.Module) -> None:
    """Raise TypeError for a defense in place of a network: its predictions have no gradient."""
    if isinstance(net, Defense):
        raise TypeError(
            f"{type(net).__name__} is a defense, not a network: put defenses together by Mixture"
        )


class Single(Defense):
    """A plain network.

    Args:
        net: [B, C, H, W] -> [B, K] logits.
        rule: any; with one draw each of this package predicts the class of its largest logit.
        rejects: class by which the network rejects an image, such as 10 where a detector has the
            classes 0 … 9 and "adversarial"; no label is of this class.
    """

    def __init__(self, net: nn.Module, rule: Rule = mean_probs, rejects: int | None = None) -> None:
        check_network(net)
        super().__init__(torch.ones(1), rule, rejects)
        self.net = net

    @property
    def classifiers(self) -> list[nn.Module]:
        return [self.net]

    @property
    def foldable_networks(self) -> list[nn.Module]:
        # A subclass may adapt: its network is then refused.
        nets = super().foldable_networks
        return [net.net if isinstance(net, Preprocessed) else net for net in nets]

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        return network_logits(self.net, x).unsqueeze(0)


def base_model(defense: Defense) -> Defense:
    """Return the defense before any adaptation, as the target of an evaluation."""
    return defense.base_model
