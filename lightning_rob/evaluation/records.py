"""What an evaluation found, as a line of JSON and as a table."""

import errno
import io
import json
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_rob.metrics import holm, wilson_over_draws

STYLE: dict[str, Any] = {
    "title_justify": "left",
    "title_style": "bold",
    "caption_justify": "left",
    "caption_style": "dim",
}
# Tells the evaluations of one process from those of another in the same folder.
SESSION = f"{datetime.now().astimezone().isoformat(timespec='seconds')} {os.getpid()}"


@dataclass(frozen=True)
class Result:
    """One attack's figure.

    Args:
        name: the attack's name.
        accuracy: in [0, 1].
        interval: its 95 % interval.
        n: images.
        seconds: the attack took, on this process.
        details: what else belongs in the record.
    """

    name: str
    accuracy: float
    interval: tuple[float, float]
    n: int
    seconds: float
    details: dict[str, Any]

    def line(self) -> str:
        """The record: one line of JSON."""
        fields = asdict(self)
        return json.dumps({"name": fields.pop("name"), **fields.pop("details"), **fields})


def measured(
    name: str,
    scores: Tensor,
    seconds: float,
    details: dict[str, Any],
    draws: Tensor | None = None,
) -> Result:
    """The accuracy of images' scores [N], NaN where there are none, with its interval.

    Args:
        name: the attack's.
        scores: [N] in [0, 1].
        seconds: the attack took.
        details: for the record.
        draws: [N, D] the scores by private draw, if the interval is to hold their chance too.
    """
    n, accuracy = len(scores), float(scores.mean()) if len(scores) else float("nan")
    by_draw = [accuracy] if draws is None or not n else draws.mean(0).tolist()
    return Result(name, accuracy, wilson_over_draws(by_draw, n), n, seconds, details)


def versions() -> dict[str, str]:
    """The versions a figure depends on."""
    return {name: version(name) for name in ("lightning-rob", "torch", "lightning", "torchvision")}


def append_records(path: Path, results: Iterable[Result]) -> None:
    """Append one line per result; each is written whole."""
    append_lines(path, (result.line() for result in results))


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines to a file that need not be there yet: all of them or none.

    Raises:
        OSError: there is no space for them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(line + "\n" for line in lines).encode()
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        if file.write(content) < len(content):
            file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _span(interval: tuple[float, float] | None) -> str:
    return f"± {(interval[1] - interval[0]) / 2:.1%}" if interval else ""


def print_table(title: str, results: Iterable[Result], console: Console | None = None) -> None:
    """A table of accuracies for the terminal; what is the same for all has no column.

    The column "chance" is half the interval over inferences or private draws: the defense's own
    part. "against" compares with the first attack image by image. A narrow terminal leaves out that
    and the time.
    """
    console = console or Console()
    last = {(result.name, result.details.get("target")): result for result in results}
    compared = [r.details["against"]["p"] for r in last.values() if r.details.get("against")]
    adjusted = iter(holm(compared))
    rows = [_cells(result, adjusted) for result in last.values()]
    needless = {"on"} if {row["on"] for row in rows} <= {"", "full defense"} else set()
    kept = [k for k in (rows[0] if rows else ()) if k not in needless and any(r[k] for r in rows)]
    widths = {k: max(len(k), *(len(row[k]) for row in rows)) for k in kept}
    for spare in [name for name in ("against", "time") if name in kept]:
        if sum(widths[k] for k in kept) + 3 * len(kept) + 1 > console.width:
            kept.remove(spare)
    covered = {str(result.details.get("interval_covers", "images")) for result in last.values()}
    table = Table(title=title, caption=_legend(kept, covered, len(compared)), **STYLE)
    for name in kept:
        left = name in ("attack", "on", "within")
        width = max(len(row[name]) for row in rows) if name == "attack" else None
        table.add_column(name, justify="left" if left else "right", min_width=width)
    for row in rows:
        table.add_row(*(row[name] for name in kept))
    console.print(table)


def _legend(columns: Collection[str], covered: Collection[str], compared: int) -> str:
    """The methods by which the intervals and comparisons of these columns are made."""
    told = [f"interval: Wilson, over {' or '.join(sorted(covered))}"]
    if "chance" in columns:
        told += [f"chance: t over {'private draws' if 'private' in told[0] else 'inferences'}"]
    if "against" in columns:
        told += ["against: McNemar, paired t for expected accuracies"]
        told += [f"p: Holm over {compared} comparisons"] if compared > 1 else []
    return "; ".join(told)


def _against(told: dict[str, Any] | None, adjusted: Iterator[float]) -> str:
    """Another attack's name, the difference to it and the next adjusted p."""
    if not told:
        return ""
    value = next(adjusted)
    p = f"p {value:.3f}" if value >= 0.001 else "p < 0.001"
    return f"{told['attack']} {100 * told['difference']:+.1f}, {p}"


def _cells(result: Result, adjusted: Iterator[float]) -> dict[str, str]:
    """What the table says of a figure, by column."""
    low, high = result.interval
    return {
        "attack": result.name,
        "on": str(result.details.get("target", "")).replace("_", " "),
        "within": str(result.details.get("ball", "")),
        "accuracy": f"{result.accuracy:.1%}",
        "95 % interval": f"{100 * low:.1f} … {100 * high:.1f}",
        "chance": _span(
            result.details.get("over_inferences") or result.details.get("over_private_draws")
        ),
        "against": _against(result.details.get("against"), adjusted),
        "images": str(result.n),
        "time": f"{result.seconds:.1f} s" if result.seconds else "",
    }


def table_of(title: str, results: Iterable[Result], width: int = 120) -> str:
    """Return the table as text."""
    console = Console(file=io.StringIO(), width=width)
    print_table(title, results, console)
    return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined,no-any-return]
