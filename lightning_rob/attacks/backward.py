"""Modified gradients that help an attacker: contexts for `PGD(backward=…)` and `WithBackward`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_rob.attacks.residual import Block, Branch, Forward, replaced, residual_blocks
from lightning_rob.defenses import Defense, random_transforms_in
from lightning_rob.defenses.network import logits_in
from lightning_rob.defenses.random_transforms import Gradients, Shared
from lightning_rob.threat import divisor, scale
from lightning_rob.transforms.base import pinned


class Backward(ABC):
    """Another backward pass for a defense while an attack runs; its predictions stay the same."""

    @abstractmethod
    def __call__(self, defense: Defense) -> AbstractContextManager[None]:
        """Return the context in which the defense has this backward pass."""


Backwards = Backward | Sequence[Backward] | None


@contextmanager
def entered(backward: Backwards, defense: Defense) -> Iterator[None]:
    """Enter one backward or several in turn; none for None."""
    chosen = backward if isinstance(backward, Sequence) else [backward]
    with ExitStack() as stack:
        for each in filter(None, chosen):
            stack.enter_context(each(defense))
        yield


def other_forward(
    nets: Sequence[nn.Module], change: Callable[[Forward], Forward]
) -> AbstractContextManager[None]:
    """Return the context in which the networks' forward is replaced by one built from it."""
    return replaced({net: change(net.forward) for net in nets})


@dataclass(frozen=True)
class SGM(Backward):
    """Prefer skip connections: shrink the gradients of residual branches (Wu et al. 2020, eq. 5).

    A block z + f(z) passes back (1 + gamma f'(z)) g. Two kinds of blocks keep their exact gradient:
    blocks whose skip connection is a convolution or drops pixels, and by default the first block of
    each stage, as in the code of Wu et al. and of the RT authors: the first child of an
    `nn.Sequential` or `nn.ModuleList`. The logits do not change. The authors divide each block's
    gradient by its standard deviation; this only scales the gradient, or mixes the images of a
    batch, and is left out.

    Args:
        gamma: factor in (0, 1] of each residual branch's gradient; 1 is the exact gradient.
        first_blocks: shrink the first block of each stage too, as in eq. 5, a product over all
            blocks. Needed where stages have one block only, as in a ResNet-8.
    """

    gamma: float = 0.5
    first_blocks: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma must be in (0, 1], got {self.gamma}")

    def __call__(self, defense: nn.Module) -> AbstractContextManager[None]:
        def shrink(x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda gradient: self.gamma * gradient)  # type: ignore[no-untyped-call]
            return x

        blocks = dict.fromkeys(block for net in residual_blocks(defense) for block in net)
        branches = [each for block in blocks for each in block.branches if each.unchanged]
        chosen = [each for each in branches if self.first_blocks or not each.block.first_of_stage]
        if not chosen:
            raise TypeError(
                f"SGM shrinks none of {len(branches)} skip connections that pass their input on as "
                "it is; first_blocks=True shrinks those of the first block of each stage too"
            )
        for branch in chosen:
            graph = branch.block.graph
            with graph.inserting_before(branch.addition):
                call = graph.call_function(shrink, (branch.body[-1],))
            branch.addition.replace_input_with(branch.body[-1], call)
        return replaced({block.module: block.forward for block in blocks})


@dataclass(frozen=True)
class LinBP(Backward):
    """Pass gradients through residual branches as if they had no ReLU (Guo et al. 2020, section 4).

    The gradient that leaves a branch is rescaled to the length of the exact one, per image and per
    draw: otherwise it would drown that of the skip connection ("gradient branching with care").
    ReLUs outside of branches keep their gradient, and the logits do not change.

    Args:
        start: share in [0, 1) of the residual branches, counted from the image, that keep their
            exact gradient; the paper starts at 1/2 in a ResNet-50 (block 1 of layer 3).
    """

    start: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.start < 1:
            raise ValueError(f"start must be a share of the branches in [0, 1), got {self.start}")

    def __call__(self, defense: nn.Module) -> AbstractContextManager[None]:
        chosen: dict[fx.Node, Block] = {}
        for net in residual_blocks(defense):
            branches = [branch for block in net for branch in block.branches]
            kept = int(self.start * len(branches))
            chosen |= {each.addition: each.block for each in branches[kept:]}
        # A nested branch comes before the one around it, whose body changes when it is replaced:
        # branches are looked up again one by one.
        current = (branch for node, block in chosen.items() for branch in block.ending_at(node))
        with_relu = (each for each in current if any(map(each.block.is_relu, each.body)))
        if not [_linearize(branch) for branch in with_relu]:
            raise TypeError(f"LinBP needs ReLUs in residual branches, {len(chosen)} have none")
        return replaced({block.module: block.forward for block in chosen.values()})


def _linearize(branch: Branch) -> fx.Node:
    """Replace a branch in its block's graph by a call of `_LinearBranch`, and return the call."""
    block, graph = branch.block, branch.block.graph
    # The branch's own graph, with ReLUs whose gradient can be switched.
    inner = fx.Graph()
    copies, switch = {branch.entry: inner.placeholder("x")}, inner.placeholder("switch")
    for node in branch.body:
        if block.is_relu(node):
            x = copies[node.all_input_nodes[0]]
            copies[node] = inner.call_function(_SwitchedReLU.apply, (x, switch))
        else:
            copies[node] = inner.node_copy(node, copies.__getitem__)
    inner.output(copies[branch.body[-1]])

    def run(x: Tensor, switch: _Switch) -> Tensor:
        return block.run(inner, x, switch)

    def linear(x: Tensor) -> Tensor:
        wanted = x.requires_grad and torch.is_grad_enabled()
        return _LinearBranch.apply(x, run) if wanted else run(x, _Switch())

    with graph.inserting_before(branch.addition):
        call = graph.call_function(linear, (branch.entry,))
    call.meta["layers"] = block.layers(branch.body)
    branch.body[-1].replace_all_uses_with(call)
    for node in reversed(branch.body):
        graph.erase_node(node)
    return call


class _Switch:
    """State of one run of a branch: whether its ReLUs pass gradients unchanged."""

    linear = False


class _SwitchedReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, switch: _Switch) -> Tensor:
        out = x.relu()
        ctx.save_for_backward(out)
        ctx.switch = switch
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        if ctx.switch.linear:
            return gradient, None
        return torch.ops.aten.threshold_backward(gradient, out, 0), None


class _LinearBranch(torch.autograd.Function):
    """One forward, two backwards: the linear one gives the direction, the exact one the length."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor, _Switch], Tensor]) -> Tensor:
        ctx.switch = _Switch()
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            out = ctx.out = run(ctx.x, ctx.switch)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (exact,) = torch.autograd.grad(ctx.out, ctx.x, gradient, retain_graph=True)
        try:
            ctx.switch.linear = True
            (linear,) = torch.autograd.grad(ctx.out, ctx.x, gradient, retain_graph=True)
        finally:
            ctx.switch.linear = False
        return scale(linear, _norms(exact) / divisor(_norms(linear))), None


def _norms(batch: Tensor) -> Tensor:
    """Return the 2-norm of each image, without underflow: [B, …] -> [B]."""
    flat = batch.flatten(1)
    largest = divisor(flat.abs().amax(1))
    return largest * torch.linalg.vector_norm(scale(flat, 1 / largest), dim=1)


@dataclass(frozen=True)
class InsideBounds(Backward):
    """Take gradients at the image moved inwards by a hair; the logits do not change.

    A network that clamps its input has gradient 0 at pixels that are exactly black or white: for
    `torch.clamp` from torch 2.14 on, for `hardtanh`, `relu` and `relu6` in every release. The
    gradient just inside belongs to the only direction in which such a pixel can move. Costs one
    more forward pass. A defense that adapts names no networks: attack its adapted model, in GMSA.

    Args:
        hair: the distance in pixel units; at least one rounding step of the image's precision.
        bounds: smallest and largest value of a pixel, those of the threat.
    """

    hair: float = 1e-4
    bounds: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", tuple(self.bounds))
        low, high = self.bounds
        if not 0 < self.hair < (high - low) / 2:
            raise ValueError(f"hair must be positive and fit into {self.bounds}, got {self.hair}")

    def __call__(self, defense: Defense) -> AbstractContextManager[None]:
        low, high = self.bounds

        def differentiate_inside(plain: Forward) -> Forward:
            def forward(x: Tensor) -> Tensor:
                if not (torch.is_grad_enabled() and x.requires_grad):
                    return plain(x)
                # The logits are those of the image itself, to the last bit.
                with torch.no_grad():
                    logits = logits_in(plain(x))
                # In half precision a smaller step would round back to the bound.
                hair = max(self.hair, torch.finfo(x.dtype).eps)
                inside = logits_in(plain(pinned(x, low + hair, high - hair)))
                return _ValueWithGradientOf.apply(logits, inside)

            return forward

        return other_forward(defense.foldable_networks, differentiate_inside)


class _ValueWithGradientOf(torch.autograd.Function):
    """The first tensor's values, bit by bit, with the gradient of the second."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


@dataclass(frozen=True)
class SurrogateTransforms(Backward):
    """Surrogate for `RandomTransforms` that the attack differentiates.

    Only the draws of the attack change; the defense's predictions do not.

    Args:
        shared_order: give all copies of an image the same transforms in the same order, drawn anew
            at every step, each still with its probability and its own parameters: gradients of less
            variance (RT paper, appendix B.2). "batch": all images share them too, as good for each
            image and faster.
        gradients: gradients of the transforms, see `RandomTransforms`; None leaves the defense's.
    """

    shared_order: Shared = True
    gradients: Gradients | None = None

    def __post_init__(self) -> None:
        if self.shared_order not in (True, False, "batch"):
            raise ValueError(
                f"shared_order must be True, False or 'batch', got {self.shared_order!r}"
            )

    @contextmanager
    def __call__(self, defense: Defense) -> Iterator[None]:
        found = random_transforms_in(defense)
        if not found:
            raise TypeError(f"{self} is for RandomTransforms, got {type(defense).__name__}")
        before = [(part.shared_order, part.gradients) for part in found]
        try:
            for part in found:
                part.shared_order = self.shared_order
                part.gradients = self.gradients or part.gradients
            yield
        finally:
            for part, (shared_order, gradients) in zip(found, before, strict=True):
                part.shared_order, part.gradients = shared_order, gradients
