"""Auto: the attack that a defense calls for, found within a number of passes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, isqrt
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_rob.attacks.apgd import APGD
from lightning_rob.attacks.arc import ARC
from lightning_rob.attacks.backward import SurrogateTransforms
from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.decorators import Budgeted, WithBackward
from lightning_rob.attacks.execution import restoring
from lightning_rob.attacks.gmsa import GMSA
from lightning_rob.attacks.inspection import lacks_gradient
from lightning_rob.attacks.lattice_climber import LatticeClimber
from lightning_rob.attacks.members import Strongest
from lightning_rob.attacks.pgd import PGD
from lightning_rob.attacks.search import NO_GRADIENT, Search, Unmasked
from lightning_rob.attacks.square import Square
from lightning_rob.attacks.transform_ensemble import OnDifferentiable
from lightning_rob.attacks.trials import DRAWS, AutoResult
from lightning_rob.defenses import Defense, is_transform_ensemble, random_transforms_in
from lightning_rob.defenses.per_image import per_image_layers
from lightning_rob.defenses.rejection import unwrapped
from lightning_rob.objectives import losses_of_rule
from lightning_rob.randomness import Generator
from lightning_rob.rules import random_member
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import TINY, Threat

# Kinds of defenses as an attacker sees them.
SuiteKind = Literal["single", "ensemble", "randomized", "random", "transformed", "transductive"]
ROUNDS = 5  # of GMSA, at most
PER_MODEL = 20  # passes of an image and model in the last round of GMSA
TARGETS_FROM = 300  # passes of an image and network from which runs towards classes pay
PARTS_FROM = 40  # passes of an image and network from which two losses may be better than one
FEWEST_STEPS = 4  # of the climb for one set of members
SEARCH_FROM = 400  # passes of an image and network from which a search pays
OPENING = 0.25  # share of the passes before a search
AGGMO = (0.0, 0.9, 0.99, 0.999, 0.9999, 0.99999)  # momenta of Sitawarin et al. (2022)


def suite_kind(defense: Defense) -> SuiteKind:
    """Return the kind of a defense, as far as it decides which attacks fit."""
    if defense.transductive:
        return "transductive"
    if is_transform_ensemble(unwrapped(defense)):
        return "transformed"
    try:
        members = len(defense.classifiers)
    except TypeError:
        return "random"
    if members == 1:
        return "single"
    return "randomized" if defense.rule is random_member else "ensemble"


@dataclass(frozen=True)
class Auto(Attack):
    """Attack a defense by what it calls for, found within a number of passes.

    A forward pass of a few images shows what hides gradients: operations without a slope, cut
    graphs, values before the output that stand for logits, noise, slopes that say little. The
    attacks for the kind of defense get a part of the passes, or all of them where several networks
    hide nothing. On up to 24 images that still stand, candidates get equal passes: each combination
    of slopes and objectives that these findings call for (`SurrogateGradient`); the best ones go on
    with other objectives and with gradients averaged over noisy copies (successive halving). The
    winners attack all images that stand. Behind rounding within l2 or l1 `FewPixels` is tried, and
    where slopes say little most of the last passes go to `Square`, from the best images so far.
    On one network that hides nothing most passes go to runs towards classes.

    With fewer than 400 passes for each network, on transformation ensembles and on random
    transforms only the attacks for the kind run, and on other defenses that draw their classifiers
    unless a forward pass shows something. On defenses that adapt each round of `GMSA` looks for
    what hides gradients, and takes the best slopes (`Unmasked`). A search compares candidates on
    some images, so that the result of an image depends on its batch; `find` returns what was found,
    as an attack that does not.

    Args:
        threat: linf, l2 or l1, in pixel units.
        passes: the largest number of forward and backward passes of an image; see `Budgeted`.
    """

    made_for: ClassVar[tuple[str, ...]] = get_args(SuiteKind)
    stops_on_gradient_logits: ClassVar[bool] = True  # in attacks that it makes
    threat: Threat
    passes: int = 1000
    results: list[AutoResult] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        at_least(1, passes=self.passes)
        check_threat(self.threat)

    @property
    def batch_dependent(self) -> bool:  # type: ignore[override]
        """Whether it searches: candidates are compared on some images, and noise is averaged."""
        return self.passes >= SEARCH_FROM

    averages = batch_dependent

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        if defense.transductive:
            kind = type(defense).__name__
            raise TypeError(f"{kind} adapts to whole batches: attack it by Auto(…).schedule")
        count = PassCount(defense, x)
        classes, kind = count.classes, suite_kind(defense)
        passes = max(self.passes - count.asked, 1)
        # Random transforms have slopes of their own. The draws of a prediction are one network.
        drawn = kind == "random" and not random_transforms_in(defense)
        networks = 1 if drawn else count.networks
        alone = kind == "transformed" or (kind == "random" and not drawn)
        if alone or self.passes < SEARCH_FROM * networks:
            restore = restoring(generator)
            whole = replace(self, passes=passes).schedule(defense, classes)
            try:
                return self._noted(AutoResult(whole.perturb(defense, x, y, generator), whole))
            except RuntimeError as error:
                if not lacks_gradient(error):
                    raise
                restore()
                square = Budgeted(Square(self.threat), passes)
                found = AutoResult(square.perturb(defense, x, y, generator), square, (NO_GRADIENT,))
                return self._noted(found)

        def plan(passes: int) -> Attack:
            return replace(self, passes=max(passes, 1)).schedule(defense, classes)

        opening = int(OPENING * passes)
        first = plan(opening)
        # The climb and ARC drop images, which labels behind which a defense rejects do not allow.
        if kind == "single" or (kind == "randomized" and per_image_layers(defense)):
            first = Budgeted(self._apgd(defense), opening)
        search = Search(self.threat, defense, x, y, generator, classes, passes, plan, drawn)
        return self._noted(search.run(first, opening))

    def __call__(
        self, defense: Defense, x: Tensor, y: Tensor, generator: Generator = None
    ) -> Tensor:
        before = len(self.results or [])
        x_adv = super().__call__(defense, x, y, generator)
        if self.results:  # without those of a run that was repeated, just inside the bounds
            del self.results[before:-1]
        return x_adv

    def _noted(self, found: AutoResult) -> Tensor:
        if self.results is not None:
            self.results.append(found)
        return found.x_adv

    def find(
        self, defense: Defense, x: Tensor, y: Tensor, generator: Generator = None
    ) -> AutoResult:
        """Attack images, and return the attack that was found beside them; as a call otherwise."""
        if not len(x):
            raise ValueError("an attack is found on images, got none")
        noting = self.noting()
        x_adv = noting(defense, x, y, generator)
        return replace(noting.results[-1], x_adv=x_adv)  # type: ignore[index]

    @property
    def shown(self) -> tuple[str, ...]:
        """The trail, the plug-in and the attack of the last call that was noted."""
        return self.results[-1].shown if self.results else ()

    def noting(self) -> "Auto":
        """Return the same attack, which keeps the `results` of its calls."""
        noting = replace(self)
        object.__setattr__(noting, "results", [])
        return noting

    def schedule(self, defense: Defense, classes: int = 10) -> Attack:
        """Return the attacks for this kind of defense, each with its share of the passes.

        Args:
            defense: the defense; the adaptations of one that adapts are not counted.
            classes: their number: runs towards classes need four.
        """
        kind, members = suite_kind(defense), len(defense.weights)
        if kind == "transductive":
            # Each round attacks one model more: passes grow with the square of the rounds.
            rounds = min(max(isqrt(self.passes // (PER_MODEL * members)), 1), ROUNDS)
            each = max(self.passes // rounds, 1)
            # Confident errors outlast an adaptation: no image stops at its first error.
            loss, _ = losses_of_rule(defense.adapted_model.rule, members)
            inner: Attack = Unmasked(APGD(self.threat, objective=loss, early_stop=False), each)
            backward = attack_gradients(defense.adapted_model)
            return GMSA(WithBackward(inner, backward) if backward else inner, rounds=rounds)
        if kind == "random":
            # Few draws a step, for momentum averages over the steps.
            anew = unwrapped(defense).resamples  # else each draw is one prediction's
            draws = DRAWS if anew else ceil(DRAWS / members)
            if self.threat.p == 1:  # where a run settles on few pixels, and more runs find more
                return Budgeted(replace(self._apgd(defense), draws=draws), self.passes)
            pgd = self._pgd(defense, self.passes, draws if anew else draws * members)
            # Not the linear loss: of unequal draws the mean logits follow the most confident.
            margin = losses_of_rule(defense.rule)[1]
            smooth = replace(pgd, draws=draws, objective=margin, momentum=AGGMO)
            return Budgeted(smooth, self.passes)
        parts = self._shares(kind, defense, classes)
        views: list[Callable[[Attack], Attack]] = [lambda attack: attack] * len(parts)
        if kind == "transformed":
            views = [partial(OnDifferentiable, straight_through=True)] * len(parts)
            known = [one.differentiable for one in defense.transforms.values()]
            # The identity's gradient may lead members away that have their own.
            if len(parts) > 1 and any(known) and not all(known):
                exact = replace(self._apgd(defense), early_stop=False)
                parts = (*((2 / 3 * share, attack) for share, attack in parts), (1 / 3, exact))
                views.append(OnDifferentiable)
        free = self.passes - members * len(parts)  # Strongest evaluates each
        count = PassCount(defense, torch.empty(0), classes)
        if any(int(share * free) < attack.least(count) for share, attack in parts):
            parts, free = ((1.0, parts[0][1]),), self.passes - members  # too few for all of them
        if free < (least := parts[0][1].least(count)):
            raise ValueError(
                f"Auto needs {least + members} passes for {members} networks, and has {self.passes}"
            )
        given = (Budgeted(attack, max(int(share * free), 1)) for share, attack in parts)
        return Strongest(tuple(view(attack) for view, attack in zip(views, given, strict=False)))

    def _apgd(self, defense: Defense) -> APGD:
        """Return APGD on the margin, or in l1 on cross-entropy, which leaves fewer images there."""
        loss, margin = losses_of_rule(defense.rule, len(defense.weights))
        return APGD(self.threat, objective=loss if self.threat.p == 1 else margin)

    def _pgd(self, defense: Defense, passes: int, networks: int) -> PGD:
        """Return PGD with a step size by which as many steps as fit lead across the ball."""
        steps = max((passes // networks - 2) // 2, 1)  # but those to find out classes and the best
        step_size = step_across(self.threat.eps, steps, 10)
        return PGD(self.threat, 1, step_size, backward=attack_gradients(defense))

    def _shares(
        self, kind: SuiteKind, defense: Defense, classes: int
    ) -> tuple[tuple[float, Attack], ...]:
        """Return the attacks on fixed classifiers with their shares of the passes."""
        margin, several = self._apgd(defense), self.passes >= PARTS_FROM * len(defense.weights)
        if kind == "transformed" and _draws(defense):
            # Step sizes that follow a noisy objective may shrink too soon: PGD keeps its own.
            pgd = self._pgd(defense, self.passes // (1 + several), len(defense.weights))
            pgd = replace(pgd, objective=losses_of_rule(defense.rule, len(defense.weights))[0])
            whole = replace(margin, early_stop=False)  # one draw that is wrong is no proof
            return ((0.5, pgd), (0.5, whole)) if several else ((1.0, pgd),)
        if kind == "transformed":
            kind = "randomized" if defense.rule is random_member else "ensemble"
        if kind == "randomized":
            count = PassCount(defense, torch.empty(0), classes)
            if LatticeClimber(self.threat, FEWEST_STEPS).cost(count) <= 0.75 * self.passes:
                return (0.25, margin), (0.75, LatticeClimber(self.threat))
            if self.threat.p == 1:
                return ((1.0, margin),)
            # With fewer steps for each set of many members ARC is the stronger one.
            arc = ARC(self.threat, 1, self.threat.eps / 4, neighbours=4, early_stop=True)
            return (0.5, margin), (0.5, arc)
        if kind == "ensemble" and several:
            losses = losses_of_rule(defense.rule)
            return tuple((0.5, APGD(self.threat, objective=loss)) for loss in losses)
        if kind == "ensemble" or classes < 4 or self.passes < TARGETS_FROM * len(defense.weights):
            return ((1.0, margin),)
        return (0.25, margin), (0.75, APGD(self.threat, targets=9))


def usual_passes(defense: Defense, threat: Threat) -> int:
    """Return passes that are enough for a search on each network of an ensemble."""
    fixed = suite_kind(defense) in ("ensemble", "randomized", "transformed")
    # In l1 most starts of a run miss an image that another one fools.
    return (2000 if threat.p == 1 else 1000) * (len(defense.weights) if fixed else 1)


def check_threat(threat: Threat) -> None:
    """Raise ValueError unless all attacks of a suite support the threat."""
    if threat.p not in (1, 2, float("inf")) or threat.relative or not threat.eps > 0:
        raise ValueError(f"the suite needs linf, l2 or l1 and eps > 0 in pixels, got {threat}")


def surrogate_for(defense: Defense) -> SurrogateTransforms | None:
    """Return a backward pass for random transforms that have no gradient; None without any."""
    parts = random_transforms_in(defense)
    transforms = [transform for part in parts for transform in part.transforms.values()]
    exact = any(part.gradients == "exact" for part in parts)
    if not exact or all(transform.differentiable for transform in transforms):
        return None
    return SurrogateTransforms(shared_order=False, gradients="straight_through")


def attack_gradients(defense: Defense) -> SurrogateTransforms | None:
    """Return the backward pass of attacks: a transform's own gradient wherever it has one.

    A defense may declare the identity for all of them, which hides its gradients.
    """
    for part in random_transforms_in(defense):
        declared = part.gradients in ("identity", "bpda")
        if declared and any(kind.differentiable for kind in part.transforms.values()):
            return SurrogateTransforms(shared_order=False, gradients="straight_through")
    return surrogate_for(defense)


def _draws(defense: Defense) -> bool:
    """Return whether a transformation in front of a member is random."""
    try:
        return not defense.classifiers
    except TypeError:
        return True


def step_across(eps: float, steps: int, fraction: int) -> float:
    """Return a fraction of the radius, or more if the steps would not lead across the ball."""
    return max(eps / fraction, 2.5 * eps / steps, TINY)  # no step has the length 0
