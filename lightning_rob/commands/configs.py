"""Options of the commands, one dataclass each: parser and `--help` are generated from it.

This module imports nothing heavy, so that `--help` prints at once. `receives` says what a command's
function is called with beside its options: "run" (a `Run`, with the weights of a checkpoint if one
is given), "trainings" (a `Run` and a function that builds others), "checkpoints" (a function that
builds the `Run` of a checkpoint), "data" (an `ImageData`) or "records" (its options alone; the
first field is positional).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning_rob.commands.sweep_values import SWEPT, Value, parse_values
from lightning_rob.commands.thresholds import parse_thresholds

Receives = Literal["run", "trainings", "checkpoints", "data", "records"]
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class CommandConfig:
    """Options of a command."""

    receives: ClassVar[Receives]
    usage: ClassVar[str]

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
        diagonal: trials before these, all variables at i/N, i = 0 … N-1 (0)
        seed: of the search and, with the trial's number, of its training
        warm_start: trials.jsonl of another study of the same variables
        out: for trials.jsonl, best.yaml, convergence.png; else tuning/RECIPE
        then_fit: train best.yaml after the search
        ray: run trials through Ray Tune: pip install 'lightning-rob[ray]'
        concurrent: N trials at a time, with --ray (2)

    Raises:
        ValueError: no search space, or `concurrent` without `ray`.
    """

    receives: ClassVar[Receives] = "trainings"
    usage: ClassVar[str] = "--config RECIPE --space FILE [options of fit]"

    space: Path | None = None
    trials: int | None = None
    min_trials: int | None = None
    patience: int | None = None
    random: int | None = None
    diagonal: int | None = None
    seed: int = 2020  # of the authors' search
    warm_start: Path | None = None
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
    """Write a defense, its rule and its draws included, as a program that needs torch alone.

    The program is loaded back and has to give the same predictions.

      lightning-rob export --ckpt_path last.ckpt --out defense.pt2

    and then, without this package:

      defense = torch.export.load("defense.pt2").module()
      probabilities = defense(images)        # [B, C, H, W] in [0, 1] -> [B, classes]
      probabilities = defense(images, keys)  # a randomized defense: keys [B] int64

    Equal keys draw equal noise: the images' indices give the predictions of `predict`.
    Under attack draw new keys for every query: torch.randint(2**62, (B,)).

    For lightning_rob.load and the Hugging Face hub, as model.safetensors, config.json and
    a model card with the accuracies recorded for these weights:

      lightning-rob export --ckpt_path last.ckpt --format safetensors --out FOLDER

    Args:
        out: FILE.pt2, the program; or the folder
        batch: N images at a time, or dynamic; of a program
        images: N test images on which predictions are compared; of a program
        format: pt2 or safetensors

    Raises:
        ValueError: another kind of file, or a number below 1.
    """

    receives: ClassVar[Receives] = "run"
    usage: ClassVar[str] = "--ckpt_path CHECKPOINT --out FILE.pt2 [options of test]"

    out: Path | None = None
    batch: int | str = "dynamic"
    images: int = 64
    format: str = "pt2"

    def __post_init__(self) -> None:
        if self.format not in ("pt2", "safetensors"):
            raise ValueError(f"--format must be pt2 or safetensors, got {self.format!r}")
        if self.format == "safetensors":
            if self.out is None or self.out.suffix in (".pt2", ".safetensors"):
                raise ValueError(f"--out must name a folder for safetensors, got {self.out}")
            return
        if self.out is None:
            raise ValueError("say where the program goes to: --out FILE.pt2")
        if self.out.suffix != ".pt2":
            raise ValueError(f"--out must name a file.pt2, got {str(self.out)!r}")
        if self.batch != "dynamic" and not str(self.batch).isdigit():
            raise ValueError(f"--batch must be a number or dynamic, got {str(self.batch)!r}")
        at_least(1, batch=self.batch_size, images=self.images)

    @property
    def batch_size(self) -> int | None:
        """Images at a time; None for any number."""
        return None if self.batch == "dynamic" else int(self.batch)


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
            YAML or a file of it, '{Affine: {alpha: 0.2}}'; else the recipe's, or all
        epochs: passes over the images
        max_images: the first N training images; else all
        device: cpu, cuda; else cuda where there is one
        seed: of the training

    Raises:
        ValueError: no folder, or a number that is too small.
    """

    receives: ClassVar[Receives] = "data"
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

      lightning-rob audit --ckpt_path last.ckpt --eps 8/255 --strict

    Attacks plugged in with --trainer.callbacks+=NAME run too, and the audit
    checks that the one made for this kind of defense is among them. It writes
    audit.json into the run's folder.

    Args:
        eps: radius in pixel units, images span [0, 1]
        norm: linf or l2
        images: N test images, a random choice
        steps: of the default PGD; other attacks take a multiple
        queries: of the black-box Square Attack, per image
        seed: of all noise, and of the choice of images
        strict: exit with code 1 if something severe was found

    Raises:
        ValueError: another norm, a radius that holds no or every image, or a count below 1.
    """

    receives: ClassVar[Receives] = "run"
    usage: ClassVar[str] = "--ckpt_path CHECKPOINT [options of test]"

    eps: float = 8 / 255
    norm: str = "linf"
    images: int = 100
    steps: int = 20
    queries: int = 1000
    seed: int = 0
    strict: bool = False

    def __post_init__(self) -> None:
        if self.norm not in ("linf", "l2"):
            raise ValueError(f"--norm must be linf or l2, got {self.norm}")
        if not self.eps > 0:
            raise ValueError(f"--eps must be above 0, got {self.eps:g}")
        if self.norm == "linf" and self.eps >= 0.5:  # a gray image is in every other's ball
            raise ValueError(
                f"--eps {self.eps:g} holds every image, for images span [0, 1]: "
                f"did you mean {self.eps:g}/255?"
            )
        at_least(1, images=self.images, steps=self.steps, queries=self.queries)
        at_least(0, seed=self.seed)


@dataclass(frozen=True)
class SweepConfig(CommandConfig):
    r"""Attack a checkpoint value by value of a variable: one table, figure and record.

    The variable is the sampling probability of the first member, the number of members,
    the radius eps (step sizes of PGD and ARC are scaled with it), the steps of every
    attack, or the neighbours, the competing classes that ARC searches.

      lightning-rob sweep --ckpt_path last.ckpt --over probability \
          --values 0.5:1:0.05 --best apgd \
          --trainer.callbacks+=callbacks/apgd.yaml --trainer.callbacks+=callbacks/arc.yaml

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

    receives: ClassVar[Receives] = "run"
    usage: ClassVar[str] = "--over VARIABLE --values LIST [options of test]"

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


@dataclass(frozen=True)
class MonitorConfig(CommandConfig):
    r"""Follow the checkpoints of a run, also while it trains.

    Each new one is attacked; the images that became vulnerable are named, and an alarm is
    raised when it is worse. The exit code is 1 after an alarm.

      lightning-rob monitor logs/version_0 --suite callbacks/rec_suite.yaml \
          --alarm robust/worst=0.40 --drop significant

    Started again it resumes where it was stopped.

    Args:
        run: folder of a run, or of its checkpoints; also without --run, as first argument
        suite: attacks such as callbacks/rec_suite.yaml, one each time; else adaptive PGD and ARC
            in the ball of the training
        alarm: alarm below an accuracy, robust/worst=0.40,acc=0.80
        drop: alarm when worst is below the last or the best checkpoint's, with p below
            this level; significant is 0.05
        stop_at_alarm: end with the first alarm
        every: seconds between two looks into the folder
        once: evaluate the checkpoints that are there, and end
        minutes: end after N minutes
        until: end when this file exists and no checkpoint is left
        out: for monitor.jsonl and TensorBoard's folder monitor; else RUN

    Raises:
        ValueError: no such folder, or a value without meaning.
    """

    receives: ClassVar[Receives] = "checkpoints"
    usage: ClassVar[str] = "RUN [options of test]"

    run: Path | None = None
    suite: list[str] | None = None
    alarm: list[str] | None = None
    drop: str | float | None = None
    stop_at_alarm: bool = False
    every: float = 30.0
    once: bool = False
    minutes: float | None = None
    until: Path | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.run is None:
            raise ValueError("say first which run to watch: lightning-rob monitor logs/version_0")
        if not self.run.is_dir():
            raise ValueError(f"there is no folder {self.run}")
        for name, time in (("every", self.every), ("minutes", self.minutes)):
            if time is not None and not 0 < time < float("inf"):
                raise ValueError(f"--{name} must be above 0, got {time:g}")
        _ = self.level, self.minima  # raise errors before anything is built

    @property
    def folder(self) -> Path:
        """The run's folder."""
        run = self.run or Path()
        return run.parent if run.resolve().name == "checkpoints" else run

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

    receives: ClassVar[Receives] = "records"
    usage: ClassVar[str] = "RECORD [RECORD] [options]"

    records: tuple[Path, ...] = ()
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

    receives: ClassVar[Receives] = "records"
    usage: ClassVar[str] = "RUN [RUN ...] [options]"

    runs: tuple[Path, ...] = ()
    out: Path | None = None

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("report takes at least one folder: lightning-rob report RUN")


@dataclass(frozen=True)
class RecipesConfig(CommandConfig):
    """List the recipes, mix-ins, search spaces and plug-ins that are found by short name.

      lightning-rob recipes                 all, with what each is for
      lightning-rob recipes demo            print a file
      lightning-rob recipes demo --copy     write it as demo.yaml here, to be edited

    Args:
        names: short names; none lists all
        copy: write the files into the current folder

    Raises:
        ValueError: a copy of nothing.
    """

    receives: ClassVar[Receives] = "records"
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
