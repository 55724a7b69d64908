"""A trained RT model under the attacks of Sitawarin et al. 2022, in the order of their Table 4.

    python benchmarks/rt_attacks.py --ckpt_path last.ckpt --data.root=cifar10 \
        --images 100 --draws 4 --steps 50 200

All attack the same test images with the same steps and draws. Each attack runs once; its
images are predicted ten times. An accuracy has the 95 % t interval over these predictions, the
difference to the row --against, which is the baseline, a paired one over images. Every finished row
is appended to --record and read from there when the same command runs again. With the records of
networks from other training seeds, --seeds, means over the seeds follow, with t intervals over
them and over the images. Other options are those of `lightning-rob test`.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from rich.progress import track

from lightning_rob.attacks import (
    PGD,
    SGM,
    Adam,
    AggMo,
    LinBP,
    SurrogateTransforms,
    Targeted,
    aggmo,
    draw_gradients,
)
from lightning_rob.attacks.backward import entered
from lightning_rob.cli.lightning_cli import RobustCLI
from lightning_rob.commands.checkpoints import load_weights, read_checkpoint
from lightning_rob.evaluation.protocol import AttackerDefenderSession, predictions
from lightning_rob.metrics import gradient_spread, student
from lightning_rob.objectives import ce_of_mean_logits, ce_of_mean_probs, expected_ce, linear
from lightning_rob.randomness import Streams
from lightning_rob.runtime.identity import fingerprint
from lightning_rob.threat import Threat

ANSWERS, BATCH = 10, 50
SHARED, SIX = SurrogateTransforms(), aggmo(6)
MOMENTA, BUFFERS = (0.5, 0.75, 0.9, 0.99), (2, 3, 4, 8)  # of Fig. 10
SGM_TOO = (SHARED, SGM(0.5))


def attacks(steps, draws, eps):
    def pgd(objective, **options):
        return PGD(Threat("linf", eps), steps, eps / 16, objective, draws=draws, **options)

    plain = {"objective": linear, "backward": SHARED}
    momenta = {f"linear, momentum {m:g}": (m,) for m in MOMENTA}
    momenta |= {f"linear + AggMo of {count}": aggmo(count) for count in BUFFERS}
    return {
        "baseline (EoT)": pgd(expected_ce),
        "EoT, shared order": pgd(expected_ce, backward=SHARED),
        "CE (softmax)": pgd(ce_of_mean_probs, backward=SHARED),
        "CE (logits)": pgd(ce_of_mean_logits, backward=SHARED),
        "linear": pgd(**plain),
        "linear + MB": pgd(**plain, ascent=AggMo((0.9,), "normalized")),
        "linear + LinBP": pgd(linear, backward=(SHARED, LinBP())),
        "linear + SGM": pgd(linear, backward=SGM_TOO),
        "linear + TG": Targeted(pgd(**plain)),
        "linear + Adam": pgd(**plain, ascent=Adam()),
        "linear + AggMo": pgd(**plain, momentum=SIX),
        "linear + AggMo, gradients": pgd(**plain, ascent=AggMo(SIX, "gradients")),
        "linear + AggMo, paper": pgd(**plain, ascent=AggMo(SIX, "paper")),
        "linear + SGM + AggMo": pgd(linear, backward=SGM_TOO, momentum=SIX),
        "baseline + AggMo": pgd(expected_ce, momentum=SIX),
        **{name: pgd(**plain, momentum=each) for name, each in momenta.items()},
    }


class Study(RobustCLI):
    """Build the objects that `test` would run, and attack the defense."""

    def __init__(self, options, args):
        self.options = options
        super().__init__(["test", *args, "--trainer.logger=false"])

    def test(self, model, datamodule, ckpt_path=None, **_):
        load_weights(model, read_checkpoint(str(ckpt_path)))
        datamodule.setup("test")
        part = datamodule.parts["test"]
        rows = [part[i] for i in range(self.options.images)]
        self.x = torch.stack([row[0] for row in rows])
        self.y = torch.tensor([int(row[1]) for row in rows])
        self.defense = model.defense.eval()

    def batches(self):
        index = torch.arange(len(self.x))
        return [(self.x[rows], self.y[rows], rows) for rows in index.split(BATCH)]

    def scores(self, attack):
        """Return the scores [images, predictions], 0 or 1."""
        found = []
        for x, y, index in self.batches():
            if attack is None:
                given = predictions(self.defense, x, Streams.from_index(index, 0), ANSWERS)
            else:
                session = AttackerDefenderSession(attack, self.defense, 0)
                _, given = session.step(x, y, index, ANSWERS)
            found.append(given.gather(2, y.expand(ANSWERS, -1)[..., None])[..., 0].T)
        return torch.cat(found)


def tell_spread(study, draws=20, repeats=5):
    """Measure the spread of single draws' gradients, by loss, order of the transforms, and trick.

    Means over images with half their 95 % t interval; each image's are means over the repeats.
    """
    columns = "variance | cosine | sign agreement | variance of non-zero entries"
    print(f"\n| {len(study.x)} images, {repeats} times {draws} draws | {columns} |")
    print("|---|---|---|---|---|")
    kinds = {
        "cross-entropy, an order for each copy": (expected_ce, None),
        "cross-entropy, one for each image": (expected_ce, SHARED),
        "linear, an order for each copy": (linear, None),
        "linear, one for each image": (linear, SHARED),
        "linear, one, LinBP": (linear, (SHARED, LinBP())),
        "linear, one, SGM": (linear, SGM_TOO),
    }
    for name, (loss, tricks) in kinds.items():
        found, view = [], partial(entered, tricks)
        for x, y, index in study.batches():
            see = partial(draw_gradients, study.defense, x, y, draws)
            drawn = (see(Streams.from_index(index, key), loss, view) for key in range(repeats))
            found.append(sum(torch.stack(gradient_spread(each)) for each in drawn) / repeats)
        cells = []
        for each in torch.cat(found, 1):
            low, high = student(each.tolist())
            cells.append(f"{float(each.mean()):.3f} ± {(high - low) / 2:.3f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def recorded(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


def cell(values, sign=""):
    low, high = student(values)
    return f"{mean(values):{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def row(name, line, base):
    each = torch.tensor(line["accuracies"])
    low, high = student((100 * each).tolist())
    cells = [name, f"{100 * float(each.mean()):.1f} ± {(high - low) / 2:.1f}"]
    if base and base is not line:
        gap = 100 * (torch.tensor(line["images"]) - torch.tensor(base["images"]))
        cells.append(cell(gap.tolist(), "+"))
    return cells + [""] * (3 - len(cells)) + [f"{line['seconds']:.0f}"]


def tell_means(records, games, against, setting):
    """Print means over training seeds, with 95 % t intervals over them, then over the images."""

    def rights(name, steps):  # [seeds, images]
        lines = [found.get(f"{name}, {steps} steps, {setting}") for found in records]
        return 100 * torch.tensor([line["images"] for line in lines]) if all(lines) else None

    head = f"accuracy, % | minus {against}"
    print(f"\n| {len(records)} seeds | {head} | over images: {head} |\n|---|---|---|---|---|")
    for steps, name in games:
        if (ours := rights(name, steps)) is None:
            continue
        base, cells = rights(against, steps), [name]
        for dim in (1, 0):
            cells.append(cell(ours.mean(dim).tolist()))
            same = name == against or base is None
            cells.append("" if same else cell((ours - base).mean(dim).tolist(), "+"))
        print(f"| {' | '.join(cells)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--eps", type=float, default=8, help="of 255, linf; a step is a 16th")
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 200])
    names = list(attacks(1, 1, 1))
    usual = names[: -len(MOMENTA + BUFFERS)]  # the others run where --only names them
    parser.add_argument(
        "--only", nargs="+", choices=names, default=usual, help="rows", metavar="ROW"
    )
    parser.add_argument(
        "--against", default=names[0], choices=names, help="row of the differences", metavar="ROW"
    )
    parser.add_argument("--spread", action="store_true", help="of gradients, instead of attacks")
    parser.add_argument("--record", type=Path, default=Path("rt_attacks.jsonl"))
    parser.add_argument("--seeds", type=Path, nargs="+", help="records of other training seeds")
    options, rest = parser.parse_known_args()
    study = Study(options, rest)
    if options.spread:
        tell_spread(study)
        return
    done = recorded(options.record)
    setting = f"{options.draws} draws, {options.images} images, {options.eps:g}/255"
    network = fingerprint(study.defense)
    if any(line.get("network", network) != network for line in done.values()):
        parser.error(f"{options.record} is of another network: give another --record")
    games = {(0, "clean"): None}
    for steps in options.steps:
        for name, attack in attacks(steps, options.draws, options.eps / 255).items():
            if name in options.only:
                games[steps, name] = attack
    for (steps, name), attack in track(list(games.items()), "attacks"):
        key = f"{name}, {steps} steps, {setting}"
        if key in done:
            continue
        began = time.perf_counter()
        scores = study.scores(attack)
        line = {
            "key": key,
            "network": network,
            "accuracies": scores.mean(0).tolist(),
            "images": scores.mean(1).tolist(),
            "seconds": time.perf_counter() - began,
        }
        with options.record.open("a") as file:
            file.write(json.dumps(line) + "\n")
        done[key] = line
    for steps in [0, *options.steps]:
        print(f"\n| {steps} steps | accuracy, % | minus {options.against} | seconds |")
        print("|---|---|---|---|")
        base = done.get(f"{options.against}, {steps} steps, {setting}")
        for at, name in games:
            if at == steps:
                line = done[f"{name}, {at} steps, {setting}"]
                print("| " + " | ".join(row(name, line, base)) + " |")
    if options.seeds:
        tell_means([done, *map(recorded, options.seeds)], games, options.against, setting)


if __name__ == "__main__":
    main()
