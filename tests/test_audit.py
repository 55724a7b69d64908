"""What the audit finds in broken defenses, and does not find in honest ones."""

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import conv2d

from lightning_rob.attacks import ARC, PGD, Strongest
from lightning_rob.audit.adaptive import adaptive
from lightning_rob.audit.answers import numbers, outputs
from lightning_rob.audit.auditor import CHECKS, audit
from lightning_rob.audit.bounds import bounds
from lightning_rob.audit.case import Case, Subject
from lightning_rob.audit.finding import beyond_chance, many
from lightning_rob.audit.measures import MEASURES, Seen
from lightning_rob.audit.slope import DIRECTIONS, slope
from lightning_rob.audit.strength import black_box, steps
from lightning_rob.audit.suite import kind_of, suite_for
from lightning_rob.defenses import (
    DENT,
    Ensemble,
    RandomTransforms,
    Single,
    TransformEnsemble,
)
from lightning_rob.metrics import robust_accuracy
from lightning_rob.nets import SmallCNN
from lightning_rob.objectives import (
    NonFiniteLogitsError,
    ce_of_mean_logits,
    ce_of_mean_probs,
    check_logits,
    expected_ce,
)
from lightning_rob.rules import VOTING_RULES, majority, mean_logits, mean_probs, random_member
from lightning_rob.threat import Threat
from tests.planted import PLANTED, Decoy, Through, clamped, honest, straight_through, trained
from tests.tiny import ROOT, Blobs, TinyNet

THREAT, LARGE = Threat("linf", 0.15), Threat("linf", 0.3)
IMAGES = 50
HONEST = ["standard", "adversarially_trained", "randomized_ensemble", "ensemble_of_means"]
HONEST += ["random_transforms", "eight_bit_straight_through"]


def images(train, count):
    pairs = Blobs(train_size=count, test_size=count).source(train)
    return torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs])


@pytest.fixture(scope="module")
def blobs():
    return images(False, IMAGES)


@pytest.fixture(scope="module")
def contrasty(blobs):
    """The same images with four values in ten black or white."""
    x, y = blobs
    return (3 * x - 1).clamp(0, 1), y


@pytest.fixture(scope="module")
def nets():
    """A standard net and two adversarially trained ones."""
    x, y = images(True, 256)
    made = []
    for seed, threat in enumerate((None, THREAT, THREAT)):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made.append(trained(TinyNet(), x, y, threat, steps=100))
    return made


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_broken_is_flagged(name, nets, blobs, contrasty):
    make, check = PLANTED[name]
    found = audit(make(nets[0]), *(contrasty if check == "bounds" else blobs), LARGE)
    flagged = {finding.name for finding in found.flags}
    assert check in flagged
    assert all(finding.text and finding.advice for finding in found.flags)


@pytest.mark.parametrize("name", HONEST)
def test_what_is_honest_passes(name, nets, blobs):
    steps = 4 if name == "random_transforms" else 20
    found = audit(honest(*nets)[name], *blobs, THREAT, steps=steps)
    assert found.flags == []
    assert len(found.findings) == len(CHECKS)
    accuracy = {result.name: result.accuracy for result in found.results}
    assert accuracy["clean"] > 0.9
    assert accuracy["worst"] <= min(v for k, v in accuracy.items() if k != "huge")
    assert accuracy["worst"] < accuracy["noise"]


def test_the_network_the_images_and_the_random_stream_stay_as_they_were(nets, blobs):
    net, (x, y) = nets[1].train(), blobs
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(3)
    state, copy = torch.get_rng_state(), x.clone()
    audit(Ensemble(nets[1:]), x[:8], y[:8], THREAT, queries=10)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, copy)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.training
    assert all(weight.grad is None or weight.requires_grad for weight in net.parameters())
    net.eval()


def test_the_same_audit_twice_says_the_same(nets, blobs):
    defense = Single(Through(nets[0], lambda x: x + 0.1 * torch.randn_like(x)))
    one, other = (audit(defense, *blobs, THREAT, queries=10) for _ in range(2))
    assert one.findings == other.findings
    assert audit(defense, *blobs, THREAT, queries=10, seed=1).findings != one.findings


def by_slope(defense, x, y, **options):
    (found,) = audit(defense, x, y, THREAT, checks=[slope], **options).findings
    return found


@pytest.mark.parametrize("name", [name for name, (_, check) in PLANTED.items() if check == "slope"])
def test_a_gradient_that_is_not_the_slope_is_severe(name, nets, blobs):
    found = by_slope(PLANTED[name][0](nets[0]), *blobs)
    assert found.severity == "severe" and "BPDA" in found.advice
    assert max(found.figures["near"], found.figures["far"]) < 0.75
    assert found.figures["pairs"] == DIRECTIONS * IMAGES


def test_the_gradient_of_another_network_is_not_the_slope(nets, blobs):
    assert by_slope(Single(Decoy(nets[0], nets[1])), *blobs).severity == "severe"
    same = by_slope(Single(Decoy(nets[1], nets[1])), *blobs)
    assert same.severity == "fine" and same.figures["near"] > 0.95


def test_an_honest_gradient_is_the_slope(nets, blobs):
    plain = nets[0]
    moved = TransformEnsemble(nets[:2], ["flip_horizontal", "quantize_4_colors"])
    defenses = honest(*nets) | {
        "eight_bit": Single(Through(plain, straight_through)),
        "large_logits": Single(Through(plain, after=lambda z: 5 * z)),
        "means": Ensemble(nets, rule=mean_logits),
        "one_member_without_a_gradient": moved,
    }
    for name, defense in defenses.items():
        found = by_slope(defense, *blobs)
        assert found.severity == "fine", name
        assert max(found.figures["near"], found.figures["far"]) > 0.95, name
    rounded = by_slope(defenses["eight_bit"], *blobs).figures
    assert rounded["near"] < rounded["far"]


def test_the_gradient_of_a_transform_may_be_an_estimate(nets, blobs):
    """But not that of the network behind it."""
    cut = PLANTED["half_detached"][0](nets[0]).net
    found = [by_slope(RandomTransforms(net, {"JPEG": {}}, 1, 2), *blobs) for net in (nets[0], cut)]
    assert [finding.severity for finding in found] == ["note", "severe"]
    assert found[0].figures["far"] < 0.8


def test_single_precision_will_do(nets, blobs):
    only = Through(nets[0], lambda x: x @ torch.eye(8))  # float32: refuses double precision
    assert by_slope(Single(only), *blobs).severity == "fine"


def test_the_slope_is_not_checked_without_saying_so(nets, blobs):
    few = by_slope(Single(nets[0]), *(part[:12] for part in blobs))
    assert few.severity == "note" and "48 pairs" in few.text
    adapts = by_slope(DENT(SmallCNN(4, 3, 4), steps=1), *blobs)
    assert adapts.severity == "note" and "adapts" in adapts.text


def by_bounds(defense, x, y, **options):
    (found,) = audit(defense, x, y, LARGE, checks=[bounds], **options).findings
    return found


def test_pixels_that_a_clamp_hides_from_attacks(nets, contrasty):
    plain, *both = (Through(net, clamped) for net in nets)
    found = by_bounds(Single(plain), *contrasty)
    assert found.severity == "severe" and found.figures["images"] > 0.9
    assert found.figures["inside"] < 0.1 < 0.5 < found.figures["usual"]
    assert "exactly 0 or 1 is exactly zero" in found.text and "clamp" in found.text
    assert "InsideBounds" in found.advice
    kinds = {
        "randomized": Ensemble(both),
        "transformed": TransformEnsemble(both, ["flip_both", "rotate_180"]),
        "random": RandomTransforms(both[0], {"HorizontalFlip": {}}, 1, 2),
        "one_bound": Single(Through(nets[1], lambda x: x.relu())),
    }
    for name, defense in kinds.items():
        assert by_bounds(defense, *contrasty).figures["pixels"] > 0.9, name


def _edges(x):
    """Of flat parts that are black exactly 0, of other flat parts 0 but for rounding."""
    kernel = torch.arange(1.0, 10.0).to(x).view(1, 1, 3, 3).expand(3, 1, 3, 3) / 45
    return (x - conv2d(x, kernel, padding=1, groups=3)).abs()


def test_honest_pixels_at_a_bound(nets, contrasty):
    """Flat ones too: dead there and just inside, or where slopes just inside are rounding."""
    x, y = contrasty
    mostly_black = torch.zeros_like(x)
    mostly_black[..., :3, :3] = x[..., :3, :3]
    dead = Through(nets[0], lambda x: (x - 0.2).relu())
    plain = honest(*nets) | {"dead": Single(dead)}
    cases = [(name, defense, x) for name, defense in plain.items()]
    cases += [("edges", Single(Through(nets[0], _edges)), mostly_black)]
    for name, defense, images in cases:
        assert by_bounds(defense, images, y).severity == "fine", name


def test_few_pixels_at_a_bound_are_no_verdict(nets, blobs, contrasty):
    defense, (x, y) = Single(Through(nets[0], clamped)), contrasty
    for images in (blobs[0], x.clamp(0.01, 0.99), torch.cat([x[:1], blobs[0][1:]])):
        found = by_bounds(defense, images, y)
        assert found.severity == "note" and "at least 2 are needed" in found.text
    adapts = by_bounds(DENT(SmallCNN(4, 3, 4), steps=1), x, y)
    assert adapts.severity == "note" and "adapts" in adapts.text


def test_a_check_alone_runs_what_it_needs(nets, blobs):
    subject = Subject(Single(nets[0]), THREAT)
    seen = Seen(Case(subject, *blobs))
    assert steps(subject, seen).severity in ("fine", "note")
    assert set(seen.columns) == {"fgsm", "pgd", "longer"}
    (found,) = audit(Single(nets[0]), *blobs, THREAT, checks=[outputs]).findings
    assert (found.name, found.severity) == ("outputs", "fine")


def columns(**given):
    """Made-up columns of fifty images; those not given are zero."""
    names = [*MEASURES, *suite_for(Single(TinyNet()), THREAT).attacks, "clean"]
    return {name: torch.zeros(50) for name in names} | given


def part(count, value=1.0):
    return torch.cat([torch.full((count,), value), torch.zeros(50 - count)])


@pytest.mark.parametrize(("lost", "flagged"), [(0, False), (1, False), (2, True), (50, True)])
def test_how_many_images_are_enough(lost, flagged):
    subject = Subject(Single(TinyNet()), THREAT)
    assert many(part(lost)) == flagged
    found = black_box(
        subject,
        columns(
            clean=torch.ones(50),
            **dict.fromkeys(("fgsm", "pgd", "longer", "restarts", "margin"), torch.ones(50)),
            square=1 - part(lost),
        ),
    )
    assert found.flagged == flagged
    assert found.figures["images"] == pytest.approx(lost / 50)


def test_chance_takes_more_than_two_images():
    assert many(part(2)) and not beyond_chance(part(2))
    assert beyond_chance(part(10))
    assert not beyond_chance(part(10) - part(8).flip(0))
    assert not many(torch.full((50,), torch.nan)) and not many(torch.zeros(0))
    assert many(torch.ones(1))


def test_black_box_is_not_silent_without_its_package(nets, blobs, monkeypatch):
    monkeypatch.setattr("lightning_rob.audit.suite.find_spec", lambda _: None)
    (found,) = audit(Single(nets[0]), *blobs, THREAT, checks=[black_box]).findings
    assert found.severity == "note"
    assert "Not checked" in found.text and 'pip install "lightning-rob[autoattack]"' in found.text


# which attacks for which kind


def test_the_suite_fits_the_defense(nets):
    net = nets[1]
    rt = RandomTransforms(net, {"GaussianNoise": {}}, 1, 3)
    moved = TransformEnsemble([net, net], ["flip_horizontal", "quantize_4_colors"])
    kinds = {
        "single": (Single(net), ()),
        "ensemble": (Ensemble([net, net], rule=mean_logits), ()),
        "randomized": (Ensemble([net, net]), ("arc", "arc_two_radii")),
        "random": (rt, ("linear_aggmo",)),
        "transformed": (moved, ("adaptive_pgd", "taa", "paa")),
        "transductive": (DENT(SmallCNN(4, 3, 4)), ("gmsa_avg",)),
    }
    for kind, (defense, names) in kinds.items():
        suite = suite_for(defense, THREAT)
        assert (kind_of(defense), suite.kind, suite.adaptive) == (kind, kind, names)
        assert (ROOT / suite.recipe).exists()


@pytest.mark.parametrize("threat", [Threat(1), Threat("l2", 0.3, relative=True), Threat(eps=0)])
def test_a_threat_that_attacks_are_not_made_for(threat):
    with pytest.raises(ValueError, match="an audit needs linf or l2 and eps > 0"):
        suite_for(Single(TinyNet()), threat)


def test_the_adaptive_attack_was_not_run(nets, blobs):
    """The user's own evaluation runs PGD on a randomized ensemble, for which ARC was made."""
    ensemble = Ensemble([nets[0], nets[1]], [0.5, 0.5])
    pgd = PGD(THREAT, 3, 0.05)
    arc = Strongest((ARC(THREAT, 5, 0.15),))
    found = {}
    for name, others in {
        "pgd": {"mine": pgd},
        "arc": {"mine": pgd, "arc": arc},
        "none": {},
    }.items():
        (found[name],) = audit(ensemble, *blobs, THREAT, checks=[adaptive], others=others).findings
    assert found["pgd"].flagged and not found["arc"].flagged and not found["none"].flagged
    assert "runs mine, but not ARC" in found["pgd"].text
    assert "callbacks/arc_two_radii.yaml" in found["pgd"].advice
    figures = found["pgd"].figures
    assert figures["gap"] == pytest.approx(figures["usual"] - figures["adaptive"])


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (ARC(THREAT, 5, 0.15), ""),
        (ARC(Threat("linf", 1e-4), 5, 0.15), "too weakly"),
        (ARC(Threat("l2", 0.15), 5, 0.15), "too weakly"),
        (ARC(THREAT, 1, 0.15), "too weakly"),
        (ARC(THREAT, 5, 0.001), "too weakly"),
        (PGD(THREAT, 20, 0.05), "not ARC"),
    ],
)
def test_an_adaptive_attack_may_be_too_weak(attack, words):
    subject = Subject(Ensemble([TinyNet(), TinyNet()]), THREAT, others={"mine": attack})
    found = adaptive(subject, {"pgd": part(31), "arc": part(31), "arc_two_radii": part(31)})
    assert found.flagged == bool(words)
    assert words in found.text


@pytest.mark.parametrize(
    ("rule", "loss"),
    [(mean_probs, ce_of_mean_probs), (mean_logits, ce_of_mean_logits), (majority, expected_ce)],
)
def test_an_ensemble_with_one_answer_needs_the_loss_of_its_rule(rule, loss):
    defense = Ensemble([TinyNet(), TinyNet()], rule=rule)
    for objective in (ce_of_mean_probs, ce_of_mean_logits, expected_ce):
        attack = PGD(THREAT, 10, 0.05, objective)
        found = adaptive(Subject(defense, THREAT, others={"mine": attack}), {})
        assert found.flagged == (objective is not loss)
        assert found.severity != "warning" or loss.__name__ in found.advice
    short = adaptive(Subject(defense, THREAT, others={"mine": PGD(THREAT, 10, 1e-4, loss)}), {})
    assert short.severity == "warning" and "too weakly" in short.text
    assert not adaptive(Subject(defense, THREAT), {}).flagged


def test_the_gap_is_told_in_words():
    subject = Subject(Ensemble([TinyNet(), TinyNet()]), THREAT)
    seen = {"pgd": part(31), "arc": part(31), "arc_two_radii": part(20)}
    found = adaptive(subject, seen)
    assert "leaves 62 %, those for its kind 40 %" in found.text
    subject.others = {"apgd": subject.attacks["pgd"]}
    assert adaptive(subject, seen).severity == "severe"
    assert adaptive(subject, seen | {"arc_two_radii": part(31)}).severity == "warning"


def test_eot_with_one_velocity_is_not_what_random_transforms_need():
    subject = Subject(RandomTransforms(TinyNet(), {"GaussianNoise": {}}, 1, 3), THREAT)
    seen = {"pgd": part(31), "linear_aggmo": part(31)}
    subject.others = {"eot": PGD(THREAT, 3, 0.05, draws=3)}
    assert adaptive(subject, seen).flagged
    subject.others["best"] = subject.attacks["linear_aggmo"]
    assert not adaptive(subject, seen).flagged


def test_a_transformation_ensemble_is_audited(nets, blobs):
    x, y = (part[:8] for part in blobs)
    members = TransformEnsemble(nets[:2], ["flip_horizontal", "rotate_180"], random_member)
    found = audit(members, x, y, THREAT, steps=3, queries=10)
    names = {result.name for result in found.results}
    assert {"adaptive_pgd", "taa", "paa", "worst"} <= names


def test_a_defense_that_adapts_is_audited_as_a_game(blobs):
    x, y = (part[:8] for part in blobs)
    found = audit(DENT(SmallCNN(4, 3, 4), steps=1), x, y, THREAT, steps=2)
    assert [result.name for result in found.results] == [
        *("clean", "noise", "transfer", "gmsa_avg", "huge", "worst")
    ]
    by_name = {finding.name: finding for finding in found.findings}
    assert "adapts" in by_name["black_box"].text and by_name["black_box"].severity == "note"


# answers that are no numbers


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rule", VOTING_RULES.values(), ids=VOTING_RULES)
def test_no_numbers_are_never_class_0(rule, bad):
    logits = torch.full((3, 4, 5), bad)
    assert torch.equal(rule(logits, torch.full((3,), 1 / 3)), torch.zeros(4, 5))
    logits[:, 1:] = torch.eye(5)[2]
    answers = rule(logits, torch.full((3,), 1 / 3))
    assert answers[0].sum() == 0
    assert answers[1:].argmax(1).tolist() == [2, 2, 2]


def test_a_class_that_is_ruled_out_is_no_missing_number():
    logits = torch.tensor([[[-torch.inf, 1.0, 0.0]]])
    assert random_member(logits, torch.ones(1)).tolist() == [[0, 1, 0]]
    check_logits(logits, torch.tensor([1]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_attacks_refuse_what_is_no_number(bad):
    with pytest.raises(NonFiniteLogitsError, match="not numbers on 1 of 2 images"):
        check_logits(torch.tensor([[[0.0, 1.0], [bad, 0.0]]]), torch.tensor([0, 1]))


def test_an_answer_that_is_no_number_is_wrong():
    answers = torch.tensor([[torch.nan, 1.0], [0.25, 0.75], [torch.inf, 0.0]])
    assert robust_accuracy(answers, torch.tensor([0, 0, 0])).tolist() == [0, 0.25, 0]


def test_one_image_without_a_number_is_told(nets, blobs):
    x, y = blobs
    mark = x[3].flatten()[:3].clone()

    def one(images):
        found = (images.flatten(1)[:, :3] == mark).all(1)
        return torch.where(found[:, None, None, None], torch.nan, images)

    (found,) = audit(Single(Through(nets[0], one)), x, y, THREAT, checks=[numbers]).findings
    assert found.severity == "warning"
    assert "1 of 50 images" in found.text
    assert found.figures["clean"] == pytest.approx(1 / 50)


def test_any_part_may_be_imported_first():
    """The callbacks are made of parts of the audit, and the audit of parts of the callbacks."""
    code = """
import sys
from importlib import import_module
for part in ("audit.auditor", "audit.case", "audit.measures", "audit.page", "audit.command",
             "audit.strength", "callbacks.audit", "evaluation.protocol"):
    for name in [name for name in sys.modules if name.startswith("lightning_rob")]:
        del sys.modules[name]
    import_module(f"lightning_rob.{part}")
    assert import_module("lightning_rob").RobustAudit.__name__ == "RobustAudit"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
