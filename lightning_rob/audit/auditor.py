"""The audit of a defense: attacks by its kind, columns over all images, and all checks."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import methodcaller
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from lightning_rob.attacks import Attack
from lightning_rob.attacks.auto import SuiteKind
from lightning_rob.attacks.nested import walk
from lightning_rob.attacks.sight import watching
from lightning_rob.defenses import Defense
from lightning_rob.defenses.copies import working_copy
from lightning_rob.evaluation import AttackerDefenderSession, NoAttack, worst_case
from lightning_rob.evaluation import checks as basic
from lightning_rob.evaluation import columns as basic_columns
from lightning_rob.evaluation.check_batch import CheckBatch, CheckTarget, nonfinite
from lightning_rob.evaluation.checks import made
from lightning_rob.evaluation.columns import LazyColumns, Measure
from lightning_rob.evaluation.evaluator import check_predictions
from lightning_rob.evaluation.findings import (
    Columns,
    Finding,
    by_severity,
    images_of,
    is_gain,
    known,
    many,
    mean,
    means,
    not_checked,
    percent,
    record,
    significant,
)
from lightning_rob.evaluation.records import Result, measured, with_schema
from lightning_rob.evaluation.suites import suite_for
from lightning_rob.metrics import robust_accuracy
from lightning_rob.objectives import NonFiniteLogitsError, ce_of_rule
from lightning_rob.rules import rejected_share
from lightning_rob.runtime.identity import attack_spec
from lightning_rob.tables import finding_lines, print_table
from lightning_rob.threat import Threat

INFERENCES = 5  # predictions of each image; their mean is the score
GRADIENT_FREE = ("clean", "noise", "square")


class AuditTarget(CheckTarget):
    """A defense under audit; `steps` are those of the default PGD.

    Args:
        other_attacks: name -> attack that the user runs beside the audit.
        progress: called with the name of an attack and the number of images that it attacked.
    """

    def __init__(
        self,
        defense: Defense,
        threat: Threat,
        steps: int = 20,
        queries: int = 1000,
        seed: int = 0,
        other_attacks: Mapping[str, Attack] | None = None,
        progress: Callable[[str, int], object] | None = None,
    ) -> None:
        super().__init__(working_copy(defense), threat.bounds, seed)
        self.threat = threat
        self.suite = suite_for(self.defense, threat, steps, queries)
        self.attacks: dict[str, Attack] = {"clean": NoAttack(threat), **self.suite.attacks}
        self.queries = queries
        self.other_attacks = dict(other_attacks or {})
        self.progress = progress
        self.seconds = dict.fromkeys(self.attacks, 0.0)
        self.sessions: dict[str, AttackerDefenderSession] = {}
        self.failed: dict[str, Exception] = {}  # why a column could not be measured
        self.worst_names = ["clean", *self.suite.within(threat)]
        halves = () if self.transductive else ("first", "second")
        # They choose and score the worst case of a random defense.
        self.half_columns = [f"{name}/{half}" for name in self.worst_names for half in halves]

    def session(self, attack: Attack, name: str) -> AttackerDefenderSession:
        """Return the session of an attack; against a defense that adapts it continues."""
        if not self.transductive or name not in self.sessions:
            keys = (self.seed, *name.encode())
            self.sessions[name] = AttackerDefenderSession(
                attack, self.defense, *keys, private=(self.seed,)
            )
        return self.sessions[name]


class AuditBatch(CheckBatch):
    """A batch of images, attacked and differentiated on demand; see `CheckBatch`."""

    def __init__(
        self, target: AuditTarget, x: Tensor, y: Tensor, index: Tensor | None = None
    ) -> None:
        super().__init__(target, x, y, index)
        self.target: AuditTarget = target
        self.scores: dict[str, Tensor] = {}  # [B, R] by inference
        self.perturbed: dict[str, Tensor] = {}

    def score(self, name: str, half: str = "") -> Tensor:
        """Return the probability [B] of a right prediction under an attack, or in half of draws."""
        if name not in self.scores:
            began = time.perf_counter()
            self.perturbed[name], self.scores[name] = self.run(name, self.target.attacks[name])
            self.target.seconds[name] += time.perf_counter() - began
            if self.target.progress and name != "clean":
                self.target.progress(name, len(self.x))
        # One half chooses the strongest attack, the other scores it.
        first, second = self.scores[name].tensor_split(2, dim=1)
        return {"first": first, "second": second}.get(half, self.scores[name]).mean(1)

    def run(self, name: str, attack: Attack) -> tuple[Tensor, Tensor]:
        """Return the images [B, C, H, W] under an attack of this name, and their scores [B, R]."""
        # Without a gradient the attack cannot run: the clean images, and no scores.
        if name not in GRADIENT_FREE and not self.differentiable:
            return self.x, self.unknown()[:, None].expand(-1, INFERENCES)
        return self._run(name, attack, torch.arange(len(self.x), device=self.x.device))

    def _run(self, name: str, attack: Attack, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Attack some of the images; one with non-finite logits counts as wrong."""
        x, y = self.x[rows], self.y[rows]
        session = self.target.session(attack, name)
        try:
            with watching(len(x), x.device):  # without warnings: a check finds what is amiss
                x_adv, found = session.step(x, y, self.index[rows], INFERENCES)
        except NonFiniteLogitsError as error:
            x_adv, scores = x.clone(), x.new_zeros(len(x), INFERENCES)
            # Attack the finite images again; where they are unknown, each half.
            count, nonfinite = len(x), error.images
            parts = list(torch.arange(count, device=x.device).tensor_split(2))
            if len(nonfinite) == count:  # no image had left when the attack stopped
                parts = [(~nonfinite).nonzero()[:, 0]]
            for part in () if self.target.transductive else parts:
                if len(part):
                    x_adv[part], scores[part] = self._run(name, attack, rows[part])
            return x_adv, scores
        defense = self.target.defense
        check_predictions(defense, found, y)
        scores = torch.stack([robust_accuracy(one, y) for one in found], 1)
        if name != "clean":  # an attack succeeds where the defense accepts and is wrong
            scores = scores + rejected_share(found, defense.rejects, defense.abstains).T
        return x_adv, scores


RUGGED = 0.1  # of images that five starts break and as many steps from one start do not
ADAPTS = "the rounds against a defense that adapts have no such attack"
MASKED = (
    "Gradients mislead. Attack the margin and with restarts, without gradients, and look for "
    "what is not smooth inside (docs/audit.md)."
)
MADE_FOR = {  # each kind of defense
    "ensemble": "PGD on the loss of the rule by which it predicts",
    "randomized": "ARC",
    "random": "EoT on the linear loss with AggMo",
    "transformed": "PAA, and PGD through all members that have a gradient",
    "transductive": "GMSA",
}


def _why_not(columns: Columns, attack: str) -> str:
    """Return why there are no scores under an attack; empty if there are."""
    if attack not in columns:
        return ADAPTS
    return "no gradient attack could run" if columns[attack].isnan().all() else ""


def steps(target: AuditTarget, columns: Columns) -> Finding:
    """Find attacks that grow weaker with more steps."""
    if reason := _why_not(columns, "pgd"):
        return not_checked(reason)
    once, default, longer = columns["fgsm"], columns["pgd"], columns["longer"]
    values = means(one=once, default=default, longer=longer)
    text = f"One step leaves {percent(once)}, PGD {percent(default)}, more steps {percent(longer)}"
    # Which images the last step leaves is random even on a deterministic network.
    if significant(default - once) or significant(longer - default):
        return Finding("severe", f"{text}: more steps are weaker.", MASKED, values)
    if significant(default - longer):
        advice = "Report an attack of more steps: this one had not converged."
        return Finding("note", f"{text}.", advice, values)
    return Finding("fine", f"{text}.", values=values)


def radius(target: AuditTarget, columns: Columns) -> Finding:
    """Find images that stand an attack in a ball that holds every image."""
    if reason := _why_not(columns, "unbounded"):
        return not_checked(reason)
    left = columns["unbounded"]
    text = f"In a ball that holds every image the attack leaves {percent(left)}."
    if not many(left):
        return Finding("fine", text, values=means(left=left))
    if (columns["predicted_class"] == columns["predicted_class"][0]).all():
        return not_checked("it predicts one class for all images")
    text += " It could replace each image by that of another class, and leave nothing."
    return Finding("severe", text, MASKED, means(left=left))


def noise(target: AuditTarget, columns: Columns) -> Finding:
    """Find random noise that is as strong as the default attack."""
    if reason := _why_not(columns, target.suite.default):
        return not_checked(reason)
    clean, random, default = columns["clean"], columns["noise"], columns[target.suite.default]
    values = means(noise=random, default=default)
    text = f"Random noise leaves {percent(random)}, the default attack {percent(default)}."
    breaks = is_gain(clean - random, target.exact)
    if breaks and many(default) and not many(random - default):
        return Finding("severe", f"{text} The attack is no better.", MASKED, values)
    return Finding("fine", text, values=values)


def restarts(target: AuditTarget, columns: Columns) -> Finding:
    """Find a rugged loss: the attack's start decides its success."""
    if reason := _why_not(columns, "pgd"):
        return not_checked(reason)
    default, longer, again = columns["pgd"], columns["longer"], columns["restarts"]
    values = means(default=default, longer=longer, restarts=again)
    text = f"Five starts leave {percent(again)}, as many steps from one start {percent(longer)}."
    # As many steps from one start as from five, so that only the starts differ.
    difference = torch.minimum(default, longer) - again
    if is_gain(difference, target.exact) and mean(difference) > RUGGED:
        text += " Its start decides: the loss is rugged."
        advice = "Report restarts=10 or more, and look for what makes the loss rugged."
        return Finding("warning", text, advice, values)
    return Finding("fine", text, values=values)


def black_box(target: AuditTarget, columns: Columns) -> Finding:
    """Find images that an attack without gradients breaks and no attack with gradients does."""
    if target.transductive:
        return not_checked(ADAPTS)
    square, names = columns["square"], target.suite.within(target.threat)
    seeing = [columns[n].nan_to_num(torch.inf) for n in names if n not in GRADIENT_FREE]
    white = torch.stack([columns["clean"], *seeing]).amin(0)
    # Of noisy scores the negative differences stay: without them chance would look like a loss.
    lost = (white - square).clamp_min(0) if target.exact else white - square
    values = means(white_box=white, square=square, images=lost) | {"queries": target.queries}
    text = (
        f"Square ({target.queries} queries, no gradients) leaves {percent(square)}, all attacks "
        f"with gradients together {percent(white)}."
    )
    if not is_gain(lost, target.exact):
        return Finding("fine", text, values=values)
    found = images_of(lost) if target.exact else percent(lost)
    text += f" {found} stand attacks that see everything and fall to one that sees nothing."
    return Finding("severe", text, MASKED, values)


def adaptive(target: AuditTarget, columns: Columns) -> Finding:
    """Find that the user's evaluation lacks the attack made for this kind of defense."""
    suite, lacking = target.suite, _lacking(target)
    if not suite.adaptive:
        return _pgd_is_adaptive(target, lacking)
    inside = [columns[name] for name in suite.adaptive if name in suite.within(target.threat)]
    # The minimum of noisy scores, image by image, would be too low.
    best = torch.stack(inside).amin(0) if target.exact else min(inside, key=mean)
    default = columns[suite.default]
    # A gap alone is no fault: only that the user's evaluation lacks the attack is.
    gain = is_gain(default - best, target.exact)
    values = means(default=default, adaptive=best)
    values["gap"] = values["default"] - values["adaptive"]
    values["attacks"] = means(**{name: columns[name] for name in suite.adaptive})
    text = f"The default attack leaves {percent(default)}, those for its kind {percent(best)}."
    recipe = f"--trainer.callbacks+={suite.plug_in}"
    if lacking:
        advice = f"Add {recipe}, and report what it leaves."
        return Finding("severe" if gain else "warning", f"{lacking} {text}", advice, values)
    if gain:
        return Finding("note", text, f"Report the lower accuracy: {recipe}.", values)
    return Finding("fine", text, values=values)


def _pgd_is_adaptive(target: AuditTarget, lacking: str) -> Finding:
    """Return the finding where PGD is adaptive: on an ensemble if it climbs the rule's loss."""
    if target.suite.kind != "ensemble":
        return Finding("fine", "PGD is adaptive here: there is one network and no randomness.")
    if not lacking:
        text = "PGD on the loss of its rule is adaptive here: its prediction has a gradient."
        return Finding("fine", text)
    loss = ce_of_rule(target.defense.rule).__name__
    advice = f"Run PGD with objective lightning_rob.objectives.{loss} within {target.threat}."
    return Finding("warning", lacking, advice)


def _lacking(target: AuditTarget) -> str:
    """Return what the user's attacks lack, in words; empty if nothing, or without such attacks."""
    kind, rule = target.suite.kind, target.defense.rule
    if not target.other_attacks or kind == "single":
        return ""
    parts = [part for attack in target.other_attacks.values() for part in walk(attack)]
    if any(part.is_made_for(kind, rule) for part in parts):
        return ""
    names = ", ".join(target.other_attacks)
    return f"This evaluation runs {names}, but not {MADE_FOR[kind]}, made for this kind."


STRENGTH = (steps, radius, noise, restarts, black_box, adaptive)


Check = Callable[[AuditTarget, Columns], Finding]


@dataclass(frozen=True)
class Report:
    """The report of an audit: accuracies, and findings with the most severe first."""

    title: str
    results: list[Result]
    findings: list[Finding]

    @property
    def flags(self) -> list[Finding]:
        """The findings that are severe or warnings."""
        return [finding for finding in self.findings if finding.flagged]

    @property
    def severe(self) -> bool:
        """Whether a finding is severe."""
        return any(finding.severity == "severe" for finding in self.findings)

    def summary(self) -> str:
        """Return the verdict in one line."""
        flags, severe = len(self.flags), sum(flag.severity == "severe" for flag in self.flags)
        if severe:
            return f"Do not trust the accuracies: {severe} of {flags} flags are severe."
        if flags:
            return f"Look at the warnings before you trust the accuracies: {flags}."
        return "Nothing suspicious was found."

    def show(self, console: Console | None = None) -> None:
        """Print the accuracies as a table, then the findings with their remedies."""
        console = console or Console()
        print_table(f"Audit · {self.title}", self.results, console)
        console.print(self.summary(), style="bold")
        fine = [finding.name for finding in self.findings if finding.severity == "fine"]
        lines = list(finding_lines(record(f) for f in self.findings if f.severity != "fine"))
        lines += [f"fine    {', '.join(fine)}"] if fine else []
        for line in lines:
            console.print(line, highlight=False)

    def json(self, metadata: Mapping[str, Any]) -> str:
        """Return the report as JSON, together with the metadata of the run."""
        content = {
            "kind": "audit",
            **metadata,
            "title": self.title,
            "attacks": [result.record() for result in self.results],
            "findings": [{"name": f.name, **asdict(f)} for f in self.findings],
        }
        return json.dumps(with_schema(content), indent=2, ensure_ascii=False) + "\n"


def nonfinite_attacked(batch: AuditBatch) -> Tensor:
    """Return the images [B] with non-finite logits after noise or after the default attack."""
    found = torch.zeros_like(batch.nonfinite)
    for name in ("noise", batch.target.suite.default):
        batch.score(name)
        found |= nonfinite(batch.logits_of(batch.perturbed[name]))
    return found


def predicted_class(batch: AuditBatch) -> Tensor:
    """Return the class [B] of the largest mean logit."""
    return batch.logits.mean(0).argmax(-1)


COLUMNS: dict[str, Measure] = {
    **basic_columns.COLUMNS,
    "nonfinite_attacked": nonfinite_attacked,
    "predicted_class": predicted_class,
}
CHECKS: tuple[Check, ...] = (*basic.CHECKS, *STRENGTH)
KINDS: dict[SuiteKind, str] = {
    "single": "one network",
    "ensemble": "an ensemble with one prediction",
    "randomized": "a randomized ensemble",
    "random": "random predictions",
    "transformed": "a transformation ensemble",
    "transductive": "adapts to the test batch",
}


def audit(
    defense: Defense,
    x: Tensor,
    y: Tensor,
    threat: Threat | None = None,
    index: Tensor | None = None,
    checks: Sequence[Check] = CHECKS,
    **options: Any,
) -> Report:
    """Check a defense for a false sense of security, without a Trainer.

    Args:
        defense: the defense; it and torch's global random stream are not changed.
        x: [B, C, H, W] images; a defense that adapts has them all in one round.
        threat: linf, l2 or l1; None is linf 8/255.
        index: [B] the images' indices, by which noise is keyed; None for the positions.
        checks: the checks that are made; only the columns that they need are measured.
        **options: see `AuditTarget`.
    """
    target = AuditTarget(defense, threat or Threat(), **options)
    return build_report(target, lazy_columns(target, x, y, index), checks)


def lazy_columns(
    target: AuditTarget, x: Tensor, y: Tensor, index: Tensor | None = None
) -> LazyColumns:
    """Return the columns [B] of a batch by name: scores under attacks, then `COLUMNS`."""
    names = [*target.attacks, *target.half_columns]
    scores: dict[str, Measure] = {n: methodcaller("score", *n.split("/")) for n in names}
    return LazyColumns(AuditBatch(target, x, y, index), scores | COLUMNS)


def column_names(target: AuditTarget) -> list[str]:
    """Return the names of all columns: scores under attacks, then `COLUMNS`."""
    return [*target.attacks, *target.half_columns, *COLUMNS]


def measure(target: AuditTarget, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """Return all columns of a batch: [B, len(column_names)]."""
    columns, found = lazy_columns(target, x, y, index), []
    for name in columns:
        try:
            found.append(columns[name])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if name not in COLUMNS:  # an attack: without it there is nothing to report
                raise
            target.failed[name] = error
            found.append(columns.batch.unknown())
    return torch.stack(found, 1)


class _Measured(dict[str, Tensor]):
    """Columns by name; to read one that could not be measured raises the error."""

    def __init__(self, columns: Columns, failed: dict[str, Exception]) -> None:
        super().__init__((name, one) for name, one in columns.items() if name not in failed)
        self.failed = failed

    def __missing__(self, name: str) -> Tensor:
        raise self.failed[name]


def build_report(target: AuditTarget, columns: Columns, checks: Sequence[Check] = CHECKS) -> Report:
    """Judge the columns [N] of all images together."""
    read = _Measured(columns, target.failed) if target.failed else columns
    findings = by_severity(made(check, target, read) for check in checks)
    title = f"{type(target.defense).__name__} · {KINDS[target.suite.kind]}"
    results = _results(target, columns) if set(CHECKS) <= set(checks) else []
    return Report(title, results, findings)


def _results(target: AuditTarget, columns: Columns) -> list[Result]:
    """Return the accuracy under each attack that could run, and the worst case in the threat."""
    found = []
    for name, attack in target.attacks.items():
        ball = "every image" if name == "unbounded" else str(attack.threat)
        details = {"attack": attack_spec(attack), "ball": ball}
        if len(known(columns[name])):
            found.append(measured(name, columns[name], target.seconds[name], details))
    names = target.half_columns or target.worst_names
    # An attack that could not run is never the strongest.
    scores = torch.stack([columns[name].nan_to_num(torch.inf) for name in names], 1)
    scores = scores.reshape(len(scores), len(target.worst_names), -1)
    # A minimum of noisy scores, image by image, would be too low.
    random = any(bool(columns[name].any()) for name in ("is_random", "is_nondeterministic"))
    table = torch.arange(len(scores)), scores
    worst = worst_case([table], random or not target.exact, joint=target.transductive)
    return [*found, worst.row({"ball": str(target.threat)})]
