"""A network behind random transforms of its input (Raff et al. 2019, Sitawarin et al. 2022)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_rob.defenses.base import Defense, check_network
from lightning_rob.defenses.network import network_logits
from lightning_rob.randomness import Generator, Streams, uniform
from lightning_rob.rules import Rule, mean_probs
from lightning_rob.runtime.errors import at_least
from lightning_rob.runtime.memory import images_at_once
from lightning_rob.transforms import Transform, named
from lightning_rob.transforms.bpda import approximated, load_approximations

Shared = bool | Literal["batch"]
Gradients = Literal["exact", "straight_through", "identity", "bpda", "combo"]


class RandomTransforms(Defense):
    """Each prediction is of many copies of the image, each behind its own random transforms (RT).

    A copy goes through `size` of the transforms in an order of its own, drawn without replacement;
    each transform is applied with its probability p, with its own random parameters.

    Args:
        transforms: K transforms, augmentations of Kornia among them, see `FromKornia`; or, as in a
            recipe, their arguments by name: {Affine: {alpha: 0.2}, HorizontalFlip: {p: 0.5}}.
        size: S, the largest number of transforms a copy goes through.
        draws: n, the number of copies per prediction; attacks and training may draw others.
        rule: turns the logits of the copies into a prediction: `mean_probs`, `majority` or
            `mean_logits`.
        shared_order: all copies of an image go through the same transforms in the same order, with
            different parameters, and each copy skips some of them by its p: an attacker's variance
            reduction, see `SurrogateTransforms`.
        gradients: gradient of the transforms: "exact"; "identity"; "straight_through", exact where
            there is one, else the identity; "bpda", that of the networks in `approximations`; or
            "combo", exact where there is one, else by network. The images are the same.
        approximations: a network for each transform by its name, or the folder where
            `lightning-rob bpda` has saved them.
        released_code: reproduce the slips of the authors' code, as far as there are options for
            them: apply transforms with a p other than 0 and 1 with probability 1/2, and take each
            transform `as_released`.
    """

    resamples = True

    def __init__(
        self,
        net: nn.Module,
        transforms: Sequence[Transform | nn.Module] | Mapping[str, Mapping[str, Any]],
        size: int,
        draws: int,
        rule: Rule = mean_probs,
        shared_order: bool = False,
        gradients: Gradients = "exact",
        approximations: Mapping[str, nn.Module] | str | None = None,
        released_code: bool = False,
        rejects: int | None = None,
    ) -> None:
        check_network(net)
        at_least(1, draws=draws)
        super().__init__(torch.full((draws,), 1 / draws), rule, rejects)
        self.net = net
        self.transforms = named(transforms)
        if released_code:
            self.transforms = {name: one.as_released() for name, one in self.transforms.items()}
        if not 1 <= size <= len(self.transforms):
            raise ValueError(f"size must be 1 … {len(self.transforms)} transforms, got {size}")
        self.size = size
        self.draws = draws
        if shared_order not in (True, False):  # "batch" is for attacks: images must be independent
            raise ValueError(
                f"shared_order must be True or False, got {shared_order!r}: see SurrogateTransforms"
            )
        self.shared_order: Shared = shared_order
        self.released_code = released_code
        self.folder = approximations if isinstance(approximations, str) else None
        self.approximations: dict[str, nn.Module] = {}  # a dict: neither trained nor saved
        if isinstance(approximations, str):
            for transform in self.transforms.values():
                with suppress(FileNotFoundError):  # one that is missing raises when it is used
                    self.approximations |= load_approximations(approximations, [transform])
        else:
            self.approximations |= approximations or {}
        for approximation in self.approximations.values():
            approximation.eval()
        self.gradients: Gradients = gradients
        self._check_gradients(wanted=False)

    @property
    def foldable_networks(self) -> list[nn.Module]:
        return [self.net]

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        return self.sample_logits(x, generator)[0]

    def sample_logits(
        self, x: Tensor, generator: Generator = None, draws: int | None = None
    ) -> tuple[Tensor, Tensor]:
        draws = draws or self.draws
        copies = self.transformed(x, generator, draws).flatten(0, 1)
        # In training BatchNorm needs all copies at once, and an exported program has no parts.
        whole = self.net.training or torch.compiler.is_exporting()
        parts = [copies] if whole else torch.split(copies, images_at_once(copies))
        logits = torch.cat([network_logits(self.net, part) for part in parts])
        return logits.view(draws, len(x), logits.shape[-1]), x.new_full((draws,), 1 / draws)

    def transformed(self, x: Tensor, generator: Generator = None, draws: int = 1) -> Tensor:
        """Transform images as the network sees them: [B, C, H, W] -> [draws, B, C, H, W]."""
        self._check_gradients(wanted=x.requires_grad and torch.is_grad_enabled())
        # In half precision random numbers that rank an order are often equal.
        copies = x.to(torch.promote_types(x.dtype, torch.float32)).repeat(draws, 1, 1, 1)
        # Each copy of an image has a stream of its own.
        generator = generator.split(draws) if isinstance(generator, Streams) else generator
        order = self._orders(copies, len(x), generator)
        if torch.compiler.is_exporting():
            copies = self._masked(copies, order, generator)
        elif len(copies):
            copies = self._grouped(copies, order.cpu(), generator)
        return copies.view(draws, *x.shape)

    def _grouped(self, copies: Tensor, order: Tensor, generator: Generator) -> Tensor:
        """Transform copies [N, C, H, W]; those whose next transform is the same go together."""
        by_order: dict[tuple[int, ...], list[int]] = {}  # copies of one order stay together
        for copy, row in enumerate(order.tolist()):
            by_order.setdefault(tuple(row), []).append(copy)
        sizes = [len(group) for group in by_order.values()]
        rows = torch.tensor([copy for group in by_order.values() for copy in group])
        rows = rows.to(copies.device, non_blocking=True)
        rows_of = torch.split(rows, sizes)
        parts = list(torch.split(copies.index_select(0, rows), sizes))
        for kind, chosen in _schedule(list(by_order), len(self.transforms)):
            alone = len(chosen) == 1  # a single group is not copied
            batch = parts[chosen[0]] if alone else torch.cat([parts[i] for i in chosen])
            noise = generator
            if isinstance(generator, Streams):
                noise = generator[torch.cat([rows_of[i] for i in chosen])].fold_in(1 + kind)
            changed = self._apply_one(kind, batch, noise)
            done = [changed] if alone else torch.split(changed, [sizes[i] for i in chosen])
            for i, part in zip(chosen, done, strict=True):
                parts[i] = part
        return torch.cat(parts).index_select(0, rows.argsort())

    def _masked(self, images: Tensor, order: Tensor, generator: Generator) -> Tensor:
        """Transform copies [N, C, H, W] by masks: `torch.export` needs static shapes."""
        for place in order.unbind(1):  # each transform for every copy in every place: more work
            before = images
            for kind in range(len(self.transforms)):
                noise = generator.fold_in(1 + kind) if isinstance(generator, Streams) else generator
                chosen = (place == kind)[:, None, None, None]
                images = torch.where(chosen, self._apply_one(kind, before, noise), images)
        return images

    def _orders(self, copies: Tensor, images: int, generator: Generator) -> Tensor:
        """Draw the transforms of each copy: [N, S] indices in order, -1 for one left out."""
        count = len(self.transforms)
        if self.shared_order == "batch" and isinstance(generator, Streams):
            ranks = uniform(copies, count, generator=generator.shared())
            generator.counter += count
        else:
            ranks = uniform(copies, count, generator=generator)
            if self.shared_order:  # the ranks of one image, or of each, serve all copies
                rows = 1 if self.shared_order == "batch" else images
                ranks = ranks[:rows].repeat(len(copies) // max(rows, 1), 1)
        order = ranks.argsort(1)[:, : self.size]
        ps = [transform.p for transform in self.transforms.values()]
        if self.released_code:
            ps = [p if p in (0, 1) else 0.5 for p in ps]
        u = uniform(copies, count, generator=generator)
        applied = u < torch.tensor(ps, dtype=u.dtype).to(u.device, non_blocking=True)
        return order.where(applied.gather(1, order), -1)

    def _apply_one(self, kind: int, x: Tensor, generator: Generator) -> Tensor:
        """Apply transform number `kind` to [b, C, H, W], with the gradient of `gradients`."""
        name, transform = list(self.transforms.items())[kind]
        params = transform.sample(x.detach(), generator)
        mixed = self.gradients in ("straight_through", "combo")
        exact = self.gradients == "exact" or (mixed and transform.differentiable)
        if exact or torch.compiler.is_exporting():
            return transform(x, *params)
        by_network = self.gradients in ("bpda", "combo")
        net = self.approximations[name].to(x.device) if by_network else None
        return approximated(transform, x, params, net)

    def _check_gradients(self, wanted: bool) -> None:
        """Raise ValueError if a transform lacks the gradient that `gradients` names."""
        if self.gradients not in get_args(Gradients):
            raise ValueError(f"gradients must be of {get_args(Gradients)}, got {self.gradients!r}")
        kinds = self.transforms.items()
        without = [name for name, transform in kinds if not transform.differentiable]
        if self.gradients == "exact" and wanted and without:
            raise ValueError(
                f"{', '.join(without)} have no gradient: attack with gradients 'straight_through', "
                "'bpda' or 'combo', as SurrogateTransforms(gradients=…) does"
            )
        need = {"bpda": [name for name, _ in kinds], "combo": without}.get(self.gradients, [])
        if missing := [name for name in need if name not in self.approximations]:
            if self.folder:  # raises the better message, with the files that exist
                load_approximations(self.folder, [self.transforms[missing[0]]])
            raise ValueError(
                f"gradients {self.gradients!r} need approximations of {', '.join(missing)}: "
                "train them with lightning-rob bpda"
            )


def random_transforms_in(defense: nn.Module) -> list[RandomTransforms]:
    """Return the `RandomTransforms` that a defense consists of or contains."""
    return [part for part in defense.modules() if isinstance(part, RandomTransforms)]


def _schedule(orders: Sequence[Sequence[int]], count: int) -> Iterator[tuple[int, list[int]]]:
    """Yield each transform with the positions of the orders [N, S] that it is next applied to."""
    waiting: list[list[int]] = [[] for _ in range(count)]
    rows = [[kind for kind in reversed(row) if kind >= 0] for row in orders]
    for copy, row in enumerate(rows):
        if row:
            waiting[row.pop()].append(copy)
    # The transform that is next in the most orders is taken, as in the authors' code, so that few
    # calls serve all copies; ties go to the first.
    while any(waiting):
        kind = max(range(count), key=lambda k: len(waiting[k]))
        ready, waiting[kind] = waiting[kind], []
        yield kind, sorted(ready)
        for copy in ready:
            if rows[copy]:
                waiting[rows[copy].pop()].append(copy)
