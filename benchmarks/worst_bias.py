"""Bias of "worst" for nine attacks that do nothing against a random defense.

A linear classifier behind noise, an affine map and erased squares, on 300 embedded digits. Prints,
for 1 and 10 inferences, clean accuracy, each image's minimum over nine attacks of radius 1e-9 (how
`worst` was once defined) and `worst_case`. In the first rows every attack meets its own noise;
in the last ones all meet the same noise, as `RobustEval` has it. A minute on a CPU.
"""

import torch
from torch import nn

from lightning_rob import PGD, RandomTransforms, Threat
from lightning_rob.data import Digits5k
from lightning_rob.evaluation import worst_case
from lightning_rob.evaluation.protocol import AttackerDefenderSession
from lightning_rob.metrics import robust_accuracy, wilson
from lightning_rob.transforms import Affine, Erase, GaussianNoise

ATTACKS = 9


def images(part, count):
    rows = [part[i] for i in range(count)]
    return torch.stack([row[0] for row in rows]), torch.tensor([int(row[1]) for row in rows])


def ridge(data):
    """Fit a classifier in closed form to transformed copies of the training images."""
    x, y = images(data.parts["train"], 3000)
    noise = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 10))
    transforms = [GaussianNoise(0.4), Affine(0.25), Erase(0.3)]
    defense = RandomTransforms(net, transforms, 3, 20).eval()
    with torch.no_grad():
        seen = torch.cat([defense.transformed(x, noise, 1)[0].flatten(1) for _ in range(3)])
        seen = torch.cat([seen, torch.ones(len(seen), 1)], 1)
        wanted = nn.functional.one_hot(y.repeat(3), 10).float()
        weights = torch.linalg.solve(seen.T @ seen + 50 * torch.eye(seen.shape[1]), seen.T @ wanted)
        net[1].weight.copy_(10 * weights[:-1].T)
        net[1].bias.copy_(10 * weights[-1])
    return defense


def main():
    torch.set_num_threads(1)
    data = Digits5k(val_size=200, batch_size=128)
    data.setup("fit")
    data.setup("test")
    defense = ridge(data)
    x, y = images(data.parts["test"], 300)
    index = torch.arange(len(x))
    nothing = PGD(Threat("linf", 1e-9), 1, 1e-9, draws=2)
    print("| noise | inferences | clean | 95 % interval | minimum per image | `worst` |")
    print("|---|--:|--:|--:|--:|--:|")
    for shared in (False, True):
        for inferences in (1, 10):
            scores = []
            for name in range(1 + ATTACKS):
                luck = (0, 0) if shared else (0, name)
                match = AttackerDefenderSession(nothing, defense, 0, name, private=luck)
                answers = match.step(x, y, index, inferences)[1]
                scores.append(torch.stack([robust_accuracy(a, y) for a in answers], 1))
            table = torch.stack(scores, 1)
            clean = float(table[:, 0].mean())
            low, high = wilson(clean, len(x))
            least = float(table.mean(2).amin(1).mean())
            worst = float(worst_case([(index, table)], random=True).scores.mean())
            noise = "the same for all" if shared else "of each attack's own"
            span = f"{100 * low:.1f} … {100 * high:.1f}"
            shares = f"{100 * least:.1f} | {100 * worst:.1f}"
            print(f"| {noise} | {inferences} | {100 * clean:.1f} | {span} | {shares} |")


if __name__ == "__main__":
    main()
