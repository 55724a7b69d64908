"""`lightning-rob tune`: search values of a recipe's keys by short trainings of it."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lightning_rob.commands.base import Run, quiet_lightning, write_config
from lightning_rob.commands.configs import TuneConfig
from lightning_rob.commands.specs import class_name
from lightning_rob.commands.tune_search import Budget, Point, Search, Space, replaced
from lightning_rob.commands.tune_trials import Record, Study, Trial, read_trials
from lightning_rob.plots import convergence, save
from lightning_rob.randomness import derive_seed
from lightning_rob.recipes.safe_yaml import load_file
from lightning_rob.runtime.identity import cache_key

QUIET = {
    "trainer.logger": False,
    "trainer.enable_checkpointing": False,
    "trainer.enable_progress_bar": False,
    "trainer.enable_model_summary": False,
    "trainer.num_sanity_val_steps": 0,
}
NEEDS_LOGGER = ("ModelCheckpoint", "LearningRateMonitor", "DeviceStatsMonitor")
BUDGET = ("trials", "min_trials", "patience", "random", "diagonal")

Build = Callable[[Path], Any]  # recipe -> model, datamodule and trainer


def run(config: TuneConfig, run: Run, build: Build) -> Path | None:
    """Search, print and write the best values.

    Args:
        config: options.
        run: the recipe with all its defaults.
        build: builds the training of a recipe file.

    Returns:
        The best recipe if it is to be trained next, or None.

    Raises:
        ValueError: the space does not fit the recipe, or all trials fail.
    """
    if run.trainer.world_size > 1:
        raise ValueError(
            f"a trial runs on one device, got {run.trainer.world_size}: add --trainer.devices=1; "
            "--ray makes several trials at a time"
        )
    out = config.out or Path("tuning") / run.name
    execute = _executor(config)
    space = read_space(config.space or Path())  # which the config has checked
    own = space.initial(run.recipe)
    given = {name: value for name in BUDGET if (value := getattr(config, name)) is not None}
    budget = Budget().with_(space.budget | given)
    replaced(run.recipe, space.trial)  # fail for an unknown key before anything is built
    earlier = _earlier_trials(config.warm_start or [], space, run.recipe)
    search = Search(space.variables, own, budget, config.seed, earlier)
    record = Record(out / "trials.jsonl", _study_key(run, space, config.seed))
    training = Training(run.recipe, space, config.seed, out, build)
    with quiet_lightning():
        training.build_trial(0, own)  # fail for an invalid value before the first trial
    with _progress_bar(record, budget) as report:
        study = Study(space, search, record, training, report)
        execute(study)
    best = Outcome(study, run.recipe, out, run.command).write()
    return best if config.then_fit else None


@dataclass(frozen=True)
class Training:
    """Trains a recipe with the values of a trial.

    Args:
        recipe: the whole configuration.
        space: makes a trial cheap.
        seed: of the study.
        folder: for the trials' recipes.
        build: builds the training of a recipe file.
    """

    recipe: dict[str, Any]
    space: Space
    seed: int
    folder: Path
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
        folder = trial_folder(self.folder, number)
        seed = {"seed_everything": derive_seed(self.seed, number) % 2**32}
        place = {"trainer.default_root_dir": str(folder)}
        recipe = replaced(self.recipe, QUIET | place | seed | self.space.trial | values)
        recipe, _ = self.space.pruned(recipe, values)
        trainer = recipe["trainer"]
        unfit = () if trainer["logger"] else NEEDS_LOGGER
        given = trainer.get("callbacks+", ())
        trainer["callbacks+"] = [c for c in given if class_name(c["class_path"]) not in unfit]
        write_config(recipe, folder / "config.yaml")
        return self.build(folder / "config.yaml")


def trial_folder(study: Path, number: int) -> Path:
    """The folder of a trial's recipe."""
    return study / "trials" / f"{number:04}"


def _executor(config: TuneConfig) -> Callable[[Study], None]:
    """Return the function that runs the trials of a study."""
    if not config.ray:
        return Study.run
    from lightning_rob.commands.tune_ray import run_with_ray  # needs an extra

    return partial(run_with_ray, concurrent=config.concurrent or 2)


def read_space(path: Path) -> Space:
    """Read a search space.

    Raises:
        ValueError: no such file, or not a space.
    """
    if not path.is_file():
        raise ValueError(f"there is no search space {path}")
    content = load_file(path, "a search space")
    try:
        return Space.read(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _study_key(run: Run, space: Space, seed: int) -> str:
    """Return a key of all that an objective depends on."""
    bounds = {k: str(b) for k, b in space.variables.items()}
    contents = [bounds, space.objective, space.trial, space.prune]
    return cache_key(recipe=run.recipe, space=contents, seed=seed)


def _earlier_trials(
    files: Sequence[Path], space: Space, recipe: dict[str, Any]
) -> list[tuple[Point, float]]:
    """Return the trials of other studies that are points of this space, with their objectives.

    Raises:
        ValueError: a file has no trials, or a trial's recipe lacks a variable.
    """
    found, total = [], 0
    for path in files:
        trials = [trial for _, trial in read_trials(path)]
        if not trials:
            raise ValueError(f"--warm_start: there are no trials in {path}")
        total += len(trials)
        for trial in trials:
            if trial.objective is None:
                continue
            trained = {}
            if trial.values.keys() != space.variables.keys():
                file = trial_folder(path.parent, trial.number) / "config.yaml"
                trained = load_file(file, "the recipe of a trial")
            point = space.point(trial.values, trained, recipe)
            if point and space.contains(point):
                found.append((point, trial.objective))
    if files:
        print(f"Warm start: {len(found)} of {total} trials are points of this space")
    return found


@contextmanager
def _progress_bar(record: Record, budget: Budget) -> Iterator[Callable[..., None]]:
    """Show a bar with the best objective; yield the function that updates it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn()) as progress:
        bar = progress.add_task("Tuning", total=budget.trials)

        def update(_: Trial | None = None) -> None:
            best = record.best
            text = f", best {best.objective:.4g} (trial {best.number})" if best else ""
            progress.update(bar, completed=len(record.trials), description=f"Tuning{text}")

        update()
        yield update


@dataclass(frozen=True)
class Outcome:
    """The result of a finished study of a recipe: a table, the best recipe and a figure."""

    study: Study
    recipe: dict[str, Any]
    folder: Path
    command: str

    def write(self) -> Path:
        """Print the table, write recipe and figure, and return the recipe's file.

        Raises:
            ValueError: all trials failed.
        """
        study, best = self.study, self.study.record.best
        if best is None:
            raise ValueError(f"all {len(study.record.trials)} trials failed")
        recipe, dropped = study.space.pruned(replaced(self.recipe, best.values), best.values)
        Console().print(self.table(best, dropped))
        header = f"# Trial {best.number} of: {self.command}\n"
        header += f"# Pruned: {', '.join(dropped)}\n" if dropped else ""
        path = self.folder / "best.yaml"
        write_config(recipe, path, header)
        objectives = [trial.objective for trial in study.record.ended]
        figure = convergence(objectives, study.search.initial, self.label())
        save(figure, self.folder / "convergence.png")
        print(self.summary(best))
        print(f"Wrote {self.folder}/trials.jsonl, best.yaml and convergence.png")
        print(f"Train with the best: lightning-rob fit --config {path}")
        return path

    def label(self) -> str:
        """The objective as a formula."""
        terms = self.study.space.objective.items()
        return " + ".join(m if w == 1 else f"{w:g} {m}" for m, w in terms if w)

    def summary(self, best: Trial) -> str:
        """The best objective beside that of the recipe's own values."""
        trials = self.study.record.ended
        failed = sum(trial.error is not None for trial in trials)
        own = self.study.record.trials.get(0)
        untuned = "failed" if own is None or own.objective is None else f"{own.objective:.4g}"
        return (
            f"{self.label()}: {best.objective:.4g} at trial {best.number} of {len(trials)}"
            f"{f' ({failed} failed)' if failed else ''}; untuned: {untuned}"
        )

    def table(self, best: Trial, dropped: list[str]) -> Table:
        """Bounds, own and best value of each variable."""
        table = Table(title="Best values", title_justify="left", title_style="bold")
        for name in ("variable", "bounds", "untuned", "best"):
            table.add_column(name, justify="left" if name == "variable" else "right")
        variables, own = self.study.space.variables, self.study.search.own
        shared = _shared_prefix([*variables])
        for key, (low, high, *_) in variables.items():
            pruned = " (pruned)" if key.rpartition(".")[0].rpartition(".")[2] in dropped else ""
            values = f"{own[key]:.4g}", f"{best.values[key]:.4g}{pruned}"
            table.add_row(key[shared:], f"{low:g} … {high:g}", *values)
        return table


def _shared_prefix(keys: list[str]) -> int:
    """Return the length of the dotted parts that all keys begin with; 0 for a single key."""
    parts = [key.split(".")[:-1] for key in keys] if len(keys) > 1 else []
    shared = takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False))
    return sum(len(same[0]) + 1 for same in shared)
