"""Which attacks each kind of defense calls for."""

import copy
from dataclasses import dataclass, replace
from math import ceil, isqrt
from typing import Literal

import torch
from torch import Tensor

from lightning_rob.attacks import (
    APGD,
    ARC,
    GMSA,
    PAA,
    PGD,
    TAA,
    Attack,
    Budgeted,
    OnDifferentiable,
    Square,
    Strongest,
    SurrogateTransforms,
    TransferFromStatic,
    arc_suite,
)
from lightning_rob.attacks.passes import PassCount
from lightning_rob.defenses import Defense, random_transforms_in
from lightning_rob.objectives import (
    ce_of_mean_logits,
    ce_of_rule,
    check_labels,
    expected_ce,
    linear,
    margin_of_rule,
)
from lightning_rob.randomness import Generator, Streams, uniform
from lightning_rob.rules import random_member
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import Threat, scale

SuiteKind = Literal["single", "ensemble", "randomized", "random", "transformed", "transductive"]
ROUNDS = 5  # of GMSA, at most
PER_MODEL = 20  # passes of an image and model in the last round of GMSA
TARGETS_FROM = 300  # passes of an image and network from which runs towards classes pay
DRAWS = 10  # over which a step of EoT averages
DISSIMILARITY = 0.3  # the bound on PAA of Liao et al. (2020)
AGGMO = (0.0, 0.9, 0.99, 0.999, 0.9999, 0.99999)  # momenta of Sitawarin et al. (2022)
RECIPES: dict[SuiteKind, str] = {
    "single": "callbacks/autoattack.yaml",
    "ensemble": "callbacks/adaptive_pgd_logits.yaml",
    "randomized": "callbacks/arc_two_radii.yaml",
    "random": "callbacks/rt_best.yaml",
    "transformed": "callbacks/votes_adaptive.yaml",
    "transductive": "callbacks/gmsa_avg.yaml",
}


def suite_kind(defense: Defense) -> SuiteKind:
    """Return the kind of a defense, as far as it decides which attacks fit."""
    if defense.transductive:
        return "transductive"
    if defense.kind == "transform_ensemble":
        return "transformed"
    try:
        members = len(defense.classifiers)
    except TypeError:
        return "random"
    if members == 1:
        return "single"
    return "randomized" if defense.rule is random_member else "ensemble"


def default_attacks(defense: Defense, threat: Threat) -> dict[str, Attack]:
    """Return the attacks that score a defense where the user names none.

    Adaptive PGD of 20 steps: on the expected loss, on the loss of the mean logits, and with five
    restarts. ARC, as in the paper and with two local radii, for randomized ensembles.

    Raises:
        ValueError: the defense adapts: no attack is usual for all of those.
    """
    if defense.transductive:
        raise ValueError(
            f"a {type(defense).__name__} adapts to its attacker: name the attacks that rehearse "
            "it, such as --suite callbacks/gmsa_avg.yaml"
        )
    steps, draws = 20, DRAWS if defense.kind == "random_transforms" else None
    pgd = PGD(threat, steps, threat.eps / 4, draws=draws, random_start=False)
    attacks: dict[str, Attack] = {
        "adaptive_pgd": pgd,
        "adaptive_pgd_logits": replace(pgd, objective=ce_of_mean_logits),
        "adaptive_pgd_restarts": replace(pgd, restarts=5, random_start=True),
    }
    if defense.kind == "ensemble" and not threat.relative:
        attacks |= arc_suite(threat, steps)
    return attacks


@dataclass(frozen=True)
class RandomCorners(Attack):
    """The best of some random corners of an linf or l2 ball, without a search.

    Args:
        threat: linf or l2.
        tries: number of corners.
    """

    threat: Threat
    tries: int = 10

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """Return the perturbed images [B, C, H, W]; called inside `attacking`."""
        best, lowest = x, x.new_full((len(x),), torch.inf)
        for _ in range(self.tries):
            corner = self.threat.steepest(uniform(x, *x.shape[1:], generator=generator) - 0.5)
            tried = self.threat.project(x + scale(corner, self.threat.eps * x.new_ones(len(x))), x)
            with torch.no_grad():
                found = defense(tried, generator)
            check_labels(y, found.shape[-1])
            score = found.gather(1, y[:, None])[:, 0].to(lowest)
            wins = score < lowest
            best = torch.where(wins.view(-1, *[1] * (x.dim() - 1)), tried, best)
            lowest = torch.where(wins, score, lowest)
        return best


@dataclass(frozen=True)
class RandomStart(Attack):
    """One random point of an linf or l2 ball, without a prediction of the defense."""

    threat: Threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """Return the perturbed images [B, C, H, W]."""
        return self.threat.start(x, generator if isinstance(generator, Streams) else None)


@dataclass(frozen=True)
class DoublePrecision(Attack):
    """An attack that computes in double precision, on a copy of the defense."""

    attack: Attack

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """The attack's own."""
        return self.attack.threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """Return the perturbed images [B, C, H, W]; called inside `attacking`."""
        found = self.attack(doubled(defense), x.double(), y, generator)
        return self.threat.project(found.to(x.dtype), x)


@torch.no_grad()  # with gradients, the copied weights of TorchScript would be no leaves
def doubled(defense: Defense) -> Defense:
    """Return a copy of the defense in double precision."""
    return copy.deepcopy(defense).double()


@dataclass(frozen=True)
class Auto(Attack):
    """Attack a defense by the schedule for its kind, within a number of passes.

    Args:
        threat: linf or l2, in pixel units.
        passes: the largest number of forward and backward passes of an image; see `Budgeted`.

    Raises:
        ValueError: no passes, another threat; when called, too few passes for the schedule.
        TypeError: when called on a defense that adapts: run its `schedule`; on a transformation
            ensemble without a member that has a gradient.
    """

    threat: Threat
    passes: int = 1000

    def __post_init__(self) -> None:
        at_least(1, passes=self.passes)
        _check_threat(self.threat)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """Return the perturbed images [B, C, H, W]; called inside `attacking`."""
        if defense.transductive:
            kind = type(defense).__name__
            raise TypeError(f"{kind} adapts to whole batches: attack it by Auto(…).schedule")
        count = PassCount(defense, x)
        classes = count.classes  # takes passes, which `asked` counts
        left = replace(self, passes=max(self.passes - count.asked, 1))
        return left.schedule(defense, classes).perturb(defense, x, y, generator)

    def schedule(self, defense: Defense, classes: int = 10) -> Attack:
        """Return the attacks for this kind of defense, each with its share of the passes.

        The adaptations of a defense that adapts are not counted. Runs towards classes need four.
        """
        kind, members = suite_kind(defense), len(defense.weights)
        if kind == "transductive":
            rounds = min(max(isqrt(self.passes // (PER_MODEL * members)), 1), ROUNDS)
            each = max(self.passes // rounds, 1)
            pgd = self._pgd(defense, each, rounds * members)
            return GMSA(Budgeted(replace(pgd, keep_best=True), each), rounds=rounds)
        if kind == "random":
            anew = defense.kind == "random_transforms"  # else each draw is one prediction's
            draws = DRAWS if anew else ceil(DRAWS / members)
            pgd = self._pgd(defense, self.passes, draws if anew else draws * members)
            smooth = replace(pgd, draws=draws, objective=linear, momentum=AGGMO)
            return Budgeted(smooth, self.passes)
        if kind == "transformed":
            followed = sum(part.differentiable for part in defense.transforms.values())
            pgd = self._pgd(defense, self.passes, max(followed, 1))
            return OnDifferentiable(Budgeted(pgd, self.passes))
        margin = APGD(self.threat, objective=margin_of_rule(defense.rule))
        if kind == "randomized":
            arc = ARC(self.threat, 1, self.threat.eps / 4, neighbours=4, early_stop=True)
            parts: list[tuple[float, Attack]] = [(0.5, margin), (0.5, arc)]
        elif classes < 4 or self.passes < TARGETS_FROM * members:
            parts = [(1.0, margin)]
        else:
            parts = [(0.25, margin), (0.75, APGD(self.threat, targets=9))]
        free = self.passes - members * len(parts)  # Strongest evaluates each
        return Strongest(tuple(Budgeted(a, max(int(share * free), 1)) for share, a in parts))

    def _pgd(self, defense: Defense, passes: int, networks: int) -> PGD:
        """Return PGD with a step size by which as many steps as fit lead across the ball."""
        steps = max((passes // networks - 2) // 2, 1)  # but those to find out classes and the best
        step_size = _step_size(self.threat.eps, steps, 10)
        return PGD(self.threat, 1, step_size, backward=surrogate_for(defense))


@dataclass(frozen=True)
class AttackSuite:
    """The attacks on a kind of defense, without "clean"."""

    kind: SuiteKind
    default: str  # the attack that is mostly reported for it
    adaptive: tuple[str, ...]  # those made for its kind
    attacks: dict[str, Attack]
    averaged: Attack | None = None  # the default with EoT; None where PGD does not apply directly

    @property
    def recipe(self) -> str:
        """The plug-in that runs the adaptive attacks, for advice."""
        return RECIPES[self.kind]

    def within(self, threat: Threat) -> list[str]:
        """Return the names of the attacks of this threat, over which the worst case is taken."""
        return [name for name, attack in self.attacks.items() if attack.threat == threat]


def suite_for(
    defense: Defense, threat: Threat, steps: int = 20, queries: int = 1000
) -> AttackSuite:
    """Return the attacks that test a defense of this kind, within an linf or l2 threat.

    The default PGD has the given steps, other attacks a multiple; Square has the queries.

    Raises:
        ValueError: a threat that not all attacks support, or one without a radius.
    """
    _check_threat(threat)
    kind = suite_kind(defense)
    pgd = PGD(threat, steps, _step_size(threat.eps, steps, 4))
    if kind == "transductive":  # most papers report a transfer attack
        pgd = replace(pgd, keep_best=True)
        rounds: dict[str, Attack] = {
            "noise": RandomStart(threat),
            "transfer": TransferFromStatic(pgd),
            "gmsa_avg": GMSA(pgd, rounds=5),
            "unbounded": GMSA(_unbounded(pgd), rounds=2),
        }
        return AttackSuite(kind, "transfer", ("gmsa_avg",), rounds)
    several = len(defense.weights) > 1
    objective = ce_of_rule(defense.rule) if several else expected_ce
    margin = margin_of_rule(defense.rule) if several else linear
    pgd = replace(pgd, objective=objective, backward=surrogate_for(defense))
    longer = _step_size(threat.eps, 5 * steps, 10)
    by_gradient = {  # each should be about as strong as the default
        "fgsm": replace(pgd, steps=1, step_size=threat.eps, random_start=False),
        "pgd": pgd,
        "longer": replace(pgd, steps=5 * steps, step_size=longer),
        "restarts": replace(pgd, restarts=5),
        "margin": replace(pgd, objective=margin, keep_best=True),
        "unbounded": _unbounded(pgd),
    }
    attacks: dict[str, Attack] = {"noise": RandomCorners(threat)}
    attacks |= {name: _on_differentiable(defense, attack) for name, attack in by_gradient.items()}
    attacks["square"] = Square(threat, queries)
    adaptive = _adaptive_attacks(defense, kind, pgd)
    averaged = None if kind == "transformed" else replace(pgd, draws=DRAWS)
    return AttackSuite(kind, "pgd", tuple(adaptive), attacks | adaptive, averaged)


def _check_threat(threat: Threat) -> None:
    if threat.p not in (2, float("inf")) or threat.relative or not threat.eps > 0:
        raise ValueError(f"the suite needs linf or l2 and eps > 0 in pixel units, got {threat}")


def surrogate_for(defense: Defense) -> SurrogateTransforms | None:
    """Return a backward pass for random transforms that have no gradient; None without any."""
    parts = random_transforms_in(defense)
    transforms = [transform for part in parts for transform in part.transforms.values()]
    exact = any(part.gradients == "exact" for part in parts)
    if not exact or all(transform.differentiable for transform in transforms):
        return None
    return SurrogateTransforms(shared_order=False, gradients="straight_through")


def _step_size(eps: float, steps: int, fraction: int) -> float:
    """Return a fraction of the radius, or more if the steps would not lead across the ball."""
    return max(eps / fraction, 2.5 * eps / steps)


def _on_differentiable(defense: Defense, attack: Attack) -> Attack:
    """Return the attack on members that have a gradient; where none has, on each network (TAA)."""
    if defense.kind != "transform_ensemble":
        return attack
    with_gradient = any(kind.differentiable for kind in defense.transforms.values())
    return OnDifferentiable(attack) if with_gradient else TAA(attack)


def _unbounded(pgd: PGD) -> PGD:
    """Return the attack in a ball that holds every image."""
    low, high = pgd.threat.bounds
    side, steps = high - low, 5 * pgd.steps
    # An l2 ball of 1000 sides holds all images of up to a million values.
    radius, stride = (1.0, 1.0) if pgd.threat.p == float("inf") else (1000.0, 20.0)
    return replace(
        pgd,
        threat=replace(pgd.threat, eps=radius * side),
        steps=steps,
        step_size=stride * _step_size(side, steps, 10),
        random_start=False,
    )


def _adaptive_attacks(defense: Defense, kind: SuiteKind, pgd: PGD) -> dict[str, Attack]:
    """Return the attacks made for a kind of defense; none where PGD itself is adaptive."""
    threat, steps = pgd.threat, pgd.steps
    if kind == "randomized":
        return arc_suite(threat, steps)
    if kind == "random":
        view = None
        if random_transforms_in(defense):
            view = replace(surrogate_for(defense) or SurrogateTransforms(), shared_order=True)
        best = replace(pgd, draws=DRAWS, objective=linear, backward=view, momentum=AGGMO)
        step_size = _step_size(threat.eps, 2 * steps, 10)
        return {"linear_aggmo": replace(best, steps=2 * steps, step_size=step_size)}
    if kind == "transformed":
        inner = PGD(Threat("linf", 0.05, threat.bounds), steps, 0.01)
        return {
            "adaptive_pgd": _on_differentiable(defense, replace(pgd, steps=5 * steps, restarts=2)),
            "taa": TAA(pgd),
            "paa": PAA(inner, "AvgP", DISSIMILARITY, project_last=True),
        }
    return {}
