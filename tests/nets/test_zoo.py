"""Networks of torchvision and timm by name."""

import sys

import pytest
import torch

from lightning_rob.nets import ZooNet
from tests.nets import images


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
