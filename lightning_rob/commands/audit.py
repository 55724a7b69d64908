"""`lightning-rob audit`: test a checkpoint with an audit plugged in."""

from lightning_rob.callbacks.audit import RobustAudit
from lightning_rob.commands.base import Run
from lightning_rob.commands.configs import AuditConfig
from lightning_rob.threat import Threat


def run(config: AuditConfig, run: Run) -> bool:
    """Run the audit beside the callbacks of the run.

    Returns:
        Whether something severe was found and that is to be an error.
    """
    if run.checkpoint is None:
        raise ValueError("say whose weights: --ckpt_path CHECKPOINT")
    threat = Threat(config.norm, config.eps)
    audit = RobustAudit(
        threat,
        config.steps,
        config.queries,
        max_images=config.images,
        seed=config.seed,
        **run.inputs,
    )
    run.trainer.callbacks.append(audit)  # type: ignore[attr-defined]
    run.trainer.test(run.model, run.data, ckpt_path=run.checkpoint, weights_only=True)
    return config.strict and audit.found is not None and audit.found.severe
