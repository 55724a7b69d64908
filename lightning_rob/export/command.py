"""`lightning-rob export`: the defense of a checkpoint as one file that needs torch alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_rob.data import ImageData
from lightning_rob.export.options import Request, parse
from lightning_rob.export.program import export
from lightning_rob.reasons import InputError, asked
from lightning_rob.run import Command
from lightning_rob.sweep.command import load


def main(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: the command line without `export`.

    Raises:
        InputError: what is asked for cannot be run.
    """
    ExportCommand(*asked(parse, args))


class ExportCommand(Command):
    """Builds what `test` would run, and exports its defense.

    Args:
        request: what is asked for.
        args: a command line of `test`, without the subcommand.
    """

    def __init__(self, request: Request, args: Sequence[str]) -> None:
        self.request = request
        super().__init__(["test", *args])

    def test(
        self, model: Any, datamodule: ImageData, ckpt_path: str | None = None, **_: Any
    ) -> None:
        """Export where `test` would test."""
        if not ckpt_path:
            raise ValueError("say whose weights: --ckpt_path CHECKPOINT")
        load(model, ckpt_path)
        images, keys = first_images(datamodule, self.request.images)
        request = self.request
        try:
            card = export(model.defense, request.out, images, keys, model.seed, request.batch)
        except OSError as error:
            raise InputError(f"{request.out} cannot be written: {error}") from error
        print(
            f"{card['defense']} under {card['rule']}, {card['draws']} draws, in {request.out}: "
            f"answers to {card['compared_images']} test images differ by at most "
            f"{card['largest_difference']:.1e} after loading it back"
        )


def first_images(data: ImageData, count: int) -> tuple[Tensor, Tensor]:
    """The first test images [N, C, H, W] and their indices [N]."""
    data.setup("test")
    part = data.parts["test"]
    rows = [part[i] for i in range(min(count, len(part)))]
    return torch.stack([row[0] for row in rows]), torch.tensor([int(row[2]) for row in rows])
