"""Ensembles of networks, each of which sees images through a transformation of its own."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn

from lightning_rob.defenses.base import Defense, check_network
from lightning_rob.defenses.ensemble import sampling_probabilities
from lightning_rob.defenses.network import Preprocessed, network_logits
from lightning_rob.randomness import Generator, Streams, derive_seed
from lightning_rob.rules import Rule, mean_probs
from lightning_rob.runtime.errors import nearest
from lightning_rob.transforms import Transform
from lightning_rob.transforms.bpda import approximated
from lightning_rob.transforms.pool import chosen

Transforms = str | Sequence[str] | Mapping[str, Transform]


class TransformEnsemble(Defense):
    """Sub-models, each behind its transformation, that vote (Meng et al. 2020, "Athena").

    Under `random_member` it is the paper's Random Defense (RD), with `majority` MV, with
    `top2_majority` T2MV, with `mean_probs` AVEP and with `mean_logits` AVEL.

    The randomness of a transformation, such as noise, is keyed by its name: a member predicts the
    same in every ensemble that contains it.

    Args:
        members: M networks [B, C, H, W] -> [B, K], each trained on images that its transformation
            has changed.
        transforms: M names of `lightning_rob.transforms.pool`, or words for several of them, see
            `chosen`; or transformations by name.
    """

    def __init__(
        self, members: Iterable[nn.Module], transforms: Transforms, rule: Rule = mean_probs
    ) -> None:
        nets = nn.ModuleList(members)
        for net in nets:
            check_network(net)
        super().__init__(sampling_probabilities(None, len(nets)), rule)
        known = transforms if isinstance(transforms, Mapping) else chosen(transforms)
        self.transforms = dict(known)
        if len(self.transforms) != len(nets):
            raise ValueError(
                f"{len(nets)} members need as many transformations, got {len(self.transforms)}: "
                f"{', '.join(self.transforms)}"
            )
        self.members = nets
        self.straight_through = False  # for an attack: the identity's gradient where there is none

    @property
    def names(self) -> list[str]:
        return list(self.transforms)

    def place(self, name: str | int) -> int:
        """Return the index of the member behind a transformation of this name, or of this index."""
        if isinstance(name, int) and 0 <= name < len(self.members):
            return name
        if name not in self.transforms:
            hint = nearest(str(name), self.names, f", there are {', '.join(self.names)}")
            raise ValueError(f"no member is behind {name!r}{hint}")
        return self.names.index(str(name))

    def transform(self, member: int) -> Transform:
        """Return the transformation in front of a member."""
        return self.transforms[self.names[member]]

    def one(self, member: int) -> "TransformEnsemble":
        """Return the ensemble of a single member behind its transformation."""
        return self.part([member])

    def part(self, members: Sequence[int]) -> "TransformEnsemble":
        """Return the ensemble of some of the members; the networks are shared."""
        transforms = {self.names[i]: self.transform(i) for i in members}
        part = TransformEnsemble([self.members[i] for i in members], transforms, self.rule)
        part.rejects = self.rejects
        part.weights = part.weights.to(self.weights.device)
        return part

    def seen(self, member: int, x: Tensor, generator: Generator = None) -> Tensor:
        """Transform images [B, C, H, W] as a member sees them, with a gradient if x needs one."""
        name, transform = self.names[member], self.transform(member)
        cut = x.requires_grad and torch.is_grad_enabled() and not transform.differentiable
        if cut and not self.straight_through:
            raise RuntimeError(
                f"{name} has no gradient: attack the members that have one by OnDifferentiable, or "
                "one of them by TAA"
            )
        return transformed(transform, name, x, generator)

    @property
    def classifiers(self) -> list[nn.Module]:
        """The members, each behind its transformation; TypeError if a transformation is random."""
        # A transformation is random if it draws parameters, for any image.
        probe = torch.zeros(1, 1, 8, 8)
        for name, transform in self.transforms.items():
            if transform.sample(probe, torch.Generator()):
                raise TypeError(f"{name} is random: its member is no fixed classifier")
        nets: list[nn.Module] = []
        for transform, net in zip(self.transforms.values(), self.members, strict=True):
            cut = self.straight_through and not transform.differentiable
            see = partial(approximated, transform, params=()) if cut else transform
            nets.append(Preprocessed(see, net))
        return nets

    @property
    def foldable_networks(self) -> list[nn.Module]:
        return list(self.members)

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        if isinstance(generator, Streams):
            generator = generator.split(1)  # the next call draws anew
        seen = (self.seen(i, x, generator) for i in range(len(self.members)))
        return torch.stack(list(map(network_logits, self.members, seen)))


def is_transform_ensemble(defense: nn.Module) -> TypeGuard[TransformEnsemble]:
    """Return whether a defense is a `TransformEnsemble`, in a form that type checkers follow."""
    return isinstance(defense, TransformEnsemble)


def transformed(transform: Transform, name: str, x: Tensor, generator: Generator = None) -> Tensor:
    """Transform images [B, C, H, W]; the randomness is keyed by the transformation's name."""
    if isinstance(generator, Streams):
        # By its name and not its place, a member draws the same in every ensemble.
        generator = generator.fold_in(derive_seed(*name.encode()))
    params = transform.sample(x.detach(), generator)
    # With the identity's gradient; `seen` refuses it unless an attack asks for it.
    return transform(x, *params) if transform.differentiable else approximated(transform, x, params)
