"""Auto finds what a network hides from gradients, and its recipe runs alone."""

import contextlib
import statistics
import warnings
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot
from torch.utils.data import DataLoader, TensorDataset

from lightning_rob import load_callbacks, objectives
from lightning_rob.attacks import (
    APGD,
    PGD,
    Auto,
    Budgeted,
    CommonCorruption,
    Square,
    SurrogateGradient,
    search,
)
from lightning_rob.attacks.base import is_batch_separable
from lightning_rob.attacks.folding import FoldingError
from lightning_rob.attacks.members import Best
from lightning_rob.attacks.nested import walk
from lightning_rob.attacks.search import LOOKING_FROM, Search, Unmasked
from lightning_rob.attacks.slopes import OtherSlopes
from lightning_rob.attacks.surrogate import SeenThrough, StandIn
from lightning_rob.defenses import DENT, Defense, Ensemble, Single, Smoothing
from lightning_rob.defenses.per_image import restricted_to
from lightning_rob.evaluation import evaluate
from lightning_rob.randomness import normal
from lightning_rob.rules import majority, mean_logits, random_member
from lightning_rob.runtime.errors import NoGradientError, ZeroGradientWarning
from lightning_rob.threat import Threat
from lightning_rob.transforms.corruptions import Brightness
from tests.attacks.common import PROTOTYPES, images, right, seeded, streams, trained_net
from tests.audit.planted import Through
from tests.counting import Counting
from tests.evaluation.test_evaluate import Stopping

THREAT = Threat("linf", 0.14)
PASSES, IMAGES = 600, 24


class Ranked(nn.Module):
    """Heads that are compared as in CrossMax: a class counts by its second best head."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(trained_net(seed) for seed in (1, 2, 3))

    def forward(self, x):
        z = torch.stack([net(x) for net in self.nets])
        z = z - z.amax(2, keepdim=True)
        z = z - z.amax(0, keepdim=True)
        return z.topk(2, 0).values[-1]


class Rounded(torch.autograd.Function):
    """A function of a user's own, without a slope."""

    @staticmethod
    def forward(ctx, x):
        return (32 * x).round() / 32

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient)


FAULTS = {
    "softmax": {"after": lambda z: (60 * z).softmax(1)},
    "logarithm": {"after": lambda z: ((60 * z).softmax(1) + 1e-9).log()},
    "votes": {"after": lambda z: one_hot(z.argmax(1), 4).float()},
    "saturation": {"after": lambda z: (40 * z).tanh() + 1e-3 * z.detach()},
    "rounding": {"before": lambda x: (32 * x).round() / 32},
    "8 bits": {"before": lambda x: (255 * x).to(torch.uint8) / 255},
    "own function": {"before": Rounded.apply},
    "detach": {"before": lambda x: x.detach() + 0},
    "no_grad": {"before": torch.no_grad()(lambda x: 1 * x)},
    "numpy": {"before": lambda x: torch.from_numpy(x.detach().numpy().astype("float64")).float()},
}


def left_by(attack, net, x, y):
    defense = Single(net)
    x_adv = attack(defense, x, y, seeded())
    assert (attack.threat.distance(x_adv, x) <= attack.threat.eps * (1 + 1e-5)).all()
    return right(defense, x_adv, y).mean().item()


@cache
def left_plain():
    x, y = images(IMAGES, seed=4)
    return left_by(Auto(THREAT, PASSES), trained_net(1), x, y)


# The others are of the same kinds: tests of slopes and values have all.
@pytest.mark.parametrize("name", ["softmax", "votes", "rounding", "own function", "numpy"])
def test_what_a_network_hides_is_found(name):
    """Behind a fault, Auto leaves at most an image more than on the network alone."""
    x, y = images(IMAGES, seed=4)
    net = Through(trained_net(1), **FAULTS[name])
    assert 0.1 < left_plain() < 0.5
    assert left_by(Auto(THREAT, PASSES), net, x, y) <= left_plain() + 1.1 / IMAGES
    with contextlib.suppress(NoGradientError), warnings.catch_warnings():
        warnings.simplefilter("ignore", ZeroGradientWarning)
        hidden = left_by(APGD(THREAT, 30), net, x, y)
        assert hidden > left_plain() + 0.4


class Guarded(nn.Module):
    """A network that rejects images which are far from all centers."""

    def __init__(self, kind):
        super().__init__()
        self.net, self.kind = trained_net(1), kind
        self.centers = (0.25 + 0.5 * PROTOTYPES[6]).flatten(1)

    def near(self, x):
        return 0.95 - torch.cdist(x.flatten(1), self.centers).amin(1)

    def forward(self, x):
        z = nn.functional.pad(self.net(x), (0, 1), value=-50.0)
        flag, row = self.near(x) < 0, 50.0 * torch.eye(5)[4]
        if self.kind == "rows":
            z[flag] = row
        if self.kind == "cells":
            z[flag, 4] = 50.0
        return torch.where(flag[:, None], row, z) if self.kind == "where" else z


@pytest.mark.parametrize("kind", ["rows", "cells", "where"])
def test_decisions_of_an_image_are_held(kind):
    """Auto leaves fewer images than steps by hand that know what is rejected."""
    x, y = images(IMAGES, seed=4)
    net = Guarded(kind).eval()

    def left(z):
        p = net(z).argmax(1)
        return (p == y) | (p == 4)

    by_hand, z = left(x), x.clone()
    for _ in range(60):
        logits = net.net(z.requires_grad_())
        wrong = objectives.expected_margin(logits[None], torch.ones(1), y)
        (gradient,) = torch.autograd.grad(wrong.minimum(net.near(z)).sum(), z)
        z = THREAT.project(z.detach() + 0.02 * gradient.sign(), x)
        by_hand &= left(z)
    defense = Single(net, rejects=4)
    found = Auto(THREAT, PASSES).find(defense, x, y, seeded())
    assert "decisions with one outcome an image" in found.findings
    assert left(found.x_adv).sum() <= by_hand.sum() - 2
    plain = APGD(THREAT, 100)(defense, x, y, seeded())
    assert left(plain).sum() > by_hand.sum()


DECIDED = (  # by three scores of an image, with the number of decisions
    (lambda z: z[:, 0] > 0.5, 1),
    (lambda z: torch.lt(input=z[:, :1], other=torch.tensor(0.5))[:, 0], 1),
    (lambda z: z.gt(0.5).any(1), 3),
    (lambda z: (z[:, 0] - 0.5).sign() == 1, 1),
    (lambda z: torch.heaviside(z[:, 0] - 0.5, torch.tensor(0.0)).bool(), 1),
    (lambda z: z.argmin(1) == 1, 1),
    (lambda z: z.min(dim=1)[1] == 1, 1),
    (lambda z: z.topk(1, largest=False).indices[:, 0] == 1, 1),
    (lambda z: torch.topk(z, 1).indices[:, 0] == 1, 1),
    (lambda z: z.max(1).values > 0.9, 1),  # of whose place no use is made
    (lambda z: ~(z[:, 0] - 0.5).signbit(), 1),
    (lambda z: z[:, 0].round() == 1, 1),
    (lambda z: (2 * z[:, 0]).long() == 1, 1),
    (lambda z: torch.bucketize(z[:, 0].contiguous(), torch.tensor([0.3, 0.6])) == 1, 1),
    (lambda z: torch.tensor([bool(row[0] > 0.5) != bool(row[1] > 0.5) for row in z]), 2),
    (lambda z: torch.tensor([row[0].item() > 0.5 for row in z]), 1),
    (lambda z: torch.tensor([row[:1].item() <= numpy.float64(0.5) for row in z]), 1),
    (lambda z: torch.tensor([2 * (1 - row[0].item()) < 1 for row in z]), 1),
    (lambda z: torch.tensor([row[0].item() - row[1].item() > 0 for row in z]), 1),
    (lambda z: torch.tensor([number > 0.5 for number in z[:, 0].tolist()]), 1),
    (lambda z: torch.tensor([int(row.argmax()) == 1 for row in z]), 1),
    (lambda z: torch.tensor([row[None].argmin(1).item() == 1 for row in z]), 1),
    (lambda z: torch.tensor([row.max(0).indices.item() == 1 for row in z]), 1),
    (lambda z: torch.tensor([place == 1 for place in z.argmax(1).tolist()]), 1),
)


@pytest.mark.parametrize("images", [6, 1])
@pytest.mark.parametrize(("decide", "many"), DECIDED)
def test_decisions_are_found_and_turned(decide, many, images):
    """Held at its own outcomes a pass predicts as the network; at the next one otherwise."""

    class Decided(nn.Module):
        def forward(self, x):
            z = x.flatten(1)
            return torch.where(decide(z)[:, None], z, -z)

    x, y = torch.rand((images, 3, 1, 1), generator=seeded(3)), torch.zeros(images).long()
    for rank in (0, 1):
        view = SurrogateGradient(APGD(THREAT), ("rounding",))
        found = SeenThrough(Single(Decided()), view).decisions(x)
        assert len(found.used) == many
        ranks = tuple(rank if key in found.used else -1 for key in found.scores)
        seen = SeenThrough(Single(Decided()), replace(view, held=ranks)).holding(x, y, None)
        decided = seen.observed(x.clone().requires_grad_()).decided.argmax(1)
        same = decided == Decided()(x).argmax(1)
        if rank == 0:
            assert same.all()
        elif many == 1:
            assert (~same).any()


@pytest.mark.parametrize("logged", [0, 1, 3])
def test_a_condition_on_the_batch_is_no_decision(logged):
    """Nor as many of them as there are images, nor one on some images: others stay decisions."""

    class Decided(nn.Module):
        def forward(self, x):
            z = x.flatten(1)
            some = z if z.mean() > 0 else -z
            for _ in range(6):
                some = some if some.mean().item() > 9 else 0.9 * some
            rows = [row if row[0] > 0.4 else row * row.argmax().item() for row in some]
            self.seen = [row.argmax().item() for row in rows[:logged] for _ in range(9)]
            return torch.stack(rows)

    x = torch.rand((6, 3, 1, 1), generator=seeded(3))
    view = SurrogateGradient(APGD(THREAT), ("rounding",))
    found = SeenThrough(Single(Decided()), view).decisions(x)
    assert [n for _, n, _ in found.used] == [2]


def test_numbers_keep_no_pass_that_has_ended():
    """As where a network keeps a mean of them from pass to pass."""

    class Mean(nn.Module):
        mean = 0.0

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * (1 - x.mean().item())
            return x.flatten(1)

    view = SurrogateGradient(APGD(THREAT), ("rounding", "detached"))
    net, x = Mean(), torch.rand((6, 3, 1, 1), generator=seeded(3))
    seen = SeenThrough(Single(net), view)
    nodes = []
    for _ in range(3):
        seen.decisions(x)
        (mean,) = {id(part): part for part in seen.modules() if isinstance(part, Mean)}.values()
        steps, todo = 0, [mean.mean.source.grad_fn]
        while todo:
            todo += [node for node, _ in todo.pop().next_functions if node]
            steps += 1
        nodes.append(steps)
    assert nodes[0] == nodes[1] == nodes[2]


def test_a_number_that_left_torch_is_compared_as_a_number():
    """Whatever it is compared with, in its own precision, also after its tensor has changed."""
    pairs = []

    class Numbers(nn.Module):
        def forward(self, x):
            for _ in range(2):
                z = x.flatten(1).sum(1) * 0 + 0.7
                number = z[0].item()
                z.mul_(0.5)
                others = [
                    0.7,
                    0.1,
                    10**40,
                    number,
                    numpy.array([0.5, 0.9]),
                    torch.tensor([0.1, 0.8]),
                ]
                pairs.append(
                    [
                        *([number > o, number >= o, number < o, number <= o] for o in others),
                        [statistics.mean([number, number]), deepcopy(number), f"{number:.2f}"],
                    ]
                )
            return x.flatten(1)

    x = torch.rand((6, 3, 1, 1), generator=seeded(3))
    Numbers()(x)
    view = SurrogateGradient(APGD(THREAT), ("rounding", "detached"))
    SeenThrough(Single(Numbers()), view).decisions(x)
    assert len(pairs) == 4
    for own, seen in zip(pairs[0], pairs[-1], strict=True):
        for a, b in zip(own, seen, strict=True):
            assert isinstance(b, type(a))
            assert (a == b).all() if isinstance(a, numpy.ndarray | torch.Tensor) else a == b


def test_held_outcomes_belong_to_their_decisions():
    """Also in a pass that does not come to the first one of them."""

    class Sometimes(nn.Module):
        def forward(self, x):
            z = x.flatten(1)
            if len(z) > 3:
                z = z + 0 * (6 * z[:, 0]).round()[:, None]
            return torch.where((z[:, 1] > 0.5)[:, None], z, -z)

    x, y = torch.rand((6, 3, 1, 1), generator=seeded(3)), torch.zeros(6).long()
    view = SurrogateGradient(APGD(THREAT), ("rounding",), held=(0, 1))
    seen = SeenThrough(Single(Sometimes()), view).holding(x, y, None)
    for rows in (torch.arange(6), torch.arange(2)):
        with restricted_to(seen, rows):
            at = x[rows].clone().requires_grad_()
            decided = seen.observed(at).output[0]
        assert torch.equal(decided, -Sometimes()(x)[rows])


def test_a_winner_without_a_gradient_is_left_out():
    """On other images than those of its trial none may have one."""

    class Constant(nn.Module):
        def forward(self, x):
            return torch.eye(4)[torch.zeros(len(x)).long()]

    x, y = images(4, seed=4)[0], torch.zeros(4).long()
    plain = PGD(THREAT, 2, 0.1)
    search = Search(THREAT, Single(Constant()), x, y, seeded(), 4, 500, lambda _: plain)
    winners = [(1.0, plain), (1.0, Square(THREAT))]
    result = search._finished(plain, Best(x.clone(), torch.ones(4)), winners)
    assert [bool(trial.error) for trial in result.trail] == [True, False]
    assert result.attack.attacks[0] == plain and len(result.attack.attacks) == 2


def test_a_pass_with_fewer_decisions_is_attacked():
    """Where no image needs the second network there is one decision less."""

    class Early(nn.Module):
        def __init__(self):
            super().__init__()
            self.nets = nn.ModuleList(trained_net(seed) for seed in (1, 2))

        def forward(self, x):
            z, second = (net(x) for net in self.nets)
            sure = -z.topk(2, 1).values.diff(dim=1)[:, 0] > 4
            if (~sure).all():
                z = torch.where((second[:, 0] > 1)[:, None], second, z)
            return torch.where(sure[:, None], z, second)

    x, y = images(IMAGES, seed=4)
    net = Early().eval()
    x = x[(z := net(x).topk(2, 1).values.diff(dim=1)[:, 0]).argsort(descending=True)]
    x_adv = Auto(THREAT, PASSES)(Single(net), x, y[z.argsort(descending=True)], seeded())
    assert (THREAT.distance(x_adv, x) <= THREAT.eps * (1 + 1e-5)).all()


@pytest.mark.parametrize(("rank", "lead"), [(0, 0.5), (1, -0.5)])
def test_held_decisions_bound_the_margin(rank, lead):
    """The margin is that behind the decision, and at most the lead, both by their medians."""

    class Routed(nn.Module):
        def forward(self, x):
            z = x.flatten(1)
            ways = torch.stack([z[:, 1:4], z[:, 4:7] - torch.tensor([torch.inf, 0, 0])])
            return ways[(z[:, 0] > 0.5).long(), torch.arange(len(z))]

    x = torch.tensor([[0.0, 0.9, 0.5, 0.1, 0.3, 0.2, 0.7]] * 3).view(3, 7, 1, 1)
    x[1:, 1] = torch.tensor([0.2, 0.6])[:, None, None]
    y = torch.zeros(3, dtype=torch.long)
    view = SurrogateGradient(APGD(THREAT), ("rounding",), held=(rank,))
    seen = SeenThrough(Single(Routed()), view).holding(x, y, seeded())
    x[:, 0] = 0.5 - lead / 2  # half of the usual lead
    logits = seen.logits(x.requires_grad_(), seeded())
    margins = objectives.margin(logits, y)
    # Behind the first way the usual margin is 0.3; behind the second the label is ruled out.
    expected = [-0.4, 0.15, -0.1] if rank == 0 else [0.5, 0.5, 0.5]
    torch.testing.assert_close(margins[1], torch.tensor(expected))
    assert torch.equal(logits[0].argmax(1), Routed()(x).argmax(1))


@pytest.mark.parametrize("threat", [Threat("l2", 0.8), Threat("l1", 2.4)], ids=["l2", "l1"])
def test_steps_within_l2_and_l1(threat):
    """Of black and white images small changes of many pixels cross none, those of a few do."""
    x, y = images(IMAGES, seed=4)
    x = x.round()
    net = Through(trained_net(1), before=lambda x: (2 * x).round() / 2)
    found = Auto(threat, PASSES).find(Single(net), x, y, seeded())
    through = Budgeted(SurrogateGradient(APGD(threat), ("rounding",)), PASSES)
    others = [attack(Single(net), x, y, seeded()) for attack in (through, Square(threat, PASSES))]
    left, *by_others = (right(Single(net), at, y).mean() for at in (found.x_adv, *others))
    assert any("FewPixels" in trial.words for trial in found.trail)
    assert found.trail[-1].words == "from there: Square"
    assert left < min(by_others) - 0.1


def test_noise_before_steps_within_l2():
    """One prediction is no proof there, so that few pixels are judged by draws."""
    x, y = images(IMAGES, seed=4)
    torch.manual_seed(0)  # of the network's noise, which tests before this one would decide
    net = Through(trained_net(1), before=lambda x: (4 * x + 0.1 * torch.randn_like(x)).round() / 4)
    threat = Threat("l2", 0.4)
    found = Auto(threat, PASSES).find(Single(net), x, y, seeded())
    assert {"noise of its own", "rounding operations"} <= set(found.findings)
    assert any("FewPixels" in trial.words for trial in found.trail)
    assert not any(trial.error for trial in found.trail)
    pgd = PGD(threat, 1, 0.04, objectives.expected_margin, 2, momentum=(0.9,))
    through = Budgeted(SurrogateGradient(pgd, ("rounding",), draws_anew=True), PASSES)
    x_pgd = through(Single(net), x, y, seeded())
    by_pgd = torch.stack([right(Single(net), x_pgd, y) for _ in range(20)]).mean()
    assert found.trail[-1].left <= float(by_pgd) + 0.05


def test_heads_that_are_ranked():
    """As on the mean of the heads, which has all their gradients."""
    x, y = images(IMAGES, seed=4)
    mean = Ensemble([trained_net(seed) for seed in (1, 2, 3)], rule=mean_logits)
    x_adv = APGD(THREAT, objective=objectives.linear)(mean, x, y, seeded())
    ranked = Ranked()
    known = right(Single(ranked), x_adv, y).mean().item()
    assert left_by(Auto(THREAT, PASSES), ranked, x, y) <= known + 1.1 / IMAGES


@pytest.mark.parametrize("rule", [mean_logits, majority, random_member])
def test_outputs_of_members_hide_nothing(rule):
    """A member that rounds is found; else the schedule gets all passes."""
    x, y = images(IMAGES, seed=4)
    members, passes = [trained_net(seed) for seed in (1, 2, 3)], 1300
    defense = Ensemble(members, rule=rule)
    result = Auto(THREAT, passes).find(defense, x, y, seeded())
    assert not result.findings and len(result.trail) == 2
    assert sum(trial.passes for trial in result.trail) > 0.9 * passes
    members[1] = Through(members[1], **FAULTS["rounding"])
    result = Auto(THREAT, passes).find(Ensemble(members, rule=rule), x, y, seeded())
    assert "rounding operations" in result.findings


class Apart(nn.Module):
    """A network that no other part knows, whose logits come back from numpy."""

    def __init__(self, net):
        super().__init__()
        self.held = [net.eval()]

    def forward(self, x):
        return torch.from_numpy(self.held[0](x.detach()).detach().numpy())


def test_outputs_that_come_back_from_numpy_are_told_apart():
    """Each has the slope of its own network, as if it had not left torch."""
    nets = [trained_net(seed).eval() for seed in (1, 2, 3)]
    view = SurrogateGradient(APGD(THREAT), slopes=("detached",))
    found = []
    for members in (nets, [Apart(net) for net in nets]):
        x = images(IMAGES, seed=4)[0].requires_grad_()
        logits = SeenThrough(Ensemble(members).eval(), view).observed(x).logits
        found.append([torch.autograd.grad(z.sum(), x, retain_graph=True)[0] for z in logits])
    for plain, apart in zip(*found, strict=True):
        assert torch.equal(plain, apart)


@pytest.mark.parametrize("eps", [0.01, 0.14])
def test_a_member_without_a_gradient_hides_nothing(eps):
    """The schedule for several networks needs the gradient of each, where it is no weaker too."""
    x, y = images(IMAGES, seed=4)
    members, left = [trained_net(seed) for seed in (1, 2)], []
    for front in ({}, FAULTS["numpy"]):
        defense = Ensemble([Through(members[0], **front), members[1]])
        result = Auto(Threat("linf", eps), 800).find(defense, x, y, seeded())
        left.append(right(defense, result.x_adv, y).mean().item())
    assert search.NO_GRADIENT in result.findings
    assert left[1] <= left[0] + 1.1 / IMAGES


class Drawn(Defense):
    """Votes of three noisy copies of an image, as a user would write it."""

    def __init__(self, net):
        super().__init__(torch.full((3,), 1 / 3), majority)
        self.net = net

    def logits(self, x, generator=None):
        copies = (x + 0.02 * normal(x, *x.shape[1:], generator=generator) for _ in self.weights)
        return torch.stack([self.net(copy) for copy in copies])


@cache
def left_adapted(name=None):
    """Accuracy of a network that adapts to the batch and hides its gradients in some way."""
    net = Through(trained_net(1), **FAULTS.get(name, {}))
    defense = DENT(nn.Sequential(nn.BatchNorm2d(1), net)).eval()
    loader = DataLoader(TensorDataset(*images(IMAGES, seed=4)), IMAGES)
    auto = {"auto": Auto(THREAT, 800).schedule(defense)}
    return evaluate(defense, auto, loader, progress=False).accuracy("auto")


@pytest.mark.parametrize("name", ["numpy", "softmax"])
def test_a_defense_that_adapts_hides_nothing(name):
    """Its adapted networks are seen through in each round of GMSA."""
    assert left_adapted(name) <= left_adapted() + 1.1 / IMAGES


def test_few_passes_on_a_defense_that_adapts_are_not_spent_on_looking():
    x, y = images(IMAGES, seed=4)
    defense, plain = Single(trained_net(1)), APGD(THREAT, early_stop=False)
    found = [
        kind(plain, passes)(defense, x, y, seeded())
        for passes in (LOOKING_FROM - 1, LOOKING_FROM)
        for kind in (Budgeted, Unmasked)
    ]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[2], found[3])


def test_a_class_that_rejects_hides_nothing():
    """The values before a saturated output have this class too."""
    x, y = images(2 * IMAGES, seed=4)
    x, y = x[y < 3], y[y < 3]
    found, left = [], []
    for after in ({}, FAULTS["softmax"]):
        defense = Single(Through(trained_net(1), **after), rejects=3)
        found.append(Auto(THREAT, PASSES).find(defense, x, y, seeded()))
        left.append(right(defense, found[-1].x_adv, y).mean().item())
    assert found[0].findings == () and HIDDEN["softmax"] in found[1].findings
    assert left[1] <= left[0] + 1.1 / len(x)


HIDDEN = {
    "rounding": "rounding operations",
    "softmax": "values before the output that stand for logits",
}


@pytest.mark.parametrize(
    ("made", "name"),
    [(Drawn, "softmax"), (lambda net: Smoothing(net, 0.02, draws=5), "rounding")],
    ids=["drawn", "smoothing"],
)
def test_a_random_defense_hides_nothing(made, name, monkeypatch):
    """What its networks hide is found, also where a CPU would work on parts of all copies.

    Where nothing is hidden the schedule gets all passes.
    """
    monkeypatch.setattr("lightning_rob.defenses.smoothing.MOST_VALUES", 36 * 50)
    x, y = images(IMAGES, seed=4)
    plain = Auto(THREAT, PASSES).find(made(trained_net(1)), x, y, seeded())
    assert plain.findings == () and len(plain.trail) == 1
    hiding = made(Through(trained_net(1), **FAULTS[name]))
    found = Auto(THREAT, PASSES).find(hiding, x, y, seeded())
    assert HIDDEN[name] in found.findings
    left, of_plain = (
        right(one, result.x_adv, y).mean()
        for one, result in ((hiding, found), (made(trained_net(1)), plain))
    )
    assert left <= of_plain + 0.1
    assert sum(trial.passes for trial in found.trail) <= PASSES


def test_a_random_defense_without_a_gradient_is_left_to_square():
    x, y = images(IMAGES, seed=4)
    cut = Drawn(Through(trained_net(1), before=torch.inference_mode()(lambda x: 1 * x)))
    found = Auto(THREAT, PASSES).find(cut, x, y, seeded())
    assert search.NO_GRADIENT in found.findings
    assert right(cut, found.x_adv, y).mean() < right(cut, x, y).mean()


class Mean(nn.Module):
    """A network that sees inverted images, or the mean of an image's levels."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, z):
        return self.net(1 - z if z.shape[1] == 1 else z.mean(1, keepdim=True))


def levels(x):
    """Thermometer code (Buckman et al. 2018) outside of torch: 16 planes of zeros and ones."""
    planes = [x.detach().numpy() > level / 16 for level in range(16)]
    return torch.from_numpy(numpy.concatenate(planes, 1).astype("float32"))


def inverted(x):
    return torch.from_numpy(1 - x.detach().numpy())


@pytest.mark.parametrize("before", [inverted, levels])
def test_a_network_learns_what_has_no_slope(before):
    """The identity's slope is no help: it has the wrong sign, or not the shape."""
    x, y = images(IMAGES, seed=4)
    net = Through(Mean(trained_net(1)), before=before)
    found = Auto(THREAT, PASSES).find(Single(net), x, y, seeded())
    assert right(Single(net), found.x_adv, y).mean() <= left_plain() + 2.1 / IMAGES
    assert any("a learned stand-in before net.net" in trial.words for trial in found.trail)
    assert not is_batch_separable(found.attack, Single(net))


def test_a_stand_in_starts_at_the_best_mixture():
    x = torch.rand(8, 3, 6, 6, generator=seeded())
    z = torch.cat([1 - x, x.mean(1, keepdim=True)], 1)
    torch.testing.assert_close(StandIn(x, z)(x), z, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_stand_in_serves_networks_of_any_precision(dtype):
    x, y = images(4, seed=4)
    net = Through(Mean(deepcopy(trained_net(1))), before=lambda x: (1 - x).detach()).to(dtype)
    attack = SurrogateGradient(APGD(THREAT, 3), enter="net.net", stand_in=4)
    found = attack(Single(net), x.to(dtype), y, seeded())
    assert found.dtype == dtype and not torch.equal(found, x.to(dtype))


def waved(x):
    """Waves of short length: slopes say nothing of the next wave."""
    return x + 0.1 * torch.sin(997 * x)


class Closed(nn.Module):
    """A network behind waves, without parts that a search could enter."""

    def __init__(self):
        super().__init__()
        self.hidden = (trained_net(1).eval(),)

    def forward(self, x):
        return self.hidden[0](waved(x))


def test_a_search_without_slopes_goes_on_where_they_mislead():
    x, y = images(IMAGES, seed=4)
    net = Closed()
    found = Auto(THREAT, PASSES).find(Single(net), x, y, seeded())
    *_, winner, last = found.trail
    assert last.words == "from there: Square" and winner.words.startswith("winner")
    assert last.left < winner.left - 0.15
    assert (THREAT.distance(found.x_adv, x) <= THREAT.eps * (1 + 1e-5)).all()


class Curved(nn.Module):
    """The lead of a class, which changes by its curvature more than by its slope."""

    def forward(self, x):
        moves = (x - 0.5).flatten(1)
        slope = torch.randn(moves.shape[1], generator=torch.Generator().manual_seed(0))
        lead = 9 + moves @ slope + 10 * moves.square().sum(1)
        return torch.stack([lead, -lead], 1)


def test_curvature_hides_no_slope():
    x, y = torch.full((16, 1, 12, 12), 0.5), torch.zeros(16).long()
    found = Auto(Threat("linf", 0.1), PASSES).find(Single(Curved()), x, y, seeded())
    assert right(Single(Curved()), found.x_adv, y).all()  # so that it was looked at
    assert "slopes that say little of how predictions change" not in found.findings


def test_the_identity_replaces_waves_before_each_member():
    x, y = images(IMAGES, seed=4)
    nets = [Through(trained_net(seed), before=waved) for seed in (1, 2)]
    defense, auto = Ensemble(nets, rule=majority), Auto(THREAT, 2 * PASSES)
    found = auto.find(defense, x, y, seeded())
    assert "slopes that say little of how predictions change" in found.findings
    before = "identity before members.0.net, members.1.net"
    assert any(before in trial.words for trial in found.trail)
    plain = auto.schedule(defense, 4)(defense, x, y, seeded())
    assert right(defense, found.x_adv, y).mean() < right(defense, plain, y).mean() - 0.1


@cache
def plainly_attacked():
    x, y = images(IMAGES, seed=4)
    return Auto(THREAT, PASSES)(Single(Through(trained_net(1))), x, y, seeded())


@pytest.mark.parametrize("call", [1, 20, 200])
def test_a_network_that_was_folded_wrongly_is_attacked_again(call):
    """Whether it shows as the search looks, in its first attack, or in a candidate."""
    x, y = images(IMAGES, seed=4)
    calls = []

    def counted(x):
        calls.append(len(x))
        if len(calls) == call:
            raise FoldingError
        return x

    noting = Auto(THREAT, PASSES).noting()
    x_adv = noting(Single(Through(trained_net(1), before=counted)), x, y, seeded())
    assert len(calls) > 2 * call
    torch.testing.assert_close(x_adv, plainly_attacked(), rtol=0, atol=1e-4)
    (result,) = noting.results
    assert not any("FoldingError" in trial.error for trial in result.trail)


def test_a_run_that_is_repeated_has_one_result():
    """Where gradients are not finite at a bound, the attack runs once more, inside of it."""
    x, _ = images(IMAGES, seed=4)
    x[:, :, :2] = 0
    net = Through(trained_net(1), before=lambda x: x.sqrt())
    noting = Auto(THREAT, PASSES).noting()
    x_adv = noting(Single(net), x, net(x).argmax(1), seeded())
    (result,) = noting.results
    assert torch.equal(result.x_adv, x_adv)


@pytest.mark.parametrize(
    ("name", "noise"),
    [
        ("softmax", streams),
        ("noise", lambda x: seeded(3)),
        ("inverted", lambda x: seeded(3)),
        ("guarded", lambda x: seeded(3)),
    ],
)
def test_the_recipe_runs_alone_with_the_same_result(name, noise, tmp_path):
    x, y = images(IMAGES, seed=5)
    noisy = {"before": lambda x: x + 0.2 * torch.randn_like(x)}
    if name == "inverted":
        net = Through(Mean(trained_net(1)), before=inverted)
    elif name == "guarded":
        net = Guarded("rows")
    else:
        net = Through(trained_net(1), **(FAULTS | {"noise": noisy})[name])
    defense = Single(net, rejects=4 if name == "guarded" else None)
    result = Auto(THREAT, PASSES).find(defense, x, y, noise(x))
    assert torch.equal(result.x_adv, result.attack(defense, x, y, noise(x)))
    assert not any(isinstance(part, Auto) for part in walk(result.attack))
    file = tmp_path / "found.yaml"
    file.write_text(result.recipe)
    (plugin,) = load_callbacks(str(file))
    assert plugin.attacks == {"auto": result.attack}
    assert result.trail[0].images == IMAGES
    assert all(trial.words for trial in result.trail)


@pytest.mark.parametrize("name", ["softmax", "rounding", "decision", "nothing"])
def test_passes_are_counted(name):
    """On images of which none is fooled, so that none leaves: the budget is an upper bound."""
    counting = Counting(trained_net(1)).eval()
    decision = {"after": lambda z: torch.where((z[:, 0] > 9)[:, None], -z, z)}
    defense = Single(Through(counting, **(FAULTS | {"decision": decision}).get(name, {})))
    x = torch.rand(4, 1, 6, 6)
    y = defense(x).argmax(1)
    counting.clear()
    result = Auto(Threat("linf", 1e-6), 420).find(defense, x, y, seeded())
    used = counting.images() + sum(counting.backwards)
    assert 0.6 * 420 * 4 <= used <= 420 * 4
    assert sum(trial.passes for trial in result.trail) <= 420
    mislead = any(finding.startswith("slopes that say little") for finding in result.findings)
    assert mislead == (result.trail[-1].words == "from there: Square")


SLOPES = ("rounding", "detached", "saturating", "custom")


@pytest.mark.parametrize("name", FAULTS)
def test_values_stay_the_same_bit_by_bit(name):
    x = images(12, seed=6)[0]
    net = Through(trained_net(1), **FAULTS[name]).eval()
    view = SurrogateGradient(APGD(THREAT), slopes=SLOPES)
    seen = SeenThrough(Single(net), view)
    logits = seen.logits(x.requires_grad_())
    with torch.no_grad():
        assert torch.equal(logits[1].detach(), net(x))
        assert torch.equal(logits[0].argmax(1), net(x).argmax(1))
    assert seen.weights.tolist() == [0, 1]
    if "before" in FAULTS[name]:
        (gradient,) = torch.autograd.grad(logits[1, :, 0].sum(), x)
        assert (gradient.flatten(1).abs().amax(1) > 0).all()


NUMBERS = torch.tensor([[-0.7, 0.2], [0.6, 3.0]])


def slope(function, *slopes):
    """The gradient of a function's sum at a few numbers, through other slopes; values stay."""
    x = NUMBERS.clone().requires_grad_()
    torch.manual_seed(0)
    with OtherSlopes(slopes, 2):
        out = function(x)
    torch.manual_seed(0)
    assert torch.equal(out.detach(), function(NUMBERS.clone()))
    return torch.autograd.grad(out.sum(), x)[0]


BOOK = torch.tensor([[0.0, 1.0], [2.0, 4.0]])  # of vector quantization


def stepped(x):
    z = torch.zeros_like(x)
    z[x > 0] = 1
    return z


def rows_set(x):
    z = torch.zeros(2, 2)
    z[x[:, 0] > 0] = torch.tensor([1.0, 2.0])
    return z


def gradient(function):
    return torch.autograd.functional.jacobian(lambda x: function(x).sum(), NUMBERS)


def likely(x):
    """A softmax whose temperature is half the lead of the largest value."""
    return (2 * x / -x.topk(2, 1).values.diff(dim=1).detach()).softmax(1)


LABELS = torch.tensor([1, 0])
# Rows of the book by the smaller value of each row, in the ways that classifiers are written.
LOOKED_UP = (
    lambda x: BOOK[x.argmin(1)],
    lambda x: BOOK[x.min(1).indices],
    lambda x: BOOK[x.sort(1).indices[:, 0]],
    lambda x: BOOK[(-x).argsort(1, descending=True)[..., :1]].sum(1),
    lambda x: BOOK[x.topk(1, largest=False).indices.flatten()],
    lambda x: BOOK[x.argmin(1, keepdim=True).tile(1, 3).narrow(1, 1, 1).rot90(2).flatten().flip(0)],
    lambda x: BOOK[x.argmin(1).byte().long()],
    lambda x: BOOK.index_select(0, x.argmin(axis=-1)),
    lambda x: torch.gather(BOOK, dim=0, index=x.argmin(1, keepdim=True).expand(2, 2)),
    lambda x: torch.take_along_dim(BOOK, x.argmin(1, keepdim=True), dim=0),
    lambda x: BOOK.index_select(0, index=torch.argmin(input=x, dim=1)),
    lambda x: nn.functional.embedding(x.argmin(1), BOOK),
    lambda x: one_hot(x.argmin(1), 2).float() @ BOOK,
    lambda x: torch.stack([(x.argmin(1) == k).float() for k in range(2)], 1) @ BOOK,
    lambda x: (torch.arange(2) == x.argmin(1)[:, None]).float() @ BOOK,
    lambda x: one_hot(LABELS[x.topk(1, 1, False)[1]]).sum(1).float() @ BOOK.flip(0),
    lambda x: one_hot(LABELS[x.topk(1, 1, False)[1]].mode(1).values, 2).float() @ BOOK.flip(0),
    lambda x: (
        one_hot(LABELS.expand(2, 2).gather(1, x.argmin(1, True))[:, 0], 2).float() @ BOOK.flip(0)
    ),
    lambda x: (
        torch.stack([torch.bincount(one, minlength=2) for one in x.topk(1, 1, False)[1]]).float()
        @ BOOK
    ),
    lambda x: torch.zeros(2, 2).scatter_(1, x.argmin(1, keepdim=True), 1.0) @ BOOK,
    lambda x: BOOK.expand(2, 2, 2)[torch.arange(2), x.argmin(1)],
    lambda x: (
        torch.zeros(2, 2).scatter_add_(1, LABELS[x.topk(1, 1, False)[1]], torch.ones(2, 1))
        @ BOOK.flip(0)
    ),
)
LEVELS, EDGES = torch.tensor([0.0, 1.0, 3.0, 7.0]), torch.tensor([0.0, 0.5, 1.0])
LEVELED = (  # the four numbers are in four steps
    lambda x: LEVELS[torch.bucketize(x, EDGES)],
    lambda x: LEVELS[torch.searchsorted(EDGES, x)],
    lambda x: nn.functional.embedding(torch.bucketize(x, EDGES), LEVELS[:, None])[..., 0],
)
PLACES = torch.arange(-4, 13)
ENDS = torch.arange(-1.0, 4)  # the lowest and the highest are those of the numbers


def whole(x):
    return (4 * x).round().long()


CODED = (  # slopes of 4, as of the whole numbers
    lambda x: whole(x).clamp(max=7).float(),
    lambda x: torch.minimum(whole(x), torch.tensor(7)).float(),
    lambda x: whole(x) // 2 * 2.0,
    lambda x: (whole(x) >> 1) * 2.0,
    lambda x: (whole(x) - whole(x) % 2).float(),
    lambda x: (whole(x) > 1).float(),
    lambda x: torch.cat(whole(x).chunk(2)).roll(1).roll(-1).contiguous().float(),
    lambda x: torch.stack([*whole(x)]).float(),
    lambda x: (whole(x)[..., None] == PLACES).float() @ PLACES.float(),
    lambda x: torch.zeros(2, 2, 17).scatter_(-1, whole(x)[..., None] + 4, 1.0) @ PLACES.float(),
    lambda x: 4 * (~(x > 0) ^ True).float(),
    lambda x: 4 * ((x > 0) != torch.tensor(False)).float(),
    lambda x: whole(x).float() + (x - x.masked_fill(x < 0, -torch.inf)).nan_to_num(0, 0, 0),
)
MATCHED = (
    lambda x: (x.round()[..., None] == ENDS).float() @ ENDS,
    lambda x: torch.eq(ENDS, x.round()[..., None]).float() @ ENDS,
    lambda x: torch.isclose(ENDS, torch.round(input=x)[..., None]).float() @ ENDS,
)


def matched(x):
    """The mean place by a Gaussian around the rounded number."""
    x = x + (x.round() - x).detach()
    return (-(x[..., None] - ENDS).square() / 2).softmax(-1) @ ENDS


WHOLE = torch.tensor([[1, 2], [3, 4]])
OF_EITHER = torch.tensor([[2.0, 1.0], [1.0, 0.0]])


def by_hand(x):
    """A steep softmax."""
    e = (90 * x - (90 * x).amax(1, keepdim=True)).exp()
    return e / e.sum(1, keepdim=True) @ BOOK


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_slopes():
    ones, nearest = torch.ones(2, 2), gradient(lambda x: likely(-x) @ BOOK)
    along = numpy.polyfit(NUMBERS.flatten(), range(4), 1)[0]  # steps for each unit
    steps = torch.tensor([[1, 1.5], [3, 4]]) * along
    for function, slopes, expected in (
        (torch.round, ("rounding",), ones),
        (lambda x: (8 * x).floor() / 8, ("rounding",), ones),
        (lambda x: torch.div(x, 4, rounding_mode="floor"), ("rounding",), ones / 4),
        (lambda x: x // 4, ("rounding",), ones / 4),
        (lambda x: (3 * x > 1).float(), ("rounding",), 3 * ones),
        (lambda x: (3 * x < 1).float(), ("rounding",), -3 * ones),
        (lambda x: (torch.full((2, 2), 1.0) < 3 * x).float(), ("rounding",), 3 * ones),
        (lambda x: ~(x > 0) * 2.0, ("rounding",), -2 * ones),
        (lambda x: ((x > 0) & (x < 2)).float(), ("rounding",), torch.tensor([[1.0, 0], [0, -1]])),
        (lambda x: (x > 0)[:, None].sum(1).float(), ("rounding",), ones),
        (lambda x: torch.where(2 * x > 1, 3.0, 1.0), ("rounding",), 4 * ones),
        (
            lambda x: torch.ones(2, 2).where(x > 0, x),
            ("rounding",),
            torch.tensor([[2.7, 0.8], [0.4, -2]]),
        ),
        (lambda x: torch.zeros(2, 2).masked_fill_(x > 0, 2.0), ("rounding",), 2 * ones),
        (stepped, ("rounding",), ones),
        (rows_set, ("rounding",), torch.tensor([[3.0, 0.0], [3.0, 0.0]])),
        (
            lambda x: torch.where(x[:, :1] > 0, torch.tensor([1.0, 2.0]), torch.zeros(2, 2)),
            ("rounding",),
            torch.tensor([[3.0, 0.0], [3.0, 0.0]]),
        ),
        *((look_up, ("rounding",), nearest) for look_up in LOOKED_UP),
        *((look_up, ("rounding",), steps) for look_up in LEVELED),
        *((code, ("rounding",), 4 * ones) for code in CODED),
        *((match, ("rounding",), gradient(matched)) for match in MATCHED),
        (lambda x: torch.inference_mode()(lambda z: 2 * z)(x), ("detached",), 2 * ones),
        (lambda x: (2 * x).detach_() * 1, ("detached",), 2 * ones),
        (lambda x: x + torch.randint_like(x.argmax(1), 9)[:, None], ("rounding",), ones),
        (
            lambda x: (x.argmax(1) != x.square().argmax(1)).float(),
            ("rounding",),
            gradient(lambda x: 1 - (likely(x) * likely(x.square())).sum(1)),
        ),
        (lambda x: ((x > 0) | (x > 1)).float(), ("rounding",), OF_EITHER),
        (lambda x: torch.heaviside(x, torch.ones(())), ("rounding",), ones),
        (lambda x: (x[..., None] > EDGES[:2]).count_nonzero(-1).float(), ("rounding",), 2 * ones),
        (lambda x: (x > 0).any(1).float(), ("rounding",), torch.tensor([[0.0, 1], [0.5, 0.5]])),
        (lambda x: (x > 0).all(1).float(), ("rounding",), torch.tensor([[1.0, 0], [0.5, 0.5]])),
        (lambda x: (whole(x) @ WHOLE).float(), ("rounding",), torch.tensor([[12.0, 28], [12, 28]])),
        (lambda x: torch.tensor(x), ("detached",), ones),
        (lambda x: 2 * x.new_tensor(x), ("detached",), 2 * ones),
        (lambda x: 2 * torch.tensor(x.detach().numpy()), ("detached",), 2 * ones),
        (lambda x: 1.0 * torch.from_numpy(x.detach().numpy() > 0.5), SLOPES, ones),
        (lambda x: torch.bernoulli(x.sigmoid()), ("rounding",), gradient(torch.sigmoid)),
        (lambda x: x - x % 0.25, ("rounding",), ones),
        (lambda x: (255 * x).to(torch.int32) / 255, ("rounding",), ones),
        (lambda x: x.clone().clamp_(0, 1), ("saturating",), ones),
        (
            lambda x: (90 * x).softmax(1) @ BOOK,
            ("saturating",),
            gradient(lambda x: likely(x) @ BOOK),
        ),
        (
            lambda x: nn.functional.softmin(-90 * x, 1) @ BOOK,
            ("saturating",),
            gradient(lambda x: likely(x) @ BOOK),
        ),
        (by_hand, ("saturating",), gradient(lambda x: likely(x) @ BOOK)),
        (lambda x: x.clone().exp_(), ("saturating",), gradient(torch.exp)),
        (
            lambda x: (x - 60).exp() @ BOOK,
            ("saturating",),
            gradient(lambda x: (x / torch.tensor([[1.0], [1.2]])).softmax(1) @ BOOK),
        ),
        (
            lambda x: nn.functional.pad(90 * x, (0, 1), value=-torch.inf).softmax(1)[:, :2] @ BOOK,
            ("saturating",),
            gradient(lambda x: likely(x) @ BOOK),
        ),
        *(
            (lambda x, bend=bend: bend(2 * x), ("saturating",), 2 * ones)
            for bend in (torch.sigmoid, torch.tanh, torch.erf, nn.functional.softsign)
        ),
        (lambda x: x.detach() * x, ("detached",), 2 * torch.tensor([[-0.7, 0.2], [0.6, 3.0]])),
        (lambda x: x.data * 3 + 0 * x, ("detached",), 3 * ones),
        (lambda x: x.clamp(0, 1), ("rounding",), torch.tensor([[0.0, 1.0], [1.0, 0.0]])),
        (lambda x: x.round() + x, (), ones),
    ):
        torch.testing.assert_close(slope(function, *slopes), expected)


@pytest.mark.filterwarnings("ignore:Implicit dimension")
def test_odd_forms_run():
    """A softmax without a dimension, a comparison with what is no number, a scatter by places."""
    for slopes in ((), SLOPES):
        found = slope(lambda x: nn.functional.softmax(x, dim=None) + float(x == "a"), *slopes)
        assert found.abs().max() < 1e-6  # probabilities have the sum 1

    def set_elsewhere(x):
        places = torch.zeros(2, 1, dtype=torch.long)
        return whole(x).scatter(1, places, 9).gather(dim=1, index=places + 1).float()

    expected = torch.tensor([[0.0, 4.0], [0.0, 4.0]])
    torch.testing.assert_close(slope(set_elsewhere, "rounding"), expected)


@pytest.mark.parametrize(("passes", "classes"), [(500, 3), (1500, 4)])
def test_runs_towards_classes_have_steps_enough(passes, classes):
    """Of few passes they climb towards the classes of the largest scores alone."""
    defense = Single(nn.Sequential(nn.Flatten(), nn.Linear(36, 10)))
    x = torch.rand(4, 1, 6, 6)
    found = Auto(Threat("linf", 1e-6), passes).find(defense, x, defense(x).argmax(1), seeded())
    (run,) = (trial for trial in found.trail if "towards" in trial.words)
    assert run.words == f"winner: APGD towards {classes} classes"
    assert classes == 3 or run.passes >= 120 * classes


def test_stages_of_another_network_are_refused():
    with pytest.raises(ValueError, match=r"stages \(99,\) of \d+ values: search again"):
        SurrogateGradient(APGD(THREAT), stages=(99,))(Single(trained_net(1)), *images(4), seeded())


def test_tiny_noise_hides_nothing():
    """Noise that hardly moves the logits keeps no part of the search away."""
    x, y = images(IMAGES, seed=4)
    calm = Through(trained_net(1), before=waved)
    noisy = Through(trained_net(1), before=lambda x: waved(x + 1e-6 * torch.randn_like(x)))
    left = [left_by(Auto(THREAT, PASSES), net, x, y) for net in (calm, noisy)]
    assert left[1] <= left[0] + 3.1 / IMAGES


def test_noise_that_clean_images_do_not_show():
    """A network that draws noise where it is not sure: one prediction of its images is no proof."""
    (x, y), net = images(3 * IMAGES, seed=4), trained_net(1)

    def sure(z):
        return z.softmax(1).amax(1, keepdim=True)

    with torch.no_grad():
        confidence, rows = sure(net(x))[:, 0].topk(IMAGES)
    x, y, least = x[rows], y[rows], confidence.min() - 0.01
    noisy = Through(net, after=lambda z: z + 2 * (sure(z) < least) * torch.randn_like(z))
    found = Auto(THREAT, PASSES).find(Single(noisy), x, y, seeded())
    assert "noise of its own" in found.findings
    left = right(Single(noisy), found.x_adv.repeat(30, 1, 1, 1), y.repeat(30)).mean()
    assert abs(left - found.trail[-1].left) < 0.1


def test_noise_of_a_network_in_l1():
    """There PGD is weak on images of usual size, and many short runs are not."""
    (x, y), threat = images(IMAGES, seed=4), Threat("l1", 2.0)
    masked = partial(nn.functional.pad, pad=(0, 2), value=-1e4)  # two classes that do not exist
    net = Through(trained_net(1), lambda x: x + 0.2 * torch.randn_like(x), masked)
    found = Auto(threat, PASSES).find(Single(net), x, y, seeded())
    kinds = {type(part) for part in walk(found.attack)}
    assert APGD in kinds and PGD not in kinds
    apgd = Budgeted(APGD(threat, draws=2, early_stop=False), PASSES)

    def left(x_adv):  # of many predictions, as one draw moves a share of 24 images by a tenth
        return right(Single(net), x_adv.repeat(30, 1, 1, 1), y.repeat(30)).mean()

    assert left(found.x_adv) <= left(apgd(Single(net), x, y, seeded())) + 0.1


def test_a_front_in_inference_mode_is_passed_by():
    """Inference mode calls no function of torch, and is seen as no_grad is."""
    x, y = images(IMAGES, seed=4)
    net = Through(trained_net(1), before=torch.inference_mode()(lambda x: 1 * x))
    assert left_by(Auto(THREAT, PASSES), net, x, y) <= left_plain() + 1.1 / IMAGES


def test_operations_without_a_derivative():
    """They end no search, and Square needs none."""
    x, y = images(IMAGES, seed=4)
    step = torch.tensor(0.5)
    net = Through(trained_net(1), before=lambda x: x + 0.01 * torch.heaviside(x - 0.5, step))
    found = Auto(THREAT, PASSES).find(Single(net), x, y, seeded())
    assert "no gradient leads to the images" in found.findings
    assert right(Single(net), found.x_adv, y).mean() < 0.8


def noisy(x):
    return x + 0.05 * torch.randn_like(x)


def purified(x):
    """Descend to the nearest of eight levels, in so many steps that the slope explodes."""
    x = noisy(x)
    for _ in range(40):
        x = x - 0.02 * torch.sin(16 * torch.pi * x)
    return x


def scrambled(x):
    """Replace the gradient by noise on its way back to the image."""
    x = noisy(x)
    if x.requires_grad:
        x.register_hook(lambda gradient: torch.randn_like(gradient) * gradient.abs().mean())
    return x


class Inside(nn.Module):
    """A network whose activations are changed."""

    def __init__(self, change):
        super().__init__()
        self.net, self.change = trained_net(1), change

    def forward(self, x):
        z = self.net.norm(self.net.conv(noisy(x))).relu().contiguous()
        return self.net.linear(self.change(z).flatten(1))


GRID = torch.tensor([0.0, 0.4, 1.0, 2.0])
BEHIND_NOISE = {
    "purifier": lambda: Through(trained_net(1), before=purified),
    "hook": lambda: Through(trained_net(1), before=scrambled),
    "table": lambda: Inside(lambda z: GRID[torch.bucketize(z, (GRID[1:] + GRID[:-1]) / 2)]),
    "steep": lambda: Inside(lambda z: (-1e5 * (z[..., None] - GRID) ** 2).softmax(-1) @ GRID),
}


@cache
def left_behind(name=None):
    (x, y), net = images(IMAGES, seed=4), Through(trained_net(1), before=noisy)
    net = BEHIND_NOISE[name]() if name else net
    found = Auto(THREAT, PASSES).find(Single(net.eval()), x, y, seeded())
    torch.manual_seed(0)
    return torch.stack([right(Single(net), found.x_adv, y) for _ in range(20)]).mean().item()


@pytest.mark.parametrize("name", BEHIND_NOISE)
def test_what_hides_behind_noise(name):
    """Slopes that mislead call for the identity, and operations that are known for others."""
    assert left_behind(name) <= left_behind() + 0.1


class Nearest(nn.Module):
    """Votes of the five stored images that are nearest to an image."""

    def __init__(self, noise):
        super().__init__()
        self.noise, (x, self.y) = noise, images(300, seed=5)
        self.x = x.flatten(1)

    def distances(self, x):
        return torch.cdist((x + self.noise * torch.randn_like(x)).flatten(1), self.x)

    def forward(self, x):
        return one_hot(self.y[self.distances(x).topk(5, largest=False).indices], 4).float().mean(1)


class Smooth(Nearest):
    """Votes of all of them, more of the nearer ones."""

    def forward(self, x):
        return (-10 * self.distances(x)).softmax(1) @ one_hot(self.y, 4).float()


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_nearest_neighbors(noise):
    """Their places and labels have slopes, with noise that moves no vote of clean images too."""
    (x, y), net = images(IMAGES, seed=4), Nearest(noise)
    found = Auto(THREAT, PASSES).find(Single(net), x, y, seeded())
    pgd = PGD(THREAT, 100, 0.005, objectives.expected_margin, draws=2, momentum=(0.9,))
    by_hand = pgd(Single(Smooth(noise)), x, y, seeded())

    def left(x_adv):
        return right(Single(net), x_adv.repeat(30, 1, 1, 1), y.repeat(30)).mean()

    assert ("noise of its own" in found.findings) == (noise > 0)
    assert left(found.x_adv) <= left(by_hand) + 0.1 < 0.5


class Shrinking(nn.Module):
    """A network whose logits shrink with the energy of its features, by up to e^4 on images."""

    def __init__(self, seed=1, classes=4):
        super().__init__()
        self.net, self.classes = trained_net(seed).eval(), classes
        self.usual = self.energy(images(300, seed=5)[0])[0].mean().item()

    def energy(self, x):
        h = self.net.norm(self.net.conv(x)).relu().flatten(1)
        return h.square().sum(1, keepdim=True), h

    def forward(self, x):
        energy, h = self.energy(x)
        z = h * (4 - 4 * energy / self.usual).exp() @ self.net.linear.weight.T
        return z if self.classes == 4 else z.view(-1, 2, 2).sum(2)


SHRINKS = {
    "two classes": lambda: Single(Shrinking(classes=2)),
    "noise": lambda: Single(Through(Shrinking(), before=noisy)),
    "smoothing": lambda: Smoothing(Shrinking(), 0.05, draws=5),
    "ensemble": lambda: Ensemble([Shrinking(seed) for seed in (1, 2, 3)], rule=mean_logits),
}


@pytest.mark.parametrize("name", SHRINKS)
def test_logits_that_shrink_hide_nothing(name):
    """The margin grows where they do, and an attack on it leads there."""
    x, y = images(IMAGES, seed=4)
    defense = SHRINKS[name]().eval()
    y = defense.logits(x, seeded()).mean(0).argmax(1) if name == "two classes" else y
    passes = 2 * PASSES if name == "ensemble" else PASSES  # a search needs 400 for each network
    found = Auto(THREAT, passes).find(defense, x, y, seeded())
    assert "logits that shrink where the margin grows" in found.findings
    left = torch.stack([right(defense, found.x_adv, y) for _ in range(10)]).mean()
    assert left < 0.35


def test_logits_of_images_that_a_step_nearly_fools_do_not_shrink():
    """Of a linear network each step brings them nearer to zero."""
    reach = THREAT.eps * 144  # by which the sum of a gray image changes
    margins = reach * torch.tensor([0.4] * 12 + [1.1] * 4)
    x = 0.5 + (margins / 144).view(-1, 1, 1, 1).expand(-1, 1, 12, 12)

    class Linear(nn.Module):
        def forward(self, x):
            lead = 50 * (x - 0.5).flatten(1).sum(1)
            return torch.stack([lead, -lead], 1)

    found = Auto(THREAT, PASSES).find(Single(Linear()), x, torch.zeros(16).long(), seeded())
    assert "logits that shrink where the margin grows" not in found.findings
    assert right(Single(Linear()), found.x_adv, torch.zeros(16).long()).sum() == 4


@pytest.mark.parametrize("name", ["two classes", "smoothing", "ensemble", None])
def test_an_evaluation_finds_an_attack_that_leads_to_small_logits(name):
    """A loss without scale breaks images that it left; of an honest network it breaks none more."""
    x, y = images(IMAGES, seed=4)
    defense = SHRINKS[name]().eval() if name else Single(trained_net(1).eval())
    y = defense.logits(x, seeded()).mean(0).argmax(1) if name == "two classes" else y
    attacks = {"pgd": PGD(THREAT, 20, THREAT.eps / 4), "one": PGD(THREAT, 1, THREAT.eps)}
    corrupted = {"corrupted": CommonCorruption(Brightness(5))}  # which is in no ball
    result = evaluate(defense, attacks | corrupted, [(x, y)], inferences=2, progress=False)
    found = {one.values["attack"]: one for one in result.findings if one.name == "scale"}
    assert found.keys() == (attacks.keys() if name else set())
    for one in found.values():
        assert one.severity == "severe" and one.values["size"] < 0.3
        assert one.values["broken"] > one.values["by_its_loss"] + 0.3


class Rejecting(nn.Module):
    """Classes 0 to 2 of one pixel, of which 1 and 2 are never accepted; the fourth rejects."""

    def forward(self, x):
        m = x.flatten(1)[:, :1] - 0.5
        k = 10 * (-20 * m).exp()
        return torch.cat([k * m, -k * m, -k, k * (0.01 - m)], 1)


def test_an_image_that_is_rejected_is_not_broken():
    x, y = torch.linspace(0.7, 0.75, 20).view(-1, 1, 1, 1), torch.zeros(20, dtype=torch.long)
    attacks, net = {"pgd": PGD(Threat("linf", 0.3), 20, 0.1)}, Rejecting()
    for rejects in (3, None):
        found = evaluate(Single(net, rejects=rejects), attacks, [(x, y)], progress=False)
        assert rejects is None or found.accuracy("pgd") == 1.0
        assert any(one.name == "scale" for one in found.findings) == (rejects is None)


def test_a_resumed_evaluation_keeps_what_it_found(tmp_path):
    x, y = images(IMAGES, seed=4)
    attacks = {"pgd": PGD(THREAT, 20, THREAT.eps / 4), "last": Stopping(0)}
    given = {"model": Single(Shrinking().eval()), "batches": [(x, y)], "resume": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        evaluate(attacks=attacks, progress=False, **given)
    found = evaluate(attacks=attacks | {"last": Stopping()}, progress=False, **given)
    assert "scale" in {one.name for one in found.findings}


def test_unmasked_climbs_a_margin_without_scale():
    """It leads across the boundary where cross-entropy leads to logits that shrink."""
    (x, y), defense = images(IMAGES, seed=4), Single(Shrinking().eval())
    apgd = APGD(THREAT, PASSES // 2, objectives.expected_ce, early_stop=False)
    x_adv = Unmasked(apgd, PASSES)(defense, x, y, seeded())
    assert right(defense, x_adv, y).mean() < 0.35 < right(defense, apgd(defense, x, y), y).mean()


class Tempered(nn.Module):
    """Two classes, whose logits are the smaller the surer another network is."""

    def __init__(self):
        super().__init__()
        self.net, self.other = trained_net(1), trained_net(2)

    def forward(self, x):
        z = self.net(x)
        lead = self.other(x).topk(2, 1).values.diff(dim=1)[:, 0]
        m = (z[:, :2].logsumexp(1) - z[:, 2:].logsumexp(1)) * (lead / 2).exp()
        return torch.stack([m, -m], 1)


def test_a_difference_of_two_logits_that_is_scaled():
    """It stands for both, before the other network scales it."""
    x, _ = images(IMAGES, seed=4)
    net = Tempered().eval()
    assert left_by(Auto(THREAT, PASSES), net, x, net(x).argmax(1)) < 0.3


def test_a_network_that_refuses_one_image():
    """It normalizes by its batch, of which one image has no variance."""
    x, y = images(IMAGES, seed=4)
    norm = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    net = Through(trained_net(1), after=norm)
    found = Auto(THREAT, PASSES).find(Single(net.eval()), x, y, seeded())
    assert "predictions that depend on the batch" in found.findings
    assert right(Single(net), found.x_adv, y).mean() < right(Single(net), x, y).mean() - 0.4


def test_slopes_estimated_from_predictions():
    """Of a linear network they lead to the best corner; a network's gradient is not asked for."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    x, y = 0.2 + 0.6 * torch.rand(8, 1, 6, 6), torch.arange(8) % 2
    other = net[1].weight[1 - y] - net[1].weight[y]  # [B, 36]
    pgd = PGD(THREAT, 60, 0.01, objectives.expected_margin, momentum=(0.9,))
    blind = Single(Through(net, after=lambda z: z.detach()))
    attack = SurrogateGradient(pgd, pairs=10, noise=0.04, draws_anew=True)
    moved = (attack(blind, x, y, seeded()) - x).flatten(1)
    assert (moved * other).sum().item() > 0.9 * THREAT.eps * other.abs().sum().item()
    with pytest.raises(ValueError, match="noise with copies or pairs"):
        SurrogateGradient(pgd, pairs=3)
    with pytest.raises(ValueError, match="pairs ask for no gradient"):
        SurrogateGradient(pgd, pairs=3, noise=0.1, slopes=("rounding",))
