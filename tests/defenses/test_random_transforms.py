import math
from collections import Counter

import pytest
import torch
from torch import nn

from lightning_rob.attacks import SurrogateTransforms
from lightning_rob.defenses import Mixture, RandomTransforms, Single
from lightning_rob.defenses.random_transforms import _schedule
from lightning_rob.randomness import Streams
from lightning_rob.transforms import (
    Affine,
    GaussianNoise,
    GrayOneChannel,
    HorizontalFlip,
    Sobel,
    Swirl,
    VerticalFlip,
    catalogue,
)
from lightning_rob.transforms.bpda import save_approximation, train_bpda
from lightning_rob.transforms.nondifferentiable import HardPrecision


class Flat(nn.Module):
    """A linear network on the pixels."""

    def __init__(self, inputs=3 * 8 * 8, classes=4):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x):
        return self.linear(x.flatten(1))


def defense(transforms=None, size=1, draws=5, **options):
    return RandomTransforms(Flat(), transforms or [GaussianNoise(0.1)], size, draws, **options)


def images(n=4):
    return torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def streams(n=4, key=0):
    return Streams.from_index(torch.arange(n), key)


FLIPS = [HorizontalFlip(), VerticalFlip()]


def test_all_transforms_at_full_size_are_composed_in_some_order():
    rt = defense([*FLIPS, Sobel()], size=3)
    x = images()
    both = Sobel()(x.flip(2, 3))  # the gradient's size does not care about the order of flips
    for copy in rt.transformed(x, None, 6):
        assert torch.allclose(copy, both, atol=1e-6)


def test_order_is_uniform_and_without_replacement():
    rt = defense([GaussianNoise(), Sobel(), Affine(), HorizontalFlip()], size=2)
    order = rt._orders(torch.rand(24000, 1), 24000, torch.Generator().manual_seed(0))
    pairs = Counter(map(tuple, order.tolist()))
    assert len(pairs) == 12  # 4 * 3 ordered pairs, none twice
    assert all(abs(count - 2000) < 5 * 2000**0.5 for count in pairs.values())


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.9, 1.0])
def test_probability_is_honoured_unless_the_released_code_is_asked_for(p, released):
    rt = defense([HorizontalFlip(p=p)], released_code=released)
    order = rt._orders(torch.rand(20000, 1), 20000, torch.Generator().manual_seed(0))
    expected, slack = (p, 0) if p in (0, 1) else (0.5 if released else p, 0.015)
    assert (order >= 0).float().mean() == pytest.approx(expected, abs=slack)


def test_one_switch_sets_every_slip_that_a_transform_has_as_an_option():
    kinds = list(catalogue().values())
    options = {"size": len(kinds), "draws": 1}
    rt = defense([kind(p=0.3) for kind in kinds], **options, released_code=True)
    corrected = defense([kind(p=0.3) for kind in kinds], **options).transforms
    changed = {name for name, one in rt.transforms.items() if one != corrected[name]}
    assert changed == {"HSV", "LAB", "YUV", "JPEG", "Swirl", "GrayOneChannel"}
    assert rt.transforms["GrayOneChannel"] == GrayOneChannel(mixed=3, p=0.3)
    for name in changed - {"GrayOneChannel"}:
        assert rt.transforms[name] == catalogue()[name](released_code=True, p=0.3)


def test_released_yuv_is_the_released_formula():
    """Without a shift it clamps U and V to [0, 1], and goes back by the authors' coefficients."""
    red, green, blue = images().unbind(1)
    u = (-0.147 * red - 0.289 * green + 0.436 * blue).clamp(0, 1)
    v = (0.615 * red - 0.515 * green - 0.100 * blue).clamp(0, 1)
    y = 0.299 * red + 0.587 * green + 0.114 * blue
    expected = torch.stack([y + 1.14 * v, y - 0.396 * u - 0.581 * v, y + 2.029 * u], 1).clamp(0, 1)
    found = defense({"YUV": {"alpha": 0}}, released_code=True).transformed(images())[0]
    assert torch.allclose(found, expected, atol=1e-6)


def test_released_swirl_is_the_released_formula():
    """Bilinear weights of neighbours that are clamped already."""
    x, side = images(1).double(), 8
    center, radius, strength = torch.tensor([[2.0, 5.0]]), torch.tensor([9.0]), torch.tensor([1.5])
    grid = torch.arange(side).double()
    right, down = grid[None] - 2, grid[:, None] - 5
    reach = radius.item() / 5 * math.log(2)
    turn = torch.atan2(down, right) + 1.5 * torch.exp(-torch.hypot(down, right) / reach)
    column = 2 + torch.hypot(down, right) * turn.cos()
    row = 5 + torch.hypot(down, right) * turn.sin()
    sides = []
    for place in (column, row):
        low, high = place.floor(), place.floor() + 1
        low, high = low.clamp(0, side - 1), high.clamp(0, side - 1)
        sides.append(((low.long(), high - place), (high.long(), place - low)))
    parts = [a * b * x[0, :, i, j] for j, a in sides[0] for i, b in sides[1]]
    expected = sum(parts).clamp(0, 1)
    swirl = defense([Swirl()], released_code=True).transforms["Swirl"]
    found = swirl(x, center.double(), radius.double(), strength.double())[0]
    assert torch.allclose(found, expected, atol=1e-9)


def test_shared_order_is_shared_by_the_copies_of_an_image_and_not_by_images():
    rt = defense([*FLIPS, Sobel(), Affine()], size=2, shared_order=True)
    order = rt._orders(torch.rand(60, 1), 20, None).view(3, 20, 2)
    assert (order == order[0]).all()
    assert len(set(map(tuple, order[0].tolist()))) > 3
    rt.shared_order = False
    order = rt._orders(torch.rand(60, 1), 20, None).view(3, 20, 2)
    assert not (order == order[0]).all()


def seen_as_batch(kinds, **options):
    rt = defense(kinds, **options)
    rt.shared_order = "batch"  # as SurrogateTransforms sets it for an attack
    return rt


@pytest.mark.parametrize(
    "chance", [torch.Generator(), Streams.from_index(torch.arange(60) % 20, 3)]
)
def test_an_order_for_the_batch_is_that_of_any_other_batch(chance):
    rt = seen_as_batch([*FLIPS, Sobel(), Affine()], size=2)
    order = rt._orders(torch.rand(60, 1), 20, chance)
    assert (order == order[0]).all()
    again = rt._orders(torch.rand(60, 1), 20, chance)
    assert (again == again[0]).all()
    found = {tuple(rt._orders(torch.rand(60, 1), 20, chance)[0].tolist()) for _ in range(30)}
    assert len(found) > 5


def test_an_order_for_the_batch_leaves_each_image_what_it_gets_alone():
    rt = seen_as_batch([*FLIPS, GaussianNoise(0.1), Affine()], size=3)
    x, keys = images(), torch.arange(len(images()))
    whole = rt.transformed(x, Streams.from_index(keys, 1, 2), 4)
    for i in range(len(x)):
        alone = rt.transformed(x[i : i + 1], Streams.from_index(keys[i : i + 1], 1, 2), 4)
        torch.testing.assert_close(alone[:, 0], whole[:, i])


def test_images_do_not_depend_on_their_batch():
    kinds = [kind() for kind in catalogue().values()]
    rt = defense(kinds, size=6, draws=3)
    x = torch.rand(4, 3, 16, 16)
    whole = rt.transformed(x, streams(), 3)
    for i in range(4):
        alone = rt.transformed(x[i : i + 1], streams()[torch.tensor([i])], 3)
        assert torch.allclose(whole[:, i : i + 1], alone, atol=1e-5)


class SecondNoise(GaussianNoise):
    """The same noise under another name."""


def test_transforms_draw_independently():
    rt = defense([GaussianNoise(0.05), SecondNoise(0.05)], size=2)
    x = torch.full((4, 3, 8, 8), 0.5)
    noise = rt.transformed(x, streams(), 50) - x
    assert noise.std().item() == pytest.approx(0.05 * 2**0.5, rel=0.05)


def test_schedule_runs_each_copy_in_its_order_and_merges():
    order = torch.tensor([[0, 1, 2], [1, 2, 0], [-1, 1, -1], [0, -1, 1]])
    done = [[] for _ in order]
    calls = list(_schedule(order, 3))
    for kind, copies in calls:
        for copy in copies:
            done[copy].append(kind)
    assert done == [[0, 1, 2], [1, 2, 0], [1], [0, 1]]
    assert len(calls) < 9


def test_identity_gradient_is_the_networks_own():
    rt = defense([VerticalFlip()], draws=1, gradients="identity")
    x = images().requires_grad_()
    logits = rt.logits(x)
    (found,) = torch.autograd.grad(logits[..., 0].sum(), x)
    weight = rt.net.linear.weight[0].view(3, 8, 8)
    assert torch.allclose(found, weight.expand_as(x))
    assert torch.equal(logits[0], rt.net(x.detach().flip(2)))


def test_combo_is_exact_where_it_can_be():
    nets = {"HardPrecision": nn.Identity()}
    rt = defense([VerticalFlip(), HardPrecision()], size=2, gradients="identity")
    seen = SurrogateTransforms(shared_order=False, gradients="combo")
    with pytest.raises(ValueError, match="need approximations of HardPrecision"), seen(rt):
        rt.logits(images())
    assert rt.gradients == "identity"
    rt = RandomTransforms(Flat(), [VerticalFlip()], 1, 1, gradients="combo", approximations=nets)
    x = images().requires_grad_()
    (found,) = torch.autograd.grad(rt.logits(x)[..., 0].sum(), x)
    assert torch.allclose(found, rt.net.linear.weight[0].view(3, 8, 8).flip(1).expand_as(x))


def test_straight_through_is_the_identity_only_where_it_must_be():
    rt = defense([VerticalFlip(), HardPrecision()], size=2, draws=1, gradients="straight_through")
    x = images().requires_grad_()
    (found,) = torch.autograd.grad(rt.logits(x)[..., 0].sum(), x)
    assert torch.allclose(found, rt.net.linear.weight[0].view(3, 8, 8).flip(1).expand_as(x))


def test_approximations_from_a_folder(tmp_path):
    flips = [VerticalFlip(), HorizontalFlip()]
    x = images(32)
    trained = train_bpda(VerticalFlip(), x, epochs=1)
    save_approximation(tmp_path, VerticalFlip(), (3, 8, 8), trained.net)
    assert set(defense(flips, approximations=str(tmp_path)).approximations) == {"VerticalFlip"}
    with pytest.raises(FileNotFoundError, match="network of HorizontalFlip"):
        defense(flips, approximations=str(tmp_path), gradients="bpda")
    rt = defense(flips[:1], draws=1, approximations=str(tmp_path), gradients="bpda")
    image = images().requires_grad_()
    (found,) = torch.autograd.grad(rt.logits(image)[..., 0].sum(), image)
    z = images().requires_grad_()
    weight = rt.net.linear.weight[0].detach().view(3, 8, 8).expand_as(z)
    (expected,) = torch.autograd.grad(trained.net.eval()(z), z, weight)
    assert torch.allclose(found, expected, atol=1e-6)


def test_a_transform_without_gradient_is_refused_at_once():
    rt = defense([HardPrecision(), VerticalFlip()], size=1)
    assert rt(images()).shape == (4, 4)
    with pytest.raises(ValueError, match="HardPrecision have no gradient"):
        rt.logits(images().requires_grad_())


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"transforms": {"Afine": {}}}, "no transform 'Afine', did you mean Affine"),
        ({"size": 2}, "size must be 1 … 1"),
        ({"gradients": "bpda"}, "need approximations of GaussianNoise"),
        ({"gradients": "exactly"}, "gradients must be of"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        defense(**arguments)


def test_a_mixture_asks_its_random_parts_for_the_draws_of_the_attack():
    rt = defense(draws=20)
    mixture = Mixture([rt, Single(rt.net)], probs=[0.25, 0.75])
    logits, weights = mixture.sample_logits(images(), streams(), 3)
    assert logits.shape == (6, 4, 4)
    assert weights[:3].sum() == pytest.approx(0.25)
    assert weights[3:].sum() == pytest.approx(0.75)
    assert mixture.logits(images()).shape == (21, 4, 4)
