"""Networks of torchvision and timm by name."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Literal, NamedTuple

from torch import Tensor, nn

from lightning_rob.nets.normalize import IMAGENET_MEAN, IMAGENET_STD, Normalize
from lightning_rob.nets.weights import load_weights


class Found(NamedTuple):
    """Network of a zoo and the statistics of its training images."""

    net: nn.Module
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD


def _known(name: str, names: Iterable[str], kind: str) -> str:
    """Return the name if it is known; else raise ValueError with the closest names."""
    names = list(names)
    if name in names:
        return name
    close = get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f", did you mean {', '.join(close)}?" if close else ""
    raise ValueError(f"no {kind} {name!r}{hint}")


def _swap_head(net: nn.Module, fresh: nn.Module) -> nn.Module:
    """Replace the layers whose weights have another shape in a fresh network by the fresh ones."""
    for path, layer in list(fresh.named_modules()):
        weight, old = getattr(layer, "weight", None), net.get_submodule(path)
        if isinstance(weight, Tensor) and weight.shape != old.weight.shape:
            net.set_submodule(path, layer)
    return net


def torchvision_net(name: str, classes: int, weights: str | None) -> Found:
    """Build a classifier of torchvision, named as in `torchvision.models.list_models`."""
    from torchvision import models

    _known(name, models.list_models(module=models), "torchvision network")
    fresh = models.get_model(name, weights=None, num_classes=classes)
    if weights is None:
        return Found(fresh)
    known = models.get_model_weights(name)
    chosen = known[_known(weights, known.__members__, f"weights of {name}")]
    images = chosen.transforms()
    return Found(_swap_head(models.get_model(name, weights=chosen), fresh), images.mean, images.std)


def timm_net(name: str, classes: int, weights: str | None) -> Found:
    """Build a network of timm; weights are a tag of timm, or DEFAULT."""
    try:
        import timm
    except ImportError as error:
        raise ImportError('timm networks need timm: pip install "lightning-rob[timm]"') from error
    if not timm.is_model(name):
        _known(name, timm.list_models(), "timm network")
    if weights not in (None, "DEFAULT"):
        tags = [full.split(".", 1)[1] for full in timm.list_pretrained(f"{name}.*")]
        name = f"{name}.{_known(weights, tags, f'weights of {name}')}"
    net = timm.create_model(name, pretrained=weights is not None, num_classes=classes)
    images = getattr(net, "pretrained_cfg", {})
    return Found(net, images.get("mean", IMAGENET_MEAN), images.get("std", IMAGENET_STD))


ZOOS = {"torchvision": torchvision_net, "timm": timm_net}


class ZooNet(nn.Module):
    """Network of torchvision or timm, for images in [0, 1].

    Args:
        name: the network's name in the zoo, such as resnet18.
        source: the zoo.
        classes: K; pretrained weights for another K get a new last layer.
        weights: None for random weights; a checkpoint's path, recognised by its suffix (x.pt,
            x.ckpt, x.safetensors); or their name in the zoo: DEFAULT, IMAGENET1K_V1 (torchvision),
            a1_in1k (timm).
        mean: [C] of images in [0, 1]; None: those of the weights or of timm, else ImageNet's.
        std: [C], likewise.

    Raises:
        ValueError: the zoo has no such network or weights.
        ImportError: timm is not installed.
    """

    def __init__(
        self,
        name: str,
        source: Literal["torchvision", "timm"] = "torchvision",
        classes: int = 10,
        weights: str | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        from_file = weights is not None and "." in weights
        find = ZOOS[_known(source, ZOOS, "zoo")]
        found = find(name, classes, None if from_file else weights)
        self.normalize = Normalize(mean or found.mean, std or found.std)
        self.net = found.net
        if weights and from_file:
            load_weights(self, weights)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, K] of images [B, C, H, W] in [0, 1]."""
        out = self.net(self.normalize(x))
        # In training, Inception and GoogLeNet also return the logits of their auxiliary heads.
        main: Tensor = out[0] if isinstance(out, tuple) else out
        return main
