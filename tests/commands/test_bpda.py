"""The command `bpda`: which networks it trains or finds, and which options it refuses."""

import re

import torch
import yaml

from lightning_rob.commands.bpda.training import build_transforms
from lightning_rob.defenses import RandomTransforms
from lightning_rob.randomness import derive_seed
from lightning_rob.transforms import Affine, Gamma, Swirl, VerticalFlip, catalogue
from lightning_rob.transforms.bpda import load_approximation as load
from lightning_rob.transforms.bpda import load_approximations, place_of, train_bpda
from lightning_rob.transforms.nondifferentiable import ALL
from tests.pieces import spec
from tests.tiny import Blobs, TinyNet, images_of, run

COLOUR = ["--data", "tests.tiny.Blobs", "--data.train_size=40"]
ONCE = ["--epochs", "1"]


class Grey(Blobs):
    """One channel of the blobs."""

    channels, mean, std = 1, (0.5,), (0.25,)

    def source(self, train: bool):
        return [(x[:1], y) for x, y in super().source(train)]


def bpda(folder, *args):
    run("bpda", "--out", folder, "--device", "cpu", *args)


def test_two_transforms_from_end_to_end(tmp_path, capsys):
    """The networks are those of a direct call, and a defense can be attacked through them."""
    bpda(tmp_path, *COLOUR, "--transforms", "VerticalFlip,HardPrecision", "--epochs", "2")
    printed = capsys.readouterr().out
    data = Blobs(train_size=40)
    data.setup("fit")
    images, _ = images_of(data, "train")
    place = place_of(tmp_path, VerticalFlip(), (3, 8, 8))
    generator = torch.Generator().manual_seed(derive_seed(0, *place.name.encode()))
    by_hand = train_bpda(VerticalFlip(), images, 2, generator=generator)
    net, about = load(place)
    assert torch.equal(net(images), by_hand.net(images))
    assert (about["error"], about["identity"]) == (by_hand.error, by_hand.identity)
    assert (about["images"], about["epochs"], about["seed"]) == (len(images), 2, 0)
    row = re.search(r"VerticalFlip\W+([\d.]+)(\*?)\W+([\d.]+)\W+(\d+)\W+2\W+\d+", printed)
    assert row[1] == f"{by_hand.error:.5f}"
    assert (row[2] == "*") == (by_hand.error >= by_hand.identity)
    assert row[3] == f"{by_hand.identity:.5f}" and int(row[4]) == len(images)
    assert "0 of them from before" in printed
    transforms = {"VerticalFlip": {}, "HardPrecision": {}}
    options = {"gradients": "bpda", "approximations": str(tmp_path)}
    defense = RandomTransforms(TinyNet(), transforms, 2, 3, **options).eval()
    x = images[:4].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(defense.logits(x, torch.Generator()).max(), x)
    assert gradient.abs().sum() > 0


def test_an_existing_network_is_not_trained_again(tmp_path, capsys):
    two = ["--transforms", "VerticalFlip,Gamma"]
    bpda(tmp_path, *COLOUR, *ONCE, *two)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(before) == 2
    (tmp_path / "Gamma_0_3x8x8.123.part").write_bytes(b"of a run that was killed")
    bpda(tmp_path, *COLOUR, "--epochs", "2", "--transforms", "VerticalFlip,Erase,Gamma")
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.pt")}
    assert {name: after[name] for name in before} == before and len(after) == 3
    out = capsys.readouterr().out
    assert "2 of them from before" in out
    epochs = dict(re.findall(r"(VerticalFlip|Erase|Gamma)\W+[\d.]+\*?\W+[\d.]+\W+\d+\W+(\d)", out))
    assert epochs == {"VerticalFlip": "1", "Erase": "2", "Gamma": "1"}


def test_on_grey_images_transforms_of_colour_are_skipped(tmp_path, capsys):
    data = ["--data", "tests.commands.test_bpda.Grey", "--max_images", "4"]
    bpda(tmp_path, *data, *ONCE, "--transforms", "HSV,Gamma")
    assert "Skipped: HSV takes images of 3 channels" in capsys.readouterr().out
    assert [path.name.split("_")[0] for path in tmp_path.iterdir()] == ["Gamma"]


def test_the_data_and_the_transforms_of_a_recipe(tmp_path):
    """Fractions, strengths and what the command line changes."""
    transforms = {"Affine": {"alpha": "51/255"}, "VerticalFlip": {"p": 0.3}}
    defense = spec("RandomTransforms", size=1, draws=2, transforms=transforms)
    model = spec("AdversarialTraining", defense=defense)
    data = spec("tests.tiny.Blobs", train_size=96)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"model": model, "data": data, "trainer": {}}))
    bpda(tmp_path / "nets", "--config", recipe, "--data.train_size=50", *ONCE)
    found = load_approximations(tmp_path / "nets", [Affine(0.2), VerticalFlip(p=0.3)])
    assert set(found) == {"Affine", "VerticalFlip"}
    _, about = load(place_of(tmp_path / "nets", Affine(0.2), (3, 8, 8)))
    assert about["images"] == 50 - 32
    bpda(tmp_path / "one", "--config", recipe, *ONCE, "--transforms", "Gamma")
    assert list((tmp_path / "one").iterdir()) == [place_of(tmp_path / "one", Gamma(), (3, 8, 8))]


def test_ways_to_choose_transforms():
    assert build_transforms("Affine, Swirl") == {"Affine": Affine(), "Swirl": Swirl()}
    assert build_transforms({"Gamma": {"alpha": 0.2}}) == {"Gamma": Gamma(0.2)}
    assert list(build_transforms("nondifferentiable")) == [kind.__name__ for kind in ALL]
    names = {*catalogue(), "Bilateral", *(kind.__name__ for kind in ALL)}
    assert {*build_transforms("all")} == names and len(names) == 39
