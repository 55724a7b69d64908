"""Commands whose options are a dataclass: `RobustCLI` builds what they work on."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_type_hints

import jsonargparse
import yaml

from lightning_rob.cli import plugins
from lightning_rob.cli.configs import config_files, read_config
from lightning_rob.cli.lightning_cli import USER_ERRORS, Parser, RobustCLI
from lightning_rob.cli.options import allows, spell_out
from lightning_rob.commands.base import Run, quiet_lightning
from lightning_rob.commands.checkpoints import load_weights
from lightning_rob.commands.configs import CONFIGS, CommandConfig
from lightning_rob.data import ImageData
from lightning_rob.errors import InputError
from lightning_rob.safe_yaml import parse_fraction_arg, plain_yaml


def run_command(name: str, args: Sequence[str]) -> None:
    """Run a command of `CONFIGS` that needs torch.

    Args:
        name: of the command.
        args: its command line.

    Raises:
        InputError: it cannot be run.
    """
    runners = {
        "run": _with_run,
        "trainings": _with_trainings,
        "checkpoints": _with_checkpoints,
        "data": _with_data,
    }
    try:
        if not args:
            CONFIGS[name]()  # raises an error that names the missing option
        runners[CONFIGS[name].receives](name, plugins.spell_out(args))
    except USER_ERRORS as error:
        raise InputError(str(error)) from error


def _function(name: str) -> Any:
    return import_module(f"lightning_rob.commands.{name}").run


def _options(config: type[CommandConfig], parsed: Any) -> Any:
    return config(**{field.name: parsed[field.name] for field in fields(config)})


def parse_options(name: str, args: Sequence[str]) -> Any:
    """Return a command's own options, of the command line and of its configuration files.

    Args:
        name: of the command.
        args: its command line, spelled out; options of other parsers are ignored.

    Raises:
        ValueError: an option without meaning.
    """
    config = CONFIGS[name]
    own = {f"--{field.name}" for field in fields(config)}
    parser = Parser(prog=f"lightning-rob {name}")
    files: Any = jsonargparse.ActionConfigFile  # type: ignore[attr-defined]
    parser.add_argument("--config", action=files)
    parser.add_class_arguments(config, instantiate=False)
    kept = []
    for path in filter(os.path.isfile, config_files(args)):  # the run's parser refuses others
        part = {key: v for key, v in read_config(path).items() if f"--{key}" in own}
        kept += [f"--config={yaml.safe_dump(part)}"] if part else []
    kinds = get_type_hints(config)
    texts = {f"--{field.name}" for field in fields(config) if allows(kinds[field.name], str)}
    for arg in args:
        if (option := arg.partition("=")[0].rstrip("+")) in own:
            kept.append(arg if option in texts else parse_fraction_arg(arg))
    with plain_yaml():
        return _options(config, parser.parse_args(kept))


class CommandCLI(RobustCLI):
    """Builds what `test` (or, without a subcommand, `fit`) would run, for a command.

    Args:
        name: of the command.
        args: its command line.
        run: run the command in place of `test`; False only builds.
    """

    def __init__(self, name: str, args: Sequence[str], run: bool = True) -> None:
        self.name = name
        self.config_class = CONFIGS[name]
        self.args = args
        self.failed = False
        self.study = next((Path(path).stem for path in config_files(args)), "study")
        spelled = spell_out(args, self.config_class)
        self.options = parse_options(name, spelled)  # before anything is read or built
        super().__init__(["test", *spelled] if run else spelled, run)

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add the command's options to those of the run."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(self.config_class, instantiate=False)

    def before_instantiate_classes(self) -> None:
        """Leave the options of the run alone, so that its recipe is one for `fit` and `test`."""
        super().before_instantiate_classes()
        parsed = self.config[self.subcommand] if self.subcommand else self.config
        for field in fields(self.config_class):
            del parsed[field.name]

    def test(self, model: Any, datamodule: Any, ckpt_path: str | None = None, **_: Any) -> None:
        """Run the command in place of `test`."""
        if ckpt_path:
            load_weights(model, self.checkpoint_io.load_checkpoint(ckpt_path))
        self.failed = bool(_function(self.name)(self.options, self.built(ckpt_path)))

    def built(self, checkpoint: str | None = None) -> Run:
        """Return what was built."""
        recipe = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
        recipe = recipe[self.subcommand] if self.subcommand else recipe
        model: Any = self.model
        data: Any = self.datamodule
        command = shlex.join(["lightning-rob", self.name, *self.args])
        overrides = tuple(model_overrides(self.args))
        trainer = self.trainer
        return Run(model, data, trainer, recipe, self.study, checkpoint, command, overrides)


class CheckpointCLI(CommandCLI):
    """Builds what `test` would run for a checkpoint, without its weights, and does not run it."""

    def test(self, model: Any, datamodule: Any, ckpt_path: str | None = None, **_: Any) -> None:
        """Do nothing: the command decides when to evaluate."""

    def after_test(self) -> None:
        """Do nothing: no accuracies are logged."""


def model_overrides(args: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options that change the model of a checkpoint; of a file, its content."""
    for arg, following in zip_longest(args, args[1:], fillvalue=""):
        name, equals, value = arg.partition("=")
        if not re.match(r"--(model|config)\b|-c\b", name):
            continue
        value = value if equals else following
        is_file = value.endswith((".yaml", ".yml", ".json")) and Path(value).is_file()
        content = read_config(value) if is_file else value
        if name.startswith("--model") or not isinstance(content, dict):
            yield name, content
        elif "model" in content:
            yield name, content["model"]


def _with_checkpoints(name: str, args: Sequence[str]) -> None:
    """Run a command that builds a `Run` for each checkpoint, on one device and without a logger."""
    if args and not args[0].startswith("-"):
        args = ["--run", *args]
    spelled = spell_out(args, CONFIGS[name])
    options = parse_options(name, spelled)
    if any(re.match(r"--ckpt_path(=|$)", arg) for arg in args):
        raise ValueError(f"{name} takes the checkpoints of {options.run}: leave out --ckpt_path")
    plugged = [f"--trainer.callbacks+={file}" for file in options.suite or ()]
    own = ["--trainer.devices=1", "--trainer.logger=false", *plugged]

    def build(path: Path) -> Run:
        return CheckpointCLI(name, ["--ckpt_path", str(path), *own, *spelled]).built(str(path))

    _function(name)(options, build)


def _with_run(name: str, args: Sequence[str]) -> None:
    if CommandCLI(name, args).failed:
        raise SystemExit(1)


def _with_trainings(name: str, args: Sequence[str]) -> None:
    with quiet_lightning():
        cli = CommandCLI(name, args, run=False)
    chosen = _function(name)(cli.options, cli.built(), build_training)
    if chosen is not None:
        RobustCLI(["fit", "--config", str(chosen)])


def build_training(recipe: Path) -> Any:
    """Build model, data and trainer of a recipe."""
    return RobustCLI(["--config", str(recipe)], run=False)


def _with_data(name: str, args: Sequence[str]) -> None:
    config = CONFIGS[name]
    args = spell_out(args, config)
    parser = Parser(prog=f"lightning-rob {name}")
    files: Any = jsonargparse.ActionConfigFile  # type: ignore[attr-defined]
    parser.add_argument("--config", action=files, help="A recipe.")
    parser.add_class_arguments(config, instantiate=False)
    parser.add_lightning_class_args(ImageData, "data", subclass_mode=True, required=False)
    with plain_yaml():
        inlined = [parse_fraction_arg(arg) for arg in _inline_recipes(args, config)]
        parsed = parser.parse_args(inlined)
        options = _options(config, parsed)
        if parsed.data is None:
            raise ValueError("say which images: --data CLASS, such as --data Digits5k")
        data = parser.instantiate_classes(parsed).data
    _function(name)(options, data)


def _inline_recipes(args: Sequence[str], config: Any) -> list[str]:
    """Replace each recipe by the part of it that concerns the command."""
    own = {"data", *(field.name for field in fields(config))}
    inlined = []
    for before, arg in zip(["", *args], args, strict=False):
        option = re.match(r"(--config|-c)=", arg)
        if option or before in ("--config", "-c"):
            prefix = option[0] if option else ""
            recipe = read_config(arg.removeprefix(prefix))
            part = {key: value for key, value in recipe.items() if key in own}
            arg = prefix + str(yaml.safe_dump(config.from_recipe(recipe) | part))
        inlined.append(arg)
    return inlined
