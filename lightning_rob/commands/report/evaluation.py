"""One evaluation of a run: the accuracy to cite, what limits it, tables; the curve of several."""

import math
from collections.abc import Iterator, Mapping, Sequence

from lightning_rob.commands.report.blocks import (
    NONE,
    WHOLE,
    WORST,
    Block,
    Cell,
    Curve,
    Headline,
    Line,
    Paragraph,
    Table,
    Warned,
    accuracy_cell,
    between,
    extent,
    line_name,
    listed,
    percent,
    split_of,
    table,
)
from lightning_rob.commands.report.runs import AttackResult, Key
from lightning_rob.commands.specs import (
    Spec,
    arguments,
    class_name,
    inner_attacks,
    other_arguments,
    short,
    threat_of,
    threat_text,
)

FEW = 100  # images below which an accuracy is hardly one
LOUD = ("severe", "warning")  # findings that are warnings
WHICH = "docs/which_attack.md"
SUITE = (
    "the plug-in for its kind of defense, such as autoattack for a single network and rec_suite "
    f"for a randomized ensemble: see {WHICH}"
)
WIDTH, HEIGHT = 600, 200  # of the drawing, without the texts around it
COLORS = 8  # of the page
MANY_EPOCHS = 40
TICKS = 6
Series = Mapping[Key, Sequence[AttackResult]]


def evaluation(final: Sequence[AttackResult]) -> Iterator[Block]:
    """Yield the accuracy to cite, warnings about it, and the table."""
    cite = result_to_cite(final)
    if cite and math.isfinite(cite.accuracy):
        clean = [percent(r.accuracy) for r in final if r.key == ("clean", WHOLE)]
        beside = [(accuracy, "without an attack.") for accuracy in clean]
        yield Headline([(percent(cite.accuracy), _meaning(cite, final)), *beside])
    yield from map(Warned, _cautions(final))
    found = {one["text"]: one for result in final for one in result.findings}  # each once
    for one in found.values():
        text = f"{one['text']} {one['advice']}"
        yield Warned(text, "Finding") if one["severity"] in LOUD else Paragraph(text, "note")
    yield accuracy_table(final)


def result_to_cite(final: Sequence[AttackResult]) -> AttackResult | None:
    """Return the per-image worst, or the result of the only attack."""
    attacks = [r for r in final if r.is_attack and r.target == WHOLE]
    worst = [r for r in final if r.key == WORST]
    return next(iter(worst or (attacks if len(attacks) == 1 else [])), None)


def threats(result: AttackResult, final: Sequence[AttackResult]) -> list[str]:
    """Return the threat of a result; for "worst", those of all attacks it is over."""
    if result.name != "worst":
        return [threat_text(result.threat)] if result.threat else []
    over = [r for r in final if r.is_attack and r.target == result.target]
    return list(dict.fromkeys(threat_text(r.threat) for r in over if r.threat))


def _meaning(cite: AttackResult, final: Sequence[AttackResult]) -> str:
    of = f"{cite.n:,} {split_of(cite.stage)} images"
    within = f", within {listed(threats(cite, final))}" if threats(cite, final) else ""
    span = f"; 95 % interval {between(cite.interval)}" if cite.interval else ""
    if cite.is_attack or len(cite.over) == 1:
        return f"of {of} under {listed(cite.over) or cite.name} alone{within}{span}."
    by = f"each counted under the worst of {listed(cite.over)} for it"
    return f"of {of}, {by}{within}{span}. This is the accuracy to cite."


def _cautions(final: Sequence[AttackResult]) -> Iterator[str]:
    """Yield what a reader should know before trusting the table."""
    attacks = [r for r in final if r.is_attack and r.target == WHOLE]
    if final[0].stage != "test":
        yield (
            f"these are accuracies on the {split_of(final[0].stage)} images at epoch "
            f"{final[0].epoch}; no test is recorded."
        )
    yield from few_images(final)
    plug_in = next((r.plug_in for r in final if r.plug_in), "")
    advice = f"{plug_in}, the plug-in for its kind of defense: see {WHICH}" if plug_in else SUITE
    is_own = any(f"/{r.name}.yaml" in plug_in for r in final)
    advice = "" if is_own else f" Add {advice}."
    if not attacks:
        yield f"no attack on the whole defense is recorded.{advice}"
    elif len(attacks) == 1:
        yield (
            f"{attacks[0].name} is the only attack. Accuracy under one attack is an upper bound "
            f"of robustness; another may find more.{advice}"
        )
    if unknown := [line_name(r.key) for r in final if math.isnan(r.accuracy)]:
        yield f"no number was recorded for {listed(unknown)}."
    over = {threat for r in attacks for threat in threats(r, final)}
    if len(over) > 1:
        yield f"worst mixes attacks of different threats: {listed(sorted(over))}."


def few_images(results: Sequence[AttackResult]) -> Iterator[str]:
    """Yield a warning if an accuracy is of few images."""
    fewest = min(r.n for r in results)
    if fewest < FEW:
        yield (
            f"only {fewest} images were evaluated, so the choice of images alone moves an accuracy "
            f"by many points. Take at least {FEW}."
        )


def accuracy_table(final: Sequence[AttackResult]) -> Table:
    """Return a row per attack, that of the accuracy to cite in bold type."""
    stage, cite = split_of(final[0].stage), result_to_cite(final)
    scale = Cell("", small="0 to 100 %")  # the heading of a column that only the page has
    measured = ["accuracy>", "95 % interval>", scale, "images>", "seconds>"]
    rows = [
        [
            r.name,
            r.target.replace("_", " "),
            percent(r.accuracy),
            between(r.interval),
            Cell("", shade=r.accuracy, span=r.interval),
            f"{r.n:,}",
            f"{r.seconds:,.1f}" if r.seconds else "",
            listed(threats(r, final)),
        ]
        for r in final
    ]
    strong = [i for i, r in enumerate(final) if r is cite]
    epoch = "" if stage == "test" else f" at epoch {final[0].epoch}"
    caption = f"Accuracy on the {stage} images{epoch}"
    return table(caption, ["attack", "on", *measured, "threat"], rows, strong, "results")


def result_cell(result: AttackResult | None) -> Cell:
    """Return an accuracy above its interval; a dash without a result."""
    return accuracy_cell(result.accuracy, result.interval) if result else Cell(NONE)


def attack_table(
    results: Sequence[AttackResult],
    caption: str = "The threat, and every argument of every attack",
) -> Table:
    """Return the arguments of each attack, a row each."""
    columns = ["attack", "on", "method", "norm", "eps>", "steps>", "step size>", "other arguments"]
    rows = [row for r in results if r.is_attack for row in _attack_rows(r.name, r.target, r.attack)]
    return table(caption, columns, rows, kind="fine")


def _attack_rows(name: str, target: str, attack: Spec) -> Iterator[list[str]]:
    """Yield a row for an attack and for each attack inside it."""
    threat, own = arguments(threat_of(attack)), arguments(attack)
    pairs = ((threat, "norm"), (threat, "eps"), (own, "steps"), (own, "step_size"))
    shown = [short(v) if (v := found.get(key)) is not None else NONE for found, key in pairs]
    head = [name, target.replace("_", " "), class_name(attack.get("class_path"))]
    yield [*head, *shown, other_arguments(attack)]
    for i, part in enumerate(inner_attacks(attack), start=1):
        yield from _attack_rows(f"{name}, part {i}", target, part)


def best(series: Series) -> AttackResult | None:
    """Return the result with the best worst case, or the best under the only attack."""
    attacked = [records for key, records in series.items() if key[1] == WHOLE and key[0] != "clean"]
    ranked = series.get(WORST) or (attacked[0] if len(attacked) == 1 else [])
    known = [record for record in ranked if record.accuracy == record.accuracy]
    return max(known, key=lambda record: record.accuracy, default=None)


def curve(series: Series, by: str = "epoch", of: str = "validation") -> Curve:
    """Return the figure; of clean images the whole defense alone is shown."""
    shown = {k: records for k, records in series.items() if k[1] == WHOLE or k[0] != "clean"}
    epochs = sorted({record.epoch for records in shown.values() for record in records})
    first, span = epochs[0], max(epochs[-1] - epochs[0], 1)

    def place(epoch: int, share: float) -> tuple[float, float]:
        return WIDTH * (epoch - first) / span, HEIGHT * (1 - share)

    lines = []
    for i, (key, records) in enumerate(shown.items()):
        known = [r for r in records if r.accuracy == r.accuracy]  # a NaN has no place
        low, high = (
            [place(r.epoch, (r.interval or (r.accuracy, r.accuracy))[end]) for r in known]
            for end in (0, 1)
        )
        band = low + high[::-1] if key == WORST else []
        color = {"clean": "--grey", "worst": "--ink"}.get(key[0], f"--line-{i % COLORS}")
        points = [place(r.epoch, r.accuracy) for r in known]
        value = percent(records[-1].accuracy)
        lines.append(Line(line_name(key), value, color, key[1] != WHOLE, points, band))
    values = ", ".join(f"{line.name} {line.value}" for line in lines)
    alt = f"Accuracy on the {of} images by {by}, at the last {by}: {values}."
    sentences = ["The band is the 95 % interval of worst."] if WORST in shown else []
    if peak := best(series):
        was = f"{peak.name} was best at {by} {peak.epoch}: {percent(peak.accuracy)}."
        alt += f" {was}"
        sentences.append(f"The circle marks where {was.replace(' at ', ', at ', 1)}")
    n = extent([record.n for records in shown.values() for record in records])
    sentences.append(f"The numbers are those of the last {by}; {n} {of} images.")
    step = max(1, -(-len(epochs) // TICKS))
    return Curve(
        lines,
        [(place(epoch, 0)[0], epoch) for epoch in epochs[::step]],
        place(peak.epoch, peak.accuracy) if peak else None,
        len(epochs) <= MANY_EPOCHS,
        by,
        alt,
        " ".join(sentences),
    )
