"""Type I error and power of tests of paired scores, and coverage of the package's intervals.

Scores in [0, 1] of two defenses on the same images, drawn from settings in which their means are
equal (first table) or not (second table): the share of samples that each test calls different at
5 %. `Gaffke` is the package's test, McNemar's where scores are 0 or 1; beside it the t test, the
hedged capital of Waudby-Smith and Ramdas (2024) and the empirical Bernstein bound of Maurer and
Pontil (2009). The third table is the share of 95 % intervals that hold the true mean, for
accuracies by draw of a defender's randomness; the fourth of intervals of ranks that do, and of
comparisons over draws that find no difference of equal defenses. A quarter of an hour on a CPU,
with `--quick` one minute; `--only several` prints the fourth alone.
"""

import argparse
import warnings

import numpy as np
import torch
from scipy.stats import ttest_1samp

from lightning_rob.commands.leaderboard.ranks import ranks
from lightning_rob.metrics import student, wilson, wilson_over_draws
from lightning_rob.metrics.gaffke import p_at_most
from lightning_rob.metrics.intervals import paired_over_draws

LEVEL = 0.05
VALUES, SHARES = np.array([0, 0.5, 1]), np.array([0.2, 0.2, 0.6])  # of images' scores


def network_and_ensemble(accuracy, ensemble=None):
    """A network that is right with this probability, an ensemble with the same score everywhere."""

    def gaps(chance, shape):
        return (chance.random(shape) < accuracy) - (accuracy if ensemble is None else ensemble)

    return gaps


def right_or_wrong(lost, won):
    """Two networks: the probabilities that only the first or only the second is right."""
    return mixture((-1, lost), (1, won), (0, 1 - lost - won))


def mixture(*values):
    def gaps(chance, shape):
        return chance.choice([v for v, _ in values], shape, p=[p for _, p in values])

    return gaps


def independent(one, other):
    """Two scores that are drawn independently of each other."""
    return lambda chance, shape: other(chance, shape) - one(chance, shape)


def quarters(*shares):
    return mixture(*zip((0, 0.25, 0.5, 0.75, 1), shares, strict=True))


def inferences(lower=0.0):
    """Ten inferences each of two random defenses; the second is right less often on each image."""

    def gaps(chance, shape):
        right = chance.beta(0.6, 0.2, shape)
        return (chance.binomial(10, right * (1 - lower)) - chance.binomial(10, right)) / 10

    return gaps


def member_and_pair(alone):
    """The first of two members, and both at random: they disagree on 20 % of the images."""
    return mixture((-0.5, alone), (0.5, 0.2 - alone), (0, 0.8))


def noise_and_losses(chance, shape):
    """Small changes on all images, and on one of twenty the loss of half the score."""
    return 0.02 * chance.uniform(-1, 1, shape) + np.where(
        chance.random(shape) < 0.05, -0.475, 0.025
    )


EQUAL = {
    "network right with 0.9, ensemble's score 0.9": network_and_ensemble(0.9),
    "network right with 0.99, ensemble's score 0.99": network_and_ensemble(0.99),
    "network right with 0.6, ensemble's score 0.6": network_and_ensemble(0.6),
    "0/1, different on half of the images": right_or_wrong(0.25, 0.25),
    "0/1, different on 10 %": right_or_wrong(0.05, 0.05),
    "0/1, different on 2 %": right_or_wrong(0.01, 0.01),
    "-1 on 1 %, a little more on the others": mixture((-1, 0.01), (0.01 / 0.99, 0.99)),
    "+0.9 on 5 %, a little less on the others": mixture((0.9, 0.05), (-0.045 / 0.95, 0.95)),
    "quarters, both alike": independent(
        quarters(0.1, 0.2, 0.4, 0.2, 0.1), quarters(0.1, 0.2, 0.4, 0.2, 0.1)
    ),
    "quarters, 0.75 and 0 to 1": independent(
        quarters(0, 0, 0, 1, 0), quarters(0.15, 0.05, 0.05, 0.15, 0.6)
    ),
    "uniform, both": independent(
        lambda chance, shape: chance.random(shape), lambda chance, shape: chance.random(shape)
    ),
    "near 0 or 1, both": independent(
        lambda chance, shape: chance.beta(0.1, 0.1, shape),
        lambda chance, shape: chance.beta(0.1, 0.1, shape),
    ),
    "0.9, and skewed around it": lambda chance, shape: chance.beta(1.8, 0.2, shape) - 0.9,
    "first member, and both of two": member_and_pair(0.1),
    "ten inferences of two random defenses": inferences(),
    "lost entirely on 5 %, won by a quarter on 20 %": mixture((-1, 0.05), (0.25, 0.2), (0, 0.75)),
    "noise on all, half lost on 5 %": noise_and_losses,
}
UNEQUAL = {
    "network right with 0.8, ensemble's score 0.9": network_and_ensemble(0.8, 0.9),
    "0/1, lost on 10 %, won on 5 %": right_or_wrong(0.1, 0.05),
    "quarters, one step lower on 30 %, higher on 15 %": mixture(
        (-0.25, 0.3), (0.25, 0.15), (0, 0.55)
    ),
    "first member, and both of two": member_and_pair(0.15),
    "ten inferences, each right 5 % less often": inferences(0.05),
    "lost entirely on 5 %": mixture((-1, 0.05), (0, 0.95)),
    "a little lower on all, with noise": lambda chance, shape: chance.normal(
        -0.02, 0.1, shape
    ).clip(-1, 1),
}


def t_test(gaps):
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of differences that are all equal
        p = ttest_1samp(gaps, 0, axis=1).pvalue
    equal = (gaps == gaps[:, :1]).all(1)
    return np.where(equal, (gaps[:, 0] == 0).astype(float), p) < LEVEL


def gaffke(gaps):
    return np.array([2 * min(p_at_most(g), p_at_most(-g)) < LEVEL for g in gaps])


def hedged_capital(gaps):
    """Bet against a mean of 1 / 2 of (1 + gap) / 2 on both sides; wealth of 1 / level rejects."""
    n, scores, before = gaps.shape[1], (1 + gaps) / 2, np.arange(gaps.shape[1]) + 1
    means = (0.5 + scores.cumsum(1)) / (before + 1)
    variances = (0.25 + ((scores - means) ** 2).cumsum(1)) / (before + 1)
    variances = np.concatenate([np.full((len(gaps), 1), 0.25), variances[:, :-1]], 1)
    bets = np.minimum(np.sqrt(2 * np.log(2 / LEVEL) / (n * variances)), 1)
    wealth = [np.log1p(sign * bets * (scores - 0.5)).cumsum(1) for sign in (1, -1)]
    return (np.logaddexp(*wealth) - np.log(2)).max(1) >= -np.log(LEVEL)


def bernstein(gaps):
    n, log = gaps.shape[1], np.log(4 / LEVEL)
    half = np.sqrt(2 * gaps.var(1, ddof=1) * log / n) + 14 * log / (3 * (n - 1))
    return abs(gaps.mean(1)) > half


TESTS = {"Gaffke": gaffke, "t": t_test, "hedged capital": hedged_capital, "Bernstein": bernstein}


def rejected(test, gaps, chance, n, times):
    return 100 * float(np.mean(test(gaps(chance, (times, n)).astype(float))))


def by_size(settings, sizes, tests, times, seed):
    """Print the share of rejections, a row for each setting and test, a column for each n."""
    print(f"| setting | test | {' | '.join(f'n = {n}' for n in sizes)} |")
    print("|---|---|" + "--:|" * len(sizes))
    largest = dict.fromkeys(tests, 0.0)
    for name, gaps in settings.items():
        for test in tests:
            shares = [
                rejected(TESTS[test], gaps, np.random.default_rng([seed, n]), n, times)
                for n in sizes
            ]
            largest[test] = max(largest[test], *shares)
            print(f"| {name} | {test} | {' | '.join(f'{s:.1f}' for s in shares)} |", flush=True)
    half = 100 * 1.96 * (LEVEL * (1 - LEVEL) / times) ** 0.5
    print(
        f"\nLargest of each: { {k: round(v, 1) for k, v in largest.items()} }. {times} samples "
        f"each, so that 5 % is 5 ± {half:.1f}.\n"
    )


def coverage(times, seed):
    """Print how often intervals of accuracies by draw hold what they are of.

    Wilson's are of the mean over images and draws, the t interval of the mean over draws alone.
    """
    effects = {
        "normal, sd 2 points": lambda chance, shape: chance.normal(0, 0.02, shape),
        "skewed, sd 2 points": lambda chance, shape: 0.02 * (1 - chance.exponential(1, shape)),
        "20 points lost in one of ten": lambda chance, shape: (
            0.02 - 0.2 * (chance.random(shape) < 0.1)
        ),
    }
    print(
        "| the draws differ | images | draws | Wilson over draws | t over draws | Wilson of one |"
    )
    print("|---|--:|--:|--:|--:|--:|")
    for name, effect in effects.items():
        mean = expected(effect)
        for n in (100, 1000):
            for draws in (2, 5, 10):
                chance = np.random.default_rng([seed, n, draws])
                held = np.zeros(3)
                for _ in range(times):
                    shift = effect(chance, draws)
                    kind = chance.choice(3, n, p=SHARES)
                    scores = chance.random((draws, n)) < np.clip(
                        0.9 * VALUES[kind] + shift[:, None], 0, 1
                    )
                    found = scores.mean(1).tolist()
                    whole, drawn = mean @ SHARES, mean[kind].mean()
                    spans = [
                        (whole, wilson_over_draws(found, n)),
                        (drawn, student(found)),
                        (whole, wilson(found[0], n)),
                    ]
                    held += [low <= truth <= high for truth, (low, high) in spans]
                cells = " | ".join(f"{100 * share:.1f}" for share in held / times)
                print(f"| {name} | {n} | {draws} | {cells} |", flush=True)


def several(times, seed):
    """Print how often ranks of equal defenses, and comparisons over draws, find a difference."""
    print("| what differs, sd | images | number | ranks of eight | comparison over draws |")
    print("|---|--:|--:|--:|--:|")
    for sd in (0.02, 0.04, 0.1):
        for number in (2, 3, 5):
            chance, missed, different = np.random.default_rng([seed, number]), 0, 0
            for _ in range(times):
                means = (0.6 + chance.normal(0, sd, (8, number, 1))).clip(0, 1)
                scores = (chance.random((8, number, 300)) < means).astype(float)
                missed += sum(one != (1, 8) for one in ranks(scores)) / 8
                pair = torch.from_numpy(scores[:2].transpose(0, 2, 1).copy())
                different += paired_over_draws(*pair).p < LEVEL
            cells = " | ".join(f"{100 * count / times:.1f}" for count in (missed, different))
            print(f"| {100 * sd:g} points | 300 | {number} | {cells} |", flush=True)


def expected(effect):
    """Return the mean score over draws of images with each of `VALUES`, from a million draws."""
    shift = effect(np.random.default_rng(0), 1_000_000)
    return np.array([np.clip(0.9 * value + shift, 0, 1).mean() for value in VALUES])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--times", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["several"])
    options = parser.parse_args()
    times = 100 if options.quick else options.times
    if options.only:
        several(times // 10, options.seed)
        return
    print("Share of samples in which equal means are called different, in percent\n")
    by_size(EQUAL, (10, 12, 13, 20, 50, 100, 1000), ("Gaffke", "t"), times, options.seed)
    print("Share of samples in which a difference is found, in percent\n")
    by_size(UNEQUAL, (20, 50, 100, 200, 1000), tuple(TESTS), times // 4, options.seed)
    print("Share of 95 % intervals that hold the mean, in percent\n")
    coverage(times // 2, options.seed)
    print("\nShare of intervals and comparisons that find a difference of equals, in percent\n")
    several(times // 10, options.seed)


if __name__ == "__main__":
    main()
