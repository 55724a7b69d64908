"""Gradients that lie, to an attacker's advantage: contexts for `PGD(backward=…)`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_rob.attacks.base import Backward
from lightning_rob.attacks.residual import Block, Branch, residual_blocks, running
from lightning_rob.threat import TINY, scale


@dataclass(frozen=True)
class SGM(Backward):
    """Gradients prefer skip connections (Wu et al. 2020, eq. 5): those of residual branches shrink.

    A block z + f(z) passes back (1 + gamma f'(z)) g. Two kinds of blocks keep their exact gradient:
    those whose skip connection is a convolution or drops pixels, and by default the first block of
    each stage, also where its skip connection is the identity. The code of Wu et al. and that of
    the RT authors leave the same blocks out, by their names: `layer1.0`, `layer2.0` … (also
    `layer3.10`, whose name ends in 0 too; that is not followed here). Here the first block of a
    stage is the first child of an `nn.Sequential` or `nn.ModuleList`, whatever the names; a block
    that stands in neither, such as an attribute of the network, shrinks.

    The images' logits stay what they are. The authors' division of each block's gradient by its
    standard deviation only scales the whole, or over a batch mixes its images: it is left out.

    Args:
        gamma: what the gradient of each residual branch is multiplied by; 1 is the exact gradient.
        first_blocks: shrink the first block of each stage too, as in eq. 5, a product over all
            blocks. Needed where stages have one block only, as in a ResNet-8.

    Raises:
        ValueError: gamma is not in (0, 1].
        TypeError: when entered, the defense has no residual blocks, or none that would shrink.
    """

    gamma: float = 0.5
    first_blocks: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma must be in (0, 1], got {self.gamma}")

    def __call__(self, defense: nn.Module) -> AbstractContextManager[None]:
        """A context in which the defense has these gradients."""
        return _shrunk(defense, self.gamma, self.first_blocks)


@contextmanager
def _shrunk(defense: nn.Module, gamma: float, first_blocks: bool) -> Iterator[None]:
    def shrunk(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gamma * gradient)  # type: ignore[no-untyped-call]
        return x

    blocks = dict.fromkeys(block for net in residual_blocks(defense) for block in net)
    branches = [each for block in blocks for each in block.branches if each.unchanged]
    if not branches:
        raise TypeError("SGM needs skip connections that pass their input on as it is, found none")
    chosen = [branch for branch in branches if first_blocks or not branch.block.first]
    if not chosen:
        raise TypeError(
            "SGM leaves the first block of each stage as it is, and there are no others here: "
            "SGM(first_blocks=True) shrinks those too"
        )
    for branch in chosen:
        graph = branch.block.graph
        with graph.inserting_before(branch.addition):
            call = graph.call_function(shrunk, (branch.end,))
        branch.addition.replace_input_with(branch.end, call)
    with running(blocks):
        yield


@dataclass(frozen=True)
class LinBP(Backward):
    """Gradients pass residual branches as if they had no ReLU (Guo et al. 2020, section 4).

    The gradient that leaves a branch is brought to the length that the exact one has there, image
    by image and draw by draw, lest it drown that of the skip connection ("gradient branching with
    care"). ReLUs outside of branches keep their gradient and the logits stay what they are.

    Args:
        start: share of a network's residual branches, counted from the image, that keep their
            exact gradient; 1/2 is where the paper starts in a ResNet-50 (block 1 of layer 3).

    Raises:
        ValueError: start is not in [0, 1).
        TypeError: when entered, the defense has no residual blocks, or there is no ReLU in them.
    """

    start: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.start < 1:
            raise ValueError(f"start must be a share of the branches in [0, 1), got {self.start}")

    def __call__(self, defense: nn.Module) -> AbstractContextManager[None]:
        """A context in which the defense has these gradients."""
        return _linear(defense, self.start)


@contextmanager
def _linear(defense: nn.Module, start: float) -> Iterator[None]:
    chosen: dict[fx.Node, Block] = {}
    for net in residual_blocks(defense):
        branches = [branch for block in net for branch in block.branches]
        chosen |= {each.addition: each.block for each in branches[int(start * len(branches)) :]}
    # those inside of others come first, and are found anew as the others shrink
    late = (branch for node, block in chosen.items() for branch in block.ending_at(node))
    if not [_replace(branch) for branch in late if any(map(branch.block.is_relu, branch.body))]:
        raise TypeError(f"LinBP needs ReLUs in residual branches, {len(chosen)} have none")
    with running(dict.fromkeys(chosen.values())):
        yield


def _replace(branch: Branch) -> fx.Node:
    """Put one call in the place of a branch, and return it."""
    block, graph, inner = branch.block, branch.block.graph, _switchable(branch)

    def run(x: Tensor, switch: Switch) -> Tensor:
        return block.run(inner, x, switch)

    def linear(x: Tensor) -> Tensor:
        wanted = x.requires_grad and torch.is_grad_enabled()
        out: Tensor = _LinearBranch.apply(x, run) if wanted else run(x, Switch())
        return out

    with graph.inserting_before(branch.addition):
        call = graph.call_function(linear, (branch.entry,))
    call.meta["layers"] = block.layers(branch.body)
    branch.end.replace_all_uses_with(call)
    for node in reversed(branch.body):
        graph.erase_node(node)
    return call


def _switchable(branch: Branch) -> fx.Graph:
    """The graph of a branch alone, with ReLUs whose gradient can be switched."""
    graph = fx.Graph()
    copies = {branch.entry: graph.placeholder("x")}
    switch = graph.placeholder("switch")
    for node in branch.body:
        if branch.block.is_relu(node):
            x = copies[node.all_input_nodes[0]]
            copies[node] = graph.call_function(_switched_relu, (x, switch))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[branch.end])
    return graph


class Switch:
    """Whether the ReLUs of one run of a branch pass gradients as they are."""

    linear = False


class _SwitchedReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, switch: Switch) -> Tensor:
        out = x.relu()
        ctx.save_for_backward(out)
        ctx.switch = switch
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return gradient if ctx.switch.linear else gradient.masked_fill(out <= 0, 0), None


def _switched_relu(x: Tensor, switch: Switch) -> Tensor:
    out: Tensor = _SwitchedReLU.apply(x, switch)
    return out


class _LinearBranch(torch.autograd.Function):
    """One forward, and two backwards: one for the direction, one for the length."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor, Switch], Tensor]) -> Tensor:
        ctx.switch = Switch()
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
        return scale(linear, _length(exact) / _length(linear).clamp_min(TINY)), None


def _length(batch: Tensor) -> Tensor:
    """The 2-norm of each image, without underflow: [B, …] -> [B]."""
    flat = batch.flatten(1)
    largest = flat.abs().amax(1).clamp_min(TINY)
    norms: Tensor = largest * torch.linalg.vector_norm(scale(flat, 1 / largest), dim=1)
    return norms
