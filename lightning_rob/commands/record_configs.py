"""Options of the commands that read records, one dataclass each: `--help` is generated from it.

This file imports neither torch nor Lightning, so that `--help` prints at once.
"""

from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from inspect import cleandoc
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

import jsonargparse


@dataclass(frozen=True)
class CompareConfig:
    r"""Compare results on the same images, image by image.

    A record is a CSV file in the folder images/ of a run. Of two records: two checkpoints
    under the same attacks, or an ensemble and its first member. Of one record: attacks on
    the same checkpoint. The test is McNemar's where each prediction is right or wrong, and
    the paired t test for expected accuracies of randomized ensembles; with several rows p
    is adjusted by Holm, so that all can be read at once.

      lightning-rob compare logs/version_0/images/test-arc.csv \
          logs/version_1/images/test-arc.csv
      lightning-rob compare test-arc.csv test-first_member-member_1_arc.csv \
          --pairs arc=member_1_arc

    Args:
        records: one or two CSV files
        reference: of one record: compare each attack with this one; else the first
        against_worst: of two records: compare the worst of all attacks only
        pairs: of two records: attacks of the first with those of the second, A=B,C=D

    Raises:
        ValueError: options that exclude each other, or another number of records.
    """

    usage: ClassVar[str] = "RECORD [RECORD] [options]"

    records: tuple[Path, ...]
    reference: str | None = None
    against_worst: bool = False
    pairs: str | None = None

    def __post_init__(self) -> None:
        if len(self.records) not in (1, 2):
            raise ValueError(f"compare takes one or two records, got {len(self.records)}")
        if self.reference and len(self.records) == 2:
            raise ValueError("--reference is for the attacks of one record, got two records")
        if self.pairs and (len(self.records) == 1 or self.against_worst):
            raise ValueError("--pairs is for two records, without --against_worst")
        if any(len(pair) != 2 or not all(pair) for pair in self.named_pairs):
            raise ValueError(
                f"--pairs is NAME=NAME, several separated by commas, got {self.pairs!r}"
            )

    @property
    def named_pairs(self) -> list[tuple[str, ...]]:
        """Names of the first record with names of the second."""
        pairs = self.pairs.split(",") if self.pairs else []
        return [tuple(name.strip() for name in pair.split("=")) for pair in pairs]


@dataclass(frozen=True)
class ReportConfig:
    """Turn the records of runs into one HTML page, complete in itself, and into Markdown.

    A page shows the last evaluation of each run, its robust accuracy epoch by epoch, all
    arguments of each attack, sweeps, matrices and pictures where a run has them, and the
    recipe. Several runs are compared in one table.

      lightning-rob report logs/version_0     logs/version_0/report.html and .md
      lightning-rob report logs               all runs below logs, compared
      lightning-rob report logs/version_0 logs/version_1 --out compared.html

    Args:
        runs: folders of runs, or folders above runs
        out: the page, .html; else report.html in RUN, or here if there are several

    Raises:
        ValueError: no run.
    """

    usage: ClassVar[str] = "RUN [RUN ...] [options]"

    runs: tuple[Path, ...]
    out: Path | None = None

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("report takes at least one folder: lightning-rob report RUN")


Config = TypeVar("Config", CompareConfig, ReportConfig)
CONFIGS: dict[str, type[Any]] = {"compare": CompareConfig, "report": ReportConfig}


class Formatter(RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=19, width=88)


def build_parser(config: type[Any]) -> jsonargparse.ArgumentParser:
    """Build the parser of a command from its dataclass; the first field is positional."""
    name = config.__name__.removesuffix("Config").lower()
    description, _, rest = cleandoc(config.__doc__ or "").partition("\n\nArgs:\n")
    lines = rest.partition("\n\n")[0].splitlines()
    helps = dict(line.strip().split(": ", 1) for line in lines)
    parser = jsonargparse.ArgumentParser(
        usage=f"lightning-rob {name} {config.usage}",
        description=description,
        formatter_class=Formatter,
        exit_on_error=False,
    )
    first, *others = fields(config)
    parser.add_argument(first.name, nargs="*", type=Path, help=helps[first.name])
    kinds = get_type_hints(config)
    for field in others:
        flag: dict[str, Any] = {"type": kinds[field.name], "metavar": field.name.upper()}
        flag = {"action": "store_true"} if kinds[field.name] is bool else flag
        parser.add_argument(f"--{field.name}", help=helps[field.name], **flag)
    return parser


def parse(config: type[Config], args: Sequence[str]) -> Config:
    """Read a command line.

    Raises:
        ValueError: it has no meaning.
    """
    try:
        parsed = vars(build_parser(config).parse_args(list(args)))
    except jsonargparse.ArgumentError as error:
        raise ValueError(f"{error}; try --help") from error
    first = fields(config)[0].name
    return config(**parsed | {first: tuple(parsed[first])})
