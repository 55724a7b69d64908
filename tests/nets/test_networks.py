"""One contract for every network; names and counts as published; libraries as references."""

from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_rob import nets
from lightning_rob.attacks.folding import folded
from lightning_rob.nets import (
    VGG16,
    WRN28_4,
    AthenaCNN,
    DANNNet,
    DANNResNet18,
    LeNet,
    MNISTNet,
    MobileNetV1,
    Normalize,
    PreActResNet18,
    ResNet,
    ResNet20,
    ResNet32,
    SmallCNN,
    WideResNet,
    ZooNet,
)
from lightning_rob.nets.pooling import spatial_mean
from lightning_rob.nets.resnet import PaddedShortcut
from tests.nets import MEAN, STD, TINY, images, with_statistics

GOWAL = {"activation": "silu", "same": True}
NETS = {
    "small": (partial(SmallCNN, width=4), 1, 28),
    "mnist": (partial(MNISTNet, width=4, channels=3, size=32), 3, 32),
    "lenet": (LeNet, 1, 28),
    "athena": (partial(AthenaCNN, channels=3, size=32, hidden=32), 3, 32),
    "resnet20": (ResNet20, 3, 32),
    "resnet-b": (partial(ResNet, **TINY, shortcut="B"), 3, 32),
    "preact": (partial(PreActResNet18, width=16), 3, 32),
    "mobilenet": (MobileNetV1, 3, 32),
    "vgg": (VGG16, 3, 32),
    "wide": (partial(WideResNet, 16, 2), 3, 32),
    "wide-gowal": (partial(WideResNet, 10, 1, **GOWAL), 3, 32),
    "preact-gowal": (partial(PreActResNet18, width=4, shortcut="3x3", **GOWAL), 3, 32),
    "dann": (partial(DANNNet, width=4), 1, 28),
    "dann-resnet18": (partial(DANNResNet18, width=4), 3, 32),
    "squeezenet": (partial(ZooNet, "squeezenet1_0"), 3, 64),
    "timm": (partial(ZooNet, "test_resnet", source="timm"), 3, 32),
}
FIXED_DEPTH = {ResNet32, WRN28_4}  # their classes' code is held by ResNet and WideResNet


def count(net):
    return sum(parameter.numel() for parameter in net.parameters())


def normalised(x):
    channels = x.shape[1]
    mean, std = torch.tensor(MEAN[:channels]), torch.tensor(STD[:channels])
    return (x - mean[:, None, None]) / std[:, None, None]


def test_every_network_is_in_the_list():
    with torch.device("meta"):
        kinds = {type(build()) for build, *_ in NETS.values()} | FIXED_DEPTH | {Normalize}
    kinds |= {nets.TransformersNet}  # tests/nets/test_hugging_face.py
    assert {kind for kind in vars(nets).values() if isinstance(kind, type)} == kinds


@pytest.mark.parametrize(("build", "channels", "size"), NETS.values(), ids=NETS.keys())
def test_contract(build, channels, size):
    """Logits; normalised inside; the trace keeps its check; BatchNorm folds away unnoticed."""
    torch.manual_seed(7)
    x, other = images(channels, size).double(), images(4 - channels, size).double()
    build = partial(build, classes=7)
    net = with_statistics(build(mean=MEAN[:channels], std=STD[:channels]).double(), x)
    raw = build(mean=[0] * channels, std=[1] * channels).double().eval()
    raw.load_state_dict(net.state_dict())
    traced = torch.fx.symbolic_trace(net)
    with torch.no_grad():
        logits = net(x)
        assert logits.shape == (len(x), 7)
        torch.testing.assert_close(raw(normalised(x)), logits)
        assert not torch.allclose(raw(x), logits)
        torch.testing.assert_close(traced(x), logits)
        with folded([net]):
            torch.testing.assert_close(net(x), logits)
    for model in (net, traced):
        with pytest.raises(ValueError, match=f"expects {channels} channels, got {4 - channels}"):
            model(other)


def small_images(net, stem):
    """Give a network of a library the stem that 32x32 images need."""
    width = net.get_submodule(stem).weight.shape[0]
    net.set_submodule(stem, nn.Conv2d(3, width, 3, padding=1, bias=False))
    return net


def tv_resnet(depths, features, classes=10):
    """torchvision's, of three or four stages from 64 channels."""
    import torchvision.models as tv

    net = small_images(tv.ResNet(tv.resnet.BasicBlock, [*depths, 1][:4]), "conv1")
    net.maxpool, net.fc = nn.Identity(), nn.Linear(features, classes)
    if len(depths) == 3:
        net.layer4 = nn.Identity()
    return net


def tv_vgg():
    import torchvision.models as tv

    features = tv.vgg.make_layers(tv.vgg.cfgs["D"], batch_norm=True)
    layers = {"features": features, "flat": nn.Flatten(), "classifier": nn.Linear(512, 10)}
    return nn.Sequential(OrderedDict(layers))


def timm_preact(depths, channels, stem):
    """timm's pre-activation ResNet, as it is when it has basic blocks and BatchNorm."""
    import timm.models
    from timm.layers import BatchNormAct2d, create_conv2d

    net = timm.models.resnetv2.ResNetV2(
        depths, channels, 10, stem_chs=stem, basic=True, bottle_ratio=1.0,
        conv_layer=create_conv2d, norm_layer=BatchNormAct2d,
    )  # fmt: skip
    net.stem.pool = nn.Identity()
    return small_images(net, "stem.conv")


def timm_mobilenet():
    import timm

    net = timm.create_model("mobilenetv1_100", num_classes=10)
    for layer in (net.conv_stem, net.blocks[2][0].conv_dw):  # CIFAR's strides
        layer.stride = (1, 1)
    for name, module in list(net.named_modules()):
        if isinstance(module, nn.ReLU6):
            net.set_submodule(name, nn.ReLU())
    return net


def dann_classifier(**options):
    net = DANNResNet18(**options)
    del net.discriminator, net.judge
    return net


STATISTICS = {"mean": MEAN, "std": STD}
TADV = {"depth": 14, "widths": (64, 128, 256), "shortcut": "B"}
REFERENCES = {
    "resnet-b": (partial(ResNet, **TADV), partial(tv_resnet, [2, 2, 2], 256)),
    "dann-resnet18": (dann_classifier, partial(tv_resnet, [2, 2, 2, 2], 512)),
    "vgg": (VGG16, tv_vgg),
    "preact": (
        partial(PreActResNet18, width=16),
        partial(timm_preact, [2, 2, 2, 2], (16, 32, 64, 128), 16),
    ),
    "wide": (partial(WideResNet, 16, 2), partial(timm_preact, [2, 2, 2], (32, 64, 128), 16)),
    "mobilenet": (MobileNetV1, timm_mobilenet),
}


def entries(net):
    """Names in one order for all: every block's layers, then all shortcuts."""
    return sorted(net.state_dict(), key=lambda name: "shortcut" in name.lower() or "down" in name)


@pytest.mark.parametrize(("build", "make"), REFERENCES.values(), ids=REFERENCES.keys())
def test_forward_equals_the_library(build, make):
    torch.manual_seed(1)
    x = images().double()
    net, reference = with_statistics(build(**STATISTICS).double(), x), make().double()
    names = dict(zip(entries(reference), entries(net), strict=True))
    state, old = net.state_dict(), reference.state_dict()
    reference.load_state_dict({n: state[names[n]].reshape(old[n].shape) for n in old})
    with torch.no_grad():
        expected = reference.eval()(normalised(x))
        torch.testing.assert_close(net(x), expected)
    assert expected.std(0).max() > 0.02


def test_padded_shortcut_by_hand():
    x = images(4, 6)
    out = PaddedShortcut(added=4, stride=2)(x)
    expected = F.pad(x[:, :, [0, 2, 4]][..., [0, 2, 4]], (0, 0, 0, 0, 2, 2))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("layer", [PaddedShortcut(added=4, stride=2), spatial_mean])
def test_gradient_of_a_layer_has_the_memory_format_of_its_input(layer, memory_format):
    x = images(4, 6).contiguous(memory_format=memory_format).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x.relu()).square().sum(), x)
    y = x.detach().contiguous().requires_grad_()
    plain = y.relu().mean((2, 3)) if layer is spatial_mean else y.relu()[:, :, ::2, ::2]
    (expected,) = torch.autograd.grad(plain.square().sum(), y)
    assert gradient.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(gradient, expected)


COUNTS = [
    (MobileNetV1, 3_217_226),
    (VGG16, 14_728_266),
    (partial(WideResNet, 28, 10), 36_479_194),
    (partial(WideResNet, 16, 10), 17_116_634),
    (WRN28_4, 5_849_050),
    (partial(WRN28_4, classes=100), 5_849_050 + 90 * 257),
    (ResNet20, 269_722),
    (ResNet32, 464_154),
    (partial(ResNet, 20, widths=(64, 128, 256), shortcut="B"), 4_327_754),  # TADV's 4.33M
    (LeNet, 832 + 51_264 + 3_212_288 + 10_250),
    (AthenaCNN, 320 + 18_496 + 6_557_696 + 40_970),
    (PreActResNet18, 11_171_146 + 2 * 512),  # ARC has a batch norm before the pool
    (DANNNet, 2_736_780),  # appendix A.4.1
    (DANNResNet18, 11_173_962 + 8_394_754),  # and its discriminator, of appendix A.4.2
]


def test_published_parameter_counts():
    for build, expected in COUNTS:
        with torch.device("meta"):
            assert count(build()) == expected, build


def test_dann_has_the_papers_numbers():
    net, small = DANNNet(), DANNResNet18(width=4)
    assert (net.normalize.mean.item(), net.normalize.std.item()) == pytest.approx((0.1307, 0.3015))
    assert [m.p for m in net.modules() if isinstance(m, nn.Dropout2d)] == [0.5]
    assert small.discriminator(torch.rand(2, 16, 8, 8)).shape == (2, 32, 4, 4)


NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def names_of(layers, fields):
    return {f"{layer}.{field}" for layer in layers for field in fields}


def test_entries_are_named_as_published():
    names = set(ResNet20(shortcut="B").state_dict())
    expected = {"conv1.weight", "bn1.running_mean", "layer1.0.conv1.weight", "layer3.2.bn2.bias"}
    assert expected | {"layer2.0.shortcut.0.weight", "linear.bias"} <= names
    assert not {name for name in ResNet20().state_dict() if "shortcut" in name or "norm" in name}
    with torch.device("meta"):
        built = [build().state_dict().keys() for build in (PreActResNet18, MobileNetV1, VGG16)]
        wide = WRN28_4().state_dict().keys()
    preact, mobile, vgg = map(set, built)
    assert {"layer1.0.bn1.weight", "layer4.0.shortcut.0.weight", "bn.weight"} <= preact
    head = {"classifier.weight", "classifier.bias"}
    convs = ["features.0.0"] + [f"features.{i}.{j}" for i in range(1, 14) for j in (0, 3)]
    norms = ["features.0.1"] + [f"features.{i}.{j}" for i in range(1, 14) for j in (1, 4)]
    assert mobile == names_of(convs, ["weight"]) | names_of(norms, NORM) | head
    assert vgg == {n for n in tv_vgg().state_dict() if n.startswith("features.")} | head
    blocks = [f"block{i}.layer.{j}" for i in (1, 2, 3) for j in range(4)]
    norms = ["bn1", *(f"{block}.bn{i}" for block in blocks for i in (1, 2))]
    convs = ["conv1", *(f"{block}.conv{i}" for block in blocks for i in (1, 2))]
    convs += [f"block{i}.layer.0.convShortcut" for i in (1, 2, 3)]
    assert set(wide) == names_of(convs, ["weight"]) | names_of(norms, NORM) | names_of(
        ["fc"], ["weight", "bias"]
    )


def test_kaiming_initialization():
    torch.manual_seed(0)
    net, wide = ResNet20(), WideResNet(10, 4)
    for layer in (net.layer3[1].conv1, net.layer2[2].conv2, net.linear):
        fan_in = layer.weight[0].numel()
        assert layer.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.1)
    for layer in (wide.conv1, wide.block2.layer[0].conv1, wide.block3.layer[0].convShortcut):
        fan_out = layer.out_channels * layer.kernel_size[0] ** 2
        assert layer.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)
    assert not wide.fc.bias.any()


def test_two_linear_layers_in_evaluation_are_one():
    torch.manual_seed(0)
    net, x = AthenaCNN(hidden=64).eval(), torch.rand(5, 1, 28, 28)
    step_by_step = net.linear(net.hidden(net.features(net.normalize(x))))
    assert torch.allclose(net(x), step_by_step, atol=1e-5)
    assert not torch.equal(net.train()(x), net(x))  # dropout


def test_same_padding_of_odd_sides():
    """As in TensorFlow, a stride of 2 rounds the sides up: 15 to 8, 8 to 4."""
    net = WideResNet(10, 1, activation="silu", same=True).eval()
    sides = []
    for block in (net.block2, net.block3):
        block.register_forward_hook(lambda _, __, out: sides.append(tuple(out.shape[2:])))
    net(torch.rand(2, 3, 15, 16))
    assert sides == [(8, 8), (4, 4)]


IMPOSSIBLE = [
    *((partial(WideResNet, d), rf"depth must be 6n \+ 4 .*got {d}") for d in (4, 20, 29)),
    *((partial(ResNet, d), rf"depth must be 6n \+ 2 .*got {d}") for d in (2, 18, 21, 34)),
    (partial(WideResNet, 10, 0), "widen must be at least 1, got 0"),
    (partial(PreActResNet18, shortcut="B"), "must be one of active, input, 3x3, got 'B'"),
    (partial(ResNet, shortcut="C"), "shortcut must be 'A' or 'B', got 'C'"),
    (partial(DANNNet, size=15), "size must be at least 16 pixels, got 15"),
    (partial(Normalize, (0.5,), (0.5, 0.5)), "mean has 1 channels, std has 2"),
    (partial(Normalize, (0.5,), (0,)), r"std must be positive, got \[0\]"),
    (partial(SmallCNN, channels=2), "images of 2 channels need a mean and a std"),
    (partial(SmallCNN, channels=3, mean=[0.5], std=[1]), "3 channels, but mean and std have 1"),
    (lambda: ResNet(**TINY)(images()[0]), r"\[B, C, H, W\], got \[3, 32, 32\]"),
]


def test_what_cannot_be_built_says_why():
    for build, message in IMPOSSIBLE:
        with pytest.raises(ValueError, match=message):
            build()
