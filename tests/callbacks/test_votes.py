"""All rules from one count of votes, and ensembles that are parts of one another."""

import json
from io import StringIO

import pytest
import torch
from rich.console import Console

from lightning_rob.attacks import PGD
from lightning_rob.callbacks import VotingRuleEval
from lightning_rob.callbacks.votes import print_votes
from lightning_rob.defenses import DENT, TransformEnsemble
from lightning_rob.evaluation.records import with_schema
from lightning_rob.rules import VOTING_RULES, abstaining, majority
from lightning_rob.threat import Threat
from tests.attacks.common import NonFinite
from tests.callbacks.test_cross_eval import study as evaluated
from tests.defenses.test_transform_ensemble import nets
from tests.schema import checked
from tests.tiny import TinyNet, blobs

NAMES = ["clean", "rotate_90", "flip_both"]
THREAT = Threat("linf", 0.1)
WEAK = PGD(THREAT, 1, 0.1, random_start=False)


def study(defense, *votes, **options):
    """Test with the callbacks: what was logged, and the callbacks."""
    return evaluated(defense, *votes, **options)[0], votes


@pytest.fixture(scope="module")
def ensemble():
    return TransformEnsemble(nets(3), NAMES)


def figures(votes):
    return {(r["name"], r["ensemble"], r["rule"]): r["accuracy"] for r in votes.results}


def test_each_rule_has_the_accuracy_of_the_ensemble_under_that_rule(ensemble):
    logged, (votes,) = study(ensemble, VotingRuleEval({"pgd": WEAK}))
    found = figures(votes)
    assert set(found) == {(name, "all", rule) for name in ("clean", "pgd") for rule in VOTING_RULES}
    x, y = blobs(False)
    for name, seen in (("clean", x), ("pgd", WEAK(ensemble, x, y))):
        for rule_name, rule in VOTING_RULES.items():
            predicted = rule(ensemble.logits(seen), ensemble.weights)
            expected = predicted.gather(1, y[:, None]).mean().item()
            assert found[name, "all", rule_name] == pytest.approx(expected, abs=1e-6)
            assert logged[f"test/votes/{name}/{rule_name}"] == pytest.approx(expected, abs=1e-6)


def test_members_vote_once_whatever_the_number_of_rules_and_ensembles(ensemble):
    calls = []
    handle = ensemble.members[0].register_forward_hook(lambda *_: calls.append(1))
    try:
        parts = {"one": ["clean"], "two": ["clean", "rotate_90"]}
        study(ensemble, VotingRuleEval({"pgd": WEAK}, ensembles=parts))
    finally:
        handle.remove()
    # one for test/acc, one for the clean images, the attack's step, one for the attacked images
    assert len(calls) == 4


def test_parts_are_counted_from_the_votes_of_the_whole(ensemble):
    parts = {"two": ["clean", "flip_both"], "one": ["rotate_90"]}
    _, (votes,) = study(ensemble, VotingRuleEval({"pgd": WEAK}, ensembles=parts))
    _, (whole,) = study(ensemble.part([0, 2]), VotingRuleEval({"pgd": WEAK}))
    clean = {k[2]: v for k, v in figures(votes).items() if k[:2] == ("clean", "two")}
    expected = {k[2]: v for k, v in figures(whole).items() if k[0] == "clean"}
    assert clean == pytest.approx(expected, abs=1e-6)
    alone = {v for k, v in figures(votes).items() if k[:2] == ("clean", "one")}
    assert len(alone) == 1  # with one member all rules agree


def test_draws_are_averaged_and_have_an_interval():
    names = [*NAMES[1:], "rotate_180", "shift_left"]
    whole = TransformEnsemble(nets(72), "all")
    few = {"ensembles": {"2i": "2i"}, "draws": 3, "attacked": names, "max_images": 4}
    _, (votes,) = study(whole, VotingRuleEval({"pgd": WEAK}, **few))
    for result in votes.results:
        assert result["members"] == 2 and len(result["draws"]) == 3
        assert result["accuracy"] == pytest.approx(sum(result["draws"]) / 3)
        low, high = result["interval"]
        assert low <= result["accuracy"] <= high


@pytest.mark.parametrize(
    ("attacked", "place", "ensembles", "voters"),
    [
        (["rotate_90"], 1, None, [0, 1, 2]),
        ("clean", 0, {"14r": "reversible", "72": "all"}, [1, 2]),  # the original has no vote
    ],
)
def test_the_attacker_knows_some_of_the_members_only(ensemble, attacked, place, ensembles, voters):
    x, y = blobs(False)
    callback = VotingRuleEval({"pgd": WEAK}, attacked=attacked, ensembles=ensembles)
    study(ensemble, callback)
    x_adv = WEAK(ensemble.part([place]), x, y)
    votes = majority(ensemble.logits(x_adv)[voters], torch.full((len(voters),), 1 / len(voters)))
    expected = votes.gather(1, y[:, None]).mean().item()
    for name in ensembles or ["all"]:
        assert callback.parts[name] == [voters]
        assert figures(callback)["pgd", name, "MV"] == pytest.approx(expected, abs=1e-6)


def test_each_target_in_turn(ensemble):
    _, (votes,) = study(ensemble, VotingRuleEval({"pgd": WEAK}, each_target=True))
    names = {result["name"] for result in votes.results}
    assert names == {"clean", *(f"pgd_on_{name}" for name in NAMES)}


def test_dissimilarity_is_that_of_the_perturbation(ensemble):
    relative = PGD(Threat("l2", 0.2, relative=True), 5, 0.1, keep_best=False)
    _, (votes,) = study(ensemble, VotingRuleEval({"pgd": relative}))
    by_name = {result["name"]: result["dissimilarity"] for result in votes.results}
    assert by_name["clean"] == 0 and 0.1 < by_name["pgd"] <= 0.2 * (1 + 1e-5)


def test_a_defense_that_adapts_or_rejects_is_refused(ensemble):
    agreeing = {"agreeing": abstaining(lambda logits, weights: majority(logits, weights))}
    rejecting = TransformEnsemble(nets(3), NAMES)
    rejecting.rejects = 3
    for defense, rules in ((ensemble, agreeing), (rejecting, None)):
        with pytest.raises(ValueError, match="a rejection is no vote"):
            study(defense, VotingRuleEval({"pgd": WEAK}, rules))
    net = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(192, 4))
    with pytest.raises(TypeError, match="DENT adapts to the test batch"):
        study(DENT(net), VotingRuleEval({"pgd": WEAK}))


def test_the_table_has_a_column_for_each_rule(ensemble):
    parts = {"1": ["clean"], "3": NAMES}
    _, (votes,) = study(ensemble, VotingRuleEval({"pgd [a]": WEAK}, ensembles=parts))
    console = Console(width=80, record=True, file=StringIO())
    print_votes("X", votes.results, console)
    text = console.export_text()
    assert all(rule in text for rule in VOTING_RULES) and text.count("pgd [a]") == 2
    assert "…" not in text
    for result in votes.results:
        checked(json.dumps(with_schema(result)))


def test_only_some_attacks_are_run():
    attacks = {name: WEAK for name in ("fgsm_avg", "pgd_avg", "pgd_max")}
    assert list(VotingRuleEval(attacks, only=["pgd*"]).attacks) == ["pgd_avg", "pgd_max"]
    with pytest.raises(ValueError, match="no attack is called cw: fgsm_avg, pgd_avg, pgd_max"):
        VotingRuleEval(attacks, only=["cw"])


def test_logits_that_are_not_finite_are_no_success_of_an_attack():
    mixed = TransformEnsemble([*nets(1), NonFinite(TinyNet()).eval()], ["clean", "rotate_90"])
    with pytest.raises(ValueError, match="logits are not numbers on 33 of 33 images"):
        study(mixed, VotingRuleEval({"pgd": WEAK}, attacked=["clean"]))
