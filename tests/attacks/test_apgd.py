"""APGD walks as its authors' code does, and never ends weaker than it began."""

from dataclasses import replace

import pytest
import torch

from lightning_rob.attacks import APGD, PGD, attacking
from lightning_rob.attacks.active_set import derived
from lightning_rob.attacks.apgd import Ascent, surface_point
from lightning_rob.defenses import DENT, Ensemble, RandomTransforms, Single
from lightning_rob.objectives import expected_ce, expected_dlr, expected_margin, worst_ce
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise
from tests.attacks.common import (
    Recording,
    accuracy,
    assert_inside,
    images,
    right,
    seeded,
    trained_net,
)
from tests.counting import Counting

LINF, L2, L1 = Threat("linf", "24/255"), Threat("l2", 0.5), Threat("l1", 0.8)
both_norms = pytest.mark.parametrize("threat", [LINF, L2], ids=["linf", "l2"])
every_norm = pytest.mark.parametrize("threat", [LINF, L2, L1], ids=["linf", "l2", "l1"])


def package_iterates(threat, loss, net, x, y, start, rank=None):
    """The images that the authors' code calls the network on, from a given start."""
    base = pytest.importorskip("pyautoattack.autopgd_base")
    norm = threat.norm.capitalize()
    kind = base.APGDAttack_targeted if loss == "dlr-targeted" else base.APGDAttack
    recording = Recording(net)
    attack = kind(recording, norm=norm, eps=threat.eps, device="cpu")
    attack.loss = loss
    attack.init_hyperparam(x)
    if rank is not None:
        attack.y_target = net(x).sort(dim=1)[1][:, -2 - rank]
    if threat.norm == "l1":  # it compares rounding errors of its own projections with 0
        base.L0_norm = lambda z: (z.abs() > 1e-9).flatten(1).sum(1)
    for radius, steps in ((3, 30), (2, 30), (1, 40)) if threat.norm == "l1" else ((1, 100),):
        attack.eps, attack.n_iter = radius * threat.eps, steps
        if threat.norm == "l1":
            start = start + base.L1_projection(x, start - x, attack.eps)
        start = attack.attack_single_run(x, y, x_init=start)[0]
    return recording.seen


LOSSES = {
    "ce": ("ce", {}),
    "dlr": ("dlr", {"objective": expected_dlr}),
    "targeted dlr": ("dlr-targeted", {"targets": 1}),
}


@every_norm
@pytest.mark.parametrize(("loss", "options"), LOSSES.values(), ids=LOSSES)
def test_iterates_are_those_of_the_package(threat, loss, options, double, monkeypatch):
    """Image by image, from the same start, until the image is fooled."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # where the package rounds
    net, (x, y) = trained_net(1).double().eval(), images(4, seed=1)
    x, lengths, whole = x.double(), [], 103 if threat.norm == "l1" else 101  # three starts
    for i in (1, 2):  # of which one is not fooled
        noise = Streams.from_index(torch.tensor([i]), 1)
        first = replace(threat, eps=3 * threat.eps) if threat.norm == "l1" else threat
        start = surface_point(first, x[i : i + 1], derived(derived(noise, 0), 1))
        recording = Recording(net)
        APGD(threat, **options)(Single(recording), x[i : i + 1], y[i : i + 1], noise)
        ours = recording.seen[1:]  # the first is the clean image
        rank = 0 if "targets" in options else None
        with attacking(Single(net)):
            theirs = package_iterates(threat, loss, net, x[i : i + 1], y[i : i + 1], start, rank)
        ours = ours[: len(theirs)]  # a last one evaluates the objective, if there are targets
        for step, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5, msg=f"image {i}, {step}")
        lengths.append(len(ours))
        assert len(ours) == whole or (net(ours[-1]).argmax(1) != y[i]).all()
    assert lengths[1] < lengths[0] == whole


@both_norms
def test_without_early_stop_the_images_are_those_of_the_package(threat, double):
    """The last misclassified iterate of the first run that finds one."""
    base = pytest.importorskip("pyautoattack.autopgd_base")
    net, (x, y) = trained_net(1).double().eval(), images(12, seed=1)
    x, norm = x.double(), threat.norm.capitalize()
    attack = base.APGDAttack(net, norm=norm, eps=threat.eps, device="cpu")
    attack.init_hyperparam(x)
    noise = Streams.from_index(torch.arange(12), 1)
    start = surface_point(threat, x, derived(derived(noise, 0), 1))
    x_adv = APGD(threat, early_stop=False)(Single(net), x, y, noise)
    with attacking(Single(net)):
        best, right_still, _, fooling = attack.attack_single_run(x, y, x_init=start)
    expected = torch.where(right_still.view(-1, 1, 1, 1), best, fooling)
    assert 0 < right_still.sum() < 12
    # the package adds 1e-12 to the norm of a step
    torch.testing.assert_close(x_adv, expected, rtol=0, atol=1e-5)


def test_checkpoints_are_those_of_the_paper():
    """p_j = 0, 0.22, 0.41, 0.57, 0.70, 0.80, 0.87, 0.93, 0.99."""
    assert list(Ascent.checkpoints(100)) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert list(Ascent.checkpoints(3)) == [1, 2, 3]


@every_norm
def test_starts_lie_on_the_surface(threat):
    x = torch.full((50, 3, 4, 4), 0.5)
    distance = threat.distance(surface_point(threat, x, seeded()), x)
    torch.testing.assert_close(distance, torch.full_like(distance, threat.eps))


def test_a_randomized_ensemble_is_left_at_the_best_value():
    """One member may still be right: the image goes on, and ends at the largest objective."""
    ensemble, (x, y) = Ensemble([trained_net(1), trained_net(2)], [0.6, 0.4]), images(60, seed=4)
    for objective in (expected_ce, worst_ce):
        x_adv = APGD(LINF, 30, objective)(ensemble, x, y, seeded())
        with attacking(ensemble) as ensemble, torch.no_grad():
            values = [objective(ensemble.logits(z), ensemble.weights, y) for z in (x, x_adv)]
        fooled = right(ensemble, x_adv, y) == 0
        assert (fooled | (values[1] >= values[0])).all()
    assert accuracy(ensemble, x_adv, y) < accuracy(ensemble, x, y) - 0.2
    reference = PGD(LINF, 30, LINF.eps / 8)(ensemble, x, y, seeded())
    x_adv = APGD(LINF, 30)(ensemble, x, y, seeded())
    assert accuracy(ensemble, x_adv, y) <= accuracy(ensemble, reference, y) + 0.06


def test_a_random_defense_is_attacked_to_the_end():
    """One wrong prediction is no proof: no image leaves."""
    net, (x, y) = Counting(trained_net(1)).eval(), images(12, seed=5)
    defense = RandomTransforms(net, [GaussianNoise(alpha=0.1)], size=1, draws=2)
    x_adv = APGD(Threat("linf", 0.5), 10, draws=4)(defense, x, y, seeded())
    assert net.linearised == [4 * 12] * 12
    assert_inside(Threat("linf", 0.5), x_adv, x)


def test_a_defense_with_weights_for_each_image_keeps_its_batch():
    """DENT's scales and shifts belong to the images of the batch that it adapted to."""
    (x, y), defense = images(12, seed=6), DENT(trained_net(1), steps=2)
    adapted = defense.adapt(x, seeded())
    x_adv = APGD(LINF, 10)(adapted, x, y, seeded())
    assert accuracy(adapted, x_adv, y) < accuracy(adapted, x, y)


@every_norm
def test_is_as_strong_as_pgd_with_restarts(threat):
    """On the margin; under cross-entropy and DLR the iterates are those of the package."""
    defense, (x, y) = Single(trained_net(1)), images(100, seed=2)
    pgd = PGD(threat, 25, threat.eps / 8, expected_margin, restarts=2, early_stop=True)
    reference = right(defense, pgd(defense, x, y, seeded()), y)
    x_adv = APGD(threat, 40, expected_margin, restarts=2)(defense, x, y, seeded())
    assert_inside(threat, x_adv, x)
    assert right(defense, x_adv, y).sum() <= reference.sum() + 5
    assert 0 < reference.mean() < 0.9
