"""Labelled source images beside unlabelled target images, from data modules and from files."""

import numpy as np
import pytest
import torch

from lightning_rob.data.source_target import SourceTargetData, read_images
from tests.tiny import Blobs


class Unlabelled(Blobs):
    """Test images whose labels must not be read."""

    def source(self, train):
        return [(x, None) for x, _ in super().source(train)]


def with_target(**options):
    settings = {"source": Blobs(), "target": Blobs(test_size=40)} | options
    data = SourceTargetData(**settings)
    data.setup("fit")
    return data


def epochs(data, wanted=2):
    loader = data.train_dataloader()
    for epoch in range(wanted):
        for part in loader.flattened:
            part.sampler.set_epoch(epoch)
        yield list(batch for batch, _, _ in loader)


def test_both_sets_go_together_and_the_target_has_no_labels():
    data = with_target()
    first, second = epochs(data)
    assert len(first) == len(second) == 3  # 40 target images; 64 source images would be 4
    x, y, index = (torch.cat(part) for part in zip(*(b["target"] for b in first), strict=True))
    assert (y == -1).all()
    assert sorted(index.tolist()) == list(range(40))
    known = [image for image, _ in Blobs(test_size=40).source(False)]
    assert all(torch.equal(image, known[i]) for image, i in zip(x, index, strict=True))
    order = {
        name: [[b[name][2].tolist() for b in epoch] for epoch in (first, second)]
        for name in ("source", "target")
    }
    assert order["source"][0] != order["source"][1]
    assert order["target"][0] != order["target"][1]
    plain = Blobs()
    plain.setup("fit")
    expected = [batch[2].tolist() for batch in plain.train_dataloader()]
    assert order["source"][0] == expected[:3]
    pairs = dict(enumerate(Blobs().source(True)))
    for batch in first:
        for image, label, i in zip(*batch["source"], strict=True):
            assert torch.equal(image, pairs[int(i)][0])
            assert int(label) == pairs[int(i)][1]


def test_sets_of_one_size_are_not_in_one_order():
    first, _ = epochs(with_target(target=Blobs(test_size=64)))
    positions = with_target().parts["train"].indices.tolist()
    for batch in first:
        places = [positions.index(int(i)) for i in batch["source"][2]]
        assert places != batch["target"][2].tolist()


def test_the_targets_labels_are_never_read():
    """Not even where they are no labels."""
    assert len(next(epochs(with_target(target=Unlabelled(test_size=40))))) == 3


def test_without_a_target_the_sources_test_images_are_it():
    (batches, _) = epochs(with_target(source=Blobs(test_size=33), target=None))
    index = torch.cat([b["target"][2] for b in batches])
    assert sorted(index.tolist()) == list(range(33))
    image = Blobs().source(False)[int(index[0])][0]
    assert torch.equal(batches[0]["target"][0][0], image)


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
    ],
)
def test_images_from_a_file(tmp_path, name, wrap):
    images = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    path = saved(tmp_path / name, wrap(images))
    assert torch.equal(read_images(path), images)
    first, _ = epochs(with_target(target=None, images=path))
    assert len(first) == 3
    assert torch.equal(first[0]["target"][0], images[first[0]["target"][2]])


def test_bytes_from_a_file(tmp_path):
    pixels = torch.randint(
        256, (4, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    assert torch.equal(read_images(saved(tmp_path / "x.pt", pixels)), pixels / 255)


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


class Large(Blobs):
    size = 16


def test_targets_that_cannot_be():
    with pytest.raises(ValueError, match="not both"):
        SourceTargetData(Blobs(), Blobs(), "x.pt")
    with pytest.raises(ValueError, match=r"must be \[3, 8, 8\], Large has \[3, 16, 16\]"):
        SourceTargetData(Blobs(), Large())


def test_a_file_of_another_shape(tmp_path):
    path = saved(tmp_path / "x.pt", torch.rand(4, 1, 8, 8))
    with pytest.raises(ValueError, match=r"must be \[3, 8, 8\], .*x.pt has \[1, 8, 8\]"):
        with_target(target=None, images=path)


def test_evaluation_is_that_of_the_source():
    data, plain = with_target(source=Blobs(eval_batch_size=7)), Blobs(eval_batch_size=7)
    for stage in ("fit", "test"):
        data.setup(stage)
        plain.setup(stage)
    for ours, theirs in zip(
        (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()),
        (plain.val_dataloader(), plain.test_dataloader(), plain.predict_dataloader()),
        strict=True,
    ):
        for a, b in zip(ours, theirs, strict=True):
            assert all(map(torch.equal, a, b))
    a, b = data.labelled(), plain.labelled()
    assert torch.equal(a.indices, b.indices)


def test_evaluation_needs_no_target():
    data = SourceTargetData(Blobs(), images="nowhere.pt")
    data.setup("test")
    assert len(data.test_dataloader()) == 3
    with pytest.raises(FileNotFoundError, match=r"no file of images nowhere\.pt"):
        data.setup("fit")
