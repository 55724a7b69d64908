import copy
import pickle
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_rob.attacks import GMSA, PGD
from lightning_rob.defenses import Single
from lightning_rob.defenses.rmc import RMC, FeatureStore, features, nearest, split, stops
from lightning_rob.defenses.transductive import Source
from lightning_rob.nets import AthenaCNN, LeNet, SmallCNN
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from tests.attacks.common import seeded
from tests.defenses.test_transductive_contract import same
from tests.tiny import TinyNet, blobs, fit_all, same_nets

THREAT = Threat("linf", 0.16)
CPU = torch.device("cpu")


X, Y = blobs(True, train_size=240)
TEST_X, TEST_Y = blobs(False, test_size=60)
torch.manual_seed(0)
NET = fit_all(TinyNet(), X, Y, 30)
ATTACK = PGD(THREAT, 5, 0.064, keep_best=True)


def rmc(net=NET, **options):
    settings = {"source": (X, Y), "attack": ATTACK, "neighbours": 40, "epochs": 3, "batch_size": 16}
    return RMC(net, **settings | options)


def test_an_attack_can_be_the_first_use():
    """The attacks of the training set, in parts of 64, are on none of the images around them."""
    conv = SmallCNN(channels=1).eval()
    source = torch.rand(150, 1, 12, 12, generator=seeded()), torch.arange(150) % 10
    defense = rmc(conv, source=source, epochs=1)
    x_adv = GMSA(ATTACK, rounds=1)(defense, source[0][:2], source[1][:2], seeded())
    assert (x_adv != source[0][:2]).any()


# neighbours
def brute_force(rows, query, count):
    """Sorted by distance, then by position."""
    found = []
    for point in query.double():
        distances = (rows.double() - point).square().sum(1).tolist()
        found.append(sorted(range(len(rows)), key=lambda i: (distances[i], i))[:count])
    return torch.tensor(found)


@pytest.mark.parametrize(("chunk", "count"), [(1, 5), (7, 150), (64, 1), (1000, 5)])
def test_neighbours_are_those_of_brute_force(monkeypatch, chunk, count):
    monkeypatch.setattr("lightning_rob.defenses.rmc.CHUNK", chunk)
    rows = torch.randn(150, 6, generator=seeded())
    query = torch.randn(9, 6, generator=seeded(1))
    assert torch.equal(nearest(rows, query, count), brute_force(rows, query, count))


def test_duplicates_far_from_the_origin_come_in_their_order():
    """Where rounding in a matrix product would separate them, or merge others."""
    row = 1000 + torch.rand(1, 64, generator=seeded())
    rows = torch.cat([row + 0.01, row, row.expand(40, -1), row + 0.005])
    assert nearest(rows, row, 43)[0].tolist() == [*range(1, 42), 42, 0]


# features
@pytest.mark.parametrize(
    ("net", "x", "last"),
    [
        (TinyNet(), torch.rand(5, 3, 8, 8), "last"),
        (LeNet(), torch.rand(5, 1, 28, 28), "head.3"),
        (SmallCNN(), torch.rand(5, 1, 16, 16), "linear"),
        (AthenaCNN(hidden=8), torch.rand(5, 1, 28, 28), "linear"),
    ],
)
def test_features_are_what_the_last_linear_layer_is_given(net, x, last):
    net.train()
    before, found = copy.deepcopy(net.state_dict()), features(net, x)
    layer = net.get_submodule(last)
    assert all(module.training for module in net.modules())
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    torch.testing.assert_close(layer(found), net.eval()(x))
    assert found.dtype == torch.float32
    assert not layer._forward_pre_hooks


def test_no_features():
    with pytest.raises(ValueError, match="Flatten calls no linear layer"):
        features(nn.Flatten(), X[:4])


# D'
def remembered(store, net=NET, source=None):
    return store.build(net, source or Source((X, Y)), CPU)


def test_clean_images_come_first_then_attacked_ones():
    found = remembered(FeatureStore(ATTACK, 2))
    assert len(found.y) == 3 * len(X)
    assert torch.equal(found.x[: len(X)], X)
    assert torch.equal(found.y, Y.repeat(3))
    for turn in (1, 2):
        part = found.x[turn * len(X) : (turn + 1) * len(X)]
        assert THREAT.size(part - X).max() <= 0.16 + 1e-6
        assert (NET(part).argmax(1) == Y).float().mean() < 0.2
    assert not torch.equal(found.x[len(X) : 2 * len(X)], found.x[2 * len(X) :])
    torch.testing.assert_close(found.features, features(NET, found.x), rtol=1e-5, atol=1e-5)


def darker(image):
    return image * torch.rand(())


def test_every_pass_is_augmented_afresh():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found = remembered(FeatureStore(None, 1, [darker])).x
    assert torch.equal(torch.rand(3), expected)  # the global stream is where it was
    ratios = (found / X.repeat(2, 1, 1, 1)).nanmedian(-1).values.flatten(1).nanmedian(1).values
    assert len(ratios.unique()) == 2 * len(X)
    assert torch.equal(found, remembered(FeatureStore(None, 1, [darker])).x)
    assert not torch.equal(found, remembered(FeatureStore(None, 1, [darker], seed=1)).x)


class Recorder:
    """An attack that only records its arguments."""

    def __init__(self):
        self.calls = []

    def __call__(self, defense, x, y, generator):
        self.calls.append((defense, len(x), generator))
        return x


def test_the_static_network_is_attacked_once():
    recorder = Recorder()
    defense = rmc(attack=recorder, copies=2)
    final = defense.adapt(TEST_X[:1], seeded()).after_batch(seeded(1))
    final.adapt(TEST_X[1:2], seeded(2))
    assert sum(count for _, count, _ in recorder.calls) == 2 * len(X)
    for attacked, count, generator in recorder.calls:
        assert isinstance(attacked, Single)
        assert attacked.net is NET
        assert isinstance(generator, Streams)
        assert len(generator) == count


def test_another_network_in_the_same_defense_is_remembered_anew():
    """As when a network in training is evaluated every epoch."""
    net = copy.deepcopy(NET)
    store, source = FeatureStore(ATTACK), Source((X, Y))
    before = store.build(net, source, CPU)
    assert store.build(net, source, CPU) is before
    with torch.no_grad():
        net.first.weight.mul_(0.9)
    after = store.build(net, source, CPU)
    torch.testing.assert_close(after.features, features(net, after.x), rtol=1e-5, atol=1e-5)
    assert not torch.equal(after.x, before.x)


def test_a_network_of_a_notebook_is_remembered():
    """Its class is in no file, by which it could be known again."""
    names = {"TinyNet": TinyNet, "__name__": "__main__"}
    exec("class Loose(TinyNet): pass", names)
    net, store, source = names["Loose"]().eval(), FeatureStore(), Source((X, Y))
    assert store.build(net, source, CPU) is store.build(net, source, CPU)


def test_features_of_a_network_in_half_precision():
    found = features(copy.deepcopy(NET).bfloat16(), X)
    torch.testing.assert_close(found, features(NET, X), rtol=0.1, atol=0.1)


def test_a_defense_that_has_remembered_travels_light():
    defense = rmc(copies=4).adapt(TEST_X[:1], seeded())
    text = pickle.dumps(defense)
    assert len(text) < 2 * X.numel() * X.element_size()  # D' alone has five times as much
    for other in (pickle.loads(text), copy.deepcopy(defense)):
        assert same(other.adapt(TEST_X[1:2], seeded()), defense.adapt(TEST_X[1:2], seeded()))
    assert copy.deepcopy(defense).store is defense.store


# the split
@pytest.mark.parametrize(
    ("neighbours", "train", "held"), [(1024, 973, 51), (256, 243, 13), (20, 19, 1), (5, 4, 1)]
)
def test_counts_of_the_split(neighbours, train, held):
    found = torch.randperm(5000, generator=seeded())[None, :neighbours]
    parts = split(found, seeded(1))
    assert [len(part) for part in parts] == [train, held]
    assert sorted(torch.cat(parts).tolist()) == sorted(found[0].tolist())
    near = set(found[0, : neighbours // 5].tolist())
    assert set(parts[1].tolist()) <= near


def test_validation_is_drawn_at_random_among_the_nearest():
    found = torch.arange(100)[None]
    drawn = Counter(i for s in range(400) for i in split(found, seeded(s))[1].tolist())
    assert sorted(drawn) == list(range(20))
    assert all(60 <= count <= 140 for count in drawn.values())  # 100 are expected, 9 the deviation


def test_neighbours_of_several_images_are_united():
    found = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [5, 11, 1, 2, 12, 13, 14, 15, 16, 17]])
    train, held = split(found, seeded())
    assert sorted(torch.cat([train, held]).tolist()) == list(range(1, 18))
    assert len(held) == 1
    assert held.item() in {1, 2, 5, 11}


# when training stops
def stops_after(stop, trained, held):
    losses = list(zip(trained, held, strict=True))
    counts = range(1, len(losses) + 1)
    return next((n for n in counts if stops(losses[:n], 0.01, 3, stop)), None)


HIGH, LOW = [1.0] * 8, [0.001] * 8
FALLING, RISING = [8.0, 7, 6, 5, 4, 3, 2, 1], [1.0, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("trained", "held", "either", "both"),
    [
        (HIGH, FALLING, None, None),
        (LOW, FALLING, 1, None),
        (HIGH, RISING, 4, None),
        (LOW, RISING, 1, 4),
        (HIGH[:5] + LOW[:3], RISING, 4, 6),
        (HIGH[:2] + LOW[:6], FALLING[:4] + [9.0] * 4, 3, 7),
        (HIGH, [5.0, 5, 5, 4, 4, 4, 4, 3], 7, None),  # equal is no improvement
        (LOW, [5.0, 6, 6, 4, 6, 6, 6, 6], 1, 7),
        ([0.01] * 8, FALLING, None, None),  # below the target, not at it
        (HIGH, [1.0, *[float("nan")] * 7], 4, None),
    ],
)
def test_stopping(trained, held, either, both):
    assert stops_after("either", trained, held) == either
    assert stops_after("both", trained, held) == both


# rounds
def by_hand(defense, net, optimizer, train, held, chance):
    """The loop as it is described, on a network and an optimizer that live on."""
    images = remembered(defense.store)
    best, stale = float("inf"), 0
    for _ in range(defense.epochs):
        net.train()
        total = 0.0
        for index in torch.split(torch.randperm(len(train), generator=chance), 16):
            optimizer.zero_grad()
            loss = cross_entropy(net(images.x[train[index]]), images.y[train[index]])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(index)
        with torch.no_grad():
            value = cross_entropy(net.eval()(images.x[held]), images.y[held]).item()
        best, stale = (value, 0) if value < best else (best, stale + 1)
        if total / len(train) < 0.01 or stale >= 5:
            return


class Chance:
    """The generators that a defense draws from, one after the other, for a hand-written loop."""

    def __init__(self, monkeypatch):
        self.states = []

        def noted(x, generator):
            chance = torch.Generator().manual_seed(int(generator.initial_seed()) + 100)
            twin = torch.Generator().manual_seed(int(generator.initial_seed()) + 100)
            torch.randint(2**62, (), generator=twin)  # what seeds dropout
            self.states.append(twin)
            return chance

        for module in ("transductive", "rmc"):
            monkeypatch.setattr(f"lightning_rob.defenses.{module}.generator_from", noted)


@pytest.mark.parametrize("stateful", [True, False])
def test_rounds_are_those_of_a_loop_written_by_hand(monkeypatch, stateful):
    chances = Chance(monkeypatch)
    make = partial(torch.optim.Adam, lr=0.003)
    defense = start = rmc(optimizer=make, epochs=8, stateful=stateful)
    net = copy.deepcopy(NET)
    optimizer = make(net.parameters())
    for turn in range(3):
        if not stateful:
            net = copy.deepcopy(NET)
            optimizer = make(net.parameters())
        x = TEST_X[turn : turn + 1]
        final = defense.adapt(x, seeded(2 * turn))
        # The base network's features, not those of the adapted one.
        images = remembered(start.store)
        found = brute_force(images.features, features(NET, x), 40)
        parts = split(found, chances.states[-1])
        by_hand(start, net, optimizer, *parts, chances.states[-1])
        assert same_nets(final.adapted, net)
        assert torch.equal(final.logits(x)[0], net.eval()(x))

        defense = final.after_batch(seeded(2 * turn + 1))
        if stateful:
            twin = chances.states[-1]
            drawn = torch.randint(len(X), (40,), generator=twin)
            by_hand(start, net, optimizer, drawn[5:], drawn[:5], twin)
            assert same_nets(defense.adapted, net)
            moments = defense.moments["state"]
            for place, weight in enumerate(net.parameters()):
                for name, tensor in optimizer.state[weight].items():
                    assert torch.equal(moments[place][name], tensor)
        else:
            assert defense.adapted is None
            assert defense.moments is None


def test_a_network_that_views_its_activations_can_learn():
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.linear = nn.Linear(144, 4)

        def forward(self, x):
            return self.linear(self.conv(x).relu().view(len(x), -1))

    torch.manual_seed(0)
    net = Viewing()
    final = rmc(net).adapt(TEST_X[:1], seeded())
    assert not same_nets(final.adapted, net)
