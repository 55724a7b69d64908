"""Search for the attack that a defense calls for: what to climb, and through which slopes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_rob.attacks.active_set import positions
from lightning_rob.attacks.apgd import APGD
from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.decorators import AttackDecorator, Budgeted
from lightning_rob.attacks.few_pixels import FewPixels
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.attacks.inspection import Inspection, lacks_gradient
from lightning_rob.attacks.members import Best, Strongest
from lightning_rob.attacks.pgd import PGD
from lightning_rob.attacks.square import Square
from lightning_rob.attacks.surrogate import SurrogateGradient
from lightning_rob.attacks.trials import (
    DRAWS,
    MORE_DRAWS,
    TARGETS,
    AutoResult,
    Judged,
    Trials,
    changed,
    is_few,
)
from lightning_rob.defenses import Defense, Single
from lightning_rob.defenses.per_image import restricted_to
from lightning_rob.objectives import (
    expected_probability_margin,
    losses_of_rule,
    without_scale,
)
from lightning_rob.randomness import Generator, own_streams, seed_of
from lightning_rob.rules import random_member
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import Threat

IMAGES = 24  # that still stand, on which candidates are compared
PROBED = 16  # images of which a forward pass is looked at
SHARES = (0.15, 0.25)  # of the passes, for all candidates and for variants of the best
OF_RANDOM = (0.05, 0.35, 0.2)  # for the opening, candidates and variants where steps cost more
LEARNING = 0.02  # share of the passes from which a network learns what lies before a part
COPIES, NOISE = 6, 0.3  # noisy copies for each step, and their noise as a share of the radius
PAIRS = 5  # of opposite points, where the gradient is estimated from predictions
STUCK = 0.8  # share of the images left from which attacks are tried that cost more
LOCAL = 0.5  # of the passes for the winners, for a search without slopes from their images
MOST_LOCAL = 0.7  # of them where few pixels win, in few passes
VIEWS = 2  # surrogates with which few pixels are changed by one length
BISECTIONS = 9  # to find what change of each pixel crosses a step
NO_GRADIENT = "no gradient leads to the images"
LOOKING_FROM = 30  # passes of an image and network from which it pays to look for what hides
WINDOW = 0.2  # share of the image in its first windows


@dataclass(frozen=True)
class Unmasked(AttackDecorator):
    """Give an attack a number of passes, and where gradients are masked, those of a surrogate.

    For attacks inside of others, as in `GMSA`, where no image may leave the batch. A forward pass
    shows what hides gradients, as in `Auto`. Where something does, a trial of a third of the passes
    compares the surrogate gradients that this calls for, and the best one gets the others. Where
    logits shrink as the margin grows, a loss without scale takes the place of the objective.

    Args:
        attack: a gradient attack on any objective whose passes are known before it runs.
        passes: the largest number of forward and backward passes an image.
    """

    batch_dependent: ClassVar[bool] = True
    passes: int

    def __post_init__(self) -> None:
        at_least(1, passes=self.passes)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        plain = Budgeted(self.attack, self.passes)
        if self.passes < LOOKING_FROM * len(defense.weights):
            return plain(defense, x, y, generator)
        classes = PassCount(defense, x).classes
        passes = self.passes - len(defense.weights)  # that one image costs, to know the classes
        search = Search(self.threat, defense, x, y, generator, classes, passes, lambda _: plain)
        return search.unmasked(self.attack)


class Search:
    """Successive halving over surrogate gradients and objectives, on images that still stand.

    Args:
        defense: the defense inside `attacking`.
        classes: their number.
        passes: the largest number of passes of an image.
        plan: function that makes the attacks for the kind of defense, for a number of passes. They
            take the place of the winners where several networks hide nothing.
        drawn: whether the defense draws its classifiers.
    """

    def __init__(
        self,
        threat: Threat,
        defense: Defense,
        x: Tensor,
        y: Tensor,
        generator: Generator,
        classes: int,
        passes: int,
        plan: Callable[[int], Attack],
        drawn: bool = False,
    ) -> None:
        self.threat, self.defense, self.classes = threat, defense, classes
        self.passes, self.plan = passes, plan
        self.x, self.y, self.generator = x, y, generator
        self.at = x  # where forward passes are looked at
        # Noise of its own, so that the attack that is found draws the same when it runs alone.
        self.seed = int(torch.randint(2**62, ())) if generator is None else seed_of(generator)
        self.networks, self.drawn = len(defense.weights), drawn
        self.cross_entropy, self.margin = losses_of_rule(defense.rule, self.networks)
        self.relative = without_scale(classes)
        self.look = Inspection(threat, defense, x, y, self.margin, self.seed)
        self.trials = Trials(self.look, generator, classes, passes, drawn)
        self.rugged = self.shrinking = False
        self.estimated: SurrogateGradient | None = None  # by predictions alone

    def run(self, first: Attack, opening: int) -> AutoResult:
        """Attack all images by `first`, within `opening` passes, and by what is found."""
        probed = positions(self.x)[:PROBED]
        views = self._views(probed)
        self.shrinking = self.look.is_shrinking(views[0], probed)
        if self.drawn and len(views) == 1 and not self.shrinking:  # nothing is hidden
            return self._planned()
        shares: list[float] = [*SHARES]
        drawn = self.look.random and (self.drawn or isinstance(self.defense, Single))
        if drawn:
            start, *shares = OF_RANDOM
            opening = int(start * self.passes)
        if drawn or self.look.together:  # no image may leave a batch on which the others depend
            first = self.trials.within(views[0], opening)
        best = self._opened(first)
        if best is None:
            opening = 2 * self.networks
            views += [view for view in self.look.entries if view not in views]
        x_adv = self.x if best is None else best.x_adv
        right = self.trials.right(x_adv, positions(x_adv)) if best is None else best.right
        self.trials.note("first", first, right, opening + self.trials.judging)
        if not self.look.one_attack and self.look.varies(x_adv[:PROBED], positions(x_adv)[:PROBED]):
            self.look.random, self.at = True, x_adv  # noise that clean images do not show
            self.trials.restore()
            return self.run(first, opening)
        standing = (right > 0).nonzero()[:, 0]
        if not len(standing):
            return self._found(x_adv, first)
        rows = positions(x_adv) if self.look.together else standing[:IMAGES]
        winners = self._searched(views, rows, shares)
        return self._finished(first, best, winners)

    def _planned(self) -> AutoResult:
        """Attack all images by the attack for their defense, or by Square without a gradient."""
        passes = self.trials.left
        attack = self.plan(passes)
        try:
            x_adv, right = self.trials.alone(attack)
        except RuntimeError as error:
            if not lacks_gradient(error):
                raise
            self.look.findings.append(NO_GRADIENT)
            attack = Budgeted(Square(self.threat), passes)
            x_adv, right = self.trials.alone(attack)
        self.trials.note("first", attack, right, passes)
        return self._found(x_adv, attack)

    def _opened(self, first: Attack) -> Best | None:
        """Return the images of the first attack; None if no gradient leads to them."""
        x = self.x
        best = Best(x.clone(), x.new_full((len(x),), torch.inf))
        try:
            if self.look.one_attack:
                best.x_adv, best.right = self.trials.alone(first)
            else:
                best.improve(first, 0, self.defense, x, self.y, self.generator)
        except RuntimeError as error:  # a surrogate may have a gradient
            if not lacks_gradient(error):
                raise
            self.trials.restore()  # for what is found runs without this attack
            self.look.findings.append(NO_GRADIENT)
            self.look.blocked = True
            return None
        return best

    def _searched(
        self, views: list[SurrogateGradient], rows: Tensor, shares: list[float]
    ) -> list[tuple[float, Attack]]:
        """Return the winners with their shares; none where several networks hide nothing."""
        several = self.networks > 1 and not self.look.one_attack
        if several and not self.look.findings and not self.look.is_rugged(views[0], rows[:PROBED]):
            return []
        judged = self._judged(views, rows, shares)
        if several and judged and not self.look.blocked and not self.shrinking:
            found = judged[0].attack
            if hasattr(found, "slopes") and replace(found, attack=views[0].attack) == views[0]:
                return []
        return self._winners(judged)[: 1 if self.look.one_attack else None]

    def _finished(
        self, first: Attack, best: Best | None, winners: list[tuple[float, Attack]]
    ) -> AutoResult:
        """Attack the images that stand by the winners; `best` is of the first attack, if it ran."""
        free = self.trials.left - max(len(winners), 1) * self.trials.judging
        # Slopes that say little lead into the neighbourhood of an image that fools, and no further.
        entered = self.networks > 1 and any(getattr(one, "enter", ()) for _, one in winners)
        rough = self.rugged and self._scored and not self.look.one_attack and not entered
        few = any(is_few(attack) for _, attack in winners)
        local = int((MOST_LOCAL if few else LOCAL) * free) if rough else 0
        free -= local
        finals = self.trials.shared(winners, free)
        if not winners:  # all losses of the rule of several networks are better than one of them
            finals = [(self.plan(free), free)]
        if self.look.one_attack and finals:
            final, given = finals[0]
            try:
                x_adv, right = self.trials.alone(final)
            except RuntimeError as problem:
                if best is None or not lacks_gradient(problem):
                    raise
                self.trials.note("winner", final, best.right, given, str(problem))
                return self._found(best.x_adv, first)
            self.trials.note("winner", final, right, given)
            if best is None or float(right.mean()) <= float(best.right.mean()):
                return self._found(x_adv, final)
            return self._found(best.x_adv, first)
        attacks = [] if best is None else [first]
        best = best or Best(self.x.clone(), self.x.new_full((len(self.x),), torch.inf))
        for final, given in finals:
            error = ""
            try:
                best.improve(final, len(attacks), self.defense, self.x, self.y, self.generator)
                attacks.append(final)
            except RuntimeError as problem:  # none of these images may have a gradient
                if not lacks_gradient(problem):
                    raise
                error = str(problem)
            self.trials.note("winner", final, best.right, given, error)
        found = Strongest(tuple(attacks)) if len(attacks) > 1 else [*attacks, first][0]
        return self._from_there(found, best, local)

    def _judged(
        self, views: list[SurrogateGradient], rows: Tensor, shares: list[float]
    ) -> list[Judged]:
        """Try views, and variants of the best ones unless they fool all images; best first."""
        judged = self.trials.round(
            "1", list(self._candidates(views)), rows, int(shares[0] * self.passes)
        )
        judged.sort(key=Judged.order)
        if not judged or judged[0].left > 0:
            climbs = bool(judged) and (self.networks == 1 or not self.look.random)
            self.rugged = climbs and self.look.is_rugged(judged[0].attack, rows[:PROBED])
            if self.rugged:
                self.look.findings.append("slopes that say little of how predictions change")
            variants = list(self._variants(judged, int(LEARNING * self.passes)))
            # Few pixels need few passes, and Square many.
            costly = any(getattr(variant, "stand_in", 0) for variant in variants)
            share = shares[0] if self._few_only and not costly else shares[1]
            judged += self.trials.round("2", variants, rows, int(share * self.passes))
            judged.sort(key=Judged.order)
        return judged

    def _from_there(self, found: Attack, best: Best, passes: int) -> AutoResult:
        """Go on from the best images by Square, if there are passes for it."""
        queries = passes // self.networks - 2
        if queries < 1 or not bool(best.right.any()):
            return self._found(best.x_adv, found)
        square = Square(self.threat, queries, WINDOW, start=found)
        x_adv = square.search(self.defense, self.x, self.y, self.generator, best.x_adv)
        right = self.trials.right(x_adv, positions(x_adv))
        self.trials.note("from there", square, right, passes)
        better = float(right.mean()) < float(best.right.mean())
        return self._found(x_adv, square) if better else self._found(best.x_adv, found)

    @property
    def _steps(self) -> bool:
        """Whether something has no slope in l2 or l1: small changes of all pixels cross no step."""
        return self.look.blocked and self.threat.p < inf

    @property
    def _few_only(self) -> bool:
        """Whether few pixels have to do, but for what is cut off."""
        return self._steps and self.rugged and not self.look.random

    @property
    def _lost(self) -> bool:
        """Whether slopes mislead, and nothing that was recognized says why."""
        return self.rugged and not self.look.blocked

    @property
    def _scored(self) -> bool:
        """Whether Square may search: on images, by scores that are those of the prediction."""
        return self.x.dim() == 4 and self.defense.rule is not random_member

    def _found(self, x_adv: Tensor, attack: Attack) -> AutoResult:
        return AutoResult(x_adv, attack, tuple(self.look.findings), tuple(self.trials.trail))

    def _views(self, rows: Tensor) -> list[SurrogateGradient]:
        """Look at forward passes of a few images; return what their findings call for."""
        x = self.at[rows]
        with restricted_to(self.defense, rows), own_streams(self.seed, x.device):
            self.look.random |= self.drawn
            if not self.look.random:
                self.look.find_noise(x)
            elif not self.drawn:
                self.look.findings = ["noise of its own"]
            random, together = self.look.random, self.look.together
            margin: Attack = APGD(self.threat, objective=self.margin, early_stop=not together)
            if random:
                # Step sizes that follow a noisy objective shrink too soon; momentum averages draws.
                step = PGD(self.threat, 1, self.threat.eps, self.margin, self.trials.draws)
                margin = replace(step, momentum=(0.9,))
            if random and self.threat.p == 1:  # where PGD is weak, with noise too
                runs = APGD(self.threat, objective=self.cross_entropy, draws=self.trials.draws)
                margin = replace(runs, early_stop=False)
            base = SurrogateGradient(margin, draws_anew=random, together=together)
            if self.look.one_attack and self.networks == 1:
                step = PGD(self.threat, 1, self.threat.eps, self.margin, 1, momentum=(0.9,))
                noisy = replace(self._noisy(base), copies=0, pairs=PAIRS)
                self.estimated = replace(noisy, attack=step, draws_anew=True)
            return self.look.views_through(base, x)

    def unmasked(self, attack: Attack) -> Tensor:
        """Run an attack through the surrogate by which a trial of it raises the margin most."""
        self.look.together = True
        rows, tried = positions(self.x)[:IMAGES], []
        with restricted_to(self.defense, rows), own_streams(self.seed, self.x.device):
            base = SurrogateGradient(attack, together=True)
            views = self.look.views_through(base, self.x[rows])
        climbs = hasattr(attack, "objective")
        self.shrinking = climbs and self.look.is_shrinking(views[0], rows[:PROBED])
        margin = ObjectiveGradient(self.relative if self.shrinking else self.margin)
        all_of_it = max(views, key=lambda view: (len(view.slopes), len(view.stages)))
        best = all_of_it if self.look.blocked or all_of_it.stages else views[0]
        if self.shrinking:
            best = changed(best, objective=self.relative)
            views += [changed(view, objective=self.relative) for view in views]
        trials = self.trials
        judging = 2 * trials.judging  # a prediction and a margin
        share = self.passes // (3 * len(views)) - judging
        if share < trials.least(attack):
            views = [view for view in views if not view.held]
            share = self.passes // (3 * len(views)) - judging
        if len(views) > 1 and share >= attack.least(trials.count):
            for view in views:
                try:
                    x_adv, _ = trials.attacked(trials.within(view, share), rows)
                except RuntimeError as error:
                    if not lacks_gradient(error):
                        raise
                    continue
                with restricted_to(self.defense, rows):
                    value = margin.value(self.defense, x_adv, self.y[rows], self.look.noise())
                tried.append((float(value.nan_to_num().mean()), view))
            trials.tried += (share + judging) * len(views)
            best = max(tried, key=lambda one: one[0], default=(0.0, views[0]))[1]
        trials.restore()
        chosen = best if best.slopes or best.stages or best.enter else best.attack
        # Called, not only run: in parts where memory or a CPU's caches call for them.
        return trials.within(chosen, trials.left)(self.defense, self.x, self.y, self.generator)

    def _candidates(self, views: list[SurrogateGradient]) -> Iterator[SurrogateGradient]:
        yield from views
        yield changed(views[0], objective=self.cross_entropy)
        if self.shrinking:
            yield changed(views[0], objective=self.relative)

    def _noisy(self, view: SurrogateGradient) -> SurrogateGradient:
        # In l1 the radius is spent on few pixels: noise is measured by what each of them moves.
        low, high = self.threat.bounds
        length = min(self.threat.eps, (high - low) / 3) if self.threat.p == 1 else self.threat.eps
        return replace(view, noise=NOISE * length, copies=COPIES)

    def _variants(self, judged: list[Judged], learning: int) -> Iterator[Attack]:
        """Yield stand-ins and Square where nothing works, and variants of the best."""
        if self._steps:
            views = [one.attack for one in judged if one.attack.slopes or one.attack.enter]
            yield from self._of_few(views)
        stuck = not judged or judged[0].left > STUCK
        if stuck and learning and self.look.blocked and (self.look.cut or not self._few_only):
            yield from (replace(view, stand_in=learning) for view in self.look.learners)
        if self._few_only:
            return
        if stuck and self.look.ways:  # more steps than in the first round
            yield from self.look.ways
        elif judged:
            yield from self._of_best([one.attack for one in judged])
        if self.estimated and (stuck or self._lost):
            yield self.estimated
        if stuck and self._scored and not (self.look.random or self.look.together):
            yield Square(self.threat)

    def _of_few(self, views: list[SurrogateGradient]) -> Iterator[Attack]:
        """Yield changes of few pixels across the steps, measured where there is no noise."""
        few = FewPixels(self.threat, objective=self.margin)
        if self.look.random:
            yield from (
                replace(view, attack=replace(few, draws=self.trials.draws)) for view in views[:1]
            )
            return
        measured = replace(few, bisections=BISECTIONS)
        yield from (replace(entry, attack=measured) for entry in self.look.entries[:1])
        yield from dict.fromkeys(replace(view, attack=few) for view in views[:VIEWS])

    def _of_best(self, ranked: list[Any]) -> Iterator[Attack]:
        """Yield the best with other objectives, smoothed where slopes call for it."""
        best, *others = ranked
        objectives = [self.cross_entropy]
        # These are means over networks, which say little of a rule with one prediction.
        each = self.networks == 1 or self.defense.rule is random_member
        if each and not self.look.random:
            objectives += [expected_probability_margin]
        if self.shrinking or (each and not self.look.random and self.classes > 2):
            objectives += [self.relative]
        losses = [o for o in objectives if o is not best.attack.objective]
        tried = [changed(best, objective=objective) for objective in losses]
        if self.look.random and self._lost:
            yield from (entry for entry in self.look.entries if entry not in ranked)
            return
        yield from self.look.ways[1:]
        if getattr(best, "held", ()):
            yield from tried[:1]
            yield from [view for view in others if not getattr(view, "held", ())][:1]
            return
        yield from tried
        if self.look.random:  # its own noise smooths already
            yield changed(best, draws=MORE_DRAWS * self.trials.draws // DRAWS)
            return
        yield from (view for view in others[:1] if view not in tried)
        if self.rugged:
            yield from (entry for entry in self.look.entries if entry not in ranked)
        for view in (best, *others[:1]) if self.rugged and self.networks == 1 else ():
            yield self._noisy(view)  # too many passes for several networks

    def _winners(self, judged: list[Judged]) -> list[tuple[float, Attack]]:
        """Return attacks for all images that stand, with their shares of the passes."""
        if not judged:  # nothing could run
            return [(1.0, Square(self.threat))]
        best = judged[0]
        if self.look.random and is_few(best.attack):
            return [(1.0, changed(best.attack, draws=MORE_DRAWS * self.trials.draws // DRAWS))]
        if self.networks > 1 and not self.look.random and hasattr(best.attack, "slopes"):
            # Losses of their rule, each better at times.
            losses = (self.cross_entropy, self.relative if self.shrinking else self.margin)
            return [(1.0, changed(best.attack, objective=loss)) for loss in losses]
        follows = not getattr(best.attack, "copies", 1)  # a gradient, at the image itself
        # Of several networks, losses of their rule say more than a loss towards a class.
        towards = follows and self.classes > 3 and self.networks == 1
        towards = towards and not self.look.random and self.threat.p != 1
        towards = towards and hasattr(best.attack.attack, "targets")
        targeted = changed(best.attack, targets=TARGETS) if towards else None
        if best.left == 1 and targeted:
            return [(1.0, targeted)]
        # Most passes where decisions are held, whose steps cost more.
        winners = [(3.0 if getattr(best.attack, "held", ()) else 1.0, best.attack)]
        joint = min(judged, key=lambda one: float(torch.minimum(one.right, best.right).mean()))
        if float(torch.minimum(joint.right, best.right).mean()) < best.left:
            winners.append((0.75, joint.attack))
        return [*winners, (1.5, targeted)] if targeted else winners
