"""Accuracy of an ensemble, and of parts of it, under every voting rule, from the same votes."""

import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_rob.attacks import TAA, Attack, NoAttack, evaluating
from lightning_rob.attacks.transform_ensemble import attackable
from lightning_rob.callbacks.base import EvaluationCallback
from lightning_rob.callbacks.loggers import writing_folder
from lightning_rob.callbacks.progress import console_of
from lightning_rob.callbacks.robust_eval import with_threat
from lightning_rob.defenses import Defense, is_transform_ensemble
from lightning_rob.evaluation import GROUP_SIZE, EvaluationSettings, RoundProtocol
from lightning_rob.evaluation.groups import Batch
from lightning_rob.evaluation.protocol import check_within
from lightning_rob.evaluation.records import append_records
from lightning_rob.metrics import PerImage, robust_accuracy, wilson_over_draws
from lightning_rob.objectives import check_logits
from lightning_rob.randomness import Streams
from lightning_rob.rules import VOTING_RULES, Rule
from lightning_rob.runtime.errors import at_least
from lightning_rob.runtime.identity import attack_spec
from lightning_rob.tables import CLEAN, print_votes
from lightning_rob.threat import Length, Norm, Threat
from lightning_rob.transforms.pool import WORDS, chosen

ALL = "all"
DISSIMILARITY = Threat("l2", 1.0, relative=True)
Names = list[str] | str


class VotingRuleEval(EvaluationCallback):
    """Attack an ensemble once, and count its members' votes by every rule.

    Prints a table with the accuracy under each rule, as Tables 4 to 7 of Liao et al. (2020), at the
    end of a test, and logs `{stage}/votes/{attack}/{rule}`, or `…/{ensemble}/{rule}` of the parts
    asked for. Noise is keyed by image; the random streams of training are not touched.

    Args:
        attacks: name -> attack.
        rules: name -> rule that turns votes into a prediction; None is RD, MV, T2MV, AVEP and AVEL.
        ensembles: name -> which members of a `TransformEnsemble` vote: names or words as for
            `lightning_rob.transforms.pool.chosen`, where "reversible", "irreversible" and "all" are
            those that there are; None is one of all members.
        draws: how often an ensemble such as "14r+28i" is drawn; the accuracy is the mean over
            draws.
        attacked: the members that the attacker knows, in the same words; None is all.
        each_target: of each attack make a `TAA` on every member that can be attacked, in turn, and
            call it `{attack}_on_{transformation}` (Table 4).
        every_n_epochs: evaluate in every n-th epoch of `fit`.
        max_images: attack this many images, a random choice by the seed; None attacks all.
        seed: of the evaluation's noise and of the draws.
        record: file in the run's folder to which each accuracy is appended as a line of JSON.
        only: patterns of the names of the attacks to run, such as "cw*"; None runs all.
        eps: radius of all attacks instead of their own, see `RobustEval`.
        norm: norm of the attacks instead of their own, with `eps`.
        group_size: images that are attacked together; other sizes may round otherwise.

    Raises:
        ValueError: no attacks, none that `only` names, one called "clean", or a count below 1.
    """

    def __init__(
        self,
        attacks: dict[str, Attack],
        rules: dict[str, Rule] | None = None,
        ensembles: dict[str, Names] | None = None,
        draws: int = 5,
        attacked: Names | None = None,
        each_target: bool = False,
        every_n_epochs: int = 1,
        max_images: int | None = None,
        seed: int = 0,
        record: str = "votes.jsonl",
        only: list[str] | None = None,
        eps: Length | None = None,
        norm: Norm | None = None,
        group_size: int = GROUP_SIZE,
    ) -> None:
        if not attacks:
            raise ValueError("attacks must name at least one attack, got an empty dict")
        if CLEAN in attacks:
            raise ValueError("no attack can be called 'clean': that row has another meaning")
        settings = EvaluationSettings(seed, max_images=max_images, group_size=group_size)
        super().__init__(settings, every_n_epochs)
        at_least(1, draws=draws)
        self.given = with_threat(_matching(attacks, only), eps, norm)
        self.attacks = dict(self.given)  # those that no earlier callback of the run runs
        self.rules = rules or dict(VOTING_RULES)
        self.ensembles = ensembles
        self.draws = draws
        self.attacked = attacked
        self.each_target = each_target
        self.made: dict[str, Attack] = {}
        self.record = record
        self.parts: dict[str, list[list[int]]] = {}
        self.tables: dict[str, PerImage] = {}
        self.seconds: dict[str, float] = {}
        self.results: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop attacks that an earlier callback runs; number names that it uses for another."""
        super().setup(trainer, pl_module, stage)
        how = (self.rules, self.ensembles, self.draws, self.attacked, self.each_target)
        self.attacks = self.collector(trainer).register(self, self.given, *how)

    def due(self, trainer: Trainer) -> bool:
        """Whether this callback evaluates in the current epoch: once all members are trained."""
        complete = getattr(trainer.lightning_module, "complete", True)
        growing = trainer.state.fn == "fit" and not complete
        return bool(self.attacks) and not growing and super().due(trainer)

    def attack_count(self, pl_module: Any) -> int:
        """Return the number of attacks."""
        return len(self._made(self.defense_of(pl_module)))

    def begin(self, trainer: Trainer, pl_module: Any) -> RoundProtocol | None:
        """Forget the last evaluation, and draw the ensembles from the current members."""
        if self.defense_of(pl_module).transductive:
            kind = type(self.defense_of(pl_module)).__name__
            raise TypeError(f"{kind} adapts to the test batch: play games against it by RobustEval")
        self.parts = self._parts(self.defense_of(pl_module))
        votes = sum(map(len, self.parts.values())) * len(self.rules)
        self.made = self._made(self.defense_of(pl_module))
        names = (CLEAN, *self.made)
        self.tables = {name: PerImage(1 + votes).to(pl_module.device) for name in names}
        self.seconds = dict.fromkeys(self.made, 0.0)
        return None

    def _target(self, defense: Any) -> Any:
        """Return the part of the defense that the attacker knows."""
        if self.attacked is None:
            return defense
        return defense.part(_places(defense, self.attacked, self.settings.seed))

    def _made(self, defense: Defense) -> dict[str, Attack]:
        """Return the attacks that run: those given, or one on each member."""
        known = self._target(defense)
        if not self.each_target or not is_transform_ensemble(known):
            return self.attacks
        return {
            f"{name}_on_{known.names[i]}": TAA(attack, known.names[i])
            for name, attack in self.attacks.items()
            for i in attackable(known)
        }

    def _parts(self, defense: Defense) -> dict[str, list[list[int]]]:
        """The members of each draw of each ensemble."""
        if self.ensembles is None:
            return {ALL: [list(range(len(defense.weights)))]}
        found = {}
        for name, members in self.ensembles.items():
            seeds = range(self.settings.seed, self.settings.seed + self.draws)
            drawn = [tuple(_places(defense, members, seed)) for seed in seeds]
            found[name] = [list(part) for part in dict.fromkeys(drawn)]
        return found

    def attack_batch(self, trainer: Trainer, pl_module: Any, batch: Batch) -> None:
        """Let the members vote on the batch, untouched and under every attack."""
        defense, (x, y, index) = self.defense_of(pl_module), batch
        target = self._target(defense)
        nothing = NoAttack(next(iter(self.attacks.values())).threat)
        for name, attack in {CLEAN: nothing, **self.made}.items():
            began, keys = time.perf_counter(), (self.settings.seed, 0, *name.encode())
            x_adv = attack(target, x, y, Streams.from_index(index, *keys, 0))
            check_within(attack, x_adv, x)
            scores = self._scores(defense, x_adv, y, Streams.from_index(index, *keys, 2))
            dissimilarity = DISSIMILARITY.distance(x_adv, x)
            if not trainer.sanity_checking:
                self.tables[name].update(index, torch.stack([dissimilarity, *scores], 1))
            if name != CLEAN:
                self.seconds[name] += time.perf_counter() - began
                if self.progress:
                    self.progress.advance(name, len(x))

    @torch.no_grad()
    def _scores(self, defense: Defense, x: Tensor, y: Tensor, noise: Streams) -> list[Tensor]:
        """The accuracies [B] of every draw of every ensemble under every rule, votes cast once."""
        with evaluating(defense) as copied:
            logits = copied.logits(x, noise)
        check_logits(logits, y)
        found = []
        for draws in self.parts.values():
            for members in draws:
                weights = defense.weights[members] / defense.weights[members].sum()
                predictions = [rule(logits[members], weights) for rule in self.rules.values()]
                found += [robust_accuracy(prediction, y) for prediction in predictions]
        return found

    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Log the accuracies, and record them."""
        self.results = self._results(self.run_metadata(trainer, stage))
        for result in self.results:
            middle = "" if self.ensembles is None else f"{result['ensemble']}/"
            key = f"{stage}/votes/{result['name']}/{middle}{result['rule']}"
            self.log_value(pl_module, key, result["accuracy"])
        if stage == "test":
            self.collector(trainer).rows.append(self.results)
        folder = writing_folder(trainer)
        if folder is not None:
            append_records(folder / self.record, self.results)

    def _results(self, shared: dict[str, Any]) -> list[dict[str, Any]]:
        """A record for each attack, ensemble and rule."""
        found: list[dict[str, Any]] = []
        for name, table in self.tables.items():
            _, scores = table.rows()
            details = shared | self._details(name) | {"n": len(scores)}
            known = scores[:, 0][scores[:, 0].isfinite()]  # a black image has none
            details["dissimilarity"] = float(known.mean()) if len(known) else None
            columns = iter(scores[:, 1:].unbind(1))
            for ensemble, draws in self.parts.items():
                rows = [[float(next(columns).mean()) for _ in self.rules] for _ in draws]
                for rule, values in zip(self.rules, zip(*rows, strict=True), strict=True):
                    places = {"ensemble": ensemble, "rule": rule, "members": len(draws[0])}
                    found.append(
                        {"kind": "voting_rule", "name": name}
                        | details
                        | places
                        | _accuracy(values, len(scores))
                    )
        return found

    def _details(self, name: str) -> dict[str, Any]:
        if name == CLEAN:
            return {}
        attack = self.made[name]
        fields = {"attack": attack_spec(attack), "threat": attack_spec(attack.threat)}
        return fields | {"attacked": self.attacked, "seconds": self.seconds[name]}

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the tables of all callbacks of the run, once."""
        for results in self.collector(trainer).take_rows() if trainer.is_global_zero else ():
            print_votes(type(pl_module).__name__, results, console_of(trainer))


def _accuracy(values: Sequence[float], n: int) -> dict[str, Any]:
    """The mean over draws with its 95 % interval, over the images and, if several, the draws."""
    interval = wilson_over_draws(values, n)
    return {"accuracy": fmean(values), "interval": interval, "draws": list(values)}


def _places(defense: Defense, names: Names, seed: int) -> list[int]:
    """The members behind these transformations.

    Raises:
        TypeError: the defense is not a `TransformEnsemble`.
        ValueError: a transformation is missing.
    """
    if not is_transform_ensemble(defense):
        raise TypeError(f"ensembles are parts of a TransformEnsemble, got {type(defense).__name__}")
    wanted: list[str] = []
    for one in [names] if isinstance(names, str) else names:
        found = chosen(one, seed)
        wanted += [name for name in found if one not in WORDS or name in defense.transforms]
    if not wanted:
        raise ValueError(f"no member is behind {names}, there are {', '.join(defense.names)}")
    return [defense.place(name) for name in dict.fromkeys(wanted)]


def _matching(attacks: dict[str, Attack], only: list[str] | None) -> dict[str, Attack]:
    """Return the attacks whose names match one of the patterns; all without patterns."""
    if only is None:
        return attacks
    found = {k: v for k, v in attacks.items() if any(fnmatchcase(k, part) for part in only)}
    if not found:
        raise ValueError(f"no attack is called {', '.join(only)}: {', '.join(attacks)}")
    return found
