"""Folders of images as torchvision prepares them."""

import numpy as np
import pytest
import torch
import torchvision.models
from PIL import Image

from lightning_rob.attacks import PGD
from lightning_rob.data import Images
from lightning_rob.defenses import Single
from lightning_rob.nets import ZooNet
from lightning_rob.runtime.errors import InputError
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
    few = Images(str(root), resize=20, crop=16, val_size=3, limit_train=12)
    few.setup()
    assert {few.parts["train"][i][1] for i in range(12)} == {0, 1}  # not the first class alone


def test_imagenet_images_reach_resnet18_as_torchvision_prepares_them(tmp_path):
    data = Images(str(image_folder(tmp_path, "train", "val")), val_size=3, eval_batch_size=2)
    data.setup()
    x, y, index = next(iter(data.test_dataloader()))
    assert x.shape == (2, 3, 224, 224)
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
    x_adv = PGD(Threat("linf", 4 / 255), 1, 2 / 255)(Single(net), x, y)
    assert 0 < (x_adv - x).abs().max() <= 4 / 255 + 1e-6
    assert x_adv.min() >= 0 and x_adv.max() <= 1


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    root = image_folder(tmp_path, "train", "val", count=2)
    deep, cut = (root / "val" / "ant" / f"{i}.png" for i in range(2))
    Image.fromarray(np.full((20, 24), 9_000, np.uint16)).save(deep)
    cut.write_bytes(cut.read_bytes()[:300])
    images = Images(str(root), val_size=1).source(train=False)
    for i, file, reason in [(0, deep, "mode I;16 has more than 8 bits"), (1, cut, "truncated")]:
        with pytest.raises(InputError, match=f"{file} cannot be read as an image: .*{reason}"):
            images[i]


def test_missing_image_folders_are_named_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no folders of images in {tmp_path}/train"):
        Images(str(tmp_path))
    image_folder(tmp_path, "train")
    with pytest.raises(FileNotFoundError, match=f"no folders of images in {tmp_path}/val"):
        Images(str(tmp_path))
    image_folder(tmp_path, "test", classes=("ant", "cow"))
    with pytest.raises(ValueError, match=r"same classes: \['bee', 'cow'\]"):
        Images(str(tmp_path))
