"""What an audit looks at in each image, besides whether attacks break it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_rob.attacks import PGD
from lightning_rob.audit.bounds import hidden, inside_bounds
from lightning_rob.audit.case import Case, no_numbers
from lightning_rob.audit.slope import slope_far, slope_near, slope_networks
from lightning_rob.audit.suite import InDouble
from lightning_rob.evaluation.protocol import predictions
from lightning_rob.randomness import derive_seed, seeded_global_rng

VERY_LITTLE = 1e-5  # of a pixel: far below the 1/255 of a grey level, far above rounding
OTHER = 1e-3  # probabilities that differ by more than rounding
DRAWS = 10  # that a step of EoT averages over, at least


def not_numbers(case: Case) -> Tensor:
    """The answer to the clean image is no number."""
    return case.sick


def not_numbers_near(case: Case) -> Tensor:
    """The answer is none after noise or the usual attack."""
    found = torch.zeros_like(case.sick)
    for name in ("noise", case.subject.suite.usual):
        case.score(name)
        found |= no_numbers(case.outputs(case.perturbed[name]))
    return found


def probabilities(case: Case) -> Tensor:
    """The outputs lie in [0, 1] and sum to one."""
    inside = (case.logits >= -1e-6) & (case.logits <= 1 + 1e-6)
    sums = (case.logits.sum(-1) - 1).abs() < 1e-4
    return (inside.all(-1) & sums).all(0)


def constant(case: Case) -> Tensor:
    """Nothing changes when every pixel changes by very little."""
    low, high = case.subject.threat.bounds
    inward = torch.where(case.x > (low + high) / 2, -1.0, 1.0)
    moved = case.x + VERY_LITTLE * (high - low) * inward
    return ~_differ(case.outputs(moved), case.logits)


def by_chance(case: Case) -> Tensor:
    """Other noise gives other outputs."""
    return _differ(case.outputs(case.x, "again"), case.logits) & ~case.sick


def unrepeatable(case: Case) -> Tensor:
    """The same noise gives other outputs."""
    return _differ(case.outputs(case.x), case.logits) & ~case.sick


def _differ(a: Tensor, b: Tensor) -> Tensor:
    """Of which images [B] the logits [S, B, K] are not the same to the last bit."""
    found: Tensor = (a != b).any(-1).any(0)
    return found


def second_answer(case: Case) -> Tensor:
    """The defense answers otherwise when it is asked again."""
    first, second = predictions(case.subject.defense, case.x, case.noise("answers"), 2)
    found: Tensor = (first - second).abs().amax(1) > OTHER
    return found


def alone(case: Case) -> Tensor:
    """The image alone is answered otherwise than in the batch."""
    if case.subject.transductive:
        return case.unknown()
    defense = case.subject.defense
    whole = predictions(defense, case.x, case.noise())[0]
    each = [predictions(defense, x[None], case.noise()[i])[0] for i, x in _one_by_one(case)]
    return (torch.cat(each) - whole).abs().amax(1) > OTHER


def _one_by_one(case: Case) -> Iterator[tuple[Tensor, Tensor]]:
    places = torch.arange(len(case.x), device=case.x.device)
    return zip(places[:, None], case.x, strict=True)


def no_gradient(case: Case) -> Tensor:
    """Nothing leads from the outputs back to the image."""
    return torch.full_like(case.sick, not case.differentiable)


def zero_gradient(case: Case) -> Tensor:
    """Nothing that an attack could climb: even the margin is flat."""
    return _of_slopes(case, lambda margin, _: (margin == 0).all(1))


def infinite_gradient(case: Case) -> Tensor:
    """The gradient has entries that are infinite, or no numbers."""
    return _of_slopes(case, lambda *both: ~torch.cat(both, 1).isfinite().all(1))


def vanished(case: Case) -> Tensor:
    """The loss is flat where the margin is not: the outputs are too large for it."""
    return _of_slopes(case, lambda margin, loss: (loss == 0).all(1) & ~(margin == 0).all(1))


def _of_slopes(case: Case, test: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A test [B] of the gradients of margin and loss, where there are any."""
    if case.slopes is None:
        return case.unknown()
    return test(*case.slopes) & ~case.sick


def largest_output(case: Case) -> Tensor:
    """The largest magnitude among the outputs."""
    magnitude: Tensor = case.logits.abs().amax(-1).amax(0)
    return magnitude.nan_to_num(posinf=torch.finfo(magnitude.dtype).max)


def double(case: Case) -> Tensor:
    """The score under the usual attack if it computes in double precision, where it can."""
    usual = case.subject.attacks.get("pgd")
    if not (case.subject.exact and usual):
        return case.unknown()
    try:
        return case.play("pgd", InDouble(usual))[1].mean(1)
    except RuntimeError:  # of a network that insists on single precision
        return case.unknown()


def eot(case: Case) -> Tensor:
    """The score under the usual attack if its steps average over draws."""
    usual = case.subject.attacks.get("pgd")
    if not isinstance(usual, PGD) or not (by_chance(case) | unrepeatable(case)).any():
        return case.score(case.subject.suite.usual)
    return case.play("pgd", replace(usual, draws=DRAWS))[1].mean(1)


MEASURES: dict[str, Callable[[Case], Tensor]] = {
    measure.__name__: measure
    for measure in (
        not_numbers,
        not_numbers_near,
        probabilities,
        constant,
        by_chance,
        unrepeatable,
        second_answer,
        alone,
        no_gradient,
        zero_gradient,
        infinite_gradient,
        vanished,
        slope_near,
        slope_far,
        slope_networks,
        hidden,
        inside_bounds,
        largest_output,
        double,
        eot,
    )
}


class Seen(Mapping[str, Tensor]):
    """The columns [B] of a batch, each made when it is asked for.

    Args:
        case: the batch.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.columns: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[str]:
        """Scores of attacks, then what is measured."""
        return iter([*self.case.subject.attacks, *self.case.subject.halves, *MEASURES])

    def __len__(self) -> int:
        """How many there are."""
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> Tensor:
        """The column by this name, in the same way at every call."""
        if name not in self.columns:
            case = self.case
            seed = derive_seed(case.subject.seed, *name.encode(), *case.index.tolist())
            with seeded_global_rng(torch.Generator().manual_seed(seed), case.x.device):
                attack, _, half = name.partition("/")
                attacked = attack in case.subject.attacks
                found = case.score(attack, half) if attacked else MEASURES[name](case).float()
                self.columns[name] = found
        return self.columns[name]
