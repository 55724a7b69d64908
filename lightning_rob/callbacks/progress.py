"""A line beside Lightning's own progress bar that says which attack is running."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console


class AttackProgress:
    """Counts attacked images beside a `RichProgressBar`; silent without one and on other ranks."""

    def __init__(self, trainer: Trainer, total: int | None) -> None:
        bar = trainer.progress_bar_callback
        self.bar: Any = getattr(bar, "progress", None) if isinstance(bar, RichProgressBar) else None
        self.task = self.bar and self.bar.add_task("Attacking", total=total)

    def expect(self, total: int | None) -> None:
        if self.bar:
            self.bar.update(self.task, total=total)

    def advance(self, attack: str, images: int) -> None:
        if self.bar:
            self.bar.update(self.task, advance=images, description=f"Attacking: {attack}")
            self.bar.refresh()

    def close(self) -> None:
        if self.bar:
            self.bar.update(self.task, visible=False)
            self.bar = None


def console_of(trainer: Trainer) -> Console:
    """Return the console to print to while a bar of Rich is live: it would erase other output."""
    live = getattr(trainer.progress_bar_callback, "progress", None)
    console = getattr(live, "console", None)
    return console if isinstance(console, Console) else Console()


def logs_to_file(trainer: Trainer) -> bool:
    """Return whether the output is a file, in which a progress bar leaves nothing."""
    wanted = trainer.is_global_zero and trainer.progress_bar_callback is not None
    return wanted and not console_of(trainer).is_terminal
