"""Tables of results for the terminal."""

import io
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_rob.comparisons import holm

CLEAN = "clean"  # the row without an attack
SEVERITIES = {"severe": "bold red", "warning": "yellow", "note": "cyan", "fine": "default"}
STYLE: dict[str, Any] = {
    "title_justify": "left",
    "title_style": "bold",
    "caption_justify": "left",
    "caption_style": "dim",
}


class Row(Protocol):
    """A row of the table of accuracies, such as `lightning_rob.evaluation.records.Result`."""

    @property
    def name(self) -> str:
        """The attack's name."""

    @property
    def accuracy(self) -> float:
        """In [0, 1]."""

    @property
    def interval(self) -> tuple[float, float]:
        """Its 95 % interval."""

    @property
    def n(self) -> int:
        """The number of images."""

    @property
    def seconds(self) -> float:
        """The run time of the attack."""

    @property
    def details(self) -> dict[str, Any]:
        """Further fields of the record."""


def print_table(title: str, results: Iterable[Row], console: Console | None = None) -> None:
    """Print a table of accuracies; columns with the same content in all rows are left out.

    The column "median distance", of attacks of smallest norm, is "beyond" where half of the images
    or more are not fooled within the ball. "randomness" is half the interval over inferences or
    private draws: the share that the defense's own randomness has. "rejected" and "accepted,
    wrong" are shares of the predictions of a defense that may reject. "blind" is the share of
    images, right without an attack, on which it had no gradient to follow. "against" compares with
    the first attack image by image. A narrow terminal leaves out "against" and the time. The
    findings of the evaluation stand below.

    Args:
        title: above the table.
        results: of one name, target and number of images the last counts.
        console: None prints to standard output.
    """
    console = console or Console()
    last = {(r.name, r.details.get("target"), r.n): r for r in results}
    compared = [r.details["against"]["p"] for r in last.values() if r.details.get("against")]
    adjusted = iter(holm(compared))
    rows = [_accuracy_cells(result, adjusted) for result in last.values()]
    needless = {"on"} if {row["on"] for row in rows} <= {"", "full defense"} else set()
    kept = [k for k in (rows[0] if rows else ()) if k not in needless and any(r[k] for r in rows)]
    widths = {k: max(len(k), *(len(row[k]) for row in rows)) for k in kept}
    for spare in [name for name in ("against", "time") if name in kept]:
        if sum(widths[k] for k in kept) + 3 * len(kept) + 1 > console.width:
            kept.remove(spare)
    covered = {str(result.details.get("interval_covers", "images")) for result in last.values()}
    methods = [*_methods(kept, covered, len(compared)), *_left_out(last.values())]
    table = Table(title=title, caption="; ".join(methods), **STYLE)
    for name in kept:
        left = name in ("attack", "on", "within")
        width = max(len(row[name]) for row in rows) if name == "attack" else None
        table.add_column(name, justify="left" if left else "right", min_width=width)
    for row in rows:
        table.add_row(*(row[name] for name in kept))
    console.print(table)
    for line in _findings(last.values()):
        console.print(line, highlight=False)


def _findings(results: Iterable[Row]) -> Iterator[str]:
    """Yield what the checks found, each once, with its remedy."""
    found = [one for result in results for one in result.details.get("findings", ())]
    for one in {finding["text"]: finding for finding in found}.values():
        severity = f"[{SEVERITIES[one['severity']]}]{one['severity']:7}[/]"
        yield f"{severity} {escape(one['name'])}: {escape(one['text'])}"
        if one["advice"]:
            yield f"        → {escape(one['advice'])}"


def _left_out(results: Iterable[Row]) -> list[str]:
    """Name the images of results that leave out some: the worst of attacks on other images."""
    named = [(r.name, r.n, r.details["images"]) for r in results if "images" in r.details]
    return [f"{name}: on {n} images, {which}" for name, n, which in named]


def _methods(columns: Collection[str], covered: Collection[str], compared: int) -> list[str]:
    """Name the methods behind the intervals and comparisons of these columns."""
    methods = [f"interval: Wilson, over {' or '.join(sorted(covered))}"]
    if "accepted, wrong" in columns:
        methods += ["accuracy: accepted and right on clean images; not accepted and wrong attacked"]
    if "blind" in columns:
        methods += ["blind: no gradient to follow, of images right without an attack"]
    if "randomness" in columns:
        source = "private draws" if "private" in methods[0] else "inferences"
        methods += [f"randomness: t over {source}"]
    if "against" in columns:
        methods += ["against: McNemar, Gaffke for expected accuracies"]
        methods += [f"p: Holm over {compared} comparisons"] if compared > 1 else []
    return methods


def _accuracy_cells(result: Row, adjusted: Iterator[float]) -> dict[str, str]:
    details = result.details
    low, high = result.interval
    randomness = details.get("over_inferences") or details.get("over_private_draws")
    return {
        "attack": result.name,
        "on": str(details.get("target", "")).replace("_", " "),
        "within": str(details.get("ball", "")),
        "accuracy": f"{result.accuracy:.1%}",
        "95 % interval": f"{100 * low:.1f} … {100 * high:.1f}",
        "rejected": _share(details.get("rejected")),
        "accepted, wrong": _share(details.get("accepted_wrong")),
        "blind": _share(details.get("blind") or None),
        "median distance": _distance(details),
        "randomness": f"± {(randomness[1] - randomness[0]) / 2:.1%}" if randomness else "",
        "against": _comparison(details.get("against"), adjusted),
        "images": str(result.n),
        "time": f"{result.seconds:.1f} s" if result.seconds else "",
    }


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _distance(details: Mapping[str, Any]) -> str:
    """Return the median distance to the nearest image that fools, if the attack searches it."""
    if "median_distance" not in details:
        return ""
    median = details["median_distance"]
    return "beyond" if median is None or math.isinf(median) else f"{median:.4f}"


def _comparison(against: Mapping[str, Any] | None, adjusted: Iterator[float]) -> str:
    """Return the other attack's name, the difference to it and the next adjusted p."""
    if not against:
        return ""
    value = next(adjusted)
    p = f"p {value:.3f}" if value >= 0.001 else "p < 0.001"
    return f"{against['attack']} {100 * against['difference']:+.1f}, {p}"


def print_votes(
    title: str, results: Sequence[Mapping[str, Any]], console: Console | None = None
) -> None:
    """Print accuracies by voting rule: a row per attack and ensemble, a column per rule.

    Args:
        title: begins the table's title.
        results: records of the kind "voting_rule".
        console: None prints to standard output.
    """
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for result in results:
        rows.setdefault((result["name"], result["ensemble"]), []).append(result)
    rules = list(dict.fromkeys(result["rule"] for result in results))
    several = len({ensemble for _, ensemble in rows}) > 1
    n = results[0]["n"] if results else 0
    table = Table(
        title=f"{title}: accuracy by voting rule, {n} images\nbelow, half the 95 % interval; "
        "M: members, dis.: mean l2 of the perturbation over that of the image",
        show_lines=True,
        **STYLE,
    )
    table.add_column("attack", overflow="fold")
    if several:
        table.add_column("ensemble", overflow="fold")
    for heading in ("M", "dis.", *rules):
        table.add_column(heading, justify="right")
    for (name, ensemble), found in rows.items():
        distance = found[0]["dissimilarity"]
        cells = [name, *([ensemble] if several else []), str(found[0]["members"])]
        cells.append("" if name == CLEAN or distance is None else f"{distance:.3f}")
        by_rule = {result["rule"]: _half_width_cell(result) for result in found}
        table.add_row(*cells, *(by_rule.get(rule, "") for rule in rules))
    (console or Console()).print(table)


def _half_width_cell(result: Mapping[str, Any]) -> str:
    low, high = result["interval"]
    return f"{result['accuracy']:.1%}\n± {50 * (high - low):.1f}"


def print_members(title: str, results: Sequence[Mapping[str, Any]]) -> None:
    """Print the accuracy of each member alone, clean and under an attack on itself.

    Args:
        title: begins the table's title.
        results: records of the kind "transfer_matrix", that of clean images first.
    """
    n, probs = results[0]["n"], results[0]["probs"]
    title = f"{title}: each member alone, {n} images; below, the 95 % interval"
    table = Table(title=title, show_lines=True, **STYLE)
    table.add_column("member", no_wrap=True)
    unequal = len({round(share, 6) for share in probs}) > 1
    if unequal:
        table.add_column("probability", justify="right")
    for result in results:
        table.add_column(result["name"], justify="right")
    for i, share in enumerate(probs):
        own = [(result["matrix"][i][i], *result["intervals"][i][i]) for result in results]
        cells = [f"{acc:.1%}\n{100 * low:.1f} … {100 * high:.1f}" for acc, low, high in own]
        shares = [f"{share:.3g}"] if unequal else []
        table.add_row(results[0]["names"][i], *shares, *cells)
    console = Console()
    console.print(table)
    for result in results:
        if len(result.get("ranking", ())) > 1:
            names = [result["names"][i] for i in result["ranking"]]
            console.print(f"{result['name']} transfers best from: {', '.join(names)}")


def table_text(title: str, results: Iterable[Row], width: int = 120) -> str:
    """Return the table of accuracies as text."""
    file = io.StringIO()
    print_table(title, results, Console(file=file, width=width))
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))
