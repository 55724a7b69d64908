"""Effect of hostile files and users' mistakes on the command: every case is run.

python -m benchmarks.reliability_trust
"""

import os
import random
import tempfile
from contextlib import chdir
from pathlib import Path

# Every command here reads it: the bad inputs name small networks of the tests.
os.environ.setdefault("LIGHTNING_ROB_ALLOW_IMPORT", "tests")

from lightning_rob.runtime.files import check_manifest, write_manifest
from tests.cli.bad_inputs import CASES, complaint, trained
from tests.cli.hostile import FILES, outcome

FLIPS = 200


def flips_found(count: int, seed: int = 0) -> int:
    """Return how many flipped bits of a checkpoint its manifest detects, each at another place."""
    chance, found = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.ckpt"
        path.write_bytes(trained())
        write_manifest(path)
        check_manifest(path)
        places = chance.sample(range(8 * len(trained())), count)
        for byte, bit in (divmod(place, 8) for place in places):
            content = bytearray(trained())
            content[byte] ^= 1 << bit
            path.write_bytes(content)
            try:
                check_manifest(path)
            except ValueError:
                found += 1
    return found


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
            "flipped bits of a checkpoint that are found",
            f"{FLIPS}/{FLIPS}",
            _of(flips_found(FLIPS)),
        ),
        ("hostile files of which anything was run", f"0/{files}", f"{run}/{files}"),
        ("hostile files refused, exit code 2", f"{files}/{files}", f"{refused}/{files}"),
        (
            "bad inputs with one clear line, exit code 2",
            f"{cases}/{cases}",
            f"{cases - len(wrong)}/{cases}",
        ),
    ]


def _of(found: int) -> str:
    return f"{found}/{FLIPS}"


if __name__ == "__main__":
    for what, target, found in figures():
        print(f"{what}: {found} (aimed at {target})")
