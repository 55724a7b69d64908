"""Networks that exist already, made into a randomized ensemble to be evaluated."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_rob.defenses import Defense, Ensemble
from lightning_rob.modules.base import RobustModule
from lightning_rob.nets import load_weights, member_prefixes
from lightning_rob.nets.weights import started_members
from lightning_rob.rules import Rule, random_member

Factory = Callable[[], nn.Module]


class PretrainedEnsemble(RobustModule):
    """Trained networks, an ensemble or one alone, for `lightning-rob test`; nothing is to fit.

    Args:
        nets: makes a network, [B, C, H, W] -> [B, K]: one for each member, or one for all.
        checkpoints: a path for each member, null where `nets` brings the weights; or one path to
            an ensemble whose members are numbered (`members.0` …, `model0` …) in the file. None:
            `nets` brings all weights.
        members: M, how many; of a larger ensemble in one file its first. None goes by the rest.
        probs: M sampling probabilities; None means equal ones.
        prefix: where in the files the networks are, or in the one file the ensemble, or some of
            that; in a list one for each member, null to find it.
        rename: as in `load_weights`, for all.
        drop: as in `load_weights`, for all.
        normalizer: as in `load_weights`, for all.
        rule: how the members' draws become an answer.
        defense: what is made of the one network there is, such as DENT; None makes an ensemble.

    Raises:
        FileNotFoundError: a checkpoint is missing.
        ValueError: weights are missing or do not fit, the numbers of members differ, or a defense
            of one network is to be made of several.
    """

    def __init__(
        self,
        nets: list[Callable[[], nn.Module]] | Callable[[], nn.Module],
        checkpoints: list[str | None] | str | None = None,
        members: int | None = None,
        probs: list[float] | None = None,
        prefix: list[str | None] | str | None = None,
        rename: dict[str, str] | None = None,
        drop: list[str] | None = None,
        normalizer: str | None = None,
        rule: Rule = random_member,
        defense: Callable[[nn.Module], Defense] | None = None,
    ) -> None:
        super().__init__()
        names: dict[str, Any] = {"rename": rename, "drop": drop or []}
        if defense and isinstance(checkpoints, str):
            checkpoints = [checkpoints]
        count = _agreed(members=members, nets=nets, checkpoints=checkpoints, prefix=prefix)
        if isinstance(checkpoints, str):
            if isinstance(prefix, list):
                raise ValueError(f"one checkpoint for all needs one prefix, got {prefix}")
            prefix = _places(nets, checkpoints, prefix, count, names)
            count = len(prefix)
        if count is None:
            raise ValueError("members must be said, or be as many as nets or checkpoints in a list")
        parts = zip(*(_each(one, count) for one in (nets, checkpoints, prefix)), strict=True)
        options = names | {"normalizer": normalizer}
        built = [_member(make, path, {"prefix": at, **options}) for make, path, at in parts]
        if defense is not None and len(built) > 1:
            raise ValueError(f"a defense is made of one network, got {len(built)} members")
        self.defense = defense(built[0]) if defense else Ensemble(built, probs, rule)

    def setup(self, stage: str) -> None:
        """Refuse to be trained."""
        if stage == "fit":
            raise MisconfigurationException(
                "Assembled has nothing to train: run lightning-rob test (or validate, predict)"
            )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """There is none."""
        raise MisconfigurationException("Assembled has no loss: its networks are trained")


def _each(one: Any, count: int) -> list[Any]:
    return one if isinstance(one, list) else [one] * count


def _agreed(members: int | None, **given: object) -> int | None:
    """How many members there are, as far as it is said."""
    counts = {name: len(value) for name, value in given.items() if isinstance(value, list)}
    counts |= {"members": members} if members is not None else {}
    if len({*counts.values()}) > 1 or 0 in counts.values():
        said = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ValueError(f"members and all that is one per member must agree, got {said}")
    return next(iter(counts.values()), None)


def _places(
    nets: list[Factory] | Factory,
    path: str,
    prefix: str | None,
    count: int | None,
    names: dict[str, Any],
) -> list[str | None]:
    """Where in the file the members are, as many as wanted."""
    first = [make() for make in nets] if isinstance(nets, list) else [nets()]
    # The others of a run that was stopped early have their random weights still.
    found = member_prefixes(first, path, prefix, **names)[: started_members(path)]
    if count is not None and len(found) < count:
        raise ValueError(f"{path} holds {len(found)} members, not {count}: {', '.join(found)}")
    return list(found[:count])


def _member(make: Factory, path: str | None, options: dict[str, Any]) -> nn.Module:
    """A network with weights from the file, or with its own."""
    net = make()
    if path is not None:
        return load_weights(net, path, **options)
    # Whoever makes trained networks makes the same one each time.
    weights = zip(net.state_dict().values(), make().state_dict().values(), strict=True)
    if not all(torch.equal(one, other) for one, other in weights):
        raise ValueError(f"a {type(net).__name__} has random weights: give it a checkpoint")
    return net
