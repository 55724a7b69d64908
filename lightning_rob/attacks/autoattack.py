"""AutoAttack, the suite that ranks robust networks, in its authors' code."""

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
from lightning_rob.attacks.foreign import isolated_streams, scores
from lightning_rob.defenses import Defense
from lightning_rob.objectives import check_logits
from lightning_rob.randomness import Generator, seed_from, uniform
from lightning_rob.rules import Rule, mean_logits, mean_probs
from lightning_rob.threat import Threat

CLASSES = {"apgd-ce": 2, "apgd-dlr": 3, "apgd-t": 4, "fab": 2, "fab-t": 2, "square": 2}  # needed
NORMS = {math.inf: "Linf", 2.0: "L2"}


@dataclass(frozen=True)
class AutoAttack(Attack):
    """APGD, FAB and Square Attack, each on the images that are still right (Croce and Hein 2020).

    It attacks a single function: the logits of a single network, the mean logits under the rule
    `mean_logits`, else the log of the mean probabilities. An image that this function gets wrong is
    returned unchanged. AutoAttack therefore cannot judge a defense that predicts by one draw or by
    vote: it stops at images on which such a defense is still right half of the time. Use ARC or
    PGD on the expected loss there. `RobustEval` evaluates its images on the defense in any case.

    The package draws noise for a batch, not for an image: the same batch and generator give the
    same images, another batch gives other random starts. An evaluation attacks the same images
    together; elsewhere `batch_size=1` gives each image its own noise, at the price of speed.
    Warnings of the package (no gradients, Square Attack the strongest …) go to the logger
    "auto-attack".

    Args:
        threat: a ball for linf or l2, images within [0, 1].
        version: "standard" (APGD-CE, APGD-T, FAB-T, Square with 5,000 queries), "plus" (all six),
            "rand" (APGD-CE and APGD-DLR on the mean gradient of 20 predictions), or "custom".
        attacks: the attacks of a "custom" version, in this order and with one restart, else as in
            the standard version: "apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square".
        draws: draws of a random defense for one prediction; None as many as the defense takes.
        batch_size: number of images attacked at a time; None for the whole batch.
        queries: number of queries of the Square Attack, for each image.

    Raises:
        ValueError: another norm or other bounds, an unknown version or attack, attacks for a
            version that has its own; when called, fewer classes than an attack's loss needs.
        ModuleNotFoundError: when called, without the package.
    """

    batch_dependent: ClassVar[bool] = True
    made_for: ClassVar[tuple[str, ...]] = ("ensemble",)
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
        self._check_threat()
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

    def _check_threat(self) -> None:
        if self.threat.p not in NORMS:
            raise ValueError(f"AutoAttack is for linf and l2, not for norm {self.threat.norm}")
        if self.threat.relative:
            raise ValueError(f"AutoAttack is for a radius in pixel units, got {self.threat}")
        if self.threat.bounds != (0, 1):
            raise ValueError(f"AutoAttack needs images in [0, 1], not in {self.threat.bounds}")

    def require_package(self) -> None:
        """Raise ModuleNotFoundError without the package pyautoattack."""
        if find_spec("pyautoattack") is None:
            raise ModuleNotFoundError(
                'AutoAttack needs pyautoattack: pip install "lightning-rob[autoattack]"'
            )

    def is_made_for(self, suite_kind: str, rule: Rule) -> bool:
        """Return whether it attacks what the defense predicts by: the mean of an ensemble."""
        return super().is_made_for(suite_kind, rule) and rule in (mean_logits, mean_probs)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        drawn = uniform(torch.zeros(len(x), device=x.device), generator=generator)
        size = self.batch_size or len(x)
        batches = zip(*(torch.split(whole, size) for whole in (x, y, drawn)), strict=True)
        found = [self._run(defense, x, y, seed_from(drawn)) for x, y, drawn in batches]
        return self.threat.project(torch.cat(found), x)

    def _run(self, defense: Defense, x: Tensor, y: Tensor, seed: int) -> Tensor:
        """Run the package on one batch [B, C, H, W], in the single precision that it needs."""
        generator = torch.Generator(x.device).manual_seed(seed)
        single = x.float().contiguous()

        def model(images: Tensor) -> Tensor:
            return scores(defense, images.to(x.dtype), generator, self.draws)

        with _isolated():
            with torch.no_grad():
                logits = model(single)
            check_logits(logits[None], y)
            suite = self._suite(model, logits.shape[-1], x.device, seed)
            found, _ = suite.run_standard_evaluation(single, y.long(), batch_size=len(x))
        # Images that the package left alone must not lose digits to single precision.
        return torch.where(found == single, x, found.to(x.dtype))

    def _suite(
        self, model: Callable[[Tensor], Tensor], classes: int, device: torch.device, seed: int
    ) -> Any:
        """Return the package's object, with no more target classes than there are."""
        self.require_package()
        import pyautoattack

        suite = pyautoattack.AutoAttack(
            model,
            attacks=self.attacks and list(self.attacks),
            device=device,
            eps=self.threat.eps,
            norm=NORMS[self.threat.p],
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
        if self.version == "custom":  # the package's default is 5, the standard version's is 1
            suite.apgd.n_restarts = suite.fab.n_restarts = 1
        suite.square.n_queries = self.queries
        return suite


@contextmanager
def _isolated() -> Iterator[None]:
    """Undo two side effects: the package seeds torch's global streams, and ends `sys.settrace`."""
    trace = sys.gettrace()
    with isolated_streams():
        try:
            yield
        finally:
            sys.settrace(trace)
