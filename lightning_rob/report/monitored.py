"""What `lightning-rob monitor` recorded of a run: a curve over its checkpoints, and alarms."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_rob.report.blocks import Block, Details, Drawing, Heading, Text
from lightning_rob.report.card import card
from lightning_rob.report.curve import curve
from lightning_rob.report.records import Fields, Record, record
from lightning_rob.report.table import Table
from lightning_rob.report.words import NONE, line_name, percent


@dataclass(frozen=True)
class Watched:
    """One checkpoint's evaluation.

    Args:
        event: what was said of it.
        figures: by attack and target; `epoch` of each is the step.
    """

    event: Fields
    figures: dict[tuple[str, str], Record]

    @property
    def step(self) -> int:
        """Of training."""
        return int(self.event["step"])


def monitored(lines: Sequence[Fields], name: str, level: int) -> Iterator[Block]:
    """The curve of the last suite, what was wrong, and the numbers.

    Args:
        lines: of the history.
        name: of the figure.
        level: of the heading.
    """
    found = sorted(_watched(lines), key=lambda watched: watched.step)
    wrong = list(_wrong(lines))
    if not (found or wrong):
        return
    yield Heading(level, "Checkpoint by checkpoint")
    yield from (Text(text, "warning") for text in wrong)
    if not found:
        return
    series: dict[tuple[str, str], list[Record]] = {}
    for watched in found:
        for key, figure in watched.figures.items():
            series.setdefault(key, []).append(figure)
    yield Drawing(curve(series, name, "step", "test"))
    numbers = _numbers(found[::-1], list(series))
    yield Details("The numbers of every checkpoint", [numbers, card([*found[-1].figures.values()])])


def _watched(lines: Sequence[Fields]) -> Iterator[Watched]:
    """The evaluations by the suite that was used last; half of one is passed over."""
    ended = [line for line in lines if line.get("event") == "evaluated" and _is_whole(line)]
    figures: list[Fields] = []
    for line in lines:
        if "event" not in line:
            figures.append(line)
            continue
        if any(line is end for end in ended) and line.get("suite") == ended[-1].get("suite"):
            records = filter(None, map(record, figures))
            found = {r.key: replace(r, epoch=int(line["step"])) for r in records}
            yield Watched(line, found)
        figures = []


def _is_whole(event: Fields) -> bool:
    return isinstance(event.get("step"), int) and isinstance(event.get("checkpoint"), str)


def _wrong(lines: Sequence[Fields]) -> Iterator[str]:
    """Alarms by checkpoint, and checkpoints that went too soon."""
    for line in lines:
        alarms = line.get("alarm")
        for alarm in alarms if isinstance(alarms, list) else ():
            yield f"{line.get('checkpoint')}: {alarm}" if "step" in line else str(alarm)
        if line.get("event") == "missed":
            yield f"{line.get('checkpoint')} went before it could be evaluated"


def _numbers(found: Sequence[Watched], keys: Sequence[tuple[str, str]]) -> Table:
    """A row for each checkpoint; those with an alarm stand out."""
    rows = []
    for watched in found:
        figures = (watched.figures.get(key) for key in keys)
        cells = [percent(figure.accuracy) if figure else NONE for figure in figures]
        event = watched.event
        rows.append([event["checkpoint"], str(watched.step), *cells, *_changed(event)])
    strong = frozenset(i for i, watched in enumerate(found) if watched.event.get("alarm"))
    columns = ["checkpoint", "step>", *(f"{line_name(key)}>" for key in keys)]
    columns += ["newly vulnerable>", "won back>", "p>"]
    caption = "Accuracy on the test images by checkpoint, the latest first; each change is since "
    return Table(
        f"{caption}the checkpoint before, p by McNemar's exact test", columns, rows, strong
    )


def _changed(event: Fields) -> list[str]:
    change = event.get("change")
    if not isinstance(change, dict):
        return [NONE] * 3
    counts = [change.get(key) for key in ("newly_vulnerable", "won_back")]
    p = change.get("p")
    told = [str(len(images)) if isinstance(images, list) else NONE for images in counts]
    return [*told, f"{p:.3g}" if isinstance(p, float) else NONE]
