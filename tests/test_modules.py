"""Training losses against hand-written references, and what each member is trained on."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_rob.attacks import PGD
from lightning_rob.attacks.base import Attack
from lightning_rob.defenses import Ensemble, RandomTransforms, Single
from lightning_rob.modules import BAT, IAT, AdversarialTraining
from lightning_rob.objectives import ce_of_mean_probs
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise, VerticalFlip
from tests.tiny import TinyNet

THREAT = Threat("linf", 16 / 255)


def batch(n=8):
    chance = torch.Generator().manual_seed(3)
    return torch.rand(n, 3, 8, 8, generator=chance), torch.randint(0, 4, (n,), generator=chance)


class Spy(Attack):
    """Whites the images out and remembers what it was to attack."""

    def __init__(self):
        self.threat = THREAT
        self.seen = []

    def perturb(self, defense, x, y, generator):
        self.seen.append((defense, len(x)))
        return torch.ones_like(x)


def reference_trades(net, x, y, attack, beta, noise):
    """Zhang et al. 2019, eq. 5, by hand: sign ascent on KL in eval mode, then the two terms."""
    net.eval()
    target = F.softmax(net(x), 1).detach()
    x_adv = attack.threat.start(x, noise)
    for _ in range(attack.steps):
        x_adv.requires_grad_()
        gap = F.kl_div(F.log_softmax(net(x_adv), 1), target, reduction="sum")
        (g,) = torch.autograd.grad(gap, x_adv)
        x_adv = x_adv.detach() + attack.step_size * g.sign()
        x_adv = torch.min(torch.max(x_adv, x - attack.threat.eps), x + attack.threat.eps).clamp(
            0, 1
        )
    net.train()
    clean = net(x)
    robust = F.kl_div(F.log_softmax(net(x_adv), 1), F.softmax(clean, 1), reduction="batchmean")
    return F.cross_entropy(clean, y) + beta * robust


def test_standard_training_is_cross_entropy():
    module = AdversarialTraining(TinyNet)
    x, y = batch()
    torch.testing.assert_close(module.loss(x, y), F.cross_entropy(module.defense.net(x), y))


def test_adversarial_training_sees_the_attacked_images_in_train_mode():
    module, spy = AdversarialTraining(TinyNet, spy_ := Spy()), spy_
    x, y = batch()
    module.train()
    loss = module.loss(x, y)
    assert spy.seen == [(module.defense, 8)]
    torch.testing.assert_close(loss, F.cross_entropy(module.defense.net(torch.ones_like(x)), y))
    assert module.defense.net.training


def test_only_a_fraction_is_attacked():
    module = AdversarialTraining(TinyNet, Spy(), fraction=0.25)
    x, y = batch()
    mixed = torch.cat([torch.ones(2, 3, 8, 8), x[2:]])
    torch.testing.assert_close(module.loss(x, y), F.cross_entropy(module.defense.net(mixed), y))


def test_trades_is_the_papers_formula():
    attack = PGD(THREAT, steps=3, step_size=6 / 255)
    module = AdversarialTraining(TinyNet, attack, trades_beta=4.0)
    x, y = batch()
    index = torch.arange(8)
    module.noise = Streams.from_index(index, 1)
    module.train()
    twin = TinyNet()
    twin.load_state_dict(module.defense.net.state_dict())
    expected = reference_trades(twin, x, y, attack, 4.0, Streams.from_index(index, 1))
    torch.testing.assert_close(module.loss(x, y), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"attack": None}, {"fraction": 0.5}, {"attack": PGD(THREAT, 1, 0.1, random_start=False)}],
)
def test_trades_refuses_what_it_cannot_use(options):
    with pytest.raises(ValueError, match="TRADES needs a PGD attack with random_start"):
        AdversarialTraining(
            TinyNet, **({"attack": PGD(THREAT, 1, 0.1), "trades_beta": 6.0} | options)
        )


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5])
def test_fraction_out_of_range(fraction):
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\]"):
        AdversarialTraining(TinyNet, Spy(), fraction=fraction)


def test_each_bat_member_is_trained_on_images_of_those_before_it():
    spy = Spy()
    module = BAT(TinyNet, spy, epochs=1, members=3, probs=[0.6, 0.3, 0.1])
    opponents = []
    for module.stage in range(3):
        module.loss(*batch())
        opponents.append(spy.seen[-1][0])
    members = list(module.members)
    assert [o.classifiers for o in opponents] == [members[:1], members[:1], members[:2]]
    torch.testing.assert_close(opponents[2].weights, torch.tensor([2 / 3, 1 / 3]))


def test_each_iat_member_is_trained_on_its_own_images():
    spy = Spy()
    module = IAT(TinyNet, spy, epochs=1, members=2)
    for module.stage in range(2):
        module.loss(*batch())
        assert spy.seen[-1][0].classifiers == [module.members[module.stage]]


def test_only_the_member_in_training_is_optimised():
    module = BAT(TinyNet, Spy(), epochs=[1, 1], members=2)
    module.stage = 1
    optimizer = module.configure_optimizers()["optimizer"]
    assert set(optimizer.param_groups[0]["params"]) == set(module.members[1].parameters())
    module.loss(*batch()).backward()
    assert all(p.grad is None for p in module.members[0].parameters())
    assert all(p.grad is not None for p in module.members[1].parameters())


def test_the_defense_is_the_ensemble_of_the_members_begun():
    module = BAT(TinyNet, Spy(), epochs=1, members=2, probs=[0.8, 0.2])
    assert module.defense.classifiers == [module.members[0]]
    module.stage = 1
    assert isinstance(module.defense, Ensemble)
    torch.testing.assert_close(module.defense.weights, torch.tensor([0.8, 0.2]))


def test_members_start_from_checkpoints(tmp_path):
    net = TinyNet()
    nn.init.constant_(net.last.bias, 5.0)
    torch.save(
        {"state_dict": {f"defense.net.{k}": v for k, v in net.state_dict().items()}},
        tmp_path / "a.ckpt",
    )
    module = BAT(
        TinyNet, Spy(), epochs=[0, 2], members=2, checkpoints=[str(tmp_path / "a.ckpt"), None]
    )
    torch.testing.assert_close(module.members[0].last.bias, torch.full((4,), 5.0))
    assert module.stage == 1  # nothing to train in the first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": [1]}, "epochs must be a count for each of 2 members"),
        ({"epochs": 0}, "epochs must be"),
        ({"probs": [1.0]}, "2 members need 2 probs"),
        ({"probs": [1.2, -0.2]}, "must not be negative"),
        ({"checkpoints": [None]}, "checkpoints must be one per member"),
    ],
)
def test_numbers_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        BAT(TinyNet, Spy(), **({"epochs": 1} | options))


def test_labels_out_of_range():
    x, y = batch()
    with pytest.raises(ValueError, match="labels must be 0 … 3 for 4 classes"):
        AdversarialTraining(TinyNet).loss(x, y + 2)


def test_single_is_what_adversarial_training_defends():
    assert isinstance(AdversarialTraining(TinyNet).defense, Single)


def random_defense(net):
    return RandomTransforms(net, [GaussianNoise(0.1), VerticalFlip(p=0.5)], 2, 6)


def test_random_transforms_train_on_the_log_of_the_mean_probability():
    torch.manual_seed(0)
    module = AdversarialTraining(
        TinyNet, defense=random_defense, draws=3, criterion=ce_of_mean_probs
    )
    module.defense.eval()
    x, y = torch.rand(8, 3, 8, 8), torch.arange(8) % 4
    module.noise = Streams.from_index(torch.arange(8), 1)
    found = module.loss(x, y)
    logits, _ = module.defense.sample_logits(
        x, Streams.from_index(torch.arange(8), 1).fold_in(1), 3
    )
    assert logits.shape[0] == 3
    expected = F.nll_loss(logits.softmax(-1).mean(0).log(), y)
    assert torch.allclose(found, expected, atol=1e-6)


def test_advrt_trains_on_images_that_its_own_attack_makes():
    seen = []

    def criterion(logits, weights, y):
        seen.append(logits.shape[0])
        return ce_of_mean_probs(logits, weights, y)

    attack = PGD(Threat("linf", 0.1), 2, 0.05, criterion, draws=2)
    module = AdversarialTraining(
        TinyNet, attack, defense=random_defense, draws=4, criterion=criterion
    )
    module.noise = Streams.from_index(torch.arange(8), 1)
    module.loss(torch.rand(8, 3, 8, 8), torch.arange(8) % 4).backward()
    assert seen == [2, 2, 4]
    assert all(weight.grad is not None for weight in module.defense.net.parameters())


def test_training_begins_with_the_weights_of_a_checkpoint_and_resumes_with_its_own(tmp_path):
    start = TinyNet()
    torch.save({"state_dict": start.state_dict()}, tmp_path / "start.pt")
    module = AdversarialTraining(TinyNet, weights=str(tmp_path / "start.pt"))
    module.setup("test")
    assert not torch.equal(module.defense.net.first.weight, start.first.weight)
    module.setup("fit")
    assert torch.equal(module.defense.net.first.weight, start.first.weight)


def test_trades_is_for_a_single_network():
    attack = PGD(Threat("linf", 0.1), 2, 0.05)
    with pytest.raises(ValueError, match="TRADES is for a single network, got RandomTransforms"):
        AdversarialTraining(TinyNet, attack, trades_beta=6.0, defense=random_defense)
