"""Call a network in its own precision, and take the logits out of whatever it returns."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rob.objectives import check_classes

CHANGES_INPUT = "the network changes its input: x = x - mean, not x -= mean"


class Preprocessed(nn.Module):
    """A network behind a function of its images, such as a normalization."""

    def __init__(self, preprocess: Callable[[Tensor], Tensor], net: nn.Module) -> None:
        super().__init__()
        self.preprocess = preprocess
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return network_logits(self.net, self.preprocess(x))


def network_logits(net: nn.Module, x: Tensor) -> Tensor:
    """Compute a network's logits, [B, …] -> [B, K], in its own type; float32 or better."""
    # Preprocessing sees the images as they are given; the network behind it gets its own type.
    given = x if isinstance(net, Preprocessed) else in_type_of(net, x)
    counted = not (torch.compiler.is_compiling() or given.is_inference())
    version = given._version if counted else 0  # torch's number of changes in place
    try:
        logits = logits_in(net(given))
    except AssertionError as error:  # so timm and torchvision refuse images of another size
        size, reason = "x".join(map(str, x.shape[1:])), str(error).rstrip(".!")
        raise ValueError(
            f"{type(net).__name__} refuses images of {size}{reason and f': {reason}'}; if it wants "
            "another size, resize in its first layer or by preprocess="
        ) from error
    if counted and given._version != version:
        raise ValueError(CHANGES_INPUT)
    tensor = isinstance(logits, Tensor)
    if not tensor or logits.dim() != 2 or len(logits) != len(x) or not logits.is_floating_point():
        raise (ValueError if tensor else TypeError)(
            f"{type(net).__name__} returned {_described(logits)} for {len(x)} images, but logits "
            f"[B, K] are wanted, here a floating-point tensor [{len(x)}, K], alone or as `logits` "
            "of an object or dict: wrap the network in a module whose forward returns them"
        )
    check_classes(logits.shape[1])
    return logits.float() if logits.itemsize < 4 else logits


def logits_in(output: Any) -> Any:
    """Return the `logits` of a network's output, or the output itself if it has none."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("logits", output)
    return getattr(output, "logits", output)


def in_type_of(net: nn.Module, x: Tensor) -> Tensor:
    """Return images in the type of a network's first weights."""
    return x.to(_dtype(net, x.dtype))


def _dtype(net: nn.Module, default: torch.dtype) -> torch.dtype:
    for part in net.modules():
        for tensors in (part._parameters, part._buffers):
            for tensor in tensors.values():
                if tensor is not None and tensor.is_floating_point():
                    return tensor.dtype
    return default


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"Tensor {list(output.shape)} of {output.dtype}"
    if isinstance(output, Mapping):
        return f"{type(output).__name__} with keys {', '.join(map(str, output))}"
    return type(output).__name__
