"""The errors of a classifier that may reject: eq. 1 by hand, curves by a loop."""

import math

import numpy as np
import pytest
import torch

from lightning_rob.metrics.selective import SelectiveError, rejection_curves, selective_error

both = pytest.mark.parametrize("per", ["image", "prediction"])


def played(count=41, classes=5, seed=0):
    """Predictions, some of them rejections, labels, and a mask of the clean images."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (count,), generator=generator)
    predicted = torch.randint(classes, (count,), generator=generator)
    predicted = torch.where(torch.rand(count, generator=generator) < 0.5, y, predicted)
    predictions = torch.nn.functional.one_hot(predicted, classes).float()
    predictions[torch.rand(count, generator=generator) < 0.3] = 0
    return predictions, y, torch.rand(count, generator=generator) < 0.5


@both
def test_image_by_image(per):
    predictions, y, clean = played()
    rejected = [float(row.sum()) == 0 for row in predictions]
    wrong = [
        not out and int(row.argmax()) != k
        for row, k, out in zip(predictions, y.tolist(), rejected, strict=True)
    ]
    of_z = [out for out, z in zip(rejected, clean, strict=True) if z]
    whole = 41 if per == "image" else 41 - sum(rejected)
    expected = [sum(of_z) / len(of_z), sum(rejected) / 41, sum(wrong) / whole]
    found = [float(value) for value in selective_error(predictions, y, clean, per)]
    assert found == pytest.approx(expected, abs=1e-12)
    assert 0 < sum(wrong) < 41 - sum(rejected)


def test_a_prediction_that_is_no_number_is_wrong():
    predictions = torch.tensor([[1.0, 0.0], [torch.nan, torch.nan], [0.0, 0.0]])
    found = selective_error(predictions, torch.zeros(3).long(), torch.ones(3).bool())
    assert [float(value) for value in found] == pytest.approx([1 / 3] * 3)


def test_expectations_of_a_random_defense():
    """Half of the members of an ensemble of two reject: the shares are expectations."""
    predictions, y = torch.tensor([[0.5, 0.0], [0.5, 0.5]]), torch.tensor([0, 0])
    clean = torch.tensor([True, False])
    assert [float(v) for v in selective_error(predictions, y, clean)] == [0.5, 0.25, 0.25]
    found = [float(v) for v in selective_error(predictions, y, clean, "prediction")]
    assert found == pytest.approx([0.5, 0.25, 1 / 3])


@both
def test_a_class_that_rejects_is_as_rows_of_zeros(per):
    predictions, y, clean = played()
    rejected = (predictions.sum(1, keepdim=True) == 0).to(predictions)
    for place in (0, 2, predictions.shape[1]):
        wide = torch.cat([predictions[:, :place], rejected, predictions[:, place:]], 1)
        found = SelectiveError(per, rejects=place)
        found.update(wide, y + (y >= place).long(), clean)
        assert tuple(found.compute().values()) == selective_error(predictions, y, clean, per)


@both
def test_no_images_are_no_number(per):
    nothing = selective_error(torch.zeros(0, 3), torch.zeros(0).long(), torch.zeros(0) > 0, per)
    assert all(math.isnan(value) for value in nothing)
    predictions, y, clean = played()
    of_z, rejected, error = selective_error(predictions, y, clean & False, per)
    assert math.isnan(of_z) and 0 < rejected < 1 and 0 < error < 1


def test_what_is_refused():
    predictions, y, clean = played()
    with pytest.raises(ValueError, match=r"per must be of .*, got 'accepted'"):
        selective_error(predictions, y, clean, "accepted")
    with pytest.raises(ValueError, match=r"a mask of 41 images, got torch.bool \[40\]"):
        selective_error(predictions, y, clean[:-1])


def scored(count=300, seed=0):
    """Probabilities, some of them exactly 0 and 1, which images are wrong, and which are clean."""
    generator = torch.Generator().manual_seed(seed)
    scores = (3 * torch.randn(count, generator=generator)).sigmoid()
    scores[:20], scores[20:40] = 0, 1
    wrong, clean = (torch.rand(count, generator=generator) < share for share in (0.4, 0.5))
    return scores, wrong, clean


@both
def test_curves_threshold_by_threshold(per):
    scores, wrong, clean = scored()
    found = torch.stack(rejection_curves(scores, wrong, clean, per=per))
    assert found.shape == (3, 100)
    p = scores.numpy()
    for t, limit in enumerate(np.linspace(0, 1, 100)):
        out = p > limit
        kept = wrong.numpy()[~out]
        error = kept.sum() / (len(p) if per == "image" else max(1, len(kept)))
        expected = [out[clean.numpy()].mean(), out.mean(), error]
        assert found[:, t].tolist() == pytest.approx(expected, abs=1e-12)


def test_rejecting_everything_is_no_error():
    predictions, y, clean = torch.zeros(7, 3), torch.arange(7) % 3, torch.arange(7) < 3
    for per in ("image", "prediction"):
        assert [float(v) for v in selective_error(predictions, y, clean, per)] == [1.0, 1.0, 0.0]


def test_a_score_that_is_no_number_is_rejected():
    scores = torch.tensor([torch.nan, 0.2])
    curves = rejection_curves(scores, torch.tensor([True, False]), torch.tensor([True, False]))
    assert [float(curve[-1]) for curve in curves] == [1.0, 0.5, 0.0]
