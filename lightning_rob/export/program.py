"""A defense as one file that needs torch alone, kept only if it answers as the defense does."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import load as load_program
from torch.export import save as save_program

from lightning_rob.defenses import Defense
from lightning_rob.evaluation.records import versions
from lightning_rob.export.tracing import MOST_IMAGES, Answers, Inputs, traced
from lightning_rob.files import write_whole
from lightning_rob.identity import fingerprint

CARD = "lightning_rob.json"
SIZES = (1, 3, 8)
TOLERANCE = 1e-5


def export(
    defense: Defense,
    path: Path,
    example: Tensor,
    keys: Tensor | None = None,
    seed: int = 0,
    batch: int | None = None,
) -> dict[str, Any]:
    """Write a defense as a program, if that gives the defense's answers after it was loaded.

    The program takes images and, where there is chance in the defense, keys [B] int64: equal keys
    draw equal noise, and the images' indices that of `lightning-rob predict`.

    Args:
        defense: what answers; one that does not learn from the test batch.
        path: the file, *.pt2.
        example: [N, C, H, W] images in [0, 1] on which the answers are compared.
        keys: [N] int64, theirs; None numbers them.
        seed: of the noise, beside the keys.
        batch: so many images at a time; None for any number up to 4096.

    Returns:
        What the file says of itself (`read_card`), and "largest_difference" of an answer.

    Raises:
        ValueError: it cannot be exported, or the program answers otherwise.
    """
    if defense.transductive:
        raise ValueError(
            f"{type(defense).__name__} is transductive: it learns from every test batch before it "
            "answers, and an exported program cannot learn"
        )
    net = Answers(deepcopy(defense).cpu(), seed).eval()
    program, inputs = traced(net, _inputs(example, keys, batch), batch)
    card = _card(net, inputs, batch)
    found = []

    def write(draft: Path) -> None:
        with draft.open("wb") as file:
            save_program(program, file, extra_files={CARD: json.dumps(card, indent=1)})
        found.append(_difference(net, draft, inputs, batch))

    write_whole(path, write)
    return card | {"largest_difference": found[0]}


def read_card(path: Path | str) -> dict[str, Any]:
    """What an exported program says of itself."""
    found: dict[str, Any] = {CARD: ""}
    with Path(path).open("rb") as file:
        load_program(file, extra_files=found)
    card: dict[str, Any] = json.loads(found[CARD])
    return card


def _inputs(example: Tensor, keys: Tensor | None, batch: int | None) -> Inputs:
    """Images and keys on the CPU: at least two, and a multiple of `batch`."""
    keys = torch.arange(len(example)) if keys is None else keys.to("cpu", torch.int64)
    unit = batch or 2
    chosen = torch.arange(-(-len(example) // unit) * unit) % len(example)
    return example.detach().to("cpu", torch.float32)[chosen], keys[chosen]


def _card(net: Answers, inputs: Inputs, batch: int | None) -> dict[str, Any]:
    defense, images = net.defense, inputs[0]
    with torch.no_grad():
        classes = net(*(part[: batch or 1] for part in inputs)).shape[1]
    shape = [batch or f"1 to {MOST_IMAGES}", *images.shape[1:]]
    given = {"images": {"shape": shape, "type": "float32", "range": [0, 1]}}
    if len(inputs) > 1:
        about = "equal keys draw equal noise; indices give the noise of `predict`"
        given["keys"] = {"shape": shape[:1], "type": "int64", "about": about}
    return {
        "inputs": given,
        "answers": {"shape": [shape[0], classes], "about": "probability that class k is answered"},
        "classes": classes,
        "defense": type(defense).__name__,
        "rule": getattr(defense.rule, "__name__", repr(defense.rule)),
        "draws": len(defense.weights),
        "chance": len(inputs) > 1,
        "seed": net.seed,
        "weights": fingerprint(defense),
        "compared_images": len(images),
        "tolerance": TOLERANCE,
        "versions": versions(),
    }


def _difference(net: Answers, path: Path, inputs: Inputs, batch: int | None) -> float:
    """The largest difference of an answer, at several batch sizes.

    Raises:
        ValueError: it is beyond 1e-5.
    """
    with path.open("rb") as file:
        program = load_program(file).module()
    largest = torch.zeros(())
    for size in (batch,) if batch else (*SIZES, min(len(inputs[0]), MOST_IMAGES)):
        some = [part if batch or size > max(SIZES) else part[:24] for part in inputs]
        for chunk in zip(*(torch.split(part, size) for part in some), strict=True):
            with torch.no_grad():
                off = (program(*chunk) - net(*chunk)).abs().amax()
            largest = torch.maximum(largest, off)  # which keeps a NaN
    if not largest <= TOLERANCE:
        raise ValueError(
            f"the exported program answers otherwise, by up to {float(largest):.2g} where "
            f"{TOLERANCE} is allowed; nothing was written"
        )
    return float(largest)
