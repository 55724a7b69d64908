"""Networks that approximate a transform: planes, gradients, training, files."""

from itertools import pairwise

import kornia.augmentation as kornia
import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm, conv2d

from lightning_rob.attacks import PGD
from lightning_rob.defenses import RandomTransforms
from lightning_rob.threat import Threat
from lightning_rob.transforms import FFT, Affine, Erase, FromKornia, Gamma, Swirl, VerticalFlip
from lightning_rob.transforms.bpda import (
    BPDANet,
    approximated,
    load_approximation,
    load_approximations,
    place_of,
    planes_of,
    save_approximation,
    train_bpda,
)
from lightning_rob.transforms.nondifferentiable import HardPrecision
from tests.transforms.inputs import generator

X = torch.rand(3, 3, 16, 16, generator=generator())
V = torch.randn(3, 3, 16, 16, generator=generator(1))


def untrained(x, params):
    """A network whose BatchNorm has seen something, in evaluation mode."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        net = BPDANet(x.shape[1], planes_of(x, params).shape[1])
        net.learn_ranges(x, params)
        for _ in range(30):
            net(x, *params)
    return net.eval().requires_grad_(False)


def smooth_images(count, size, channels=1):
    """Four random corners, and what lies between."""
    corners = torch.rand(count, channels, 2, 2, generator=generator(7))
    return nn.functional.interpolate(corners, (size, size), mode="bilinear").clamp(0, 1)


def test_parameters_become_planes():
    numbers, vectors = torch.tensor([1, 2, 3]), torch.arange(12.0).view(3, 4)
    matrices, images = torch.arange(18.0).view(3, 2, 3), X[:, :1].double()
    planes = planes_of(X, [numbers, vectors, matrices, images])
    assert planes.shape == (3, 1 + 4 + 6 + 1, 16, 16)
    assert planes.dtype == X.dtype
    flat = torch.cat([numbers[:, None], vectors, matrices.flatten(1)], 1)
    assert torch.equal(planes[:, :11], flat[..., None, None].expand(-1, -1, 16, 16))
    assert torch.equal(planes[:, 11:], X[:, :1])
    assert planes_of(X, []).shape == (3, 0, 16, 16)


def test_the_network_by_hand():
    """Six layers; each but the last gets the input again."""
    params = Swirl().sample(X, generator())
    net = untrained(X, params)
    center, radius, strength = params
    values = torch.cat([center, radius[:, None], strength[:, None]], 1)
    low, high = values.amin(0), values.amax(0)
    place = torch.arange(-1, 1, 2 / 16)
    row, column = torch.meshgrid(place, place, indexing="ij")
    planes = ((values - low) / (high - low))[..., None, None].expand(3, 4, 16, 16)
    seen = torch.cat([X, row.expand(3, 1, 16, 16), column.expand(3, 1, 16, 16), planes], 1)
    y, widths, sizes = seen, [], []
    for number, (conv, norm, _) in enumerate(net.layers):
        assert conv.bias is None
        widths.append(conv.out_channels)
        sizes.append(conv.kernel_size[0])
        y = conv2d(y, conv.weight, padding=sizes[-1] // 2)
        y = batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias).relu()
        y = torch.cat([y, seen], 1) if number < 5 else y
    assert widths == [16, 22, 32, 45, 64, 3]
    assert sizes == [5, 5, 5, 5, 5, 3]
    assert torch.allclose(net(X, *params), y.clamp(0, 1), atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_any_image_size(channels):
    x = torch.rand(2, channels, 16, 16)
    net = untrained(x, Gamma().sample(x))
    for shape in ((24, 20), (7, 31)):
        x = torch.rand(2, channels, *shape)
        y = net(x, *Gamma().sample(x))
        assert y.shape == x.shape
        assert 0 <= y.min() <= y.max() <= 1


@pytest.mark.parametrize("transform", [Gamma(), FFT(), Swirl(), VerticalFlip(), HardPrecision()])
def test_images_of_the_transform_and_gradient_of_the_network(transform):
    params = transform.sample(X, generator(3))
    y = transform(X, *params)
    net = untrained(X, params)
    x = X.clone().requires_grad_()
    learned = approximated(transform, x, params, net)
    plain = approximated(transform, x, params)
    unused = approximated(transform, X, params, lambda *_: pytest.fail("called"))
    for value in (learned, plain, unused):
        assert torch.equal(value, y)
    (gradient,) = torch.autograd.grad(learned, x, V)
    _, by_hand = torch.autograd.functional.vjp(lambda x: net(x, *params), X, V)
    assert gradient.any()
    assert torch.allclose(gradient, by_hand, atol=1e-6)
    (gradient,) = torch.autograd.grad(plain, x, V)
    assert torch.equal(gradient, V)


class Flat(nn.Module):
    """A linear network on 3x16x16."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3 * 16 * 16, generator=generator(2)))

    def forward(self, x):
        return x.flatten(1) @ self.weight.T


@pytest.mark.parametrize("gradients", ["bpda", "identity", "combo"])
def test_an_attack_in_inference_mode(gradients):
    transforms = [HardPrecision((4, 8)), Gamma(0.1)]
    nets = {type(t).__name__: untrained(X, t.sample(X, generator())) for t in transforms}
    defense = RandomTransforms(
        Flat(), transforms, 2, 4, gradients=gradients, approximations=nets
    ).eval()
    y = defense(X, generator()).argmax(1)
    attack = PGD(Threat("linf", 0.1), 3, 0.05)
    outside = attack(defense, X, y, generator())
    with torch.inference_mode():
        x_adv = attack(defense, X.clone(), y.clone(), generator())
        probabilities = defense(x_adv, generator())
    assert torch.equal(x_adv, outside)
    assert all(weight.grad is None for net in nets.values() for weight in net.parameters())
    if gradients == "identity":  # the networks are untrained
        assert (probabilities.argmax(1) != y).all()


@pytest.mark.parametrize("transform", [VerticalFlip(), Gamma(0.9)])
def test_it_learns(transform):
    images = smooth_images(384, 8)
    trained = train_bpda(transform, images[:192], 12, 16, generator=generator())
    assert trained.error < 0.25 * trained.identity
    fresh = images[192:]
    params = transform.sample(fresh, generator(5))
    y = transform(fresh, *params)
    assert (trained.net(fresh, *params) - y).square().mean() < 0.25 * (fresh - y).square().mean()
    assert not trained.net.training
    assert not any(weight.requires_grad for weight in trained.net.parameters())


def test_training_depends_on_its_generator_alone():
    images = smooth_images(24, 8)
    before = torch.get_rng_state()
    runs = [train_bpda(Erase(), images, 1, 8, generator=generator(s)) for s in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    first, again, other = (run.net(images, *Erase().sample(images, generator())) for run in runs)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_best_epoch_is_kept():
    images = smooth_images(24, 8)
    runs = [
        train_bpda(VerticalFlip(), images, epochs, 8, lr=3.0, generator=generator())
        for epochs in range(1, 8)
    ]
    errors = [run.error for run in runs]
    assert errors == sorted(errors, reverse=True)
    assert 1 < len(set(errors)) < len(errors)  # some epochs made it better and some worse
    for before, after in pairwise(runs):
        same = torch.equal(before.net(images), after.net(images))
        assert same == (before.error == after.error)


@pytest.mark.parametrize("bad", [{"epochs": 0}, {"batch_size": 0}, {"images": X[:1]}])
def test_training_refuses(bad):
    with pytest.raises(ValueError, match="must be at least 1"):
        train_bpda(Gamma(), **({"images": X} | bad))


def saved(folder, transform, x=X, **about):
    net = untrained(x, transform.sample(x, generator()))
    return net, save_approximation(folder, transform, x.shape[1:], net, **about)


def test_there_and_back(tmp_path):
    transforms = [Affine(0.2), Erase(), HardPrecision()]
    more = {"epochs": 3, "error": 0.5}
    nets = {type(t).__name__: saved(tmp_path / "new", t, **more)[0] for t in transforms}
    with torch.inference_mode():
        found = load_approximations(tmp_path / "new", transforms)
    assert list(found) == ["Affine", "Erase", "HardPrecision"]
    for transform in transforms:
        name, params = type(transform).__name__, transform.sample(X, generator(4))
        assert torch.equal(found[name](X, *params), nets[name](X, *params))
        x = X.clone().requires_grad_()
        y = approximated(transform, x, params, found[name])
        assert torch.autograd.grad(y, x, V)[0].any()
        assert not found[name].training
        assert not any(weight.requires_grad for weight in found[name].parameters())
    _, about = load_approximation(place_of(tmp_path / "new", Affine(0.2), (3, 16, 16)))
    assert about == more | {"transform": "Affine(alpha=0.2)", "shape": [3, 16, 16]}


def test_a_file_depends_on_transform_arguments_and_shape_but_not_on_p():
    same = [HardPrecision((8, 200)), HardPrecision([8, 200.0]), HardPrecision((8, 200), p=0.1)]
    places = {place_of("f", t, (3, 8, 8)).name for t in same}
    assert len(places) == 1
    others = [
        (HardPrecision((8, 100)), (3, 8, 8)),
        (HardPrecision(), (1, 8, 8)),
        (Gamma(), (3, 8, 8)),
    ]
    places |= {place_of("f", *other).name for other in others}
    assert len(places) == 4
    assert place_of("f", Gamma(), (3, 8, 8)).name.startswith("Gamma_")


def test_augmentations_of_kornia_have_networks_of_their_own(tmp_path):
    kinds = [FromKornia(kornia.RandomPosterize(3, p=1.0)), FromKornia(kornia.RandomEqualize(p=1.0))]
    for kind in kinds:
        save_approximation(tmp_path, kind, [1, 6, 6], BPDANet(1, 1))
    assert load_approximations(tmp_path, kinds).keys() == {"RandomPosterize", "RandomEqualize"}


def test_missing_networks(tmp_path):
    saved(tmp_path, Affine(0.2))
    with pytest.raises(FileNotFoundError, match=r"network of Affine\(alpha=0.3\): train .*bpda"):
        load_approximations(tmp_path, [Affine(0.2), Affine(0.3)])
    with pytest.raises(FileNotFoundError, match="Gamma"):
        RandomTransforms(Flat(), [Gamma()], 1, 2, gradients="bpda", approximations=str(tmp_path))
    saved(tmp_path, Affine(0.2), X[..., :8])
    with pytest.raises(ValueError, match=r"several networks of Affine\(alpha=0.2\), keep one: "):
        load_approximations(tmp_path, [Affine(0.2)])


def test_another_file_is_refused(tmp_path):
    place = place_of(tmp_path, Gamma(), (3, 16, 16))
    torch.save({"a": 1}, place)
    with pytest.raises(ValueError, match="is no network of lightning-rob bpda"):
        load_approximations(tmp_path, [Gamma()])
    place.write_bytes(b"not a network")
    with pytest.raises(ValueError, match="is not a PyTorch checkpoint"):
        load_approximations(tmp_path, [Gamma()])
