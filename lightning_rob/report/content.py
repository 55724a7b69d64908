"""What is told of one run."""

from collections.abc import Iterator, Sequence

from lightning_rob.report.arguments import short
from lightning_rob.report.audited import audited
from lightning_rob.report.blocks import (
    Block,
    Code,
    Details,
    Drawing,
    Heading,
    Text,
)
from lightning_rob.report.card import card
from lightning_rob.report.curve import best, curve
from lightning_rob.report.extras import gallery, matrices, sweep, votes
from lightning_rob.report.monitored import monitored
from lightning_rob.report.outcome import outcome
from lightning_rob.report.records import Record
from lightning_rob.report.runs import Run, class_name, setting
from lightning_rob.report.table import Table
from lightning_rob.report.words import (
    NONE,
    line_name,
    percent,
)


def story(run: Run, name: str, level: int) -> Iterator[Block]:
    """The section of a run, whose heading of that level has the `id` `name`."""
    final = run.evaluations.last()
    pictures = list(run.pictures)
    names = [run.label, run.title] if level > 1 else [run.title, run.label]
    yield Heading(level, names[0], name)
    about = dict.fromkeys([names[1], *setup(run)])
    about.pop(names[0], None)
    if about:
        yield Text(" · ".join(about), "setup")
    if final:
        yield from outcome(final)
    yield from history(run, name, level + 1)
    yield from monitored(run.monitor, f"{name}-monitor", level + 1)
    yield from audited(run.audit, level + 1)
    if any(record.an_attack for record in final):
        yield Heading(level + 1, "What the attacks were")
        yield card(final)
    yield from sweep(run, pictures, level + 1)
    yield from matrices(run, pictures, level + 1)
    yield from votes(run, level + 1)
    yield from gallery(run, pictures, level + 1)
    yield from provenance(run, final)


def setup(run: Run) -> list[str]:
    """What the recipe says of the model, in a few words."""
    options = setting(run.config, "model", "init_args")
    net = class_name(setting(options, "net", "class_path"))
    members, probs = setting(options, "members"), setting(options, "probs")
    size = members or (len(probs) if isinstance(probs, list) else None)
    of = f"{size} \N{MULTIPLICATION SIGN} {net}" if size and net else net
    shares = f"probabilities {', '.join(map(str, probs))}" if isinstance(probs, list) else ""
    threat = setting(options, "attack", "init_args", "threat")
    trained = [short(str(setting(threat, key))) for key in ("norm", "eps") if setting(threat, key)]
    against = f"trained against {' '.join(trained)}" if trained else ""
    checkpoint = setting(run.config, "ckpt_path")
    loaded = f"checkpoint {checkpoint}" if checkpoint else ""
    return [part for part in (of, shares, against, loaded) if part]


def history(run: Run, name: str, level: int) -> Iterator[Block]:
    """The curve over the epochs, and its numbers."""
    series = run.evaluations.series()
    epochs = sorted(run.evaluations.by_stage.get("val", {}), reverse=True)
    if not epochs:
        return
    yield Heading(level, "Epoch by epoch")
    yield Drawing(curve(series, name))
    at = {(key, r.epoch): r for key, records in series.items() for r in records}
    rows = [[str(epoch), *(_accuracy(at.get((key, epoch))) for key in series)] for epoch in epochs]
    peak = best(series)
    strong = frozenset(i for i, epoch in enumerate(epochs) if peak and peak.epoch == epoch)
    columns = ["epoch", *(f"{line_name(key)}>" for key in series)]
    caption = "Accuracy on the validation images by epoch, the latest first"
    if peak:
        caption += f"; {peak.name} was best at epoch {peak.epoch}"
    yield Details("The numbers of every epoch", [Table(caption, columns, rows, strong)])


def _accuracy(record: Record | None) -> str:
    return percent(record.accuracy) if record else NONE


def provenance(run: Run, final: Sequence[Record]) -> Iterator[Block]:
    """What is needed to repeat the figures."""
    facts = {
        "training seed": [str(setting(run.config, "seed_everything"))] if run.config else [],
        "evaluation seed": [r.seed for r in final],
        "repeats": [r.repeats for r in final],
        "versions": [part for r in final for part in r.versions],
    }
    told = [
        f"{fact} {', '.join(dict.fromkeys(filter(None, values)))}"
        for fact, values in facts.items()
        if any(values)
    ]
    if told:
        yield Text("; ".join(told) + ".", "note")
    if run.recipe:
        yield Details("The recipe: config.yaml", [Code(run.recipe)])
