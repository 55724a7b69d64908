"""Networks of torchvision, timm and the Hugging Face hub by name."""

import json
import sys

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

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


def test_named_weights_and_a_new_head(downloaded):
    net = ZooNet("squeezenet1_0", weights="IMAGENET1K_V1", classes=1000)
    assert all(torch.equal(entry, downloaded[n]) for n, entry in net.net.state_dict().items())
    net = ZooNet("squeezenet1_0", weights="DEFAULT", classes=4).net
    assert torch.equal(net.state_dict()["features.0.weight"], downloaded["features.0.weight"])
    assert net.classifier[1].weight.shape == (4, 512, 1, 1)
    assert net(images(size=64)).shape == (2, 4)


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


@pytest.mark.parametrize(
    ("package", "name"), [("timm", "resnet10t"), ("huggingface_hub", "hf-hub:org/net")]
)
def test_packages_of_extras_are_named(package, name, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    extra = "hub" if package == "huggingface_hub" else package
    with pytest.raises(ImportError, match=rf'pip install "lightning-rob\[{extra}\]"'):
        ZooNet(name, source="timm")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """The snapshot of org/net in a cache of the hub, with a network of timm in it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--org--net"
    snapshot = folder / "snapshots" / ("5" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(snapshot.name)
    images = {"mean": [0.5, 0.25, 0.75], "std": [0.5, 0.5, 0.25]}
    config = {"architecture": "test_resnet", "num_classes": 7, "pretrained_cfg": images}
    (snapshot / "config.json").write_text(json.dumps(config))
    return snapshot


def test_a_repository_of_the_hub(repository):
    timm = pytest.importorskip("timm")
    saved, x = timm.create_model("test_resnet", num_classes=7).eval(), images(size=32)
    save_file(saved.state_dict(), repository / "model.safetensors")
    mean, std = torch.tensor([[0.5, 0.25, 0.75], [0.5, 0.5, 0.25]])[..., None, None]
    normalised = (x - mean) / std
    for name in ("hf-hub:org/net", f"hf-hub:org/net@{repository.name}"):
        with torch.no_grad():
            torch.testing.assert_close(ZooNet(name).eval()(x), saved(normalised))
    with pytest.raises(ValueError, match="of another shape"):
        ZooNet("hf-hub:org/net", classes=10)
    with pytest.raises(FileNotFoundError, match="hf-hub:org/other cannot be fetched"):
        ZooNet("hf-hub:org/other")


def test_a_pickle_of_the_hub_must_be_named(repository):
    timm = pytest.importorskip("timm")
    saved = timm.create_model("test_resnet", num_classes=7)
    torch.save(saved.state_dict(), repository / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"has no model.safetensors \(found: .*_model.bin"):
        ZooNet("hf-hub:org/net")
    net = ZooNet("hf-hub:org/net", weights="pytorch_model.bin")
    assert torch.equal(net.net.fc.weight, saved.fc.weight)
    torch.save({"net": saved}, repository / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"which torch.load\(weights_only=True\) refuses"):
        ZooNet("hf-hub:org/net", weights="pytorch_model.bin")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lightning_rob": {}}, r"opened by lightning_rob.load\('hf-hub:org/net'\)"),
        ({"architecture": "resnet0"}, "no timm network 'resnet0'"),
        (
            {"architecture": "test_resnet", "model_args": {"checkpoint_path": "x.bin"}},
            "hf-hub:org/net: model_args may not set checkpoint_path",
        ),
    ],
)
def test_configurations_that_name_no_network(config, message, repository):
    save_file({"x": torch.zeros(1)}, repository / "model.safetensors")
    (repository / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        ZooNet("hf-hub:org/net")
