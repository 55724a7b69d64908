"""A game between an attack and a defense: who perturbs, who adapts, who counts."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_rob.attacks import Attack, evaluating
from lightning_rob.defenses import Defense
from lightning_rob.precision import in_float32
from lightning_rob.randomness import Generator, Streams, derive_seed, seeded_global_rng
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

    See `AttackerDefenderSession`, for arguments and what is returned.
    """
    return AttackerDefenderSession(attack, defense, *keys).round(x, y, index, inferences)


class AttackerDefenderSession:
    """An attack against a defense, round after round.

    In each round the attacker perturbs a batch, knowing all of the defense but its private
    randomness; the defense adapts to the perturbed batch, without labels, and predicts. A
    stateful defense goes on with its new state. The attacker does not see that state, but keeps a
    rehearsal of the defender going, with randomness of its own, if it looks at more than the
    static network.

    Args:
        attack: whose threat bounds what it may do.
        defense: as it stands before the first round; it stays as it is.
        *keys: seed of the attack's noise: a seed, a repeat, a name.
        private: seed of the defender's randomness; None takes `keys`. Matches that share it meet
            the same defender, so that their scores differ by the attacks alone.
        draws: how many defenders, each with randomness of its own, answer the same perturbed batch.
        attacker_sees_state: the attacker sees what a stateful defense has become.

    Raises:
        ValueError: several defenders, and an attacker who sees the state of one.
    """

    def __init__(
        self,
        attack: Attack,
        defense: Defense,
        *keys: int,
        private: tuple[int, ...] | None = None,
        draws: int = 1,
        attacker_sees_state: bool = False,
    ) -> None:
        if attacker_sees_state and draws > 1:
            raise ValueError(
                f"an attacker who sees the defender's state plays against one: "
                f"got attacker_sees_state with {draws} private draws"
            )
        self.strategies = attack.strategies(defense)
        self.keys = keys
        self.private = keys if private is None else private
        self.attacker_sees_state = attacker_sees_state
        self.defenders = [[defense] * draws for _ in self.strategies]
        self.rehearsals: list[Defense] = [defense] * len(self.strategies)

    def round(
        self, x: Tensor, y: Tensor, index: Tensor, inferences: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Play a round.

        Args:
            x: [B, C, H, W] images.
            y: [B] labels.
            index: [B] the images' indices, by which all noise is keyed.
            inferences: R, how often each defender predicts each perturbed image.

        Returns:
            The perturbed images [B, C, H, W], of the likeliest strategy if the attack mixes
            several, and the probability of each class [draws * R, B, K], the mean over strategies.

        Raises:
            RuntimeError: the attack broke its own threat.
        """
        turns = range(len(self.strategies))
        own = torch.Generator().manual_seed(derive_seed(*self.keys, 5, *index.tolist()))
        # The stream is for noise that a network takes from torch's own; adapting is in float32 too.
        with seeded_global_rng(own, x.device), in_float32():
            outcomes = [self._turn(i, x, y, index, inferences) for i in turns]
        likeliest = max(turns, key=lambda i: self.strategies[i][0])
        shares = [p for p, _ in self.strategies]
        expected = [p * found for p, (_, found) in zip(shares, outcomes, strict=True)]
        return outcomes[likeliest][0], torch.stack(expected).sum(0)

    def _turn(
        self, turn: int, x: Tensor, y: Tensor, index: Tensor, inferences: int
    ) -> tuple[Tensor, Tensor]:
        """One strategy: the perturbed images and the probability of each class."""
        attack, defenders = self.strategies[turn][1], self.defenders[turn]
        seen = defenders[0] if self.attacker_sees_state else self.rehearsals[turn]
        x_adv = attack(seen, x, y, Streams.from_index(index, *self.keys, 0))
        check_within(attack, x_adv, x)
        found = []
        for draw, defender in enumerate(defenders):
            # The defender's randomness is its own: no attack has seen this generator.
            private = self._generator(index, 1, draw)
            final = defender.adapt(x_adv, private)
            noise = Streams.from_index(index, *_of_draw(self.private, 2, draw))
            found.append(answers(final, x_adv, noise, inferences))
            if defender.stateful:
                defenders[draw] = final.after_batch(private)
        rehearses = not (self.attacker_sees_state or attack.ignores_state)
        if defenders[0].stateful and rehearses:
            chance = self._generator(index, 3)
            self.rehearsals[turn] = seen.adapt(x_adv, chance).after_batch(chance)
        return x_adv, torch.cat(found)

    def _generator(self, index: Tensor, key: int, draw: int = 0) -> torch.Generator:
        keys = self.keys if key == 3 else self.private
        seed = derive_seed(*_of_draw(keys, key, draw), *index.tolist())
        return torch.Generator().manual_seed(seed)


def _of_draw(keys: tuple[int, ...], key: int, draw: int) -> tuple[int, ...]:
    """Seeds of the defender's randomness; the first draw's are those of a single one."""
    return (*keys, key) if draw == 0 else (*keys, key, -draw)


@dataclass(frozen=True)
class NoAttack(Attack):
    """No attack: the images as they are.

    Args:
        threat: what others may do; its bounds hold for the images.
    """

    ignores_state: ClassVar[bool] = True
    threat: Threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W], the same."""
        return x


def answers(defense: Defense, x: Tensor, noise: Streams, inferences: int = 1) -> Tensor:
    """The probability of each class [R, B, K], in eval mode, by the network itself.

    A network with noise of its own, from torch's global streams, draws the same for the same noise.
    """
    parts = [noise, *(noise.fold_in(again) for again in range(1, inferences))]
    own = torch.Generator().manual_seed(derive_seed(noise.batch_key, *noise.keys.tolist()))
    with evaluating(defense), torch.no_grad(), seeded_global_rng(own, x.device):
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
