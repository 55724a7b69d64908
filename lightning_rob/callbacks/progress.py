"""A line beside Lightning's own progress bar that says which attack is running."""

import time
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console
from tqdm import tqdm


class AttackProgress:
    """Counts attacked images; silent on other ranks and where the trainer shows no bar.

    Args:
        trainer: whose progress bar is joined.
        name: what is in progress.
        total: images to attack, if known.
    """

    def __init__(self, trainer: Trainer, name: str, total: int | None) -> None:
        bar = trainer.progress_bar_callback
        rich = getattr(bar, "progress", None) if isinstance(bar, RichProgressBar) else None
        self.rich: Any = rich
        self.task = rich.add_task(name, total=total) if rich is not None else None
        self.told = 0.0
        shown = bar is not None and rich is None and trainer.is_global_zero
        self.bar = tqdm(total=total, desc=name, leave=False, position=2, disable=not shown)

    def tell(self, text: str) -> None:
        """Say in the same line what goes on meanwhile, twice a second at most."""
        now = time.monotonic()
        if self.rich is not None and now - self.told > 0.5:
            self.told = now
            self.rich.update(self.task, description=f"Attacking: {text}")
            self.rich.refresh()

    def advance(self, attack: str, images: int) -> None:
        """Say that so many images went through an attack."""
        self.bar.set_postfix_str(attack, refresh=False)
        self.bar.update(images)
        if self.rich is not None:
            self.rich.update(self.task, advance=images, description=f"Attacking: {attack}")
            self.rich.refresh()

    def close(self) -> None:
        """Take the line away."""
        self.bar.close()
        if self.rich is not None:
            self.rich.update(self.task, visible=False)
            self.rich = None


def console_of(trainer: Trainer) -> Console:
    """Where to print while the trainer shows its progress: a live bar would erase what is not its.

    Args:
        trainer: whose progress bar may be one of Rich.
    """
    live = getattr(trainer.progress_bar_callback, "progress", None)
    console = getattr(live, "console", None)
    return console if isinstance(console, Console) else Console()
