"""Distributions over a fixed set of networks, or of defenses."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_rob.defenses.base import Defense, Single, check_network
from lightning_rob.randomness import Generator
from lightning_rob.rules import Rule, random_member


def sampling_probabilities(probs: Sequence[float] | Tensor | None, count: int) -> Tensor:
    """Check sampling probabilities; None means equal ones.

    Raises:
        ValueError: wrong in number, negative, or not summing to 1.
    """
    if count < 1:
        raise ValueError("an ensemble needs at least one member")
    values = torch.full((count,), 1 / count) if probs is None else torch.as_tensor(probs).float()
    if values.shape != (count,):
        raise ValueError(f"{count} members need {count} probs, got {values.tolist()}")
    if not (values >= 0).all():
        raise ValueError(f"probs must not be negative, got {values.tolist()}")
    if abs(float(values.sum()) - 1) > 1e-4:
        raise ValueError(f"probs must sum to 1, got {float(values.sum()):.4g}")
    return values / values.sum()


class Ensemble(Defense):
    """Networks of which one, drawn by its probability, answers (randomized ensemble).

    Args:
        members: M networks [B, C, H, W] -> [B, K].
        probs: M sampling probabilities, alpha in the ARC paper; None means equal ones.
        rule: how the members' draws become an answer.
    """

    def __init__(
        self,
        members: Iterable[nn.Module],
        probs: Sequence[float] | Tensor | None = None,
        rule: Rule = random_member,
    ) -> None:
        members = nn.ModuleList(members)
        for member in members:
            check_network(member)
        super().__init__(sampling_probabilities(probs, len(members)), rule)
        self.members = members

    @property
    def classifiers(self) -> list[nn.Module]:
        """The members."""
        return list(self.members)

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        """[B, C, H, W] -> [M, B, K]."""
        return torch.stack([member(x) for member in self.members])


class Mixture(Defense):
    """Defenses of which one, drawn by its probability, answers: GMSA's model space.

    Args:
        defenses: the parts; their draws are laid side by side.
        probs: their probabilities; None means equal ones.
        rule: how all the draws become an answer.
    """

    def __init__(
        self,
        defenses: Iterable[Defense],
        probs: Sequence[float] | Tensor | None = None,
        rule: Rule = random_member,
    ) -> None:
        parts = list(defenses)
        shares = sampling_probabilities(probs, len(parts))
        weights = [share * part.weights.cpu() for share, part in zip(shares, parts, strict=True)]
        super().__init__(torch.cat(weights), rule)
        self.parts = nn.ModuleList(parts)
        self.shares = shares.tolist()
        self.stateful = any(part.stateful for part in parts)

    @property
    def defenses(self) -> list[Defense]:
        """The parts."""
        return [part for part in self.parts if isinstance(part, Defense)]

    @property
    def classifiers(self) -> list[nn.Module]:
        """The classifiers of all the parts."""
        return [net for part in self.defenses for net in part.classifiers]

    @property
    def foldable_networks(self) -> list[nn.Module]:
        """The networks of all the parts."""
        return [net for part in self.defenses for net in part.foldable_networks]

    @property
    def transductive(self) -> bool:
        """Whether a part adapts."""
        return any(part.transductive for part in self.defenses)

    @property
    def base_model(self) -> "Mixture":
        """The parts before they have seen any test image."""
        return self._of([part.base_model for part in self.defenses])

    @property
    def adapted_model(self) -> "Mixture":
        """The parts as they stand."""
        return self._of([part.adapted_model for part in self.defenses])

    def adapt(self, x: Tensor, generator: Generator = None) -> "Mixture":
        """The parts after each of them has seen the unlabelled test batch."""
        if not self.transductive:
            return self
        return self._of([part.adapt(x, generator) for part in self.defenses])

    def after_batch(self, generator: Generator = None) -> "Mixture":
        """What the parts go on with after they have answered."""
        return self._of([part.after_batch(generator) for part in self.defenses])

    def _of(self, parts: list[Defense]) -> "Mixture":
        return Mixture(parts, self.shares, self.rule)

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        """[B, C, H, W] -> [S_1 + … + S_n, B, K]."""
        return torch.cat([part.logits(x, generator) for part in self.defenses])

    def forward(self, x: Tensor, generator: Generator = None) -> Tensor:
        """[B, C, H, W] -> [B, K]; under `random_member` one part answers, by its own rule."""
        if self.rule is not random_member:
            return super().forward(x, generator)
        answers = [part(x, generator) for part in self.defenses]
        return torch.stack([p * a for p, a in zip(self.shares, answers, strict=True)]).sum(0)

    def sample_logits(
        self, x: Tensor, generator: Generator = None, draws: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The draws of all the parts, each asked for so many."""
        found = [part.sample_logits(x, generator, draws) for part in self.defenses]
        weights = [share * part for share, (_, part) in zip(self.shares, found, strict=True)]
        return torch.cat([logits for logits, _ in found]), torch.cat(weights)


def first_member(defense: Defense) -> Single:
    """The member an ensemble was grown from, alone."""
    return Single(defense.classifiers[0])
