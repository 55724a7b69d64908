"""Work on batches in parts, for instance because a batch does not fit into memory."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_rob.attacks.active_set import positions, rows_of
from lightning_rob.defenses import Defense
from lightning_rob.defenses.per_image import PerImageValues, restricted_to
from lightning_rob.defenses.rejection import AcceptedClasses, behind_labels
from lightning_rob.randomness import Generator, Streams

# Maps a defense, images [b, …], their labels [b] and a source of noise to a tensor [b, …].
Work = Callable[[Defense, Tensor, Tensor, Generator], Tensor]


def run_in_chunks(
    work: Work, size: int, defense: Defense, x: Tensor, y: Tensor, generator: Generator
) -> Tensor:
    """Work on at most `size` images at a time; see `run_in_parts`."""
    return run_in_parts(work, torch.split(positions(x), size), defense, x, y, generator)


def run_in_parts(
    work: Work,
    parts: Sequence[Tensor],
    defense: Defense,
    x: Tensor,
    y: Tensor,
    generator: Generator,
) -> Tensor:
    """Work on a batch part by part; the parts' positions [b] together have each image once."""
    done, counter = [], 0
    for rows in parts:
        noise = rows_of(generator, rows)  # of `Streams` an image has the same noise in any part
        with restricted_to(defense, rows):  # one that has adapted sees the images of this part
            done.append(work(defense, x[rows], y[rows], noise))
        counter = max(counter, noise.counter) if isinstance(noise, Streams) else 0
    if isinstance(generator, Streams):
        generator.counter = counter  # as far as an attack on the whole batch would have drawn
    found, order = torch.cat(done), torch.cat(list(parts))
    return torch.empty_like(found).index_copy_(0, order, found)


def restoring(generator: Generator) -> Callable[[], object]:
    """Return a function that sets a source of noise back to its current state."""
    if isinstance(generator, Streams):
        return partial(setattr, generator, "counter", generator.counter)
    if generator is None:
        return lambda: None
    return partial(generator.set_state, generator.get_state())


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
