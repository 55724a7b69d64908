"""Images and networks of the audit's tests."""

import pytest
import torch

from tests.audit.planted import IMAGES, THREAT, trained
from tests.tiny import Blobs, TinyNet


def images(train, count):
    pairs = Blobs(train_size=count, test_size=count).source(train)
    return torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs])


@pytest.fixture(scope="session")
def blobs():
    return images(False, IMAGES)


@pytest.fixture(scope="session")
def contrasty(blobs):
    """The same images with four values in ten black or white."""
    x, y = blobs
    return (3 * x - 1).clamp(0, 1), y


@pytest.fixture(scope="session")
def nets():
    """A standard net and two adversarially trained ones."""
    x, y = images(True, 192)
    made = []
    for seed, threat in enumerate((None, THREAT, THREAT)):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made.append(trained(TinyNet(), x, y, threat, steps=60))
    return made
