"""The section of a run: evaluation, history, studies, pictures, recipe."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_rob.commands.report.blocks import (
    Block,
    Cell,
    Code,
    Details,
    Drawing,
    Heading,
    Picture,
    Table,
    Text,
)
from lightning_rob.commands.report.curve import best, curve
from lightning_rob.commands.report.evaluation import attack_table, evaluation, few_images
from lightning_rob.commands.report.formatting import (
    NONE,
    between,
    extent,
    images,
    line_name,
    percent,
    split_of,
)
from lightning_rob.commands.report.monitor import monitor
from lightning_rob.commands.report.runs import (
    AttackResult,
    Fields,
    Key,
    Run,
    attack_result,
    read_interval,
    setting,
)
from lightning_rob.commands.specs import class_name, short, threat_text

LONG = 60  # letters of a field from which it is left out of a caption
HIDDEN = ("schema", "kind", "name")  # fields that no caption shows
LOUD = ("severe", "warning")
Point = tuple[str, AttackResult]  # the value as a text, and the result there


def run_section(run: Run, name: str, level: int) -> Iterator[Block]:
    """Yield the section of a run.

    Args:
        run: one folder.
        name: the `id` of its heading.
        level: of the heading.
    """
    final = run.evaluations.last()
    pictures = list(run.pictures)
    names = [run.label, run.title] if level > 1 else [run.title, run.label]
    yield Heading(level, names[0], name)
    about = dict.fromkeys([names[1], *_setup(run)])
    about.pop(names[0], None)
    if about:
        yield Text(" · ".join(about), "setup")
    if final:
        yield from evaluation(final)
    yield from _history(run, name, level + 1)
    yield from monitor(run.monitor, f"{name}-monitor", level + 1)
    yield from _audit(run.audit, level + 1)
    if any(result.is_attack for result in final):
        yield Heading(level + 1, "Arguments of the attacks")
        yield attack_table(final)
    yield from _sweeps(run.sweep, level + 1)
    yield from _pictures(pictures, "sweep")
    yield from _matrices(run, level + 1)
    yield from _pictures(pictures, "transfer" if run.matrices else None)
    yield from votes(run, level + 1)
    yield from _gallery(run, pictures, level + 1)
    yield from _provenance(run, final)


def _setup(run: Run) -> list[str]:
    """Return what the recipe says of the model, in a few words."""
    options = setting(run.config, "model", "init_args")
    net = class_name(setting(options, "net", "class_path"))
    members, probs = setting(options, "members"), setting(options, "probs")
    size = members or (len(probs) if isinstance(probs, list) else None)
    of = f"{size} \N{MULTIPLICATION SIGN} {net}" if size and net else net
    shares = f"probabilities {', '.join(map(str, probs))}" if isinstance(probs, list) else ""
    threat = setting(options, "attack", "init_args", "threat")
    trained = [short(setting(threat, key)) for key in ("norm", "eps") if setting(threat, key)]
    against = f"trained against {' '.join(trained)}" if trained else ""
    checkpoint = setting(run.config, "ckpt_path")
    loaded = f"checkpoint {checkpoint}" if checkpoint else ""
    return [part for part in (of, shares, against, loaded) if part]


def _history(run: Run, name: str, level: int) -> Iterator[Block]:
    """Yield the curve over the epochs, and its numbers."""
    series = run.evaluations.series()
    epochs = sorted(run.evaluations.by_stage.get("val", {}), reverse=True)
    if not epochs:
        return
    yield Heading(level, "Epoch by epoch")
    yield Drawing(curve(series, name))
    at = {(key, r.epoch): percent(r.accuracy) for key, results in series.items() for r in results}
    rows = [[str(epoch), *(at.get((key, epoch), NONE) for key in series)] for epoch in epochs]
    peak = best(series)
    strong = frozenset(i for i, epoch in enumerate(epochs) if peak and peak.epoch == epoch)
    columns = ["epoch", *(f"{line_name(key)}>" for key in series)]
    caption = "Accuracy on the validation images by epoch, the latest first"
    if peak:
        caption += f"; {peak.name} was best at epoch {peak.epoch}"
    yield Details("The numbers of every epoch", [Table(caption, columns, rows, strong)])


def _audit(audit: Fields, level: int) -> Iterator[Block]:
    """Yield warnings first, then the attacks, and the checks without a warning."""
    if not audit:
        return
    yield Heading(level, f"Audit: {audit.get('title', '')}")
    found = audit.get("findings", [])
    for finding in found:
        if finding["severity"] in LOUD:
            yield Text(f"{finding['text']} {finding['advice']}".strip(), "warning")
    if not any(finding["severity"] in LOUD for finding in found):
        yield Text("Nothing suspicious was found.")
    rows = [
        [attack["name"], str(attack.get("ball", "")), _accuracy_cell(attack)]
        for attack in audit.get("attacks", [])
    ]
    count = audit["attacks"][0]["n"] if audit.get("attacks") else 0
    caption = f"Accuracy on {images(count)} test images"
    yield Table(caption, ["attack", "within", "accuracy>"], rows, kind="matrix")
    rest = [[f["name"], f["severity"], f["text"]] for f in found if f["severity"] not in LOUD]
    yield Details("Other checks", [Table("", ["check", "severity", "finding"], rest)])


def _accuracy_cell(fields: Fields) -> Cell:
    share = fields["accuracy"]
    if share is None:  # no image was attacked
        return Cell(NONE)
    return Cell(percent(share), between(read_interval(fields["interval"])), shade=share)


def _sweeps(records: Sequence[Fields], level: int) -> Iterator[Block]:
    """Yield a table for each variable, and the attacks' arguments."""
    measured = [fields for fields in records if fields.get("kind") == "accuracy"]
    for variable in dict.fromkeys(str(fields["variable"]) for fields in measured):
        points = list(_points(_of_last_study(records, variable)))
        if points:
            yield Heading(level, f"Sweep over {variable}")
            yield from (Text(text, "warning") for text in few_images([r for _, r in points]))
            yield _sweep_table(variable, points)
        first = [r for value, r in points if value == points[0][0]]
        if any(r.is_attack and r.attack for r in first):
            caption = f"Every argument of every attack, at {variable} {points[0][0]}"
            yield attack_table(first, caption)


def _of_last_study(records: Sequence[Fields], variable: str) -> list[Fields]:
    """Return the results in the table of the last finished sweep; all if none is finished."""
    of_variable = [fields for fields in records if str(fields["variable"]) == variable]
    measured = [fields for fields in of_variable if fields.get("kind") == "accuracy"]
    finished = [fields for fields in of_variable if fields.get("kind") == "sweep_study"]
    if not finished:
        return measured
    points = {(value, key) for value, key in finished[-1]["points"]}
    return [f for f in measured if (f.get("value"), f.get("reuse", {}).get("key")) in points]


def _points(records: Sequence[Fields]) -> Iterator[Point]:
    """Yield the results in the order of their values; foreign records are passed over."""
    for fields in sorted(records, key=lambda fields: _order(fields.get("value"))):
        found = attack_result({"stage": "test"} | fields)
        if found and isinstance(value := fields.get("value"), int | float | str):
            is_integer = isinstance(value, float) and value.is_integer()
            yield str(int(value)) if is_integer else short(value), found


def _order(value: Any) -> tuple[bool, float]:
    is_number = isinstance(value, int | float)
    return not is_number, float(value) if is_number else 0.0


def _sweep_table(variable: str, points: Sequence[Point]) -> Table:
    """Return a row per value and a column per attack; of repeated results the last counts."""
    at = {
        (value, r.key): Cell(percent(r.accuracy), small=between(r.interval)) for value, r in points
    }
    keys = sorted(dict.fromkeys(r.key for _, r in points), key=_clean_first)
    threats = {r.key: threat_text(r.threat) if variable != "eps" else "" for _, r in points}
    heads = [Cell(f"{line_name(key)}>", small=threats[key]) for key in keys]
    rows: list[list[Cell | str]] = [
        [value, *(at.get((value, key), Cell(NONE)) for key in keys)]
        for value in dict.fromkeys(value for value, _ in points)
    ]
    n = extent([r.n for _, r in points])
    caption = f"Accuracy on {n} test images by {variable}, with 95 % intervals"
    return Table(caption, [variable, *heads], rows)


def _clean_first(key: Key) -> int:
    return {"clean": 0, "worst": 2}.get(key[0], 1)


def _matrices(run: Run, level: int) -> Iterator[Block]:
    """Yield the transfer matrix of each attack."""
    if not run.matrices:
        return
    yield Heading(level, "Transfer between members")
    yield Text("Each member is attacked alone, and all members predict.")
    for fields in run.matrices:
        rows: list[list[Cell | str]] = [
            [f"member {i + 1} predicts", *(_matrix_cell(fields, i, j) for j in range(len(row)))]
            for i, row in enumerate(fields["matrix"])
        ]
        columns = ["prediction", *(f"member {j} attacked>" for j in range(1, len(rows[0])))]
        yield Table(_matrix_caption(fields), columns, rows, kind="matrix")


def _matrix_caption(fields: Fields) -> str:
    attack, stage, n = (fields.get(key) for key in ("name", "stage", "n"))
    of = f"{images(n)} {split_of(str(stage))}" if isinstance(n, int) else split_of(str(stage))
    threat = threat_text(fields.get("threat"))
    within = f" ({threat})" if threat else ""
    epoch = "" if stage == "test" else f" at epoch {fields.get('epoch')}"
    return f"{attack}{within}: accuracy on {of} images{epoch}"


def _matrix_cell(fields: Fields, i: int, j: int) -> Cell:
    share = float(fields["matrix"][i][j])
    try:
        interval = read_interval(fields["intervals"][i][j])
    except (KeyError, IndexError, TypeError):
        interval = None
    return Cell(percent(share), between(interval), shade=share if math.isfinite(share) else None)


def votes(run: Run, level: int) -> Iterator[Block]:
    """Yield the accuracy under each attack by every voting rule, a row for each ensemble."""
    if not run.votes:
        return
    yield Heading(level, "All voting rules, from the same votes")
    rules = list(dict.fromkeys(str(fields["rule"]) for fields in run.votes))
    rows: dict[tuple[Any, ...], dict[str, Cell]] = {}
    for fields in run.votes:
        key = tuple(fields.get(key) for key in ("name", "ensemble", "members", "dissimilarity"))
        rows.setdefault(key, {})[str(fields["rule"])] = _accuracy_cell(fields)
    table = [
        [str(name), str(ensemble), str(members), f"{distance:.3f}" if distance else ""]
        + [cells.get(rule, Cell("")) for rule in rules]
        for (name, ensemble, members, distance), cells in rows.items()
    ]
    columns = ["attack", "ensemble", "members>", "dissimilarity>", *(f"{rule}>" for rule in rules)]
    first = run.votes[0]
    caption = f"Accuracy on {images(first['n'])} {split_of(str(first['stage']))} images"
    yield Table(caption, columns, table, kind="matrix")


def _pictures(pictures: list[Path], prefix: str | None) -> Iterator[Block]:
    """Yield the pictures of a section, by the beginning of their names."""
    for path in pictures:
        if prefix and path.name.startswith(prefix):
            yield Picture(path, path.stem.replace("_", " "))


def _gallery(run: Run, pictures: list[Path], level: int) -> Iterator[Block]:
    """Yield the pictures of no other section, each with the record of its name."""
    shown = ("sweep", "transfer") if run.matrices else ("sweep",)
    rest = [path for path in pictures if not path.name.startswith(shown)]
    if rest:
        yield Heading(level, "Pictures")
    for path in rest:
        fields = run.others.get(path.stem, {})
        texts = {key: _caption_text(v) for key, v in fields.items() if key not in HIDDEN}
        facts = ", ".join(f"{key} {text}" for key, text in texts.items() if text)
        yield Picture(path, ": ".join(filter(None, [path.stem.replace("_", " "), facts])))


def _caption_text(value: Any) -> str:
    """Return a field as text; empty where it is too long for a caption."""
    if isinstance(value, bool | int | float | str) and len(str(value)) <= LONG:
        return short(value)
    return ""


def _provenance(run: Run, final: Sequence[AttackResult]) -> Iterator[Block]:
    """Yield what is needed to repeat the evaluation."""
    facts = {
        "training seed": [str(setting(run.config, "seed_everything"))] if run.config else [],
        "evaluation seed": [r.seed for r in final],
        "repeats": [r.repeats for r in final],
        "versions": [part for r in final for part in r.versions],
    }
    known = [
        f"{fact} {', '.join(dict.fromkeys(filter(None, values)))}"
        for fact, values in facts.items()
        if any(values)
    ]
    if known:
        yield Text("; ".join(known) + ".", "note")
    if run.recipe:
        yield Details("The recipe: config.yaml", [Code(run.recipe)])
