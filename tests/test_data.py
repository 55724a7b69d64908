import pickle
import struct

import numpy as np
import pytest
import scipy.io
import torch
import torchvision.datasets
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from PIL import Image
from torch import nn
from torchvision.transforms import v2

from lightning_rob.attacks import PGD
from lightning_rob.data import (
    CIFAR10,
    CIFAR100,
    MNIST,
    SVHN,
    Digits5k,
    FashionMNIST,
    ImageData,
    Images,
    Patches10,
)
from lightning_rob.data.patches import CROP, KINDS, PHOTOS, cells, crops
from lightning_rob.data.samples import Part, Pixels
from lightning_rob.data.sampling import EpochSampler, Start, every_image_once
from lightning_rob.data.wheels import inside
from lightning_rob.defenses import Single
from lightning_rob.nets import ZooNet
from lightning_rob.threat import Threat

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*fit.ckpt_path="),  # says OnExceptionCheckpoint
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),  # Lightning on torch 2.15
]


def grains(x):
    return x + torch.rand(x.shape)


class Dots(ImageData):
    """47 training images of 4x4 pixels that are noise, 10 for test."""

    classes, channels, size = 3, 1, 4

    def source(self, train):
        generator = torch.Generator().manual_seed(int(train))
        count = 47 if train else 10
        images = torch.randint(256, (count, 1, 4, 4), generator=generator, dtype=torch.uint8)
        return Pixels(images, torch.arange(count) % 3)


def dots(**options):
    defaults = {"batch_size": 8, "val_size": 10, "seed": 3}
    return Dots(**{**defaults, "augment": [v2.RandomHorizontalFlip(), grains], **options})


class Line(LightningModule):
    """A linear classifier that remembers the images it saw and dies at a step of its choice."""

    def __init__(self, dies=None):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Linear(16, 3)
        self.dies = dies
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        if self.global_step == self.dies:
            raise InterruptedError
        self.seen.append(index.tolist())
        return nn.functional.cross_entropy(self.net(x.flatten(1)), y)

    def validation_step(self, batch, batch_idx):
        pass

    def predict_step(self, batch, batch_idx):
        return batch[2]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.3, momentum=0.9)


def trainer(**options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False}
    return Trainer(**{**defaults, **quiet, **options})


def trained(data, dies=None, ckpt_path=None, **options):
    net = Line(dies)
    try:
        trainer(**options).fit(net, datamodule=data, ckpt_path=ckpt_path)
    except InterruptedError:
        assert dies is not None
    return net


def newest(folder):
    def step(file):
        return int(file.stem.split("step=")[1].split("-")[0])

    return max(folder.glob("*.ckpt"), key=step, default=None)


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.net.parameters()])


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


def image_folder(root, *parts, classes=("ant", "bee"), count=12):
    rng = np.random.default_rng(0)
    for part in parts:
        for name in classes:
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(256, size=(20 + i, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return root


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
        elif kind is CIFAR100:
            args = (sets.CIFAR100, "cifar-100-python", ["train", "test", "meta"], "fine_labels")
            pixels = cifar_archive(tmp_path, monkeypatch, *args)
        else:
            pixels = idx_archive(tmp_path, kind.__name__, rng)
        return kind(root=str(tmp_path), val_size=5, batch_size=4), torch.from_numpy(pixels.copy())

    return write


ARCHIVES = [MNIST, FashionMNIST, CIFAR10, CIFAR100, SVHN]


def check_batches(data):
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        x, y, index = next(iter(loader))
        assert x.shape[1:] == (data.channels, data.size, data.size)
        assert (x.dtype, y.dtype, index.dtype) == (torch.float32, torch.int64, torch.int64)
        assert x.min() >= 0 and x.max() <= 1
        assert y.min() >= 0 and y.max() < data.classes
        assert len(data.mean) == len(data.std) == data.channels


@pytest.mark.parametrize("kind", ARCHIVES)
def test_archives_are_read_as_they_were_written(archive, kind):
    data, pixels = archive(kind)
    data.prepare_data()
    data.setup()
    check_batches(data)
    test = torch.cat([x for x, _, _ in data.test_dataloader()])
    assert torch.equal(test, pixels.float() / 255)


@pytest.mark.parametrize("kind", ARCHIVES)
def test_missing_archives_are_named_at_once(tmp_path, kind):
    with pytest.raises(FileNotFoundError, match=f"{kind.__name__} is not in {tmp_path}/.*download"):
        kind(root=str(tmp_path)).prepare_data()


def test_an_archive_that_lacks_a_file_is_named(archive, tmp_path):
    data, _ = archive(SVHN)
    (tmp_path / "test_32x32.mat").unlink()
    data.prepare_data()
    data.setup("fit")
    with pytest.raises(FileNotFoundError, match="SVHN is missing, incomplete or corrupt"):
        data.setup("test")


@pytest.mark.parametrize("kind", [Digits5k, Patches10])
def test_embedded_sets(kind):
    data = kind()
    data.setup()
    check_batches(data)
    assert len(data.parts["test"]) == 1000
    labels = torch.cat([y for _, y, _ in data.test_dataloader()])
    assert labels.bincount().tolist() == [100] * 10
    assert labels[:10].unique().tolist() == list(range(10))


@pytest.mark.parametrize("data", [dots(), Digits5k(), Patches10(train_size=90, val_size=30)])
def test_training_and_validation_images_share_the_numbers_of_their_source(data):
    data.setup("fit")
    numbers = torch.cat([data.parts["train"].indices, data.parts["val"].indices])
    assert len(data.parts["val"]) == data.val_size
    assert numbers.sort().values.tolist() == list(range(len(data.parts["train"].source)))
    _, _, index = data.parts["val"][0]
    assert index == data.parts["val"].indices[0]


def test_the_split_is_the_same_under_another_seed():
    first, again, other = dots(), dots(seed=99), dots(split_seed=1)
    for data in (first, again, other):
        data.setup("fit")
    assert torch.equal(first.parts["val"].indices, again.parts["val"].indices)
    assert not torch.equal(first.parts["val"].indices, other.parts["val"].indices)


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
def test_no_validation_images_mean_no_validation_loader():
    data = dots(val_size=0)
    data.setup("fit")
    assert data.val_dataloader() == []
    assert len(data.parts["train"]) == 47
    assert len(trained(data, max_epochs=1).seen) == 6


def test_limit_train_takes_images_from_training_only():
    data, all_of_it = dots(limit_train=6), dots(limit_train=1000)
    data.setup("fit")
    all_of_it.setup("fit")
    assert len(data.parts["train"]) == 6 and len(all_of_it.parts["train"]) == 37
    assert torch.equal(data.parts["val"].indices, all_of_it.parts["val"].indices)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"eval_batch_size": 0},
        {"val_size": -1},
        {"workers": -1},
        {"limit_train": 0},
        {"val_size": 47},
    ],
)
def test_values_out_of_range_are_named(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} must be .*{value}$"):
        dots(**options).setup()


def test_only_training_images_are_augmented():
    data = dots(augment=torch.zeros_like)
    data.setup()
    assert all(x.sum() == 0 for x, _, _ in data.train_dataloader())
    assert all(x.sum() > 0 for x, _, _ in data.val_dataloader())
    assert all(x.sum() > 0 for x, _, _ in data.test_dataloader())


def test_default_augmentation_gives_way_to_an_empty_list(archive):
    data, _ = archive(CIFAR100)
    kinds = [type(step).__name__ for step in data.default_augment()]
    assert kinds == ["RandomCrop", "RandomHorizontalFlip", "RandomRotation"]
    assert data.default_augment()[2].degrees == [-15, 15]
    data.augment = []
    data.setup("fit")
    assert data.parts["train"].steps == ()


@pytest.mark.parametrize("count", [1, 2, 5, 10, 33])
@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_evaluation_sees_every_image_once(count, processes):
    part = Part(Pixels(torch.zeros(count, 1, 1, 1), torch.zeros(count)), torch.arange(count))
    if count < processes:
        with pytest.raises(ValueError, match=f"{count} images .* {processes} processes"):
            every_image_once(part, processes, 0)
        return
    seen = [i for rank in range(processes) for i in every_image_once(part, processes, rank)]
    assert sorted(seen) == list(range(count))


def test_loaders_take_their_share_from_the_trainer():
    data = dots()
    data.setup()
    data.trainer = trainer(devices=2, strategy="ddp_fork", num_nodes=2)
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        assert (loader.sampler.num_replicas, loader.sampler.rank) == (4, 0)


def test_overfitting_takes_the_first_images_again_and_again():
    with pytest.warns(UserWarning, match="You requested to overfit"):
        seen = trained(dots(), overfit_batches=1, max_epochs=2).seen
    assert len(seen) == 2 and seen[0] == seen[1]


def test_prediction_is_on_every_test_image_in_order():
    index = trainer().predict(Line(), datamodule=dots())
    assert torch.cat(index).tolist() == list(range(10))


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_training_epoch_has_every_image_in_an_order_of_its_own(processes):
    data = dots()
    data.setup("fit")
    epochs = []
    for epoch in (0, 1, 1):
        ranks = []
        for rank in range(processes):
            sampler = EpochSampler(data.parts["train"], 8, 3, Start(), processes, rank)
            sampler.set_epoch(epoch)
            assert len(list(sampler)) == len(sampler) == -(-37 // processes)
            ranks += [code % 37 for code in sampler]
        assert set(ranks) == set(range(37))
        epochs.append(ranks)
    assert epochs[0] != epochs[1] == epochs[2]


def collected(data, epochs=2):
    """Each image of each epoch by (epoch, index)."""
    data.setup("fit")
    loader = data.train_dataloader()
    images = {}
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        images |= {
            (epoch, int(i)): x for xs, _, index in loader for x, i in zip(xs, index, strict=True)
        }
    return images


@pytest.mark.parametrize("options", [{"workers": 2}, {"batch_size": 5}, {"limit_train": 20}])
def test_augmentation_is_a_function_of_seed_epoch_and_index(options):
    images = collected(dots())
    again = collected(dots(**options))
    assert all(torch.equal(images[key], again[key]) for key in again)
    assert not torch.equal(images[0, 5], images[1, 5])
    assert not torch.equal(images[0, 5], collected(dots(seed=4))[0, 5])


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_the_global_stream_alone(workers):
    before = torch.random.get_rng_state()
    data = dots(workers=workers)
    data.setup()
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        assert len(list(loader)) > 0
    assert torch.equal(torch.random.get_rng_state(), before)


SAVED = {
    "mid-epoch": {"every_n_train_steps": 7},
    "last batch": {"every_n_train_steps": 5},
    "end of epoch": {"save_on_train_epoch_end": True},
    "end of validation": {"save_on_train_epoch_end": False},
}


def saving(folder, how):
    if how == "exception":
        return OnExceptionCheckpoint(folder, filename="step=9")
    return ModelCheckpoint(folder, save_top_k=-1, **SAVED[how])


def killed_and_resumed(folder, how, deaths, workers=0, **length):
    """The images and weights of a whole run, and of the last of several attempts at it."""
    whole = trained(dots(), **length)
    for dies in [*deaths, None]:
        data = dots(workers=workers)
        options = {"callbacks": saving(folder, how), "enable_checkpointing": True}
        net = trained(data, dies, newest(folder), **options, **length)
    assert 0 < len(net.seen) < len(whole.seen)
    return whole, net


@pytest.mark.parametrize(
    "length", [{"max_epochs": 3}, {"max_steps": 15}, {"max_epochs": 3, "limit_train_batches": 4}]
)
@pytest.mark.parametrize("how", [*SAVED, "exception"])
def test_a_killed_run_resumes_exactly(tmp_path, how, length):
    whole, resumed = killed_and_resumed(tmp_path, how, [9], **length)
    assert whole.seen[-len(resumed.seen) :] == resumed.seen
    assert torch.equal(weights(whole), weights(resumed))


@pytest.mark.parametrize("how", ["mid-epoch", "last batch", "end of epoch"])
@pytest.mark.parametrize(("workers", "validate"), [(0, 1), (2, 1), (2, 0)])
@pytest.mark.parametrize("limit", [1.0, 4])
def test_a_run_killed_again_and_again_resumes_exactly(tmp_path, how, workers, validate, limit):
    length = {"max_steps": 25, "limit_train_batches": limit, "limit_val_batches": validate}
    whole, resumed = killed_and_resumed(tmp_path, how, [9, 12, 16], workers, **length)
    assert torch.equal(weights(whole), weights(resumed))


def test_a_second_run_with_the_same_data_starts_afresh():
    data = dots()
    assert trained(data, max_epochs=2).seen == trained(data, max_epochs=2).seen


def test_digits_are_mnist_and_its_split_goes_by_split_seed():
    first, again, other = Digits5k(), Digits5k(seed=5), Digits5k(split_seed=1)
    for data in (first, again, other):
        data.setup()
    train, test = first.parts["train"].source, first.parts["test"].source
    assert torch.equal(test.images, again.parts["test"].source.images)
    assert not torch.equal(test.images, other.parts["test"].source.images)
    assert len(torch.cat([train.images, test.images]).unique(dim=0)) == 5000
    assert 0.12 < train[0][0].new_tensor([x.mean() for x, _ in train]).mean() < 0.14


def test_patches_of_different_kinds_share_no_pixel():
    generator = torch.Generator().manual_seed(0)
    for place in PHOTOS.values():
        with Image.open(inside(*place)) as image:
            width, height = image.size
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
    first, again = (Patches10(train_size=200, test_size=30, val_size=0) for _ in range(2))
    for data in (first, again):
        data.setup()
        assert [len(data.parts[part]) for part in ("train", "val", "test")] == [200, 0, 30]
    for part in ("train", "test"):
        images = first.parts[part].source.images
        assert torch.equal(images, again.parts[part].source.images)
        assert len(images.unique(dim=0)) > 0.9 * len(images)


def test_a_package_that_lacks_a_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"sklearn should carry nothing\.png"):
        inside("sklearn", "nothing.png")
    with pytest.raises(ModuleNotFoundError, match="comes with no_such_package"):
        inside("no_such_package", "nothing.png")


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


def test_image_folders_without_augmentation_are_cropped_like_the_test_images(tmp_path):
    data = Images(str(image_folder(tmp_path, "train", "val")), 20, 16, val_size=3, augment=[])
    data.setup("fit")
    code = next(iter(data.train_dataloader().sampler))
    x, _, index = data.parts["train"][code]
    path, _ = data.parts["train"].source.datasets[0].samples[index]
    pixels = v2.functional.pil_to_tensor(Image.open(path)).float() / 255
    expected = v2.functional.center_crop(v2.functional.resize(pixels, [20]), [16])
    assert torch.equal(x, expected)


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


CONFIG = """
class_path: lightning_rob.data.CIFAR10
init_args:
  root: somewhere
  batch_size: 64
  augment:
    - class_path: torchvision.transforms.v2.RandomCrop
      init_args: {size: 32, padding: 4}
    - class_path: torchvision.transforms.v2.RandomHorizontalFlip
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # as LightningCLI instantiates
def test_a_module_comes_from_yaml_and_goes_back():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(ImageData, "data")
    config = parser.parse_args([f"--data={CONFIG}", "--data.val_size=500"])
    data = parser.instantiate_classes(config).data
    assert (data.batch_size, data.val_size) == (64, 500)
    assert [type(step) for step in data.augment] == [v2.RandomCrop, v2.RandomHorizontalFlip]
    text = parser.dump(config)
    assert parser.dump(parser.parse_string(text)) == text
