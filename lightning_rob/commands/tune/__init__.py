"""`lightning-rob tune`: search the values of a recipe's keys."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lightning_rob.commands.config import SpreadConfig


@dataclass(frozen=True)
class TuneConfig(SpreadConfig):
    """Search the values of a recipe's keys that make short trainings of it score best.

    The search is Bayesian optimization: Gaussian process, upper confidence bound.

      lightning-rob tune --config rt_digits --space configs/spaces/tune_digits.yaml
      lightning-rob fit --config tuning/rt_digits/best.yaml

    Trial 0 has the recipe's own values. The same command again resumes the search.

    Args:
        space: YAML file with variables, objective, trial, prune, budget
        trials: stop after N trials; else as the space says, or 160
        min_trials: never stop before N trials (80)
        patience: stop after more than N trials without improvement (40)
        random: random trials before the optimizer proposes (12)
        seed: of the search and, with the trial's number, of its training
        out: for trials.jsonl, best.yaml, convergence.png; else tuning/RECIPE
        workers: processes on this machine, each with a trial of its own at a time
        ray: workers of a Ray cluster in their place: RAY_ADDRESS, or this machine
        part: i/n, the i-th of the next n trials alone, in an array of jobs
    """

    positional: ClassVar[str] = ""
    usage: ClassVar[str] = "--config RECIPE --space FILE [options of fit]"
    module: ClassVar[str] = "search"

    space: Path | None = None
    trials: int | None = None
    min_trials: int | None = None
    patience: int | None = None
    random: int | None = None
    seed: int = 2020  # of the authors' search
    out: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.space is None:
            raise ValueError(
                "say what to search: --space FILE, such as configs/spaces/tune_digits.yaml"
            )
