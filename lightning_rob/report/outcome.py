"""The figures of one evaluation: which to cite, what speaks against them, and the table."""

import math
from collections.abc import Iterator, Sequence

from lightning_rob.report.arguments import threat_of
from lightning_rob.report.blocks import Block, Headline, Text
from lightning_rob.report.records import WHOLE, Record
from lightning_rob.report.table import Cell, Table
from lightning_rob.report.words import (
    between,
    images,
    line_name,
    listed,
    percent,
    split_of,
    target,
)

FEW = 100  # images below which a figure is hardly one
SCALE = Cell("", small="0 to 100 %")  # the heading of a column that only the page has
SUITE = "callbacks/rec_suite.yaml"


def outcome(final: Sequence[Record]) -> Iterator[Block]:
    """The figure to cite, what speaks against it, and the table."""
    cite = cited(final)
    if cite and math.isfinite(cite.accuracy):
        clean = [r for r in final if r.key == ("clean", WHOLE)]
        yield Headline(
            percent(cite.accuracy),
            _says(cite, final),
            [(percent(r.accuracy), "without an attack.") for r in clean],
        )
    yield from (Text(text, "warning") for text in warnings(final))
    yield results(final)


def cited(final: Sequence[Record]) -> Record | None:
    """The per-image worst, or the only attack there was."""
    attacks = [r for r in final if r.an_attack and r.target == WHOLE]
    worst = [r for r in final if r.key == ("worst", WHOLE)]
    return next(iter(worst or (attacks if len(attacks) == 1 else [])), None)


def threats(record: Record, final: Sequence[Record]) -> list[str]:
    """What the adversary of a figure may do; for "worst", of all attacks it is over."""
    if record.name != "worst":
        return [threat_of(record.threat)] if record.threat else []
    over = [r for r in final if r.an_attack and r.target == record.target]
    return list(dict.fromkeys(threat_of(r.threat) for r in over if r.threat))


def _says(cite: Record, final: Sequence[Record]) -> str:
    of = f"{images(cite.n)} {split_of(cite.stage)} images"
    within = f", within {listed(threats(cite, final))}" if threats(cite, final) else ""
    span = f"; 95 % interval {between(cite)}" if between(cite) else ""
    if cite.an_attack or len(cite.over) == 1:
        return f"of {of} under {listed(cite.over) or cite.name} alone{within}{span}."
    by = f"each counted under the worst of {listed(cite.over)} for it"
    return f"of {of}, {by}{within}{span}. This is the figure to cite."


def warnings(final: Sequence[Record]) -> Iterator[str]:
    """What a reader should know before believing the table."""
    attacks = [r for r in final if r.an_attack and r.target == WHOLE]
    if final[0].stage != "test":
        yield (
            f"these are figures of the {split_of(final[0].stage)} images at epoch "
            f"{final[0].epoch}; no test is recorded."
        )
    yield from few(final)
    if not attacks:
        yield f"no attack on the whole defense is recorded. Add {SUITE}."
    elif len(attacks) == 1:
        yield (
            f"{attacks[0].name} is the only attack. Accuracy under one attack is an upper bound "
            f"of robustness; another may find more. Add {SUITE}."
        )
    if unknown := [line_name(r.key) for r in final if math.isnan(r.accuracy)]:
        yield f"no number was recorded for {listed(unknown)}."
    over = {threat for r in attacks for threat in threats(r, final)}
    if len(over) > 1:
        yield f"worst mixes attacks of different threats: {listed(sorted(over))}."


def few(records: Sequence[Record]) -> Iterator[str]:
    """What to know of figures of few images."""
    fewest = min(r.n for r in records)
    if fewest < FEW:
        yield (
            f"only {fewest} images were evaluated, so chance alone moves a figure by many points. "
            f"Take at least {FEW}."
        )


def results(final: Sequence[Record]) -> Table:
    """A row per attack; the one to cite stands out."""
    stage, cite = split_of(final[0].stage), cited(final)
    columns: list[Cell | str] = [
        "attack",
        "on",
        "accuracy>",
        "95 % interval>",
        SCALE,
        "images>",
        "seconds>",
        "threat",
    ]
    rows: list[list[Cell | str]] = [
        [
            r.name,
            target(r.target),
            percent(r.accuracy),
            between(r),
            Cell("", shade=r.accuracy, span=r.interval if between(r) else None),
            images(r.n),
            f"{r.seconds:,.1f}" if r.seconds else "",
            listed(threats(r, final)),
        ]
        for r in final
    ]
    strong = frozenset(i for i, r in enumerate(final) if r is cite)
    when = "" if stage == "test" else f" at epoch {final[0].epoch}"
    caption = f"Accuracy on the {stage} images{when}"
    return Table(caption, columns, rows, strong, kind="results")
