"""Certificates, measured: attacks that contradict them, draws saved, the gap between both.

    python benchmarks/certify.py --small 25            # 25 small networks x 400 images x 10 radii
    lightning-rob fit --config smoothing_digits
    python benchmarks/certify.py logs/version_0/checkpoints/last.ckpt --sigma 0.25

`--small` trains networks of one hidden layer on four blobs of 16 pixels, certifies each image by
1,000 draws at most, and attacks the vote by PGD within ten radii. A checkpoint is certified
by all draws as Cohen et al. (2019) do, and with early looks, and attacked on a grid of radii.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_rob import PGD, Smoothing, Threat, evaluate, load
from lightning_rob.certify import certify
from lightning_rob.data import Digits5k
from lightning_rob.metrics import wilson


def pgd(radii, steps, draws):
    options = {"draws": draws, "random_start": False}
    return {f"pgd_{r:g}": PGD(Threat("l2", r), steps, r / 3, **options) for r in radii}


def blobs(seed, count):
    generator = torch.Generator().manual_seed(seed)
    centres = 0.2 + 0.6 * torch.rand(4, 16, generator=torch.Generator().manual_seed(seed % 7))
    y = torch.randint(4, (count,), generator=generator)
    x = centres[y] + 0.15 * torch.randn(count, 16, generator=generator)
    return x.clamp(0, 1).view(-1, 1, 4, 4), y


def small_network(seed, sigma):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    x, y = blobs(seed + 7000, 1000)  # of the same centres
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x + sigma * torch.randn_like(x)), y).backward()
        optimizer.step()
    return net.eval()


def small(networks, images=400, sigma=0.25):
    radii = [0.05 * i for i in range(1, 11)]
    pairs = certified_pairs = broken_pairs = violations = 0
    for seed in range(networks):
        smoothed = Smoothing(small_network(seed, sigma), sigma, draws=51)
        batches = DataLoader(TensorDataset(*blobs(seed, images)), 128)
        options = {"seed": seed, "progress": False}
        found = certify(smoothed, batches, draws=1000, radii=[0.0, *radii], **options)
        attacks = pgd(radii, 8, 8)
        attacked = evaluate(smoothed, attacks, batches, inferences=10, checks=False, **options)
        held = torch.stack([found.per_image(r) for r in radii], 1) == 1
        broken = torch.stack([attacked.per_image(name) for name in attacks], 1) == 0
        pairs += held.numel()
        certified_pairs += int(held.sum())
        broken_pairs += int(broken.sum())
        violations += len(found.violations(attacked))
    print(f"{networks} networks, {pairs} pairs of image and radius: {certified_pairs} certified, ")
    print(f"{broken_pairs} attacked with success, {violations} both")


def measure(options):
    data = Digits5k(eval_batch_size=128)
    data.prepare_data()
    data.setup("test")
    model, sigma = load(options.checkpoint), options.sigma
    base = getattr(model, "base", model)
    test = data.test_dataloader().dataset
    batches = DataLoader(Subset(test, range(options.images)), 128)
    radii = [0.0, 0.5 * sigma, sigma, 1.5 * sigma, 2 * sigma]
    results = {}
    for name, draws, wanted in (
        ("all draws", options.draws, None),
        ("early looks", options.draws, radii),
        ("early looks, five times the draws", 5 * options.draws, radii),
        ("the same for one radius, sigma", 5 * options.draws, radii[2:3]),
    ):
        began = time.process_time()
        found = certify(base, batches, sigma=sigma, draws=draws, radii=wanted, progress=False)
        results[name] = found
        each = found.draws.double()
        fewer = ((draws + 100) / each).quantile(torch.tensor([0.25, 0.5, 0.75]).double())
        print(
            f"{name}: certified {[round(found.certified(r), 3) for r in radii]} at {radii}, draws: "
            f"of {draws + 100} mean {each.mean():.0f}, median {each.median():.0f}, times fewer by "
            f"image (quartiles) {fewer.round(decimals=1).tolist()}, "
            f"{time.process_time() - began:.0f} s"
        )
    both = [results[name] for name in ("all draws", "early looks")]
    grid = [round(sigma * i, 3) for i in range(1, 13)]
    smoothed, attacks = Smoothing(base, sigma, draws=51), pgd(grid, 8, 4)
    attacked = evaluate(smoothed, attacks, batches, inferences=5, checks=False, progress=False)
    broken = torch.stack([attacked.per_image(name) for name in attacks], 1) == 0
    reach = torch.tensor([*grid, torch.inf])
    first = reach[torch.where(broken.any(1), broken.double().argmax(1), len(grid))]
    right = both[0].per_image(0.0) == 1
    gap = (first - both[0].radius)[right]
    print(
        f"{int(right.sum())} images certified as right: median certified "
        f"{both[0].radius[right].median():.3f}, first broken {first[right].median():.2f}, gap "
        f"{gap.median():.3f}; {len(both[0].violations(attacked))} violations"
    )
    for name in attacks:
        row = attacked.measurement(name)
        low, high = wilson(row.accuracy, row.n)
        r = float(name.removeprefix("pgd_"))
        print(f"{r}: {both[0].certified(r):.3f} <= {row.accuracy:.3f} [{low:.3f}, {high:.3f}]")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--small", type=int, default=0, help="number of small networks")
    parser.add_argument("--sigma", type=float, default=0.25)
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--draws", type=int, default=2000)
    options = parser.parse_args()
    if options.small:
        small(options.small)
    if options.checkpoint:
        measure(options)


if __name__ == "__main__":
    main()
