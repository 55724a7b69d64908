"""Options of the commands, one dataclass each: parser and `--help` are generated from it.

This module imports nothing heavy, so that `--help` prints at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning_rob.commands.destinations import check_destinations
from lightning_rob.commands.locations import check_remote, is_remote, is_single
from lightning_rob.commands.sweep_values import SWEPT, Value, parse_values
from lightning_rob.commands.thresholds import parse_thresholds
from lightning_rob.comparisons import SIGNIFICANT
from lightning_rob.runtime.errors import visible

LOCAL = "127.0.0.1"  # address of the monitor's page and metrics
ONNX = ("onnx", "onnxscript", "onnxruntime")  # the packages of the extra


@dataclass(frozen=True)
class CommandConfig:
    """Options of a command.

    Attributes:
        usage: arguments in the first line of its page.
        positional: option that arguments without a name belong to; "" for none.
        reads_records: whether it reads records of runs, all of its arguments, and needs no torch.
    """

    usage: ClassVar[str]
    positional: ClassVar[str] = "ckpt_path"
    reads_records: ClassVar[bool] = False

    @classmethod
    def from_recipe(cls, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that a recipe of `fit` implies."""
        return {}


def at_least(minimum: int, **numbers: int | None) -> None:
    """Refuse an option that is given and below a minimum."""
    for name, number in numbers.items():
        if number is not None and number < minimum:
            raise ValueError(f"--{name} must be at least {minimum}, got {number}")


@dataclass(frozen=True)
class TuneConfig(CommandConfig):
    """Search the values of a recipe's keys that make short trainings of it score best.

    The search is Bayesian optimization: Gaussian process, upper confidence bound.

      lightning-rob tune --config rt_digits --space configs/spaces/tune_digits.yaml
      lightning-rob fit --config tuning/rt_digits/best.yaml

    Trial 0 has the recipe's own values. The same command again resumes the search.

    Args:
        space: YAML file with variables, objective, trial, prune, budget
        trials: stop after N trials; else as the space says, or 160
        min_trials: never stop before N trials (80)
        patience: stop after N trials without improvement (40)
        random: random trials before the optimizer proposes (12)
        seed: of the search and, with the trial's number, of its training
        warm_start: trials.jsonl of an earlier study of all or some variables; may be repeated
        out: for trials.jsonl, best.yaml, convergence.png; else tuning/RECIPE
        then_fit: train best.yaml after the search
        ray: run trials through Ray Tune: pip install 'lightning-rob[ray]'
        concurrent: N trials at a time, with --ray (2)

    Raises:
        ValueError: no search space, or `concurrent` without `ray`.
    """

    positional: ClassVar[str] = ""
    usage: ClassVar[str] = "--config RECIPE --space FILE [options of fit]"

    space: Path | None = None
    trials: int | None = None
    min_trials: int | None = None
    patience: int | None = None
    random: int | None = None
    seed: int = 2020  # of the authors' search
    warm_start: list[Path] | None = None
    out: Path | None = None
    then_fit: bool = False
    ray: bool = False
    concurrent: int | None = None

    def __post_init__(self) -> None:
        if self.space is None:
            raise ValueError(
                "say what to search: --space FILE, such as configs/spaces/tune_digits.yaml"
            )
        if self.concurrent is not None and (not self.ray or self.concurrent < 1):
            raise ValueError(f"--concurrent needs --ray and at least 1, got {self.concurrent}")


@dataclass(frozen=True)
class ExportConfig(CommandConfig):
    """Write a defense, its rule and its draws included, as a program of torch.export or ONNX.

    The program is loaded back and has to give the same predictions.

      lightning-rob export last.ckpt --out defense.pt2
      lightning-rob export last.ckpt --out defense.onnx

    and then, without this package:

      defense = torch.export.load("defense.pt2").module()
      probabilities = defense(images)        # [B, C, H, W] in [0, 1] -> [B, classes]
      probabilities = defense(images, keys)  # a randomized defense: keys [B] int64

    Equal keys draw equal noise: the images' indices give the predictions of `predict`.
    Under attack draw new keys for every query: torch.randint(2**62, (B,)).
    ONNX is for defenses that do not predict at random; it needs lightning-rob[onnx].

    For lightning_rob.load and the Hugging Face hub, as model.safetensors, config.json and
    a model card with the accuracies recorded for these weights:

      lightning-rob export last.ckpt --format safetensors --out FOLDER

    Args:
        out: FILE.pt2 or FILE.onnx, the program; or the folder
        images: N test images on which predictions are compared; of a program
        format: pt2, onnx or safetensors; default: that of the file's name

    Raises:
        ValueError: another kind of file, or a number below 1.
        ModuleNotFoundError: a package of the extra `onnx` is missing.
    """

    usage: ClassVar[str] = "CHECKPOINT --out FILE [options of test]"

    out: Path | None = None
    images: int = 64
    format: Literal["pt2", "onnx", "safetensors"] | None = None

    def __post_init__(self) -> None:
        if self.format == "safetensors":
            if self.out is None or self.out.suffix in (".pt2", ".onnx", ".safetensors"):
                raise ValueError(f"--out must name a folder for safetensors, got {self.out}")
            return
        if self.out is None:
            raise ValueError("say where the program goes to: --out FILE.pt2")
        formats = [self.format] if self.format else ["pt2", "onnx"]
        if self.out.suffix.removeprefix(".") not in formats:
            wanted = " or ".join(f"file.{name}" for name in formats)
            raise ValueError(f"--out must name a {wanted}, got {str(self.out)!r}")
        if self.out.suffix == ".onnx" and not all(map(find_spec, ONNX)):
            raise ModuleNotFoundError("ONNX files need pip install 'lightning-rob[onnx]'")
        at_least(1, images=self.images)


def find_transforms(content: Any) -> dict[str, Any] | None:
    """Return the first mapping under a key `transforms`, at any depth."""
    if not isinstance(content, Mapping):
        return None
    if isinstance(content.get("transforms"), Mapping):
        return dict(content["transforms"])
    found = (find_transforms(part) for part in content.values())
    return next((part for part in found if part), None)


@dataclass(frozen=True)
class BpdaConfig(CommandConfig):
    """Train a network on each transform (BPDA), whose gradient can replace the transform's.

    It is used by RandomTransforms(…, gradients="bpda", approximations=FOLDER).

      lightning-rob bpda --data Digits5k --out bpda_nets --max_images 2000

    With --config, data and transforms are those of a recipe. The same command again
    resumes: a finished network is not trained again. Its file is named after the
    transform, its arguments and the image shape.

    Args:
        out: folder for the networks
        transforms: names such as Affine,Swirl; all; nondifferentiable; or with arguments, as
            YAML, '{Affine: {alpha: 0.2}}'; else the recipe's, or all
        epochs: passes over the images
        max_images: the first N training images; else all
        device: cpu, cuda; else cuda where there is one
        seed: of the training

    Raises:
        ValueError: no folder, or a number that is too small.
    """

    positional: ClassVar[str] = ""
    usage: ClassVar[str] = "--data CLASS --out FOLDER [--data.NAME=VALUE] [options]"

    out: Path | None = None
    transforms: Mapping[str, Any] | str = "all"
    epochs: int = 10
    max_images: int | None = None
    device: str | None = None
    seed: int = 0

    @classmethod
    def from_recipe(cls, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that a recipe of `fit` implies: its transforms, at any depth."""
        found = find_transforms(recipe)
        return {"transforms": found} if found else {}

    def __post_init__(self) -> None:
        if self.out is None:
            raise ValueError("say where the networks go to: --out FOLDER")
        at_least(1, epochs=self.epochs)
        at_least(2, max_images=self.max_images)


@dataclass(frozen=True)
class AuditConfig(CommandConfig):
    """Check a checkpoint for signs that its defense only seems robust.

    Gradients that are zero, infinite or cut off; attacks that grow weaker with more
    steps, or that noise and black-box attacks beat; randomness that no attack averages
    over; non-finite predictions; an attack for this kind of defense that was not run.

      lightning-rob audit last.ckpt --strict

    Attacks plugged in with --trainer.callbacks+=NAME run too, and the audit
    checks that the one made for this kind of defense is among them. It writes
    audit.json into the run's folder.

    Args:
        eps: radius in pixel units, images span [0, 1]; else that of the training
        norm: linf or l2; else that of the training
        images: N test images, a random choice
        steps: of the default PGD; other attacks take a multiple
        queries: of the black-box Square Attack, per image
        seed: of all noise, and of the choice of images
        strict: exit with code 1 if something severe was found

    Raises:
        ValueError: another norm, a radius that holds no or every image, or a count below 1.
    """

    usage: ClassVar[str] = "CHECKPOINT [options of test]"

    eps: float | None = None
    norm: str | None = None
    images: int = 100
    steps: int = 20
    queries: int = 1000
    seed: int = 0
    strict: bool = False

    def __post_init__(self) -> None:
        if self.norm not in ("linf", "l2", None):
            raise ValueError(f"--norm must be linf or l2, got {self.norm}")
        if self.eps is not None and not self.eps > 0:
            raise ValueError(f"--eps must be above 0, got {self.eps:g}")
        self.check_radius(self.norm)
        at_least(1, images=self.images, steps=self.steps, queries=self.queries)
        at_least(0, seed=self.seed)

    def check_radius(self, norm: str | None) -> None:
        """Refuse a radius that holds every image: in linf a gray one is in every other's ball."""
        if norm == "linf" and self.eps is not None and self.eps >= 0.5:
            raise ValueError(
                f"--eps {self.eps:g} holds every image, for images span [0, 1]: "
                f"did you mean {self.eps:g}/255?"
            )


@dataclass(frozen=True)
class SweepConfig(CommandConfig):
    r"""Attack a checkpoint value by value of a variable: one table, figure and record.

    The variable is the sampling probability of the first member, the number of members,
    the radius eps (step sizes of PGD and ARC are scaled with it), the steps of every
    attack, or the neighbours, the competing classes that ARC searches.

      lightning-rob sweep last.ckpt --over probability \
          --values 0.5:1:0.05 --best adaptive_pgd \
          --trainer.callbacks+=adaptive_pgd --trainer.callbacks+=arc

    The same command again resumes. A recorded result is used only if weights, attack,
    data, seed and versions are the same.

    Args:
        over: probability, members, eps, steps or neighbours
        values: numbers, fractions, ranges start:stop:step, such as 1/255,2/255
        best: the attack under which to find the best value for the defense; over steps or
            neighbours the value at which that attack is strongest
        out: for sweep.jsonl, .md and .png; else sweeps/CHECKPOINT_FINGERPRINT_VARIABLE

    Raises:
        ValueError: no such variable, or values that it cannot have.
    """

    usage: ClassVar[str] = "CHECKPOINT --over VARIABLE --values LIST [options of test]"

    over: str | None = None
    values: str | float = ""
    best: str | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.over not in SWEPT:
            raise ValueError(f"--over must be one of {', '.join(SWEPT)}, got {self.over}")
        if self.best and self.over == "eps":
            raise ValueError("--best has no meaning over eps: a larger radius is never better")
        parse_values(self.over, str(self.values))

    @property
    def points(self) -> tuple[Value, ...]:
        """The values, in the order of the table."""
        return parse_values(str(self.over), str(self.values))


class MissingRun(ValueError):
    """A folder or checkpoint that is not there, and may come."""


@dataclass(frozen=True)
class MonitorConfig(CommandConfig):
    """Follow the checkpoints of a run, or a deployed one.

    Each new one is attacked; the images that became vulnerable are named, and an alarm is
    raised when it is worse. The exit code is 1 after an alarm. Started again it resumes.

      lightning-rob monitor logs/version_0 --alarm robust/worst=0.40 --drop significant

    Args:
        run: folder, file, s3://… or mlflow:models/NAME@ALIAS; or first argument
        suite: attacks such as rec_suite, one each time; else PGD, ARC as trained
        alarm: alarm below robust/worst=0.40,acc=0.80, or above blind=0.02
        drop: alarm if worst fell since last or best, p < N; significant: 0.05
        notify: POST alarms and recoveries to this URL; slack://… by apprise
        serve: show a page on localhost at this port, such as 9108
        serve_host: address of that port
        template: Jinja template of the page, else the shipped one
        metrics_port: serve metrics for Prometheus, and /healthz
        metrics_host: address of that port
        metrics_file: the same as FILE.prom, for node exporter
        reevaluate: evaluate the newest checkpoint again after N hours
        stop_at_alarm: end with the first alarm, of any model
        every: seconds between two looks into the folder
        once: evaluate the checkpoints that are there, and end
        minutes: end after N minutes
        until: end when this file exists and no checkpoint is left
        models: YAML file of several models, each with its run and other options
        label: name in notifications and metrics; else the whole path or the URL
        out: for the history; else RUN, for a file NAME_monitor; a URL needs it

    Raises:
        ValueError: no such folder or file, a URL without `out`, a value without meaning, or a
            missing package.
    """

    positional: ClassVar[str] = "run"
    usage: ClassVar[str] = "RUN [options of test]"

    run: str | Path | None = None
    suite: list[str] | None = None
    alarm: list[str] | None = None
    drop: str | float | None = None
    notify: list[str] | None = field(default=None, repr=False)  # some URLs are secrets
    serve: int | None = None
    serve_host: str = LOCAL
    template: Path | None = None
    metrics_port: int | None = None
    metrics_host: str = LOCAL
    metrics_file: Path | None = None
    reevaluate: float | None = None
    stop_at_alarm: bool = False
    every: float = 30.0
    once: bool = False
    minutes: float | None = None
    until: Path | None = None
    models: Path | None = None
    label: str | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        self._check_run()
        for name in ("every", "minutes", "reevaluate"):
            time = getattr(self, name)
            if time is not None and not 0 < time < float("inf"):
                raise ValueError(f"--{name} must be above 0, got {time:g}")
        _ = self.level, self.minima  # raise errors before anything is built
        check_destinations(self.notify or ())
        self._check_metrics()
        self._check_page()

    def _check_page(self) -> None:
        """Refuse options of a page that cannot be served."""
        if self.serve is None:
            for name, given in (
                ("serve_host", self.serve_host != LOCAL),
                ("template", self.template),
            ):
                if given:
                    raise ValueError(f"--{name} is for --serve, which is not given")
            return
        if not 0 <= self.serve < 65536:
            raise ValueError(f"--serve must be in 0 … 65535, got {self.serve}")
        shared = self.serve > 0 and self.serve == self.metrics_port  # 0 takes any
        if shared and self.serve_host != self.metrics_host:
            raise ValueError(
                f"--serve shares port {self.serve} with --metrics_port, but --serve_host is "
                f"{self.serve_host} and --metrics_host is {self.metrics_host}: give both the same "
                "address, or --serve another port"
            )

    def _check_run(self) -> None:
        """Refuse a run that cannot be watched.

        Raises:
            MissingRun: there is no such folder or file.
            ValueError: no run, several, or a URL that cannot be read.
        """
        if self.models:
            if self.run or self.label or self.out:
                raise ValueError("--models names each run, label and out: leave out those options")
        elif self.run is None:
            raise ValueError("say first which run to watch: lightning-rob monitor logs/version_0")
        elif self.url:
            check_remote(self.url)
            if self.out is None:
                raise ValueError(f"{self.url} needs --out FOLDER: the history is a local file")
        elif not Path(self.run).exists():
            raise MissingRun(f"there is no folder or checkpoint {self.run}")

    def _check_metrics(self) -> None:
        """Refuse options of metrics that cannot be served or written."""
        if self.metrics_port is None and self.metrics_file is None:
            if self.metrics_host != LOCAL:
                raise ValueError("--metrics_host is for --metrics_port, which is not given")
            return
        if self.metrics_port is not None and not 0 <= self.metrics_port < 65536:
            raise ValueError(f"--metrics_port must be in 0 … 65535, got {self.metrics_port}")
        if self.metrics_file and self.metrics_file.suffix != ".prom":
            raise ValueError(f"--metrics_file must name a FILE.prom, got {self.metrics_file}")
        if find_spec("prometheus_client") is None:
            raise ValueError("metrics need a package: pip install 'lightning-rob[prometheus]'")

    @property
    def is_over(self) -> bool:
        """Whether no further checkpoints are awaited."""
        return self.once or bool(self.until and self.until.exists())

    @property
    def url(self) -> str | None:
        """RUN if it is remote, else None."""
        return str(self.run) if is_remote(self.run) else None

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
        return is_single(self.url) if self.url else self.file is not None

    @property
    def name(self) -> str:
        """The run's name in notifications and metrics."""
        return visible(self.label or self.url or str((self.file or self.folder).absolute()))

    @property
    def home(self) -> Path:
        """The folder of the history."""
        beside = self.file and self.folder / f"{self.file.stem}_monitor"
        return self.out or beside or self.folder

    @property
    def minima(self) -> dict[str, float]:
        """Minimum accuracy by name."""
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
        fail_if_worse: exit code 1 if a row fell by this share or more, with p < 0.05
        markdown: write the table to FILE.md

    Raises:
        ValueError: options that exclude each other, or another number of records.
    """

    positional: ClassVar[str] = "records"
    reads_records: ClassVar[bool] = True
    usage: ClassVar[str] = "RECORD [RECORD] [options]"

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
        if limit is not None and not 0 < limit < 1:
            raise ValueError(f"--fail_if_worse is a share in (0, 1), such as 0.02, got {limit:g}")
        if limit is not None and len(self.records) == 1:
            raise ValueError("--fail_if_worse is for two records, OLD and NEW, got one")

    @property
    def named_pairs(self) -> list[tuple[str, ...]]:
        """Names of the first record with names of the second."""
        pairs = self.pairs.split(",") if self.pairs else []
        return [tuple(name.strip() for name in pair.split("=")) for pair in pairs]


@dataclass(frozen=True)
class ReportConfig(CommandConfig):
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

    positional: ClassVar[str] = "runs"
    reads_records: ClassVar[bool] = True
    usage: ClassVar[str] = "RUN [RUN ...] [options]"

    runs: tuple[Path, ...] = ()
    out: Path | None = None

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("report takes at least one folder: lightning-rob report RUN")


@dataclass(frozen=True)
class RecipesConfig(CommandConfig):
    """List the recipes, plug-ins and trained networks that are found by short name.

      lightning-rob recipes                        all, with what each is for
      lightning-rob recipes demo                   print a file; of a network, its card
      lightning-rob recipes demo --copy            write it as demo.yaml here, to be edited
      lightning-rob recipes digits_robust --copy   write the folder of this network's run

    Args:
        names: short names; none lists all
        copy: write the files into the current folder

    Raises:
        ValueError: a copy of nothing.
    """

    positional: ClassVar[str] = "names"
    reads_records: ClassVar[bool] = True
    usage: ClassVar[str] = "[NAME ...] [options]"

    names: tuple[str, ...] = ()
    copy: bool = False

    def __post_init__(self) -> None:
        if self.copy and not self.names:
            raise ValueError("say which recipe to copy: lightning-rob recipes demo --copy")


CONFIGS: dict[str, type[CommandConfig]] = {
    "sweep": SweepConfig,
    "tune": TuneConfig,
    "bpda": BpdaConfig,
    "monitor": MonitorConfig,
    "compare": CompareConfig,
    "export": ExportConfig,
    "audit": AuditConfig,
    "report": ReportConfig,
    "recipes": RecipesConfig,
}
