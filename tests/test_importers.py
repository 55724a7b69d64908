"""Foreign weights that do not fit: the error names every key, however many."""

import re

import pytest
import torch
from torch import nn
from torchvision.models import squeezenet1_0

from lightning_rob.nets import ZooNet, load_weights
from tests.tiny import TinyNet


def under(prefix, state):
    return {f"{prefix}{name}": entry for name, entry in state.items()}


class Deeper(TinyNet):
    """With two more layers than the network."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


STYLES = {
    "robustbench": lambda state: {"state_dict": under("module.model.", state), "epoch": 9},
    "dverge": lambda state: under("model0.model.", state),
    "plain": lambda state: state,
}


@pytest.mark.parametrize("style", STYLES)
def test_weights_of_each_style_are_found(style, tmp_path):
    saved, net = TinyNet(), TinyNet()
    torch.save(STYLES[style](saved.state_dict()), tmp_path / "net.pt")
    load_weights(net, tmp_path / "net.pt")
    assert all(map(torch.equal, net.state_dict().values(), saved.state_dict().values()))


@pytest.mark.parametrize("style", STYLES)
def test_every_unexpected_and_missing_key_is_named(style, tmp_path):
    torch.save(STYLES[style](Deeper().state_dict()), tmp_path / "deeper.pt")
    extra = {f"extra.{i}.{part}" for i in (0, 1) for part in ("weight", "bias")}
    assert named(TinyNet(), tmp_path / "deeper.pt") == {"4 unexpected": extra}
    torch.save(STYLES[style](TinyNet().state_dict()), tmp_path / "net.pt")
    assert named(Deeper(), tmp_path / "net.pt") == {"4 missing": extra}


def test_a_whole_network_of_torchvision_that_is_not_there(tmp_path):
    state = squeezenet1_0(num_classes=10).state_dict()
    gone = {name for name in state if name.startswith("features.1") and "expand" in name}
    torch.save({k: v for k, v in state.items() if k not in gone}, tmp_path / "net.pth")
    assert len(gone) == 8
    assert named(ZooNet("squeezenet1_0"), tmp_path / "net.pth") == {f"{len(gone)} missing": gone}


def named(net, path):
    """The keys in the error by what is said of them."""
    with pytest.raises(ValueError, match="does not fit") as caught:
        load_weights(net, path)
    text = str(caught.value)
    assert max(map(len, text.splitlines()[1:]), default=0) <= 100
    return {
        told: {name.strip() for name in names.split(",")}
        for told, names in re.findall(r"(\d+ \w+) \(([^)]*)\)", text.split("does not fit")[1])
    }
