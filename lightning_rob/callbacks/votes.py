"""Accuracy of an ensemble, and of parts of it, under every voting rule, from the same votes."""

import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_rob.attacks import TAA, Attack, NoAttack, evaluating
from lightning_rob.attacks.transform_ensemble import attackable
from lightning_rob.callbacks.base import EvaluationCallback, with_threat
from lightning_rob.callbacks.images import Images
from lightning_rob.callbacks.loggers import writing_folder
from lightning_rob.callbacks.progress import console_of
from lightning_rob.defenses import Defense, is_transform_ensemble
from lightning_rob.evaluation.groups import Batch
from lightning_rob.evaluation.protocol import check_within
from lightning_rob.evaluation.records import append_records
from lightning_rob.metrics import PerImage, robust_accuracy, wilson_over_draws
from lightning_rob.objectives import check_logits
from lightning_rob.randomness import Streams
from lightning_rob.rules import VOTING_RULES, Rule, abstains
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
    asked for; `votes.jsonl` in the run's folder has them too. Noise is keyed by image.

    Args:
        attacks: name -> attack.
        rules: name -> rule that turns votes into a prediction; None is all of `VOTING_RULES`.
        ensembles: name -> which members of a `TransformEnsemble` vote: names or words as for
            `lightning_rob.transforms.pool.chosen`, where "reversible", "irreversible" and "all" are
            those that there are; None is one of all members.
        draws: number of random compositions of an ensemble such as "14r+28i"; the accuracy is their
            mean.
        attacked: members that the attacker knows, in the same words; None is all.
        each_target: of each attack make a `TAA` on every member that can be attacked, in turn, and
            call it `{attack}_on_{transformation}` (Table 4).
        only: patterns of the names of the attacks to run, such as "cw*"; None runs all.
        eps: radius of all attacks instead of their own, see `RobustEval`.
        norm: norm of the attacks instead of their own, with `eps`.
        **options: those of `EvaluationCallback`; the seed is that of the compositions too.
    """

    def __init__(
        self,
        attacks: dict[str, Attack],
        rules: dict[str, Rule] | None = None,
        ensembles: dict[str, Names] | None = None,
        draws: int = 5,
        attacked: Names | None = None,
        each_target: bool = False,
        only: list[str] | None = None,
        eps: Length | None = None,
        norm: Norm | None = None,
        **options: Any,
    ) -> None:
        at_least(1, draws=draws)
        patterns = ["*"] if only is None else only
        kept = {n: a for n, a in attacks.items() if any(fnmatchcase(n, p) for p in patterns)}
        if attacks and not kept:
            raise ValueError(f"no attack is called {', '.join(patterns)}: {', '.join(attacks)}")
        super().__init__(with_threat(kept, eps, norm), **options)
        self.rules = rules or dict(VOTING_RULES)
        self.ensembles = ensembles
        self.draws = draws
        self.attacked = attacked
        self.each_target = each_target
        self.made: dict[str, Attack] = {}
        self.parts: dict[str, list[list[int]]] = {}
        self.tables: dict[str, PerImage] = {}
        self.seconds: dict[str, float] = {}
        self.results: list[dict[str, Any]] = []

    @property
    def conditions(self) -> tuple[Any, ...]:
        return self.rules, self.ensembles, self.draws, self.attacked, self.each_target

    def due(self, trainer: Trainer) -> bool:
        """Whether this callback evaluates in the current epoch: once all members are trained."""
        complete = getattr(trainer.lightning_module, "complete", True)
        return (complete or trainer.state.fn != "fit") and super().due(trainer)

    def begin(self, trainer: Trainer, pl_module: Any, loaders: Any) -> Sequence[Images]:
        defense, seed = self.defense_of(pl_module), self.settings.seed
        if defense.transductive:
            kind = type(defense).__name__
            raise TypeError(f"{kind} adapts to the test batch: play games against it by RobustEval")
        if defense.may_reject or any(map(abstains, self.rules.values())):
            raise ValueError(
                "a rejection is no vote: evaluate a defense that rejects by RobustEval"
            )
        self.parts = {ALL: [list(range(len(defense.weights)))]} if self.ensembles is None else {}
        for name, members in (self.ensembles or {}).items():
            drawn = [tuple(_places(defense, members, seed + draw)) for draw in range(self.draws)]
            # Several draws of a small ensemble may be the same: each counts once.
            self.parts[name] = [list(part) for part in dict.fromkeys(drawn)]
        self.made, known = self.attacks, self._known_part(defense)
        if self.each_target and is_transform_ensemble(known):
            self.made = {
                f"{name}_on_{known.names[i]}": TAA(attack, known.names[i])
                for name, attack in self.attacks.items()
                for i in attackable(known)
            }
        votes = sum(map(len, self.parts.values())) * len(self.rules)
        names = (CLEAN, *self.made)
        self.tables = {name: PerImage(1 + votes).to(pl_module.device) for name in names}
        self.seconds, self.results = dict.fromkeys(self.made, 0.0), []
        return [Images(trainer, loaders, self.inputs, self.settings, attacks=len(self.made))]

    def _known_part(self, defense: Any) -> Any:
        if self.attacked is None:
            return defense
        return defense.part(_places(defense, self.attacked, self.settings.seed))

    def attack_batch(self, trainer: Trainer, pl_module: Any, batch: Batch, images: Images) -> None:
        defense, (x, y, index) = self.defense_of(pl_module), batch
        known = self._known_part(defense)
        # Every rule and ensemble is counted from the same votes: each image is predicted once.
        nothing = NoAttack(next(iter(self.attacks.values())).threat)
        for name, attack in {CLEAN: nothing, **self.made}.items():
            began, keys = time.perf_counter(), (self.settings.seed, 0, *name.encode())
            x_adv = attack(known, x, y, Streams.from_index(index, *keys, 0))
            check_within(attack, x_adv, x)
            with evaluating(defense) as copied, torch.no_grad():
                logits = copied.logits(x_adv, Streams.from_index(index, *keys, 2))
            check_logits(logits, y)
            scores = []  # [B] of every composition of every ensemble under every rule
            for members in (members for draws in self.parts.values() for members in draws):
                weights = defense.weights[members] / defense.weights[members].sum()
                for rule in self.rules.values():
                    scores.append(robust_accuracy(rule(logits[members], weights), y))
            dissimilarity = DISSIMILARITY.distance(x_adv, x)
            if not trainer.sanity_checking:
                self.tables[name].update(index, torch.stack([dissimilarity, *scores], 1))
            if name != CLEAN:
                self.seconds[name] += time.perf_counter() - began
                self.advance(name, len(x))

    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        for name, table in self.tables.items():
            _, scores = table.rows()
            details: dict[str, Any] = {"kind": "voting_rule", "name": name}
            details |= self.images[0].metadata
            if name != CLEAN:
                attack = self.made[name]
                details |= {"attack": attack_spec(attack), "threat": attack_spec(attack.threat)}
                details |= {"attacked": self.attacked, "seconds": self.seconds[name]}
            known = scores[:, 0][scores[:, 0].isfinite()]  # a black image has none
            details["n"] = n = len(scores)
            details["dissimilarity"] = float(known.mean()) if len(known) else None
            columns = iter(scores[:, 1:].unbind(1))
            for ensemble, draws in self.parts.items():
                rows = [[float(next(columns).mean()) for _ in self.rules] for _ in draws]
                for rule, values in zip(self.rules, zip(*rows, strict=True), strict=True):
                    place = {"ensemble": ensemble, "rule": rule, "members": len(draws[0])}
                    # The 95 % interval is over the images and, if several, the compositions.
                    accuracy = {"accuracy": fmean(values), "interval": wilson_over_draws(values, n)}
                    self.results.append(details | place | accuracy | {"draws": list(values)})
        for result in self.results:
            middle = "" if self.ensembles is None else f"{result['ensemble']}/"
            key = f"{stage}/votes/{result['name']}/{middle}{result['rule']}"
            self.log_value(pl_module, key, result["accuracy"])
        folder = writing_folder(trainer)
        if folder is not None:
            append_records(folder / "votes.jsonl", self.results)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.results and trainer.is_global_zero:
            print_votes(type(pl_module).__name__, self.results, console_of(trainer))


def _places(defense: Defense, names: Names, seed: int) -> list[int]:
    if not is_transform_ensemble(defense):
        raise TypeError(f"ensembles are parts of a TransformEnsemble, got {type(defense).__name__}")
    wanted: list[str] = []
    for one in [names] if isinstance(names, str) else names:
        found = chosen(one, seed)
        wanted += [name for name in found if one not in WORDS or name in defense.transforms]
    if not wanted:
        raise ValueError(f"no member is behind {names}, there are {', '.join(defense.names)}")
    return [defense.place(name) for name in dict.fromkeys(wanted)]
