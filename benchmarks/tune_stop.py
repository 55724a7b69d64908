"""What stopping trials below the median costs and saves in `tune`, on simulated trainings.

    python benchmarks/tune_stop.py --seeds 20      # four minutes on a core

A trial has four variables in [0, 1]. Its objective after e of ten validations is
height (1 - exp(-e / tau)) plus noise of deviation 0.01; height is 0.6 minus the squared distance
from a random top. In "steady" trainings tau is 3 for all; in "crossing" ones it grows from 1 to 6
with the first variable, so that those that learn slowest may end highest. Both searches propose
from the same seed; prints validations trained and the height of the trial that was found best.
"""

import argparse
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import numpy as np

from lightning_rob.commands.tune.space import Budget, Space
from lightning_rob.commands.tune.study import Record, Search, Study, below_median
from lightning_rob.metrics import student

VALIDATIONS, NAMES = 10, "abcd"


def search(seed, crossing, stop_after, trials, folder):
    """Validations that were trained, and the true height of the best trial."""
    top = np.random.default_rng(seed).uniform(0.2, 0.8, len(NAMES))
    bounds = {name: [0, 1] for name in NAMES}
    space = Space.read({"variables": bounds, "objective": {"height": 1.0}})
    record, trained = Record(folder / f"{crossing}{stop_after}.jsonl", "key"), []

    def height(point):
        return 0.6 - float(((np.array([point[name] for name in NAMES]) - top) ** 2).sum())

    def evaluate(number, point):
        noise = np.random.default_rng((seed, number)).normal(0, 0.01, VALIDATIONS)
        tau = 1 + 5 * point["a"] if crossing else 3
        values = []
        for e in range(VALIDATIONS):
            values.append(height(point) * (1 - np.exp(-(e + 1) / tau)) + float(noise[e]))
            due = 0 < stop_after <= len(values) < VALIDATIONS
            if stopped := due and below_median(values, record.ended):
                break
        trained.append(len(values))
        found = {f"objective/{i}": value for i, value in enumerate(values, 1)}
        return found | {"height": values[-1]} | ({"stopped": 1.0} if stopped else {})

    budget = Budget(trials, min_trials=trials, random=10, stop_after=stop_after)
    Study(Search(space, dict.fromkeys(NAMES, 0.1), budget, seed), record, evaluate).run()
    return sum(trained), height(record.best.values)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, default=30)
    args = parser.parse_args()
    print("| trainings | stop_after | validations trained | best height | minus without stopping |")
    print("|---|--:|--:|--:|--:|")
    with TemporaryDirectory() as folder:
        for crossing in (False, True):
            whole = None
            for stop_after in (0, 2, 5):
                found = []
                for seed in range(args.seeds):
                    place = Path(folder) / str(seed)
                    place.mkdir(exist_ok=True)
                    found.append(search(seed, crossing, stop_after, args.trials, place))
                trained, best = zip(*found, strict=True)
                whole = whole or best
                low, high = student([b - w for b, w in zip(best, whole, strict=True)])
                change = fmean(best) - fmean(whole)
                row = [
                    "crossing" if crossing else "steady",
                    str(stop_after),
                    f"{fmean(trained):.0f}",
                ]
                row += [f"{fmean(best):.3f}", f"{change:+.3f} [{low:+.3f}, {high:+.3f}]"]
                print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
