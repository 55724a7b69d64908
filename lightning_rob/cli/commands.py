"""Commands that need torch: `RobustCLI` builds what they work on."""

import json
import logging
import re
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_rob.cli.errors import shorten_state_dict_error
from lightning_rob.cli.lightning_cli import USER_ERRORS, Parser, RobustCLI, build
from lightning_rob.cli.load import load
from lightning_rob.cli.options import (
    CONFIG,
    CommandLine,
    allows,
    join_values,
    option_types,
    read_command_line,
)
from lightning_rob.commands.base import Run, quiet_lightning
from lightning_rob.commands.bpda import find_transforms
from lightning_rob.commands.checkpoints import load_weights
from lightning_rob.commands.config import function_of
from lightning_rob.data import ImageData
from lightning_rob.defenses import Defense
from lightning_rob.recipes.safe_yaml import load_file, one_line, reading_recipes
from lightning_rob.runtime.errors import InputError

OF_PROCESS = {  # options that all models of `monitor` share
    *("models", "label", "once", "until", "every", "serve", "serve_host", "template")
}


def run_command(line: CommandLine) -> None:
    """Run a command that needs torch: one of `RUNNERS`, or of Lightning."""
    # Advice to install other products, at level INFO like Lightning's devices, which stay.
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(lambda record: "Tip: For seamless cloud" not in str(record.msg))
    warnings.filterwarnings("ignore", ".*LeafSpec")  # of torch on Lightning, in every run
    if line.command != "fit":  # which alone goes on with the list of its best checkpoints
        warnings.filterwarnings("ignore", "The dirpath has changed")
    try:
        RUNNERS.get(line.command, RobustCLI)(line)
    except USER_ERRORS as error:
        raise InputError(str(error)) from error


class CommandCLI(RobustCLI):
    """Builds what `test` (or, without `run`, `fit`) would run, and runs a command instead."""

    in_place_of = "test"

    def before_test(self) -> None:
        command = self.line.command
        # A recipe of trained networks is enough for a sweep alone.
        if not self.config.get("ckpt_path") and command != "sweep":
            own = 'of another network call lightning_rob.evaluate(net, "auto", loader, eps=8/255)'
            own = f"; {own}" if command in ("attack", "audit") else ""
            usage = f"lightning-rob {command} CHECKPOINT"
            raise InputError(f"{command} needs a checkpoint: {usage}{own}")
        super().before_test()

    def test(self, model: Any, datamodule: Any, ckpt_path: str | None = None, **_: Any) -> None:
        if ckpt_path:  # for commands without the trainer; `attack` and `audit` let it load again
            load_weights(model, self.checkpoint_io.load_checkpoint(ckpt_path))
        self.failed = function_of(self.line.command)(self.line.options, self.built(ckpt_path))

    def after_test(self) -> None:
        super().after_test()
        if self.failed:
            raise SystemExit(1)

    def built(self, checkpoint: str | None = None) -> Run:
        configs = [a.partition("=")[2] for a in self.line.args if a.partition("=")[0] in CONFIG]
        model: Any = self.model
        data: Any = self.datamodule
        return Run(
            model,
            data,
            self.trainer,
            self.recipe(),
            name=Path(configs[0]).stem if configs else "study",
            checkpoint=checkpoint,
            command=shlex.join(["lightning-rob", self.line.command, *self.line.given]),
            overrides=tuple(model_overrides(self.line.args)),
        )


def model_overrides(args: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options that change the model of a checkpoint; of a file, its content."""
    for arg in args:
        name, _, value = arg.partition("=")
        if not re.match(r"--(model|config)\b|-c\b", name):
            continue
        is_file = value.endswith((".yaml", ".yml", ".json")) and Path(value).is_file()
        content = load_file(Path(value), "a configuration file") if is_file else value
        if name.startswith("--model") or not isinstance(content, dict):
            yield name, content
        elif "model" in content:
            yield name, content["model"]


def _with_checkpoints(line: CommandLine) -> None:
    def start(own: Sequence[str] = ()) -> tuple[Any, Callable[[Path], Run]]:
        one = line
        if own:  # in place of the options of all models
            named = {arg.partition("=")[0] for arg in own}
            joined = join_values(line.given, option_types(type(line.options)))
            given = [arg for arg in joined if arg.partition("=")[0].rstrip("+") not in named]
            one = read_command_line(line.command, *given, *own)
        return one.options, partial(_build, one)

    starts: dict[str, Callable[[], tuple[Any, Callable[[Path], Run]]]] = {"": start}
    if line.options.models:
        starts = {label: partial(start, own) for label, own in _models(line.options)}
    # Each model is built when its turn comes: a folder may get checkpoints for hours.
    function_of(line.command)(line.options, starts)


def _models(options: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield name and arguments of each model of `monitor --models`."""
    path, kinds = options.models, option_types(type(options))
    content = load_file(path, "a list of models")
    if not (isinstance(content, dict) and content):
        raise ValueError(f"{path} must name models, such as resnet: {{run: resnet.ckpt}}")
    for name, own in content.items():
        if not isinstance(own, Mapping):
            raise ValueError(f"{path}: {name} must have options such as run, got {own!r:.40}")
        if shared := sorted(OF_PROCESS & own.keys()):
            raise ValueError(f"{path}: {name}: {shared[0]} is of the process: --{shared[0]}")
        args = []
        for key, value in own.items():
            is_list = isinstance(value, list) and allows(kinds.get(f"--{key}"), list)
            for part in value if is_list else [value]:
                args.append(f"--{key}={part if isinstance(part, str) else json.dumps(part)}")
        yield str(name), [*args, f"--label={name}", "--models=null"]


def _build(line: CommandLine, path: Path) -> Run:
    plugged = [f"--trainer.callbacks+={file}" for file in line.options.suite or ()]
    # First: the user's own options override them.
    own = ["--trainer.devices=1", "--trainer.logger=false", *plugged]
    line = read_command_line(line.command, *own, *line.given)
    line = replace(line, args=[f"--ckpt_path={path}", *line.args])
    return CommandCLI(line, run=False).built(str(path))


def _with_trainings(line: CommandLine) -> None:
    if paths := [part["ckpt_path"] for part in line.parts if part.get("ckpt_path")]:
        raise InputError(f"every trial trains anew: leave out the ckpt_path {paths[0]}")
    with quiet_lightning():
        cli = CommandCLI(line, run=False)

    def build(recipe: Path) -> Any:
        return RobustCLI([f"--config={recipe}"], run=False)

    function_of(line.command)(line.options, cli.built(), build)


def _with_data(line: CommandLine) -> None:
    with reading_recipes():
        parser = Parser(prog=f"lightning-rob {line.command}")
        parser.add_lightning_class_args(ImageData, "data", subclass_mode=True, required=False)
        args = []
        for arg, part in zip(line.args, line.parts, strict=True):
            option = arg.partition("=")[0]
            if option in CONFIG:
                args += [f"--data={one_line(part['data'])}"] if "data" in part else []
            else:
                args.append(arg)
        parsed = parser.parse_args(args)
        if parsed.data is None:
            raise ValueError("say which images: --data CLASS, such as --data Digits5k")
        data = parser.instantiate_classes(parsed).data
    implied = next(filter(None, map(find_transforms, reversed(line.parts))), None)
    function_of(line.command)(line.options, data, implied)


def _with_submissions(line: CommandLine) -> None:
    def model(path: Path) -> Defense:
        try:
            return load(path)
        except RuntimeError as error:
            raise shorten_state_dict_error(error) from error

    def data(spec: Any) -> ImageData:
        with reading_recipes():
            module: ImageData = build(ImageData, spec)
        return module

    function_of(line.command)(line.options, model, data)


RUNNERS: dict[str, Callable[[CommandLine], object]] = {
    "sweep": CommandCLI,
    "attack": CommandCLI,
    "audit": CommandCLI,
    "certify": CommandCLI,
    "export": CommandCLI,
    "tune": _with_trainings,
    "monitor": _with_checkpoints,
    "bpda": _with_data,
    "leaderboard": _with_submissions,
}
