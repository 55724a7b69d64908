"""The rounds of a game with a defense that adapts: which images are played together, and when."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from torch import Tensor


@dataclass(frozen=True)
class RoundProtocol:
    """How a defense that adapts to the test batch is played against.

    Args:
        order: "natural", that of the data set or, of some images only, a random one by the seed;
            or "by_label", in which every two rounds in a row are sorted by label, so that a round
            has few classes (Chen et al. 2022, Table 5).
        images: how many images make a round; None is the batch size of the evaluation.
        attacker_sees_state: show the attacker the state of a stateful defense; otherwise it knows
            only the state of its own rehearsal.

    Raises:
        ValueError: another order, or rounds without images.
    """

    order: Literal["natural", "by_label"] = "natural"
    images: int | None = None
    attacker_sees_state: bool = False

    def __post_init__(self) -> None:
        if self.order not in ("natural", "by_label"):
            raise ValueError(f"order must be 'natural' or 'by_label', got {self.order!r}")
        if self.images is not None and self.images < 1:
            raise ValueError(f"images must be at least 1, got {self.images}")

    def rounds(self, trainer: Trainer, loader: Any, positions: Tensor | None) -> Iterator[Any]:
        """This process's rounds: batches as the loader would make them.

        Which images make a round does not depend on the number of processes.

        Args:
            trainer: whose processes share the rounds, and whose limit on batches holds.
            loader: whose data set is played.
            positions: which images of it, in this order; None is all.
        """
        order, size = self._order(trainer, loader, positions)
        count = -(-len(order) // size)
        for number in range(trainer.global_rank, count, trainer.world_size):
            yield trainer.strategy.batch_to_device(self._batch(loader, order, number, size))

    def check(self, trainer: Trainer, loader: Any, positions: Tensor | None) -> None:
        """Refuse what `check_rounds` refuses; for the arguments see `rounds`."""
        order, size = self._order(trainer, loader, positions)
        check_rounds(-(-len(order) // size), trainer.world_size, len(order))

    def _order(self, trainer: Trainer, loader: Any, positions: Tensor | None) -> tuple[Tensor, int]:
        """The images that are played, in order, and how many make a round."""
        size = self.images or loader.batch_size
        if size is None:
            raise ValueError("the loader has no batch size to make rounds of: give protocol.images")
        order = torch.arange(len(loader.dataset)) if positions is None else positions
        return order[: images_within_limits(trainer, loader, size)], size

    def _batch(self, loader: Any, order: Tensor, number: int, size: int) -> Any:
        if self.order == "natural":
            return _fetch(loader, order[number * size : (number + 1) * size])
        start = number // 2 * 2 * size
        window = order[start : start + 2 * size]
        labels = _fetch(loader, window)[1]
        window = window[labels.argsort(stable=True)]
        return _fetch(loader, window[:size] if number % 2 == 0 else window[size:])

    def record(self, defense: Any, loader: Any, world_size: int) -> dict[str, Any]:
        """What an evaluation says of the game it played."""
        told: dict[str, Any] = {"order": self.order, "images": self.images or loader.batch_size}
        told["defender"] = "stateful" if defense.stateful else "stateless"
        if defense.stateful:
            told["attacker"] = (
                "sees its state" if self.attacker_sees_state else "rehearses its state"
            )
            told["sequences"] = world_size  # each process plays one of its own
        return told


def images_within_limits(trainer: Trainer, loader: Any, size: int) -> int:
    """Return how many images `limit_val_batches` and the like leave; a trial run has one round.

    Args:
        trainer: whose limits hold.
        loader: whose data set is evaluated.
        size: images of a round.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return min(int(size * trainer.world_size), len(loader.dataset))
    testing = trainer.state.fn == "test"
    limits: Any = trainer.num_test_batches if testing else trainer.num_val_batches
    if not limits or limits[0] >= len(loader):
        return len(loader.dataset)
    return min(int(limits[0] * loader.batch_size * trainer.world_size), len(loader.dataset))


def _fetch(loader: Any, positions: Tensor) -> Any:
    """The images at these positions, as a batch of the loader."""
    many = getattr(loader.dataset, "__getitems__", None)
    places = positions.tolist()
    return loader.collate_fn(many(places) if many else [loader.dataset[i] for i in places])


def check_rounds(rounds: int, processes: int, images: int) -> None:
    """Refuse a game of one round under several processes, before any of them starts to wait.

    A round is played by one process. The others would wait for it in the next collective, until
    their time-out ends the run, hours into the attack.

    Args:
        rounds: how many the game has, on all processes together.
        processes: how many share them.
        images: how many images are played, in all rounds together.

    Raises:
        ValueError: one round for several processes.
    """
    if rounds == 1 < processes:
        raise ValueError(
            f"all {images} images make one round, which one of {processes} processes plays while "
            "the others wait for it and time out: start one process (--trainer.devices=1), or "
            f"play smaller rounds, protocol.images={-(-images // processes)} or fewer"
        )
