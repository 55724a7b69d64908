"""FAB walks as its authors' code does, and its projections are the shortest."""

import pytest
import torch
from scipy.optimize import linprog

from lightning_rob.attacks import FAB, attacking
from lightning_rob.attacks.fab import to_hyperplane
from lightning_rob.defenses import Single
from lightning_rob.threat import Threat
from tests.attacks.common import Recording, images, seeded, trained_net

LINF, L2 = Threat("linf", "24/255"), Threat("l2", 0.5)
L1 = Threat("l1", 0.8)
both_norms = pytest.mark.parametrize("threat", [LINF, L2], ids=["linf", "l2"])
every_norm = pytest.mark.parametrize("threat", [LINF, L2, L1], ids=["linf", "l2", "l1"])


@both_norms
def test_projection_is_the_shortest_of_the_box(threat):
    """By the conditions of optimality: pixels not at their bound move by lambda |w|^(q-1)."""
    x = torch.rand((200, 30), generator=seeded(), dtype=torch.float64)
    w = torch.randn((200, 30), generator=seeded(1), dtype=torch.float64)
    w[:, 3], x[:, 4], x[:, 5] = 0, 0, 1
    gap = 6 * torch.randn(200, generator=seeded(2), dtype=torch.float64)
    d = to_hyperplane(x, w, gap, threat)
    assert ((x + d >= -1e-12) & (x + d <= 1 + 1e-12)).all()
    left = gap + (w * d).sum(1)
    reached = left.abs() < 1e-9
    assert 20 < reached.sum() < 200
    free = (x + d > 1e-9) & (x + d < 1 - 1e-9) & (w != 0)
    assert not free[~reached].any()
    rate = d.abs() if threat.norm == "linf" else d.abs() / w.abs()
    for row in reached.nonzero()[:, 0]:
        most = rate[row][w[row] != 0].max()
        torch.testing.assert_close(rate[row][free[row]], most.expand(int(free[row].sum())))
        assert (d[row] * gap[row] * w[row] <= 0).all()


def test_projection_in_l1_is_that_of_a_linear_program():
    x = torch.rand((40, 8), generator=seeded(), dtype=torch.float64)
    w = torch.randn((40, 8), generator=seeded(1), dtype=torch.float64)
    w[:, 3], x[:, 4], x[:, 5] = 0, 0, 1
    gap = torch.randn(40, generator=seeded(2), dtype=torch.float64)
    found, solved = to_hyperplane(x, w, gap, L1), 0
    assert ((x + found >= -1e-12) & (x + found <= 1 + 1e-12)).all()
    for row in range(40):
        bounds = [(0, 1 - float(v)) for v in x[row]] + [(0, float(v)) for v in x[row]]
        weights = torch.cat([w[row], -w[row]])[None].numpy()  # of moves up, and of moves down
        best = linprog([1.0] * 16, A_eq=weights, b_eq=[-float(gap[row])], bounds=bounds)
        if best.status == 0:
            solved += 1
            assert float(found[row].abs().sum()) == pytest.approx(best.fun, abs=1e-9)
            assert float((w[row] * found[row]).sum()) == pytest.approx(-float(gap[row]), abs=1e-9)
    assert 20 < solved < 40


@every_norm
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_projection_does_not_depend_on_the_normals_length(threat, size):
    x, w = torch.rand((20, 12), generator=seeded()), torch.randn((20, 12), generator=seeded(1))
    gap = torch.randn(20, generator=seeded(2))
    d = to_hyperplane(x, size * w, size * gap, threat)
    torch.testing.assert_close(d, to_hyperplane(x, w, gap, threat), rtol=1e-4, atol=1e-5)


@every_norm
def test_iterates_are_those_of_the_package(threat, double, monkeypatch):
    """Image by image, from the image, until it is misclassified within the ball."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # where the package rounds
    package = pytest.importorskip("pyautoattack.fab_pt")
    net, (x, y) = trained_net(1).double().eval(), images(6, seed=1)
    x, lengths = x.double(), []
    for i in range(len(x)):
        one, recording, reference = x[i : i + 1], Recording(net), Recording(net)
        x_adv = FAB(threat, 25, 1)(Single(recording), one, y[i : i + 1], seeded())
        norm = threat.norm.capitalize()
        fab = package.FABAttack_PT(reference, norm=norm, n_iter=25, eps=threat.eps, device="cpu")
        fab.target_class = 2
        with attacking(Single(net)):
            fab.attack_single_run(one, y[i : i + 1], is_targeted=True)
        ours, theirs = recording.seen[1:], reference.seen[2:]
        for step, (image, other) in enumerate(zip(ours, theirs, strict=False)):
            torch.testing.assert_close(image, other, rtol=0, atol=1e-7, msg=f"{i}, {step}")
            first, second = net(image)[0].topk(2).values
            if first - second < 1e-9:  # on the boundary itself: rounding decides how it goes on
                break
        else:
            lengths.append(len(ours))
            assert len(ours) == len(theirs) or torch.equal(x_adv, ours[-1])
    assert len(lengths) > 3
    assert max(lengths) == 50 and min(lengths) < 50
