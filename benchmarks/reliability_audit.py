"""Findings of the audit on nineteen deliberately broken defenses and honest ones of six kinds.

OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/reliability_audit.py
"""

import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import avg_pool2d

sys.path.insert(0, str(Path(__file__).parent.parent))

from lightning_rob.audit.auditor import audit
from lightning_rob.data import Digits5k
from lightning_rob.nets import SmallCNN
from lightning_rob.threat import Threat
from tests.audit.planted import PLANTED, honest, trained

THREAT = Threat("linf", 0.15)
IMAGES = 50
SEEDS = (0, 1, 2, 3)  # of the honest ones; the broken ones have the first


def digits():
    """Return training images and labels, then `count` test images: 14x14, to be quick."""
    parts = []
    for train, count in ((True, 4000), (False, IMAGES * len(SEEDS))):
        pairs = Digits5k().source(train)
        x, y = zip(*(pairs[i] for i in range(count)), strict=True)
        parts += [avg_pool2d(torch.stack(x), 2), torch.tensor([int(label) for label in y])]
    return parts


def nets(x, y, seed):
    """Train a standard network and two adversarial ones."""
    made = []
    for number, threat in enumerate((None, THREAT, THREAT)):
        torch.manual_seed(3 * seed + number)
        steps = 400 if threat else 200
        made.append(trained(SmallCNN(width=8), x, y, threat, steps, batch=64))
    return made


def cases():
    """Yield name, defense, the check that must flag it (None for honest ones), images, labels.

    Each seed has its own networks and test images.
    """
    x, y, x_test, y_test = digits()
    for seed in SEEDS:
        part = slice(seed * IMAGES, (seed + 1) * IMAGES)
        images = x_test[part], y_test[part]
        made = nets(x, y, seed)
        if seed == SEEDS[0]:
            for name, (make, check) in PLANTED.items():
                yield name, make(made[0]), check, *images
        for name, defense in honest(*made).items():
            yield f"{name}, seed {seed}", defense, None, *images


def judged():
    """Yield each defense's name, the check that must flag it, the report and CPU seconds."""
    for name, defense, check, x, y in cases():
        began = time.process_time()
        report = audit(defense, x, y, THREAT)
        yield name, check, report, time.process_time() - began


def figures():
    """Return rows for docs/running.md: promise, target, result."""
    right, false, broken, sound = 0, [], 0, 0
    for name, check, report, seconds in judged():
        flags = [finding.name for finding in report.flags]
        accuracy = {result.name: f"{result.accuracy:.0%}" for result in report.results}
        print(
            f"{name}: {', '.join(flags) or 'no flag'} · {accuracy} · {seconds:.0f} CPU s",
            flush=True,
        )
        if check:
            print(*(f"  {found.text}" for found in report.findings if found.name == check))
            broken, right = broken + 1, right + (check in flags)
        else:
            sound, false = sound + 1, false + ([name] if flags else [])
    return [
        ("broken defenses flagged by the right check", f"{broken}/{broken}", f"{right}/{broken}"),
        ("honest defenses flagged", f"0/{sound}", f"{len(false)}/{sound}"),
    ]


if __name__ == "__main__":
    for row in figures():
        print(*row, sep=" | ")
