"""What tells one evaluation from another."""

import hashlib
import json
import re
from typing import Any

import torch

from lightning_rob.defenses import Defense


def describe(attack: object) -> str:
    """The attack with all its arguments, functions by name and not by address."""
    return re.sub(r"<function ([\w.<>]+) at 0x[0-9a-f]+>", r"\1", repr(attack))


def fingerprint(defense: Defense) -> str:
    """What tells a defense from all others: its networks, their weights, its probabilities."""
    digest = hashlib.sha256(f"{describe(defense)} {describe(defense.rule)}".encode())
    # Buffers by themselves: normalisation and probabilities are in no state dict.
    for name, tensor in [*defense.named_parameters(), *defense.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()[:16]


def key_of(**circumstances: Any) -> str:
    """A name for all that a figure depends on."""
    text = json.dumps(circumstances, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
