"""A defense that is checked, and a few images on which it is measured."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from lightning_rob.attacks import attacking, evaluating
from lightning_rob.attacks.auto import suite_kind, surrogate_for
from lightning_rob.attacks.backward import entered
from lightning_rob.defenses import Defense, is_transform_ensemble
from lightning_rob.defenses.copies import fresh
from lightning_rob.objectives import Objective, expected_ce, expected_margin
from lightning_rob.randomness import Streams, derive_seed, own_streams

DIRECTIONS = 4  # random corners, of each image; more where there are few images


class CheckTarget:
    """A defense that is checked and not changed.

    Args:
        bounds: a pixel's least and largest value.
        seed: seed of all noise.
        random: whether one network draws noise, which its kind does not declare.
    """

    def __init__(
        self,
        defense: Defense,
        bounds: tuple[float, float] = (0.0, 1.0),
        seed: int = 0,
        random: bool = False,
    ) -> None:
        self.defense = defense
        self.bounds = bounds
        self.seed = seed
        self.kind = suite_kind(defense)
        self.transductive = self.kind == "transductive"  # a batch is a round
        # whether it stands for a defense whose `forward` returns the exact expectation
        self.declared_exact = self.kind in ("single", "ensemble", "randomized")
        self.exact = self.declared_exact and not random
        self.changed: set[str] = set()  # weights, buffers and attributes that a prediction changed

    @property
    def differentiable_part(self) -> Defense | None:
        """The current defense; of a transformation ensemble the members that have a gradient."""
        if not is_transform_ensemble(self.defense):
            return self.defense.adapted_model
        transforms = self.defense.transforms.values()
        members = [i for i, transform in enumerate(transforms) if transform.differentiable]
        return self.defense.part(members) if members else None


class CheckBatch:
    """A batch of images [B, C, H, W], predicted and differentiated on demand."""

    def __init__(
        self,
        target: CheckTarget,
        x: Tensor,
        y: Tensor,
        index: Tensor | None = None,
        directions: int = DIRECTIONS,
    ) -> None:
        self.target = target
        self.directions = directions  # in which slopes are compared with differences, at least
        self.x, self.y = x.detach().clone(), y  # a network may write to them
        self.index = torch.arange(len(x), device=x.device) if index is None else index
        self.near: Tensor | None = None  # the column `slope_near`, once it is measured

    def noise(self, key: str = "") -> Streams:
        """Return the source of the defense's randomness, the same at every call with one key."""
        return Streams.from_index(self.index, self.target.seed, *b"audit", *key.encode())

    @contextmanager
    def drawn(self, key: str = "", rows: slice = slice(None)) -> Iterator[Streams]:
        """Yield the source of randomness of a part of the batch; seed torch's own streams by it."""
        noise = self.noise(key)[torch.arange(len(self.x), device=self.x.device)[rows]]
        # A network that draws from torch's global stream sees the same noise at every call too.
        with own_streams(derive_seed(noise.batch_key, *noise.keys.tolist()), self.x.device):
            yield noise

    def unknown(self) -> Tensor:
        """Return the column [B] of a value that could not be measured: NaN."""
        return self.x.new_full((len(self.x),), torch.nan)

    def logits_of(self, x: Tensor, key: str = "", rows: slice = slice(None)) -> Tensor:
        """Return the current defense's logits [S, B, K] of images, with the noise of some rows."""
        defense = fresh(self.target.defense.adapted_model)
        with evaluating(defense) as copied, torch.no_grad(), self.drawn(key, rows) as noise:
            return copied.sample_logits(x, noise)[0].float()

    @cached_property
    def logits(self) -> Tensor:
        """The logits [S, B, K] of the clean images."""
        return self.logits_of(self.x)

    @cached_property
    def nonfinite(self) -> Tensor:
        """Images [B] with non-finite logits."""
        return nonfinite(self.logits)

    @property
    def differentiable(self) -> bool:
        """Whether the logits depend on the images by operations that have a gradient."""
        return self.gradients is not None

    @cached_property
    def gradients(self) -> tuple[Tensor, Tensor] | None:
        """The gradients [B, D] of margin and cross-entropy; None without a gradient."""
        margin, loss = self._gradient(expected_margin), self._gradient(expected_ce)
        return None if margin is None or loss is None else (margin.flatten(1), loss.flatten(1))

    def _gradient(self, objective: Objective) -> Tensor | None:
        part = self.target.differentiable_part
        if part is None:
            return None
        with (
            attacking(fresh(part)) as defense,
            entered(surrogate_for(self.target.defense), defense),
            self.drawn() as noise,
        ):
            x = self.x.detach().clone().requires_grad_()
            logits, weights = defense.sample_logits(x, noise)
            if not logits.requires_grad:
                return None
            value = objective(logits.float(), weights, self.y.clone()).sum()
            return torch.autograd.grad(value, x, allow_unused=True)[0]


def nonfinite(logits: Tensor) -> Tensor:
    """Return the images [B] for which a draw of the logits [S, B, K] has a non-finite maximum."""
    return ~logits.amax(-1).isfinite().all(0)
