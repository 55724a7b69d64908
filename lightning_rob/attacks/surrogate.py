"""Surrogate gradients: other slopes and other objectives for a given network."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.functional import interpolate, mse_loss

from lightning_rob.attacks.backward import ValueWithGradientOf
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.decisions import Decisions, HeldOutcomes
from lightning_rob.attacks.decorators import AttackDecorator
from lightning_rob.attacks.sight import own_sight
from lightning_rob.attacks.slopes import OtherSlopes, Slope
from lightning_rob.defenses import Defense
from lightning_rob.defenses.per_image import WholeBatch
from lightning_rob.defenses.rejection import as_seen, unwrapped
from lightning_rob.randomness import Generator, normal, own_streams, seed_of
from lightning_rob.runtime.errors import at_least
from lightning_rob.runtime.memory import all_at_once
from lightning_rob.threat import Threat
from lightning_rob.transforms.base import pinned

WIDTH = 24
STEPS = 4  # of Adam for each pass of the defense
PART = 64  # images of a step
FITTED = 256  # pairs of images to which the mixture is fitted


class StandIn(nn.Module):
    """Map images [B, C, H, W] to [B, D, I, J]: a mixture of the channels, and a correction."""

    def __init__(self, x: Tensor, z: Tensor) -> None:
        super().__init__()
        channels, wanted, self.size = x.shape[1], z.shape[1], z.shape[2:]
        self.mixture = nn.Conv2d(channels, wanted, 1)
        last = nn.Conv2d(WIDTH, wanted, 3, padding=1, bias=False)  # the mixture has one
        self.correction = nn.Sequential(
            nn.Conv2d(channels, WIDTH, 5, padding=2),
            nn.SiLU(),
            nn.Conv2d(WIDTH, WIDTH, 5, padding=2),
            nn.SiLU(),
            last,
        )
        nn.init.zeros_(last.weight)  # so that it begins with the mixture alone
        # The best mixture, by least squares: a few steps would not even find its signs.
        inputs, wanted_z = self._resized(x[:FITTED]).movedim(1, -1), z[:FITTED].movedim(1, -1)
        rows = nn.functional.pad(inputs.flatten(0, -2), (0, 1), value=1.0)
        gram, moments = rows.T @ rows / len(rows), rows.T @ wanted_z.flatten(0, -2) / len(rows)
        gram = gram.cpu() + 1e-6 * torch.eye(channels + 1)
        found = torch.linalg.solve(gram, moments.cpu()).T
        self.mixture.load_state_dict({"weight": found[:, :-1, None, None], "bias": found[:, -1]})

    def _resized(self, x: Tensor) -> Tensor:
        return x if x.shape[2:] == self.size else interpolate(x, self.size, mode="bilinear")

    def forward(self, x: Tensor) -> Tensor:
        x = self._resized(x)
        return self.mixture(x) + self.correction(x)


def inputs_of(defense: Defense, part: str, x: Tensor, generator: Generator) -> Tensor:
    """Return what a part of a defense is given for images x, in its last call of a prediction."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        found[:] = [inputs[0].detach().clone()]  # of the last call alone

    with defense.get_submodule(part).register_forward_pre_hook(keep), torch.no_grad():
        defense.logits(x, generator)
    if not found or found[0].dim() != 4 or len(found[0]) != len(x):
        shape = list(found[0].shape) if found else "nothing"
        raise ValueError(f"{part} must get a batch of {len(x)} images or maps, got {shape}")
    return found[0]


def train_stand_in(
    defense: Defense, part: str, x: Tensor, threat: Threat, passes: int, generator: Generator
) -> StandIn:
    """Train a network on what lies before a part of a defense; return it frozen.

    It learns from pairs of a point of each image's ball and what the defense makes of it (mean
    squared error, Adam), one pair of each image a pass.
    """
    seed = int(torch.randint(2**62, ())) if generator is None else seed_of(generator)
    with own_streams(seed, x.device), torch.enable_grad():
        noise = torch.Generator().manual_seed(seed)
        # Attacks end near the surface of the ball, and pass through all of it.
        draws = (threat.start, threat.corner)
        points = [draws[i % 2](x, noise) for i in range(passes)]
        targets = torch.cat([inputs_of(defense, part, at, noise) for at in points]).float()
        points_seen = torch.cat(points).float()
        net = StandIn(points_seen, targets).to(x.device)
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        steps = STEPS * passes
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps + 1)
        for _ in range(steps):
            chosen = torch.randint(len(targets), (PART,), device=x.device)
            optimizer.zero_grad()
            torch.autograd.backward(mse_loss(net(points_seen[chosen]), targets[chosen]))
            optimizer.step()
            schedule.step()
    return net.eval().requires_grad_(False)


# Share of images for which values that stand for logits have the same largest one, of two and more.
AGREES, AGREES_OF_TWO = 0.6, 0.95


class _Entering(torch.autograd.Function):
    """The first tensor's values, with the gradient to both as long as the network runs.

    A purifier asks for that of its own images while it runs. The attack's comes after it.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor, running: list[bool]) -> Tensor:
        ctx.running = running
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        return gradient if ctx.running else None, gradient, None


def by_draw(value: Tensor, images: int) -> Tensor:
    """Return values that may be logits as [n, B, K]: whichever order puts like ones together."""
    classes = value.shape[-1]
    if value.dim() == 2 and len(value) == images:
        return value[None]
    if value.dim() == 3:
        return value if value.shape[1] == images else value.transpose(0, 1)
    draws_first = value.reshape(-1, images, classes)
    images_first = value.reshape(images, -1, classes).transpose(0, 1)
    spread = [float(order.detach().var(0).mean()) for order in (draws_first, images_first)]
    return draws_first if spread[0] <= spread[1] else images_first


def like_logits(values: Sequence[Tensor], classes: int, rejects: int | None) -> list[Tensor]:
    """Return the values [..., K] among these; those without the class that rejects with it."""
    found = []
    for value in values:
        if rejects is not None and value.shape[-1] == classes - 1:
            none = value.new_full((*value.shape[:-1], 1), -torch.inf)
            value = torch.cat([value[..., :rejects], none, value[..., rejects:]], -1)
        found += [value] if value.shape[-1] == classes else []
    return found


def sources(values: Sequence[Tensor], decided: Tensor) -> tuple[int, ...]:
    """Return the positions of values that agree with decisions [B] and come from no others."""
    nodes = {}
    for position, value in enumerate(values):
        chosen = by_draw(value, len(decided)).detach().mean(0).argmax(1)
        least = AGREES_OF_TWO if value.shape[-1] == 2 else AGREES
        if float((chosen == decided).float().mean()) >= least:
            nodes[position] = value.grad_fn
    behind = {position: _ancestors(node) for position, node in nodes.items()}
    return tuple(place for place in nodes if behind[place].isdisjoint(nodes.values()))


def _ancestors(node: Any) -> set[Any]:
    """Return all nodes of the graph that a node's gradient goes to."""
    found, waiting = set(), [node]
    while waiting:
        for next_node, _ in waiting.pop().next_functions:
            if next_node is not None and next_node not in found:
                found.add(next_node)
                waiting.append(next_node)
    return found


def custom_nodes(logits: Tensor) -> list[Any]:
    """Return the nodes of the graph that are functions of the network's own."""
    start = logits.grad_fn
    nodes = () if start is None else chain([start], _ancestors(start))
    own = [node for node in nodes if isinstance(node, BackwardCFunction)]
    modules = [getattr(node, "_forward_cls").__module__ for node in own]  # noqa: B009
    return [n for n, m in zip(own, modules, strict=True) if not m.startswith("lightning_rob.")]


def _as_identity(node: Any) -> None:
    """Let a node pass on what it gets to inputs of the same shape."""

    def passed_on(inner: Sequence[Tensor | None], outer: Sequence[Tensor | None]) -> Any:
        (given,) = outer if len(outer) == 1 else (None,)
        if given is None or inner[0] is None or inner[0].shape != given.shape:
            return None
        return given, *inner[1:]

    node.register_hook(passed_on)


@contextmanager
def entering(
    defense: nn.Module, parts: tuple[str, ...], x: Tensor, stand_in: StandIn | None = None
) -> Iterator[None]:
    """Let what lies before parts of the defense be the identity, or a network, for gradients."""
    running = [True]

    def replace_input(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        z = inputs[0]
        if not (isinstance(z, Tensor) and x.requires_grad and torch.is_grad_enabled()):
            return None
        if stand_in is None:
            return (_Entering.apply(z, x, running), *inputs[1:]) if z.shape == x.shape else None
        other = stand_in(x.float()).to(z)  # its weights are single precision
        if z.shape != other.shape or (z.is_leaf and z.requires_grad):
            return None  # such a leaf is a purifier's, which asks for its gradient
        return ValueWithGradientOf.apply(z, other), *inputs[1:]

    with ExitStack() as hooks:
        for part in parts:
            module = defense.get_submodule(part)
            hooks.enter_context(module.register_forward_pre_hook(replace_input))
        hooks.callback(running.clear)
        yield


@dataclass(frozen=True)
class SurrogateGradient(AttackDecorator):
    """Attack by the gradient of a surrogate that is computed in the network's own forward pass.

    The defense's own logits, which stay the same bit by bit, decide what fools it. Works on
    operations of torch as Python calls them, not in TorchScript.

    Args:
        attack: a gradient attack on any objective, such as APGD.
        slopes: operations that get another slope. "rounding" (round, sign, argmax, comparisons,
            whole numbers) passes gradients straight through, and through what is looked up by
            places of the largest or smallest values. "detached" ignores detach, no_grad and ways
            through numpy, "saturating" passes them through clamp, sigmoid, tanh and a softmax that
            picks one value, "custom" through autograd functions and hooks of the network's own
            (BPDA, Athalye et al. 2018).
        stages: the objective's logits: places among the values [B, K] that the forward pass
            computes, as `Auto` finds them, such as those before a softmax. Empty: its output.
        enter: names of parts of the defense that take images; all before them is the identity.
        stand_in: passes of the defense from which a small network learns, for each batch, what
            lies before the part `enter`, and whose gradient is taken; 0 takes the identity's.
        held: decisions with one outcome an image, as of a detector or a router, in their order,
            those of a loop over the images last: 0 holds what the defense decides on the image
            itself, 1 the next likely outcome, -1 nothing. The attack climbs the margin as it is
            then, bounded by the lead of these outcomes.
        noise: standard deviation of noise on the image, in pixel units, over which gradients are
            averaged where they change from point to point.
        copies: noisy copies of the image; 0 takes the gradient at the image itself.
        pairs: pairs of opposite points around the image, `noise` away in each pixel, from whose
            predictions the gradient is estimated (NES, Ilyas et al. 2018); 0 asks the network's.
        draws_anew: whether the network draws noise of its own, so that no prediction is a proof.
        together: whether predictions depend on the batch, so that no image may leave it.
    """

    slopes: tuple[Slope, ...] = ()
    stages: tuple[int, ...] = ()
    enter: tuple[str, ...] = ()
    stand_in: int = 0
    held: tuple[int, ...] = ()
    noise: float = 0.0
    copies: int = 0
    pairs: int = 0
    draws_anew: bool = False
    together: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "slopes", tuple(self.slopes))
        object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "held", tuple(self.held))
        if not {*self.held} <= {-1, 0, 1}:
            raise ValueError(f"held is -1, 0 or 1 for each decision, got {self.held}")
        enter = (self.enter,) if isinstance(self.enter, str) else tuple(self.enter)
        object.__setattr__(self, "enter", enter)
        if self.stand_in and len(enter) != 1:
            raise ValueError(f"a stand-in takes the place before one part, got enter={list(enter)}")
        if unknown := set(self.slopes) - set(get_args(Slope)):
            raise ValueError(f"slopes must be of {get_args(Slope)}, got {sorted(unknown)}")
        at_least(0, copies=self.copies, pairs=self.pairs, stand_in=self.stand_in)
        if self.noise < 0 or (self.noise > 0) != (self.copies + self.pairs > 0):
            given = f"{self.noise:g}, {self.copies} and {self.pairs}"
            raise ValueError(f"give noise with copies or pairs, got {given}")
        if self.pairs and (self.copies or self.stages or self.slopes or enter):
            raise ValueError("pairs ask for no gradient: leave out slopes, stages, enter, copies")

    @property
    def batch_dependent(self) -> bool:  # type: ignore[override]
        return self.stand_in > 0 or bool(self.held)

    def cost(self, count: PassCount) -> int:
        if self.pairs:  # in place of a forward and a backward pass
            return self.attack.cost(count) * (2 * self.pairs + 1) // 2
        # Each forward pass is one of the defense itself and one of each noisy copy.
        before, passes = self.stand_in, self.attack.cost(count) * (self.copies + 1)
        if self.held:  # one without, too
            before, passes = before + 2, passes if self.copies else 3 * passes // 2
        return passes + before * count.networks

    def with_effort(self, effort: int) -> Self:
        return replace(self, attack=self.attack.with_effort(effort))

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        with own_sight(len(x), x.device, generator):  # its gradients are not the defense's
            net = None
            if self.stand_in:
                (part,) = self.enter
                net = train_stand_in(defense, part, x, self.threat, self.stand_in, generator)
            seen = SeenThrough(defense, self, net).holding(x, y, generator)
            return self.attack.perturb(seen, x, y, generator)


class SeenThrough(Defense):
    """A defense with the logits of a surrogate; its predictions are the defense's own.

    The first draw holds the defense's predictions [B, K] and has no weight in any objective; the
    others are the surrogate's logits. The rule predicts by the first draw alone.
    """

    def __init__(
        self, defense: Defense, view: SurrogateGradient, stand_in: StandIn | None = None
    ) -> None:
        super().__init__(torch.tensor([0.0, 1.0]), _decided)
        self.defense = defense
        self.view = view
        self.stand_in = stand_in
        # Attacks let no image leave a batch that such a layer looks at.
        self.batch = WholeBatch() if view.together else None
        self.outcomes: HeldOutcomes | None = None

    def decisions(self, x: Tensor, generator: Generator = None) -> Decisions:
        """Return the decisions on images x [B, …], with the scores of their outcomes."""
        found, x = Decisions(len(x)), x.detach().requires_grad_()
        self.observed(x, generator, decisions=found)
        found.keep_those_of_an_image(x)
        return found

    def holding(self, x: Tensor, y: Tensor, generator: Generator) -> Self:
        """Hold the outcomes of the view for images x [B, …] with labels [B], and return itself.

        A pass that makes fewer decisions, as where no image needs a second network, holds those.
        """
        if self.view.held:
            self.outcomes = HeldOutcomes(self.decisions(x, generator), self.view.held, y)
            self.observed(x.detach().requires_grad_(), generator)  # for the sizes
        return self

    @property
    def classifiers(self) -> list[nn.Module]:
        if self.view.draws_anew:
            raise TypeError("the network draws noise of its own")
        return self.defense.classifiers

    def forward(self, x: Tensor, generator: Generator = None) -> Tensor:
        found: Tensor = self.defense(x, generator)
        return found

    def given(self, x: Tensor, generator: Generator = None) -> Tensor:
        """Return what the first of the parts `enter` is given for images x [B, …]."""
        if not self.view.enter:
            raise ValueError("name a part of the network that is entered, got none")
        return inputs_of(self.defense, self.view.enter[0], x, generator)

    def sample_logits(
        self, x: Tensor, generator: Generator = None, draws: int | None = None
    ) -> tuple[Tensor, Tensor]:
        if draws and type(self.defense).sample_logits is not Defense.sample_logits:
            return self.logits(x, generator, draws), self.weights
        parts = [(self.logits(x, generator), self.weights) for _ in range(draws or 1)]
        decided = torch.stack([logits[0] for logits, _ in parts]).mean(0)[None]
        weights = torch.cat([weights[1:] / len(parts) for _, weights in parts])
        logits = torch.cat([decided, *(logits[1:] for logits, _ in parts)])
        return logits, torch.cat([weights.new_zeros(1), weights])

    def logits(self, x: Tensor, generator: Generator = None, draws: int | None = None) -> Tensor:
        """Compute predictions and the surrogate's logits [1 + n, B, K]; sets their `weights`."""
        wanted = x.requires_grad and torch.is_grad_enabled()
        view, (low, high) = self.view, self.view.threat.bounds
        if view.pairs:
            return self._estimated(x, generator, wanted)
        with torch.enable_grad():
            inside = x if wanted else x.detach().requires_grad_()
            if view.copies:
                with torch.no_grad():
                    parts = [self.defense(x, generator)[None]]
                for _ in range(view.copies):
                    noise = view.noise * normal(x, *x.shape[1:], generator=generator)
                    moved = pinned(inside + noise, low, high)
                    seen = self.observed(moved, generator)
                    parts.append(seen.logits)
            else:
                seen = self.observed(inside, generator, draws)
                decided = seen.decided
                if self.outcomes:
                    with torch.no_grad():
                        decided = self.defense(x, generator)
                parts = [decided[None].to(seen.logits), seen.logits]
        found = torch.cat(parts)
        # As many values as draws are theirs; of others nothing is known.
        of_each = seen.weights if len(seen.logits) == len(seen.weights) else torch.ones(1)
        shares = of_each.repeat((len(found) - 1) // len(of_each))
        self.weights = torch.cat([shares.new_zeros(1), shares / shares.sum()])
        return found if wanted else found.detach()

    def _estimated(self, x: Tensor, generator: Generator, wanted: bool) -> Tensor:
        """Return predictions and logits [2, B, K] with slopes from differences of logits."""
        view, at = self.view, x.detach()
        low, high = view.threat.bounds
        values, slopes = [], []

        def mean_logits(moved: Tensor) -> Tensor:
            logits, weights = unwrapped(self.defense).sample_logits(moved, generator)
            seen = as_seen(logits, weights, self.defense)
            return torch.einsum("s,sbk->bk", weights.to(seen), seen)

        with torch.no_grad():
            decided = self.defense(at, generator)
            for _ in range(view.pairs if wanted else 0):
                step = view.noise * normal(x, *x.shape[1:], generator=generator).sign()
                pair = [mean_logits((at + sign * step).clamp(low, high)) for sign in (1, -1)]
                values += pair
                slopes.append((pair[0] - pair[1], step / (2 * view.noise**2)))
            mean = torch.stack(values or [mean_logits(at)]).mean(0)
        for change, step in slopes:  # a slope, and no change of the value
            along = ((x - at) * step).flatten(1).sum(1)
            mean = mean + change * along[:, None] / view.pairs
        self.weights = mean.new_tensor([0.0, 1.0])
        return torch.stack([decided.to(mean), mean])

    def observed(
        self,
        x: Tensor,
        generator: Generator = None,
        draws: int | None = None,
        decisions: Decisions | None = None,
    ) -> "Observed":
        """Return what a forward pass of images x [B, …] that need a gradient shows."""
        view, held = self.view, self.outcomes
        decisions = Decisions(len(x), held.outcomes) if held else decisions
        mode = OtherSlopes(view.slopes, len(x), decisions)
        inner = unwrapped(self.defense)
        with all_at_once(), mode, entering(self.defense, view.enter, x, self.stand_in):
            output, weights = inner.sample_logits(x, generator, draws)
            logits = as_seen(output, weights, self.defense)
        own = custom_nodes(output)
        for node in own if "custom" in view.slopes else ():
            _as_identity(node)
        values = like_logits(mode.values, output.shape[-1], inner.rejects)
        decided = self.defense.rule(logits.detach(), weights)
        if view.stages:
            if max(view.stages) >= len(values):
                raise ValueError(f"stages {view.stages} of {len(values)} values: search again")
            logits = torch.cat([by_draw(values[place], len(x)) for place in view.stages])
            if inner.rejects is not None:
                equal = logits.new_full((len(logits),), 1 / len(logits))
                logits = as_seen(logits, equal, self.defense)
        if held and decisions:
            logits = held.bounded(logits, decisions.scores)
        mode.met |= {"custom"} if own else set()
        return Observed(decided, logits, weights, output, values, mode.met, mode.leads)


@dataclass(frozen=True)
class Observed:
    """Predictions of a forward pass, the logits to climb, and the values like logits."""

    decided: Tensor  # [B, K]
    logits: Tensor  # [n, B, K]
    weights: Tensor  # of the defense's draws
    output: Tensor  # [S, B, …] its logits, with those of a class that rejects
    values: list[Tensor]
    met: set[Slope]  # slopes that would change something
    leads: list[Tensor]  # of the largest score in each softmax, in the median


def _decided(logits: Tensor, weights: Tensor) -> Tensor:
    """Predict by the first draw, which holds the predictions."""
    return logits[0]
