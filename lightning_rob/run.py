"""The command line over Lightning's, imported only when there is something to run."""

import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from fractions import Fraction
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import (
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_rob.callbacks.guard import Guard
from lightning_rob.data import ImageData
from lightning_rob.files import UNWRITABLE, save_whole, threads_may_fail, write_text_whole
from lightning_rob.manifest import SUFFIX, write_manifest
from lightning_rob.modules import RobustModule
from lightning_rob.nets.contents import read_file
from lightning_rob.plain import check_plain
from lightning_rob.processes import lost, together
from lightning_rob.thresholds import fallen, thresholds
from lightning_rob.trust import refusal, restrict

USER_ERRORS = (
    ValueError,
    TypeError,
    OSError,
    ModuleNotFoundError,  # of an extra
    MisconfigurationException,
    yaml.YAMLError,
)
RECIPE = "lightning_rob_recipe"
FRACTION = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*(?!0+(?:\.0+)?$)(\d+(?:\.\d+)?)")  # not by zero
NAMED = ("best", "last", "hpc")  # checkpoints that Lightning finds


class InputError(Exception):
    """What the user gave cannot be run; the message says what would be right."""


def fractions(value: Any) -> Any:
    """Every "8/255" in a parsed configuration as a number."""
    if isinstance(value, dict):
        return {key: fractions(part) for key, part in value.items()}
    if isinstance(value, list):
        return [fractions(part) for part in value]
    if isinstance(value, str) and (parts := FRACTION.fullmatch(value.strip())):
        return float(Fraction(parts[1]) / Fraction(parts[2]))
    return value


_load_yaml = jsonargparse.get_loader("yaml")


def load_plain(text: str) -> Any:
    """YAML as jsonargparse reads it, with fractions as numbers.

    Raises:
        InputError: not plain data of a sane size.
    """
    try:
        check_plain(text)
    except ValueError as error:
        raise InputError(f"YAML: {error}") from error
    return fractions(_load_yaml(text))


jsonargparse.set_loader("yaml", load_plain, exceptions=(yaml.YAMLError,))


class Parser(LightningArgumentParser):
    """Imports nothing but what is trusted, and says what is wrong with an argument in one line."""

    def __init__(self, *args: Any, **options: Any) -> None:
        try:
            restrict()
        except ValueError as error:
            raise InputError(str(error)) from error
        super().__init__(*args, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise InputError with the innermost reason first."""
        raise InputError(_innermost(message)) from ex


NOISE = re.compile(
    r"\s*(Does not validate against|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value|"
    r"Not a valid subclass of|Subclass types expect|a class path \(str\)|a dict with).*"
    r"|Expected a path but .* either not accessible or invalid"
)
WORDS = {
    "Expected a <class 'int'>": "expected a whole number",
    "Expected a <class 'float'>": "expected a number",
    "Expected a <class 'bool'>": "expected true or false",
    "Expected a <class 'dict'>": "expected keys with values",
    "unhashable type: 'list'": "",
}


def _innermost(message: str) -> str:
    """Jsonargparse's tree of reasons without the types that were tried and the values given."""
    if refused := refusal(message):
        return refused
    kept = [NOISE.sub("", re.sub(r"^\s*(- )*", "", line)).strip() for line in message.splitlines()]
    text = " ".join(dict.fromkeys(line for line in kept if line)) or message
    for theirs, ours in WORDS.items():
        text = text.replace(theirs, ours)
    text = re.sub(
        r"(?:Expected a dot import path string|Unexpected import path format): (\S+)",
        _unknown,
        text,
    )
    missing = " must name a class: its name, or class_path and init_args"
    return text.strip() + (missing if text.strip().endswith(":") else "")


def _unknown(found: re.Match[str]) -> str:
    """What to say of a name that stands for nothing."""
    if "/" in found[1] or found[1].endswith(".yaml"):
        return f"there is no file {found[1]}"
    parts = ("modules", "data", "attacks", "callbacks", "nets", "defenses")
    known = [n for part in parts for n in import_module(f"lightning_rob.{part}").__all__]
    close = ", ".join(dict.fromkeys(get_close_matches(found[1], known)))
    hint = f", did you mean {close}?" if close else ": write package.module.Class for others"
    return f"nothing here is called {found[1]!r}{hint}"


class SaveRecipe(SaveConfigCallback):
    """Writes the run's configuration to its folder and, as text, into its checkpoints."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write it once, as one that can be given to `--config` beside others."""
        if self.already_saved:
            return
        super().setup(trainer, pl_module, stage)
        folder = trainer.log_dir  # a collective: every process has to ask
        if trainer.is_global_zero:
            path = Path(folder or ".") / self.config_filename
            text = re.sub(r"^  callbacks:$", "  callbacks+:", path.read_text(), flags=re.M)
            path.write_text(text.replace("\n  callbacks: null\n", "\n"))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the text: a checkpoint holds no live objects and loads with weights only."""
        checkpoint[RECIPE] = self.parser.dump(self.config, skip_none=False)


def numbers(arg: str) -> str:
    """An argument whose value is a fraction, such as `--eps=8/255`, with the number instead."""
    option, sign, value = re.findall(r"^((?:--[^=]+=)?)(-?)(.*)", arg, flags=re.S)[0]
    match = FRACTION.fullmatch(value)
    return f"{option}{sign}{float(Fraction(match[1]) / Fraction(match[2]))}" if match else arg


def check_configs(args: Sequence[str]) -> None:
    """Refuse a configuration file that is none, or whose `callbacks:` would drop those before."""
    if any(re.match(r"--trainer\.callbacks(=|$)", arg) for arg in args):
        raise InputError("write --trainer.callbacks+=…: without + it drops those before it")
    given = [a.partition("=")[2] for a in args if re.match(r"(--config|-c)=", a)]
    given += [b for a, b in pairwise(args) if a in ("--config", "-c")]
    for path in given:
        content = read_config(path) if "\n" not in path and Path(path).exists() else {}
        if "callbacks" in content or "callbacks" in (content.get("trainer") or {}):
            raise InputError(
                f"{path}: write `callbacks+:` under `trainer:`; "
                "a plain `callbacks:` silently drops those that came before it"
            )


def read_config(path: str) -> dict[str, Any]:
    """A configuration file's content.

    Raises:
        InputError: it cannot be read, or is no mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        check_plain(text)
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as a configuration file: {error}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold keys such as model and trainer, got {text[:40]!r}")
    if not isinstance(content.get("trainer") or {}, dict):
        raise InputError(f"{path}: trainer must hold keys, got {content['trainer']!r:.40}")
    return content


def recipe_in(path: str) -> str | None:
    """The model and data a checkpoint was made by, as YAML; None where it says nothing."""
    recipe = read_checkpoint(path).get(RECIPE)
    if recipe is None:
        return None
    try:
        whole = load_plain(recipe) if isinstance(recipe, str) else None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: its recipe is no YAML: {error}") from error
    if not isinstance(whole, dict):
        raise InputError(f"{path}: its recipe must be text of model and data, got {recipe!r:.40}")
    return str(yaml.safe_dump({key: whole[key] for key in ("model", "data") if key in whole}))


def read_checkpoint(path: str) -> dict[str, Any]:
    """Load a checkpoint without running code from it.

    Raises:
        InputError: missing, or not a checkpoint.
    """
    if not Path(path).exists():
        raise InputError(f"there is no checkpoint {path}")
    try:
        checkpoint = read_file(path)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    if not (isinstance(checkpoint, dict) and isinstance(checkpoint.get("state_dict"), dict)):
        raise InputError(
            f"{path} is not a Lightning checkpoint: it has no state_dict; weights alone go into "
            "a recipe of Assembled (configs/assembled.yaml)"
        )
    return checkpoint


class Checkpoints(TorchCheckpointIO):
    """Writes whole checkpoints, each with a manifest, and reads weights only."""

    loaded: dict[str, Any] | None = None  # when the last one that was read was written

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write to the disk, then rename; a kill never leaves a manifest of another file."""
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        Path(f"{path}{SUFFIX}").unlink(missing_ok=True)
        save_whole(checkpoint, Path(path))
        write_manifest(Path(path))

    def load_checkpoint(self, path: Any, *_: Any, **options: Any) -> dict[str, Any]:
        """The content, on the CPU; code in it is refused whoever asks for it."""
        content = read_checkpoint(str(path))
        known = {"epoch": "epoch", "step": "global_step"}
        self.loaded = {name: content[key] for name, key in known.items() if key in content}
        return content

    def remove_checkpoint(self, path: Any) -> None:
        """Remove it with its manifest."""
        super().remove_checkpoint(path)
        Path(f"{path}{SUFFIX}").unlink(missing_ok=True)


def with_recipe(args: Sequence[str]) -> list[str]:
    """Put the recipe of `--ckpt_path` before the other arguments, which may override it."""
    told = any(re.match(r"--(model|config|help|print_config)|-c|-h", arg) for arg in args)
    for i, arg in enumerate(args):
        path = arg.partition("=")[2] or (args[i + 1] if len(args) > i + 1 else "")
        if re.match(r"--ckpt_path(=|$)", arg) and path not in (*NAMED, "null", ""):
            recipe = recipe_in(path)
            if not (recipe or told):
                raise InputError(f"{path} does not say what it is a checkpoint of: add --config")
            return [args[0], "--config", recipe, *args[1:]] if recipe else list(args)
    if not told and args:
        raise InputError(
            "say what to run: --config RECIPE, or --ckpt_path CHECKPOINT of such a run"
        )
    return list(args)


class Command(LightningCLI):
    """`lightning-rob`: LightningCLI with our defaults and errors.

    Args:
        args: the command line, the subcommand first.
        run: run the subcommand; False only builds model, data and trainer, without one.
    """

    def __init__(self, args: Sequence[str], run: bool = True) -> None:
        check_configs(args)
        try:
            with threads_may_fail(), together(self._children, self._rank_timeout):
                super().__init__(
                    RobustModule,
                    ImageData,
                    save_config_callback=SaveRecipe,
                    save_config_kwargs={"overwrite": True},
                    parser_class=Parser,
                    subclass_mode_model=True,
                    subclass_mode_data=True,
                    auto_configure_optimizers=False,
                    load_from_checkpoint_support=False,
                    seed_everything_default=0,
                    args=with_recipe(
                        [numbers(arg.replace("--fail-under", "--fail_under")) for arg in args]
                    ),
                    run=run,
                )
        except USER_ERRORS as error:
            raise InputError(_innermost(self._words(error))) from error
        except RuntimeError as error:
            raise _readable(error) from error

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `--test_after_fit` and the logger's defaults."""
        parser.add_argument(
            "--test_after_fit",
            type=bool,
            default=False,
            help="Test the trained model when fit is done, and print the table.",
        )
        parser.add_argument(
            "--rank_timeout",
            type=jsonargparse.typing.PositiveFloat | None,
            default=None,
            help="Seconds after which a process that others wait for counts as hung, and the run "
            "ends; it must be longer than one attacks more than another. Default: the strategy's.",
        )
        parser.add_argument(
            "--fail_under",
            type=str | None,
            default=None,
            help="Exit with code 1 if a figure is below: robust/worst=0.40,robust/arc=0.35.",
        )
        settings = {"save_dir": "logs", "name": None, "default_hp_metric": False}
        logger = {
            "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
            "init_args": settings,
        }
        parser.set_defaults({"trainer.logger": logger})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the given list, whatever the shell's arguments are."""
        self.config = parser.parse_args(args)
        for options in [self.config.get(name) for name in self.subcommands()]:
            if options is not None:
                _check_loading(options)

    def _parse_ckpt_path(self) -> None:
        """Nothing: what a checkpoint says of its module is taken from its recipe alone."""

    def instantiate_trainer(self, **options: Any) -> Trainer:
        """The trainer under guard, with checkpoints of our own unless a plugin brings others."""
        trainer = super().instantiate_trainer(**options)
        guard = Guard(self._rank_timeout())
        trainer.callbacks.insert(0, guard)  # type: ignore[attr-defined]
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = Checkpoints()
        return trainer

    def predict(self, **options: Any) -> None:
        """Write each image's probabilities to `predictions.csv` in the run's folder."""
        batches: Any = self.trainer.predict(**options)
        folder = Path(self.trainer.log_dir or ".")
        rank = f"-{self.trainer.global_rank}" if self.trainer.world_size > 1 else ""
        print(f"Writing {folder}/predictions{rank}.csv")
        rows = [["index", "answer", *(f"p{k}" for k in range(batches[0][1].shape[1]))]]
        for index, answers in batches:
            for i, row in zip(index.tolist(), answers.tolist(), strict=True):
                rows.append([str(i), str(row.index(max(row))), *(f"{p:.6g}" for p in row)])
        text = "".join(",".join(cells) + "\n" for cells in rows)
        write_text_whole(folder / f"predictions{rank}.csv", text)

    def _rank_timeout(self) -> float | None:
        seconds: float | None = self._get(self.config, "rank_timeout")
        return seconds

    def _children(self) -> Any:
        """The other processes of the run that this one has started."""
        strategy = getattr(getattr(self, "trainer", None), "strategy", None)
        return getattr(getattr(strategy, "launcher", None), "procs", ())

    def _words(self, error: Exception) -> str:
        """What an error says, and of a disk that takes no more, which folder."""
        if not isinstance(error, OSError) or error.errno not in UNWRITABLE:
            return str(error)
        loggers = getattr(getattr(self, "trainer", None), "loggers", ())
        folders = [getattr(logger, "log_dir", None) for logger in loggers]
        place = error.filename or next(filter(None, folders), "the run's folder")
        return f"{place} cannot be written: {error.strerror}; what was there before is whole"

    def before_instantiate_classes(self) -> None:
        """Read the thresholds before hours of attacks."""
        thresholds(self._get(self.config, "fail_under") or "any=0")

    def before_test(self) -> None:
        """Refuse a threshold for an attack that there is not."""
        least = thresholds(self._get(self.config, "fail_under") or "any=0")
        callbacks: Any = self.trainer.callbacks  # type: ignore[attr-defined]
        attacks = [name for part in callbacks for name in getattr(part, "attacks", ())]
        for name in least if attacks else ():
            stem, _, attack = name.removeprefix("test/").rpartition("robust/")
            if not stem and attack != name and attack not in (*attacks, "worst", "clean"):
                raise InputError(f"no attack is called {attack!r}: {', '.join(attacks)}, worst")

    def after_test(self) -> None:
        """Judge the figures."""
        self._judge("test")

    def after_validate(self) -> None:
        """Judge the figures."""
        self._judge("val")

    def _judge(self, stage: str) -> None:
        """Exit with code 1 if a figure is below what `--fail_under` asks for."""
        least = self._get(self.config, "fail_under")
        if not least:
            return
        logged = {key: float(value) for key, value in self.trainer.callback_metrics.items()}
        for line in (lines := fallen(thresholds(least), logged, stage)):
            print(f"lightning-rob: {line}", file=sys.stderr)
        if lines:
            raise SystemExit(1)

    def after_fit(self) -> None:
        """Test, if asked to."""
        trial = self.trainer.fast_dev_run  # type: ignore[attr-defined]
        if self._get(self.config, "test_after_fit") and not trial:
            self.trainer.test(self.model, datamodule=self.datamodule, verbose=False)
            self._judge("test")


def _check_loading(options: Any) -> None:
    """Let a subcommand load weights only, and from a file that is here."""
    if options.get("weights_only") is False:
        raise InputError(
            "weights_only must be true: otherwise a checkpoint may run code of its own"
        )
    if "weights_only" in options:
        options["weights_only"] = True
    path = options.get("ckpt_path")
    if path and path not in NAMED:
        read_checkpoint(str(path))


def _readable(error: RuntimeError) -> Exception:
    """A checkpoint of another architecture in one line; any other error as it is."""
    message = str(error)
    if fault := lost(error):
        return fault
    if "Error(s) in loading state_dict" not in message:
        return error
    shapes = re.findall(r"size mismatch for ([^:]+): ", message)
    kinds = {
        "missing": _keys(message, "Missing"),
        "unexpected": _keys(message, "Unexpected"),
        "of another shape": shapes,
    }
    told = [
        f"{len(names)} weights {kind} (e.g. {names[0]})" for kind, names in kinds.items() if names
    ]
    return InputError(
        "the checkpoint is of another architecture than the model: " + ", ".join(told)
    )


def _keys(message: str, kind: str) -> list[str]:
    match = re.search(rf"{kind} key\(s\) in state_dict: (.*)", message)
    return re.findall(r'"([^"]+)"', match.group(1)) if match else []
