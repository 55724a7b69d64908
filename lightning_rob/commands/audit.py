"""`lightning-rob audit`: test a checkpoint with an audit plugged in."""

from typing import Any

from lightning_rob.callbacks.audit import RobustAudit
from lightning_rob.commands.base import Run, trained_threat
from lightning_rob.commands.configs import AuditConfig
from lightning_rob.threat import Threat

DEFAULTS = {"linf": 8 / 255, "l2": 128 / 255}  # radius by norm


def run(config: AuditConfig, run: Run) -> bool:
    """Run the audit beside the callbacks of the run."""
    if run.checkpoint is None:
        raise ValueError("say whose weights: lightning-rob audit CHECKPOINT")
    threat, reason = audited_threat(config, run.model)
    if run.trainer.is_global_zero:
        print(f"Radius: {threat}, {reason}")
    audit = RobustAudit(
        threat,
        config.steps,
        config.queries,
        max_images=config.images,
        seed=config.seed,
        **vars(run.inputs),
    )
    run.trainer.callbacks.append(audit)  # type: ignore[attr-defined]
    run.trainer.test(
        run.model, run.data, ckpt_path=run.checkpoint, verbose=False, weights_only=True
    )
    return config.strict and audit.found is not None and audit.found.severe


def audited_threat(config: AuditConfig, model: Any) -> tuple[Threat, str]:
    """Return the threat of an audit, by default the training's, and the reason for it."""
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
