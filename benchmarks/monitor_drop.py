"""False and true alarms of `monitor --drop significant` over the lifetime of a monitor.

Simulated streams of checkpoints, all compared on the same images, of which 60 % are robust. Each
checkpoint redraws 5 % of the images. In the healthy streams that is all that happens; in the
others each robust image of the 50th checkpoint is lost with probability 5 / 60 and stays lost,
so accuracy falls by 5 points. `drops` of the package judges every checkpoint, beside two rules
that are simpler: each checkpoint against the one before at 5 %, and against the first at
0.05 / (t (t + 1)), both by McNemar's one-sided test.

Prints two tables: streams that ring though nothing happens, and the place of the first alarm where
accuracy falls. Half an hour on a CPU; `--quick` takes a tenth of the streams and
checkpoints.
"""

import argparse
from functools import partial

import numpy as np
import torch
from scipy.stats import binom

from lightning_rob.commands.monitor.comparison import CheckpointResults, drops
from lightning_rob.metrics import clopper_pearson

IMAGES, ROBUST, REDRAWN, FALL, PLACE, LEVEL = 1000, 0.6, 0.05, 0.05, 50, 0.05
INFERENCES = 10  # of the random defense


def redrawn_once(chance, draw, fallen):
    """Yield checkpoints that each redraw 5 % of the images of the same training."""
    fixed = draw()
    while True:
        fixed = fallen(fixed)
        yield np.where(chance.random(IMAGES) < REDRAWN, fallen(draw()), fixed)


def redrawn_on(chance, draw, fallen):
    """Yield checkpoints that each redraw 5 % of the images of the one before."""
    state = draw()
    while True:
        state = fallen(state)
        yield state
        state = np.where(chance.random(IMAGES) < REDRAWN, draw(), state)


def stream(kind, random, chance, falls_at=None):
    """Yield the scores [N] of one checkpoint after another."""
    lost = chance.random(IMAGES) < FALL / ROBUST
    count = 0

    def draw():
        if random:  # the probability that one inference is right
            return chance.beta(0.6, 0.4, IMAGES)
        return (chance.random(IMAGES) < ROBUST).astype(float)

    def fallen(scores):
        return np.where(lost, 0.0, scores) if falls_at and count >= falls_at - 1 else scores

    for scores in kind(chance, draw, fallen):
        yield chance.binomial(INFERENCES, scores) / INFERENCES if random else scores
        count += 1


def results(place, scores):
    index, found = torch.arange(IMAGES), torch.tensor(scores)
    return CheckpointResults(str(place), place, {"worst": float(found.mean())}, (index, found))


def package(earlier, now):
    found = drops(now[0], [each for each, _ in earlier])
    return any(drop.significant(LEVEL) for drop in found)


def mcnemar(before, after):
    lost, won = int((after < before).sum()), int((after > before).sum())
    return binom.sf(lost - 1, lost + won, 0.5)


def each_time(earlier, now):
    return mcnemar(earlier[-1][1], now[1]) < LEVEL


def against_the_first(earlier, now):
    t = len(earlier)
    return mcnemar(earlier[0][1], now[1]) < LEVEL / (t * (t + 1))


RULES = {
    "`--drop significant`": package,
    "5 % each time, against the one before": each_time,
    "0.05 / (t (t + 1)), against the first": against_the_first,
}
STREAMS = {
    "of the same training": (redrawn_once, False),
    "of the one before": (redrawn_on, False),
    "of the one before, ten random predictions": (redrawn_on, True),
}


def first_alarm(rule, source, length):
    """Return the number of the first checkpoint that rings, the first being 1; None for none."""
    earlier = []
    for place, scores in zip(range(1, length + 1), source, strict=False):
        now = results(place, scores), scores
        if earlier and rule(earlier, now):
            return place
        earlier.append(now)
    return None


def share(count, of):
    low, high = clopper_pearson(count, of)
    return f"{count} of {of} ({100 * low:.1f} … {100 * high:.1f} %)"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    streams, length = (10, 100) if options.quick else (options.streams, 1000)

    def alarms(rule, kind, random, length, falls_at=None):
        for i in range(streams):
            chance = np.random.default_rng([options.seed, i])
            yield first_alarm(rule, stream(kind, random, chance, falls_at), length)

    cases = [
        (name, rule, images, partial(alarms, rule, *how))
        for images, how in STREAMS.items()
        for name, rule in RULES.items()
        if rule is package or not how[1]  # McNemar's test is of predictions right or wrong
    ]
    print(
        f"| 5 % of the images are redrawn | rule | a fall by 5 points at the {PLACE}th: before | "
        "at once | later, until the 60th |"
    )
    print("|---|---|--:|--:|--:|")
    for name, _, images, found in cases:
        places = list(found(PLACE + 10, PLACE))
        early = sum(p is not None and p < PLACE for p in places)
        late = sum(p is not None and p > PLACE for p in places)
        at_once = share(places.count(PLACE), streams)
        print(f"| {images} | {name} | {early} | {at_once} | {late} |", flush=True)
    print(f"\n| 5 % of the images are redrawn | rule | false alarm within 100 | within {length} |")
    print("|---|---|--:|--:|")
    for name, _, images, found in cases:
        places = [place for place in found(length) if place is not None]
        counts = share(sum(place <= 100 for place in places), streams), share(len(places), streams)
        print(f"| {images} | {name} | {' | '.join(counts)} |", flush=True)


if __name__ == "__main__":
    main()
