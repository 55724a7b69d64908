"""Checks of predictions under attack: finite, and the same at every call."""

import torch
from torch import Tensor

from lightning_rob.audit.target import AuditBatch, AuditTarget
from lightning_rob.evaluation.checks import is_nondeterministic, is_random, nonfinite
from lightning_rob.evaluation.findings import Columns, Finding, many, means, percent, significant
from lightning_rob.evaluation.protocol import predictions

LARGE_CHANGE = 1e-3  # of a probability: more than rounding


def nonfinite_attacked(batch: AuditBatch) -> Tensor:
    """Return the images [B] with non-finite logits after noise or after the default attack."""
    found = torch.zeros_like(batch.nonfinite)
    for name in ("noise", batch.target.suite.default):
        batch.score(name)
        found |= nonfinite(batch.logits_of(batch.perturbed[name]))
    return found


def prediction_varies(batch: AuditBatch) -> Tensor:
    """Return the images [B] of which two predictions differ."""
    first, second = predictions(batch.target.defense, batch.x, batch.noise("answers"), 2)
    found: Tensor = (first - second).abs().amax(1) > LARGE_CHANGE
    return found


def averaged(batch: AuditBatch) -> Tensor:
    """Return the scores [B] under the default attack with steps that average over draws (EoT)."""
    suite = batch.target.suite
    if suite.averaged is None or not (is_random(batch) | is_nondeterministic(batch)).any():
        return batch.score(suite.default)
    return batch.run(suite.default, suite.averaged)[1].mean(1)


MEASUREMENTS = (nonfinite_attacked, prediction_varies, averaged)


def randomness(target: AuditTarget, columns: Columns) -> Finding:
    """Find random predictions over which attacks do not average."""
    nondeterministic, varies = columns["is_nondeterministic"], columns["prediction_varies"]
    if not (columns["is_random"].any() or nondeterministic.any()):
        return Finding("fine", "The prediction of an image is always the same.")
    default, eot = columns[target.suite.default], columns["averaged"]
    values = means(prediction_varies=varies, nondeterministic=nondeterministic)
    values |= means(default=default, averaged=eot)
    text = f"A second prediction differs from the first on {percent(varies)} of images."
    gain = significant(default - eot)
    if gain:
        text += (
            f" PGD with one draw a step leaves {percent(default)}, averaged over ten draws (EoT) "
            f"{percent(eot)}."
        )
    advice = (
        "Attack with draws (PGD(draws=10)), evaluate with inferences=10 and report the interval."
    )
    if many(nondeterministic):
        text += " The randomness is not the generator's: no accuracy of it can be reproduced."
        advice += " Draw from the generator that `logits` is given."
        return Finding("severe", text, advice, values)
    if target.exact:
        text += f" Yet a {type(target.defense).__name__} stands for a defense without randomness."
        return Finding("severe" if gain else "warning", text, advice, values)
    text += " The audit's own attack averages over draws."
    return Finding("note", text, advice if gain else "", values)
