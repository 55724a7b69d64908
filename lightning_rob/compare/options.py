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
  --pairs A=B,C=D  of two records: attacks of the first with attacks of the second
                   that have other names

Of two records: two checkpoints under the same attacks, or an ensemble and its
first member. Of one record: attacks on the same checkpoint. The test is
McNemar's where each answer is right or wrong, and the paired t test for
expected accuracies of randomized ensembles;
with several rows p is adjusted by Holm, so that all can be read at once.

  lightning-rob compare logs/version_0/images/test-arc.csv \\
      logs/version_1/images/test-arc.csv
  lightning-rob compare test-arc.csv test-first_member-member_1_arc.csv \\
      --pairs arc=member_1_arc"""


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Args:
        records: one or two CSV files.
        reference: the attack the others are compared with; None is the first.
        worst: compare nothing but the worst.
        pairs: names of the first record with those of the second; none compares equal names.
    """

    records: tuple[Path, ...]
    reference: str | None = None
    worst: bool = False
    pairs: tuple[tuple[str, str], ...] = ()


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
    parser.add_argument("--pairs")
    told = parser.parse_args(list(args))
    if len(told.records) not in (1, 2):
        raise ValueError(f"compare takes one or two records, got {len(told.records)}")
    if told.reference and len(told.records) == 2:
        raise ValueError("--with is for the attacks of one record, got two records")
    if told.pairs and (len(told.records) == 1 or told.against_worst):
        raise ValueError("--pairs is for two records, without --against_worst")
    pairs = _pairs(told.pairs) if told.pairs else ()
    return Request(tuple(told.records), told.reference, told.against_worst, pairs)


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """The names of "arc=member_1_arc,apgd=member_1"."""
    found = [tuple(name.strip() for name in pair.split("=")) for pair in text.split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in found):
        raise ValueError(f"--pairs is NAME=NAME, several separated by commas, got {text!r}")
    return tuple((one, other) for one, other in found)
