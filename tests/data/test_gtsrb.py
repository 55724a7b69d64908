import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from PIL import Image, ImageOps

from lightning_rob.data import ImageData
from lightning_rob.data.gtsrb import GTSRB


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
    data = GTSRB(str(signs), classes=3, val_size=4, batch_size=4)
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


@pytest.mark.parametrize("equalize", [True, False])
def test_pixels_are_those_of_the_file(signs, equalize):
    data = GTSRB(str(signs), classes=2, equalize=equalize)
    x, label = data.source(train=True)[7]
    path = signs / "gtsrb/GTSRB/Training/00001/00000_00002.ppm"
    expected = Image.open(path).resize((32, 32), Image.Resampling.BILINEAR)
    expected = ImageOps.equalize(expected) if equalize else expected
    found = (255 * x).round().byte().permute(1, 2, 0).numpy()
    assert label == 1
    assert np.abs(found.astype(int) - np.asarray(expected).astype(int)).max() <= 1
    spread = torch.std(x).item()
    assert (spread > 0.27) == equalize


def test_missing_files_and_classes_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"GTSRB is not in .*gtsrb.*download=true"):
        GTSRB(str(tmp_path)).prepare_data()
    with pytest.raises(ValueError, match="at most 43, got 44"):
        GTSRB(classes=44)
    with pytest.raises(ValueError, match="at least 2, got 1"):
        GTSRB(classes=1)


def test_from_a_recipe():
    parser = ArgumentParser()
    parser.add_subclass_arguments(ImageData, "data")
    content = {"class_path": "lightning_rob.data.gtsrb.GTSRB", "init_args": {"val_size": 100}}
    data = parser.instantiate(parser.parse_object({"data": content})).data
    assert (data.classes, data.val_size, len(data.default_augment())) == (10, 100, 2)
