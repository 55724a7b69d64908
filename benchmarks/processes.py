"""How an evaluation scales with processes: AutoAttack on groups of digits.

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/processes.py

Times each group of a digits network in one process, then prints the wall time on several: computed
from these times for groups that are dealt beforehand and for groups that a process takes when it is
ready, and measured on one and two processes of this machine. The images stand by class, so that the
groups differ in cost.
"""

import argparse
import time

import torch
from autoattack import digits, trained
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_rob import AutoAttack, RobustEval, Single, Threat, evaluate

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


def sorted_digits(count):
    x, y = digits(train=False)
    x, y = x[:count], y[:count]
    order = y.argsort(stable=True)
    return TensorDataset(x[order], y[order])


def group_times(net, attack, data, size):
    found, began = [], time.perf_counter()
    for start in range(0, len(data), size):
        part = DataLoader(TensorDataset(*data[start : start + size]), size)
        evaluate(Single(net), {"attack": attack}, part, progress=False)
        found.append(time.perf_counter() - began)
        began = time.perf_counter()
    return found


def wall(times, processes, taken):
    """The time at which the last process is done."""
    busy = [0.0] * processes
    for number, seconds in enumerate(times):
        busy[busy.index(min(busy)) if taken else number % processes] += seconds
    return max(busy)


def measured(net, attack, data, size, processes):
    options = {"strategy": "ddp_fork", "devices": 2} if processes == 2 else {"devices": 1}
    callback = RobustEval({"attack": attack}, group_size=size)
    trainer = Trainer(accelerator="cpu", callbacks=[callback], **options, **QUIET)
    began = time.perf_counter()
    trainer.test(Plain(net), DataLoader(data, size), verbose=False)
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--group_size", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    threat = Threat("linf", 0.2)
    net, data = trained(threat, 5, standard=False).eval(), sorted_digits(args.images)
    attack = AutoAttack(threat)
    times = group_times(net, attack, data, args.group_size)
    total = sum(times)
    print(f"{len(times)} groups, {min(times):.1f} to {max(times):.1f} s each\n")
    print("| processes | dealt, computed | taken, computed | taken, measured |\n|--:|--:|--:|--:|")
    one = measured(net, attack, data, args.group_size, 1)
    for processes in (1, 2, 4, 8, 16):
        computed = [total / wall(times, processes, taken) for taken in (False, True)]
        shown = one / measured(net, attack, data, args.group_size, 2) if processes == 2 else None
        shown = 1.0 if processes == 1 else shown
        print(f"| {processes} | {computed[0]:.2f} x | {computed[1]:.2f} x |", end=" ")
        print("" if shown is None else f"{shown:.2f} x", "|")


if __name__ == "__main__":
    main()
