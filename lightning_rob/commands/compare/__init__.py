"""`lightning-rob compare`: two attacks or checkpoints on the same images."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lightning_rob.commands.config import CommandConfig


@dataclass(frozen=True)
class CompareConfig(CommandConfig):
    r"""Compare results on the same images, image by image.

    A record is a CSV file in the folder images/ of a run. Of two records: two checkpoints
    under the same attacks, or an ensemble and its first member. Of one record: each attack
    with the first. The test is McNemar's where each prediction is right or wrong, and
    Gaffke's for expected accuracies of randomized ensembles; with several rows p is
    adjusted by Holm, so that all can be read at once. The interval is of the same test.

      lightning-rob compare logs/version_0/images/test-arc.csv \
          logs/version_1/images/test-arc.csv
      lightning-rob compare old.csv new.csv --fail_if_worse 0.02

    Args:
        records: one or two CSV files
        pairs: of two records: attacks of the first with those of the second, A=B,C=D; worst=worst
            compares the worst of all attacks only
        fail_if_worse: exit code 1 if a row fell by this share or more, with p < 0.05;
            0 is any such fall
        markdown: write the table to FILE.md
    """

    positional: ClassVar[str] = "records"
    reads_records: ClassVar[bool] = True
    usage: ClassVar[str] = "RECORD [RECORD] [options]"
    module: ClassVar[str] = "records"

    records: tuple[Path, ...] = ()
    pairs: str | None = None
    fail_if_worse: float | None = None
    markdown: Path | None = None

    def __post_init__(self) -> None:
        if len(self.records) not in (1, 2):
            raise ValueError(f"compare takes one or two records, got {len(self.records)}")
        if self.pairs and len(self.records) == 1:
            raise ValueError("--pairs is for two records, got one")
        if any(len(pair) != 2 or not all(pair) for pair in self.named_pairs):
            raise ValueError(
                f"--pairs is NAME=NAME, several separated by commas, got {self.pairs!r}"
            )
        limit = self.fail_if_worse
        if limit is not None and not 0 <= limit < 1:
            raise ValueError(f"--fail_if_worse is a share in [0, 1), such as 0.02, got {limit:g}")
        if limit is not None and len(self.records) == 1:
            raise ValueError("--fail_if_worse is for two records, OLD and NEW, got one")

    @property
    def named_pairs(self) -> list[tuple[str, ...]]:
        """Names of the first record with names of the second."""
        pairs = self.pairs.split(",") if self.pairs else []
        return [tuple(name.strip() for name in pair.split("=")) for pair in pairs]
