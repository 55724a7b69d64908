"""Certificates of linear classifiers, whose exact radii are known, and of what is made of them."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_rob import DENT, PGD, Ensemble, Mixture, Single, Smoothing, Threat, evaluate
from lightning_rob.certify import certify
from lightning_rob.certify.smoothing import SELECTION
from lightning_rob.rules import abstaining, majority, mean_logits, random_member
from tests.schema import checked

SIGMA = 0.5


class Linear(nn.Module):
    """Class 1 where w x > bias, of two or more classes."""

    def __init__(self, weight, bias=0.0, classes=2):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.tensor(weight)), bias
        self.others = classes - 2

    def forward(self, x):
        z = x.flatten(1) @ self.weight - self.bias
        return torch.stack([-z, z, *[torch.full_like(z, -1e3)] * self.others], 1)

    def distance(self, x):
        """The distance [B] to the other class, signed by the class."""
        return (x.flatten(1) @ self.weight - self.bias) / self.weight.norm()


def images(count=20, seed=0):
    return torch.rand((count, 1, 2, 2), generator=torch.Generator().manual_seed(seed))


def loader(net, x=None, batch_size=16):
    x = images() if x is None else x
    y = net(x).argmax(1).detach()
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


NET = Linear([1.0, -0.5, 0.3, -0.8])


def test_radii_of_a_linear_classifier():
    """Never beyond the distance to the other class, and near it."""
    exact = NET.distance(images()).abs().detach()
    found = certify(NET, loader(NET), sigma=SIGMA, draws=4000, progress=False)
    assert (found.radius <= exact).all()
    assert ((exact - found.radius)[found.prediction >= 0] < 0.08).all()
    decided = found.prediction >= 0
    assert (found.prediction[decided] == found.label[decided]).all() and decided.sum() > 16
    assert found.draws.unique().tolist() == [4000 + SELECTION]
    for radius in (0.0, 0.1, 0.3):
        assert found.certified(radius) <= float((exact >= radius).double().mean())
    assert found.certified(0.1) > found.certified(0.3) > 0


def test_early_looks_decide_the_same_with_fewer_draws():
    radii = (0.0, 0.1)
    options = {"sigma": SIGMA, "draws": 3000, "progress": False}
    slow = certify(NET, loader(NET), **options)
    fast = certify(NET, loader(NET), radii=radii, **options)
    differing = sum(float((slow.per_image(r) - fast.per_image(r)).sum()) for r in radii)
    assert abs(differing) <= 1  # the last look spends half of the failure probability
    assert fast.draws.double().mean() < slow.draws.double().mean() / 2
    assert (fast.radius <= NET.distance(images()).abs()).all()


def test_neither_batches_nor_groups_nor_others_change_a_certificate():
    options = {"sigma": SIGMA, "draws": 200, "radii": (0.1, 0.3), "progress": False}
    one = certify(NET, loader(NET), **options)
    for size, group, chosen in ((1, 128, None), (7, 5, None), (20, 128, 9)):
        batches = loader(NET, batch_size=size)
        other = certify(NET, batches, group_size=group, max_images=chosen, **options)
        rows = torch.searchsorted(one.index, other.index)
        for name in ("label", "prediction", "draws", "probability", "radius"):
            assert torch.equal(getattr(other, name), getattr(one, name)[rows]), name
    assert not torch.equal(
        certify(NET, loader(NET), seed=1, **options).probability, one.probability
    )


def test_ensembles_have_the_probability_of_their_rule():
    """The mean of linear members is linear; of a random member the probabilities add up."""
    nets, shares = [NET, Linear([0.2, 0.9, -0.4, -0.6])], [0.7, 0.3]
    x = images(8)
    z = torch.stack([net.distance(x) * net.weight.norm() for net in nets]).detach().double()
    lengths = torch.stack([net.weight.norm() for net in nets]).detach().double()
    mixed = torch.tensor(shares).double()
    both = sum(w * net.weight for w, net in zip(shares, nets, strict=True)).norm().item()
    expected = {
        random_member: mixed @ torch.from_numpy(norm.cdf(z / lengths[:, None] / SIGMA)),
        mean_logits: torch.from_numpy(norm.cdf((mixed @ z) / both / SIGMA)),
    }
    batches = DataLoader(TensorDataset(x, torch.ones(8).long()), 8)
    mixture = Mixture([Single(net) for net in nets], shares)
    models = {mixture: random_member}
    models |= {Ensemble(nets, shares, rule): rule for rule in (random_member, mean_logits)}
    for model, rule in models.items():
        found = certify(model, batches, sigma=SIGMA, draws=3000, failure=0.01, progress=False)
        likelier = torch.maximum(expected[rule], 1 - expected[rule])
        kept = found.prediction >= 0
        assert kept.sum() >= 5
        gap = (likelier - found.probability)[kept]
        assert (gap > 0).all() and (gap < 0.06).all(), rule


def test_a_class_of_rejection_is_never_certified_as_right():
    net = Linear([1.0, -0.5, 0.3, -0.8], classes=3)
    x = images(12)
    batches = DataLoader(TensorDataset(x, torch.zeros(12).long()), 6)
    found = certify(Single(net, rejects=1), batches, sigma=0.1, draws=200, progress=False)
    rejected = net(x).argmax(1) == 1
    assert rejected.any() and (found.per_image(0.0)[rejected] == 0).all()
    assert found.per_image(0.0)[~rejected].sum() > 0


def test_attacks_stay_outside_of_certified_radii():
    """And a certificate that promises too much is found out."""
    smoothed = Smoothing(NET, SIGMA, draws=51)
    batches = loader(NET)
    found = certify(smoothed, batches, draws=2000, progress=False)
    radii = (0.05, 0.15, 0.3, 0.45, 0.8)
    attacks = {f"pgd_{r}": PGD(Threat("l2", r), 5, r / 2, random_start=False) for r in radii}
    attacked = evaluate(smoothed, attacks, batches, inferences=10, checks=False, progress=False)
    assert found.violations(attacked) == []
    for radius in radii:
        broken = attacked.per_image(f"pgd_{radius}") == 0
        assert found.per_image(radius)[broken].sum() == 0
    assert attacked.accuracy("pgd_0.45") < attacked.accuracy("pgd_0.05")
    wrong = replace(found, radius=4 * found.radius).violations(attacked)
    assert wrong and {name for name, _ in wrong} <= attacks.keys()
    with pytest.raises(ValueError, match="are of other images"):
        replace(found, index=found.index + 1).violations(attacked)
    linf = evaluate(smoothed, {"a": PGD(Threat("linf", 0.5), 2, 0.5)}, batches, checks=False)
    assert replace(found, radius=found.radius + 9).violations(linf) == []


def test_the_files(tmp_path):
    found = certify(NET, loader(NET), sigma=SIGMA, draws=300, radii=[0.1], progress=False)
    found.save(tmp_path / "certified.csv")
    text = (tmp_path / "certified.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert [int(row["certified_draws"]) for row in rows] == found.draws.tolist()
    radii = np.array([float(row["certified_radius"]) for row in rows])
    assert (radii <= found.radius.numpy()).all() and (radii > found.radius.numpy() - 1e-5).all()
    card = checked((tmp_path / "certified.json").read_text())
    assert card["sigma"] == SIGMA and card["failure"] == 0.001 and card["radii"] == [0.1]
    record = checked(json.dumps({"schema": 1, **found.record([0.0, 0.1])}))
    assert record["accuracy"] == [found.certified(0.0), found.certified(0.1)]
    assert "certified_0.1" in found.table([0.1])


@abstaining
def undecided(logits, weights):
    return majority(logits, weights) * (logits.amax(-1, keepdim=True)[0] > 1)


@pytest.mark.parametrize(
    ("model", "options", "kind", "message"),
    [
        (NET, {}, ValueError, "the model is not smoothed: give the standard deviation"),
        (NET, {"sigma": 0.1, "radii": [-1.0]}, ValueError, r"at least 0, got \[-1.0\]"),
        (Smoothing(NET, 0.2), {"sigma": 0.1}, ValueError, "is smoothed by 0.2 already, got sigma"),
        (Single(NET, undecided), {"sigma": 0.1}, ValueError, "rejects images by rows of zeros"),
        (DENT(nn.Sequential(nn.BatchNorm2d(1), nn.Flatten())), {"sigma": 0.1}, TypeError, "adapts"),
    ],
)
def test_refusals(model, options, kind, message):
    with pytest.raises(kind, match=message):
        certify(model, loader(NET), progress=False, **options)


def test_votes_that_are_not_finite_count_for_no_class():
    class Broken(Linear):
        def forward(self, x):
            return super().forward(x) * torch.where(x[:, 0, 0, 0] > 0.5, torch.nan, 1.0)[:, None]

    net = Broken([1.0, -0.5, 0.3, -0.8])
    x = torch.full((1, 1, 2, 2), 0.5)
    x[0, 0, 1, 0] = 1.0
    found = certify(net, [(x, torch.tensor([1]))], sigma=0.05, draws=1000, progress=False)
    assert found.prediction.tolist() == [-1]  # half of the votes are none
