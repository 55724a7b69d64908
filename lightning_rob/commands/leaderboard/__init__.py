"""`lightning-rob leaderboard`: defenses under one protocol, checked, and ranked with intervals."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lightning_rob.commands.config import SpreadConfig, at_least


@dataclass(frozen=True)
class LeaderboardConfig(SpreadConfig):
    """Rank defenses that were attacked under one protocol, random and adapting ones too.

    A leaderboard is a folder: protocol.yaml says data, radii, images and attacks, and each
    submission is a folder in it with submission.yaml (name, paper, seed, training) and a
    model that `load` reads: last.ckpt, or the files that `export --format safetensors`
    writes. Several trainings of one defense have one name and different seeds.

      lightning-rob leaderboard boards/digits --evaluate     scores what has no scores yet
      lightning-rob leaderboard boards/digits --check 50     attacks 50 images of each again
      lightning-rob leaderboard mine --evaluate --beside leaderboard_photographs.json
                        ranks the defenses of `mine` among those of a published leaderboard

    Each submission is checked: the protocol of its scores, the fingerprint of its weights,
    severe findings. One that fails gets no rank, with the reason, and the exit code is 1.
    Scores are trusted without --check. Classes of yours need --allow-import PACKAGE.
    Writes leaderboard.md, .html and .json into the folder.

    Args:
        folder: the leaderboard
        evaluate: attack the submissions without scores, and write their scores.json
        check: attack this many images of each submission again, and compare
        beside: the leaderboard.json of a leaderboard under the same protocol, whose scores are
            ranked too, without their models; a folder without protocol.yaml takes its protocol
        workers: processes on this machine that share the submissions
        ray: workers of a Ray cluster that share them: RAY_ADDRESS, or this machine
        part: i/n, the submissions of this process alone, such as 3/8 in an array of jobs
    """

    positional: ClassVar[str] = "folder"
    usage: ClassVar[str] = "FOLDER [options]"
    module: ClassVar[str] = "board"

    folder: Path | None = None
    evaluate: bool = False
    check: int = 0
    beside: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folder is None:
            raise ValueError("leaderboard takes one folder: lightning-rob leaderboard FOLDER")
        at_least(0, check=self.check)
