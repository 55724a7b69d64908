"""The active test: does an attack find adversarial images that exist by construction?

Zimmermann, Brendel, Tramèr and Carlini, "Increasing confidence in adversarial robustness
evaluations", NeurIPS 2022.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rob.attacks import PGD, Attack, RandomCorners, WithBackward, attacking, evaluating
from lightning_rob.attacks.active_set import positions
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.folding import FoldingError
from lightning_rob.attacks.readouts import (
    Layer,
    Place,
    Readouts,
    directions,
    features,
    networks,
    places,
)
from lightning_rob.attacks.sight import watching
from lightning_rob.comparisons import ROUNDING
from lightning_rob.defenses import Defense, Single
from lightning_rob.defenses.copies import fresh, working_copy
from lightning_rob.evaluation.check_batch import CheckTarget
from lightning_rob.evaluation.findings import Finding
from lightning_rob.evaluation.groups import GROUP_SIZE
from lightning_rob.evaluation.protocol import predictions
from lightning_rob.metrics import clopper_pearson, robust_accuracy
from lightning_rob.objectives import linear
from lightning_rob.randomness import Streams, derive_seed, own_streams
from lightning_rob.rules import rejected_share

# An attack passes from this rate; a test says little where random search has more than that.
PASSED, TELLING = 0.95, 0.1
SHARE = 0.95  # radius of the inner points, in units of eps
CLOSE, HALFWAY = 0.95, 0.5  # places of the threshold; halfway where confidence decides rejection
# Of few features the planted image stands out only among many points.
WIDE, FEWEST_POINTS, MOST_POINTS = 64, 9, 48
MOST_TRIES, USUAL_TRIES = 300, 50  # of random search; usual where passes are not known before
INFERENCES = 3  # predictions of each image of a random defense


@dataclass(frozen=True)
class Power:
    """How many of the adversarial images that exist by construction an attack finds.

    Args:
        rate: share of images on which the attack finds the planted image, or one as good.
        interval: its 95 % interval (Clopper and Pearson).
        random_rate: share on which random search does, in one point for two passes of the attack.
        passed: whether the rate is 95 % or more; None where the test says nothing.
        images: number of images with a planted image.
        left_out: number of images without, as no readout separates it.
        why: reason why the test says nothing; else empty.
        inverted: of a defense that rejects by a class, the test in which it accepts exactly what
            it rejects otherwise: an attack that does not look at rejection fails it.
    """

    rate: float
    interval: tuple[float, float]
    random_rate: float
    passed: bool | None
    images: int
    left_out: int
    why: str = ""
    inverted: "Power | None" = None

    @classmethod
    def of(cls, counts: Tensor, why: str = "") -> "Power":
        """Return the outcome of the sums of `counted`; `why` says why nothing was tested."""
        (n, left_out, total, lucky), *more = counts.tolist()
        inverted = cls.of(counts[1:]) if more else None
        n, left_out = round(n), round(left_out)
        if not n:
            none = "no readout separates a planted image from the inner points"
            return cls(math.nan, (0.0, 1.0), math.nan, None, 0, left_out, why or none, inverted)
        # Images of a randomized ensemble count by their probability: rounded to the safe side.
        low, high = math.floor(total + ROUNDING), math.ceil(total - ROUNDING)
        interval = clopper_pearson(low, n)[0], clopper_pearson(high, n)[1]
        passed: bool | None = total / n >= PASSED
        if passed and lucky / n > TELLING:
            passed, why = None, "the test says nothing, for random search finds such images too"
        if passed and inverted:
            passed, why = inverted.passed, inverted.why
        return cls(total / n, interval, lucky / n, passed, n, left_out, why, inverted)

    def __str__(self) -> str:
        """Return the outcome in one line."""
        low, high = self.interval
        failed = "failed" if high < PASSED else "failed, or bad luck: take more images"
        verdict = {True: "passed", False: failed, None: self.why}[self.passed]
        left = f", {self.left_out} left out" if self.left_out else ""
        text = (
            f"finds {100 * self.rate:.3g} % ({100 * low:.3g} … {100 * high:.3g}) of the "
            "adversarial images that exist by construction, random search "
            f"{100 * self.random_rate:.3g} %, {self.images} images{left}: {verdict}"
        )
        text = text if self.images else self.why
        return f"{text}; inverted: {self.inverted}" if self.inverted else text

    def record(self) -> dict[str, Any]:
        """Return the field `power` of a record."""
        return {**asdict(self), "text": str(self)}


def power(
    model: nn.Module,
    attack: Attack,
    x: Tensor,
    y: Tensor,
    *,
    index: Tensor | None = None,
    seed: int = 0,
    points: int | None = None,
) -> Power:
    """Test whether an attack finds adversarial images that exist by construction.

    In place of the last linear layer of each network, or behind its logits, stands a readout for
    each image. It gives the label to the image and to points inside the ball, and another class to
    one point of the surface, the planted image. The same attack with the same arguments has to
    find this image, or one as good. An attack that fails is too weak for the defense, and its
    accuracy says little. One that passes may still be too weak, as other images may be harder to
    find. The test costs about as much again as an attack of 40 passes.

    Args:
        model: a defense, or a network; it is not changed.
        attack: the attack as it is to be evaluated.
        x: [N, C, H, W] images in [0, 1].
        y: [N] their labels.
        index: [N] the images' indices, by which noise is keyed; None for the positions.
        seed: seed of all noise.
        points: number of inner points, 9 to 48 by default. The more, the harder the planted image
            is to find: take hundreds where random search finds it too.

    Returns:
        The rates. A defense that adapts, or that does not name its networks, cannot be tested:
        `Power.why` says so.
    """
    defense = model if isinstance(model, Defense) else Single(model)
    index = positions(x) if index is None else index
    if why := not_applicable(defense, attack):
        return Power.of(torch.zeros(1, 4), why)
    groups = zip(*(torch.split(part, GROUP_SIZE) for part in (x, y, index)), strict=True)
    test = partial(found_by, attack, defense, points=points)
    return Power.of(counted(torch.cat([test(*g, seed) for g in groups])))


def counted(found: Tensor) -> Tensor:
    """Sum images [N, 2] or [N, 4] of `found_by`: tested, left out, found, found by random search.

    Returns:
        [1, 4], or with the inverted test [2, 4].
    """
    pairs = found.double().reshape(len(found), -1, 2)
    left_out = pairs[:, :, 0].isnan()
    return torch.stack([(~left_out).sum(0), left_out.sum(0), *pairs.nansum(0).T], 1)


def finding_of(powers: Mapping[str, Power]) -> Finding:
    """Return the finding about the power of attacks by name."""
    failed = {name: one for name, one in powers.items() if one.passed is False}
    values = {name: one.record() for name, one in powers.items()}
    if not failed:
        unknown = [name for name, one in powers.items() if one.passed is None]
        passed = f"{len(powers) - len(unknown)} of {len(powers)} tested attacks find 95 % or more"
        text = f"{passed} of the adversarial images that exist by construction"
        text += f"; unknown for {', '.join(unknown)}" if unknown else ""
        return Finding("note" if unknown else "fine", f"{text}.", "", values)
    # A good attack may miss 95 % by luck.
    tests = [part for one in failed.values() for part in (one, one.inverted) if part]
    # Without intervals and random search, which stand in the lines of the attacks.
    rates = {name: min(p.rate for p in (one, one.inverted) if p) for name, one in failed.items()}
    found = ", ".join(f"{name} finds {100 * rate:.3g} %" for name, rate in rates.items())
    return Finding(
        "severe" if min(part.interval[1] for part in tests) < PASSED else "warning",
        f"{found} of the adversarial images that exist by construction.",
        "Take more steps or restarts, or the attack made for this kind of defense. Where gradients "
        "mislead, attack without them (Square) or with another backward pass (BPDA).",
        values,
    )


def not_applicable(defense: Defense, attack: Attack) -> str:
    """Return why the test cannot be made; empty if it can."""
    kind, ball = type(defense).__name__, attack.threat
    if defense.transductive:
        return f"not applicable: {kind} adapts to the images, and the readouts would have to adapt"
    if not (ball.eps > 0 and ball.p in (1, 2, math.inf)):
        return f"not applicable: the ball must be of linf, l2 or l1 and above 0, got {ball}"
    try:
        networks(defense)
    except TypeError as error:
        return f"not applicable: {error}"
    return ""


def found_by(
    attack: Attack,
    defense: Defense,
    x: Tensor,
    y: Tensor,
    index: Tensor,
    *keys: int,
    points: int | None = None,
) -> Tensor:
    """Test an attack on one group of images.

    Args:
        *keys: seed of all noise, beside the indices.
        points: number of inner points; None chooses.

    Returns:
        [B, 2] the probability that the attack has found an adversarial image, and that random
        search has; NaN for images that no readout separates. Of a defense that rejects by a class
        [B, 4]: the same of the inverted test.
    """
    trial = _Trial(attack, working_copy(defense), x, y, index, keys, points)
    try:
        return trial.outcome()
    except FoldingError:  # once: the network is not folded a second time
        return trial.outcome()


@dataclass(frozen=True)
class _Trial:
    """The test of one attack on one group of images."""

    attack: Attack
    defense: Defense  # a working copy
    x: Tensor
    y: Tensor
    index: Tensor
    keys: tuple[int, ...]
    points: int | None = None

    def noise(self, *purpose: int) -> Streams:
        """Return a source of randomness, another for each purpose."""
        return Streams.from_index(self.index, *self.keys, *b"power", *purpose)

    @contextmanager
    def undisturbed(self) -> Iterator[Defense]:
        """Yield the defense as attacks see it, with global streams of its own."""
        seed = derive_seed(*self.keys, *self.index.tolist())
        with own_streams(seed, self.x.device), attacking(fresh(self.defense)) as defense:
            yield defense

    def outcome(self) -> Tensor:
        # Two copies for a point: another point teaches more than another draw of the same one.
        draws = 2 if CheckTarget(self.defense).kind == "random" else None
        threat = self.attack.threat
        with self.undisturbed() as defense:
            where = places(defense, self.x, self.noise(0))
            inner = [features(defense, where, self.x, self.noise(1), draws)]
            tries = self.tries(inner[0][0].outputs.shape[-1])
            narrow = min(layer.features.shape[-1] for layer in inner[0]) < WIDE
            points = min(max(tries // 2, FEWEST_POINTS), MOST_POINTS)
            points = self.points or (MOST_POINTS if narrow or draws else points)
            for i in range(1, points):
                point = threat.corner(self.x, self.noise(2, i), SHARE)
                inner.append(features(defense, where, point, self.noise(1, i), draws))
        outcomes = []
        for inverted in (False,) if self.defense.rejects is None else (False, True):
            readouts, sure = self.planted(where, inner, inverted)
            parts = self.attack.strategies(self.defense)
            shares = [share * self.searched(part, readouts) for share, part in parts]
            lucky = self.searched(RandomCorners(threat, tries), readouts)
            found = torch.stack([torch.stack(shares).sum(0), lucky], 1)
            outcomes.append(found.masked_fill(~sure[:, None], torch.nan))
        return torch.cat(outcomes, 1)

    def tries(self, classes: int) -> int:
        """Return the number of points of random search: as many as a gradient attack looks at."""
        try:
            passes = self.attack.cost(PassCount(self.defense, self.x, classes))
        except TypeError:
            return USUAL_TRIES
        return min(max(passes // (2 * len(self.defense.weights)), 1), MOST_TRIES)

    def planted(
        self, where: Sequence[Place], inner: Sequence[Sequence[Layer]], inverted: bool
    ) -> tuple[Readouts, Tensor]:
        """Return readouts, and the images [B] whose planted image is sure to fool the defense."""
        x, y, rejects = self.x, self.y, self.defense.rejects
        corners = [self.attack.threat.corner(x, self.noise(3, i)) for i in range(len(inner) // 3)]
        outer = torch.stack([*corners, self.rejected()] if inverted else corners)
        allowed = torch.ones(outer.shape[:2], dtype=torch.bool, device=x.device)
        with self.undisturbed() as defense, torch.no_grad():
            surface = [features(defense, where, o, self.noise(4, i)) for i, o in enumerate(outer)]
            if defense.may_reject:
                found = torch.stack([defense(o, self.noise(4, i)) for i, o in enumerate(outer)])
                shares = rejected_share(found, rejects, defense.abstains)
                allowed = (shares >= 1 - ROUNDING) if inverted else (shares <= ROUNDING)
            inside, outside = _by_network(inner), _by_network(surface)
            towards, best = directions(inside, outside, allowed)
            planted = outer[best, positions(x)]
            again = features(defense, where, planted, self.noise(5))
        accepted = [k for k in range(inner[0][0].outputs.shape[-1]) if k != rejects]
        close = HALFWAY if self.defense.abstains else CLOSE
        made, sure = [], allowed.any(0)
        for one, points, clean, layer in zip(towards, inside, inner[0], again, strict=True):
            low, high = clean.outputs.mean(0)[:, accepted].aminmax(dim=1)
            readout, separates = one.between(points, layer.features, high - low, close)
            made.append(readout)
            sure = sure & separates
        target = torch.tensor(accepted, device=x.device)
        target = target[(torch.searchsorted(target, y) + 1) % len(accepted)]
        readouts = Readouts(x.flatten(1), y, target, where, made, rejects, inverted)
        # The promise of the readouts counts only where the defense itself keeps it.
        fools, right = self.fooled(readouts, planted), self.fooled(readouts, x)
        return readouts, sure & (fools >= 1 - ROUNDING) & (right <= ROUNDING)

    def rejected(self) -> Tensor:
        """Return images of the balls that PGD drives into rejection: random points seldom are."""

        def rejection(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
            return -linear(logits, weights, torch.full_like(y, self.defense.rejects or 0))

        threat = self.attack.threat
        pgd = PGD(threat, 10, threat.eps / 4, objective=rejection, keep_best=True)
        with self.undisturbed() as defense:
            return pgd.perturb(defense, self.x, self.y, self.noise(6))

    def searched(self, attack: Attack, readouts: Readouts) -> Tensor:
        """Return the probability [B] that an attack on the planted defense has succeeded."""
        with watching(len(self.x), self.x.device):  # without warnings: the rate says it
            attack = WithBackward(attack, readouts)
            x_adv = attack(fresh(self.defense), self.x, self.y, self.noise(7))
        return self.fooled(readouts, x_adv)

    def fooled(self, readouts: Readouts, images: Tensor) -> Tensor:
        """Return the probability [B] that the planted defense accepts images and is wrong."""
        times = 1 if CheckTarget(self.defense).exact else INFERENCES
        with evaluating(fresh(self.defense)) as defense, readouts(defense):
            found = predictions(defense, images, self.noise(8), times)
        right = torch.stack([robust_accuracy(one, self.y) for one in found])
        rejected = rejected_share(found, self.defense.rejects, self.defense.abstains)
        return (1 - right - rejected).mean(0)


def _by_network(points: Sequence[Sequence[Layer]]) -> list[Tensor]:
    """Return the features [n, S, B, F] of n points in each network."""
    return [torch.stack([layer.features for layer in net]) for net in zip(*points, strict=True)]
