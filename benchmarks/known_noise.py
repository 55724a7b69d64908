"""Attackers who know the noise of a random defense, beside those who do not.

    for r in rt smoothing dverge; do lightning-rob fit --config ${r}_digits; done
    python benchmarks/known_noise.py logs/version_0/checkpoints/last.ckpt --eps 0.1 --draws 5
    smoothed="logs/version_1/checkpoints/last.ckpt --norm l2 --eps 0.75 --draws 8"
    python benchmarks/known_noise.py $smoothed
    python benchmarks/known_noise.py $smoothed --copies 1
    python benchmarks/known_noise.py logs/version_2/checkpoints/last.ckpt --eps 0.1

Prints the accuracies on a random choice of digits; `--copies` makes predictions of a smoothed
network from so many noisy copies.
"""

import argparse

from lightning_rob import PGD, LatticeClimber, Smoothing, Threat, evaluate, load
from lightning_rob.data import Digits5k


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--eps", type=float, required=True)
    parser.add_argument("--norm", default="linf")
    parser.add_argument("--draws", type=int, help="of a step of PGD; none for fixed members")
    parser.add_argument("--copies", type=int)
    parser.add_argument("--images", type=int, default=60)
    options = parser.parse_args()
    data = Digits5k(eval_batch_size=128)
    data.prepare_data()
    data.setup("test")
    model, threat = load(options.checkpoint), Threat(options.norm, options.eps)
    if options.copies:
        model = Smoothing(model.base, model.sigma, options.copies)
    pgd = PGD(threat, 20, threat.eps / 4, draws=options.draws, random_start=False)
    attacks = {"pgd": pgd} if options.draws else {"pgd": pgd, "climb": LatticeClimber(threat)}
    found = evaluate(
        model,
        attacks,
        data.test_dataloader(),
        inferences=5 if options.draws else 1,
        max_images=options.images,
        known_noise=True,
        progress=False,
    )
    print(found.table(type(model).__name__))
    known = found.known_noise
    print(f"known noise: {known.accuracy:.3f}, interval {known.interval}")
    for name in attacks:
        print(f"{name}, five submissions: {found.resubmitted(name, 5).accuracy:.3f}")


if __name__ == "__main__":
    main()
