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


def monitor(records: Sequence[Fields], level: int) -> Iterator[Block]:
    """Yield alarms, the curve of the last suite, and its numbers."""
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
        yield curve(series, by, "test")
        numbers = _numbers(found[::-1], list(series), by)
        attacks = attack_table(list(found[-1][1].values()))
        yield Details("The numbers of every checkpoint", [numbers, attacks])


def _position(event: Fields) -> int:
    return int(event["position"] if "position" in event else event["step"])


def _evaluated(records: Sequence[Fields]) -> Iterator[Checkpoint]:
    """Yield the complete evaluations by the suite that was used last."""
    needed = {"step", "checkpoint"}
    ends = [f for f in records if f.get("event") == "evaluated" and needed <= f.keys()]
    results: list[Fields] = []
    for fields in records:
        if "event" not in fields:
            results.append(fields)
            continue
        if fields in ends and fields.get("suite") == ends[-1].get("suite"):
            known = filter(None, map(attack_result, results))
            yield fields, {r.key: replace(r, epoch=_position(fields)) for r in known}
        results = []


def _alarms(records: Sequence[Fields]) -> Iterator[str]:
    """Yield alarms by checkpoint, and checkpoints that were deleted too soon."""
    for fields in records:
        for alarm in fields.get("alarm", []):
            yield f"{fields.get('checkpoint')}: {alarm}" if "step" in fields else str(alarm)
        if fields.get("event") == "missed":
            yield f"{fields.get('checkpoint')} went before it could be evaluated"


def _numbers(found: Sequence[Checkpoint], keys: Sequence[Key], by: str) -> Table:
    """Return a row for each checkpoint, in bold type where it has an alarm."""
    p = {i: event["change"].get("p") for i, (event, _) in enumerate(found) if "change" in event}
    p = {i: value for i, value in p.items() if isinstance(value, float) and 0 <= value <= 1}
    adjusted = dict(zip(p, holm(list(p.values())), strict=True))
    rows: list[list[object]] = []
    for i, (event, results) in enumerate(found):
        images = [event.get("change", {}).get(key) for key in ("newly_vulnerable", "won_back")]
        counts = [len(of) if isinstance(of, list) else NONE for of in images]
        row = [Cell(event["checkpoint"], small=str(event.get("date", ""))[:16]), _position(event)]
        row += [*(result_cell(results.get(key)) for key in keys), *counts]
        rows.append(row + [f"{of[i]:.3g}" if i in of else NONE for of in (p, adjusted)])
    columns = ["checkpoint", f"{by}>", *(f"{line_name(key)}>" for key in keys)]
    columns += ["newly vulnerable>", "won back>", "p>", "p, Holm>"]
    caption = (
        "Accuracy on the test images by checkpoint with 95 % intervals, the latest first; each "
        "change is since the checkpoint before, p: McNemar's exact test"
    ) + (f", Holm over {len(p)} comparisons" if p else "")
    alarmed = [i for i, (event, _) in enumerate(found) if event.get("alarm")]
    return table(caption, columns, rows, alarmed)
