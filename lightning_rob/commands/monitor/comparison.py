"""Comparison of a checkpoint with earlier ones, and the alarms that follow from it."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lightning_rob.commands.monitor import MonitorConfig
from lightning_rob.commands.monitor.history import (
    Fields,
    History,
    Identity,
    finding_count,
    identity,
    largest_blind,
    tag,
)
from lightning_rob.commands.monitor.scores import Scores
from lightning_rob.commands.thresholds import violations
from lightning_rob.comparisons import rounded_down
from lightning_rob.evaluation.records import Result
from lightning_rob.evaluation.results import WORST
from lightning_rob.metrics import mcnemar, paired_p

FADING = 1.3  # of the shares of the level, 1 / n^1.3; a smaller power takes more from the first
SHARES = 3.94  # at least the sum of 1 / n^1.3 over all n
MIN_IMAGES = 10  # fewer are too few to judge a drop
ROBUST = rounded_down(0.5)  # score from which an image counts as robust, as in McNemar's test


@dataclass(frozen=True)
class CheckpointResults:
    """An evaluation of one checkpoint."""

    checkpoint: str
    position: int  # training step, or number of the evaluation where a single file is replaced
    accuracies: dict[str, float]  # by name
    scores: Scores  # indices [N] and scores [N] under the strongest attack
    fell: bool = False  # judged to be significantly worse than earlier ones
    blind: float = 0.0  # largest share of images on which an attack had no gradient to follow
    findings: float = 0.0  # number of warnings and severe findings


@dataclass(frozen=True)
class Drop:
    """A comparison with an earlier checkpoint; accuracy fell if it is `significant`."""

    to: str  # "last", of those that had not fallen, or "best"
    since: str  # the earlier checkpoint
    before: float  # its accuracy under the strongest attack
    after: float  # accuracy of the judged checkpoint
    p: float  # two-sided
    p_adjusted: float  # by all comparisons of the history, those to come included
    test: str

    def significant(self, level: float | None) -> bool:
        """Return whether accuracy fell and p is below a level; None: nothing is significant."""
        return level is not None and self.after < self.before and self.p_adjusted < level


def worst_of(group: Sequence[Fields]) -> Fields:
    """Return the line `worst` in the lines of an evaluation."""
    return next((line for line in group if line.get("name") == WORST), {})


def last_results(history: History, suite: str) -> dict[Identity, CheckpointResults]:
    """Return the last evaluation with scores of each checkpoint by a suite, the oldest first."""
    found: dict[Identity, CheckpointResults] = {}
    for *results, event in history.groups():
        if event["event"] != "evaluated" or event["suite"] != suite:
            continue
        level = event.get("limits", {}).get("drop")  # as it was then
        worst = worst_of(results)
        if (stored := history.scores.read(worst)) is not None:
            found.pop(identity(event), None)  # ordered by the last evaluation
            found[identity(event)] = CheckpointResults(
                event["checkpoint"],
                event["position"],
                {line["name"]: line["accuracy"] for line in results},
                (stored[0], stored[1].double().mean(1)),
                any(Drop(**drop).significant(level) for drop in event.get("drops", ())),
                largest_blind(results),
                finding_count(results),
            )
    return found


def current_results(
    checkpoint: str, position: int, results: Sequence[tuple[Result, Scores]]
) -> CheckpointResults:
    """Return a new evaluation, from its results and their scores [N, R]."""
    accuracies = {result.name: result.accuracy for result, _ in results}
    index, scores = next(scores for result, scores in results if result.name == WORST)
    details = [result.details for result, _ in results]
    blind, findings = largest_blind(details), finding_count(details)
    mean = index, scores.double().mean(1)
    return CheckpointResults(checkpoint, position, accuracies, mean, blind=blind, findings=findings)


def change(before: CheckpointResults, after: CheckpointResults) -> Fields:
    """Return the images that became vulnerable or robust, as a field of an event."""
    index, old, new = _common(before.scores, after.scores)
    was, remains = old >= ROBUST, new >= ROBUST
    return {
        "since": before.checkpoint,
        "newly_vulnerable": index[was & ~remains].tolist(),
        "won_back": index[~was & remains].tolist(),
        "p": mcnemar(old, new),  # exact, two-sided
        "test": "McNemar",
    }


def _common(one: Scores, other: Scores) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices [N] of the images that both have, and the scores [N] of each."""
    index = one[0][torch.isin(one[0], other[0])]
    first, second = (scores[torch.searchsorted(own, index)] for own, scores in (one, other))
    return index, first, second


def last_before(earlier: Sequence[CheckpointResults], position: float) -> CheckpointResults | None:
    """Return the latest evaluation at this position or an earlier one."""
    # Reversed, because max returns the first of equal positions, and the later one counts.
    until = [other for other in reversed(earlier) if other.position <= position]
    return max(until, key=lambda other: other.position, default=None)


def drops(
    current: CheckpointResults,
    previous: Sequence[CheckpointResults],
    judged_before: int | None = None,  # judgements of the history; None: by the previous alone
) -> list[Drop]:
    """Compare a checkpoint with the last that had not fallen and the best, given enough images."""
    earlier = [other for other in previous if other.position <= current.position]
    earlier.sort(key=lambda other: other.position)  # evaluated in any order, the same is the best
    if not earlier or len(current.scores[0]) < MIN_IMAGES:
        return []
    # The n-th judgement of a history takes the share 1 / (3.94 n^1.3) of the level. Half of it is
    # for the last checkpoint. The other half is for the best, spread over the k checkpoints of
    # which it is the best. All shares sum to less than one. p is two-sided, and half of each share
    # is for a rise: a false alarm in a lifetime has a probability below half the level, however the
    # checkpoints depend on each other.
    k, n = len(earlier), len(earlier) if judged_before is None else judged_before + 1
    factor = SHARES * n**FADING
    # A checkpoint that fell is no reference: the alarm stays until one recovers.
    last = next((other for other in reversed(earlier) if not other.fell), earlier[-1])
    best = max(earlier, key=lambda other: other.accuracies[WORST])
    found = [_drop("last", last, current, factor if k == 1 else 2 * factor)]
    return found if best is last else [*found, _drop("best", best, current, 2 * factor * k)]


def _drop(to: str, before: CheckpointResults, after: CheckpointResults, factor: float) -> Drop:
    p = paired_p(*_common(before.scores, after.scores)[1:])
    accuracies = before.accuracies[WORST], after.accuracies[WORST]
    test = "Gaffke, over the history"
    return Drop(to, before.checkpoint, *accuracies, p, min(1.0, factor * p), test)


def judged(config: MonitorConfig, history: History, suite: str, now: CheckpointResults) -> Fields:
    """Return the fields of an event that compare a checkpoint with earlier ones, and the limits."""
    previous = list(last_results(history, suite).values())
    before = last_before(previous, now.position)
    judged_before = sum("drops" in event for event in history.events("evaluated"))
    found = drops(now, previous, judged_before)
    fields: Fields = {"change": change(before, now)} if before else {}
    fields |= {"drops": [asdict(drop) for drop in found]} if found else {}
    fields |= {"limits": {"alarm": config.limits, "drop": config.level}}
    return fields | {"alarm": alarms(config, now, found)}


def alarms(config: MonitorConfig, current: CheckpointResults, found: Sequence[Drop]) -> list[str]:
    """Describe violated thresholds and significant drops of a checkpoint."""
    return violated(config, current) + [
        f"robust/worst fell from {drop.before:.1%} ({drop.to}: {drop.since}) to {drop.after:.1%}, "
        f"adjusted p = {drop.p_adjusted:.2g}, below {config.level:g} ({drop.test})"
        for drop in found
        if drop.significant(config.level)
    ]


def violated(config: MonitorConfig, current: CheckpointResults) -> list[str]:
    """Describe accuracies below their minimum, and too few images for a verdict."""
    accuracies = {tag(name): accuracy for name, accuracy in current.accuracies.items()}
    noted = {tag("blind"): current.blind, tag("findings"): current.findings}
    found = violations(config.limits, accuracies | noted, "monitor")
    images = len(current.scores[0])
    if config.level is not None and images < MIN_IMAGES:
        found.append(
            f"--drop needs at least {MIN_IMAGES} images, there are {images}: none was judged"
        )
    return found


def final_alarms(config: MonitorConfig, history: History, suite: str) -> list[str]:
    """Describe violations of the current options by the last checkpoint, or that there is none.

    An alarm of this checkpoint since a monitor last ended is not repeated.
    """
    alarmed = history.unreported()
    if last := last_before(list(last_results(history, suite).values()), math.inf):
        place = last.checkpoint, last.position
        events = (e for e in alarmed if (e["checkpoint"], e.get("position")) == place)
        known = {alarm for event in events for alarm in event["alarm"]}
        return [alarm for alarm in violated(config, last) if alarm not in known]
    asked = [*config.limits, *([] if config.level is None else ["--drop"])]
    none = f"no checkpoint was evaluated: no figure for {', '.join(asked)}"
    return [none] if asked and not alarmed else []
