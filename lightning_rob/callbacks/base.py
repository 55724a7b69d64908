"""Base class of the callbacks that attack the module at validation and test."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import count, takewhile
from typing import Any, ClassVar, Self

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_rob.attacks import Attack
from lightning_rob.callbacks.images import Images, Inputs
from lightning_rob.callbacks.progress import AttackProgress
from lightning_rob.defenses import Defense
from lightning_rob.evaluation.evaluate import as_defense
from lightning_rob.evaluation.evaluator import EvaluationSettings, check_attacks
from lightning_rob.evaluation.groups import GROUP_SIZE, Batch, Unpack
from lightning_rob.randomness import own_streams
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import Norm, norm_order, pixels

SHARDED = (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)


class EvaluationCallback(Callback, ABC):
    """Hands each image of a validation or test to `attack_batch` once, and then calls `report`.

    See `Images` for their order. Attacks run outside autocast and inference mode, and the global
    random streams, from which training draws, are left as they were. The sanity check before
    training tries two images and reports nothing.

    Args:
        attacks: name -> attack; the attribute has those that no earlier callback of the run runs.
        every_n_epochs: evaluate in every n-th epoch of `fit`.
        max_images: number of attacked images, a random choice by the seed; None attacks all.
        seed: seed of all noise.
        group_size: images that are attacked together; other sizes may round otherwise.
        unpack: function of a batch that returns (images, labels) or (images, labels, indices),
            images in [0, 1]; None takes batches that are so already.
        preprocess: function that is applied to images before a plain network, such as a
            normalization; attacks go through its gradient.
        dataloader_idx: number of the data loader that is evaluated; None refuses several.
    """

    alone: ClassVar[bool] = False  # whether a run has one: its figures have one name

    def __init__(
        self,
        attacks: Mapping[str, Attack] | None = None,
        every_n_epochs: int = 1,
        max_images: int | None = None,
        seed: int = 0,
        group_size: int = GROUP_SIZE,
        unpack: Unpack | None = None,
        preprocess: Callable[..., Any] | None = None,
        dataloader_idx: int | None = None,
    ) -> None:
        at_least(1, every_n_epochs=every_n_epochs)
        self.settings = EvaluationSettings(seed, max_images=max_images, group_size=group_size)
        self.every_n_epochs = every_n_epochs
        self.inputs = Inputs(unpack, preprocess, dataloader_idx)
        self.given, self.attacks = dict(attacks or {}), dict(attacks or {})
        self.images: Sequence[Images] = ()
        self.progress: AttackProgress | None = None

    @abstractmethod
    def begin(self, trainer: Trainer, pl_module: Any, loaders: Any) -> Sequence[Images]:
        """Forget the last evaluation; return the images of this one."""

    @abstractmethod
    def attack_batch(self, trainer: Trainer, pl_module: Any, batch: Batch, images: Images) -> None:
        """Attack a batch of `images`: images [B, C, H, W], labels [B] and indices [B]."""

    @abstractmethod
    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Log the results; called on every process."""

    def before_images(self, trainer: Trainer, pl_module: Any, images: Images) -> None:
        """Look at what is evaluated before the first batch; called on every process."""

    def finish_images(self, images: Images) -> None:
        """Gather the results of images that are all attacked; called on every process."""

    def due(self, trainer: Trainer) -> bool:
        """Whether this callback evaluates in the current epoch."""
        if self.given and not self.attacks:
            return False  # an earlier callback runs them
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return True
        return (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def evaluated_for(self, trainer: Trainer) -> Sequence["EvaluationCallback"]:
        """Return the callbacks of the run whose attacks this one runs."""
        return [self]

    def peers(self, trainer: Trainer) -> list[Self]:
        """Return the callbacks of this kind, a subclass included."""
        kinds = (kind for kind in type(self).__mro__ if EvaluationCallback in kind.__bases__)
        kind: Any = next(kinds)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        return [callback for callback in callbacks if isinstance(callback, kind)]

    def earlier(self, trainer: Trainer) -> list[Self]:
        """Return the `peers` that stand before this callback."""
        return list(takewhile(lambda one: one is not self, self.peers(trainer)))

    @property
    def conditions(self) -> tuple[Any, ...]:
        """Everything that makes the same attack another measurement."""
        return (self.settings,)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse trainers in which nothing can be measured; order and compare the callbacks."""
        name = type(self).__name__
        if not isinstance(pl_module, LightningModule):
            raise MisconfigurationException(
                f"{name} is for trainers and modules of the package lightning, got "
                f"{type(pl_module).__name__} of another, such as pytorch_lightning: write "
                "`import lightning.pytorch as pl`"
            )
        if isinstance(trainer.strategy, SHARDED):
            raise MisconfigurationException(
                f"{name} attacks whole networks, {type(trainer.strategy).__name__} shards them: "
                "train with strategy ddp, or leave the callback out and call "
                "lightning_rob.evaluate on the saved network afterwards"
            )
        if stage == "fit" and not is_overridden("validation_step", pl_module):
            rank_zero_warn(
                f"{name} measures nothing in fit: {type(pl_module).__name__} has no "
                "validation_step, which may be empty (`pass`)"
            )
        if stage == "fit" and 0 < (trainer.max_epochs or 0) < self.every_n_epochs:
            rank_zero_info(
                f"{name} will not attack: it does so in every {self.every_n_epochs}th epoch, and "
                f"this fit has {trainer.max_epochs}; lower its every_n_epochs, or test afterwards"
            )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        averaging = [c for c in callbacks if isinstance(c, WeightAveraging)]
        if averaging:  # behind all evaluations: it takes its weights back at an epoch's end
            others = [c for c in callbacks if c not in averaging]
            places = [i for i, c in enumerate(others) if isinstance(c, EvaluationCallback)]
            place = 1 + max(places, default=-1)
            trainer.callbacks = [*others[:place], *averaging, *others[place:]]  # type: ignore[attr-defined]
        earlier = self.earlier(trainer)
        if any(one.inputs != self.inputs for one in earlier):
            raise ValueError(
                "all callbacks of a run need the same unpack, preprocess and dataloader_idx: their "
                "worst case is one number; evaluate other images in another run"
            )
        if self.alone and any(isinstance(one, type(self)) for one in earlier):
            raise ValueError(
                f"a run has one {name}, for Lightning would log the mean of two: test in turn"
            )
        # Attacks that no earlier callback runs, under names that none uses.
        taken: dict[str, tuple[Any, ...]] = {}
        for one in earlier:
            # A subclass with attributes of its own may compare equal to another attack.
            taken |= {n: (a, type(a), vars(a), *one.conditions) for n, a in one.attacks.items()}
        found: dict[str, Attack] = {}
        for name, attack in self.given.items():
            similar = [taken[key] for key in taken if key == name or key.startswith(f"{name}_")]
            if name not in taken:
                found[name] = attack
            elif (attack, type(attack), vars(attack), *self.conditions) not in similar:
                numbered = (f"{name}_{i}" for i in count(2))
                new = next(key for key in numbered if key not in {*taken, *self.given})
                found[new] = attack
                if trainer.is_global_zero:
                    print(
                        f"{name} is the name of another attack: this one, {attack.threat}, is {new}"
                    )
        self.attacks = found

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Add advice to Lightning's refusal of a module without a step, which precedes `setup`."""
        step = "test_step" if trainer.state.fn == "test" else "validation_step"
        refused = isinstance(exception, MisconfigurationException)
        refused = refused and f"No `{step}()` method defined" in str(exception)
        if refused and not getattr(exception, "__notes__", None):
            exception.add_note(
                f"Give {type(pl_module).__name__} a {step}, which may be empty (`pass`), or call "
                'evaluate(module, "pgd", loader, eps=8/255) of lightning_rob without a Trainer.'
            )

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.images, self.progress = (), None
        if not any(callback.due(trainer) for callback in self.evaluated_for(trainer)):
            return
        loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        with torch.inference_mode(False):  # whose tensors could not be added to outside of it
            self.images = self.begin(trainer, pl_module, loaders)
        if not trainer.sanity_checking:
            totals = [images.total for images in self.images]
            total = None if None in totals else sum(filter(None, totals))
            self.progress = AttackProgress(trainer, total)

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.images:
            return
        device = pl_module.device
        for images in self.images:
            # Training draws from the global streams; images of another seed have their own.
            with (
                own_streams(images.settings.seed, device),
                torch.autocast(device.type, enabled=False),
                torch.inference_mode(False),
            ):
                self.before_images(trainer, pl_module, images)
                for batch in images.batches():
                    self.attack_batch(trainer, pl_module, batch, images)
                if not trainer.sanity_checking:
                    self.finish_images(images)
        if self.progress:
            self.progress.close()
            self.report(trainer, pl_module, "test" if trainer.testing else "val")

    on_test_epoch_end = on_validation_epoch_end

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep averaged weights for a test after a fit; Lightning would take the others back."""
        if trainer.state.fn != "fit" and "current_model_state" in checkpoint:
            checkpoint["current_model_state"] = checkpoint["state_dict"]

    def log_value(self, pl_module: Any, name: str, value: Any, prog_bar: bool = False) -> None:
        """Log a value."""
        # Lightning would add the data loader of the batch that came last.
        pl_module.log(name, value, sync_dist=True, add_dataloader_idx=False, prog_bar=prog_bar)

    def advance(self, attack: str, images: int) -> None:
        """Add images that an attack has finished to the progress bar."""
        if self.progress:
            self.progress.advance(attack, images)

    def defense_of(self, pl_module: Any) -> Defense:
        """Return the module's `defense`, or the module itself as a network, in `Single`."""
        return as_defense(pl_module, self.inputs.preprocess)


def with_threat(
    attacks: Mapping[str, Attack], eps: float | None, norm: Norm | None
) -> dict[str, Attack]:
    """Return the attacks in balls of this radius and norm, checked; None keeps their own."""
    if eps is not None:
        attacks = {name: attack.rescaled(pixels(eps), norm) for name, attack in attacks.items()}
    elif norm is not None and norm_order(norm):  # raises for an unknown one
        raise ValueError(f"norm {norm} needs a radius in its units: give eps too")
    check_attacks(attacks)
    return dict(attacks)
