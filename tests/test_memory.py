"""Free memory of a device."""

import os

import pytest
import torch

from lightning_rob.runtime.memory import free_memory


def test_memory_of_a_gpu():
    """The figure of the driver, where torch has reserved nothing."""
    given = torch.device("cuda", 1)
    found = free_memory(given, of_cuda=lambda device: (300 if device == given else 0, 1000))
    assert found == 300


def test_memory_of_the_host():
    system = {"SC_AVPHYS_PAGES": 7, "SC_PAGE_SIZE": 4096}
    assert free_memory(torch.device("cpu"), of_host=system.__getitem__) == 7 * 4096


@pytest.mark.skipif("SC_AVPHYS_PAGES" not in os.sysconf_names, reason="not on this system")
def test_memory_of_this_machine():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_memory(torch.device("cpu")) <= total


def test_devices_that_do_not_say():
    def unknown(name):
        raise ValueError(f"unrecognized configuration name {name}")

    assert free_memory(torch.device("cpu"), of_host=unknown) is None
    assert free_memory(torch.device("meta")) is None
