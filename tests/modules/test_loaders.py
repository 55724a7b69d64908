"""Training on loaders of other people: (x, y), (x, y, index) and batches of another form."""

import sys

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_rob import PGD, Threat
from lightning_rob.defenses import RandomTransforms
from lightning_rob.modules import AdversarialTraining, RobustModule, TransformTraining
from lightning_rob.transforms import GaussianNoise
from tests.tiny import Blobs, TinyNet, quiet_trainer


class Pairs(LightningDataModule):
    """A data module as users have theirs: batches of images and labels."""

    def __init__(self, indices: bool = False) -> None:
        super().__init__()
        samples = Blobs(64).source(train=True)
        x, y = torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])
        self.images = TensorDataset(x, y, *[torch.arange(len(x))] * indices)

    def train_dataloader(self):
        return DataLoader(self.images, batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.images, batch_size=24)

    test_dataloader = predict_dataloader = val_dataloader


def trainer(folder, *callbacks, **options):
    return quiet_trainer(*callbacks, default_root_dir=folder, **({"max_epochs": 1} | options))


class Losses(Callback):
    """The validation losses of each sub-model."""

    def __init__(self):
        self.found = {}

    def on_validation_end(self, trainer, module):
        for key, value in trainer.callback_metrics.items():
            if key.startswith("val/loss/"):
                self.found.setdefault(key.removeprefix("val/loss/"), []).append(float(value))


def test_transform_training_on_pairs_stops_and_ends_with_the_best_weights(tmp_path):
    torch.manual_seed(0)
    module, data, seen = TransformTraining(TinyNet, ["clean", "rotate_90"], 3, 1), Pairs(), Losses()
    trainer(tmp_path, seen, max_epochs=6, num_sanity_val_steps=0).fit(module, data)
    assert module.complete
    x, y = data.images.tensors
    for member, (name, transform) in zip(module.members, module.transforms.items(), strict=True):
        with torch.no_grad():
            loss = nn.functional.cross_entropy(member.eval()(transform(x)), y)
        assert float(loss) == pytest.approx(min(seen.found[name]), rel=1e-4)


def test_a_plain_command_line_of_lightning(tmp_path, monkeypatch):
    """No command, recipe or data module of this package."""
    arguments = {
        "model": {
            "class_path": "lightning_rob.modules.AdversarialTraining",
            "init_args": {
                "net": {"class_path": "tests.tiny.TinyNet"},
                "attack": {
                    "class_path": "lightning_rob.PGD",
                    "init_args": {"threat": {"eps": 0.05}, "steps": 2, "step_size": 0.03},
                },
            },
        },
        "trainer": {
            **{"max_epochs": 1, "accelerator": "cpu", "logger": False},
            **{"enable_checkpointing": False, "enable_progress_bar": False},
        },
    }
    options = {
        "subclass_mode_model": True,
        "save_config_callback": None,
        "seed_everything_default": False,
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(arguments))
    monkeypatch.setattr(sys, "argv", ["mine.py", "fit", "--config", str(tmp_path / "mine.yaml")])
    cli = LightningCLI(RobustModule, Pairs, **options)
    metrics = cli.trainer.callback_metrics
    assert metrics["train/loss"] > 0
    assert 0 < metrics["val/acc"] <= 1


class AsDict(Pairs):
    def __init__(self) -> None:
        super().__init__()
        self.images = [{"image": x, "label": y} for x, y in self.images]


class FromDict(AdversarialTraining):
    def unpack(self, batch):
        return batch["image"], batch["label"]


def random_module(kind=AdversarialTraining):
    """A defense and an attack whose noise is that of the images."""
    torch.manual_seed(0)
    attack = PGD(Threat("linf", 0.05), 2, 0.03)
    return kind(
        TinyNet, attack, defense=lambda net: RandomTransforms(net, [GaussianNoise(alpha=0.9)], 1, 2)
    )


def trained(folder, kind, data):
    module = random_module(kind)
    torch.manual_seed(1)  # of the user's shuffle
    trainer(folder).fit(module, data)
    return torch.cat([weight.flatten() for weight in module.parameters()])


def test_other_batches_are_unpacked_by_a_method(tmp_path):
    expected = trained(tmp_path, AdversarialTraining, Pairs())
    assert torch.equal(trained(tmp_path, FromDict, AsDict()), expected)
    with pytest.raises(TypeError, match=r"batches must be .*, got dict: .*unpack"):
        trained(tmp_path, AdversarialTraining, AsDict())


def test_noise_of_images_without_an_index_is_that_of_their_place():
    """Another noise in another batch or position, the same again at the same place."""
    module = random_module().eval()
    x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(5)).expand(3, -1, -1, -1)
    y = torch.zeros(3, dtype=torch.long)
    keys = [module.indexed((x, y), number)[2] for number in (0, 1, 1)]
    assert torch.equal(keys[1], keys[2])
    assert len(torch.cat(keys[:2]).unique()) == 6
    index = torch.tensor([7, 3, 5])
    assert torch.equal(module.indexed((x, y, index), 4)[2], index)


@pytest.mark.parametrize("indices", [False, True])
def test_predictions_are_numbered(tmp_path, indices):
    found = trainer(tmp_path).predict(random_module(), Pairs(indices))
    index, probs = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert index.tolist() == list(range(64))
    assert probs.shape == (64, 4)
