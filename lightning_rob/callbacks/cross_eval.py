"""Transfer matrix of an ensemble: each member is attacked alone, and all members predict."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics import SumMetric

from lightning_rob.attacks import TAA, Attack, evaluating
from lightning_rob.attacks.transform_ensemble import attackable
from lightning_rob.callbacks.base import EvaluationCallback, with_threat
from lightning_rob.callbacks.images import Images
from lightning_rob.callbacks.loggers import log_picture, writing_folder
from lightning_rob.defenses import Defense, Single, is_transform_ensemble
from lightning_rob.evaluation.groups import Batch
from lightning_rob.evaluation.protocol import AttackerDefenderSession
from lightning_rob.evaluation.records import append_records
from lightning_rob.metrics import Transferability, TransferMatrix, transfer_ranking, wilson
from lightning_rob.objectives import check_logits
from lightning_rob.plots import heat_map, pixels, save
from lightning_rob.randomness import Streams
from lightning_rob.rules import random_member
from lightning_rob.runtime.identity import attack_spec
from lightning_rob.tables import CLEAN, print_members
from lightning_rob.threat import Length, Norm


class TransferMatrixEval(EvaluationCallback):
    """Attack each member of the module's `defense` alone, and let all members predict.

    Sub-models of a `TransformEnsemble` are attacked in their own space, as by `TAA`. Noise is keyed
    by image and equals that of `RobustEval`: member 1 has the accuracy of `first_member` there.

    Logs `{stage}/member_{i}/acc`, clean, and `{stage}/member_{i}/{attack}`, member i under attack
    itself. Draws the matrix of every attack (ARC paper, Fig. 10a) as `transfer_{attack}.png` in the
    run's folder, and as `transferability_{attack}.png` the share of the images that fool one member
    which fool another (Liao et al. 2020, Table 3); `transfer.jsonl` has their figures. After a test
    prints the table of members (ARC paper, Table 4), and the members ranked by how well attacks on
    them transfer (Liao et al. 2020, Algorithm 2).

    Args:
        attacks: name -> attack.
        eps: radius of all attacks instead of their own, see `RobustEval`.
        norm: norm of the attacks instead of their own, with `eps`.
        **options: those of `EvaluationCallback`.
    """

    def __init__(
        self,
        attacks: dict[str, Attack],
        eps: Length | None = None,
        norm: Norm | None = None,
        **options: Any,
    ) -> None:
        if "acc" in attacks:
            raise ValueError("no attack can be called 'acc': that column has another meaning")
        super().__init__(with_threat(attacks, eps, norm), **options)
        self.matrices: dict[str, TransferMatrix] = {}
        self.transfers: dict[str, Transferability] = {}
        self.count = SumMetric()
        self.seconds = dict.fromkeys(attacks, 0.0)
        self.results: list[dict[str, Any]] = []

    def begin(self, trainer: Trainer, pl_module: Any, loaders: Any) -> Sequence[Images]:
        defense, device = self.defense_of(pl_module), pl_module.device
        members = len(defense.weights)
        if is_transform_ensemble(defense):
            known = {defense.names[i] for i in attackable(defense)}
            if beyond := [name for name in defense.names if name not in known]:
                raise TypeError(
                    f"{', '.join(beyond)} can neither be undone nor have a gradient: "
                    "TransferMatrixEval attacks sub-models one by one; use VotingRuleEval"
                )
        names = (CLEAN, *self.attacks)
        self.matrices = {name: TransferMatrix(members).to(device) for name in names}
        self.transfers = {name: Transferability(members).to(device) for name in self.attacks}
        self.count = SumMetric().to(device)
        self.seconds = dict.fromkeys(self.attacks, 0.0)
        self.results = []
        attacks = len(self.attacks) * members
        return [Images(trainer, loaders, self.inputs, self.settings, attacks=attacks)]

    def attack_batch(self, trainer: Trainer, pl_module: Any, batch: Batch, images: Images) -> None:
        x, y, index = batch
        defense, members = self.defense_of(pl_module), len(self.defense_of(pl_module).weights)
        self.count.update(len(x))
        clean = self._predict(defense, x, y, index)
        self.matrices[CLEAN].update(torch.stack([clean] * members, 1), y)
        for name, attack in self.attacks.items():
            found, began = [], time.perf_counter()
            for j in range(members):
                target, alone = defense, attack
                if is_transform_ensemble(defense):
                    alone = TAA(attack, j)
                else:
                    target = Single(defense.classifiers[j], rejects=defense.rejects)
                # Noise by the same keys as in `RobustEval`.
                keys = (self.settings.seed, 0, *name.encode())
                x_adv, _ = AttackerDefenderSession(alone, target, *keys).step(x, y, index)
                found.append(self._predict(defense, x_adv, y, index))
                self.advance(f"{name} on member {j + 1}", len(x))
            probabilities = torch.stack(found, 1)
            self.matrices[name].update(probabilities, y)
            self.transfers[name].update(probabilities, y)
            self.seconds[name] += time.perf_counter() - began

    @torch.no_grad()
    def _predict(self, defense: Defense, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return the probability of each class by each member: [M, B, K]."""
        with evaluating(defense) as copied:
            logits = copied.logits(x, Streams.from_index(index, self.settings.seed))
        check_logits(logits, y)
        return torch.stack([random_member(one[None], torch.ones(1)) for one in logits])

    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.results = self._results(self.defense_of(pl_module))
        for result in self.results:
            name = "acc" if result["name"] == CLEAN else result["name"]
            for i, row in enumerate(result["matrix"]):
                self.log_value(pl_module, f"{stage}/member_{i + 1}/{name}", row[i])
        folder = writing_folder(trainer)
        if folder is None:
            return
        append_records(folder / "transfer.jsonl", self.results[1:])
        for result in self.results[1:]:
            for kind in ("transfer", "transferability"):
                figure = draw(result, kind)
                save(figure, folder / f"{kind}_{result['name']}.png")
                tag = f"{stage}/{kind}/{result['name']}"
                log_picture(trainer, tag, pixels(figure))

    def _results(self, defense: Defense) -> list[dict[str, Any]]:
        shared = self.images[0].metadata | {"probs": defense.weights.tolist()}
        shared |= {"names": defense.names}
        n, members = int(self.count.compute()), len(defense.weights)
        matrices = {
            name: sums.compute().reshape(members, -1) for name, sums in self.matrices.items()
        }
        shared |= {"clean": matrices[CLEAN][:, 0].tolist(), "n": n}
        found = []
        for name, matrix in matrices.items():
            intervals = [[wilson(value, n) for value in row] for row in matrix.tolist()]
            record: dict[str, Any] = {"kind": "transfer_matrix", "name": name} | shared
            record |= {"matrix": matrix.tolist(), "intervals": intervals}
            if attack := self.attacks.get(name):
                shares, successes = self.transfers[name].compute()
                shares = shares.reshape(matrix.shape).nan_to_num(0.0)  # where nothing succeeded
                record |= {"attack": attack_spec(attack), "threat": attack_spec(attack.threat)}
                record |= {"seconds": self.seconds[name], "transferability": shares.tolist()}
                record |= {"successes": successes.reshape(-1).tolist()}
                record |= {"ranking": transfer_ranking(matrix)}
            found.append(record)
        return found

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.results and trainer.is_global_zero:
            print_members(type(pl_module).__name__, self.results)


def draw(result: dict[str, Any], kind: str) -> Figure:
    """Return the heat map of a record: accuracies, or for "transferability" shares of images."""
    names = result["names"]
    epoch = f", epoch {result['epoch']}" if result["stage"] == "val" else ""
    when = f"{result['stage']}{epoch}, n = {result['n']}"
    if kind == "transfer":
        matrix = torch.tensor(result["matrix"])
        return heat_map(matrix, names, names, f"{result['name']} on each member\n{when}")
    title = f"{result['name']}: of the images that fool the source, those that fool the target\n"
    labels = {"row_label": "source", "column_label": "target", "unit": "fooled in %"}
    matrix = torch.tensor(result["transferability"])
    return heat_map(matrix, names, names, title + when, **labels)
