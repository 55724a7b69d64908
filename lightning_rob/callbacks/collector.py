"""The evaluations of one run, shared by its callbacks: none of them reads another."""

from collections.abc import Callable, Collection, Hashable, Mapping
from itertools import count
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from lightning.pytorch import Callback, Trainer

from lightning_rob.evaluation.results import EvaluationResult

Kind = TypeVar("Kind")


class Collector:
    """Names, results and rows of the table, over all callbacks of a kind in a run.

    A callback registers its attacks before the run, announces an evaluation when an epoch begins
    and delivers the result when it ends. The last one to deliver reports what is over all of them.
    """

    def __init__(self) -> None:
        self.registered: WeakKeyDictionary[Callback, dict[str, Any]] = WeakKeyDictionary()
        self.announced: dict[Hashable, list[Callback]] = {}
        self.delivered: dict[Hashable, list[EvaluationResult]] = {}
        self.rows: list[Any] = []
        self.cache: dict[Hashable, Any] = {}
        self.when: Hashable = None
        self.inputs: Hashable = None

    def register(
        self, callback: Callback, attacks: Mapping[str, Kind], *settings: Any
    ) -> dict[str, Kind]:
        """Return the attacks that no earlier callback runs, by names of their own.

        Args:
            callback: the callback that runs them; registering again returns the same.
            attacks: name -> attack.
            *settings: with others the same attack is another evaluation.
        """
        if callback not in self.registered:
            earlier = {name: a for own in self.registered.values() for name, a in own.items()}
            # A subclass with attributes of its own may compare equal to another attack.
            asked = {name: (a, *settings, type(a), vars(a)) for name, a in attacks.items()}
            self.registered[callback] = deduplicate_names(asked, earlier)
        return {name: attack for name, (attack, *_) in self.registered[callback].items()}

    def forget_others(self, callbacks: Collection[Callback]) -> None:
        """Forget the attacks of callbacks that have left the trainer."""
        for callback in [c for c in self.registered if c not in callbacks]:
            del self.registered[callback]
            self.when = None  # so that the next evaluation starts without their results

    def agree(self, inputs: Hashable) -> None:
        """Check that all callbacks see the images alike: their results are put together.

        Raises:
            ValueError: an earlier one unpacks or preprocesses them otherwise.
        """
        if self.inputs is not None and self.inputs != inputs:
            raise ValueError(
                "all callbacks of a run need the same unpack and preprocess: their worst case is "
                "one number; evaluate another preprocessing in another run"
            )
        self.inputs = inputs

    def holder(self, name: str) -> Any:
        """Return the attack that the first callback runs by this name."""
        return next(own[name][0] for own in self.registered.values() if name in own)

    def announce(self, callback: Callback, group: Hashable, when: Hashable) -> None:
        """Expect a result of the callback, among those of a group, e.g. on the same target.

        Args:
            callback: the callback that will deliver it.
            group: results of one group are compared with each other.
            when: identifies the evaluation, such as the epoch; callbacks may leave out epochs.
        """
        if when != self.when or callback in self.announced.get(group, ()):  # a new evaluation
            self.when, self.announced, self.delivered = when, {}, {}
            self.rows = []  # of a test that was broken off
            self.cache.clear()
        self.announced.setdefault(group, []).append(callback)
        self.delivered.setdefault(group, [])

    def deliver(
        self, group: Hashable, result: EvaluationResult
    ) -> tuple[list[EvaluationResult], bool]:
        """Add a result; return those of the group so far, and whether none is missing."""
        self.delivered[group].append(result)
        return self.delivered[group], len(self.delivered[group]) == len(self.announced[group])

    def once(self, key: Hashable, compute: Callable[[], Kind]) -> Kind:
        """Return a value that all callbacks share, computed by the first one in each epoch."""
        if key not in self.cache:
            self.cache[key] = compute()
        value: Kind = self.cache[key]
        return value

    def take_rows(self) -> list[Any]:
        """Return the rows of the table that have not been printed yet, and forget them."""
        rows, self.rows = self.rows, []
        return rows


_COLLECTORS: WeakKeyDictionary[Trainer, dict[Hashable, Collector]] = WeakKeyDictionary()


def collector_of(trainer: Trainer, kind: type, loader: int | None = None) -> Collector:
    """Return the collector of a kind of callbacks in a run, on one of its data loaders."""
    return _COLLECTORS.setdefault(trainer, {}).setdefault((kind, loader), Collector())


def deduplicate_names(mine: Mapping[str, Kind], others: Mapping[str, Kind]) -> dict[str, Kind]:
    """Drop what is among the others; number a name that they use for something else."""
    kept: dict[str, Kind] = {}
    for name, item in mine.items():
        if name not in others:
            kept[name] = item
        elif all(item != others[k] for k in others if k == name or k.startswith(f"{name}_")):
            numbered = (f"{name}_{i}" for i in count(2))
            kept[next(key for key in numbered if key not in {*others, *mine})] = item
    return kept
