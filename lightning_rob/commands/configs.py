"""Options of the commands, one dataclass each: parser and `--help` are generated from it.

This module imports nothing heavy, so that `--help` prints at once. `receives` says what a command's
function is called with beside its options: "run" (a `Run` with loaded weights), "trainings" (a
`Run` and a function that builds others) or "data" (an `ImageData`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

Receives = Literal["run", "trainings", "data"]


@dataclass(frozen=True)
class TuneConfig:
    """Search the values of a recipe's keys that make short trainings of it score best.

    The search is Bayesian optimization: Gaussian process, upper confidence bound.

      lightning-rob tune --config configs/rt_digits.yaml --space configs/tune_digits.yaml
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
            raise ValueError("say what to search: --space FILE, such as configs/tune_digits.yaml")
        if self.concurrent is not None and (not self.ray or self.concurrent < 1):
            raise ValueError(f"--concurrent needs --ray and at least 1, got {self.concurrent}")


@dataclass(frozen=True)
class ExportConfig:
    """Write a defense, its rule and its draws included, as a program that needs torch alone.

    The program is loaded back and has to give the same predictions.

      lightning-rob export --ckpt_path last.ckpt --out defense.pt2

    and then, without this package:

      defense = torch.export.load("defense.pt2").module()
      probabilities = defense(images)        # [B, C, H, W] in [0, 1] -> [B, classes]
      probabilities = defense(images, keys)  # a randomized defense: keys [B] int64

    Equal keys draw equal noise: the images' indices give the predictions of `predict`.
    Under attack draw new keys for every query: torch.randint(2**62, (B,)).

    Args:
        out: FILE.pt2, the program
        batch: N images at a time, or dynamic
        images: N test images on which predictions are compared

    Raises:
        ValueError: another kind of file, or a number below 1.
    """

    receives: ClassVar[Receives] = "run"
    usage: ClassVar[str] = "--ckpt_path CHECKPOINT --out FILE.pt2 [options of test]"

    out: Path | None = None
    batch: int | str = "dynamic"
    images: int = 64

    def __post_init__(self) -> None:
        if self.out is None:
            raise ValueError("say where the program goes to: --out FILE.pt2")
        if self.out.suffix != ".pt2":
            raise ValueError(f"--out must name a file.pt2, got {str(self.out)!r}")
        if self.batch != "dynamic" and not str(self.batch).isdigit():
            raise ValueError(f"--batch must be a number or dynamic, got {str(self.batch)!r}")
        for name, number in (("batch", self.batch_size), ("images", self.images)):
            if number is not None and number < 1:
                raise ValueError(f"--{name} must be at least 1, got {number}")

    @property
    def batch_size(self) -> int | None:
        """Images at a time; None for any number."""
        return None if self.batch == "dynamic" else int(self.batch)


@dataclass(frozen=True)
class BpdaConfig:
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
        for name, minimum in (("epochs", 1), ("max_images", 2)):
            number = getattr(self, name)
            if number is not None and number < minimum:
                raise ValueError(f"--{name} must be at least {minimum}, got {number}")


@dataclass(frozen=True)
class AuditConfig:
    """Check a checkpoint for signs that its defense only seems robust.

    Gradients that are zero, infinite or cut off; attacks that grow weaker with more
    steps, or that noise and black-box attacks beat; randomness that no attack averages
    over; non-finite predictions; an attack for this kind of defense that was not run.

      lightning-rob audit --ckpt_path last.ckpt --eps 8/255 --strict

    Attacks plugged in with --trainer.callbacks+=callbacks/… run too, and the audit
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
        for name in ("images", "steps", "queries"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"--seed must be at least 0, got {self.seed}")


def find_transforms(content: Any) -> dict[str, Any] | None:
    """Return the first mapping under a key `transforms`, at any depth."""
    if not isinstance(content, Mapping):
        return None
    if isinstance(content.get("transforms"), Mapping):
        return dict(content["transforms"])
    found = (find_transforms(part) for part in content.values())
    return next((part for part in found if part), None)


CommandConfig = TuneConfig | ExportConfig | BpdaConfig | AuditConfig
CONFIGS: dict[str, type[CommandConfig]] = {
    "tune": TuneConfig,
    "bpda": BpdaConfig,
    "export": ExportConfig,
    "audit": AuditConfig,
}
