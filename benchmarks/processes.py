"""How an evaluation scales with processes, where groups of images differ in cost.

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/processes.py

Measures PGD and Auto-PGD with early stopping on groups of digits, on one and on two processes of
this machine, in CPU seconds: with one thread each, the largest of a process is the wall time on
cores that nothing else uses. For more processes the time at which the last one is done is computed
from the times of the groups, which are dealt in turn. Images of similar margins stand together, so
that groups differ in cost. A minute and a half of CPU time in all.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from autoattack import images, trained
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_rob import APGD, PGD, RobustEval, Single, Threat, evaluate
from lightning_rob.objectives import linear

THREAT = Threat("linf", 0.2)
ATTACKS = {
    "pgd": PGD(THREAT, 20, 0.05, early_stop=True),
    "apgd": APGD(THREAT, 100, restarts=3),
}
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Plain(LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)

    def test_step(self, batch, batch_idx):
        pass


class Clock(Callback):
    """Writes the CPU seconds that each process has taken for a test."""

    def __init__(self, folder):
        self.folder, self.began = folder, 0.0

    def on_test_start(self, trainer, pl_module):
        self.began = time.process_time()

    def on_test_end(self, trainer, pl_module):
        seconds = time.process_time() - self.began
        Path(self.folder, str(trainer.global_rank)).write_text(str(seconds))


def digits_in_blocks(net, count, size):
    """Digits of similar margins together, from hard to easy, and the blocks shuffled."""
    x, y = images("Digits5k", train=False, most=count)
    margins = -linear(net(x)[None], torch.ones(1), y)
    blocks = margins.argsort().split(size)
    shuffled = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
    order = torch.cat([blocks[i] for i in shuffled])
    return TensorDataset(x[order], y[order])


def group_times(net, data, size):
    found = []
    for start in range(0, len(data), size):
        part = DataLoader(TensorDataset(*data[start : start + size]), size)
        began = time.process_time()
        evaluate(Single(net), ATTACKS, part, progress=False, checks=False)
        found.append(time.process_time() - began)
    return found


def makespan(times, processes):
    """The time at which the last process is done."""
    return max(sum(times[rank::processes]) for rank in range(processes))


def measured(net, data, size, processes):
    """The CPU seconds of each process."""
    options = {"strategy": "ddp_fork", "devices": processes} if processes > 1 else {"devices": 1}
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [Clock(folder), RobustEval(ATTACKS, group_size=size)]
        trainer = Trainer(accelerator="cpu", callbacks=callbacks, **options, **QUIET)
        trainer.test(Plain(net), DataLoader(data, size), verbose=False)
        return [float(path.read_text()) for path in Path(folder).iterdir()]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--images", type=int, default=480)
    parser.add_argument("--group_size", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    net = trained("Digits5k", THREAT, 2, standard=False)
    data = digits_in_blocks(net, args.images, args.group_size)
    times = group_times(net, data, args.group_size)
    one, two = (measured(net, data, args.group_size, processes) for processes in (1, 2))
    print(f"{len(times)} groups, {min(times):.2f} to {max(times):.2f} s each, {sum(times):.0f} s")
    print(f"one process {one[0]:.1f} s, two {two[0]:.1f} and {two[1]:.1f} s\n")
    print("| processes | computed | measured |\n|--:|--:|--:|")
    shown = {1: "1.00 x", 2: f"{one[0] / max(two):.2f} x"}
    for processes in (1, 2, 4, 8, 16):
        computed = sum(times) / makespan(times, processes)
        print(f"| {processes} | {computed:.2f} x | {shown.get(processes, '')} |")


if __name__ == "__main__":
    main()
