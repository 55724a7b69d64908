"""Common mistakes of users: a command line, the files it names, and a pattern of the error."""

import io
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
import yaml

from lightning_rob.cli import main
from tests.tiny import Blobs, recipe

Make = Callable[[Path], list[object]]
SKEWED = {"bytes": lambda x, y: (255 * x, y), "label": lambda x, y: (x, y + 4)}


class Skewed(Blobs):
    """Images or labels with a common mistake."""

    def __init__(self, how: str, train_size: int = 96, test_size: int = 33) -> None:
        super().__init__(train_size, test_size)
        self.how = how

    def source(self, train: bool):
        return [SKEWED[self.how](x, y) for x, y in super().source(train)]


@cache
def trained() -> bytes:
    """A checkpoint of a short run."""
    folder = Path(mkdtemp())
    changes = {"trainer__callbacks+": [{"class_path": "ModelCheckpoint"}], "trainer__max_epochs": 1}
    file = recipe(folder, model__init_args__epochs=[1, 0], **changes)
    content = yaml.safe_load(file.read_text())
    content["model"]["init_args"]["monitor"] = None
    file.write_text(yaml.safe_dump(content))
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        main(["fit", "--config", str(file)])
    return next(folder.rglob("*.ckpt")).read_bytes()


def saved(content: object, **options: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def changed(**parts: object) -> bytes:
    """The checkpoint with other parts; None removes one."""
    content = torch.load(io.BytesIO(trained()), weights_only=True) | parts
    return saved({key: part for key, part in content.items() if part is not None})


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def put(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def fit(*args: str) -> Make:
    return lambda folder: ["fit", "--config", recipe(folder), *args]


def config(content: bytes | str, *more: str, command: str = "fit") -> Make:
    return lambda folder: [command, "--config", put(folder, "given.yaml", content), *more]


def ckpt(content: Callable[[], bytes | str], command: str = "test", *more: str) -> Make:
    return lambda folder: [command, "--ckpt_path", put(folder, "given.ckpt", content()), *more]


def skewed(how: str, *more: str) -> Make:
    data = {"class_path": "tests.cli.bad_inputs.Skewed", "init_args": {"how": how}}
    return lambda folder: ["fit", "--config", recipe(folder, data=data), *more]


def given(*args: object) -> Make:
    return lambda folder: [str(arg).replace("FOLDER", str(folder)) for arg in args]


MODEL = "--model.init_args."
RECIPE_KEY = "lightning_rob_recipe"
ARGUMENTS: dict[str, tuple[Make, str]] = {
    "steps half": (
        fit(f"{MODEL}attack.init_args.steps=2.5"),
        "expected a whole number. Got value: 2.5",
    ),
    "probs sum": (fit(f"{MODEL}probs=[0.9, 0.3]"), "probs must sum to 1, got 1.2"),
    "callbacks without +": (fit("--trainer.callbacks=x.yaml"), r"write --trainer.callbacks\+="),
    "allow the parser": (fit("--allow-import=jsonargparse"), "would let a recipe change"),
}
CONFIGS: dict[str, tuple[Make, str]] = {
    "a folder": (given("fit", "--config", "FOLDER"), "cannot be read as a configuration file"),
    "cycle of includes": (
        lambda f: ["fit", "--config", put(f, "given.yaml", f"config: {f}/given.yaml\n")],
        "loop",
    ),
    "callbacks": (fit("--config={trainer: {callbacks: []}}"), r"write `callbacks\+:`"),
    "class_path missing": (
        config("model: {init_args: {}}\ndata: Digits5k\n"),
        "needs its class: class_path is missing",
    ),
    "ckpt_path far away": (fit("--config={ckpt_path: 'http://x.invalid/a'}"), "no checkpoint http"),
}
CHECKPOINTS: dict[str, tuple[Make, str]] = {
    "half": (ckpt(lambda: trained()[: len(trained()) // 2]), "or is cut short"),
    "tensor": (ckpt(lambda: saved(torch.zeros(3))), "has no state_dict"),
    "no recipe": (ckpt(lambda: saved({"state_dict": {}})), "add --config"),
    "recipe broken": (ckpt(lambda: changed(**{RECIPE_KEY: "model: {"})), "given.ckpt"),
    "other width": (
        ckpt(trained, "test", f"{MODEL}net.init_args.width=8"),
        "another architecture than the model: 14 weights of another shape",
    ),
}


RANGE = r"images must lie in \[0.0, 1.0\]"
DATA: dict[str, tuple[Make, str]] = {
    "to 255": (skewed("bytes"), RANGE),
    "labels above": (skewed("label"), "labels must be 0 … 3 for 4 classes"),
    "one image": (fit("--data.init_args.train_size=1"), "val_size must be below the 1 images"),
}
COMMANDS: dict[str, tuple[Make, str]] = {
    "fit alone": (given("fit"), "say what to run: --config RECIPE")
}
GROUPS = {
    "arguments": ARGUMENTS,
    "config": CONFIGS,
    "checkpoint": CHECKPOINTS,
    "data": DATA,
    "command": COMMANDS,
}
CASES = {
    f"{group}: {name}": case for group, cases in GROUPS.items() for name, case in cases.items()
}


def complaint(name: str, folder: Path) -> str:
    """Describe how a command mishandles a bad input; "" for one clear line and exit code 2."""
    make, wanted = CASES[name]
    errors = io.StringIO()
    try:
        args = list(map(str, make(folder)))
        with redirect_stderr(errors), redirect_stdout(io.StringIO()):
            main(args)
    except SystemExit as stop:
        code = stop.code
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    else:
        return "it was run"
    lines = [line for line in errors.getvalue().splitlines() if "error:" in line]
    text = errors.getvalue()
    if code != 2 or len(lines) != 1 or "Traceback" in text or len(lines[0]) > 500:
        return f"exit code {code}, {text[-600:]}"
    return "" if re.search(wanted, lines[0]) else f"{wanted!r} is not in {lines[0]!r}"
