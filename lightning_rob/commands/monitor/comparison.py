"""Comparison of a checkpoint with earlier ones, and the alarms that follow from it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_rob.commands.configs import MonitorConfig
from lightning_rob.commands.monitor.history import Fields, History, Identity, identity, tag
from lightning_rob.commands.scores import Scores
from lightning_rob.commands.thresholds import violations
from lightning_rob.errors import InputError
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
        position: in the order of checkpoints; the training step, or the number of the evaluation
            where a single file is replaced.
        accuracies: by name.
        read: returns indices [N] and scores [N] under the worst attack.
    """

    checkpoint: str
    position: int
    accuracies: dict[str, float]
    read: Callable[[], Scores]

    @property
    def scores(self) -> Scores:
        """Indices [N] and scores [N] under the worst attack, which are read from their file."""
        return self.read()


@dataclass(frozen=True)
class Drop:
    """The difference in accuracy to an earlier checkpoint, as it is judged.

    Args:
        to: "last" or "best".
        since: the earlier checkpoint.
        before: its accuracy under the worst attack.
        after: that of the judged checkpoint.
        p: of McNemar's test where predictions are right or wrong, else of the paired t test.
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


def worst_of(group: Sequence[Fields]) -> Fields:
    """Return the line of the worst attack, of the lines of an evaluation."""
    return next((line for line in group if line.get("name") == WORST), {})


def _stored(history: History, line: Fields) -> Scores:
    """Return indices [N] and scores [N] that a line names.

    Raises:
        InputError: their file was deleted after it was found.
    """
    if (found := history.scores.read(line)) is None:
        raise InputError(f"{history.path.parent / line['reuse']['scores']} cannot be read any more")
    return _averaged(found)


def _averaged(scores: Scores) -> Scores:
    """Return the mean [N] of scores [N, R], with the indices."""
    return scores[0], scores[1].double().mean(1)


def last_results(history: History, suite: str) -> dict[Identity, CheckpointResults]:
    """Return the last evaluation of each checkpoint by a suite, the oldest first.

    Evaluations without scores are left out. Only those that are compared are read.
    """
    found: dict[Identity, CheckpointResults] = {}
    for *results, event in history.groups():
        if event["event"] != "evaluated" or event["suite"] != suite:
            continue
        if history.has_scores(worst := worst_of(results)):
            scores = partial(_stored, history, worst)
            accuracies = {line["name"]: line["accuracy"] for line in results}
            checkpoint, position = event["checkpoint"], event["position"]
            found.pop(identity(event), None)
            found[identity(event)] = CheckpointResults(checkpoint, position, accuracies, scores)
    return found


def current_results(
    checkpoint: str, position: int, results: Sequence[tuple[Result, Scores]]
) -> CheckpointResults:
    """Return a new evaluation, from its results and their scores [N, R]."""
    accuracies = {result.name: result.accuracy for result, _ in results}
    worst = next(scores for result, scores in results if result.name == WORST)
    return CheckpointResults(checkpoint, position, accuracies, lambda: _averaged(worst))


def change(before: CheckpointResults, after: CheckpointResults) -> Fields:
    """Return the images that became vulnerable or robust, as a field of an event.

    The p is that of McNemar's exact two-sided test of one against the other.
    """
    index, old, new = _common(before, after)
    was, remains = old >= ROBUST, new >= ROBUST
    return {
        "since": before.checkpoint,
        "newly_vulnerable": index[was & ~remains].tolist(),
        "won_back": index[~was & remains].tolist(),
        "p": mcnemar(old, new),
        "test": "McNemar",
    }


def _common(before: CheckpointResults, after: CheckpointResults) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices [N] of the images that both have, and the scores [N] of each."""
    both = before.scores, after.scores
    index = both[0][0][torch.isin(both[0][0], both[1][0])]
    old, new = (scores[torch.searchsorted(own, index)] for own, scores in both)
    return index, old, new


def last_before(earlier: Sequence[CheckpointResults], position: float) -> CheckpointResults | None:
    """Return the latest evaluation at this position or an earlier one."""
    # Of equal positions max returns the first, and the later one counts.
    until = [other for other in reversed(earlier) if other.position <= position]
    return max(until, key=lambda other: other.position, default=None)


def drops(current: CheckpointResults, previous: Sequence[CheckpointResults]) -> list[Drop]:
    """Compare a checkpoint with the last and the best before it, on at least `MIN_IMAGES` images.

    Returns:
        One for each; the last alone where it is also the best.
    """
    earlier = [other for other in previous if other.position <= current.position]
    earlier.sort(key=lambda other: other.position)  # evaluated in any order, the same is the best
    last = last_before(earlier, current.position)
    if last is None or len(current.scores[0]) < MIN_IMAGES:
        return []
    best = max(earlier, key=lambda other: other.accuracies[WORST])
    compared = [("last", last, 1)]
    compared += [] if best is last else [("best", best, len(earlier))]
    found = [paired(*_common(other, current)[1:]) for _, other, _ in compared]
    adjusted = holm([min(1.0, t * test.p) for (*_, t), test in zip(compared, found, strict=True)])
    several = f", Holm over {len(compared)} comparisons" if len(compared) > 1 else ""
    after = current.accuracies[WORST]
    return [
        Drop(to, one.checkpoint, one.accuracies[WORST], after, test.p, p, test.test + several)
        for (to, one, _), test, p in zip(compared, found, adjusted, strict=True)
    ]


def judged(
    config: MonitorConfig, current: CheckpointResults, previous: Sequence[CheckpointResults]
) -> Fields:
    """Return the fields of an event that compare a checkpoint with earlier ones, and the limits."""
    before, found = last_before(previous, current.position), drops(current, previous)
    fields: Fields = {"change": change(before, current)} if before else {}
    fields |= {"drops": [asdict(drop) for drop in found]} if found else {}
    fields |= {"limits": {"alarm": config.minima, "drop": config.level}}
    return fields | {"alarm": alarms(config, current, found)}


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
    if last := last_before(previous, math.inf):
        return violated(config, last)
    asked = [*config.minima, *([] if config.level is None else ["--drop"])]
    return [f"no checkpoint was evaluated: no figure for {', '.join(asked)}"] if asked else []
