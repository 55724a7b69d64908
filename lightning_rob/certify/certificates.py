"""Certified radii of images, and their comparison with attacks on the same images."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rob.evaluation.records import Result, measured
from lightning_rob.evaluation.result_file import write_table
from lightning_rob.evaluation.results import EvaluationResult
from lightning_rob.tables import table_text

DIGITS = 10**6  # radii in files are rounded down to multiples of 1 / DIGITS


@dataclass(frozen=True)
class Certificates:
    """Certified l2 radii of N images by rising index; see `certify`.

    The prediction abstains, by class -1, where no class has more than half of the votes with
    certainty.
    """

    index: Tensor
    label: Tensor
    prediction: Tensor
    draws: Tensor  # [N] that were taken, those that choose the class among them
    probability: Tensor  # [N] lower bound of the probability of the class's votes
    radius: Tensor  # [N] certified radius in pixel units, 0 where the prediction abstains
    details: Mapping[str, Any] = field(default_factory=dict)  # sigma and the other settings

    def per_image(self, radius: float) -> Tensor:
        """Return which images [N] are predicted right everywhere within a radius, as 0 or 1."""
        right = (self.prediction == self.label) & (self.radius >= radius)
        return right.double()

    def certified(self, radius: float) -> float:
        """Return the certified accuracy in [0, 1] within an l2 radius in pixel units."""
        return self.measurement(radius).accuracy

    def measurement(self, radius: float) -> Result:
        """Return the certified accuracy within a radius with its 95 % interval over images."""
        if not radius >= 0:
            raise ValueError(f"a radius is a length of at least 0, got {radius}")
        ball = {"ball": f"l2 {radius:.4g}", "interval_covers": "images"}
        scores = self.per_image(radius)
        return measured(f"certified_{radius:g}", scores, 0.0, {**self.details, **ball})

    def table(self, radii: Sequence[float], title: str = "Certified accuracy") -> str:
        """Return the table of certified accuracies within some radii, for a terminal."""
        return table_text(title, [self.measurement(radius) for radius in radii])

    def record(self, radii: Sequence[float]) -> dict[str, Any]:
        """Return the certified accuracies within some radii as a record."""
        rows = [self.measurement(radius) for radius in radii]
        found = {"accuracy": [r.accuracy for r in rows], "intervals": [r.interval for r in rows]}
        own = {**self.details, "radii": list(radii)}
        return {"kind": "certified", "name": "certified", **own, **found, "n": len(self.index)}

    def columns(self) -> dict[str, list[Any]]:
        """Return the columns of a CSV file by name; radii and bounds are rounded down."""
        floor = {
            name: [math.floor(value * DIGITS) / DIGITS for value in values.tolist()]
            for name, values in (("radius", self.radius), ("probability", self.probability))
        }
        own = {"prediction": self.prediction.tolist(), **floor, "draws": self.draws.tolist()}
        return {f"certified_{name}": values for name, values in own.items()}

    def save(self, path: Path | str) -> None:
        """Write the certificate of each image as CSV and, beside it, the settings as JSON."""
        images = {"index": self.index.tolist(), "label": self.label.tolist()}
        write_table(Path(path), images | self.columns(), {"kind": "certificates", **self.details})

    def violations(self, attacked: EvaluationResult) -> list[tuple[str, int]]:
        """Return (attack, image) where an attack succeeds within the radius that is certified.

        Attacks are on the same smoothed defense, in l2; they succeed where every inference is
        wrong, which 10 inferences are by bad luck on one of 1,000 images at most. Any success is
        a bug of the attack or of the certificate, or the model's prediction on a copy depends on
        more than this copy, but for the small probability with which a certificate fails.
        """
        if not torch.equal(self.index, attacked.index):
            raise ValueError("certificates and attacks are of other images: evaluate the same ones")
        found = []
        for name, attack in attacked.attacks.items():
            if attack.threat.p != 2 or attack.threat.relative:
                continue
            broken = attacked.per_image(name) == 0
            broken &= self.per_image(attack.threat.eps) == 1
            found += [(name, image) for image in self.index[broken].tolist()]
        return found
