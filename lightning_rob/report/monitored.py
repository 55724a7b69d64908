"""What `lightning-rob monitor` recorded of a run: a curve over its checkpoints, and alarms."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_rob.comparisons import holm
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
    raw = {i: p for i, watched in enumerate(found) if (p := _p(watched.event)) is not None}
    adjusted = dict(zip(raw, holm(list(raw.values())), strict=True))
    for i, row in enumerate(rows if len(raw) > 1 else ()):
        row.append(f"{adjusted[i]:.3g}" if i in adjusted else NONE)
    strong = frozenset(i for i, watched in enumerate(found) if watched.event.get("alarm"))
    columns = ["checkpoint", "step>", *(f"{line_name(key)}>" for key in keys)]
    columns += ["newly vulnerable>", "won back>", "p>", *(["p, Holm>"] if len(raw) > 1 else [])]
    caption = (
        "Accuracy on the test images by checkpoint, the latest first; each change is since the "
        "checkpoint before, p: McNemar's exact test"
    )
    caption += f", Holm over {len(raw)} comparisons" if len(raw) > 1 else ""
    return Table(caption, columns, rows, strong)


def _changed(event: Fields) -> list[str]:
    change = event.get("change")
    if not isinstance(change, dict):
        return [NONE] * 3
    counts = [change.get(key) for key in ("newly_vulnerable", "won_back")]
    p = _p(event)
    told = [str(len(images)) if isinstance(images, list) else NONE for images in counts]
    return [*told, NONE if p is None else f"{p:.3g}"]


def _p(event: Fields) -> float | None:
    """The p of the change since the checkpoint before, if it has one."""
    change = event.get("change")
    p = change.get("p") if isinstance(change, dict) else None
    return p if isinstance(p, float) and 0 <= p <= 1 else None
