"""A defense whose randomness an attacker knows: a mixture of classifiers without any."""

from collections.abc import Iterator

from torch import Tensor, nn

from lightning_rob.defenses.base import Defense, Single
from lightning_rob.defenses.random_transforms import random_transforms_in
from lightning_rob.defenses.transform_ensemble import is_transform_ensemble
from lightning_rob.randomness import Generator, Streams, generator_of, seeded_global_rng
from lightning_rob.rules import random_member


class KnownNoise(Defense):
    """A defense with the draws of one prediction, whatever source of noise it is given.

    Attacks see the very copies that will predict: also a surrogate's shared order of transforms
    stays theirs. A network that draws from torch's global stream does so for the images that it is
    given; its noise is the prediction's where all of them are attacked at once.

    Args:
        noise: streams [B] of the prediction, one for each image of the batch that is attacked.
    """

    def __init__(self, defense: Defense, noise: Streams) -> None:
        super().__init__(defense.weights, defense.rule, defense.rejects)
        self.defense, self.noise = defense, noise
        self.transforms = dict(defense.transforms)
        self.orders = [part.shared_order for part in random_transforms_in(defense)]

    @property
    def foldable_networks(self) -> list[nn.Module]:
        return self.defense.foldable_networks

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        # An attack's streams say which images of the batch it still attacks.
        rows = generator.rows if isinstance(generator, Streams) else None
        keys = self.noise.keys if rows is None else self.noise.keys[rows]
        parts = random_transforms_in(self.defense)
        before = [part.shared_order for part in parts]
        try:
            for part, order in zip(parts, self.orders, strict=True):
                part.shared_order = order
            with seeded_global_rng(generator_of(self.noise.batch_key, *keys.tolist()), x.device):
                return self.defense.logits(x, Streams(keys, self.noise.batch_key))
        finally:
            for part, order in zip(parts, before, strict=True):
                part.shared_order = order

    def sample_logits(
        self, x: Tensor, generator: Generator = None, draws: int | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.logits(x, generator), self.weights


def drawn_parts(defense: Defense) -> Iterator[tuple[float, Defense]]:
    """Yield (probability, defense) of all that a defense draws one of to predict."""
    parts = defense.components()
    if defense.rule is not random_member or len(defense.weights) == 1:
        yield 1.0, defense
    elif parts[0][1] is not defense:  # a mixture
        for share, part in parts:
            yield from ((share * inner, one) for inner, one in drawn_parts(part))
    elif defense.resamples:  # each prediction draws copies of its own, which the noise fixes
        yield 1.0, defense
    elif is_transform_ensemble(defense):  # whose transformations may be random
        yield from ((share, defense.one(i)) for i, share in enumerate(defense.weights.tolist()))
    else:
        members = zip(defense.weights.tolist(), defense.classifiers, strict=True)
        yield from ((share, Single(net, rejects=defense.rejects)) for share, net in members)
