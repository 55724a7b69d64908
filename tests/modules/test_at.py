"""Adversarial training: its losses against hand-written references, and what it attacks."""

import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.cli import ReduceLROnPlateau
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from lightning_rob.attacks import PGD
from lightning_rob.callbacks import RobustEval
from lightning_rob.defenses import RandomTransforms
from lightning_rob.modules import AdversarialTraining
from lightning_rob.modules.weight_perturbation import loss_at_perturbed_weights
from lightning_rob.objectives import ce_of_mean_probs
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise, VerticalFlip
from tests.modules.support import Spy, batch
from tests.tiny import Blobs, TinyNet, quiet_trainer

THREAT = Threat("linf", 16 / 255)


def trades(net, x, x_adv, y, beta):
    clean = net(x)
    robust = F.kl_div(F.log_softmax(net(x_adv), 1), F.softmax(clean, 1), reduction="batchmean")
    return F.cross_entropy(clean, y) + beta * robust


def test_only_a_fraction_is_attacked():
    module = AdversarialTraining(TinyNet, Spy(), fraction=0.25)
    x, y = batch()
    mixed = torch.cat([torch.ones(2, 3, 8, 8), x[2:]])
    torch.testing.assert_close(module.loss(x, y), F.cross_entropy(module.defense.net(mixed), y))


def test_the_attack_of_trades_climbs_the_divergence():
    """Zhang et al. 2019, eq. 5, by hand: sign ascent on KL in eval mode."""
    attack = PGD(THREAT, steps=3, step_size=6 / 255)
    module = AdversarialTraining(TinyNet, attack, trades_beta=4.0).train()
    (x, y), index = batch(), torch.arange(8)
    module.noise = Streams.from_index(index, 1)
    net = copy.deepcopy(module.defense.net).eval()
    target = F.softmax(net(x), 1).detach()
    expected = THREAT.start(x, Streams.from_index(index, 1))
    for _ in range(3):
        expected.requires_grad_()
        gap = F.kl_div(F.log_softmax(net(expected), 1), target, reduction="sum")
        step = 6 / 255 * torch.autograd.grad(gap, expected)[0].sign()
        expected = (expected.detach() + step).clamp(x - THREAT.eps, x + THREAT.eps).clamp(0, 1)
    torch.testing.assert_close(module._perturbed(x, y), expected)


class Shift(Spy):
    """Shift images by a value, and record its calls."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def perturb(self, defense, x, y, generator):
        super().perturb(defense, x, y, generator)
        return (x + self.value).clamp(0, 1)


def test_the_union_of_several_attacks_by_hand():
    """Tramèr and Boneh 2019: the largest loss of each image in eval mode, or the mean of all."""
    shifts, (x, y) = [Shift(-0.3), Shift(0.0), Shift(0.3)], batch()
    made = [(x + shift.value).clamp(0, 1) for shift in shifts]
    largest = AdversarialTraining(TinyNet, shifts).train()
    net = copy.deepcopy(largest.defense.net).eval()
    losses = torch.stack([F.cross_entropy(net(z), y, reduction="none") for z in made])
    chosen = losses.argmax(0)
    assert len(chosen.unique()) > 1
    expected = torch.stack([made[a][i] for i, a in enumerate(chosen)])
    assert torch.equal(largest._perturbed(x, y), expected)
    mean = AdversarialTraining(TinyNet, shifts, union="avg").eval()
    mean.defense.net.load_state_dict(net.state_dict())
    torch.testing.assert_close(mean.loss(x, y), losses.mean())
    assert [len(shift.calls) for shift in shifts] == [2, 2, 2]


def test_a_random_attack_for_each_batch():
    """E-AT: one of them, as often as the others, and the same in a run of the same seed."""
    trails = []
    for _ in range(2):
        shifts = [Shift(-0.3), Shift(0.3)]
        module = AdversarialTraining(TinyNet, shifts, union="random")
        quiet_trainer(max_epochs=1, limit_val_batches=0).fit(module, Blobs(512))
        trails.append([len(shift.calls) for shift in shifts])
        assert module.attack == tuple(shifts)
    assert sum(trails[0]) == 30 and 7 < trails[0][0] < 23
    assert trails[0] == trails[1]


def test_several_attacks_on_a_random_defense_share_its_images_draws():
    defense = partial(RandomTransforms, transforms=[GaussianNoise(alpha=0.2)], size=1, draws=2)
    losses = []
    for attacks in ([Shift(0.1)], [Shift(0.1), Shift(0.1)]):
        torch.manual_seed(0)
        module = AdversarialTraining(TinyNet, attacks, union="avg", defense=defense).eval()
        module.noise = Streams.from_index(torch.arange(8), 1)
        losses.append(module.loss(*batch()))
    torch.testing.assert_close(*losses)


def mart(net, x, x_adv, y, beta):
    """Wang et al. 2020, eq. 11, image by image."""
    total = 0
    for p, q, label in zip(net(x).softmax(1), net(x_adv).softmax(1), y, strict=True):
        bce = -q[label].log() - (1 - max(q[k] for k in range(4) if k != label)).log()
        total += bce + beta * (p * (p / q).log()).sum() * (1 - p[label])
    return total / len(x)


def plain(net, x, x_adv, y):
    return F.cross_entropy(net(x_adv), y)


def at_perturbed_weights(net, loss, gamma):
    """Wu et al. 2020: a copy takes a step uphill, each layer is rescaled to gamma of its norm."""
    proxy = copy.deepcopy(net)
    loss(proxy).backward()
    moved = copy.deepcopy(net)
    for name in ("first", "last"):
        g, w = getattr(proxy, name).weight.grad, getattr(moved, name).weight
        w.data += gamma * w.norm() * g / g.norm()
    value = loss(moved)
    value.backward()
    return value, moved


LOSSES = {
    "plain": (plain, {}),
    "trades": (trades, {"trades_beta": 4.0}),
    "mart": (mart, {"mart_beta": 5.0}),
}


def trained_by(name, **options):
    attack = PGD(THREAT, steps=2, step_size=6 / 255)
    module = AdversarialTraining(TinyNet, attack, **LOSSES[name][1], **options)
    module.noise = Streams.from_index(torch.arange(8), 1)
    return module, *batch()


@pytest.mark.parametrize("gamma", [None, 0.1])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_the_papers(name, gamma):
    """And the weights stay, and BatchNorm sees the batch once, at the perturbed weights."""
    module, x, y = trained_by(name, awp=gamma)
    before = copy.deepcopy(module.defense.net)
    x_adv = module._perturbed(x, y)

    def reference(net):
        return LOSSES[name][0](net, x, x_adv, y, *LOSSES[name][1].values())

    loss = module.loss(x, y)
    loss.backward()
    expected, moved = at_perturbed_weights(before, reference, gamma or 0.0)
    near = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(loss, expected, **near)
    net = module.defense.net
    for one, other in zip(net.buffers(), moved.buffers(), strict=True):
        torch.testing.assert_close(one, other, **near)
    for one, other, old in zip(*(n.parameters() for n in (net, moved, before)), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **near)
        assert torch.equal(one, old)
    assert not gamma or loss.item() > reference(before).item() + 0.01


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


def test_advrt_trains_on_images_of_its_own_attack():
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


def test_only_a_fit_starts_from_the_weights_of_a_checkpoint(tmp_path):
    start = TinyNet()
    torch.save({"state_dict": start.state_dict()}, tmp_path / "start.pt")
    module = AdversarialTraining(TinyNet, weights=str(tmp_path / "start.pt"))
    module.setup("test")
    assert not torch.equal(module.defense.net.first.weight, start.first.weight)
    module.setup("fit")
    assert torch.equal(module.defense.net.first.weight, start.first.weight)


FIXED = PGD(THREAT, 1, 0.1, random_start=False)
REFUSED = [
    ({"fraction": 1.5}, r"fraction must be in \(0, 1\], got 1.5"),
    ({"awp": 0.0}, "awp must be a positive share such as 0.005, got 0.0"),
    ({"mart_beta": 5.0, "attack": None}, "MART needs an attack, fraction 1 and .*, got None"),
    ({"mart_beta": 5.0, "trades_beta": 6.0}, "TRADES needs .* and no mart_beta"),
    ({"trades_beta": 6.0, "defense": random_defense}, "TRADES needs .* and RandomTransforms"),
    ({"trades_beta": 6.0, "attack": FIXED}, "TRADES needs a PGD attack with random_start"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_arguments_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        AdversarialTraining(TinyNet, **({"attack": PGD(THREAT, 1, 0.1)} | options))


class Saving(Callback):
    """A callback with an interval of its own, 0 as that of a `ModelCheckpoint` of steps."""

    every_n_epochs = 0


def rates(schedule, epochs, *callbacks):
    """Return the learning rate after each step of a training with a schedule."""
    found = []

    class Noted(AdversarialTraining):
        def on_train_batch_start(self, batch, batch_idx):
            found.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    module = Noted(TinyNet, optimizer=lambda p: torch.optim.SGD(p, 1e-7), lr_scheduler=schedule)
    options = {"num_sanity_val_steps": 0, "log_every_n_steps": 1}
    quiet_trainer(*callbacks, max_epochs=epochs, **options).fit(module, Blobs(train_size=48))
    return found


def test_a_schedule_waits_for_new_robust_accuracies():
    """The accuracy never improves; it is measured in every second epoch."""
    callback = RobustEval({"pgd": PGD(Threat("linf", 0.1), 1, 0.1)}, every_n_epochs=2)
    options = {"mode": "max", "patience": 0, "factor": 0.5}
    plateau = partial(ReduceLROnPlateau, monitor="val/robust/worst", **options)
    assert rates(plateau, 6, callback) == [1e-7] * 4 + [5e-8] * 2
    # What does not measure it does not count.
    others = RobustEval({"late": PGD(Threat("linf", 0.1), 1, 0.1)}, every_n_epochs=9), Saving()
    plateau = partial(ReduceLROnPlateau, monitor="val/robust/pgd", **options)
    assert rates(plateau, 6, callback, *others) == [1e-7] * 4 + [5e-8] * 2
    with pytest.raises(MisconfigurationException, match="needs the name of a logged value"):
        rates(torch.optim.lr_scheduler.ReduceLROnPlateau, 1, callback)


def test_a_schedule_of_one_cycle_steps_with_each_batch():
    callback = RobustEval({"pgd": PGD(Threat("linf", 0.1), 1, 0.1)}, every_n_epochs=9)
    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=3)
    assert len(set(rates(cycle, 3, callback))) == 3
    with pytest.raises(MisconfigurationException, match=r"after 3 batches, .* takes 5: "):
        rates(cycle, 5, callback)


@pytest.mark.parametrize(
    "parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm]
)
def test_awp_perturbs_weights_behind_a_parametrization(parametrize):
    module, x, y = trained_by("plain", awp=0.1)
    module.defense.net.first.weight.requires_grad_(False)
    parametrize(module.defense.net.last).eval()
    loss = loss_at_perturbed_weights(module.defense, module._loss_on, (x, x, y), 0.1)
    assert loss.item() > module._loss_on(x, x, y).item() + 0.01


@pytest.mark.parametrize(
    ("norm", "eps", "message"),
    [
        ("linf", 8, "'training', linf 8, holds every image: did you mean 8/255"),
        ("l2", 128, "'training', l2 128, holds every image: did you mean 128/255"),
    ],
)
def test_a_ball_of_all_images_is_no_training(norm, eps, message):
    module = AdversarialTraining(TinyNet, PGD(Threat(norm, eps), 1, 0.1))
    with pytest.raises(ValueError, match=message):
        quiet_trainer(max_epochs=1).fit(module, Blobs(train_size=48))


def test_weights_and_labels_that_training_cannot_take():
    module, x, y = trained_by("plain", awp=0.1)
    with pytest.raises(ValueError, match="labels must be 0 … 3 for 4 classes"):
        module.loss(x, y + 2)
    with pytest.raises(MisconfigurationException, match=r"awp is for .* got bf16-true"):
        module.check_trainer(quiet_trainer(precision="bf16-true"))
    for name in ("first", "last"):
        getattr(module.defense.net, name).weight.requires_grad_(False)
    with pytest.raises(ValueError, match="awp found no weights to perturb"):
        module.loss(x, y)
