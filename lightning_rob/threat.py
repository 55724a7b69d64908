"""The threat model: how far an adversary may change an image."""

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_rob.randomness import Generator, normal, uniform

Norm = str | float
if TYPE_CHECKING:
    Length = float
else:
    Length = float | str  # so that any LightningCLI takes "8/255"; `pixels` makes it a number
PROJECTED = (math.inf, 2, 1)  # orders of the balls into which `Threat.project` projects
TINY = 1e-30
SPARSITY = 0.01  # least share of the pixels that a step for l1 moves, as in foolbox, cleverhans


def pixels(value: float | str) -> float:
    """Return a length in pixel units, given as a number or a fraction such as "8/255"."""
    try:
        return float(Fraction(value)) if isinstance(value, str) else float(value)
    except (ValueError, ZeroDivisionError):
        raise ValueError(
            f"a length must be a number or a fraction such as 8/255, got {value!r}"
        ) from None


def norm_order(norm: Norm) -> float:
    """Return the p of a norm given by name ("linf", "l2") or number; ValueError for p < 1."""
    try:
        # "linf" becomes "inf", which is a number.
        p = float(str(norm).lower().removeprefix("l"))
    except ValueError:
        p = math.nan
    if not p >= 1:
        raise ValueError(f"norm must be 'linf', 'l2', 'l1' or a number >= 1, got {norm!r}")
    return p


def per_image(values: Tensor, x: Tensor) -> Tensor:
    """Return numbers [B] of images x [B, …] in the shape [B, 1, …] that broadcasts with them."""
    return values.reshape(-1, *[1] * (x.dim() - 1))


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply each image of a batch by its own number, cut to a finite one: [B, …] by [B]."""
    # float16 ends at 65,504: the distance over a zero gradient is infinite, and 0 times it NaN.
    return x * per_image(factor.clamp_max(torch.finfo(factor.dtype).max), x)


def guard(values: Tensor, least: float = TINY) -> float:
    """Return what keeps a divisor from 0: `least`, or the smallest number if that is 0 to them."""
    return max(least, torch.finfo(values.dtype).tiny)  # 1e-30 is 0 in float16


def divisor(size: Tensor, least: float = TINY) -> Tensor:
    """Return sizes raised to `guard`, to divide by."""
    return size.clamp_min(guard(size, least))


def choose(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return each image of a [B, …] where the condition [B] holds, else that of b [B, …]."""
    return torch.where(per_image(condition, a), a, b)


def _norms(batch: Tensor, order: float) -> Tensor:
    flat = batch.flatten(1)
    if order == math.inf:
        return flat.abs().amax(1)  # a tenth of the time of `vector_norm` on a CPU
    return torch.linalg.vector_norm(flat, order, dim=1)


def signs_of_largest(g: Tensor, share: Tensor | float) -> Tensor:
    """Return the signs of each image's largest entries, scaled to an l1 norm of 1; else 0.

    [B, …] and the share [B] of entries that are kept, at least one -> [B, …]. The step of sparse
    l1 descent (SLIDE, Tramèr and Boneh 2019) and of l1-APGD (Croce and Hein 2021).
    """
    flat = g.flatten(1).nan_to_num()
    n, share = flat.shape[1], torch.as_tensor(share, device=g.device).expand(len(g))
    rank = (n - 1 - ((1 - share) * n).long()).clamp(0, n - 1)  # rounded as the authors do
    least = flat.abs().sort(1, descending=True).values.gather(1, rank[:, None])
    signs = (flat.sign() * (flat.abs() >= least)).view_as(g)
    return scale(signs, 1 / divisor(_norms(signs, 1)))


def _onto_l1(delta: Tensor, room: Tensor, radius: Tensor) -> Tensor:
    """Return the nearest d with |d| <= room and an l1 norm of at most the radius; all [B, …]."""
    # d = sgn(delta) min(relu(|delta| - t), room). Its norm falls with t, linearly between the
    # points where a pixel leaves its bound or arrives at 0; a binary search finds the last of
    # these at which the norm is still too large.
    size, room, radius = delta.abs().flatten(1), room.flatten(1), radius[:, None]
    points = torch.cat([(size - room).clamp_min(0), size], 1).sort(1).values

    def shrunk(t: Tensor) -> Tensor:
        return torch.minimum((size - t).clamp_min(0), room)

    low = torch.zeros(len(size), 1, dtype=torch.long, device=size.device)
    high = low + points.shape[1] - 1
    for _ in range(points.shape[1].bit_length()):
        middle = (low + high) // 2
        above = shrunk(points.gather(1, middle)).sum(1, keepdim=True) > radius
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    t = points.gather(1, low)
    falling = ((size > t) & (size - room <= t)).sum(1, keepdim=True).clamp_min(1)
    t = t + (shrunk(t).sum(1, keepdim=True) - radius) / falling
    inside = torch.minimum(size, room).sum(1, keepdim=True) <= radius
    found = shrunk(torch.where(inside, 0.0, t)).view_as(delta) * delta.sign()
    return scale(found, (radius[:, 0] / divisor(_norms(found, 1))).clamp_max(1))  # rounding errors


@dataclass(frozen=True)
class Threat:
    """A ball of perturbations around an image, within the range of images.

    Args:
        norm: "linf", "l2", "l1" or the p >= 1 of any p-norm.
        eps: radius in pixel units, images span `bounds`; "8/255" is accepted.
        relative: all lengths, of steps too, are shares of the image's own norm. With l2 that is
            the normalised l2 dissimilarity of Liao et al. (2020), eq. 1.
    """

    norm: Norm = "linf"
    eps: Length = 8 / 255
    bounds: tuple[float, float] = (0.0, 1.0)
    relative: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", pixels(self.eps))
        object.__setattr__(self, "bounds", tuple(self.bounds))
        object.__setattr__(self, "norm", f"l{norm_order(self.norm):g}")  # one name for 2 and "l2"
        if not (0 <= self.eps < math.inf):
            raise ValueError(f"eps must be a finite radius >= 0, got {self.eps}")
        if not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds must be (low, high) with low < high, got {self.bounds}")

    def check_size(self, name: str, values: int) -> None:
        """Raise ValueError if the ball of an attack, by its name, holds every image of N values."""
        low, high = self.bounds
        if not self.relative and self.eps > (high - low) * values ** (1 / self.p):
            # The usual slip: 8 in place of 8/255.
            ball, eps = f"{self.norm} {self.eps:g}", f"{self.eps:g}/255"
            raise ValueError(
                f"the ball of {name!r}, {ball}, holds every image: did you mean {eps}?"
            )

    def __str__(self) -> str:
        """Return norm and radius, in 255ths if it is a multiple: "linf 8/255", "linf 0.2"."""
        of_255 = self.eps * 255
        if self.relative:
            return f"{self.norm} {100 * self.eps:.4g} % of the image"
        is_short = len(f"{self.eps:.6g}") < 5  # 0.2, not 51/255
        if 0 < of_255 < 255 and abs(of_255 - round(of_255)) < 1e-6 and not is_short:
            return f"{self.norm} {round(of_255)}/255"
        return f"{self.norm} {self.eps:.4g}"

    @property
    def p(self) -> float:
        """The order of the norm; infinity for linf."""
        return norm_order(self.norm)

    @property
    def q(self) -> float:
        """The order of the dual norm, 1/p + 1/q = 1."""
        if self.p == 1:
            return math.inf
        return 1.0 if self.p == math.inf else self.p / (self.p - 1)

    def of(self, rows: Tensor) -> "Threat":
        """Return the threat of some of the images, given as a mask [B] or as indices."""
        return self

    def size(self, delta: Tensor) -> Tensor:
        """Compute ||delta||_p of each image: [B, …] -> [B]."""
        return _norms(delta, self.p)

    def unit(self, x: Tensor) -> Tensor:
        """Return the unit of length at each image: 1, or if relative its norm; [B, …] -> [B]."""
        return self.size(x) if self.relative else x.new_ones(len(x))

    def radius(self, x: Tensor) -> Tensor:
        """Return the radius of the ball around each image, in pixel units: [B, …] -> [B]."""
        return self.eps * self.unit(x)

    def distance(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Compute the distance of images from x, in units of `eps`: [B, …], [B, …] -> [B].

        A relative distance from a black image is infinite.
        """
        size = self.size(x_adv - x)
        # No perturbation of a black image has the relative size 0 / 0: it counts as 0.
        return torch.where(size > 0, size / self.unit(x), 0.0)

    def dual(self, w: Tensor) -> Tensor:
        """Compute ||w||_q of each image, the largest change of w.x per length: [B, …] -> [B]."""
        return _norms(w, self.q)

    def steepest(self, g: Tensor) -> Tensor:
        """Compute the direction of unit p-norm with the largest inner product with g; 0 if g is 0.

        [B, …] -> [B, …]: sgn(g) |g|^(q-1) / ||g||_q^(q-1); for p = 1 all on the largest entry.
        """
        if self.p == math.inf:
            return g.sign()
        flat = g.flatten(1).nan_to_num()
        if self.p == 1:
            top = flat.abs().argmax(1, keepdim=True)
            return torch.zeros_like(flat).scatter(1, top, flat.gather(1, top).sign()).view_as(g)
        # Squares of a confident network's gradients would underflow: scale to a largest entry of 1.
        flat = flat / divisor(flat.abs().amax(1, keepdim=True))
        d = (flat.sign() * flat.abs() ** (self.q - 1)).view_as(g)
        return scale(d, 1 / divisor(self.size(d)))

    def direction(self, g: Tensor) -> Tensor:
        """Compute the direction of an ascent's steps: `steepest`, but sparse signs for l1.

        One pixel at a time, the steepest of l1, would need as many steps as it moves pixels.
        """
        if self.p != 1:
            return self.steepest(g)
        # On small images 1 % of the pixels cannot hold the radius: three for each that would go
        # from bound to bound.
        pixels_needed = 3 * self.eps / (self.bounds[1] - self.bounds[0])
        return signs_of_largest(g, max(SPARSITY, pixels_needed / g[0].numel()))

    def free(self, g: Tensor, x: Tensor) -> Tensor:
        """Return the gradient without entries that point out of the bounds at x; all [B, …]."""
        return g.masked_fill((g > 0) & (x >= self.bounds[1]) | (g < 0) & (x <= self.bounds[0]), 0)

    def clip(self, delta: Tensor, x: Tensor) -> Tensor:
        """Project the perturbation into the ball, then into the bounds around x; all [B, …].

        For l1 it is the projection onto the intersection of both (Croce and Hein 2021), which the
        projections in turn would miss by far; for linf both are the same.
        """
        radius = self.radius(x)
        if self.p == math.inf:
            reach = scale(torch.ones_like(delta), radius)
            delta = torch.maximum(torch.minimum(delta, reach), -reach)
        elif self.p == 2:
            # Perturbations inside the ball stay as they are.
            delta = scale(delta, (radius / divisor(self.size(delta))).clamp_max(1))
        elif self.p == 1:
            low, high = self.bounds
            room = torch.where(delta > 0, high - x, x - low).clamp_min(0)
            exact = torch.promote_types(delta.dtype, torch.float32)  # half precision loses in sums
            return _onto_l1(delta.to(exact), room.to(exact), radius.to(exact)).to(delta)
        else:
            raise ValueError(f"projection is for linf, l2 and l1, not for norm {self.norm}")
        return self.confine(delta, x)

    def confine(self, delta: Tensor, x: Tensor) -> Tensor:
        """Clip the perturbation so that x + delta stays within the bounds."""
        return torch.maximum(torch.minimum(delta, self.bounds[1] - x), self.bounds[0] - x)

    def apply(self, delta: Tensor, x: Tensor) -> Tensor:
        """Add the perturbation; clamp the rounding errors that leave the bounds."""
        return (x + delta).clamp(*self.bounds)

    def project(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Project images into the ball around x, then into the bounds; all [B, …]."""
        return self.apply(self.clip(x_adv - x, x), x)

    def start(self, x: Tensor, generator: Generator = None) -> Tensor:
        """Draw images [B, …] at random points of the ball around x [B, …], within the bounds."""
        radius = self.radius(x)
        if self.p == math.inf:
            u = uniform(x, *x.shape[1:], generator=generator)
            # Uniform in the cube; in other balls the direction and the radius are random.
            delta = scale(2 * u - 1, radius)
        else:
            d = normal(x, *x.shape[1:], generator=generator)
            radius = radius * uniform(x, generator=generator)
            delta = scale(d, radius / divisor(self.size(d)))
        return self.apply(self.confine(delta, x), x)

    def corner(self, x: Tensor, generator: Generator = None, share: float = 1.0) -> Tensor:
        """Draw images at random points of the surface of the ball, within the bounds.

        Under linf they are corners; else directions of random values in [-1/2, 1/2], under l1
        sparse ones.

        Args:
            x: [B, …] centres of the balls.
            share: radius of the ball, in units of `eps`.
        """
        corner = self.direction(uniform(x, *x.shape[1:], generator=generator) - 0.5)
        return self.project(x + scale(corner, share * self.eps * self.unit(x)), x)


@dataclass(frozen=True, eq=False)
class ThreatPerImage(Threat):
    """A ball of its own radius, eps * radii [B], around each image of one batch.

    PGD and APGD attack within such balls: they read every length in units of `unit`, and take the
    part `of` the images that they still work on.
    """

    radii: Tensor = field(kw_only=True)
    __eq__ = object.__eq__  # that of Threat would not see the radii
    __hash__ = object.__hash__

    def unit(self, x: Tensor) -> Tensor:
        """Return the unit of length at each image: its factor of eps; [B, …] -> [B]."""
        # Images that have left an attack must have taken their radii with them.
        if len(x) != len(self.radii):
            raise ValueError(f"{len(self.radii)} radii for {len(x)} images: take `of` these rows")
        return super().unit(x) * self.radii.to(x)

    def of(self, rows: Tensor) -> "ThreatPerImage":
        """Return the threat of some of the images, given as a mask [B] or as indices."""
        return replace(self, radii=self.radii[rows])
