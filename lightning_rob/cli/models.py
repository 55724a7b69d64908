"""Files that name the models of `monitor --models`, each with options of its own."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_rob.cli.options import allows, option_types
from lightning_rob.commands.configs import CommandConfig
from lightning_rob.recipes.plugins import resolve_names
from lightning_rob.recipes.safe_yaml import load_file
from lightning_rob.runtime.errors import nearest

OF_PROCESS = {  # options that all models share
    *("models", "label", "once", "until", "every", "stop_at_alarm"),
    *("serve", "serve_host", "template", "metrics_file"),
}


def read_models(path: Path, config: type[CommandConfig]) -> dict[str, list[str]]:
    """Return the command line of each model by its name.

    Args:
        path: YAML file, a mapping from names to options as on the command line, without hyphens.
        config: options of the command.

    Raises:
        ValueError: the file has another content, or an option that all models share.
    """
    kinds = option_types(config)
    content = load_file(path, "a list of models")
    if not (isinstance(content, dict) and content):
        raise ValueError(f"{path} must name models, such as resnet: {{run: resnet.ckpt}}")
    for name, options in content.items():
        if not isinstance(options, Mapping):
            raise ValueError(f"{path}: {name} must have options such as run, got {options!r:.40}")
        if shared := sorted(OF_PROCESS & options.keys()):
            raise ValueError(f"{path}: {name}: {shared[0]} is of the process: --{shared[0]}")
        known = {"trainer", "data", "model", *(key[2:] for key in kinds)}
        if unknown := [key for key in options if str(key).partition(".")[0] not in known]:
            hint = nearest(str(unknown[0]), known, "; try --help")
            raise ValueError(f"{path}: {name}: there is no option {unknown[0]}{hint}")
    return {
        str(name): resolve_names([arg for key in own for arg in _args(str(key), own[key], kinds)])
        for name, own in content.items()
    }


def _args(name: str, value: Any, kinds: Mapping[str, Any]) -> list[str]:
    """Return the arguments for an option; of a list, one for each entry."""
    if value is not None and allows(kinds.get(f"--{name}"), list):
        return [f"--{name}+={part}" for part in (value if isinstance(value, list) else [value])]
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}"]
