"""Common mistakes of users: a command line, the files it names, and a pattern of the error."""

import io
import re
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

from tests.pieces import spec
from tests.tiny import Blobs, exit_code, recipe
from tests.tiny import fit as fitted

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
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        short = {"model__init_args__epochs": [1, 0], "trainer__max_epochs": 1}
        return fitted(Path(mkdtemp()), **short).read_bytes()


def saved(content, **options) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def changed(**parts) -> bytes:
    """The checkpoint with other parts; None removes one."""
    content = torch.load(io.BytesIO(trained()), weights_only=True) | parts
    return saved({key: part for key, part in content.items() if part is not None})


def put(folder, name, content) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def fit(*args, **changes):
    return lambda folder: ["fit", "--config", recipe(folder, **changes), *args]


def ckpt(content, *more):
    return lambda folder: ["test", "--ckpt_path", put(folder, "given.ckpt", content()), *more]


def skewed(how):
    return fit(data=spec("tests.cli.bad_inputs.Skewed", how=how))


def written(text):
    """A recipe of this text, in which FOLDER is that of the recipe."""
    return lambda f: ["fit", "--config", put(f, "given.yaml", text.replace("FOLDER", str(f)))]


MODEL = "--model.init_args."
RECIPE_KEY = "lightning_rob_recipe"
RANGE = r"images must lie in \[0.0, 1.0\]"
OTHER = "another architecture than the model: 14 weights of another shape"
CASES = {
    "steps half": (fit(f"{MODEL}attack.init_args.steps=2.5"), "a whole number. Got value: 2.5"),
    "probs sum": (fit(f"{MODEL}probs=[0.9, 0.3]"), "probs must sum to 1, got 1.2"),
    "callbacks without +": (fit("--trainer.callbacks=x.yaml"), r"write --trainer.callbacks\+="),
    "allow the parser": (fit("--allow-import=jsonargparse"), "would let a recipe change"),
    "a folder": (lambda f: ["fit", "--config", f], "cannot be read as a configuration file"),
    "cycle of includes": (written("config: FOLDER/given.yaml\n"), "loop"),
    "callbacks": (fit("--config={trainer: {callbacks: []}}"), r"write `callbacks\+:`"),
    "class_path missing": (
        written("model: {init_args: {}}\ndata: Digits5k\n"),
        "needs its class: class_path is missing",
    ),
    "ckpt_path far away": (fit("--config={ckpt_path: 'http://x.invalid/a'}"), "no checkpoint http"),
    "half": (ckpt(lambda: trained()[: len(trained()) // 2]), "or is cut short"),
    "tensor": (ckpt(lambda: saved(torch.zeros(3))), "has no state_dict"),
    "no recipe": (ckpt(lambda: saved({"state_dict": {}})), "add --config"),
    "recipe broken": (ckpt(lambda: changed(**{RECIPE_KEY: "model: {"})), "given.ckpt"),
    "other width": (ckpt(trained, f"{MODEL}net.init_args.width=8"), OTHER),
    "to 255": (skewed("bytes"), RANGE),
    "labels above": (skewed("label"), "labels must be 0 … 3 for 4 classes"),
    "one image": (fit("--data.init_args.train_size=1"), "val_size must be below the 1 images"),
    "fit alone": (lambda _: ["fit"], "say what to run: --config RECIPE"),
}


def complaint(name, folder) -> str:
    """Describe how a command mishandles a bad input; "" for one clear line and exit code 2."""
    make, wanted = CASES[name]
    errors = io.StringIO()
    try:
        with redirect_stderr(errors), redirect_stdout(io.StringIO()):
            code = exit_code(*make(folder))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    text = errors.getvalue()
    lines = [line for line in text.splitlines() if "error:" in line]
    if code != 2 or len(lines) != 1 or "Traceback" in text or len(lines[0]) > 500:
        return f"exit code {code}, {text[-600:]}"
    return "" if re.search(wanted, lines[0]) else f"{wanted!r} is not in {lines[0]!r}"
