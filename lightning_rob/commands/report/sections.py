"""The sections of a report: the comparison of runs; of each run evaluation, history, studies."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_rob.commands import specs
from lightning_rob.commands.report.blocks import (
    NONE,
    WHOLE,
    WORST,
    Block,
    Cell,
    Code,
    Curve,
    Details,
    Heading,
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
    picture,
    split_of,
    table,
)
from lightning_rob.commands.report.runs import (
    AttackResult,
    Fields,
    Key,
    Run,
    attack_result,
    by_line,
    setting,
)
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
from lightning_rob.comparisons import holm

Checkpoint = tuple[Fields, dict[Key, AttackResult]]  # the record that ends it, and its results
Column = tuple[str, str, str]  # attack, target, threat
Results = Mapping[Column, AttackResult]
MARK = "\N{DAGGER}"
FEW = 100  # images below which an accuracy is hardly one
LOUD = ("severe", "warning")  # findings that are warnings
WHICH = "docs/which_attack.md"
SUITE = (
    "the plug-in for its kind of defense, such as autoattack for a single network and rec_suite "
    f"for a randomized ensemble: see {WHICH}"
)
WIDTH, HEIGHT = 600, 200  # of the drawing, without the texts around it
COLORS = 8  # of the page
TICKS = 6
Series = Mapping[Key, Sequence[AttackResult]]


def comparison(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Block]:
    """Yield a row per run, linked to the section of that name, and warnings of unlike columns."""
    rows: list[tuple[Run, str, Results]] = []
    for run, name in zip(runs, names, strict=True):
        final = run.evaluations.last()
        # The clean accuracy of a part of a defense is not that of the run.
        shown = [r for r in final if r.target == WHOLE or r.name != "clean"]
        by_column: Results = {(*r.key, listed(sorted(threats(r, final)))): r for r in shown}
        rows += [(run, name, by_column)] if by_column else []
    if not rows:
        return
    by_label = {run.label: found for run, _, found in rows}
    columns = list(dict.fromkeys(column for found in by_label.values() for column in found))
    apart = {column: differences(by_label, column) for column in columns}
    heads = [
        Cell(f"{line_name(column[:2])}{f' {MARK}' if apart[column] else ''}>", small=column[2])
        for column in columns
    ]
    cells = []
    for run, name, found in rows:
        splits = dict.fromkeys(split_of(r.stage) for r in found.values())
        results = [result_cell(found.get(column)) for column in columns]
        n = extent([r.n for r in found.values()])
        cells.append([Cell(run.label, link=name), run.title, listed(list(splits)), n, *results])
    caption = "The last evaluation of each run, with 95 % intervals"
    yield table(caption, ["run", "what", "split", "images>", *heads], cells, kind="runs")
    yield from (Warned(f"{MARK} {line}") for line in apart.values() if line)
    if len(data := {run.data for run, _, _ in rows if run.data}) > 1:
        names = listed(sorted(data))
        yield Warned(f"the runs are of different data ({names}): do not compare their accuracies.")
    if len(of := {split_of(r.stage) for found in by_label.values() for r in found.values()}) > 1:
        yield Warned(f"some accuracies are of {listed(sorted(of))} images: do not compare them.")


def differences(by_label: Mapping[str, Results], column: Column) -> str:
    """Return how the attacks of one column differ between runs, as text; "" if they are equal."""
    title = f"{line_name(column[:2])} {column[2]}".strip()
    runs = {label: found[column] for label, found in by_label.items() if column in found}
    (first, one), *others = runs.items()
    described = []
    for label, other in others:
        apart = list(specs.differences(one.attack, other.attack))
        if one.over != other.over:
            apart.append(f"its attacks ({', '.join(one.over)}; {', '.join(other.over)})")
        described += [f"{first} and {label} differ in {', '.join(apart)}"] if apart else []
    if described:
        return f"{title} does not mean the same in all runs: {'; '.join(described)}."
    parts = {c for found in by_label.values() for c in found if c[0] not in ("clean", "worst")}
    mixed = column[0] == "worst" and any(
        differences(by_label, part) for part in parts if part[1:] == column[1:]
    )
    return f"{title} is over attacks that are not the same in all runs." if mixed else ""


def run_section(run: Run, name: str, level: int, folder: Path) -> Iterator[Block]:
    """Yield the section of a run, its heading with the `id` name, for a report in `folder`."""
    final, below = run.evaluations.last(), level + 1
    title, *about = dict.fromkeys(
        [*((run.label, run.title) if level > 1 else (run.title, run.label)), *_setup(run)]
    )
    yield Heading(level, title, name)
    if about:
        yield Paragraph(" · ".join(about), "setup")
    if final:
        yield from evaluation(final)
    yield from _history(run, below)
    yield from map(Warned, dict.fromkeys(_alarms(run.monitor)))  # a later end may repeat one
    yield from checkpoints(run.monitor, below)
    yield from votes(run.votes, below)
    yield from _audit(run.audit, below)
    yield from _certified(run.certified, below)
    if any(result.is_attack for result in final):
        yield Heading(below, "Arguments of the attacks")
        yield attack_table(final)
    if run.pictures:
        yield Heading(below, "Pictures")
    for path in run.pictures:
        yield picture(path, path.stem.replace("_", " "), folder)
    yield from _provenance(run, final)


def _setup(run: Run) -> Iterator[str]:
    options = setting(run.config, "model", "init_args")
    members, probs = setting(options, "members"), setting(options, "probs")
    size = members or (len(probs) if isinstance(probs, list) else None)
    if net := class_name(setting(options, "net", "class_path")):
        yield f"{size} \N{MULTIPLICATION SIGN} {net}" if size else net
    if isinstance(probs, list):
        yield f"probabilities {', '.join(map(str, probs))}"
    threat = setting(options, "attack", "init_args", "threat")
    if trained := [short(setting(threat, key)) for key in ("norm", "eps") if setting(threat, key)]:
        yield f"trained against {' '.join(trained)}"


def votes(records: Sequence[Fields], level: int) -> Iterator[Block]:
    """Yield the accuracy under each attack by every voting rule, a row for each ensemble."""
    if not records:
        return
    yield Heading(level, "All voting rules, from the same votes")
    cells: dict[tuple[Any, ...], dict[str, Cell]] = {}
    for fields in records:
        row = tuple(fields.get(key) for key in ("name", "ensemble", "members", "dissimilarity"))
        accuracy = accuracy_cell(fields.get("accuracy"), fields.get("interval"))
        cells.setdefault(row, {})[str(fields["rule"])] = accuracy
    rules = list(dict.fromkeys(str(fields["rule"]) for fields in records))
    rows = [
        [*names, f"{distance:.3f}" if distance else "", *(by_rule.get(rule, "") for rule in rules)]
        for (*names, distance), by_rule in cells.items()
    ]
    columns = ["attack", "ensemble", "members>", "dissimilarity>", *(f"{rule}>" for rule in rules)]
    caption = f"Accuracy on {records[0]['n']:,} {split_of(str(records[0]['stage']))} images"
    yield table(caption, columns, rows)


def _history(run: Run, level: int) -> Iterator[Block]:
    series = run.evaluations.series()
    evaluated = sorted(run.evaluations.by_stage.get("val", {}).items(), reverse=True)
    if not evaluated:
        return
    yield Heading(level, "Epoch by epoch")
    yield curve(series)
    for fields in run.overfitting:
        yield Paragraph(f"{fields.get('name')}: {fields.get('text')}.")
    rows = [
        [epoch, *(percent(at[key].accuracy) if key in at else NONE for key in series)]
        for epoch, at in evaluated
    ]
    caption = "Accuracy on the validation images by epoch, the latest first"
    columns = ["epoch", *(f"{line_name(key)}>" for key in series)]
    yield Details("The numbers of every epoch", [table(caption, columns, rows)])


def _audit(audit: Fields, level: int) -> Iterator[Block]:
    """Yield the warnings, the attacks, and the checks without a warning."""
    if not audit:
        return
    yield Heading(level, f"Audit: {audit.get('title', '')}")
    loud = [finding for finding in audit["findings"] if finding["severity"] in LOUD]
    yield from (Warned(f"{finding['text']} {finding['advice']}".strip()) for finding in loud)
    if not loud:
        yield Paragraph("Nothing suspicious was found.")
    attacks = audit.get("attacks", [])
    rows = [
        [f["name"], f.get("ball", ""), accuracy_cell(f.get("accuracy"), f.get("interval"))]
        for f in attacks
    ]
    caption = f"Accuracy on {attacks[0]['n'] if attacks else 0:,} test images"
    yield table(caption, ["attack", "within", "accuracy>"], rows)
    rest = [[f["name"], f["severity"], f["text"]] for f in audit["findings"] if f not in loud]
    yield Details("Other checks", [table("", ["check", "severity", "finding"], rest)])


def _certified(records: Sequence[Fields], level: int) -> Iterator[Block]:
    """Yield the accuracy that is certified within each radius."""
    for fields in records:
        yield Heading(level, "Certified accuracy")
        found = zip(fields["radii"], fields["accuracy"], fields["intervals"], strict=True)
        rows = [[f"l2 {radius:.4g}", accuracy_cell(*rest)] for radius, *rest in found]
        settings = f"noise of {fields['sigma']:g}, at most {fields['draws']:,} draws"
        caption = f"No attack changes a right prediction: {fields['n']:,} images, {settings}"
        yield table(caption, ["within", "accuracy>"], rows)
        if wrong := fields.get("violations"):
            yield Warned(f"{len(wrong)} attacks succeeded within a certified radius.")


def _provenance(run: Run, final: Sequence[AttackResult]) -> Iterator[Block]:
    facts = {
        "training seed": [str(setting(run.config, "seed_everything"))] if run.config else [],
        "evaluation seed": [str(r.seed) for r in final if r.seed is not None],
        "repeats": [str(r.repeats) for r in final if r.repeats is not None],
        "versions": [" ".join(part) for r in final for part in r.versions.items()],
    }
    known = [f"{name} {', '.join(dict.fromkeys(found))}" for name, found in facts.items() if found]
    if known:
        yield Paragraph("; ".join(known) + ".", "note")
    if run.recipe:
        yield Details("The recipe: config.yaml", [Code(run.recipe)])


def checkpoints(records: Sequence[Fields], level: int) -> Iterator[Block]:
    """Yield the curve of the checkpoints of a monitor by its last suite, and the numbers."""
    found = sorted(_evaluated(records), key=lambda checkpoint: checkpoint[0]["position"])
    if found:
        yield Heading(level, "Checkpoint by checkpoint")
        # Checkpoints of a training follow one another by step, models that replace one another
        # in a single file by evaluation.
        replaced = any(event["position"] != event["step"] for event, _ in found)
        series, by = by_line(results for _, results in found), "evaluation" if replaced else "step"
        yield curve(series, by, "test")
        numbers = _numbers(found[::-1], list(series), by)
        attacks = attack_table(list(found[-1][1].values()))
        yield Details("The numbers of every checkpoint", [numbers, attacks])


def _evaluated(records: Sequence[Fields]) -> Iterator[Checkpoint]:
    ends = [fields for fields in records if fields.get("event") == "evaluated"]
    results: list[Fields] = []
    for fields in records:
        if "event" not in fields:
            results.append(fields)
            continue
        if fields in ends and fields.get("suite") == ends[-1].get("suite"):
            known = filter(None, map(attack_result, results))
            yield fields, {r.key: replace(r, epoch=fields["position"]) for r in known}
        results = []


def _alarms(records: Sequence[Fields]) -> Iterator[str]:
    for fields in records:
        for alarm in fields.get("alarm", []):
            place = f"{fields.get('checkpoint')}: " if "step" in fields else ""
            yield f"alarm of the monitor: {place}{alarm}"
        if fields.get("event") == "missed":
            yield f"{fields.get('checkpoint')} went before it could be evaluated"


def _numbers(found: Sequence[Checkpoint], keys: Sequence[Key], by: str) -> Table:
    p = {i: event["change"]["p"] for i, (event, _) in enumerate(found) if "change" in event}
    adjusted = dict(zip(p, holm(list(p.values())), strict=True))
    rows: list[list[object]] = []
    for i, (event, results) in enumerate(found):
        change = event.get("change")
        counts = [len(change[key]) if change else NONE for key in ("newly_vulnerable", "won_back")]
        row = [Cell(event["checkpoint"], small=str(event.get("date", ""))[:16]), event["position"]]
        row += [*(result_cell(results.get(key)) for key in keys), *counts]
        rows.append(row + [f"{of[i]:.3g}" if i in of else NONE for of in (p, adjusted)])
    columns = ["checkpoint", f"{by}>", *(f"{line_name(key)}>" for key in keys)]
    columns += ["newly vulnerable>", "won back>", "p>", "p, Holm>"]
    caption = (
        "Accuracy on the test images by checkpoint with 95 % intervals, the latest first; each "
        "change is since the checkpoint before, p: McNemar's exact test"
    ) + (f", Holm over {len(p)} comparisons" if p else "")
    alarmed = [i for i, (event, _) in enumerate(found) if event.get("alarm")]
    return table(caption, columns, rows, alarmed)


def evaluation(final: Sequence[AttackResult]) -> Iterator[Block]:
    """Yield the accuracy to cite, warnings about it, and the table."""
    cite = result_to_cite(final)
    if cite and math.isfinite(cite.accuracy):
        clean = [percent(r.accuracy) for r in final if r.key == ("clean", WHOLE)]
        beside = [(accuracy, "without an attack.") for accuracy in clean]
        yield Headline([(percent(cite.accuracy), _meaning(cite, final)), *beside])
    for known in (result.known_noise for result in final if result.known_noise):
        span = f"95 % interval {between(known['interval'])}, {known['n']:,} images"
        text = f"Of these, {percent(known['accuracy'])} withstand an attacker who knows the noise"
        yield Paragraph(f"{text}, within {known['ball']} ({span}).")
    yield from map(Warned, _cautions(final))
    found = {one["text"]: one for result in final for one in result.findings}  # each once
    for one in found.values():
        text = f"{one['text']} {one['advice']}"
        yield Warned(text, "Finding") if one["severity"] in LOUD else Paragraph(text, "note")
    yield accuracy_table(final)
    for result in final:
        if result.power:
            yield Paragraph(f"{result.name} {result.power['text']}.", "note")


def result_to_cite(final: Sequence[AttackResult]) -> AttackResult | None:
    """Return the per-image worst, or the result of the only attack."""
    attacks = [r for r in final if r.is_attack and r.target == WHOLE]
    worst = [r for r in final if r.key == WORST]
    return next(iter(worst or (attacks if len(attacks) == 1 else [])), None)


def threats(result: AttackResult, final: Sequence[AttackResult]) -> list[str]:
    """Return the threat of a result; for "worst", the threats of all its attacks."""
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
    by = f"in the worst case over {listed(cite.over)}"
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
    # An attack whose name was taken has a number behind it.
    is_own = any(f"/{re.sub(r'_[0-9]+$', '', r.name)}.yaml" in plug_in for r in final)
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
    """Return a row per attack; the row of the accuracy to cite is in bold type."""
    stage, cite = split_of(final[0].stage), result_to_cite(final)
    measured = ["accuracy>", "95 % interval>", "images>", "seconds>"]
    rows = [
        [
            r.name,
            r.target.replace("_", " "),
            percent(r.accuracy),
            between(r.interval),
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


def attack_table(results: Sequence[AttackResult]) -> Table:
    """Return the arguments of each attack, a row each."""
    columns = ["attack", "on", "method", "norm", "eps>", "steps>", "step size>", "other arguments"]
    rows = [row for r in results if r.is_attack for row in _attack_rows(r.name, r.target, r.attack)]
    caption = "The threat, and every argument of every attack"
    return table(caption, columns, rows, kind="fine")


def _attack_rows(name: str, target: str, attack: Spec) -> Iterator[list[str]]:
    threat, own = arguments(threat_of(attack)), arguments(attack)
    pairs = ((threat, "norm"), (threat, "eps"), (own, "steps"), (own, "step_size"))
    shown = [short(v) if (v := found.get(key)) is not None else NONE for found, key in pairs]
    head = [name, target.replace("_", " "), class_name(attack.get("class_path"))]
    yield [*head, *shown, other_arguments(attack)]
    for i, part in enumerate(inner_attacks(attack), start=1):
        yield from _attack_rows(f"{name}, part {i}", target, part)


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
        points = [place(r.epoch, r.accuracy) for r in known]
        band: list[tuple[float, float]] = []
        if key == WORST:
            ends = [(r.epoch, r.interval or (r.accuracy, r.accuracy)) for r in known]
            low, high = ([place(epoch, share[end]) for epoch, share in ends] for end in (0, 1))
            band = low + high[::-1]
        color = {"clean": "--grey", "worst": "--ink"}.get(key[0], f"--line-{i % COLORS}")
        lines.append(Line(line_name(key), percent(records[-1].accuracy), color, points, band))
    n = extent([record.n for records in shown.values() for record in records])
    caption = f"Accuracy on {n} {of} images by {by}; the numbers are those of the last {by}."
    caption += " The band is the 95 % interval of worst." if WORST in shown else ""
    ticks = [(place(epoch, 0)[0], epoch) for epoch in epochs[:: -(-len(epochs) // TICKS)]]
    return Curve(lines, ticks, by, caption)
