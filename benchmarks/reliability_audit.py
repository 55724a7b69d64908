"""What the audit flags: twelve defenses broken on purpose, and five honest ones, on digits.

OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/reliability_audit.py
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from lightning_rob.audit.auditor import audit
from lightning_rob.data import Digits5k
from lightning_rob.nets import SmallCNN
from lightning_rob.threat import Threat
from tests.planted import PLANTED, honest, trained

THREAT = Threat("linf", 0.2)
IMAGES = 50


def digits():
    """Training images and labels, then so many test images of all classes."""
    parts = []
    for train, stride in ((True, 1), (False, 1)):
        pairs = Digits5k().source(train)
        chosen = range(0, len(pairs), stride) if train else range(IMAGES)
        parts.append(torch.stack([pairs[i][0] for i in chosen]))
        parts.append(torch.tensor([int(pairs[i][1]) for i in chosen]))
    return parts


def nets(x, y):
    """A standard net and two adversarially trained ones."""
    made = []
    for seed, threat in enumerate((None, THREAT, THREAT)):
        torch.manual_seed(seed)
        steps = 300 if threat else 150
        made.append(trained(SmallCNN(width=8), x, y, threat, steps, batch=128))
    return made


def judged():
    """Each defense's name, the check that has to find it (None for honest ones), the report."""
    x, y, x_test, y_test = digits()
    made = nets(x, y)
    cases = [(name, make(made[0]), check) for name, (make, check) in PLANTED.items()]
    cases += [(name, defense, None) for name, defense in honest(*made).items()]
    for name, defense, check in cases:
        began = time.process_time()
        report = audit(defense, x_test, y_test, THREAT)
        yield name, check, report, time.process_time() - began


def figures():
    """Rows for docs/reliability.md: what, the target, what was found."""
    right, false, broken, sound = 0, [], 0, 0
    for name, check, report, seconds in judged():
        flags = [finding.name for finding in report.flags]
        accuracy = {result.name: f"{result.accuracy:.0%}" for result in report.results}
        print(
            f"{name}: {', '.join(flags) or 'no flag'} · {accuracy} · {seconds:.0f} CPU s",
            flush=True,
        )
        if check:
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
