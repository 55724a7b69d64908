"""AutoAttack, the suite by which robust networks are ranked, in its authors' code."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_rob.attacks.base import Attack
from lightning_rob.defenses import Defense
from lightning_rob.objectives import check_logits
from lightning_rob.randomness import Generator, seed_from, uniform
from lightning_rob.rules import expectation, mean_logits
from lightning_rob.threat import Threat

# Which attacks there are, and how many classes their losses need.
CLASSES = {"apgd-ce": 2, "apgd-dlr": 3, "apgd-t": 4, "fab": 2, "fab-t": 2, "square": 2}
NAMES = {math.inf: "Linf", 2.0: "L2"}


@dataclass(frozen=True)
class AutoAttack(Attack):
    """APGD, FAB and Square Attack, each on the images that are still right (Croce and Hein 2020).

    It attacks what is one function with one answer: the logits of a single network, the mean logits
    under the rule `mean_logits`, else the log of the mean probabilities. Of an image on which that
    answer is wrong it returns the image; so it cannot judge a defense that answers by one draw or
    by vote: where such a defense is right by half, AutoAttack is content. Use ARC or PGD on the
    expected loss there. What its images do to the defense, `RobustEval` counts all the same.

    The package draws its noise for a batch, not for an image: the same batch and generator give
    the same images, another batch gives other random starts. An evaluation attacks the same images
    together; elsewhere `batch_size=1` gives each image noise of its own, at the price of speed.
    Warnings of the package (no gradients, Square Attack the strongest …) go to the logger
    "auto-attack".

    Args:
        threat: a ball for linf or l2, images within [0, 1].
        version: "standard" (APGD-CE, APGD-T, FAB-T, Square with 5,000 queries), "plus" (all six),
            "rand" (APGD-CE and APGD-DLR on the mean gradient of 20 answers), or "custom".
        attacks: which ones a "custom" version runs, in this order and as the standard one would,
            with one restart: "apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square".
        draws: how often a random defense is drawn for one answer; None as often as for its own.
        batch_size: how many images are attacked at a time; None takes them as they come.
        queries: of the Square Attack, for each image.

    Raises:
        ValueError: another norm or other bounds, an unknown version or attack, attacks for a
            version that brings its own; when called, fewer classes than an attack's loss needs.
        ModuleNotFoundError: when called, without the package.
    """

    batch_dependent: ClassVar[bool] = True
    knowledge: ClassVar[str] = "the weights and the predictions; Square uses the predictions alone"
    threat: Threat
    version: Literal["standard", "plus", "rand", "custom"] = "standard"
    attacks: tuple[str, ...] | None = None
    draws: int | None = None
    batch_size: int | None = None
    queries: int = 5000

    def __post_init__(self) -> None:
        attacks = None if self.attacks is None else tuple(self.attacks)
        object.__setattr__(self, "attacks", attacks)
        if self.threat.p not in NAMES:
            raise ValueError(f"AutoAttack is for linf and l2, not for norm {self.threat.norm}")
        if self.threat.relative:
            raise ValueError(f"AutoAttack is for a radius in pixel units, got {self.threat}")
        if self.threat.bounds != (0, 1):
            raise ValueError(f"AutoAttack needs images in [0, 1], not in {self.threat.bounds}")
        if self.version not in ("standard", "plus", "rand", "custom"):
            raise ValueError(
                f"version must be 'standard', 'plus', 'rand' or 'custom', got {self.version!r}"
            )
        if (self.version == "custom") != bool(attacks):
            raise ValueError(
                f"attacks are for version 'custom', and it needs some, got {attacks} for "
                f"{self.version!r}"
            )
        if unknown := set(attacks or ()) - set(CLASSES):
            raise ValueError(f"attacks must be of {list(CLASSES)}, got {sorted(unknown)}")
        counts = {"draws": self.draws, "batch_size": self.batch_size, "queries": self.queries}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")

    @staticmethod
    def require_package() -> None:
        """Raise ModuleNotFoundError without the package."""
        if find_spec("pyautoattack") is None:
            raise ModuleNotFoundError(
                'AutoAttack needs pyautoattack: pip install "lightning-rob[autoattack]"'
            )

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        drawn = uniform(torch.zeros(len(x), device=x.device), generator=generator)
        size = self.batch_size or len(x)
        parts = zip(*(torch.split(whole, size) for whole in (x, y, drawn)), strict=True)
        found = [self._run(defense, x, y, seed_from(drawn)) for x, y, drawn in parts]
        return self.threat.project(torch.cat(found), x)

    def _run(self, defense: Defense, x: Tensor, y: Tensor, seed: int) -> Tensor:
        """The package on one batch [B, C, H, W], in single precision as it computes."""
        chance, single = torch.Generator(x.device).manual_seed(seed), x.float().contiguous()

        def model(images: Tensor) -> Tensor:
            return self._answer(defense, images.to(x.dtype), chance)

        with _isolated():
            with torch.no_grad():
                logits = model(single)
            check_logits(logits[None], y)
            suite = self._suite(model, logits.shape[-1], x.device, seed)
            found, _ = suite.run_standard_evaluation(single, y.long(), batch_size=len(x))
        return torch.where(found == single, x, found.to(x.dtype))

    def _answer(self, defense: Defense, x: Tensor, generator: Generator) -> Tensor:
        """One score per class, of which the largest is the answer: [B, C, H, W] -> [B, K]."""
        logits, weights = defense.sample_logits(x, generator, self.draws)
        logits, weights = logits.float(), weights.to(logits)
        if len(logits) == 1:
            return logits[0]
        if defense.rule is mean_logits:
            return expectation(weights, logits)
        return (logits.log_softmax(-1) + weights.log()[:, None, None]).logsumexp(0)

    def _suite(
        self, model: Callable[[Tensor], Tensor], classes: int, device: torch.device, seed: int
    ) -> Any:
        """The package's object, as it is but for target classes that there are not."""
        self.require_package()
        import pyautoattack

        suite = pyautoattack.AutoAttack(
            model,
            attacks=self.attacks and list(self.attacks),
            device=device,
            eps=self.threat.eps,
            norm=NAMES[self.threat.p],
            seed=seed,
            version=self.version,
        )
        for name in suite.attacks_to_run:
            if classes < CLASSES[name]:
                raise ValueError(
                    f"{name} needs {CLASSES[name]} classes or more, the defense has {classes}: "
                    "name other attacks, with version='custom'"
                )
        for part in (suite.apgd_targeted, suite.fab):
            part.n_target_classes = min(part.n_target_classes, classes - 1)
        if self.version == "custom":  # left alone, it would be five
            suite.apgd.n_restarts = suite.fab.n_restarts = 1
        suite.square.n_queries = self.queries
        return suite


@contextmanager
def _isolated() -> Iterator[None]:
    """The package seeds torch's global streams, and ends the tracing of debuggers and coverage."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if on_gpu else []
    trace = sys.gettrace()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            sys.settrace(trace)
