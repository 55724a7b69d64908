"""Labelled images of one data set beside unlabelled ones of another."""

import pytest
import torch

from lightning_rob.data.source_target import SourceTargetData
from tests.tiny import Blobs


class WithoutLabels(Blobs):
    """Test images whose labels are not to be read."""

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
    for name in ("source", "target"):
        assert [b[name][2].tolist() for b in first] != [b[name][2].tolist() for b in second]
    plain = Blobs()
    plain.setup("fit")
    expected = [batch[2].tolist() for batch in plain.train_dataloader()]
    assert [b["source"][2].tolist() for b in first] == expected[:3]
    pairs = dict(enumerate(Blobs().source(True)))
    for batch in first:
        for image, label, i in zip(*batch["source"], strict=True):
            assert torch.equal(image, pairs[int(i)][0])
            assert int(label) == pairs[int(i)][1]


def test_without_a_target_the_sources_test_images_are_it():
    (batches, _) = epochs(with_target(source=Blobs(test_size=33), target=None))
    index = torch.cat([b["target"][2] for b in batches])
    assert sorted(index.tolist()) == list(range(33))
    image = Blobs().source(False)[int(index[0])][0]
    assert torch.equal(batches[0]["target"][0][0], image)


class Large(Blobs):
    size = 16


def test_a_target_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"must be \[3, 8, 8\], Large has \[3, 16, 16\]"):
        SourceTargetData(Blobs(), Large())


def test_the_targets_labels_are_never_read():
    """Not even where they are no labels."""
    assert len(next(epochs(with_target(target=WithoutLabels(test_size=40))))) == 3


class Augmented(Blobs):
    def default_augment(self):
        return [lambda image: (image + 0.1 * torch.rand(3, 1, 1)).clamp(0, 1)]


def test_the_target_is_augmented_like_the_source_and_alike_in_every_run():
    first, again = (next(epochs(with_target(source=Augmented()))) for _ in range(2))
    for name, train in (("source", True), ("target", False)):
        x, index = (torch.cat([batch[name][k] for batch in first]) for k in (0, 2))
        assert torch.equal(x, torch.cat([batch[name][0] for batch in again]))
        plain = Blobs(test_size=40).source(train)
        assert not any(torch.equal(image, plain[i][0]) for image, i in zip(x, index, strict=True))
