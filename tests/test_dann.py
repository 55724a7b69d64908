"""DANN: the network in parts, the defense, the run, and the data that both domains come from."""

import copy
import hashlib
import io
import json
import signal

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import nn
from torch.nn import functional as F

from lightning_rob.attacks import PGD, attacking
from lightning_rob.attacks.folding import folded
from lightning_rob.data.source_target import SourceTargetData, read_images
from lightning_rob.defenses.dann import DANN, domain_adversarial_loss, reversal_weight
from lightning_rob.defenses.learning import learning, reinitialized
from lightning_rob.modules.dann import DANN as Module
from lightning_rob.nets.dann import DANNNet, DANNResNet18, reversed_gradient
from lightning_rob.threat import Threat
from tests.tiny import (
    ROOT,
    Blobs,
    pgd,
    recipe,
    records,
    robust_eval,
    run,
    same_weights,
    shell,
    weights,
)


class TinyDANN(nn.Module):
    """Three parts of one or two linear layers; learns in a second."""

    def __init__(
        self, inputs: int = 192, classes: int = 4, width: int = 16, norm: bool = True
    ) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), middle, nn.ReLU())
        self.predictor = nn.Linear(width, classes)
        self.discriminator = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 2))

    def features(self, x):
        return self.encoder(x)

    def classify(self, features):
        return self.predictor(features)

    def domain(self, features):
        return self.discriminator(features)

    def forward(self, x):
        return self.classify(self.features(x))


class Relabelled(Blobs):
    """The same images with other labels."""

    def source(self, train):
        return [(x, (3 * y + 1) % 4) for x, y in super().source(train)]


class Untold(Blobs):
    """Test images that nobody may ask for a label of."""

    def source(self, train):
        return [(x, None) for x, _ in super().source(train)]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def fast(parameters):
    return torch.optim.Adam(parameters, 0.005)


def slow(parameters):
    return torch.optim.Adam(parameters, 0.003)


def descent(parameters):
    """Adam would make steps of rounding errors, where BatchNorm leaves no gradient."""
    return torch.optim.SGD(parameters, 0.1)


def blobs(train=True, **options):
    pairs = Blobs(**options).source(train)
    return torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs])


def tiny_defense(**options):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = TinyDANN()
    return DANN(net, **{"source": blobs(), "epochs": 3, "batch_size": 16} | options)


def fingerprint(module):
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def count(net):
    return sum(parameter.numel() for parameter in net.parameters())


# The reversed gradient


def test_values_pass_and_the_gradient_is_minus_so_much():
    x = torch.randn(4, 3, generator=generator()).requires_grad_()
    a = torch.randn(4, 3, generator=generator(1))
    out = reversed_gradient(x, 0.3)
    assert torch.equal(out, x)
    (gradient,) = torch.autograd.grad((out * a).sum(), x)
    torch.testing.assert_close(gradient, -0.3 * a)


def test_it_is_minus_so_many_times_the_numerical_gradient():
    x = torch.randn(5, generator=generator(), dtype=torch.float64).requires_grad_()

    def game(x):
        return torch.sin(x).prod() + (x**3).sum()

    (gradient,) = torch.autograd.grad(game(reversed_gradient(x, 0.7)), x)
    steps = 1e-6 * torch.eye(5, dtype=torch.float64)
    slopes = torch.stack([(game(x + s) - game(x - s)) / 2e-6 for s in steps])
    torch.testing.assert_close(gradient, -0.7 * slopes, rtol=1e-6, atol=1e-8)


def test_twice_reversed_is_the_gradient_again():
    x = torch.randn(4, generator=generator(), dtype=torch.float64).requires_grad_()

    def twice(x):
        return reversed_gradient(reversed_gradient(x, 2.0).tanh(), 0.5)

    assert torch.autograd.gradcheck(twice, x)


# The schedule and the loss


def test_the_weight_is_a_hyperbolic_tangent():
    for progress in (0.0, 0.05, 0.31, 0.5, 1.0):
        expected = 0.1 * float(torch.tanh(torch.tensor(5 * progress, dtype=torch.float64)))
        assert reversal_weight(progress, 0.1) == pytest.approx(expected, abs=1e-12)
    assert reversal_weight(0.0, 1.0) == 0
    assert reversal_weight(1.0, 1.0) == pytest.approx(0.9999092, abs=1e-7)


def by_hand(net, x, y, target):
    """Class loss and domain loss apart, in the order of the two forwards."""
    source, other = net.encoder(x), net.encoder(target)
    domains = torch.cat([net.discriminator(source), net.discriminator(other)])
    told = torch.tensor([0] * len(x) + [1] * len(target))
    each = F.cross_entropy(domains, told, reduction="none")
    domain = each[: len(x)].mean() + each[len(x) :].mean()
    return F.cross_entropy(net.predictor(source), y), domain


@pytest.mark.parametrize("weight", [0.0, 0.1, 1.0])
def test_the_encoder_plays_against_the_discriminator(weight):
    """Encoder: class - alpha * domain; predictor: class; discriminator: domain."""
    net = TinyDANN().double()
    twin = copy.deepcopy(net)
    x, y = blobs()
    target = blobs(False)[0].double()
    loss = domain_adversarial_loss(net, x.double(), y, target, weight)
    loss.backward()
    classes, domain = by_hand(twin, x.double(), y, target)
    torch.testing.assert_close(loss, classes + domain, rtol=0, atol=1e-6)
    encoder, rest = list(twin.encoder.parameters()), [twin.predictor, twin.discriminator]
    (classes - weight * domain).backward(inputs=encoder, retain_graph=True)
    (classes + domain).backward(inputs=[p for part in rest for p in part.parameters()])
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)
    assert same_weights(net.state_dict(), twin.state_dict())  # two forwards, source first


def written_out(net, source, x, epochs, size, scale, chance):
    """The authors' loop: p = (i + epoch * n) / (epochs * n), n the smaller number of batches."""
    x_s, y_s = source
    optimizer = descent(net.parameters())
    n = min(-(-len(x_s) // size), -(-len(x) // size))
    for epoch in range(epochs):
        first = torch.randperm(len(x_s), generator=chance)
        second = torch.randperm(len(x), generator=chance)
        for i in range(n):
            alpha = scale * (2 / (1 + np.exp(-10 * (i + epoch * n) / epochs / n)) - 1)
            part, place = (order[i * size : (i + 1) * size] for order in (first, second))
            optimizer.zero_grad()
            encoder = net.encoder
            a, b = encoder(x_s[part]), encoder(x[place])
            told = [
                F.cross_entropy(net.discriminator(f.detach()), torch.full((len(f),), d))
                for d, f in enumerate((a, b))
            ]
            sum(told).backward()
            frozen = copy.deepcopy(net.discriminator).requires_grad_(False)
            fooled = [
                F.cross_entropy(frozen(f), torch.full((len(f),), d)) for d, f in enumerate((a, b))
            ]
            (F.cross_entropy(net.predictor(a), y_s[part]) - alpha * sum(fooled)).backward()
            optimizer.step()


@pytest.mark.parametrize(("size", "scale"), [(16, 0.1), (10, 1.0)])
def test_adapting_is_the_authors_loop(size, scale):
    """96 source and 33 test images: 3 or 4 steps an epoch."""
    defense = tiny_defense(epochs=4, batch_size=size, scale=scale, optimizer=descent)
    x = blobs(False)[0]
    x = x[:32] if size == 16 else x
    ours = defense
    with learning(chance := generator(5), x.device):
        ours = defense.fit_to_batch(x, chance).adapted
    with learning(chance := generator(5), x.device):
        net = reinitialized(defense.net, chance).train()
        written_out(net, blobs(), x, 4, size, scale, chance)
    for a, b in zip(ours.state_dict().values(), net.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


class Counting(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        Counting.steps += 1
        return super().step(closure)


@pytest.mark.parametrize(
    ("source", "test", "size", "steps"),
    [(96, 33, 16, 2), (96, 32, 16, 2), (40, 96, 16, 3), (33, 96, 16, 2), (96, 5, 16, 1)],
)
def test_an_epoch_is_as_long_as_the_smaller_set(source, test, size, steps):
    """A last batch of one image is left out, for BatchNorm cannot take it."""
    Counting.steps = 0
    x, y = blobs()
    defense = tiny_defense(
        source=(x[:source], y[:source]),
        batch_size=size,
        optimizer=lambda parameters: Counting(parameters, 0.1),
    )
    defense.adapt(blobs(False, test_size=test)[0], generator())
    assert Counting.steps == 3 * steps


# The defense


def test_adapting_is_pure():
    defense, (x, _) = tiny_defense(), blobs(False)
    defense.train()
    before, seen = fingerprint(defense), x.clone()
    source = [part.clone() for part in defense.source.data]
    stream = torch.random.get_rng_state()
    final = defense.adapt(x, generator())
    assert fingerprint(defense) == before
    assert torch.equal(x, seen)
    assert all(map(torch.equal, defense.source.data, source))
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert all(weight.grad is None for part in (defense, final) for weight in part.parameters())
    assert all(weight.requires_grad for weight in defense.net.parameters())
    assert defense.training
    assert defense.adapted is None
    assert final.net is defense.net
    assert not same_weights(final.adapted.state_dict(), defense.net.state_dict())


def test_all_weights_are_new():
    """Nobody who knows `net` knows where the training begins."""
    defense, (x, _) = tiny_defense(optimizer=lambda p: torch.optim.SGD(p, 0.0)), blobs(False)
    final = defense.adapt(x, generator())
    for (name, old), new in zip(
        defense.net.named_parameters(), final.adapted.parameters(), strict=True
    ):
        if "encoder.2" not in name:  # BatchNorm begins with ones and zeros
            assert not torch.isclose(old, new).any(), name


def test_the_same_chance_gives_the_same_network_and_another_another():
    defense, (x, _) = tiny_defense(), blobs(False)
    one, same, other = (defense.adapt(x, generator(seed)) for seed in (3, 3, 4))
    assert same_weights(one.adapted.state_dict(), same.adapted.state_dict())
    assert not same_weights(one.adapted.state_dict(), other.adapted.state_dict())
    assert torch.equal(one(x), same(x))
    again = one.adapt(x, generator(3))  # what it has become is no part of the next round
    assert same_weights(one.adapted.state_dict(), again.adapted.state_dict())


def test_dropout_draws_from_the_defenders_chance():
    x, y = torch.rand(12, 1, 16, 16, generator=generator()), torch.arange(12) % 10
    defense = DANN(DANNNet(size=16, width=2), source=(x, y), epochs=2, batch_size=6)
    torch.manual_seed(8)
    one = defense.adapt(x, generator(3))
    torch.manual_seed(9)
    same = defense.adapt(x, generator(3))
    assert same_weights(one.adapted.state_dict(), same.adapted.state_dict())


def test_it_adapts_wherever_it_is_asked_to():
    defense, (x, y) = tiny_defense(), blobs(False)
    expected = defense.adapt(x, generator())
    with torch.inference_mode():
        inside = defense.adapt(x + 0, generator())
        assert torch.equal(inside(x), expected(x))
    with attacking(defense):
        rehearsed = defense.adapt(x, generator())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cast = defense.adapt(x, generator())
    attack = PGD(Threat("linf", 0.1), 3, 0.05, random_start=False)
    for final in (inside, rehearsed, cast):
        assert same_weights(final.adapted.state_dict(), expected.adapted.state_dict())
        assert torch.equal(attack(final.adapted_model, x, y), attack(expected.adapted_model, x, y))
    assert all(weight.requires_grad for weight in defense.net.parameters())


def test_it_learns():
    final = tiny_defense(epochs=15, optimizer=fast).adapt(blobs(False)[0], generator())
    x, y = blobs(False, test_size=200)
    assert (final(x).argmax(1) == y).float().mean() > 0.9


def halves(count, of_target, chance):
    """Two classes: the left half tells them clearly, but of target images always says 1.

    The right half tells them faintly on both.
    """
    y = torch.randint(2, (count,), generator=chance)
    sign = (2.0 * y - 1).view(-1, 1, 1, 1)
    x = 0.5 + 0.1 * torch.randn(count, 1, 8, 8, generator=chance)
    x[..., 4:] += 0.06 * sign
    x[..., :4] += 0.15 * (torch.ones_like(sign) if of_target else sign)
    return x.clamp(0, 1), y


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_true_of_the_source_only_is_not_trusted(seed):
    """Plain training on the source trusts it, and is little better than chance on the target."""
    chance = generator(seed)
    source, (x, y) = halves(256, False, chance), halves(256, True, chance)
    net = TinyDANN(inputs=64, classes=2, width=32)
    right = {}
    for scale in (0.0, 0.2):
        settings = {"epochs": 50, "batch_size": 64, "scale": scale, "optimizer": fast}
        final = DANN(net, source, **settings).adapt(x, generator(seed))
        right[scale] = float((final(x).argmax(1) == y).float().mean())
        assert (final(source[0]).argmax(1) == source[1]).float().mean() > 0.95
    assert right[0.0] < 0.75
    assert right[0.2] > 0.9


def brighter(count, of_target, chance):
    """Two classes that the right half tells; the left half is brighter in target images."""
    y = torch.randint(2, (count,), generator=chance)
    x = 0.5 + 0.1 * torch.randn(count, 1, 8, 8, generator=chance)
    x[..., 4:] += 0.1 * (2.0 * y - 1).view(-1, 1, 1, 1)
    x[..., :4] += 0.1 * of_target
    return x.clamp(0, 1), y


@pytest.mark.parametrize("seed", [0, 1])
def test_the_reversed_gradient_confuses_the_discriminator(seed):
    """No BatchNorm here, which would take the difference away from each domain by itself."""
    chance = generator(seed)
    source, (x, _) = brighter(256, False, chance), brighter(256, True, chance)
    net = TinyDANN(inputs=64, classes=2, width=32, norm=False)
    told = {}
    for scale in (0.0, 0.5):
        settings = {"epochs": 60, "batch_size": 64, "scale": scale, "optimizer": slow}
        final = DANN(net, source, **settings).adapt(x, generator(seed)).adapted
        answers = [final.domain(final.features(images)).argmax(1) for images in (source[0], x)]
        told[scale] = float((answers[1] - answers[0]).float().mean() + 1) / 2
    assert told[0.0] > 0.9
    assert told[0.5] < 0.75


def test_augmentation_is_of_both_domains_and_by_the_defenders_chance():
    seen = []

    def step(image):
        seen.append(float(image[0, 0, 0]))
        return image + 0.01 * torch.rand(())

    x, y = torch.zeros(8, 3, 8, 8), torch.arange(8) % 4
    defense = tiny_defense(source=(x, y), epochs=1, batch_size=8, augment=[step])
    one, same = (defense.adapt(torch.ones(8, 3, 8, 8), generator(1)) for _ in range(2))
    assert sorted(seen) == [0.0] * 16 + [1.0] * 16
    assert same_weights(one.adapted.state_dict(), same.adapted.state_dict())


def test_the_rate_falls_by_the_epoch():
    """MultiStepLR as in Chen et al.: a tenth after each milestone, whatever steps an epoch has."""
    rates = []

    class Noting(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    defense = tiny_defense(
        epochs=6,
        optimizer=lambda parameters: Noting(parameters, 0.1),
        lr_scheduler=lambda made: torch.optim.lr_scheduler.MultiStepLR(made, [2, 4, 5], 0.1),
    )
    defense.adapt(blobs(False)[0], generator())  # two steps an epoch
    assert rates == pytest.approx([0.1] * 4 + [0.01] * 4 + [0.001] * 2 + [0.0001] * 2)


def test_the_cifar_recipe_is_the_papers(monkeypatch, tmp_path):
    """SGD, a tenth at epochs 50, 75 and 90, batches of 64, crops and flips (appendix A.4.2)."""
    from lightning_rob.cli.lightning_cli import RobustCLI

    monkeypatch.chdir(tmp_path)
    recipe = ["--config", str(ROOT / "configs/dann_cifar10.yaml"), "--trainer.accelerator=cpu"]
    built = RobustCLI(recipe, run=False)
    defense = built.model.defense
    assert defense.batch_size == built.datamodule.batch_size == 64
    assert [type(step).__name__ for step in defense.augment] == [
        "RandomCrop",
        "RandomHorizontalFlip",
    ]
    optimizer = defense.optimizer([nn.Parameter(torch.zeros(1))])
    schedule, rates = defense.lr_scheduler(optimizer), []
    for _ in range(defense.epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    wanted = [0.1] * 50 + [0.01] * 25 + [0.001] * 15 + [0.0001] * 10
    assert rates == pytest.approx(wanted)
    assert optimizer.param_groups[0]["nesterov"]
    x = torch.rand(3, 32, 32)
    for step in defense.augment:
        x = step(x)
    assert x.shape == (3, 32, 32)


def test_augmentation_never_touches_what_is_answered():
    """It changes what is trained on, source and test images alike, and neither batch itself."""
    (x, y), (seen, _) = blobs(), blobs(False)
    kept, shown = x.clone(), seen.clone()
    plain, flipped = (
        tiny_defense(source=(x, y), epochs=2, augment=steps).adapt(seen, generator(1)).eval()
        for steps in ((), (lambda image: image.flip(-1),))
    )
    assert not same_weights(plain.adapted.state_dict(), flipped.adapted.state_dict())
    asked = []
    flipped.adapted.register_forward_pre_hook(lambda module, given: asked.append(given[0]))
    flipped(seen)
    assert torch.equal(asked[0], shown)
    assert torch.equal(x, kept)
    assert torch.equal(seen, shown)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"scale": -0.1}, "scale must not be negative, got -0.1"),
    ],
)
def test_settings_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_defense(**options)


def test_a_network_in_one_piece():
    with pytest.raises(
        TypeError, match="such as DANNNet: Linear has no features, classify, domain"
    ):
        DANN(nn.Linear(2, 2))


def test_labels_out_of_range():
    x, y = blobs()
    with pytest.raises(ValueError, match="labels must be 0 … 3"):
        tiny_defense(source=(x, y + 1)).adapt(x, generator())


# The networks


def test_the_mnist_network_is_the_papers():
    """2.74M weights: table of appendix A.4.1, with one input channel."""
    net = DANNNet()
    conv, linear = 9 * 128 * 128 + 128, 2048 * 256 + 256
    encoder = (25 * 64 + 64) + 2 * 64 + (25 * 64 * 128 + 128) + 2 * 128 + 2 * (conv + 256)
    predictor = 3 * (conv + 256) + linear + 2 * 256 + 256 * 10 + 10
    assert count(net) == encoder + predictor + 5 * conv + linear + 256 * 2 + 2 == 2_736_780
    assert net.normalize.mean.item() == pytest.approx(0.1307)
    assert net.normalize.std.item() == pytest.approx(0.3015)
    assert not [m for m in net.discriminator if isinstance(m, nn.BatchNorm2d | nn.Dropout2d)]
    assert [m.p for m in net.modules() if isinstance(m, nn.Dropout2d)] == [0.5]


def test_the_cifar_network_is_resnet18_in_two():
    """The discriminator of appendix A.4.2: two BasicBlocks of 512, the first of stride 2."""
    net = DANNResNet18()
    blocks = 9 * (256 + 3 * 512) * 512 + 256 * 512 + 5 * 2 * 512
    judged = count(net.discriminator) + count(net.judge)
    assert judged == blocks + 512 * 2 + 2 == 8_394_754
    assert count(net) - judged == 11_173_962
    small = DANNResNet18(width=4)
    features = small.features(torch.rand(2, 3, 32, 32))
    assert features.shape == (2, 16, 8, 8)
    assert small.discriminator(features).shape == (2, 32, 4, 4)
    assert small.domain(features).shape == (2, 2)


NETS = {
    "mnist": (lambda: DANNNet(width=4), 1, 28),
    "colour": (lambda: DANNNet(channels=3, size=32, width=4), 3, 32),
    "smallest": (lambda: DANNNet(size=16, width=2), 1, 16),
    "resnet18": (lambda: DANNResNet18(width=4), 3, 32),
}


@pytest.mark.parametrize(("build", "channels", "size"), NETS.values(), ids=NETS.keys())
def test_the_parts_fit_together(build, channels, size):
    torch.manual_seed(0)
    net, x = build(), torch.rand(6, channels, size, size)
    net(x)
    net.eval()
    features = net.features(x)
    assert torch.equal(net(x), net.classify(features))
    assert (net(x).shape, net.domain(features).shape) == ((6, 10), (6, 2))
    with torch.no_grad(), folded([net]):
        torch.testing.assert_close(net(x), net.classify(features), rtol=1e-4, atol=1e-5)
    reinitialized(net, generator())  # has no weights that it could not
    net.train()
    domain_adversarial_loss(net, x, torch.zeros(6, dtype=torch.long), x, 0.1).backward()
    assert all(weight.grad is not None for weight in net.parameters())  # DDP asks for it


def test_images_too_small():
    with pytest.raises(ValueError, match="size must be at least 16 pixels, got 15"):
        DANNNet(size=15)


# The data


def with_target(**options):
    settings = {"source": Blobs(), "target": Blobs(test_size=40)} | options
    data = SourceTargetData(**settings)
    data.setup("fit")
    return data


def epochs(data, wanted=2):
    loader = data.train_dataloader()
    for epoch in range(wanted):
        for part in loader.flattened:
            part.sampler.set_epoch(epoch)
        yield list(batch for batch, _, _ in loader)


def test_both_sets_go_together_and_the_target_has_no_labels():
    data = with_target()
    first, second = epochs(data)
    assert len(first) == len(second) == 3  # 40 target images; 64 source images would be 4
    x, y, index = (torch.cat(part) for part in zip(*(b["target"] for b in first), strict=True))
    assert (y == -1).all()
    assert sorted(index.tolist()) == list(range(40))
    known = [image for image, _ in Blobs(test_size=40).source(False)]
    assert all(torch.equal(image, known[i]) for image, i in zip(x, index, strict=True))
    order = {
        name: [[b[name][2].tolist() for b in epoch] for epoch in (first, second)]
        for name in ("source", "target")
    }
    assert order["source"][0] != order["source"][1]
    assert order["target"][0] != order["target"][1]
    plain = Blobs()
    plain.setup("fit")
    expected = [batch[2].tolist() for batch in plain.train_dataloader()]
    assert order["source"][0] == expected[:3]
    pairs = dict(enumerate(Blobs().source(True)))
    for batch in first:
        for image, label, i in zip(*batch["source"], strict=True):
            assert torch.equal(image, pairs[int(i)][0])
            assert int(label) == pairs[int(i)][1]


def test_sets_of_one_size_are_not_in_one_order():
    first, _ = epochs(with_target(target=Blobs(test_size=64)))
    positions = with_target().parts["train"].indices.tolist()
    for batch in first:
        places = [positions.index(int(i)) for i in batch["source"][2]]
        assert places != batch["target"][2].tolist()


def test_the_targets_labels_are_never_read():
    """Not even where they are no labels."""
    assert len(next(epochs(with_target(target=Untold(test_size=40))))) == 3


def test_without_a_target_the_sources_test_images_are_it():
    (batches, _) = epochs(with_target(source=Blobs(test_size=33), target=None))
    index = torch.cat([b["target"][2] for b in batches])
    assert sorted(index.tolist()) == list(range(33))
    image = Blobs().source(False)[int(index[0])][0]
    assert torch.equal(batches[0]["target"][0][0], image)


def saved(path, images):
    if path.suffix == ".pt":
        torch.save(images, path)
    elif path.suffix == ".npz":
        np.savez(path, **images)
    else:
        np.save(path, images)
    return str(path)


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("a.pt", lambda x: x),
        ("b.pt", lambda x: {"x": x, "y": torch.zeros(len(x))}),
        ("c.npy", lambda x: x.numpy()),
        ("d.npz", lambda x: {"x": x.numpy(), "y": np.zeros(len(x))}),
        ("e.npz", lambda x: {"x": x.double().numpy()}),
    ],
)
def test_images_from_a_file(tmp_path, name, wrap):
    images = torch.rand(40, 3, 8, 8, generator=generator())
    path = saved(tmp_path / name, wrap(images))
    assert torch.equal(read_images(path), images)
    first, _ = epochs(with_target(target=None, images=path))
    assert len(first) == 3
    assert torch.equal(first[0]["target"][0], images[first[0]["target"][2]])


def test_bytes_from_a_file(tmp_path):
    pixels = torch.randint(256, (4, 3, 8, 8), generator=generator(), dtype=torch.uint8)
    assert torch.equal(read_images(saved(tmp_path / "x.pt", pixels)), pixels / 255)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.rand(3, 8, 8), r"must hold images \[N, C, H, W\], got \[3, 8, 8\]"),
        (torch.rand(0, 3, 8, 8), r"must hold images \[N, C, H, W\], got \[0, 3, 8, 8\]"),
        (2 * torch.ones(2, 3, 8, 8), r"must lie in \[0, 1\], got values in \[2, 2\]"),
        (torch.full((2, 3, 8, 8), torch.nan), r"must lie in \[0, 1\], got values in \[nan, nan\]"),
        ({"images": torch.rand(2, 3, 8, 8)}, "must hold a tensor, or one called x among others"),
        ([torch.rand(2, 3, 8, 8)], "must hold a tensor, or one called x among others"),
    ],
)
def test_a_file_of_something_else(tmp_path, images, message):
    with pytest.raises(ValueError, match=message):
        read_images(saved(tmp_path / "x.pt", images))


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file of images nowhere"):
        read_images("nowhere.pt")
    (tmp_path / "x.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"is not a file of images: \.pt, \.npy or \.npz"):
        read_images(str(tmp_path / "x.csv"))


class Large(Blobs):
    size = 16


def test_targets_that_cannot_be():
    with pytest.raises(ValueError, match="not both"):
        SourceTargetData(Blobs(), Blobs(), "x.pt")
    with pytest.raises(ValueError, match=r"must be \[3, 8, 8\], Large has \[3, 16, 16\]"):
        SourceTargetData(Blobs(), Large())


def test_a_file_of_another_shape(tmp_path):
    path = saved(tmp_path / "x.pt", torch.rand(4, 1, 8, 8))
    with pytest.raises(ValueError, match=r"must be \[3, 8, 8\], .*x.pt has \[1, 8, 8\]"):
        with_target(target=None, images=path)


def test_evaluation_is_that_of_the_source():
    data, plain = with_target(source=Blobs(eval_batch_size=7)), Blobs(eval_batch_size=7)
    for stage in ("fit", "test"):
        data.setup(stage)
        plain.setup(stage)
    for ours, theirs in zip(
        (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()),
        (plain.val_dataloader(), plain.test_dataloader(), plain.predict_dataloader()),
        strict=True,
    ):
        for a, b in zip(ours, theirs, strict=True):
            assert all(map(torch.equal, a, b))
    a, b = data.labelled(), plain.labelled()
    assert torch.equal(a.indices, b.indices)


def test_evaluation_needs_no_target():
    data = SourceTargetData(Blobs(), images="nowhere.pt")
    data.setup("test")
    assert len(data.test_dataloader()) == 3
    with pytest.raises(FileNotFoundError, match=r"no file of images nowhere\.pt"):
        data.setup("fit")


# The run


def shift(image):
    """An augmentation that draws."""
    return (image + 0.1 * torch.rand(3, 1, 1)).clamp(0, 1)


class AugmentedBlobs(Blobs):
    def default_augment(self):
        return [shift]


def dann(folder, target=None, **overrides):
    model = {
        "class_path": "lightning_rob.modules.dann.DANN",
        "init_args": {
            "net": {"class_path": "tests.test_dann.TinyDANN", "init_args": {"width": 8}},
            "scale": 0.5,
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        },
    }
    target = target or {"class_path": "tests.tiny.Blobs", "init_args": {"test_size": 40}}
    data = {
        "class_path": "lightning_rob.data.source_target.SourceTargetData",
        "init_args": {
            "source": {"class_path": "tests.test_dann.AugmentedBlobs"},
            "target": target,
        },
    }
    folder.mkdir(exist_ok=True)
    callbacks = [robust_eval({"apgd": pgd()})]
    settings = {"model": model, "data": data, "trainer__callbacks+": callbacks}
    return recipe(folder, **settings | overrides)


CHECKPOINTS = [
    "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: "
    "{filename: 'at-{step}', every_n_train_steps: 2, save_top_k: -1, save_last: true}}",
    "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: "
    "{filename: 'end-{epoch}', save_top_k: -1}}",
]
FOLDER = "run/version_0/checkpoints"
END = f"{FOLDER}/end-epoch=3.ckpt"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 4 epochs of 3 steps."""
    folder = tmp_path_factory.mktemp("whole")
    run("fit", "--config", dann(folder), *CHECKPOINTS)
    return folder


def test_a_run_is_attacked_every_epoch(whole):
    found = [r for r in records(whole) if r["name"] == "apgd"]
    assert [(r["epoch"], r["step"], r["n"]) for r in found] == [
        (epoch, 3 * epoch + 3, 32) for epoch in range(4)
    ]
    clean = [r["accuracy"] for r in records(whole) if r["name"] == "clean"]
    assert clean[-1] > 0.6
    assert all(key.startswith("defense.net.") for key in weights(whole / END))


def test_the_targets_labels_never_reach_the_weights(whole, tmp_path):
    target = {"class_path": "tests.test_dann.Relabelled", "init_args": {"test_size": 40}}
    run("fit", "--config", dann(tmp_path, target), *CHECKPOINTS)
    assert same_weights(weights(whole / END), weights(tmp_path / END))


def test_the_targets_images_do(whole, tmp_path):
    target = {"class_path": "tests.tiny.Blobs", "init_args": {"test_size": 41}}
    run("fit", "--config", dann(tmp_path, target), *CHECKPOINTS)
    assert not same_weights(weights(whole / END), weights(tmp_path / END))


def test_monitoring_changes_nothing(whole, tmp_path):
    run("fit", "--config", dann(tmp_path, **{"trainer__callbacks+": []}), *CHECKPOINTS)
    assert same_weights(weights(whole / END), weights(tmp_path / END))


@pytest.mark.parametrize("name", ["at-step=4", "at-step=6", "end-epoch=0", "end-epoch=2"])
def test_resuming_from_any_checkpoint_gives_the_same_weights(whole, tmp_path, name):
    start = whole / FOLDER / f"{name}.ckpt"
    run("fit", "--config", dann(tmp_path), *CHECKPOINTS, "--ckpt_path", start)
    assert same_weights(weights(whole / END), weights(tmp_path / END))


def test_sigkill_and_resume_gives_the_same_weights(whole, tmp_path):
    """By number of steps and with a loader process, where Lightning counts epochs otherwise."""
    length = ["--trainer.max_steps=12", "--trainer.max_epochs=-1", "--data.source.workers=1"]
    args = [dann(tmp_path), *CHECKPOINTS, *length]
    killer = "--trainer.callbacks+={class_path: tests.tiny.KillAt, init_args: {step: 7}}"
    threads = {
        "OMP_NUM_THREADS": str(torch.get_num_threads())
    }  # sums are rounded as in this process
    killed = shell("fit", "--config", *args, killer, **threads)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    last = tmp_path / FOLDER / "last.ckpt"
    resumed = shell("fit", "--config", *args, "--ckpt_path", last, **threads)
    assert resumed.returncode == 0, resumed.stderr
    one, other = (weights(folder / FOLDER / "at-step=12.ckpt") for folder in (whole, tmp_path))
    assert same_weights(one, other)


def test_two_processes_fit_it_under_attack_and_resume(tmp_path):
    two = ["--trainer.strategy=ddp", "--trainer.devices=2"]
    done = shell("fit", "--config", dann(tmp_path / "a"), *two, *CHECKPOINTS)
    assert done.returncode == 0, done.stderr
    found = records(tmp_path / "a")
    assert {r["n"] for r in found} == {32}
    assert [r["step"] for r in found if r["name"] == "apgd"] == [2, 4, 6, 8]  # 20 images each
    start = tmp_path / "a" / FOLDER / "end-epoch=1.ckpt"
    again = shell("fit", "--config", dann(tmp_path / "b"), *two, *CHECKPOINTS, "--ckpt_path", start)
    assert again.returncode == 0, again.stderr
    one, other = (weights(tmp_path / name / END) for name in "ab")
    assert same_weights(one, other)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_checkpoint_can_be_tested_by_itself(whole, tmp_path):
    logger = {"class_path": "TensorBoardLogger"} | {
        "init_args": {"save_dir": str(tmp_path), "name": "run", "version": 0}
    }
    attacked = f"--trainer.callbacks+={json.dumps(robust_eval({'apgd': pgd()}))}"
    given = ["--ckpt_path", whole / END, attacked, f"--trainer.logger={json.dumps(logger)}"]
    run("test", *given, "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false")
    found = {r["name"]: (r["stage"], r["n"]) for r in records(tmp_path)}
    assert found["apgd"] == ("test", 33)


def test_plain_data_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("fit", "--config", dann(tmp_path, data={"class_path": "tests.tiny.Blobs"}))
    assert "DANN needs unlabelled images beside the labelled ones" in capsys.readouterr().err


def fit(module, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False}
    data = SourceTargetData(Blobs(), Blobs(test_size=40))
    Trainer(**quiet, **settings, **options).fit(module, datamodule=data)


@pytest.mark.parametrize("length", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 9}])
def test_the_weight_grows_over_the_whole_run(length):
    module, seen = Module(TinyDANN, scale=0.3), []
    loss = module.loss
    module.loss = lambda x, y: seen.append(module.reversal_weight()) or loss(x, y)
    fit(module, **length)
    steps = [(i + epoch * 3) / 3 / 3 for epoch in range(3) for i in range(3)]
    assert seen == pytest.approx([0.3 * (2 / (1 + np.exp(-10 * p)) - 1) for p in steps])


def test_a_run_without_an_end_is_refused():
    with pytest.raises(MisconfigurationException, match=r"set trainer\.max_epochs or max_steps"):
        fit(Module(TinyDANN), max_epochs=-1)


def test_the_module_refuses_what_the_defense_does():
    with pytest.raises(ValueError, match="scale must not be negative, got -1"):
        Module(TinyDANN, scale=-1)
    with pytest.raises(TypeError, match="such as DANNNet: Identity has no features"):
        Module(nn.Identity)


def test_the_defense_is_played_from_a_recipe(tmp_path):
    """F(0) is trained by plain cross-entropy, then DANN adapts to each attacked batch."""
    defense = {
        "class_path": "lightning_rob.defenses.dann.DANN",
        "init_args": {
            "epochs": 6,
            "batch_size": 16,
            "scale": 0.1,
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        },
    }
    model = {
        "class_path": "AdversarialTraining",
        "init_args": {
            "net": {"class_path": "tests.test_dann.TinyDANN"},
            "defense": defense,
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        },
    }
    file = recipe(tmp_path, model=model, **{"trainer__callbacks+": [robust_eval({"apgd": pgd()})]})
    run("fit", "--config", file)
    last = [r for r in records(tmp_path) if r["name"] == "apgd"][-1]
    assert last["n"] == 32
    assert last["accuracy"] > 0.5
