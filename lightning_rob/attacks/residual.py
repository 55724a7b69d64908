"""Residual branches of a network, found in the graph of its operations and not by names."""

import copy
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from lightning_rob.attacks.contexts import foldable_networks
from lightning_rob.defenses import Defense

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
