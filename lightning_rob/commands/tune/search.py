"""`lightning-rob tune`: search values of a recipe's keys by short trainings of it."""

import gc
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from lightning_rob.commands.base import Run, quiet_lightning
from lightning_rob.commands.specs import class_name
from lightning_rob.commands.tune import TuneConfig
from lightning_rob.commands.tune.space import Point, Space, replaced
from lightning_rob.commands.tune.study import Record, Search, Study, Trial
from lightning_rob.plots import convergence, save
from lightning_rob.randomness import derive_seed
from lightning_rob.recipes.safe_yaml import load_file
from lightning_rob.recipes.trust import OPTION, allowed
from lightning_rob.runtime.errors import visible
from lightning_rob.runtime.files import atomic_write_text
from lightning_rob.runtime.identity import cache_key
from lightning_rob.runtime.spread import spread

QUIET = {
    "trainer.logger": False,
    "trainer.enable_checkpointing": False,
    "trainer.enable_progress_bar": False,
    "trainer.enable_model_summary": False,
    "trainer.num_sanity_val_steps": 0,
}
NEEDS_LOGGER = ("ModelCheckpoint", "LearningRateMonitor", "DeviceStatsMonitor")
BUDGET = ("trials", "min_trials", "patience", "random")

Build = Callable[[Path], Any]  # recipe -> model, datamodule and trainer


def run(config: TuneConfig, built: Run, build: Build) -> None:
    """Search, print and write the best values."""
    if built.trainer.world_size > 1:
        raise ValueError(
            f"a trial runs on one device, got {built.trainer.world_size}: add --trainer.devices=1; "
            "--workers and --ray make several trials at a time"
        )
    out = config.out or Path("tuning") / built.name
    file = config.space or Path()  # which the config has checked
    content = load_file(file, "a search space")
    try:
        space = Space.read(content)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    own = space.initial(built.recipe)
    given = {name: value for name in BUDGET if (value := getattr(config, name)) is not None}
    budget = replace(space.budget, **given)
    replaced(built.recipe, space.trial)  # fail for an unknown key before anything is built
    search = Search(space, own, budget, config.seed)
    bounds = {key: str(bound) for key, bound in space.variables.items()}
    parts = [bounds, space.objective, space.trial, str(space.near_zero)]
    key = cache_key(recipe=built.recipe, space=parts, seed=config.seed)
    record = Record(out / "trials.jsonl", key)
    training = Training(built.recipe, space, config.seed, out, build)
    with quiet_lightning():
        training.build_trial(0, own)  # fail for an invalid value before the first trial

    def report(trial: Trial) -> None:
        outcome = visible(trial.error or f"{trial.objective:.4g}")
        best = record.best
        text = f"; best {best.objective:.4g} at trial {best.number}" if best else ""
        count = f"[{len(record.trials)}/{budget.trials}]"
        print(f"{count} trial {trial.number}: {outcome} ({trial.seconds:.0f} s){text}")

    study = Study(search, record, training, report)
    if config.part:
        study.run_part(*map(int, config.part.split("/")))
        return
    if config.processes:
        args = shlex.split(built.command)[1:]
        study.run_rounds(config.processes, partial(spread, args, config.processes, config.ray > 0))
    else:
        study.run()
    write_outcome(study, built, out)


@dataclass(frozen=True)
class Training:
    """Trains a recipe with the values of a trial, made cheap as the space says."""

    recipe: dict[str, Any]
    space: Space
    seed: int
    folder: Path  # of the study
    build: Build

    def __call__(self, number: int, values: Point) -> dict[str, float]:
        """Return the metrics that were logged last."""
        with quiet_lightning():
            built = self.build_trial(number, values)
            built.trainer.fit(built.model, datamodule=built.datamodule)
            metrics = {name: float(v) for name, v in built.trainer.callback_metrics.items()}
        del built
        gc.collect()  # reference cycles would keep the networks of earlier trials
        return metrics

    def build_trial(self, number: int, values: Point) -> Any:
        """Return trainer, model and data of a trial, and write its recipe to its folder."""
        folder = self.folder / "trials" / f"{number:04}"
        seed = {"seed_everything": derive_seed(self.seed, number) % 2**32}
        place = {"trainer.default_root_dir": str(folder)}
        recipe = replaced(self.recipe, QUIET | place | seed | self.space.trial | values)
        recipe, _ = self.space.pruned(recipe, values)
        trainer = recipe["trainer"]
        unfit = () if trainer["logger"] else NEEDS_LOGGER
        given = trainer.get("callbacks+", ())
        trainer["callbacks+"] = [c for c in given if class_name(c["class_path"]) not in unfit]
        atomic_write_text(folder / "config.yaml", yaml.safe_dump(recipe, sort_keys=False))
        return self.build(folder / "config.yaml")


def write_outcome(study: Study, run: Run, folder: Path) -> None:
    """Print the table, and write figure and best recipe."""
    trials, best = study.record.ended, study.record.best
    space, own = study.search.space, study.search.own
    if best is None:
        raise ValueError(f"all {len(trials)} trials failed")
    recipe, dropped = space.pruned(replaced(run.recipe, best.values), best.values)
    table = Table(title="Best values", title_justify="left", title_style="bold")
    table.add_column("variable", overflow="fold")  # the longest names, on a narrow terminal
    for name in ("bounds", "untuned", "best"):
        table.add_column(name, justify="right", no_wrap=True)
    for key, (low, high, *_) in space.variables.items():
        pruned = " (pruned)" if key.rpartition(".")[0].rpartition(".")[2] in dropped else ""
        values = f"{own[key]:.4g}", f"{best.values[key]:.4g}{pruned}"
        table.add_row(key, f"{low:g} … {high:g}", *values)
    Console().print(table)

    header = f"# Trial {best.number} of: {visible(run.command)}\n"
    header += f"# Pruned: {', '.join(dropped)}\n" if dropped else ""
    path = folder / "best.yaml"
    atomic_write_text(path, header + yaml.safe_dump(recipe, sort_keys=False))
    terms = space.objective.items()
    label = " + ".join(m if w == 1 else f"{w:g} {m}" for m, w in terms if w)
    objectives = [trial.objective for trial in trials]
    save(convergence(objectives, label), folder / "convergence.png")

    failed = sum(trial.error is not None for trial in trials)
    first = objectives[0] if trials[0].number == 0 else None
    print(
        f"{label}: {best.objective:.4g} at trial {best.number} of {len(trials)}"
        f"{f' ({failed} failed)' if failed else ''}"
        f"; untuned: {'failed' if first is None else f'{first:.4g}'}"
    )
    print(f"Wrote {folder}/trials.jsonl, best.yaml and convergence.png")
    allowance = "".join(f" {OPTION} {name}" for name in sorted(allowed()))
    print(f"Train with the best: lightning-rob fit --config {path}{allowance}")
