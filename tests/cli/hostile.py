"""Files of a stranger, each of which would leave a file behind if its code were run."""

import io
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout

import torch
import yaml

from tests.cli.bad_inputs import RECIPE_KEY, changed, ckpt, fit, put, saved, trained
from tests.pieces import spec
from tests.tiny import exit_code, recipe

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
TAG = f"!!python/object/apply:exec [{TOUCH!r}]\n"


class Exec:
    """Pickles into code."""

    def __reduce__(self):
        return exec, (TOUCH,)


def with_recipe(**parts):
    """A checkpoint whose recipe asks for more than it should."""

    def content() -> bytes:
        held = torch.load(io.BytesIO(trained()), weights_only=True)
        return changed(**{RECIPE_KEY: yaml.safe_dump(yaml.safe_load(held[RECIPE_KEY]) | parts)})

    return ckpt(content)


def net(path, **options):
    """A recipe with another network."""
    return fit(model__init_args__net=spec(path, **options))


def beside(text):
    """A recipe and a file beside it."""
    return lambda folder: [*fit()(folder), "--config", put(folder, "x.yaml", text)]


def evil() -> bytes:
    return saved({"state_dict": {}, "x": Exec()})


def with_evil(make):
    """A command line that may name a checkpoint with code in it."""
    return lambda folder: (put(folder, "evil.ckpt", evil()), make(folder))[1]


HUB = {"repo_or_dir": ".", "model": "model", "source": "local", "trust_repo": True}
SYSTEM = "lightning_rob.nets.weights.os.system"
SPACE = f"variables: {TAG}"
POPEN = spec("subprocess.Popen", args=["touch", CANARY])
PARAMETERS = {"_class_path": "stranger.Net", "_instantiator": "stranger.model"}
PARAMETERS = {RECIPE_KEY: None, "hyper_parameters": PARAMETERS}
FILES = {
    "checkpoint with code": ckpt(evil),
    "checkpoint of the old kind with code": ckpt(
        lambda: saved({"state_dict": Exec()}, _use_new_zipfile_serialization=False)
    ),
    "checkpoint to resume from": lambda f: [*beside("{seed_everything: 1}")(f), *ckpt(evil)(f)[1:]],
    "recipe in a checkpoint, a module beside it": with_recipe(model=spec("stranger.Net")),
    "recipe in a checkpoint, a tag": ckpt(lambda: changed(**{RECIPE_KEY: f"model: {TAG}"})),
    "a class in hyper-parameters": ckpt(lambda: changed(**PARAMETERS)),
    "class of another kind": beside("model: {class_path: stranger.Net}\n"),
    "callback that is a process": fit(**{"trainer__callbacks+": [POPEN]}),
    "exec": net("builtins.exec", source=TOUCH),
    "a function by way of a trusted module": fit(model__init_args__net=SYSTEM),
    "the hub": net("torch.hub.load", **HUB),
    "a loader": with_evil(net("torch.load", f="evil.ckpt", weights_only=False)),
    "an allowance in a recipe": beside("allow_import: stranger\nmodel: {class_path: stranger.Net}"),
    "weights_only": with_evil(beside("weights_only: false\nckpt_path: evil.ckpt\n")),
    "search space": lambda f: ["tune", "--config", recipe(f), "--space", put(f, "s.yaml", SPACE)],
    "help on a class": lambda f: ["fit", "--model.help", "stranger.Net"],
    "data for bpda": lambda f: ["bpda", "--out", f / "nets", "--data", "stranger.Net"],
}


def outcome(name, folder) -> tuple[bool, object, str]:
    """Return whether code was run, the exit code and stderr, in a folder with a module."""
    for file in ("stranger.py", "hubconf.py"):
        put(folder, file, MODULE)
    args, errors = FILES[name](folder), io.StringIO()
    sys.path.insert(0, str(folder))  # as `python -m lightning_rob` has it
    try:
        with chdir(folder), redirect_stderr(errors), redirect_stdout(io.StringIO()):
            code = exit_code(*args)
    finally:
        sys.path.remove(str(folder))
        for module in ("stranger", "hubconf"):
            sys.modules.pop(module, None)
    return (folder / CANARY).exists(), code, errors.getvalue()
