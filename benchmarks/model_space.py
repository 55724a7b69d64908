"""Peak memory and time of GMSA by the number of models it attacks, against all models at once.

    python benchmarks/model_space.py

Each case is a process of its own: the attack of one round of GMSA-AVG or GMSA-MIN, three steps of
PGD on the given number of ResNet-20 and 128 images of 3x32x32. Memory is what the process grew by.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time

ROWS = [(name, count) for name in ("mean", "min", "mean, at once") for count in (2, 10)]


def grown() -> float:
    """Return the largest resident set so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def case(name: str, count: int) -> None:
    """Attack the models; print time and memory."""
    import torch

    from lightning_rob.attacks import PGD
    from lightning_rob.defenses import Ensemble, Mixture, Single
    from lightning_rob.nets import ResNet20
    from lightning_rob.objectives import expected_ce, worst_ce
    from lightning_rob.threat import Threat

    torch.manual_seed(0)
    torch.set_num_threads(1)
    nets = [ResNet20().eval() for _ in range(count)]
    at_once = "at once" in name
    space = Ensemble(nets) if at_once else Mixture([Single(net) for net in nets])
    objective = worst_ce if name == "min" else expected_ce
    x, y = torch.rand(128, 3, 32, 32), torch.randint(10, (128,))
    attack = PGD(Threat("linf", 8 / 255), 3, 2 / 255, objective, keep_best=True)
    before, began = grown(), time.perf_counter()
    attack(space, x, y, torch.Generator().manual_seed(0))
    print(json.dumps([grown() - before, time.perf_counter() - began]))


def main() -> None:
    """Run every case, print a table."""
    found = {}
    for name, count in ROWS:
        command = [sys.executable, __file__, "--case", name, "--models", str(count)]
        out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
        found[name, count] = json.loads(out.stdout)
        print(
            f"{name:15} {count:2} models: {found[name, count][0]:6.0f} MiB, "
            f"{found[name, count][1]:5.1f} s",
            flush=True,
        )
    for name in dict.fromkeys(name for name, _ in ROWS):
        print(f"{name:15} memory of 10 models over 2: {found[name, 10][0] / found[name, 2][0]:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--case")
    parser.add_argument("--models", type=int)
    options = parser.parse_args()
    case(options.case, options.models) if options.case else main()
