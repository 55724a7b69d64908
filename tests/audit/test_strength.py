"""Checks of the attacks' strength, mostly on made-up scores."""

from copy import deepcopy

import pytest
import torch

from lightning_rob.attacks import ARC, PGD, Strongest
from lightning_rob.audit.auditor import AuditTarget, adaptive, audit, black_box, radius
from lightning_rob.defenses import Ensemble, Single
from lightning_rob.evaluation.findings import many
from lightning_rob.objectives import ce_of_mean_logits, ce_of_mean_probs, expected_ce
from lightning_rob.rules import majority, mean_logits, mean_probs
from tests.audit.planted import THREAT
from tests.tiny import TinyNet


def part(count, value=1.0):
    return torch.cat([torch.full((count,), value), torch.zeros(50 - count)])


@pytest.mark.parametrize(("lost", "flagged"), [(0, False), (1, False), (2, True), (50, True)])
def test_how_many_images_are_enough(lost, flagged):
    target = AuditTarget(Single(TinyNet()), THREAT)
    assert many(part(lost)) == flagged
    seeing = dict.fromkeys(("clean", "fgsm", "pgd", "longer", "restarts", "margin"), torch.ones(50))
    found = black_box(target, seeing | {"square": 1 - part(lost)})
    assert found.flagged == flagged
    assert found.values["images"] == pytest.approx(lost / 50)


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (None, ""),
        (ARC(THREAT, 5, 0.15), ""),
        (Strongest((ARC(THREAT, 5, 0.15),)), ""),
        (PGD(THREAT, 20, 0.05), "runs mine, but not ARC"),
    ],
)
def test_an_adaptive_attack_may_be_lacking(attack, words):
    others = {} if attack is None else {"mine": attack}
    target = AuditTarget(Ensemble([TinyNet(), TinyNet()]), THREAT, other_attacks=others)
    found = adaptive(target, {"pgd": part(31), "arc": part(31), "climb": part(31)})
    assert found.flagged == bool(words)
    assert words in found.text


@pytest.mark.parametrize(
    ("rule", "loss"),
    [(mean_probs, ce_of_mean_probs), (mean_logits, ce_of_mean_logits), (majority, expected_ce)],
)
def test_an_ensemble_with_one_prediction_needs_the_loss_of_its_rule(rule, loss):
    defense = Ensemble([TinyNet(), TinyNet()], rule=rule)
    for objective in (ce_of_mean_probs, ce_of_mean_logits, expected_ce):
        attack = PGD(THREAT, 10, 0.05, objective)
        found = adaptive(AuditTarget(defense, THREAT, other_attacks={"mine": attack}), {})
        assert found.flagged == (objective is not loss)
        assert found.severity != "warning" or loss.__name__ in found.advice
    assert not adaptive(AuditTarget(defense, THREAT), {}).flagged


def test_of_one_class_for_all_images_no_ball_holds_another(nets, blobs):
    """A network that did not learn hides nothing."""
    net = deepcopy(nets[0])
    net.last.bias.data[0] += 100
    (found,) = audit(Single(net), *blobs, THREAT, checks=[radius]).findings
    assert (found.severity, found.text) == (
        "note",
        "Not checked: it predicts one class for all images.",
    )
