"""The attacks that a search tries within a number of passes, and what they leave."""

from dataclasses import dataclass, replace
from math import ceil
from textwrap import shorten
from typing import Any

import torch
import yaml
from torch import Tensor

from lightning_rob.attacks.active_set import positions
from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.decorators import Budgeted
from lightning_rob.attacks.execution import restoring
from lightning_rob.attacks.folding import FoldingError
from lightning_rob.attacks.inspection import Inspection
from lightning_rob.attacks.surrogate import SurrogateGradient
from lightning_rob.defenses import Defense
from lightning_rob.defenses.per_image import restricted_to
from lightning_rob.randomness import Generator, derive_seed, own_streams
from lightning_rob.runtime.identity import attack_spec

DRAWS, MORE_DRAWS = 2, 6  # for each step on a network that draws noise of its own
PREDICTIONS = 5  # of such a network, to judge an attack
COSTLY = ("queries", "copies", "pairs", "stand_in")  # of an attack that needs more passes
TARGETS, FOR_A_TARGET = 9, 120  # wrong classes at most, and passes to climb towards each


@dataclass(frozen=True)
class Trial:
    """One attack of a search, and the share of images that it left."""

    words: str
    attack: Attack
    images: int
    left: float  # share of the images; NaN where it could not run
    passes: int  # of an image, at most
    error: str = ""


@dataclass(frozen=True)
class AutoResult:
    """Images of `Auto`, the attack that it found, what hides gradients, and what was tried."""

    x_adv: Tensor  # [B, C, H, W]
    attack: Attack  # runs alone, and gives the same images of this batch
    findings: tuple[str, ...] = ()  # what hides gradients, in words
    trail: tuple[Trial, ...] = ()  # what was tried, in order

    def __str__(self) -> str:
        """Return the findings and what was tried, line by line."""
        if not self.trail:
            return "Not searched: the attacks for this kind of defense got all passes"
        lines = [f"Found: {'; '.join(self.findings) or 'nothing that hides gradients'}"]
        lines.append("Tried: first, then candidates on images that stood, then the winners on all")
        lines.append("  left %  images  passes")
        for trial in self.trail:
            left = "       -" if trial.error else f"{100 * trial.left:8.1f}"
            reason = f" ({shorten(trial.error, 90)})" if trial.error else ""
            lines.append(f"{left}{trial.images:8}{trial.passes:8}  {trial.words}{reason}")
        return "\n".join(lines)

    @property
    def recipe(self) -> str:
        """The attack as a plug-in, the content of a file for `--trainer.callbacks+=FILE`."""
        spec = {"attacks": {"auto": attack_spec(self.attack)}}
        plugin = {"class_path": "lightning_rob.RobustEval", "init_args": spec}
        return yaml.safe_dump(plugin, sort_keys=False)

    @property
    def shown(self) -> tuple[str, str, str]:
        """The trail, the plug-in, and the attack as Python, as texts."""
        return str(self), self.recipe, str(self.attack)


@dataclass
class Judged:
    """A candidate with the probability of a right prediction of each image of the search."""

    attack: Any
    right: Tensor

    @property
    def left(self) -> float:
        """Mean probability of a right prediction."""
        return float(self.right.mean())

    def order(self) -> tuple[float, bool]:
        """Return what comes first: the best one, of equal ones without held decisions."""
        return self.left, bool(getattr(self.attack, "held", ()))


class Trials:
    """Attacks on images of one inspection, within a number of passes.

    Args:
        look: what is known of the defense, with the images [B, …] and their labels.
        generator: source of the noise of the attack on all images.
        passes: the largest number of passes of an image, with those of the inspection.
        drawn: whether the defense draws its classifiers.
    """

    def __init__(
        self, look: Inspection, generator: Generator, classes: int, passes: int, drawn: bool
    ) -> None:
        self.look, self.generator, self.passes, self.drawn = look, generator, passes, drawn
        self.threat, self.defense, self.x, self.y = look.threat, look.defense, look.x, look.y
        self.seed, self.networks = look.seed, look.networks
        self.count = PassCount(self.defense, self.x, classes)
        self.restore = restoring(generator)
        again = type(self.defense).sample_logits is Defense.sample_logits  # all draws at once
        self.draws = ceil(DRAWS / self.networks) if drawn and again else DRAWS
        self.trail: list[Trial] = []
        self.tried = 0  # passes of an image for attacks, at most

    @property
    def left(self) -> int:
        """Passes of an image that are left."""
        return self.passes - self.tried - self.look.spent

    @property
    def judging(self) -> int:
        """Passes that the predictions cost by which an attack is judged."""
        return self.networks * self._predictions

    @property
    def _predictions(self) -> int:
        """Predictions of each image by which an attack is judged."""
        enough = ceil(PREDICTIONS / self.networks) if self.drawn else PREDICTIONS
        return enough if self.look.random else 1

    def note(self, turn: str, attack: Attack, right: Tensor, passes: int, error: str = "") -> None:
        """Keep what an attack left in the trail, and count its passes."""
        left = float("nan") if error else float(right.mean())
        words = f"{turn}: {in_words(attack)}"
        self.trail.append(Trial(words, attack, len(right), left, passes, error))
        self.tried += passes

    def within(self, attack: Any, passes: int) -> Budgeted:
        """Return the attack within some passes, with steps of PGD that lead across the ball."""
        own = self.look.random or bool(getattr(attack, "pairs", 0))
        if own and hasattr(getattr(attack, "attack", None), "step_size"):
            steps = max(passes // attack.cost(self.count), 1)
            attack = changed(attack, step_size=2.5 * self.threat.eps / steps)
        if getattr(getattr(attack, "attack", None), "targets", 0):  # few steps reach none
            attack = changed(attack, targets=min(max(passes // FOR_A_TARGET, 3), TARGETS))
        return Budgeted(attack, max(passes, 1))

    def least(self, attack: Attack) -> int:
        """Return the passes of an attack's fewest steps, with those that `Budgeted` asks."""
        return attack.least(self.count) + self.count.asked

    def shared(self, winners: list[tuple[float, Attack]], passes: int) -> list[tuple[Attack, int]]:
        """Return attacks with their passes; the last ones with too few leave them to the others."""
        while winners:
            total = sum(share for share, _ in winners)
            parts = [(attack, int(share / total * passes)) for share, attack in winners]
            poor = [at for at, (attack, given) in enumerate(parts) if given < self.least(attack)]
            if not poor:
                return [(self.within(attack, given), given) for attack, given in parts]
            winners = [winner for at, winner in enumerate(winners) if at != poor[-1]]
        return []

    def round(self, turn: str, candidates: list[Attack], rows: Tensor, passes: int) -> list[Judged]:
        """Try candidates on the same images with their shares of the passes."""
        judged, weights = [], {one: self._weight(one, turn) for one in candidates}

        def share(candidate: Any) -> int:
            return weights[candidate] * passes // sum(weights.values())

        for candidate in reversed(candidates):  # the passes of too few for one go to the others
            if share(candidate) - self.judging < self.least(candidate):
                del weights[candidate]
                self.note(turn, candidate, self.x.new_ones(len(rows)), 0, "too few passes")
        for candidate in weights:
            given = share(candidate)
            attack, error = self.within(candidate, given - self.judging), ""
            right = self.x.new_ones(len(rows))
            try:
                _, right = self.attacked(attack, rows)
                judged.append(Judged(candidate, right))
            except (torch.OutOfMemoryError, FoldingError):
                raise
            except Exception as problem:  # the next candidate may run
                error = f"{type(problem).__name__}: {problem}"
            self.note(turn, attack, right, given, error)
        return judged

    def _weight(self, candidate: Any, turn: str) -> int:
        """Return the share of the passes in a trial of what costs more in each step."""
        costly = any(getattr(candidate, name, 0) for name in COSTLY)
        weight = 5 if costly else 1
        if self.look.random:
            many = is_few(candidate) or bool(getattr(candidate, "pairs", 0))
            weight = 3 if many else (candidate.attack.draws or 1) // self.draws
        # Two forward passes a step, of which the first ones fool no image.
        return weight * ((6 if turn == "1" else 3) if getattr(candidate, "held", ()) else 2)

    def alone(self, attack: Attack) -> tuple[Tensor, Tensor]:
        """Attack all images as the attack does when it runs by itself."""
        self.restore()
        with own_streams(self.seed, self.x.device):
            x_adv = attack.perturb(self.defense, self.x, self.y, self.generator)
        return x_adv, self.right(x_adv, positions(x_adv))

    def attacked(self, attack: Attack, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return images [b, …] of an attack, and the probability [b] of a right prediction."""
        x, seed = self.x[rows], derive_seed(self.seed, len(self.trail))
        noise = torch.Generator(x.device).manual_seed(seed)
        with restricted_to(self.defense, rows), own_streams(seed, x.device):
            x_adv = attack.perturb(self.defense, x, self.y[rows], noise)
        return x_adv, self.right(x_adv, rows)

    @torch.no_grad()
    def right(self, x_adv: Tensor, rows: Tensor) -> Tensor:
        """Return the probability [b] of a right prediction of attacked images."""
        runs, noise = [], self.look.noise()
        with restricted_to(self.defense, rows), own_streams(self.seed, x_adv.device):
            for _ in range(self._predictions):
                right = self.defense(x_adv, noise).gather(1, self.y[rows, None])
                runs.append(right[:, 0])
        return torch.stack(runs).mean(0).to(x_adv)


def changed(view: SurrogateGradient, **changes: Any) -> SurrogateGradient:
    """Return the surrogate with another setting of its attack."""
    return replace(view, attack=replace(view.attack, **changes))  # type: ignore[type-var]


def is_few(attack: Any) -> bool:
    """Return whether an attack changes few pixels, in many passes even for its first step."""
    return hasattr(getattr(attack, "attack", None), "bisections")


def in_words(attack: Any) -> str:
    """Return an attack in a few words, for the trail."""
    inner = getattr(attack, "attack", None)
    if inner is not None:
        parts = [in_words(inner)]
        if hasattr(attack, "slopes"):
            parts += [f"slopes through {', '.join(attack.slopes)}"] if attack.slopes else []
            parts += [f"on {len(attack.stages)} values before the output"] if attack.stages else []
            before = "a learned stand-in" if attack.stand_in else "identity"
            parts += [f"decisions held at {attack.held}"] if attack.held else []
            parts += [f"{before} before {', '.join(attack.enter)}"] if attack.enter else []
            parts += [f"mean of {attack.copies} noisy copies"] if attack.copies else []
            parts += ["slopes estimated from predictions"] if attack.pairs else []
        return "; ".join(parts)
    name, objective = type(attack).__name__, getattr(attack, "objective", None)
    if getattr(attack, "bisections", 0):
        name = f"{name} by thresholds"
    if getattr(attack, "targets", 0):
        return f"{name} towards {attack.targets} classes"
    return f"{name} on {objective}" if objective else name
