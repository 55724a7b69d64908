"""Checks of the attacks' strength, mostly on made-up scores."""

from copy import deepcopy

import pytest
import torch

from lightning_rob.attacks import ARC, PGD, Strongest
from lightning_rob.audit import strength
from lightning_rob.audit.auditor import audit
from lightning_rob.audit.strength import adaptive, black_box
from lightning_rob.audit.target import AuditTarget
from lightning_rob.defenses import Ensemble, RandomTransforms, Single
from lightning_rob.evaluation.findings import many, significant
from lightning_rob.objectives import ce_of_capped_probs, ce_of_mean_logits, ce_of_votes, expected_ce
from lightning_rob.rules import majority, mean_logits, mean_probs
from lightning_rob.threat import Threat
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


def test_noisy_scores_need_more_than_two_images():
    assert many(part(2)) and not significant(part(2))
    assert significant(part(10))
    assert not significant(part(10) - part(8).flip(0))
    assert not many(torch.full((50,), torch.nan)) and not many(torch.zeros(0))
    assert many(torch.ones(1))


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (None, ""),
        (ARC(THREAT, 5, 0.15), ""),
        (Strongest((ARC(THREAT, 5, 0.15),)), ""),
        (ARC(Threat("linf", 1e-4), 5, 0.15), "too weakly"),
        (ARC(Threat("l2", 0.15), 5, 0.15), "too weakly"),
        (ARC(THREAT, 1, 0.15), "too weakly"),
        (ARC(THREAT, 5, 0.001), "too weakly"),
        (PGD(THREAT, 20, 0.05), "runs mine, but not ARC"),
    ],
)
def test_an_adaptive_attack_may_be_too_weak(attack, words):
    others = {} if attack is None else {"mine": attack}
    target = AuditTarget(Ensemble([TinyNet(), TinyNet()]), THREAT, other_attacks=others)
    found = adaptive(target, {"pgd": part(31), "arc": part(31), "climb": part(31)})
    assert found.flagged == bool(words)
    assert words in found.text


LOSSES = {mean_probs: ce_of_capped_probs, mean_logits: ce_of_mean_logits, majority: ce_of_votes}


@pytest.mark.parametrize(("rule", "loss"), LOSSES.items())
def test_an_ensemble_with_one_prediction_needs_the_loss_of_its_rule(rule, loss):
    defense = Ensemble([TinyNet(), TinyNet()], rule=rule)
    for objective in (*LOSSES.values(), expected_ce):
        attack = PGD(THREAT, 10, 0.05, objective)
        found = adaptive(AuditTarget(defense, THREAT, other_attacks={"mine": attack}), {})
        assert found.flagged == (objective is not loss)
        assert found.severity != "warning" or loss.__name__ in found.advice
    short = adaptive(
        AuditTarget(defense, THREAT, other_attacks={"mine": PGD(THREAT, 10, 1e-4, loss)}), {}
    )
    assert short.severity == "warning" and "too weakly" in short.text
    assert not adaptive(AuditTarget(defense, THREAT), {}).flagged


def test_the_text_names_the_gap():
    target = AuditTarget(Ensemble([TinyNet(), TinyNet()]), THREAT)
    columns = {"pgd": part(31), "arc": part(31), "climb": part(20)}
    found = adaptive(target, columns)
    assert "leaves 62 %, those for its kind 40 %" in found.text
    assert found.values["gap"] == pytest.approx(found.values["default"] - found.values["adaptive"])
    target.other_attacks = {"apgd": target.attacks["pgd"]}
    found = adaptive(target, columns)
    assert found.severity == "severe" and "callbacks/climb.yaml" in found.advice
    assert adaptive(target, columns | {"climb": part(31)}).severity == "warning"


def test_eot_with_one_velocity_is_not_what_random_transforms_need():
    target = AuditTarget(RandomTransforms(TinyNet(), {"GaussianNoise": {}}, 1, 3), THREAT)
    columns = {"pgd": part(31), "linear_aggmo": part(31)}
    target.other_attacks = {"eot": PGD(THREAT, 3, 0.05, draws=3)}
    assert adaptive(target, columns).flagged
    target.other_attacks["best"] = target.attacks["linear_aggmo"]
    assert not adaptive(target, columns).flagged


def test_of_one_class_for_all_images_no_ball_holds_another(nets, blobs):
    """A network that did not learn hides nothing."""
    net = deepcopy(nets[0])
    net.last.bias.data[0] += 100
    (found,) = audit(Single(net), *blobs, THREAT, checks=[strength.radius]).findings
    assert (found.severity, found.text) == (
        "note",
        "Not checked: it predicts one class for all images.",
    )
