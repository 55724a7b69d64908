"""The worst case over several attacks, without the luck of the draw.

Where a defense has no randomness, each image's minimum over the attacks is its accuracy under the
strongest of them. Where it has, every score is noisy, and a minimum of noisy scores is too low:
nine attacks that change nothing took a random defense from 78 % to 58 %. There the attack is chosen
on one half of the predictions and scored on the other half, then the other way round. Where a
defense adapts to its test batch, images belong together, and one attack is chosen for all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_rob.attacks.auto import suite_kind
from lightning_rob.attacks.contexts import evaluating
from lightning_rob.defenses import Defense
from lightning_rob.defenses.copies import working_copy
from lightning_rob.evaluation.records import Result, measured
from lightning_rob.randomness import Streams, derive_seed, own_streams

WORST = "worst"
COMMON = "those that all attacks have"
PRIOR = 4  # predictions of an image that an attack's mean over all images counts for
TIMES = 4  # predictions of the same images, which are compared to find randomness
ROUNDING = 1e-5  # relative to the largest logit: what a deterministic network's logits may differ


@dataclass(frozen=True)
class Worst:
    """Scores under the strongest attack."""

    index: Tensor  # [n] the images' indices, rising
    scores: Tensor  # [n, C] in [0, 1]; C is 1, 2 halves that judge each other, or private draws
    choice: str  # the way in which the attack was chosen
    private_draws: bool = False  # whether the columns are defenders that adapted
    partial: bool = False  # whether some attacks have more images

    def row(self, details: Mapping[str, Any]) -> Result:
        """Return the row `worst` of a table."""
        found = {**details, "choice": self.choice} | ({"images": COMMON} if self.partial else {})
        draws = self.scores if self.private_draws else None
        return measured(WORST, self.scores.mean(1), 0.0, found, draws)


def worst_case(
    tables: Sequence[tuple[Tensor, Tensor]], random: bool = False, joint: bool = False
) -> Worst:
    """Return the scores under the strongest attack, on the images that all tables have.

    - Without randomness: the attack is chosen for each image (its minimum).
    - With it, and at least two inferences: for each image, on half of the inferences; the other
      half gives the scores. Then the halves are swapped.
    - With one inference: once for all images, on every second image; the other images give the
      scores. Then the halves are swapped.
    - Where predictions depend on the whole batch, once for all images: on half of the private
      draws if there are several, else by the lowest mean.

    Args:
        tables: of each evaluation the indices [N], rising, and the scores [N, A, R] of A columns,
            in R inferences or private draws. Clean images are a column beside the attacks, for an
            attacker may leave an image as it is.
        random: whether predictions vary, so that a minimum of their scores would be too low; an
            evaluation finds out on the first images of each group and on attacked images.
        joint: whether predictions depend on the whole batch (transductive defenses).

    Returns:
        The scores of the images that are in every table.
    """
    index = tables[0][0]
    for other, _ in tables[1:]:
        index = index[torch.isin(index, other)]
    parts = [scores[torch.searchsorted(own, index)].double() for own, scores in tables]
    means = torch.cat([part.mean(2) for part in parts], 1)
    if not (random or joint):
        scores, choice = means.amin(1, keepdim=True), "per-image minimum"
    elif all(part.shape[2] > 1 for part in parts):
        scores, choice = _by_halves(parts, joint)
    elif joint or len(index) < 2:
        scores, choice = means[:, [_strongest(means)]], "attack with the lowest mean"
    else:
        scores, choice = means[:, :1].clone(), "one attack, chosen on the other half of the images"
        even = torch.arange(len(means)) % 2 == 0
        # Chosen on one half and scored on the other: the luck of the choice does not count.
        for half in (even, ~even):
            scores[half, 0] = means[half, _strongest(means[~half])]
    partial = any(len(own) > len(index) for own, _ in tables)
    return Worst(index, scores, choice, joint and scores.shape[1] > 1, partial)


def _strongest(means: Tensor) -> int:
    """The attack with the lowest mean of scores [n, A]."""
    return int(means.mean(0).argmin()) if len(means) else 0


def _by_halves(parts: list[Tensor], joint: bool) -> tuple[Tensor, str]:
    """Choose by half of the inferences or draws of scores [n, A, R], and score on the other."""
    first = [part[..., : part.shape[2] // 2] for part in parts]
    second = [part[..., part.shape[2] // 2 :] for part in parts]
    sides = [(first, second), (second, first)]
    if joint:
        once = []
        for by, scores in sides:
            place = _strongest(torch.cat([part.mean(2) for part in by], 1))
            once.append([part[:, a] for part in scores for a in range(part.shape[1])][place])
        return torch.cat(once, 1), "one attack, chosen on the other half of the private draws"
    each = []
    for by, scores in sides:
        expected = []
        for part in by:
            mean, count = part.mean(2), part.shape[2]
            # A few predictions of one image say little: the attack's mean over all images counts
            # as `PRIOR` more. Of two attacks that tie on an image the stronger one on all wins.
            expected.append((count * mean + PRIOR * mean.mean(0)) / (count + PRIOR))
        strongest = torch.cat(expected, 1).argmin(1, keepdim=True)
        each.append(torch.cat([part.mean(2) for part in scores], 1).gather(1, strongest))
    return torch.cat(each, 1), "per image, chosen on the other half of the inferences"


def draws_noise(defense: Defense, x: Tensor, index: Tensor) -> bool:
    """Return whether a defense of one network, which declares no noise, predicts at random."""
    return suite_kind(defense) == "single" and is_random(
        working_copy(defense), x, index.to(x.device)
    )


def is_random(defense: Defense, x: Tensor, index: Tensor) -> bool:
    """Return whether a defense predicts at random: predictions differ by more than rounding.

    They are made in eval mode, with different noise, which is keyed by the images' indices [B]. A
    network that draws one of two parts for a whole batch often draws the same twice.
    """
    seed = derive_seed(*index.tolist())
    with own_streams(seed, x.device), evaluating(defense) as copied, torch.no_grad():
        first, *others = (copied.logits(x, Streams.from_index(index, k)) for k in range(TIMES))
    largest = float(first.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if first.numel() else 0.0
    room = ROUNDING * (1 + largest)
    same = [torch.isclose(first, o, rtol=0.0, atol=room, equal_nan=True).all() for o in others]
    return not all(map(bool, same))
