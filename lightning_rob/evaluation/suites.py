"""Which attacks each kind of defense calls for."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_rob.attacks import (
    APGD,
    ARC,
    GMSA,
    PAA,
    PGD,
    TAA,
    Attack,
    Auto,
    AutoAttack,
    FewAttacked,
    LatticeClimber,
    OnDifferentiable,
    Square,
    SurrogateTransforms,
    TransferFromStatic,
)
from lightning_rob.attacks.apgd import SHORT
from lightning_rob.attacks.auto import (
    AGGMO,
    SuiteKind,
    attack_gradients,
    check_threat,
    step_across,
    suite_kind,
    surrogate_for,
    usual_passes,
)
from lightning_rob.attacks.nested import walk
from lightning_rob.attacks.random_points import RandomCorners, RandomStart
from lightning_rob.defenses import Defense, Ensemble, is_transform_ensemble, random_transforms_in
from lightning_rob.evaluation.findings import Finding
from lightning_rob.objectives import ce_of_mean_logits, linear, losses_of_rule
from lightning_rob.rules import Rule, mean_logits, random_member
from lightning_rob.runtime.errors import nearest
from lightning_rob.threat import Threat

DRAWS = 10  # over which a step of EoT averages
DISSIMILARITY = 0.3  # the bound on PAA of Liao et al. (2020)
PLUG_INS: dict[SuiteKind, str] = {
    "single": "callbacks/autoattack.yaml",
    "ensemble": "callbacks/adaptive_pgd_probs.yaml",  # if it averages logits, see `plug_in_for`
    "randomized": "callbacks/climb.yaml",
    "random": "callbacks/rt_best.yaml",
    "transformed": "callbacks/votes_adaptive.yaml",
    "transductive": "callbacks/gmsa_avg.yaml",
}

KINDS: dict[SuiteKind, str] = {
    "single": "one network",
    "ensemble": "an ensemble with one prediction",
    "randomized": "a randomized ensemble",
    "random": "random predictions",
    "transformed": "a transformation ensemble",
    "transductive": "a defense that adapts to the test batch",
}
MADE_FOR: dict[SuiteKind, str] = {
    "ensemble": "PGD on the loss of the rule by which it predicts",
    "randomized": "ARC or the climb",
    "random": "EoT on the linear loss with AggMo",
    "transformed": "PAA, and PGD through all members that have a gradient",
    "transductive": "GMSA",
}

# Beside "pgd", "suite" and its parts: by the defense, the threat, and whether it draws noise.
WORDS: dict[str, Callable[[Defense, Threat, bool], Attack]] = {
    "auto": lambda defense, threat, _: _auto(defense, threat),
    "autoattack": lambda _, threat, random: AutoAttack(threat, "rand" if random else "standard"),
}


def plug_in_for(defense: Defense, kind: SuiteKind | None = None) -> str:
    """Return the plug-in of the attacks that are made for a defense; `kind` where it is known."""
    kind = kind or suite_kind(defense)
    if kind == "random" and not random_transforms_in(defense):
        return "callbacks/eot.yaml"  # the other one looks for random transforms
    if kind == "ensemble" and defense.rule is mean_logits:
        return "callbacks/adaptive_pgd_logits.yaml"
    return PLUG_INS[kind]


def fitting(attacks: Mapping[str, Attack], kind: SuiteKind, rule: Rule) -> list[Attack]:
    """Return the attacks, or parts of them, that are made for a kind of defense and its rule."""
    parts = (part for attack in attacks.values() for part in walk(attack))
    return [part for part in parts if part.is_made_for(kind, rule)]


def unfit(attacks: Mapping[str, Attack], defense: Defense) -> list[Finding]:
    """Find that none of the attacks is made for the kind of a defense."""
    kind = suite_kind(defense)
    if kind == "single" or fitting(attacks, kind, defense.rule):
        return []
    text = f"None of these attacks is made for {KINDS[kind]}: {MADE_FOR[kind]} may leave less."
    plug_in = f"--trainer.callbacks+={Path(plug_in_for(defense)).stem}"
    if kind == "random" and not random_transforms_in(defense):
        plug_in = "`lightning-rob attack`"  # EoT, the plug-in, is on the expected loss
    advice = f'Attack by evaluate(net, "auto", …) or {plug_in} too.'
    return [Finding("note", text, advice, name="adaptive")]


def attacks_by_name(
    name: str, defense: Defense, threat: Threat, random: bool = False
) -> dict[str, Attack]:
    """Return the attacks that one word stands for: suite, or one of that suite or beside it.

    `random`: whether a plain network draws noise.
    """
    if name in WORDS:
        return {name: WORDS[name](defense, threat, random)}
    # The audit alone takes balls of another size, within which "worst" means nothing.
    whole = suite_for(defense, threat, random=random)
    suite = {each: whole.attacks[each] for each in whole.within(threat)}
    if name == "pgd" and name not in suite:  # of a defense that adapts: without rehearsals
        return {name: PGD(threat, 20, step_across(threat.eps, 20, 4))}
    if name not in ("suite", *suite):
        words = dict.fromkeys(("suite", *WORDS, "pgd", *suite))
        kind, choices = type(defense).__name__, f": give a mapping, or one of {', '.join(words)}"
        raise ValueError(f"no attack on a {kind} is called {name!r}{nearest(name, words, choices)}")
    return suite if name == "suite" else {name: suite[name]}


def _auto(defense: Defense, threat: Threat) -> Attack:
    auto = Auto(threat, usual_passes(defense, threat))
    return auto.schedule(defense) if defense.transductive else auto


def default_attacks(defense: Defense, threat: Threat) -> dict[str, Attack]:
    """Return the attacks that score a defense where the user names none.

    Adaptive PGD of 20 steps: on the expected loss, on the loss of the mean logits, and with five
    restarts. For ensembles that average probabilities or vote also on the loss of their rule; for
    randomized ones ARC as in the paper, and the climb, which is the strongest.
    """
    if defense.transductive:
        raise ValueError(
            f"a {type(defense).__name__} adapts to its attacker: name the attacks that rehearse "
            "it, such as --suite callbacks/gmsa_avg.yaml"
        )
    steps, draws = 20, DRAWS if defense.resamples else None
    view = attack_gradients(defense)
    pgd = PGD(threat, steps, threat.eps / 4, draws=draws, backward=view, random_start=False)
    attacks: dict[str, Attack] = {
        "adaptive_pgd": pgd,
        "adaptive_pgd_logits": replace(pgd, objective=ce_of_mean_logits),
        "adaptive_pgd_restarts": replace(pgd, restarts=5, random_start=True),
    }
    if threat.p == 1:  # where PGD is weak
        attacks["apgd"] = APGD(threat, SHORT, restarts=10, draws=draws)
    # Not `suite_kind`: boosting adds the other members later.
    if isinstance(defense, Ensemble) and defense.rule not in (mean_logits, random_member):
        attacks["adaptive_pgd_rule"] = replace(pgd, objective=losses_of_rule(defense.rule)[0])
    if isinstance(defense, Ensemble) and defense.rule is random_member and not threat.relative:
        attacks |= _on_members(threat, steps)
    return attacks


def _on_members(threat: Threat, steps: int) -> dict[str, Attack]:
    climb: dict[str, Attack] = {"climb": LatticeClimber(threat, 2 * steps)}
    if threat.p == 1:
        return climb
    radius = threat.eps if threat.p == math.inf else threat.eps / 4  # as in the ARC paper
    return {"arc": ARC(threat, steps, radius, early_stop=True), **climb}


@dataclass(frozen=True)
class AttackSuite:
    """The attacks on a kind of defense."""

    kind: SuiteKind
    default: str  # name of the attack that is mostly reported for it
    adaptive: tuple[str, ...]  # names of the attacks made for its kind
    attacks: dict[str, Attack]  # all attacks by name; "clean" is not among them
    averaged: Attack | None = None  # the default over draws (EoT); None where PGD does not apply

    def within(self, threat: Threat) -> list[str]:
        """Return the names of the attacks of this threat, over which the worst case is taken."""
        return [name for name, attack in self.attacks.items() if attack.threat == threat]


def suite_for(
    defense: Defense, threat: Threat, steps: int = 20, queries: int = 1000, random: bool = False
) -> AttackSuite:
    """Return the attacks that test a defense of this kind, within one threat: linf, l2 or l1.

    The steps are those of the default PGD, of which others have a multiple. `random`: whether a
    plain network draws noise, of which its kind says nothing.
    """
    check_threat(threat)
    kind = "random" if random else suite_kind(defense)
    pgd = PGD(threat, steps, step_across(threat.eps, steps, 4))
    if kind == "transductive":  # most papers report a transfer attack
        pgd = replace(pgd, keep_best=True)
        loss, _ = losses_of_rule(defense.adapted_model.rule, len(defense.weights))
        own: dict[str, Attack] = {
            "noise": RandomStart(threat),
            "transfer": TransferFromStatic(pgd),
            "gmsa_avg": GMSA(APGD(threat, 2 * steps, loss, early_stop=False), rounds=5),
            "unbounded": GMSA(_unbounded(pgd), rounds=2),
        }
        if not defense.may_reject:
            return AttackSuite(kind, "transfer", ("gmsa_avg",), own)
        # A defense that rejects attacked rounds may accept an image among clean ones.
        own["one_attacked"] = FewAttacked(TransferFromStatic(pgd))
        return AttackSuite(kind, "transfer", ("gmsa_avg", "one_attacked"), own)
    # PGD climbs the loss that decides the prediction; a single network has but one.
    objective, margin = losses_of_rule(defense.rule, len(defense.weights))
    pgd = replace(pgd, objective=objective, backward=attack_gradients(defense))
    long = step_across(threat.eps, 5 * steps, 10)
    variants = {  # which should all be about as strong
        "fgsm": replace(pgd, steps=1, step_size=threat.eps, random_start=False),
        "pgd": pgd,
        "longer": replace(pgd, steps=5 * steps, step_size=long),
        "restarts": replace(pgd, restarts=5),
        "margin": replace(pgd, objective=margin, keep_best=True),
        "unbounded": _unbounded(pgd),
    }
    attacks: dict[str, Attack] = {"noise": RandomCorners(threat)}
    attacks |= {name: _through(defense, one) for name, one in variants.items()}
    if threat.p == 1 and pgd.backward is None:  # where one start of PGD is weaker than Square
        attacks["apgd"] = _through(defense, APGD(threat, SHORT, objective, restarts=10))
    attacks["square"] = Square(threat, queries)
    if attack_gradients(defense) != surrogate_for(defense):
        attacks["declared"] = replace(pgd, backward=None)  # by the gradients that it declares
    adaptive = _adaptive_attacks(defense, kind, pgd)
    averaged = None if kind == "transformed" else replace(pgd, draws=DRAWS)
    return AttackSuite(kind, "pgd", tuple(adaptive), attacks | adaptive, averaged)


def _through(defense: Defense, attack: Attack) -> Attack:
    """Return the attack, on a transformation ensemble on all its members."""
    whole = is_transform_ensemble(defense)
    return OnDifferentiable(attack, straight_through=True) if whole else attack


def _unbounded(pgd: PGD) -> PGD:
    """Return the attack in a ball that holds every image, of linf whatever the norm."""
    low, high = pgd.threat.bounds
    side, steps = high - low, 5 * pgd.steps
    return replace(
        pgd,
        threat=replace(pgd.threat, norm="linf", eps=side),
        steps=steps,
        step_size=step_across(side, steps, 10),
        random_start=False,
    )


def _adaptive_attacks(defense: Defense, kind: SuiteKind, pgd: PGD) -> dict[str, Attack]:
    """Return the attacks made for a kind of defense; none where PGD itself is adaptive."""
    threat, steps = pgd.threat, pgd.steps
    if kind == "randomized":
        return _on_members(threat, steps)
    if kind == "random":
        view = None
        if random_transforms_in(defense):
            view = replace(attack_gradients(defense) or SurrogateTransforms(), shared_order=True)
        best = replace(pgd, draws=DRAWS, objective=linear, backward=view, momentum=AGGMO)
        step_size = step_across(threat.eps, 2 * steps, 10)
        return {"linear_aggmo": replace(best, steps=2 * steps, step_size=step_size)}
    if kind == "transformed":
        # PAA adds up the perturbations of many rounds: each one is small, whatever the threat.
        inner = PGD(Threat("linf", 0.05, threat.bounds), steps, 0.01)
        longer = replace(pgd, steps=5 * steps, restarts=2)
        adaptive: dict[str, Attack] = {"adaptive_pgd": _through(defense, longer)}
        known = is_transform_ensemble(defense) and not defense.may_reject
        kinds = defense.transforms.values() if known else ()
        if any(kind.reversible or kind.differentiable for kind in kinds):  # else both refuse
            paa = PAA(inner, "AvgP", DISSIMILARITY, project_last=True)
            adaptive |= {"taa": TAA(pgd), "paa": paa}
        return adaptive
    return {}
