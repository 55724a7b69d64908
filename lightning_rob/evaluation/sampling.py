"""The sampling probabilities under which a randomized ensemble is most robust."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import eye_array, hstack, kron
from torch import Tensor

from lightning_rob.attacks import Attack
from lightning_rob.attacks.contexts import evaluating
from lightning_rob.defenses import Defense, Ensemble
from lightning_rob.defenses.network import network_logits
from lightning_rob.evaluation.evaluate import indexed_groups
from lightning_rob.evaluation.evaluator import EvaluationSettings, device_of
from lightning_rob.evaluation.groups import Batch, Unpack
from lightning_rob.randomness import Streams
from lightning_rob.rules import random_member
from lightning_rob.runtime.errors import at_least


@dataclass(frozen=True)
class OptimalSampling:
    """Probabilities found by `optimal_sampling`."""

    probs: Tensor  # [M] the best sampling probabilities
    accuracy: float  # the expected one with them under all images that the attack has found
    bound: float  # no probabilities keep a higher accuracy under the same images
    trail: Tensor  # [T, M + 1] all probabilities that were tried, and the accuracy with each
    images: int  # their number


def optimal_sampling(
    ensemble: Defense,
    attack: Attack,
    batches: Iterable[Any],
    *,
    steps: int = 20,
    tolerance: float = 1e-3,
    seed: int = 0,
    max_images: int | None = None,
    unpack: Unpack | None = None,
) -> OptimalSampling:
    """Find the sampling probabilities under which an attack leaves the most.

    The expected error under the strongest attack is convex in the probabilities, since each
    perturbed image has an error that is linear in them (Dbouk and Shanbhag, ICML 2023). The paper
    descends along subgradients. Here the images that have been found are kept, and the next
    probabilities are the best ones against all of them, a linear program: this needs fewer attacks,
    and its value bounds what other probabilities could keep. Other arguments are those of
    `evaluate`.

    Args:
        ensemble: an `Ensemble` of M members, of which one is drawn.
        attack: the strongest attack at hand, such as `LatticeClimber`.
        batches: (x, y) or (x, y, index), as for `evaluate`; all are kept in memory. Images that
            will not judge the ensemble, such as validation images.
        steps: the largest number of attacks on each image.
        tolerance: of the accuracy; the search ends when no probabilities can keep more than this
            above the best so far.
    """
    at_least(1, steps=steps)
    at_least(0, tolerance=tolerance)
    if not isinstance(ensemble, Ensemble) or ensemble.rule is not random_member:
        raise ValueError("optimal_sampling is for an Ensemble of which one drawn member predicts")
    settings = EvaluationSettings(seed=seed, max_images=max_images)
    images = list(indexed_groups(batches, settings, None, unpack))
    if not images:
        raise ValueError("optimal_sampling needs images, got none")
    probs, tried, wrong = ensemble.weights.double().cpu().numpy(), [], []
    for step in range(steps):
        drawn = Ensemble(ensemble.members, torch.from_numpy(probs), rejects=ensemble.rejects)
        defense = drawn.to(device_of(ensemble))
        wrong.append(torch.cat([_fooled(defense, attack, one, seed) for one in images]).numpy())
        tried.append(probs)
        kept = 1 - np.max([one @ np.array(tried).T for one in wrong], 0).mean(0)  # [T]
        probs, bound = _least_wrong(np.stack(wrong, 1))
        # Without an attack on other probabilities than the ensemble's own nothing is known of them.
        if step and kept.max() >= bound - tolerance:
            break
    best = torch.from_numpy(tried[int(kept.argmax())])
    trail = torch.from_numpy(np.column_stack([tried, kept]))
    return OptimalSampling(best, float(kept.max()), bound, trail, len(wrong[0]))


def _fooled(defense: Ensemble, attack: Attack, batch: Batch, seed: int) -> Tensor:
    """Return which members [B, M] the attacked images fool."""
    x, y, index = (part.to(device_of(defense)) for part in batch)
    x_adv = attack(defense, x, y, Streams.from_index(index, seed))
    with evaluating(defense) as copied, torch.no_grad():
        logits = torch.stack([network_logits(member, x_adv) for member in copied.members], 1)
    predicted = logits.argmax(-1)
    fooled = predicted != y[:, None]
    if defense.rejects is not None:  # an attack fails where the image is rejected
        fooled &= predicted != defense.rejects
    return fooled.double().cpu()


def _least_wrong(wrong: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the probabilities of the least error on known images, and the accuracy they keep.

    Of the T perturbed versions of an image, wrong [N, T, M], the attacker takes the one of the
    largest error.
    """
    members = wrong.shape[-1]
    # Images with the same sets of fooled members share a variable, which is at least each error.
    sets = np.sort(wrong @ 2.0 ** np.arange(members))
    kinds, first, counts = np.unique(sets, axis=0, return_index=True, return_counts=True)
    errors = wrong[first].reshape(-1, members)
    largest = kron(eye_array(len(kinds)), np.ones((wrong.shape[1], 1)))
    found = linprog(
        np.concatenate([np.zeros(members), counts / len(wrong)]),
        A_ub=hstack([errors, -largest]),
        b_ub=np.zeros(len(errors)),
        A_eq=np.concatenate([np.ones(members), np.zeros(len(kinds))])[None],
        b_eq=[1.0],
    )
    probs = found.x[:members].clip(0)
    return probs / probs.sum(), 1 - found.fun
