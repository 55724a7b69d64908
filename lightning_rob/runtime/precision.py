"""Full float32 while attacks and evaluations run: no TF32 on GPUs, no bfloat16 on CPUs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

backends: Any = torch.backends  # type checkers do not see the attributes of its modules

OPERATIONS = {
    "cudnn.conv": backends.cudnn.conv,
    "cudnn.rnn": backends.cudnn.rnn,
    "cuda.matmul": backends.cuda.matmul,
    "mkldnn.conv": backends.mkldnn.conv,
    "mkldnn.rnn": backends.mkldnn.rnn,
    "mkldnn.matmul": backends.mkldnn.matmul,
}
FULL = ["ieee"] * len(OPERATIONS)
TF32 = ["tf32" if name.startswith("cu") else "ieee" for name in OPERATIONS]
_decided = False  # whether an enclosing `in_float32` has set the flags


@contextmanager
def in_float32(tf32: bool | None = None) -> Iterator[None]:
    """Compute float32 convolutions and matrix products in float32; restore the flags afterwards.

    Args:
        tf32: False for full precision, True for TF32 on NVIDIA GPUs. None for full precision,
            unless an enclosing `in_float32` has chosen already.
    """
    # torch lets cuDNN round the inputs of convolutions to 10 bits of mantissa (TF32), and
    # `torch.set_float32_matmul_precision("high")` does so for matrix products. These are flags of
    # the process. torch has two interfaces to them, and raises an error where the older is asked
    # and disagrees with the newer, so both are set.
    global _decided
    if tf32 is None and _decided:
        yield
        return
    outside, _decided = _decided, True
    seen = _precisions()
    generic, backends.fp32_precision = backends.fp32_precision, "none"
    cudnn, backends.cudnn.fp32_precision = backends.cudnn.fp32_precision, "none"
    inherited = (generic, cudnn) != ("none", "none")
    own = _precisions() if inherited else seen  # "none": inherits from cudnn or generic
    older = _older_flags()
    try:
        _set(TF32 if tf32 else FULL, (bool(tf32), "high" if tf32 else "highest"))
        yield
    finally:
        _decided = outside
        _set(own, older)
        backends.cudnn.fp32_precision, backends.fp32_precision = cudnn, generic
        if inherited:  # torch's default "tf32" yields to these flags, one that was set does not
            now = _precisions()
            _set([None if p == q else "none" for p, q in zip(now, seen, strict=True)])


def float32_precision() -> str:
    """Name the precision of float32 operations: "ieee", or those below it, as "cudnn.conv tf32".

    These are the flags of the process, with or without a device that has such operations.
    """
    found = zip(OPERATIONS, _precisions(), strict=True)
    return ", ".join(f"{name} {p}" for name, p in found if p not in ("ieee", "none")) or "ieee"


def _precisions() -> list[str]:
    return [str(operation.fp32_precision) for operation in OPERATIONS.values()]


def _set(precisions: Sequence[str | None], older: tuple[bool, str] | None = None) -> None:
    if older is not None:  # first: they overwrite those of the operations
        backends.cudnn.allow_tf32 = older[0]
        torch.set_float32_matmul_precision(older[1])
    for operation, precision in zip(OPERATIONS.values(), precisions, strict=True):
        if precision is not None:
            operation.fp32_precision = precision


def _older_flags() -> tuple[bool, str]:
    try:
        return bool(backends.cudnn.allow_tf32), torch.get_float32_matmul_precision()
    except RuntimeError:  # the interfaces disagree: ask again while the newer one has no TF32
        _set(FULL)
    try:
        allowed = bool(backends.cudnn.allow_tf32)
    except RuntimeError:  # the older interface is the one with TF32
        allowed = True
    return allowed, torch.get_float32_matmul_precision()
