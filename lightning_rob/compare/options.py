"""What a user may ask of `lightning-rob compare`; nothing heavy is imported."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_rob.sweep.options import Arguments

HELP = """usage: lightning-rob compare RECORD [RECORD]

Compare what was measured on the same images, image by image.

  RECORD           a CSV file in the folder images/ of a run
  --with ATTACK    of one record: compare each attack with this one
                   (default: the first)
  --against_worst  of two records: the worst of all attacks only

Of two records: two checkpoints under the same attacks. Of one record: attacks
on the same checkpoint. The test is McNemar's where each answer is right or
wrong, and the paired t test for expected accuracies of randomized ensembles;
with several rows p is also adjusted by Holm, so that all can be read at once.

  lightning-rob compare logs/version_0/images/test-arc.csv \\
      logs/version_1/images/test-arc.csv"""


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Args:
        records: one or two CSV files.
        reference: the attack the others are compared with; None is the first.
        worst: compare nothing but the worst.
    """

    records: tuple[Path, ...]
    reference: str | None = None
    worst: bool = False


def help_text() -> str:
    """What `--help` prints."""
    return HELP


def parse(args: Sequence[str]) -> Request:
    """Read the command line.

    Raises:
        ValueError: it asks for something else.
    """
    parser = Arguments(prog="lightning-rob compare", add_help=False, allow_abbrev=False)
    parser.add_argument("records", nargs="*", type=Path)
    parser.add_argument("--with", dest="reference")
    parser.add_argument("--against_worst", action="store_true")
    told = parser.parse_args(list(args))
    if len(told.records) not in (1, 2):
        raise ValueError(f"compare takes one or two records, got {len(told.records)}")
    if told.reference and len(told.records) == 2:
        raise ValueError("--with is for the attacks of one record, got two records")
    return Request(tuple(told.records), told.reference, told.against_worst)
