"""Scores of one defense, batch by batch, clean and under every attack."""

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rob.attacks import PGD, Attack, InsideBounds, NoAttack, WithBackward
from lightning_rob.attacks.auto import attack_gradients, step_across
from lightning_rob.attacks.backward import Backward
from lightning_rob.attacks.base import HAIR, check_images
from lightning_rob.attacks.execution import check_none_rejected
from lightning_rob.attacks.nested import walk
from lightning_rob.attacks.sight import watching
from lightning_rob.defenses import Defense
from lightning_rob.defenses.copies import fresh, working_copy
from lightning_rob.defenses.known_noise import KnownNoise, drawn_parts
from lightning_rob.defenses.network import CHANGES_INPUT
from lightning_rob.evaluation.check_batch import CheckTarget
from lightning_rob.evaluation.checks import checked, randomness, slope
from lightning_rob.evaluation.findings import Finding
from lightning_rob.evaluation.groups import GROUP_SIZE
from lightning_rob.evaluation.power import Power, counted, found_by, not_applicable
from lightning_rob.evaluation.protocol import (
    PREDICT,
    AttackerDefenderSession,
    RoundProtocol,
    predictions,
)
from lightning_rob.evaluation.results import WORST, EvaluationResult
from lightning_rob.evaluation.resume_log import BatchOutcome
from lightning_rob.evaluation.scale import scale
from lightning_rob.evaluation.store import KNOWN, PerImageResults, predicted_class
from lightning_rob.evaluation.suites import unfit
from lightning_rob.evaluation.worst import is_random
from lightning_rob.metrics import robust_accuracy
from lightning_rob.objectives import check_classes, check_labels, losses_of_rule
from lightning_rob.randomness import Streams
from lightning_rob.rules import mean_probs, rejected_share
from lightning_rob.runtime.errors import at_least
from lightning_rob.runtime.precision import float32_precision, in_float32
from lightning_rob.runtime.processes import gathered
from lightning_rob.tables import CLEAN
from lightning_rob.threat import PROJECTED

# Columns, and what is logged beside the accuracies.
RESERVED = (
    *(CLEAN, WORST, KNOWN, "index", "label", "broken_by", "draws", "checksum"),
    *("blind", "findings"),
)
SLACK = 1e-3  # by which probabilities of half precision may miss one
TRIED = 8  # images of each group that are predicted twice, to see whether predictions vary
CHECKED = 16  # images of the first group on which the defense is checked
KNOWING_STEPS = 20  # of PGD with known noise
CHECKED_ATTACKED = 50  # attacked images of it on which the slope is checked again


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings on which scores depend, beside defense, attacks and images; see `evaluate`."""

    seed: int = 0
    repeats: int = 1
    inferences: int = 1
    private_draws: int = 1
    max_images: int | None = None
    group_size: int = GROUP_SIZE
    protocol: RoundProtocol | None = None  # None: rounds where the defense adapts, else groups
    known_noise: bool = False  # attack the draws that will predict too

    def __post_init__(self) -> None:
        counts = ("repeats", "inferences", "private_draws", "max_images", "group_size")
        at_least(1, **{name: getattr(self, name) for name in counts})

    @property
    def repetitions(self) -> dict[str, int]:
        """How often each image is attacked and predicted, as records have it."""
        names = ("repeats", "inferences", "private_draws")
        return {name: getattr(self, name) for name in names}

    @property
    def columns(self) -> int:
        """The number of predictions of each image."""
        return self.inferences * self.private_draws

    def protocol_for(self, defense: Defense) -> RoundProtocol | None:
        """Return the rounds in which this defense is attacked; None if in canonical groups."""
        if self.private_draws > 1 and not defense.transductive:
            raise ValueError(
                f"private_draws is for defenses that adapt, {type(defense).__name__} does not: "
                "leave it out; where a defense predicts at random give inferences=10"
            )
        if self.known_noise and defense.transductive:
            raise ValueError("known_noise is for defenses that do not adapt: leave it out")
        return self.protocol or (RoundProtocol() if defense.transductive else None)

    def asdict(self) -> dict[str, Any]:
        """Return the settings as plain data, the protocol by its repr."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        del own["known_noise"]  # it changes no other figure
        return own | {"protocol": repr(self.protocol) if self.protocol else None}


def check_attacks(attacks: Mapping[str, Attack]) -> None:
    """Raise ValueError for no attacks, a ball that holds all images, or a name that is taken."""
    if not isinstance(attacks, Mapping):
        raise TypeError(f"attacks must be a dict, name -> attack, got {type(attacks).__name__}")
    for name, attack in attacks.items():
        if not isinstance(attack, Attack):
            raise TypeError(f"attack {name!r} must be such as PGD(…), got {attack!r}")
        for part in walk(attack):  # others refuse a norm as they are built
            if type(part) is PGD and part.threat.p not in PROJECTED:
                raise ValueError(f"{name!r}: PGD is for linf, l2 and l1, not {part.threat.norm}")
        if attack.threat.p == math.inf:
            check_ball(name, attack, 1)
    if not attacks:
        raise ValueError("attacks must name at least one attack, got an empty dict")
    if joined := [name for name in attacks if "+" in name or "/" in name]:
        raise ValueError(f"an attack's name is part of a file's: {joined[0]!r} has a + or a /")
    # Columns of the CSV file have the attacks' names, with such endings.
    columns = "|".join(re.escape(name) for name in (CLEAN, *attacks))
    taken = re.compile(
        rf"{'|'.join(RESERVED)}|({columns})_(prediction|size|rejected|blind|inference_\d+)"
    )
    for name in filter(taken.fullmatch, attacks):
        raise ValueError(f"no attack can be called {name!r}: that column has another meaning")


def check_ball(name: str, attack: Attack, values: int) -> None:
    """Raise ValueError for a ball that holds every image; `values` is their number in one."""
    if not any(part.smallest_norm for part in walk(attack)):  # it stays as near as it can
        attack.threat.check_size(name, values)


@dataclass(frozen=True)
class AttackedBatch:
    """One batch under one attack, for progress bars, panels and saved images."""

    name: str  # of the attack
    index: Tensor  # [B] the images' indices
    x: Tensor  # [B, C, H, W] clean images
    # None where the scores are of an earlier run:
    x_adv: Tensor | None = None  # [B, C, H, W] perturbed images


class Evaluator:
    """Scores batches under every attack; one evaluation of one defense.

    Args:
        store: place of the scores; None keeps them in memory.
        attacked: function that is called after each attack on each batch.
        details: other fields of the records.
        checks: check the defense on the first images, see `lightning_rob.evaluation.checks`.
        power: number of images on which the attacks are tested, see `lightning_rob.audit.power`.
    """

    def __init__(
        self,
        defense: Defense,
        attacks: Mapping[str, Attack],
        settings: EvaluationSettings | None = None,
        store: PerImageResults | None = None,
        attacked: Callable[[AttackedBatch], object] | None = None,
        details: Mapping[str, Any] | None = None,
        checks: bool = True,
        power: int = 0,
    ) -> None:
        self.defense = defense
        self.attacks = dict(attacks)
        self.settings = settings or EvaluationSettings()
        self.protocol = self.settings.protocol_for(defense)
        # Where predictions depend on the whole batch, batches are rounds.
        self.joint = self.protocol is not None
        if store is None:
            names = (CLEAN, *self.attacks)
            store = PerImageResults(names, self.settings.columns, device_of(defense))
        self.store = store
        self.attacked = attacked or (lambda batch: None)
        self.details = dict(details or {})
        self.random = False
        self.to_check = {CLEAN, *self.attacks} if checks else set()
        self.to_test = power  # images
        tested = self.attacks if power else {}
        self.not_tested = {name: not_applicable(defense, one) for name, one in tested.items()}
        tests = 1 if defense.rejects is None else 2  # of each attack
        self.powers = torch.zeros(len(tested), tests, 4, dtype=torch.double)
        self.findings: list[Finding] = []
        self.unfit = unfit(attacks, defense) if checks else []
        self.recovered: set[str] = set()  # attacks that took gradients just inside the bounds
        self.inside: Backward | None = None  # with which all attacks run from now on
        self.seconds = {name: self.store.log.seconds.get(name, 0.0) for name in self.attacks}
        self.sessions: dict[tuple[str, int], AttackerDefenderSession] = {}
        self.bounds = next(iter(self.attacks.values())).threat.bounds
        for name, notes in self.store.log.notes.items():
            self.to_check -= {name} & self.attacks.keys()  # what was found is known
            for noted in notes:
                self._take(Finding(**fields) for fields in noted.get("findings", ()))
                self.random |= noted.get("random", False)
                self.recovered |= {name} if noted.get("recovered") else set()

    def _take(self, findings: Iterable[Finding]) -> None:
        """Add findings, each once: those of an attack and those of the defense."""
        known = {(one.name, one.values.get("attack")) for one in self.findings}
        for one in findings:
            if (key := (one.name, one.values.get("attack"))) not in known:
                known.add(key)
                self.findings.append(one)

    @cached_property
    def subject(self) -> Defense:
        """The working copy that is attacked and predicts."""
        return working_copy(self.defense)

    def score(self, x: Tensor, y: Tensor, index: Tensor, keep: bool = True) -> None:
        """Score a canonical group of images, or a round, clean and under every attack.

        All noise is keyed by the images' indices [B]. Unless the scores are to be kept, this only
        tries that every attack runs.
        """
        check_images(x, self.bounds)
        for name, attack in self.attacks.items():
            check_ball(name, attack, x[:1].numel())
        # A network may write into its input, and then all scores are of other images.
        given, settings = x.clone(), self.settings
        # A defense may be random on some images only, so that each group is looked at.
        if not self.joint:
            self.random = self.random or is_random(fresh(self.subject), x[:TRIED], index[:TRIED])
        outcomes = self.store.log.load(x, y, index)
        for name in self.attacks:
            if name in outcomes:
                self.attacked(AttackedBatch(name, index, x))
        names = (CLEAN, *self.attacks)
        if not outcomes.keys() >= set(names):
            # The defense's noise is that of each attack's first repeat, so that scores differ by
            # the attack alone.
            if self.joint:
                clean = self._session(CLEAN).step(x, y, index, settings.inferences)[1]
            else:
                noise = Streams.from_index(index, settings.seed, 0, PREDICT)
                clean = predictions(fresh(self.subject), x, noise, settings.inferences)
            check_predictions(self.defense, clean, y)
            if not torch.equal(given, x):
                raise ValueError(CHANGES_INPUT)
        self._check(CLEAN, x, y, index)
        if CLEAN not in outcomes:
            right, rejected = self._shares(clean, y)
            predicted = predicted_class(clean[0], self.defense.rejects)
            zeros = torch.zeros_like(right[:, 0])
            outcomes[CLEAN] = BatchOutcome(right, predicted, zeros, rejected, zeros - 1)
            if keep:
                self.store.log.add(x, y, index, CLEAN, outcomes[CLEAN], 0.0)
        for name, attack in self.attacks.items():
            if name in outcomes:
                continue
            began, before = time.perf_counter(), len(self.findings)
            outcomes[name] = self._under(name, attack, x, y, index, clean[0])
            seconds = time.perf_counter() - began
            self.seconds[name] += seconds
            if keep:
                found = [asdict(finding) for finding in self.findings[before:]]
                noted = {"findings": found, "random": self.random}
                noted["recovered"] = name in self.recovered
                if attack.shown:
                    noted["found"] = attack.shown
                self.store.log.add(x, y, index, name, outcomes[name], seconds, noted)
        # Predictions may be random by noise, or by the choice of a member.
        wanted = settings.known_noise and KNOWN not in outcomes
        if wanted and (self.random or len(list(drawn_parts(self.subject))) > 1):
            began = time.perf_counter()
            outcomes[KNOWN] = self._with_known_noise(x, y, index, outcomes)
            if keep:
                seconds = time.perf_counter() - began
                self.store.log.add(x, y, index, KNOWN, outcomes[KNOWN], seconds)
        if keep:
            known = outcomes[KNOWN].scores[:, 0] if KNOWN in outcomes else None
            self.store.add_batch(x, y, index, [outcomes[name] for name in names], known)
            if self.to_test:
                rows = spread_over(x, self.to_test)
                self.to_test -= len(rows)
                self._test(x[rows], y[rows], index[rows])

    def check(self, x: Tensor, y: Tensor, index: Tensor) -> None:
        """Check the defense on images, in place of the first ones that are scored."""
        self._check(CLEAN, x, y, index)

    def _under(
        self, name: str, attack: Attack, x: Tensor, y: Tensor, index: Tensor, before: Tensor
    ) -> BatchOutcome:
        """Score a batch under an attack; `before` [B, K] are the predictions on clean images."""
        repeats = self.settings.repeats
        total = torch.zeros(len(x), self.settings.columns, device=x.device)
        rejected = torch.zeros_like(total)
        with watching(len(x), x.device) as sight:
            for repeat in range(repeats):
                session = self._session(name, repeat)
                try:
                    x_adv, found = session.step(x, y, index, self.settings.inferences)
                except Exception as error:
                    error.add_note(f"under the attack {name!r}")  # of several: which one
                    raise
                right, share = self._shares(found, y)
                # An attack succeeds where the defense accepts and is wrong.
                total, rejected = total + right + share, rejected + share
        if sight.recovered:
            self.recovered.add(name)
        if not self.joint:
            if name in self.to_check:
                known = self.settings.seed, self.random
                small = scale(name, attack, self.subject, x, x_adv, y, index, *known)
                self.findings += [small] if small else []
            self._check(name, x_adv, y, index)
        self.attacked(AttackedBatch(name, index, x, x_adv))
        return BatchOutcome(
            total / repeats,
            predicted_class(found[0], self.defense.rejects),
            attack.threat.distance(x_adv, x),
            rejected / repeats,
            sight.blind.nan_to_num(-1.0),
        )

    def _test(self, x: Tensor, y: Tensor, index: Tensor) -> None:
        """Test the power of the attacks on some images."""
        for number, name in enumerate(self.attacks):
            if self.not_tested[name]:
                continue
            attack = self.attacks[name]
            if self.inside is not None:
                attack = WithBackward(attack, self.inside)
            try:
                found = found_by(attack, self.subject, x, y, index, self.settings.seed)
                self.powers[number] += counted(found).cpu()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # the scores are worth something without the test
                self.not_tested[name] = f"not tested: {type(error).__name__}: {error}"

    def _with_known_noise(
        self, x: Tensor, y: Tensor, index: Tensor, outcomes: Mapping[str, BatchOutcome]
    ) -> BatchOutcome:
        """Attack the draws of the first prediction by PGD on its loss, and the member it draws."""
        first, settings = next(iter(self.attacks.values())), self.settings
        threat, private = first.threat, (settings.seed, 0)
        step_size = step_across(threat.eps, KNOWING_STEPS, 4)
        total = torch.zeros(len(x), 1, device=x.device)
        for share, part in drawn_parts(self.subject):
            attack: Attack = PGD(
                threat,
                KNOWING_STEPS,
                step_size,
                losses_of_rule(part.rule)[0],
                keep_best=True,
                backward=attack_gradients(part),
            )
            attack = attack if self.inside is None else WithBackward(attack, self.inside)
            noise = Streams.from_index(index, *private, PREDICT)
            session = AttackerDefenderSession(
                attack, KnownNoise(part, noise), *private, *KNOWN.encode(), private=private
            )
            _, found = session.step(x, y, index)
            right, rejected = self._shares(found, y)
            total = total + share * (right + rejected)
        # An attacker who knows the noise may also take the image of any other attack in the ball.
        clean = outcomes[CLEAN]
        others = [clean.scores[:, :1] + clean.rejected[:, :1]]
        others += [outcomes[n].scores[:, :1] for n, a in self.attacks.items() if a.threat == threat]
        least = torch.stack([total, *(scores.to(total) for scores in others)]).amin(0)
        return clean._replace(scores=least.expand(-1, settings.columns))

    def _check(self, name: str, x: Tensor, y: Tensor, index: Tensor) -> None:
        """Check the defense on the first images once, and note whether it predicts at random."""
        if name not in self.to_check:
            return
        self.to_check.discard(name)
        target = CheckTarget(self.subject, self.bounds, self.settings.seed)
        if name == CLEAN:
            rows = spread_over(x, CHECKED)
            found = checked(target, x[rows], y[rows], index[rows])
        else:
            # Gradients may be wrong on attacked images only, or in large batches only.
            some = slice(TRIED)
            found = checked(target, x[some], y[some], index[some], (randomness,))
            self.random = self.random or found[0].flagged
            # The slope again, for a network may tamper with gradients of perturbed images only.
            rows = spread_over(x, CHECKED_ATTACKED)
            found += checked(target, x[rows], y[rows], index[rows], (slope,), directions=2)
        known = {finding.name for finding in self.findings}
        found = [one for one in found if one.flagged and not self._is_averaged(one)]
        self.findings += [one for one in found if one.name not in known]
        cut = name == CLEAN and any(finding.name == "bounds" for finding in self.findings)
        if cut and not self.joint:
            self.inside = InsideBounds(HAIR * (self.bounds[1] - self.bounds[0]), self.bounds)
            self.recovered |= set(self.attacks)

    def _is_averaged(self, finding: Finding) -> bool:
        """Return whether an attack in each ball averages over the randomness that was found."""
        random = (finding.name, finding.severity) == ("randomness", "warning")
        attacks = self.attacks.values()
        good = [attack for attack in attacks if any(part.averages for part in walk(attack))]
        in_each = all(any(one.threat == attack.threat for one in good) for attack in attacks)
        return random and in_each and self.settings.inferences > 1

    def _shares(self, found: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities [B, R] of right predictions and of rejections, of [R, B, K]."""
        right = torch.stack([robust_accuracy(one, y) for one in found], 1)
        defense = self.defense
        return right, rejected_share(found, defense.rejects, defense.abstains).T.to(right)

    def _session(self, name: str, repeat: int = 0) -> AttackerDefenderSession:
        """Return the session of an attack, or of none: continued in rounds, new for each group."""
        if (name, repeat) in self.sessions:
            return self.sessions[name, repeat]
        attack = self.attacks.get(name) or NoAttack(next(iter(self.attacks.values())).threat)
        if self.inside is not None:
            attack = WithBackward(attack, self.inside)
        seed = self.settings.seed
        session = AttackerDefenderSession(
            attack,
            self.subject,
            *((seed,) if name == CLEAN else (seed, repeat, *name.encode())),
            private=(seed, repeat),  # the same defender under every attack
            draws=self.settings.private_draws,
            attacker_sees_state=self.protocol is not None and self.protocol.attacker_sees_state,
        )
        if self.joint:
            self.sessions[name, repeat] = session
        return session

    def result(self) -> EvaluationResult:
        """Return the scores of all images; every process has to call it."""
        rows = self.store.rows()
        # Each process has seen a part of the images; one that finds something is enough.
        mine = self.findings, self.recovered, self.random, self.powers
        found, recovered, random, powers = zip(*gathered(mine), strict=True)
        self._take(chain(*found))
        self.recovered, self.random = set().union(*recovered), any(random)
        self.powers = torch.stack(powers).sum(0)
        noted = [*self.findings, *self.unfit]
        if self.recovered:
            why = "are zero at the bounds" if self.inside else "were not finite on some images"
            text = (
                f"Gradients of {', '.join(sorted(self.recovered))} {why} and were taken "
                f"{HAIR:g} of the range further inside"
            )
            text += "." if self.inside else ", in a second run on their groups."
            values = {"attacks": sorted(self.recovered)}
            noted.append(Finding("note", text, values=values, name="recovered"))
        self.__dict__.pop("subject", None)  # its memory is for the next training step
        self.sessions.clear()
        return EvaluationResult(
            self.attacks,
            rows if self.defense.may_reject else replace(rows, rejected=None),
            self.settings.private_draws,
            self.random,
            self.joint,
            self.defense.stateful,
            len(self.defense.weights),
            dict(self.seconds),
            self.details,
            tuple(noted),
            {
                name: Power.of(counts, why)
                for (name, why), counts in zip(self.not_tested.items(), self.powers, strict=True)
            },
        )


def spread_over(x: Tensor, count: int) -> Tensor:
    """Return the indices of some images of all of a batch: its first ones may be of one class."""
    return torch.linspace(0, len(x) - 1, min(count, len(x)), device=x.device).long()


def check_predictions(defense: Defense, predictions: Tensor, y: Tensor) -> None:
    """Raise ValueError for labels [B] that are no class of [R, B, K], or undeclared rejections."""
    check_classes(predictions.shape[-1])
    check_labels(y, predictions.shape[-1])
    if defense.rejects is not None:
        check_none_rejected(y, defense.rejects)
    name = getattr(defense.rule, "__name__", repr(defense.rule))
    known = predictions.nan_to_num(0.0)
    if bool((known < -SLACK).any()) or bool((known.sum(-1) > 1 + SLACK).any()):
        low, high = float(known.min()), float(known.sum(-1).max())
        raise ValueError(
            f"the rule {name} must return probabilities that sum to one, got values from {low:.3g} "
            f"and sums up to {high:.3g}"
        )
    # A row of zeros of the package's rules stands for logits that are not finite.
    of_package = getattr(defense.rule, "__module__", None) == mean_probs.__module__
    if not (of_package or defense.abstains) and bool((predictions == 0).all(-1).any()):
        raise ValueError(
            f"the rule {name} returns a row of zeros, as if it rejects an image: declare that it "
            "does by the decorator lightning_rob.rules.abstaining"
        )


def evaluation_precision() -> str:
    """Return the precision of float32 operations during an evaluation."""
    with in_float32():
        return float32_precision()


def device_of(defense: nn.Module) -> torch.device:
    """Return the device of a module's first parameter or buffer; the CPU if it has none."""
    for tensor in (*defense.parameters(), *defense.buffers()):
        return tensor.device
    return torch.device("cpu")


def check_indices(index: Tensor, expected: int) -> None:
    """Raise ValueError where several images have the same index: one would count for all."""
    if len(index) < expected:
        raise ValueError(
            f"{expected} images have {len(index)} different indices: give each image of a "
            "data set an index of its own, by which its scores and its noise are kept"
        )
