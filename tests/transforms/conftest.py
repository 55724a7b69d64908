import sys
import types

import numpy as np
import pytest


def darker(image, severity=1):
    """As a corruption of the package: PIL to [H, W, 3] in 0 … 255."""
    return np.asarray(image) * (1 - severity / 10)


def grainy(image, severity=1):
    return np.clip(np.asarray(image) + np.random.normal(size=np.asarray(image).shape), 0, 255)


def seeded(image, severity=1, seed=None):
    return np.asarray(image) * np.random.default_rng(seed).random()


@pytest.fixture
def package(monkeypatch):
    """A package of the interface of imagecorruptions, whose three results are known."""
    stand_in = types.ModuleType("imagecorruptions")
    stand_in.corruption_dict = {f.__name__: f for f in (darker, grainy, seeded)}
    monkeypatch.setitem(sys.modules, "imagecorruptions", stand_in)
