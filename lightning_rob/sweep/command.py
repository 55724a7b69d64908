"""`lightning-rob sweep`: what `test` would evaluate, once for each value of a variable."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningDataModule

from lightning_rob.cli.checkpoints import load_weights
from lightning_rob.cli.errors import parse_or_fail
from lightning_rob.cli.lightning_cli import RobustCLI
from lightning_rob.evaluation.records import versions
from lightning_rob.identity import fingerprint
from lightning_rob.sweep.measure import measure
from lightning_rob.sweep.options import Study, parse
from lightning_rob.sweep.outcome import Outcome

CHANGES_NO_FIGURE = ("batch_size", "eval_batch_size", "workers")


def main(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: the command line without `sweep`.

    Raises:
        InputError: what is asked for cannot be run.
    """
    SweepCommand(*parse_or_fail(parse, args))


class SweepCommand(RobustCLI):
    """Builds what `test` would run, and sweeps it.

    Args:
        study: what is asked for.
        args: a command line of `test`, without the subcommand.
    """

    def __init__(self, study: Study, args: Sequence[str]) -> None:
        self.study = study
        super().__init__(["test", *args])

    def test(
        self,
        model: Any,
        datamodule: LightningDataModule,
        ckpt_path: str | None = None,
        **_: Any,
    ) -> None:
        """Run the sweep where `test` would be run."""
        if ckpt_path:
            load_weights(model, self.checkpoint_io.load_checkpoint(ckpt_path))
        print_of = fingerprint(model.defense)
        name = Path(ckpt_path).stem if ckpt_path else type(model).__name__
        folder = Path("sweeps") / f"{name}_{print_of[:8]}_{self.study.over}"
        told = {
            "command": self.study.command,
            "date": datetime.now().astimezone().isoformat(" ", "minutes"),
            "model": f"{type(model).__name__}, weights {print_of}",
            "checkpoint": ckpt_path or "none",
            "data": f"test images of {type(datamodule).__name__}",
            "versions": ", ".join(f"{name} {v}" for name, v in versions().items()),
        }
        folder = self.study.out or folder
        table = measure(self.study, self.trainer, model, datamodule, settings(self), folder)
        if self.trainer.is_global_zero:
            Outcome(self.study, table, told).tell(folder)


def settings(command: RobustCLI) -> dict[str, Any]:
    """What a command's figures depend on beside the weights and the attacks."""
    config = yaml.safe_load(command.parser.dump(command.config, skip_none=False))["test"]
    trainer = {key: config["trainer"][key] for key in ("limit_test_batches", "precision")}
    options = config["data"].get("init_args", {})
    if command.trainer.limit_test_batches == 1.0:
        for name in CHANGES_NO_FIGURE:
            options.pop(name, None)
    else:
        trainer["world_size"] = command.trainer.world_size
    parts = {"model": config["model"], "data": config["data"], "trainer": trainer}
    return parts | {"versions": versions()}
