"""A defense that rejects, as the classifier that an attacker has to fool."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_rob.defenses.base import Defense
from lightning_rob.defenses.network import network_logits
from lightning_rob.defenses.per_image import PerImageValues
from lightning_rob.randomness import Generator
from lightning_rob.rules import abstains, mean_probs, rejected_share


class AcceptedClasses(Defense):
    """The K classes that a defense accepts, with rejection counted as the label.

    A wrong class has the largest logit here where the defense accepts and is wrong. The label's
    logit is the larger one of its own and of rejection's. Of several draws each is joined by
    itself: where some are for the label and some for rejection, an attack may take an image for
    right that the defense accepts and gets wrong. Predictions are exact.
    """

    def __init__(self, defense: Defense, labels: int | PerImageValues) -> None:
        super().__init__(defense.weights, defense.rule)
        if abstains(defense.rule):

            def decided(logits: Tensor, weights: Tensor) -> Tensor:
                # The most probable class takes the place of a rejection.
                predictions = defense.rule(logits, weights)
                rejected = rejected_share(predictions, None, True)
                return predictions + rejected[:, None] * mean_probs(logits, weights)

            self.rule = decided
        self.defense = defense
        self.labels = labels
        self.transforms = dict(defense.transforms)
        self.stateful = defense.stateful

    @property
    def classifiers(self) -> list[nn.Module]:
        return [_OfAcceptedClasses(net, self.seen) for net in self.defense.classifiers]

    @property
    def foldable_networks(self) -> list[nn.Module]:
        return self.defense.foldable_networks

    @property
    def names(self) -> list[str]:
        return self.defense.names

    def components(self) -> list[tuple[float, Defense]]:
        return [(share, self._of(part)) for share, part in self.defense.components()]

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        return self.seen(self.defense.logits(x, generator), self.defense.weights)

    def sample_logits(
        self, x: Tensor, generator: Generator = None, draws: int | None = None
    ) -> tuple[Tensor, Tensor]:
        logits, weights = self.defense.sample_logits(x, generator, draws)
        return self.seen(logits, weights), weights

    def forward(self, x: Tensor, generator: Generator = None) -> Tensor:
        """Predict [B, C, H, W] -> [B, K]: the label's probability is that of not being fooled."""
        predictions = self.defense(x, generator)
        rejected = rejected_share(predictions, self.defense.rejects, self.defense.abstains)
        label = self._labels_of(predictions)[:, None]
        return self._accepted(predictions).scatter_add(1, label, rejected[:, None])

    @property
    def transductive(self) -> bool:
        return self.defense.transductive

    @property
    def base_model(self) -> Defense:
        return self._of(self.defense.base_model)

    @property
    def adapted_model(self) -> Defense:
        return self._of(self.defense.adapted_model)

    def adapt(self, x: Tensor, generator: Generator = None) -> Defense:
        return self._of(self.defense.adapt(x, generator))

    def after_batch(self, generator: Generator = None) -> Defense:
        return self._of(self.defense.after_batch(generator))

    def _of(self, defense: Defense) -> Defense:
        if defense is self.defense:
            return self
        return AcceptedClasses(defense, self.labels) if defense.may_reject else defense

    def _labels_of(self, rows: Tensor) -> Tensor:
        """Return the labels [B] of the images of these rows [B, …]."""
        if isinstance(self.labels, PerImageValues):
            labels: Tensor = self.labels()
        else:
            labels = rows.new_full((len(rows),), self.labels, dtype=torch.long)
        if len(labels) != len(rows):
            raise ValueError(
                f"the attack drops {len(labels) - len(rows)} of {len(labels)} images of a round of "
                "a defense that rejects: take one that keeps them, as PGD without early_stop does"
            )
        return labels

    def _accepted(self, values: Tensor) -> Tensor:
        """Return values [..., K] of the accepted classes, of those [..., K + 1] of all."""
        place = self.defense.rejects
        if place is None:
            return values
        if place >= values.shape[-1]:
            raise ValueError(
                f"rejects must be a class 0 … {values.shape[-1] - 1} of the network, got {place}"
            )
        return torch.cat([values[..., :place], values[..., place + 1 :]], -1)

    def seen(self, logits: Tensor, weights: Tensor) -> Tensor:
        """Return logits [S, B, K] in which the label's stands for rejection too."""
        if self.defense.rejects is None and not abstains(self.defense.rule):
            return logits  # what rejects images is no function of them
        accepted = self._accepted(logits)
        index = self._labels_of(logits[0]).expand(logits.shape[:-1])[..., None]
        label = accepted.gather(-1, index)
        if self.defense.rejects is not None:
            place = self.defense.rejects
            # Averaged probabilities of label and rejection add up; else the larger logit decides.
            pooled = self.rule is mean_probs and len(logits) > 1
            join = torch.logaddexp if pooled else torch.maximum
            label = join(label, logits[..., place : place + 1])
        if abstains(self.defense.rule):
            # Where the largest wrong class leads the label's own logit by g, the raised one leads
            # it by 1 / (1 + g), and by 1 - g where it does not: the margin stays negative, and
            # rises as g does. The gradient stays the label's.
            top = accepted.scatter(-1, index, -torch.inf).amax(-1, keepdim=True)
            gap = top - label
            lead = torch.where(gap > 0, 1 / (1 + gap.clamp_min(0)), 1 - gap)
            rounding = 4 * torch.finfo(top.dtype).eps * top.abs()
            raised = label + (gap + torch.maximum(lead, rounding)).detach()
            abstained = self.defense.rule(logits, weights).sum(-1) <= 0
            label = torch.where(abstained[:, None], raised, label)
        return accepted.scatter(-1, index, label)


def unwrapped(defense: Defense) -> Defense:
    """Return the defense of which an attacker sees the accepted classes; any other as it is."""
    return defense.defense if isinstance(defense, AcceptedClasses) else defense


def as_seen(logits: Tensor, weights: Tensor, whole: Defense) -> Tensor:
    """Return logits [S, B, …] of the `unwrapped` defense as an attack sees the whole one's."""
    return whole.seen(logits, weights) if isinstance(whole, AcceptedClasses) else logits


def rewrapped(part: Defense, whole: Defense) -> Defense:
    """Return a part of the `unwrapped` defense as an attack sees the whole one."""
    return AcceptedClasses(part, whole.labels) if isinstance(whole, AcceptedClasses) else part


def behind_labels(defense: Defense) -> Defense | None:
    """Return the defense that is seen through a label of each image; None for any other."""
    if isinstance(defense, AcceptedClasses) and isinstance(defense.labels, PerImageValues):
        return defense.defense
    return None


class _OfAcceptedClasses(nn.Module):
    """A network whose logits are seen as those of the accepted classes."""

    def __init__(self, net: nn.Module, seen: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net = net
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        logits = network_logits(self.net, x)
        return self.seen(logits[None], logits.new_ones(1))[0]
