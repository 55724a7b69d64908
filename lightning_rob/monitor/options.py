"""What a user may ask of `lightning-rob monitor`; nothing heavy is imported."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_rob.sweep.options import Arguments
from lightning_rob.thresholds import parse_thresholds

LEVEL = 0.05
HELP = """usage: lightning-rob monitor RUN [options]

Follow the checkpoints of a run, also while it trains: attack each new one, name
the images that became vulnerable, and raise an alarm when it is worse.

  RUN                a run's folder, such as logs/version_0, or its checkpoints
  --suite FILE       the attacks: callbacks/rec_suite.yaml (default: adaptive
                     PGD and ARC in the ball of the training); repeatable
  --alarm NAME=V     when a figure is below: robust/worst=0.40,acc=0.80
  --drop significant when worst is significantly (p < 0.05) below the last or
                     the best checkpoint's; or another level: --drop 0.01
  --stop_at_alarm    end with the first alarm
  --every SECONDS    between two looks into the folder (30)
  --once             evaluate what is there, and end
  --for MINUTES      end after so long
  --until FILE       end when this file is there and no checkpoint is left
  --out FOLDER       for monitor.jsonl and TensorBoard's monitor/ (RUN)

All other options are those of `lightning-rob test`, see there.

  lightning-rob monitor logs/version_0 --suite callbacks/rec_suite.yaml \\
      --alarm robust/worst=0.40 --drop significant

Exit code 1 after an alarm. Started again it goes on where it was stopped."""


@dataclass(frozen=True)
class Watch:
    """What is to be watched, and how.

    Args:
        folder: of a run, or of checkpoints.
        out: for the history and TensorBoard's files.
        every: seconds between two looks.
        once: end when what is there is evaluated.
        seconds: end after so long; None never does.
        until: end when this file is there.
        floors: figure -> the value below which there is an alarm.
        level: p below which a drop is an alarm; None for no such alarm.
        stop_at_alarm: end with the first alarm.
    """

    folder: Path
    out: Path
    every: float = 30.0
    once: bool = False
    seconds: float | None = None
    until: Path | None = None
    floors: Mapping[str, float] = field(default_factory=dict)
    level: float | None = None
    stop_at_alarm: bool = False


def help_text() -> str:
    """What `lightning-rob monitor --help` prints."""
    return HELP


def parse(args: Sequence[str]) -> tuple[Watch, list[str]]:
    """What is to be watched, and the arguments that are for `test`.

    Raises:
        ValueError: it cannot be meant.
    """
    if not args or args[0].startswith("-"):
        raise ValueError("say first which run to watch: lightning-rob monitor logs/version_0")
    own, rest = _options().parse_known_args(list(args[1:]))
    if any(re.match(r"--ckpt_path(=|$)", arg) for arg in rest):
        raise ValueError(f"monitor takes the checkpoints of {args[0]}: leave out --ckpt_path")
    folder = Path(args[0])
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    if folder.resolve().name == "checkpoints":
        folder = folder.parent
    watch = Watch(
        folder=folder,
        out=own.out or folder,
        every=_positive("--every", own.every),
        once=own.once,
        seconds=None if own.minutes is None else 60 * _positive("--for", own.minutes),
        until=own.until,
        floors=parse_thresholds(",".join(own.alarm)) if own.alarm else {},
        level=None if own.drop is None else _level(own.drop),
        stop_at_alarm=own.stop_at_alarm,
    )
    return watch, [*(f"--trainer.callbacks+={file}" for file in own.suite), *rest]


def _options() -> Arguments:
    options = Arguments(add_help=False, allow_abbrev=False)
    for name in ("--suite", "--alarm"):
        options.add_argument(name, action="append", default=[])
    for name in ("--once", "--stop_at_alarm"):
        options.add_argument(name, action="store_true")
    for name in ("--until", "--out"):
        options.add_argument(name, type=Path)
    options.add_argument("--every", type=float, default=30.0)
    options.add_argument("--for", type=float, dest="minutes")
    options.add_argument("--drop")
    return options


def _positive(name: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be above 0, got {value:g}")
    return value


def _level(text: str) -> float:
    """The level of significance, of "significant" or a number."""
    try:
        level = LEVEL if text == "significant" else float(text)
    except ValueError:
        level = -1.0
    if not 0 < level < 1:
        raise ValueError(f"--drop takes significant, or a level in (0, 1), got {text!r}")
    return level
