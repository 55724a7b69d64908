"""`lightning-rob monitor`: follow the checkpoints of a run, or a deployed one."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from lightning_rob.commands.config import CommandConfig
from lightning_rob.commands.monitor.urls import check_destinations, check_remote
from lightning_rob.commands.thresholds import parse_thresholds
from lightning_rob.comparisons import SIGNIFICANT
from lightning_rob.runtime.errors import visible

LOCAL = "127.0.0.1"  # address of the monitor's page and metrics


@dataclass(frozen=True)
class MonitorConfig(CommandConfig):
    """Follow the checkpoints of a run, or a deployed one.

    Each new one is attacked; the images that became vulnerable are named, and an alarm is
    raised when it is worse. The exit code is 1 after an alarm. Started again it resumes.

      lightning-rob monitor logs/version_0 --alarm robust/worst=0.40 --drop significant

    Args:
        run: folder, file, s3://… or mlflow:models/NAME@ALIAS; or first argument
        suite: attacks such as rec_suite, one each time; else PGD, ARC, climb
        alarm: limits: an alarm below robust/worst=0.40,acc=0.80, above blind=0.02,findings=0
        drop: alarm if worst fell with an adjusted p below this; significant: 0.05
        notify: POST alarms and recoveries to this URL
        serve: page, /metrics for Prometheus and /healthz at this port of localhost, such as 9108
        serve_host: address of that port
        template: Jinja template of the page, which may extend "page.html"
        every: seconds between two looks into the folder
        once: evaluate the checkpoints that are there, and end
        until: end when this file exists and no checkpoint is left
        models: YAML file of several models, each with its run and other options
        label: name in notifications and metrics; else the whole path or the URL
        out: for the history; else RUN, for a file NAME_monitor; a URL needs it
    """

    positional: ClassVar[str] = "run"
    usage: ClassVar[str] = "RUN [options of test]"
    module: ClassVar[str] = "loop"

    run: str | Path | None = None
    suite: list[str] | None = None
    alarm: list[str] | None = None
    drop: str | float | None = None
    notify: list[str] | None = field(default=None, repr=False)  # some URLs are secrets
    serve: int | None = None
    serve_host: str = LOCAL
    template: Path | None = None
    every: float = 30.0
    once: bool = False
    until: Path | None = None
    models: Path | None = None
    label: str | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.models:
            if self.run or self.label or self.out:
                raise ValueError("--models names each run, label and out: leave out those options")
        elif self.run is None:
            raise ValueError("say first which run to watch: lightning-rob monitor logs/version_0")
        elif self.url:
            check_remote(self.url)
            if self.out is None:
                raise ValueError(f"{self.url} needs --out FOLDER: the history is a local file")
        elif not self.label:
            self.check_run()
        if not 0 < self.every < float("inf"):
            raise ValueError(f"--every must be above 0, got {self.every:g}")
        _ = self.level, self.limits  # raise errors before anything is built
        check_destinations(self.notify or ())
        if self.serve is None and self.serve_host != LOCAL:
            raise ValueError("--serve_host is for --serve, which is not given")

    def check_run(self) -> None:
        """Raise ValueError if there is nothing to watch; one of several models may begin later."""
        if not (self.url or Path(str(self.run)).exists()):
            raise ValueError(f"there is no folder or checkpoint {self.run}")

    @property
    def is_over(self) -> bool:
        return self.once or bool(self.until and self.until.exists())

    @property
    def url(self) -> str | None:
        """RUN if it is remote, else None."""
        run = str(self.run)
        return run if "://" in run or run.startswith("mlflow:") else None

    @property
    def folder(self) -> Path:
        """The local run's folder; that of a single file."""
        run = Path(self.run or "")
        return run.parent if self.file or run.resolve().name == "checkpoints" else run

    @property
    def file(self) -> Path | None:
        """The local checkpoint, if RUN is a single file."""
        run = Path(self.run or "")
        return run if self.run and not self.url and not run.is_dir() else None

    @property
    def is_single(self) -> bool:
        """Whether RUN is a single checkpoint, which is replaced by each new one."""
        url = self.url or ""
        return self.file is not None or url.endswith(".ckpt") or url.startswith("mlflow:")

    @property
    def name(self) -> str:
        return visible(self.label or self.url or str((self.file or self.folder).absolute()))

    @property
    def home(self) -> Path:
        beside = self.file and self.folder / f"{self.file.stem}_monitor"
        return self.out or beside or self.folder

    @property
    def limits(self) -> dict[str, float]:
        return parse_thresholds(",".join(self.alarm)) if self.alarm else {}

    @property
    def level(self) -> float | None:
        """The p below which a drop is an alarm; None for no such alarm."""
        if self.drop is None:
            return None
        try:
            level = SIGNIFICANT if self.drop == "significant" else float(self.drop)
        except ValueError:
            level = -1.0
        if not 0 < level < 1:
            raise ValueError(f"--drop takes significant, or a level in (0, 1), got {self.drop!r}")
        return level
