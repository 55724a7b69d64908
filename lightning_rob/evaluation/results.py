"""Per-image scores of one evaluation, with accuracies, intervals and comparisons."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_rob.attacks import Attack
from lightning_rob.attacks.nested import walk
from lightning_rob.evaluation.findings import (
    Finding,
    by_severity,
    images_of,
    is_gain,
    many,
    mean,
    percent,
    record,
)
from lightning_rob.evaluation.power import Power, finding_of
from lightning_rob.evaluation.records import Result, measured, threat_model_card
from lightning_rob.evaluation.result_file import write_result_file
from lightning_rob.evaluation.store import KNOWN, PerImageRows
from lightning_rob.evaluation.worst import WORST as WORST
from lightning_rob.evaluation.worst import Worst, worst_case
from lightning_rob.metrics import Paired, clopper_pearson, student
from lightning_rob.metrics.intervals import paired_over_draws
from lightning_rob.runtime.identity import attack_spec
from lightning_rob.tables import CLEAN, table_html, table_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST_BROKEN, MOST_BROKEN = 10, 0.9  # images that one class must take to be suspicious
UNLUCKY = 0.01  # probability by which guessing would be as bad
FEWEST_OF_CLASS = 5  # images of each class: where a class has as many, 0.7 % of samples lack it


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of a defense on clean images and under each attack."""

    attacks: Mapping[str, Attack]  # in the order in which they ran
    rows: PerImageRows  # labels, scores, predictions and sizes of perturbations of N images
    private_draws: int = 1  # defenders that adapted to each perturbed batch
    random: bool = False  # whether the defense predicts at random
    joint: bool = False  # whether predictions depend on the whole batch (transductive defenses)
    stateful: bool = False  # whether the defender keeps its state from round to round
    draws: int = 1  # S, the number of classifiers in each prediction
    seconds: Mapping[str, float] = field(default_factory=dict)  # run time of attacks, here
    details: Mapping[str, Any] = field(default_factory=dict)  # settings, for the records
    noted: tuple[Finding, ...] = ()  # what the checks of the defense found
    power: Mapping[str, Power] = field(default_factory=dict)  # of attacks that were tested

    @property
    def names(self) -> list[str]:
        """The names of the columns: "clean" and the attacks."""
        return [CLEAN, *self.attacks]

    @property
    def index(self) -> Tensor:
        """The images' indices [N], rising."""
        return self.rows.index

    @cached_property
    def scores(self) -> Tensor:
        """The probability of a right prediction [N, 1 + A, R]: clean, then each attack.

        Of a defense that rejects, a rejection is an error on clean images. Under an attack it
        counts as right: the attack succeeds where the defense accepts and is wrong.

        The R columns are independent draws where there are several: inferences of a static
        defense, or private draws of one that adapts, whose inferences share one adapted network.
        """
        return self._by_draw(self.rows.scores)

    @cached_property
    def not_fooled(self) -> Tensor:
        """As `scores`, with rejections counted as right on clean images too."""
        if self.rows.rejected is None:
            return self.scores
        scores = self.scores.clone()
        scores[:, 0] += self._by_draw(self.rows.rejected)[:, 0]
        return scores

    def _by_draw(self, values: Tensor) -> Tensor:
        """Average values [N, 1 + A, R] over the inferences that share one adapted network."""
        if not self.joint:
            return values
        return values.reshape(*values.shape[:2], self.private_draws, -1).mean(3)

    @cached_property
    def worst(self) -> Worst:
        """The scores under the strongest attack; see `worst_case`."""
        return worst_over([self])

    def per_image(self, name: str) -> Tensor:
        """Return the scores [N] under an attack, "clean" or "worst", the mean over draws."""
        if name == WORST:
            return self.worst.scores.mean(1)
        _check_name(name, [*self.names, WORST])
        return self.scores[:, self.names.index(name)].mean(1)

    def accuracy(self, name: str) -> float:
        """Return the accuracy in [0, 1] under an attack, "clean" or "worst"."""
        return self.measurement(name).accuracy

    def interval(self, name: str) -> tuple[float, float]:
        """Return the 95 % interval of the accuracy; `covers` says which randomness it holds."""
        return self.measurement(name).interval

    def rejected(self, name: str) -> float:
        """Return the share [0, 1] of predictions that are rejections, clean or under an attack."""
        _check_name(name, self.names)
        if self.rows.rejected is None:
            return 0.0
        return float(self.rows.rejected[:, self.names.index(name)].double().mean())

    def accepted_wrong(self, name: str) -> float:
        """Return the share in [0, 1] of predictions that are accepted and wrong.

        Under an attack, and under "worst" over all attacks and no attack, it is its success.
        """
        if name == WORST:
            return 1 - float(worst_over([self], not_fooled=True).scores.mean())
        rejected = self.rejected(CLEAN) if name == CLEAN else 0.0  # elsewhere the scores hold it
        return 1 - float(self.per_image(name).double().mean()) - rejected

    def blind(self, name: str) -> float:
        """Return the share of images without a useful gradient under an attack, or under all.

        The images are right without an attack, and the attack asked for their gradients. Where each
        was exactly zero or not finite the attack is blind, and its score says nothing.

        Under "worst" each attack by gradient is blind on them. NaN if it asks for no gradients.
        """
        return mean(self._blind(name))

    def _blind(self, name: str) -> Tensor:
        """Which images [N] that are right without an attack it is blind on; NaN for the others."""
        if name != WORST:
            _check_name(name, list(self.attacks))
        if self.rows.blind is None:
            return torch.full_like(self.per_image(CLEAN), torch.nan)
        places = [self.names.index(n) for n in (self.attacks if name == WORST else [name])]
        # NaN, of an attack without gradients, becomes infinite: such an attack decides nothing.
        found = self.rows.blind[:, places].nan_to_num(torch.inf).amin(1)
        unknown = found.isinf() | ~(self.per_image(CLEAN) > 0)
        return found.masked_fill(unknown, torch.nan)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The findings about the accuracies, the most severe first."""
        found = [*self.noted, *self._below_guessing()]
        for name in self.attacks:
            found += self._of_attack(name)
        return tuple(by_severity(found))

    def _below_guessing(self) -> Iterator[Finding]:
        """Find that clean images are right less often than by guessing among the seen classes."""
        scores, predicted = self.not_fooled[:, 0].mean(1), self.rows.predictions[:, 0]
        classes = len({*self.rows.label.tolist(), *predicted.tolist()})
        right = min(math.ceil(float(scores.sum())), len(scores))
        _, high = clopper_pearson(right, len(scores), 1 - 2 * UNLUCKY)
        if classes > 1 and high < 1 / classes:
            yield Finding(
                "severe",
                f"{percent(scores)} of the clean images are right, where guessing among the "
                f"{classes} classes of labels and predictions gets {100 / classes:.3g} %.",
                "Compare the order of the labels with that of the network's outputs, and the "
                "images with those that it was trained on.",
                name="below_guessing",
            )

    def _of_attack(self, name: str) -> Iterator[Finding]:
        """Find an attack that is blind, too weak, climbs wrongly, or reaches only rejections."""
        if name in self.power and self.power[name].passed is False:
            weak = finding_of({name: self.power[name]})
            yield replace(weak, values=weak.values | {"attack": name}, name="power")
        blind = self._blind(name)
        if many(blind):
            yield Finding(
                "severe",
                f"{name} had no gradient to follow on {images_of(blind)} that are right without an "
                "attack: each was exactly zero or not finite. The accuracy says nothing of them, "
                "unless a part of the attack needs no gradient, as in AutoAttack.",
                'Attack by evaluate(net, "auto", …) or `lightning-rob attack`, which search for a '
                "way around what hides gradients, and without them, by Square(queries=5000); the "
                "lowest accuracy counts. `lightning-rob audit` says why gradients are missing.",
                {"attack": name, "blind": mean(blind)},
                "blind",
            )
        clean, attacked = self.not_fooled[:, 0].mean(1), self.per_image(name)
        if is_gain(attacked - clean, exact=not (self.random or self.joint)):
            yield Finding(
                "severe",
                f"The accuracy under {name}, {percent(attacked)}, is above that on clean images, "
                f"{percent(clean)}: the attack climbs the wrong way.",
                "Look for a backward pass that is not the forward's: `lightning-rob audit` "
                "compares it with the slope of the predictions.",
                {"attack": name},
                "above_clean",
            )
        # An attack on a detector of attacks often reaches its class for rejections only.
        broken = (clean > 0.5) & (attacked < 0.5)
        classes = self.rows.predictions[:, self.names.index(name)][broken]
        if len(classes) < FEWEST_BROKEN or self.rows.rejected is not None:
            return
        most = int(classes.mode().values)
        share = float((classes == most).double().mean())
        # A sample of this size should hold every class; classes count from 0 on.
        seen = {*self.rows.label.tolist()}
        others = max(*seen, most)  # without the one that is lacked
        lacked = most not in seen and len(seen) > 1 and len(seen) >= 0.9 * others
        enough = len(self.rows.label) >= FEWEST_OF_CLASS * len(seen)
        if share >= MOST_BROKEN and most >= 0 and lacked and enough:
            yield Finding(
                "warning",
                f"{100 * share:.3g} % of the {len(classes)} images that {name} broke are predicted "
                f"as class {most}, which is no image's label. Innocent causes are labels in "
                "another order than the network's, a sample without images of this class, and an "
                "untrained network.",
                f"Look at the labels first. Only if class {most} means that the image is rejected, "
                f"give the network as Single(net, rejects={most}): attacks then look for images "
                "that it accepts and gets wrong.",
                {"attack": name, "class": most},
                "only_one_class",
            )

    def compare(self, first: str, second: str) -> Paired:
        """Compare two columns image by image: the second minus the first; see `metrics.paired`.

        Two results: `paired(a.per_image("pgd"), b.per_image("pgd"))` of `lightning_rob.metrics`.
        """
        return paired_over_draws(self._by_defender(first), self._by_defender(second))

    def _by_defender(self, name: str) -> Tensor:
        """Return the scores [N, R] of R private draws, or their mean as one column."""
        if self.private_draws == 1 or name == WORST:
            return self.per_image(name)[:, None]
        _check_name(name, self.names)
        return self.scores[:, self.names.index(name)]

    def resubmitted(self, name: str, times: int) -> Result:
        """Return the accuracy against an attacker who may submit each image several times.

        An image counts as right if all predictions of it are right: a randomized defense that is
        right with probability p survives n submissions with probability p^n, not p. It is exact
        for a randomized ensemble, and else the unbiased estimate from R >= n inferences.

        Raises:
            ValueError: fewer inferences than submissions or scores between right and wrong; or a
                defense that adapts, whose predictions of a round are not independent.
        """
        _check_name(name, self.names)
        scores = self.scores[:, self.names.index(name)]
        right, inferences = scores.sum(1), scores.shape[1]
        certain = bool(torch.isin(scores, torch.tensor([0.0, 1.0]).to(scores)).all())
        averaged = self.details.get("repeats", 1) > 1 and not certain
        if self.joint or averaged or (self.random and not (certain and inferences >= times)):
            raise ValueError(
                f"{times} submissions need a defense that does not adapt and, where it predicts at "
                f"random, inferences={times} or more and repeats=1"
            )
        if not self.random:
            each = scores[:, 0] ** times
        else:  # the share of choices of n inferences that are all right
            factors = [(right - i).clamp(min=0) / (inferences - i) for i in range(times)]
            each = torch.stack(factors).prod(0)
        details = {"submissions": times, "interval_covers": self.covers}
        return measured(name, each, 0.0, {**self.details, **details})

    @property
    def known_noise(self) -> Result:
        """The accuracy against an attacker who knows the noise of the first prediction.

        A defense that draws its noise from a seed, a counter or the image is as strong as its
        attacker is ignorant of it. The attacker sees the copies, and the member of a randomized
        ensemble, that will predict, and takes the best of PGD on them and of all attacks within
        its threat, the first attack's.
        """
        scores = self.rows.known_noise
        if scores is None:
            raise ValueError(
                "known_noise is measured for defenses that predict at random, by known_noise=True"
            )
        threat = next(iter(self.attacks.values())).threat
        details = {**self.details, "ball": str(threat), "interval_covers": "images"}
        # On groups whose predictions did not vary all attackers know the same.
        within = [j for j, one in enumerate(self.attacks.values(), 1) if one.threat == threat]
        others = self.not_fooled[:, [0, *within]].mean(2).amin(1).to(scores)
        return measured(KNOWN, scores.where(~scores.isnan(), others).double(), 0.0, details)

    def distances(self, name: str) -> Tensor:
        """Return how far each image [N] had to be moved until the defense was always wrong.

        They are in the unit of the threat's eps: 0 where the clean image is accepted and wrong with
        certainty, infinite where the perturbed one is not. From one run of an attack of smallest
        norm (`PDGD`, `DDN`, `MinimalNorm`, `CW`, `DeepFool`) the accuracy within any radius up to
        its eps is `(distances(name) > radius).float().mean()`. Of other attacks the distances are
        upper bounds, mostly eps.

        Raises:
            ValueError: of a defense that predicts at random or adapts, for which one wrong
                prediction is no proof; or of several repeats, whose scores are averages.
        """
        if self.random or self.joint or self.details.get("repeats", 1) > 1:
            raise ValueError(
                "distances are of one run (repeats=1) on a defense that predicts the same each time"
            )
        _check_name(name, list(self.attacks))
        sizes = self.rows.sizes[:, self.names.index(name)].double()
        # an image on the ball's surface is within it, though its float32 size may round to more
        within = sizes.clamp_max(self.attacks[name].threat.eps)
        found = within.masked_fill(self.per_image(name) > 0, torch.inf)
        without = self.not_fooled[:, 0].mean(1)
        return found.masked_fill(without == 0, 0.0)

    @property
    def covers(self) -> str:
        """The randomness that the intervals hold."""
        if self.private_draws > 1:
            return "images and private draws"
        if self.joint:
            return "images, as if rounds were independent" if self.stateful else "images"
        return "images and inferences" if self.random else "images"

    def measurement(self, name: str, reference: "EvaluationResult | None" = None) -> Result:
        """Return the row of the table for one column, with all that its record holds.

        It is compared with the first attack of a reference, a result on the same defense, where the
        images are the same.
        """
        if name == WORST:
            return worst_measurement([self])
        details = {**self.details, "random": self.random, "interval_covers": self.covers}
        if found := [f for f in self.findings if f.values.get("attack", name) == name]:
            details["findings"] = [record(finding) for finding in found]
        scores = self.per_image(name)
        draws = self.scores[:, self.names.index(name)]
        if attack := self.attacks.get(name):
            details |= {"attack": attack_spec(attack), "threat": attack_spec(attack.threat)}
            details |= {"power": self.power[name].record()} if name in self.power else {}
            details["ball"] = str(attack.threat)
            other = reference or self
            in_ball = (n for n, one in other.attacks.items() if one.threat == attack.threat)
            first = next(in_ball, None)
            same = torch.equal(other.index, self.index) and other.joint == self.joint
            if first and same and not (other is self and name == first):
                draws_of_both = other._by_defender(first), self._by_defender(name)
                compared = paired_over_draws(*draws_of_both)
                details["against"] = {"attack": first, **asdict(compared)}
            searches = any(part.smallest_norm for part in walk(attack))
            once = self.details.get("repeats", 1) == 1 and not (self.random or self.joint)
            if searches and once and len(self.index):
                details["median_distance"] = float(self.distances(name).median())
            details |= {} if math.isnan(blind := self.blind(name)) else {"blind": blind}
        if draws.shape[1] > 1 and len(draws):
            over = "over_inferences" if self.private_draws == 1 else "over_private_draws"
            details[over] = student(draws.mean(0).tolist())
        if self.rows.rejected is not None:
            details |= {"rejected": self.rejected(name)}
            details |= {"accepted_wrong": self.accepted_wrong(name)}
        seconds = self.seconds.get(name, 0.0)
        return measured(name, scores, seconds, details, draws if self.private_draws > 1 else None)

    def measurements(self, reference: "EvaluationResult | None" = None) -> list[Result]:
        """Return the rows of clean images and each attack, without "worst"."""
        return [self.measurement(name, reference) for name in self.names]

    def table(self, title: str = "") -> str:
        """Return the table of accuracies with their intervals, for a terminal."""
        return table_text(title, [*self.measurements(), self.measurement(WORST)])

    def _repr_html_(self) -> str:
        return table_html("", [*self.measurements(), self.measurement(WORST)])

    def plot(self) -> "Figure":
        """Draw the accuracies with their intervals, "worst" last."""
        from lightning_rob.plots import bars  # matplotlib takes a second to import

        rows = [*self.measurements(), self.measurement(WORST)]
        return bars(*zip(*((r.name, r.accuracy, r.interval) for r in rows), strict=True))

    def card(self) -> dict[str, Any]:
        """Return what identifies the evaluation: settings, threat model of each attack, worst."""
        attacks = {name: threat_model_card(attack) for name, attack in self.attacks.items()}
        known = {"attacks": attacks, "random": self.random, "worst": self.worst.choice}
        findings = [record(finding) for finding in self.findings if finding.flagged]
        return {**self.details, **known, **({"findings": findings} if findings else {})}

    def save(
        self,
        path: Path | str,
        card: Mapping[str, Any] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Write the per-image scores as CSV and, beside it, the card as JSON, with more of both."""
        worst, card = self.per_image(WORST), self.card() | dict(card or {})
        own = self.names, self.rows, self.draws
        write_result_file(Path(path), *own, card, worst, columns)

    def __str__(self) -> str:
        return self.table()


def _check_name(name: str, names: Sequence[str]) -> None:
    if not isinstance(name, str):
        raise TypeError(
            f"give the name of an attack, got {type(name).__name__}; two results are compared by "
            "lightning_rob.metrics.paired(a.per_image(name), b.per_image(name))"
        )
    if name not in names:
        raise KeyError(f"no attack is called {name!r}: choose from {', '.join(names)}")


def worst_over(results: Sequence[EvaluationResult], not_fooled: bool = False) -> Worst:
    """Return the scores under the strongest attack of several evaluations of one defense.

    Of a defense that adapts, evaluations by the protocol of the last one count: another protocol is
    another attacker.
    """
    results = _by_last_protocol(results)
    return worst_case(
        # `not_fooled` is for an attacker who may leave images as they are.
        [(one.index, one.not_fooled if not_fooled else one.scores) for one in results],
        random=any(result.random for result in results),
        joint=any(result.joint for result in results),
    )


def _by_last_protocol(results: Sequence[EvaluationResult]) -> list[EvaluationResult]:
    # A defense that adapts is another one where rounds or memory differ.
    protocol = results[-1].details.get("protocol")
    return [r for r in results if not r.joint or r.details.get("protocol") == protocol]


def worst_measurement(results: Sequence[EvaluationResult]) -> Result:
    """Return the row of the strongest attack over several evaluations of one defense."""
    results, worst = _by_last_protocol(results), worst_over(results)
    last = results[-1]
    details = {
        **last.details,
        "random": any(r.random for r in results),
        "interval_covers": last.covers,
    }
    found = {one.text: record(one) for result in results for one in result.findings}
    details |= {"findings": list(found.values())} if found else {}
    attacks = [(name, attack) for result in results for name, attack in result.attacks.items()]
    details |= {"over": [name for name, _ in attacks]}
    if len(results) == 1 and not math.isnan(blind := last.blind(WORST)):
        details["blind"] = blind
    if measuring := [one for one in results if one.rows.known_noise is not None]:
        known = measuring[-1].known_noise
        of = {"accuracy": known.accuracy, "interval": known.interval, "n": known.n}
        details[KNOWN] = of | {"ball": known.details["ball"]}
    if last.rows.rejected is not None:
        details["accepted_wrong"] = 1 - float(worst_over(results, not_fooled=True).scores.mean())
    threats = {str(attack.threat): attack_spec(attack.threat) for _, attack in attacks}
    if len(threats) == 1:
        (details["ball"], details["threat"]), *_ = threats.items()
    else:
        details["ball"] = "several"
    return worst.row(details)
