"""Attacks of other packages give the images here that they give alone."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_rob import Ensemble, Foreign, Single, Threat
from lightning_rob.attacks.foreign import scores
from lightning_rob.rules import mean_logits, mean_probs
from tests.attacks.common import images, trained_net

LINF, L2 = Threat("linf", 32 / 255), Threat("l2", 0.7)
NET = trained_net(0)
X, Y = images(12)


def sign_step(model, x, y):
    """FGSM as anyone would write it."""
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(model(x), y, reduction="sum"), x)
    return (x + LINF.eps * gradient.sign()).clamp(0, 1)


def noisy(model, x, y):
    return (x + LINF.eps * (2 * torch.rand_like(x) - 1)).clamp(0, 1)


def test_it_is_the_attack_alone():
    found = Foreign(LINF, sign_step)(Single(NET), X, Y)
    assert torch.allclose(found, sign_step(NET.eval(), X.clone(), Y), atol=1e-6)


def test_an_ensemble_is_one_network():
    defense, weights = Ensemble([NET, trained_net(1)], [0.3, 0.7]).eval(), torch.tensor([0.3, 0.7])
    for draws in (None, 3):
        defense.rule, z = mean_probs, defense.logits(X)
        found, expected = scores(defense, X, None, draws), weights @ z.softmax(-1).transpose(0, 1)
        assert torch.allclose(found.softmax(1), expected, atol=1e-6)
        defense.rule = mean_logits
        expected = weights @ z.transpose(0, 1)
        assert torch.allclose(scores(defense, X, None, draws), expected, atol=1e-6)
    single = Single(NET).eval()
    assert torch.equal(scores(single, X, None, None), single.net(X))


def test_noise_is_that_of_the_evaluation():
    attack = Foreign(LINF, noisy)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = [attack(Single(NET), X, Y, torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_the_threat_is_checked():
    far = Foreign(Threat("linf", 8 / 255), sign_step)
    with pytest.raises(ValueError, match="left linf 8/255: largest perturbation"):
        far(Single(NET), X, Y)
    found = Foreign(Threat("linf", 8 / 255), sign_step, minimal=True)(Single(NET), X, Y)
    assert torch.equal(found, X)
    with pytest.raises(ValueError, match="must return finite images"):
        Foreign(LINF, lambda model, x, y: x[:1])(Single(NET), X, Y)
    with pytest.raises(ValueError, match="give a Foreign for each radius"):
        far.rescaled(0.1)


def foolbox(model, x, y):
    fb = pytest.importorskip("foolbox")
    attack = fb.attacks.LinfPGD(rel_stepsize=0.25, steps=5, random_start=False)
    return attack(fb.PyTorchModel(model, bounds=(0, 1)), x, y, epsilons=LINF.eps)[1]


def decision_based(model, x, y):
    fb = pytest.importorskip("foolbox")
    attack = fb.attacks.LinearSearchBlendedUniformNoiseAttack(directions=20, steps=20)
    return attack(fb.PyTorchModel(model, bounds=(0, 1)), x, y, epsilons=None)[1]


def torchattacks(model, x, y):
    package = pytest.importorskip("torchattacks")
    return package.PGD(model, LINF.eps, LINF.eps / 4, steps=5, random_start=False)(x, y)


def adv_lib(model, x, y):
    package = pytest.importorskip("adv_lib.attacks")
    return package.ddn(model, x, y, steps=20, levels=None)  # rounding to levels may go either way


def adv_lib_l1(model, x, y):
    package = pytest.importorskip("adv_lib.attacks")
    return package.fmn(model, x, y, norm=1, steps=100)


CASES = {
    foolbox: (LINF, False),
    decision_based: (Threat("l2", 3.0), True),
    torchattacks: (LINF, False),
    adv_lib: (L2, True),
    adv_lib_l1: (Threat(1, 5.0), True),
}


@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
@pytest.mark.filterwarnings("ignore")
def test_packages(run):
    threat, minimal = CASES[run]
    attack = Foreign(threat, run, minimal)
    found = attack(Single(NET), X, Y, torch.Generator().manual_seed(0))
    if run is not decision_based:  # it draws noise
        alone = run(nn.Sequential(NET).eval(), X.clone(), Y.clone())
        inside = threat.distance(alone, X) <= threat.eps
        assert torch.allclose(found[inside], alone[inside], atol=1e-6)
    fooled = NET(found).argmax(1) != Y
    assert fooled.sum() > (NET(X).argmax(1) != Y).sum()
