"""A random defense as its attacker chooses to look at it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from lightning_rob.attacks.base import Backward
from lightning_rob.defenses import Defense, random_transforms_in
from lightning_rob.defenses.random_transforms import Gradients, Shared


@dataclass(frozen=True)
class SurrogateTransforms(Backward):
    """What an attack on `RandomTransforms` takes for it, as a `backward` of PGD.

    The defense answers as ever; only the attack's own draws change.

    Args:
        shared_order: all copies of an image have the same transforms in the same order, drawn anew
            at every step, each still by its p and parameters: gradients of less variance (RT
            paper, appendix B.2). "batch": all images have them too, as good for each and faster.
        gradients: of the transforms, see `RandomTransforms`; None leaves the defense's own.

    Raises:
        ValueError: another value of shared_order.
        TypeError: when entered, the defense has no random transforms.
    """

    shared_order: Shared = True
    gradients: Gradients | None = None

    def __post_init__(self) -> None:
        if self.shared_order not in (True, False, "batch"):
            raise ValueError(
                f"shared_order must be True, False or 'batch', got {self.shared_order!r}"
            )

    def __call__(self, defense: Defense) -> AbstractContextManager[None]:
        """A context in which every `RandomTransforms` in the defense is seen so."""
        return _seen(defense, self)


@contextmanager
def _seen(defense: Defense, view: SurrogateTransforms) -> Iterator[None]:
    found = random_transforms_in(defense)
    if not found:
        raise TypeError(f"{view} is for RandomTransforms, got {type(defense).__name__}")
    before = [(part.shared_order, part.gradients) for part in found]
    try:
        for part in found:
            part.shared_order = view.shared_order
            part.gradients = view.gradients or part.gradients
        yield
    finally:
        for part, (shared_order, gradients) in zip(found, before, strict=True):
            part.shared_order, part.gradients = shared_order, gradients
