"""Modified gradients that help an attacker: contexts for `PGD(backward=…)` and `WithBackward`."""

import copy
import inspect
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from lightning_rob.attacks.contexts import foldable_networks
from lightning_rob.defenses import Defense, random_transforms_in
from lightning_rob.defenses.network import logits_in
from lightning_rob.defenses.random_transforms import Gradients, Shared
from lightning_rob.runtime.errors import within
from lightning_rob.threat import divisor, scale
from lightning_rob.transforms.base import pinned

ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
RELUS = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYER_FUNCTIONS = (F.linear, F.conv1d, F.conv2d, F.conv3d)
SHAPE_QUERIES = (getattr, operator.getitem, operator.eq)
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Branch:
    """A path of layers and the addition of its input to its output."""

    block: "Block"  # the block whose graph contains the branch
    entry: fx.Node  # the node where branch and skip connection separate
    body: list[fx.Node]  # the branch's nodes, in order; only the addition uses the last one
    addition: fx.Node  # the node where they meet again
    unchanged: bool  # whether the skip connection is the identity


class Block:
    """A module with residual branches, as a graph that can be edited and run."""

    def __init__(self, module: nn.Module, graph: fx.Graph, first_of_stage: bool) -> None:
        self.module, self.graph, self.first_of_stage = module, graph, first_of_stage
        self.parts = dict(module.named_modules())

    @property
    def branches(self) -> list[Branch]:
        """The branches in the current graph."""
        return [branch for node in self.graph.nodes for branch in self.ending_at(node)]

    def ending_at(self, node: fx.Node) -> list[Branch]:
        """Return the branch that a node adds to a skip connection, or no branch."""
        ends = node.all_input_nodes
        if not node.op.startswith("call_") or node.target not in ADDITIONS or len(ends) != 2:
            return []
        return [*self._branches(node, ends[0], ends[1]), *self._branches(node, ends[1], ends[0])]

    def forward(self, x: Tensor) -> Tensor:
        """Compute the module's forward by the graph."""
        return self.run(self.graph, x)

    def run(self, graph: fx.Graph, *inputs: Any) -> Tensor:
        """Run a graph of this module's layers; compiling it would leave traces in the module."""
        return fx.Interpreter(self.module, graph=graph).run(*inputs)

    def is_relu(self, node: fx.Node) -> bool:
        """Whether a node is a ReLU, as a module, function or method."""
        if node.op == "call_module":
            return isinstance(self.parts[str(node.target)], nn.ReLU)
        return node.target in RELUS

    def layers(self, nodes: Iterable[fx.Node]) -> int:
        """Count the convolutions and linear layers in these nodes."""
        count = 0
        for node in nodes:
            if "layers" in node.meta:
                count += node.meta["layers"]
            elif node.op == "call_module":
                parts = self.parts[str(node.target)].modules()
                count += sum(isinstance(part, LAYERS) for part in parts)
            else:
                count += node.target in LAYER_FUNCTIONS
        return count

    def _branches(self, addition: fx.Node, end: fx.Node, skip: fx.Node) -> Iterator[Branch]:
        """Yield the branch that ends in `end` if `skip` ends a skip connection around it."""
        skipped = _ancestors(skip)
        above = _ancestors(end) - skipped
        body = [node for node in self.graph.nodes if node in above]
        # A branch has one entry, and no node inside of it is used elsewhere.
        entries = {node for part in body for node in part.all_input_nodes} - above
        closed = all(user in above or user is addition for part in body for user in part.users)
        if len(entries) != 1 or not closed:
            return
        (entry,) = entries
        connection = skipped - _ancestors(entry)
        plain = not any(map(self.is_relu, connection))
        # The path of more layers is the branch; a path with a ReLU is no skip connection.
        if entry in skipped and plain and self.layers(body) > self.layers(connection):
            unchanged = all(
                node.op == "call_module" and isinstance(self.parts[str(node.target)], nn.Identity)
                for node in connection
            )
            yield Branch(self, entry, body, addition, unchanged)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """Return the node and all nodes that it depends on."""
    found, pending = set(), [node]
    while pending:
        if (current := pending.pop()) not in found:
            found.add(current)
            pending += current.all_input_nodes
    return found


def residual_blocks(defense: nn.Module) -> list[list[Block]]:
    """Return the residual blocks of each of a defense's networks, in the order of its layers."""
    known: dict[nn.Module, Block] = {}
    networks, found = list(dict.fromkeys(foldable_networks(defense))) or [defense], []
    for net in networks:
        modules = list(net.modules())
        stages = [part for part in modules if isinstance(part, nn.Sequential | nn.ModuleList)]
        first = {next(iter(stage)) for stage in stages if len(stage)}
        for module in reversed(modules):  # inner modules first: the smallest one is the block
            library = type(module).__module__.startswith(("torch.nn", "torch.jit"))
            if module in known or library or isinstance(module, Defense):
                continue
            unary = len(inspect.signature(type(module).forward).parameters) == 2  # self and x
            if not unary or not any(isinstance(part, LAYERS) for part in module.modules()):
                continue
            if graph := _graph(module, known):
                block = Block(module, graph, module in first)
                if block.branches:
                    known[module] = block
        found.append([known[module] for module in modules if module in known])
    if not known:
        names = ", ".join(sorted({type(net).__name__ for net in networks}))
        raise TypeError(
            f"SGM and LinBP need residual networks, and there are no skip connections in {names}: "
            "leave them out"
        )
    return found


def _graph(module: nn.Module, known: dict[nn.Module, Block]) -> fx.Graph | None:
    """Return a copy of the graph that an outer context runs, or trace a copy of the module."""
    # Inside another context the module runs a graph already: a copy of that one is changed.
    running = getattr(module.__dict__.get("forward"), "__self__", None)
    if isinstance(running, Block):
        graph = fx.Graph()
        graph.output(graph.graph_copy(running.graph, {}))
        return graph

    class Tracer(fx.Tracer):  # into all modules but torch's own layers and known blocks
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str = "") -> bool:
            return m in known or super().is_leaf_module(m, module_qualified_name)

    tracer = Tracer()
    kept = [part for name, part in module.named_modules() if name and tracer.is_leaf_module(part)]
    memo = {id(part): part for part in (*kept, *module.parameters(), *module.buffers())}
    try:
        with torch.random.fork_rng(devices=[]):
            graph = tracer.trace(copy.deepcopy(module, memo).eval())
    except Exception:  # a user's forward may raise anything when its input is a tracer's proxy
        return None
    # Assertions on shapes use nodes inside of a branch, which must be replaceable.
    for node in reversed(graph.nodes):
        unused = node.target in SHAPE_QUERIES and not node.users
        if node.op == "call_function" and (node.target is torch._assert or unused):
            graph.erase_node(node)
    return graph


@contextmanager
def replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Give modules another forward inside this context."""
    before = [(module, module.__dict__.get("forward")) for module in forwards]
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before:
            module.__dict__.pop("forward", None)
            module.__dict__.update({"forward": own} if own else {})


class Backward(ABC):
    """Another backward pass for a defense while an attack runs; its predictions stay the same."""

    more_passes: ClassVar[int] = 0  # that each gradient costs

    @abstractmethod
    def __call__(self, defense: Defense) -> AbstractContextManager[None]:
        """Return the context in which the defense has this backward pass."""


Backwards = Backward | Sequence[Backward] | None


def passes_of(backward: Backwards) -> int:
    """Return the passes that one backward or several add to each gradient."""
    chosen = backward if isinstance(backward, Sequence) else [backward]
    return sum(each.more_passes for each in filter(None, chosen))


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
        within(0, 1, gamma=self.gamma)

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
        within(0, 1, start=self.start)

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

    more_passes: ClassVar[int] = 1
    hair: float = 1e-4
    bounds: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", tuple(self.bounds))
        within(0, 0.5, hair=self.hair)

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
                return ValueWithGradientOf.apply(logits, inside)

            return forward

        return other_forward(defense.foldable_networks, differentiate_inside)


class ValueWithGradientOf(torch.autograd.Function):
    """The first tensor's values, bit by bit, with the gradient of the second."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        return value.detach().clone()

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
