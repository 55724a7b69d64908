"""Clock, networks and table shared by the benchmarks."""

import os
import platform
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lightning_rob.cli.main import tune_process
from lightning_rob.data import Patches10
from lightning_rob.nets import ResNet20

sys.path.insert(0, str(Path(__file__).parent.parent))  # for tests.plain and tests.counting
from tests.counting import kept_for_gradients

tune_process()


def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds(work):
    """Return the result of the work and its seconds: of all processor cores, or on the GPU."""
    if torch.cuda.is_available():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        result = work()
        end.record()
        torch.cuda.synchronize()
        return result, begin.elapsed_time(end) / 1e3
    began = time.process_time()
    result = work()
    return result, time.process_time() - began


def in_turn(contenders, rounds):
    """Return each contender's last result, seconds of every round, and bytes kept for gradients.

    The bytes are counted in a warm-up round.
    """
    times, results, kept = {name: [] for name in contenders}, {}, {}
    with Progress(*Progress.get_default_columns(), transient=True) as bar:
        told = bar.add_task("", total=(rounds + 1) * len(contenders))
        for again in range(rounds + 1):
            for name, work in contenders.items():
                bar.update(told, description=str(name))
                if again:
                    results[name], took = seconds(work)
                    times[name].append(took)
                else:
                    kept[name] = kept_for_gradients(work)
                bar.advance(told)
    return results, times, kept


def ratio(own, base):
    """Return the median over rounds of the ratio of `own` to `base` in the same round."""
    return statistics.median(a / b for a, b in zip(own, base, strict=True))


def machine():
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    threads = "" if torch.cuda.is_available() else f", {torch.get_num_threads()} threads"
    return f"{name}{threads}, torch {torch.__version__}"


def photographs(train, count):
    """Return images [count,3,32,32] and labels [count] of Patches10."""
    data = Patches10(val_size=10, train_size=count, test_size=count)
    data.setup("fit" if train else "test")
    items = data.parts["train" if train else "test"]
    rows = [items[i] for i in range(len(items))]
    x, y = torch.stack([row[0] for row in rows]), torch.tensor([int(row[1]) for row in rows])
    return x.to(device()), y.to(device())


def trained(seed, epochs=4, count=3000, make=ResNet20):
    """Train a network that classifies the photographs and is a little robust."""
    torch.manual_seed(seed)
    net, (x, y) = make().to(device()), photographs(True, count)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    steps = epochs * -(-len(x) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            images = x[rows] + 8 / 255 * torch.randn_like(x[rows])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(images), y[rows]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def printed(title, columns, rows):
    table = Table(title=f"{title}; {machine()}", title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column != columns[0] else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
    sys.stdout.flush()
