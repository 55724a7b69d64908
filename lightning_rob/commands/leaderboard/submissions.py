"""Submissions to a leaderboard: how they are scored under its protocol, and checked."""

import json
import math
import shutil
import time
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binom, permutation_test
from torch import Tensor

from lightning_rob.attacks import Attack, Auto
from lightning_rob.certify import certify
from lightning_rob.defenses import Defense
from lightning_rob.defenses.copies import working_copy
from lightning_rob.evaluation import EvaluationResult, RoundProtocol, evaluate
from lightning_rob.evaluation.evaluator import TRIED
from lightning_rob.evaluation.findings import Finding
from lightning_rob.evaluation.records import versions, with_schema
from lightning_rob.evaluation.suites import suite_for
from lightning_rob.evaluation.worst import WORST, draws_noise, is_random
from lightning_rob.metrics.gaffke import p_at_most
from lightning_rob.metrics.intervals import paired_p
from lightning_rob.recipes.safe_yaml import load_file
from lightning_rob.runtime.errors import InputError, at_least, nearest, visible
from lightning_rob.runtime.files import atomic_write_text
from lightning_rob.runtime.identity import cache_key, fingerprint
from lightning_rob.threat import Threat

SCORES = "scores.json"
CLEAN, USUAL, ADAPTS = "clean", "usual", "auto"
ROUNDED = 0.005  # of the images on which another processor may differ; between SSE and AVX 0 of 800
TIE = 1e-6
DIFFERS = 0.01  # p below which scores of the same images are not the same defense's
OTHER = (
    "other weights: the scores are not of this model; delete scores.json and run with --evaluate"
)
SUBMISSIONS = 10  # of one image, by an attacker who needs one wrong prediction
TIMED = 32  # images of a prediction whose time is taken
RUNS = 30  # of a prediction, the fastest counts: a busy machine makes most of a few runs slow
Scores = dict[str, Any]
Batches = list[tuple[Tensor, Tensor, Tensor]]  # x, y and index


@dataclass(frozen=True)
class Protocol:
    """Hold what all defenses of a leaderboard share: data, radii, attacks and noise."""

    title: str
    data: dict[str, Any]  # class_path and init_args of a data module: its test images
    radii: dict[str, float]  # by norm
    images: int
    seed: int = 0
    passes: int = 2000  # of Auto, an image
    steps: int = 20  # of the usual attack
    inferences: int = SUBMISSIONS
    power: int = 0  # images on which the power of each attack is tested
    certified: int = 0  # draws that bound a probability, for smoothed defenses in l2
    training: float | None = None  # passes of a training image, at most

    def __post_init__(self) -> None:
        for key in ("images", "seed", "passes", "steps", "inferences", "power", "certified"):
            if type(value := getattr(self, key)) is not int:
                raise TypeError(f"{key} must be a whole number, got {value!r}")
        at_least(1, passes=self.passes, inferences=self.inferences)
        at_least(2, images=self.images)  # ranks need a variance between images
        if not self.radii:
            raise ValueError("radii must name a norm")
        str(self.title).encode()  # raises for a lone surrogate, which no file can hold
        # A ValueError for another norm; YAML reads 2 as a number.
        radii = {str(Threat(norm, eps).norm): eps for norm, eps in self.radii.items()}
        object.__setattr__(self, "radii", radii)

    def attacks(self, defense: Defense, threat: Threat, random: bool) -> dict[str, Attack]:
        """Return the usual attack on a kind of defense, and the ones that adapt to it."""
        suite = suite_for(defense, threat, self.steps, random=random)
        found = {USUAL: suite.attacks[suite.default]}
        within = set(suite.within(threat))
        found |= {name: suite.attacks[name] for name in suite.adaptive if name in within}
        return found if defense.transductive else found | {ADAPTS: Auto(threat, self.passes)}


@dataclass
class Submission:
    """One trained defense of a leaderboard, with its scores and what speaks against a rank."""

    folder: Path
    name: str
    paper: str = ""
    seed: int = 0
    training: float | None = None  # passes of a training image
    # Not of its file, which is the submitter's.
    scores: Scores = field(default_factory=dict, init=False)
    reasons: list[str] = field(default_factory=list, init=False)  # why it has no rank
    published: bool = field(default=False, init=False)  # of another leaderboard, without a model

    def __post_init__(self) -> None:
        for key, kind in (("name", str), ("paper", str), ("seed", int)):
            if type(value := getattr(self, key)) is not kind:
                raise ValueError(f"{key} must be of type {kind.__name__}, got {value!r}")
            str(value).encode()  # raises for a lone surrogate, which no file can hold
        if not self.name or unicodedata.normalize("NFKC", self.name).strip() != self.name:
            raise ValueError(f"name must be plain text without spaces around, got {self.name!r}")
        known = self.training is not None
        number = type(self.training) in (int, float)
        if known and not (number and 0 <= self.training < math.inf):  # type: ignore[operator]
            raise ValueError(f"training must be a number of passes, got {self.training!r}")

    @classmethod
    def read(cls, folder: Path) -> "Submission":
        """Return the submission of a folder, with its scores, or the reason why it has no rank."""
        found, path = cls(folder, visible(folder.name).strip()), folder / SCORES
        try:
            inside = folder.parent.resolve() / folder.name
            for one in (folder, *folder.iterdir()):
                if not one.resolve().is_relative_to(inside):
                    raise ValueError(f"{one.name} is a link to what is elsewhere: give the files")
            if odd := [one for one in folder.iterdir() if not (one.is_file() or one.is_dir())]:
                raise ValueError(f"{odd[0].name} is no file")  # to read a pipe never ends
            found = cls(folder, **_content(folder / "submission.yaml", cls))
            found.scores = _scores(path) if path.is_file() else {}
        except (InputError, ValueError, TypeError, OSError, RecursionError) as error:
            found.reasons.append(visible(str(error)))
        return found

    def publish(self, protocol: Protocol) -> dict[str, Any]:
        """Return what a leaderboard.json holds of a ranked submission."""
        about = {key: getattr(self, key) for key in ("name", "paper", "seed", "training")}
        scores = {key: value for key, value in self.scores.items() if key != "protocol"}
        scores["norms"] = {norm: dict(scores["norms"][norm]) for norm in protocol.radii}
        for part in scores["norms"].values():
            part["images"] = {name: part["images"][name] for name in (CLEAN, USUAL, WORST)}
        return {"folder": self.folder.name, "about": about, "scores": scores}

    @property
    def model(self) -> Path:
        """The checkpoint, or the folder with the files of an export."""
        checkpoint = self.folder / "last.ckpt"
        return checkpoint if checkpoint.exists() else self.folder

    def evaluate(self, protocol: Protocol, defense: Defense, batches: Batches) -> None:
        """Attack under the protocol, and write the scores; a run that was stopped goes on."""
        scores: Scores = {"protocol": asdict(protocol), "weights": fingerprint(defense)}
        scores["versions"] = versions()
        # Outside of the submission, whose files are not ours.
        name = f"{self.folder.name[:50]}_{cache_key(**scores, batches=batches)}"
        kept = self.folder.with_name(".scoring") / name
        scores |= {"prediction": relative_time(defense, batches[0][0]), "norms": {}}
        for norm, eps in protocol.radii.items():
            if not (path := kept / f"{norm}.json").exists():
                part = self._within(defense, protocol, Threat(norm, eps), batches, kept)
                kept.mkdir(parents=True, exist_ok=True)
                atomic_write_text(path, json.dumps(part))
            scores["norms"][norm] = json.loads(path.read_text())
        if protocol.certified and hasattr(defense, "sigma") and "l2" in protocol.radii:
            found = certify(
                defense,
                batches,
                draws=protocol.certified,
                radii=[protocol.radii["l2"]],
                seed=protocol.seed,
                progress=False,
            )
            scores["certified"] = found.certified(protocol.radii["l2"])
        self.scores = with_schema(scores)
        atomic_write_text(self.folder / SCORES, json.dumps(self.scores, allow_nan=False) + "\n")
        shutil.rmtree(kept)
        with suppress(OSError):  # another submission is scored at the same time
            kept.parent.rmdir()

    def _within(
        self, defense: Defense, protocol: Protocol, threat: Threat, batches: Batches, kept: Path
    ) -> Scores:
        result = scored(defense, protocol, threat, batches, kept=kept)
        found: Scores = {"index": result.index.tolist(), "random": result.random}
        names = (*result.names, WORST)
        found["images"] = {name: result.per_image(name).tolist() for name in names}
        strongest = strongest_of(result)
        found["findings"] = [[f.severity, f.name, f.text] for f in flagged(result)]
        found["power"] = {name: one.record() for name, one in result.power.items()}
        if result.random or len(set(result.per_image(CLEAN).tolist()) - {0.0, 1.0}):
            # Undefined for a few inferences, scores between right and wrong, and one that adapts.
            with suppress(ValueError):
                found["resubmitted"] = result.resubmitted(strongest, SUBMISSIONS).accuracy
            with suppress(ValueError):
                found["known_noise"] = result.known_noise.accuracy
        return found

    def check_scores(self, protocol: Protocol, index: Sequence[int]) -> None:
        """Find what speaks against a rank in the scores alone."""
        if not self.scores:
            self.reasons.append("no scores: --evaluate attacks it")
            return
        own = self.scores.get("protocol", {})
        for key, wanted in asdict(protocol).items():
            if own.get(key) != wanted:
                self.reasons.append(f"another protocol: {key} is {own.get(key)}, not {wanted}")
        if protocol.training and (self.training is None or self.training > protocol.training):
            self.reasons.append(
                f"training cost: {self.training} passes of an image, at most {protocol.training:g}"
            )
        for norm in protocol.radii:
            found = self.scores["norms"][norm]
            self._refuse_severe(f"within {norm}", found["findings"])
            if found["index"] != index:
                self.reasons.append(f"scores within {norm} are not of the protocol's images")
            for name in (CLEAN, USUAL, WORST):
                values = found["images"][name]
                if len(values) != len(index) or not all(0 <= value <= 1 for value in values):
                    self.reasons.append(
                        f"{name} within {norm} must be {len(index)} numbers in [0, 1]"
                    )

    def check(
        self,
        protocol: Protocol,
        defense: Defense,
        batches: Batches,
        images: int,
        others: Batches,
    ) -> None:
        """Find whether the scores are of this model; attack images again if asked for.

        Args:
            batches: the protocol's images.
            images: how many of them are attacked again.
            others: test images that are not the protocol's, attacked by the usual attack.
        """
        if not self.scores:
            return
        x, _, index = batches[0]
        random = defense.transductive or is_random(working_copy(defense), x[:TRIED], index[:TRIED])
        for norm in () if random else self.scores["norms"]:
            found = self.scores["norms"][norm]
            above = zip(found["images"][WORST], found["images"][USUAL], strict=False)
            if any(worst > usual + TIE for worst, usual in above):
                self.reasons.append(f"{WORST} within {norm} is above {USUAL}, one of its attacks")
        if self.scores.get("weights") != fingerprint(defense):
            self.reasons.append(OTHER)
        elif images and not self.reasons:
            for norm, eps in protocol.radii.items():
                self._attack_again(defense, protocol, Threat(norm, eps), batches, images)
                if others:
                    self._attack_others(defense, protocol, Threat(norm, eps), others)

    def _refuse_severe(self, where: str, findings: Sequence[Sequence[str]]) -> None:
        if severe := {name: text for severity, name, text in findings if severity == "severe"}:
            texts = "; ".join(f"{name}: {text}" for name, text in sorted(severe.items()))
            self.reasons.append(f"severe findings {where}: {texts}")

    def _attack_again(
        self, defense: Defense, protocol: Protocol, threat: Threat, batches: Batches, images: int
    ) -> None:
        own = self.scores["norms"][str(threat.norm)]
        index = torch.tensor(own["index"])
        # A new choice at each check: the default stream is the same in every process.
        fresh = torch.Generator()
        fresh.seed()
        order = torch.randperm(len(index), generator=fresh)[:images].sort().values
        fewer = replace(protocol, power=min(protocol.power, len(order)))
        # A defense that adapts is another one in a smaller round.
        attacked = batches if defense.transductive else some_of(batches, index[order])
        result = scored(defense, fewer, threat, attacked)
        rows = torch.isin(result.index, index[order])
        found = [(one.severity, one.name, one.text) for one in flagged(result)]
        self._refuse_severe(f"of {len(order)} images attacked again within {threat.norm}", found)
        for name in (CLEAN, USUAL, WORST):
            before = torch.tensor(own["images"][name])[order].double()
            now = result.per_image(name)[rows].double()
            lost, any_way = before > now + TIE, (before - now).abs() > TIE
            differ = any_way if name == CLEAN else lost  # a luckier attack is no fraud
            if result.random or result.joint:
                of_more = p_at_most((before - now).numpy())  # on one side: as above
                p = paired_p(before, now) if name == CLEAN else of_more
            else:
                # The same images fall again, but for the rounding of another processor.
                p = float(binom.sf(int(differ.sum()) - 1, len(order), ROUNDED))
            if p < DIFFERS:
                accuracy = f"{before.mean():.1%} of the scores for {now.mean():.1%}"
                where = f"{len(order)} images attacked again within {threat.norm}"
                self.reasons.append(f"{name} of {where}: {accuracy}")
            elif name == WORST:
                # Of two attacks the best. Of noise the new draws: chosen ones may have been sent.
                kept = now if result.random or result.joint else now.minimum(before)
                for place, score in zip(order.tolist(), kept.tolist(), strict=True):
                    own["images"][WORST][place] = score

    def _attack_others(
        self, defense: Defense, protocol: Protocol, threat: Threat, others: Batches
    ) -> None:
        """Compare with images that the scores are not of: a defense may be trained on those."""
        own = self.scores["norms"][str(threat.norm)]["images"]
        result = scored(defense, protocol, threat, others, (USUAL,))
        for name in (CLEAN, USUAL):
            before, now = own[name], result.per_image(name).tolist()
            test = permutation_test((before, now), _gap, vectorized=True, alternative="greater")
            if test.pvalue < DIFFERS / (2 * len(protocol.radii)):
                self.reasons.append(
                    f"{name} within {threat.norm}: {sum(before) / len(before):.1%} of the "
                    f"protocol's images, and {sum(now) / len(now):.1%} of {len(now)} others"
                )


def _gap(first: Any, second: Any, axis: int) -> Any:
    return first.mean(axis) - second.mean(axis)


def scored(
    defense: Defense,
    protocol: Protocol,
    threat: Threat,
    batches: Batches,
    names: Sequence[str] | None = None,
    kept: Path | None = None,
) -> EvaluationResult:
    """Attack images under a protocol within one threat, by all its attacks or those of names.

    With a folder, an evaluation that was killed goes on from there.
    """
    adapts, (x, _, index) = defense.transductive, batches[0]
    attacks = protocol.attacks(defense, threat, draws_noise(defense, x[:TRIED], index[:TRIED]))
    return evaluate(
        defense,
        {name: attacks[name] for name in names or attacks},
        batches,
        seed=protocol.seed,
        inferences=1 if adapts else protocol.inferences,
        protocol=RoundProtocol(images=protocol.images) if adapts else None,
        known_noise=not adapts and not names,
        power=0 if adapts or names else protocol.power,
        resume=None if adapts and defense.stateful else kept,
        progress=kept is not None,
    )


def strongest_of(result: EvaluationResult) -> str:
    """Return the attack under which the accuracy is the lowest; of several, the ablest."""
    rate = {name: power.rate for name, power in result.power.items()}
    return min(result.attacks, key=lambda name: (result.accuracy(name), -rate.get(name, 0.0)))


def flagged(result: EvaluationResult) -> list[Finding]:
    """Return the warnings about the defense and about the strongest attack on it."""
    # A fault of one attack alone says nothing of what a stronger one finds.
    about = (None, strongest_of(result))
    found = [f for f in result.findings if f.flagged and f.values.get("attack") in about]
    able = any(power.passed for power in result.power.values())
    return [f for f in found if not (able and f.name == "power")]


def some_of(batches: Batches, wanted: Tensor) -> Batches:
    """Return the images at some indices."""
    masks = [torch.isin(index, wanted) for _, _, index in batches]
    parts = zip(batches, masks, strict=True)
    return [(x[m], y[m], index[m]) for (x, y, index), m in parts if m.any()]


def relative_time(defense: Defense, x: Tensor) -> float:
    """Return the time of a prediction in forward passes of one of its networks."""
    defense = deepcopy(defense)  # a prediction may change buffers
    net = (defense.base_model if defense.transductive else defense).foldable_networks[0]
    works: tuple[Callable[[], object], ...] = (
        lambda: net(x[:TIMED]),
        lambda: (defense.adapt(x[:TIMED]) if defense.transductive else defense)(x[:TIMED]),
    )
    one: list[float] = []
    whole: list[float] = []
    for _ in range(2 if defense.transductive else RUNS):
        # In turn, so that a slow moment of the machine meets both.
        for work, times in zip(works, (one, whole), strict=True):
            began = time.perf_counter()
            with torch.no_grad():
                work()
            times.append(time.perf_counter() - began)
    return min(whole) / min(one)  # the fastest: other work only makes a run longer


def read_protocol(folder: Path) -> Protocol:
    """Return the protocol of a leaderboard."""
    path = folder / "protocol.yaml"
    try:
        return Protocol(**_content(path, Protocol))
    except (TypeError, ValueError, AttributeError) as error:  # a value of another type
        raise InputError(f"{path}: {error}") from error


def read_published(path: Path) -> tuple[Protocol, list[Submission]]:
    """Return the protocol of a leaderboard.json, and the submissions whose scores it holds."""
    found = []
    try:
        content = json.loads(path.read_text("utf-8"))
        protocol = Protocol(**content["protocol"])
        for entry in content["submissions"]:
            one = Submission(path.parent / entry["folder"], **entry["about"])
            one.scores = {"protocol": asdict(protocol), **entry["scores"]}
            one.published = True
            found.append(one)
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is no leaderboard.json with the scores of its submissions: "
            f"{type(error).__name__}: {error}; docs/leaderboard.md names one for each data set"
        ) from error
    return protocol, found


def _scores(path: Path) -> Scores:
    """Return the scores of a file."""
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except ValueError as error:
        advice = "delete it and run with --evaluate"
        raise InputError(f"{path.name} is damaged ({error}): {advice}") from error


def _content(path: Path, kind: type[Protocol] | type[Submission]) -> Any:
    if not path.is_file():
        advice = "give the folder of a leaderboard, or --beside a published leaderboard.json"
        raise InputError(f"there is no {path}: {advice}")
    content = load_file(path, "a leaderboard's file")
    known = {one.name for one in fields(kind) if one.init} - {"folder"}
    for key in content.keys() - known if isinstance(content, dict) else ():
        raise InputError(f"{path}: there is no key {key!r}{nearest(str(key), known)}")
    if kind is Submission and isinstance(content, dict) and "name" not in content:
        raise InputError(f"{path} has no name")
    return content
