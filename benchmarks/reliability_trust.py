"""What strangers' files and users' slips do to the command: all of it, really tried.

python -m benchmarks.reliability_trust
"""

import os
import random
import tempfile
from contextlib import chdir
from pathlib import Path

# Read by every command that is run here: the bad inputs name small networks of the tests.
os.environ.setdefault("LIGHTNING_ROB_ALLOW_IMPORT", "tests")

from lightning_rob.files import check_manifest, write_manifest
from tests.cli.bad_inputs import CASES, complaint, trained
from tests.cli.hostile import FILES, outcome

FLIPS = 200


def flips_found(count: int, seed: int = 0) -> int:
    """How many flipped bits of a checkpoint its manifest finds, each at a place of its own."""
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
    """How many hostile files were run, and how many were refused with exit code 2."""
    run = refused = 0
    for name in FILES:
        with tempfile.TemporaryDirectory() as folder:
            ran, code, _ = outcome(name, Path(folder))
        run, refused = run + ran, refused + (code == 2)
    return run, refused


def complaints() -> dict[str, str]:
    """The bad inputs that did not get one clear line and exit code 2, and what they got."""
    found = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            if told := complaint(name, Path(folder)):
                found[name] = told
    return found


def figures() -> list[tuple[str, str, str]]:
    """What is claimed, the figure aimed at, and the figure found."""
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
