import math
from itertools import product

import pytest
import torch
from scipy import stats

from lightning_rob.attacks import PGD
from lightning_rob.defenses import Single
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat, signs_of_largest
from tests.attacks.common import assert_inside

ORDERS = [1, 1.5, 2, 3, math.inf]


def batch(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=dtype)


def noise(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


def scalar_norm(values, p):
    values = [abs(v) for v in values]
    return max(values) if p == math.inf else sum(v**p for v in values) ** (1 / p)


# construction
def test_values_that_are_refused():
    for norm in ("l0", "lnan", "L", "", "nan", 0.5, 0, -2, math.nan, -math.inf):
        with pytest.raises(ValueError, match="norm must be 'linf', 'l2', 'l1' or a number >= 1"):
            Threat(norm)
    for eps in (-1e-9, "-8/255", math.nan, math.inf):
        with pytest.raises(ValueError, match="eps must be a finite radius >= 0, got"):
            Threat(eps=eps)
    for bounds in ((1.0, 0.0), (0.5, 0.5), (0.0, math.nan)):
        with pytest.raises(ValueError, match=r"bounds must be \(low, high\) with low < high"):
            Threat(bounds=bounds)


# norms and directions
@pytest.mark.parametrize("p", ORDERS)
def test_size_and_dual_of_each_image(p):
    delta, threat = noise(3, 2, 2, 2), Threat(p)
    q = math.inf if p == 1 else 1 if p == math.inf else p / (p - 1)
    for i in range(3):
        values = delta[i].flatten().tolist()
        assert threat.size(delta)[i].item() == pytest.approx(scalar_norm(values, p), rel=1e-12)
        assert threat.dual(delta)[i].item() == pytest.approx(scalar_norm(values, q), rel=1e-12)


@pytest.mark.parametrize("p", ORDERS)
def test_steepest_meets_hoelder_with_equality(p):
    threat, ones = Threat(p), torch.ones(4).double()
    for size in (1e-12, 1e-6, 1.0, 1e6, 1e12):
        g = size * noise(4, 3, 2, 2, seed=1)
        direction = threat.steepest(g)
        assert direction.shape == g.shape
        torch.testing.assert_close(threat.size(direction), ones, rtol=1e-9, atol=0)
        reached = (direction * g).flatten(1).sum(1)
        torch.testing.assert_close(reached, threat.dual(g), rtol=1e-9, atol=0)


@pytest.mark.parametrize("p", ORDERS)
def test_steepest_of_float32_gradients_of_any_scale(p):
    """A confident network's gradients are far below 1e-20, where their squares are zero."""
    threat, g = Threat(p), noise(2, 3, 2, 2, seed=2)
    expected = threat.steepest(g).float()
    for size in (1e-27, 1e-20, 1e18):
        strange = (g * size).float().to(memory_format=torch.channels_last)
        torch.testing.assert_close(threat.steepest(strange), expected, rtol=1e-5, atol=1e-6)


# projection
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_project_is_inside_and_idempotent(norm, dtype):
    for eps in (0.0, 1e-8, 0.1, 3.0):
        threat = Threat(norm, eps)
        x = batch(5, 3, 4, 4, dtype=dtype)
        x_adv = x + noise(5, 3, 4, 4, dtype=dtype)
        once = threat.project(x_adv, x)
        assert_inside(threat, once, x)
        torch.testing.assert_close(threat.project(once, x), once, rtol=0, atol=1e-6)
        assert eps > 0 or torch.equal(once, x)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_project_finds_the_nearest_point(norm):
    """Away from the bounds; no random point of the ball is nearer in the Euclidean sense."""
    threat, x = Threat(norm, 0.2), torch.full((1, 4), 0.5, dtype=torch.float64)
    outside = x + 0.4 * noise(1, 4, seed=4).sign() * batch(1, 4, seed=5)
    best = (threat.project(outside, x) - outside).norm()
    delta = 0.2 * (2 * batch(4000, 4, seed=6) - 1)
    delta = delta[threat.size(delta) <= 0.2]
    assert len(delta) > 500
    assert (x + delta - outside).norm(dim=1).min() >= best - 1e-12


def nearest_by_bisection(x, x_adv, radius):
    """The nearest point of the l1 ball within [0, 1]: the multiplier of the norm by bisection."""
    delta = (x_adv - x).double()
    x = x.double()

    def shrunk(t):
        return torch.clamp(delta.sign() * (delta.abs() - t).clamp_min(0), -x, 1 - x)

    low, high = torch.zeros(len(x), 1).double(), delta.abs().amax(1, keepdim=True) + 1
    for _ in range(100):
        middle = (low + high) / 2
        above = shrunk(middle).abs().sum(1, keepdim=True) > radius
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    inside = shrunk(torch.zeros(1)).abs().sum(1, keepdim=True) <= radius
    return x + torch.where(inside, shrunk(torch.zeros(1)), shrunk(high))


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.3, 1.0, 12.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_project_l1_is_the_nearest_point_of_ball_and_bounds(dtype, eps):
    """Pixels at the bounds, equal values, images of one pixel, perturbations of any size."""
    for n, size in product((1, 2, 17, 784), (1e-3, 0.3, 5.0)):
        x = (1.5 * batch(9, n, seed=n) - 0.25).clamp(0, 1).to(dtype)
        x_adv = x + size * noise(9, n, seed=n + 1).to(dtype)
        x_adv[0], x_adv[1], x_adv[2] = x[0], x[1] + size, x[2] - size
        found = Threat("l1", eps).project(x_adv, x)
        assert found.dtype == dtype
        error = (found.double() - nearest_by_bisection(x, x_adv, eps)).abs().max()
        assert error <= 4 * torch.finfo(dtype).eps * max(size, 1)
        if dtype in (torch.float32, torch.float64):
            assert_inside(Threat("l1", eps * (1 + 1e-6) + 1e-5), found, x)


def test_signs_of_largest_by_hand():
    g = torch.tensor([[3.0, -4.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1e-30, -2e-30, 0.0, 0.0]])
    half, all_of_it = signs_of_largest(g, 0.5), signs_of_largest(g, torch.ones(3))
    expected = torch.tensor([[0.5, -0.5, 0, 0], [0, 0, 0, 0], [0.5, -0.5, 0, 0]])
    assert torch.equal(half, expected)
    assert torch.allclose(all_of_it[0], torch.tensor([1 / 3, -1 / 3, 0, 1 / 3]))
    assert torch.equal(Threat("l1").direction(g)[0], torch.tensor([0.0, -1, 0, 0]))


def test_free_drops_what_points_out_of_the_bounds():
    x, g = torch.tensor([[0.0, 0.0, 1.0, 1.0, 0.5]]), torch.tensor([[1.0, -1, 1, -1, 2]])
    assert Threat("l1").free(g, x).tolist() == [[1, 0, 0, -1, 2]]


# random starts
@pytest.mark.parametrize("p", ORDERS)
def test_start_is_inside(p):
    x = batch(7, 3, 4, 4)
    generators = (torch.Generator().manual_seed(1), Streams(torch.arange(7)))
    for eps, generator in product((0.0, 0.1, 5.0), generators):
        threat = Threat(p, eps)
        start = threat.start(x, generator)
        assert_inside(threat, start, x)
        assert torch.equal(start, x) == (eps == 0)


def test_start_linf_is_uniform_in_every_pixel():
    x = torch.full((4000, 2), 0.5, dtype=torch.float64)
    delta = Threat("linf", 0.2).start(x, torch.Generator().manual_seed(2)) - x
    for pixel in range(2):
        sample = delta[:, pixel].numpy()
        assert stats.kstest(sample, stats.uniform(-0.2, 0.4).cdf).pvalue > 1e-3
    assert abs(stats.pearsonr(*delta.T.numpy()).statistic) < 0.06


def test_start_l2_has_uniform_radius_and_any_direction():
    threat = Threat("l2", 0.3)
    x = torch.full((4000, 3), 0.5, dtype=torch.float64)
    delta = threat.start(x, torch.Generator().manual_seed(3)) - x
    radius = threat.size(delta)
    assert stats.kstest(radius.numpy(), stats.uniform(0, 0.3).cdf).pvalue > 1e-3
    # each coordinate of a uniform direction in three dimensions is uniform (Archimedes)
    direction = delta / radius[:, None]
    for pixel in range(3):
        sample = direction[:, pixel].numpy()
        assert stats.kstest(sample, stats.uniform(-1, 2).cdf).pvalue > 1e-3


def test_relative_lengths_are_shares_of_the_images_own_norm():
    x = torch.stack([torch.full((1, 2, 2), 0.5), torch.full((1, 2, 2), 0.25)])
    threat = Threat("l2", 0.1, relative=True)
    assert threat.unit(x).tolist() == pytest.approx([1.0, 0.5])
    moved = threat.project(x + 0.2, x)
    assert threat.distance(moved, x).tolist() == pytest.approx([0.1, 0.1])
    assert threat.size(moved - x).tolist() == pytest.approx([0.1, 0.05])
    assert str(threat) == "l2 10 % of the image"


@pytest.mark.parametrize("norm", ["l2", "linf", "l1"])
def test_a_black_image_has_no_relative_ball(norm):
    black, threat = torch.zeros(2, 1, 4, 4), Threat(norm, 0.3, relative=True)
    assert torch.equal(threat.project(black + 0.5, black), black)
    assert torch.equal(threat.start(black, torch.Generator().manual_seed(0)), black)
    assert threat.distance(black, black).tolist() == [0, 0]
    assert threat.distance(black + 0.1, black).isinf().all()


def test_pgd_climbs_as_far_as_a_relative_ball_lets_it():
    """On a linear network the steepest l2 step is known: as far as the radius, along w."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    x, y = 0.4 + 0.2 * torch.rand(5, 1, 4, 4), torch.zeros(5, dtype=torch.long)
    threat = Threat("l2", 0.1, relative=True)
    x_adv = PGD(threat, 10, 0.05, random_start=False)(Single(net), x, y)
    w = (net[1].weight[1] - net[1].weight[0]).detach().view(1, 1, 4, 4)
    radius = 0.1 * x.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    assert torch.allclose(x_adv, x + radius * w / w.norm(), atol=1e-5)


def test_a_threat_in_words():
    assert str(Threat("linf", "8/255")) == "linf 8/255"
    assert str(Threat("l2", 128 / 255)) == "l2 128/255"
    assert str(Threat("l2", 0.03141)) == "l2 0.03141"  # nearly 8/255
    assert str(Threat("l2", 2.0)) == "l2 2"
    assert str(Threat("linf", 0)) == "linf 0"


def test_steepest_keeps_ties_of_l1_on_one_pixel():
    direction = Threat(1).steepest(torch.tensor([[-2.0, 2.0, 1.0]]))
    assert direction.abs().sum() == 1
    assert (direction != 0).sum() == 1


def test_apply_never_leaves_the_bounds():
    threat = Threat("linf", 0.5, (-0.1, 0.7))
    x, delta = torch.tensor([[-0.1, 0.3, 0.7]]), torch.tensor([[-1e-7, 0.1, 0.2]])
    applied = threat.apply(delta, x)
    assert applied.min() >= -0.1
    assert applied.tolist()[0] == pytest.approx([-0.1, 0.4, 0.7])
