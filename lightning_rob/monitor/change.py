"""What became of the images since another checkpoint, and what of it is an alarm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_rob.evaluation.records import Result
from lightning_rob.metrics import holm, mcnemar, paired
from lightning_rob.monitor.history import Fields, History, tag
from lightning_rob.monitor.options import Watch
from lightning_rob.sweep.points import Scores, scores_of
from lightning_rob.thresholds import violations

WORST = "worst"
FEWEST = 10  # images on which a drop is judged
ROBUST = 0.5  # the score from which an image counts as robust: more often right than not


@dataclass(frozen=True)
class Past:
    """An evaluation that the history has.

    Args:
        checkpoint: its name.
        step: of training.
        figures: name -> accuracy.
        scores: (indices [N], scores [N]) under the worst attack.
    """

    checkpoint: str
    step: int
    figures: dict[str, float]
    scores: Scores


@dataclass(frozen=True)
class Change:
    """How a checkpoint differs from an earlier one on the same images.

    Args:
        since: the earlier checkpoint.
        before: its accuracy under the worst attack.
        after: that of the later one.
        lost: indices of images that were robust and are no longer.
        won: indices of those that are robust now and were not.
        p: exact two-sided p of McNemar's test of lost against won.
        drop: p of the difference in accuracy: the same where answers are right or wrong, else of
            the paired t test.
        test: by which test drop is.
    """

    since: str
    before: float
    after: float
    lost: list[int]
    won: list[int]
    p: float
    drop: float
    test: str

    def fields(self) -> Fields:
        """For a line of the history."""
        told = {"since": self.since, "newly_vulnerable": self.lost, "won_back": self.won}
        return told | {"p": self.p, "test": "McNemar"}


@dataclass(frozen=True)
class Drop:
    """The difference in accuracy to an earlier checkpoint, as it is judged.

    Args:
        to: which one that is, "last" or "best".
        since: its name.
        before: its accuracy under the worst attack.
        after: that of the checkpoint that is judged.
        p: of the difference.
        p_adjusted: by Holm over the checkpoint's comparisons; that with the best of k earlier ones,
            which is the best by chance too, counts k times.
        test: what the two are by.
    """

    to: str
    since: str
    before: float
    after: float
    p: float
    p_adjusted: float
    test: str


def pasts(history: History, suite: str) -> list[Past]:
    """What this suite evaluated, the oldest first."""
    found, group = [], dict[str, Fields]()
    for line in history.lines:
        if "event" not in line:
            group[line["name"]] = line
            continue
        if line["event"] == "evaluated" and line["suite"] == suite and WORST in group:
            figures = {name: fields["accuracy"] for name, fields in group.items()}
            scores = _scores(group[WORST]["reuse"])
            found.append(Past(line["checkpoint"], line["step"], figures, scores))
        group = {}
    return found


def _scores(reuse: dict[str, Any]) -> Scores:
    images, scores = scores_of(reuse)
    return images, scores.mean(1)


def present(checkpoint: str, step: int, results: Sequence[Result]) -> Past:
    """An evaluation that has just been made."""
    figures = {result.name: result.accuracy for result in results}
    worst = next(result for result in results if result.name == WORST)
    return Past(checkpoint, step, figures, _scores(worst.details["reuse"]))


def change(before: Past, after: Past) -> Change:
    """Compare two evaluations, on the images that both have."""
    index = _common(before.scores[0], after.scores[0])
    old, new = (_at(index, past.scores) for past in (before, after))
    lost = index[(old >= ROBUST) & ~(new >= ROBUST)].tolist()
    won = index[~(old >= ROBUST) & (new >= ROBUST)].tolist()
    old_figure, new_figure = (past.figures[WORST] for past in (before, after))
    drop = paired(old, new)
    p = mcnemar(old, new)
    return Change(before.checkpoint, old_figure, new_figure, lost, won, p, drop.p, drop.test)


def _common(one: Tensor, other: Tensor) -> Tensor:
    return one[torch.isin(one, other)]


def _at(index: Tensor, scores: Scores) -> Tensor:
    return scores[1][torch.searchsorted(scores[0], index)]


def last_before(past: Sequence[Past], step: int) -> Past | None:
    """The latest evaluation that is not of a later step."""
    earlier = [(other.step, i) for i, other in enumerate(past) if other.step <= step]
    return past[max(earlier)[1]] if earlier else None


def drops(now: Past, past: Sequence[Past]) -> list[Drop]:
    """Compare a checkpoint with the last and with the best before it, on at least `FEWEST` images.

    Returns:
        One for each; none of the best where it is the last.
    """
    earlier = [other for other in past if other.step <= now.step]
    last = last_before(earlier, now.step)
    if last is None or len(now.scores[0]) < FEWEST:
        return []
    best = max(earlier, key=lambda other: other.figures[WORST])
    compared = [("last", 1, change(last, now))]
    compared += [] if best is last else [("best", len(earlier), change(best, now))]
    adjusted = holm([min(1.0, times * seen.drop) for _, times, seen in compared])
    several = f", Holm over {len(compared)} comparisons" if len(compared) > 1 else ""
    return [
        Drop(word, seen.since, seen.before, seen.after, seen.drop, p, seen.test + several)
        for (word, _, seen), p in zip(compared, adjusted, strict=True)
    ]


def alarms(watch: Watch, now: Past, found: Sequence[Drop]) -> list[str]:
    """What is wrong with a checkpoint, by its figures and seen beside those before it."""
    return below(watch, now) + [
        f"robust/worst fell from {drop.before:.1%} ({drop.to}: {drop.since}) to {drop.after:.1%}, "
        f"p = {drop.p_adjusted:.2g} ({drop.test})"
        for drop in found
        if watch.level is not None and drop.after < drop.before and drop.p_adjusted < watch.level
    ]


def below(watch: Watch, now: Past) -> list[str]:
    """Which figures are below what they have to be at least, or too few for a verdict.

    Raises:
        ValueError: one of them was not measured.
    """
    found = violations(watch.floors, {tag(k): v for k, v in now.figures.items()}, "monitor")
    images = len(now.scores[0])
    if watch.level is not None and images < FEWEST:
        found.append(f"--drop needs at least {FEWEST} images, there are {images}: none was judged")
    return found


def today(watch: Watch, past: Sequence[Past]) -> list[str]:
    """What is wrong with the last checkpoint by what is asked for now, or that there is none."""
    if past:
        return below(watch, past[max((other.step, i) for i, other in enumerate(past))[1]])
    asked = [*watch.floors, *([] if watch.level is None else ["--drop"])]
    return [f"no checkpoint was evaluated: no figure for {', '.join(asked)}"] if asked else []
