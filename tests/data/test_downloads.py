"""Data sets that torchvision downloads: read as they were written, missing files named."""

import pickle
import struct

import numpy as np
import pytest
import scipy.io
import torch
import torchvision.datasets
from PIL import Image, ImageOps

from lightning_rob.data import CIFAR10, CIFAR100, GTSRB, MNIST, SVHN, FashionMNIST
from tests.data import check_batches


def idx(path, array):
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(head + array.tobytes())


def idx_archive(root, name, rng):
    folder = root / name / "raw"
    folder.mkdir(parents=True)
    for part, count in {"train": 30, "t10k": 12}.items():
        images = rng.integers(256, size=(count, 28, 28), dtype=np.uint8)
        idx(folder / f"{part}-images-idx3-ubyte", images)
        idx(folder / f"{part}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 10)
    return images[:, None]


def cifar_archive(root, monkeypatch, kind, folder, files, labels):
    monkeypatch.setattr(kind, "train_list", [[name, None] for name in files[:-2]])
    monkeypatch.setattr(kind, "test_list", [[files[-2], None]])
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": None})
    (root / folder).mkdir()
    rng = np.random.default_rng(0)
    for name in files[:-1]:
        pixels = rng.integers(256, size=(30, 3072), dtype=np.uint8)
        entry = {"data": pixels, labels: (np.arange(30) % 10).tolist()}
        (root / folder / name).write_bytes(pickle.dumps(entry))
    meta = pickle.dumps({kind.meta["key"]: [str(i) for i in range(10)]})
    (root / folder / files[-1]).write_bytes(meta)
    return pixels.reshape(30, 3, 32, 32)


def svhn_archive(root, monkeypatch, rng):
    lists = {part: ["", f"{part}_32x32.mat", None] for part in ("train", "test")}
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", lists)
    for part in ("train", "test"):
        pixels = rng.integers(256, size=(32, 32, 3, 30), dtype=np.uint8)
        labels = np.arange(1, 31, dtype=np.uint8)[:, None] % 10 + 1
        scipy.io.savemat(root / f"{part}_32x32.mat", {"X": pixels, "y": labels})
    return pixels.transpose(3, 2, 0, 1)


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """Writes a data set's original files and gives its module with the test images in them."""

    def write(kind):
        rng = np.random.default_rng(0)
        sets = torchvision.datasets
        if kind is SVHN:
            pixels = svhn_archive(tmp_path, monkeypatch, rng)
        elif kind is CIFAR10:
            files = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch", "batches.meta"]
            args = (sets.CIFAR10, "cifar-10-batches-py", files, "labels")
            pixels = cifar_archive(tmp_path, monkeypatch, *args)
        else:
            pixels = idx_archive(tmp_path, kind.__name__, rng)
        return kind(root=str(tmp_path), val_size=5, batch_size=4), torch.from_numpy(pixels.copy())

    return write


ARCHIVES = [MNIST, CIFAR10, SVHN]


@pytest.mark.parametrize("kind", ARCHIVES)
def test_archives_are_read_as_they_were_written(archive, kind):
    data, pixels = archive(kind)
    data.prepare_data()
    data.setup()
    check_batches(data)
    test = torch.cat([x for x, _, _ in data.test_dataloader()])
    assert torch.equal(test, pixels.float() / 255)


def test_missing_files_are_named(archive, tmp_path):
    for kind in (*ARCHIVES, CIFAR100, FashionMNIST, GTSRB):
        message = f"{kind.__name__} is missing, .* in {tmp_path}: pass --data.download=true"
        with pytest.raises(FileNotFoundError, match=message):
            kind(root=str(tmp_path)).setup("test")
    data, _ = archive(SVHN)
    (tmp_path / "test_32x32.mat").unlink()
    data.setup("fit")
    with pytest.raises(FileNotFoundError, match="SVHN is missing, incomplete or corrupt"):
        data.setup("test")


def picture(rng, size=(40, 36)):
    return Image.fromarray(rng.integers(256, size=(*size, 3), dtype=np.uint8))


@pytest.fixture
def signs(tmp_path):
    """The files as the archives have them: a folder to each class, test labels in a table."""
    rng, base = np.random.default_rng(0), tmp_path / "gtsrb"
    for k in range(4):
        folder = base / "GTSRB/Training" / f"{k:05}"
        folder.mkdir(parents=True)
        for i in range(5):
            picture(rng).save(folder / f"00000_{i:05}.ppm")
    (base / "GTSRB/Final_Test/Images").mkdir(parents=True)
    rows = ["Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"]
    for i in range(8):
        picture(rng).save(base / "GTSRB/Final_Test/Images" / f"{i:05}.ppm")
        rows.append(f"{i:05}.ppm;36;40;5;5;30;30;{i % 4}")
    (base / "GT-final_test.csv").write_text("\n".join(rows))
    return tmp_path


def test_the_first_classes_at_one_size(signs):
    data = GTSRB(root=str(signs), classes=3, val_size=4, batch_size=4)
    data.prepare_data()
    data.setup()
    assert [len(data.parts[name]) for name in ("train", "val", "test")] == [11, 4, 6]
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        x, y, _ = next(iter(loader))
        assert x.shape[1:] == (3, 32, 32)
        assert 0 <= float(x.min()) < 0.1 and 0.9 < float(x.max()) <= 1
        assert int(y.max()) < 3
    labels = [data.parts["test"].source[i][1] for i in range(6)]
    assert labels == [0, 1, 2, 0, 1, 2]


def test_pixels_are_those_of_the_file_equalized(signs):
    x, label = GTSRB(root=str(signs), classes=2).source(train=True)[7]
    path = signs / "gtsrb/GTSRB/Training/00001/00000_00002.ppm"
    expected = Image.open(path).resize((32, 32), Image.Resampling.BILINEAR)
    found = (255 * x).round().byte().permute(1, 2, 0).numpy().astype(int)
    assert label == 1
    assert np.abs(found - np.asarray(ImageOps.equalize(expected)).astype(int)).max() <= 1
