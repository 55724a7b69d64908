"""A game between an attack and a defense: who perturbs, who adapts, who counts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rob.attacks import Attack, OnStatic, evaluating
from lightning_rob.defenses import Defense
from lightning_rob.randomness import Generator, Streams, fold
from lightning_rob.threat import Threat

ROUNDING = 1e-5  # of a pixel's range, what float32 arithmetic may add to a perturbation


def play(
    attack: Attack,
    defense: Defense,
    x: Tensor,
    y: Tensor,
    index: Tensor,
    *keys: int,
    inferences: int = 1,
) -> tuple[Tensor, Tensor]:
    """One round: the attack perturbs, the defense adapts to what it sees, and answers.

    See `Match`, for arguments and what is returned.
    """
    return Match(attack, defense, *keys).round(x, y, index, inferences)


class Match:
    """An attack against a defense, round after round.

    In each round the attacker perturbs a batch, knowing all of the defense but its private
    randomness; the defense adapts to the perturbed batch, without labels, and answers it. A
    stateful defense goes on with what it has become. The attacker does not see that, but keeps a
    rehearsal of the defender going, by chance of its own, if it looks at more than the static one.

    Args:
        attack: whose threat bounds what it may do.
        defense: as it stands before the first round; it stays as it is.
        *keys: what tells this match from others: a seed, a repeat, a name.
        leaking: the attacker sees what a stateful defense has become.
    """

    def __init__(self, attack: Attack, defense: Defense, *keys: int, leaking: bool = False) -> None:
        self.strategies = attack.strategies(defense)
        self.keys = keys
        self.leaking = leaking
        self.defenders: list[Defense] = [defense] * len(self.strategies)
        self.rehearsals: list[Defense] = [defense] * len(self.strategies)

    def round(
        self, x: Tensor, y: Tensor, index: Tensor, inferences: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Play a round.

        Args:
            x: [B, C, H, W] images.
            y: [B] labels.
            index: [B] the images' indices, by which all noise is keyed.
            inferences: R, how often the defense answers each perturbed image.

        Returns:
            The perturbed images [B, C, H, W], of the likeliest strategy if the attack mixes
            several, and the probability of each answer [R, B, K], the mean over strategies.

        Raises:
            RuntimeError: the attack broke its own threat.
        """
        turns = range(len(self.strategies))
        outcomes = [self._turn(i, x, y, index, inferences) for i in turns]
        likeliest = max(turns, key=lambda i: self.strategies[i][0])
        shares = [p for p, _ in self.strategies]
        expected = [p * found for p, (_, found) in zip(shares, outcomes, strict=True)]
        return outcomes[likeliest][0], torch.stack(expected).sum(0)

    def _turn(
        self, turn: int, x: Tensor, y: Tensor, index: Tensor, inferences: int
    ) -> tuple[Tensor, Tensor]:
        """One strategy: the perturbed images and the probability of each answer."""
        attack, defender = self.strategies[turn][1], self.defenders[turn]
        seen = defender if self.leaking else self.rehearsals[turn]
        x_adv = attack(seen, x, y, Streams.keyed(index, *self.keys, 0))
        check_within(attack, x_adv, x)
        # The defender's chance is its own: no attack has seen this generator.
        private = self._generator(1, index)
        final = defender.adapt(x_adv, private)
        found = answers(final, x_adv, Streams.keyed(index, *self.keys, 2), inferences)
        if defender.stateful:
            self.defenders[turn] = final.settle(private)
            if not self.leaking and not isinstance(attack, OnStatic | Untouched):
                chance = self._generator(3, index)
                self.rehearsals[turn] = seen.adapt(x_adv, chance).settle(chance)
        return x_adv, found

    def _generator(self, key: int, index: Tensor) -> torch.Generator:
        return torch.Generator().manual_seed(fold(*self.keys, key, *index.tolist()))


@dataclass(frozen=True)
class Untouched(Attack):
    """No attack: the images as they are.

    Args:
        threat: what others may do; its bounds hold for the images.
    """

    threat: Threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W], the same."""
        return x


def answers(defense: Defense, x: Tensor, noise: Streams, inferences: int = 1) -> Tensor:
    """The probability of each answer [R, B, K], in eval mode, by the network itself."""
    parts = [noise, *(noise.apart(again) for again in range(1, inferences))]
    with evaluating(defense), torch.no_grad():
        return torch.stack([defense(x, part) for part in parts])


def check_within(attack: Attack, x_adv: Tensor, x: Tensor) -> None:
    """Raise RuntimeError if a perturbation is larger than the threat allows."""
    size = attack.threat.distance(x_adv, x)
    allowed = attack.threat.eps * (1 + 1e-4) + ROUNDING
    low, high = attack.threat.bounds
    inside = (x_adv >= low - ROUNDING).all() and (x_adv <= high + ROUNDING).all()
    if not ((size <= allowed).all() and inside):
        raise RuntimeError(
            f"{type(attack).__name__} left its threat {attack.threat}: "
            f"largest perturbation {float(size.max()):.6g}"
        )
