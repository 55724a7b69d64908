"""A line beside Lightning's own progress bar that says which attack is running."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console
from tqdm import tqdm


class AttackProgress:
    """Counts attacked images; silent on other ranks and where the trainer shows no bar."""

    def __init__(self, trainer: Trainer, total: int | None) -> None:
        bar = trainer.progress_bar_callback
        rich = getattr(bar, "progress", None) if isinstance(bar, RichProgressBar) else None
        self.rich: Any = rich
        self.task = rich.add_task("Attacking", total=total) if rich is not None else None
        shown = bar is not None and rich is None and trainer.is_global_zero
        self.bar = tqdm(total=total, desc="Attacking", leave=False, position=2, disable=not shown)

    def advance(self, attack: str, images: int) -> None:
        self.bar.set_postfix_str(attack, refresh=False)
        self.bar.update(images)
        if self.rich is not None:
            self.rich.update(self.task, advance=images, description=f"Attacking: {attack}")
            self.rich.refresh()

    def close(self) -> None:
        self.bar.close()
        if self.rich is not None:
            self.rich.update(self.task, visible=False)
            self.rich = None


def console_of(trainer: Trainer) -> Console:
    """Return the console to print to while a bar of Rich is live: it would erase other output."""
    live = getattr(trainer.progress_bar_callback, "progress", None)
    console = getattr(live, "console", None)
    return console if isinstance(console, Console) else Console()
