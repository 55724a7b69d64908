"""The card of the threat model: what each attack may do, and how it does it."""

from collections.abc import Iterator, Sequence

from lightning_rob.report.arguments import Call, call, short
from lightning_rob.report.records import Record
from lightning_rob.report.table import Cell, Table
from lightning_rob.report.words import NONE, target

CAPTION = "The threat, and every argument of every attack"


def card(records: Sequence[Record], caption: str = CAPTION) -> Table:
    """What each attack was made with, a row each."""
    columns = ["attack", "on", "method", "norm", "eps>", "steps>", "step size>", "all the rest"]
    rows: list[list[Cell | str]] = []
    for record in filter(lambda r: r.an_attack, records):
        rows += _methods(record.name, target(record.target), call(record.attack))
    return Table(caption, columns, rows, kind="fine")


def _methods(name: str, on: str, method: Call) -> Iterator[list[Cell | str]]:
    """A row for an attack and for each attack inside it."""
    threat = method.threat.arguments
    lengths = [
        short(found.get(key, NONE))
        for found, key in (
            (threat, "norm"),
            (threat, "eps"),
            (method.arguments, "steps"),
            (method.arguments, "step_size"),
        )
    ]
    yield [name, on, method.name, *lengths, method.others]
    for i, part in enumerate(method.parts, start=1):
        yield from _methods(f"{name}, part {i}", on, part)
