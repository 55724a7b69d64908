"""Minimum accuracies, as `--fail_under` and `monitor --alarm` take them."""

import math

import pytest
import torch

from lightning_rob.commands.thresholds import parse_thresholds, violations
from lightning_rob.evaluation.records import measured


def test_thresholds():
    assert parse_thresholds("robust/worst=0.4, acc=90%") == {"robust/worst": 0.4, "acc": 0.9}
    figures = {"test/robust/worst": 0.41, "test/acc": 0.8, "val/acc": 1.0}
    assert violations({"robust/worst": 0.41, "worst": 0.41}, figures, "test") == []
    assert violations({"worst": 0.42}, figures, "test") == ["worst is 41.00%, below 42%"]
    assert violations({"acc": 0.9}, figures, "test") == ["acc is 80.00%, below 90%"]
    assert violations({"test/acc": 0.9}, figures, "test") != []
    assert violations({"acc": 0.1}, {"test/acc": math.nan}, "test") != []
    found = {"test/robust/findings": 1.0, "test/robust/blind": 0.1}
    (line,) = violations({"robust/findings": 0.0, "blind": 0.2}, found, "test")
    assert line == "robust/findings is 1, above 0"
    assert violations(parse_thresholds("findings=2"), found, "test") == []
    with pytest.raises(ValueError, match="no figure robust/arc was measured, only acc, robust/w"):
        violations({"robust/arc": 0.1}, figures, "test")

    for text in ("worst", "=0.4", "worst=", "worst=2", "worst=nan", "worst=x%"):
        with pytest.raises(ValueError, match="a threshold is NAME=VALUE"):
            parse_thresholds(text)


def test_a_float32_accuracy_reaches_the_limit_that_it_equals():
    """An ensemble's score of 0.7 on every image is 0.69999999 in float32."""
    for share in (0.7, 0.1, 0.3, 0.9):
        accuracy = measured("worst", torch.full((50,), share), 0.0, {}).accuracy
        assert violations({"worst": share}, {"test/worst": accuracy}, "test") == []
        (line,) = violations({"worst": share + 2e-5}, {"test/worst": accuracy}, "test")
        assert line == f"worst is {share:.4%}, below {100 * (share + 2e-5):g}%"
