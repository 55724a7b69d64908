"""A defense under audit, and a batch of images with what was tried on it."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cached_property

import torch
from torch import Tensor

from lightning_rob.attacks import Attack, attacking, evaluating
from lightning_rob.audit.suite import Suite, seen, suite_for
from lightning_rob.defenses import Defense, is_transform_ensemble
from lightning_rob.evaluation.protocol import AttackerDefenderSession, NoAttack
from lightning_rob.metrics import robust_accuracy
from lightning_rob.objectives import NonFiniteLogitsError, Objective, expected_ce, expected_margin
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat

ANSWERS = 5  # of a defense to each image; their mean is the score
NO_GRADIENT_NEEDED = ("clean", "noise", "square")


class Subject:
    """A defense under audit.

    Args:
        defense: it stays as it is.
        threat: within which it is attacked.
        steps: of the usual PGD.
        queries: of the Square Attack.
        seed: of all noise.
        others: attacks that are run beside the audit, by name; None if nothing is.
        tell: called with the name of an attack and the number of images that went through it.
    """

    def __init__(
        self,
        defense: Defense,
        threat: Threat,
        steps: int = 20,
        queries: int = 1000,
        seed: int = 0,
        others: Mapping[str, Attack] | None = None,
        tell: Callable[[str, int], object] | None = None,
    ) -> None:
        self.defense = defense
        self.threat = threat
        self.suite: Suite = suite_for(defense, threat, steps, queries)
        self.attacks: dict[str, Attack] = {"clean": NoAttack(threat), **self.suite.attacks}
        self.queries = queries
        self.seed = seed
        self.others = dict(others or {})
        self.tell = tell
        self.seconds = dict.fromkeys(self.attacks, 0.0)
        self.matches: dict[str, AttackerDefenderSession] = {}

    @property
    def transductive(self) -> bool:
        """Whether it is a game."""
        return self.suite.kind == "transductive"

    @property
    def exact(self) -> bool:
        """Whether all chance in its answers is counted out, as for a randomized ensemble."""
        return self.suite.kind in ("single", "ensemble", "randomized")

    @property
    def counted(self) -> list[str]:
        """The attacks that the worst case is over."""
        return ["clean", *self.suite.within(self.threat)]

    @property
    def halves(self) -> list[str]:
        """The columns by which the worst case of a random defense is chosen and scored."""
        if self.transductive:
            return []
        return [f"{name}/{half}" for name in self.counted for half in ("first", "second")]

    @property
    def target(self) -> Defense | None:
        """What has gradients: the network as it stands, of some ensembles only some members."""
        if not is_transform_ensemble(self.defense):
            return self.defense.adapted_model
        kinds = self.defense.transforms.values()
        chosen = [i for i, transform in enumerate(kinds) if transform.differentiable]
        return self.defense.part(chosen) if chosen else None

    def match(self, attack: Attack, name: str) -> AttackerDefenderSession:
        """A match of an attack against the defense; a game goes on where it was."""
        if not self.transductive or name not in self.matches:
            keys = (self.seed, *name.encode())
            self.matches[name] = AttackerDefenderSession(
                attack, self.defense, *keys, private=(self.seed,)
            )
        return self.matches[name]


class Case:
    """A batch under audit.

    Args:
        subject: what is audited.
        x: [B, C, H, W] images.
        y: [B] labels.
        index: [B] the images' indices, by which noise is keyed; None counts them.
    """

    def __init__(self, subject: Subject, x: Tensor, y: Tensor, index: Tensor | None = None) -> None:
        self.subject = subject
        self.x, self.y = x, y
        self.index = torch.arange(len(x), device=x.device) if index is None else index
        self.scores: dict[str, Tensor] = {}  # [B, R] by prediction
        self.perturbed: dict[str, Tensor] = {}

    def noise(self, key: str = "") -> Streams:
        """The defense's chance, the same at every call of the same key."""
        return Streams.from_index(self.index, self.subject.seed, *b"audit", *key.encode())

    def unknown(self) -> Tensor:
        """A column [B] of what could not be measured: NaN."""
        return self.x.new_full((len(self.x),), torch.nan)

    def score(self, name: str, half: str = "") -> Tensor:
        """How often the defense is right under an attack of the suite [B].

        Args:
            name: of the attack.
            half: "first" or "second" counts that half of the predictions alone.
        """
        if name not in self.scores:
            attack = self.subject.attacks[name]
            began = time.perf_counter()
            self.perturbed[name], self.scores[name] = self.play(name, attack)
            self.subject.seconds[name] += time.perf_counter() - began
            if self.subject.tell and name != "clean":
                self.subject.tell(name, len(self.x))
        first, second = self.scores[name].tensor_split(2, dim=1)
        return {"first": first, "second": second}.get(half, self.scores[name]).mean(1)

    def play(self, name: str, attack: Attack) -> tuple[Tensor, Tensor]:
        """The perturbed images, and how often the defense is right on each [B, R].

        Without a gradient that such an attack needs the images are as they were, the scores NaN.
        """
        if name not in NO_GRADIENT_NEEDED and not self.differentiable:
            return self.x, self.unknown()[:, None].expand(-1, ANSWERS)
        return _round(self.subject, name, attack, self.x, self.y, self.index)

    def outputs(self, x: Tensor, key: str = "") -> Tensor:
        """The logits [S, B, K] of images [B, C, H, W] by the defense as it stands."""
        defense = self.subject.defense.adapted_model
        with evaluating(defense), torch.no_grad():
            return defense.sample_logits(x, self.noise(key))[0].float()

    @cached_property
    def logits(self) -> Tensor:
        """The outputs for the clean images."""
        return self.outputs(self.x)

    @cached_property
    def sick(self) -> Tensor:
        """Of which images [B] the logits are not numbers."""
        return no_numbers(self.logits)

    @cached_property
    def differentiable(self) -> bool:
        """Whether anything leads from the logits back to the images."""
        one = Case(self.subject, self.x[:1], self.y[:1], self.index[:1])
        return one.gradient(expected_ce) is not None

    @cached_property
    def slopes(self) -> tuple[Tensor, Tensor] | None:
        """The gradients [B, D] of margin and loss, if there are any."""
        margin, loss = self.gradient(expected_margin), self.gradient(expected_ce)
        if margin is None or loss is None:
            return None
        return margin.flatten(1), loss.flatten(1)

    def gradient(self, objective: Objective) -> Tensor | None:
        """The gradient by the images [B, C, H, W]; None if nothing leads back to them."""
        target, view = self.subject.target, seen(self.subject.defense)
        if target is None:
            return None
        with attacking(target), view(target) if view else nullcontext():
            leaf = self.x.detach().clone().requires_grad_()
            logits, weights = target.sample_logits(leaf, self.noise())
            if not logits.requires_grad:
                return None
            climbed = objective(logits.float(), weights, self.y.clone()).sum()
            return torch.autograd.grad(climbed, leaf, allow_unused=True)[0]


def no_numbers(logits: Tensor) -> Tensor:
    """Of which images [B] a draw of the logits [S, B, K] is no answer."""
    return ~logits.amax(-1).isfinite().all(0)


def _pieces(sick: Tensor, count: int) -> list[Tensor]:
    """What may still be attacked of so many images: those that are not sick, if it is known who is.

    Of an attack that had only some of the images in hand when it stopped: each half by itself.
    """
    if len(sick) == count:
        return [(~sick).nonzero()[:, 0]]
    first, last = torch.arange(count, device=sick.device).tensor_split(2)
    return [first, last]


def _round(
    subject: Subject, name: str, attack: Attack, x: Tensor, y: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """A round. Where an attack meets no numbers within the ball, the answer there is wrong."""
    try:
        x_adv, found = subject.match(attack, name).step(x, y, index, ANSWERS)
    except NonFiniteLogitsError as error:
        x_adv, scores = x.clone(), x.new_zeros(len(x), ANSWERS)
        for well in _pieces(error.images, len(x)):
            if len(well) and not subject.transductive:
                part = _round(subject, name, attack, x[well], y[well], index[well])
                x_adv[well], scores[well] = part
        return x_adv, scores
    return x_adv, torch.stack([robust_accuracy(answer, y) for answer in found], 1)
