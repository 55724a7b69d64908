"""Files that name the models of `monitor --models`, each with options of its own."""

import json
from collections.abc import Mapping
from pathlib import Path

from lightning_rob.cli.options import allows, option_types
from lightning_rob.cli.spelling import PARTS
from lightning_rob.commands.config import CommandConfig
from lightning_rob.recipes.safe_yaml import load_file
from lightning_rob.runtime.errors import nearest

OF_PROCESS = {  # options that all models share
    *("models", "label", "once", "until", "every", "stop_at_alarm"),
    *("serve", "serve_host"),
}


def read_models(path: Path, config: type[CommandConfig]) -> dict[str, list[str]]:
    """Return the command line of each model by its name, from a YAML file of names and options."""
    kinds = option_types(config)
    known = {*PARTS, *(option.removeprefix("--") for option in kinds)}
    content = load_file(path, "a list of models")
    if not (isinstance(content, dict) and content):
        raise ValueError(f"{path} must name models, such as resnet: {{run: resnet.ckpt}}")
    models: dict[str, list[str]] = {}
    for name, options in content.items():
        if not isinstance(options, Mapping):
            raise ValueError(f"{path}: {name} must have options such as run, got {options!r:.40}")
        if shared := sorted(OF_PROCESS & options.keys()):
            raise ValueError(f"{path}: {name}: {shared[0]} is of the process: --{shared[0]}")
        args = models.setdefault(str(name), [])
        for key, value in options.items():
            if str(key).partition(".")[0] not in known:
                hint = nearest(str(key), known, "; try --help")
                raise ValueError(f"{path}: {name}: there is no option {key}{hint}")
            is_list = value is not None and allows(kinds.get(f"--{key}"), list)
            for part in value if is_list and isinstance(value, list) else [value]:
                text = part if is_list or isinstance(part, str) else json.dumps(part)
                args.append(f"--{key}{'+' if is_list else ''}={text}")
    return models
