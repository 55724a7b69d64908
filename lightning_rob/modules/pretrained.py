"""Evaluation of networks that are already trained, as an ensemble or behind a defense."""

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


class PretrainedEnsemble(RobustModule):
    """Evaluate trained networks by `lightning-rob test`: an ensemble, or a defense of one network.

    Args:
        nets: builds a network, [B, C, H, W] -> [B, K]: one factory per member, or one for all.
        checkpoints: a path per member, null where `nets` loads the weights itself; or one path to
            an ensemble of one kind, numbered (`members.0` …, `model0` …) in the file. None:
            `nets` loads all weights.
        members: number of members M, the first ones of a larger ensemble in one file. None infers
            it from the other arguments.
        probs: M sampling probabilities; None means equal ones.
        prefix: key of the networks in the files, or of the ensemble in the one file, or a dotted
            part of that key; a list has one per member, null to search for it.
        rename: as in `load_weights`, for all members.
        drop: as in `load_weights`, for all members.
        rule: turns the members' logits into a prediction.
        defense: network -> defense, such as DENT, for a single network; None builds an ensemble.
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
        rule: Rule = random_member,
        defense: Callable[[nn.Module], Defense] | None = None,
    ) -> None:
        super().__init__()
        names: dict[str, Any] = {"rename": rename, "drop": drop or []}
        if defense and isinstance(checkpoints, str):
            checkpoints = [checkpoints]
        lengths = {len(one) for one in (nets, checkpoints, prefix) if isinstance(one, list)}
        lengths |= set() if members is None else {members}
        if len(lengths) > 1 or 0 in lengths:
            raise ValueError(f"members and all that is one per member must agree, got {lengths}")
        count = next(iter(lengths), None)
        if isinstance(checkpoints, str):
            if isinstance(prefix, list):
                raise ValueError(f"one checkpoint for all needs one prefix, got {prefix}")
            example = nets[0]() if isinstance(nets, list) else nets()
            found = member_prefixes(example, checkpoints, prefix, **names)
            # A run that was stopped early also saves members with random weights.
            found = found[: started_members(checkpoints)]
            if count is not None and len(found) < count:
                raise ValueError(f"{checkpoints} holds {len(found)} members, not {count}: {found}")
            prefix = list(found[:count])
            count = len(prefix)
        if count is None:
            raise ValueError("give the number of members, or nets or checkpoints in a list")
        columns = (
            value if isinstance(value, list) else [value] * count
            for value in (nets, checkpoints, prefix)
        )
        built: list[nn.Module] = []
        for make, path, key in zip(*columns, strict=True):
            built.append(net := make())
            if path is not None:
                load_weights(net, path, key, **names)
                continue
            # A factory that loads trained weights builds the same network twice.
            pairs = zip(net.state_dict().values(), make().state_dict().values(), strict=True)
            if not all(torch.equal(one, other) for one, other in pairs):
                raise ValueError(f"a {type(net).__name__} has random weights: give it a checkpoint")
        if defense is not None and len(built) > 1:
            raise ValueError(f"a defense is made of one network, got {len(built)} members")
        self.defense = defense(built[0]) if defense else Ensemble(built, probs, rule)

    def setup(self, stage: str) -> None:
        if stage == "fit":
            raise MisconfigurationException(
                "PretrainedEnsemble has nothing to train: run lightning-rob test (or validate, "
                "predict)"
            )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        raise MisconfigurationException("PretrainedEnsemble has no loss: its networks are trained")
