"""The figures of a sweep, value by value, as far as the record lacks them."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import SaveConfigCallback

from lightning_rob.callbacks import RobustEval
from lightning_rob.callbacks.base import EvaluationCallback
from lightning_rob.callbacks.measurement import Measurement
from lightning_rob.evaluation.records import Result
from lightning_rob.sweep.options import Study, Value
from lightning_rob.sweep.plan import Game, plan, worst
from lightning_rob.sweep.points import Points, scores_of

Table = dict[Value, dict[str, Result]]
RECORD = "sweep.jsonl"


class Unseen(ProgressBar):
    """No bar of its own: lets the attacks show theirs."""

    def disable(self) -> None:
        """There is nothing to disable."""


def measure(
    study: Study,
    trainer: Trainer,
    model: Any,
    datamodule: LightningDataModule,
    settings: dict[str, Any],
    folder: Path,
) -> Table:
    """Each value's figures by name, from the record in the folder or measured and recorded now.

    Args:
        study: what is asked for.
        trainer: its `RobustEval` callbacks say which attacks, and what they attack.
        model: a `RobustModule` with its weights.
        datamodule: the images.
        settings: what figures depend on beside weights and attacks.
        folder: where the record is.

    Raises:
        ValueError: the study does not fit the attacks or the defense.
    """
    with bare(trainer) as (callbacks, others):
        for callback in callbacks:
            callback.setup(trainer, model, "test")  # numbers names that are there twice
        if model.defense.transductive:
            settings = settings | {"round": getattr(datamodule, "eval_batch_size", None)}
        rows = plan(study, callbacks, model.defense, settings)
        points, table = Points(folder / RECORD), Table()
        for number, (value, games) in enumerate(rows, start=1):
            began = time.perf_counter()
            evaluations = _evaluations(games, points)
            if evaluations:
                trainer.callbacks = [*others, *evaluations]  # type: ignore[attr-defined]
                trainer.test(model, datamodule=datamodule, verbose=False)
            results = _results(games, evaluations, points)
            points.add(results, write=trainer.is_global_zero)
            results += worst(games, points, model.defense.transductive)
            points.add(results, write=trainer.is_global_zero)
            row = table.setdefault(value, {})
            for result in results:
                row.setdefault(result.name, result)
            if trainer.is_global_zero:
                took = f"{time.perf_counter() - began:.0f} s" if evaluations else "recorded"
                told = ", ".join(f"{r.name} {r.accuracy:.1%}" for r in row.values())
                print(f"[{number}/{len(rows)}] {study.over} {value.label}: {told} ({took})")
    return table


@contextmanager
def bare(trainer: Trainer) -> Iterator[tuple[list[RobustEval], list[Callback]]]:
    """The trainer without what a run tells of itself; yields its evaluations and the rest."""
    log = logging.getLogger("lightning.pytorch")
    callbacks, level = trainer.callbacks, log.level  # type: ignore[attr-defined]
    told = (EvaluationCallback, ProgressBar, SaveConfigCallback)
    others = [callback for callback in callbacks if not isinstance(callback, told)]
    if sys.stderr.isatty():
        others.append(Unseen())
    log.setLevel(logging.WARNING)
    try:
        yield [c for c in callbacks if isinstance(c, RobustEval)], others
    finally:
        trainer.callbacks = callbacks  # type: ignore[attr-defined]
        log.setLevel(level)


def _evaluations(games: Iterable[Game], points: Points) -> list[Measurement]:
    """Callbacks for the numbers that are not recorded, one for each that the user gave."""
    missing: dict[Any, list[Game]] = {}
    for game in games:
        if game.key not in points and game.attack is not None:
            missing.setdefault(game.target, []).append(game)
    return [
        Measurement(
            {game.name: game.attack for game in group if game.attack is not None},
            target,
            target.source.settings,
        )
        for target, group in missing.items()
    ]


def _results(
    games: Sequence[Game], evaluations: Sequence[Measurement], points: Points
) -> list[Result]:
    """The value's numbers, new and recorded."""
    measured = {}
    for evaluation in evaluations:
        found = evaluation.result
        if found is None:
            raise ValueError(
                "no figures came back from processes that were spawned: use strategy ddp"
            )
        for i, name in enumerate(found.names):
            details = found.measurement(name).details
            scores = found.index, found.scores[:, i]
            measured[name, evaluation.target] = scores, found.seconds.get(name, 0.0), details
    results = []
    for game in games:
        if game.key in points:
            recorded = points[game.key]
            known = scores_of(recorded.details["reuse"])
            results.append(game.result(known, recorded.seconds, recorded.details))
        elif (game.name, game.target) in measured:
            results.append(game.result(*measured[game.name, game.target]))
    return results
