"""The labelled images that a transductive defense learns from, out of a run's data."""

from lightning.pytorch import Trainer
from torch import nn

from lightning_rob.data.image_data import ImageData
from lightning_rob.defenses.transductive import Source, Transductive


def give_source(defense: nn.Module, trainer: Trainer) -> None:
    """Let defenses that learn from labelled images learn from those that the run trains on.

    Raises:
        ValueError: the run's data module is none of ours.
    """
    for part in defense.modules():
        if isinstance(part, Transductive) and part.needs_source and part.source_data is None:
            data = trainer.datamodule  # type: ignore[attr-defined]
            if not isinstance(data, ImageData):
                raise ValueError(
                    f"{type(part).__name__} learns from labelled images: give it source=(x, y), or "
                    "evaluate it with one of the data modules of lightning_rob.data"
                )
            part.source_data = Source(data.labelled())
