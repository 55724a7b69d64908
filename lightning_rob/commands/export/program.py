"""`lightning-rob export`: a defense as a program for torch, or as a folder."""

import io
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightning_rob.commands.base import Run
from lightning_rob.commands.export import ExportConfig
from lightning_rob.commands.export.model_folder import write_model_folder
from lightning_rob.defenses import Defense
from lightning_rob.evaluation.groups import counted, regrouped
from lightning_rob.randomness import Streams
from lightning_rob.runtime.files import atomic_write

SIZES = (1, 3, 8)  # batch sizes at which predictions are compared
TOLERANCE = 1e-5
MAX_IMAGES = 4096  # torch chooses other kernels above some size, so there has to be a bound
TRACED_IMAGES = 8

Predict = Callable[..., Tensor]  # images [B, C, H, W], and keys [B] if it has any -> [B, K]
Inputs = tuple[Tensor, ...]


def run(config: ExportConfig, built: Run) -> None:
    """Export the defense of a checkpoint, and print how exact the program is."""
    path = config.out or Path()  # which the config has checked
    if config.format == "safetensors":
        write_model_folder(built, path)
        print(f"{type(built.defense).__name__} in {path}: lightning_rob.load({str(path)!r})")
        return
    built.data.setup("test")
    batches = counted(built.data.test_dataloader(), built.inputs.unpack)
    images, _, keys = next(regrouped(batches, config.images))
    seed = int(getattr(built.model, "seed", 0))
    try:
        difference = export(built.defense, path, images, keys, seed)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from error
    print(
        f"{type(built.defense).__name__} in {path}: predictions on {len(images)} test images "
        f"differ by at most {difference:.1e} after loading it back"
    )
    print(
        f"It takes 1 to {MAX_IMAGES} images of {' x '.join(map(str, images.shape[1:]))} at a time, "
        "and no others: for another size export again, from data of that size"
    )


def export(
    defense: Defense, path: Path, example: Tensor, keys: Tensor | None = None, seed: int = 0
) -> float:
    """Write a defense as a program, if the loaded program gives the defense's predictions.

    The program takes 1 to 4096 images and, for a randomized defense, keys [B] int64: equal keys
    draw equal noise, and the images' indices draw that of `lightning-rob predict`.

    Returns:
        The largest difference of a probability, at most 1e-5.
    """
    if defense.transductive:
        raise ValueError(
            f"{type(defense).__name__} is transductive: it learns from every test batch before it "
            "predicts, and an exported program cannot learn"
        )
    net = KeyedDefense(deepcopy(defense).cpu(), seed).eval()
    keys = torch.arange(len(example)) if keys is None else keys.to("cpu", torch.int64)
    chosen = torch.arange(max(len(example), 2)) % len(example)  # one alone cannot be traced
    inputs: Inputs = (example.detach().to("cpu", torch.float32)[chosen], keys[chosen])
    if not is_randomized(net.defense, inputs[0]):
        inputs = inputs[:1]
    program, differences = trace(net, inputs), []

    def write(draft: Path) -> None:
        # Writing straight to a full disk, torch ends the process.
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        draft.write_bytes(buffer.getvalue())
        # Checked before the file gets its name, so a wrong program is never there.
        with draft.open("rb") as file:
            loaded = torch.export.load(file).module()
        differences.append(_largest_difference(net, loaded, inputs))

    atomic_write(path, write)
    return differences[0]


class KeyedDefense(nn.Module):
    """A defense whose randomness is derived from a second input, as a graph needs it."""

    def __init__(self, defense: Defense, seed: int) -> None:
        super().__init__()
        self.defense = defense
        self.seed = seed

    def forward(self, images: Tensor, keys: Tensor | None = None) -> Tensor:
        """Map [B, C, H, W] in [0, 1] and [B] int64 to [B, K]; deterministic without keys."""
        generator = None if keys is None else Streams.from_index(keys, self.seed)
        return self.defense(images, generator)


def trace(net: KeyedDefense, inputs: Inputs) -> ExportedProgram:
    """Return the program of a defense, given images [N, C, H, W] and perhaps keys [N]."""
    some = tuple(part[:TRACED_IMAGES] for part in inputs)
    shape = {0: Dim("batch", min=1, max=MAX_IMAGES)}
    try:
        with torch.no_grad():
            net(*some)  # constants cached by a first call must not be tensors of the trace
            return torch.export.export(net, some, dynamic_shapes=(shape,) * len(some), strict=True)
    except Exception as error:  # tracing may raise any kind
        reason = (str(error).strip() or "no reason").splitlines()[0][:200]
        raise ValueError(
            f"{type(net.defense).__name__} cannot be exported ({type(error).__name__}: {reason})"
        ) from error


def is_randomized(defense: Defense, images: Tensor) -> bool:
    """Whether a prediction draws random numbers."""
    generator = torch.Generator()
    before = generator.get_state()
    with torch.no_grad():
        defense(images[:1], generator)
    return not torch.equal(before, generator.get_state())


def _largest_difference(net: KeyedDefense, program: Predict, inputs: Inputs) -> float:
    """Return the largest difference of a probability; ValueError if it is above 1e-5."""
    largest = torch.zeros(())
    # A batch of another size runs other kernels, and a program may hold the size that was traced.
    for size in (*SIZES, min(len(inputs[0]), MAX_IMAGES)):
        some = [part if size > max(SIZES) else part[:24] for part in inputs]
        for chunk in zip(*(torch.split(part, size) for part in some), strict=True):
            with torch.no_grad():
                difference = (program(*chunk) - net(*chunk)).abs().amax()
            largest = torch.maximum(largest, difference)  # keeps a NaN, unlike Python's max
    if not largest <= TOLERANCE:
        raise ValueError(
            f"the exported program predicts otherwise, by up to {float(largest):.2g} where "
            f"{TOLERANCE} is allowed; nothing was written"
        )
    return float(largest)
