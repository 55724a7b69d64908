import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn
from torch.nn import functional as F

from lightning_rob.nets import (
    LeNet,
    MNISTNet,
    Normalize,
    PreActResNet18,
    ResNet,
    ResNet20,
    ResNet32,
    SmallCNN,
    ZooNet,
    load_weights,
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
            module.momentum = 0.7
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
    "resnet20": (lambda **o: ResNet20(**o), 3, 32),
    "resnet-b": (lambda **o: ResNet(**TINY, shortcut="B", **o), 3, 32),
    "preact": (lambda **o: PreActResNet18(**o), 3, 32),
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


def test_published_parameter_counts():
    assert count(ResNet20()) == 269_722
    assert count(ResNet32()) == 464_154
    # TADV's 4.33M
    assert count(ResNet20(widths=(64, 128, 256), shortcut="B")) == 4_327_754
    assert count(LeNet()) == 832 + 51_264 + 3_212_288 + 10_250
    # 11,171,146 without the batch norm before the pool, which ARC has
    assert count(PreActResNet18()) == 11_171_146 + 2 * 512


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


@every_net
def test_normalises_inside(build, channels, size):
    mean, std = MEAN[:channels], STD[:channels]
    net = build(mean=mean, std=std).eval()
    raw = build(mean=[0] * channels, std=[1] * channels).eval()
    raw.load_state_dict(net.state_dict())
    x = images(channels, size)
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
    with pytest.raises(ValueError, match="does not fit SmallCNN: 17 missing"):
        load_weights(small(), ensemble[1], prefix=prefix)


@pytest.mark.parametrize(
    ("saved", "net", "message"),
    [
        (
            {"depth": 14, "widths": (4, 8, 16)},
            TINY,
            r"36 unexpected \(layer1.1.conv1.weight, layer1.1.bn1.weight, layer1.1.bn1.bias, …\)$",
        ),
        (TINY, {"depth": 14, "widths": (4, 8, 16)}, r"30 missing \(layer1.1.conv1.weight, .*…\)$"),
        (
            TINY | {"classes": 100},
            TINY,
            r"2 of another shape \(linear.weight \[100, 16\] instead of \[10, 16\], linear.bias",
        ),
        (TINY | {"shortcut": "B"}, TINY, r"12 unexpected \(layer2.0.shortcut.0.weight"),
        (TINY, TINY | {"shortcut": "B"}, r"10 missing \(layer2.0.shortcut.0.weight"),
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
    assert "\n" not in text
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
    "lenet": ("LeNet", {"size": 32}, LeNet),
    "mnist": ("MNISTNet", {"size": 32}, MNISTNet),
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


# ResNet alone is ambiguous once torchvision or timm has been imported
@pytest.mark.parametrize("kind", [ResNet20, ResNet32, PreActResNet18, SmallCNN, LeNet, MNISTNet])
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
