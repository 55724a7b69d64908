"""Look at a defense by forward passes of a few images: what hides its gradients, and noise."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rob.attacks.active_set import positions
from lightning_rob.attacks.decisions import Key
from lightning_rob.attacks.folding import FoldingError
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.attacks.slopes import STEEP, Slope
from lightning_rob.attacks.surrogate import SeenThrough, SurrogateGradient, by_draw, sources
from lightning_rob.defenses import Defense
from lightning_rob.defenses.per_image import restricted_to
from lightning_rob.defenses.rejection import unwrapped
from lightning_rob.objectives import Objective, linear, spread
from lightning_rob.randomness import own_streams
from lightning_rob.runtime.errors import NoGradientError
from lightning_rob.threat import Threat

AGAIN = 3  # predictions that are compared with the first one, to find noise
MOVES, LENGTH = 8, 0.15  # to and fro, by which slopes are checked; their share of the radius
AGREEING = 0.5  # correlation of slopes and differences from which a slope is worth following
APART = 0.01  # of the lead of the largest logit, by which noise or another batch may change them
DECISIONS = 8  # with one outcome an image, more of which are not held
TURNED = 2  # of them that are tried with the next outcome alone
MOST_PARTS = 2  # of a network, before which a surrogate takes the place of what is there
SHRUNK = 0.3  # spread of the logits after a step, from which their scale hides where it leads


def lacks_gradient(error: RuntimeError) -> bool:
    """Return whether an attack failed for want of a gradient, or of an operation's derivative."""
    return isinstance(error, NoGradientError) or "derivative" in str(error)


class Inspection:
    """The findings of forward passes of a few images.

    Args:
        defense: the defense inside `attacking`.
        x: images [B, …], of which some are looked at.
        y: their labels [B].
        margin: of the rule of the defense.
        seed: seed of all noise.
    """

    def __init__(
        self, threat: Threat, defense: Defense, x: Tensor, y: Tensor, margin: Objective, seed: int
    ) -> None:
        self.threat, self.defense, self.x, self.y = threat, defense, x, y
        self.margin, self.seed = margin, seed
        self.networks = len(defense.weights)
        self.random = self.together = False  # whether it has noise, or depends on the batch
        self.blocked = self.cut = False  # whether something has no slope, or is cut off
        self.findings: list[str] = []
        self.entries: list[SurrogateGradient] = []  # with the identity before a part
        self.learners: list[SurrogateGradient] = []  # with a network in the place of a part
        self.ways: list[SurrogateGradient] = []  # with decisions held, at its own outcomes first
        self.spent = 0  # passes of an image

    @property
    def one_attack(self) -> bool:
        """Whether one attack has to do: a prediction is no proof, or images belong together."""
        return self.random or self.together

    def views_through(self, base: SurrogateGradient, x: Tensor) -> list[SurrogateGradient]:
        """Return the surrogates that a forward pass of images x calls for, with `base` first."""
        hard: tuple[Slope, ...] = ()
        met, _ = self._observed(base, x)
        for _ in range(2):  # behind what is cut off there may be more
            hard = tuple(sorted(met - {"saturating"}))
            met |= self._observed(replace(base, slopes=hard), x)[0] if hard else set()
        self.findings += [f"{name} operations" for name in sorted(met)]
        sets: list[tuple[Slope, ...]] = [(), hard, (*hard, "saturating")]
        sets += [("rounding",)] if "rounding" in hard else []
        sets = [s for s in sets if "saturating" not in s or "saturating" in met]
        views = []
        for slopes in dict.fromkeys(sets):
            view = replace(base, slopes=slopes)
            _, stages = self._observed(view, x)
            views += [view, replace(view, stages=stages)] if stages else [view]
        if any(view.stages for view in views):
            self.findings.append("values before the output that stand for logits")
        if {"rounding", "detached"} & {*hard}:  # a number that left torch may be compared
            self.ways = self._hold(replace(base, slopes=hard), x, "saturating" in met)
        views += self.ways[:1]
        parts = self._parts(x)
        alike = [name for name, same in parts.items() if same]
        if self.networks == 1:  # before the last one lies all that may hide
            alike = list(dict.fromkeys([*alike[: MOST_PARTS - 1], *alike[-1:]]))
        groups = [tuple(alike)] if self.networks > 1 and alike else [(a,) for a in alike]
        self.entries = [replace(base, enter=names) for names in groups]
        # A stand-in takes the place of what is cut off.
        kept = replace(base, slopes=tuple(slope for slope in hard if slope != "detached"))
        self.learners = [replace(kept, enter=(name,)) for name in [*parts][:MOST_PARTS]]
        self.blocked, self.cut = bool(hard), "detached" in hard
        return views + (self.entries if hard else [])

    def noise(self) -> torch.Generator:
        """Return a new source of the same noise."""
        return torch.Generator(self.x.device).manual_seed(self.seed)

    @torch.no_grad()
    def _logits(self, x: Tensor) -> Tensor:
        self.spent += self.networks
        return self.defense.logits(x, self.noise()).nan_to_num()  # NaN equals nothing

    def varies(self, x: Tensor, rows: Tensor) -> bool:
        """Return whether a second prediction of images by some of their rows differs."""
        with restricted_to(self.defense, rows), own_streams(self.seed, x.device):
            logits, again = self._logits(x), self._logits(x)
        return float((again - logits).abs().max()) > APART * float(spread(logits).max())

    def find_noise(self, x: Tensor) -> None:
        """Find out whether equal noise gives equal logits, and whether another batch does."""
        logits, half = self._logits(x), positions(x)[: len(x) // 2]
        # Noise that hardly moves the logits would only keep a deterministic search away.
        # A network that draws one of two parts for a batch often draws the same again.
        change = max(float((self._logits(x) - logits).abs().max()) for _ in range(AGAIN))
        unsure = (x + x.roll(1, 0)) / 2  # where noise moves votes that are sure of the images
        change = max(change, float((self._logits(unsure) - self._logits(unsure)).abs().max()))
        # A shift of all logits decides nothing, and classes may be masked by -1e4.
        least = APART * float(spread(logits).max())
        self.random = change > least
        if self.random:
            self.findings.append("noise of its own")
        elif len(half):
            with restricted_to(self.defense, half):
                change = float((self._logits(x[half]) - logits[:, half]).abs().max())
            self.together = change > least
            self.findings += ["predictions that depend on the batch"] if self.together else []

    def _hold(
        self, view: SurrogateGradient, x: Tensor, saturating: bool
    ) -> list[SurrogateGradient]:
        """Return surrogates with the decisions of an image held, at its own outcomes first."""
        self.spent += self.networks
        try:
            seen = SeenThrough(self.defense, view).decisions(x, self.noise())
        except (torch.OutOfMemoryError, FoldingError):
            raise
        except Exception:  # as in `_observed`
            return []
        used: list[Key] = []
        of_operation = Counter(name for name, *_ in seen.used)
        for name, many in sorted(of_operation.items(), key=lambda one: one[1]):  # the few first
            if len(used) + many <= DECISIONS:
                used += [key for key in seen.used if key[0] == name]
        if not used:
            return []
        self.findings.append("decisions with one outcome an image")
        ways, used = [], [key for key in seen.scores if key in used]
        # All of them turned, as where a prediction has to agree with another one.
        for turned in ([], *([at] for at in used[:TURNED]), used):
            ranks = tuple(int(key in turned) if key in used else -1 for key in seen.scores)
            ways.append(replace(view, held=ranks))
        if saturating:  # what decides may be behind what saturates
            ways.append(replace(ways[0], slopes=(*view.slopes, "saturating")))
        return list(dict.fromkeys(ways))

    def _observed(self, view: SurrogateGradient, x: Tensor) -> tuple[set[Slope], tuple[int, ...]]:
        """Return the slopes met, and the places of the first values that stand for logits."""
        self.spent += self.networks
        try:
            seen = SeenThrough(self.defense, view).observed(x.requires_grad_(), self.noise())
        except (torch.OutOfMemoryError, FoldingError):
            raise
        except Exception:  # what does not run so will not as a candidate either, with its reason
            return set(view.slopes), ()
        finally:
            x.requires_grad_(False)
        # With the class that rejects, as the values have it.
        chosen = unwrapped(self.defense).rule(seen.output.detach(), seen.weights).argmax(1)
        places = sources(seen.values, chosen)
        values = [one for place in places for one in by_draw(seen.values[place], len(x))]
        of_output = all(any(torch.equal(v, one) for one in seen.output) for v in values)
        picks = any(float(lead) > STEEP for lead in seen.leads)
        return seen.met | ({"saturating"} if picks else set()), () if of_output else places

    def _parts(self, x: Tensor) -> dict[str, bool]:
        """Return the first outermost parts that take something else in the place of images x.

        Values say whether it has their shape. Another shape counts where no gradient leads back.
        """
        found: dict[str, bool] = {}
        names = {module: name for name, module in self.defense.named_modules()}

        def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            z, name = (inputs or (None,))[0], names[module]
            inner = any(f"{name}.".startswith(f"{outer}.") for outer in found)
            if inner or not isinstance(z, Tensor) or z.dim() != 4 or len(z) != len(x):
                return
            alike = z.shape == x.shape
            if not z.requires_grad or (alike and not torch.equal(z, x)):
                found[name] = alike

        self.spent += self.networks
        with ExitStack() as hooks, torch.enable_grad():
            for module in names:
                hooks.enter_context(module.register_forward_pre_hook(look))
            self.defense.logits(x.clone().requires_grad_(), self.noise())
        return found if self.networks == 1 else dict([*found.items()][: MOST_PARTS * self.networks])

    def is_shrinking(self, view: SurrogateGradient, rows: Tensor) -> bool:
        """Return whether a step along the margin shrinks the logits, and fools few images so.

        A margin whose scale falls away from the data leads there instead of across the boundary.
        Of any network the logits of the few images that such a step nearly fools are small.
        """
        x, y, seen = self.x[rows], self.y[rows], SeenThrough(self.defense, view)
        self.spent += 5 * self.networks  # a gradient is two, and three forward passes
        try:
            with restricted_to(self.defense, rows), own_streams(self.seed, x.device):
                gradient = ObjectiveGradient(self.margin)(seen, x, y, self.noise()).gradient
                step = self.threat.eps * self.threat.direction(gradient)
                moved = self.threat.project(x + step, x)
                with torch.no_grad():
                    sizes = [spread(seen.logits(z, self.noise())).mean(0) for z in (x, moved)]
                    right = self.defense(moved, self.noise()).gather(1, y[:, None]) > 0.5
        except RuntimeError as error:
            if not lacks_gradient(error):
                raise
            return False
        ratio = (sizes[1] / sizes[0])[right]
        most = len(ratio) > 1 and 2 * len(ratio) >= len(rows)
        shrinks = most and float(ratio.median()) < SHRUNK
        self.findings += ["logits that shrink where the margin grows"] if shrinks else []
        return shrinks

    def is_rugged(self, view: SurrogateGradient, rows: Tensor) -> bool:
        """Return whether slopes of the margin say little of its changes within the ball.

        Changes are those between opposite moves, in which curvature cancels: networks that were
        trained without attacks bend within a radius at which they still predict.
        """
        x, y, seen = self.x[rows], self.y[rows], SeenThrough(self.defense, view)
        low, high = self.threat.bounds
        self.spent += (3 + 2 * MOVES) * self.networks
        expected, real, noise = [], [], self.noise()
        with restricted_to(self.defense, rows):
            with own_streams(self.seed, x.device):
                seen = seen.holding(x, y, self.noise())
                with torch.no_grad():
                    scale = spread(seen.logits(x, self.noise()))
            # Not the margin of the rule, whose slopes leave out how the members' scales change.
            margin = ObjectiveGradient(lambda z, weights, y: linear(z / scale, weights, y))
            with own_streams(self.seed, x.device):
                at = margin(seen, x, y, self.noise())
            for _ in range(MOVES):
                step = LENGTH * (self.threat.start(x, noise) - x)
                ends = [(x + step).clamp(low, high), (x - step).clamp(low, high)]
                values = []
                for end in ends:
                    with own_streams(self.seed, x.device), torch.no_grad():
                        values.append(margin.value(seen, end, y, self.noise()))
                real.append(values[0] - values[1])
                expected.append((at.gradient * (ends[0] - ends[1])).flatten(1).sum(1))
        both = torch.stack([torch.stack(expected), torch.stack(real)], 2)
        both = both / both.abs().amax((0, 2), keepdim=True).clamp_min(1e-30)  # no image decides
        product, squares = (both[..., 0] * both[..., 1]).sum(), both.square().sum((0, 1))
        return float(product / squares.prod().sqrt().clamp_min(1e-30)) < AGREEING
