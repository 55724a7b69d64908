"""Pieces of recipes, processes of their own, and records, each in a line."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.schema import checked

ROOT = Path(__file__).parent.parent
CKPT = "run/version_0/checkpoints/last.ckpt"


def spec(kind: str, /, **options) -> dict:
    """A class and its arguments, as recipes name them."""
    return {"class_path": kind, "init_args": options}


def adam() -> dict:
    return spec("torch.optim.Adam", lr=0.01)


def plugged(*callbacks: dict) -> list[str]:
    """The options that add callbacks."""
    return [f"--trainer.callbacks+={json.dumps(callback)}" for callback in callbacks]


def python(*args: str, cwd: Path = ROOT, **env: str) -> str:
    """What an interpreter of its own prints, which ends well."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env
    options = {"capture_output": True, "text": True, "timeout": 600, "cwd": cwd}
    done = subprocess.run([sys.executable, *map(str, args)], env=environment, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shell(*args: str) -> None:
    """The command in a process of its own."""
    python("-m", "lightning_rob", *args)


def lines_of(file: Path) -> list[dict]:
    """The records in a file, which follow the schema."""
    return list(map(checked, file.read_text().splitlines()))


def records(folder: Path) -> list[dict]:
    return lines_of(folder / "run/version_0/robust.jsonl")
