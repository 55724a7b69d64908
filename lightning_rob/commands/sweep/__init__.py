"""`lightning-rob sweep`: a checkpoint under attack, value by value of a variable."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from lightning_rob.commands.config import SpreadConfig
from lightning_rob.commands.sweep.values import SWEPT, Value, parse_values

if TYPE_CHECKING:
    from lightning_rob.commands.base import Run


@dataclass(frozen=True)
class SweepConfig(SpreadConfig):
    r"""Attack a checkpoint value by value of a variable: one table, figure and record.

    The variable is the sampling probability of the first member, the number of members,
    the radius eps (step sizes of PGD and ARC are scaled with it), the steps of every
    attack, or the neighbours, the competing classes that ARC searches.

      lightning-rob sweep last.ckpt --over probability \
          --values 0.5:1:0.05 --best adaptive_pgd \
          --trainer.callbacks+=adaptive_pgd --trainer.callbacks+=arc

    The probability "optimal" is found on validation images, under the attack of --best or
    the first one; it sets all members' probabilities.

    The same command again resumes. A recorded result is used only if weights, attack,
    data, seed and versions are the same.

    Args:
        over: probability, members, eps, steps or neighbours
        values: numbers, fractions, ranges start:stop:step, such as 1/255,2/255;
            over probability also optimal
        best: the attack under which to find the best value for the defense; over steps or
            neighbours the value at which that attack is strongest
        out: for sweep.jsonl, .md and .png; else sweeps/CHECKPOINT_FINGERPRINT_VARIABLE
        workers: processes on this machine that share the values
        ray: workers of a Ray cluster that share them: RAY_ADDRESS, or this machine
        part: i/n, the values of this process alone, such as 3/8 in an array of jobs
    """

    usage: ClassVar[str] = "CHECKPOINT --over VARIABLE --values LIST [options of test]"

    over: str | None = None
    values: str | float = ""
    best: str | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.over not in SWEPT:
            raise ValueError(f"--over must be one of {', '.join(SWEPT)}, got {self.over}")
        if self.best and self.over == "eps":
            raise ValueError("--best has no meaning over eps: a larger radius is never better")
        parse_values(self.over, str(self.values))

    @property
    def points(self) -> tuple[Value, ...]:
        """The values, in the order of the table."""
        return parse_values(str(self.over), str(self.values))


def run(config: SweepConfig, run: "Run") -> None:
    """Measure the values that are not recorded, and write table, figure and record."""
    from lightning_rob.commands.sweep import study

    study.run(config, run)
