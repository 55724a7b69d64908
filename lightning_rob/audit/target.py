"""A defense under audit, and a batch of images with the attacks that were run on it."""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightning_rob.attacks import Attack
from lightning_rob.attacks.sight import watching
from lightning_rob.defenses import Defense
from lightning_rob.defenses.copies import working_copy
from lightning_rob.evaluation import AttackerDefenderSession, NoAttack
from lightning_rob.evaluation.check_batch import CheckBatch, CheckTarget
from lightning_rob.evaluation.evaluator import check_predictions
from lightning_rob.evaluation.power import found_by, not_applicable
from lightning_rob.evaluation.suites import suite_for
from lightning_rob.metrics import robust_accuracy
from lightning_rob.objectives import NonFiniteLogitsError
from lightning_rob.rules import rejected_share
from lightning_rob.threat import Threat

INFERENCES = 5  # predictions of each image; their mean is the score
GRADIENT_FREE = ("clean", "noise", "square")
WEAK = ("clean", "noise", "fgsm")  # attacks that are there to be beaten


class AuditTarget(CheckTarget):
    """A defense under audit; `steps` are those of the default PGD.

    Args:
        other_attacks: name -> attack that the user runs beside the audit.
        progress: called with the name of an attack and the number of images that it attacked.
        power: test whether each attack finds adversarial images that exist by construction.
        random: whether one network draws noise, which its kind does not declare.
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
        power: bool = False,
        random: bool = False,
    ) -> None:
        super().__init__(working_copy(defense), threat.bounds, seed, random)
        self.threat = threat
        self.suite = suite_for(self.defense, threat, steps, queries, random)
        self.attacks: dict[str, Attack] = {"clean": NoAttack(threat), **self.suite.attacks}
        self.queries = queries
        self.other_attacks = dict(other_attacks or {})
        self.progress = progress
        self.seconds = dict.fromkeys(self.attacks, 0.0)
        self.sessions: dict[str, AttackerDefenderSession] = {}
        self.failed: dict[str, Exception] = {}  # why a column could not be measured
        self.worst_names = ["clean", *self.suite.within(threat)]
        each = () if self.transductive else range(INFERENCES)
        # They choose and score the worst case of a random defense.
        self.inferences = [f"{name}/{k}" for name in self.worst_names for k in each]
        tested = [name for name in self.worst_names if name not in WEAK] if power else []
        self.untested = {name: not_applicable(defense, self.attacks[name]) for name in tested}
        # Of the attack and of random search; of a defense that rejects twice.
        count = 2 if defense.rejects is None else 4
        self.power_columns = {name: [f"{name}/power/{i}" for i in range(count)] for name in tested}

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
        self.found: dict[str, Tensor] = {}  # the power of attacks, see `found_by`

    def score(self, name: str, inference: str = "") -> Tensor:
        """Return the probability [B] of a right prediction under an attack, or of one inference."""
        if name not in self.scores:
            began = time.perf_counter()
            self.perturbed[name], self.scores[name] = self.run(name, self.target.attacks[name])
            self.target.seconds[name] += time.perf_counter() - began
            if self.target.progress and name != "clean":
                self.target.progress(name, len(self.x))
        scores = self.scores[name]
        return scores[:, int(inference)] if inference else scores.mean(1)

    def power(self, name: str, column: int) -> Tensor:
        """Return a column [B] of `found_by`: NaN for images that could not be tested."""
        target = self.target
        if name not in self.found:
            self.found[name] = self.unknown()[:, None].expand(-1, len(target.power_columns[name]))
            try:
                if not target.untested[name]:
                    images = self.x, self.y, self.index
                    attack = target.attacks[name]
                    self.found[name] = found_by(attack, target.defense, *images, target.seed)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # the other attacks can be tested
                target.untested[name] = f"not tested: {error}"
        return self.found[name][:, column]

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
