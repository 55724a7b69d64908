"""Measure every promise of docs/running.md again and write its tables.

python benchmarks/reliability.py                  # all, half an hour on two cores
python benchmarks/reliability.py --only audit     # one part; the others' tables do not change
"""

import argparse
import importlib
import os
import platform
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

PAGE = Path(__file__).parent.parent / "docs" / "running.md"
PARTS = ("test", "faults", "trust", "monitor", "outages", "audit", "scale")


def measured(part: str) -> list[tuple[str, str, str]]:
    """Return the rows of a part: promise, target and result."""
    sys.path.insert(0, str(Path(__file__).parent))
    rows: list[tuple[str, str, str]] = importlib.import_module(f"reliability_{part}").figures()
    return rows


def table(part: str, rows: list[tuple[str, str, str]]) -> str:
    """Return the rows in Markdown, with date and machine of the measurement."""
    import torch

    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    command = f"`python benchmarks/reliability.py --only {part}`, {date.today()}, {machine}"
    cells = [
        f"| {' | '.join(text.replace('|', '/') for text in row)} |"
        for row in [("what", "aim", "found"), ("---", "---", "---"), *rows]
    ]
    return "\n".join([f"Measured by {command}.", "", *cells])


def written(page: str, part: str, text: str) -> str:
    """Return the page with the part's new table in place of the old one."""
    begin, end = f"<!-- {part} -->", f"<!-- end of {part} -->"
    if begin not in page or end not in page:
        raise ValueError(f"{PAGE} has no place for {part}: write {begin} and {end}")
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    return pattern.sub(lambda _: f"{begin}\n{text}\n{end}", page)


def main() -> None:
    """Measure the parts one after another, each in its own process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append")
    for part in parser.parse_args().only or PARTS:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            rows = pool.submit(measured, part).result()
        PAGE.write_text(written(PAGE.read_text(), part, table(part, rows)))
        for row in rows:
            print(*row, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
