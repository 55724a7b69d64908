"""The protocol between attacker and defender: who sees what, who adapts, in which rounds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_rob.attacks import Attack, evaluating
from lightning_rob.attacks.nested import walk
from lightning_rob.defenses import Defense
from lightning_rob.defenses.copies import fresh
from lightning_rob.evaluation.groups import Unpack, fetch, unpacked
from lightning_rob.randomness import Streams, generator_of, seeded_global_rng
from lightning_rob.runtime.errors import at_least
from lightning_rob.runtime.precision import in_float32

# Keys of the noise for each purpose; they are part of every published figure.
ATTACK, ADAPT, PREDICT, REHEARSE, GLOBAL = 0, 1, 2, 3, 5
ROUNDING = 1e-5  # of a pixel's range: float32 arithmetic may add this much to a perturbation


class AttackerDefenderSession:
    """One attack against one defense, round after round.

    In each round the attacker perturbs a batch. It knows all of the defense but its private
    randomness. The defense adapts to the perturbed batch, without labels, and predicts. A stateful
    defense keeps its new state for the next round. The attacker does not see that state, but
    rehearses: it adapts a copy of the defender of its own, with randomness of its own.

    Args:
        *keys: seed of the attack's noise: a seed, a repeat, a name; the images' indices too.
        private: seed of the defender's randomness; None takes `keys`. Sessions that share it meet
            the same defender, so that their scores differ by the attacks alone.
        draws: number of defenders, each with randomness of its own, that predict the same
            perturbed batch.
        attacker_sees_state: attack the defender's current state, not the rehearsed one.
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
        for _, strategy in self.strategies:
            for _, _, part in strategy.turns(2):
                if any(inner.splits_rounds for inner in walk(part)):
                    raise TypeError(
                        "FewAttacked inside another attack would attack all images at once: put "
                        "it around that attack, such as FewAttacked(GMSA(...))"
                    )
        self.keys = keys
        self.private = keys if private is None else private
        self.attacker_sees_state = attacker_sees_state
        self.defenders = [[defense] * draws for _ in self.strategies]
        self.rehearsals: list[Defense] = [defense] * len(self.strategies)

    def step(
        self, x: Tensor, y: Tensor, index: Tensor, inferences: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Attack one batch, let the defense adapt to it, and predict R times, the inferences.

        Returns:
            The perturbed images [B, C, H, W], of the most probable strategy if the attack mixes
            several, and the probability of each class [draws * R, B, K], the mean over strategies.
        """
        perturbed, expected = [], []
        for number, (share, attack) in enumerate(self.strategies):
            x_adv, parts, places = x.clone(), [], []
            before = [*self.defenders[number]], self.rehearsals[number]
            for order, attacked, part in attack.turns(len(x)):
                # Turns are played instead of each other: all begin in the state before the round.
                self.defenders[number], self.rehearsals[number] = [*before[0]], before[1]
                images, predicted = self._turn(number, part, x, y, index, order, inferences)
                x_adv[order[-attacked:]] = images[-attacked:]
                parts.append(predicted[:, -attacked:])
                places.append(order[-attacked:])
            perturbed.append(x_adv)
            expected.append(share * torch.cat(parts, 1)[:, torch.cat(places).argsort()])
        shares = [share for share, _ in self.strategies]
        return perturbed[shares.index(max(shares))], torch.stack(expected).sum(0)

    def _turn(
        self,
        number: int,
        attack: Attack,
        x: Tensor,
        y: Tensor,
        index: Tensor,
        order: Tensor,
        inferences: int,
    ) -> tuple[Tensor, Tensor]:
        """Let one strategy attack a batch in some order, and the defense adapt and predict."""
        x, y, index = x[order], y[order], index[order]
        images, defenders, found = index.tolist(), self.defenders[number], []
        # Networks may draw noise from torch's global stream; adaptation is in full float32 too.
        with seeded_global_rng(generator_of(*self.keys, GLOBAL, *images), x.device), in_float32():
            seen = defenders[0] if self.attacker_sees_state else self.rehearsals[number]
            noise = Streams.from_index(index, *self.keys, ATTACK)
            noise.rows = order.to(x.device)  # where findings about an image are noted
            x_adv = attack(_as_made(seen), x, y, noise)
            check_within(attack, x_adv, x)
            for draw, defender in enumerate(defenders):
                # The defender's randomness is its own: no attack has seen this generator. That
                # of the first draw is the randomness of a single one.
                more = (-draw,) if draw else ()
                private = generator_of(*self.private, ADAPT, *more, *images)
                final = defender.adapt(x_adv, private)
                noise = Streams.from_index(index, *self.private, PREDICT, *more)
                found.append(predictions(_as_made(final), x_adv, noise, inferences))
                if defender.stateful:
                    defenders[draw] = final.after_batch(private)
            if defenders[0].stateful and not (self.attacker_sees_state or attack.ignores_state):
                own = generator_of(*self.keys, REHEARSE, *images)
                self.rehearsals[number] = seen.adapt(x_adv, own).after_batch(own)
        return x_adv, torch.cat(found)


def _as_made(defense: Defense) -> Defense:
    """Return a defense without what earlier predictions wrote into its copy, unless it adapts."""
    return defense if defense.transductive else fresh(defense)


def predictions(defense: Defense, x: Tensor, noise: Streams, inferences: int = 1) -> Tensor:
    """Return the probability of each class [R, B, K], in eval mode, a function of the noise."""
    parts = [noise, *(noise.fold_in(again) for again in range(1, inferences))]
    own = generator_of(noise.batch_key, *noise.keys.tolist())
    with seeded_global_rng(own, x.device), evaluating(defense) as copied, torch.no_grad():
        return torch.stack([copied(x, part) for part in parts])


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


@dataclass(frozen=True)
class RoundProtocol:
    """The rounds in which a defense that adapts to the test batch is attacked.

    Args:
        order: "natural", the order of the data set or, of a part of the images, a random one by
            the seed; or "by_label", in which every two consecutive rounds are sorted by label, so
            that a round has few classes (Chen et al. 2022, Table 5).
        images: images in a round; None is the batch size of the evaluation.
        attacker_sees_state: show the attacker the state of a stateful defense; otherwise it knows
            only the state of its own rehearsal.
    """

    order: Literal["natural", "by_label"] = "natural"
    images: int | None = None
    attacker_sees_state: bool = False

    def __post_init__(self) -> None:
        if self.order not in ("natural", "by_label"):
            raise ValueError(f"order must be 'natural' or 'by_label', got {self.order!r}")
        at_least(1, images=self.images)

    def size(self, loader: Any) -> int:
        """Return the number of images in a round of this loader."""
        size = self.images or getattr(loader, "batch_size", None)
        if size is None:
            raise ValueError("the loader has no batch size to make rounds of: give protocol.images")
        return int(size)

    def rounds(
        self,
        loader: Any,
        order: Tensor,
        rank: int = 0,
        world_size: int = 1,
        unpack: Unpack | None = None,
    ) -> Iterator[tuple[Tensor, Any]]:
        """Yield the rounds of one process: positions, and the batch as the loader would collate it.

        The images of a round, of positions [N], do not depend on the number of processes.
        """
        size = self.size(loader)
        for number in range(rank, -(-len(order) // size), world_size):
            positions = order[number * size : (number + 1) * size]
            if self.order == "by_label":
                # Two consecutive rounds share a window of images, sorted by label and cut in half.
                start = number // 2 * 2 * size
                window = order[start : start + 2 * size]
                labels = unpacked(fetch(loader, window), unpack)[1]
                window = window[labels.argsort(stable=True)]
                positions = window[:size] if number % 2 == 0 else window[size:]
            yield positions, fetch(loader, positions)

    def check(self, loader: Any, images: int, processes: int) -> None:
        """Raise ValueError for one round and several processes, before any starts to wait."""
        if processes > 1 and 0 < images <= self.size(loader):
            raise ValueError(
                f"all {images} images make one round, which one of {processes} processes plays "
                "while the others wait for it and time out: start one process "
                "(--trainer.devices=1), or play smaller rounds, "
                f"protocol.images={-(-images // processes)} or fewer"
            )

    def describe(self, defense: Defense, images: int, processes: int = 1) -> dict[str, Any]:
        """Return the protocol as a record has it; each process plays a sequence of its own."""
        described: dict[str, Any] = {"order": self.order, "images": images}
        if not defense.stateful:
            return described | {"defender": "stateless"}
        sees = "sees its state" if self.attacker_sees_state else "rehearses its state"
        return described | {"defender": "stateful", "attacker": sees, "sequences": processes}
