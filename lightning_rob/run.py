"""The command line over Lightning's, imported only when there is something to run."""

import re
import sys
from collections.abc import Sequence
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

from lightning_rob.callbacks.guard import TerminateOnNonFinite
from lightning_rob.checkpoints import RECIPE, Checkpoints
from lightning_rob.data import ImageData
from lightning_rob.files import UNWRITABLE, threads_may_fail, write_text_whole
from lightning_rob.modules import RobustModule
from lightning_rob.processes import together
from lightning_rob.reasons import InputError, innermost, readable
from lightning_rob.recipes import NAMED, check_configs, numbers, with_recipe
from lightning_rob.thresholds import fallen, thresholds
from lightning_rob.trust import restrict

USER_ERRORS = (
    ValueError,
    TypeError,
    OSError,
    ModuleNotFoundError,  # of an extra
    MisconfigurationException,
    yaml.YAMLError,
)


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
        raise InputError(innermost(message)) from ex


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
            raise InputError(innermost(self._words(error))) from error
        except RuntimeError as error:
            raise readable(error) from error

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `--test_after_fit` and the logger's defaults."""
        parser.add_argument(
            "--test_after_fit",
            type=bool,
            default=False,
            help="Test the trained model when fit is done, and print the table: the best one, if a "
            "checkpoint callback monitors a figure.",
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
        guard = TerminateOnNonFinite(self._rank_timeout())
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
        self._least()

    def _least(self) -> dict[str, float]:
        """What `--fail_under` asks for."""
        text = self._get(self.config, "fail_under")
        return thresholds(text) if text else {}

    def before_test(self) -> None:
        """Refuse a threshold for an attack that there is not."""
        callbacks: Any = self.trainer.callbacks  # type: ignore[attr-defined]
        attacks = [name for part in callbacks for name in getattr(part, "attacks", ())]
        for name in self._least() if attacks else ():
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
        logged = {key: float(value) for key, value in self.trainer.callback_metrics.items()}
        for line in (lines := fallen(self._least(), logged, stage)):
            print(f"lightning-rob: {line}", file=sys.stderr)
        if lines:
            raise SystemExit(1)

    def after_fit(self) -> None:
        """Test, if asked to: the best checkpoint, if one is kept by a figure, or the end."""
        trial = self.trainer.fast_dev_run  # type: ignore[attr-defined]
        if self._get(self.config, "test_after_fit") and not trial:
            keepers: Any = self.trainer.checkpoint_callbacks
            best = [kept.best_model_path for kept in keepers if getattr(kept, "monitor", None)]
            path = next(filter(None, best), None)
            self.trainer.test(
                self.model, self.datamodule, ckpt_path=path, verbose=False, weights_only=True
            )
            self._judge("test")


def _check_loading(options: Any) -> None:
    """Let a subcommand load weights only, and from a file that is here (which reads it later)."""
    if options.get("weights_only") is False:
        raise InputError(
            "weights_only must be true: otherwise a checkpoint may run code of its own"
        )
    if "weights_only" in options:
        options["weights_only"] = True
    path = options.get("ckpt_path")
    if path and path not in NAMED and not Path(path).exists():
        raise InputError(f"there is no checkpoint {path}")
