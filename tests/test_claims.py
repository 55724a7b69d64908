"""Table, count and picture of docs/reproduction.md are those of the file of claims."""

import re
import runpy
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
OF = runpy.run_path(str(ROOT / "benchmarks/claims.py"))
CLAIMS, PAGE = OF["read"](), OF["PAGE"].read_text()
WORDS = 40  # of a cell


def test_the_page_is_written_from_the_file():
    assert OF["page"](PAGE, CLAIMS) == PAGE, "run python benchmarks/claims.py"


def test_the_picture_shows_the_file():
    assert Image.open(OF["PICTURE"]).text["Claims"] == OF["drawn"](CLAIMS)


@pytest.mark.parametrize("change", [{"verdict": "open"}, {"seeds": 3}, {"same": []}])
def test_a_change_of_a_claim_is_seen(change):
    one = next(c for c in CLAIMS if c["seeds"] == 1 and c["verdict"] == "holds")
    changed = [c | change if c is one else c for c in CLAIMS]
    assert OF["page"](PAGE, changed) != PAGE and OF["drawn"](changed) != OF["drawn"](CLAIMS)


def test_the_count_is_that_of_the_tables():
    numbers = re.search(r"(\d+) of (\d+) claims hold, (\d+) fail,\s+and (\d+) are open", PAGE)
    tables = PAGE.partition("<!-- begin tables -->")[2].partition("<!-- end tables -->")[0]
    rows = re.findall(r"^\| \[.*?\]\(#([\w-]+)\) \| \*\*(\w+)\*\*", tables, re.M)
    verdicts = [verdict for _, verdict in rows]
    found = [verdicts.count("holds"), len(rows), verdicts.count("fails"), verdicts.count("open")]
    assert [int(number) for number in numbers.groups()] == found
    assert [name for name, _ in rows] == [claim["id"] for claim in CLAIMS]


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim["id"] for claim in CLAIMS])
def test_a_claim_is_short_and_known(claim):
    for key in ("setting", "turns", "do"):
        assert 0 < len(claim[key].split()) <= WORDS, key
    assert claim["verdict"] in OF["VERDICTS"] and claim["group"] in OF["GROUPS"]
    assert claim["paper"] in OF["PAPERS"]
    assert [part for part in OF["PARTS"] if part in claim["same"]] == claim["same"]
    assert PAGE.count(f'<details id="{claim["id"]}"') == 1
