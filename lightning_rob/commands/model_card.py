"""The model card of an exported defense: threat models and accuracies recorded for its weights."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_rob.callbacks.loggers import run_folder
from lightning_rob.commands.base import Run
from lightning_rob.commands.report.blocks import Block, Heading, Paragraph, markdown, table
from lightning_rob.commands.report.evaluation import accuracy_table, attack_table, evaluation
from lightning_rob.commands.report.runs import AttackResult, Evaluations, attack_result, records_in
from lightning_rob.commands.specs import class_name, short
from lightning_rob.evaluation.records import versions
from lightning_rob.runtime.identity import fingerprint

RECORDS = "robust.jsonl"
FRONT = """---
library_name: lightning-rob
pipeline_tag: image-classification
tags:
- adversarial-robustness
---
"""
USE = """```python
import lightning_rob

defense = lightning_rob.load("hf-hub:OWNER/NAME"{allowed})  # or the path of this folder
probabilities = defense(images)  # [B, C, H, W] in [0, 1] -> [B, K]
```"""
TRUSTED = ("lightning_rob", "lightning", "torch", "torchvision", "torchmetrics", "timm", "kornia")


def model_card(run: Run) -> str:
    """Return README.md of a run's defense, as Markdown with the hub's metadata."""
    method, data = (class_name(run.recipe[part]["class_path"]) for part in ("model", "data"))
    defense = run.defense
    rule = getattr(defense.rule, "__name__", repr(defense.rule))
    found = recorded(fingerprint(defense), _logs(run))
    before: list[Block] = [
        Heading(1, f"{getattr(run.model, 'method', method)} on {data}"),
        Paragraph(
            f"{type(defense).__name__}, rule {rule}, draws {len(defense.weights)}; trained by "
            f"{_training(run.recipe['model'], method)}. Images lie in [0, 1]; the networks "
            "normalize inside."
        ),
        Heading(2, "Use"),
    ]
    after = [
        Heading(2, "Robust accuracy"),
        *_accuracies(found),
        Heading(2, "Data and versions"),
        Paragraph(f"Trained on {data}."),
        table("Written with", ["package", "version"], list(versions().items())),
    ]
    use = USE.format(allowed=_allowance(run.recipe["model"]))
    return FRONT + "\n" + "\n\n".join([markdown(before), use, markdown(after)]) + "\n"


def _training(model: dict[str, Any], method: str) -> str:
    """Return the method, whether it attacks, and the network."""
    options = model.get("init_args", {})
    without = " without an attack" if "attack" in options and options["attack"] is None else ""
    return f"{method}{without}" + (f", network {short(options['net'])}" if "net" in options else "")


def _accuracies(found: list[tuple[str, list[AttackResult]]]) -> Iterator[Block]:
    if not found:
        yield Paragraph(
            "No evaluation of these weights is recorded: run lightning-rob test before the export."
        )
    most = sorted(found, key=lambda pair: -max(result.n for result in pair[1]))
    for place, (data, results) in enumerate(most):
        yield Paragraph(f"Of {data}:")
        yield from [accuracy_table(results)] if place else evaluation(results)
        if any(result.is_attack for result in results):
            yield attack_table(results)


def recorded(weights: str, logs: Iterable[Path]) -> list[tuple[str, list[AttackResult]]]:
    """Return data and results of each evaluation of exactly these weights: of all tests, if any.

    The cards of per-image results hold the digest of the attacked defense; records of the same
    process, stage and step belong to it.

    Args:
        weights: the defense's `fingerprint`.
        logs: folders of runs.
    """
    evaluations: dict[tuple[Any, ...], list[AttackResult]] = {}
    data: dict[tuple[Any, ...], str] = {}
    cards_of = {card.resolve() for place in logs for card in place.glob("*/images/*.json")}
    for folder in sorted({card.parents[1] for card in cards_of}):
        cards = [json.loads(path.read_text("utf-8")) for path in folder.glob("images/*.json")]
        wanted = {_moment(card): card for card in cards if card.get("weights") == weights}
        data |= {(folder, *moment): str(card.get("data")) for moment, card in wanted.items()}
        records = records_in(folder / RECORDS) if (folder / RECORDS).is_file() else ()
        for fields in records:
            result = attack_result(fields)
            if result is not None and _moment(fields) in wanted:
                evaluations.setdefault((folder, *_moment(fields)), []).append(result)
    found = [(data[key], Evaluations(results).last()) for key, results in evaluations.items()]
    return [pair for pair in found if pair[1][0].stage == "test"] or found[-1:]


def _moment(fields: dict[str, Any]) -> tuple[Any, ...]:
    """Return process, stage and step of a record or card."""
    return tuple(fields.get(name) for name in ("session", "stage", "epoch", "step"))


def _logs(run: Run) -> set[Path]:
    """Return the folders that hold the training's folder and those of tests."""
    folder = Path(str(run.checkpoint)).resolve().parent
    trained = folder.parents[1] if folder.name == "checkpoints" else folder.parent
    tested = run_folder(run.trainer)
    return {trained, *([tested.resolve().parent] if tested else [])}


def _allowance(model: Any) -> str:
    """Return the option of `load` that names the packages which a recipe imports."""
    found = re.findall(r"\"class_path\": \"(\w+)\.", json.dumps(model))
    packages = sorted(set(found) - set(TRUSTED))
    return f", allow_import={packages}" if packages else ""
