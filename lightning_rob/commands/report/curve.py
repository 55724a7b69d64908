"""Robust accuracy by epoch, as an SVG that takes its colours from the page."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from lightning_rob.commands.report.blocks import Curve
from lightning_rob.commands.report.formatting import WHOLE, WORST, extent, line_name, percent
from lightning_rob.commands.report.runs import AttackResult, Key

# Matplotlib draws in these colours, which become the page's variables. Okabe and Ito (2008).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5f3f", "#8a6fd1")
MARKERS = "os^DvP*X"
INK, PAGE, GREY, GRID = "#010203", "#fdfcfb", "#807f7e", "#d0d1d2"
VARIABLES = {INK: "--ink", PAGE: "--page", GREY: "--grey", GRID: "--grid"} | {
    color: f"--line-{i}" for i, color in enumerate(COLORS)
}
MANY_EPOCHS = 40
Series = Mapping[Key, Sequence[AttackResult]]


def best(series: Series) -> AttackResult | None:
    """Return the result with the best worst case, or the best under the only attack."""
    attacked = [records for key, records in series.items() if key[1] == WHOLE and key[0] != "clean"]
    ranked = series.get(WORST) or (attacked[0] if len(attacked) == 1 else [])
    known = [record for record in ranked if record.accuracy == record.accuracy]
    return max(known, key=lambda record: record.accuracy, default=None)


def curve(series: Series, prefix: str, by: str = "epoch", of: str = "validation") -> Curve:
    """Return the figure; of clean images the whole defense alone is shown.

    Args:
        series: (attack, target) -> results by epoch.
        prefix: beginning of every `id`, different from those of other figures on the page.
        by: unit of `AttackResult.epoch` here.
        of: split of the images.
    """
    lines = {k: records for k, records in series.items() if k[1] == WHOLE or k[0] != "clean"}
    peak = best(series)
    values = [f"{line_name(key)} {percent(records[-1].accuracy)}" for key, records in lines.items()]
    alt = f"Accuracy on the {of} images by {by}, at the last {by}: {', '.join(values)}."
    if peak:
        alt += f" {peak.name} was best at {by} {peak.epoch}: {percent(peak.accuracy)}."
    sentences = ["The band is the 95 % interval of worst."] if WORST in lines else []
    if peak:
        at = f"at {by} {peak.epoch}: {percent(peak.accuracy)}"
        sentences.append(f"The circle marks where {peak.name} was best, {at}.")
    n = extent([record.n for records in lines.values() for record in records])
    sentences.append(f"The numbers are those of the last {by}; {n} {of} images.")
    # Names stand in a legend of our own, for matplotlib would interpret them as formulas.
    legend = [
        (
            VARIABLES[_color(i, key)],
            key[1] != WHOLE,
            3 if key == WORST else 2,
            line_name(key),
            percent(records[-1].accuracy),
        )
        for i, (key, records) in enumerate(lines.items())
    ]
    box, svg = _themed(_drawn(lines, peak, by), prefix)
    return Curve(Markup(svg), box, alt, legend, " ".join(sentences))


def _drawn(lines: Series, peak: AttackResult | None, by: str) -> str:
    """Return matplotlib's drawing of the lines, its texts as texts."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "report",
        "font.size": 9,
        "axes.edgecolor": GREY,
        "grid.color": GRID,
        **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
        **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), INK),
    }
    few = len({r.epoch for records in lines.values() for r in records}) <= MANY_EPOCHS
    with rc_context(style):
        figure = Figure(figsize=(7, 3), layout="constrained")
        axes: Any = figure.add_subplot(xlabel=by, ylabel="accuracy in %")
        for i, (key, records) in enumerate(lines.items()):
            x, y = [r.epoch for r in records], [100 * r.accuracy for r in records]
            color = _color(i, key)
            marker = MARKERS[i % len(MARKERS)] if few else ""
            edge = {"markersize": 4, "markeredgecolor": PAGE, "markeredgewidth": 0.5}
            width, order = (2.2, 4) if key == WORST else (1.3, 3)
            dashes = "-" if key[1] == WHOLE else "--"
            line = {"linestyle": dashes, "linewidth": width, "zorder": order}
            axes.plot(x, y, color=color, marker=marker, **line, **edge)
            if key == WORST:
                spans = [r.interval or (r.accuracy, r.accuracy) for r in records]
                low, high = ([100 * span[end] for span in spans] for end in (0, 1))
                axes.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
        if peak:
            axes.axvline(peak.epoch, color=GREY, linewidth=0.8, linestyle=(0, (3, 3)), zorder=1)
            circle = {"marker": "o", "markersize": 10, "markerfacecolor": "none"}
            axes.plot(peak.epoch, 100 * peak.accuracy, color=INK, zorder=5, **circle)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.margins(x=0.02)
        text = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    return text.getvalue()


def _color(i: int, key: Key) -> str:
    return {"clean": GREY, "worst": INK}.get(key[0], COLORS[i % len(COLORS)])


def _themed(svg: str, prefix: str) -> tuple[str, str]:
    """Return box and content of a drawing in the page's size, colours, font and name space."""
    opening, svg = svg[svg.index("<svg") :].split(">", 1)
    box = re.search(r'viewBox="([^"]*)"', opening)
    svg = re.sub(
        r"<metadata>.*?</metadata>",
        "",
        svg.removesuffix("\n").removesuffix("</svg>"),
        flags=re.DOTALL,
    )
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg.replace("xlink:href", "href"))
    svg = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", svg)
    return box[1] if box else "", re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
