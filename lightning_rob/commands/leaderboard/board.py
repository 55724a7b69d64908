"""`lightning-rob leaderboard`: score, check and rank the submissions of a folder."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_rob.commands.leaderboard import LeaderboardConfig
from lightning_rob.commands.leaderboard.ranks import agreement, ranks
from lightning_rob.commands.leaderboard.submissions import (
    CLEAN,
    SUBMISSIONS,
    USUAL,
    Protocol,
    Submission,
    read_protocol,
    read_published,
    some_of,
)
from lightning_rob.commands.report.blocks import (
    NONE,
    TEMPLATES,
    Block,
    Heading,
    Paragraph,
    html,
    markdown,
    table,
)
from lightning_rob.data import ImageData
from lightning_rob.defenses import Defense
from lightning_rob.defenses.transductive import give_source
from lightning_rob.evaluation.worst import WORST
from lightning_rob.metrics import wilson_over_draws
from lightning_rob.runtime.errors import InputError, is_of_shape, visible
from lightning_rob.runtime.files import atomic_write_text
from lightning_rob.runtime.processes import stop
from lightning_rob.threat import Threat

HEADS = (
    "rank",
    "defense",
    "seeds>",
    "clean>",
    "usual attack>",
    "worst [95 % interval]>",
    "certified>",
    "power>",
    f"resubmitted@{SUBMISSIONS}>",
    "known noise>",
    "findings",
    "training>",
    "prediction>",
)
NOTE = (
    "Worst: the strongest attack on each image, or on all images at once if the defense adapts, "
    "of the usual one, those made for the kind of defense, and Auto. Ranks are by worst; defenses "
    "whose ranks overlap may be equally robust. Intervals of 95 % cover the images and, with "
    "several seeds, the trainings; with one seed another training may rank elsewhere. Certified: "
    "the share of images on which no attack within the radius changes the right prediction. "
    "Power: the share of planted adversarial images that the ablest attack finds. Resubmitted: "
    f"against an attacker who may submit {SUBMISSIONS} times. Known noise: against one who knows "
    "the draws that predict. Training: passes of a training image. Prediction: its time in "
    "forward passes of one of the defense's networks."
)


def run(
    config: LeaderboardConfig,
    load: Callable[[Path], Defense],
    build: Callable[[dict[str, Any]], ImageData],
) -> None:
    """Write the leaderboard of a folder, after its submissions are scored and checked."""
    folder = Path(str(config.folder))
    if (folder / "submission.yaml").is_file():
        raise InputError(f"{folder} is a submission of a leaderboard: give the folder above")
    protocol, published = read_published(config.beside) if config.beside else (None, [])
    if protocol is None or (folder / "protocol.yaml").is_file():
        protocol = read_protocol(folder)
    own = [Submission.read(path.parent) for path in sorted(folder.glob("*/submission.yaml"))]
    found = [*published, *own]  # a copy of what is published gets no rank
    for path in sorted(folder.glob("*/last.ckpt")) + sorted(folder.glob("*/model.safetensors")):
        if not path.with_name("submission.yaml").exists():
            print(visible(f"{path.parent.name}: a model without a submission.yaml, passed over"))
    if not own:
        raise InputError(f"{folder} has no folder with a submission.yaml")
    data = build(protocol.data)
    data.prepare_data()
    data.setup("test")
    batches = [(x, y, index) for x, y, index in data.test_dataloader()]
    index = torch.cat([index for _, _, index in batches])
    if len(index) < protocol.images:
        raise InputError(f"the data has {len(index)} test images, not {protocol.images}")
    noise = torch.Generator().manual_seed(protocol.seed)
    order = torch.randperm(len(index), generator=noise)
    others = some_of(batches, index[order[protocol.images :][: protocol.images]])
    batches = some_of(batches, index[order[: protocol.images]])
    chosen = torch.cat([index for _, _, index in batches]).sort().values.tolist()  # as in scores
    check = 0 if config.part else config.check  # what a check finds is not recorded
    # Its scores are recorded one by one: a run that is killed goes on with the next submission.
    for one in config.own([one for one in found if not one.reasons]):
        try:
            defense = None if one.published else load(one.model)
            if defense:
                give_source(defense, data.labelled)
                if config.evaluate and not one.scores:
                    print(visible(f"{one.folder.name}: attacking"), flush=True)
                    one.evaluate(protocol, defense, batches)
            # The scores are the submitter's: what needs no attack comes before some are repeated.
            one.check_scores(protocol, chosen)
            if defense:
                one.check(protocol, defense, batches, check, others)
            for norm in protocol.radii if not one.reasons else ():
                check_row(*rows([one], norm))
            if not one.reasons:
                if defense and check:
                    print(visible(f"{one.folder.name}: images attacked again agree"), flush=True)
                hash(one.scores["weights"])  # what the file cannot hold is an error of its own
                json.dumps(one.publish(protocol), allow_nan=False)
        except (Exception, SystemExit) as error:  # one submission never stops the others
            stop.leave()  # but Ctrl-C does
            one.reasons.append(reason(error, [*batches[0][0].shape[1:]]))
    if config.part is not None:
        print_reasons(found)
        if config.check:
            print("A part attacks what has no scores: run --check without --part")
        return
    refuse_copies(found)
    names = {one.name for one in published}
    for one in own:
        if one.name in names and not one.reasons:
            print(visible(f"{one.folder.name}: another training of {one.name}, published"))
    found.sort(key=lambda one: (one.folder.name, one.published))  # as in one folder
    ranked = {norm: rows(found, norm) for norm in protocol.radii}
    blocks = [*page(protocol, ranked, found)]
    whole = TEMPLATES.get_template("sortable.html")
    atomic_write_text(folder / "leaderboard.md", markdown(blocks) + "\n")
    text = whole.render(title=protocol.title, sections=[html(blocks)])
    atomic_write_text(folder / "leaderboard.html", text)
    scores = [one.publish(protocol) for one in found if not one.reasons]
    content = {"protocol": asdict(protocol), "norms": ranked, "submissions": scores}
    atomic_write_text(folder / "leaderboard.json", json.dumps(content) + "\n")
    ranked_own = {one.name for one in own if not one.reasons}
    for norm, entries in ranked.items():
        print(f"Within {norm}: rank, worst accuracy in per cent and its 95 % interval")
        for row in entries:
            mine = " (yours)" * (bool(published) and row["defense"] in ranked_own)
            print(visible(f"  {cells(row)[0]:>8}  {cells(row)[5]:20}  {row['defense']}{mine}"))
    print(visible(f"Wrote {folder}/leaderboard.md, .html and .json"))
    if not config.check:
        print("The scores are as submitted: --check 50 attacks 50 images again")
    print_reasons(found)
    for kind, some in (("submissions", own), ("published scores", published)):
        if refused := sum(bool(one.reasons) for one in some):
            print(f"{refused} of {len(some)} {kind} have no rank, for the reasons above")
    if any(one.reasons for one in found):
        raise SystemExit(1)


def reason(error: BaseException, shape: list[int]) -> str:
    """Return why a submission has no rank, in one line; `shape` is that of the images."""
    if is_of_shape(error):
        return f"the network does not take the protocol's images, [C, H, W] = {shape}"
    name = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
    return name + " ".join(str(error).split())


def print_reasons(found: Sequence[Submission]) -> None:
    """Print why submissions have no rank; a reason that published ones share, once."""
    alike: dict[tuple[str, str], list[str]] = {}
    for one in found:
        for reason in one.reasons:
            key = reason, "" if one.published else one.folder.name
            alike.setdefault(key, []).append(one.folder.name)
    for (reason, _), names in alike.items():
        others = f" and {len(names) - 2} others" if len(names) > 3 else ""
        first = ", ".join(names[:2] if others else names)
        print(visible(f"{first}{others}: {reason}"), flush=True)


def rows(submissions: Sequence[Submission], norm: str) -> list[dict[str, Any]]:
    """Return the defenses that have a rank within a norm, the most robust first."""
    groups: dict[str, list[Submission]] = {}
    for one in submissions:
        if not one.reasons:
            groups.setdefault(one.name, []).append(one)
    found = []
    for name, group in groups.items():
        own = [one.scores["norms"][norm] for one in group]
        images = {
            key: np.array([part["images"][key] for part in own]) for key in (CLEAN, USUAL, WORST)
        }
        by_seed = images[WORST].mean(1)
        # An attack beside a stronger one takes nothing away: the best power of each seed counts.
        tested = [[p for p in part["power"].values() if p["passed"] is not None] for part in own]
        powers = [max(power["rate"] for power in part) for part in tested if part]
        certified = [one.scores.get("certified") for one in group] if norm == "l2" else []
        row: dict[str, Any] = {
            "defense": name,
            "paper": group[0].paper,
            "seeds": len(group),
            "scores": images[WORST],
            "worst": float(by_seed.mean()),
            "interval": wilson_over_draws(by_seed, images[WORST].shape[1]),
            CLEAN: float(images[CLEAN].mean()),
            USUAL: float(images[USUAL].mean()),
            "certified": mean(certified),
            "power": mean(powers),
            "resubmitted": mean([part.get("resubmitted") for part in own]),
            "known_noise": mean([part.get("known_noise") for part in own]),
            "findings": sorted({name for part in own for _, name, _ in part["findings"]}),
            "training": mean([one.training for one in group]),
            "prediction": mean([one.scores["prediction"] for one in group]),
        }
        found.append(row)
    found.sort(key=lambda row: -row["worst"])
    for row, places in zip(found, ranks([row["scores"] for row in found]), strict=True):
        row["rank"] = places
    return found


def check_row(row: dict[str, Any]) -> None:
    """Raise ValueError for a row with what is no share or no number."""
    " ".join(cells(row)).encode()  # raises where a cell cannot be written
    if not 0 <= row["prediction"] < 1e12:
        raise ValueError(f"prediction must be in [0, 1e12), got {row['prediction']}")
    for key in (CLEAN, USUAL, "certified", "power", "resubmitted", "known_noise"):
        if row[key] is not None and not 0 <= row[key] <= 1:
            raise ValueError(f"{key} must be in [0, 1], got {row[key]}")
    json.dumps({key: value for key, value in row.items() if key != "scores"}, allow_nan=False)


def refuse_copies(found: Sequence[Submission]) -> None:
    """Give no rank to a training that is counted already: it would narrow the intervals."""
    seen: dict[tuple[str, str, Any], Submission] = {}
    for one in found:
        if one.reasons:
            continue
        own = (one.name, "seed", one.seed), ("", "weights", one.scores["weights"])
        for name, what, key in own:
            other = seen.setdefault((name, what, key), one)
            if other is not one:
                where = f"{other.folder.name}{' (published)' * other.published}"
                one.reasons.append(f"{one.name} with the {what} of {where}")


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def page(
    protocol: Protocol, ranked: dict[str, list[dict[str, Any]]], found: Sequence[Submission]
) -> Iterator[Block]:
    """Yield the leaderboard's tables and what they mean."""
    yield Heading(1, protocol.title)
    for norm, entries in ranked.items():
        yield Heading(2, str(Threat(norm, protocol.radii[norm])))
        scores = [entry.pop("scores") for entry in entries]
        body = [cells(entry) for entry in entries]
        shown = [i for i in range(len(HEADS)) if any(row[i] != NONE for row in body)]
        caption = f"Accuracy in per cent, {protocol.images} images"
        heads = [HEADS[i] for i in shown]
        yield table(caption, heads, ([row[i] for i in shown] for row in body))
        tau, low, high = agreement(scores)
        if tau == tau:
            yield Paragraph(
                f"Order by one training and by another: Kendall's tau {tau:.2f} [{low:.2f}, "
                f"{high:.2f}], the mean over pairs of trainings, bootstrap over defenses."
            )
    yield Paragraph(NOTE)
    if refused := [one for one in found if one.reasons]:
        yield Heading(2, "Without a rank")
        reasons = [
            tuple(map(visible, (one.folder.name, one.name, "; ".join(one.reasons))))
            for one in refused
        ]
        yield table("Submissions", ("folder", "defense", "reason"), reasons)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row, in the order of HEADS."""
    (best, worst), (low, high) = row["rank"], row["interval"]
    return (
        f"{best}" if best == worst else f"{best} to {worst}",
        f"{row['defense']}" + (f" ({row['paper']})" if row["paper"] else ""),
        f"{row['seeds']}",
        hundredths(row[CLEAN]),
        hundredths(row[USUAL]),
        f"{hundredths(row['worst'])} [{hundredths(low)}, {hundredths(high)}]",
        hundredths(row["certified"]),
        hundredths(row["power"]),
        hundredths(row["resubmitted"]),
        hundredths(row["known_noise"]),
        ", ".join(row["findings"]) or NONE,
        NONE if row["training"] is None else f"{row['training']:.0f}",
        f"{row['prediction']:,.0f}" if row["prediction"] >= 100 else f"{row['prediction']:.3g}",
    )


def hundredths(share: float | None) -> str:
    """Return a share in per cent; a dash where it is not known."""
    return NONE if share is None else f"{100 * share:.1f}"
