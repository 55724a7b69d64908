"""`lightning-rob export`: a defense as a program for torch or ONNX Runtime, or as a folder."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightning_rob.commands.base import Run
from lightning_rob.commands.configs import ExportConfig
from lightning_rob.commands.formats import FORMATS, Predict
from lightning_rob.commands.model_folder import write_model_folder
from lightning_rob.defenses import Defense
from lightning_rob.evaluation.groups import Unpack, counted, regrouped
from lightning_rob.evaluation.records import versions
from lightning_rob.randomness import Streams
from lightning_rob.runtime.files import atomic_write
from lightning_rob.runtime.identity import fingerprint
from lightning_rob.transforms import Transform

SIZES = (1, 3, 8)  # batch sizes at which predictions are compared
TOLERANCE = 1e-5
MAX_IMAGES = 4096  # torch chooses other kernels above some size, so there has to be a bound
TRACED_IMAGES = 8

Inputs = tuple[Tensor, ...]


def run(config: ExportConfig, run: Run) -> None:
    """Export the defense of a checkpoint, and print how exact the program is.

    Raises:
        ValueError: the defense cannot be exported.
        OSError: the file cannot be written.
    """
    if run.checkpoint is None:
        raise ValueError("say whose weights: lightning-rob export CHECKPOINT")
    path = config.out or Path()  # which the config has checked
    if config.format == "safetensors":
        write_model_folder(run, path)
        print(f"{type(run.defense).__name__} in {path}: lightning_rob.load({str(path)!r})")
        return
    images, keys = first_images(run.data, config.images, run.inputs.unpack)
    seed = int(getattr(run.model, "seed", 0))
    try:
        card = export(run.defense, path, images, keys, seed, config.batch_size)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from error
    print(
        f"{card['defense']} under {card['rule']}, {card['draws']} draws, in {path}: "
        f"predictions on {card['compared_images']} test images differ by at most "
        f"{card['largest_difference']:.1e} after loading it back"
    )
    many, *shape = card["inputs"]["images"]["shape"]
    print(
        f"It takes {many} images of {' x '.join(map(str, shape))} at a time, and no others: for "
        "another size export again, from data of that size"
    )


def first_images(
    data: LightningDataModule, count: int, unpack: Unpack | None = None
) -> tuple[Tensor, Tensor]:
    """Return the first test images [N, C, H, W] and their indices [N]."""
    data.setup("test")
    x, _, index = next(regrouped(counted(data.test_dataloader(), unpack), count))
    return x, index


def export(
    defense: Defense,
    path: Path,
    example: Tensor,
    keys: Tensor | None = None,
    seed: int = 0,
    batch: int | None = None,
) -> dict[str, Any]:
    """Write a defense as a program, if the loaded program gives the defense's predictions.

    The program takes images and, for a randomized defense, keys [B] int64: equal keys draw equal
    noise, and the images' indices that of `lightning-rob predict`.

    Args:
        defense: one that is not transductive.
        path: the file: *.pt2 for torch.export, *.onnx for ONNX.
        example: [N, C, H, W] images in [0, 1] on which predictions are compared.
        keys: [N] int64, theirs; None numbers them.
        seed: of the noise, beside the keys.
        batch: images at a time; None for any number up to 4096.

    Returns:
        The content of the program's card (`read_card`), and the "largest_difference" of a
        probability.

    Raises:
        ValueError: it cannot be exported to such a file, or the program's predictions differ.
    """
    if defense.transductive:
        raise ValueError(
            f"{type(defense).__name__} is transductive: it learns from every test batch before it "
            "predicts, and an exported program cannot learn"
        )
    net, form = KeyedDefense(deepcopy(defense).cpu(), seed).eval(), FORMATS[path.suffix]
    inputs = _inputs(example, keys, batch)
    if not is_randomized(net.defense, inputs[0]):
        inputs = inputs[:1]
    elif not form.randomized:
        raise ValueError(
            f"{type(defense).__name__} predicts at random, by integers that overflow, for which "
            "ONNX defines no result: export a .pt2"
        )
    program = trace(net, inputs, batch)
    card = _card(net, inputs, batch)

    def write(draft: Path) -> None:
        form.save(program, json.dumps(card, indent=1), draft)
        # Checked before the file gets its name, so a wrong program is never there.
        card["largest_difference"] = _largest_difference(net, form.load(draft), inputs, batch)

    atomic_write(path, write)
    return card


def read_card(path: Path | str) -> dict[str, Any]:
    """Return the description stored in an exported program."""
    card: dict[str, Any] = json.loads(FORMATS[Path(path).suffix].read_card(Path(path)))
    return card


class KeyedDefense(nn.Module):
    """A defense whose randomness is derived from a second input, as a graph needs it.

    Args:
        defense: predicts.
        seed: the same as of `lightning-rob predict`.
    """

    def __init__(self, defense: Defense, seed: int) -> None:
        super().__init__()
        self.defense = defense
        self.seed = seed

    def forward(self, images: Tensor, keys: Tensor | None = None) -> Tensor:
        """Map [B, C, H, W] in [0, 1] and [B] int64 to [B, K]; deterministic without keys."""
        generator = None if keys is None else Streams.from_index(keys, self.seed)
        probabilities: Tensor = self.defense(images, generator)
        return probabilities


class KeyedTransform(nn.Module):
    """A single transform, to find out which of several cannot be exported."""

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, images: Tensor, keys: Tensor) -> Tensor:
        """Map [B, C, H, W] and [B] to [B, C, H, W]."""
        return self.transform(images, *self.transform.sample(images, Streams.from_index(keys, 0)))


def trace(net: KeyedDefense, inputs: Inputs, batch: int | None) -> ExportedProgram:
    """Return the program of a defense.

    Args:
        net: in evaluation mode.
        inputs: images [N, C, H, W] and, for a randomized defense, keys [N].
        batch: images at a time; None for any number.

    Raises:
        ValueError: there is no such program; names the transforms that prevent it.
    """
    try:
        return _graph(net, inputs, batch)
    except Exception as error:  # tracing may raise any kind
        defenses = [part for part in net.defense.modules() if isinstance(part, Defense)]
        transforms = [pair for defense in defenses for pair in defense.transforms.items()]
        culprits = [name for name, one in transforms if not _is_exportable(one, inputs)]
        reason = f"because of {', '.join(culprits)} " if culprits else ""
        raise ValueError(
            f"{type(net.defense).__name__} cannot be exported {reason}"
            f"({type(error).__name__}: {(str(error).strip() or 'no reason').splitlines()[0][:200]})"
        ) from error


def _graph(net: nn.Module, inputs: Inputs, batch: int | None) -> ExportedProgram:
    """Trace a module on a few of the inputs."""
    some = tuple(part[: batch or TRACED_IMAGES] for part in inputs)
    shape = None if batch else {0: Dim("batch", min=1, max=MAX_IMAGES)}
    with torch.no_grad():
        net(*some)  # constants cached by a first call must not be tensors of the trace
        return torch.export.export(net, some, dynamic_shapes=(shape,) * len(some), strict=True)


def is_randomized(defense: Defense, images: Tensor) -> bool:
    """Whether a prediction draws random numbers."""
    generator = torch.Generator()
    before = generator.get_state()
    with torch.no_grad():
        defense(images[:1], generator)
    return not torch.equal(before, generator.get_state())


def _is_exportable(transform: Transform, inputs: Inputs) -> bool:
    keys = torch.arange(len(inputs[0]))
    try:
        _graph(KeyedTransform(transform), (inputs[0], keys), None)
    except Exception:  # tracing may raise any kind
        return False
    return True


def _inputs(example: Tensor, keys: Tensor | None, batch: int | None) -> Inputs:
    """Images and keys on the CPU: at least two, and a multiple of `batch`."""
    keys = torch.arange(len(example)) if keys is None else keys.to("cpu", torch.int64)
    unit = batch or 2
    chosen = torch.arange(-(-len(example) // unit) * unit) % len(example)
    return example.detach().to("cpu", torch.float32)[chosen], keys[chosen]


def _card(net: KeyedDefense, inputs: Inputs, batch: int | None) -> dict[str, Any]:
    """Describe the program: inputs, outputs, defense, and what it was compared on."""
    defense, images = net.defense, inputs[0]
    with torch.no_grad():
        classes = net(*(part[: batch or 1] for part in inputs)).shape[1]
    shape = [batch or f"1 to {MAX_IMAGES}", *images.shape[1:]]
    described = {"images": {"shape": shape, "type": "float32", "range": [0, 1]}}
    if len(inputs) > 1:
        about = "equal keys draw equal noise; indices give the noise of `predict`"
        described["keys"] = {"shape": shape[:1], "type": "int64", "about": about}
    return {
        "inputs": described,
        "outputs": {"shape": [shape[0], classes], "about": "probability of predicting class k"},
        "classes": classes,
        "defense": type(defense).__name__,
        "rule": getattr(defense.rule, "__name__", repr(defense.rule)),
        "draws": len(defense.weights),
        "randomized": len(inputs) > 1,
        "seed": net.seed,
        "weights": fingerprint(defense),
        "compared_images": len(images),
        "tolerance": TOLERANCE,
        "versions": versions(),
    }


def _largest_difference(
    net: KeyedDefense, program: Predict, inputs: Inputs, batch: int | None
) -> float:
    """Return the largest difference of a probability, over several batch sizes.

    Raises:
        ValueError: it is above 1e-5.
    """
    largest = torch.zeros(())
    for size in (batch,) if batch else (*SIZES, min(len(inputs[0]), MAX_IMAGES)):
        some = [part if batch or size > max(SIZES) else part[:24] for part in inputs]
        for chunk in zip(*(torch.split(part, size) for part in some), strict=True):
            with torch.no_grad():
                difference = (program(*chunk) - net(*chunk)).abs().amax()
            largest = torch.maximum(largest, difference)  # keeps a NaN, unlike Python's max
    if not largest <= TOLERANCE:
        raise ValueError(
            f"the exported program answers otherwise, by up to {float(largest):.2g} where "
            f"{TOLERANCE} is allowed; nothing was written"
        )
    return float(largest)
