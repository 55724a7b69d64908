"""Networks of torchvision, timm, RobustBench and the Hugging Face hub by name."""

import json
from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from lightning_rob.nets.hub import CONFIG, HUB, WEIGHTS, hub_folder
from lightning_rob.nets.hugging_face import PROCESSOR, TransformersNet, is_classifier
from lightning_rob.nets.normalize import IMAGENET_MEAN, IMAGENET_STD, Normalize
from lightning_rob.nets.robustbench import DEFAULT_FOLDER, NETWORKS
from lightning_rob.nets.weights import load_weights
from lightning_rob.runtime.errors import nearest

ROBUSTBENCH = "robustbench/"
CLASSES = 10  # K where neither the caller nor the weights' name says it


class Found(NamedTuple):
    """Network of a zoo and the statistics of its training images, [C] each."""

    net: nn.Module
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    file: str | Path | None = None  # weights that are still to be loaded
    layout: Mapping[str, Any] = {}  # names in that file, as options of `load_weights`


def _known(name: str, names: Iterable[str], kind: str) -> str:
    names = list(names)
    if name not in names:
        listed = f": {', '.join(names)}" if len(names) < 10 else ""
        raise ValueError(f"no {kind} {name!r}{nearest(name, names, listed)}")
    return name


def torchvision_net(name: str, classes: int | None, weights: str | None) -> Found:
    """Build a classifier of torchvision, named as in `torchvision.models.list_models`."""
    from torchvision import models

    classes = CLASSES if classes is None else classes
    _known(name, models.list_models(module=models), "torchvision network")
    fresh = models.get_model(name, weights=None, num_classes=classes)
    if weights is None:
        return Found(fresh)
    known = models.get_model_weights(name)
    chosen = known[_known(weights, known.__members__, f"weights of {name}")]
    net = models.get_model(name, weights=chosen)
    # Another number of classes: the layers whose weights have another shape are the fresh ones.
    for path, layer in list(fresh.named_modules()):
        weight, old = getattr(layer, "weight", None), net.get_submodule(path)
        if isinstance(weight, Tensor) and weight.shape != old.weight.shape:
            net.set_submodule(path, layer)
    images = chosen.transforms()
    return Found(net, images.mean, images.std)


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise ImportError('timm networks need timm: pip install "lightning-rob[timm]"') from error
    return timm


def timm_net(name: str, classes: int | None, weights: str | None) -> Found:
    """Build a network of timm; weights are a tag of timm, or DEFAULT."""
    timm, classes = _timm(), CLASSES if classes is None else classes
    if not timm.is_model(name):
        _known(name, timm.list_models(), "timm network")
    if weights not in (None, "DEFAULT"):
        tags = [full.split(".", 1)[1] for full in timm.list_pretrained(f"{name}.*")]
        name = f"{name}.{_known(weights, tags, f'weights of {name}')}"
    net = timm.create_model(name, pretrained=weights is not None, num_classes=classes)
    images = getattr(net, "pretrained_cfg", {})
    return Found(net, images.get("mean", IMAGENET_MEAN), images.get("std", IMAGENET_STD))


def robustbench_net(name: str, classes: int | None, weights: str | None) -> Found:
    """Build the architecture of RobustBench's weights, "Wong2020Fast" or "cifar10/L2/Standard"."""
    if weights is not None and "." not in weights:
        raise ValueError(f"weights of RobustBench are the path of their file, got {weights!r}")
    name = name if "/" in name else f"{DEFAULT_FOLDER}/{name}"
    published = NETWORKS[_known(name, NETWORKS, "robustbench network")]
    own = 100 if name.startswith("cifar100/") else 10
    net = published.build(classes=own if classes is None else classes)
    if hasattr(net, "normalize"):  # one layer normalizes, that of `ZooNet`
        net.normalize = nn.Identity()
    return Found(net, *published.statistics, weights, published.layout)


def hub_net(name: str, classes: int | None, weights: str | None) -> Found:
    """Build the network that `config.json` of a hub's repository names, "org/name@revision".

    It is one of timm, or an image classifier of transformers, which normalises by itself.
    """
    file = weights or WEIGHTS
    folder = hub_folder(name, (CONFIG, file))
    if is_classifier(folder):
        net = TransformersNet(hub_folder(name, (CONFIG, WEIGHTS, PROCESSOR)))
        if weights is not None or classes not in (None, net.net.num_labels):
            raise ValueError(
                f"{HUB}{name} has {net.net.num_labels} classes and the weights {WEIGHTS}, got "
                f"classes {classes} and weights {weights}: leave both out"
            )
        return Found(net, [0.0] * net.channels, [1.0] * net.channels)
    timm, config = _timm(), json.loads((folder / CONFIG).read_text("utf-8"))
    if not isinstance(config, dict) or not isinstance(config.get("architecture"), str):
        raise ValueError(
            f"{HUB}{name} names no architecture of timm in {CONFIG}; a defense that lightning-rob "
            f"has exported is opened by lightning_rob.load({HUB + name!r})"
        )
    options = config.get("model_args") or {}
    # These are of the architecture: options of `create_model` itself could load other files.
    if refused := sorted(options.keys() & signature(timm.create_model).parameters.keys()):
        raise ValueError(f"{HUB}{name}: model_args may not set {', '.join(refused)}")
    architecture = _known(config["architecture"], timm.list_models(), "timm network")
    count = config.get("num_classes", 1000) if classes is None else classes
    net = timm.create_model(architecture, num_classes=count, **options)
    images = config.get("pretrained_cfg") or {}
    mean, std = images.get("mean", IMAGENET_MEAN), images.get("std", IMAGENET_STD)
    return Found(net, mean, std, folder / file)


ZOOS = {"torchvision": torchvision_net, "timm": timm_net}


class ZooNet(nn.Module):
    """Network of torchvision, timm, RobustBench or the Hugging Face hub, for images in [0, 1].

    Args:
        name: the network's name in the zoo, such as resnet18; "robustbench/Carmon2019Unlabeled" (of
            another data set or threat, "robustbench/cifar10/L2/Rice2020Overfitting"); or
            "hf-hub:org/name", at a revision "hf-hub:org/name@revision", in timm's format or that of
            transformers.
        source: the zoo of a name without such a prefix.
        classes: K; pretrained weights of torchvision and timm for another K get a new last layer.
            None: those of the data set of RobustBench or of the hub's file, else 10.
        weights: None for random weights; a checkpoint's path, recognised by its suffix (x.pt,
            x.ckpt, x.safetensors); or their name in the zoo: DEFAULT, IMAGENET1K_V1 (torchvision),
            a1_in1k (timm). Of a hub the file's name in the repository; None is model.safetensors,
            and a pickle is read, by `weights_only=True`, if it is named.
        mean: [C] of images in [0, 1]; None: those of the weights or of timm, else ImageNet's.
    """

    def __init__(
        self,
        name: str,
        source: Literal["torchvision", "timm"] = "torchvision",
        classes: int | None = None,
        weights: str | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if name.startswith(ROBUSTBENCH):
            found = robustbench_net(name.removeprefix(ROBUSTBENCH), classes, weights)
        elif name.startswith(HUB):
            found = hub_net(name.removeprefix(HUB), classes, weights)
        else:
            is_file = weights is not None and "." in weights
            find = ZOOS[_known(source, ZOOS, "zoo")]
            found = find(name, classes, None if is_file else weights)
            found = found._replace(file=weights if is_file else None)
        self.normalize = Normalize(mean or found.mean, std or found.std)
        self.net = found.net
        if found.file is not None:
            load_weights(self, found.file, **found.layout)

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(self.normalize(x))
        # In training, Inception and GoogLeNet also return the logits of their auxiliary heads.
        return out[0] if isinstance(out, tuple) else out
