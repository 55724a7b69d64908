"""The contract of every defense that adapts to the test batch."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_rob.attacks import (
    GMSA,
    PGD,
    AutoAttack,
    PartialBatchAttack,
    Strongest,
    Targeted,
    ThroughAdaptation,
    attacking,
)
from lightning_rob.defenses import DANN, DENT, RMC, TADV, Mixture, Single, URejectron
from lightning_rob.evaluation.protocol import AttackerDefenderSession
from lightning_rob.objectives import worst_ce
from lightning_rob.threat import Threat
from tests.attacks.common import seeded
from tests.tiny import fit_all, same_weights

THREAT = Threat("linf", 0.1)
WEAK = PGD(THREAT, 2, 0.05)


class Parts(nn.Module):
    """A network for all of them: BatchNorm2d, dropout, a linear layer, a discriminator."""

    def __init__(self, classes=4, dropout=0.0):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.drop = nn.Dropout(dropout)
        self.last, self.critic = nn.Linear(4 * 9, classes), nn.Linear(4 * 9, 2)

    def features(self, x):
        return self.drop(nn.functional.avg_pool2d(self.norm(self.conv(x)).relu(), 2).flatten(1))

    def classify(self, features):
        return self.last(features)

    def domain(self, features):
        return self.critic(features)

    def forward(self, x):
        return self.classify(self.features(x))


def images(count, seed=0):
    chance = torch.Generator().manual_seed(seed)
    prototypes = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(7))
    y = torch.arange(count) % 4
    x = 0.25 + 0.5 * prototypes[y] + 0.1 * torch.randn(count, 3, 8, 8, generator=chance)
    return x.clamp(0, 1), y


def trained(dropout=0.0):
    torch.manual_seed(0)
    return fit_all(Parts(dropout=dropout), *images(64, seed=3), 15)


SOURCE = images(64, seed=3)
QUICK = {"source": SOURCE, "epochs": 1, "batch_size": 16}
ADAPTING = {
    "dent": partial(DENT, steps=2),
    "rmc": partial(RMC, attack=WEAK, neighbours=16, **QUICK),
    "rmc-stateless": partial(RMC, neighbours=16, stateful=False, **QUICK),
    "dann": partial(DANN, **QUICK),
    "tadv": partial(TADV, attack=WEAK, **QUICK),
    "urejectron": partial(
        URejectron, discriminator=partial(Parts, 2, dropout=0.5), tau=0.9, **QUICK
    ),
}
every_defense = pytest.mark.parametrize("name", ADAPTING)


def state(defense):
    """All tensors that a defense holds, with modes and gradients, the optimizer's moments too."""
    tensors = {**dict(defense.named_parameters()), **dict(defense.named_buffers())}
    found = {name: value.detach().clone() for name, value in tensors.items()}
    for place, moments in ((getattr(defense, "moments", None) or {}).get("state") or {}).items():
        found |= {f"{place} {key}": torch.as_tensor(v).clone() for key, v in moments.items()}
    flags = [(module.training,) for module in defense.modules()]
    flags += [(weight.requires_grad, weight.grad is None) for weight in defense.parameters()]
    return found, flags


def same(one, other):
    """Whether two defenses have learned the same, bit by bit."""
    return same_weights(state(one)[0], state(other)[0])


def unchanged(before, defense):
    after = state(defense)
    return same_weights(before[0], after[0]) and before[1] == after[1]


@every_defense
@pytest.mark.parametrize("context", [torch.inference_mode, torch.enable_grad])
def test_a_whole_attack_changes_nothing(name, context):
    defense, (x, y) = ADAPTING[name](trained()), images(6)
    defense.train()  # modes are to be kept, too
    before, rng = state(defense), torch.random.get_rng_state()
    attack = GMSA(PGD(THREAT, 2, 0.05, worst_ce), rounds=2)
    with context():
        x_adv = attack(defense, x, y, seeded(0))
    assert unchanged(before, defense)
    assert torch.equal(rng, torch.random.get_rng_state())
    assert (THREAT.size(x_adv - x) <= 0.1 + 1e-5).all()


@every_defense
def test_adapting_is_pure(name):
    """Before and after a first batch; frozen weights, modes and gradients are kept."""
    net = trained()
    net.norm.train()
    net.last.weight.requires_grad_(False)
    net.conv.weight.grad = torch.ones_like(net.conv.weight)
    first, x = ADAPTING[name](net), images(6)[0]
    source = [part.clone() for part in SOURCE]
    for defense in (first, first.adapt(x, seeded(0)).after_batch(seeded(1))):
        before, rng, batch = state(defense), torch.random.get_rng_state(), x.clone()
        final = defense.adapt(batch, seeded(2))
        final.after_batch(seeded(3))
        assert unchanged(before, defense)
        assert torch.equal(rng, torch.random.get_rng_state())
        assert torch.equal(x, batch)
        assert all(map(torch.equal, SOURCE, source))
        assert final.net is net
        assert not same(first, final)
        learned = {id(p) for p in final.parameters()} - {id(p) for p in net.parameters()}
        assert learned
        assert all(
            not p.requires_grad and p.grad is None for p in final.parameters() if id(p) in learned
        )


@every_defense
def test_the_same_generator_gives_the_same_in_any_state_of_the_global_stream(name):
    """Dropout draws from the defender's generator too."""
    defense, (x, _) = ADAPTING[name](trained(dropout=0.5)), images(6)
    found = []
    for noise, seed in ((1, 0), (2, 0), (1, 3)):
        torch.manual_seed(noise)
        found.append(defense.adapt(x, seeded(seed)))
    assert same(*found[:2])
    assert not same(found[0], found[2])
    assert torch.equal(found[0].eval().logits(x), found[1].eval().logits(x))
    again = found[0].after_batch(seeded(1)), found[1].after_batch(seeded(1))
    assert same(*again)


@every_defense
def test_only_stateful_defenses_continue_from_what_they_learned(name):
    defense, (x, _) = ADAPTING[name](trained()), images(6)
    final = defense.adapt(x, seeded(0))
    assert final.stateful == (name == "rmc")
    assert same(final.adapt(x, seeded(1)), defense.adapt(x, seeded(1))) == (not final.stateful)


@every_defense
def test_a_rehearsal_never_changes_the_result(name):
    """The same images handed in after rehearsals by other generators, and after none."""
    x, y = images(6)
    index = torch.arange(6)

    class Rehearsing(PGD):
        def perturb(self, defense, x, y, generator):
            for seed in range(self.steps - 1):
                defense.adapt(x, seeded(seed)).after_batch(seeded(seed))
            return x

    found = []
    for rehearsals in (0, 3):
        attack = Rehearsing(THREAT, rehearsals + 1, 0.05)
        session = AttackerDefenderSession(attack, ADAPTING[name](trained()), 7)
        rounds = [session.step(x, y, index)[1] for _ in range(2)]
        found.append((rounds, session.defenders[0][0]))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert same(found[0][1], found[1][1])


@every_defense
def test_it_adapts_to_nothing_but_the_images(name):
    """`adapt` has no labels; TADV does not even look at the images."""
    defense, (x, _) = ADAPTING[name](trained()), images(6)
    one, other = (defense.adapt(batch, seeded(0)) for batch in (x, 1 - x))
    assert same(one, other) == (name == "tadv")


@every_defense
def test_adaptation_is_the_same_wherever_it_happens(name):
    defense, (x, y) = ADAPTING[name](trained()), images(6)

    def becomes(context):
        with context:
            return defense.adapt(x + 0, seeded(3)).after_batch(seeded(4)).adapt(x, seeded(5))

    expected = becomes(torch.enable_grad())
    for context in (
        attacking(defense),
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
    ):
        found = becomes(context)
        assert same(expected, found)
        assert not any(weight.is_inference() for weight in found.parameters())
    # A network that was adapted in inference mode can still be attacked.
    attack = PGD(THREAT, 1, 0.05, random_start=False)
    inside = becomes(torch.inference_mode())
    x_adv = attack(inside.adapted_model, x, y)
    assert torch.equal(x_adv, attack(expected.adapted_model, x, y))


def test_autoattack_goes_through_the_adapting_network():
    defense, (x, y) = ADAPTING["dent"](trained()), images(6)
    suite = AutoAttack(THREAT, "custom", ("apgd-ce",))
    before = state(defense)
    x_adv = ThroughAdaptation(suite)(defense, x, y, seeded(0))
    assert unchanged(before, defense)
    assert not torch.equal(x_adv, x)
    assert (THREAT.size(x_adv - x) <= 0.1 + 1e-5).all()


def test_attacks_that_go_image_by_image_refuse_what_adapts_to_a_batch():
    defense, (x, y) = DENT(trained()), images(6)
    with pytest.raises(TypeError, match="DENT adapts to whole batches: Strongest cannot pick"):
        Strongest([WEAK, WEAK])(defense, x, y)
    with pytest.raises(TypeError, match=r"write GMSA\(inner=PartialBatchAttack"):
        PartialBatchAttack(GMSA(WEAK))
    with pytest.raises(ValueError, match="the least over models cannot be negated"):
        Targeted(PGD(THREAT, 2, 0.05, worst_ce))
    GMSA(PartialBatchAttack(WEAK), rounds=1)(defense, x, y)


def test_a_mixture_adapts_with_its_parts():
    nets, (x, _) = [trained(), trained()], images(6)
    mixed = Mixture([DENT(nets[0], steps=2), DENT(nets[1], steps=3)])
    assert mixed.transductive
    final = mixed.adapt(x)
    expected = [DENT(net, steps=n).adapt(x).eval() for net, n in zip(nets, (2, 3), strict=True)]
    with torch.no_grad():
        found = final.eval().logits(x)
        torch.testing.assert_close(found, torch.cat([part.logits(x) for part in expected]))
        torch.testing.assert_close(final.base_model.eval().logits(x)[0], nets[0].eval()(x))
    assert not Mixture([Single(nets[0])]).transductive


@every_defense
def test_synchronised_batch_norm_adapts_alone(name):
    """As `trainer.sync_batchnorm` makes it; ranks adapt to rounds of their own."""
    net = nn.SyncBatchNorm.convert_sync_batchnorm(trained())
    plain, (x, _) = ADAPTING[name](trained()), images(6)
    one, other = (defense.adapt(x, seeded(0)).eval() for defense in (ADAPTING[name](net), plain))
    with torch.no_grad():
        torch.testing.assert_close(
            (one.adapted or net.eval())(x), (other.adapted or plain.net.eval())(x)
        )


class Flat(Parts):
    """A BatchNorm1d that refuses one image, and a BatchNorm2d that is not called."""

    def __init__(self, classes=4):
        super().__init__(classes)
        self.flat, self.unused = nn.BatchNorm1d(4 * 9), nn.BatchNorm2d(3)

    def features(self, x):
        return self.flat(super().features(x))


@pytest.mark.parametrize("name", ["tadv", "urejectron", "dann", "rmc"])
def test_no_batch_of_one_image_is_trained_on(name):
    """17 images in batches of 16, with 16 test images 33."""
    own = {"source": images(17)}
    own |= {"rmc": {"neighbours": 17}, "urejectron": {"discriminator": partial(Flat, 2)}}.get(
        name, {}
    )
    ADAPTING[name](Flat().eval(), **own).adapt(images(16)[0], seeded(0))


def test_dent_leaves_other_batch_norms_alone():
    net = Flat().eval()
    final = DENT(net).adapt(images(6)[0] ** 2)
    assert torch.equal(final.adapted.flat.running_mean, net.flat.running_mean)
    several = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(net)).eval()
    of_all = DENT(several).adapt(images(6)[0] ** 2)
    torch.testing.assert_close(of_all(images(6)[0] ** 2), final(images(6)[0] ** 2))
    DENT(net).adapt(images(1)[0])


@pytest.mark.parametrize("kind", [tuple, lambda parts: TensorDataset(*parts)])
@pytest.mark.parametrize(("name", "scale"), [("rmc", 255.0), ("rmc", -1.0), ("tadv", 255.0)])
def test_source_images_of_another_range_are_refused(name, scale, kind):
    x, y = images(8)
    with pytest.raises(ValueError, match=r"source must have images in \[0, 1\], got values in"):
        ADAPTING[name](trained(), source=kind((scale * x, y)))


OUT_OF_RANGE = {
    "rmc": {"copies": -1, "epochs": 0, "batch_size": 0, "patience": 0, "neighbours": 4},
    "rmc-stateless": {"stop": "no"},
    "dann": {"epochs": 0, "batch_size": 0, "scale": -0.1},
    "tadv": {"epochs": 0, "batch_size": 0, "fraction": 1.5},
    "urejectron": {"tau": 1.5, "epochs": 0, "batch_size": 0, "source_size": 0},
    "dent": {"steps": 0},
}
WRONG = [(name, *pair) for name, given in OUT_OF_RANGE.items() for pair in given.items()]


@pytest.mark.parametrize(
    ("name", "option", "value"), [*WRONG, ("urejectron", "tau", -0.1), ("tadv", "fraction", 0.0)]
)
def test_arguments_out_of_range(name, option, value):
    with pytest.raises(ValueError, match=f"{option} must .*{value}"):
        ADAPTING[name](trained(), **{option: value})
