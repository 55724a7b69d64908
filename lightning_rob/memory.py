"""Free memory of a device."""

import os
from collections.abc import Callable
from contextlib import suppress

import torch


def free_memory(
    device: torch.device,
    of_cuda: Callable[[torch.device], tuple[int, int]] = torch.cuda.mem_get_info,
    of_host: Callable[[str], int] = os.sysconf,
) -> int | None:
    """Return the bytes that new tensors may take on a device; None where it cannot be known.

    On an NVIDIA GPU memory that torch has reserved and does not use counts as free. On a CPU it is
    what no process uses, without caches of files.

    Args:
        device: a CPU or an NVIDIA GPU; others do not say.
        of_cuda: device -> (free, total) bytes, as the driver has them.
        of_host: name -> value of a setting of the operating system.
    """
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return of_cuda(device)[0] + reserved
    if device.type == "cpu":
        with suppress(ValueError, OSError):  # macOS has no such setting
            pages = of_host("SC_AVPHYS_PAGES")
            return pages * of_host("SC_PAGE_SIZE") if pages > 0 else None
    return None
