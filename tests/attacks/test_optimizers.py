from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_rob.attacks import PGD, Adam, AggMo, Nesterov, aggmo
from lightning_rob.defenses import Single
from lightning_rob.threat import Threat
from tests.attacks.common import mlp, noise_images

LINF, L2 = Threat("linf", 0.4), Threat("l2", 0.9)
both_norms = pytest.mark.parametrize("threat", [LINF, L2], ids=["linf", "l2"])
OPTIMIZERS = {
    "sign": AggMo((0.0,)),
    "momentum": AggMo((0.9,)),
    "boosted": AggMo((0.9,), "normalized"),
    "aggmo": AggMo(),
    "aggmo of gradients": AggMo(aggmo(4), "gradients"),
    "aggmo as printed": AggMo(aggmo(4), "paper"),
    "nesterov": Nesterov(),
    "adam": Adam(),
}
all_optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def gradients(count=7, batch=3, seed=0):
    """Of all lengths, with a few entries of zero."""
    chance = torch.Generator().manual_seed(seed)
    drawn = torch.randn((count, batch, 2, 4), generator=chance).double()
    lengths = 10 ** torch.empty(count, batch, 1, 1).uniform_(-3, 3, generator=chance).double()
    return drawn * lengths * (torch.rand(drawn.shape, generator=chance) > 0.1)


def steps_of(optimizer, threat, given):
    rule = optimizer.init(threat)
    return torch.stack([rule(g) for g in given])


def per_image(function, g):
    return torch.stack([function(image) for image in g])


def unit(g):
    return per_image(lambda image: image / image.abs().sum(), g)


def steepest(threat, g):
    return g.sign() if threat.norm == "linf" else per_image(lambda image: image / image.norm(), g)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


# by hand
@both_norms
@pytest.mark.parametrize("variant", ["steepest", "gradients", "normalized", "paper"])
@pytest.mark.parametrize("momentum", [(0.0, 0.9, 0.99), (0.0,), (0.9, 1.0)])
def test_aggmo_by_hand(threat, variant, momentum):
    given = gradients()
    velocities = [torch.zeros_like(given[0]) for _ in momentum]
    expected = []
    for g in given:
        if variant == "gradients":
            pushed = g.clamp(-(8**-0.5), 8**-0.5)
        else:
            pushed = unit(g) if variant == "normalized" else steepest(threat, g)
        velocities = [d * v + pushed for d, v in zip(momentum, velocities, strict=True)]
        if variant == "paper":
            expected.append(sum(velocities) / len(momentum))
        else:
            expected.append(sum(steepest(threat, v) for v in velocities) / len(momentum))
    close(steps_of(AggMo(momentum, variant), threat, given), torch.stack(expected))


def released(momentum, raw, step_size):
    """Entry by entry, as the RT authors' optimiser: where one image is after each step."""
    velocities = [[0.0] * len(raw[0]) for _ in momentum]
    point, most, path = [0.0] * len(raw[0]), 1 / len(raw[0]) ** 0.5, []
    for g in raw:
        for i, entry in enumerate(g):
            entry = min(max(entry, -most), most)
            for velocity, damping in zip(velocities, momentum, strict=True):
                velocity[i] = damping * velocity[i] + entry
                sign = (velocity[i] > 0) - (velocity[i] < 0)
                point[i] += step_size / len(momentum) * sign
        path.append(list(point))
    return path


@pytest.mark.parametrize("momentum", [aggmo(3), aggmo(6), (0.9, 1.0), (0.0,)])
def test_aggmo_of_gradients_is_that_of_the_released_code(momentum):
    """Of the recorded gradients neither the signs nor the lengths alone decide."""
    given = gradients(30)
    path = 0.3 * steps_of(AggMo(momentum, "gradients"), LINF, given).cumsum(0)
    expected = [released(momentum, given[:, i].flatten(1).tolist(), 0.3) for i in range(3)]
    expected = torch.tensor(expected, dtype=torch.float64)
    close(path, expected.transpose(0, 1).reshape(path.shape))
    if any(momentum):
        for variant in ("steepest", "normalized"):
            other = 0.3 * steps_of(AggMo(momentum, variant), LINF, given).cumsum(0)
            assert ((other - path).abs() > 0.01).double().mean() > 0.1


@both_norms
def test_nesterov_is_that_of_torch(threat):
    """A step of the steepest direction of its update, given gradients of length one."""
    point = nn.Parameter(torch.zeros(3, 2, 4).double())
    optimizer = torch.optim.SGD([point], lr=1.0, momentum=0.9, nesterov=True)
    given = gradients()
    for gradient, move in zip(given, steps_of(Nesterov(0.9), threat, given), strict=True):
        before = point.detach().clone()
        point.grad = -unit(gradient)
        optimizer.step()
        close(move, steepest(threat, point.detach() - before))


@both_norms
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9), (0.0, 0.0)])
def test_adam_is_that_of_torch(threat, betas):
    point = nn.Parameter(torch.zeros(3, 2, 4).double())
    optimizer = torch.optim.Adam([point], lr=1.0, betas=betas, eps=1e-30)
    given = gradients()
    for gradient, move in zip(given, steps_of(Adam(betas), threat, given), strict=True):
        before = point.detach().clone()
        point.grad = -gradient
        optimizer.step()
        ones = 1.0 if threat.norm == "linf" else 8**0.5
        close(move, (point.detach() - before) / ones)


@all_optimizers
@both_norms
def test_confident_networks_move_in_single_precision(threat, optimizer):
    """A gradient of 1e-25 leads where one of 0.1 does, which is not clamped either."""
    given = gradients().float()
    given *= 0.1 / given.abs().amax((0, 2, 3), keepdim=True)
    expected = steps_of(optimizer, threat, given)
    torch.testing.assert_close(
        steps_of(optimizer, threat, given * 1e-25), expected, rtol=1e-3, atol=1e-4
    )


@all_optimizers
@both_norms
def test_steps_of_single_images(threat, optimizer):
    """Alone, in a batch, or left of a batch; a zero gradient gives a zero step; lengths."""
    given = gradients(batch=5)
    alone = [steps_of(optimizer, threat, given[:, i : i + 1]) for i in range(5)]
    together = steps_of(optimizer, threat, given)
    close(together, torch.cat(alone, 1))
    rule, rows = optimizer.init(threat), torch.tensor([0, 3])
    for g in given[:4]:
        rule(g)
    rule = rule.select(rows)
    close(torch.stack([rule(g[rows]) for g in given[4:]]), together[4:, rows])
    assert steps_of(optimizer, threat, torch.zeros(3, 2, 4)).eq(0).all()
    # at most 1, except the printed AggMo, and Adam after a gradient larger than all before
    longest = {OPTIMIZERS["aggmo as printed"]: 7.0, OPTIMIZERS["adam"]: 3.2}
    lengths = threat.size(steps_of(optimizer, threat, gradients()).flatten(0, 1))
    assert lengths.max() <= longest.get(optimizer, 1.0) + 1e-9


def test_dampings_are_short_for_aggmo():
    net, (x, y) = mlp(1), noise_images()
    for momentum in [(0.0,), (0.9,), (0.0, 0.9, 0.99)]:
        short = PGD(LINF, 9, 0.05, momentum=momentum)
        long = replace(short, momentum=(0.0,), ascent=AggMo(momentum))
        results = [a(Single(net), x, y, torch.Generator().manual_seed(0)) for a in (short, long)]
        assert torch.equal(*results)


def test_dampings_of_the_papers():
    assert aggmo(1) == (0.0,)
    assert aggmo(6) == pytest.approx((0, 0.9, 0.99, 0.999, 0.9999, 0.99999))
    assert AggMo().momentum == aggmo(6)
