"""The command line over Lightning's, imported only when there is something to run."""

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import (
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)

from lightning_rob.data import ImageData
from lightning_rob.modules import RobustModule

USER_ERRORS = (
    ValueError,
    TypeError,
    FileNotFoundError,
    ModuleNotFoundError,  # of an extra
    MisconfigurationException,
    yaml.YAMLError,
)
RECIPE = "lightning_rob_recipe"


class InputError(Exception):
    """What the user gave cannot be run; the message says what would be right."""


def fractions(value: Any) -> Any:
    """Every "8/255" in a parsed configuration as a number."""
    if isinstance(value, dict):
        return {key: fractions(part) for key, part in value.items()}
    if isinstance(value, list):
        return [fractions(part) for part in value]
    if isinstance(value, str) and re.fullmatch(r"\s*\d+(\.\d+)?\s*/\s*\d+(\.\d+)?\s*", value):
        return float(Fraction(value.split("/")[0]) / Fraction(value.split("/")[1]))
    return value


_load_yaml = jsonargparse.get_loader("yaml")
jsonargparse.set_loader("yaml", lambda text: fractions(_load_yaml(text)))


class Parser(LightningArgumentParser):
    """Says what is wrong with an argument in one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise InputError with the innermost reason first."""
        raise InputError(_innermost(message)) from ex


NOISE = re.compile(
    r"\s*(Does not validate against|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value|"
    r"Not a valid subclass of|Subclass types expect|a class path \(str\)|a dict with).*"
)


def _innermost(message: str) -> str:
    """Jsonargparse's tree of reasons without the types that were tried and the values given."""
    kept = [NOISE.sub("", line.strip(" -\t")) for line in message.splitlines()]
    return " ".join(dict.fromkeys(line for line in kept if line)) or message


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
    match = re.fullmatch(r"((?:--[^=]+=)?)(-?\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)", arg)
    return f"{match[1]}{float(Fraction(match[2]) / Fraction(match[3]))}" if match else arg


def check_configs(args: Sequence[str]) -> None:
    """Refuse a configuration file whose `callbacks:` would drop those that came before it."""
    if any(re.match(r"--trainer\.callbacks(=|$)", arg) for arg in args):
        raise InputError("write --trainer.callbacks+=…: without + it drops those before it")
    given = [a.partition("=")[2] for a in args if re.match(r"(--config|-c)=", a)]
    given += [b for a, b in pairwise(args) if a in ("--config", "-c")]
    for path in filter(lambda name: Path(name).is_file(), given):
        content = yaml.safe_load(Path(path).read_text())
        trainer = content.get("trainer") if isinstance(content, dict) else None
        if "callbacks" in (trainer or {}) or "callbacks" in (content or {}):
            raise InputError(
                f"{path}: write `callbacks+:` under `trainer:`; "
                "a plain `callbacks:` silently drops those that came before it"
            )


def recipe_in(path: str) -> str | None:
    """The model and data a checkpoint was made by, as YAML; None where it says nothing."""
    recipe = read_checkpoint(path).get(RECIPE)
    if recipe is None:
        return None
    whole = yaml.safe_load(recipe)
    return str(yaml.safe_dump({key: whole[key] for key in ("model", "data") if key in whole}))


def read_checkpoint(path: str) -> dict[str, Any]:
    """Load a checkpoint without running code from it.

    Raises:
        InputError: missing, or not a checkpoint.
    """
    if not Path(path).is_file():
        raise InputError(f"there is no checkpoint {path}")
    try:
        checkpoint = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # whatever a file that is no checkpoint makes torch do
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
        raise InputError(f"{path} is not a checkpoint that can be loaded ({reason})") from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise InputError(f"{path} is not a Lightning checkpoint: it has no state_dict")
    return checkpoint


def with_recipe(args: Sequence[str]) -> list[str]:
    """Put the recipe of `--ckpt_path` before the other arguments, which may override it."""
    told = any(re.match(r"--(model|config|help|print_config)|-c|-h", arg) for arg in args)
    for i, arg in enumerate(args):
        path = arg.partition("=")[2] or (args[i + 1] if len(args) > i + 1 else "")
        if re.match(r"--ckpt_path(=|$)", arg) and path not in ("best", "last", "null", ""):
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
                args=with_recipe([numbers(arg) for arg in args]),
                run=run,
            )
        except USER_ERRORS as error:
            raise InputError(_innermost(str(error))) from error
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
        settings = {"save_dir": "logs", "name": None, "default_hp_metric": False}
        logger = {
            "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
            "init_args": settings,
        }
        parser.set_defaults({"trainer.logger": logger})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the given list, whatever the shell's arguments are."""
        self.config = parser.parse_args(args)

    def predict(self, **options: Any) -> None:
        """Write each image's probabilities to `predictions.csv` in the run's folder."""
        batches: Any = self.trainer.predict(**options)
        folder = Path(self.trainer.log_dir or ".")
        rank = f"-{self.trainer.global_rank}" if self.trainer.world_size > 1 else ""
        folder.mkdir(parents=True, exist_ok=True)
        print(f"Writing {folder}/predictions{rank}.csv")
        with (folder / f"predictions{rank}.csv").open("w") as file:
            classes = range(batches[0][1].shape[1])
            file.write(",".join(["index", "answer", *(f"p{k}" for k in classes)]) + "\n")
            for index, answers in batches:
                for i, row in zip(index.tolist(), answers.tolist(), strict=True):
                    cells = [str(i), str(row.index(max(row))), *(f"{p:.6g}" for p in row)]
                    file.write(",".join(cells) + "\n")

    def after_fit(self) -> None:
        """Test, if asked to."""
        trial = self.trainer.fast_dev_run  # type: ignore[attr-defined]
        if self._get(self.config, "test_after_fit") and not trial:
            self.trainer.test(self.model, datamodule=self.datamodule, verbose=False)


def _readable(error: RuntimeError) -> Exception:
    """A checkpoint of another architecture in one line; any other error as it is."""
    message = str(error)
    if "Error(s) in loading state_dict" not in message:
        return error
    missing, unexpected = (_keys(message, kind) for kind in ("Missing", "Unexpected"))
    return InputError(
        "the checkpoint is of another architecture than the model: "
        f"{len(missing)} weights missing (e.g. {missing[:1]}), "
        f"{len(unexpected)} unexpected (e.g. {unexpected[:1]}), "
        f"{message.count('size mismatch')} of another shape"
    )


def _keys(message: str, kind: str) -> list[str]:
    match = re.search(rf"{kind} key\(s\) in state_dict: (.*)", message)
    return re.findall(r'"([^"]+)"', match.group(1)) if match else []
