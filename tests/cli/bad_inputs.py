"""Common mistakes of users: a command line, the files it names, and a pattern of the error."""

import io
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import torch
import yaml

from lightning_rob.cli import main
from tests.tiny import Blobs, pgd, recipe, robust_eval

Make = Callable[[Path], list[object]]
SKEWED = {"bytes": lambda x, y: (255 * x, y), "label": lambda x, y: (x, y + 4)}


class Skewed(Blobs):
    """Images or labels with a common mistake."""

    def __init__(self, how: str, train_size: int = 96, test_size: int = 33) -> None:
        super().__init__(train_size, test_size)
        self.how = how

    def source(self, train: bool):
        return [SKEWED[self.how](x, y) for x, y in super().source(train)]


class Refusing:
    """Pickles into a call of `print`."""

    def __reduce__(self):
        return print, ("code of a checkpoint was run",)


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


def saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
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


def attack(**options: object) -> Make:
    return fit(*(f"--model.init_args.attack.init_args.{k}={v}" for k, v in options.items()))


def evaluated(**options: object) -> Make:
    given = robust_eval({"apgd": pgd()}) | {}
    given["init_args"] = given["init_args"] | options
    return lambda folder: ["fit", "--config", recipe(folder, **{"trainer__callbacks+": [given]})]


def config(content: bytes | str, *more: str, command: str = "fit") -> Make:
    return lambda folder: [command, "--config", put(folder, "given.yaml", content), *more]


def beside(content: bytes | str) -> Make:
    """A good recipe and then another configuration file."""
    return lambda folder: [
        *("fit", "--config", recipe(folder)),
        *("--config", put(folder, "given.yaml", content)),
    ]


def ckpt(content: Callable[[], bytes | str], command: str = "test", *more: str) -> Make:
    return lambda folder: [command, "--ckpt_path", put(folder, "given.ckpt", content()), *more]


def skewed(how: str, *more: str) -> Make:
    data = {"class_path": "tests.cli.bad_inputs.Skewed", "init_args": {"how": how}}
    return lambda folder: ["fit", "--config", recipe(folder, data=data), *more]


def weights_from(content: Callable[[], bytes | str]) -> Make:
    """A network that loads its weights from a file."""

    def make(folder: Path) -> list[object]:
        path = put(folder, "given.pt", content())
        return [*fit()(folder), f"--model.init_args.checkpoints=[{path}, null]"]

    return make


def images_from(content: Callable[[], bytes | str], name: str) -> Make:
    def make(folder: Path) -> list[object]:
        source = {"class_path": "tests.tiny.Blobs"}
        options = {"source": source, "images": str(put(folder, name, content()))}
        data = {"class_path": "lightning_rob.data.SourceTargetData", "init_args": options}
        return ["fit", "--config", recipe(folder, data=data)]

    return make


def given(*args: object) -> Make:
    return lambda folder: [str(arg).replace("FOLDER", str(folder)) for arg in args]


MODEL = "--model.init_args."
RECIPE_KEY = "lightning_rob_recipe"
EPS = "eps must be a finite radius >= 0, got"
ARGUMENTS: dict[str, tuple[Make, str]] = {
    "eps negative": (attack(**{"threat.eps": -1}), f"{EPS} -1.0"),
    "steps half": (attack(steps=2.5), "expected a whole number. Got value: 2.5"),
    "objective a word": (attack(objective="loss"), "nothing here is called 'loss'"),
    "attack no attack": (fit(f"{MODEL}attack=torch.nn.Linear"), "Attack"),
    "probs sum": (fit(f"{MODEL}probs=[0.9, 0.3]"), "probs must sum to 1, got 1.2"),
    "epochs other": (fit("--trainer.max_epochs=3"), "trainer.max_epochs must be 4"),
    "checkpoints missing": (fit(f"{MODEL}checkpoints=[no.pt, null]"), r"no\.pt"),
    "data missing": (fit("--data=CIFAR10", "--data.root=nowhere"), "CIFAR10 is not in"),
    "seed negative": (fit("--seed_everything=-5"), "-5 is not in bounds"),
    "accelerator": (fit("--trainer.accelerator=abacus"), "abacus"),
    "callbacks without +": (fit("--trainer.callbacks=x.yaml"), r"write --trainer.callbacks\+="),
    "callback missing": (
        fit("--trainer.callbacks+=callbacks/no.yaml"),
        "there is no file callbacks/no.yaml",
    ),
    "attacks empty": (evaluated(attacks={}), "at least one attack, got an empty dict"),
    "allow the parser": (fit("--allow-import=jsonargparse"), "would let a recipe change"),
}
CONFIGS: dict[str, tuple[Make, str]] = {
    "a folder": (given("fit", "--config", "FOLDER"), "cannot be read as a configuration file"),
    "bytes": (config(bytes(range(256))), "cannot be read as a configuration file"),
    "brackets": (config("model: {class_path: BAT"), "given.yaml"),
    "key twice": (beside("trainer:\n  max_epochs: 4\n  max_epochs: 5\n"), "'max_epochs' is given"),
    "cycle of includes": (
        lambda f: ["fit", "--config", put(f, "given.yaml", f"config: {f}/given.yaml\n")],
        "loop",
    ),
    "deep": (beside("x: " + 500 * "[" + 500 * "]"), "more than 60 levels"),
    "python tag": (beside("x: !!python/object/apply:print [y]\n"), "asks for Python objects"),
    "callbacks": (beside("trainer:\n  callbacks: []\n"), r"write `callbacks\+:`"),
    "class_path missing": (
        config("model: {init_args: {}}\ndata: Digits5k\n"),
        "needs its class: class_path is missing",
    ),
    "class of a stranger": (beside("model: {class_path: mine.Net}\n"), "--allow-import mine"),
    "weights_only": (beside("weights_only: false\n"), "weights_only must be true"),
    "ckpt_path far away": (beside("ckpt_path: http://x.invalid/a.ckpt\n"), "no checkpoint http"),
}
CHECKPOINTS: dict[str, tuple[Make, str]] = {
    "html": (ckpt(lambda: "<!DOCTYPE html>\n<html></html>"), "it is an HTML page"),
    "half": (ckpt(lambda: trained()[: len(trained()) // 2]), "or is cut short"),
    "code": (ckpt(lambda: saved({"state_dict": {}, "x": Refusing()})), r"holds a \S*print"),
    "tensor": (ckpt(lambda: saved(torch.zeros(3))), "has no state_dict"),
    "no recipe": (ckpt(lambda: saved({"state_dict": {}})), "add --config"),
    "recipe broken": (ckpt(lambda: changed(**{RECIPE_KEY: "model: {"})), "given.ckpt"),
    "other width": (
        ckpt(trained, "test", f"{MODEL}net.init_args.width=8"),
        "another architecture than the model: 14 weights of another shape",
    ),
    "resume from a page": (
        lambda f: [*fit()(f), "--ckpt_path", put(f, "a.ckpt", "<html></html>")],
        "it is an HTML page",
    ),
    "member from a page": (weights_from(lambda: "<html></html>"), "it is an HTML page"),
    "member not finite": (
        weights_from(lambda: saved({k: v * float("nan") for k, v in tiny_state().items()})),
        "are not finite",
    ),
}


def tiny_state() -> dict[str, torch.Tensor]:
    state = torch.load(io.BytesIO(trained()), weights_only=True)["state_dict"]
    return {k.removeprefix("members.0."): v for k, v in state.items() if "members.0." in k}


RANGE = r"images must lie in \[0.0, 1.0\]"
DATA: dict[str, tuple[Make, str]] = {
    "to 255": (skewed("bytes"), RANGE),
    "labels above": (skewed("label"), "labels must be 0 … 3 for 4 classes"),
    "one image": (fit("--data.init_args.train_size=1"), "val_size must be below the 1 images"),
    "images to 255": (
        images_from(lambda: saved(255 * torch.rand(5, 3, 8, 8)), "x.pt"),
        r"must lie in \[0, 1\]",
    ),
}
SWEEP = partial(given, "sweep", "--ckpt_path=no.ckpt")
COMMANDS: dict[str, tuple[Make, str]] = {
    "fit alone": (given("fit"), "say what to run: --config RECIPE"),
    "sweep by zero": (SWEEP("--over=eps", "--values=1/0"), "--values takes numbers"),
    "sweep missing": (SWEEP("--over=eps", "--values=1/255"), r"no checkpoint no\.ckpt"),
    "tune missing": (
        lambda f: ["tune", "--config", recipe(f), "--space", f / "no.yaml"],
        "cannot be read as a search space",
    ),
    "tune key twice": (
        lambda f: ["tune", "--config", recipe(f), "--space", put(f, "s.yaml", "a: 1\na: 2\n")],
        "'a' is given twice",
    ),
    "bpda transform": (
        given("bpda", "--out=FOLDER/x", "--data=Digits5k", "--transforms=Blurr"),
        "Blurr",
    ),
    "report missing": (given("report", "FOLDER/nowhere"), "nowhere"),
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
