"""Which attacks an audit runs, by the kind of defense."""

import copy
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from lightning_rob.attacks import (
    GMSA,
    PAA,
    PGD,
    TAA,
    Attack,
    AutoAttack,
    OnDifferentiable,
    SurrogateTransforms,
    TransferFromStatic,
    arc_suite,
)
from lightning_rob.defenses import Defense, random_transforms_in
from lightning_rob.objectives import (
    Objective,
    ce_of_mean_logits,
    ce_of_mean_probs,
    expected_ce,
    expected_margin,
    linear,
)
from lightning_rob.randomness import Generator, Streams, uniform
from lightning_rob.rules import Rule, mean_logits, mean_probs, random_member
from lightning_rob.threat import Threat, scale

Kind = Literal["single", "ensemble", "randomized", "random", "transformed", "transductive"]
TRIES = 10  # of random noise
DISSIMILARITY = 0.3  # the bound on PAA of Liao et al. (2020)
DAMPINGS = (0.0, 0.9, 0.99, 0.999, 0.9999, 0.99999)  # Sitawarin et al. (2022)


def kind_of(defense: Defense) -> Kind:
    """What has to be known of a defense to attack it."""
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


@dataclass(frozen=True)
class Noise(Attack):
    """No search: the best of some random corners of the ball.

    Args:
        threat: linf or l2.
        tries: how many.
    """

    threat: Threat
    tries: int = TRIES

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        best, lowest = x, x.new_full((len(x),), torch.inf)
        for _ in range(self.tries):
            corner = self.threat.steepest(uniform(x, *x.shape[1:], generator=generator) - 0.5)
            tried = self.threat.project(x + scale(corner, self.threat.eps * x.new_ones(len(x))), x)
            with torch.no_grad():
                right = defense(tried, generator).gather(1, y[:, None])[:, 0].to(lowest)
            wins = right < lowest
            best = torch.where(wins.view(-1, *[1] * (x.dim() - 1)), tried, best)
            lowest = torch.where(wins, right, lowest)
        return best


@dataclass(frozen=True)
class InDouble(Attack):
    """An attack that computes in double precision.

    Args:
        attack: on a copy of the defense.
    """

    attack: Attack

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """The attack's own."""
        return self.attack.threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        found = self.attack(copy.deepcopy(defense).double(), x.double(), y, generator)
        return self.threat.project(found.to(x.dtype), x)


@dataclass(frozen=True)
class Suite:
    """The attacks on a kind of defense.

    Args:
        kind: of the defense.
        usual: the name of the attack that is mostly reported for it.
        adaptive: the names of those made for its kind.
        attacks: all by their names; "clean" is not among them.
        recipe: the plug-in that runs the adaptive ones, for the advice.
    """

    kind: Kind
    usual: str
    adaptive: tuple[str, ...]
    attacks: dict[str, Attack]
    recipe: str

    def within(self, threat: Threat) -> list[str]:
        """The attacks of this threat, that tell what is left in the worst case."""
        return [name for name, attack in self.attacks.items() if attack.threat == threat]


def suite_for(defense: Defense, threat: Threat, steps: int = 20, queries: int = 1000) -> Suite:
    """The attacks that such a defense has to stand, within one threat.

    Args:
        defense: what is audited.
        threat: linf or l2, in pixel units.
        steps: of the usual PGD; others have a multiple of it.
        queries: of the Square Attack, which is left out if its package is missing.

    Raises:
        ValueError: a threat that not all attacks are made for, or one without a radius.
    """
    if threat.p not in (2, float("inf")) or threat.relative or not threat.eps > 0:
        raise ValueError(f"an audit needs linf or l2 and eps > 0 in pixel units, got {threat}")
    kind = kind_of(defense)
    if kind == "transductive":
        return _transductive(threat, steps)
    usual = PGD(threat, steps, _step(threat.eps, steps, 4))
    usual = replace(usual, objective=climbed(defense), backward=seen(defense))
    attacks = _gradient_attacks(defense, usual)
    adaptive = _adaptive(defense, kind, usual)
    attacks["huge"] = _wrapped(defense, _huge(usual))
    black_box = {"square": AutoAttack(threat, "custom", ("square",), queries=queries)}
    attacks |= black_box if find_spec("pyautoattack") and threat.bounds == (0, 1) else {}
    return Suite(kind, "pgd", tuple(adaptive), attacks | adaptive, RECIPES[kind])


RECIPES = {
    "single": "callbacks/autoattack.yaml",
    "ensemble": "callbacks/apgd_logits.yaml",
    "randomized": "callbacks/arc_two_radii.yaml",
    "random": "callbacks/rt_best.yaml",
    "transformed": "callbacks/votes_adaptive.yaml",
    "transductive": "callbacks/gmsa_avg.yaml",
}


def _step(eps: float, steps: int, part: int) -> float:
    """A part of the radius, or more if so many steps would not lead across the ball."""
    return max(eps / part, 2.5 * eps / steps)


def climbed(defense: Defense) -> Objective:
    """The loss of what the defense answers by."""
    by_rule: dict[Rule, Objective] = {mean_logits: ce_of_mean_logits, mean_probs: ce_of_mean_probs}
    return by_rule.get(defense.rule, expected_ce) if len(defense.weights) > 1 else expected_ce


def seen(defense: Defense) -> SurrogateTransforms | None:
    """A view that has a gradient where random transforms have none; None where it needs none."""
    parts = random_transforms_in(defense)
    kinds = [kind for part in parts for kind in part.transforms.values()]
    lacking = any(part.gradients == "exact" for part in parts) and not all(
        kind.differentiable for kind in kinds
    )
    return (
        SurrogateTransforms(shared_order=False, gradients="straight_through") if lacking else None
    )


def _wrapped(defense: Defense, attack: Attack) -> Attack:
    """The attack, on what has a gradient; on single members where nothing has one."""
    if defense.kind != "transform_ensemble":
        return attack
    with_gradient = any(kind.differentiable for kind in defense.transforms.values())
    return OnDifferentiable(attack) if with_gradient else TAA(attack)


def _gradient_attacks(defense: Defense, usual: PGD) -> dict[str, Attack]:
    by_draws = defense.rule in (mean_logits, mean_probs) or len(defense.weights) == 1
    margin = linear if by_draws else expected_margin
    fgsm = replace(usual, steps=1, step_size=usual.threat.eps, random_start=False)
    steps = 5 * usual.steps
    longer = replace(usual, steps=steps, step_size=_step(usual.threat.eps, steps, 10))
    attacks = {
        "fgsm": fgsm,
        "pgd": usual,
        "longer": longer,
        "restarts": replace(usual, restarts=5),
        "margin": replace(usual, objective=margin, keep_best=True),
    }
    return {"noise": Noise(usual.threat)} | {
        name: _wrapped(defense, attack) for name, attack in attacks.items()
    }


def _huge(usual: PGD) -> PGD:
    """The attack in a ball that holds every image."""
    low, high = usual.threat.bounds
    side = high - low
    radius = side if usual.threat.p == float("inf") else side * 1000.0  # a million pixels
    steps = 5 * usual.steps
    threat = replace(usual.threat, eps=radius)
    length = _step(side, steps, 10) * (1.0 if usual.threat.p == float("inf") else 20.0)
    return replace(usual, threat=threat, steps=steps, step_size=length, random_start=False)


def _adaptive(defense: Defense, kind: Kind, usual: PGD) -> dict[str, Attack]:
    """What was made for this kind of defense."""
    threat, steps = usual.threat, usual.steps
    if kind == "randomized":
        return arc_suite(threat, steps)
    if kind == "random":
        view = None
        if random_transforms_in(defense):
            view = replace(seen(defense) or SurrogateTransforms(), shared_order=True)
        found = replace(usual, draws=10, objective=linear, backward=view, momentum=DAMPINGS)
        step_size = _step(threat.eps, 2 * steps, 10)
        return {"linear_aggmo": replace(found, steps=2 * steps, step_size=step_size)}
    if kind == "transformed":
        round_ = PGD(Threat("linf", 0.05, threat.bounds), steps, 0.01)
        return {
            "adaptive_pgd": _wrapped(defense, replace(usual, steps=5 * steps, restarts=2)),
            "taa": TAA(usual),
            "paa": PAA(round_, "AvgP", DISSIMILARITY, project_last=True),
        }
    return {}


def _transductive(threat: Threat, steps: int) -> Suite:
    """The same for a game: what is mostly reported is a transfer attack."""
    usual = PGD(threat, steps, _step(threat.eps, steps, 4), keep_best=True)
    attacks: dict[str, Attack] = {
        "noise": _Once(threat),
        "transfer": TransferFromStatic(usual),
        "gmsa_avg": GMSA(usual, rounds=5),
        "huge": GMSA(_huge(usual), rounds=2),
    }
    return Suite("transductive", "transfer", ("gmsa_avg",), attacks, RECIPES["transductive"])


class _Once(Noise):
    """A random corner, without a look at what the defense makes of it."""

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return self.threat.start(x, generator if isinstance(generator, Streams) else None)
