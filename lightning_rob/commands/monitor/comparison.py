"""Comparison of a checkpoint with earlier ones, and the alarms that follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rob.commands.configs import MonitorConfig
from lightning_rob.commands.monitor.history import Fields, History, tag
from lightning_rob.commands.scores import Scores
from lightning_rob.commands.thresholds import violations
from lightning_rob.evaluation.records import Result
from lightning_rob.evaluation.results import WORST
from lightning_rob.metrics import holm, mcnemar, paired

MIN_IMAGES = 10  # fewer are too few to judge a drop
ROBUST = 0.5  # score from which an image counts as robust: more often right than not


@dataclass(frozen=True)
class CheckpointResults:
    """An evaluation of one checkpoint.

    Args:
        checkpoint: its name.
        step: of training.
        accuracies: by name.
        scores: indices [N] and scores [N] under the worst attack.
    """

    checkpoint: str
    step: int
    accuracies: dict[str, float]
    scores: Scores


@dataclass(frozen=True)
class Difference:
    """Difference between a checkpoint and an earlier one on the same images.

    Args:
        since: the earlier checkpoint.
        before: its accuracy under the worst attack.
        after: that of the later one.
        lost: indices of images that were robust and no longer are.
        won: indices of images that are robust and were not.
        p: exact two-sided p of McNemar's test of lost against won.
        drop: p of the difference in accuracy: the same where predictions are right or wrong, else
            of the paired t test.
        test: the test of `drop`.
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
        """Return the difference as a field of an event."""
        images = {"newly_vulnerable": self.lost, "won_back": self.won}
        return {"since": self.since, **images, "p": self.p, "test": "McNemar"}


@dataclass(frozen=True)
class Drop:
    """The difference in accuracy to an earlier checkpoint, as it is judged.

    Args:
        to: "last" or "best".
        since: the earlier checkpoint.
        before: its accuracy under the worst attack.
        after: that of the judged checkpoint.
        p: of the difference.
        p_adjusted: by Holm over the checkpoint's comparisons. The best of k earlier checkpoints is
            so by luck as well, and its p counts k times.
        test: the test of both.
    """

    to: str
    since: str
    before: float
    after: float
    p: float
    p_adjusted: float
    test: str


def worst_scores(history: History, group: Sequence[Fields]) -> Scores | None:
    """Return indices [N] and scores [N] under the worst attack; None if their file is missing.

    Args:
        history: has the file.
        group: the lines of an evaluation.
    """
    worst = next((line for line in group if line.get("name") == WORST), {})
    found = history.scores.read(worst)
    return None if found is None else (found[0], found[1].double().mean(1))


def previous_results(history: History, suite: str) -> list[CheckpointResults]:
    """Return the evaluations by a suite whose scores are there, the oldest first."""
    found = []
    for *results, event in history.groups():
        if event["event"] != "evaluated" or event["suite"] != suite:
            continue
        if (scores := worst_scores(history, results)) is not None:
            accuracies = {line["name"]: line["accuracy"] for line in results}
            found.append(CheckpointResults(event["checkpoint"], event["step"], accuracies, scores))
    return found


def current_results(
    checkpoint: str, step: int, results: Sequence[tuple[Result, Scores]]
) -> CheckpointResults:
    """Return a new evaluation, from its results and their scores [N, R]."""
    accuracies = {result.name: result.accuracy for result, _ in results}
    index, scores = next(scores for result, scores in results if result.name == WORST)
    return CheckpointResults(checkpoint, step, accuracies, (index, scores.double().mean(1)))


def diff(before: CheckpointResults, after: CheckpointResults) -> Difference:
    """Compare two evaluations, on the images that both have."""
    index = before.scores[0][torch.isin(before.scores[0], after.scores[0])]
    old, new = (_select(index, each.scores) for each in (before, after))
    lost = index[(old >= ROBUST) & ~(new >= ROBUST)].tolist()
    won = index[~(old >= ROBUST) & (new >= ROBUST)].tolist()
    first, second = before.accuracies[WORST], after.accuracies[WORST]
    found = paired(old, new)
    p = mcnemar(old, new)
    return Difference(before.checkpoint, first, second, lost, won, p, found.p, found.test)


def _select(index: Tensor, scores: Scores) -> Tensor:
    return scores[1][torch.searchsorted(scores[0], index)]


def last_before(earlier: Sequence[CheckpointResults], step: int) -> CheckpointResults | None:
    """Return the latest evaluation of this step or an earlier one."""
    places = [(other.step, i) for i, other in enumerate(earlier) if other.step <= step]
    return earlier[max(places)[1]] if places else None


def drops(current: CheckpointResults, previous: Sequence[CheckpointResults]) -> list[Drop]:
    """Compare a checkpoint with the last and the best before it, on at least `MIN_IMAGES` images.

    Returns:
        One for each; the last alone where it is also the best.
    """
    earlier = [other for other in previous if other.step <= current.step]
    last = last_before(earlier, current.step)
    if last is None or len(current.scores[0]) < MIN_IMAGES:
        return []
    best = max(earlier, key=lambda other: other.accuracies[WORST])
    compared = [("last", 1, diff(last, current))]
    compared += [] if best is last else [("best", len(earlier), diff(best, current))]
    adjusted = holm([min(1.0, times * found.drop) for _, times, found in compared])
    several = f", Holm over {len(compared)} comparisons" if len(compared) > 1 else ""
    return [
        Drop(to, found.since, found.before, found.after, found.drop, p, found.test + several)
        for (to, _, found), p in zip(compared, adjusted, strict=True)
    ]


def alarms(config: MonitorConfig, current: CheckpointResults, found: Sequence[Drop]) -> list[str]:
    """Describe violated thresholds and significant drops of a checkpoint."""
    level = config.level
    return violated(config, current) + [
        f"robust/worst fell from {drop.before:.1%} ({drop.to}: {drop.since}) to {drop.after:.1%}, "
        f"p = {drop.p_adjusted:.2g} ({drop.test})"
        for drop in found
        if level is not None and drop.after < drop.before and drop.p_adjusted < level
    ]


def violated(config: MonitorConfig, current: CheckpointResults) -> list[str]:
    """Describe accuracies below their minimum, and too few images for a verdict.

    Raises:
        ValueError: an accuracy was not measured.
    """
    accuracies = {tag(name): accuracy for name, accuracy in current.accuracies.items()}
    found = violations(config.minima, accuracies, "monitor")
    images = len(current.scores[0])
    if config.level is not None and images < MIN_IMAGES:
        found.append(
            f"--drop needs at least {MIN_IMAGES} images, there are {images}: none was judged"
        )
    return found


def final_alarms(config: MonitorConfig, previous: Sequence[CheckpointResults]) -> list[str]:
    """Describe violations of the current options by the last checkpoint, or that there is none."""
    if previous:
        place = max((one.step, i) for i, one in enumerate(previous))[1]  # the later of equal steps
        return violated(config, previous[place])
    asked = [*config.minima, *([] if config.level is None else ["--drop"])]
    return [f"no checkpoint was evaluated: no figure for {', '.join(asked)}"] if asked else []
