"""Checks of predictions: finite, from logits, and the same at every call."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_rob.attacks import evaluating
from lightning_rob.audit.findings import (
    Columns,
    Finding,
    images_finding,
    images_of,
    many,
    means,
    not_checked,
    percent,
    significant,
)
from lightning_rob.audit.target import AuditBatch, AuditTarget, nonfinite
from lightning_rob.defenses import Defense
from lightning_rob.evaluation.protocol import predictions

SMALL_CHANGE = 1e-5  # of the pixels' range: far below the 1/255 of a grey level, above rounding
LARGE_CHANGE = 1e-3  # of a probability: more than rounding


def nonfinite_clean(batch: AuditBatch) -> Tensor:
    """Return the images [B] with non-finite logits."""
    return batch.nonfinite


def nonfinite_attacked(batch: AuditBatch) -> Tensor:
    """Return the images [B] with non-finite logits after noise or after the default attack."""
    found = torch.zeros_like(batch.nonfinite)
    for name in ("noise", batch.target.suite.default):
        batch.score(name)
        found |= nonfinite(batch.logits_of(batch.perturbed[name]))
    return found


def is_probability(batch: AuditBatch) -> Tensor:
    """Return the images [B] whose outputs lie in [0, 1] and sum to one."""
    inside = (batch.logits >= -1e-6) & (batch.logits <= 1 + 1e-6)
    sums = (batch.logits.sum(-1) - 1).abs() < 1e-4
    return (inside.all(-1) & sums).all(0)


def is_constant(batch: AuditBatch) -> Tensor:
    """Return the images [B] whose logits stay the same when every pixel changes a little."""
    low, high = batch.target.threat.bounds
    inward = torch.where(batch.x > (low + high) / 2, -1.0, 1.0)
    moved = batch.x + SMALL_CHANGE * (high - low) * inward
    return ~_differ(batch.logits_of(moved), batch.logits)


def is_random(batch: AuditBatch) -> Tensor:
    """Return the images [B] whose logits depend on the noise."""
    return _differ(batch.logits_of(batch.x, "again"), batch.logits) & ~batch.nonfinite


def is_nondeterministic(batch: AuditBatch) -> Tensor:
    """Return the images [B] whose logits differ with the same noise."""
    return _differ(batch.logits_of(batch.x), batch.logits) & ~batch.nonfinite


def _differ(a: Tensor, b: Tensor) -> Tensor:
    """Return the images [B] on which logits [S, B, K] differ in any bit."""
    found: Tensor = (a != b).any(-1).any(0)
    return found


def prediction_varies(batch: AuditBatch) -> Tensor:
    """Return the images [B] of which two predictions differ."""
    first, second = predictions(batch.target.defense, batch.x, batch.noise("answers"), 2)
    found: Tensor = (first - second).abs().amax(1) > LARGE_CHANGE
    return found


def depends_on_batch(batch: AuditBatch) -> Tensor:
    """Return the images [B] that are predicted differently alone and in the batch."""
    if batch.target.transductive:
        return batch.unknown()
    defense, x = batch.target.defense, batch.x
    together = predictions(defense, x, batch.noise())[0]
    places = torch.arange(len(x), device=x.device)[:, None]
    alone = [predictions(defense, x[i], batch.noise()[i])[0] for i in places]
    return (torch.cat(alone) - together).abs().amax(1) > LARGE_CHANGE


def averaged(batch: AuditBatch) -> Tensor:
    """Return the scores [B] under the default attack with steps that average over draws (EoT)."""
    suite = batch.target.suite
    if suite.averaged is None or not (is_random(batch) | is_nondeterministic(batch)).any():
        return batch.score(suite.default)
    return batch.run(suite.default, suite.averaged)[1].mean(1)


MEASUREMENTS = (
    nonfinite_clean,
    nonfinite_attacked,
    is_probability,
    is_constant,
    is_random,
    is_nondeterministic,
    prediction_varies,
    depends_on_batch,
    averaged,
)


def numbers(target: AuditTarget, columns: Columns) -> Finding:
    """Find non-finite predictions: they count as wrong, never as class 0."""
    clean, attacked = columns["nonfinite_clean"], columns["nonfinite_attacked"]
    values = means(clean=clean, attacked=attacked)
    if not (clean.any() or attacked.any()):
        return Finding("fine", "All predictions are finite.", values=values)
    return Finding(
        "severe" if many(clean) or many(attacked) else "warning",
        f"The logits are not finite for {images_of(clean)}, and for {images_of(attacked)} after "
        "noise or an attack. They count as wrong.",
        "Find what overflows or divides by zero; until then no attack can follow its gradient.",
        values,
    )


def outputs(target: AuditTarget, columns: Columns) -> Finding:
    """Find probabilities in place of logits: the loss flattens where the network is confident."""
    found = columns["is_probability"]
    return images_finding(
        found,
        fine="The outputs are logits, not probabilities.",
        text=f"The outputs for {images_of(found)} lie in [0, 1] and sum to one: the network ends "
        "in a softmax. Cross-entropy applies another one, so that its gradient is tiny.",
        advice="Take the softmax off the network, or its logarithm, and run the attacks again.",
    )


def steps_inside(target: AuditTarget, columns: Columns) -> Finding:
    """Find piecewise constant logits, as those of quantized images are."""
    found = columns["is_constant"]
    blind = many(columns["zero_gradient"]) or many(columns["no_gradient"])
    finding = images_finding(
        found,
        fine="The logits change with the smallest change of the image.",
        text=f"The logits for {images_of(found)} stay the same to the last bit when every pixel "
        "changes by 1e-5: the input is quantized, something inside is rounded or thresholded, or "
        "the logits are saturated.",
        advice="Attack with a gradient that passes straight through the rounding (BPDA), and "
        "without gradients; the accuracies under gradient attacks say nothing here.",
    )
    if blind or not finding.flagged:
        return finding
    text = f"{finding.text} There is a gradient all the same: attacks pass straight through it."
    return Finding("note", text, values=finding.values)


def modes(target: AuditTarget, columns: Columns) -> Finding:
    """Find layers that act as in training when the defense predicts."""
    found = list(_training_layers(target.defense))
    values = {"layers": found}
    if not found:
        text = "BatchNorm and dropout are in eval mode when the defense predicts."
        return Finding("fine", text, values=values)
    shown = ", ".join(found[:3]) + (" …" if len(found) > 3 else "")
    return Finding(
        "severe",
        f"{len(found)} layers act as in training when the defense predicts: {shown}. Dropout "
        "draws, and BatchNorm looks at the other images of the batch.",
        "Let eval() reach them, and keep running statistics; then evaluate again.",
        values,
    )


def _training_layers(defense: Defense) -> Iterator[str]:
    """Yield name and class of each layer that eval mode does not reach."""
    with evaluating(defense):
        for name, module in defense.named_modules():
            batch_only = getattr(module, "track_running_stats", True) is False
            idle = isinstance(module, _DropoutNd) and module.p == 0
            trains = isinstance(module, _BatchNorm | _DropoutNd) and (module.training or batch_only)
            if trains and not idle:
                yield f"{name} ({type(module).__name__})"


def batches(target: AuditTarget, columns: Columns) -> Finding:
    """Find predictions that depend on the other images of the batch."""
    if target.transductive:
        return not_checked("this defense adapts to the batch")
    if columns["is_nondeterministic"].any():
        return not_checked("predictions are nondeterministic, whatever the seed")
    found = columns["depends_on_batch"]
    return images_finding(
        found,
        fine="An image alone is predicted as in a batch.",
        text=f"{images_of(found)} are predicted differently alone and in a batch with others.",
        advice="If it is meant to adapt to the test batch, give it as a defense with `adapt`, so "
        "that it is attacked in rounds; else find the layer that looks at the batch.",
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


CHECKS = (numbers, outputs, steps_inside, modes, batches, randomness)
