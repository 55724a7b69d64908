"""One game between an attack and a defense: who perturbs, who adapts, who counts."""

import torch
from torch import Tensor

from lightning_rob.attacks import Attack, evaluating
from lightning_rob.defenses import Defense
from lightning_rob.randomness import Streams, fold

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
    """The attack perturbs, the defense adapts to what it sees, and answers.

    Args:
        attack: whose threat bounds what it may do.
        defense: as it stands before the round.
        x: [B, C, H, W] images.
        y: [B] labels.
        index: [B] the images' indices, by which all noise is keyed.
        *keys: what tells this game from others: a seed, a repeat, a name.
        inferences: R, how often the defense answers each perturbed image.

    Returns:
        The perturbed images [B, C, H, W], of the likeliest strategy if the attack mixes several,
        and the probability of each answer [R, B, K], the mean over strategies.

    Raises:
        RuntimeError: the attack broke its own threat.
    """
    strategies = attack.strategies(defense)
    outcomes = [_round(pure, defense, x, y, index, keys, inferences) for _, pure in strategies]
    likeliest = max(range(len(outcomes)), key=lambda i: strategies[i][0])
    expected = [p * found for (p, _), (_, found) in zip(strategies, outcomes, strict=True)]
    return outcomes[likeliest][0], torch.stack(expected).sum(0)


def _round(
    attack: Attack,
    defense: Defense,
    x: Tensor,
    y: Tensor,
    index: Tensor,
    keys: tuple[int, ...],
    inferences: int,
) -> tuple[Tensor, Tensor]:
    """One strategy played: the perturbed images and the probability of each answer."""
    x_adv = attack(defense, x, y, Streams.keyed(index, *keys, 0))
    check_within(attack, x_adv, x)
    # The defender's chance is its own: no attack has seen this generator.
    private = torch.Generator().manual_seed(fold(*keys, 1))
    final = defense.adapt(x_adv, private)
    return x_adv, answers(final, x_adv, Streams.keyed(index, *keys, 2), inferences)


def answers(defense: Defense, x: Tensor, noise: Streams, inferences: int = 1) -> Tensor:
    """The probability of each answer [R, B, K], in eval mode, by the network itself."""
    parts = [noise, *(noise.apart(again) for again in range(1, inferences))]
    with evaluating(defense), torch.no_grad():
        return torch.stack([defense(x, part) for part in parts])


def check_within(attack: Attack, x_adv: Tensor, x: Tensor) -> None:
    """Raise RuntimeError if a perturbation is larger than the threat allows."""
    size = attack.threat.size(x_adv - x)
    allowed = attack.threat.eps * (1 + 1e-4) + ROUNDING
    low, high = attack.threat.bounds
    inside = (x_adv >= low - ROUNDING).all() and (x_adv <= high + ROUNDING).all()
    if not ((size <= allowed).all() and inside):
        raise RuntimeError(
            f"{type(attack).__name__} left its threat {attack.threat}: "
            f"largest perturbation {float(size.max()):.6g}"
        )
