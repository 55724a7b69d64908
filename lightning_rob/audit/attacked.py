"""Checks that every evaluation makes and that look closer here: at images under attacks too."""

from dataclasses import replace

import torch
from torch import Tensor

from lightning_rob.attacks import DoublePrecision, InsideBounds, WithBackward
from lightning_rob.audit.target import AuditBatch, AuditTarget
from lightning_rob.evaluation import checks
from lightning_rob.evaluation.check_batch import nonfinite
from lightning_rob.evaluation.columns import MOST, hidden_pixels, is_nondeterministic, uses_noise
from lightning_rob.evaluation.findings import (
    Columns,
    Finding,
    images_of,
    is_gain,
    many,
    means,
    not_checked,
    percent,
    significant,
)
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
    """Return the images [B] whose two predictions differ."""
    first, second = predictions(batch.target.defense, batch.x, batch.noise("answers"), 2)
    return (first - second).abs().amax(1) > LARGE_CHANGE


def predicted_class(batch: AuditBatch) -> Tensor:
    """Return the class [B] of the largest mean logit."""
    return batch.logits.mean(0).argmax(-1)


def averaged(batch: AuditBatch) -> Tensor:
    """Return the scores [B] under the default attack with steps that average over draws (EoT)."""
    suite = batch.target.suite
    if suite.averaged is None or not (uses_noise(batch) | is_nondeterministic(batch)).any():
        return batch.score(suite.default)
    return batch.run(suite.default, suite.averaged)[1].mean(1)


def largest_logit(batch: AuditBatch) -> Tensor:
    """Return the largest magnitude [B] among the logits."""
    magnitude: Tensor = batch.logits.abs().amax(-1).amax(0)
    return magnitude.nan_to_num(posinf=torch.finfo(magnitude.dtype).max)


def double(batch: AuditBatch) -> Tensor:
    """Return the scores [B] under the default attack in double precision, where it can run."""
    if not batch.target.exact:
        return batch.unknown()
    name = batch.target.suite.default
    try:
        return batch.run(name, DoublePrecision(batch.target.attacks[name]))[1].mean(1)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # code that takes float32 only may raise anything
        return batch.unknown()


def inside_bounds(batch: AuditBatch) -> Tensor:
    """Return the scores [B] under the default attack with gradients from just inside the bounds."""
    name = batch.target.suite.default
    if not (hidden_pixels(batch) > MOST).any():
        return batch.score(name)
    view = InsideBounds(bounds=batch.target.threat.bounds)
    try:
        return batch.run(name, WithBackward(batch.target.attacks[name], view))[1].mean(1)
    except TypeError:  # of a defense that names no networks
        return batch.unknown()


COLUMNS = (
    nonfinite_attacked,
    prediction_varies,
    predicted_class,
    averaged,
    largest_logit,
    double,
    inside_bounds,
)


def randomness(target: AuditTarget, columns: Columns) -> Finding:
    """Find random predictions over which attacks do not average."""
    nondeterministic, varies = columns["is_nondeterministic"], columns["prediction_varies"]
    if not (columns["is_random"].any() or nondeterministic.any()):
        return Finding("fine", "The prediction of an image is always the same.")
    default, eot = columns[target.suite.default], columns["averaged"]
    values = means(prediction_varies=varies, nondeterministic=nondeterministic)
    values |= means(default=default, averaged=eot)
    text = f"A second prediction differs from the first on {percent(varies)} of images."
    # Both scores are noisy: only a significant difference is evidence.
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
    if target.declared_exact:
        text += f" Yet a {type(target.defense).__name__} stands for a defense without randomness."
        return Finding("severe" if gain else "warning", text, advice, values)
    text += " The audit's own attack averages over draws."
    return Finding("note", text, advice if gain else "", values)


def saturation(target: AuditTarget, columns: Columns) -> Finding:
    """Find logits too large for single precision: the loss is flat though the network is not."""
    flat, default = columns["loss_saturated"], columns[target.suite.default]
    in_doubles = columns["double"]
    if flat.isnan().all():
        return not_checked(checks.NO_PATH)
    largest = float(columns["largest_logit"].max())
    values = means(loss_saturated=flat, default=default) | {"largest_logit": largest}
    values |= {} if in_doubles.isnan().all() else means(double=in_doubles)
    # A nondeterministic network scores otherwise in a second run anyway.
    weaker = significant(default - in_doubles) and not columns["is_nondeterministic"].any()
    if not (many(flat) or weaker):
        text = "Double precision makes the attack no stronger, and the loss has a slope."
        if in_doubles.isnan().all():
            text = "The loss has a slope. The attack was not run again in double precision."
        return Finding("fine", text, values=values)
    text = f"The logits are as large as {largest:.3g}."
    if many(flat):
        text += f" For {images_of(flat)} cross-entropy is so flat that its gradient is zero."
    if weaker:
        text += f" PGD leaves {percent(default)}, in double precision {percent(in_doubles)}."
    advice = (
        "Divide the logits by a constant, which changes no prediction, or attack the margin "
        "(objective lightning_rob.objectives.linear)."
    )
    return Finding("severe", text, advice, values)


def bounds(target: AuditTarget, columns: Columns) -> Finding:
    """Find pixels at a bound that have no gradient, and what attacks lack without them."""
    finding = checks.bounds(target, columns)
    if not finding.flagged:
        return finding
    default, inside = columns[target.suite.default], columns["inside_bounds"]
    values = finding.values | means(default=default, inside=inside)
    text = finding.text
    if not inside.isnan().all():
        text += (
            f" PGD leaves {percent(default)}, with gradients from just inside {percent(inside)}."
        )
    gain = is_gain(default - inside, target.exact)
    return replace(finding, severity="severe" if gain else "warning", text=text, values=values)
