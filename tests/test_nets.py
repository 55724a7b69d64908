import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn
from torch.nn import functional as F

from lightning_rob.attacks.folding import folded
from lightning_rob.nets import (
    VGG16,
    WRN28_4,
    AthenaCNN,
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
    load_weights,
    member_prefixes,
)
from lightning_rob.nets.resnet import PaddedShortcut

MEAN, STD = (0.2, 0.4, 0.6), (0.5, 0.25, 0.125)
TINY = {"depth": 8, "widths": (4, 8, 16)}


def images(channels=3, size=32, batch=2):
    generator = torch.Generator().manual_seed(channels * size)
    return torch.rand((batch, channels, size, size), generator=generator)


def count(net):
    return sum(parameter.numel() for parameter in net.parameters())


def move_statistics(net, x):
    """Batch norm of an untrained network hides mistakes: its statistics are 0 and 1."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0  # less, and the signal is lost on its way through 27 layers
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    net.train()(x)
    return net.eval()


NETS = {
    "small-grey": (lambda **o: SmallCNN(width=4, **o), 1, 28),
    "small-colour": (lambda **o: SmallCNN(channels=3, width=4, **o), 3, 32),
    "mnist-28": (lambda **o: MNISTNet(width=4, **o), 1, 28),
    "mnist-32": (lambda **o: MNISTNet(width=4, channels=3, size=32, **o), 3, 32),
    "lenet-28": (lambda **o: LeNet(**o), 1, 28),
    "lenet-32": (lambda **o: LeNet(channels=3, size=32, **o), 3, 32),
    "athena-28": (lambda **o: AthenaCNN(hidden=32, **o), 1, 28),
    "athena-32": (lambda **o: AthenaCNN(channels=3, size=32, hidden=32, **o), 3, 32),
    "resnet20": (lambda **o: ResNet20(**o), 3, 32),
    "resnet-b": (lambda **o: ResNet(**TINY, shortcut="B", **o), 3, 32),
    "preact": (lambda **o: PreActResNet18(**o), 3, 32),
    "mobilenet": (lambda **o: MobileNetV1(**o), 3, 32),
    "vgg": (lambda **o: VGG16(**o), 3, 32),
    "wide": (lambda **o: WideResNet(16, 2, **o), 3, 32),
    "squeezenet": (lambda **o: ZooNet("squeezenet1_0", **o), 3, 64),
    "timm": (lambda **o: ZooNet("test_resnet", source="timm", **o), 3, 32),
}
every_net = pytest.mark.parametrize(("build", "channels", "size"), NETS.values(), ids=NETS.keys())


def resnet_parameters(n, widths, classes, option):
    a, b, c = widths
    kernels = 3 * a + 2 * n * a * a + a * b + (2 * n - 1) * b * b + b * c + (2 * n - 1) * c * c
    shortcuts = a * b + 2 * b + b * c + 2 * c if option == "B" else 0
    norms = 2 * (a + 2 * n * (a + b + c))
    return 9 * kernels + norms + shortcuts + (c + 1) * classes


@pytest.mark.parametrize(
    ("depth", "classes", "widths", "option"),
    [
        (20, 10, (16, 32, 64), "A"),
        (32, 100, (16, 32, 64), "B"),
        (8, 10, (4, 12, 24), "A"),
        (14, 3, (4, 8, 24), "B"),
    ],
)
def test_parameters_by_formula(depth, classes, widths, option):
    net = ResNet(depth, classes, widths, option)
    assert count(net) == resnet_parameters((depth - 2) // 6, widths, classes, option)


MOBILE_WIDTHS = [32, 64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024]
MOBILE_STRIDES = [1, 2, 1, 1, 1, 2, 1, 1, 1, 1, 1, 2, 1]
VGG_LAYERS = [64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0]


@pytest.mark.parametrize("classes", [10, 100])
def test_mobilenet_parameters_by_formula(classes):
    pairs = list(pairwise(MOBILE_WIDTHS))
    separable = sum(9 * a + 2 * a + a * b + 2 * b for a, b in pairs)
    assert count(MobileNetV1(classes)) == 27 * 32 + 2 * 32 + separable + 1025 * classes


@pytest.mark.parametrize("classes", [10, 100])
def test_vgg_parameters_by_formula(classes):
    widths = [3, *(width for width in VGG_LAYERS if width)]
    convolutions = sum(9 * a * b + b + 2 * b for a, b in pairwise(widths))
    assert count(VGG16(classes)) == convolutions + 513 * classes


def wide_parameters(n, k, classes):
    widths = [16, 16 * k, 32 * k, 64 * k]
    total = 27 * 16 + 2 * widths[-1] + (widths[-1] + 1) * classes
    for a, b in pairwise(widths):
        total += 9 * (a * b + (2 * n - 1) * b * b) + 2 * (a + (2 * n - 1) * b)
        total += a * b if a != b else 0
    return total


@pytest.mark.parametrize(("depth", "widen", "classes"), [(10, 1, 3), (16, 2, 10), (22, 3, 7)])
def test_wide_parameters_by_formula(depth, widen, classes):
    assert count(WideResNet(depth, widen, classes)) == wide_parameters(
        (depth - 4) // 6, widen, classes
    )


def test_published_parameter_counts():
    assert count(MobileNetV1()) == 3_217_226
    assert count(VGG16()) == 14_728_266
    with torch.device("meta"):
        assert count(WideResNet(28, 10)) == 36_479_194
        assert count(WideResNet(16, 10)) == 17_116_634
    assert count(WRN28_4()) == wide_parameters(4, 4, 10) == 5_849_050
    assert count(WRN28_4(classes=100)) == 5_849_050 + 90 * 257
    assert count(ResNet20()) == 269_722
    assert count(ResNet32()) == 464_154
    # TADV's 4.33M
    assert count(ResNet20(widths=(64, 128, 256), shortcut="B")) == 4_327_754
    assert count(LeNet()) == 832 + 51_264 + 3_212_288 + 10_250
    assert count(AthenaCNN()) == 320 + 18_496 + 6_557_696 + 40_970
    # 11,171,146 without the batch norm before the pool, which ARC has
    assert count(PreActResNet18()) == 11_171_146 + 2 * 512


def test_two_linear_layers_in_evaluation_are_one():
    torch.manual_seed(0)
    net, x = AthenaCNN(hidden=64).eval(), torch.rand(5, 1, 28, 28)
    step_by_step = net.linear(net.hidden(net.features(net.normalize(x))))
    assert torch.allclose(net(x), step_by_step, atol=1e-5)
    assert not torch.equal(net.train()(x), net(x))  # dropout


@every_net
def test_gives_logits(build, channels, size):
    net = build(classes=7).eval()
    with torch.no_grad():
        assert net(images(channels, size)).shape == (2, 7)


def test_entries_are_named_as_published():
    names = set(ResNet20(shortcut="B").state_dict())
    expected = {"conv1.weight", "bn1.running_mean", "layer1.0.conv1.weight", "layer3.2.bn2.bias"}
    assert expected | {"layer2.0.shortcut.0.weight", "linear.bias"} <= names
    assert not {name for name in ResNet20().state_dict() if "shortcut" in name or "norm" in name}
    preact = set(PreActResNet18().state_dict())
    assert {"layer1.0.bn1.weight", "layer4.0.shortcut.0.weight", "bn.weight"} <= preact


def names_of(layers, fields):
    return {f"{layer}.{field}" for layer in layers for field in fields}


NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def test_entries_of_the_other_cifar_networks_are_named_as_published():
    convs = ["features.0.0"] + [f"features.{i}.{j}" for i in range(1, 14) for j in (0, 3)]
    norms = ["features.0.1"] + [f"features.{i}.{j}" for i in range(1, 14) for j in (1, 4)]
    head = {"classifier.weight", "classifier.bias"}
    assert set(MobileNetV1().state_dict()) == (
        names_of(convs, ["weight"]) | names_of(norms, NORM) | head
    )
    at, convs = 0, []
    for width in VGG_LAYERS:
        convs += [at] if width else []
        at += 3 if width else 1
    norms = [f"features.{i + 1}" for i in convs]
    convs = [f"features.{i}" for i in convs]
    assert set(VGG16().state_dict()) == (
        names_of(convs, ["weight", "bias"]) | names_of(norms, NORM) | head
    )
    blocks = [f"block{i}.layer.{j}" for i in (1, 2, 3) for j in range(4)]
    norms = ["bn1", *(f"{block}.bn{i}" for block in blocks for i in (1, 2))]
    convs = ["conv1", *(f"{block}.conv{i}" for block in blocks for i in (1, 2))]
    convs += [f"block{i}.layer.0.convShortcut" for i in (1, 2, 3)]
    assert set(WRN28_4().state_dict()) == (
        names_of(convs, ["weight"]) | names_of(norms, NORM) | {"fc.weight", "fc.bias"}
    )


def test_wide_init():
    torch.manual_seed(0)
    net = WideResNet(10, 4)
    for layer in (net.conv1, net.block2.layer[0].conv1, net.block3.layer[0].convShortcut):
        fan_out = layer.out_channels * layer.kernel_size[0] ** 2
        assert layer.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)
    assert not net.fc.bias.any()


@pytest.mark.parametrize("depth", [4, 20, 29])
def test_impossible_wide_depth(depth):
    with pytest.raises(ValueError, match=rf"depth must be 6n \+ 4 .*got {depth}"):
        WideResNet(depth)


def test_impossible_wide_width():
    with pytest.raises(ValueError, match="widen must be at least 1, got 0"):
        WideResNet(10, 0)


def test_kaiming_normal_init():
    torch.manual_seed(0)
    net = ResNet20()
    for layer in (net.layer3[1].conv1, net.layer2[2].conv2, net.linear):
        fan_in = layer.weight[0].numel()
        assert layer.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.1)


@pytest.mark.parametrize("depth", [2, 18, 21, 34])
def test_impossible_depth(depth):
    with pytest.raises(ValueError, match=rf"depth must be 6n \+ 2 .*got {depth}"):
        ResNet(depth)


def test_impossible_shortcut():
    with pytest.raises(ValueError, match="shortcut must be 'A' or 'B', got 'C'"):
        ResNet(shortcut="C")


def test_padded_shortcut_by_hand():
    x = images(4, 6)
    out = PaddedShortcut(added=4, stride=2)(x)
    expected = torch.zeros(2, 8, 3, 3)
    for channel in range(4):
        for row in range(3):
            for column in range(3):
                expected[:, channel + 8 // 4, row, column] = x[:, channel, 2 * row, 2 * column]
    assert torch.equal(out, expected)


def norm(s, name, x):
    mean, var = s[f"{name}.running_mean"], s[f"{name}.running_var"]
    return F.batch_norm(x, mean, var, s[f"{name}.weight"], s[f"{name}.bias"])


def option_a(s, name, x, planes, stride):
    if stride == 1:
        return x
    return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, planes // 4, planes // 4))


def option_b(s, name, x, planes, stride):
    if stride == 1:
        return x
    projected = F.conv2d(x, s[f"{name}.shortcut.0.weight"], stride=2)
    return norm(s, f"{name}.shortcut.1", projected)


@pytest.mark.parametrize("option", ["A", "B"])
def test_resnet_by_hand(option):
    torch.manual_seed(1)
    x = images()
    net = move_statistics(ResNet(14, widths=(4, 8, 16), shortcut=option, mean=MEAN, std=STD), x)
    s, shortcut = net.state_dict(), {"A": option_a, "B": option_b}[option]
    h = (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    h = norm(s, "bn1", F.conv2d(h, s["conv1.weight"], padding=1)).relu()
    for layer, planes in enumerate((4, 8, 16), start=1):
        for block in range(2):
            name, stride = f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1
            skip = shortcut(s, name, h, planes, stride)
            h = F.conv2d(h, s[f"{name}.conv1.weight"], stride=stride, padding=1)
            h = F.conv2d(norm(s, f"{name}.bn1", h).relu(), s[f"{name}.conv2.weight"], padding=1)
            h = (norm(s, f"{name}.bn2", h) + skip).relu()
    h = F.avg_pool2d(h, 8).flatten(1)
    expected = F.linear(h, s["linear.weight"], s["linear.bias"])
    torch.testing.assert_close(net(x), expected)


def test_preact_by_hand():
    torch.manual_seed(2)
    x = images()
    net = move_statistics(PreActResNet18(mean=MEAN, std=STD), x)
    s = net.state_dict()
    h = (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    h = F.conv2d(h, s["conv1.weight"], padding=1)
    for name in (f"layer{layer}.{block}" for layer in range(1, 5) for block in range(2)):
        first = name in ("layer2.0", "layer3.0", "layer4.0")
        active = norm(s, f"{name}.bn1", h).relu()
        skip = F.conv2d(active, s[f"{name}.shortcut.0.weight"], stride=2) if first else h
        h = F.conv2d(active, s[f"{name}.conv1.weight"], stride=1 + first, padding=1)
        h = F.conv2d(norm(s, f"{name}.bn2", h).relu(), s[f"{name}.conv2.weight"], padding=1) + skip
    h = F.avg_pool2d(norm(s, "bn", h).relu(), 4).flatten(1)
    expected = F.linear(h, s["linear.weight"], s["linear.bias"])
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)


def normalised(x):
    return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def conv(s, name, x, **options):
    return F.conv2d(x, s[f"{name}.weight"], s.get(f"{name}.bias"), **options)


def test_mobilenet_by_hand():
    torch.manual_seed(3)
    x = images(batch=4).double()
    net = move_statistics(MobileNetV1(mean=MEAN, std=STD).double(), x)
    s = net.state_dict()
    h = norm(s, "features.0.1", conv(s, "features.0.0", normalised(x), padding=1)).relu()
    for i, stride in enumerate(MOBILE_STRIDES, start=1):
        each = {"stride": stride, "padding": 1, "groups": h.shape[1]}
        h = norm(s, f"features.{i}.1", conv(s, f"features.{i}.0", h, **each)).relu()
        h = norm(s, f"features.{i}.4", conv(s, f"features.{i}.3", h)).relu()
    assert h.shape == (4, 1024, 4, 4)
    expected = F.linear(F.avg_pool2d(h, 4).flatten(1), s["classifier.weight"], s["classifier.bias"])
    torch.testing.assert_close(net(x), expected)
    assert expected.std(0).max() > 0.02


def test_vgg_by_hand():
    torch.manual_seed(4)
    x = images(batch=4).double()
    net = move_statistics(VGG16(mean=MEAN, std=STD).double(), x)
    s, h, at = net.state_dict(), normalised(x), 0
    for width in VGG_LAYERS:
        if width:
            h = norm(s, f"features.{at + 1}", conv(s, f"features.{at}", h, padding=1)).relu()
        else:
            h = F.max_pool2d(h, 2)
        at += 3 if width else 1
    assert h.shape == (4, 512, 1, 1)
    expected = F.linear(h.flatten(1), s["classifier.weight"], s["classifier.bias"])
    torch.testing.assert_close(net(x), expected)
    assert expected.std(0).max() > 0.02


def test_wide_by_hand():
    torch.manual_seed(5)
    x = images().double()
    net = move_statistics(WideResNet(16, 2, mean=MEAN, std=STD).double(), x)
    s = net.state_dict()
    h = conv(s, "conv1", normalised(x), padding=1)
    for name in (f"block{stage}.layer.{block}" for stage in (1, 2, 3) for block in range(2)):
        stride = 2 if name in ("block2.layer.0", "block3.layer.0") else 1
        active = norm(s, f"{name}.bn1", h).relu()
        skip = conv(s, f"{name}.convShortcut", active, stride=stride) if name[-1] == "0" else h
        h = conv(s, f"{name}.conv1", active, stride=stride, padding=1)
        h = conv(s, f"{name}.conv2", norm(s, f"{name}.bn2", h).relu(), padding=1) + skip
    h = F.avg_pool2d(norm(s, "bn1", h).relu(), 8).flatten(1)
    expected = F.linear(h, s["fc.weight"], s["fc.bias"])
    torch.testing.assert_close(net(x), expected)
    assert expected.std(0).max() > 0.02


@every_net
def test_normalises_inside(build, channels, size):
    torch.manual_seed(7)
    mean, std = MEAN[:channels], STD[:channels]
    x = images(channels, size)
    net = move_statistics(build(mean=mean, std=std), x)
    raw = build(mean=[0] * channels, std=[1] * channels).eval()
    raw.load_state_dict(net.state_dict())
    by_hand = (x - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    with torch.no_grad():
        torch.testing.assert_close(net(x), raw(by_hand))
        assert not torch.allclose(net(x), raw(x))


def test_usual_statistics_follow_the_channels():
    assert SmallCNN().normalize.mean.flatten().tolist() == pytest.approx([0.1307])
    assert LeNet(channels=3).normalize.std.flatten().tolist() == pytest.approx(
        [0.2471, 0.2435, 0.2616]
    )


@every_net
def test_wrong_channels(build, channels, size):
    with pytest.raises(
        ValueError, match=f"network expects {channels} channels, got {4 - channels}"
    ):
        build()(images(4 - channels, size))


def test_wrong_dimensions():
    with pytest.raises(ValueError, match=r"\[B, C, H, W\], got \[3, 32, 32\]"):
        ResNet(**TINY)(images()[0])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Normalize((0.5,), (0.5, 0.5)), "mean has 1 channels, std has 2"),
        (lambda: Normalize((0.5,), (0,)), r"std must be positive, got \[0\]"),
        (lambda: SmallCNN(channels=2), "images of 2 channels need a mean and a std"),
        (lambda: SmallCNN(channels=3, mean=[0.5], std=[1]), "3 channels, but mean and std have 1"),
    ],
)
def test_impossible_statistics(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_other_channels_with_their_statistics():
    net = SmallCNN(channels=2, width=4, mean=[0.1, 0.2], std=[1, 1])
    assert net(images(2)).shape == (2, 10)


@every_net
def test_traces(build, channels, size):
    x = images(channels, size)
    net = move_statistics(build(), x)
    traced = torch.fx.symbolic_trace(net)
    with torch.no_grad():
        torch.testing.assert_close(traced(x), net(x))
    with pytest.raises(ValueError, match=f"network expects {channels} channels"):
        traced(images(4 - channels, size))


def test_batch_norm_folds_away():
    from torch.fx.experimental.optimization import fuse

    x = images()
    net = move_statistics(ResNet20(), x)
    folded = fuse(net)
    assert not [m for m in folded.modules() if isinstance(m, nn.BatchNorm2d)]
    with torch.no_grad():
        torch.testing.assert_close(folded(x), net(x), rtol=1e-4, atol=1e-4)


FOLDED = {
    "mobilenet": (MobileNetV1, 0),
    "vgg": (VGG16, 0),
    "wide": (WRN28_4, 12),  # the norms that follow a sum, not a convolution
    "resnet18": (lambda: ZooNet("resnet18"), 0),
}


@pytest.mark.parametrize(("make", "left"), FOLDED.values(), ids=FOLDED.keys())
def test_folds_for_an_attack(make, left):
    torch.manual_seed(6)
    x = images(batch=4).double().requires_grad_()
    net = move_statistics(make().double(), x.detach())
    before = net(x)
    (slope,) = torch.autograd.grad(before.square().sum(), x)
    with folded([net]):
        norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
        assert sum("forward" not in vars(m) for m in norms) == left
        after = net(x)
        (other,) = torch.autograd.grad(after.square().sum(), x)
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(other, slope, rtol=1e-6, atol=1e-6 * float(slope.abs().max()))


def test_torchvision_by_name():
    from torchvision.models import squeezenet1_0

    torch.manual_seed(0)
    net = ZooNet("squeezenet1_0", classes=5).eval()
    torch.manual_seed(0)
    plain = squeezenet1_0(num_classes=5).eval()
    imagenet = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    mean, std = (numbers[:, None, None] for numbers in imagenet)
    x = images(size=64)
    with torch.no_grad():
        torch.testing.assert_close(net(x), plain((x - mean) / std))


def test_timm_says_its_statistics():
    net = ZooNet("test_vit", source="timm")
    assert net.normalize.mean.flatten().tolist() == [0.5, 0.5, 0.5]
    assert net.normalize.std.flatten().tolist() == [0.5, 0.5, 0.5]


@pytest.fixture
def downloaded(tmp_path, monkeypatch):
    """Random weights in the place to which torchvision downloads those of SqueezeNet."""
    from torchvision.models import SqueezeNet1_0_Weights, squeezenet1_0

    file = SqueezeNet1_0_Weights.DEFAULT.url.rsplit("/", 1)[1]
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    state = squeezenet1_0().state_dict()
    torch.save(state, tmp_path / "hub" / "checkpoints" / file)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    return state


def test_named_weights(downloaded):
    net = ZooNet("squeezenet1_0", weights="IMAGENET1K_V1", classes=1000)
    for name, entry in net.net.state_dict().items():
        assert torch.equal(entry, downloaded[name])


def test_named_weights_with_a_new_head(downloaded):
    net = ZooNet("squeezenet1_0", weights="DEFAULT", classes=4).net
    assert torch.equal(net.state_dict()["features.0.weight"], downloaded["features.0.weight"])
    assert net.classifier[1].weight.shape == (4, 512, 1, 1)
    assert net(images(size=64)).shape == (2, 4)


def test_zoo_weights_from_a_file(tmp_path):
    saved = ZooNet("squeezenet1_0")
    torch.save({"state_dict": saved.state_dict()}, tmp_path / "squeeze.ckpt")
    net = ZooNet("squeezenet1_0", weights=str(tmp_path / "squeeze.ckpt"))
    assert torch.equal(net.net.classifier[1].weight, saved.net.classifier[1].weight)


def test_auxiliary_logits_are_left_out():
    with pytest.warns(FutureWarning, match="initialization"):
        net = ZooNet("googlenet")
    assert net.train()(images()).shape == (2, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "resnet19"}, "no torchvision network 'resnet19', did you mean .*resnet18"),
        ({"name": "resnet10x", "source": "timm"}, "no timm network 'resnet10x', .*resnet10t"),
        ({"name": "fcn_resnet50"}, "no torchvision network 'fcn_resnet50'"),
        ({"name": "?"}, r"no torchvision network '\?'$"),
        ({"name": "resnet18", "source": "tim"}, "no zoo 'tim', did you mean timm"),
        ({"name": "squeezenet1_0", "weights": "IMAGENET1K"}, "no weights of squeezenet1_0"),
        ({"name": "resnet10t", "source": "timm", "weights": "c3"}, "no weights of .* c3_in1k"),
    ],
)
def test_unknown_to_the_zoo(options, message):
    with pytest.raises(ValueError, match=message):
        ZooNet(**options)


def test_timm_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r'pip install "lightning-rob\[timm\]"'):
        ZooNet("resnet10t", source="timm")


def test_imports_neither_lightning_nor_a_zoo():
    code = "import sys, lightning_rob.nets; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"lightning", "torchvision", "timm"} & set(out.stdout.split())


def small(seed=0, **options):
    torch.manual_seed(seed)
    return SmallCNN(**{"width": 4, **options})


def under(prefix, state):
    return {prefix + name: entry for name, entry in state.items()}


LAYOUTS = {
    "plain": lambda s: s,
    "state_dict": lambda s: {"epoch": 3, "state_dict": s},
    "model": lambda s: {"model": s, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}},
    "last": lambda s: {"last": s},
    "best": lambda s: {"best": s, "acc": torch.tensor(0.5)},
    "parallel": lambda s: under("module.", s),
    "both": lambda s: {"state_dict": under("module.model.", s)},
    "lightning": lambda s: {
        "state_dict": under("defense.net.", s) | {"threshold": torch.zeros(3)},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{}]}],
        "hyper_parameters": {"lr": 0.1},
    },
    "list": lambda s: {"members": [s]},
    "old": lambda s: {k: v for k, v in s.items() if "num_batches_tracked" not in k},
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_finds_the_network(layout, legacy, tmp_path):
    saved = move_statistics(small(1), images(1, 28))
    file = tmp_path / "net.pt"
    torch.save(layout(saved.state_dict()), file, _use_new_zipfile_serialization=not legacy)
    net = small(2)
    assert load_weights(net, file) is net
    assert torch.equal(net.eval()(images(1, 28)), saved(images(1, 28)))


@pytest.fixture
def ensemble(tmp_path):
    members = [small(1), small(2), small(3, classes=3)]
    state = {}
    for index, member in enumerate(members):
        state |= under(f"members.{index}.", member.state_dict())
    torch.save({"state_dict": state}, tmp_path / "ensemble.ckpt")
    return members, tmp_path / "ensemble.ckpt"


def test_several_networks(ensemble):
    with pytest.raises(ValueError, match="prefix= one of") as caught:
        load_weights(small(), ensemble[1])
    assert "'state_dict.members.0', 'state_dict.members.1'" in str(caught.value)
    assert "members.2" not in str(caught.value)


@pytest.mark.parametrize("prefix", ["members.1", "state_dict.members.1"])
def test_one_of_several(ensemble, prefix):
    members, file = ensemble
    net = load_weights(small(), file, prefix=prefix)
    assert torch.equal(net.linear.weight, members[1].linear.weight)


def test_the_only_one_that_fits(ensemble):
    members, file = ensemble
    net = load_weights(small(classes=3), file)
    assert torch.equal(net.linear.weight, members[2].linear.weight)


@pytest.mark.parametrize("prefix", ["members.7", "embers.1", ""])
def test_nothing_under_the_prefix(ensemble, prefix):
    known = "'state_dict.members.0', 'state_dict.members.1'$"
    with pytest.raises(ValueError, match=f"no SmallCNN under '{prefix}': pass .* {known}"):
        load_weights(small(), ensemble[1], prefix=prefix)


def test_another_network_under_the_prefix(ensemble):
    with pytest.raises(ValueError, match=r"members.2'\) does not fit SmallCNN: 2 of another shape"):
        load_weights(small(), ensemble[1], prefix="members.2")


def same(one, other):
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_prefix_may_end_before_the_network(tmp_path):
    nets = [small(1), small(2)]
    state = {f"model{i}": under("module.", net.state_dict()) for i, net in enumerate(nets)}
    torch.save(state, tmp_path / "nets.pt")
    assert same(load_weights(small(), tmp_path / "nets.pt", prefix="model1"), nets[1])
    with pytest.raises(ValueError, match=r"several .* 'model0.module', 'model1.module'$"):
        load_weights(small(), tmp_path / "nets.pt", prefix="module")


def test_renames_components(tmp_path):
    saved = small(1)
    old = {n.replace("linear.", "fc."): entry for n, entry in saved.state_dict().items()}
    old = {n.replace("layer2.0.", "conv."): entry for n, entry in old.items()}
    torch.save({"fc": old}, tmp_path / "net.pt")
    with pytest.raises(ValueError, match="missing"):
        load_weights(small(), tmp_path / "net.pt")
    rename = {"fc": "linear", "conv": "layer2.0"}
    assert same(load_weights(small(), tmp_path / "net.pt", rename=rename), saved)


def test_rename_must_not_make_two_of_one(tmp_path):
    state = small(1).state_dict()
    torch.save(state | {"fc.bias": state["linear.bias"]}, tmp_path / "net.pt")
    with pytest.raises(ValueError, match=r"\{'fc': 'linear'\} gives two .* linear.bias"):
        load_weights(small(), tmp_path / "net.pt", rename={"fc": "linear"})


def test_drops_what_is_no_part_of_the_network(tmp_path):
    saved = WideResNet(10, 1)
    dead = under("sub_block1.", WideResNet(10, 1).block1.state_dict())
    torch.save({"state_dict": under("module.", saved.state_dict() | dead)}, tmp_path / "net.pt")
    with pytest.raises(ValueError, match=r"12 unexpected \(\s+sub_block1"):
        load_weights(WideResNet(10, 1), tmp_path / "net.pt")
    loaded = load_weights(WideResNet(10, 1), tmp_path / "net.pt", drop=["sub_block1."])
    assert same(loaded, saved)
    with pytest.raises(ValueError, match=r"unexpected \(\s*sub_block1"):
        load_weights(WideResNet(10, 1), tmp_path / "net.pt", drop=["block1.layer.9", "lock1."])


OTHER_MEAN, OTHER_STD = (0.49, 0.48, 0.45), (0.2023, 0.1994, 0.2010)
DVERGE = {"rename": {"fc": "linear", "downsample": "shortcut"}}


def dverge_state(net, mean=OTHER_MEAN, std=OTHER_STD):
    """A member as the authors of DVERGE save it."""
    names = {n: n.replace("linear", "fc").replace("shortcut", "downsample") for n in net}
    state = {f"model.{names[n]}": entry for n, entry in net.items()}
    return state | {"normalizer.mean": torch.tensor(mean), "normalizer.std": torch.tensor(std)}


@pytest.fixture
def dverge(tmp_path):
    nets = [ResNet(**TINY, shortcut="B") for _ in range(3)]
    states = [dverge_state(net.state_dict()) for net in nets]
    states[2] = dverge_state(nets[2].state_dict(), MEAN, STD)
    torch.save({f"model{i}": state for i, state in enumerate(states)}, tmp_path / "epoch_200.pth")
    return nets, tmp_path / "epoch_200.pth"


@pytest.mark.parametrize("prefix", ["model1", "model1.model"])
def test_dverge_member_with_the_statistics_of_the_first(dverge, prefix):
    nets, file = dverge
    net = load_weights(
        ResNet(**TINY, shortcut="B"), file, prefix, **DVERGE, normalizer="model0.normalizer"
    )
    assert same(net, nets[1])
    by_hand = ResNet(**TINY, shortcut="B", mean=OTHER_MEAN, std=OTHER_STD)
    by_hand.load_state_dict(nets[1].state_dict())
    assert torch.equal(net.eval()(images()), by_hand.eval()(images()))


def test_statistics_are_not_ignored_by_mistake(dverge):
    nets, file = dverge
    net = ResNet(**TINY, shortcut="B")
    with pytest.raises(ValueError, match=r"normalises by \[0.49, .*\(model0.normalizer\), ResNet"):
        load_weights(net, file, "model1", **DVERGE)
    for drop in (["normalizer."], ["normalizer.mean", "normalizer.std"]):
        assert same(load_weights(net, file, "model1", **DVERGE, drop=drop), nets[1])
    assert net.normalize.mean.flatten().tolist() == pytest.approx([0.4914, 0.4822, 0.4465])


def test_statistics_that_agree_need_no_word(tmp_path):
    saved = ResNet(**TINY, shortcut="B")
    torch.save(dverge_state(saved.state_dict()), tmp_path / "net.pt")
    net = ResNet(**TINY, shortcut="B", mean=OTHER_MEAN, std=OTHER_STD)
    assert same(load_weights(net, tmp_path / "net.pt", **DVERGE), saved)


@pytest.mark.parametrize("shape", [(), (1,), (5,)])
def test_a_mean_and_a_std_of_something_else(shape, tmp_path):
    saved = ResNet(**TINY)
    log = {"loss": {"mean": torch.ones(shape), "std": torch.ones(shape)}}
    torch.save({"state_dict": saved.state_dict(), **log}, tmp_path / "net.pt")
    assert same(load_weights(ResNet(**TINY), tmp_path / "net.pt"), saved)


class Scaled(nn.Module):
    """Has weights called mean and std of its own."""

    def __init__(self):
        super().__init__()
        self.mean, self.std = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))


def test_a_mean_and_a_std_that_are_weights(tmp_path):
    saved = nn.Sequential(Scaled(), nn.Linear(3, 2))
    torch.save({"model": saved.state_dict()}, tmp_path / "net.pt")
    assert same(load_weights(nn.Sequential(Scaled(), nn.Linear(3, 2)), tmp_path / "net.pt"), saved)


def test_statistics_beside_the_weights(tmp_path):
    saved = ResNet(**TINY)
    shape = (1, 3, 1, 1)
    mean, std = torch.tensor(MEAN).view(shape), torch.tensor(STD).view(shape)
    numbers = {"normalize.mean": mean, "normalize.std": std}
    torch.save({"state_dict": saved.state_dict() | numbers}, tmp_path / "net.pt")
    net = load_weights(ResNet(**TINY), tmp_path / "net.pt", normalizer="normalize")
    assert same(net, saved)
    assert net.normalize.std.flatten().tolist() == list(STD)


@pytest.mark.parametrize(
    ("normalizer", "message"),
    [
        ("normalizer", r"several that differ: .* 'model0.normalizer', 'model1.normalizer'"),
        ("model7.normalizer", r"no mean and std under 'model7.normalizer', they are: 'model0"),
        ("ormalizer", "no mean and std under"),
    ],
)
def test_statistics_that_are_not_there(dverge, normalizer, message):
    net = ResNet(**TINY, shortcut="B")
    before = {name: entry.clone() for name, entry in net.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_weights(net, dverge[1], "model0", **DVERGE, normalizer=normalizer)
    assert all(torch.equal(entry, before[name]) for name, entry in net.state_dict().items())


def test_statistics_need_a_layer_that_takes_them(tmp_path):
    plain = nn.Sequential(nn.Flatten(), nn.Linear(12, 2), nn.ReLU())
    numbers = {"n.mean": torch.tensor(MEAN), "n.std": torch.tensor(STD)}
    torch.save(plain.state_dict() | numbers, tmp_path / "net.pt")
    with pytest.raises(ValueError, match=r"Sequential has no Normalize: pass .* drop="):
        load_weights(plain, tmp_path / "net.pt")
    with pytest.raises(ValueError, match="Sequential has no Normalize, got normalizer='n'"):
        load_weights(plain, tmp_path / "net.pt", normalizer="n")
    with pytest.raises(ValueError, match="statistics of 3 channels, expected 1"):
        small().normalize.take(torch.tensor([MEAN, STD]))


def test_members_of_a_file(ensemble, dverge):
    same_kind = ["state_dict.members.0", "state_dict.members.1"]
    assert member_prefixes([small()], ensemble[1]) == same_kind
    each = [small(), small(), small(classes=3)]
    assert member_prefixes(each, ensemble[1]) == [*same_kind, "state_dict.members.2"]
    found = member_prefixes([ResNet(**TINY, shortcut="B")], dverge[1], **DVERGE)
    assert found == ["model0.model", "model1.model", "model2.model"]


def test_members_stop_at_a_gap_and_keep_their_order(tmp_path):
    state = {f"net{i}": small(i).state_dict() for i in (10, 2, 12, *range(9, 2, -1), 1, 0)}
    torch.save(state, tmp_path / "nets.pt")
    assert member_prefixes([small()], tmp_path / "nets.pt") == [f"net{i}" for i in range(11)]


def test_members_that_cannot_be_told(tmp_path, ensemble):
    net = small().state_dict()
    torch.save({kind: {"0": net, "1": net} for kind in ("ema", "now")}, tmp_path / "two.pt")
    with pytest.raises(ValueError, match=r"several ensembles, .*: 'ema.0', 'now.0'"):
        member_prefixes([small()], tmp_path / "two.pt")
    assert member_prefixes([small()], tmp_path / "two.pt", "now") == ["now.0", "now.1"]
    torch.save(net, tmp_path / "one.pt")
    with pytest.raises(ValueError, match="no SmallCNN numbered from 0, only: ''"):
        member_prefixes([small()], tmp_path / "one.pt")
    with pytest.raises(ValueError, match="no SmallCNN numbered from 0"):
        member_prefixes([small(classes=3), small()], ensemble[1])


def test_a_zoo_network_takes_the_zoos_own_weights(tmp_path):
    saved = ZooNet("squeezenet1_0")
    torch.save({"state_dict": under("module.", saved.net.state_dict())}, tmp_path / "zoo.pt")
    assert same(load_weights(ZooNet("squeezenet1_0"), tmp_path / "zoo.pt"), saved)


@pytest.mark.parametrize(
    ("saved", "net", "message"),
    [
        (
            {"depth": 14, "widths": (4, 8, 16)},
            TINY,
            r"36 unexpected \(\s+layer1.1.conv1.weight, (.|\n)*layer3.1.bn2.num_batches_tracked\)$",
        ),
        (TINY, {"depth": 14, "widths": (4, 8, 16)}, r"30 missing \(\s+layer1.1.conv1.weight, "),
        (
            TINY | {"classes": 100},
            TINY,
            r"2 of another shape \(linear.weight \[100, 16\] instead of \[10, 16\], linear.bias",
        ),
        (TINY | {"shortcut": "B"}, TINY, r"12 unexpected \(\s+layer2.0.shortcut.0.weight"),
        (TINY, TINY | {"shortcut": "B"}, r"10 missing \(\s+layer2.0.shortcut.0.weight"),
    ],
    ids=["deeper", "shallower", "classes", "option-b", "option-a"],
)
def test_another_architecture(saved, net, message, tmp_path):
    torch.save({"model": ResNet(**saved).state_dict()}, tmp_path / "net.pt")
    net = ResNet(**net)
    before = {name: entry.clone() for name, entry in net.state_dict().items()}
    with pytest.raises(ValueError, match=message) as caught:
        load_weights(net, tmp_path / "net.pt")
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'net.pt'} (under 'model') does not fit ResNet: ")
    assert "…" not in text
    assert max(map(len, text.splitlines()[1:]), default=0) <= 100
    assert all(torch.equal(entry, before[name]) for name, entry in net.state_dict().items())


def saved_bytes(tree, path):
    torch.save(tree, path)
    return path.read_bytes()


BROKEN = {
    "html": lambda path: b"<!DOCTYPE html><html><body>404</body></html>",
    "empty": lambda path: b"",
    "bytes": lambda path: bytes(range(256)),
    "truncated": lambda path: saved_bytes(small().state_dict(), path)[:3000],
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_no_checkpoint(content, tmp_path):
    file = tmp_path / "net.pt"
    file.write_bytes(content(file))
    with pytest.raises(ValueError, match=r"net\.pt is not a PyTorch checkpoint.*") as caught:
        load_weights(small(), file)
    assert "\n" not in str(caught.value)


def test_no_weights(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "net.pt")
    with pytest.raises(ValueError, match="does not fit SmallCNN: 17 missing"):
        load_weights(small(), tmp_path / "net.pt")


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pt"):
        load_weights(small(), tmp_path / "nowhere.pt")


def test_runs_no_code(tmp_path):
    torch.save({"state_dict": small().state_dict(), "net": small()}, tmp_path / "net.pt")
    with pytest.raises(ValueError, match=r"holds a lightning_rob\.nets\.small\.SmallCNN"):
        load_weights(small(), tmp_path / "net.pt")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_must_be_finite(value, tmp_path):
    state = small().state_dict()
    state["linear.bias"][2] = value
    torch.save(state, tmp_path / "net.pt")
    with pytest.raises(ValueError, match=r"1 weights are not finite \(linear.bias\)"):
        load_weights(small(), tmp_path / "net.pt")


class Trio:
    def __init__(self, net: Callable[[], nn.Module]):
        self.nets = [net() for _ in range(3)]


class Solo:
    def __init__(self, net: nn.Module):
        self.net = net


def from_config(owner, net):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(owner, "owner")
    first = parser.parse_object({"owner": {"net": net}})
    written = parser.parse_string(parser.dump(first))
    return parser.instantiate(written).owner


FACTORIES = {
    "resnet": ("ResNet", {"depth": 14, "widths": [4, 8, 16], "shortcut": "B"}, ResNet),
    "resnet20": ("ResNet20", {"classes": 3, "mean": [0.5] * 3, "std": [0.5] * 3}, ResNet20),
    "resnet32": ("ResNet32", {}, ResNet32),
    "small": ("SmallCNN", {"channels": 3, "width": 8}, SmallCNN),
    "mobilenet": ("MobileNetV1", {"classes": 3}, MobileNetV1),
    "vgg": ("VGG16", {"mean": [0.5] * 3}, VGG16),
    "wide": ("WideResNet", {"depth": 10, "widen": 1}, WideResNet),
    "wrn": ("WRN28_4", {"classes": 100}, WRN28_4),
    "lenet": ("LeNet", {"size": 32}, LeNet),
    "mnist": ("MNISTNet", {"size": 32}, MNISTNet),
    "athena": ("AthenaCNN", {"hidden": 16}, AthenaCNN),
    "zoo": ("ZooNet", {"name": "test_resnet", "source": "timm", "classes": 3}, ZooNet),
}


@pytest.mark.parametrize(("name", "options", "kind"), FACTORIES.values(), ids=FACTORIES.keys())
def test_factory_from_config(name, options, kind):
    path = f"lightning_rob.nets.{name}"
    nets = from_config(Trio, {"class_path": path, "init_args": options}).nets
    assert [type(net) for net in nets] == [kind] * 3
    weights = [next(net.parameters()) for net in nets]
    assert not torch.equal(weights[0], weights[1])
    assert count(nets[0]) == count(kind(**options))


SHORT = [
    ResNet20,
    ResNet32,
    PreActResNet18,
    MobileNetV1,
    VGG16,
    WRN28_4,
    SmallCNN,
    LeNet,
    MNISTNet,
    AthenaCNN,
]


# ResNet alone is ambiguous once torchvision or timm has been imported
@pytest.mark.parametrize("kind", SHORT)
def test_factory_by_short_name(kind):
    nets = from_config(Trio, kind.__name__).nets
    assert [type(net) for net in nets] == [kind] * 3


def test_loaded_network_from_config(tmp_path):
    saved = small(5)
    torch.save({"state_dict": saved.state_dict()}, tmp_path / "net.pt")
    network = {"class_path": "lightning_rob.nets.SmallCNN", "init_args": {"width": 4}}
    options = {"net": network, "path": str(tmp_path / "net.pt")}
    spec = {"class_path": "lightning_rob.nets.load_weights", "init_args": options}
    net = from_config(Solo, spec).net
    assert torch.equal(net.linear.weight, saved.linear.weight)
