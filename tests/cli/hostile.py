"""Files of a stranger, each of which would leave a file behind if its code were run."""

import io
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import torch
import yaml

from lightning_rob.cli import main
from tests.cli.bad_inputs import RECIPE_KEY, changed, put, saved, trained
from tests.tiny import recipe

Make = Callable[[Path], list[object]]
CANARY = "was_run"
MODULE = f"""
from pathlib import Path
from torch import nn
Path({CANARY!r}).touch()
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, 4))
def model():
    return Net()
"""
TOUCH = f"open({CANARY!r}, 'w').close()"


class Exec:
    """Pickles into code."""

    def __reduce__(self):
        return exec, (TOUCH,)


def ckpt(content: Callable[[], bytes], *command: str) -> Make:
    return lambda folder: [
        *(command or ("test",)),
        "--ckpt_path",
        put(folder, "given.ckpt", content()),
    ]


def with_recipe(**parts: object) -> Make:
    """A checkpoint whose recipe asks for more than it should."""

    def content() -> bytes:
        held = torch.load(io.BytesIO(trained()), weights_only=True)
        return changed(**{RECIPE_KEY: yaml.safe_dump(yaml.safe_load(held[RECIPE_KEY]) | parts)})

    return ckpt(content)


def model(**parts: object) -> Make:
    """A recipe with other arguments of its model."""
    changes = {f"model__init_args__{name}": part for name, part in parts.items()}
    return lambda folder: ["fit", "--config", recipe(folder, **changes)]


def callback(path: str, **options: object) -> Make:
    given = {"class_path": path, "init_args": options}
    return lambda folder: ["fit", "--config", recipe(folder, **{"trainer__callbacks+": [given]})]


def beside(text: str) -> Make:
    return lambda folder: [
        "fit",
        "--config",
        recipe(folder),
        "--config",
        put(folder, "x.yaml", text),
    ]


def object_of(path: str, **options: object) -> dict[str, object]:
    return {"class_path": path, "init_args": options}


def evil() -> bytes:
    return saved({"state_dict": {}, "x": Exec()})


def with_evil(make: Make) -> Make:
    """A command line that may name a checkpoint with code in it."""

    def also(folder: Path) -> list[object]:
        put(folder, "evil.ckpt", evil())
        return make(folder)

    return also


LOAD = object_of("torch.load", f="evil.ckpt", weights_only=False)
HUB = object_of("torch.hub.load", repo_or_dir=".", model="model", source="local", trust_repo=True)
FILES: dict[str, Make] = {
    "checkpoint with code": ckpt(evil),
    "checkpoint of the old kind with code": ckpt(
        lambda: saved({"state_dict": Exec()}, _use_new_zipfile_serialization=False)
    ),
    "checkpoint to resume from": lambda f: [*beside("{seed_everything: 1}")(f), *ckpt(evil)(f)[1:]],
    "recipe in a checkpoint, a module beside it": with_recipe(model=object_of("stranger.Net")),
    "recipe in a checkpoint, a tag": ckpt(
        lambda: changed(**{RECIPE_KEY: f"model: !!python/object/apply:exec [{TOUCH!r}]\n"})
    ),
    "hyper-parameters with a class": ckpt(
        lambda: changed(
            **{RECIPE_KEY: None},
            hyper_parameters={"_class_path": "stranger.Net", "_instantiator": "stranger.model"},
        )
    ),
    "class of another kind": beside("model: {class_path: stranger.Net}\n"),
    "callback that is a process": callback("subprocess.Popen", args=["touch", CANARY]),
    "exec": model(net=object_of("builtins.exec", source=TOUCH)),
    "a function by way of a trusted module": model(net="lightning_rob.nets.weights.os.system"),
    "the hub": model(net=HUB),
    "a loader": with_evil(model(net=LOAD)),
    "an allowance in a recipe": beside(
        "allow_import: stranger\nmodel: {class_path: stranger.Net}\n"
    ),
    "weights_only": with_evil(beside("weights_only: false\nckpt_path: evil.ckpt\n")),
    "search space": lambda f: [
        *("tune", "--config", recipe(f), "--space"),
        put(f, "s.yaml", f"variables: !!python/object/apply:exec [{TOUCH!r}]\n"),
    ],
    "help on a class": lambda f: ["fit", "--model.help", "stranger.Net"],
    "data for bpda": lambda f: ["bpda", "--out", f / "nets", "--data", "stranger.Net"],
}


def outcome(name: str, folder: Path) -> tuple[bool, object, str]:
    """Return whether code was run, the exit code and stderr, in a folder with a module."""
    for file in ("stranger.py", "hubconf.py"):
        put(folder, file, MODULE)
    args = list(map(str, FILES[name](folder)))
    errors = io.StringIO()
    sys.path.insert(0, str(folder))  # as `python -m lightning_rob` has it
    code: object = 0
    try:
        with chdir(folder), redirect_stderr(errors), redirect_stdout(io.StringIO()):
            main(args)
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.path.remove(str(folder))
        for module in ("stranger", "hubconf"):
            sys.modules.pop(module, None)
    return (folder / CANARY).exists(), code, errors.getvalue()
