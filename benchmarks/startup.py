"""Start-up time: complete processes run in turn, medians of CPU and wall time.

python benchmarks/startup.py
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

BARE = """
import lightning.pytorch as pl
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel, BoringDataModule
LightningCLI(BoringModel, BoringDataModule)
"""
COMMANDS = {
    "import torch": ["-c", "import torch"],
    "import lightning_rob": ["-c", "import lightning_rob"],
    "import lightning_rob.attacks": ["-c", "import lightning_rob.attacks"],
    "import lightning.pytorch": ["-c", "import lightning.pytorch"],
    "lightning-rob --help": ["-m", "lightning_rob", "--help"],
    "lightning-rob fit --help": ["-m", "lightning_rob", "fit", "--help"],
    "lightning-rob fit --help all": ["-m", "lightning_rob", "fit", "--help", "all"],
    "a bare LightningCLI, fit --help": ["-c", BARE, "fit", "--help"],
}


def clock(arguments):
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    found = {name: [] for name in COMMANDS}
    for again in range(rounds + 1):
        for name, arguments in COMMANDS.items():
            took = clock(arguments)
            if again:  # the first round fills the system's file cache
                found[name].append(took)
    print(f"| whole process, median of {rounds} | wall s | CPU s |\n|---|---|---|")
    for name, rows in found.items():
        wall, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| `{name}` | {wall:.2f} | {cpu:.2f} |")


if __name__ == "__main__":
    main()
