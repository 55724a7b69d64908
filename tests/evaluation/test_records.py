"""Records: plain data that follows the schema, written completely or not at all."""

import math
import re

import torch

from lightning_rob.attacks import (
    PGD,
    TAA,
    Budgeted,
    CommonCorruption,
    PartialBatchAttack,
    Strongest,
    TransferFromStatic,
)
from lightning_rob.commands.report.runs import SCHEMA as REPORT_READS
from lightning_rob.evaluation.records import (
    SCHEMA,
    Result,
    append_records,
    measured,
    threat_model_card,
)
from lightning_rob.tables import table_text
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise
from tests.schema import SCHEMA as JSON_SCHEMA
from tests.schema import checked
from tests.tiny import ROOT

WHITE_BOX = PGD(Threat("linf", 0.1), 3, 0.05, draws=5, restarts=2)


def test_the_card_is_that_of_all_parts_of_an_attack():
    card = threat_model_card(TransferFromStatic(WHITE_BOX))
    assert [card[name] for name in ("steps", "restarts", "draws", "passes")] == [3, 2, 5, None]
    assert card["knowledge"] == "the defense before it adapts"
    card = threat_model_card(Budgeted(WHITE_BOX, 90))  # which decides the number of steps
    assert [card[name] for name in ("steps", "restarts", "draws", "passes")] == [None, 2, 5, 90]


def test_the_card_holds_all_that_an_attacker_knows():
    noise = CommonCorruption(GaussianNoise(0.1))
    for attack, kinds in (
        (WHITE_BOX, (PGD,)),
        (PartialBatchAttack(WHITE_BOX, natural=WHITE_BOX), (PGD,)),
        (PartialBatchAttack(WHITE_BOX, natural=noise), (PGD, CommonCorruption)),
        (Strongest((TAA(WHITE_BOX), WHITE_BOX)), (TAA, PGD)),
    ):
        known = "; ".join(kind.knowledge for kind in kinds)
        assert threat_model_card(attack)["knowledge"] == known


def test_a_result_is_the_same_after_writing_and_reading(tmp_path):
    result = Result("pgd", 0.25, (0.125, 0.5), 8, 1.5, {"stage": "test", "epoch": 3})
    none = measured("arc", torch.zeros(0), 0.0, {"stage": "test"})
    append_records(tmp_path / "a.jsonl", (one.record() for one in (result, none)))
    first, second = map(checked, (tmp_path / "a.jsonl").read_text().splitlines())
    assert Result.from_record(first) == result
    assert JSON_SCHEMA["properties"]["schema"]["const"] == SCHEMA == REPORT_READS
    assert second["accuracy"] is None
    assert math.isnan(Result.from_record(second).accuracy)


def test_the_page_and_the_schema_name_the_same_fields():
    page = (ROOT / "docs/records.md").read_text().partition("An `accuracy` has")[2]
    cells = [line.split("|")[1] for line in page.partition("\n## ")[0].splitlines() if "|" in line]
    described = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert described == JSON_SCHEMA["$defs"]["accuracy"]["properties"].keys() - {"kind"}


def test_a_narrow_terminal_cuts_no_number():
    result = Result("adaptive_pgd", 1.0, (0.83, 0.97), 1000, 1.5, {})
    lines = table_text("a", [result], 34).split("\n")
    columns = zip(*(line.split("│")[1:-1] for line in lines if "│" in line), strict=True)
    folded = ["".join(map(str.strip, parts)) for parts in columns]
    assert folded[1:] == ["100.0%", "83.0 …97.0", "1000"]
