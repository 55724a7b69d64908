"""Tables of results for the terminal."""

import io
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_rob.comparisons import holm
from lightning_rob.runtime.errors import visible

CLEAN = "clean"  # the row without an attack
SEVERITIES = {"severe": "bold red", "warning": "yellow", "note": "cyan", "fine": "default"}
STYLE: dict[str, Any] = {
    "title_justify": "left",
    "title_style": "bold",
    "caption_justify": "left",
    "caption_style": "dim",
}


def literal(text: object) -> str:
    """Return a name as Rich prints it unchanged: brackets are no markup, for any terminal."""
    return escape(visible(str(text)))


def print_table(title: str, results: Iterable[Any], console: Console | None = None) -> None:
    """Print a table of `Result`s; columns with the same content in all rows are left out.

    Its caption says what the columns mean. The power of attacks and the findings of the evaluation
    stand below the table.
    """
    console = console or Console()
    # If a result was measured twice, the last one counts.
    last = {(r.name, r.details.get("target"), r.n): r for r in results}
    compared = [r.details["against"]["p"] for r in last.values() if r.details.get("against")]
    # Several comparisons would find a difference somewhere by luck.
    adjusted = iter(holm(compared))
    rows = [_accuracy_cells(result, adjusted) for result in last.values()]
    needless = {"on"} if {row["on"] for row in rows} <= {"", "full defense"} else set()
    kept = [k for k in (rows[0] if rows else ()) if k not in needless and any(r[k] for r in rows)]
    widths = {k: max(len(k), *(len(row[k]) for row in rows)) for k in kept}
    # A narrow terminal does without these columns.
    for spare in [name for name in ("against", "time") if name in kept]:
        if sum(widths[k] for k in kept) + 3 * len(kept) + 1 > console.width:
            kept.remove(spare)
    covered = {str(result.details.get("interval_covers", "images")) for result in last.values()}
    methods = _methods(kept, covered, len(compared))
    for result in last.values():
        if "images" in result.details:  # the worst of attacks on other images
            methods.append(f"{result.name}: on {result.n} images, {result.details['images']}")
    table = Table(title=title, caption="; ".join(methods), **STYLE)
    for name in kept:
        left = name in ("attack", "on", "within")
        # The other columns fold first; no name and no number is cut.
        least = widths[name] if name == "attack" else None
        table.add_column(
            name,
            justify="left" if left else "right",
            overflow="fold",
            no_wrap=least is not None,
            min_width=least,
        )
    for row in rows:
        cells = {**row, "attack": literal(row["attack"])}
        table.add_row(*(cells[name] for name in kept))
    console.print(table)
    for result in last.values():
        if power := result.details.get("power"):
            line = f"power   {literal(result.name)} {escape(power['text'])}"
            console.print(line, highlight=False)
    found = [one for result in last.values() for one in result.details.get("findings", ())]
    for line in finding_lines({one["text"]: one for one in found}.values()):
        console.print(line, highlight=False)


def joined(findings: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """Join records of findings whose texts differ in the first word alone, an attack's name."""
    found: dict[tuple[str, ...], dict[str, None]] = {}
    for one in findings:
        first, _, said = one["text"].partition(" ")
        found.setdefault((one["name"], one["severity"], said, one["advice"]), {})[first] = None
    return [
        {"name": name, "severity": severity, "text": f"{', '.join(first)} {said}", "advice": advice}
        for (name, severity, said, advice), first in found.items()
    ]


def finding_lines(findings: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Yield the lines, with markup, of each finding and its remedy."""
    order = list(SEVERITIES)
    for one in sorted(joined(findings), key=lambda one: order.index(one["severity"])):
        severity = f"[{SEVERITIES[one['severity']]}]{one['severity']:7}[/]"
        yield f"{severity} {escape(one['name'])}: {escape(one['text'])}"
        if one["advice"]:
            yield f"        → {escape(one['advice'])}"


def _methods(columns: Collection[str], covered: Collection[str], compared: int) -> list[str]:
    methods = [f"interval: Wilson, over {' or '.join(sorted(covered))}"]
    if "accepted, wrong" in columns:
        methods += ["accuracy: accepted and right on clean images; not accepted and wrong attacked"]
    if "blind" in columns:
        methods += ["blind: no gradient to follow, of images right without an attack"]
    if "known noise" in columns:
        methods += ["known noise: the attacker knows the draws that predict"]
    if "randomness" in columns:
        source = "private draws" if "private" in methods[0] else "inferences"
        methods += [f"randomness: t over {source}"]
    if "against" in columns:
        methods += ["against: McNemar, Gaffke for expected accuracies"]
        methods += [f"p: Holm over {compared} comparisons"] if compared > 1 else []
    return methods


def _accuracy_cells(result: Any, adjusted: Iterator[float]) -> dict[str, str]:
    """Return the row's cells by column; a comparison takes the next adjusted p."""
    details, against, distance = result.details, "", ""
    low, high = result.interval
    randomness = details.get("over_inferences") or details.get("over_private_draws")
    if "median_distance" in details:
        # "beyond": half of the images or more are not fooled within the ball.
        median = details["median_distance"]
        distance = "beyond" if median is None or math.isinf(median) else f"{median:.4f}"
    if other := details.get("against"):
        p = next(adjusted)
        shown = f"p {p:.3f}" if p >= 0.001 else "p < 0.001"
        against = f"{other['attack']} {100 * other['difference']:+.1f}, {shown}"

    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    return {
        "attack": result.name,
        "on": str(details.get("target", "")).replace("_", " "),
        "within": str(details.get("ball", "")),
        "accuracy": share(result.accuracy),
        "95 % interval": f"{100 * low:.1f} … {100 * high:.1f}",
        "rejected": share(details.get("rejected")),
        "accepted, wrong": share(details.get("accepted_wrong")),
        "blind": share(details.get("blind") or None),
        "known noise": share((details.get("known_noise") or {}).get("accuracy")),
        "median distance": distance,
        "randomness": f"± {(randomness[1] - randomness[0]) / 2:.1%}" if randomness else "",
        "against": against,
        "images": str(result.n),
        "time": f"{result.seconds:.1f} s" if result.seconds else "",
    }


def print_votes(
    title: str, results: Sequence[Mapping[str, Any]], console: Console | None = None
) -> None:
    """Print records "voting_rule": a row per attack and ensemble, a column per rule."""
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
        table.add_column(heading, justify="right", overflow="fold")
    for (name, ensemble), found in rows.items():
        distance = found[0]["dissimilarity"]
        cells = [literal(name), *([literal(ensemble)] if several else [])]
        cells.append(str(found[0]["members"]))
        cells.append("" if name == CLEAN or distance is None else f"{distance:.3f}")
        by_rule = {}
        for result in found:
            low, high = result["interval"]
            by_rule[result["rule"]] = f"{result['accuracy']:.1%}\n± {50 * (high - low):.1f}"
        table.add_row(*cells, *(by_rule.get(rule, "") for rule in rules))
    (console or Console()).print(table)


def print_members(title: str, results: Sequence[Mapping[str, Any]]) -> None:
    """Print the accuracy of each member alone, clean and under an attack on itself.

    `results` are records "transfer_matrix", that of clean images first.
    """
    n, probs = results[0]["n"], results[0]["probs"]
    title = f"{title}: each member alone, {n} images; below, the 95 % interval"
    table = Table(title=title, show_lines=True, **STYLE)
    table.add_column("member", no_wrap=True)
    unequal = len({round(share, 6) for share in probs}) > 1
    if unequal:
        table.add_column("probability", justify="right")
    for result in results:
        table.add_column(literal(result["name"]), justify="right")
    for i, share in enumerate(probs):
        own = [(result["matrix"][i][i], *result["intervals"][i][i]) for result in results]
        cells = [f"{acc:.1%}\n{100 * low:.1f} … {100 * high:.1f}" for acc, low, high in own]
        shares = [f"{share:.3g}"] if unequal else []
        table.add_row(literal(results[0]["names"][i]), *shares, *cells)
    console = Console()
    console.print(table)
    for result in results:
        if len(result.get("ranking", ())) > 1:
            names = [result["names"][i] for i in result["ranking"]]
            line = f"{result['name']} transfers best from: {', '.join(names)}"
            console.print(literal(line))


def table_text(title: str, results: Iterable[Any], width: int = 120) -> str:
    """Return the table of accuracies as text."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=False, color_system=None)
    print_table(title, results, console)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))


def table_html(title: str, results: Iterable[Any], width: int = 120) -> str:
    """Return the table of accuracies for a notebook, with its colours."""
    console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True)
    print_table(title, results, console)
    frame = '<pre style="line-height: 1.2; font-family: monospace">{code}</pre>'
    return console.export_html(inline_styles=True, code_format=frame)
