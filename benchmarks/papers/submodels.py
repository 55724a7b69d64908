"""Does it help to have more sub-models? Athena's compositions (Meng et al. 2020), paired by image.

    lightning-rob fit --config configs/athena_pool_digits.yaml --model.epochs=3 \
        --trainer.max_epochs=219 --data.limit_train=2000
    python benchmarks/papers/submodels.py logs/version_0/checkpoints/last.ckpt

PGD-100 attacks the sub-model on unchanged images, as in the paper's Table 6. All sub-models predict
each image once; then random compositions of them vote. An accuracy is the mean over compositions,
and a difference has the 95 % t interval over images of the mean over compositions.
"""

import argparse
from pathlib import Path
from statistics import fmean

import torch
from rich.progress import track

from lightning_rob import PGD, Threat, load
from lightning_rob.data import Digits5k
from lightning_rob.metrics import student
from lightning_rob.plots import COLORS, blank, save
from lightning_rob.randomness import Streams
from lightning_rob.rules import VOTING_RULES
from lightning_rob.transforms.pool import chosen

COUNTS = (14, 28, 42, 56)  # irreversible sub-models
BASES = ("14r+14i", "reversible")
ENSEMBLES = ("reversible", *(f"14r+{n}i" for n in COUNTS), *(f"{n}i" for n in COUNTS))
BATCH = 100


class Study:
    """Test images, and the sub-models that vote on them."""

    def __init__(self, checkpoint, images):
        data = Digits5k()
        data.prepare_data()
        data.setup("test")
        rows = [data.parts["test"][i] for i in range(images)]
        self.x = torch.stack([row[0] for row in rows])
        self.y = torch.tensor([int(row[1]) for row in rows])
        self.defense = load(checkpoint)

    def logits(self, attack):
        """Return the logits [members, images, classes] of attacked or clean images."""
        found, original = [], self.defense.part([self.defense.place("clean")])
        for rows in track(torch.arange(len(self.x)).split(BATCH), "batches"):
            x, y = self.x[rows], self.y[rows]
            if attack is not None:
                x = attack(original, x, y, Streams.from_index(rows, 0))
            with torch.no_grad():
                found.append(self.defense.logits(x, Streams.from_index(rows, 1)))
        return torch.cat(found, 1)

    def right(self, logits, rule, members):
        """Return which images [images] a composition of sub-models predicts correctly, 0 or 1."""
        weights = torch.full((len(members),), 1 / len(members))
        given = rule(logits[members], weights)
        return given.gather(1, self.y[:, None])[:, 0].double()


def mean_scores(study, logits, rule, draws):
    """Return the scores [images] of each kind of composition, the mean over its draws, in %."""
    found = {}
    for words in ENSEMBLES:
        drawn = {tuple(chosen(words, seed)) for seed in range(draws)}
        parts = [[study.defense.place(name) for name in names] for names in sorted(drawn)]
        votes = [study.right(logits, rule, members) for members in parts]
        found[words] = 100 * torch.stack(votes).mean(0)
    return found


def tell(study, logits, draws):
    """Print each composition's accuracy, and its difference from 14 of both kinds."""
    minus = " | ".join(f"minus {base}" for base in BASES)
    print(f"| rule | sub-models | accuracy, % | {minus} |\n|---|---|---|---|---|")
    for name, rule in VOTING_RULES.items():
        scores = mean_scores(study, logits, rule, draws)
        for words, ours in scores.items():
            cells = []
            for base in BASES:
                gap = (ours - scores[base]).tolist()
                low, high = student(gap)
                text = f"{fmean(gap):+.1f} [{low:.1f}, {high:.1f}]"
                cells.append("" if words == base else text)
            print(f"| {name} | {words} | {float(ours.mean()):.1f} | {' | '.join(cells)} |")


def draw(study, votes, draws, path):
    """Draw the accuracy against the number of sub-models, a panel for each attack (Fig. 4)."""
    figure = blank(3.4 * len(votes), 3.2)
    panels = figure.subplots(1, len(votes), squeeze=False)[0]
    kinds = {"with 14 reversible ones": "14r+{}i", "alone": "{}i"}
    for axes, (attack, logits) in zip(panels, votes.items(), strict=True):
        scores = mean_scores(study, logits, VOTING_RULES["MV"], draws)
        for color, (label, words) in zip(COLORS, kinds.items(), strict=False):
            rows = [scores[words.format(count)].tolist() for count in COUNTS]
            middle = [fmean(row) for row in rows]
            half = [(high - low) / 2 for low, high in map(student, rows)]
            axes.errorbar(COUNTS, middle, half, color=color, label=label, marker="o", capsize=3)
        axes.set(title=attack, xlabel="irreversible sub-models", xticks=COUNTS)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy of the majority vote, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=5, help="random compositions of each kind")
    parser.add_argument("--eps", type=float, default=0.3, help="linf")
    parser.add_argument("--picture", type=Path, help="PNG of accuracy and number of sub-models")
    options = parser.parse_args()
    study = Study(options.checkpoint, options.images)
    attack = PGD(Threat("linf", options.eps), steps=100, step_size=0.01)
    attacks = {"no attack": None, "PGD on the original": attack}
    votes = {name: study.logits(attack) for name, attack in attacks.items()}
    for name, logits in votes.items():
        print(f"\n{name}, {options.images} images, {options.draws} compositions of each kind\n")
        tell(study, logits, options.draws)
    if options.picture:
        draw(study, votes, options.draws, options.picture)


if __name__ == "__main__":
    main()
