"""Distributions over a fixed set of networks, or of defenses."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_rob.defenses.base import Defense, Single, check_network
from lightning_rob.defenses.network import network_logits
from lightning_rob.randomness import Generator
from lightning_rob.rules import Rule, random_member


def sampling_probabilities(probs: Sequence[float] | Tensor | None, count: int) -> Tensor:
    """Return the sampling probabilities [count], scaled to sum to 1; None means equal ones."""
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
    """Several networks: one, drawn by its probability, predicts, or all of them by another rule.

    Args:
        members: M networks [B, C, H, W] -> [B, K].
        probs: M sampling probabilities, alpha in the ARC paper; None means equal ones.
        rule: from the members' logits to a prediction; the default draws one member (a randomized
            ensemble).
        rejects: class by which members reject an image, if they have one; see `Single`.
    """

    def __init__(
        self,
        members: Iterable[nn.Module],
        probs: Sequence[float] | Tensor | None = None,
        rule: Rule = random_member,
        rejects: int | None = None,
    ) -> None:
        if isinstance(members, nn.Module) and not isinstance(members, Iterable):
            raise TypeError(f"members must be a list of networks, got {type(members).__name__}")
        members = nn.ModuleList(members)
        for member in members:
            check_network(member)
        weights = sampling_probabilities(probs, len(members))
        device = next(members.parameters(), weights).device
        # Members may be on a device already; on the meta device are no values.
        super().__init__(weights if device.type == "meta" else weights.to(device), rule, rejects)
        self.members = members

    @property
    def classifiers(self) -> list[nn.Module]:
        return list(self.members)

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        return torch.stack([network_logits(member, x) for member in self.members])


class Mixture(Defense):
    """Defenses of which one, drawn by its probability, predicts: GMSA's model space.

    Args:
        defenses: the parts; their draws are concatenated.
        probs: probabilities of the parts; None means equal ones.
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
        # The parts' logits are concatenated, so that their classes must mean the same.
        rejecting = {part.rejects for part in parts}
        if len(rejecting) > 1:
            raise ValueError(f"the parts of a mixture must reject by one class, got {rejecting}")
        if rule is not random_member and any(part.abstains for part in parts):
            raise ValueError(
                "a part of the mixture rejects images by its prediction, which only the rule "
                "random_member uses; another rule sees its logits alone"
            )
        super().__init__(torch.cat(weights), rule, rejecting.pop())
        self.parts = nn.ModuleList(parts)
        self.shares = shares.tolist()
        self.stateful = any(part.stateful for part in parts)

    @property
    def defenses(self) -> list[Defense]:
        return [part for part in self.parts if isinstance(part, Defense)]

    @property
    def abstains(self) -> bool:
        return super().abstains or any(part.abstains for part in self.defenses)

    def components(self) -> list[tuple[float, Defense]]:
        return list(zip(self.shares, self.defenses, strict=True))

    @property
    def classifiers(self) -> list[nn.Module]:
        return [net for part in self.defenses for net in part.classifiers]

    @property
    def foldable_networks(self) -> list[nn.Module]:
        return [net for part in self.defenses for net in part.foldable_networks]

    @property
    def transductive(self) -> bool:
        return any(part.transductive for part in self.defenses)

    @property
    def base_model(self) -> "Mixture":
        return self._with_parts([part.base_model for part in self.defenses])

    @property
    def adapted_model(self) -> "Mixture":
        return self._with_parts([part.adapted_model for part in self.defenses])

    def adapt(self, x: Tensor, generator: Generator = None) -> "Mixture":
        if not self.transductive:
            return self
        return self._with_parts([part.adapt(x, generator) for part in self.defenses])

    def after_batch(self, generator: Generator = None) -> "Mixture":
        return self._with_parts([part.after_batch(generator) for part in self.defenses])

    def _with_parts(self, parts: list[Defense]) -> "Mixture":
        return Mixture(parts, self.shares, self.rule)

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        return torch.cat([part.logits(x, generator) for part in self.defenses])

    def forward(self, x: Tensor, generator: Generator = None) -> Tensor:
        """Predict [B, C, H, W] -> [B, K]; under `random_member` one part does, by its own rule."""
        if self.rule is not random_member:
            return super().forward(x, generator)
        # Each part's probabilities are those of its prediction, whatever its rule: they add up.
        return torch.stack([share * part(x, generator) for share, part in self.components()]).sum(0)

    def sample_logits(
        self, x: Tensor, generator: Generator = None, draws: int | None = None
    ) -> tuple[Tensor, Tensor]:
        samples = [part.sample_logits(x, generator, draws) for part in self.defenses]
        weights = [share * part for share, (_, part) in zip(self.shares, samples, strict=True)]
        logits = torch.cat([part for part, _ in samples])
        return logits, torch.cat([part.to(logits.device) for part in weights])


def first_member(defense: Defense) -> Single:
    """Return the first member of an ensemble as a defense: the one that BAT starts from."""
    return Single(defense.classifiers[0], rejects=defense.rejects)
