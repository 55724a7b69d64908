"""RobustBench's networks by name: files in its layout, against the formulas written out."""

import re

import pytest
import torch
from torch.nn import functional as F

from lightning_rob.nets import ZooNet
from lightning_rob.nets import robustbench as bench
from lightning_rob.nets.robustbench import CIFAR10, NETWORKS, gowal, gowal_preact, preact, wide
from tests.nets import images


class Formula:
    """Layers as functions of names; weights are drawn where a name is used first."""

    def __init__(self):
        self.state, self.random = {}, torch.Generator().manual_seed(3)

    def draw(self, name, *shape, low=-1.0, high=1.0):
        if name not in self.state:
            self.state[name] = torch.empty(shape).uniform_(low, high, generator=self.random)
        return self.state[name].double()

    def conv(self, name, x, width, size=3, stride=1, padding=1):
        bound = (3 / (x.shape[1] * size**2)) ** 0.5
        weight = self.draw(f"{name}.weight", width, x.shape[1], size, size, low=-bound, high=bound)
        return F.conv2d(x, weight, stride=stride, padding=padding)

    def norm(self, name, x):
        k = x.shape[1]
        mean, bias = self.draw(f"{name}.running_mean", k), self.draw(f"{name}.bias", k)
        var = self.draw(f"{name}.running_var", k, low=0.5, high=1.5)
        weight = self.draw(f"{name}.weight", k, low=0.5, high=1.5)
        self.state[f"{name}.num_batches_tracked"] = torch.tensor(7)
        return F.batch_norm(x, mean, var, weight, bias, eps=1e-5)

    def linear(self, name, x, classes=10):
        bound = (3 / x.shape[1]) ** 0.5
        weight = self.draw(f"{name}.weight", classes, x.shape[1], low=-bound, high=bound)
        return F.linear(x, weight, self.draw(f"{name}.bias", classes))

    def statistics(self, x, mean, std, names=None):
        mean, std = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)
        if names:
            self.state |= dict(zip(names, (mean, std), strict=True))
        return (x - mean.double()) / std.double()


def stages(widths, count, first="{}"):
    """Name, channels and stride of each residual block."""
    for k, width in enumerate(widths):
        for i in range(count if isinstance(count, int) else count[k]):
            yield first.format(k, k + 1) + f".{i}", width, 2 if i == 0 and k > 0 else 1


def trades(f, x):
    """WRN-16-2 of TRADES: the projection is of the activated input; no normalization."""
    x = f.conv("conv1", x, 16)
    for name, width, stride in stages((32, 64, 128), 2, "block{1}.layer"):
        active = f.norm(f"{name}.bn1", x).relu()
        y = f.norm(f"{name}.bn2", f.conv(f"{name}.conv1", active, width, stride=stride)).relu()
        if x.shape[1] != width:
            x = f.conv(f"{name}.convShortcut", active, width, 1, stride, 0)
        x = x + f.conv(f"{name}.conv2", y, width)
    x = f.norm("bn1", x).relu()
    return f.linear("fc", F.avg_pool2d(x, 8).flatten(1))


def rice(f, x):
    return trades(f, f.statistics(x, *CIFAR10, ("mu", "sigma")))


def swish(x):
    return x * x.sigmoid()


def same(x, stride):
    return F.pad(x, (1, 1, 1, 1) if stride == 1 else (0, 1, 0, 1))


def deepmind(f, x):
    """WRN-10-2 of Gowal et al.: Swish, SAME padding, statistics in the file."""
    x = f.conv("init_conv", f.statistics(x, *CIFAR10, ("mean", "std")), 16)
    for name, width, stride in stages((32, 64, 128), 1, "layer.{0}.block"):
        active = swish(f.norm(f"{name}.batchnorm_0", x))
        y = f.conv(f"{name}.conv_0", same(active, stride), width, stride=stride, padding=0)
        y = f.conv(f"{name}.conv_1", swish(f.norm(f"{name}.batchnorm_1", y)), width)
        if x.shape[1] != width:
            x = f.conv(f"{name}.shortcut", active, width, 1, stride, 0)
        x = x + y
    x = swish(f.norm("batchnorm", x))
    return f.linear("logits", F.avg_pool2d(x, 8).flatten(1))


def deepmind_preact(f, x):
    """PreActResNet-18 of Gowal et al., 4 channels wide: a 3x3 projection of the block's input."""
    x = f.conv("conv_2d", f.statistics(x, *CIFAR10, ("mean", "std")), 4)
    for name, width, stride in stages((4, 8, 16, 32), 2, "layer_{0}"):
        active = swish(f.norm(f"{name}.batchnorm_0", x))
        y = f.conv(f"{name}.conv_2d_1", same(active, stride), width, stride=stride, padding=0)
        y = f.conv(f"{name}.conv_2d_2", swish(f.norm(f"{name}.batchnorm_1", y)), width)
        if x.shape[1] != width:
            x = f.conv(f"{name}.shortcut", same(x, stride), width, 3, stride, 0)
        x = x + y
    x = swish(f.norm("batchnorm", x))
    return f.linear("logits", F.avg_pool2d(x, 4).flatten(1))


def preact_formula(first, of_active, norm):
    """PreActResNet-18 of Wong et al. or, with both options, of Rice et al."""

    def formula(f, x):
        x = f.conv("conv1", f.statistics(x, *CIFAR10), first)
        widths = [first * factor for factor in (1, 2, 4, 8)]
        for name, width, stride in stages(widths, 2, "layer{1}"):
            active = f.norm(f"{name}.bn1", x).relu()
            y = f.norm(f"{name}.bn2", f.conv(f"{name}.conv1", active, width, stride=stride)).relu()
            if x.shape[1] != width:
                source = active if of_active else x
                x = f.conv(f"{name}.shortcut.0", source, width, 1, stride, 0)
            x = x + f.conv(f"{name}.conv2", y, width)
        x = f.norm("bn", x).relu() if norm else x
        return f.linear("linear", F.avg_pool2d(x, 4).flatten(1))

    return formula


def resnet_formula(blocks, expansion, mean, std):
    """ResNet-18 (expansion 1) and ResNet-50 (expansion 4) for 32x32 images."""

    def formula(f, x):
        x = f.norm("bn1", f.conv("conv1", f.statistics(x, mean, std), 64)).relu()
        for name, width, stride in stages((64, 128, 256, 512), blocks, "layer{1}"):
            sizes = [(3, stride), (3, 1)] if expansion == 1 else [(1, 1), (3, stride), (1, 1)]
            y = x
            for i, (size, step) in enumerate(sizes, 1):
                out = width * (expansion if i == len(sizes) else 1)
                y = f.norm(
                    f"{name}.bn{i}", f.conv(f"{name}.conv{i}", y, out, size, step, size // 2)
                )
                y = y.relu() if i < len(sizes) else y
            if y.shape != x.shape:
                x = f.conv(f"{name}.shortcut.0", x, y.shape[1], 1, stride, 0)
                x = f.norm(f"{name}.shortcut.1", x)
            x = (x + y).relu()
        return f.linear("linear", F.avg_pool2d(x, 4).flatten(1))

    return formula


def parallel(state):
    return {"state_dict": {f"module.{name}": entry for name, entry in state.items()}, "epoch": 3}


def with_dead_stage(state):
    stage = {n: torch.zeros_like(e) for n, e in state.items() if n.startswith("block1.")}
    return parallel(state | {f"sub_{name}": entry for name, entry in stage.items()})


def two(state):
    best = {name: entry + 1 for name, entry in state.items()}
    return {"last": state, "best": best}


OLD = (0.2023, 0.1994, 0.2010)
FAMILIES = {
    "wide": (wide(16, 2), trades, with_dead_stage),
    "wide-mu": (
        wide(16, 2, CIFAR10),
        rice,
        lambda state: {"model." + n: e for n, e in state.items()},
    ),
    "gowal": (gowal(10, 2), deepmind, dict),
    "gowal-preact": (gowal_preact(width=4), deepmind_preact, parallel),
    "wong": (preact(CIFAR10, "last", width=4), preact_formula(4, False, False), two),
    "rice": (NETWORKS["cifar10/L2/Rice2020Overfitting"], preact_formula(64, True, True), dict),
    "resnet18": (bench.resnet(18), resnet_formula((2,) * 4, 1, *bench.RAW), parallel),
    "resnet50": (
        NETWORKS["cifar10/Linf/Engstrom2019Robustness"],
        resnet_formula((3, 4, 6, 3), 4, CIFAR10[0], OLD),
        dict,
    ),
}


@pytest.mark.parametrize(("published", "formula", "layout"), FAMILIES.values(), ids=FAMILIES)
def test_a_file_of_the_family_gives_the_logits_of_its_formula(
    published, formula, layout, tmp_path, monkeypatch
):
    f, x = Formula(), images().double()
    expected = formula(f, x)
    torch.save(layout(f.state), tmp_path / "net.pt")
    monkeypatch.setitem(NETWORKS, "cifar10/Linf/Some2020Paper", published)
    net = ZooNet("robustbench/Some2020Paper", weights=str(tmp_path / "net.pt"))
    with torch.no_grad():
        torch.testing.assert_close(net.double().eval()(x), expected, rtol=1e-6, atol=1e-6)
    assert expected.std(0).max() > 0.02


def build(name):
    with torch.device("meta"):
        return ZooNet(f"robustbench/{name}")


WRN_28_10, R18 = 36_479_194, 11_173_962
SIZES = {  # as published, or by the formula of the class
    "Carmon2019Unlabeled": WRN_28_10,
    "Gowal2020Uncovering_28_10_extra": WRN_28_10,
    "Rice2020Overfitting": 184_531_674,
    "cifar10/L2/Rice2020Overfitting": R18 - 1792,
    "Wong2020Fast": R18 - 2816,
    "Sehwag2021Proxy_R18": R18,
    "Engstrom2019Robustness": 23_520_842,
    "cifar100/Linf/Wang2023Better_WRN-28-10": WRN_28_10 + 90 * 641,
}


def test_names_choose_the_architecture():
    counts = {n: sum(p.numel() for p in build(n).parameters()) for n in SIZES}
    assert counts == SIZES
    assert build("Wong2020Fast").normalize.std.numel() == 3
    assert not any(block.projects_active for block in build("Wong2020Fast").net.layer2)
    assert all(b.projects_active for b in build("cifar100/Linf/Rice2020Overfitting").net.layer2)


def test_every_entry_has_the_depth_and_width_in_its_name():
    """A paper with several WideResNets names them, WRN-28-10 or 28_10."""
    for name, published in NETWORKS.items():
        numbers = [int(number) for number in re.findall(r"(?<![a-zA-Z0-9])\d+(?=[-_]|$)", name)]
        numbers += [int(number) for number in re.findall(r"WRN(\d+)", name)]
        assert set(numbers) <= set(published.build.args), name


WRONG = [
    ("Carmon2019", {}, "no robustbench network 'cifar10/Linf/Carmon2019', did you mean .*Unlabel"),
    ("Augustin2020Adversarial", {}, "did you mean .*cifar10/L2/Augustin2020Adversarial"),
    ("Wong2020Fast", {"weights": "DEFAULT"}, "are the path of their file, got 'DEFAULT'"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_unknown_names(name, options, message):
    with pytest.raises(ValueError, match=message):
        ZooNet(f"robustbench/{name}", **options)


def test_a_file_of_another_network_is_refused(tmp_path, monkeypatch):
    f = Formula()
    rice(f, images().double())
    file = str(tmp_path / "net.pt")
    torch.save(f.state, file)
    others = [
        (wide(16, 2), r"normalises by mean \[0.4914.*ZooNet has other numbers"),
        (wide(22, 2, CIFAR10), "missing"),
        (gowal(16, 2), r"\(under 'another_layout'\) does not fit WideResNet: 7 missing"),
    ]
    for other, message in others:
        monkeypatch.setitem(NETWORKS, "cifar10/Linf/Some2020Paper", other)
        with pytest.raises(ValueError, match=message):
            ZooNet("robustbench/Some2020Paper", weights=file)
    monkeypatch.setitem(NETWORKS, "cifar10/Linf/Some2020Paper", wide(16, 2, CIFAR10))
    with pytest.raises(ValueError, match="of another shape"):
        ZooNet("robustbench/Some2020Paper", weights=file, classes=100)
