"""`lightning-rob tune`: trainings of a recipe, each with values of its own for some keys."""

import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_rob.identity import cache_key
from lightning_rob.randomness import derive_seed
from lightning_rob.reasons import InputError
from lightning_rob.run import Command
from lightning_rob.tune.options import Budget, Options, parse
from lightning_rob.tune.outcome import Outcome, write_recipe
from lightning_rob.tune.search import Search
from lightning_rob.tune.space import Point, Space, changed
from lightning_rob.tune.trials import Record, Study, Trial, read_trials

QUIET = {
    "trainer.logger": False,
    "trainer.enable_checkpointing": False,
    "trainer.enable_progress_bar": False,
    "trainer.enable_model_summary": False,
    "trainer.num_sanity_val_steps": 0,
}
OF_LOGS = ("ModelCheckpoint", "LearningRateMonitor", "DeviceStatsMonitor")


@dataclass(frozen=True)
class Fit:
    """Trains the recipe with the values of a trial.

    Args:
        recipe: the whole of it.
        space: what makes a trial cheap.
        seed: of the study.
        folder: for the trials' recipes.
    """

    recipe: dict[str, Any]
    space: Space
    seed: int
    folder: Path

    def __call__(self, number: int, values: Point) -> dict[str, float]:
        """What was logged last."""
        with _quiet():
            built = self.build(number, values)
            built.trainer.fit(built.model, datamodule=built.datamodule)
            metrics = {name: float(v) for name, v in built.trainer.callback_metrics.items()}
        del built
        gc.collect()  # of cycles that hold the networks of trials long gone
        return metrics

    def build(self, number: int, values: Point) -> Command:
        """The trainer, model and data of a trial; its recipe is in its folder."""
        folder = self.folder / "trials" / f"{number:04}"
        seed = {"seed_everything": derive_seed(self.seed, number) % 2**32}
        place = {"trainer.default_root_dir": str(folder)}
        whole = changed(self.recipe, QUIET | place | seed | self.space.trial | values)
        recipe, _ = self.space.pruned(whole, values)
        callbacks = recipe["trainer"]["callbacks"] or []
        if not recipe["trainer"]["logger"]:
            callbacks = [c for c in callbacks if c["class_path"].split(".")[-1] not in OF_LOGS]
        recipe["trainer"]["callbacks"] = callbacks
        write_recipe(recipe, folder / "config.yaml")
        return Command(["--config", str(folder / "config.yaml")], run=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Lightning says of every trial: which devices there are, why it stopped."""
    loggers = [logging.getLogger(f"lightning.{part}") for part in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*LeafSpec")  # of torch, once a training
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def main(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: the command line without `tune`.

    Raises:
        InputError: what is asked for cannot be run.
    """
    try:
        options, rest = parse(args)
        with _quiet():
            recipe = _whole(rest)
        best = tune(options, recipe)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise InputError(str(error)) from error
    if options.then_fit:
        Command(["fit", "--config", str(best)])


def _whole(args: Sequence[str]) -> dict[str, Any]:
    """The recipe with all its defaults."""
    built = Command(args, run=False)
    recipe: dict[str, Any] = yaml.safe_load(built.parser.dump(built.config, skip_none=False))
    if built.trainer.world_size > 1:
        raise ValueError(
            f"a trial runs on one device, got {built.trainer.world_size}: add --trainer.devices=1; "
            "--ray makes several trials at a time"
        )
    return recipe


def tune(options: Options, recipe: dict[str, Any]) -> Path:
    """Search, and write and print what was found; the file of the best recipe.

    Raises:
        ValueError: the space does not fit the recipe, or nothing can be found.
    """
    make = _runner(options.concurrent)
    space = _space(options.space)
    own = space.own(recipe)
    budget = Budget().with_(space.budget | options.budget)
    changed(recipe, space.trial)  # an unknown key is told before anything is built
    search = Search(space.variables, own, budget, options.seed, _earlier(options, space))
    study = cache_key(recipe=recipe, space=_contents(space), seed=options.seed)
    record = Record(options.out / "trials.jsonl", study)
    fit = Fit(recipe, space, options.seed, options.out)
    with _quiet():
        fit.build(0, own)
    with _progress(record, budget) as tell:
        make(Study(space, search, record, fit, tell))
    return Outcome(space, search, record, recipe, options).tell()


def _runner(concurrent: int | None) -> Callable[[Study], None]:
    """What makes the trials of a study."""
    if concurrent is None:
        return Study.run
    from lightning_rob.tune.parallel import run_with_ray

    return partial(run_with_ray, concurrent=concurrent)


def _space(path: Path) -> Space:
    if not path.is_file():
        raise ValueError(f"there is no search space {path}")
    try:
        return Space.read(jsonargparse.get_loader("yaml")(path.read_text()))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error


def _contents(space: Space) -> list[Any]:
    """What an objective depends on."""
    bounds = {k: str(b) for k, b in space.variables.items()}
    return [bounds, space.objective, space.trial, space.prune]


def _earlier(options: Options, space: Space) -> list[tuple[Point, float]]:
    """What there is to learn from."""
    if options.warm_start is None:
        return []
    trials = [trial for _, trial in read_trials(options.warm_start)]
    if not trials:
        raise ValueError(f"--warm_start: there are no trials in {options.warm_start}")
    for key in {key for trial in trials for key in trial.values} ^ set(space.variables):
        where = options.space if key in space.variables else options.warm_start
        raise ValueError(
            f"--warm_start needs trials of the same variables: {key} is only in {where}"
        )
    found = [(t.values, t.objective) for t in trials if t.objective is not None]
    inside = [(point, objective) for point, objective in found if space.contains(point)]
    print(f"Warm start: {len(inside)} of {len(trials)} trials ended well and within the bounds")
    return inside


@contextmanager
def _progress(record: Record, budget: Budget) -> Iterator[Any]:
    """A bar with the best so far."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn()) as progress:
        bar = progress.add_task("Tuning", total=budget.trials)

        def tell(_: Trial | None = None) -> None:
            best = record.best
            told = f", best {best.objective:.4g} (trial {best.number})" if best else ""
            progress.update(bar, completed=len(record.trials), description=f"Tuning{told}")

        tell()
        yield tell
