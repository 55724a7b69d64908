"""Put the tables of the leaderboards into docs/leaderboard.md, and their JSON files beside it.

    python benchmarks/leaderboard/publish.py

A table stands between <!-- NAME --> and <!-- end -->; its leaderboard is the folder NAME.
"""

import argparse
import re
import shutil
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/leaderboard.md"


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()

    def tables(mark):
        name = mark[1]
        if not (HERE / name / "leaderboard.md").exists():  # it was made on another machine
            return mark[0]
        text = (HERE / name / "leaderboard.md").read_text().split("\n", 1)[1].strip()
        text = re.sub(r"^## ", "### ", text, flags=re.M)
        shutil.copy(HERE / name / "leaderboard.json", PAGE.with_name(f"leaderboard_{name}.json"))
        return f"<!-- {name} -->\n\n{text}\n\n<!-- end -->"

    found = re.sub(r"<!-- (\w+) -->.*?<!-- end -->", tables, PAGE.read_text(), flags=re.S)
    PAGE.write_text(found)


if __name__ == "__main__":
    main()
