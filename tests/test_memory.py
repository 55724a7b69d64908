"""Free memory of a device."""

import os

import pytest
import torch

from lightning_rob.runtime.memory import free_memory


@pytest.mark.skipif("SC_AVPHYS_PAGES" not in os.sysconf_names, reason="not on this system")
def test_memory_of_this_machine():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_memory(torch.device("cpu")) <= total


@pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a GPU")
def test_memory_of_a_gpu():
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= free_memory(torch.device("cuda")) <= total


def test_devices_that_do_not_say(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: int(f"no {name}"))  # ValueError, as on macOS
    assert free_memory(torch.device("cpu")) is None
    assert free_memory(torch.device("meta")) is None
