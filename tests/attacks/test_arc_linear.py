import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_rob.attacks import arc_linear
from lightning_rob.threat import Threat

ORDERS = [1.5, 2.0, 3.0, math.inf]


def norm(v, p):
    return max(abs(a) for a in v) if p == math.inf else sum(abs(a) ** p for a in v) ** (1 / p)


def dual_order(p):
    return 1.0 if p == math.inf else p / (p - 1)


def dot(a, b):
    return sum(i * j for i, j in zip(a, b, strict=True))


def accuracy(w, b, alpha, x, y):
    return sum(a for v, c, a in zip(w, b, alpha, strict=True) if y * (dot(v, x) + c) > 0)


def reference(w, b, alpha, x, y, p, eps):
    """Algorithm 1 for one point, in floats."""
    q, rho, size = dual_order(p), 0.05 * eps, range(len(x))
    order = sorted(range(len(w)), key=lambda i: (alpha[i], i), reverse=True)
    delta, v = [0.0 for _ in size], accuracy(w, b, alpha, x, y)
    for i in order:
        length = norm(w[i], q)
        g = [-y * math.copysign((abs(a) / length) ** (q - 1), a) if a else 0.0 for a in w[i]]
        zeta = abs(dot(w[i], x) + b[i]) / length
        if zeta >= eps or i == order[0]:
            beta = eps
        else:
            beta = eps / (eps - zeta) * abs(y * dot(w[i], delta) / length + zeta) + rho
        step = [delta[d] + beta * g[d] for d in size]
        long = max(norm(step, p), 1e-10)
        step = [eps * a / long for a in step]
        v_hat = accuracy(w, b, alpha, [x[d] + step[d] for d in size], y)
        if v_hat <= v:
            delta, v = step, v_hat
    return [x[d] + delta[d] for d in size]


def problem(seed, members, dim, opposition=0.0):
    """A point that all members have right, and how far each boundary is in w's own measure."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn((members, dim), generator=generator).double()
    w[1:] -= opposition * w[:1]
    x = torch.randn((1, dim), generator=generator).double()
    y = 2 * torch.randint(2, (1,), generator=generator) - 1
    margin = 0.05 + torch.rand(members, generator=generator).double()
    b = y * margin - (w @ x[0])
    alpha = torch.rand(members, generator=generator).double() + 0.05
    return w, b, alpha / alpha.sum(), x, y


def radius(w, b, x, p, share):
    """An eps that reaches the boundaries of this share of the members, at least one."""
    q = dual_order(p)
    zeta = sorted(
        abs(dot(v, x[0].tolist()) + c) / norm(v, q)
        for v, c in zip(w.tolist(), b.tolist(), strict=True)
    )
    reached = max(1, math.ceil(share * len(zeta)))
    return zeta[reached - 1] * 1.01


def check_consistent(w, b, alpha, x, y, p, eps):
    """Theorem 5.1 and the size of the perturbation."""
    x_adv = arc_linear(w, b, alpha, x, y, Threat(p, eps))
    assert x_adv.shape == x.shape
    assert x_adv.isfinite().all()
    size = norm((x_adv - x)[0].tolist(), p)
    assert size <= eps * (1 + 1e-9) + 1e-12
    sign = int(y)
    right = [
        sign * (dot(v, x_adv[0].tolist()) + c) > 0
        for v, c in zip(w.tolist(), b.tolist(), strict=True)
    ]
    assert not all(right)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    seed=st.integers(0, 2**31),
    members=st.integers(1, 5),
    dim=st.integers(1, 8),
    p=st.sampled_from(ORDERS),
    share=st.floats(0, 1),
    opposition=st.sampled_from([0.0, 1.0, 3.0, 100.0]),
    equal=st.booleans(),
)
def test_theorem_5_1(seed, members, dim, p, share, opposition, equal):
    """Whenever all members are right and one can be fooled, one is fooled."""
    w, b, alpha, x, y = problem(seed, members, dim, opposition)
    if equal:
        alpha = torch.full((members,), 1 / members).double()
    check_consistent(w, b, alpha, x, y, p, radius(w, b, x, p, share))


NUMBERS = st.integers(-8, 8).map(lambda n: n / 4)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(data=st.data(), p=st.sampled_from(ORDERS), eps=st.sampled_from([0.01, 0.1, 0.5, 1.0, 4.0]))
def test_theorem_5_1_in_degenerate_positions(data, p, eps):
    """Parallel and opposed members, ties, zeros in w, equal distances."""
    members, dim = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    rows = st.lists(NUMBERS, min_size=dim, max_size=dim).filter(any)
    w = torch.tensor(data.draw(st.lists(rows, min_size=members, max_size=members))).double()
    x = torch.tensor([data.draw(st.lists(NUMBERS, min_size=dim, max_size=dim))]).double()
    y = torch.tensor([data.draw(st.sampled_from([-1, 1]))])
    shares = data.draw(st.lists(st.integers(1, 3), min_size=members, max_size=members))
    alpha = torch.tensor(shares).double() / sum(shares)
    zeta = data.draw(
        st.lists(st.sampled_from([0.05, 0.25, 0.5, 0.95, 1.5]), min_size=members, max_size=members)
    )
    assume(min(zeta) < 1)
    q = dual_order(p)
    lengths = torch.tensor([norm(v, q) for v in w.tolist()]).double()
    b = y * eps * torch.tensor(zeta).double() * lengths - w @ x[0]
    check_consistent(w, b, alpha, x, y, p, eps)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    members=st.integers(1, 5),
    dim=st.integers(2, 8),
    p=st.sampled_from(ORDERS),
    share=st.floats(0, 1),
    equal=st.booleans(),
    all_right=st.booleans(),
)
def test_algorithm_1(seed, members, dim, p, share, equal, all_right):
    w, b, alpha, x, y = problem(seed, members, dim)
    if equal:
        alpha = torch.full((members,), 1 / members).double()
    if not all_right:
        y = -y if seed % 2 else y
        b = b * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])[:members]
    eps = radius(w, b, x, p, share)
    ours = arc_linear(w, b, alpha, x, y, Threat(p, eps))
    expected = reference(w.tolist(), b.tolist(), alpha.tolist(), x[0].tolist(), int(y), p, eps)
    torch.testing.assert_close(
        ours[0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("p", [1, *ORDERS])
def test_one_member_is_fooled_exactly_when_it_is_in_reach(p):
    w, b, _, x, y = problem(3, 1, 5)
    zeta = radius(w, b, x, p, 1.0) / 1.01 if p != 1 else abs(dot(w[0], x[0]) + b[0]) / w.abs().max()
    for factor, fooled in ((0.999, False), (1.001, True)):
        x_adv = arc_linear(w, b, [1.0], x, y, Threat(p, float(zeta) * factor))
        assert bool(y * (w[0] @ x_adv[0] + b[0]) < 0) == fooled
