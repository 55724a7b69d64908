"""The embedded data sets: digits of MNIST, and crops of photographs that share no pixel."""

import torch
from torch import nn

from lightning_rob.data import Digits5k, Patches10
from lightning_rob.data.embedded import CROP, KINDS, PHOTOS, cells, crops, photo
from tests.data import check_batches


def check_classes(data, count):
    """As many test images are of each class, in turn."""
    check_batches(data)
    labels = torch.cat([y for _, y, _ in data.test_dataloader()])
    assert labels.bincount().tolist() == [count] * 10
    assert labels[:10].unique().tolist() == list(range(10))


def test_digits_are_mnist_and_its_split_goes_by_split_seed():
    first, again, other = Digits5k(), Digits5k(seed=5), Digits5k(split_seed=1)
    for data in (first, again, other):
        data.setup()
    check_classes(first, 100)
    train, test = first.parts["train"].source, first.parts["test"].source
    assert torch.equal(test.images, again.parts["test"].source.images)
    assert not torch.equal(test.images, other.parts["test"].source.images)
    assert len(torch.cat([train.images, test.images]).unique(dim=0)) == 5000
    assert 0.12 < train[0][0].new_tensor([x.mean() for x, _ in train]).mean() < 0.14


def test_patches_of_different_kinds_share_no_pixel():
    generator = torch.Generator().manual_seed(0)
    for name in PHOTOS:
        _, height, width = photo(name).shape
        for kind in KINDS:
            owned = torch.zeros(3, height, width, dtype=torch.uint8)
            for row, column in cells(height, width, kind).tolist():
                owned[:, row : row + 96, column : column + 96] = 255
            for cut in KINDS:
                pixels = crops(owned, cut, 20, generator)
                assert (pixels == (255 if cut == kind else 0)).all()


def test_patches_are_the_photographs_at_half_size():
    photo = torch.arange(96 * 96).reshape(1, 96, 96).expand(3, 96, 96) % 256
    crop = crops(photo.to(torch.uint8), "train", 1, torch.Generator().manual_seed(0))[0]
    halves = nn.functional.avg_pool2d(photo.float(), 2, stride=1).round()
    windows = halves.unfold(1, CROP - 1, 1).unfold(2, CROP - 1, 1)[..., ::2, ::2]
    assert (windows == crop[:, None, None]).all((0, 3, 4)).any()


def test_patches_are_the_same_each_time():
    first, again = (Patches10(train_size=200, test_size=30, val_size=30) for _ in range(2))
    for data in (first, again):
        data.setup()
        check_classes(data, 3)
        assert [len(data.parts[part]) for part in ("train", "val", "test")] == [200, 30, 30]
    for part in ("train", "test"):
        images = first.parts[part].source.images
        assert torch.equal(images, again.parts[part].source.images)
        assert len(images.unique(dim=0)) > 0.9 * len(images)
