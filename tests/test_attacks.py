import random
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_rob.attacks import ARC, CW, PGD, Attack, DeepFool, attacking
from lightning_rob.defenses import Defense, Ensemble, Mixture, Single
from lightning_rob.objectives import (
    ce_of_mean_logits,
    ce_of_mean_probs,
    confident,
    expected_ce,
    linear,
    worst_ce,
)
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat

LINF, L2 = Threat("linf", "32/255"), Threat("l2", 0.7)

ATTACKS = {
    "fgsm": PGD(LINF, 1, LINF.eps, random_start=False),
    "bim": PGD(LINF, 5, 0.03, random_start=False),
    "pgd": PGD(LINF, 5, "8/255"),
    "pgd-l2": PGD(L2, 5, 0.2),
    "pgd-logits": PGD(LINF, 5, 0.03, objective=ce_of_mean_logits),
    "pgd-mean-probs": PGD(L2, 5, 0.2, objective=ce_of_mean_probs),
    "pgd-linear": PGD(LINF, 5, 0.03, objective=linear),
    "pgd-worst": PGD(LINF, 5, 0.03, objective=worst_ce),
    "pgd-confident": PGD(L2, 5, 0.2, objective=confident),
    "pgd-draws": PGD(LINF, 5, 0.03, draws=2),
    "momentum": PGD(LINF, 5, 0.03, momentum=(0.9,)),
    "momentum-l2": PGD(L2, 5, 0.2, momentum=(0.9,), random_start=False),
    "aggmo": PGD(LINF, 5, 0.03, momentum=(0.0, 0.9, 0.99)),
    "aggmo-l2": PGD(L2, 5, 0.2, momentum=(0.0, 0.9, 0.99)),
    "restarts": PGD(LINF, 4, 0.04, restarts=3),
    "restarts-l2": PGD(L2, 4, 0.25, restarts=2, keep_best=True),
    "best": PGD(LINF, 4, 0.04, keep_best=True),
    "best-l2": PGD(L2, 4, 0.25, keep_best=True, random_start=False),
    "arc": ARC(LINF, 3, LINF.eps),
    "arc-l2": ARC(L2, 3, 0.3),
    "arc-neighbours": ARC(LINF, 3, LINF.eps, neighbours=1),
    "arc-neighbours-l2": ARC(L2, 3, 0.4, neighbours=2),
    "arc-random": ARC(LINF, 3, LINF.eps, random_start=True),
    "arc-random-l2": ARC(L2, 3, 0.4, random_start=True),
    "arc-drop": ARC(LINF, 3, LINF.eps, early_stop=True),
    "arc-drop-l2": ARC(L2, 3, 0.4, early_stop=True, neighbours=1),
    "cw": CW(L2, 20, 0.05, binary_steps=4, initial_const=0.1),
    "cw-logits": CW(L2, 20, 0.05, binary_steps=4, initial_const=0.1, objective=linear),
    "cw-draws": CW(L2, 10, 0.1, binary_steps=3, initial_const=0.3, confidence=0.5, draws=2),
    "deepfool": DeepFool(LINF),
    "deepfool-l2": DeepFool(L2, 20, overshoot=0.1),
    "deepfool-candidates": DeepFool(L2, 20, candidates=1, overshoot=1e-6, draws=2),
}
every_attack = pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
FAMILIES = ["pgd", "arc", "cw", "deepfool"]
one_of_each = pytest.mark.parametrize("attack", [ATTACKS[key] for key in FAMILIES], ids=FAMILIES)


class ConvNet(nn.Module):
    """Batch norm and dropout show whether an attack runs in evaluation mode."""

    def __init__(self, width=6):
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.3)
        self.linear = nn.Linear(width * 36, 4)

    def forward(self, x):
        return self.linear(self.drop(self.norm(self.conv(x)).relu()).flatten(1))


PROTOTYPES = torch.rand((4, 1, 6, 6), generator=torch.Generator().manual_seed(42))


def images(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (count,), generator=generator)
    noise = 0.15 * torch.randn((count, 1, 6, 6), generator=generator)
    return (0.25 + 0.5 * PROTOTYPES[y] + noise).clamp(0, 1), y


def trained_net(seed):
    torch.manual_seed(seed)
    net = ConvNet()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for step in range(60):
        x, y = images(64, seed=1000 * seed + step)
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.zero_grad() or net


@pytest.fixture(scope="module")
def pair():
    """Two trained networks as they stand in training, as an ensemble of unequal members."""
    state = torch.get_rng_state()
    defense = Ensemble([trained_net(1), trained_net(2)], [0.6, 0.4])
    torch.set_rng_state(state)
    return defense


@pytest.fixture
def defense(pair):
    pair.train()
    for parameter in pair.parameters():
        parameter.grad = None
        parameter.requires_grad_(True)
    return pair


@pytest.fixture
def exact(defense):
    """In float64, where an image's arithmetic hardly depends on its batch."""
    copy = Ensemble([ConvNet(), ConvNet()], [0.6, 0.4]).double()
    copy.load_state_dict(defense.state_dict())
    return copy


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def accuracy(defense, x, y):
    with attacking(defense), torch.no_grad():
        return defense(x).gather(1, y[:, None]).mean().item()


def assert_inside(threat, x_adv, x):
    assert x_adv.shape == x.shape
    assert x_adv.dtype == x.dtype
    assert x_adv.isfinite().all()
    assert x_adv.min() >= threat.bounds[0]
    assert x_adv.max() <= threat.bounds[1]
    assert (threat.size((x_adv - x).double()) <= threat.eps + 1e-6).all()


# what an attack returns


@every_attack
@pytest.mark.parametrize("count", [1, 3, 8])
def test_stays_inside(attack, defense, count):
    x, y = images(count, seed=5)
    x[0, 0, 0] = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    x_adv = attack(defense, x, y, seeded())
    assert_inside(attack.threat, x_adv, x)
    assert not x_adv.requires_grad
    assert count < 8 or not torch.equal(x_adv, x)


@every_attack
def test_stays_inside_other_bounds(attack, defense):
    """Bounds whose differences are not exact in single precision."""
    x, y = images(16, seed=5)
    low, high = (torch.tensor(value).item() for value in (-0.1, 0.7))
    shifted = low + (high - low) * (3 * x - 1).clamp(0.03, 0.97)
    threat = replace(attack.threat, bounds=(low, high))
    assert_inside(threat, replace(attack, threat=threat)(defense, shifted, y, seeded()), shifted)


@every_attack
def test_no_images(attack, defense):
    x, y = images(2)
    assert attack(defense, x[:0], y[:0], seeded()).shape == (0, 1, 6, 6)


@every_attack
def test_lowers_accuracy(attack, defense):
    x, y = images(200, seed=6)
    clean = accuracy(defense, x, y)
    assert clean > 0.9
    left = accuracy(defense, attack(defense, x, y, seeded()), y)
    assert left < clean - 0.3


@every_attack
def test_without_limits_nothing_is_left(attack, defense):
    """A radius that reaches every image: an attack that is not blind gets to zero."""
    eps = 1.0 if attack.threat.norm == "linf" else 6.0
    step = {"step_size": eps if isinstance(attack, ARC) else eps / 8, "steps": 40}
    if isinstance(attack, CW | DeepFool):  # these stop at the boundary of the members' mean
        step, defense = {}, Single(defense.members[0])
    free = replace(attack, threat=replace(attack.threat, eps=eps), **step)
    x, y = images(40, seed=7)
    left = accuracy(defense, free(defense, x, y, seeded()), y)
    assert left == 0


@every_attack
def test_no_radius_no_change(attack, defense):
    x, y = images(5, seed=8)
    still = replace(attack, threat=replace(attack.threat, eps=0))
    assert torch.equal(still(defense, x, y, seeded()), x)


@every_attack
def test_repeats_itself(attack, defense):
    x, y = images(6, seed=9)
    first = attack(defense, x, y, seeded(3))
    torch.rand(5)
    assert torch.equal(attack(defense, x, y, seeded(3)), first)


RANDOM = {k: attack for k, attack in ATTACKS.items() if getattr(attack, "random_start", False)}


@pytest.mark.parametrize("attack", RANDOM.values(), ids=RANDOM.keys())
def test_other_generators_other_images(attack, defense):
    x, y = images(6, seed=9)
    assert not torch.equal(attack(defense, x, y, seeded(3)), attack(defense, x, y, seeded(4)))
    # without a generator it is torch's global one
    torch.manual_seed(3)
    first = attack(defense, x, y)
    torch.manual_seed(3)
    assert torch.equal(attack(defense, x, y), first)


@every_attack
def test_streams_do_not_know_the_batch(attack, exact):
    """However a data set is cut, ordered or spread over processes: the same images."""
    x, y = images(9, seed=10)
    x, index = x.double(), torch.arange(100, 109)
    whole = attack(exact, x, y, Streams.from_index(index, 7))
    order = torch.tensor([4, 8, 0, 2, 6, 1, 7, 3, 5])
    for part in order.split([1, 5, 3]):
        again = attack(exact, x[part], y[part], Streams.from_index(index[part], 7))
        torch.testing.assert_close(again, whole[part], rtol=0, atol=1e-9)
    if attack in RANDOM.values():
        other = attack(exact, x, y, Streams.from_index(index, 8))
        assert ((other - whole).flatten(1).abs().amax(1) > 1e-6).all()


@every_attack
def test_number_format_of_images_is_kept(attack, exact):
    x, y = images(3, seed=11)
    x_adv = attack(exact, x.double(), y, seeded())
    assert_inside(attack.threat, x_adv, x.double())


@every_attack
def test_memory_layout_does_not_matter(attack, exact):
    x, y = images(4, seed=12)
    x = x.double()
    strange = torch.stack([x, x], -1)[..., 0]
    assert not strange.is_contiguous()
    torch.testing.assert_close(
        attack(exact, strange, y, seeded()), attack(exact, x, y, seeded()), rtol=0, atol=1e-9
    )


# what an attack leaves behind


def snapshot(defense):
    return {
        "modes": [module.training for module in defense.modules()],
        "modules": [(name, id(module)) for name, module in defense.named_modules()],
        "trainable": [p.requires_grad for p in defense.parameters()],
        "grads": [p.grad if p.grad is None else p.grad.clone() for p in defense.parameters()],
        "owners": [id(p) for p in defense.parameters()],
        "state": {name: value.clone() for name, value in defense.state_dict().items()},
        "weights": defense.weights.clone(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "hooks": sum(len(m._forward_hooks) + len(m._backward_hooks) for m in defense.modules()),
    }


def assert_same(before, after):
    assert before.keys() == after.keys()
    for key, value in before.items():
        if key in ("state", "weights", "torch"):
            torch.testing.assert_close(after[key], value, rtol=0, atol=0, msg=key)
        elif key == "grads":
            for old, new in zip(value, after[key], strict=True):
                assert (old is None) == (new is None)
                assert old is None or torch.equal(old, new)
        else:
            assert after[key] == value, key


def half_frozen(defense):
    """A defense in training of which some parts are deliberately frozen."""
    first, second = defense.members
    first.norm.eval()
    first.conv.requires_grad_(False)
    second.drop.eval()
    second.norm.weight.requires_grad_(False)
    for i, parameter in enumerate(defense.parameters()):
        parameter.grad = None if i % 3 else torch.full_like(parameter, float(i))
    return defense


@every_attack
def test_leaves_nothing_behind(attack, defense):
    before = snapshot(half_frozen(defense))
    x, y = images(6, seed=13)
    keep = x.clone(), y.clone()
    attack(defense, x, y, seeded())
    assert_same(before, snapshot(defense))
    assert torch.equal(x, keep[0])
    assert torch.equal(y, keep[1])
    assert x.grad is None


@every_attack
def test_is_the_same_in_training_and_evaluation(attack, defense):
    x, y = images(6, seed=14)
    training = attack(half_frozen(defense), x, y, seeded())
    assert torch.equal(attack(defense.eval(), x, y, seeded()), training)


class Falls(nn.Module):
    """A network that gives up at the n-th call."""

    def __init__(self, inner, after):
        super().__init__()
        self.inner, self.left = inner, after

    def forward(self, x):
        self.left -= 1
        if self.left < 0:
            raise ArithmeticError("out of patience")
        return self.inner(x)


@every_attack
@pytest.mark.parametrize("after", [0, 1])
def test_leaves_nothing_behind_when_it_fails(attack, defense, after):
    half_frozen(defense)
    falling = Single(Falls(defense.members[0], after))
    x, y = images(4, seed=15)
    before = snapshot(falling)
    # twenty of them: every attack needs more than one call
    once = replace(attack, steps=max(attack.steps, 2))
    with pytest.raises(ArithmeticError):
        once(falling, x, y, seeded())
    assert_same(before, snapshot(falling))


@pytest.mark.parametrize("attack", [ATTACKS["pgd"], ATTACKS["arc"]])
def test_images_that_require_gradients_are_no_surprise(attack, defense):
    """The warning comes once in a process unless asked for always."""
    x, y = images(3, seed=16)
    leaf, always = x.clone().requires_grad_(), torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        x_adv = attack(defense, leaf * 1, y, seeded())
    finally:
        torch.set_warn_always(always)
    assert torch.equal(x_adv, attack(defense, x, y, seeded()))
    assert not x_adv.requires_grad
    assert leaf.grad is None


@every_attack
def test_pending_training_step_is_not_disturbed(attack, defense):
    """TRADES: a loss built before the attack is backpropagated after it."""
    x, y = images(8, seed=17)
    defense.eval()
    cross_entropy(defense.members[0](x), y).backward()
    expected = [p.grad.clone() for p in defense.members[0].parameters()]
    defense.members[0].zero_grad()
    loss = cross_entropy(defense.members[0](x), y)
    attack(defense, x, y, seeded())
    loss.backward()
    for parameter, gradient in zip(defense.members[0].parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


# where an attack runs


@contextmanager
def nothing():
    yield


PLACES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "plain": nothing}


@every_attack
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_runs_in_evaluation_loops(attack, defense, place):
    x, y = images(5, seed=18)
    expected = attack(defense, x, y, seeded())
    left = accuracy(defense, expected, y)
    with place():
        inside_x, inside_y = images(5, seed=18)
        x_adv = attack(defense, inside_x, inside_y, seeded())
        assert torch.equal(x_adv, expected)
        assert not x_adv.is_inference()
        assert accuracy(defense, x_adv, inside_y) == left
    before = snapshot(defense)
    with place():
        attack(defense, inside_x, inside_y, Streams.from_index(torch.arange(5)))
        temporary = Single(defense.members[0])
        attack(temporary, inside_x, inside_y, seeded())
    assert_same(before, snapshot(defense))


@every_attack
def test_training_step_under_autocast(attack, defense):
    x, y = images(16, seed=19)
    clean = accuracy(defense, x, y)
    with torch.autocast("cpu", torch.bfloat16):
        before = snapshot(defense)
        x_adv = attack(defense, x, y, seeded())
        assert_same(before, snapshot(defense))
        logits = defense.logits(x_adv)
        assert logits.dtype == torch.bfloat16
        loss = sum(cross_entropy(z, y) for z in logits)
    assert_inside(attack.threat, x_adv, x)
    loss.backward()
    for name, parameter in defense.named_parameters():
        assert parameter.grad is not None, name
        # a bias before batch norm has no effect
        assert parameter.grad.abs().max() > 0 or name.endswith("conv.bias"), name
    assert accuracy(defense, x_adv, y) < clean


@every_attack
def test_weights_cast_before_the_attack_keep_their_gradient(attack, defense):
    """Clean and adversarial images in one step under autocast, as TRADES and TADV have it."""
    defense.eval()
    x, y = images(16, seed=20)
    with torch.autocast("cpu", torch.bfloat16):
        clean = cross_entropy(defense.members[0](x), y)
        x_adv = attack(defense, x, y, seeded())
        adversarial = cross_entropy(defense.members[0](x_adv), y)
    (clean + adversarial).backward()
    both = defense.members[0].linear.weight.grad.clone()
    defense.members[0].zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        total = sum(cross_entropy(defense.members[0](z), y) for z in (x, x_adv))
    total.backward()
    torch.testing.assert_close(both, defense.members[0].linear.weight.grad, rtol=0.02, atol=1e-3)


def test_attacking_can_be_nested(defense):
    before = snapshot(half_frozen(defense))
    with attacking(defense):
        assert not any(m.training for m in defense.modules() if type(m) is not nn.Identity)
        assert not any(p.requires_grad for p in defense.parameters())
        with torch.no_grad(), attacking(defense.members[0]):
            assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert not any(p.requires_grad for p in defense.parameters())
    assert_same(before, snapshot(defense))


@pytest.mark.parametrize("attack", [ATTACKS["pgd"], ATTACKS["arc"]])
def test_mixture_is_attacked_as_the_ensemble_it_is(attack, exact):
    x, y = images(5, seed=21)
    x = x.double()
    mixture = Mixture([Single(member) for member in exact.members], [0.6, 0.4])
    expected = attack(exact, x, y, seeded())
    torch.testing.assert_close(attack(mixture, x, y, seeded()), expected, rtol=0, atol=1e-9)


@every_attack
def test_member_of_no_weight_is_not_attacked(attack, exact):
    """A member that never answers is no reason for other images: alpha = (1, 0) is one network."""
    x, y = images(30, seed=22)
    x, alone = x.double(), Single(exact.members[0])
    idle = Ensemble([*exact.members], [1.0, 0.0])
    expected = attack(alone, x, y, seeded())
    torch.testing.assert_close(attack(idle, x, y, seeded()), expected, rtol=0, atol=1e-9)


# networks as people write them


class Styled(nn.Module):
    """A convolution and batch norm with statistics that matter; subclasses call them in ways."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.linear = nn.Linear(6 * 36, 4)
        for tensor in (self.conv.weight, self.norm.running_mean, self.norm.bias):
            tensor.data = 0.5 * torch.randn(tensor.shape, generator=generator)
        for tensor in (self.norm.running_var, self.norm.weight):
            tensor.data = 0.5 + torch.rand(tensor.shape, generator=generator)

    def features(self, x):
        return self.norm(self.conv(x))

    def forward(self, x):
        return self.linear(self.features(x).relu().flatten(1))


class Viewing(Styled):
    """As most published networks go from images to vectors."""

    def forward(self, x):
        return self.linear(self.features(x).relu().view(x.size(0), -1))


class Renamed(Styled):
    """One convolution under two names."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([self.conv])

    def features(self, x):
        return self.norm(self.stages[0](x))


class Listed(Styled):
    """A convolution called from a plain list."""

    def __init__(self):
        super().__init__()
        self.stages = [self.conv]

    def features(self, x):
        return self.norm(self.stages[0](x))


class Tied(Styled):
    """A weight used again beside its layer."""

    def features(self, x):
        back = nn.functional.conv_transpose2d(
            self.norm(self.conv(x)).relu(), self.conv.weight, padding=1
        )
        return back.expand(-1, 6, -1, -1)


class Reused(Styled):
    """A part of a block called alone, by a parent that looks at its input."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(self.conv, self.norm)

    def features(self, x):
        if x.shape[2] != 6:
            raise ValueError("wrong size")
        return self.block(x) + self.block[0](x)


class Switched(Styled):
    """Batch norm can be switched off."""

    use = True

    def switch(self):
        self.use = False

    def features(self, x):
        return self.norm(self.conv(x)) if self.use else self.conv(x)


class Configured(Styled):
    """The same, by a dictionary of settings."""

    def __init__(self):
        super().__init__()
        self.settings = {"norm": True}

    def switch(self):
        self.settings["norm"] = False

    def features(self, x):
        return self.norm(self.conv(x)) if self.settings["norm"] else self.conv(x)


class Noisy(Styled):
    """Draws from torch's global stream."""

    def features(self, x):
        return self.norm(self.conv(x)) + torch.randn(6, 1, 1)


def assert_answers_alike_when_attacked(defense, x):
    with torch.no_grad():
        expected = defense.eval().logits(x)
    with attacking(defense), torch.no_grad():
        inside = defense.logits(x)
    torch.testing.assert_close(inside, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("style", [Styled, Viewing, Renamed, Listed, Tied, Reused])
def test_network_is_the_same_when_attacked(style):
    x, y = images(6, seed=28)
    defense = Single(style())
    assert_answers_alike_when_attacked(defense, x)
    assert_inside(LINF, ATTACKS["pgd"](defense, x, y, seeded()), x)


@pytest.mark.parametrize(
    "style",
    [Switched, Configured],
)
def test_network_may_change_between_attacks(style):
    x, _ = images(6, seed=28)
    defense = Single(style())
    assert_answers_alike_when_attacked(defense, x)
    defense.net.switch()
    assert_answers_alike_when_attacked(defense, x)


class Exit(nn.Module):
    """A second member on the first one's convolution, without its batch norm or with another."""

    def __init__(self, trunk, norm):
        super().__init__()
        self.conv, self.norm, self.linear = trunk.conv, norm, nn.Linear(6 * 36, 4)

    def forward(self, x):
        return self.linear(self.norm(self.conv(x)).relu().flatten(1))


@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm2d(6)], ids=["none", "other"])
@pytest.mark.parametrize("first", [0, 1])
def test_members_may_share_a_layer(norm, first):
    x, _ = images(6, seed=28)
    trunk = Styled()
    members = [trunk, Exit(trunk, norm())]
    assert_answers_alike_when_attacked(Ensemble([members[first], members[1 - first]]), x)


def test_a_member_may_be_there_twice():
    x, _ = images(6, seed=28)
    one, other = Styled(), Styled()
    defense = Mixture([Ensemble([one, other]), Single(one)])
    assert_answers_alike_when_attacked(defense, x)
    with attacking(defense):
        assert_answers_alike_when_attacked(Single(one), x)


def test_first_attack_draws_no_more_than_the_second():
    x, y = images(6, seed=28)
    defense, results = Single(Noisy()), []
    for _ in range(2):
        torch.manual_seed(0)
        results.append(ATTACKS["bim"](defense, x, y))
    assert torch.equal(*results)


# networks that give no numbers


class Sick(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * float("nan")


@one_of_each
def test_says_when_logits_are_not_numbers(attack, defense):
    """One sick member would shield the others: the objective of all has no gradient."""
    x, y = images(4, seed=23)
    sick = Ensemble([defense.members[0], Sick(defense.members[1])])
    with pytest.raises(ValueError, match="logits are not numbers on 4 of 4 images"):
        attack(sick, x, y, seeded())


# errors


@every_attack
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_labels_of_the_usual_types(attack, exact, dtype):
    x, y = images(3, seed=24)
    expected = attack(exact, x.double(), y, seeded())
    assert torch.equal(attack(exact, x.double(), y.to(dtype), seeded()), expected)


BAD_IMAGES = {
    "above": (lambda x: x + 0.6, r"images must lie in \[0.0, 1.0\], got values in \["),
    "bytes in floats": (lambda x: x * 255, r"images must lie in \[0.0, 1.0\]"),
    "normalised": (lambda x: (x - 0.5) / 0.25, r"images must lie in \[0.0, 1.0\]"),
    "nan": (lambda x: x / 0 * 0, r"images must lie in \[0.0, 1.0\]"),
    "infinite": (lambda x: x / 0, r"images must lie in \[0.0, 1.0\]"),
    "bytes": (lambda x: (x * 255).to(torch.uint8), "images must be floating point .* torch.uint8"),
    "integers": (lambda x: x.long(), "images must be floating point .* torch.int64"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_IMAGES.values(), ids=BAD_IMAGES.keys())
def test_bad_images(defense, spoil, message):
    """Checked once for all attacks, before any begins."""
    x, y = images(4, seed=25)
    with pytest.raises(ValueError, match=message):
        ATTACKS["pgd"](defense, spoil(x), y, seeded())


def test_one_bad_pixel_is_enough(defense):
    x, y = images(4, seed=25)
    x[2, 0, 3, 3] = 1.01
    with pytest.raises(ValueError, match="images must lie in"):
        ATTACKS["pgd"](defense, x, y)
    with pytest.raises(ValueError, match=r"images must be a batch \[B, …\], got shape \[6\]"):
        ATTACKS["pgd"](defense, torch.rand(6), y)


@one_of_each
@pytest.mark.parametrize("label", [-1, 4, 255])
def test_labels_out_of_range(attack, defense, label):
    x, y = images(4, seed=26)
    y[1] = label
    with pytest.raises(ValueError, match=r"labels must be 0 … 3 for 4 classes, got"):
        attack(defense, x, y, seeded())


@pytest.mark.parametrize(
    "reshape", [lambda y: y[:-1], lambda y: y[:, None], lambda y: y[0], lambda y: y.repeat(2)]
)
def test_labels_of_wrong_shape(defense, reshape):
    """Checked once for all attacks, before any begins."""
    x, y = images(4, seed=26)
    with pytest.raises(ValueError, match=r"4 images need labels \[4\], got \["):
        ATTACKS["pgd"](defense, x, reshape(y), seeded())


@pytest.mark.parametrize("attack", RANDOM.values(), ids=RANDOM.keys())
def test_wrong_number_of_streams(attack, defense):
    x, y = images(4, seed=26)
    with pytest.raises(ValueError, match="3 random streams for 4 images"):
        attack(defense, x, y, Streams.from_index(torch.arange(3)))


WRONG = {
    "no steps": (lambda: PGD(LINF, 0, 0.1), "steps must be at least 1, got 0"),
    "no steps, arc": (lambda: ARC(LINF, 0, 0.1), "steps must be at least 1, got 0"),
    "no restarts": (lambda: PGD(LINF, 1, 0.1, restarts=0), "restarts must be at least 1, got 0"),
    "fewer draws": (lambda: PGD(LINF, 9, 0.1, draws=-2), "draws must be at least 1, got -2"),
    "fewer neighbours": (
        lambda: ARC(LINF, 9, 0.1, neighbours=-1),
        "neighbours must be at least 1, got -1",
    ),
    "step 0": (lambda: PGD(LINF, 1, 0.0), "step_size must be positive, got 0.0"),
    "step -1": (lambda: PGD(LINF, 1, -1), "step_size must be positive, got -1"),
    "step nan": (lambda: PGD(LINF, 1, float("nan")), "step_size must be positive, got nan"),
    "step 0, arc": (lambda: ARC(LINF, 1, 0), "step_size must be positive, got 0"),
    "damping 2": (lambda: PGD(LINF, 1, 0.1, momentum=(2.0,)), r"momentum must be .*\[0, 1\]"),
    "damping -1": (lambda: PGD(LINF, 1, 0.1, momentum=(0.5, -0.1)), r"momentum must be numbers"),
    "no momentum": (lambda: PGD(LINF, 1, 0.1, momentum=()), r"momentum must be numbers"),
    "same start": (
        lambda: PGD(LINF, 1, 0.1, restarts=2, random_start=False),
        "2 restarts without random_start",
    ),
    "arc l3": (lambda: ARC(Threat(3), 1, 0.1), "ARC is for linf and l2, not for norm 3"),
    "cw linf": (lambda: CW(LINF), "CW is for l2, not for norm linf"),
    "cw no search": (lambda: CW(L2, binary_steps=0), "binary_steps must be at least 1, got 0"),
    "cw step 0": (lambda: CW(L2, step_size=0.0), "step_size must be positive, got 0.0"),
    "cw const": (lambda: CW(L2, initial_const=-1.0), "initial_const must be positive, got -1.0"),
    "cw confidence": (lambda: CW(L2, confidence=-1), "confidence must not be negative, got -1"),
    "cw draws": (lambda: CW(L2, draws=0), "draws must be at least 1, got 0"),
    "deepfool l3": (lambda: DeepFool(Threat(3)), "DeepFool is for linf and l2, not for norm 3"),
    "deepfool steps": (lambda: DeepFool(L2, 0), "steps must be at least 1, got 0"),
    "no candidates": (lambda: DeepFool(L2, candidates=0), "candidates must be at least 1, got 0"),
    "undershoot": (
        lambda: DeepFool(L2, overshoot=-0.1),
        "overshoot must not be negative, got -0.1",
    ),
    "norm": (lambda: ARC(Threat("l0"), 1, 0.1), "norm must be 'linf', 'l2' or a number"),
    "eps": (lambda: PGD(Threat(eps=-0.1), 1, 0.1), "eps must be a finite radius >= 0, got -0.1"),
    "probs": (lambda: Ensemble([ConvNet()] * 2, [0.5, 0.6]), "probs must sum to 1, got 1.1"),
}


@pytest.mark.parametrize(("build", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PGD(LINF, 9, 0.1, draws=0), "draws must be at least 1, got 0"),
        (lambda: ARC(LINF, 9, 0.1, neighbours=0), "neighbours must be at least 1, got 0"),
    ],
    ids=["draws", "neighbours"],
)
def test_message_names_the_argument(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_pgd_of_a_norm_without_projection(defense):
    x, y = images(2)
    with pytest.raises(ValueError, match="projection is for linf and l2, not for norm 3"):
        PGD(Threat(3, 0.1), 2, 0.1)(defense, x, y, seeded())


class Coin(Defense):
    """Draws its classifier anew."""

    def __init__(self, inner):
        super().__init__(torch.ones(1), ce_of_mean_logits)
        self.inner = inner

    def logits(self, x, generator=None):
        return self.inner(x).unsqueeze(0)


def test_arc_needs_fixed_classifiers(defense):
    x, y = images(2)
    with pytest.raises(TypeError, match=r"Coin is not a fixed set of classifiers.*PGD"):
        ATTACKS["arc"](Coin(defense.members[0]), x, y)


@every_attack
def test_is_a_frozen_value(attack):
    assert isinstance(attack, Attack)
    same = replace(attack)
    assert same == attack
    assert hash(same) == hash(attack)
    assert replace(attack, steps=attack.steps + 1) != attack
    with pytest.raises(FrozenInstanceError):
        attack.steps = 1
    assert isinstance(getattr(attack, "step_size", 0.0), float)
    assert {field.name for field in fields(attack)} >= {"threat", "steps"}


def test_objective_of_an_attack_is_used(defense):
    x, y = images(6, seed=27)
    results = [
        PGD(L2, 3, 0.1, objective=o, random_start=False)(defense, x, y)
        for o in (expected_ce, ce_of_mean_probs, ce_of_mean_logits, linear, worst_ce, confident)
    ]
    for i, one in enumerate(results):
        for other in results[:i]:
            assert not torch.equal(one, other)
