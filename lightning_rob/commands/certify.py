"""`lightning-rob certify`: certified and attacked accuracy of a smoothed checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rob.commands.config import CommandConfig, at_least

if TYPE_CHECKING:
    from lightning_rob.commands.base import Run
    from lightning_rob.evaluation.records import Result

MULTIPLES = (0.5, 1.0, 1.5, 2.0)  # of sigma: radii where none are given
INFERENCES = 10  # votes on each attacked image
DRAWS = 16  # copies of an image in a step of PGD


@dataclass(frozen=True)
class CertifyConfig(CommandConfig):
    """Certify a checkpoint, smoothed by Gaussian noise, and attack it within the same radii.

    Each image has a certified l2 radius, within which no attack changes the smoothed
    prediction, and an image found by PGD on the vote where it succeeds: the truth lies
    between both. An attack that succeeds within a certified radius is a bug; then the exit
    code is 1.

      lightning-rob certify last.ckpt --sigma 0.25 --radii 0.25,0.5 --images 100

    Networks need training with such noise, as by the recipe smoothing_digits.

    Args:
        sigma: standard deviation of the noise in pixel units; else that of the defense
        radii: l2 radii in pixel units, separated by commas; else 0.5, 1, 1.5 and 2 sigma
        images: N test images, a random choice
        draws: most noisy copies that bound the probability of a class
        failure: probability that the radius of an image is too large
        steps: of PGD on the vote
        seed: of all noise, and of the choice of images
        out: folder for certified.csv, .json, .jsonl and .png; else
            certificates/CHECKPOINT_FINGERPRINT_SIGMA
    """

    sigma: float | None = None
    radii: str | float = ""
    images: int = 100
    draws: int = 10_000
    failure: float = 0.001
    steps: int = 20
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.sigma is not None and not self.sigma > 0:
            raise ValueError(f"--sigma must be above 0, got {self.sigma:g}")
        if not 0 < self.failure < 1:
            raise ValueError(f"--failure is a probability in (0, 1), got {self.failure:g}")
        at_least(1, images=self.images, draws=self.draws, steps=self.steps)
        at_least(0, seed=self.seed)
        self.lengths(1.0)

    def lengths(self, sigma: float) -> tuple[float, ...]:
        """Return the radii above 0, rising."""
        parts = [part for part in str(self.radii).split(",") if part.strip()]
        try:
            given = {float(Fraction(part.strip())) for part in parts}
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"--radii takes numbers and fractions, got {self.radii!r}") from None
        if len({f"{radius:g}" for radius in given}) < len(given):
            raise ValueError(f"--radii must differ in six digits, got {self.radii!r}")
        if given and not min(given) > 0:
            raise ValueError(f"--radii must be above 0, got {min(given):g}: 0 is always among them")
        return tuple(sorted(given or {sigma * share for share in MULTIPLES}))


def run(config: CertifyConfig, built: "Run") -> bool:
    """Certify and attack the smoothed defense; return whether an attack contradicts a radius."""
    from lightning_rob.attacks import PGD
    from lightning_rob.attacks.auto import step_across
    from lightning_rob.callbacks import CertifiedEval
    from lightning_rob.callbacks.measurement import Measurement, measure
    from lightning_rob.certify.smoothing import largest_radius, smoothed_by
    from lightning_rob.commands.base import without_reporting
    from lightning_rob.evaluation import EvaluationSettings
    from lightning_rob.evaluation.records import append_records
    from lightning_rob.plots import save
    from lightning_rob.runtime.identity import fingerprint
    from lightning_rob.tables import print_table
    from lightning_rob.threat import Threat

    sigma = smoothed_by(built.defense, config.sigma).sigma
    radii = (0.0, *config.lengths(sigma))
    settings = EvaluationSettings(config.seed, inferences=INFERENCES, max_images=config.images)
    chosen = {"max_images": config.images, "seed": config.seed, **vars(built.inputs)}
    certify = CertifiedEval(config.sigma, radii, config.draws, config.failure, **chosen)
    # An attack that succeeds within a certified radius would refute the certificate.
    attacks = {
        f"pgd_{radius:g}": PGD(
            Threat("l2", radius),
            config.steps,
            step_across(radius, config.steps, 4),
            draws=DRAWS,
            random_start=False,
        )
        for radius in radii[1:]
    }
    if config.out:
        config.out.mkdir(parents=True, exist_ok=True)  # before the work
    with without_reporting(built.trainer) as (_, others):
        target = partial(smoothed_by, sigma=config.sigma)
        attack = Measurement(attacks, target, settings, built.inputs)
        (attacked,) = measure(built.trainer, built.model, built.data, [*others, certify], [attack])
    certified = certify.result
    assert certified is not None
    wrong = certified.violations(attacked)
    if built.trainer.is_global_zero:
        print_table("Attacked: PGD on the vote", attacked.measurements())
        weights, name = fingerprint(built.defense), Path(built.checkpoint or "").stem
        folder = config.out or Path("certificates") / f"{name}_{weights[:8]}_{sigma:g}"
        folder.mkdir(parents=True, exist_ok=True)
        card = {"weights": weights, "command": built.command}
        attacked.save(folder / "certified.csv", card, certified.columns())
        found = certified.record(radii) | card | {"violations": wrong}
        append_records(folder / "certified.jsonl", [found])
        bounds = [certified.measurement(radius) for radius in radii]
        save(sandwich(bounds, attacked.measurements(), radii), folder / "certified.png")
        if (most := largest_radius(sigma, config.draws, config.failure)) < max(radii):
            print(f"{config.draws:,} draws certify no radius above {most:.3g}")
        print(f"{len(wrong) or 'No'} attacks succeeded within a certified radius")
        for name, image in wrong[:10]:
            print(f"  {name} on image {image}")
        print(f"Wrote {folder}/certified.csv, .json, .jsonl and .png")
    return bool(wrong)


def sandwich(
    certified: Sequence["Result"], attacked: Sequence["Result"], radii: Sequence[float]
) -> Any:
    """Draw certified and attacked accuracy by radius: the truth lies between both lines."""
    from lightning_rob.plots import Curve, curves

    lines = [
        Curve(label, radii, [one.accuracy for one in rows], [one.interval for one in rows])
        for label, rows in (("attacked: PGD on the vote", attacked), ("certified", certified))
    ]
    return curves(lines, "l2 radius (images span 0 to 1)", f"accuracy in %, {attacked[0].n} images")
