"""Attacks on defenses that reject: they succeed where the defense accepts and is wrong."""

from torch import Tensor

from lightning_rob.attacks.execution import Work, run_in_parts
from lightning_rob.defenses import Defense
from lightning_rob.defenses.per_image import PerImageValues
from lightning_rob.defenses.rejection import AcceptedClasses, behind_labels
from lightning_rob.randomness import Generator


def towards_acceptance(
    work: Work, separable: bool, defense: Defense, x: Tensor, y: Tensor, generator: Generator
) -> Tensor:
    """Attack the classes that a defense accepts, in which rejection counts as the label."""
    behind = behind_labels(defense)
    if behind is not None:
        defense = behind  # of an outer attack, whose images depend on each other
    elif defense.rejects is not None:
        check_none_rejected(y, defense.rejects)
        y = y - (y > defense.rejects).to(y)  # among the accepted classes
    if not separable:
        return work(AcceptedClasses(defense, PerImageValues(y)), x, y, generator)

    def attack_label(defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        return work(AcceptedClasses(defense, int(y[0])), x, y, generator)

    # Attacks drop images that they have fooled, and a classifier whose logits depend on the label
    # would have to know which ones are left: the images of each label are attacked apart.
    parts = [(y == label).nonzero()[:, 0] for label in sorted(set(y.tolist()))]
    return run_in_parts(attack_label, parts, defense, x, y, generator)


def check_none_rejected(y: Tensor, rejects: int) -> None:
    """Raise ValueError if a label [B] is the class of rejection."""
    if bool((y == rejects).any()):
        raise ValueError(f"labels must be classes that are accepted, got {rejects}: it rejects")
