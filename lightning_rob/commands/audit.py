"""`lightning-rob audit`: test a checkpoint with an audit plugged in."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_rob.commands.config import CommandConfig, at_least

if TYPE_CHECKING:
    from lightning_rob.commands.base import Run
    from lightning_rob.threat import Threat

DEFAULTS = {"linf": 8 / 255, "l2": 128 / 255, "l1": 12.0}  # radius by norm, those of CIFAR-10


@dataclass(frozen=True)
class RadiusConfig(CommandConfig):
    """Options of commands that attack within one radius."""

    eps: float | None = None
    norm: str | None = None

    def __post_init__(self) -> None:
        if self.norm not in (*DEFAULTS, None):
            raise ValueError(f"--norm must be linf, l2 or l1, got {self.norm}")
        if self.eps is not None and not self.eps > 0:
            raise ValueError(f"--eps must be above 0, got {self.eps:g}")
        self.check_radius(self.norm)

    def check_radius(self, norm: str | None) -> None:
        """Refuse a radius that holds every image: in linf a gray one is in every other's ball."""
        if norm == "linf" and self.eps is not None and self.eps >= 0.5:
            raise ValueError(
                f"--eps {self.eps:g} holds every image, for images span [0, 1]: "
                f"did you mean {self.eps:g}/255?"
            )


@dataclass(frozen=True)
class AuditConfig(RadiusConfig):
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
        norm: linf, l2 or l1; else that of the training
        images: N test images, a random choice
        steps: of the default PGD; other attacks take a multiple
        queries: of the black-box Square Attack, per image
        seed: of all noise, and of the choice of images
        power: test whether each attack finds adversarial images that exist by construction
        strict: exit with code 1 if something severe was found
    """

    images: int = 100
    steps: int = 20
    queries: int = 1000
    seed: int = 0
    power: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, images=self.images, steps=self.steps, queries=self.queries)
        at_least(0, seed=self.seed)


def run(config: AuditConfig, built: "Run") -> bool:
    """Run the audit beside the callbacks; return whether something severe is to be an error."""
    from lightning_rob.callbacks.audit import RobustAudit

    threat, reason = audited_threat(config, built.model)
    if built.trainer.is_global_zero:
        print(f"Radius: {threat}, {reason}")
    audit = RobustAudit(
        threat,
        config.steps,
        config.queries,
        max_images=config.images,
        seed=config.seed,
        power=config.power,
        **vars(built.inputs),
    )
    built.test_with(audit)
    return config.strict and audit.found is not None and audit.found.severe


def audited_threat(config: RadiusConfig, model: Any) -> tuple["Threat", str]:
    """Return the threat of an attack, by default the training's, and the reason for it."""
    from lightning_rob.commands.base import trained_threat
    from lightning_rob.threat import Threat

    trained = trained_threat(model)
    usable = trained and trained.norm in DEFAULTS and not trained.relative
    norm = config.norm or (str(trained.norm) if trained and usable else "linf")
    config.check_radius(norm)
    if config.eps is not None:
        return Threat(norm, config.eps), "as --eps says"
    if trained and usable and trained.norm == norm:
        return Threat(norm, trained.eps), "that of the training; --eps takes another"
    why = f"the training was at {trained}" if trained else "the training was without attacks"
    return Threat(norm, DEFAULTS[norm]), f"the default: {why}; --eps takes another"
