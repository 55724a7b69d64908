"""Effect of hostile files and users' mistakes on the command: every case is run.

python -m benchmarks.reliability_trust
"""

import os
import random
import tempfile
from contextlib import chdir, suppress
from pathlib import Path

# Every command here reads it: the bad inputs name small networks of the tests.
os.environ.setdefault("LIGHTNING_ROB_ALLOW_IMPORT", "tests")

from lightning_rob.nets.weights import read_file
from lightning_rob.runtime.identity import cache_key
from tests.cli.bad_inputs import CASES, complaint, trained
from tests.cli.hostile import FILES, outcome

FLIPS = 200


def flips_unseen(count: int, seed: int = 0) -> int:
    """Return how many flipped bits of a checkpoint, at random places, change what is loaded."""
    chance, unseen = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.ckpt"
        path.write_bytes(trained())
        whole = fingerprint_of(read_file(path))
        places = chance.sample(range(8 * len(trained())), count)
        for byte, bit in (divmod(place, 8) for place in places):
            content = bytearray(trained())
            content[byte] ^= 1 << bit
            path.write_bytes(content)
            with suppress(ValueError):
                unseen += fingerprint_of(read_file(path)) != whole
    return unseen


def fingerprint_of(content: object) -> str:
    return cache_key(content=content)


def hostile() -> tuple[int, int]:
    """Return how many hostile files were run, and how many were refused with exit code 2."""
    run = refused = 0
    for name in FILES:
        with tempfile.TemporaryDirectory() as folder:
            ran, code, _ = outcome(name, Path(folder))
        run, refused = run + ran, refused + (code == 2)
    return run, refused


def complaints() -> dict[str, str]:
    """Return the bad inputs that did not get one clear line and exit code 2, with their output."""
    found = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            if told := complaint(name, Path(folder)):
                found[name] = told
    return found


def figures() -> list[tuple[str, str, str]]:
    """Return each promise with target and result."""
    run, refused = hostile()
    wrong = complaints()
    for name, told in wrong.items():
        print(f"{name}: {told}")
    files, cases = len(FILES), len(CASES)
    return [
        (
            "flipped bits of a checkpoint after which other weights are loaded",
            f"0/{FLIPS}",
            f"{flips_unseen(FLIPS)}/{FLIPS}",
        ),
        ("hostile files of which anything was run", f"0/{files}", f"{run}/{files}"),
        ("hostile files refused, exit code 2", f"{files}/{files}", f"{refused}/{files}"),
        (
            "bad inputs with one clear line, exit code 2",
            f"{cases}/{cases}",
            f"{cases - len(wrong)}/{cases}",
        ),
    ]


if __name__ == "__main__":
    for what, target, found in figures():
        print(f"{what}: {found} (aimed at {target})")
