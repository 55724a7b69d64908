"""Kornia's augmentations: its own results, by the streams of the images."""

import kornia.augmentation as kornia
import pytest
import torch
from torch import nn

from lightning_rob import PGD, RandomTransforms, Threat
from lightning_rob.randomness import derive_seed, seeded_global_rng
from lightning_rob.transforms import FromKornia, Gamma
from tests.transforms.inputs import images, streams

AUGMENTATIONS = {
    "affine": (kornia.RandomAffine(20.0), True),
    "rare": (kornia.RandomHorizontalFlip(p=0.03), True),
    "one kernel a batch": (kornia.RandomMotionBlur((3, 7), 35.0, 0.5), True),
    "one order a batch": (kornia.ColorJiggle(0.3, 0.3, 0.3, 0.1), True),
    "posterize": (kornia.RandomPosterize(3.0), False),
    "equalize": (kornia.RandomEqualize(), False),
}
EVERY = pytest.mark.parametrize(
    ("augmentation", "differentiable"), AUGMENTATIONS.values(), ids=AUGMENTATIONS.keys()
)


@EVERY
def test_it_is_kornia_by_the_images_own_seeds(augmentation, differentiable):
    transform, x = FromKornia(augmentation), images(5)
    before = torch.get_rng_state()
    (seeds,) = transform.sample(x, streams(*range(5)))
    found = transform(x, seeds)
    assert torch.equal(torch.get_rng_state(), before)
    for image, seed, one in zip(x.split(1), seeds.tolist(), found.split(1), strict=True):
        with seeded_global_rng(torch.Generator().manual_seed(derive_seed(seed)), x.device):
            parameters = augmentation.forward_parameters(image.shape)
            expected = augmentation(image, params=parameters)
        torch.testing.assert_close(one, expected.clamp(0, 1))
    part = streams(*range(5))[torch.tensor([3, 1])]
    assert torch.equal(transform(x[[3, 1]], *transform.sample(x[[3, 1]], part)), found[[3, 1]])


@EVERY
def test_whether_there_is_a_gradient_is_found_out(augmentation, differentiable):
    assert FromKornia(augmentation).differentiable == differentiable


def test_a_defense_takes_its_modules():
    net = nn.Sequential(nn.Flatten(), nn.Linear(images(1).numel(), 4))
    defense = RandomTransforms(net, [kornia.RandomAffine(20.0), Gamma()], size=2, draws=3)
    assert list(defense.transforms) == ["RandomAffine", "Gamma"]
    x, y = images(4), torch.arange(4)
    attack = PGD(Threat("linf", 0.1), 2, 0.05)
    x_adv = attack(defense, x, y, streams(*range(4)))
    assert torch.equal(x_adv, attack(defense, x, y, streams(*range(4))))
    assert not torch.equal(x_adv, x)


def test_other_modules_and_sizes_are_refused():
    with pytest.raises(TypeError, match=r"transforms are those of .*, got ReLU"):
        RandomTransforms(nn.Identity(), [nn.ReLU()], 1, 1)
    x, crop = images(2), FromKornia(kornia.RandomCrop((8, 8)))
    with pytest.raises(ValueError, match=r"RandomCrop must keep the size of images, .*8, 8\]"):
        crop(x, *crop.sample(x, streams(0, 1)))
    RandomTransforms(nn.Identity(), [kornia.RandomCrop((28, 28), padding=2)], 1, 1)
    with pytest.raises(ValueError, match="RandomMixUpV2 mixes images of a batch"):
        RandomTransforms(nn.Identity(), [kornia.RandomMixUpV2()], 1, 1)
    twice = [kornia.RandomErasing(), kornia.RandomErasing()]
    with pytest.raises(ValueError, match=r"can be there once, got two of RandomErasing"):
        RandomTransforms(nn.Identity(), twice, 1, 1)
