"""Records of `lightning-rob monitor`: a curve over checkpoints, and alarms."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_rob.commands.report.blocks import Block, Cell, Details, Heading, Table, Warned, table
from lightning_rob.commands.report.curve import curve
from lightning_rob.commands.report.evaluation import attack_table, result_cell
from lightning_rob.commands.report.formatting import NONE, line_name
from lightning_rob.commands.report.runs import AttackResult, Fields, Key, attack_result, by_line
from lightning_rob.comparisons import holm

Checkpoint = tuple[Fields, dict[Key, AttackResult]]  # the record that ends it, and its results


def monitor(records: Sequence[Fields], name: str, level: int) -> Iterator[Block]:
    """Yield alarms, the curve of the last suite with this name as its `id`, and its numbers."""
    alarms = dict.fromkeys(_alarms(records))  # a later end may repeat one
    found = sorted(_evaluated(records), key=lambda checkpoint: _position(checkpoint[0]))
    if found or alarms:
        yield Heading(level, "Checkpoint by checkpoint")
    yield from map(Warned, alarms)
    if found:
        # Checkpoints of a training follow one another by step, models that replace one another
        # in a single file by evaluation.
        replaced = any(_position(event) != event["step"] for event, _ in found)
        series, by = by_line(results for _, results in found), "evaluation" if replaced else "step"
        yield curve(series, name, by, "test")
        numbers = _numbers(found[::-1], list(series), by)
        attacks = attack_table(list(found[-1][1].values()))
        yield Details("The numbers of every checkpoint", [numbers, attacks])


def _position(event: Fields) -> int:
    """Return the place of an evaluation in the order of checkpoints."""
    return int(event["position"] if "position" in event else event["step"])


def _evaluated(records: Sequence[Fields]) -> Iterator[Checkpoint]:
    """Yield the complete evaluations by the suite that was used last."""
    needed = {"step", "checkpoint"}
    suites = [
        fields.get("suite")
        for fields in records
        if fields.get("event") == "evaluated" and needed <= fields.keys()
    ]
    # The history of an earlier version may have judged a checkpoint after its evaluation.
    later = {_identity(fields): fields for fields in records if fields.get("event") == "judged"}
    results: list[Fields] = []
    for fields in records:
        if "event" not in fields:
            results.append(fields)
            continue
        is_end = fields["event"] == "evaluated" and needed <= fields.keys()
        if is_end and fields.get("suite") == suites[-1]:
            known = filter(None, map(attack_result, results))
            found = {r.key: replace(r, epoch=_position(fields)) for r in known}
            judged = later.get(_identity(fields), {}) if "deferred" in fields else {}
            alarms = [*fields.get("alarm", []), *judged.get("alarm", [])]
            yield fields | judged | {"alarm": alarms}, found
        results = []


def _identity(fields: Fields) -> tuple[str, ...]:
    """Return what distinguishes an evaluated checkpoint: suite, weights and recipe."""
    return tuple(str(fields.get(name)) for name in ("suite", "weights", "recipe"))


def _alarms(records: Sequence[Fields]) -> Iterator[str]:
    """Yield alarms by checkpoint, and checkpoints that were deleted too soon."""
    for fields in records:
        for alarm in fields.get("alarm", []):
            yield f"{fields.get('checkpoint')}: {alarm}" if "step" in fields else str(alarm)
        if fields.get("event") == "missed":
            yield f"{fields.get('checkpoint')} went before it could be evaluated"


def _numbers(found: Sequence[Checkpoint], keys: Sequence[Key], by: str) -> Table:
    """Return a row for each checkpoint, in bold type where it has an alarm."""
    raw = {i: p for i, (event, _) in enumerate(found) if (p := _p(event)) is not None}
    rows: list[list[object]] = []
    for i, (event, results) in enumerate(found):
        name = Cell(event["checkpoint"], small=str(event.get("date", ""))[:16])
        change = event.get("change", {})
        images = [change.get(key) for key in ("newly_vulnerable", "won_back")]
        counts = [len(of) if isinstance(of, list) else NONE for of in images]
        cells = [result_cell(results.get(key)) for key in keys]
        rows.append([name, _position(event), *cells, *counts])
        rows[-1].append(f"{raw[i]:.3g}" if i in raw else NONE)
    columns = ["checkpoint", f"{by}>", *(f"{line_name(key)}>" for key in keys)]
    columns += ["newly vulnerable>", "won back>", "p>"]
    caption = (
        "Accuracy on the test images by checkpoint with 95 % intervals, the latest first; each "
        "change is since the checkpoint before, p: McNemar's exact test"
    )
    if len(raw) > 1:
        adjusted = dict(zip(raw, holm(list(raw.values())), strict=True))
        for i, row in enumerate(rows):
            row.append(f"{adjusted[i]:.3g}" if i in adjusted else NONE)
        columns.append("p, Holm>")
        caption += f", Holm over {len(raw)} comparisons"
    alarmed = [i for i, (event, _) in enumerate(found) if event.get("alarm")]
    return table(caption, columns, rows, alarmed)


def _p(event: Fields) -> float | None:
    p = event.get("change", {}).get("p")
    return p if isinstance(p, float) and 0 <= p <= 1 else None
