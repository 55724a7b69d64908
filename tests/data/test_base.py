"""The base of data modules: split, sizes, augmentation, and its place in a recipe."""

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_rob.data import Digits5k, Patches10
from tests.data import dots


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


def test_limit_train_takes_images_from_training_only():
    data, all_of_it = dots(limit_train=6), dots(limit_train=1000)
    data.setup("fit")
    all_of_it.setup("fit")
    assert len(data.parts["train"]) == 6 and len(all_of_it.parts["train"]) == 37
    assert torch.equal(data.parts["val"].indices, all_of_it.parts["val"].indices)


def test_values_out_of_range_are_named():
    ranges = {"batch_size": 0, "eval_batch_size": 0, "val_size": -1, "workers": -1}
    for name, value in [*ranges.items(), ("limit_train", 0), ("val_size", 47)]:
        with pytest.raises(ValueError, match=f"{name} must be .*{value}$"):
            dots(**{name: value}).setup()


def test_only_training_images_are_augmented_and_an_empty_list_turns_it_off():
    data, plain = dots(augment=torch.zeros_like), dots(augment=[])
    for one in (data, plain):
        one.setup()
    assert all(x.sum() == 0 for x, _, _ in data.train_dataloader())
    for loader in (data.val_dataloader(), data.test_dataloader(), plain.train_dataloader()):
        assert all(x.sum() > 0 for x, _, _ in loader)
    assert plain.parts["train"].augmentations == ()


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


@pytest.mark.parametrize("options", [{"workers": 1}, {"batch_size": 5}, {"limit_train": 20}])
def test_augmentation_is_a_function_of_seed_epoch_and_index(options):
    images = collected(dots())
    again = collected(dots(**options))
    assert all(torch.equal(images[key], again[key]) for key in again)
    assert not torch.equal(images[0, 5], images[1, 5])
    assert not torch.equal(images[0, 5], collected(dots(seed=4))[0, 5])


def test_training_images_come_in_the_order_of_seed_everything():
    assert dots(seed=None).seed == 0
    seed_everything(3, verbose=False)
    assert list(collected(dots(seed=None))) == list(collected(dots(seed=3)))
    assert list(collected(dots(seed=4))) != list(collected(dots(seed=3)))


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_the_global_stream_alone(workers):
    before = torch.random.get_rng_state()
    data = dots(workers=workers)
    data.setup()
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        assert len(list(loader)) > 0
    assert torch.equal(torch.random.get_rng_state(), before)
