"""Promises of `test`: the same rows when killed and resumed, on any number of processes; intervals.

python benchmarks/reliability_test.py
"""

import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import yaml

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # a process that has used several threads cannot be forked

Row = tuple[str, str, str]
SIZES, WORLDS = (1, 2, 7, 10, 33, 64), (1, 2, 3, 4)
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def _attack(kind: str, **options: object) -> dict:
    init = {"threat": {"norm": "linf", "eps": "8/255"}, "steps": 10, "step_size": "2/255"}
    return {"class_path": f"lightning_rob.attacks.{kind}", "init_args": init | options}


def _recipe(folder: Path, **attack: object) -> Path:
    """Train two convolutional networks with BatchNorm on photographs by BAT, an epoch each."""
    attacks = {"adaptive_pgd": _attack("PGD", **attack), "arc": _attack("ARC", step_size="8/255")}
    logger = {
        "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
        "init_args": {"save_dir": str(folder), "name": "run"},
    }
    content = {
        "seed_everything": 0,
        "model": {
            "class_path": "BAT",
            "init_args": {
                "net": {"class_path": "SmallCNN", "init_args": {"channels": 3}},
                "epochs": 1,
                "probs": [0.6, 0.4],
                "attack": _attack("PGD", steps=1, step_size="8/255"),
            },
        },
        "data": {
            "class_path": "Patches10",
            "init_args": {
                "batch_size": 50,
                "eval_batch_size": 4,
                "train_size": 500,
                "val_size": 50,
                "test_size": 40,
            },
        },
        "trainer": {
            "max_epochs": 2,
            "logger": logger,
            "callbacks+": [
                {
                    "class_path": "lightning_rob.callbacks.RobustEval",
                    "init_args": {"attacks": attacks, "panel": 0, "group_size": 4},
                }
            ],
            **QUIET,
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def _main(*args: object) -> None:
    """Run a command line in this process, silently unless it fails."""
    from lightning_rob.cli import main

    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
            main([str(arg) for arg in args])
    except SystemExit as stop:
        if stop.code:
            raise RuntimeError(f"exit code {stop.code}: {told.getvalue()}") from stop


def _forked(work: object, wait: object = None) -> int:
    """Run in a child that has all imports already; SIGKILL it when `wait` returns."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work()
            code = 0
        finally:
            os._exit(code)
    if wait is not None:
        wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _trained(folder: Path) -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = _recipe(folder, restarts=2)
    _main("fit", "--config", recipe)
    return recipe, next(folder.glob("run/version_0/checkpoints/*.ckpt"))


def _tested(recipe: Path, checkpoint: Path, logs: Path) -> None:
    save = f"--trainer.logger.init_args.save_dir={logs}"
    _main("test", "--config", recipe, "--ckpt_path", checkpoint, save)


def _rows(logs: Path) -> bytes:
    (found,) = logs.glob("run/version_*/images/test-*.csv")
    return found.read_bytes()


def _moment(logs: Path, seconds: float, anywhere: bool) -> None:
    """Wait the given seconds, from the start or from the first batch."""
    limit = time.monotonic() + 60
    while not (anywhere or _batches(logs)) and time.monotonic() < limit:
        time.sleep(0.005)
    time.sleep(seconds)


def _attacking(logs: Path) -> float:
    """Return the seconds of a test's attacks."""
    (found,) = logs.glob("run/version_*/robust.jsonl")
    return sum(json.loads(line)["seconds"] for line in found.read_text().splitlines())


def _batches(logs: Path) -> int:
    """Return how many batches a test has recorded, each attack counted by itself."""
    recorded = b"".join(path.read_bytes() for path in logs.glob("unfinished/*/*.jsonl"))
    return recorded.count(b'"seconds"') - recorded.count(b'"name": "clean"')


def killed_and_resumed(trials: int, resumes: int, seed: int = 0) -> tuple[int, int, int]:
    """Return how many killed tests end in the same bytes, how many had started, and of how many.

    Args:
        trials: tests that are killed.
        resumes: how often each is killed; from the second time on a resumed test is killed.
        seed: of the moments.
    """
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe, checkpoint = _trained(folder)
        assert _forked(lambda: _tested(recipe, checkpoint, folder / "whole")) == 0
        whole, span = _rows(folder / "whole"), _attacking(folder / "whole")
        equal = partly = 0
        for trial in range(trials):
            logs, part = folder / f"trial{trial}", False
            for _ in range(resumes):
                moment = partial(_moment, logs, chance.uniform(0, span), anywhere=trial % 5 == 0)
                _forked(lambda at=logs: _tested(recipe, checkpoint, at), moment)
                part |= _batches(logs) > 0
            for path in logs.glob("run/version_*/images/test-*"):
                path.unlink()  # a test that had finished before the kill
            assert _forked(lambda at=logs: _tested(recipe, checkpoint, at)) == 0
            equal += _rows(logs) == whole and not list(logs.glob("unfinished/*"))
            partly += part
    return equal, partly, trials


def _evaluate_sizes(recipe: str, checkpoint: str, out: str) -> None:
    """Run each size of data set one after another, in every process."""
    from lightning_rob.cli import main

    for size in SIZES:
        options = [
            f"--data.init_args.test_size={max(size, 10)}",
            f"--trainer.logger.init_args.save_dir={out}/{size}",
            f"--trainer.callbacks.max_images={size}",
            "--trainer.strategy=ddp",
            f"--trainer.devices={os.environ['WORLD_SIZE']}",
        ]
        main(["test", "--config", recipe, "--ckpt_path", checkpoint, *options])


def worlds() -> tuple[int, int]:
    """Return how many pairs of processes and images give the rows of one process, and the total."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe, checkpoint = _trained(folder)
        for world in WORLDS:
            out = folder / str(world)
            command = ["torchrun", "--standalone", f"--nproc_per_node={world}", __file__, "--sizes"]
            subprocess.run([*command, recipe, checkpoint, out], check=True, capture_output=True)
        pairs = [(world, size) for world in WORLDS for size in SIZES]
        rows = {pair: _rows(folder / str(pair[0]) / str(pair[1])) for pair in pairs}
        exact = sum(rows[pair] == rows[1, pair[1]] for pair in pairs)
        whole = sum(rows[pair].count(b"\n") == pair[1] + 1 for pair in pairs)
    return min(exact, whole), len(pairs)


def coverage(draws: int = 10_000) -> list[tuple[str, int, float, float]]:
    """Return method, n, true accuracy and the coverage of the 95 % interval in `draws` runs."""
    import torch

    from lightning_rob.metrics import clopper_pearson, wilson

    chance, found = torch.Generator().manual_seed(0), []
    for n in (50, 200, 1000):
        for truth in (0.05, 0.4, 0.9):
            right = torch.rand(draws, n, generator=chance).lt(truth).sum(1)
            counts = right.unique(return_counts=True)
            for name, interval in (
                ("Wilson", lambda k, n=n: wilson(k / n, n)),
                ("Clopper-Pearson", lambda k, n=n: clopper_pearson(k, n)),
            ):
                held = 0
                for k, times in zip(*(part.tolist() for part in counts), strict=True):
                    low, high = interval(k)
                    held += times * (low <= truth <= high)
                found.append((name, n, truth, held / draws))
    return found


def training_untouched() -> tuple[int, int]:
    """Return how many of three methods end in the same bits with and without evaluation."""
    import torch

    ways = {
        "at": {"class_path": "AdversarialTraining", "init_args": {}},
        "bat": {"class_path": "BAT", "init_args": {"epochs": 1, "monitor": None}},
        "advrt": {"class_path": "AdversarialTraining", "init_args": {}},
    }
    equal = 0
    with tempfile.TemporaryDirectory() as name:
        for way, model in ways.items():
            ends = []
            for watched in (True, False):
                folder = Path(name) / f"{way}{watched}"
                folder.mkdir()
                content = yaml.safe_load(_recipe(folder).read_text())
                old = content["model"]["init_args"]
                kept = {"net": old["net"], "attack": old["attack"]}
                content["model"] = {**model, "init_args": {**kept, **model["init_args"]}}
                if way == "advrt":
                    content["model"]["init_args"]["defense"] = _random_transforms()
                    del content["trainer"]["callbacks+"][0]["init_args"]["attacks"]["arc"]
                if not watched:
                    content["trainer"]["callbacks+"] = []
                (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
                _main("fit", "--config", folder / "recipe.yaml")
                path = next(folder.glob("run/version_0/checkpoints/*.ckpt"))
                ends.append(torch.load(path, weights_only=True)["state_dict"])
            equal += all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    return equal, len(ways)


def _random_transforms() -> dict:
    transforms = [
        {"class_path": "lightning_rob.transforms.GaussianNoise"},
        {"class_path": "lightning_rob.transforms.HorizontalFlip"},
    ]
    return {
        "class_path": "lightning_rob.defenses.RandomTransforms",
        "init_args": {"transforms": transforms, "size": 2, "draws": 2},
    }


def outside(cases: int, norm: str, relative: bool = False) -> int:
    """Return the number of random cases with images outside the ball or bounds, or non-finite."""
    import torch
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    from lightning_rob import PGD, Ensemble, Threat

    torch.manual_seed(0)
    nets = [
        torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 10)
        )
        for _ in range(2)
    ]
    defense = Ensemble(nets, [0.7, 0.3])
    violations = 0

    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        eps=st.sampled_from([0.0, 1e-6, 1 / 255, 8 / 255, 0.3, 1.0, 100.0]),
        steps=st.integers(1, 3),
        share=st.sampled_from([0.01, 0.25, 1.0, 10.0]),
        scale=st.sampled_from([0.0, 1e-3, 0.5, 1.0]),
        options=st.fixed_dictionaries(
            {"random_start": st.booleans(), "keep_best": st.booleans(), "restarts": st.just(1)}
        ),
        seed=st.integers(0, 2**32),
    )
    def attacked(
        eps: float, steps: int, share: float, scale: float, options: dict, seed: int
    ) -> None:
        nonlocal violations
        chance = torch.Generator().manual_seed(seed)
        x = scale * torch.rand(3, 1, 8, 8, generator=chance)
        threat = Threat(norm, eps, relative=relative)
        attack = PGD(threat, steps, max(share * eps, 1e-9), **options)
        x_adv = attack(defense, x, torch.tensor([0, 3, 7]), chance)
        size = threat.size((x_adv - x).double())
        allowed = eps * (threat.size(x.double()) if relative else 1) * (1 + 1e-5) + 1e-6
        inside = bool((size <= allowed).all() and (x_adv >= 0).all() and (x_adv <= 1).all())
        violations += not (inside and x_adv.dtype == x.dtype)

    attacked()
    return violations


LEAVES = "leaves_nothing_behind or left_as_it_was"


def leaves_nothing_behind() -> tuple[int, int]:
    """Return how many tests of modes, gradients, buffers and random streams passed."""
    folders = ("tests/attacks", "tests/evaluation")
    command = [sys.executable, "-m", "pytest", "-q", "-k", LEAVES, *folders]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    if done.returncode > 1:  # no test was run
        raise RuntimeError(done.stdout + done.stderr)
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    return counts.get("passed", 0), sum(counts.values())


def figures() -> list[Row]:
    """Return each promise with target and result."""
    exact, pairs = worlds()
    print("worlds", exact, pairs, flush=True)
    once, again = killed_and_resumed(50, 1), killed_and_resumed(20, 2, seed=1)
    print("killed", once, again, flush=True)
    spans = coverage()
    least = {name: min(held for kind, _, _, held in spans if kind == name) for name, *_ in spans}
    same, ways = training_untouched()
    left, attacks = leaves_nothing_behind()
    norms = {"linf": ("linf", False), "l2": ("l2", False), "l2 relative": ("l2", True)}
    return [
        (
            f"`test` killed by SIGKILL at a random moment, run again: rows byte-identical "
            f"({once[1]} had left whole batches)",
            "50/50",
            f"{once[0]}/{once[2]}",
        ),
        (
            f"the resumed `test` killed as well, run a third time ({again[1]} had left batches)",
            "20/20",
            f"{again[0]}/{again[2]}",
        ),
        (
            f"rows on {WORLDS} processes x {SIZES} images: those of one process",
            f"{pairs}/{pairs}",
            f"{exact}/{pairs}",
        ),
        (
            "weights after training with and without attacks watching, bit by bit: AT, BAT, AdvRT",
            f"{ways}/{ways}",
            f"{same}/{ways}",
        ),
        (
            "tests that an attack leaves modes, gradients, buffers and the global stream alone",
            f"{attacks}/{attacks}",
            f"{left}/{attacks}",
        ),
        *(
            (f"PGD's images outside ball or box, hypothesis, {name}", "0/1000", f"{found}/1000")
            for name, found in ((name, outside(1000, *norm)) for name, norm in norms.items())
        ),
        *(
            (
                f"coverage of the 95 % interval, {name}, least of 9 settings x 10,000 simulations",
                ">= 94.5 %" if name == "Clopper-Pearson" else ">= 93 %",
                f"{100 * held:.1f} %",
            )
            for name, held in least.items()
        ),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sizes"]:
        _evaluate_sizes(*sys.argv[2:])
    else:
        for row in figures():
            print(*row, sep=" | ")
