"""Commands whose options are a dataclass: `RobustCLI` builds what they work on."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from lightning_rob.cli.checkpoints import load_weights
from lightning_rob.cli.configs import config_files, read_config
from lightning_rob.cli.lightning_cli import USER_ERRORS, Parser, RobustCLI
from lightning_rob.commands.base import Run, quiet_lightning
from lightning_rob.commands.configs import CONFIGS, CommandConfig
from lightning_rob.data import ImageData
from lightning_rob.errors import InputError
from lightning_rob.safe_yaml import parse_fraction_arg, plain_yaml


def run_command(name: str, args: Sequence[str]) -> None:
    """Run a command of `CONFIGS`.

    Args:
        name: of the command.
        args: its command line.

    Raises:
        InputError: it cannot be run.
    """
    runners = {"run": _with_run, "trainings": _with_trainings, "data": _with_data}
    try:
        if not args:
            CONFIGS[name]()  # says which option is missing
        runners[CONFIGS[name].receives](name, _spell_out_flags(args, CONFIGS[name]))
    except USER_ERRORS as error:
        raise InputError(str(error)) from error


def _function(name: str) -> Any:
    return import_module(f"lightning_rob.commands.{name}").run


def _spell_out_flags(args: Sequence[str], config: type[CommandConfig]) -> list[str]:
    """Write `--flag` as `--flag=true`, as jsonargparse needs it."""
    flags = {f"--{field.name}" for field in fields(config) if field.default is False}
    return [
        f"{arg}=true" if arg in flags and after not in ("true", "false") else arg
        for arg, after in zip(args, [*args[1:], ""], strict=False)
    ]


def _options(config: type[CommandConfig], parsed: Any) -> Any:
    return config(**{field.name: parsed[field.name] for field in fields(config)})


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
        self.failed = False
        self.command_line = shlex.join(["lightning-rob", name, *args])
        self.study = next((Path(path).stem for path in config_files(args)), "study")
        super().__init__(["test", *args] if run else args, run)

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add the command's options to those of the run."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(self.config_class, instantiate=False)

    def before_instantiate_classes(self) -> None:
        """Check the command's options before anything is built."""
        super().before_instantiate_classes()
        parsed = self.config[self.subcommand] if self.subcommand else self.config
        self.options = _options(self.config_class, parsed)
        for field in fields(self.config_class):  # the rest is the run's, which `test` takes too
            del parsed[field.name]

    def test(self, model: Any, datamodule: Any, ckpt_path: str | None = None, **_: Any) -> None:
        """Run the command in place of `test`."""
        if not ckpt_path:
            raise ValueError("say whose weights: --ckpt_path CHECKPOINT")
        load_weights(model, self.checkpoint_io.load_checkpoint(ckpt_path))
        self.failed = bool(_function(self.name)(self.options, self.built(ckpt_path)))

    def built(self, checkpoint: str | None = None) -> Run:
        """Return what was built."""
        recipe = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
        recipe = recipe[self.subcommand] if self.subcommand else recipe
        model: Any = self.model
        data: Any = self.datamodule
        return Run(model, data, self.trainer, recipe, self.study, checkpoint, self.command_line)


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
