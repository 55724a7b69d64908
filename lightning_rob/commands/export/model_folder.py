"""A trained module as a folder, as the Hugging Face hub holds it: weights, recipe, model card."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import save
from torch import Tensor

from lightning_rob.callbacks.loggers import run_folder
from lightning_rob.commands.base import Run
from lightning_rob.commands.checkpoints import RECIPE, SAVED, read_checkpoint
from lightning_rob.commands.report.blocks import WHOLE, Block, Heading, Paragraph, markdown, table
from lightning_rob.commands.report.runs import (
    AttackResult,
    Evaluations,
    attack_result,
    mapping_in,
    records_in,
    text_of,
)
from lightning_rob.commands.report.sections import accuracy_table, attack_table, evaluation, threats
from lightning_rob.commands.specs import class_name, short
from lightning_rob.evaluation.records import versions
from lightning_rob.nets.hub import CONFIG, ENTRY, WEIGHTS
from lightning_rob.nets.weights import named_tensors
from lightning_rob.recipes.trust import OWNERS
from lightning_rob.runtime.files import atomic_write, atomic_write_text
from lightning_rob.runtime.identity import fingerprint

RECORDS = "robust.jsonl"
USE = """```python
import lightning_rob

defense = lightning_rob.load("hf-hub:OWNER/NAME"{allowed})  # or the path of this folder
probabilities = defense(images)  # [B, C, H, W] in [0, 1] -> [B, K]
```"""
FORMAT = 1
# Entries of a Lightning checkpoint that only a resumed training needs.
TRAINING = re.compile(
    "state_dict|loops|callbacks|optimizer_states|lr_schedulers|averaging_state|current_model_state|"
    f"(datamodule_)?hyper_parameters|(datamodule_)?hparams_(name|type)|.*Precision|{RECIPE}"
)


def write_model_folder(run: Run, folder: Path) -> None:
    """Write model.safetensors, config.json and README.md of a run's checkpoint."""
    if run.inputs.preprocess is not None:
        raise ValueError(
            "preprocess is an option of a plug-in, which the folder does not hold: normalize "
            "inside the network, or leave the plug-in out"
        )
    for key, path in _files_in(run.recipe["model"], "model"):
        raise ValueError(
            f"{key} is a file, {path!r}, that the folder does not hold: if the checkpoint has these"
            f" weights, add --{key}=null"
        )
    content = read_checkpoint(str(run.checkpoint))
    data = type(run.data).__qualname__  # under which Lightning saves the state of the data module
    kept = {k: v for k, v in content.items() if not TRAINING.fullmatch(k) and k != data}
    tensors = {**content["state_dict"], **dict(named_tensors(kept, SAVED))}
    others = [name for name, entry in tensors.items() if not isinstance(entry, Tensor)]
    if others:
        raise ValueError(f"safetensors hold tensors alone, {', '.join(others)} are none")
    entry = {"format": FORMAT, "model": run.recipe["model"], "checkpoint": _described(kept, SAVED)}
    entry |= {"fingerprint": fingerprint(run.defense), "versions": versions()}
    config = json.dumps({"library_name": "lightning-rob", ENTRY: entry}, indent=1)
    # Copies: safetensors refuse tensors that share their memory.
    copies = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    weights = save(copies, metadata={"format": "pt"})  # `save_file` would hide it from other users
    atomic_write(folder / WEIGHTS, lambda draft: draft.write_bytes(weights))
    atomic_write_text(folder / CONFIG, config + "\n")
    atomic_write_text(folder / "README.md", model_card(run))


def _files_in(spec: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the places in a recipe that name an existing file or folder."""
    items = spec.items() if isinstance(spec, Mapping) else ()
    for name, part in enumerate(spec) if isinstance(spec, list) else items:
        yield from _files_in(part, f"{key}.{name}")
    is_path = isinstance(spec, str) and re.fullmatch(r".{,200}[./\\].{,200}", spec)
    if is_path and Path(spec).exists():
        yield key, spec


def _described(tree: Any, name: str) -> Any:
    """Return nested dicts and lists with {"tensor": its name} for each tensor."""
    if isinstance(tree, Tensor):
        return {"tensor": name}
    if isinstance(tree, Mapping):
        return {str(key): _described(part, f"{name}.{key}") for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        return [_described(part, f"{name}.{i}") for i, part in enumerate(tree)]
    return tree


def model_card(run: Run) -> str:
    """Return README.md of a run's defense, as Markdown with the hub's metadata."""
    model, defense = run.recipe["model"], run.defense
    method, data = (class_name(run.recipe[part]["class_path"]) for part in ("model", "data"))
    options = model.get("init_args", {})
    training = method
    if "attack" in options and options["attack"] is None:
        training += " without an attack"
    if "net" in options:
        training += f", network {short(options['net'])}"
    rule = getattr(defense.rule, "__name__", repr(defense.rule))
    title = f"{getattr(run.model, 'method', method)} on {data}"
    before: list[Block] = [
        Heading(1, title),
        Paragraph(
            f"{type(defense).__name__}, rule {rule}, draws {len(defense.weights)}; trained by "
            f"{training}. Images lie in [0, 1]; the networks normalize inside."
        ),
        Heading(2, "Use"),
    ]
    imported = re.findall(r"\"class_path\": \"(\w+)\.", json.dumps(model))
    packages = sorted(set(imported) - OWNERS)
    use = USE.format(allowed=f", allow_import={packages}" if packages else "")

    # The records of the training and of tests lie beside the checkpoint, and beside this run.
    folder = Path(str(run.checkpoint)).resolve().parent
    logs = {folder.parents[1] if folder.name == "checkpoints" else folder.parent}
    if tested := run_folder(run.trainer):
        logs.add(tested.resolve().parent)
    found = recorded(fingerprint(defense), logs)
    after: list[Block] = [Heading(2, "Robust accuracy")]
    if not found:
        after.append(
            Paragraph(
                "No evaluation of these weights is recorded: run lightning-rob test before the "
                "export."
            )
        )
    most = sorted(found, key=lambda pair: -max(result.n for result in pair[1]))
    for place, (images, results) in enumerate(most):
        after.append(Paragraph(f"Of {images}:"))
        after += [accuracy_table(results)] if place else evaluation(results)
        if any(result.is_attack for result in results):
            after.append(attack_table(results))
    after += [
        Heading(2, "Data and versions"),
        Paragraph(f"Trained on {data}."),
        table("Written with", ["package", "version"], list(versions().items())),
    ]
    page = "\n\n".join([markdown(before), use, markdown(after)])
    return f"---\n{metadata(title, found)}---\n\n{page}\n"


def metadata(title: str, found: Iterable[tuple[str, list[AttackResult]]]) -> str:
    """Return the head of a card as the hub reads it, with the accuracies as its `model-index`."""
    about: dict[str, Any] = {
        "library_name": "lightning-rob",
        "pipeline_tag": "image-classification",
        "tags": ["adversarial-robustness"],
    }
    task, results = {"type": about["pipeline_tag"]}, []
    for images, rows in found:
        metrics = []
        for row in rows:
            within = ", ".join([row.name, *threats(row, rows)])
            name = "accuracy" if row.name == "clean" else f"robust accuracy ({within})"
            # Models are sorted by these numbers as if they were those of the whole defense.
            if row.target == WHOLE and math.isfinite(row.accuracy):
                value = round(row.accuracy, 4)
                metrics.append({"type": "accuracy", "name": name, "value": value})
        data = {"name": images, "type": images.partition(",")[0].lower()}
        results.append({"task": task, "dataset": data, "metrics": metrics})
    if results:
        about["model-index"] = [{"name": title, "results": results}]
    return yaml.safe_dump(about, sort_keys=False)


def recorded(weights: str, logs: Iterable[Path]) -> list[tuple[str, list[AttackResult]]]:
    """Return data and results of each evaluation of exactly these weights: of all tests, if any."""
    # The cards of per-image results hold the digest of the attacked defense; records of the same
    # process, stage and step belong to it.
    evaluations: dict[tuple[Any, ...], list[AttackResult]] = {}
    data: dict[tuple[Any, ...], str] = {}
    cards_of = {card.resolve() for place in logs for card in place.glob("*/images/*.json")}
    for folder in sorted({card.parents[1] for card in cards_of}):
        # Beside a checkpoint there may be images of others, with files of any content.
        files = folder.glob("images/*.json")
        cards = [mapping_in(text_of(path), json.loads) for path in files]
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
    return tuple(fields.get(name) for name in ("session", "stage", "epoch", "step"))
