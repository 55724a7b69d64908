"""The suite of attacks by which all checkpoints of a run are evaluated."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_rob.callbacks import RobustEval
from lightning_rob.callbacks.measurement import Measurement, measure
from lightning_rob.callbacks.robust_eval import full_defense
from lightning_rob.commands.base import Run, trained_threat, without_reporting
from lightning_rob.commands.monitor.scores import Scores, scores_by_name
from lightning_rob.evaluation.records import Result
from lightning_rob.evaluation.results import WORST, worst_measurement, worst_over
from lightning_rob.evaluation.suites import default_attacks, plug_in_for
from lightning_rob.runtime.identity import attack_spec, cache_key
from lightning_rob.tables import CLEAN
from lightning_rob.threat import Threat


class Suite:
    """Evaluates the current weights of a module by the attacks of its trainer, without output."""

    def __init__(self, run: Run) -> None:
        self.run, self.module = run, run.model
        trainer = run.trainer
        if trainer.world_size > 1:
            raise ValueError(f"monitor runs on one device, got {trainer.world_size}")
        with without_reporting(trainer) as (evaluations, self.others):
            if not evaluations:
                threat = trained_threat(run.model) or Threat("linf", 8 / 255)
                evaluations = [RobustEval(default_attacks(run.defense, threat), panel=0)]
            trainer.callbacks = [*self.others, *evaluations]  # type: ignore[attr-defined]
            for evaluation in evaluations:
                evaluation.setup(trainer, run.model, "test")  # renames clashing attacks
            evaluations = [one for one in evaluations if one.attacks]  # others are repetitions
        trainer.loggers = []
        self.evaluations = [
            Measurement(e.attacks, e.target, e.settings, e.inputs) for e in evaluations
        ]
        if not any(evaluation.target is full_defense for evaluation in evaluations):
            raise ValueError(
                "none of the attacks is on the whole defense; name one that is: --suite "
                f"{plug_in_for(run.defense)}"
            )
        described = [
            {"attacks": {name: attack_spec(attack) for name, attack in e.attacks.items()}}
            | {"target": attack_spec(e.target)}
            | e.settings.asdict()
            | ({"inputs": vars(e.inputs)} if any(vars(e.inputs).values()) else {})
            for e in evaluations
        ]
        settings = run.settings()
        # Each line has the versions: others are no reason to begin anew, nor is another recipe in
        # the checkpoint that happens to be the first, unless the command line changes recipes.
        del settings["versions"]
        overrides = [list(pair) for pair in run.overrides]
        model = [type(run.model).__name__, overrides, settings["model"] if overrides else None]
        self.key = cache_key(evaluations=described, **settings | {"model": model})

    @property
    def names(self) -> list[str]:
        attacks = [name for evaluation in self.evaluations for name in evaluation.attacks]
        return [CLEAN, *attacks, WORST]

    def evaluate(self, after_batch: Callable[[], None]) -> list[tuple[Result, Scores]]:
        for evaluation in self.evaluations:
            evaluation.after_batch = after_batch
        run = self.run
        results = measure(run.trainer, self.module, run.data, self.others, self.evaluations)
        pairs = [*zip(self.evaluations, results, strict=True)]
        full = [result for evaluation, result in pairs if evaluation.target is full_defense]
        worst = worst_over(full)
        row = _on(full_defense, worst_measurement(full))
        found = {WORST: (row, (worst.index, worst.scores))}
        # The full defense comes last: its clean images are the ones that stay.
        for evaluation, result in sorted(pairs, key=lambda pair: pair[0].target is full_defense):
            for name, scores in scores_by_name(result).items():
                found[name] = _on(evaluation.target, result.measurement(name)), scores
        return [found[name] for name in self.names]


def _on(target: Callable[..., Any], result: Result) -> Result:
    name = getattr(target, "__name__", repr(target))
    return replace(result, details=result.details | {"target": name})
