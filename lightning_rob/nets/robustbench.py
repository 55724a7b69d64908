"""Networks of RobustBench (Croce et al. 2021): their architecture by the name of their weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from lightning_rob.nets.normalize import CIFAR10_MEAN, CIFAR10_STD
from lightning_rob.nets.wide_resnet import PreActResNet18, WideResNet

Statistics = tuple[Sequence[float], Sequence[float]]
RAW: Statistics = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
CIFAR10: Statistics = (CIFAR10_MEAN, CIFAR10_STD)
STATISTICS: dict[str, Statistics] = {  # by their names in `TABLE`
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # 2x - 1
    "cifar10": CIFAR10,
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "exact_cifar10": (
        (0.4913997551666284, 0.48215855929893703, 0.4465309133731618),
        (0.24703225141799082, 0.24348516474564, 0.26158783926049628),
    ),
    "exact_cifar100": (
        (0.5070751592371323, 0.48654887331495095, 0.4409178433670343),
        (0.2673342858792401, 0.2564384629170883, 0.27615047132568404),
    ),
    "rounded_cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "engstrom": (CIFAR10_MEAN, (0.2023, 0.1994, 0.2010)),
    "rony": ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
}
DEFAULT_FOLDER = "cifar10/Linf"  # of RobustBench's `load_model`


class Published(NamedTuple):
    """Architecture of published weights."""

    build: Callable[..., nn.Module]  # of `classes`; its `normalize` is still to be replaced
    statistics: Statistics  # mean and standard deviation of the images
    layout: Mapping[str, Any]  # names in the file, as options of `load_weights`


def _refused(*names: str) -> dict[str, str]:
    """Rename what only another layout has: its weights fit in shape, but are of another network."""
    return {name: f"another_layout.{name}" for name in names}


def wide(depth: int, widen: int, statistics: Statistics = RAW) -> Published:
    """Return the WideResNet of TRADES, in whose files a stage may be that no forward pass uses."""
    return Published(partial(WideResNet, depth, widen), statistics, {"drop": ["sub_block1."]})


def gowal(depth: int, widen: int, statistics: Statistics = CIFAR10) -> Published:
    """Return the WideResNet of Gowal et al. 2020: Swish, and SAME padding."""
    stages = {f"layer.{i}.block": f"block{i + 1}.layer" for i in range(3)}
    stages |= _refused("block1", "block2", "block3")
    names = {"batchnorm_0": "bn1", "conv_0": "conv1", "batchnorm_1": "bn2", "conv_1": "conv2"}
    ends = {"init_conv": "conv1", "batchnorm": "bn1", "logits": "fc", "shortcut": "convShortcut"}
    build = partial(WideResNet, depth, widen, activation="silu", same=True)
    return Published(build, statistics, {"rename": stages | names | ends})


def preact(statistics: Statistics = RAW, prefix: str | None = None, **options: Any) -> Published:
    """Return the PreActResNet-18 of Wong et al. 2020, without batch norm before the last layer."""
    chosen: dict[str, Any] = {"shortcut": "input", "final_norm": False} | options
    return Published(partial(PreActResNet18, **chosen), statistics, {"prefix": prefix})


def gowal_preact(statistics: Statistics = CIFAR10, width: int = 64) -> Published:
    """Return the PreActResNet-18 of Gowal et al. 2020: Swish, SAME padding, 3x3 shortcuts."""
    stages = {f"layer_{i}": f"layer{i + 1}" for i in range(4)}
    stages |= _refused("layer1", "layer2", "layer3", "layer4")
    names = {"batchnorm_0": "bn1", "conv_2d_1": "conv1", "batchnorm_1": "bn2", "conv_2d_2": "conv2"}
    ends = {"conv_2d": "conv1", "batchnorm": "bn", "logits": "linear", "shortcut": "shortcut.1"}
    build = partial(PreActResNet18, width=width, activation="silu", shortcut="3x3", same=True)
    return Published(build, statistics, {"rename": stages | names | ends})


def resnet(layers: int, statistics: Statistics = RAW) -> Published:
    """Return torchvision's ResNet with a 3x3 convolution without pooling in front."""
    names = {"linear": "fc", "shortcut": "downsample"}
    return Published(partial(_resnet, layers), statistics, {"rename": names})


def _resnet(layers: int, classes: int) -> nn.Module:
    from torchvision import models

    net: nn.Module = models.get_model(f"resnet{layers}", weights=None, num_classes=classes)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()  # 32x32 images are small already
    return net


KINDS: dict[str, Callable[..., Published]] = {
    "wide": wide,
    "gowal": gowal,
    "gowal_preact": gowal_preact,
    "preact": preact,
    "preact_last": partial(preact, prefix="last"),
    "preact_norm": partial(preact, shortcut="active", final_norm=True),
    "resnet": resnet,
}
# Folders, and in each the architectures: kind, sizes and statistics | names of the weights.
TABLE = """\
cifar10/Linf
wide 28 10 | Standard Carmon2019Unlabeled Wang2020Improving Sehwag2020Hydra Zhang2020Geometry
wide 28 10 | Wu2020Adversarial_extra Sridhar2021Robust
wide 34 10 | Zhang2019Theoretically Zhang2019You Huang2020Self Zhang2020Attacks Wu2020Adversarial
wide 34 10 | Sitawarin2020Improving Cui2020Learnable_34_10 Sehwag2021Proxy Chen2021LTD_WRN34_10
wide 34 10 | Addepalli2021Towards_WRN34 Addepalli2022Efficient_WRN_34_10 Jia2022LAS-AT_34_10
wide 34 20 | Cui2020Learnable_34_20 Chen2021LTD_WRN34_20
gowal 28 10 | Gowal2020Uncovering_28_10_extra Rebuffi2021Fixing_28_10_cutmix_ddpm
gowal 28 10 | Rade2021Helper_ddpm Gowal2021Improving_28_10_ddpm_100m Pang2022Robustness_WRN28_10
gowal 28 10 | Wang2023Better_WRN-28-10 Xu2023Exploring_WRN-28-10
gowal 70 16 | Gowal2020Uncovering_70_16 Gowal2020Uncovering_70_16_extra
gowal 70 16 | Rebuffi2021Fixing_70_16_cutmix_ddpm Rebuffi2021Fixing_70_16_cutmix_extra
gowal 70 16 | Gowal2021Improving_70_16_ddpm_100m Pang2022Robustness_WRN70_16
gowal 70 16 | Wang2023Better_WRN-70-16
resnet 18 | Sehwag2021Proxy_R18 Addepalli2021Towards_RN18 Addepalli2022Efficient_RN18
gowal_preact | Rebuffi2021Fixing_R18_ddpm Rade2021Helper_R18_extra Rade2021Helper_R18_ddpm
gowal_preact | Gowal2021Improving_R18_ddpm_100m
wide 28 10 half | Hendrycks2019Using
resnet 50 engstrom | Engstrom2019Robustness
wide 34 20 cifar10 | Rice2020Overfitting
preact cifar10 | Wong2020Fast
preact_last | Andriushchenko2020Understanding
wide 34 10 cifar10 | Chen2020Efficient
gowal 34 20 | Gowal2020Uncovering_34_20
gowal 106 16 | Rebuffi2021Fixing_106_16_cutmix_ddpm
wide 34 15 | Sridhar2021Robust_34_15
gowal 34 10 | Rade2021Helper_extra
wide 70 16 | Jia2022LAS-AT_70_16
gowal 94 16 | Bartoldson2024Adversarial_WRN-94-16
cifar10/L2
wide 34 10 exact_cifar10 | Augustin2020Adversarial_34_10 Augustin2020Adversarial_34_10_extra
wide 34 10 | Wu2020Adversarial Sehwag2021Proxy
gowal 70 16 | Gowal2020Uncovering Gowal2020Uncovering_extra Rebuffi2021Fixing_70_16_cutmix_ddpm
gowal 70 16 | Rebuffi2021Fixing_70_16_cutmix_extra Wang2023Better_WRN-70-16
gowal 28 10 | Rebuffi2021Fixing_28_10_cutmix_ddpm Wang2023Better_WRN-28-10
gowal_preact | Rebuffi2021Fixing_R18_cutmix_ddpm Rade2021Helper_R18_ddpm
wide 28 10 | Standard
resnet 50 engstrom | Engstrom2019Robustness
wide 28 10 rony | Rony2019Decoupling
resnet 50 exact_cifar10 | Augustin2020Adversarial
preact_norm cifar10 | Rice2020Overfitting
resnet 18 | Sehwag2021Proxy_R18
cifar100/Linf
wide 34 10 | Sitawarin2020Improving Cui2020Learnable_34_10_LBGAT0 Cui2020Learnable_34_10_LBGAT6
wide 34 10 | Chen2021LTD_WRN34_10 Sehwag2021Proxy Addepalli2021Towards_WRN34
wide 34 10 | Addepalli2022Efficient_WRN_34_10 Jia2022LAS-AT_34_10
wide 34 20 | Cui2020Learnable_34_20_LBGAT6 Jia2022LAS-AT_34_20
gowal 70 16 cifar100 | Gowal2020Uncovering Gowal2020Uncovering_extra
gowal 70 16 cifar100 | Rebuffi2021Fixing_70_16_cutmix_ddpm Pang2022Robustness_WRN70_16
gowal 70 16 cifar100 | Wang2023Better_WRN-70-16
gowal 28 10 cifar100 | Rebuffi2021Fixing_28_10_cutmix_ddpm Pang2022Robustness_WRN28_10
gowal 28 10 cifar100 | Wang2023Better_WRN-28-10
gowal_preact cifar100 | Rebuffi2021Fixing_R18_ddpm Rade2021Helper_R18_ddpm
wide 28 10 half | Hendrycks2019Using
preact_norm exact_cifar100 | Rice2020Overfitting
wide 34 10 exact_cifar100 | Wu2020Adversarial
wide 34 10 rounded_cifar100 | Chen2020Efficient
preact_norm | Addepalli2021Towards_PARN18
resnet 18 | Addepalli2022Efficient_RN18
"""


def _networks(table: str) -> Iterator[tuple[str, Published]]:
    folder = ""
    for line in table.splitlines():
        architecture, _, names = line.partition(" | ")
        if not names:
            folder = line
            continue
        kind, *words = architecture.split()
        given = [int(word) if word.isdigit() else STATISTICS[word] for word in words]
        published = KINDS[kind](*given)
        yield from ((f"{folder}/{name}", published) for name in names.split())


NETWORKS = dict(_networks(TABLE))
