"""Everything to be measured where a GPU is lent for minutes; the next leg goes on where one ended.

    python benchmarks/gpu.py --minutes 9 --data cifar10   # again, until it prints "all done"
    python benchmarks/gpu.py --small --minutes 20         # a rehearsal on the CPU

Parts: `suite`, the tests for a GPU, where a step of an attack that waits is an error; `speed`,
attacks beside other packages; `training`, NCCL of one rank and bf16; `bat`, BAT of two ResNet-20 on
CIFAR-10 (docs/randomized_ensembles.md), then attacks on all test images. --folder has each cell at
once, gpu.md and gpu.json. `--emulate` runs `speed` on the tests' emulator of a device.
"""

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired

import timing
import torch

from lightning_rob import ARC, PGD, AutoAttack, LatticeClimber, Threat, evaluate, load
from lightning_rob.attacks import APGD, Accelerated
from lightning_rob.data import Images, Patches10
from lightning_rob.defenses import Ensemble, RandomTransforms, Single
from lightning_rob.nets import ResNet20, SmallCNN, WideResNet
from lightning_rob.transforms import Affine, GaussianNoise, HorizontalFlip
from tests.fakedev import emulated

ON_DEVICE = {"LIGHTNING_ROB_DEVICE": "cuda:0"} if torch.cuda.is_available() else {}
NEAR = Threat("linf", 2 / 255)  # of the nets of `speed`, which are hardly robust
NETS = {"ResNet-20": ResNet20, "WRN-28-10": lambda: WideResNet(28, 10)}
VARIANTS = {"plain": {}, "bf16": {"autocast": "bfloat16"}, "compile": {"compile": True}}
PEERS = {"torchattacks": ("PGD-20", "APGD-100", "AutoAttack")}
PEERS["pyautoattack"] = PEERS["torchattacks"][1:]


class Leg:
    """The cells measured so far, in a file below `folder`, and the time that is left."""

    def __init__(self, folder, minutes):
        self.folder, self.end, self.missing = folder, time.monotonic() + 60 * minutes, []
        self.file = folder / "cells.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        text = self.file.read_text() if self.file.exists() else ""
        self.lines = [json.loads(line) for line in text.splitlines()]

    def left(self):
        return self.end - time.monotonic() - 20  # seconds, to write checkpoints and tables

    def write(self, part, name, row=None):
        self.lines.append([part, name, row])
        with self.file.open("a") as file:
            file.write(json.dumps(self.lines[-1]) + "\n")

    def measure(self, part, name, work):
        """Record a row of the part's table, unless it is known; `work` returns it, or None."""
        rows, row = [row for *key, row in self.lines if key == [part, name]], None
        if any(row and (part != "bat" or not row.get("exit code")) for row in rows):
            return  # a fit of `bat` that failed, such as without data, is run again
        if len(rows) >= 2 and part != "bat":  # whose fit takes as many legs as it needs
            row = {"note": "not finished in two legs"}
        elif self.left() > 0:
            self.write(part, name)
            try:
                row = work()
            except ModuleNotFoundError as error:
                row = {"note": f"{error.name} is not installed"}
            except Exception as error:  # one failure must not cost the leg
                row = {"note": f"{type(error).__name__}: {error}"[:300].replace("\n", " ")}
        if row is None:
            self.missing.append(name)
        else:
            self.write(part, name, row)
            self.tables()

    def tables(self):
        """Write and return the tables of all legs."""
        text, found = [f"# {timing.machine()}"], {}
        for part, name, row in self.lines:
            if row:
                found.setdefault(part, {})[name] = row
        for part, rows in found.items():
            heads = list(dict.fromkeys(head for row in rows.values() for head in row))
            lines = [["", *heads], ["---"] * (len(heads) + 1)]
            lines += [[n, *(str(row.get(head, "")) for head in heads)] for n, row in rows.items()]
            text += [f"## {part}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
        (self.folder / "gpu.json").write_text(json.dumps({"machine": timing.machine()} | found))
        (self.folder / "gpu.md").write_text("\n\n".join(text) + "\n")
        return "\n\n".join(text)


def called(leg, module, *options):
    """Run a module for as long as the leg lasts; return its row, or None if that was too short."""
    began, line = time.monotonic(), (sys.executable, "-m", module, *options)
    where = {"cwd": Path(__file__).parents[1], "env": os.environ | ON_DEVICE}
    process = Popen(line, stdout=PIPE, stderr=STDOUT, text=True, **where)
    try:
        text, _ = process.communicate(timeout=max(1, leg.left()))
    except TimeoutExpired:
        process.terminate()  # `fit` ends after its batch
        process.communicate()
        return None
    row = {"seconds": round(time.monotonic() - began), "exit code": process.returncode}
    words = [word for word in text.replace("|", " ").split() if word.isascii()]  # without frames
    return row | {"note": " ".join(words[-25:])}


def suite(leg, _):
    tests = ("-q", "-p", "no:cacheprovider", "tests/test_placement.py")
    leg.measure("suite", "tests on the device", lambda: called(leg, "pytest", *tests))


def speed(leg, options):
    nets, sizes, scale = NETS, (128, 512, 2048), 1
    emulate, few = options.emulate, options.small or options.emulate
    if few:
        nets, sizes, scale = {"SmallCNN": lambda: SmallCNN(channels=3)}, (8,), 10
    attacks = {
        "PGD-20": ("single", PGD(NEAR, 20 // scale, 0.5 / 255, random_start=False)),
        "APGD-100": ("single", APGD(NEAR, 100 // scale)),
        "AutoAttack": ("single", AutoAttack(NEAR, passes=280 if few else None)),
        "ARC": ("ensemble", ARC(NEAR, 20 // scale, NEAR.eps, 4)),
        "climb": ("ensemble", LatticeClimber(NEAR, 40 // scale)),
        "EoT": ("random", PGD(NEAR, 20 // scale, 0.5 / 255, draws=10 // scale)),
    }

    @cache
    def defenses(kind):
        epochs, count = (1, 200) if few else (4, 3000)
        members = [timing.trained(seed, epochs, count, nets[kind]) for seed in range(2)]
        transforms = [Affine(0.2), GaussianNoise(0.1), HorizontalFlip(p=0.5)]
        random = RandomTransforms(members[0], transforms, size=2, draws=10)
        return {"single": Single(members[0]), "ensemble": Ensemble(members), "random": random}

    def work(kind, size, name, variant):
        which, attack = attacks[name]
        defense = defenses(kind)[which].eval()
        x, y = timing.photographs(False, size)
        if variant in PEERS:
            run = peer(variant, name, defense.classifiers[0])
        else:
            fast = Accelerated(attack, **VARIANTS[variant]) if VARIANTS[variant] else attack
            run = lambda x, y: fast(defense, x, y, torch.Generator().manual_seed(0))  # noqa: E731
        return timed(run, defense, x, y, 1 if name == "AutoAttack" else 3, emulate)

    for kind, size, name in product(nets, sizes, attacks):
        found = [*VARIANTS, *(package for package in PEERS if name in PEERS[package])]
        for variant in found if name != "AutoAttack" or size == sizes[0] else ():
            args = (kind, size, name, variant)
            leg.measure("speed", ", ".join(map(str, args)), lambda args=args: work(*args))


def peer(package, name, net):
    common = {"norm": "Linf", "eps": NEAR.eps, "seed": 0}
    if package == "torchattacks":
        import torchattacks

        if name == "PGD-20":
            return torchattacks.PGD(net, NEAR.eps, 0.5 / 255, 20, random_start=False)
        more = {"steps": 100} if name == "APGD-100" else {}
        return getattr(torchattacks, name.removesuffix("-100"))(net, **common, **more)
    import pyautoattack

    version = {"version": "custom", "attacks": ["apgd-ce"]} if name == "APGD-100" else {}
    own = pyautoattack.AutoAttack(net, device=timing.device(), **common, **version)
    return lambda x, y: own.run_standard_evaluation(x, y, batch_size=len(x))[0]


def timed(run, defense, x, y, rounds, emulate):
    """Return seconds of the first call, which compiles, and of later ones, and what is left."""
    with emulated() if emulate else nullcontext(timing.device()) as device:
        defense, x, y = (each.to(device) for each in (defense, x, y))
        z, first = timing.seconds(lambda: run(x, y))
        usual = statistics.median(timing.seconds(lambda: run(x, y))[1] for _ in range(rounds))
        with torch.no_grad():
            left = (defense(z, torch.Generator().manual_seed(1)).argmax(1) == y).float().mean()
        row = {"first, s": round(first, 3), "then, s": round(usual, 4)}
        row |= {"images/s": round(len(x) / usual, 1), "left, %": round(100 * left.item(), 1)}
        defense.to(timing.device())
    return row


def fitted(leg, part, name, *options):
    logs = (f"--trainer.logger.save_dir={leg.folder.resolve()}", f"--trainer.logger.name={part}")
    options = (*options, "--trainer.accelerator=auto", *logs)
    leg.measure(part, name, lambda: called(leg, "lightning_rob", "fit", "--config", *options))


def training(leg, options):
    common = ["madry_digits", "--trainer.max_epochs=1", "--trainer.devices=1"]
    common += ["--data.limit_train=200"] if options.small else []
    fitted(leg, "training", "one process", *common)
    fitted(leg, "training", "NCCL of one rank", *common, "--trainer.strategy=ddp")
    fitted(leg, "training", "bf16-mixed", *common, "--trainer.precision=bf16-mixed")


def bat(leg, options):
    line = ["benchmarks/papers/bat_cifar10_fast.yaml", f"--data.root={options.data}"]
    if options.small:
        line = ["demo", "--test_after_fit=false", "--model.epochs=1", "--trainer.max_epochs=2"]
        line += ["--data.train_size=200"]

    def checkpoints():
        return sorted(
            leg.folder.glob("bat/*/checkpoints/last.ckpt"), key=lambda f: f.stat().st_mtime
        )

    fitted(leg, "bat", "fit", *line, *(f"--ckpt_path={file}" for file in checkpoints()[-1:]))
    if "fit" in leg.missing or not checkpoints():
        return
    data = Patches10(test_size=50) if options.small else Images(options.data, 32, 32)
    data.setup("test")

    def attacked(part, word):
        defense = load(checkpoints()[-1]).to(timing.device())
        defense = defense if part == "ensemble" else Single(defense.classifiers[0]).eval()
        kept, began = {"resume": leg.folder / "resume", "progress": False}, time.monotonic()
        result = evaluate(defense, word, data.test_dataloader(), eps=8 / 255, **kept)
        row = {"seconds": round(time.monotonic() - began), "images": len(result.index)}
        row |= {name: round(result.accuracy(name), 4) for name in ("clean", word)}
        return row | {"interval": [round(end, 4) for end in result.interval(word)]}

    for args in (*product(["ensemble"], ("pgd", "arc", "climb")), ("first member", "pgd")):
        leg.measure("bat", ", ".join(args), lambda args=args: attacked(*args))


def main():
    parts = {part.__name__: part for part in (suite, speed, training, bat)}
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--folder", type=Path, help="else logs/gpu, of a rehearsal another one")
    parser.add_argument("--data", default="cifar10", help="CIFAR-10 as image files")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--emulate", action="store_true", help="speed on an emulated device")
    options = parser.parse_args()
    rehearsal = "_small" * options.small + "_emulated" * options.emulate
    leg = Leg(options.folder or Path(f"logs/gpu{rehearsal}"), options.minutes)
    for name in ["speed"] if options.emulate else options.parts:
        parts[name](leg, options)
    print(leg.tables())
    print(f"left for another leg: {', '.join(leg.missing)}" if leg.missing else "all done")


if __name__ == "__main__":
    main()
