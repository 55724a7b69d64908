"""The mean corruption error against its definition."""

import pytest

from lightning_rob.metrics import ALEXNET_ERRORS, corruption_error

ERRORS = {"fog": [0.1, 0.2, 0.3, 0.4, 0.5], "snow": [0.2, 0.2, 0.4, 0.4, 0.8]}


def test_means():
    assert corruption_error(ERRORS) == pytest.approx(0.35)
    assert corruption_error(ERRORS, {"fog": 0.6, "snow": 0.8}) == pytest.approx(0.5)


def test_alexnet_has_an_mce_of_one():
    own = {name: [error] * 5 for name, error in ALEXNET_ERRORS.items()}
    assert corruption_error(own, ALEXNET_ERRORS) == pytest.approx(1)


def test_refuses():
    with pytest.raises(ValueError, match="errors of fog, not of fog, snow"):
        corruption_error(ERRORS, {"fog": 0.5})
    with pytest.raises(ValueError, match=r"mCE needs the severities 1 to 5, got \[2\]"):
        corruption_error({"fog": [0.1, 0.2]}, {"fog": 0.5})
