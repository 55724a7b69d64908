"""Checks of predictions that planted defenses do not cover."""

import pytest
import torch

from lightning_rob.audit.auditor import audit
from lightning_rob.defenses import Single
from lightning_rob.evaluation.checks import numbers
from tests.audit.planted import THREAT, Through


def test_one_image_with_non_finite_logits_is_a_warning(nets, blobs):
    x, y = blobs
    mark = x[3].flatten()[:3].clone()

    def one(images):
        found = (images.flatten(1)[:, :3] == mark).all(1)
        return torch.where(found[:, None, None, None], torch.nan, images)

    (found,) = audit(Single(Through(nets[0], one)), x, y, THREAT, checks=[numbers]).findings
    assert found.severity == "warning"
    assert "1 of 50 images" in found.text
    assert found.values["clean"] == pytest.approx(1 / 50)
