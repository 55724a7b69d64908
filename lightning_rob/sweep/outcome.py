"""What a sweep found: a table for the terminal, Markdown, a figure and a sentence."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from lightning_rob.evaluation.records import Result, append_records
from lightning_rob.plots import Curve, curves, save
from lightning_rob.sweep.options import Study, Value
from lightning_rob.sweep.plan import CLEAN, WORST
from lightning_rob.sweep.variables import VARIABLES

MARKS = {
    "defense": "* highest of its column",
    "attack": "* lowest of its column: there the attack is strongest",
}
WORDS = {CLEAN: "clean images", WORST: "worst attack per image"}
COLOR = {CLEAN: "0.45", WORST: "black"}
CAPTION = "accuracy in % (95 % interval)"


@dataclass(frozen=True)
class Outcome:
    """A finished sweep.

    Args:
        study: what was asked for.
        table: each value's figures by name.
        told: its circumstances, name -> text.
    """

    study: Study
    table: dict[Value, dict[str, Result]]
    told: dict[str, str]

    @property
    def names(self) -> list[str]:
        """The columns: clean images, the attacks, the worst of them."""
        names = dict.fromkeys(name for row in self.table.values() for name in row)
        return sorted(names, key=lambda name: (name == WORST) - (name == CLEAN))

    def column(self, name: str) -> dict[Value, Result]:
        """One attack's figure at each value."""
        return {value: row[name] for value, row in self.table.items() if name in row}

    def best(self, name: str) -> list[Value]:
        """The values best for the defense, or for the attack if it is what varies.

        Empty where the value makes no difference, or the variable has no best.
        """
        found = {value: result.accuracy for value, result in self.column(name).items()}
        sought = VARIABLES[self.study.over].sought
        low, high = min(found.values()), max(found.values())
        if sought is None or low == high:
            return []
        return [value for value, a in found.items() if a == (high if sought == "defense" else low)]

    def sentence(self) -> str:
        """What `--best` asks for; empty if it was not."""
        name, over = self.study.best, self.study.over
        if name is None:
            return ""
        value = (self.best(name) or list(self.table))[0]
        others = [n for n in self.names if n != name and n in self.table[value]]
        there = ", ".join(f"{n} there: {_percent(self.table[value][n])}" for n in others)
        word = "best" if VARIABLES[over].sought == "defense" else "strongest"
        found = f"{word} {over} under {name}: {value.label} ({_percent(self.table[value][name])})"
        return f"{found}; {there}" if there else found

    def rows(self) -> list[list[str]]:
        """The table's cells, the value first; an asterisk is at the best of a column."""
        best = {name: self.best(name) for name in self.names}
        return [
            [value.label, *(_cell(row.get(n), value in best[n]) for n in self.names)]
            for value, row in self.table.items()
        ]

    def caption(self) -> str:
        """What the cells mean."""
        mark = MARKS.get(VARIABLES[self.study.over].sought or "")
        return f"{CAPTION}; {mark}" if mark and any(map(self.best, self.names)) else CAPTION

    def images(self) -> str:
        """How many images the figures are of."""
        counts = {name: next(iter(self.column(name).values())).n for name in self.names}
        if len(set(counts.values())) == 1:
            return str(next(iter(counts.values())))
        return ", ".join(f"{n} ({name})" for name, n in counts.items())

    def markdown(self) -> str:
        """The whole outcome, with what is needed to repeat it."""
        head = ["| " + " | ".join([self.study.over, *map(self.heading, self.names)]) + " |"]
        head += ["|" + " ---: |" * (1 + len(self.names))]
        cells = ["| " + " | ".join(row) + " |" for row in self.rows()]
        facts = [f"- {k}: {v}" for k, v in (self.told | {"images": self.images()}).items()]
        table = "\n".join([*head, *cells]).replace("*", "\\*")
        said = [f"**{self.sentence()}**"] if self.study.best else []
        caption = self.caption().replace("*", "\\*")
        figure = f"![Accuracy by {self.study.over}](sweep.png)"
        parts = [f"# Sweep over {self.study.over}", *said, table, caption, figure]
        return "\n\n".join([*parts, "\n".join(facts)]) + "\n"

    def heading(self, name: str) -> str:
        """The name of a column or a line, with what was attacked unless it was the whole."""
        target = next(iter(self.column(name).values())).details["target"]
        return name if target == "full_defense" else f"{name} on {target}".replace("_", " ")

    def figure(self) -> Figure:
        """One line per attack."""
        of_255 = all(value.label.endswith("/255") for value in self.table)
        lines = []
        for name in self.names:
            column = self.column(name)
            x = [value.number * (255 if of_255 else 1) for value in column]
            accuracy = [result.accuracy for result in column.values()]
            intervals = [result.interval for result in column.values()]
            label = WORDS.get(name, self.heading(name).replace("_", " "))
            lines.append(Curve(label, x, accuracy, intervals, COLOR.get(name)))
        unit = " in 1/255" if of_255 else " (images span 0 to 1)" * (self.study.over == "eps")
        label = VARIABLES[self.study.over].axis + unit
        return curves(lines, label, f"accuracy in %, {self.images()} images")

    def show(self, console: Console) -> None:
        """Print the table, intervals below their figures where the terminal is narrow."""
        caption, names = self.caption(), [self.study.over, *map(self.heading, self.names)]
        table = Table(title=f"Sweep over {self.study.over}", title_style="bold", caption=caption)
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

    def contents(self) -> dict[str, Any]:
        """Which figures of the record the table has: it may hold those of other studies."""
        points = [
            [value.number, result.details["reuse"]["key"]]
            for value, row in self.table.items()
            for result in row.values()
        ]
        return {"kind": "sweep_study", "variable": self.study.over, "points": points}

    def tell(self, folder: Path) -> None:
        """Print the table, and write it and the figure to the folder."""
        self.show(Console())
        append_records(folder / "sweep_studies.jsonl", [self.contents()])
        save(self.figure(), folder / "sweep.png")
        (folder / "sweep.md").write_text(self.markdown())
        if self.study.best:
            print(self.sentence())
        print(f"Wrote {folder}/sweep.jsonl, sweep.md and sweep.png")


def _percent(result: Result) -> str:
    return f"{100 * result.accuracy:.1f} %"


def _cell(result: Result | None, best: bool) -> str:
    if result is None:
        return ""
    low, high = (100 * bound for bound in result.interval)
    return f"{100 * result.accuracy:.1f}{'*' * best} ({low:.1f}…{high:.1f})"
