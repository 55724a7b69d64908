"""Robust accuracy by epoch as a figure."""

from collections.abc import Mapping, Sequence

from lightning_rob.commands.report.blocks import Curve, Line
from lightning_rob.commands.report.formatting import WHOLE, WORST, extent, line_name, percent
from lightning_rob.commands.report.runs import AttackResult, Key

WIDTH, HEIGHT = 600, 200  # of the drawing, without the texts around it
COLORS = 8  # of the page
MANY_EPOCHS = 40
TICKS = 6
Series = Mapping[Key, Sequence[AttackResult]]


def best(series: Series) -> AttackResult | None:
    """Return the result with the best worst case, or the best under the only attack."""
    attacked = [records for key, records in series.items() if key[1] == WHOLE and key[0] != "clean"]
    ranked = series.get(WORST) or (attacked[0] if len(attacked) == 1 else [])
    known = [record for record in ranked if record.accuracy == record.accuracy]
    return max(known, key=lambda record: record.accuracy, default=None)


def curve(series: Series, by: str = "epoch", of: str = "validation") -> Curve:
    """Return the figure; of clean images the whole defense alone is shown.

    Args:
        series: (attack, target) -> results by epoch.
        by: unit of `AttackResult.epoch` here.
        of: split of the images.
    """
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
