"""What a user may ask of `lightning-rob tune`; nothing heavy is imported."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_rob.sweep.options import Arguments

SEED = 2020  # of the authors' search
HELP = """usage: lightning-rob tune --config RECIPE --space SPACE [options]

Search the values of a recipe's keys that make short trainings of it score best:
Bayesian optimisation (Gaussian process, upper confidence bound), trial by trial.

  --space FILE       YAML: variables, objective, trial, prune, budget
  --trials N         at most so many trials (160)
  --at_least N       before so many none is called the last (80)
  --patience N       the last is when more in a row were no improvement (40)
  --random N         random trials before the optimiser proposes (12)
  --diagonal N       trials before these: all variables at i/N, i = 0 … N-1 (0)
  --seed N           of the search and, with the trial's number, of trainings (2020)
  --warm_start FILE  trials.jsonl of another study of the same variables
  --out FOLDER       for trials.jsonl, best.yaml, convergence.png (tuning/RECIPE)
  --then_fit         train best.yaml when the search is done
  --ray              trials through Ray Tune: pip install 'lightning-rob[ray]'
  --concurrent N     so many trials at a time, with --ray (2)

All other options are those of `lightning-rob fit`, see there.

  lightning-rob tune --config configs/rt_digits.yaml --space configs/tune_digits.yaml
  lightning-rob fit --config tuning/rt_digits/best.yaml

Trial 0 has the recipe's own values. The same command again goes on where it was
stopped."""


def help_text() -> str:
    """What `--help` prints."""
    return HELP


@dataclass(frozen=True)
class Budget:
    """How many trials; defaults of Sitawarin et al. 2022.

    Args:
        trials: at most.
        at_least: so many before stopping early.
        patience: stop when more than so many in a row brought no improvement.
        random: at random before the optimiser proposes.
        diagonal: on the diagonal of the space, before those at random.

    Raises:
        ValueError: no whole number, or too small.
    """

    trials: int = 160
    at_least: int = 80
    patience: int = 40
    random: int = 12
    diagonal: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), int(field.name == "trials")
            if type(value) is not int or value < least:
                raise ValueError(f"{field.name} must be whole and at least {least}, got {value!r}")

    def with_(self, changes: Mapping[str, Any]) -> "Budget":
        """The budget with other numbers.

        Raises:
            ValueError: a name it has not, or a number it cannot be.
        """
        names = [field.name for field in fields(self)]
        if unknown := [name for name in changes if name not in names]:
            raise ValueError(f"budget: choose from {', '.join(names)}, got {unknown[0]!r}")
        return replace(self, **changes)


@dataclass(frozen=True)
class Options:
    """The command line.

    Args:
        space: file of the search space.
        out: folder of the study.
        budget: what is told of it; the file says the rest.
        seed: of the search.
        warm_start: record of another study.
        concurrent: trials at a time through Ray Tune; None runs them here, one by one.
        then_fit: whether to train with the best values.
        command: as it was typed.
    """

    space: Path
    out: Path
    budget: dict[str, int]
    seed: int = SEED
    warm_start: Path | None = None
    concurrent: int | None = None
    then_fit: bool = False
    command: str = ""


def parse(args: Sequence[str]) -> tuple[Options, list[str]]:
    """The study that is asked for, and the arguments that are for `fit`.

    Raises:
        ValueError: it cannot be meant.
    """
    parser = Arguments(add_help=False, allow_abbrev=False)
    for name in ("--space", "--out", "--warm_start"):
        parser.add_argument(name, type=Path)
    counts = [field.name for field in fields(Budget)]
    for name in (*counts, "concurrent"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--seed", type=int, default=SEED)
    for name in ("--ray", "--then_fit"):
        parser.add_argument(name, action="store_true")
    own, rest = parser.parse_known_args(list(args))
    if own.space is None:
        raise ValueError("say what to search: --space FILE, such as configs/tune_digits.yaml")
    if own.concurrent is not None and (not own.ray or own.concurrent < 1):
        raise ValueError(f"--concurrent needs --ray and at least 1, got {own.concurrent}")
    budget = {name: getattr(own, name) for name in counts if getattr(own, name) is not None}
    concurrent = (own.concurrent or 2) if own.ray else None
    out = own.out or Path("tuning") / _name(rest)
    told = shlex.join(["lightning-rob", "tune", *args])
    warm = own.warm_start
    return Options(own.space, out, budget, own.seed, warm, concurrent, own.then_fit, told), rest


def _name(args: Sequence[str]) -> str:
    """The recipe's, as it is given by the first --config."""
    given = [a.partition("=")[2] for a in args if re.match(r"(--config|-c)=", a)]
    given += [b for a, b in pairwise(args) if a in ("--config", "-c")]
    return Path(given[0]).stem if given else "study"
