"""G gradients of a batch, one after the other or in one vectorised call: the choice behind ARC.

    python benchmarks/gradients.py

ResNet-20 with BatchNorm folded, in turn, medians; the same gradients either way.
"""

import argparse

import timing
import torch

from lightning_rob.attacks.folding import folded
from lightning_rob.nets import ResNet20


def gaps(net, x, count):
    """Return the images and the logit differences [B, G] to differentiate."""
    z = x.clone().requires_grad_()
    top = net(z).topk(count + 1).values
    return z, top[:, :1] - top[:, 1:]


def loop(net, x, count):
    z, wanted = gaps(net, x, count)
    found = [torch.autograd.grad(w.sum(), z, retain_graph=True)[0] for w in wanted.unbind(1)]
    return torch.stack(found)


def vectorised(net, x, count):
    z, wanted = gaps(net, x, count)
    rows = torch.eye(count, device=x.device)[:, None].expand(-1, len(x), -1)
    return torch.autograd.grad(wanted, z, rows, is_grads_batched=True)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    net = ResNet20().to(timing.device()).eval().requires_grad_(False)
    rows = []
    with folded([net]):
        for count in (4, 9):
            for images in (1, 2, 4, 8, 32, 128):
                x = torch.rand(images, 3, 32, 32, device=timing.device())
                ways = {
                    "loop": lambda x=x, count=count: loop(net, x, count),
                    "vectorised": lambda x=x, count=count: vectorised(net, x, count),
                }
                found, times, _ = timing.in_turn(ways, rounds)
                torch.testing.assert_close(found["loop"], found["vectorised"])
                share = timing.ratio(times["vectorised"], times["loop"])
                rows.append((str(count), str(images), f"{share:.2f}"))
    timing.printed("vectorised / loop", ("G", "images", "time"), rows)


if __name__ == "__main__":
    main()
