"""The files of `lightning-rob export`: a program of torch.export, or one of ONNX."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram

CARD = "lightning_rob.json"

Predict = Callable[..., Tensor]  # images [B, C, H, W], and keys [B] if it has any -> [B, K]


class Format(NamedTuple):
    """How programs are written and read.

    Args:
        save: writes a program and its card, as text, to a path.
        load: returns the program in a file, as a function of its inputs.
        read_card: returns the card in a file.
        randomized: whether a program can draw the noise of its keys.
    """

    save: Callable[[ExportedProgram, str, Path], None]
    load: Callable[[Path], Predict]
    read_card: Callable[[Path], str]
    randomized: bool


def _save_torch(program: ExportedProgram, card: str, path: Path) -> None:
    with path.open("wb") as file:
        torch.export.save(program, file, extra_files={CARD: card})


def _load_torch(path: Path) -> Predict:
    with path.open("rb") as file:
        return torch.export.load(file).module()


def _card_of_torch(path: Path) -> str:
    stored: dict[str, Any] = {CARD: ""}
    with path.open("rb") as file:
        torch.export.load(file, extra_files=stored)
    return str(stored[CARD])


def _save_onnx(program: ExportedProgram, card: str, path: Path) -> None:
    """Convert a program to ONNX.

    Raises:
        ValueError: ONNX has no equivalent of an operation.
    """
    outputs = ["probabilities"]
    try:
        converted = torch.onnx.export(program, dynamo=True, output_names=outputs, verbose=False)
    except torch.onnx.errors.OnnxExporterError as error:
        raise ValueError(f"ONNX cannot express it: {_innermost(error)}; export a .pt2") from error
    assert converted is not None  # as by the exporter of TorchScript
    converted.model.metadata_props[CARD] = card
    path.write_bytes(converted.model_proto.SerializeToString())


def _innermost(error: BaseException) -> str:
    """Return the first line of the error from which all others were raised."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).splitlines()[0][:200]


def _load_onnx(path: Path) -> Predict:
    session = _session(path)
    names = [one.name for one in session.get_inputs()]

    def predict(*inputs: Tensor) -> Tensor:
        given = {name: part.numpy() for name, part in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run(None, given)[0])

    return predict


def _card_of_onnx(path: Path) -> str:
    return str(_session(path).get_modelmeta().custom_metadata_map[CARD])


def _session(path: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


# The noise of keys comes from integers that overflow. The ONNX standard does not define the result:
# another runtime than the one that checked the file could draw other noise, or none.
FORMATS = {
    ".pt2": Format(_save_torch, _load_torch, _card_of_torch, randomized=True),
    ".onnx": Format(_save_onnx, _load_onnx, _card_of_onnx, randomized=False),
}
