"""A plane through an image on which adaptive PGD fails: where are the members of an ensemble wrong?

    lightning-rob fit --config demo
    python benchmarks/ensemble_plane.py logs/version_0/checkpoints/last.ckpt --figure plane.png

Takes the test image of `Patches10` on which adaptive PGD overrates an ensemble of two most, beside
the climb, and draws the plane through the image and both attacks' ends: the regions in which each
member is wrong, the ball (linf 8/255), and where the attacks end. In the plane each region is as it
is for the networks; only within the ball may an attack go.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from lightning_rob import ARC, PGD, LatticeClimber, Threat, load
from lightning_rob.attacks.arc import expected_accuracy
from lightning_rob.data import Patches10
from lightning_rob.plots import blank, save

REGIONS = {"both right": "white", "member 1 wrong": "0.85", "member 2 wrong": "#bdd7ee"}
REGIONS["both wrong"] = "#f4b183"


@torch.no_grad()
def wrong(defense, x, y):
    """Which members [M, N] are wrong on images of one label."""
    parts = [torch.stack([net(part) for net in defense.members]) for part in x.split(500)]
    return torch.cat(parts, 1).argmax(-1) != y


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--figure", type=Path, default=Path("plane.png"))
    parser.add_argument("--images", type=int, default=200)
    options = parser.parse_args()
    threat, defense = Threat("linf", "8/255"), load(options.checkpoint)
    data = Patches10(test_size=400)
    data.prepare_data()
    data.setup("test")
    chosen = [data.parts["test"][i] for i in range(options.images)]
    x, y = torch.stack([one[0] for one in chosen]), torch.tensor([one[1] for one in chosen])
    attacks = {
        "adaptive PGD": PGD(threat, 20, threat.eps / 4, random_start=False),
        "ARC": ARC(threat, 20, threat.eps, 4, early_stop=True),
        "climb": LatticeClimber(threat),
    }
    ends = {name: attack(defense, x, y) for name, attack in attacks.items()}
    left = {n: expected_accuracy(defense.members, defense.weights, z, y) for n, z in ends.items()}
    found = (left["adaptive PGD"] - left["climb"]).argmax()
    image, label = x[found], y[found]
    print({name: round(float(of[found]), 2) for name, of in left.items()}, f"image {int(found)}")

    # Orthonormal directions of the plane, in the l2 norm; both attacks' ends lie in it.
    first = (ends["climb"][found] - image).flatten()
    second = (ends["adaptive PGD"][found] - image).flatten()
    u = first / first.norm()
    v = second - (second @ u) * u
    v = v / v.norm()
    reach = 1.4 * float(max(first.norm(), second.norm()))
    ticks = torch.linspace(-reach, reach, 161)
    b, a = torch.meshgrid(ticks, ticks, indexing="ij")
    shift = (a[..., None] * u + b[..., None] * v).flatten(0, 1)
    z = image + shift.view(-1, *image.shape)
    codes = wrong(defense, z.clamp(0, 1), label)[:2].float()
    inside = shift.abs().amax(1).view(b.shape) / threat.eps

    figure = blank(5.6, 4.4)
    axes = figure.add_subplot()
    extent = (-reach, reach, -reach, reach)
    regions = (codes[0] + 2 * codes[1]).view(b.shape)
    colors = ListedColormap(list(REGIONS.values()))
    axes.imshow(regions, origin="lower", extent=extent, cmap=colors, vmin=0, vmax=3)
    axes.contour(a, b, inside, levels=[1.0], colors="black", linewidths=1)
    axes.plot(0, 0, "k+", markersize=9)
    axes.annotate("image", (0, 0), xytext=(-12, -14), textcoords="offset points", fontsize=8)
    for name, of, away in (("climb", first, (-86, 6)), ("adaptive PGD", second, (-60, 8))):
        place = float(of @ u), float(of @ v)
        axes.plot(*place, "ko", markersize=4)
        text = f"{name}: {100 * float(left[name][found]):.0f} % left"
        axes.annotate(text, place, xytext=away, textcoords="offset points", fontsize=8)
    axes.set_xlabel("towards the climb's image (l2)")
    axes.set_ylabel("towards adaptive PGD's image")
    patches = [Patch(facecolor=c, edgecolor="0.5", label=n) for n, c in REGIONS.items()]
    axes.legend(handles=patches, fontsize=7, loc="lower left")
    save(figure, options.figure, dpi=110)


if __name__ == "__main__":
    main()
