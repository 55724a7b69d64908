"""What there is to measure: each attack on each defense that a value stands for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rob.attacks import Attack
from lightning_rob.attacks.base import walk
from lightning_rob.callbacks import RobustEval
from lightning_rob.callbacks.robust_eval import full_defense
from lightning_rob.defenses import Defense
from lightning_rob.evaluation import worst_case
from lightning_rob.evaluation.records import Result, measured
from lightning_rob.identity import attack_spec, cache_key, fingerprint
from lightning_rob.sweep.options import Study, Value
from lightning_rob.sweep.points import Points, Scores, kept, scores_of
from lightning_rob.sweep.variables import VARIABLES, Variable

CLEAN, WORST = "clean", "worst"


@dataclass(frozen=True)
class Target:
    """What a callback attacks once the defense has the value.

    Args:
        variable: of which it is a value.
        value: that value.
        source: the callback.
    """

    variable: Variable
    value: float
    source: RobustEval

    def __call__(self, defense: Defense) -> Defense:
        """The part of the changed defense that is attacked."""
        return self.source.target(self.variable.defense(defense, self.value))


@dataclass(frozen=True)
class Game:
    """One figure of the table: an attack on a defense.

    Args:
        name: of the attack, or "clean".
        attack: None for clean images.
        target: what is attacked.
        details: for the record.
        key: stands for all that the figure depends on.
    """

    name: str
    attack: Attack | None
    target: Target
    details: dict[str, Any]
    key: str

    @property
    def counts(self) -> bool:
        """Whether it counts in the worst case: an attack on the whole defense."""
        return self.attack is not None and self.target.source.target is full_defense

    def result(self, images_and_scores: Scores, seconds: float, found: dict[str, Any]) -> Result:
        """The figure and its record.

        Args:
            images_and_scores: indices [N] and scores [N, R].
            seconds: the attack took.
            found: details of a result of the same evaluation.
        """
        images, scores = images_and_scores
        details = self.details | _measured(found) | kept(self.key, images, scores)
        draws = scores if found["private_draws"] > 1 else None
        return measured(self.name, scores.mean(1), seconds, details, draws)


Row = tuple[Value, list[Game]]


def _measured(details: dict[str, Any]) -> dict[str, Any]:
    """The details that are known only after the evaluation."""
    return {name: details[name] for name in ("random", "private_draws", "interval_covers")}


def plan(
    study: Study, callbacks: Sequence[RobustEval], defense: Defense, settings: dict[str, Any]
) -> list[Row]:
    """The games of each value.

    Args:
        study: what is asked for.
        callbacks: the attacks and their targets.
        defense: with its weights.
        settings: what else a figure depends on, such as the data.

    Raises:
        ValueError: the study does not fit the attacks or the defense.
    """
    variable = VARIABLES[study.over]
    attacks = [attack for callback in callbacks for attack in callback.attacks.values()]
    if not attacks:
        raise ValueError("no attacks to sweep: add --trainer.callbacks+=callbacks/apgd.yaml")
    have = [hasattr(part, variable.field or "threat") for a in attacks for part in walk(a)]
    if not any(have):
        raise ValueError(f"no attack has {variable.field} to sweep over: add callbacks/arc.yaml")
    rows = []
    for value in study.values:
        targets = [Target(variable, value.number, callback) for callback in callbacks]
        rows.append((value, [g for t in targets for g in _games(study, t, defense, settings)]))
    games = rows[0][1]
    names = [*dict.fromkeys(game.name for game in games)]
    names += [WORST] * (sum(game.counts for game in games) > 1)
    if study.best and study.best not in names:
        raise ValueError(f"choose --best from {', '.join(names)}, got {study.best!r}")
    return rows


def _games(
    study: Study, target: Target, defense: Defense, settings: dict[str, Any]
) -> Iterator[Game]:
    source = target.source
    shared = {
        "target": getattr(source.target, "__name__", repr(source.target)),
        **{name: value for name, value in source.settings.asdict().items() if value is not None},
        "max_images": source.settings.max_images,
    }
    depends = shared | settings | {"defense": fingerprint(target(defense))}
    attacks: dict[str, Attack | None] = {CLEAN: None} if source.target is full_defense else {}
    for name, attack in source.attacks.items():
        attacks[name] = target.variable.attack(attack, target.value)
    for name, changed in attacks.items():
        told = {}
        if changed:
            told = {"attack": attack_spec(changed), "threat": attack_spec(changed.threat)}
        place = {"variable": study.over, "value": target.value, "stage": "test"}
        key = cache_key(name=name, **told, **depends)
        details = place | told | shared | {"versions": settings["versions"]}
        yield Game(name, changed, target, details, key)


def worst(games: Sequence[Game], points: Points, adapts: bool = False) -> list[Result]:
    """The accuracy under the strongest attack on the whole defense, if there are several.

    Like that of `RobustEval` it counts the clean image too; see `worst_case`.
    """
    counted = [game for game in games if game.counts]
    if len(counted) < 2:
        return []
    clean = [game for game in games if game.attack is None]
    over = [points[game.key] for game in (*clean, *counted)]
    tables = [scores_of(result.details["reuse"]) for result in over]
    random = any(result.details["random"] for result in over)
    found = worst_case([(i, scores[:, None]) for i, scores in tables], random, adapts)
    key = cache_key(name=WORST, over=[game.key for game in counted])
    told = {"choice": found.choice, "over": [game.name for game in counted]}
    details = counted[0].details | _measured(over[-1].details)
    details |= told | kept(key, found.index, found.scores)
    for name in ("attack", "threat"):
        details.pop(name)
    draws = found.scores if over[-1].details["private_draws"] > 1 else None
    return [measured(WORST, found.scores.mean(1), 0.0, details, draws)]
