"""Small things that several tests need: a net, a recipe, a run from the command line."""

import os
import signal
from pathlib import Path

import torch
import yaml
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_rob.cli import main
from lightning_rob.data import ImageData
from tests.pieces import CKPT, adam, spec
from tests.pieces import ROOT as ROOT
from tests.pieces import records as records


class TinyNet(nn.Module):
    """Two linear layers with BatchNorm on 3x8x8 images of 4 classes; learns in a second."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 8 * 8, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x.flatten(1))).relu())


class TinyDANN(nn.Module):
    """Three parts of one or two linear layers; learns in a second."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Flatten(), nn.Linear(192, 16), nn.BatchNorm1d(16), nn.ReLU()
        self.encoder, self.predictor = nn.Sequential(*layers), nn.Linear(16, 4)
        self.discriminator = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))

    def features(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def classify(self, features: Tensor) -> Tensor:
        return self.predictor(features)

    def domain(self, features: Tensor) -> Tensor:
        return self.discriminator(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


class Blobs(ImageData):
    """Four noisy prototypes, 3x8x8; test images as many as asked for."""

    classes, channels, size, mean, std = 4, 3, 8, (0.5,) * 3, (0.25,) * 3

    def __init__(
        self,
        train_size: int = 96,
        test_size: int = 33,
        labels: int = 4,
        eval_batch_size: int | None = None,
        workers: int = 0,
    ) -> None:
        super().__init__(16, eval_batch_size, val_size=32, workers=workers)
        self.sizes = {True: train_size, False: test_size}
        self.labels = labels

    def source(self, train: bool):
        generator = torch.Generator().manual_seed(int(train))
        prototypes = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(7))
        y = torch.randint(0, self.labels, (self.sizes[train],), generator=generator)
        noise = torch.randn(len(y), 3, 8, 8, generator=generator)
        x = (0.25 + 0.5 * prototypes[y % 4] + 0.12 * noise).clamp(0, 1)
        return [(image, int(label)) for image, label in zip(x, y, strict=True)]


def blobs(train: bool = True, **sizes: int) -> tuple[Tensor, Tensor]:
    """The images and labels of `Blobs`."""
    items = Blobs(**sizes).source(train)
    return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])


def fit_all(net: nn.Module, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """The network in eval mode after some steps of Adam on all images."""
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return net.eval()


KEPT = spec("ModelCheckpoint", save_last=True)


def pgd(**options) -> dict:
    init = {"threat": {"norm": "linf", "eps": "16/255"}, "steps": 3, "step_size": "8/255"} | options
    return spec("lightning_rob.attacks.PGD", **init)


def arc(**options) -> dict:
    return pgd(**{"step_size": "16/255"} | options) | {"class_path": "lightning_rob.attacks.ARC"}


def robust_eval(attacks: dict, **options) -> dict:
    return spec("lightning_rob.callbacks.RobustEval", attacks=attacks, **options)


def recipe(folder: Path, **overrides) -> Path:
    """A BAT run of two epochs per member in a second or two, written as a YAML file."""
    where = {"save_dir": str(folder), "name": "run", "version": 0}
    logger = spec("lightning.pytorch.loggers.TensorBoardLogger", **where)
    content = {
        "seed_everything": 0,
        "model": spec(
            "lightning_rob.modules.BAT",
            **{"net": spec("tests.tiny.TinyNet", width=16), "attack": pgd(), "optimizer": adam()},
            **{"epochs": 2, "probs": [0.9, 0.1]},
        ),
        "data": spec("tests.tiny.Blobs"),
        "trainer": {
            **{"accelerator": "cpu", "max_epochs": 4, "log_every_n_steps": 1, "logger": logger},
            **dict.fromkeys(("enable_progress_bar", "enable_model_summary"), False),
            "callbacks+": [robust_eval({"apgd": pgd(), "arc": arc()})],
        },
    }
    for key, value in overrides.items():
        *path, last = key.split("__")
        part = content
        for name in path:
            part = part[name]
        part[last] = value
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def run(*args: str) -> None:
    main(list(map(str, args)))


def exit_code(*args: str) -> int:
    """The code with which a command ends."""
    try:
        run(*args)
    except SystemExit as end:
        return end.code
    return 0


def refused(capsys, *args: str) -> str:
    """The line of error with which a command ends, its only one."""
    capsys.readouterr()
    assert exit_code(*args) == 2
    text = capsys.readouterr().err
    (line,) = [line for line in text.splitlines() if "error:" in line]
    assert line.startswith("lightning-rob: error: ")
    assert "Traceback" not in text
    assert len(line) < 500
    return line


def fit(folder: Path, *args: str, callbacks=(), **overrides) -> Path:
    """Run a recipe, by default without a robust evaluation; return its last checkpoint."""
    if not callbacks:
        overrides = {"model__init_args__monitor": None} | overrides
    file = recipe(folder, **{"trainer__callbacks+": [KEPT, *callbacks]} | overrides)
    run("fit", "--config", file, *args)
    return folder / CKPT


def quiet_trainer(*callbacks: Callback, **options) -> Trainer:
    """A trainer that writes and prints nothing."""
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    given = {"accelerator": "cpu", "devices": 1} | dict.fromkeys(silent, False) | options
    return Trainer(callbacks=list(callbacks), **given)


def images_of(data: ImageData, part: str = "test") -> tuple[Tensor, Tensor]:
    samples = [data.parts[part][i] for i in range(len(data.parts[part]))]
    return torch.stack([s[0] for s in samples]), torch.tensor([s[1] for s in samples])


def weights(path: Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def same_weights(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def same_nets(a: nn.Module, b: nn.Module) -> bool:
    return same_weights(a.state_dict(), b.state_dict())


class KillAt(Callback):
    """SIGKILL to its own process after a training step: nothing gets a chance to tidy up."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
