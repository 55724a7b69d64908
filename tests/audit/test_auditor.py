"""The audit finds what is broken in planted defenses, and nothing in honest ones."""

import copy

import pytest
import torch
from torch import nn

from lightning_rob.attacks import PGD
from lightning_rob.audit.auditor import CHECKS, audit, build_report, measure, measures
from lightning_rob.audit.strength import steps
from lightning_rob.audit.target import AuditBatch, AuditTarget
from lightning_rob.defenses import DENT, Ensemble, Single, TransformEnsemble
from lightning_rob.evaluation.columns import LazyColumns
from lightning_rob.nets import SmallCNN
from lightning_rob.rules import random_member
from tests.audit.planted import IMAGES, LARGE, PLANTED, THREAT, Noisy, Through, honest

HONEST = ["standard", "adversarially_trained", "randomized_ensemble", "ensemble_of_means"]
HONEST += ["random_transforms", "eight_bit_straight_through"]
CHECK = {check.__name__: check for check in CHECKS}


@pytest.mark.parametrize("name", PLANTED)
def test_broken_defenses_are_flagged(name, nets, blobs, contrasty):
    make, check = PLANTED[name]
    images = contrasty if check == "bounds" else blobs
    (found,) = audit(make(nets[0]), *images, LARGE, checks=[CHECK[check]]).findings
    assert found.flagged and found.name == check
    assert found.text and found.advice
    if check == "slope":
        assert found.severity == "severe" and "BPDA" in found.advice
        assert max(found.values["near"], found.values["far"]) < 0.75
        assert found.values["images"] == IMAGES


@pytest.mark.parametrize("name", HONEST)
def test_honest_defenses_pass(name, nets, blobs):
    steps = 4 if name == "random_transforms" else 20
    found = audit(honest(*nets)[name], *blobs, THREAT, steps=steps, queries=300)
    assert found.flags == []
    assert len(found.findings) == len(CHECKS)
    accuracy = {result.name: result.accuracy for result in found.results}
    assert accuracy["clean"] > 0.9
    assert accuracy["worst"] <= min(v for k, v in accuracy.items() if k != "unbounded") + 1e-6
    assert accuracy["worst"] < accuracy["noise"]


def test_the_network_the_images_and_the_random_stream_stay_as_they_were(nets, blobs):
    net, (x, y) = nets[1].train(), blobs
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(3)
    state, copy = torch.get_rng_state(), x.clone()
    audit(Ensemble(nets[1:]), x[:8], y[:8], THREAT, steps=5, queries=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, copy)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.training
    assert all(weight.grad is None or weight.requires_grad for weight in net.parameters())
    net.eval()


def test_the_same_audit_twice_finds_the_same(nets, blobs):
    defense = Single(Through(nets[0], lambda x: x + 0.1 * torch.randn_like(x)))
    x, y = (part[:12] for part in blobs)
    few = {"steps": 5, "queries": 5}
    one, other, new = (audit(defense, x, y, THREAT, **few, seed=seed) for seed in (0, 0, 1))
    assert one.findings == other.findings != new.findings


def test_one_network_with_noise_gets_the_attacks_on_random_predictions(nets, blobs):
    """Of `Single` and of a defense that only declares one network."""
    x, y = (part[:8] for part in blobs)
    inside = Single(Through(nets[0], lambda x: x + 0.1 * torch.randn_like(x)))
    for defense in (inside, Noisy(nets[0])):
        found = audit(defense, x, y, THREAT, steps=2, queries=5)
        assert "linear_aggmo" in {result.name for result in found.results}
        assert "random predictions" in found.title
        assert "randomness" in {finding.name for finding in found.flags}
        other = {"mine": PGD(THREAT, 20, 0.05)}
        lacking = audit(defense, x, y, THREAT, steps=2, queries=5, other_attacks=other)
        (adaptive,) = (one for one in lacking.flags if one.name == "adaptive")
        assert "but not EoT" in adaptive.text and "callbacks/eot.yaml" in adaptive.advice


def test_a_check_alone_runs_what_it_needs(nets, blobs):
    one = nn.Sequential(nn.Flatten(), nn.Linear(blobs[0][0].numel(), 1))
    with pytest.raises(ValueError, match="two logits or more, got 1"):
        audit(Single(one), blobs[0], 0 * blobs[1], THREAT)
    target = AuditTarget(Single(nets[0]), THREAT)
    columns = LazyColumns(AuditBatch(target, *blobs), measures(target))
    assert steps(target, columns).severity in ("fine", "note")
    assert set(columns.columns) == {"fgsm", "pgd", "longer"}


def test_a_transformation_ensemble_is_audited(nets, blobs):
    x, y = (part[:8] for part in blobs)
    members = TransformEnsemble(nets[:2], ["flip_horizontal", "rotate_180"], random_member)
    found = audit(members, x, y, THREAT, steps=3, queries=10)
    results = {result.name: result for result in found.results}
    assert {"adaptive_pgd", "taa", "paa", "worst"} <= results.keys()
    # Fixed transformations predict what they predicted: no half chooses for another.
    assert results["worst"].details["choice"] == "per-image minimum"


def test_a_defense_that_adapts_is_audited_in_rounds(blobs):
    x, y = (part[:8] for part in blobs)
    found = audit(DENT(SmallCNN(4, 3, 4), steps=1), x, y, THREAT, steps=2)
    assert [result.name for result in found.results] == [
        *("clean", "noise", "transfer", "gmsa_avg", "unbounded", "worst")
    ]
    by_name = {finding.name: finding for finding in found.findings}
    assert "adapts" in by_name["black_box"].text and by_name["black_box"].severity == "note"


@pytest.mark.parametrize(("lowered", "robust"), [(0, 0), (1e3, 1)])
def test_defenses_that_reject_are_audited(blobs, nets, lowered, robust):
    """With classes 0 … 2 accepted of four: an attack that is rejected has no success.

    The network has no robust accuracy, until the classes that are accepted and wrong are out of
    reach.
    """
    x, y = (part[blobs[1] == 0] for part in blobs)
    net = copy.deepcopy(nets[0])
    net.last.bias.data[1:3] -= lowered
    defenses = Single(net, rejects=3), Single(net)
    report, plain = (audit(each, x, y, THREAT, steps=10, queries=10) for each in defenses)
    found, naive = ({r.name: r.accuracy for r in one.results} for one in (report, plain))
    assert found["clean"] == naive["clean"] == 1
    assert (found["pgd"], naive["pgd"]) == (robust, 0)


class Pairs(nn.Module):
    """A network that takes no image alone, and float32 only."""

    def __init__(self):
        super().__init__()
        self.net = SmallCNN(4, 1, 4)

    def forward(self, x):
        if len(x) < 2 or x.dtype == torch.float64:
            raise ValueError("two float32 images at least")
        return self.net(x)


def test_a_check_in_which_the_network_fails_is_reported_and_stops_no_other():
    torch.manual_seed(0)
    net, x, index = Pairs().eval(), torch.rand(20, 1, 8, 8), torch.arange(20)
    y = (net(x).argmax(1) + 1) % 4  # no attack has to look at an image that is left
    made = audit(Single(net), x, y, THREAT, steps=2, queries=5)
    target = AuditTarget(Single(net), THREAT, steps=2, queries=5)
    columns = dict(zip(measures(target), measure(target, x, y, index).unbind(1), strict=True))
    for report in (made, build_report(target, columns)):
        failed = [finding for finding in report.flags if "could not be made" in finding.text]
        assert [finding.name for finding in failed] == ["batches"]
        assert "two float32 images" in failed[0].text
        assert len(report.findings) == len(CHECKS)
