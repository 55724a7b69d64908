"""Random transforms of a defense: S = 14 of 33, n = 10 draws of 32 images of 3x32x32, one core.

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/random_transforms.py

In batch with an order for each copy and with one for each image, the same operations copy by copy,
and kornia.augmentation with 14 of the 19 it has, one subset and order for the whole batch. Forward
and backward to the images, in turn, medians; "floor" is ResNet-20, forward and backward, on the
same 320 images. Ratios are of CPU time to the floor of the same round.
"""

import argparse
import statistics
import warnings
from functools import partial

import kornia
import timing
import torch
from kornia.augmentation import ImageSequential
from transforms import PEERS

from lightning_rob.defenses import RandomTransforms
from lightning_rob.nets import ResNet20
from lightning_rob.randomness import Streams
from lightning_rob.transforms import catalogue

IMAGES, DRAWS, SIZE = 32, 10, 14


class OneByOne(RandomTransforms):
    """Apply the same operations to one copy at a time."""

    def transformed(self, x, generator=None, draws=1):
        streams = generator.split(draws)
        copies = x.repeat(draws, 1, 1, 1)
        order = self._orders(copies, len(x), streams)
        done = []
        for i, kinds in enumerate(order.tolist()):
            image, own = copies[i : i + 1], streams[torch.tensor([i])]
            for kind in kinds:
                image = self._apply_one(kind, image, own.fold_in(1 + kind)) if kind >= 0 else image
            done.append(image)
        return torch.cat(done).view(draws, *x.shape)


def contestants(net):
    kinds = [kind() for kind in catalogue().values()]
    peer = ImageSequential(*(make() for make in PEERS.values()), random_apply=SIZE)
    noise = iter(range(10**9))

    def ours(defense):
        return lambda x: defense.transformed(
            x, Streams.from_index(torch.arange(IMAGES, device=x.device), next(noise)), DRAWS
        )

    batch = RandomTransforms(net, kinds, SIZE, DRAWS)
    batch.shared_order = "batch"  # as SurrogateTransforms(shared_order="batch") does for an attack
    return {
        "floor": lambda x: net(x.repeat(DRAWS, 1, 1, 1)),
        "order per copy": ours(RandomTransforms(net, kinds, SIZE, DRAWS)),
        "order per batch": ours(batch),
        "order per image": ours(RandomTransforms(net, kinds, SIZE, DRAWS, shared_order=True)),
        "copy by copy": ours(OneByOne(net, kinds, SIZE, DRAWS)),
        "kornia, 14 of 19": lambda x: peer(x.repeat(DRAWS, 1, 1, 1)),
    }


def gradient(run, x):
    z = x.clone().requires_grad_()
    return torch.autograd.grad(run(z).sum(), z)[0]


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=5)
    rounds = options.parse_args().rounds
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    net = ResNet20().to(timing.device()).eval().requires_grad_(False)
    x = torch.rand(IMAGES, 3, 32, 32, device=timing.device())
    runs = {name: partial(gradient, run, x) for name, run in contestants(net).items()}
    _, times, _ = timing.in_turn(runs, rounds)
    rows = []
    for name, seconds in times.items():
        middle, share = statistics.median(seconds), timing.ratio(seconds, times["floor"])
        rate = f"{IMAGES * DRAWS / middle:.0f}"
        rows.append((name, f"{1e3 * middle:.0f}", f"{share:.2f}", rate))
    title = f"S = {SIZE}, n = {DRAWS}, {IMAGES} images, medians of {rounds}"
    timing.printed(title, ("", "ms", "/ floor", "images/s"), rows)
    print(f"kornia {kornia.__version__}")


if __name__ == "__main__":
    main()
