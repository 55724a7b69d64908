"""What holds for every defense that adapts to the test batch."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_rob.attacks import (
    GMSA,
    PGD,
    AutoAttack,
    PartialBatchAttack,
    Strongest,
    Targeted,
    ThroughAdaptation,
    TransferFromStatic,
    attacking,
)
from lightning_rob.callbacks.protocol import AttackerDefenderSession
from lightning_rob.defenses import DANN, DENT, RMC, TADV, Mixture, Single, URejectron, base_model
from lightning_rob.objectives import worst_ce
from lightning_rob.threat import Threat

THREAT = Threat("linf", 0.1)
WEAK = PGD(THREAT, 2, 0.05)


class Parts(nn.Module):
    """A network that all of them can use: BatchNorm2d, a linear layer, a discriminator."""

    def __init__(self, classes=4):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.last, self.critic = nn.Linear(4 * 9, classes), nn.Linear(4 * 9, 2)

    def features(self, x):
        return nn.functional.avg_pool2d(self.norm(self.conv(x)).relu(), 2).flatten(1)

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


def trained():
    torch.manual_seed(0)
    net, (x, y) = Parts(), images(64, seed=3)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(15):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return net.eval()


SOURCE = images(64, seed=3)
QUICK = {"source": SOURCE, "epochs": 1, "batch_size": 16}
DEFENSES = {
    "dent": partial(DENT, steps=2),
    "dent-batch": partial(DENT, steps=2, statistics="batch"),
    "rmc": partial(RMC, attack=WEAK, neighbours=16, **QUICK),
    "rmc-stateless": partial(RMC, neighbours=16, stateful=False, **QUICK),
    "dann": partial(DANN, **QUICK),
    "tadv": partial(TADV, attack=WEAK, **QUICK),
    "urejectron": partial(URejectron, discriminator=partial(Parts, 2), tau=0.9, **QUICK),
}
every_defense = pytest.mark.parametrize("make", DEFENSES.values(), ids=DEFENSES.keys())
RANDOM = [name for name in DEFENSES if not name.startswith("dent")]


def fingerprint(module):
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: value.detach().clone() for name, value in state.items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@every_defense
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_nothing_changes_in_a_whole_attack(make, context):
    defense, (x, y) = make(trained()), images(6)
    defense.train()  # modes are to be kept, too
    before = fingerprint(defense)
    modes = [module.training for module in defense.modules()]
    wanted = [weight.requires_grad for weight in defense.parameters()]
    state = torch.random.get_rng_state()
    attack = GMSA(PGD(THREAT, 2, 0.05, worst_ce), rounds=2)
    with context():
        x_adv = attack(defense, x, y, torch.Generator().manual_seed(0))
    assert same(before, fingerprint(defense))
    assert modes == [module.training for module in defense.modules()]
    assert wanted == [weight.requires_grad for weight in defense.parameters()]
    assert all(weight.grad is None for weight in defense.parameters())
    assert torch.equal(state, torch.random.get_rng_state())
    assert (THREAT.size(x_adv - x) <= 0.1 + 1e-5).all()


@every_defense
def test_a_rehearsal_never_changes_the_referees_result(make):
    """The same images handed in after rehearsals by other generators, and after none."""
    x, y = images(6)
    index = torch.arange(6)

    class Rehearsing(PGD):
        def perturb(self, defense, x, y, generator):
            for seed in range(self.steps - 1):
                defense.adapt(x, torch.Generator().manual_seed(seed))
            return x

    found = []
    for rehearsals in (0, 3):
        defense = make(trained())
        match = AttackerDefenderSession(Rehearsing(THREAT, rehearsals + 1, 0.05), defense, 7)
        rounds = [match.round(x, y, index) for _ in range(2)]
        found.append((rounds, fingerprint(match.defenders[0][0])))
    for (_, one), (_, other) in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(one, other)
    assert same(found[0][1], found[1][1])


@every_defense
def test_the_defenders_chance_decides_what_it_becomes(make):
    defense, (x, _) = make(trained()), images(6)

    def answer(seed):
        with torch.no_grad():
            final = defense.adapt(x, torch.Generator().manual_seed(seed)).eval()
            return getattr(final, "scores", lambda x: final.logits(x))(x)

    assert torch.equal(answer(0), answer(0))
    if make in [DEFENSES[name] for name in RANDOM]:
        assert not torch.equal(answer(0), answer(1))


@every_defense
def test_it_adapts_to_nothing_but_the_images(make):
    """`adapt` is given no labels, and what it becomes depends on the batch unless it says so."""
    defense, (x, _) = make(trained()), images(6)
    one, other = (
        defense.adapt(images, torch.Generator().manual_seed(0)).eval() for images in (x, 1 - x)
    )
    with torch.no_grad():
        outputs = [getattr(f, "scores", lambda x, f=f: f.logits(x))(x) for f in (one, other)]
    assert torch.equal(*outputs) == (make is DEFENSES["tadv"])


@every_defense
def test_the_static_network_is_what_a_transfer_attack_sees(make):
    defense, (x, y) = make(trained()), images(6)
    final = defense.adapt(x, torch.Generator().manual_seed(0))
    attack = PGD(THREAT, 3, 0.05, random_start=False)
    expected = attack(Single(defense.net), x, y)
    torch.testing.assert_close(TransferFromStatic(attack)(final, x, y), expected, rtol=0, atol=1e-6)
    fresh = Single(trained())
    with torch.no_grad():
        alone = fresh.eval().logits(x)
        torch.testing.assert_close(base_model(final).eval().logits(x), alone)


@every_defense
def test_adaptation_is_the_same_wherever_it_happens(make):
    defense, (x, _) = make(trained()), images(6)

    def becomes(context):
        with context:
            final = defense.adapt(x, torch.Generator().manual_seed(3))
        return fingerprint(final)

    outside = becomes(torch.enable_grad())
    assert same(outside, becomes(attacking(defense)))
    assert same(outside, becomes(torch.inference_mode()))
    assert same(outside, becomes(torch.autocast("cpu", torch.bfloat16)))


@pytest.mark.parametrize("name", ["dent", "rmc"])
def test_autoattack_goes_through_the_adapting_network(name):
    pytest.importorskip("pyautoattack")
    defense, (x, y) = DEFENSES[name](trained()), images(6)
    suite = AutoAttack(THREAT, "custom", ("apgd-ce",))
    before = fingerprint(defense)
    x_adv = ThroughAdaptation(suite)(defense, x, y, torch.Generator().manual_seed(0))
    assert same(before, fingerprint(defense))
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
def test_synchronised_batch_norm_adapts_alone(make):
    """As `trainer.sync_batchnorm` makes it; ranks adapt to rounds of their own."""
    net = nn.SyncBatchNorm.convert_sync_batchnorm(trained())
    plain, (x, _) = make(trained()), images(6)
    one, other = (
        defense.adapt(x, torch.Generator().manual_seed(0)).eval() for defense in (make(net), plain)
    )
    with torch.no_grad():
        torch.testing.assert_close(
            (one.adapted or net.eval())(x), (other.adapted or plain.net.eval())(x)
        )


@pytest.mark.parametrize("name", ["tadv", "urejectron", "dann", "rmc"])
def test_no_batch_of_one_image_is_trained_on(name):
    """BatchNorm1d refuses it: 17 images in batches of 16, with 16 test images 33."""

    class Flat(Parts):
        def __init__(self, classes=4):
            super().__init__(classes)
            self.flat = nn.BatchNorm1d(4 * 9)

        def features(self, x):
            return self.flat(super().features(x))

    options = {"source": images(17), "epochs": 1, "batch_size": 16}
    own = {"tadv": {"attack": WEAK}, "rmc": {"neighbours": 17}}.get(name, {})
    if name == "urejectron":
        own = {"discriminator": partial(Flat, 2)}
    defense = {"tadv": TADV, "urejectron": URejectron, "dann": DANN, "rmc": RMC}[name]
    defense(Flat().eval(), **options, **own).adapt(images(16)[0], torch.Generator().manual_seed(0))


def test_dent_leaves_other_batch_norms_alone():
    class Flat(Parts):
        def __init__(self):
            super().__init__()
            self.flat, self.unused = nn.BatchNorm1d(4 * 9), nn.BatchNorm2d(3)

        def features(self, x):
            return self.flat(super().features(x))

    net = Flat().eval()
    final = DENT(net).adapt(images(6)[0] ** 2)
    assert torch.equal(final.adapted.flat.running_mean, net.flat.running_mean)
    DENT(net).adapt(images(1)[0])


@pytest.mark.parametrize("scale", [255.0, -1.0])
def test_a_source_has_images_from_0_to_1(scale):
    x, y = images(8)
    with pytest.raises(ValueError, match="source must have images in"):
        RMC(trained(), source=(scale * x, y))
    RMC(trained(), source=[x, y])
