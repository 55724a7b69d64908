"""Ensembles of networks, each of which sees images through a transformation of its own."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from lightning_rob.defenses.base import Defense, check_network
from lightning_rob.defenses.ensemble import sampling_probabilities
from lightning_rob.randomness import Generator, Streams, derive_seed
from lightning_rob.rules import Rule, mean_probs
from lightning_rob.transforms import Transform
from lightning_rob.transforms.pool import chosen

Transforms = str | Sequence[str] | Mapping[str, Transform]


class TransformedNetwork(nn.Module):
    """A network that sees images through a transformation without chance.

    Args:
        transform: in front of it.
        net: [B, C, H, W] -> [B, K].
    """

    def __init__(self, transform: Transform, net: nn.Module) -> None:
        super().__init__()
        self.transform = transform
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, K] of images [B, C, H, W]."""
        logits: Tensor = self.net(self.transform(x))
        return logits


class TransformEnsemble(Defense):
    """Sub-models, each behind its transformation, that vote (Meng et al. 2020, "Athena").

    Under `random_member` it is the paper's Random Defense (RD), with `majority` MV, with
    `top2_majority` T2MV, with `mean_probs` AVEP and with `mean_logits` AVEL.

    The chance in a transformation, as in noise, is keyed by its name: a member answers alike
    whichever others stand beside it.

    Args:
        members: M networks [B, C, H, W] -> [B, K], each trained on images that its transformation
            has changed.
        transforms: M names of `lightning_rob.transforms.pool`, or words for several of them, see
            `chosen`; or transformations by name.
        rule: how the members' votes become an answer.

    Raises:
        ValueError: an unknown name, or not as many transformations as members.
        TypeError: a member is a defense.
    """

    def __init__(
        self,
        members: Iterable[nn.Module],
        transforms: Transforms,
        rule: Rule = mean_probs,
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

    @property
    def names(self) -> list[str]:
        """The transformations' names, in the members' order."""
        return list(self.transforms)

    def place(self, name: str | int) -> int:
        """The index of the member behind a transformation.

        Args:
            name: of the transformation, or already the index.

        Raises:
            ValueError: there is no such member.
        """
        if isinstance(name, int):
            if not 0 <= name < len(self.members):
                raise ValueError(f"member must be 0 … {len(self.members) - 1}, got {name}")
            return name
        if name not in self.transforms:
            close = get_close_matches(name, self.names, n=3, cutoff=0.5)
            meant = f", did you mean {', '.join(close)}?" if close else ""
            there = "" if close else f", there are {', '.join(self.names)}"
            raise ValueError(f"no member is behind {name!r}{meant}{there}")
        return self.names.index(name)

    def transform(self, member: int) -> Transform:
        """The transformation in front of a member."""
        return self.transforms[self.names[member]]

    def one(self, member: int) -> "TransformEnsemble":
        """A member behind its transformation, alone."""
        return self.part([member])

    def part(self, members: Sequence[int]) -> "TransformEnsemble":
        """The ensemble of some of the members, of the same networks."""
        places = [self.names[i] for i in members]
        found = {name: self.transforms[name] for name in places}
        part = TransformEnsemble([self.members[i] for i in members], found, self.rule)
        part.weights = part.weights.to(self.weights.device)
        return part

    def seen(self, member: int, x: Tensor, generator: Generator = None) -> Tensor:
        """Images as a member sees them: [B, C, H, W] -> [B, C, H, W]."""
        name = self.names[member]
        if (
            x.requires_grad
            and torch.is_grad_enabled()
            and not self.transform(member).differentiable
        ):
            raise RuntimeError(
                f"{name} has no gradient: attack the members that have one by OnDifferentiable, or "
                "one of them by TAA"
            )
        return transformed(self.transforms[name], name, x, generator)

    @property
    def classifiers(self) -> list[nn.Module]:
        """The members, each behind its transformation.

        Raises:
            TypeError: there is chance in a transformation.
        """
        probe = torch.zeros(1, 1, 8, 8)
        for name, transform in self.transforms.items():
            if transform.sample(probe, torch.Generator()):
                raise TypeError(f"{name} is random: its member is no fixed classifier")
        pairs = zip(self.transforms.values(), self.members, strict=True)
        return [TransformedNetwork(transform, net) for transform, net in pairs]

    @property
    def foldable_networks(self) -> list[nn.Module]:
        """The members, which see transformed images."""
        return list(self.members)

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        """[B, C, H, W] -> [M, B, K]."""
        if isinstance(generator, Streams):
            generator = generator.split(1)  # other chance at the next call
        votes = [net(self.seen(i, x, generator)) for i, net in enumerate(self.members)]
        return torch.stack(votes)


def transformed(transform: Transform, name: str, x: Tensor, generator: Generator = None) -> Tensor:
    """Images [B, C, H, W] behind a transformation, by chance of its own where it has any."""
    if isinstance(generator, Streams):
        generator = generator.fold_in(derive_seed(*name.encode()))
    return transform(x, *transform.sample(x, generator))
