"""The 33 transforms on 320 CIFAR-sized images (32, ten draws each), forward and backward.

    python benchmarks/transforms.py

All of a batch at once, image by image, and by kornia.augmentation where it has the transform. The
ways take turns; times are medians.
"""

import argparse
import platform
import statistics
import time
import warnings

import kornia
import kornia.augmentation as ka
import torch
from rich.console import Console
from rich.table import Table

from lightning_rob.transforms import catalogue

PEERS = {
    "GaussianNoise": lambda: ka.RandomGaussianNoise(std=0.3, p=1.0),
    "Salt": lambda: ka.RandomSaltAndPepperNoise((0.15, 0.15), (1.0, 1.0), p=1.0),
    "Pepper": lambda: ka.RandomSaltAndPepperNoise((0.15, 0.15), (0.0, 0.0), p=1.0),
    "Erase": lambda: ka.RandomErasing((0.02, 0.3), p=1.0),
    "BoxBlur": lambda: ka.RandomBoxBlur((3, 3), p=1.0),
    "GaussianBlur": lambda: ka.RandomGaussianBlur((3, 3), (2.5, 2.5), p=1.0),
    "MedianBlur": lambda: ka.RandomMedianBlur((3, 3), p=1.0),
    "MotionBlur": lambda: ka.RandomMotionBlur(3, 90.0, (-1.0, 1.0), p=1.0),
    "Gray": lambda: ka.RandomGrayscale(p=1.0),
    "JPEG": lambda: ka.RandomJPEG((5, 61), p=1.0),
    "ColorPrecision": lambda: ka.RandomPosterize((3, 4), p=1.0),
    "Affine": lambda: ka.RandomAffine(20.0, (0.3, 0.3), (0.7, 1.3), 20.0, p=1.0),
    "Crop": lambda: ka.RandomResizedCrop((32, 32), (0.7, 1.0), p=1.0),
    "HorizontalFlip": lambda: ka.RandomHorizontalFlip(p=1.0),
    "VerticalFlip": lambda: ka.RandomVerticalFlip(p=1.0),
    "ColorJitter": lambda: ka.ColorJiggle(0.3, 0.3, 0.3, 0.05, p=1.0),
    "Gamma": lambda: ka.RandomGamma((0.7, 1.3), p=1.0),
    "Sharpen": lambda: ka.RandomSharpness(3.0, p=1.0),
    "Solarize": lambda: ka.RandomSolarize(0.1, 0.1, p=1.0),
}


def batched(transform, generator):
    return lambda x: transform(x, *transform.sample(x, generator))


def one_by_one(transform, generator):
    whole = batched(transform, generator)
    return lambda x: torch.cat([whole(image) for image in x.split(1)])


def seconds(function, x):
    x = x.clone().requires_grad_()
    start = time.perf_counter()
    y = function(x)
    if y.requires_grad:
        torch.autograd.grad(y.sum(), x)
    return time.perf_counter() - start


def measure(kind, x, rounds):
    strength = {"alpha": 0.3} if hasattr(kind, "alpha") else {}
    transform, generator = kind(**strength), torch.Generator().manual_seed(0)
    ways = [batched(transform, generator), one_by_one(transform, generator)]
    ways += [PEERS[kind.__name__]()] if kind.__name__ in PEERS else []
    times = [[seconds(way, x) for way in ways] for _ in range(rounds + 1)][1:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=320)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    x = torch.rand(options.images, 3, 32, 32)
    title = (
        f"{options.images} images 3x32x32, sample, forward and backward, {torch.get_num_threads()} "
        f"threads, torch {torch.__version__}, kornia {kornia.__version__}, {platform.machine()}"
    )
    table = Table(title=title)
    for column in ("", "images / s", "ms", "one by one, ms", "kornia.augmentation, ms"):
        table.add_column(column, justify="right")
    for name, kind in catalogue().items():
        times = [1000 * second for second in measure(kind, x, options.rounds)]
        cells = [f"{t:.1f}" for t in times] + [""] * (3 - len(times))
        table.add_row(name, f"{options.images / times[0] * 1000:,.0f}", *cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
