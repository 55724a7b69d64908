"""The suite of attacks by which all checkpoints of a run are evaluated."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback

from lightning_rob.attacks import Attack
from lightning_rob.callbacks import RobustEval
from lightning_rob.callbacks.measurement import Measurement, measure
from lightning_rob.callbacks.robust_eval import full_defense
from lightning_rob.commands.base import Run
from lightning_rob.commands.scores import Scores, scores_by_name
from lightning_rob.evaluation.evaluate import as_defense
from lightning_rob.evaluation.records import Result
from lightning_rob.evaluation.results import WORST, worst_measurement, worst_over
from lightning_rob.evaluation.suites import RECIPES, default_attacks, suite_kind
from lightning_rob.identity import attack_spec, cache_key
from lightning_rob.shipped import find
from lightning_rob.tables import CLEAN
from lightning_rob.threat import Threat


class PeriodicAction:
    """Calls a function, but at most once in a number of seconds.

    Args:
        action: the function.
        every: seconds.
    """

    def __init__(self, action: Callable[[], None], every: float) -> None:
        self.action = action
        self.every = every
        self.last = time.monotonic()

    def __call__(self) -> None:
        """Call the function if it is time."""
        if time.monotonic() - self.last >= self.every:
            self.action()
            self.last = time.monotonic()


class SuiteFiles:
    """The plug-in files of a suite and those that they list, which may be edited.

    Args:
        names: paths or short names, as for `--suite`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.read = self.contents()

    def contents(self) -> dict[Path, bytes]:
        """Return the current content of every file."""
        found: dict[Path, bytes] = {}
        _collect(self.names, Path(), found)
        return found

    def changed(self) -> bool:
        """Return whether they differ from those that were read last, which are read now."""
        before, self.read = self.read, self.contents()
        return before != self.read


def _collect(entry: Any, folder: Path, found: dict[Path, bytes]) -> None:
    """Add the plug-in files that an entry of a list of plug-ins names, and those in them."""
    if isinstance(entry, list):
        for part in entry:
            _collect(part, folder, found)
    elif isinstance(entry, dict) and len(entry) == 1:  # a name with options
        _collect(next(iter(entry)), folder, found)
    elif isinstance(entry, str) and (file := find(entry, "callbacks", folder=folder)):
        if file.resolve() in found:
            return
        with suppress(OSError, yaml.YAMLError):  # in the midst of an edit
            found[file.resolve()] = file.read_bytes()
            _collect(yaml.safe_load(found[file.resolve()]), file.parent, found)


class Suite:
    """Evaluates the current weights of a module, without any output.

    Args:
        run: module, data and trainer of the first checkpoint.
        evaluations: the attacks and their targets; empty for `default_attacks` in the ball of
            the training.
        others: other callbacks of the trainer.

    Raises:
        ValueError: no attack on the full defense, or several devices.
    """

    def __init__(
        self, run: Run, evaluations: Sequence[RobustEval], others: Sequence[Callback]
    ) -> None:
        self.run, self.module = run, run.model
        self.others = list(others)
        trainer = run.trainer
        if trainer.world_size > 1:
            raise ValueError(f"monitor runs on one device, got {trainer.world_size}")
        if not evaluations:
            attacks = default_attacks(run.defense, trained_threat(run.model))
            evaluations = [RobustEval(attacks, panel=0)]
        trainer.callbacks = [*others, *evaluations]  # type: ignore[attr-defined]
        for evaluation in evaluations:
            evaluation.setup(trainer, run.model, "test")  # renames clashing attacks
        self.evaluations = [
            Measurement(e.attacks, e.target, e.settings, **e.inputs) for e in evaluations
        ]
        if not any(evaluation.target is full_defense for evaluation in evaluations):
            raise ValueError(
                "none of the attacks is on the whole defense; name one that is: --suite "
                f"{RECIPES[suite_kind(run.defense)]}"
            )
        described = [
            {"attacks": {name: attack_spec(attack) for name, attack in e.attacks.items()}}
            | {"target": attack_spec(e.target)}
            | e.settings.asdict()
            | ({"inputs": e.inputs} if any(e.inputs.values()) else {})
            for e in evaluations
        ]
        self.key = cache_key(evaluations=described, **_settings(run))

    def replace_module(self, module: Any) -> None:
        """Evaluate another module from now on, by the same attacks on the same images.

        Raises:
            ValueError: these attacks are not for its defense.
        """
        before, after = (as_defense(m).transductive for m in (self.module, module))
        if before != after:
            raise ValueError(
                "by its recipe its defense "
                f"{'adapts to its attacker' if after else 'does not adapt'}, unlike that of the "
                "first checkpoint: the same attacks cannot judge both; watch it in its own folder"
            )
        self.module = module

    @property
    def names(self) -> list[str]:
        """The names of the results."""
        attacks = [name for evaluation in self.evaluations for name in evaluation.attacks]
        return [CLEAN, *attacks, WORST]

    def evaluate(self, after_batch: Callable[[], None]) -> list[tuple[Result, Scores]]:
        """Evaluate the current module.

        Args:
            after_batch: called after every group of images.

        Returns:
            Each result with its scores [N, R].
        """
        for evaluation in self.evaluations:
            evaluation.after_batch = after_batch
        run = self.run
        results = measure(run.trainer, self.module, run.data, self.others, self.evaluations)
        pairs = [*zip(self.evaluations, results, strict=True)]
        full = [result for evaluation, result in pairs if evaluation.target is full_defense]
        found: dict[str, tuple[Result, Scores]] = {}
        # Clean images are those of the full defense, which therefore comes last.
        for evaluation, result in sorted(pairs, key=lambda pair: pair[0].target is full_defense):
            for name, scores in scores_by_name(result).items():
                found[name] = _on(evaluation.target, result.measurement(name)), scores
        worst, measured = worst_over(full), worst_measurement(full)
        found[WORST] = _on(full_defense, measured), (worst.index, worst.scores)
        return [found[name] for name in self.names]


def _on(target: Callable[..., Any], result: Result) -> Result:
    """Return a result that names the attacked part of the defense."""
    name = getattr(target, "__name__", repr(target))
    return replace(result, details=result.details | {"target": name})


def trained_threat(module: Any) -> Threat:
    """Return the threat of a module's training; linf 8/255 where there is none."""
    attack = getattr(module, "attack", None)
    return attack.threat if isinstance(attack, Attack) else Threat("linf", 8 / 255)


def _settings(run: Run) -> dict[str, Any]:
    """Return what results depend on beside weights and attacks."""
    settings = run.settings()
    # Each line has the versions: others are no reason to begin anew, nor is another recipe in the
    # checkpoint that happens to be the first, unless the command line changes recipes.
    del settings["versions"]
    overrides = [list(pair) for pair in run.overrides]
    model = settings["model"] if overrides else None
    return settings | {"model": [type(run.model).__name__, overrides, model]}
