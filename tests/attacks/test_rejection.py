"""Defenses that reject: an attack succeeds where the defense accepts and is wrong."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_rob.attacks import (
    APGD,
    ARC,
    CW,
    DDN,
    FAB,
    GMSA,
    PGD,
    AutoAttack,
    DeepFool,
    LatticeClimber,
    OnMember,
    PartialBatchAttack,
    RandomMember,
    Square,
    Strongest,
    ThroughAdaptation,
    TransferFromStatic,
)
from lightning_rob.defenses import Defense, Ensemble, Single
from lightning_rob.defenses.per_image import PerImageValues
from lightning_rob.defenses.rejection import AcceptedClasses
from lightning_rob.evaluation import evaluate
from lightning_rob.objectives import expected_margin
from lightning_rob.randomness import Streams
from lightning_rob.rules import abstaining, mean_probs
from lightning_rob.threat import Threat
from tests.attacks.common import seeded, trained_net
from tests.counting import Counting

CLASSES, EPS = 4, 0.15
LINF, L2 = Threat("linf", EPS), Threat("l2", EPS)
PLAIN = PGD(LINF, 10, 0.05, objective=expected_margin, keep_best=True)
ATTACKS = {
    "pgd": PLAIN,
    "pgd, early": PGD(LINF, 20, 0.03, restarts=3, keep_best=True, early_stop=True),
    "apgd": APGD(LINF, steps=20),
    "autoattack": AutoAttack(LINF, "custom", ("apgd-t", "square"), passes=400),
    "arc": ARC(LINF, 10),
    "deepfool": DeepFool(LINF),
    "fab": FAB(LINF, steps=20),
    "square": Square(LINF, 200),
    "cw": CW(L2, steps=20, binary_steps=2),
    "ddn": DDN(L2, steps=20),
    "strongest": Strongest((PLAIN, Square(LINF, 50))),
    "random member": RandomMember(PLAIN),
}
SMALL = {"autoattack": AutoAttack(LINF, "custom", ("apgd-t", "square"), passes=150)}


def detector(seed: int = 0, place: int = CLASSES) -> nn.Sequential:
    """A linear network of four classes, and one that rejects, on images of two pixels."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(2, CLASSES + 1))
    weight = 8 * torch.randn(CLASSES, 2, generator=generator)
    bias = -weight @ torch.tensor([0.5, 0.5])
    rejection, offset = 8 * torch.randn(1, 2, generator=generator), torch.tensor([8.0])
    parts = (weight[:place], rejection, weight[place:]), (bias[:place], offset, bias[place:])
    net[1].weight.data, net[1].bias.data = map(torch.cat, parts)
    return net


def images(count: int = 60, net: nn.Module | None = None) -> tuple[Tensor, Tensor]:
    """Images, and the class that leads among those that are accepted."""
    x = torch.rand(count, 1, 1, 2, generator=torch.Generator().manual_seed(5))
    return x, (net or detector())(x)[:, :CLASSES].argmax(1)


@cache
def grid(threat: Threat) -> Tensor:
    """Perturbations [n, 1, 1, 2] that fill the ball, its surface included."""
    side = torch.linspace(-EPS, EPS, 121)
    points = torch.cartesian_prod(side, side)[:, None, None]
    return points[points.flatten(1).norm(dim=1) <= EPS] if threat.p == 2 else points


@cache
def leads(threat: Threat) -> Tensor:
    """The largest lead [B] of a wrong class over label and rejection, by trying every point."""
    found, net = [], detector()
    for image, label in zip(*images(), strict=True):
        z = net((image + grid(threat)).clamp(0, 1))
        wrong = z[:, torch.arange(CLASSES + 1).ne(label) & torch.arange(CLASSES + 1).ne(CLASSES)]
        found.append((wrong.amax(1) - torch.maximum(z[:, label], z[:, CLASSES])).max())
    return torch.stack(found)


@cache
def largest_wrong(net: nn.Module) -> Tensor:
    """The largest probability [B] of a wrong class in the ball, of a network without rejection."""
    found = []
    for image, label in zip(*images(net=net), strict=True):
        probs = net((image + grid(LINF)).clamp(0, 1)).softmax(1)
        found.append(probs[:, torch.arange(CLASSES) != label].max())
    return torch.stack(found)


def accepted_wrong(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    predicted = net(x).argmax(1)
    return (predicted != y) & (predicted != CLASSES)


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_takes_a_rejection_for_success(name):
    """By trying every point of the ball; many images can be brought to rejection only."""
    net, (x, y), attack = detector(), images(), ATTACKS[name]
    lead = leads(attack.threat)
    sure = lead.abs() > 0.05  # the grid's points are close, not everywhere
    x, y, possible = x[sure], y[sure], lead[sure] > 0
    assert 10 < int(possible.sum()) < len(x) - 10
    defense = Ensemble([net], rejects=CLASSES)
    found = evaluate(defense, {"attack": attack}, [(x, y)], progress=False)
    predicted = found.rows.predictions[:, 1]
    assert not ((predicted != y) & (predicted != -1) & ~possible).any()
    assert found.accepted_wrong("attack") >= 0.75 * float(possible.double().mean())
    assert found.accepted_wrong("attack") <= float(possible.double().mean()) + 1e-6
    if name == "autoattack":  # finds all that can be found
        assert found.accepted_wrong("attack") == pytest.approx(float(possible.double().mean()))


def test_shares_of_an_evaluation_are_those_by_hand(tmp_path):
    net, (x, y) = detector(), images()
    y[:6] = (y[:6] + 1) % CLASSES
    defense, attack = Single(net, rejects=CLASSES), ATTACKS["pgd"]
    found = evaluate(defense, {"pgd": attack}, [(x, y)], progress=False)
    moved = attack(defense, x, y, Streams.from_index(torch.arange(len(x)), 0, 0, *b"pgd", 0))
    for name, shown in (("clean", x), ("pgd", moved)):
        predicted = net(shown).argmax(1)
        rejected, right = (predicted == k for k in (CLASSES, y))
        wrong = ~(rejected | right)
        assert min(map(int, (rejected.sum(), right.sum(), wrong.sum()))) > 0
        assert found.rejected(name) == pytest.approx(float(rejected.double().mean()))
        assert found.accepted_wrong(name) == pytest.approx(float(wrong.double().mean()))
        counted = right if name == "clean" else ~wrong
        assert found.accuracy(name) == pytest.approx(float(counted.double().mean()))
        record = found.measurement(name).record()
        assert record["rejected"] == found.rejected(name)
        assert record["accepted_wrong"] == found.accepted_wrong(name)
        at = found.names.index(name)
        expected = torch.where(rejected, -1, predicted)
        assert torch.equal(found.rows.predictions[:, at], expected)
    clean, attacked = (accepted_wrong(net, shown, y) for shown in (x, moved))
    assert found.accepted_wrong("worst") == pytest.approx(float((clean | attacked).double().mean()))
    right = net(x).argmax(1) == y
    assert found.accuracy("worst") == pytest.approx(float((right & ~attacked).double().mean()))
    table = found.table()
    assert "accepted, wrong" in table and "rejected" in table
    found.save(tmp_path / "r.csv")
    head, first, *_ = (tmp_path / "r.csv").read_text().splitlines()
    cells = dict(zip(head.split(","), first.split(","), strict=True))
    assert float(cells["clean_rejected"]) == float(net(x)[0].argmax() == CLASSES)


@abstaining
def confident(logits: Tensor, weights: Tensor) -> Tensor:
    """Reject where no class has a mean probability of 0.8."""
    sure = torch.tensordot(weights, logits.softmax(-1), dims=1).amax(-1) > 0.8
    return mean_probs(logits, weights) * sure[:, None]


PLAIN_NET = detector()
PLAIN_NET[1].weight.data, PLAIN_NET[1].bias.data = (p[:CLASSES] for p in PLAIN_NET[1].parameters())
PLAIN_DEFENSE = Single(PLAIN_NET, confident)


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in ("cw", "ddn")])
def test_a_rule_that_abstains(name):
    """By trying every point: accepted and wrong needs a wrong class of 0.8 or more."""
    (x, y), attack, defense = images(net=PLAIN_NET), (ATTACKS | SMALL)[name], PLAIN_DEFENSE
    best = largest_wrong(PLAIN_NET)
    sure = (best - 0.8).abs() > 0.03
    x, y, possible = x[sure], y[sure], best[sure] > 0.8
    assert 10 < int(possible.sum()) < len(x) - 10
    found = evaluate(defense, {"attack": attack}, [(x, y)], progress=False)
    truth = float(possible.double().mean())
    assert 0.7 * truth <= found.accepted_wrong("attack") <= truth + 1e-6
    assert found.rejected("clean") > 0
    counted = found.accuracy("attack") + found.accepted_wrong("attack")
    assert counted == pytest.approx(1)


class Adapting(Defense):
    """A detector that moves its offsets with the mean of the test batch."""

    def __init__(self, net: nn.Module, shift: float = 0.0) -> None:
        super().__init__(torch.ones(1), mean_probs, rejects=CLASSES)
        self.net, self.shift = net, shift

    @property
    def base_model(self) -> Defense:
        return Single(self.net, rejects=self.rejects)

    @property
    def adapted_model(self) -> Defense:
        return Adapted(self.net, self.shift)

    def logits(self, x: Tensor, generator: object = None) -> Tensor:
        return self.adapted_model.logits(x)

    def adapt(self, x: Tensor, generator: object = None) -> "Adapting":
        return Adapting(self.net, float(x.detach().mean() - 0.5))


class Adapted(Single):
    """The network on shifted images."""

    def __init__(self, net: nn.Module, shift: float) -> None:
        super().__init__(net, rejects=CLASSES)
        self.shift = shift

    def logits(self, x: Tensor, generator: object = None) -> Tensor:
        return super().logits(x - self.shift)


@pytest.mark.parametrize(
    "attack",
    [
        GMSA(PLAIN, rounds=2),
        TransferFromStatic(PLAIN),
        TransferFromStatic(SMALL["autoattack"]),
        ThroughAdaptation(PLAIN),
        PartialBatchAttack(PLAIN),
        PLAIN,
    ],
    ids=lambda attack: type(attack).__name__,
)
def test_defenses_that_adapt_and_reject(attack):
    net, (x, y) = detector(), images()
    found, naive = (
        evaluate(Adapting(net), {"a": one}, DataLoader(TensorDataset(x, y), 60), progress=False)
        for one in (attack, PGD(LINF, 1, 1e-6))
    )
    share = 0.5 if isinstance(attack, PartialBatchAttack) else 1.0
    gained = found.accepted_wrong("a") - naive.accepted_wrong("a")
    assert gained > 0.15 * share
    assert found.accuracy("a") == pytest.approx(1 - found.accepted_wrong("a"))


DETECTORS = Ensemble([detector(0), detector(1)], rejects=CLASSES)


@pytest.mark.parametrize("defense", [DETECTORS, PLAIN_DEFENSE])
def test_all_that_does_not_fool_counts_as_the_label(defense):
    """The probabilities of the label, of the class that rejects, and of no class at all."""
    x, y = images()
    given, seen = defense(x), AcceptedClasses(defense, PerImageValues(y))(x)
    wrong = given[:, :CLASSES].scatter(1, y[:, None], 0)
    assert ((wrong.sum(1) == 0) & (given.gather(1, y[:, None])[:, 0] < 0.9)).sum() > 5
    assert torch.allclose(seen, wrong.scatter(1, y[:, None], 1 - wrong.sum(1, keepdim=True)))


def test_what_is_refused():
    defense, (x, y) = Single(detector(), rejects=CLASSES), images(4)
    y[1] = CLASSES
    with pytest.raises(ValueError, match="labels must be classes that are accepted, got 4"):
        PLAIN(defense, x, y)
    with pytest.raises(ValueError, match="labels must be classes that are accepted, got 4"):
        evaluate(defense, {"a": PLAIN}, [(x, y)], progress=False)


def test_fooled_images_leave_apgd():
    """With their labels: the same images are fooled as when none leaves, in fewer passes."""
    counted, (x, y) = Counting(detector()).eval(), images()
    defense = AcceptedClasses(Single(counted, rejects=CLASSES), PerImageValues(y))
    found, passes = [], []
    for early in (True, False):
        counted.clear()
        x_adv = APGD(LINF, 20, early_stop=early)(defense, x, y, torch.Generator().manual_seed(1))
        found.append(defense(x_adv).argmax(1) != y)
        passes.append(counted.images())
    assert torch.equal(*found)
    assert 0.3 < found[0].float().mean() < 1
    assert passes[0] < 0.8 * passes[1]


@pytest.mark.parametrize("name", ["pgd", "apgd", "arc", "fab", "square"])
def test_the_place_of_the_class_that_rejects_changes_nothing(name):
    x, y = images()
    noise = Streams.from_index(torch.arange(len(x)), 3)
    last = ATTACKS[name](Single(detector(), rejects=CLASSES), x, y, noise)
    noise = Streams.from_index(torch.arange(len(x)), 3)
    second = ATTACKS[name](Single(detector(place=1), rejects=1), x, y + (y >= 1).long(), noise)
    torch.testing.assert_close(last, second)


def test_square_inside_an_attack_on_whole_batches():
    """There the labels are those of a batch, of which images leave as they are fooled."""
    x, y = images(20)
    defense, noise = Single(detector(), rejects=CLASSES), Streams.from_index(torch.arange(20), 0)
    apart = Square(LINF, 50)(defense, x, y, noise)
    seen = AcceptedClasses(defense, PerImageValues(y))
    again = Streams.from_index(torch.arange(20), 0)
    assert torch.equal(Square(LINF, 50).perturb(seen, x, y, again), apart)
    assert 0 < (defense(apart).argmax(1) == y).float().mean() < 1


class Named(nn.Module):
    """A network that returns its logits by name."""

    def __init__(self):
        super().__init__()
        self.net = trained_net(1)

    def forward(self, x):
        return {"logits": self.net(x)}


def test_members_that_return_logits_by_name_may_reject():
    x, y = torch.rand(6, 1, 6, 6), torch.arange(6) % 3
    defense = Ensemble([Named(), Named()], rejects=3)
    for attack in (ARC(LINF, 2, 0.1), OnMember(PGD(LINF, 2, 0.1), 0), LatticeClimber(LINF, 2)):
        assert attack(defense, x, y, seeded()).shape == x.shape
