"""Folders of images as torchvision prepares them, and images from one file."""

import numpy as np
import pytest
import torch
import torchvision.models
from PIL import Image

from lightning_rob.attacks import PGD
from lightning_rob.data import Images
from lightning_rob.data.folders import read_images
from lightning_rob.defenses import Single
from lightning_rob.nets import ZooNet
from lightning_rob.threat import Threat
from tests.data import check_batches


def image_folder(root, *parts, classes=("ant", "bee"), count=12):
    rng = np.random.default_rng(0)
    for part in parts:
        for name in classes:
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(256, size=(20 + i, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return root


@pytest.mark.parametrize("parts", [("train", "val"), ("train", "test"), ("train", "val", "test")])
def test_image_folders(tmp_path, parts):
    root = image_folder(tmp_path, *parts)
    data = Images(str(root), resize=20, crop=16, val_size=3, batch_size=4)
    data.setup()
    check_batches(data)
    apart = len(parts) == 3
    assert (data.classes, data.size) == (2, 16)
    assert [len(data.parts[p]) for p in ("train", "val", "test")] == (
        [24, 24, 24] if apart else [21, 3, 24]
    )
    assert min(data.parts["val"].indices) >= (24 if apart else 0)
    _, y, index = next(iter(data.test_dataloader()))
    assert set(index.tolist()) != set(range(4)) and torch.equal(y, index // 12)


def test_imagenet_images_reach_resnet18_as_torchvision_prepares_them(tmp_path):
    data = Images(str(image_folder(tmp_path, "train", "val")), val_size=3, eval_batch_size=4)
    data.setup()
    x, y, index = next(iter(data.test_dataloader()))
    assert x.shape == (4, 3, 224, 224)
    torch.manual_seed(0)
    net = ZooNet("resnet18", classes=1000).eval()
    torch.manual_seed(0)
    plain = torchvision.models.resnet18(num_classes=1000).eval()
    files = [data.parts["test"].source.datasets[0].samples[i][0] for i in index]
    prepare = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()
    prepared = torch.stack([prepare(Image.open(file)) for file in files])
    rounding = 1.5 / 255 / min(data.std)  # torchvision resizes whole numbers, we do not
    torch.testing.assert_close(net.normalize(x), prepared, rtol=0, atol=rounding)
    with torch.no_grad():
        torch.testing.assert_close(net(x), plain(net.normalize(x)))
    x_adv = PGD(Threat("linf", 4 / 255), 2, 2 / 255)(Single(net), x, y)
    assert 0 < (x_adv - x).abs().max() <= 4 / 255 + 1e-6
    assert x_adv.min() >= 0 and x_adv.max() <= 1


def test_missing_image_folders_are_named_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no folders of images in {tmp_path}/train"):
        Images(str(tmp_path))
    image_folder(tmp_path, "train")
    with pytest.raises(FileNotFoundError, match=f"no folders of images in {tmp_path}/val"):
        Images(str(tmp_path))
    image_folder(tmp_path, "test", classes=("ant", "cow"))
    with pytest.raises(ValueError, match=r"same classes: \['bee', 'cow'\]"):
        Images(str(tmp_path))


def saved(path, images):
    if path.suffix == ".pt":
        torch.save(images, path)
    elif path.suffix == ".npz":
        np.savez(path, **images)
    else:
        np.save(path, images)
    return str(path)


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("a.pt", lambda x: x),
        ("b.pt", lambda x: {"x": x, "y": torch.zeros(len(x))}),
        ("c.npy", lambda x: x.numpy()),
        ("d.npz", lambda x: {"x": x.numpy(), "y": np.zeros(len(x))}),
        ("e.npz", lambda x: {"x": x.double().numpy()}),
        ("f.pt", lambda x: (255 * x).round().byte()),
    ],
)
def test_images_from_a_file(tmp_path, name, wrap):
    noise = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (40, 3, 8, 8), generator=noise, dtype=torch.uint8)
    path = saved(tmp_path / name, wrap(pixels / 255))
    assert torch.equal(read_images(path), pixels / 255)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.rand(3, 8, 8), r"must hold images \[N, C, H, W\], got \[3, 8, 8\]"),
        (torch.rand(0, 3, 8, 8), r"must hold images \[N, C, H, W\], got \[0, 3, 8, 8\]"),
        (2 * torch.ones(2, 3, 8, 8), r"must lie in \[0, 1\], got values in \[2, 2\]"),
        (torch.full((2, 3, 8, 8), torch.nan), r"must lie in \[0, 1\], got values in \[nan, nan\]"),
        ({"images": torch.rand(2, 3, 8, 8)}, "must hold a tensor, or one called x among others"),
        ([torch.rand(2, 3, 8, 8)], "must hold a tensor, or one called x among others"),
    ],
)
def test_a_file_of_something_else(tmp_path, images, message):
    with pytest.raises(ValueError, match=message):
        read_images(saved(tmp_path / "x.pt", images))


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file of images nowhere"):
        read_images("nowhere.pt")
    (tmp_path / "x.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"is not a file of images: \.pt, \.npy or \.npz"):
        read_images(str(tmp_path / "x.csv"))
