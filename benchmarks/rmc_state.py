"""RMC after each round of a game: are its rounds independent, and is its state any good?

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/rmc_state.py

Trains the network of `configs/rmc_digits.yaml` and plays its GMSA-AVG, round by round, as its test
does: sequence 0 has the recipe's images, the others have other images and other random streams.
After every round the state that the next round starts with predicts, without further adaptation,
held-out test images: clean ones, and the same attacked on the base model by PGD. A copy of the
state adapts to some of them, clean, one by one, as without an attacker. Each
image of sequence 0 is attacked once more as the first round of a fresh defender, which has no
history. The table has means by blocks of rounds.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from timing import printed

from lightning_rob import RobustEval
from lightning_rob.attacks import TransferFromStatic
from lightning_rob.cli import main as command_line
from lightning_rob.defenses.transductive import give_source
from lightning_rob.evaluation.protocol import AttackerDefenderSession
from lightning_rob.metrics import robust_accuracy, student, wilson

RECIPE = Path(__file__).parent.parent / "configs/rmc_digits.yaml"
COLUMNS = ("attacked", "attacked, no history", "state, clean", "state, attacked", "adapted, clean")


def trained(folder):
    """Return the recipe's defense, its attacks by name, and all test images in round order."""
    from lightning_rob.cli.lightning_cli import RobustCLI

    logs = f"--trainer.logger={{class_path: TensorBoardLogger, init_args: {{save_dir: {folder}}}}}"
    options = ["--config", str(RECIPE), logs]
    if not (checkpoints := sorted(folder.rglob("last.ckpt"))):
        command_line(["fit", *options, "--test_after_fit=false"])
        checkpoints = sorted(folder.rglob("last.ckpt"))
    built = RobustCLI(options, run=False)
    built.model.load_state_dict(torch.load(checkpoints[-1], weights_only=True)["state_dict"])
    built.trainer.datamodule = built.datamodule
    built.datamodule.setup("test")
    give_source(built.model.defense, built.datamodule.labelled)
    test = built.datamodule.parts["test"]
    x, y, index = zip(*(test[i] for i in range(len(test))), strict=True)
    evals = [c for c in built.trainer.callbacks if isinstance(c, RobustEval)]
    game = next(c for c in evals if c.settings.protocol)
    chance = torch.Generator().manual_seed(game.settings.seed)
    order = torch.randperm(len(x), generator=chance)
    images = torch.stack(x)[order], torch.tensor(y)[order], torch.tensor(index)[order]
    return built.model.defense.eval(), game.attacks, images


@torch.no_grad()
def share_right(defense, x, y):
    return float(robust_accuracy(defense(x), y).double().mean())


def rounds(defense, attack, sequence, played, held_out, options):
    """Return the accuracies after each round, in the order of COLUMNS."""
    keys = (0, sequence, *options.attack.encode())  # as RobustEval has them, sequence for repeat
    private = (0, sequence)
    match = AttackerDefenderSession(attack, defense, *keys, private=private)
    clean, attacked, labels = held_out
    for number, (x, y, index) in enumerate(zip(*(t.split(1) for t in played), strict=True)):
        row = [float(robust_accuracy(match.step(x, y, index)[1][0], y)), math.nan]
        state = match.defenders[0][0].eval()
        if sequence == 0:
            alone = AttackerDefenderSession(attack, defense, *keys, private=private)
            row[1] = float(robust_accuracy(alone.step(x, y, index)[1][0], y))
        row += [share_right(state, clean, labels), share_right(state, attacked, labels)]
        few = [(number * options.adapted + i) % len(labels) for i in range(options.adapted)]
        chance = torch.Generator().manual_seed(number)
        finals = [state.adapt(clean[[i]], chance).eval() for i in few]
        own = [share_right(f, clean[[i]], labels[[i]]) for f, i in zip(finals, few, strict=True)]
        yield [*row, sum(own) / len(own)]


def percent(values):
    return f"{100 * values.nanmean():.1f}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--attack", default="gmsa_avg", help="one of the recipe's that rehearse")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--adapted", type=int, default=3, help="clean images adapted to, a round")
    parser.add_argument("--block", type=int, default=5, help="rounds in a row of the table")
    parser.add_argument("--folder", type=Path, default=Path("logs/rmc_state"))
    options = parser.parse_args()
    began = time.perf_counter()
    defense, attacks, images = trained(options.folder)
    x, y, _ = (part[-options.held_out :] for part in images)
    pgd = next(a for n, a in attacks.items() if n == "pgd" and isinstance(a, TransferFromStatic))
    held_out = x, pgd(defense, x, y, torch.Generator().manual_seed(0)), y
    print(
        f"unadapted network on {len(y)} held-out images: "
        f"clean {share_right(defense.base_model, x, y):.3f}"
        f", attacked {share_right(defense.base_model, held_out[1], y):.3f}"
    )
    table = []
    for sequence in range(options.sequences):
        part = slice(sequence * options.rounds, (sequence + 1) * options.rounds)
        played = [t[: -options.held_out][part] for t in images]
        game = rounds(defense, attacks[options.attack], sequence, played, held_out, options)
        table.append([])
        for number, row in enumerate(game, start=1):
            table[-1].append(row)
            values = ", ".join(f"{n} {v:.3f}" for n, v in zip(COLUMNS, row, strict=True))
            seconds = time.perf_counter() - began
            print(f"sequence {sequence} round {number}: {values} ({seconds:.0f} s)", flush=True)
    found = torch.tensor(table).double()  # [sequences, rounds, columns]
    rows = [
        [f"{first + 1}-{first + block.shape[1]}", *(percent(block[..., i]) for i in range(5))]
        for first, block in zip(
            range(0, options.rounds, options.block), found.split(options.block, 1), strict=True
        )
    ]
    rows.append(["all", *(percent(found[..., i]) for i in range(5))])
    seconds = time.perf_counter() - began
    title = f"Right, %, {options.sequences} x {options.rounds} rounds of {options.attack}"
    printed(f"{title}, {seconds:.0f} s", ("rounds", *COLUMNS), rows)
    each, alone = found[..., 0], found[0, :, 1]
    low, high = wilson(float(alone.mean()), len(alone))
    print(f"no history: {percent(alone)} %, Wilson interval over rounds {low:.3f}-{high:.3f}")
    lost, won = ((each[0] < alone).sum(), (each[0] > alone).sum())
    print(f"sequence 0, by image: {lost} right without history only, {won} with history only")
    print(f"history: by sequence {[percent(part) for part in each]} %")
    if options.sequences > 1:
        low, high = student(each.mean(1).tolist())
        print(f"history: {percent(each)} %, Student's interval over sequences {low:.3f}-{high:.3f}")


if __name__ == "__main__":
    main()
