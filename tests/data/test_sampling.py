"""Order of the images: every image once in evaluation, exact resumption in training."""

from functools import cache

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import nn

from lightning_rob.data.base import IndexedSubset, InMemoryImages
from lightning_rob.data.sampling import EpochSampler, ResumePoint, every_image_once
from tests.data import dots
from tests.tiny import quiet_trainer

# OnExceptionCheckpoint warns of this
pytestmark = pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=")


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


def trained(data, dies=None, ckpt_path=None, *callbacks, **options):
    net = Line(dies)
    try:
        quiet_trainer(*callbacks, **options).fit(net, datamodule=data, ckpt_path=ckpt_path)
    except InterruptedError:
        assert dies is not None
    return net


def newest(folder):
    def step(file):
        return int(file.stem.split("step=")[1].split("-")[0])

    return max(folder.glob("*.ckpt"), key=step, default=None)


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.net.parameters()])


def test_evaluation_sees_every_image_once():
    for count in (1, 2, 5, 10, 33):
        images = InMemoryImages(torch.zeros(count, 1, 1, 1), torch.zeros(count))
        part = IndexedSubset(images, torch.arange(count))
        for processes in (1, 2, 3, 8):
            if count < processes:
                with pytest.raises(ValueError, match=f"{count} images .* {processes} processes"):
                    every_image_once(part, processes, 0)
                continue
            seen = [i for rank in range(processes) for i in every_image_once(part, processes, rank)]
            assert sorted(seen) == list(range(count))


def test_overfitting_takes_the_first_images_again_and_prediction_all_in_order():
    with pytest.warns(UserWarning, match="You requested to overfit"):
        seen = trained(dots(), overfit_batches=1, max_epochs=2).seen
    assert len(seen) == 2 and seen[0] == seen[1]
    index = quiet_trainer().predict(Line(), datamodule=dots())
    assert torch.cat(index).tolist() == list(range(10))


def test_a_training_epoch_has_every_image_in_an_order_of_its_own():
    data = dots()
    data.setup("fit")
    for processes in (1, 2, 3):
        epochs = []
        for epoch in (0, 1, 1):
            ranks = []
            for rank in range(processes):
                sampler = EpochSampler(data.parts["train"], 8, 3, ResumePoint(), processes, rank)
                sampler.set_epoch(epoch)
                assert len(list(sampler)) == len(sampler) == -(-37 // processes)
                ranks += [key % 37 for key in sampler]
            assert set(ranks) == set(range(37))
            epochs.append(ranks)
        assert epochs[0] != epochs[1] == epochs[2]


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


@cache
def uninterrupted(*length):
    return trained(dots(), **dict(length))


def killed_and_resumed(folder, how, deaths, workers=0, **length):
    """The images and weights of a whole run, and of the last of several attempts at it."""
    whole = uninterrupted(*length.items())
    for dies in [*deaths, None]:
        data = dots(workers=workers)
        options = {"enable_checkpointing": True}
        net = trained(data, dies, newest(folder), saving(folder, how), **options, **length)
    assert 0 < len(net.seen) < len(whole.seen)
    return whole, net


LENGTHS = [
    {"max_epochs": 3},
    {"max_steps": 15},
    {"max_epochs": 3, "limit_train_batches": 4, "reload_dataloaders_every_n_epochs": 1},
]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("how", [*SAVED, "exception"])
def test_a_killed_run_resumes_exactly(tmp_path, how, length):
    whole, resumed = killed_and_resumed(tmp_path, how, [9], **length)
    assert whole.seen[-len(resumed.seen) :] == resumed.seen
    assert torch.equal(weights(whole), weights(resumed))


AGAIN = [
    ("mid-epoch", 1, 1, 1.0),
    ("last batch", 0, 0, 4),
    ("end of epoch", 0, 1, 4),
    ("end of epoch", 0, 0, 4),
]


@pytest.mark.parametrize(("how", "workers", "validate", "limit"), AGAIN)
def test_a_run_killed_again_and_again_resumes_exactly(tmp_path, how, workers, validate, limit):
    length = {"max_steps": 25, "limit_train_batches": limit, "limit_val_batches": validate}
    whole, resumed = killed_and_resumed(tmp_path, how, [9, 12, 16], workers, **length)
    assert torch.equal(weights(whole), weights(resumed))


def test_a_second_run_with_the_same_data_starts_afresh():
    data = dots()
    assert trained(data, max_epochs=2).seen == trained(data, max_epochs=2).seen


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
def test_no_validation_images_mean_no_validation_loader():
    data = dots(val_size=0)
    data.setup("fit")
    assert data.val_dataloader() == []
    assert len(data.parts["train"]) == 47
    assert len(trained(data, max_epochs=1).seen) == 6
