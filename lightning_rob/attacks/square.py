"""Square Attack: random search over square windows of the image, without gradients."""

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from lightning_rob.attacks.active_set import ActiveBatch, derived, positions, rows_of
from lightning_rob.attacks.base import Attack, check_norm, check_start
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.foreign import scores_of
from lightning_rob.defenses import Defense
from lightning_rob.defenses.per_image import restricted_to
from lightning_rob.objectives import check_logits, margin, smoothed_votes
from lightning_rob.randomness import Generator, uniform
from lightning_rob.rules import mean_logits, mean_probs, random_member, top2_majority
from lightning_rob.runtime.errors import at_least, within
from lightning_rob.threat import Threat, choose, divisor, guard, scale

SCHEDULE = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # queries after which p is halved
AHEAD = 50  # queries whose random numbers are drawn at once
GUARD = 1e-12  # added to divisors, as in the authors' code

Proposal = tuple[Tensor, Tensor]  # rows [r] of a batch, and candidate images [r, C, H, W] for them


@dataclass(frozen=True)
class Square(Attack):
    """Square Attack (Andriushchenko et al. 2020): random search, by the scores alone.

    Each query changes a window of an image; the change is kept if it lowers the margin, the label's
    score minus the largest other one. Where members vote, scores are smoothed votes. For linf
    (Algorithm 2) each channel of the window moves to +eps or -eps; the search starts with vertical
    stripes of these. For l2 (Algorithm 3) the norm of a second window moves into the first one, in
    the form of two opposite pyramids; the search starts with tiles of these. For l1 (Croce and Hein
    2021) the pyramids are steeper, and projected in place of scaled. A window covers a share p of
    the image, halved after 10, 50, 200, 500, 1,000, 2,000 … queries. Windows are drawn for each
    image. A change that leaves an image as it is costs no pass, but counts.

    It attacks the vote where members vote, otherwise the mean prediction, as AutoAttack does
    (`lightning_rob.attacks.foreign.scores`). Images that are fooled leave; the others are returned
    at their smallest margin.

    Args:
        threat: the ball and the bounds; linf, l2 or l1.
        p: share of the image in the first windows.
        start: an attack in the same ball, from whose images the search starts.
    """

    effort: ClassVar[str] = "queries"
    threat: Threat
    queries: int = 5000
    p: float = 0.8
    draws: int | None = None
    start: Attack | None = None

    def __post_init__(self) -> None:
        at_least(1, queries=self.queries, draws=self.draws)
        within(0, 1, p=self.p)
        check_norm(self, math.inf, 2, 1)
        check_start(self)

    @property
    def knowledge(self) -> str:  # type: ignore[override]
        """The knowledge of the attacker: that of the attack at its start, if there is one."""
        return Attack.knowledge if self.start else "the predictions"

    def cost(self, count: PassCount) -> int:
        before = self.start.cost(count) if self.start else 0
        return before + count.drawn(self.draws) * (2 + self.queries)  # the clean image, the start

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        start = self.start.perturb(defense, x, y, generator) if self.start else None
        return self.search(defense, x, y, generator, start)

    @torch.no_grad()
    def search(
        self, defense: Defense, x: Tensor, y: Tensor, generator: Generator, start: Tensor | None
    ) -> Tensor:
        """Search from images [B, C, H, W] of another attack, or from random ones."""
        if x.dim() != 4:
            raise ValueError(f"Square is for images [B, C, H, W], got shape {list(x.shape)}")
        walk = Walk(positions(x), x, y.long(), derived(generator, 0), x, x.new_zeros(len(x)), x)
        walk.margin = self._margin(defense, x, walk, walk.generator, check=True)
        x_final, walk = x.clone(), walk.select(walk.margin > -torch.inf)
        if len(walk):
            walk.best = self._random(walk) if start is None else start[walk.index]
            walk.margin = self._margin(defense, walk.best, walk, walk.generator)
        for query in range(self.queries):
            # Images that fool leave, and cost no further passes.
            rows = (walk.margin > -torch.inf).nonzero()[:, 0]
            if len(rows) < len(walk):
                x_final[walk.index] = walk.best  # final for the images that leave now
                walk = walk.select(rows)
            if not len(walk):
                return x_final
            if query % AHEAD == 0:
                walk.numbers = uniform(walk.x, AHEAD, 5 + x.shape[1], generator=walk.generator)
            rows, candidate = self._propose(walk, query)
            if len(rows):
                noise, before = derived(rows_of(walk.generator, rows), query), walk.margin[rows]
                after = self._margin(defense, candidate, walk, noise, rows)
                keep = after < before
                best = choose(keep, candidate, walk.best[rows])
                walk.best[rows], walk.margin[rows] = best, torch.where(keep, after, before)
        x_final[walk.index] = walk.best
        return x_final

    def _margin(
        self,
        defense: Defense,
        x: Tensor,
        walk: "Walk",
        noise: Generator,
        rows: Tensor | None = None,
        check: bool = False,
    ) -> Tensor:
        """Return the margins [b] of images [b, C, H, W]; minus infinity where an image fools."""
        index, y = (walk.index, walk.y) if rows is None else (walk.index[rows], walk.y[rows])
        with restricted_to(defense, index):  # labels behind which it rejects are those of a batch
            logits, weights = defense.sample_logits(x, noise, self.draws)
            values = scores_of(logits, weights, rule := defense.rule)
        if rule not in (random_member, mean_probs, mean_logits) and len(logits) > 1:
            # The rule decides; the smoothed one, below 2, says how near the other classes are.
            near = smoothed_votes(logits, weights, 1 + (rule is top2_majority))
            values = near + 2 * rule(logits, weights)
        if check:
            check_logits(values[None], y)
        return (-margin(values, y)).masked_fill(values.argmax(-1) != y, -torch.inf)

    def _random(self, walk: "Walk") -> Tensor:
        """Return random images [b, C, H, W] to start from."""
        x, (channels, height, width) = walk.x, walk.x.shape[1:]
        if self.threat.p == math.inf:
            signs = _signs(uniform(x, channels, 1, width, generator=walk.generator))
            return (x + scale(signs.expand_as(x), self.threat.radius(x))).clamp(*self.threat.bounds)
        side = max(min(height, width) // 5, 1)
        down, across = height // side, width // side
        numbers = uniform(x, 1 + channels, down, across, 1, 1, generator=walk.generator)
        tiles = _signs(numbers[:, 1:]) * self._turned_pyramids(side, numbers[:, :1])
        tiles = tiles.transpose(3, 4).reshape(len(x), channels, down * side, across * side)
        top, left = (height - down * side) // 2, (width - across * side) // 2
        delta = torch.zeros_like(x)
        delta[:, :, top : top + down * side, left : left + across * side] = tiles
        return self._on_sphere(delta, x)

    def _propose(self, walk: "Walk", query: int) -> Proposal:
        """Return the images that a query changes, and their candidates."""
        numbers, (height, width) = walk.numbers[:, query % AHEAD], walk.x.shape[2:]
        share = self.p / 2 ** sum(query > last for last in SCHEDULE)
        side = max(round(math.sqrt(share * height * width)), 1)
        if self.threat.p < math.inf:
            side = max(side, 3)
            return self._window_of_pyramids(walk, numbers, min(side + 1 - side % 2, height, width))
        # Each channel of a window moves to +eps or -eps; in some images this changes nothing.
        window = _window(numbers[:, :2], min(side, height, width), walk.x)
        before, signs = walk.x.flatten(2).gather(2, window), _signs(numbers[:, 5:, None])
        new = (before + scale(signs, self.threat.radius(walk.x))).clamp(*self.threat.bounds)
        current = walk.best.flatten(2)
        rows = (new != current.gather(2, window)).flatten(1).any(1).nonzero()[:, 0]
        return rows, current[rows].scatter(2, window[rows], new[rows]).view_as(walk.x[rows])

    def _window_of_pyramids(self, walk: "Walk", numbers: Tensor, side: int) -> Proposal:
        """Move the norm in a second window, and what is left of eps, into pyramids in a first."""
        x, delta, p = walk.x, (walk.best - walk.x).flatten(2), self.threat.p
        # The norm that leaves the second window is spent in the first, so that eps is used up.
        first, second = (_window(numbers[:, at : at + 2], side, x) for at in (0, 2))
        both = torch.zeros_like(delta).scatter(2, first, 1.0).scatter(2, second, 1.0)
        in_windows = (delta * both).abs().pow(p).sum(2, keepdim=True)
        unused = (self.threat.radius(x) ** p - self.threat.size(delta) ** p).clamp_min(0)
        unused = unused / x.shape[1]
        new = self._turned_pyramids(side, numbers[:, 4, None, None]).flatten(1)[:, None]
        new = new * _signs(numbers[:, 5:, None]) + self._normalized(delta.gather(2, first))
        new = self._normalized(new) * (unused[:, None, None] + in_windows).pow(1 / p)
        if p == 1:
            new = new * x.shape[1]  # as the authors do; the projection takes back what is too much
        delta = delta.scatter(2, second, 0.0).scatter(2, first, new)
        return positions(x), self._on_sphere(delta.view_as(x), x)

    def _on_sphere(self, delta: Tensor, x: Tensor) -> Tensor:
        """Scale perturbations [b, …] to the radius, or project them, and add them within bounds."""
        if self.threat.p == 1:
            return self.threat.project(x + delta, x)
        size = divisor(self.threat.size(delta), GUARD)
        return self.threat.apply(scale(delta, self.threat.radius(x) / size), x)

    def _turned_pyramids(self, side: int, numbers: Tensor) -> Tensor:
        """Return `pyramids`, turned where numbers [..., 1, 1] are below one half."""
        pattern = pyramids(side, self.threat.p).to(numbers, non_blocking=True)
        return torch.where(numbers < 0.5, pattern.T, pattern)

    def _normalized(self, window: Tensor) -> Tensor:
        """Scale each channel of a window [b, C, n] to norm 1."""
        norm: Tensor = torch.linalg.vector_norm(window, self.threat.p, dim=2, keepdim=True)
        return window / (norm + guard(norm, GUARD))


@dataclass
class Walk(ActiveBatch):
    """The searches of the images that are not fooled yet."""

    best: Tensor  # [b, C, H, W] the images of smallest margin
    margin: Tensor  # [b] their margins; minus infinity for images that fool
    numbers: Tensor  # [b, AHEAD, n] random numbers of the next queries


def _window(numbers: Tensor, side: int, x: Tensor) -> Tensor:
    """Return the flat positions [b, C, side * side] of a window, placed by numbers [b, 2]."""
    height, width = x.shape[2:]
    top = (numbers[:, 0] * (height - side + 1)).long()
    left = (numbers[:, 1] * (width - side + 1)).long()
    steps = torch.arange(side, device=x.device)
    rows, columns = top[:, None] + steps, left[:, None] + steps
    flat = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)
    return flat[:, None].expand(-1, x.shape[1], -1)


def _signs(numbers: Tensor) -> Tensor:
    """Return -1 or +1 for numbers in [0, 1)."""
    return torch.where(numbers < 0.5, -1.0, 1.0).to(numbers)


@cache
def pyramids(side: int, p: float = 2.0) -> Tensor:
    """Return the change of a window for l2 or l1: a pyramid above an inverted one (eqs. 2, 3)."""
    halves = []
    for height in (side // 2, side - side // 2):
        rows, columns = ((torch.arange(n) - n // 2).abs() for n in (height, side))
        rings = torch.maximum(rows[:, None], columns[None, :])
        # A pixel of ring k has the sum of 1 / j^2 (1 / j^4 for l1) from j = k to the outermost one.
        steps = 1 / torch.arange(1.0, side // 2 + 2) ** (4 / p)
        values = steps.flip(0).cumsum(0).flip(0)[rings]
        norm: Tensor = torch.linalg.vector_norm(values, p)
        halves.append(values / norm.clamp_min(GUARD))
    return torch.cat([halves[0], -halves[1]]) / (2.0 if side > 1 else 1.0) ** (1 / p)
