"""Image classifiers of transformers: a folder of `save_pretrained`, attacked in [0, 1]."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.transforms.functional import resize

import lightning_rob
from lightning_rob import PGD, Threat, evaluate
from lightning_rob.nets import TransformersNet, ZooNet
from lightning_rob.runtime.errors import InputError
from tests.tiny import blobs, fit_all, run

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": 32, "width": 32},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": MEAN,
    "image_std": STD,
}
CONFIG = {"architectures": ["ViTForImageClassification"], "model_type": "vit"}


@pytest.fixture
def saved(tmp_path):
    """A small ViT and its folder."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, intermediate_size=32, num_labels=7, **shape
    )
    torch.manual_seed(0)
    net = transformers.ViTForImageClassification(config).eval()
    net.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return net, tmp_path


def images(size=32):
    return torch.rand(6, 3, size, size, generator=torch.Generator().manual_seed(1))


def normalised(x):
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (MEAN, STD))
    return (x - mean) / std


def test_logits_are_those_of_the_network_on_normalised_images(saved):
    net, folder = saved
    defense = lightning_rob.load(folder)
    with torch.no_grad():
        torch.testing.assert_close(defense.logits(images())[0], net(normalised(images())).logits)
        larger = images(48)
        seen = normalised(resize(larger, [32, 32], antialias=True))
        torch.testing.assert_close(defense.logits(larger)[0], net(seen).logits)
    assert "'height': 32" in str(defense)  # the resizing is stated


def test_a_folder_without_its_processor_says_so(saved):
    (saved[1] / "preprocessor_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no preprocessor_config.json: save the proc"):
        lightning_rob.load(saved[1])


@pytest.mark.parametrize("size", [32, 48])
def test_an_attack_moves_the_pixels_that_are_given(saved, size, tmp_path):
    """The gradient is that of the pixels, through resizing and normalization."""
    net, folder = saved
    x, y = images(size), torch.arange(6)
    defense = lightning_rob.load(folder)
    threat = Threat("linf", 0.1)
    moved = PGD(threat, 5, 0.05)(defense, x, y)
    assert 0.05 < (moved - x).abs().max() <= 0.1 + 1e-6
    assert moved.min() >= 0 and moved.max() <= 1
    batches = [(x, net(normalised(resize(x, [32, 32], antialias=True))).logits.argmax(1))]
    found = evaluate(defense, "pgd", batches, eps=0.1, resume=tmp_path / "resumed", progress=False)
    assert found.accuracy("clean") == 1
    assert found.accuracy("pgd") < 0.5
    assert not [one.text for one in found.findings if one.severity == "severe"]


def test_the_hub_and_recipes_take_it_by_name(saved, monkeypatch):
    _, folder = saved
    asked = []

    def fetched(name, files):
        asked.append((name, sorted(files)))
        return folder

    for place in ("lightning_rob.nets.zoo", "lightning_rob.cli.load"):
        monkeypatch.setattr(f"{place}.hub_folder", fetched)
    expected = lightning_rob.load(folder).logits(images())[0]
    fetched_one = lightning_rob.load("hf-hub:org/vit@main")
    assert torch.equal(fetched_one.logits(images())[0], expected)
    files = ["config.json", "model.safetensors", "preprocessor_config.json"]
    assert asked[-1] == ("org/vit@main", files)
    named = ZooNet("hf-hub:org/vit").eval()
    torch.testing.assert_close(named(images()), expected)
    with pytest.raises(ValueError, match=r"has 7 classes .* got classes 10"):
        ZooNet("hf-hub:org/vit", classes=10)


def test_no_code_of_the_folder_is_run(saved):
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ValueError, match="custom code"):
        lightning_rob.load(folder)


def test_weights_as_a_pickle_are_refused(saved):
    net, folder = saved
    torch.save(net.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        lightning_rob.load(folder)


def test_without_transformers_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ImportError, match=r'pip install "lightning-rob\[hub\]"'):
        lightning_rob.load(tmp_path)


class Classifier(nn.Linear):
    """As one of transformers: its output is an object with logits."""

    def __init__(self):
        super().__init__(192, 4)
        self.config = SimpleNamespace(num_channels=3)

    def forward(self, pixel_values):
        return SimpleNamespace(logits=super().forward(pixel_values.flatten(1)))


class Rescaling:
    """As a processor of transformers: 0 to 255 becomes 0 to 1."""

    def __call__(self, images, **_):
        return {"pixel_values": images / 255}

    def to_dict(self):
        return {"rescale_factor": 1 / 255}


def test_the_command_line_takes_the_folder(tmp_path, monkeypatch, capsys):
    """With classes in the place of those of transformers, so that it need not be there."""
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    x, y = blobs(train=False)
    net = fit_all(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), *blobs(), 30)
    save_file(net[1].state_dict(), folder / "model.safetensors")

    def read(place, **_):
        assert Path(place) == folder
        found = Classifier()
        found.load_state_dict(load_file(folder / "model.safetensors"))
        return found

    fake = SimpleNamespace(
        AutoImageProcessor=SimpleNamespace(from_pretrained=lambda *_, **__: Rescaling()),
        AutoModelForImageClassification=SimpleNamespace(from_pretrained=read),
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    monkeypatch.chdir(tmp_path)
    run("attack", folder, "--data=tests.tiny.Blobs", "--eps=0.1", "--images=33", "--passes=50")
    (record,) = tmp_path.rglob("robust.jsonl")
    found = {row["name"]: row for row in map(json.loads, record.read_text().splitlines())}
    clean = float((net(x).argmax(1) == y).float().mean())
    assert found["clean"]["accuracy"] == pytest.approx(clean)
    assert found["auto"]["accuracy"] < clean
    assert "Radius: linf 0.1, as --eps says" in capsys.readouterr().out


def test_other_folders_are_not_taken_for_one(tmp_path):
    for content in ("[]", "{", json.dumps({"architectures": ["BertForMaskedLM"]})):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(InputError):
            lightning_rob.load(tmp_path)


def test_images_of_another_number_of_channels(saved):
    with pytest.raises(ValueError, match="expects 3 channels, got 1"):
        TransformersNet(saved[1])(images()[:, :1])
