"""Does BPDA break BaRT? The study of Table 1 of Sitawarin et al. (ICML 2022) on small images.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/bpda_study.py --out bpda_study.md
    OMP_WAIT_POLICY=PASSIVE python benchmarks/bpda_study.py --whole --size 10 --resolution 32

A small CNN is trained behind random transforms of BaRT (Raff et al. 2019), once with and once
without those that have no gradient, on Patches10, at half its resolution unless --resolution is
32. PGD with EoT (10 draws, 40 steps of 4/255, within linf 16/255) then takes the transforms'
gradient exactly, from BPDA networks, as the identity, or exactly where there is one and else from
the networks (combo) or as the identity (straight_through). The accuracies are of ten independent
evaluations with 20 draws each; so are their 95 % t intervals, which say nothing about other images.
Networks and defenses are kept in --folder.

The second command has the paper's list (appendix A.3) of 25 transforms, 21 with a gradient, and its
ranges; the first, eight and six others with ranges of their own. The radius of Swirl is scaled
down from 224 pixels, windows to 3 or 5. --largest_error leaves out transforms whose network has a
larger mean squared error on held-out images, or one above the identity's.
"""

import argparse
import time
from pathlib import Path

import torch
from torch.nn.functional import avg_pool2d, cross_entropy
from tqdm import tqdm

from lightning_rob.attacks import PGD
from lightning_rob.cli.main import tune_process
from lightning_rob.data import Patches10
from lightning_rob.defenses import RandomTransforms
from lightning_rob.metrics import robust_accuracy
from lightning_rob.metrics.intervals import student
from lightning_rob.nets import SmallCNN
from lightning_rob.plots import blank, save
from lightning_rob.randomness import derive_seed
from lightning_rob.threat import Threat
from lightning_rob.transforms import named
from lightning_rob.transforms.bpda import (
    load_approximation,
    place_of,
    save_approximation,
    train_bpda,
)

DIFFERENTIABLE = {
    "Crop": {"alpha": 0.5},
    "FFT": {"alpha": 0.95},
    "GaussianBlur": {"sizes": (5,), "std": (0.1, 3.0)},
    "GaussianNoise": {"alpha": 0.05},
    "GrayMix": {"alpha": 1.0},
    "HSV": {"alpha": 0.25},
    "JPEG": {"alpha": 0.0},
    "Swirl": {"alpha": 0.45},
}
OTHERS = {
    "AdaptiveHistogram": {"regions": 2},
    "Bilateral": {"size": 5},
    "ChambolleDenoise": {},
    "ContrastStretch": {},
    "EqualizeHistogram": {},
    "HardPrecision": {},
}
WHOLE_DIFFERENTIABLE = {
    "Bilateral": {"size": (3, 5)},
    "BoxBlur": {},
    "ColorPrecision": {"steps": (8, 200)},
    "Crop": {"sides": (0.6964, 1.0)},
    "FFT": {"alpha": 0.95},
    "GaussianBlur": {"sizes": (5,), "std": (0.1, 3.0)},
    "GaussianNoise": {"alpha": 0.05},
    "Gray": {},
    "GrayMix": {"alpha": 1.0},
    "GrayOneChannel": {},
    "GrayTwoChannels": {},
    "HSV": {"alpha": 0.25},
    "JPEG": {"quality": (55, 95)},
    "LAB": {"alpha": 0.05},
    "MedianBlur": {"size": (3, 5)},
    "Pepper": {"alpha": 0.01},
    "PoissonNoise": {"alpha": 0.01},
    "Salt": {"alpha": 0.01},
    "XYZ": {"alpha": 0.25},
    "YUV": {"alpha": 0.05},
}
WHOLE_OTHERS = {
    "AdaptiveHistogram": {"regions": 2},
    "ChambolleDenoise": {},
    "ContrastStretch": {},
    "EqualizeHistogram": {},
}
STUDIES = {
    "all": ("bpda", "identity", "combo", "straight_through"),
    "differentiable": ("exact", "bpda", "identity"),
}
PAPER = {
    "all": {"clean": 88.10, "bpda": 52.32, "identity": 36.49, "combo": 25.24},
    "differentiable": {"clean": 87.43, "exact": 26.06, "bpda": 65.28, "identity": 41.25},
}
COLUMNS = ("clean", "exact", "bpda", "identity", "combo", "straight_through")
THREAT, STEPS, STEP, DRAWS = Threat("linf", 16 / 255), 40, 4 / 255, 10
EVALUATIONS, DRAWS_OF_AN_ANSWER = 10, 20


def chance(*keys):
    return torch.Generator().manual_seed(derive_seed(*keys))


def samples(part, count, resolution):
    """Return images [N, 3, resolution, resolution] and their labels."""
    picked = [part[i] for i in range(min(count, len(part)))]
    images = torch.stack([x for x, *_ in picked])
    return avg_pool2d(images, 32 // resolution), torch.tensor([y for _, y, _ in picked])


def approximation(transform, images, options):
    """Return a transform's network, from the folder or newly trained, and its measured errors."""
    shape = images.shape[1:]
    path = place_of(options.folder, transform, shape)
    if not path.exists():
        began = time.process_time()
        trained = train_bpda(transform, images, options.epochs, generator=chance(1))
        about = {"error": trained.error, "identity": trained.identity}
        about["seconds"] = time.process_time() - began
        save_approximation(options.folder, transform, shape, trained.net, **about)
    return load_approximation(path)


def train(defense, x, y, epochs, name):
    """Train by the cross-entropy of one draw per image: Adam, one-cycle learning rate."""
    noise = chance(2)
    optimizer = torch.optim.Adam(defense.net.parameters(), 0.01)
    steps = epochs * -(-len(x) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, steps)
    defense.train()
    for _ in tqdm(range(epochs), name, leave=False):
        for chosen in torch.randperm(len(x), generator=noise).split(64):
            logits, _ = defense.sample_logits(x[chosen], noise, 1)
            optimizer.zero_grad()
            cross_entropy(logits[0], y[chosen]).backward()
            optimizer.step()
            schedule.step()
    return defense.eval()


@torch.no_grad()
def measured(defense, x, y):
    """Return the accuracies, in percent, of independent evaluations."""
    scores = [robust_accuracy(defense(x, chance(3, i)), y) for i in range(EVALUATIONS)]
    return [100 * float(score.mean()) for score in scores]


def cell(accuracies):
    low, high = student(accuracies)
    return f"{sum(accuracies) / len(accuracies):.1f} ± {(high - low) / 2:.1f}"


def study(name, transforms, nets, data, options):
    """Return one row of the table: the cells by column."""
    train_x, train_y, x, y = data
    torch.manual_seed(options.seed)
    net = SmallCNN(10, 3, options.width, Patches10.mean, Patches10.std)
    defense = RandomTransforms(
        net, transforms, options.size, DRAWS_OF_AN_ANSWER, approximations=nets
    )
    asked = options.size, options.resolution, options.train, options.training_epochs, options.width
    asked += (len(transforms),) if options.seed == 0 else (len(transforms), f"seed{options.seed}")
    saved = options.folder / f"{name}_{'_'.join(map(str, asked))}.pt"
    if not saved.exists():
        torch.save(
            train(defense, train_x, train_y, options.training_epochs, name).state_dict(), saved
        )
    defense.load_state_dict(torch.load(saved, weights_only=True))
    defense.eval()
    cells = {"clean": cell(measured(defense, x, y))}
    attack = PGD(THREAT, options.steps, STEP, draws=DRAWS)
    for mode in STUDIES[name]:
        began = time.process_time()
        defense.gradients = mode
        batches = zip(x.split(options.batch), y.split(options.batch), strict=True)
        bar = tqdm(batches, f"{name}, {mode}", -(-len(x) // options.batch), leave=False)
        x_adv = torch.cat([attack(defense, a, b, chance(4, i)) for i, (a, b) in enumerate(bar)])
        cells[mode] = cell(measured(defense, x_adv, y))
        print(f"{name}, {mode}: {cells[mode]} in {time.process_time() - began:.0f} s", flush=True)
    return cells


@torch.no_grad()
def picture(known, nets, image, path):
    """Draw a photograph, its transforms and what their networks make of it (Figs. 2 and 7)."""
    figure = blank(1.0 * len(nets) + 0.9, 3.3)
    axes = figure.subplots(3, len(nets))
    for column, (name, net) in zip(axes.T, nets.items(), strict=True):
        parameters = known[name].sample(image[None], chance(5))
        shown = image[None], known[name](image[None], *parameters), net(image[None], *parameters)
        for axis, pixels in zip(column, shown, strict=True):
            axis.imshow(pixels[0].permute(1, 2, 0).clamp(0, 1).numpy())
            axis.set(xticks=[], yticks=[])
        column[0].set_title(name, fontsize=8)
    for axis, title in zip(axes[:, 0], ("photograph", "transform", "network"), strict=True):
        axis.set_ylabel(title, fontsize=8)
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("logs/bpda_study"))
    parser.add_argument("--out", type=Path, default=Path("bpda_study.md"))
    parser.add_argument("--whole", action="store_true", help="the paper's 25 transforms")
    parser.add_argument("--only", choices=STUDIES, help="one of the two defenses")
    parser.add_argument("--size", type=int, default=3, help="transforms of a copy; the paper's 10")
    parser.add_argument("--resolution", type=int, default=16, choices=(16, 32), help="of images")
    parser.add_argument("--images", type=int, default=40, help="test images")
    parser.add_argument("--train", type=int, default=1500, help="training images")
    parser.add_argument("--epochs", type=int, default=5, help="of the BPDA networks; paper 10")
    parser.add_argument("--largest_error", type=float, help="of a network; leave others out")
    parser.add_argument("--training_epochs", type=int, default=20, help="of the defenses")
    parser.add_argument("--seed", type=int, default=0, help="of the defense's first weights")
    parser.add_argument("--width", type=int, default=16, help="of the CNN")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the attack")
    parser.add_argument("--batch", type=int, default=40, help="images attacked at a time")
    parser.add_argument("--picture", type=Path, help="PNG of transforms and their networks")
    parser.add_argument("--quick", action="store_true", help="does it run at all? in a minute")
    options = parser.parse_args()
    if options.quick:
        options.images, options.train, options.steps = 10, 200, 3
        options.epochs = options.training_epochs = 1
        options.folder = options.folder / "quick"
    tune_process()
    options.folder.mkdir(parents=True, exist_ok=True)
    data = Patches10(train_size=options.train, test_size=options.images)
    data.setup()
    everything = [
        tensor
        for part in ("train", "test")
        for tensor in samples(data.parts[part], 10**9, options.resolution)
    ]
    differentiable = WHOLE_DIFFERENTIABLE if options.whole else DIFFERENTIABLE
    if options.whole:
        radius = tuple(options.resolution / 224 * pixels for pixels in (10, 200))
        differentiable = differentiable | {"Swirl": {"radius": radius, "strength": (0.01, 2.0)}}
    others = WHOLE_OTHERS if options.whole else OTHERS
    kinds = {"all": differentiable | others, "differentiable": dict(differentiable)}
    kinds = {name: kind for name, kind in kinds.items() if options.only in (name, None)}
    nets, learnt = {}, []
    known = named(next(iter(kinds.values())))
    for name, transform in tqdm(known.items(), "BPDA networks", leave=False):
        nets[name], about = approximation(transform, everything[0], options)
        learnt.append(f"| {name} | {about['error']:.5f} | {about['identity']:.5f} |")
        if options.largest_error and about["error"] > min(options.largest_error, about["identity"]):
            for kind in kinds.values():
                kind.pop(name, None)
            del nets[name]
    if options.picture:
        picture(known, nets, everything[2][0], options.picture)
    lines = [f"| transforms | {' | '.join(COLUMNS)} |", "|---|" + len(COLUMNS) * "---|"]
    for name, transforms in kinds.items():
        cells = study(name, transforms, nets, everything, options)
        rows = {name: cells, f"{name}, paper": PAPER[name]}
        for title, row in rows.items():
            lines.append(f"| {title} | {' | '.join(str(row.get(c, '')) for c in COLUMNS)} |")
    lines += ["", "| transform | MSE of its network | of the identity |", "|---|---|---|", *learnt]
    minutes = time.process_time() / 60
    asked = ", ".join(
        f"{k} {v}" for k, v in vars(options).items() if k not in ("folder", "out", "picture")
    )
    text = "\n".join([*lines, "", f"{minutes:.1f} minutes of processor time; {asked}."])
    options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
