"""What a search found: a table, a recipe, a figure."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from lightning_rob.plots import convergence, save
from lightning_rob.tune.options import Options
from lightning_rob.tune.search import Search
from lightning_rob.tune.space import Space, changed
from lightning_rob.tune.trials import Record, Trial


@dataclass(frozen=True)
class Outcome:
    """The end of a study.

    Args:
        space: what was searched.
        search: where it began.
        record: all trials, one of which at least did not fail.
        recipe: the whole of it, with its own values.
        options: where to write.
    """

    space: Space
    search: Search
    record: Record
    recipe: dict[str, Any]
    options: Options

    def tell(self) -> Path:
        """Print the table, write recipe and figure; the recipe's file."""
        best = self.record.best
        if best is None:
            raise ValueError(f"all {len(self.record.trials)} trials failed")
        recipe, dropped = self.space.pruned(changed(self.recipe, best.values), best.values)
        Console().print(self.table(best, dropped))
        out = self.options.out
        note = f"# Trial {best.number} of: {self.options.command}\n"
        note += f"# Pruned: {', '.join(dropped)}\n" if dropped else ""
        write_recipe(recipe, out / "best.yaml", note)
        objectives = [trial.objective for trial in self.record.ended]
        save(convergence(objectives, self.search.initial, self.label()), out / "convergence.png")
        print(self.sentence(best))
        print(f"Wrote {out}/trials.jsonl, best.yaml and convergence.png")
        print(f"Train with the best: lightning-rob fit --config {out}/best.yaml")
        return out / "best.yaml"

    def label(self) -> str:
        """The objective in words."""
        terms = [(m, w) for m, w in self.space.objective.items() if w]
        return " + ".join(m if w == 1 else f"{w:g} {m}" for m, w in terms)

    def sentence(self, best: Trial) -> str:
        """How much better the best is than the recipe as it was."""
        trials = self.record.ended
        failed = sum(trial.error is not None for trial in trials)
        own = self.record.trials.get(0)
        untuned = "failed" if own is None or own.objective is None else f"{own.objective:.4g}"
        return (
            f"{self.label()}: {best.objective:.4g} at trial {best.number} of {len(trials)}"
            f"{f' ({failed} failed)' if failed else ''}; untuned: {untuned}"
        )

    def table(self, best: Trial, dropped: list[str]) -> Table:
        """The variables: bounds, the recipe's values, the best ones."""
        table = Table(title="Best values", title_justify="left", title_style="bold")
        for name in ("variable", "bounds", "untuned", "best"):
            table.add_column(name, justify="left" if name == "variable" else "right")
        keys = list(self.space.variables)
        shared = _shared(keys)
        for key in keys:
            low, high = self.space.variables[key][:2]
            told = [f"{low:g} … {high:g}", f"{self.search.own[key]:.4g}", f"{best.values[key]:.4g}"]
            told[-1] += " (pruned)" if key.split(".")[-2:-1] in [[name] for name in dropped] else ""
            table.add_row(key[shared:], *told)
        return table


def _shared(keys: list[str]) -> int:
    """The length of the parts that all keys begin with."""
    parts = [key.split(".")[:-1] for key in keys]
    if len(keys) == 1:
        return 0
    count = 0
    while all(len(p) > count and p[count] == parts[0][count] for p in parts):
        count += 1
    return sum(len(part) + 1 for part in parts[0][:count])


def write_recipe(recipe: dict[str, Any], path: Path, note: str = "") -> None:
    """Write a recipe that can be given to `--config` beside others."""
    trainer = {k: v for k, v in recipe["trainer"].items() if k != "callbacks"}
    if recipe["trainer"].get("callbacks"):
        trainer["callbacks+"] = recipe["trainer"]["callbacks"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(note + yaml.safe_dump({**recipe, "trainer": trainer}, sort_keys=False))
