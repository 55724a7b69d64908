"""The residual branches of a network, found in what its blocks compute and not by their names."""

import copy
import inspect
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from lightning_rob.defenses import Defense

ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
RELUS = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
QUESTIONS = (getattr, operator.getitem, operator.eq)


@dataclass(frozen=True)
class Branch:
    """A path of layers around which its input is added.

    Args:
        block: whose graph this is a part of.
        entry: the node where branch and skip connection part.
        body: the branch's nodes, in order.
        addition: the node where they meet again.
        unchanged: whether the skip connection passes its input on as it is.
    """

    block: "Block"
    entry: fx.Node
    body: list[fx.Node]
    addition: fx.Node
    unchanged: bool

    @property
    def end(self) -> fx.Node:
        """The body's last node, which only the addition needs."""
        return self.body[-1]


class Block:
    """A module that adds residual branches, as a graph that may be edited and run.

    Args:
        module: the module, which stays as it is.
        graph: what its forward computes.
        first: whether it is the first child of an `nn.Sequential` or `nn.ModuleList`, the first
            block of a stage.
    """

    def __init__(self, module: nn.Module, graph: fx.Graph, first: bool = False) -> None:
        self.module, self.graph, self.first = module, graph, first
        self.parts = dict(module.named_modules())

    @property
    def branches(self) -> list[Branch]:
        """The branches there are in the graph, as it stands now."""
        return [branch for node in self.graph.nodes for branch in self.ending_at(node)]

    def ending_at(self, node: fx.Node) -> list[Branch]:
        """The branch that a node adds to a skip connection, if it does."""
        ends = node.all_input_nodes
        if not node.op.startswith("call_") or node.target not in ADDITIONS or len(ends) != 2:
            return []
        return [*self._around(node, ends[0], ends[1]), *self._around(node, ends[1], ends[0])]

    def forward(self, x: Tensor) -> Tensor:
        """The module's forward, by the graph."""
        return self.run(self.graph, x)

    def run(self, graph: fx.Graph, *inputs: Any) -> Tensor:
        """A graph of this module's layers, run without compiling it, which would leave traces."""
        out: Tensor = fx.Interpreter(self.module, graph=graph).run(*inputs)
        return out

    def is_relu(self, node: fx.Node) -> bool:
        """Whether a node is a ReLU, as a module, function or method."""
        if node.op == "call_module":
            return isinstance(self.parts[str(node.target)], nn.ReLU)
        return node.target in RELUS

    def _is_identity(self, node: fx.Node) -> bool:
        return node.op == "call_module" and isinstance(self.parts[str(node.target)], nn.Identity)

    def layers(self, nodes: Iterable[fx.Node]) -> int:
        """How many convolutions and linear layers there are in these nodes."""
        return sum(node.meta.get("layers") or self._layers(node) for node in nodes)

    def _layers(self, node: fx.Node) -> int:
        if node.op == "call_module":
            return sum(isinstance(part, LAYERS) for part in self.parts[str(node.target)].modules())
        return int(node.target in (F.linear, F.conv1d, F.conv2d, F.conv3d))

    def _around(self, addition: fx.Node, end: fx.Node, skip: fx.Node) -> Iterator[Branch]:
        """The branch that ends in one node, if the other ends a skip connection around it."""
        skipped = _ancestors(skip)
        above = _ancestors(end) - skipped
        body = [node for node in self.graph.nodes if node in above]
        entries = {node for part in body for node in part.all_input_nodes} - above
        closed = all(user in above or user is addition for part in body for user in part.users)
        if len(entries) != 1 or not closed:
            return
        (entry,) = entries
        connection = skipped - _ancestors(entry)
        plain = not any(map(self.is_relu, connection))
        if entry in skipped and plain and self.layers(body) > self.layers(connection):
            unchanged = all(map(self._is_identity, connection))
            yield Branch(self, entry, body, addition, unchanged)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """The node and all that it depends on."""
    found, waiting = set(), [node]
    while waiting:
        if (one := waiting.pop()) not in found:
            found.add(one)
            waiting += one.all_input_nodes
    return found


def residual_blocks(defense: nn.Module) -> list[list[Block]]:
    """The residual blocks of each of a defense's networks, in the order of its layers.

    A block is the smallest module that `torch.fx` can trace and whose forward, of one argument,
    adds what goes through more layers to what goes through fewer and no ReLU.

    Raises:
        TypeError: there are none.
    """
    known: dict[nn.Module, Block] = {}
    found = [_blocks(net, known) for net in _networks(defense)]
    if not known:
        names = ", ".join(sorted({type(net).__name__ for net in _networks(defense)}))
        raise TypeError(
            f"SGM and LinBP need residual networks, and there are no skip connections in {names}: "
            "leave them out"
        )
    return found


def _networks(defense: nn.Module) -> list[nn.Module]:
    try:
        return (
            list(dict.fromkeys(defense.foldable_networks))
            if isinstance(defense, Defense)
            else [defense]
        )
    except TypeError:
        return [defense]


def _blocks(net: nn.Module, known: dict[nn.Module, Block]) -> list[Block]:
    modules = list(net.modules())
    rows = [part for part in modules if isinstance(part, nn.Sequential | nn.ModuleList)]
    first = {next(iter(row)) for row in rows if len(row)}
    for module in reversed(modules):  # parts before the whole
        if module not in known and _candidate(module) and (graph := _graph(module, known)):
            block = Block(module, graph, module in first)
            if block.branches:
                known[module] = block
    return [known[module] for module in modules if module in known]


def _candidate(module: nn.Module) -> bool:
    if isinstance(module, Defense) or type(module).__module__.startswith(("torch.nn", "torch.jit")):
        return False
    one = len(inspect.signature(type(module).forward).parameters) == 2
    return one and any(isinstance(part, LAYERS) for part in module.modules())


def _graph(module: nn.Module, known: dict[nn.Module, Block]) -> fx.Graph | None:
    """A copy of the graph an outer context runs the module by, or a trace of a copy of it."""
    running = getattr(module.__dict__.get("forward"), "__self__", None)
    if isinstance(running, Block):
        graph = fx.Graph()
        graph.output(graph.graph_copy(running.graph, {}))
        return graph
    tracer = _Tracer(known)
    kept = [part for name, part in module.named_modules() if name and tracer.is_leaf_module(part)]
    memo = {id(part): part for part in (*kept, *module.parameters(), *module.buffers())}
    try:
        with torch.random.fork_rng(devices=[]):
            return _unasserted(tracer.trace(copy.deepcopy(module, memo).eval()))
    except Exception:  # whatever a forward does when it is given a stand-in for an image
        return None


def _unasserted(graph: fx.Graph) -> fx.Graph:
    """Without assertions on shapes, which would hold on to what is inside of a branch."""
    for node in reversed(graph.nodes):
        asked = node.target in QUESTIONS and not node.users
        if node.op == "call_function" and (node.target is torch._assert or asked):
            graph.erase_node(node)
    return graph


class _Tracer(fx.Tracer):
    """Looks into everything but torch's own layers and blocks that are known."""

    def __init__(self, known: dict[nn.Module, Block]) -> None:
        super().__init__()
        self.known = known

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str = "") -> bool:
        return m in self.known or super().is_leaf_module(m, module_qualified_name)


@contextmanager
def running(blocks: Iterable[Block]) -> Iterator[None]:
    """Let modules compute what their blocks' graphs say, for as long as the context lasts."""
    before = [(block.module, block.module.__dict__.get("forward")) for block in blocks]
    try:
        for block in blocks:
            block.module.__dict__["forward"] = block.forward
        yield
    finally:
        for module, forward in before:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward
