"""The outcome of a sweep: a table for the terminal, Markdown, a figure and the best value."""

from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from lightning_rob.commands.sweep import OF_DEFENSE, SweepConfig, Value
from lightning_rob.evaluation.records import Result, append_records
from lightning_rob.evaluation.results import WORST
from lightning_rob.plots import Curve, curves, save
from lightning_rob.tables import CLEAN

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
    facts: dict[str, str]

    @property
    def over(self) -> str:
        return str(self.config.over)

    @property
    def names(self) -> list[str]:
        """The columns: clean images, the attacks, the worst of them."""
        names = dict.fromkeys(name for row in self.table.values() for name in row)
        return sorted(names, key=lambda name: (name == WORST) - (name == CLEAN))

    def column(self, name: str) -> dict[Value, Result]:
        """Return the results of one attack by value."""
        return {value: row[name] for value, row in self.table.items() if name in row}

    def best(self, name: str) -> list[Value]:
        """Return the values that are best for the defense or, if it varies, for the attack."""
        found = {value: result.accuracy for value, result in self.column(name).items()}
        accuracies = set(found.values())
        if self.over == "eps" or len(accuracies) == 1:
            return []
        wanted = max(accuracies) if self.over in OF_DEFENSE else min(accuracies)
        return [value for value, accuracy in found.items() if accuracy == wanted]

    def sentence(self) -> str:
        """Return the sentence that `--best` asks for; empty without that option."""
        name = self.config.best
        if name is None:
            return ""
        value = (self.best(name) or list(self.table))[0]
        row = {n: f"{100 * result.accuracy:.1f} %" for n, result in self.table[value].items()}
        there = [f"{n} there: {row[n]}" for n in self.names if n != name and n in row]
        adjective = "best" if self.over in OF_DEFENSE else "strongest"
        found = f"{adjective} {self.over} under {name}: {value.label} ({row[name]})"
        return "; ".join(filter(None, [found, ", ".join(there)]))

    def rows(self) -> list[list[str]]:
        """Return the table's cells, the value first; an asterisk marks the best of a column."""
        rows = []
        for value, row in self.table.items():
            cells = [value.label]
            for name in self.names:
                if (result := row.get(name)) is None:
                    cells.append("")
                    continue
                low, high = (100 * bound for bound in result.interval)
                mark = "*" * (value in self.best(name))
                cells.append(f"{100 * result.accuracy:.1f}{mark} ({low:.1f}…{high:.1f})")
            rows.append(cells)
        return rows

    def caption(self) -> str:
        """Return the legend of the cells."""
        caption = "accuracy in % (95 % interval)"
        if not any(map(self.best, self.names)):
            return caption
        if self.over in OF_DEFENSE:
            return f"{caption}; * highest of its column"
        return f"{caption}; * lowest of its column: there the attack is strongest"

    def images(self) -> str:
        counts = (str(result.n) for row in self.table.values() for result in row.values())
        return ", ".join(dict.fromkeys(counts))

    def heading(self, name: str) -> str:
        """Return the title of a column, with the target unless it is the full defense."""
        target = next(iter(self.column(name).values())).details["target"]
        return name if target == "full_defense" else f"{name} on {target}".replace("_", " ")

    def markdown(self) -> str:
        """Return the outcome as a page, with all that is needed to repeat it."""
        head = [self.over, *map(self.heading, self.names)]
        rows = [head, ["---:"] * len(head), *self.rows()]
        table = "\n".join("| " + " | ".join(row) + " |" for row in rows).replace("*", "\\*")
        facts = [f"- {k}: {v}" for k, v in (self.facts | {"images": self.images()}).items()]
        best = [f"**{self.sentence()}**"] if self.config.best else []
        caption = self.caption().replace("*", "\\*")
        figure = f"![Accuracy by {self.over}](sweep.png)"
        parts = [f"# Sweep over {self.over}", *best, table, caption, figure, "\n".join(facts)]
        return "\n\n".join(parts) + "\n"

    def figure(self) -> Figure:
        of_255 = all(value.label.endswith("/255") for value in self.table)
        lines = []
        for name in self.names:
            column = self.column(name)
            x = [value.number * (255 if of_255 else 1) for value in column]
            accuracy = [result.accuracy for result in column.values()]
            intervals = [result.interval for result in column.values()]
            label = LABELS.get(name, self.heading(name).replace("_", " "))
            lines.append(Curve(label, x, accuracy, intervals, COLORS.get(name)))
        unit = " in 1/255" if of_255 else " (images span 0 to 1)" * (self.over == "eps")
        return curves(lines, AXES[self.over] + unit, f"accuracy in %, {self.images()} images")

    def show(self, console: Console) -> None:
        """Print the table, intervals below the accuracies where the terminal is narrow."""
        names = [self.over, *map(self.heading, self.names)]
        table = Table(title=f"Sweep over {self.over}", title_style="bold", caption=self.caption())
        table.title_justify = table.caption_justify = "left"
        for name in names:
            table.add_column(name, justify="right", overflow="fold")
        rows = self.rows()
        widths = [max(map(len, cells)) for cells in zip(names, *rows, strict=True)]
        if sum(widths) + 3 * len(widths) >= console.width:
            rows = [[cell.replace(" (", "\n").rstrip(")") for cell in row] for row in rows]
        for row in rows:
            table.add_row(*(f"[bold]{cell}[/]" if "*" in cell else cell for cell in row))
        console.print(table)

    def write(self, folder: Path) -> None:
        self.show(Console())
        # `sweep.jsonl` may hold other sweeps, so a record of its own says what this table has.
        points = [
            [value.number, result.details["reuse"]["key"]]
            for value, row in self.table.items()
            for result in row.values()
        ]
        study = {"kind": "sweep_study", "variable": self.over, "points": points}
        append_records(folder / "sweep_studies.jsonl", [study])
        save(self.figure(), folder / "sweep.png")
        (folder / "sweep.md").write_text(self.markdown())
        if self.config.best:
            print(self.sentence())
        print(f"Wrote {folder}/sweep.jsonl, sweep.md and sweep.png")
