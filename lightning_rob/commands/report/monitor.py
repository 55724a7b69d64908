"""Records of `lightning-rob monitor`: a curve over checkpoints, and alarms."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_rob.commands.report.blocks import Block, Details, Drawing, Heading, Table, Text
from lightning_rob.commands.report.curve import curve
from lightning_rob.commands.report.evaluation import attack_table
from lightning_rob.commands.report.formatting import NONE, line_name, percent
from lightning_rob.commands.report.runs import AttackResult, Fields, Key, attack_result
from lightning_rob.comparisons import holm


@dataclass(frozen=True)
class CheckpointResults:
    """The evaluation of one checkpoint.

    Args:
        event: the record that ends it.
        results: by attack and target; `epoch` of each is the step.
    """

    event: Fields
    results: dict[Key, AttackResult]

    @property
    def step(self) -> int:
        """The training step."""
        return int(self.event["step"])

    @property
    def p(self) -> float | None:
        """The p of the change since the checkpoint before, if it has one."""
        change = self.event.get("change")
        p = change.get("p") if isinstance(change, dict) else None
        return p if isinstance(p, float) and 0 <= p <= 1 else None


def monitor(records: Sequence[Fields], name: str, level: int) -> Iterator[Block]:
    """Yield alarms, the curve of the last suite, and its numbers.

    Args:
        records: of the history.
        name: of the figure.
        level: of the heading.
    """
    found = sorted(_evaluated(records), key=lambda checkpoint: checkpoint.step)
    alarms = list(_alarms(records))
    if not (found or alarms):
        return
    yield Heading(level, "Checkpoint by checkpoint")
    yield from (Text(text, "warning") for text in alarms)
    if not found:
        return
    series: dict[Key, list[AttackResult]] = {}
    for checkpoint in found:
        for key, result in checkpoint.results.items():
            series.setdefault(key, []).append(result)
    yield Drawing(curve(series, name, "step", "test"))
    numbers = _numbers(found[::-1], list(series))
    attacks = attack_table([*found[-1].results.values()])
    yield Details("The numbers of every checkpoint", [numbers, attacks])


def _evaluated(records: Sequence[Fields]) -> Iterator[CheckpointResults]:
    """Yield the complete evaluations by the suite that was used last."""
    ended = [fields for fields in records if fields.get("event") == "evaluated"]
    ended = [
        fields
        for fields in ended
        if isinstance(fields.get("step"), int) and isinstance(fields.get("checkpoint"), str)
    ]
    results: list[Fields] = []
    for fields in records:
        if "event" not in fields:
            results.append(fields)
            continue
        if any(fields is end for end in ended) and fields.get("suite") == ended[-1].get("suite"):
            known = filter(None, map(attack_result, results))
            found = {r.key: replace(r, epoch=int(fields["step"])) for r in known}
            yield CheckpointResults(fields, found)
        results = []


def _alarms(records: Sequence[Fields]) -> Iterator[str]:
    """Yield alarms by checkpoint, and checkpoints that were deleted too soon."""
    for fields in records:
        alarms = fields.get("alarm")
        for alarm in alarms if isinstance(alarms, list) else ():
            yield f"{fields.get('checkpoint')}: {alarm}" if "step" in fields else str(alarm)
        if fields.get("event") == "missed":
            yield f"{fields.get('checkpoint')} went before it could be evaluated"


def _numbers(found: Sequence[CheckpointResults], keys: Sequence[Key]) -> Table:
    """Return a row for each checkpoint, in bold type where it has an alarm."""
    rows = []
    for checkpoint in found:
        results = (checkpoint.results.get(key) for key in keys)
        cells = [percent(result.accuracy) if result else NONE for result in results]
        name, step = checkpoint.event["checkpoint"], str(checkpoint.step)
        rows.append([name, step, *cells, *_change(checkpoint)])
    raw = {i: p for i, checkpoint in enumerate(found) if (p := checkpoint.p) is not None}
    adjusted = dict(zip(raw, holm(list(raw.values())), strict=True))
    for i, row in enumerate(rows if len(raw) > 1 else ()):
        row.append(f"{adjusted[i]:.3g}" if i in adjusted else NONE)
    strong = frozenset(i for i, checkpoint in enumerate(found) if checkpoint.event.get("alarm"))
    columns = ["checkpoint", "step>", *(f"{line_name(key)}>" for key in keys)]
    columns += ["newly vulnerable>", "won back>", "p>", *(["p, Holm>"] if len(raw) > 1 else [])]
    caption = (
        "Accuracy on the test images by checkpoint, the latest first; each change is since the "
        "checkpoint before, p: McNemar's exact test"
    )
    caption += f", Holm over {len(raw)} comparisons" if len(raw) > 1 else ""
    return Table(caption, columns, rows, strong)


def _change(checkpoint: CheckpointResults) -> list[str]:
    change = checkpoint.event.get("change")
    if not isinstance(change, dict):
        return [NONE] * 3
    lists = [change.get(key) for key in ("newly_vulnerable", "won_back")]
    counts = [str(len(images)) if isinstance(images, list) else NONE for images in lists]
    return [*counts, NONE if checkpoint.p is None else f"{checkpoint.p:.3g}"]
