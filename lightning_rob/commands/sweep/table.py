"""The outcome of a sweep: a table for the terminal, a figure and the best value."""

import io
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from lightning_rob.commands.sweep import OF_DEFENSE, SweepConfig, Value
from lightning_rob.evaluation.records import Result
from lightning_rob.evaluation.results import WORST
from lightning_rob.plots import Curve, curves
from lightning_rob.runtime.files import atomic_write_text
from lightning_rob.tables import CLEAN, literal

AXES = {
    "probability": "sampling probability of the first member",
    "members": "members of the ensemble",
    "eps": "radius eps",
    "steps": "steps of the attack",
    "neighbours": "neighbouring classes searched by ARC",
}
LABELS = {CLEAN: "clean images", WORST: "strongest attack"}
COLORS = {CLEAN: "0.45", WORST: "black"}

Row = dict[str, Result]


@dataclass(frozen=True)
class SweepTable:
    """A finished sweep."""

    config: SweepConfig
    table: dict[Value, Row]

    @property
    def over(self) -> str:
        return str(self.config.over)

    @property
    def columns(self) -> dict[str, dict[Value, Result]]:
        """The results by name and value: clean images, the attacks, the worst of them."""
        names = dict.fromkeys(name for row in self.table.values() for name in row)
        ordered = sorted(names, key=lambda name: (name == WORST) - (name == CLEAN))
        return {n: {v: row[n] for v, row in self.table.items() if n in row} for n in ordered}

    @property
    def images(self) -> str:
        counts = (str(result.n) for row in self.table.values() for result in row.values())
        return ", ".join(dict.fromkeys(counts))

    def best(self) -> str:
        """Return the value that is best for the defense or, if it varies, for the attack."""
        name = str(self.config.best)
        column = {value: result.accuracy for value, result in self.columns[name].items()}
        of_defense = self.over in OF_DEFENSE
        value = (max if of_defense else min)(column, key=lambda value: column[value])
        row = {n: f"{100 * result.accuracy:.1f} %" for n, result in self.table[value].items()}
        there = [f"{n} there: {row[n]}" for n in self.columns if n != name and n in row]
        adjective = "best" if of_defense else "strongest"
        found = f"{adjective} {self.over} under {name}: {value.label} ({row[name]})"
        return "; ".join(filter(None, [found, ", ".join(there)]))

    def heading(self, name: str) -> str:
        """Return the title of a column, with the target unless it is the full defense."""
        target = next(iter(self.columns[name].values())).details["target"]
        return name if target == "full_defense" else f"{name} on {target}".replace("_", " ")

    def figure(self) -> Figure:
        of_255 = all(value.label.endswith("/255") for value in self.table)
        lines = []
        for name, column in self.columns.items():
            x = [value.number * (255 if of_255 else 1) for value in column]
            accuracy = [result.accuracy for result in column.values()]
            intervals = [result.interval for result in column.values()]
            label = LABELS.get(name, self.heading(name).replace("_", " "))
            lines.append(Curve(label, x, accuracy, intervals, COLORS.get(name)))
        unit = " in 1/255" if of_255 else " (images span 0 to 1)" * (self.over == "eps")
        return curves(lines, AXES[self.over] + unit, f"accuracy in %, {self.images} images")

    def show(self, path: Path) -> None:
        """Print the table, intervals below the accuracies, and write it as Markdown."""
        Console().print(self._table("\n"))
        text = io.StringIO()
        plain = Console(file=text, width=1000, force_terminal=False, color_system=None)
        plain.print(self._table(" "))
        atomic_write_text(path, text.getvalue())

    def _table(self, gap: str) -> Table:
        """Return the table, with a text between accuracy and interval."""
        caption = f"accuracy in %, 95 % interval; {self.images} images"
        table = Table(title=f"Sweep over {self.over}", caption=caption, title_justify="left")
        table.box = table.box if gap == "\n" else MARKDOWN
        for name in [self.over, *map(self.heading, self.columns)]:
            table.add_column(literal(name), justify="right", overflow="fold")
        for value, row in self.table.items():
            cells = [""] * len(self.columns)
            for i, name in enumerate(self.columns):
                if name in row:
                    low, high = (100 * bound for bound in row[name].interval)
                    cells[i] = f"{100 * row[name].accuracy:.1f}{gap}{low:.1f}…{high:.1f}"
            table.add_row(value.label, *cells)
        return table
