"""How many passes each attack costs, exactly; benchmarks/attacks.py tells what these take."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_rob import attacks as at
from lightning_rob.attacks.budget import PassCount
from lightning_rob.defenses import Ensemble, RandomTransforms, Single, TransformEnsemble
from lightning_rob.modules import BAT, DVERGE, IAT, AdversarialTraining
from lightning_rob.objectives import worst_ce
from lightning_rob.randomness import Streams
from lightning_rob.rules import mean_logits
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise, HorizontalFlip
from tests.counting import Counting

LINF, L2 = Threat("linf", 0.1), Threat("l2", 100.0)
B = 7


def mlp(seed, classes=5):
    torch.manual_seed(seed)
    layers = nn.Flatten(), nn.Linear(3 * 8 * 8, 32), nn.Tanh(), nn.Linear(32, classes)
    return Counting(nn.Sequential(*layers)).eval()


def mlps(count):
    return [mlp(seed) for seed in range(count)]


def batch(*nets, count=B):
    """Images, and labels that the first network gives them."""
    x = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    y = nets[0](x).argmax(1) if nets else torch.arange(count) % 5
    for net in nets:
        net.clear()
    return x, y


def seeded():
    return torch.Generator().manual_seed(0)


# where no image is fooled or none leaves: evaluations, steps, gradients

TINY = Threat("linf", 1e-6)
PASSES = {
    "pgd": (at.PGD(LINF, 5, 0.03), (0, 5, 5)),  # evaluations are paid for by those who ask
    "pgd from the image": (at.PGD(LINF, 5, 0.03, random_start=False), (0, 5, 5)),
    "pgd, aggmo": (at.PGD(LINF, 5, 0.03, ascent=at.AggMo()), (0, 5, 5)),
    "best iterate": (at.PGD(LINF, 5, 0.03, keep_best=True, random_start=False), (1, 5, 5)),
    "best of a random start": (at.PGD(LINF, 5, 0.03, keep_best=True), (2, 5, 5)),
    "restarts": (at.PGD(LINF, 5, 0.03, restarts=3), (3, 15, 15)),
    "best of restarts": (at.PGD(LINF, 5, 0.03, restarts=3, keep_best=True), (6, 15, 15)),
    # a pass on the clean images, one at the start of a run and one a step
    "apgd": (at.APGD(TINY, 5), (0, 7, 7)),
    "apgd, restarts": (at.APGD(TINY, 5, restarts=3), (0, 19, 19)),
    "apgd-t": (at.APGD(TINY, 5, targets=2), (2, 13, 13)),  # what each target's run is worth
    "apgd in l1": (at.APGD(Threat("l1", 1e-6), 5, targets=2), (2, 17, 17)),  # three starts
    "fab-t": (at.FAB(TINY, 5, 1), (6, 5, 5)),
    "fab-t, targets": (at.FAB(TINY, 5, 2), (11, 10, 10)),
    "pdgd": (at.PDGD(L2, 20), (9, 20, 20)),
    "ddn": (at.DDN(L2, 20), (9, 20, 20)),
    # each radius is the attack and a forward
    "radius-pgd": (at.MinimalNorm(at.PGD(L2, 3, 10.0), 4), (5, 12, 12)),
    "radius-apgd": (at.MinimalNorm(at.APGD(L2, 3, early_stop=False), 4), (5, 20, 20)),
}


@pytest.mark.parametrize(("attack", "counts"), PASSES.values(), ids=PASSES)
def test_passes(attack, counts):
    net = mlp(1)
    x, y = batch(net)
    attack(Single(net), x, y, seeded())
    assert net.counts() == counts
    assert {*net.linearised, *net.evaluated} == {B}
    assert attack.cost(PassCount(Single(net), x)) == sum(counts)


def test_adaptive_pgd():
    """Each member once a step, whatever the number of members."""
    nets = mlps(3)
    x, y = batch(*nets)
    at.PGD(LINF, 4, 0.03)(Ensemble(nets), x, y, seeded())
    assert [net.counts() for net in nets] == [(0, 4, 4)] * 3


def test_eot():
    """All draws of a step in one call."""
    net = mlp(1)
    x, y = batch(net)
    defense = RandomTransforms(net, [GaussianNoise(), HorizontalFlip()], 2, draws=3)
    at.PGD(LINF, 4, 0.03, draws=6, backward=at.SurrogateTransforms())(defense, x, y, seeded())
    assert net.counts() == (0, 4, 4)
    assert {*net.linearised, *net.backwards} == {6 * B}


@pytest.mark.parametrize("restarts", [1, 3])
def test_fooled_images_leave(restarts):
    """Each image costs what it costs alone, until it is fooled; then it never starts again."""
    net = mlp(1)
    x, y = batch(net, count=16)
    attack = at.PGD(Threat("linf", 0.03), 6, 0.01, restarts=restarts, early_stop=True)
    attack(Single(net), x, y, Streams.from_index(torch.arange(16), 0))
    together, sizes = sum(net.linearised), net.linearised[:6]
    assert len(net.evaluated) == (0 if restarts == 1 else 3)  # whose run was better
    net.clear()
    for i in range(16):
        attack(Single(net), x[i : i + 1], y[i : i + 1], Streams.from_index(torch.tensor([i]), 0))
    assert together == sum(net.linearised) < 16 * 6 * restarts
    assert sizes == sorted(sizes, reverse=True)


# ARC: G gradients a member and iteration
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("neighbours", "backwards"), [(None, 4), (1, 1), (3, 3), (9, 4)])
@pytest.mark.parametrize("random_start", [False, True])
def test_arc(count, neighbours, backwards, random_start):
    """Each iteration linearises every member once, with G gradients, and scores M candidates."""
    nets = mlps(count)
    x, y = batch(*nets)
    at.ARC(LINF, 4, 0.1, neighbours, random_start)(Ensemble(nets), x, y, seeded())
    for net in nets:
        assert net.counts() == (1 + random_start + 4 * count, 4, 4 * backwards)
        assert {*net.linearised, *net.evaluated, *net.backwards} == {B}


def test_arc_drops_the_fooled():
    nets, images = mlps(2), {}
    x, y = batch(*nets, count=32)
    for drop in (False, True):
        at.ARC(Threat("linf", 0.2), 6, 0.05, early_stop=drop)(Ensemble(nets), x, y)
        images[drop] = sum(net.images() for net in nets)
        for net in nets:
            net.clear()
    assert images[False] == 2 * 32 * (1 + 6 * 3)
    assert images[True] < 0.8 * images[False]


def test_climb():
    """Each member alone, towards each class; no set holds a member that nothing fools."""
    _, nets = flat_ensemble()
    x, y = torch.rand(B, 3, 8, 8), torch.zeros(B, dtype=torch.long)
    at.LatticeClimber(LINF, 4, classes=2)(Ensemble(nets), x, y)
    tries = 2 * 2
    for net in nets:
        assert net.images() == B * (1 + tries * 5)
        assert sum(net.backwards) == B * 2 * 4


@pytest.mark.parametrize("attack", [at.ARC(LINF, 5, 0.1, early_stop=True), at.CW(L2)])
def test_what_is_wrong_already_is_left_alone(attack):
    net = mlp(1)
    x, y = batch(net)
    assert torch.equal(attack(Single(net), x, (y + 1) % 5), x)
    assert net.counts() == (1, 0, 0)


# minimal perturbations
def test_carlini_wagner():
    """One forward and one backward a step; images whose cost settles leave, and none comes back."""
    net = mlp(1)
    x, y = batch(net)
    at.CW(L2, steps=20, binary_steps=3, initial_const=1.0)(Single(net), x, y)
    evaluations, steps, gradients = net.counts()
    assert evaluations == 1
    assert steps == gradients <= 3 * 20
    assert net.linearised == net.backwards
    assert max(net.linearised) == B
    rises = [b > a for a, b in zip(net.linearised, net.linearised[1:], strict=False)]
    assert sum(rises) <= 2  # each c begins with all images


@pytest.mark.parametrize(("candidates", "backwards"), [(None, 4), (2, 2), (9, 4)])
def test_deepfool(candidates, backwards):
    """Each step looks who is fooled and linearises the others, with a gradient per candidate."""
    net = mlp(1)
    x, y = batch(net, count=24)
    at.DeepFool(L2, steps=5, candidates=candidates)(Single(net), x, y)
    evaluations, steps, gradients = net.counts()
    assert evaluations in (steps, steps + 1)
    assert gradients == steps * backwards
    assert net.linearised == net.evaluated[1:] + [net.linearised[-1]] * (evaluations == steps)
    assert net.linearised == sorted(net.linearised, reverse=True)


def test_square():
    """At most one forward a query, on the images that it changes."""
    net = mlp(1)
    x, y = batch(net)
    at.Square(Threat("l2", 1e-6), 20)(Single(net), x, y, seeded())
    assert net.evaluated == [B] * 22
    net.clear()
    at.Square(TINY, 20)(Single(net), x, y, seeded())
    assert 2 <= len(net.evaluated) <= 22 and net.counts()[1:] == (0, 0)


# budgets

STEP = at.PGD(LINF, 1, 0.01)
MEASURED = at.SurrogateGradient(at.FewPixels(L2, bisections=3), enter=("members.0",))
BUDGETS = {  # name -> attack, number of passes, and the smallest number for it on two networks
    "pgd": (STEP, 41, 4),
    "inside": (replace(STEP, backward=at.InsideBounds()), 60, 6),
    "restarts": (replace(STEP, restarts=3, keep_best=True), 100, 24),
    "apgd": (at.APGD(LINF), 90, 12),
    "apgd-t": (at.APGD(LINF, targets=9, restarts=2), 500, 2 * (2 + 8 * 5 + 1)),
    "apgd in l1": (at.APGD(Threat("l1", 3.0), restarts=9), 700, 12),
    "arc-start": (at.ARC(LINF, 1, neighbours=2, start=STEP), 150, 4 + 4 + 2 * (1 + 2 + 2) + 2),
    "arc": (at.ARC(LINF, 1), 200, 2 + 2 * (1 + 4 + 2) + 2),
    "cw": (at.CW(L2, binary_steps=3), 100, 2 * (1 + 2 * 3)),
    "climb": (at.LatticeClimber(LINF), 400, 2 + (6 + 2) + 7 * 2 * 2 + 2),
    "ddn": (at.DDN(L2), 100, 2 * (1 + 2 + 8)),
    "pdgd": (at.PDGD(L2), 100, 2 * (1 + 2 + 8)),
    "deepfool": (at.DeepFool(L2, candidates=3), 90, 2 * 5 + 2),
    "fab-t": (at.FAB(LINF), 300, 2 * (1 + 4 * 3) + 2),
    "few-pixels": (at.FewPixels(L2), 90, 2 * (2 + 13)),
    "few-pixels measured": (MEASURED, 90, 2 * (3 + 2 * 3 + 4)),
    "square": (at.Square(L2), 80, 2 * (2 + 1)),
    "minimal-norm": (at.MinimalNorm(STEP), 171, 2 * (1 + 2 + 1)),
    "strongest": (at.Strongest((STEP, replace(STEP, steps=3))), 60, 2 * (2 * 2 + 2)),
    "surrogate": (at.SurrogateGradient(at.APGD(LINF), noise=0.01, copies=2), 200, 3 * 12),
    "autoattack": (at.AutoAttack(LINF), 400, 2 * (1 + 6 + 2 + 4 * 5 + 1 + 4 * 3 + 3 + 4) + 2),
}


def flat_ensemble():
    """Two networks that say the same of every image: no attack fools them, and none ends early."""
    nets = mlps(2)
    for net in nets:
        nn.init.zeros_(net.inner[-1].weight)
        net.inner[-1].bias.data = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    return Ensemble(nets, rule=mean_logits), nets


@pytest.mark.parametrize(("attack", "passes", "least"), BUDGETS.values(), ids=BUDGETS)
def test_budget(attack, passes, least):
    """No image costs more; what is left over is less than a step of each part."""
    defense, nets = flat_ensemble()
    x, y = torch.rand(1, 3, 8, 8), torch.tensor([0])
    at.Budgeted(attack, passes)(defense, x, y, seeded())
    used = sum(net.images() + sum(net.backwards) for net in nets)
    assert used <= passes
    ends_early = (at.AutoAttack, at.CW, at.DDN, at.LatticeClimber, at.MinimalNorm, at.PDGD)
    if not isinstance(attack, ends_early):
        assert used >= 0.8 * passes
    count = PassCount(defense, x)
    planned = attack.within(passes, count).cost(count) + count.asked
    assert max(used, 0.8 * passes) <= planned <= passes
    with pytest.raises(ValueError, match=f"needs {least} passes or more here, got {least - 1}"):
        at.Budgeted(attack, least - 1)(defense, x, y, seeded())
    at.Budgeted(attack, least)(defense, x, y, seeded())


def test_budget_of_a_random_defense():
    net = mlp(1)
    defense = RandomTransforms(net, [GaussianNoise(), HorizontalFlip()], 2, draws=3)
    for attack, steps in ((STEP, 10), (replace(STEP, draws=4), 7)):  # and 4 passes for the draws
        net.clear()
        at.Budgeted(attack, 60)(defense, *batch(count=1), seeded())
        assert len(net.linearised) == steps
        assert net.images() + sum(net.backwards) == 60


def test_a_budget_in_l1_is_one_of_short_runs():
    """Of as many steps each as make the most of the passes."""
    net, attack = Single(mlp(1)), at.APGD(Threat("l1", 3.0))
    count = PassCount(net, batch()[0], 5)
    found = [attack.within(passes, count) for passes in (60, 115, 1000)]
    assert [(one.steps, one.restarts) for one in found] == [(26, 1), (25, 2), (26, 17)]


def test_passes_that_are_not_known():
    with pytest.raises(TypeError, match=r"OnMember has no number of passes .* put Budgeted around"):
        at.Budgeted(at.OnMember(STEP), 100)(Ensemble(mlps(2)), *batch(), seeded())


# transductive defenses
@pytest.mark.parametrize("objective", [None, worst_ce])
@pytest.mark.parametrize("memory", [True, False])
def test_gmsa(objective, memory):
    """Round i costs K passes through i models; a rehearsal adapts, answers and tells its loss."""
    net, adapted = mlp(1), []
    x, y = batch(net)

    class Adapting(Single):
        def adapt(self, x, generator=None):
            model = Single(mlp(1))
            adapted.append(model.net)
            return model

    options = {} if objective is None else {"objective": objective}
    inner = at.PGD(Threat("linf", 1e-6), 4, 1e-6, **options)
    at.GMSA(inner, rounds=3, memory=memory)(Adapting(net), x, y, seeded())
    models, longer = [net, *adapted[1:]], [1, 2, 3] if objective and memory else [1, 1, 1]
    for age, model in enumerate(models):
        attacked = longer[age:] if memory else longer[age : age + 1]
        steps = 4 * sum(attacked)
        assert model.counts() == (0 if model is net else 2, steps, steps)
    assert adapted[0].counts() == (2, 0, 0)


# transformation ensembles
def test_targets_of_an_ensemble():
    """One member alone is attacked; in turn, what all of them say of each candidate."""
    nets = mlps(3)
    x, y = batch(*nets)
    defense = TransformEnsemble(nets, ["clean", "flip_horizontal", "flip_vertical"])
    at.TAA(at.PGD(LINF, 4, 0.03), target="clean")(defense, x, y, seeded())
    assert [net.counts() for net in nets] == [(0, 4, 4), (0, 0, 0), (0, 0, 0)]


def test_aggregated_attacks():
    """A round attacks each candidate that is left, on the images that it still gets right."""
    nets = mlps(3)
    x, y = batch(*nets)
    defense = TransformEnsemble(nets, ["clean", "flip_horizontal", "flip_vertical"])
    at.PAA(at.PGD(LINF, 4, 0.03), rounds=2, max_dissimilarity=10)(defense, x, y, seeded())
    for net in nets:
        evaluations, steps, gradients = net.counts()
        assert steps == gradients == 4 * evaluations
        assert evaluations <= 2
        assert net.linearised[::4] == net.linearised[3::4]


# training
def test_boosted_training():
    """Fixed members are attacked, once for a batch, and only the member in training is trained."""
    nets = mlps(3)
    module = BAT(lambda: nets.pop(), at.PGD(LINF, 4, 0.03), members=3, epochs=1)
    module.stage = 2
    members = list(module.members)
    for net in members:
        net.clear()
    members[2].train()
    x, y = batch()
    module.loss(x, y)
    assert [net.counts() for net in members] == [(0, 4, 4), (0, 4, 4), (0, 0, 0)]
    assert [net.trained for net in members] == [[], [], [B]]


@pytest.mark.parametrize("kind", [AdversarialTraining, IAT])
def test_adversarial_training(kind):
    net = mlp(1)
    options = {"members": 1, "epochs": 1} if kind is IAT else {}
    module = kind(lambda: net, attack=at.PGD(LINF, 4, 0.03), **options).train()
    net.clear()
    module.loss(*batch())
    assert net.counts() == (0, 4, 4)
    assert net.trained == [B]


def test_distillation():
    """DVERGE distils from each member once, and the others share what it gives."""
    module = DVERGE(lambda: mlp(1), members=3, steps=4, layers=[""]).train()
    for net in module.members:
        net.clear()
    module.loss(*batch())
    for net in module.members:
        assert net.counts() == (1, 4, 4)
        assert net.trained == [B, B]
