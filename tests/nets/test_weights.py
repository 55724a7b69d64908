"""Weights from checkpoints of other layouts: found, renamed, or refused with every reason."""

import re

import pytest
import torch
from jsonargparse import ArgumentParser
from safetensors.torch import save_file
from torch import nn

from lightning_rob.nets import ResNet, SmallCNN, WideResNet, ZooNet, load_weights, member_prefixes
from tests.nets import MEAN, STD, TINY, images, with_statistics
from tests.tiny import same_nets


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


@pytest.mark.filterwarnings("ignore:.* was written without a digest")  # of the old format
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_finds_the_network(layout, tmp_path):
    saved, file = with_statistics(small(1), images(1, 28)), tmp_path / "net.pt"
    for zipped in (True, False):
        torch.save(layout(saved.state_dict()), file, _use_new_zipfile_serialization=zipped)
        net = small(2)
        assert load_weights(net, file) is net
        assert torch.equal(net.eval()(images(1, 28)), saved(images(1, 28)))


def test_safetensors(tmp_path):
    saved, file = small(1), tmp_path / "model.safetensors"
    save_file(under("model.", saved.state_dict()), file)
    assert same_nets(load_weights(small(2), file), saved)
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ValueError, match="is not a safetensors file, or is cut short"):
        load_weights(small(), file)


def test_a_file_of_timm(tmp_path):
    timm = pytest.importorskip("timm")
    file = tmp_path / "resnet.safetensors"
    saved = timm.create_model("resnet10t", num_classes=10).eval()
    save_file(saved.state_dict(), file)
    net = load_weights(ZooNet("resnet10t", "timm"), file).eval()
    x = images(3, 64)
    with torch.no_grad():
        assert torch.allclose(net(x), saved(net.normalize(x)), atol=1e-6)


@pytest.fixture
def ensemble(tmp_path):
    members = [small(1), small(2), small(3, classes=3)]
    state = {}
    for index, member in enumerate(members):
        state |= under(f"members.{index}.", member.state_dict())
    torch.save({"state_dict": state}, tmp_path / "ensemble.ckpt")
    return members, tmp_path / "ensemble.ckpt"


def test_one_of_several_networks(ensemble):
    members, file = ensemble
    with pytest.raises(ValueError, match="prefix= one of") as caught:
        load_weights(small(), file)
    assert "'state_dict.members.0', 'state_dict.members.1'" in str(caught.value)
    assert "members.2" not in str(caught.value)
    for prefix in ("members.1", "state_dict.members.1"):
        assert same_nets(load_weights(small(), file, prefix=prefix), members[1])
    assert same_nets(load_weights(small(classes=3), file), members[2])  # the only one that fits
    known = "'state_dict.members.0', 'state_dict.members.1'$"
    for prefix in ("members.7", "embers.1", ""):
        with pytest.raises(ValueError, match=f"no SmallCNN under '{prefix}': pass .* {known}"):
            load_weights(small(), file, prefix=prefix)
    with pytest.raises(ValueError, match=r"members.2'\) does not fit SmallCNN: 2 of another shape"):
        load_weights(small(), file, prefix="members.2")


def test_prefix_may_end_before_the_network(tmp_path):
    nets = [small(1), small(2)]
    state = {f"model{i}": under("module.", net.state_dict()) for i, net in enumerate(nets)}
    torch.save(state, tmp_path / "nets.pt")
    assert same_nets(load_weights(small(), tmp_path / "nets.pt", prefix="model1"), nets[1])
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
    assert same_nets(load_weights(small(), tmp_path / "net.pt", rename=rename), saved)
    rows = {"fc": "wrong", "fc.weight": "linear.weight", "fc.bias": "linear.bias", "conv": "c"}
    back = rename | rows | {"conv": "layer2.0"}  # the longest name counts
    assert same_nets(load_weights(small(), tmp_path / "net.pt", rename=back), saved)
    twice = saved.state_dict() | {"fc.bias": saved.state_dict()["linear.bias"]}
    torch.save(twice, tmp_path / "net.pt")
    with pytest.raises(ValueError, match=r"\{'fc': 'linear'\} gives two .* linear.bias"):
        load_weights(small(), tmp_path / "net.pt", rename={"fc": "linear"})


def test_ignores_dropped_entries(tmp_path):
    saved = WideResNet(10, 1)
    dead = under("sub_block1.", WideResNet(10, 1).block1.state_dict())
    torch.save({"state_dict": under("module.", saved.state_dict() | dead)}, tmp_path / "net.pt")
    with pytest.raises(ValueError, match=r"12 unexpected \(sub_block1"):
        load_weights(WideResNet(10, 1), tmp_path / "net.pt")
    loaded = load_weights(WideResNet(10, 1), tmp_path / "net.pt", drop=["sub_block1."])
    assert same_nets(loaded, saved)
    with pytest.raises(ValueError, match=r"unexpected \(sub_block1"):
        load_weights(WideResNet(10, 1), tmp_path / "net.pt", drop=["block1.layer.9", "lock1."])


OTHER_MEAN, OTHER_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
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
    torch.save({f"model{i}": state for i, state in enumerate(states)}, tmp_path / "epoch_200.pth")
    return nets, tmp_path / "epoch_200.pth"


@pytest.mark.parametrize("prefix", ["model1", "model1.model"])
def test_statistics_of_the_file_must_be_those_of_the_network(dverge, prefix):
    nets, file = dverge
    net = ResNet(**TINY, shortcut="B")
    message = r"by mean \[0.4914, .* \(model0.normalizer.mean\), ResNet has other numbers"
    with pytest.raises(ValueError, match=message):
        load_weights(net, file, prefix, **DVERGE)
    for drop in (["normalizer."], ["normalizer.mean", "normalizer.std"]):
        assert same_nets(load_weights(net, file, prefix, **DVERGE, drop=drop), nets[1])
    net = ResNet(**TINY, shortcut="B", mean=OTHER_MEAN, std=OTHER_STD)
    assert same_nets(load_weights(net, file, prefix, **DVERGE), nets[1])


@pytest.mark.parametrize("names", [("normalize.mean", "normalize.std"), ("mu", "sigma")])
def test_statistics_beside_the_weights(names, tmp_path):
    saved = ResNet(**TINY)
    shape = (1, 3, 1, 1)
    pair = torch.tensor(MEAN).view(shape), torch.tensor(STD).view(shape)
    torch.save(saved.state_dict() | dict(zip(names, pair, strict=True)), tmp_path / "net.pt")
    with pytest.raises(ValueError, match=f"drop=.'{names[0]}', '{names[1]}'. to ignore"):
        load_weights(ResNet(**TINY), tmp_path / "net.pt")
    plain = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    with pytest.raises(ValueError, match="Sequential has no Normalize: build it"):
        load_weights(plain, tmp_path / "net.pt")
    net = load_weights(ResNet(**TINY, mean=MEAN, std=STD), tmp_path / "net.pt")
    assert same_nets(net, saved)


def test_members_of_a_file(ensemble, dverge):
    same_kind = ["state_dict.members.0", "state_dict.members.1"]
    assert member_prefixes(small(), ensemble[1]) == same_kind
    net = ResNet(**TINY, shortcut="B")
    found = member_prefixes(net, dverge[1], **DVERGE, drop=["normalizer."])
    assert found == ["model0.model", "model1.model", "model2.model"]


def test_members_stop_at_a_gap_and_keep_their_order(tmp_path):
    state = {f"net{i}": small(i).state_dict() for i in (10, 2, 12, *range(9, 2, -1), 1, 0)}
    torch.save(state, tmp_path / "nets.pt")
    assert member_prefixes(small(), tmp_path / "nets.pt") == [f"net{i}" for i in range(11)]


def test_ambiguous_members(tmp_path, ensemble):
    net = small().state_dict()
    torch.save({kind: {"0": net, "1": net} for kind in ("ema", "now")}, tmp_path / "two.pt")
    with pytest.raises(ValueError, match=r"several ensembles, .*: 'ema.0', 'now.0'"):
        member_prefixes(small(), tmp_path / "two.pt")
    assert member_prefixes(small(), tmp_path / "two.pt", "now") == ["now.0", "now.1"]
    torch.save(net, tmp_path / "one.pt")
    assert member_prefixes(small(), tmp_path / "one.pt") == [""]  # an ensemble of one
    with pytest.raises(ValueError, match="no SmallCNN numbered from 0"):
        member_prefixes(small(classes=3), ensemble[1])


DEEP = {"depth": 14, "widths": (4, 8, 16)}
MISFITS = {"shallower": (TINY, DEEP), "option-b": (TINY | {"shortcut": "B"}, TINY)}


@pytest.mark.parametrize(("saved", "net"), MISFITS.values(), ids=MISFITS.keys())
def test_every_missing_and_unexpected_entry_is_named(saved, net, tmp_path):
    saved, net = ResNet(**saved).state_dict(), ResNet(**net)
    torch.save({"model": saved}, tmp_path / "net.pt")
    before = {name: entry.clone() for name, entry in net.state_dict().items()}
    with pytest.raises(ValueError, match="does not fit") as caught:
        load_weights(net, tmp_path / "net.pt")
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'net.pt'} (under 'model') does not fit ResNet: ")
    differences = {
        "missing": {name for name in before.keys() - saved.keys() if "num_batches" not in name},
        "unexpected": saved.keys() - before.keys(),
    }
    named = {
        kind: {name.strip() for name in names.split(",")}
        for kind, names in re.findall(r"\d+ (\w+) \(([^)]*)\)", text.split("does not fit")[1])
    }
    assert named == {kind: names for kind, names in differences.items() if names}
    assert all(torch.equal(entry, before[name]) for name, entry in net.state_dict().items())


def saved_bytes(tree, path):
    torch.save(tree, path)
    return path.read_bytes()


BROKEN = {
    "bytes": lambda path: bytes(range(256)),
    "truncated": lambda path: saved_bytes(small().state_dict(), path)[:3000],
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_broken_files(content, tmp_path):
    file = tmp_path / "net.pt"
    file.write_bytes(content(file))
    with pytest.raises(ValueError, match=r"net\.pt is not a PyTorch checkpoint.*") as caught:
        load_weights(small(), file)
    assert "\n" not in str(caught.value)


def test_files_without_usable_weights(tmp_path):
    file = tmp_path / "net.pt"
    with pytest.raises(FileNotFoundError, match=r"net\.pt"):
        load_weights(small(), file)
    torch.save({"epoch": 3}, file)
    with pytest.raises(ValueError, match="does not fit SmallCNN: 17 missing"):
        load_weights(small(), file)
    torch.save({"state_dict": small().state_dict(), "net": small()}, file)
    with pytest.raises(ValueError, match=r"holds a lightning_rob\.nets\.small\.SmallCNN"):
        load_weights(small(), file)
    for value in (float("nan"), float("inf")):
        state = small().state_dict()
        state["linear.bias"][2] = value
        torch.save(state, file)
        with pytest.raises(ValueError, match=r"1 weights are not finite, as linear.bias"):
            load_weights(small(), file)


class Solo:
    def __init__(self, net: nn.Module):
        self.net = net


def test_loaded_network_from_config(tmp_path):
    saved = small(5)
    torch.save({"state_dict": saved.state_dict()}, tmp_path / "net.pt")
    network = {"class_path": "lightning_rob.nets.SmallCNN", "init_args": {"width": 4}}
    options = {"net": network, "path": str(tmp_path / "net.pt")}
    spec = {"class_path": "lightning_rob.nets.load_weights", "init_args": options}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Solo, "owner")
    config = parser.parse_string(parser.dump(parser.parse_object({"owner": {"net": spec}})))
    net = parser.instantiate(config).owner.net
    assert torch.equal(net.linear.weight, saved.linear.weight)
