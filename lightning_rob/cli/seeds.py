"""`lightning-rob fit --seeds`: one training a seed, and the mean over them with its interval."""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from lightning_rob.cli.options import join_values, option_types, parse_own
from lightning_rob.commands.config import SpreadConfig
from lightning_rob.commands.report.blocks import WHOLE
from lightning_rob.commands.report.runs import AttackResult, find_runs
from lightning_rob.commands.thresholds import parse_thresholds, violations
from lightning_rob.recipes.plugins import expand_recipe
from lightning_rob.recipes.safe_yaml import load
from lightning_rob.runtime.errors import Fault, InputError, visible
from lightning_rob.runtime.files import atomic_write_text, is_file
from lightning_rob.runtime.spread import ending_children, run_child, spread
from lightning_rob.tables import CLEAN, literal

MOST = 10_000  # seeds


@dataclass(frozen=True)
class SeedsConfig(SpreadConfig):
    """Train a recipe once for each seed, test it, and give mean and interval over the seeds.

    Args:
        seeds: such as 0..4 or 0,3,7
        workers: trainings side by side on this machine
        ray: trainings side by side on a Ray cluster: RAY_ADDRESS, or this machine
        part: i/n, the part of this process alone, such as 3/8 in an array of jobs
    """

    positional: ClassVar[str] = ""
    usage: ClassVar[str] = "--seeds LIST [options of fit]"

    seeds: str | int = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.numbers) < 2:
            raise ValueError(f"--seeds takes two seeds or more, such as 0..4, got {self.seeds!r}")

    @property
    def numbers(self) -> list[int]:
        try:
            ends = [part.partition("..") for part in str(self.seeds).split(",")]
            spans = [range(int(a), int(b if dots else a) + 1) for a, dots, b in ends]
            # Lightning refuses such a seed; and 0..2026113000 would fill the memory.
            if min(span.start for span in spans) < 0 or sum(b.stop - b.start for b in spans) > MOST:
                raise ValueError
            # One given twice is one training.
            return [*dict.fromkeys(seed for span in spans for seed in span)]
        except ValueError:
            limit = f"--seeds are such as 0..4 or 0,3,7, at most {MOST}, got {self.seeds!r}"
            raise ValueError(limit) from None


def fit_seeds(args: Sequence[str]) -> None:
    """Run `fit` with its test once for each seed that has no test yet; print the means."""
    joined = join_values(args, option_types(SeedsConfig))
    names = {one.name for one in fields(SeedsConfig)}
    own = [arg for arg in joined if arg.removeprefix("--").partition("=")[0] in names]
    # Here, for a part or a training would end with the code of a fault.
    limits = [arg for arg in joined if arg.startswith("--fail_under=")]
    rest = [arg for arg in joined if arg not in (*own, *limits)]
    if taken := [arg for arg in rest if arg.startswith(("--seed_everything", "--trainer.logger"))]:
        raise InputError(f"--seeds sets seeds and folders: leave out {taken[0]}")
    config = parse_own("fit", SeedsConfig, own)
    thresholds = parse_thresholds(limits[-1].partition("=")[2]) if limits else {}
    recipes = [
        Path(arg.partition("=")[2]).stem for arg in rest if arg.startswith(("--config", "-c"))
    ]
    # Other options or another recipe are another experiment: its trainings must not count as done.
    values = [arg.partition("=")[2] for arg in rest]
    files = [Path(value) for value in values if is_file(value)]
    known = json.dumps([rest, *map(_content, files)], default=str)
    digest = hashlib.sha256(known.encode()).hexdigest()[:8]
    folder = Path("logs") / "_".join([*recipes, "seeds", digest])
    if config.processes:
        spread(["fit", *own, *rest], config.processes, ray=config.ray > 0)
    with ending_children():
        failed = [seed for seed in config.own(config.numbers) if not _trained(folder, seed, rest)]
    if config.part is None:
        _summarize(folder, config.numbers)
    if failed:
        raise Fault(f"seeds {', '.join(map(str, failed))} failed; the same command goes on")
    if config.part is None and _below(folder, config.numbers, thresholds):
        raise SystemExit(1)


def _below(folder: Path, seeds: Sequence[int], thresholds: Mapping[str, float]) -> bool:
    """Print the figures of each seed that are beyond a limit; return whether there are any."""
    lines = []
    for seed in seeds:
        found = [one for one in tested(folder, seed) if one.target == WHOLE]
        figures = {f"test/robust/{one.name}": one.accuracy for one in found}
        if (clean := figures.get(f"test/robust/{CLEAN}")) is not None:
            figures["test/acc"] = clean
        lines += [f"seed {seed}: {line}" for line in violations(thresholds, figures, "test")]
    for line in lines:
        print(visible(f"lightning-rob: {line}"), file=sys.stderr)
    return bool(lines)


def _content(path: Path) -> Any:
    """Return the text of a file, and a recipe with the plug-ins that it lists."""
    text = path.read_text("utf-8", "replace")
    try:
        return text, expand_recipe(load(text), Path.cwd())
    except (InputError, OSError):  # no YAML; or the training refuses it
        return text


def _trained(folder: Path, seed: int, rest: Sequence[str]) -> bool:
    if tested(folder, seed):
        return True
    place = [f"--trainer.logger.save_dir={folder}", f"--trainer.logger.version=seed_{seed}"]
    last = folder / f"seed_{seed}" / "checkpoints" / "last.ckpt"
    if last.exists() and not any(arg.startswith("--ckpt_path") for arg in rest):
        place.append(f"--ckpt_path={last}")  # of a training that was interrupted
    line = ["fit", *rest, f"--seed_everything={seed}", "--test_after_fit=true", *place]
    code, _ = run_child([sys.executable, "-m", "lightning_rob", *line])
    return code == 0 and bool(tested(folder, seed))


def tested(folder: Path, seed: int) -> list[AttackResult]:
    """Return the results of the last test of a seed's run; none without one."""
    try:
        runs = find_runs([folder])
    except FileNotFoundError:  # no folder; or no records in it: the first training was interrupted
        return []
    own = [run.evaluations for run in runs if f"seed_{seed}" in run.folder.parts]
    return own[0].last() if own and "test" in own[0].by_stage else []


def _summarize(folder: Path, seeds: Sequence[int]) -> None:
    """Print and write the mean of each attack's accuracy over the seeds, with its t interval."""
    from lightning_rob.metrics import student  # imports torch

    by_seed = {seed: found for seed in seeds if (found := tested(folder, seed))}
    if not by_seed:
        return
    table = Table(title=f"{len(by_seed)} trainings", title_justify="left")
    table.add_column("attack", no_wrap=True)
    for head in ("on", "images", "mean", "95 % over seeds", *(f"seed {seed}" for seed in by_seed)):
        table.add_column(head)
    rows = []
    for key in dict.fromkeys(one.key for found in by_seed.values() for one in found):
        own = {seed: one for seed, found in by_seed.items() for one in found if one.key == key}
        values = [one.accuracy for one in own.values()]
        low, high = student(values) if len(values) > 1 else (0.0, 1.0)
        low, high = max(low, 0.0), min(high, 1.0)
        name, target = key
        images = [*dict.fromkeys(one.n for one in own.values())]  # several if `max_images` differed
        row = {"name": name, "target": target, "accuracies": values, "seeds": [*own]}
        rows.append(row | {"images": images, "mean": fmean(values), "interval": [low, high]})
        each = [f"{own[seed].accuracy:.1%}" if seed in own else "" for seed in by_seed]
        shown = ", ".join(map(str, images)), f"{fmean(values):.1%}"
        span = f"{100 * low:.1f} … {100 * high:.1f}"
        table.add_row(literal(name), target.replace("_", " "), *shown, span, *each)
    Console().print(table)
    atomic_write_text(folder / "seeds.json", json.dumps(rows, indent=1) + "\n")
    print(visible(f"Wrote {folder}/seeds.json; lightning-rob report {folder} has all runs"))
