"""Commands whose options are a dataclass: `RobustCLI` builds what they work on."""

import logging
import os
import re
import shlex
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_rob.cli.configs import config_file, read_config
from lightning_rob.cli.lightning_cli import USER_ERRORS, Parser, RobustCLI
from lightning_rob.cli.models import read_models
from lightning_rob.cli.options import asks_for_page, own_names, parse, parse_options
from lightning_rob.commands.base import Run, quiet_lightning
from lightning_rob.commands.checkpoints import load_weights
from lightning_rob.commands.configs import CONFIGS
from lightning_rob.data import ImageData
from lightning_rob.recipes.plugins import resolve_names
from lightning_rob.recipes.safe_yaml import plain_yaml
from lightning_rob.runtime.errors import InputError


def is_no_tip(record: logging.LogRecord) -> bool:
    """Filter of a logger that drops Lightning's advice to install other products of its makers."""
    return "Tip: For seamless cloud" not in str(record.msg)


def run_command(args: Sequence[str]) -> None:
    """Run a command that needs torch: one of `CONFIGS`, or of Lightning.

    Args:
        args: a command line with joined values, the command first.

    Raises:
        InputError: it cannot be run.
    """
    # Lightning writes them at level INFO, like its devices and why a fit stopped, which stay.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(is_no_tip)
    warnings.filterwarnings("ignore", ".*LeafSpec")  # of torch on Lightning, in every run
    name, *rest = args
    if name != "fit":  # which alone goes on with the list of its best checkpoints
        warnings.filterwarnings("ignore", "The dirpath has changed")
    if name not in CONFIGS:
        RobustCLI(args)
        return
    runners = {
        "run": _with_run,
        "trainings": _with_trainings,
        "checkpoints": _with_checkpoints,
        "data": _with_data,
    }
    try:
        runners[CONFIGS[name].receives](name, resolve_names(rest))
    except USER_ERRORS as error:
        raise InputError(str(error)) from error


def _function(name: str) -> Any:
    return import_module(f"lightning_rob.commands.{name}").run


class CommandCLI(RobustCLI):
    """Builds what `test` (or, without a subcommand, `fit`) would run, for a command.

    Args:
        name: of the command.
        args: its command line with joined values.
        run: run the command in place of `test`; False only builds.
    """

    def __init__(self, name: str, args: Sequence[str], run: bool = True) -> None:
        self.name = name
        self.args = args
        self.failed = False
        # Checked before anything is read or built; who asks for a page may lack some.
        asks = any(map(asks_for_page, args))
        self.options = None if asks else parse_options(name, args)
        self.own_options = own_names(CONFIGS[name])
        super().__init__(["test", *args] if run else args, run)

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add the command's options to those of the run."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(CONFIGS[self.name], instantiate=False)

    def before_instantiate_classes(self) -> None:
        """Leave the options of the run alone, so that its recipe is one for `fit` and `test`."""
        super().before_instantiate_classes()
        parsed = self.config[self.subcommand] if self.subcommand else self.config
        for option in self.own_options:
            del parsed[option]

    def test(self, model: Any, datamodule: Any, ckpt_path: str | None = None, **_: Any) -> None:
        """Run the command in place of `test`."""
        if ckpt_path:
            load_weights(model, self.checkpoint_io.load_checkpoint(ckpt_path))
        self.failed = bool(_function(self.name)(self.options, self.built(ckpt_path)))

    def built(self, checkpoint: str | None = None) -> Run:
        """Return what was built."""
        model: Any = self.model
        data: Any = self.datamodule
        return Run(
            model,
            data,
            self.trainer,
            self.recipe(),
            name=next((Path(path).stem for path in map(config_file, self.args) if path), "study"),
            checkpoint=checkpoint,
            command=shlex.join(["lightning-rob", self.name, *self.args]),
            overrides=tuple(model_overrides(self.args)),
        )


class CheckpointCLI(CommandCLI):
    """Builds what `test` would run for a checkpoint, without its weights, and does not run it."""

    def test(self, model: Any, datamodule: Any, ckpt_path: str | None = None, **_: Any) -> None:
        """Do nothing: the command decides when to evaluate."""

    def after_test(self) -> None:
        """Do nothing: no accuracies are logged."""


def model_overrides(args: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options that change the model of a checkpoint; of a file, its content."""
    for arg in args:
        name, _, value = arg.partition("=")
        if not re.match(r"--(model|config)\b|-c\b", name):
            continue
        is_file = value.endswith((".yaml", ".yml", ".json")) and Path(value).is_file()
        content = read_config(value) if is_file else value
        if name.startswith("--model") or not isinstance(content, dict):
            yield name, content
        elif "model" in content:
            yield name, content["model"]


def _with_checkpoints(name: str, args: Sequence[str]) -> None:
    """Run a command that builds a `Run` for each checkpoint, on one device and without a logger."""
    options = parse_options(name, args)
    parts = read_models(options.models, CONFIGS[name]) if options.models else {}
    starts: dict[str, Callable[[], tuple[Any, Callable[[Path], Run]]]] = {
        label: partial(_monitored, name, [*args, *own, f"--label={label}", "--models=null"])
        for label, own in parts.items()
    }
    _function(name)(options, starts or {"": lambda: (options, _builder(name, args, options))})


def _monitored(name: str, args: Sequence[str]) -> tuple[Any, Callable[[Path], Run]]:
    """Return the options of a command, and the function that builds the `Run` of a checkpoint."""
    options = parse_options(name, args)
    return options, _builder(name, args, options)


def _builder(name: str, args: Sequence[str], options: Any) -> Callable[[Path], Run]:
    """Return the function that builds the `Run` of a checkpoint."""
    plugged = [f"--trainer.callbacks+={file}" for file in options.suite or ()]
    own = ["--trainer.devices=1", "--trainer.logger=false", *plugged]

    def build(path: Path) -> Run:
        with tempfile.TemporaryDirectory() as folder:
            given = path
            if not os.fspath(path).isprintable():  # YAML has no text for such a name
                given = Path(folder) / "given.ckpt"
                given.symlink_to(path.absolute())
            return CheckpointCLI(name, [f"--ckpt_path={given}", *own, *args]).built(str(path))

    return build


def _with_run(name: str, args: Sequence[str]) -> None:
    if CommandCLI(name, args).failed:
        raise SystemExit(1)


def _with_trainings(name: str, args: Sequence[str]) -> None:
    with quiet_lightning():
        cli = CommandCLI(name, args, run=False)
    chosen = _function(name)(cli.options, cli.built(), build_training)
    if chosen is not None:
        RobustCLI(["fit", f"--config={chosen}"])


def build_training(recipe: Path) -> Any:
    """Build model, data and trainer of a recipe."""
    return RobustCLI([f"--config={recipe}"], run=False)


def _with_data(name: str, args: Sequence[str]) -> None:
    parser = Parser(prog=f"lightning-rob {name}")
    parser.add_class_arguments(CONFIGS[name], instantiate=False)
    parser.add_lightning_class_args(ImageData, "data", subclass_mode=True, required=False)
    options, parsed = parse(parser, name, args, "data")
    if parsed.data is None:
        raise ValueError("say which images: --data CLASS, such as --data Digits5k")
    with plain_yaml():
        data = parser.instantiate_classes(parsed).data
    _function(name)(options, data)
