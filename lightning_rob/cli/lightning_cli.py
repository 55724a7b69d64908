"""`RobustCLI`: Lightning's command line with the defaults, files and errors of this package."""

import os
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.multiprocessing.spawn import ProcessException

from lightning_rob.callbacks.guard import TerminateOnNonFinite
from lightning_rob.callbacks.loggers import run_folder, writing_folder
from lightning_rob.cli.checkpoints import SafeCheckpointIO
from lightning_rob.cli.errors import (
    name_old_recipe,
    shorten_jsonargparse_error,
    shorten_state_dict_error,
)
from lightning_rob.cli.options import (
    NAMED,
    OF_METHODS,
    CommandLine,
    RunOptions,
    asks_for_page,
    read_command_line,
)
from lightning_rob.commands.base import trained_threat
from lightning_rob.commands.checkpoints import RECIPE, config_in_checkpoint, read_checkpoint
from lightning_rob.commands.thresholds import parse_thresholds, violations
from lightning_rob.evaluation.evaluate import as_defense
from lightning_rob.evaluation.suites import plug_in_for
from lightning_rob.modules import RobustModule
from lightning_rob.recipes.plugins import expand_recipe
from lightning_rob.recipes.safe_yaml import load, one_line, reading_recipes
from lightning_rob.recipes.trust import OPTION, allowed
from lightning_rob.runtime.errors import Fault, InputError, NoGradientError
from lightning_rob.runtime.files import UNWRITABLE, atomic_write_text
from lightning_rob.runtime.processes import gathered, supervised_processes
from lightning_rob.threat import Threat

USER_ERRORS = (
    ValueError,
    TypeError,
    OSError,
    ModuleNotFoundError,  # of an extra
    MisconfigurationException,
    NoGradientError,
    yaml.YAMLError,
)

EVERY_IMAGE = Threat("linf", 1.0)  # of a corruption


class Parser(LightningArgumentParser):
    """Parser that expands plug-ins and reports an error in one line."""

    ignored: Collection[str] = ()  # keys of a saved config.yaml that this command does not have

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **options)

    def parse_args(self, args: Any = None, *rest: Any, **options: Any) -> Any:
        # To the parser of a class inside a class jsonargparse gives null as the text "None".
        if args is not None:
            args = [re.sub(r"(?<=[=[ ])None(?=[],}]|$)", "null", arg) for arg in args]
        return super().parse_args(args, *rest, **options)

    def parse_string(self, content: str, *args: Any, **options: Any) -> Any:
        # jsonargparse calls this in the recipe's folder.
        recipe = load(content)
        expanded = expand_recipe(recipe, Path.cwd())
        if isinstance(expanded, dict):
            expanded = {key: part for key, part in expanded.items() if key not in self.ignored}
        text = content if expanded == recipe else one_line(expanded)
        return super().parse_string(text, *args, **options)

    def dump(self, *args: Any, **options: Any) -> str:
        # `callbacks+` adds to the callbacks of other files instead of replacing them.
        text = super().dump(*args, **options)
        text = re.sub(r"^  callbacks: (null|\[\])\n", "", text, flags=re.M)
        return re.sub(r"^  callbacks:$", "  callbacks+:", text, flags=re.M)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise InputError(shorten_jsonargparse_error(message)) from ex


def build(kind: type, spec: Any) -> Any:
    """Return the object of a class and its arguments, given as plain data."""
    parser = Parser(prog="lightning_rob")
    parser.add_subclass_arguments(kind, "object")
    return parser.instantiate_classes(parser.parse_object({"object": spec})).object


def without_secrets(recipe: str) -> str:
    """Return a recipe without the keys of loggers, which come from the environment again."""
    name = r"\w*(?:api_?key|api_?token|password|secret)\w*"
    # The lines of the logger are those that are indented further, or begin an entry of its list.
    return re.sub(
        r"^  logger:.*\n(?:(?:   +|  -).*\n)*",
        lambda part: re.sub(rf"^([ -]+{name}): .*$", r"\1: null", part[0], flags=re.M),
        recipe,
        flags=re.M,
    )


class SaveRecipe(SaveConfigCallback):
    """Saves the run's configuration in its folder and, as text, in its checkpoints."""

    @cached_property
    def recipe(self) -> str:
        text = self.parser.dump(self.config, skip_none=False, skip_validation=True)
        return without_secrets(str(text))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self.already_saved and (folder := writing_folder(trainer)):
            atomic_write_text(folder / self.config_filename, self.recipe)
        self.already_saved = True

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[RECIPE] = self.recipe  # as text: a checkpoint loads by weights_only=True


class RobustCLI(LightningCLI):
    """LightningCLI for modules and data of this package, and anybody's that it may import.

    A line given as a list begins with the command if it is to be run; without `run` it only builds
    model, data and trainer.
    """

    in_place_of = ""  # command of Lightning that a subclass replaces by its own, such as `test`

    def __init__(self, line: CommandLine | Sequence[str], run: bool = True) -> None:
        self.checkpoint_io = SafeCheckpointIO()
        self.recipe_of: str | None = None  # the checkpoint whose recipe is used

        def ranks() -> Any:
            strategy = getattr(getattr(self, "trainer", None), "strategy", None)
            return getattr(getattr(strategy, "launcher", None), "procs", ())

        supervised = supervised_processes(ranks, lambda: self.config.get("rank_timeout"))
        try:
            if not isinstance(line, CommandLine):
                line = read_command_line(*line) if run else read_command_line("fit", *line)
            self.line = line
            self.method = (self.in_place_of or line.command) if run else ""
            # Without a run, the checkpoint says what to build, and its weights are not loaded.
            args = [arg for arg in line.args if run or not arg.startswith("--ckpt_path=")]
            with supervised, reading_recipes():
                super().__init__(
                    LightningModule,
                    LightningDataModule,
                    save_config_callback=SaveRecipe,
                    parser_class=Parser,
                    parser_kwargs={"prog": f"lightning-rob {line.command}"},
                    subclass_mode_model=True,
                    subclass_mode_data=True,
                    auto_configure_optimizers=False,
                    load_from_checkpoint_support=False,
                    seed_everything_default=0,
                    args=[*self._recipe_of_checkpoint(), *args],
                    run=False,
                )
                if self.method:
                    # Lightning calls before_test, `test` here or of the trainer, after_test.
                    self._run_subcommand(self.method)
                if torch.distributed.is_available() and torch.distributed.is_initialized():
                    # Else threads of the backend may abort the interpreter while it ends.
                    torch.distributed.destroy_process_group()
        except USER_ERRORS as error:
            raise InputError(shorten_jsonargparse_error(self._describe(error))) from error
        except InputError as error:
            if not self.recipe_of:
                raise
            given = " ".join(self.line.args)
            raise InputError(name_old_recipe(str(error), self.recipe_of, given)) from error
        except RuntimeError as error:
            raise shorten_state_dict_error(error) from error
        except ProcessException as error:  # of ddp_spawn and its like
            raise Fault(str(error).strip().rpartition("\n")[2]) from error

    def _recipe_of_checkpoint(self) -> list[str]:
        """Return the recipe of `--ckpt_path` as an option that other arguments may override."""
        path, recipe = self.line.checkpoint, None
        given = any(re.match(r"--(model|config)|-c", arg) for arg in self.line.args)
        given = given or any(map(asks_for_page, self.line.args))
        if path is not None and path not in NAMED:
            recipe = config_in_checkpoint(read_checkpoint(path), path)
            if not (recipe or given):
                raise InputError(
                    f"{path} does not say what it is a checkpoint of: add --config RECIPE or, of "
                    "your own Trainer, --model mine.Module --data mine.Data --allow-import mine"
                )
        elif (self.method or self.line.args) and not given:
            raise InputError(
                "say what to run: --config RECIPE, or --ckpt_path CHECKPOINT of such a run"
            )
        self.recipe_of = path if recipe else None
        return [f"--config={recipe}"] if recipe else []

    def setup_parser(self, add_subcommands: bool, main_kwargs: Any, subparser_kwargs: Any) -> None:
        # One parser for a command and its options: Lightning has one more for each subcommand, and
        # parses and checks a recipe twice.
        super().setup_parser(False, main_kwargs, subparser_kwargs)
        self.method_options: list[str] = []
        if self.method:
            skipped = LightningCLI.subcommands()[self.method]
            added = self.parser.add_method_arguments(Trainer, self.method, skip={*skipped})
            self.method_options = added
        assert isinstance(self.parser, Parser)
        self.parser.ignored = {*OF_METHODS} - {*self.method_options}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(RunOptions, as_group=False)
        logger = "lightning.pytorch.loggers.TensorBoardLogger"
        settings = {"save_dir": "logs", "name": None, "default_hp_metric": False}
        parser.set_defaults({"trainer.logger": {"class_path": logger, "init_args": settings}})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)
        path = self.config.get("ckpt_path")
        if path and path not in NAMED and not Path(path).exists():
            raise InputError(f"there is no checkpoint {path}")

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        # Whatever a recipe says: otherwise a checkpoint may run code of its own.
        safe = {"weights_only": True} if "weights_only" in self.method_options else {}
        options = {key: self.config_init[key] for key in self.method_options} | safe
        return options | {"model": self.model, "datamodule": self.datamodule}

    def instantiate_trainer(self, **options: Any) -> Trainer:
        trainer = super().instantiate_trainer(**options)
        guard = TerminateOnNonFinite(self.config.get("rank_timeout"))
        trainer.callbacks.insert(0, guard)  # type: ignore[attr-defined]
        # A plug-in for checkpoints that the user chose stays.
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = self.checkpoint_io
        return trainer

    def predict(self, **options: Any) -> None:
        if self.limits:
            raise InputError("--fail_under judges a test or a validation, not predictions")
        if not isinstance(self.model, RobustModule):
            kind = type(self.model).__name__
            raise InputError(f"predict is for modules of lightning_rob.modules, got {kind}")
        batches: Any = self.trainer.predict(**options) or []
        self._check_ran(self.trainer.num_predict_batches)
        found = [row for i, p in batches for row in zip(i.tolist(), p.tolist(), strict=True)]
        folder = run_folder(self.trainer) or Path(self.trainer.default_root_dir)
        shares = gathered(found)
        if not self.trainer.is_global_zero:
            return
        merged = dict(sorted(row for share in shares for row in share))  # no image twice
        path = folder / "predictions.csv"
        print(f"Writing {path}")
        classes = range(len(next(iter(merged.values()))))
        lines = [",".join(["index", "prediction", *(f"p{k}" for k in classes)])]
        for i, p in merged.items():
            lines.append(",".join([f"{i},{p.index(max(p))}", *(f"{value:.6g}" for value in p)]))
        atomic_write_text(path, "\n".join([*lines, ""]))

    def _describe(self, error: Exception) -> str:
        if not isinstance(error, OSError) or error.errno not in UNWRITABLE:
            return " ".join([str(error), *getattr(error, "__notes__", ())])
        loggers = getattr(getattr(self, "trainer", None), "loggers", ())
        folders = (getattr(logger, "log_dir", None) for logger in loggers)
        place = error.filename or next(filter(None, folders), "the run's folder")
        return f"{place} cannot be written: {error.strerror}; what was there before is whole"

    def before_instantiate_classes(self) -> None:
        # Before hours of attacks.
        self.limits = parse_thresholds(text) if (text := self.config.get("fail_under")) else {}

    def before_fit(self) -> None:
        if self.limits and not self.config.get("test_after_fit"):
            raise InputError("--fail_under judges a test: add --test_after_fit=true")
        self._check_limits()
        # Before a logger makes the run's folder.
        if isinstance(self.model, RobustModule):
            self.model.check_fit(self.trainer)

    def before_validate(self) -> None:
        self._check_limits()
        self.before_predict()
        if not self.config.get("ckpt_path"):
            return
        if getattr(self.line.options, "over", "") == "eps":
            return  # a sweep of radii attacks at all of them
        # Attacks at another radius than that of the training.
        trained = trained_threat(self.model)
        threats = [attack.threat for _, attack in self._attacks()]
        radii = dict.fromkeys(str(threat) for threat in threats if threat != EVERY_IMAGE)
        if radii and str(trained) not in radii:
            options = radius_options(trained, any(one.norm != "linf" for one in threats))
            taken = f", taken by{options}" if options else ""
            why = f"at {trained}{taken}" if trained else "without attacks"
            self._print(f"Radius: the attacks are at {', '.join(radii)}; the training was {why}")

    def before_predict(self) -> None:
        if (path := self.config.get("ckpt_path")) in ("best", "last"):
            raise InputError(f"{path} is a checkpoint of the fit that is running: name its file")
        if not self.config.get("ckpt_path"):
            self._print("No checkpoint is given: the weights are those that the recipe builds.")

    before_test = before_validate

    def _check_limits(self) -> None:
        """Refuse a threshold for an attack that is not there: it would be missed after hours."""
        attacks = [name for name, _ in self._attacks()]
        known = {f"robust/{name}" for name in (*attacks, "worst", "clean", "blind", "findings")}
        callbacks: Any = self.trainer.callbacks  # type: ignore[attr-defined]
        if any(getattr(getattr(c, "settings", None), "known_noise", False) for c in callbacks):
            known.add("robust/known_noise")
        for name in self.limits if attacks else ():
            short = name.removeprefix("test/").removeprefix("val/")
            if short.startswith("robust/") and short not in known:
                attack = short.removeprefix("robust/")
                raise InputError(f"no attack is called {attack!r}: {', '.join(attacks)}, worst")

    def recipe(self) -> dict[str, Any]:
        """Return the whole configuration as plain data, defaults included."""
        text = self.parser.dump(self.config, skip_none=False, skip_validation=True)
        return dict(yaml.safe_load(text))

    def _print(self, line: str) -> None:
        if self.trainer.is_global_zero:
            print(line, flush=True)

    def _attacks(self) -> list[tuple[str, Any]]:
        """Return the attacks of all callbacks by name; two may have the same one."""
        callbacks: Any = self.trainer.callbacks  # type: ignore[attr-defined]
        found = (getattr(callback, "attacks", None) for callback in callbacks)
        return [pair for of_one in found for pair in (of_one or {}).items()]

    def after_validate(self) -> None:
        self._check_ran(self.trainer.num_val_batches)
        self._check_thresholds("val")

    def after_test(self) -> None:
        self._check_ran(self.trainer.num_test_batches)
        self._check_thresholds("test")

    def _check_ran(self, batches: Sequence[float]) -> None:
        # Lightning passes over a stage without batches; some commands in place of a test have none.
        if self.trainer.state.fn and not sum(batches):
            raise InputError("there were no images: this part of the data, or its limit, is empty")

    def _check_thresholds(self, stage: str) -> None:
        logged = {key: float(value) for key, value in self.trainer.callback_metrics.items()}
        for line in (lines := violations(self.limits, logged, stage)):
            print(f"lightning-rob: {line}", file=sys.stderr)
        if lines:
            raise SystemExit(1)

    def after_fit(self) -> None:
        trainer: Any = self.trainer
        names = ("last_model_path", "best_model_path")
        paths = (getattr(c, name, "") for c in trainer.checkpoint_callbacks for name in names)
        written = next(filter(None, paths), None)
        if written:
            with suppress(ValueError):  # on another drive
                written = os.path.relpath(written)
            self._print(f"Checkpoint: {written}")
        if tested := self.config.get("test_after_fit") and not trainer.fast_dev_run:
            kept = [c for c in trainer.checkpoint_callbacks if getattr(c, "monitor", None)]
            path = next((c.best_model_path for c in kept if c.best_model_path), None)
            trainer.test(
                self.model, self.datamodule, ckpt_path=path, verbose=False, weights_only=True
            )
        if written:
            plug_in = Path(plug_in_for(as_defense(self.model))).stem
            attacks = [one.threat for _, one in self._attacks() if one.threat != EVERY_IMAGE]
            radius = radius_options(trained_threat(self.model) or next(iter(attacks), None))
            allowances = "".join(f" {OPTION} {name}" for name in sorted(allowed()))
            path = shlex.quote(written) + allowances
            # Lightning tests, and so audits, a module that says what a test step is.
            testable = is_overridden("test_step", self.model)
            command = "test" if testable else "validate"
            self._print(
                f"Next: lightning-rob {command} {path} --trainer.callbacks+={plug_in}{radius}"
            )
            if testable:
                self._print(f"      lightning-rob audit {path}")
        if tested:
            self._check_thresholds("test")


def radius_options(threat: Threat | None, with_norm: bool = False) -> str:
    """Return the options with which a plug-in takes a threat; none if it is relative."""
    if threat is None or threat.relative:
        return ""
    with_norm = with_norm or threat.norm != "linf"
    norm = f" --trainer.callbacks.norm={threat.norm}" if with_norm else ""
    return f"{norm} --trainer.callbacks.eps={str(threat).split()[1]}"
