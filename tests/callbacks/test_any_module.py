"""Callbacks on modules and batches that are not of this package, and plain loops."""

import random

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_rob import PGD, Ensemble, RobustAudit, RobustEval, Single, Threat, evaluate
from lightning_rob.callbacks import RobustCheckpoint, TransferMatrixEval, VotingRuleEval
from tests.tiny import TinyNet
from tests.tiny import quiet_trainer as trainer

THREAT = Threat("linf", 16 / 255)
ATTACKS = {"weak": PGD(THREAT, 1, 4 / 255), "pgd": PGD(THREAT, 3, 8 / 255)}
torch.manual_seed(0)
DATA = TensorDataset(torch.rand(40, 3, 8, 8), torch.arange(40) % 4)


class Classifier(LightningModule):
    """A module as people write them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = TinyNet()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        pass

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class WithoutSteps(Classifier):
    validation_step = LightningModule.validation_step
    test_step = LightningModule.test_step


@pytest.mark.parametrize("step", ["test", "validate"])
def test_a_module_without_the_step_gets_advice(step):
    """Lightning refuses it before `setup`; an error of another cause gets none."""
    loader = DataLoader(DATA, 20)
    name = {"test": "test_step", "validate": "validation_step"}[step]
    with pytest.raises(MisconfigurationException, match=name) as error:
        getattr(trainer(RobustEval(ATTACKS), RobustEval(ATTACKS)), step)(WithoutSteps(), loader)
    (note,) = error.value.__notes__
    assert f"Give WithoutSteps a {name}" in note and "evaluate(module, " in note


class Dropping(nn.Module):
    """A network behind dropout that eval() does not reach."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(dropout(x, 0.1, training=True))


class Noisy(Dataset):
    """The same images, with noise of the usual three streams."""

    def __len__(self):
        return len(DATA)

    def __getitem__(self, i):
        x, y = DATA[i]
        noise = [torch.rand(1), torch.tensor([np.random.rand(), random.random()])]
        return (x + 0.1 * torch.cat(noise).view(3, 1, 1)).float().clamp(0, 1), y


STORED = [DATA[9 * i : 9 * i + 9] for i in range(5)]  # in batches of 9; the last one has 4


class Repeated:
    """Loaders one after the other, as anything that can be iterated."""

    def __init__(self, *loaders):
        self.loaders = loaders

    def __iter__(self):
        for loader in self.loaders:
            yield from loader


def evaluated(callback, module=None, loaders=None):
    loaders = DataLoader(DATA, 7) if loaders is None else loaders
    return trainer(callback).test(module or Classifier(), loaders, verbose=False)


def expected(net=None, data=DATA, **options):
    net = Single(net or Classifier().net)
    return evaluate(net, ATTACKS, DataLoader(data, 40), progress=False, **options)


def test_a_module_that_knows_nothing_of_defenses():
    """Also in groups that are no batches of the loader."""
    callback = RobustEval(ATTACKS, group_size=16)
    (logged,) = evaluated(callback)
    found = expected(group_size=16)
    assert torch.equal(callback.result.scores, found.scores)
    for name in ("clean", "weak", "pgd", "worst"):
        assert logged[f"test/robust/{name}"] == pytest.approx(found.accuracy(name))


def test_a_stream_is_attacked_in_groups_whatever_its_batches():
    found = []
    for size in (40, 9):
        callback = RobustEval(ATTACKS, group_size=16)
        evaluated(callback, loaders=Repeated(DataLoader(DATA, size)))
        found.append(callback.result)
        assert callback.results[0].details["group_size"] == 16
    assert torch.equal(found[0].scores, found[1].scores)
    assert torch.equal(found[0].scores, expected(group_size=16).scores)


def watching(folder):
    """One callback of each kind that attacks."""
    audit = RobustAudit(THREAT, 2, 10, max_images=8)
    matrix, votes = TransferMatrixEval(ATTACKS), VotingRuleEval(ATTACKS)
    return RobustEval(ATTACKS), audit, matrix, votes, RobustCheckpoint(dirpath=folder)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__`")
@pytest.mark.parametrize("stream", [False, True])
def test_the_audit_attacks_a_network_with_noise_as_one_that_is_random(stream):
    """It looks at the first images, before it knows which attacks it runs."""
    names = []
    for drops in (False, True):
        module = Classifier()
        if drops:
            module.net = Dropping(module.net)
        audit = RobustAudit(THREAT, 2, 5, max_images=None if stream else 8)
        loader = DataLoader(DATA, 10)
        trainer(audit).test(module, Repeated(loader) if stream else loader, verbose=False)
        names.append({result.name for result in audit.found.results})
    assert names[1] - names[0] == {"linear_aggmo"}


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__`")
@pytest.mark.parametrize("stream", [False, True])
def test_it_trains_as_without_the_callbacks(stream, tmp_path):
    """Also where validation images draw from the streams that training draws from."""
    weights = []
    for callbacks in ((), watching(tmp_path)):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(1)
        module = Classifier()
        run = trainer(*callbacks, max_epochs=2, enable_checkpointing=bool(callbacks))
        val = DataLoader(Noisy(), 10)
        run.fit(module, DataLoader(Noisy(), 10, shuffle=True), Repeated(val) if stream else val)
        weights.append(module.net.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert len(list(tmp_path.glob("*.ckpt"))) == 1


def test_images_that_draw_at_random_are_the_same_in_every_epoch():
    found = []
    for size in (7, 40):
        callback = RobustEval(ATTACKS)
        evaluated(callback, loaders=DataLoader(Noisy(), size))
        found.append(callback.result.scores)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("loader", "images"),
    [
        (Repeated(DataLoader(DATA, 7)), 40),
        (Repeated(DataLoader(DATA, 7), DataLoader(DATA, 7)), 80),
        (DataLoader(STORED, batch_size=None), 40),
    ],
)
def test_streams_and_stored_batches(loader, images):
    whole, few = RobustEval(ATTACKS), RobustEval(ATTACKS, max_images=12, group_size=5)
    run = trainer(whole, few)
    run.test(Classifier(), loader, verbose=False)
    assert whole.result.index.tolist() == list(range(images))
    assert len(set(few.result.index.tolist())) == 12
    places = few.result.index % 40
    assert torch.equal(few.result.rows.label, DATA[:][1][places])
    assert run.callback_metrics["test/robust/clean"] == expected().accuracy("clean")


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
def test_a_module_without_validation_is_reported(tmp_path, monkeypatch):
    monkeypatch.delattr(Classifier, "validation_step")
    loaders = DataLoader(DATA, 10), DataLoader(DATA, 10)
    with pytest.warns(UserWarning, match="RobustEval measures nothing in fit: Classifier has no"):
        trainer(RobustEval(ATTACKS), max_epochs=1).fit(Classifier(), *loaders)
    callbacks = RobustEval(ATTACKS), RobustCheckpoint(dirpath=tmp_path)
    both = pytest.raises(MisconfigurationException, match="Classifier needs a validation_step")
    with pytest.warns(UserWarning, match="measures nothing in fit"), both:
        trainer(*callbacks, max_epochs=1, enable_checkpointing=True).fit(Classifier(), *loaders)


def unnormalized(batch):
    return 0.5 + 0.25 * batch["image"], batch["label"]


def normalized(x):
    return (x - 0.5) / 0.25


DICTIONARIES = [{"image": normalized(x), "label": y} for x, y in DATA]


def test_dictionaries_of_normalized_images():
    class Behind(Classifier):
        """Expects normalized images."""

        def forward(self, x):
            return self.net(0.5 + 0.25 * x)

    callback = RobustEval(ATTACKS, unpack=unnormalized, preprocess=normalized)
    loader = DataLoader(DICTIONARIES, 7)
    evaluated(callback, Behind(), loader)
    assert torch.allclose(callback.result.scores, expected().scores)
    inputs = {"unpack": unnormalized, "preprocess": normalized, "progress": False}
    again = evaluate(Behind(), ATTACKS, loader, **inputs)
    assert torch.equal(again.scores, callback.result.scores)


@pytest.mark.parametrize("stored", [False, True])
def test_one_of_several_data_loaders_is_evaluated(stored):
    """Also in a mode of a combined loader that would read a part of them."""
    few = DataLoader(TensorDataset(*DATA[:20]), 7)
    second = DataLoader(STORED, batch_size=None) if stored else few
    loaders = CombinedLoader([DataLoader(DATA, 5), second], "min_size" if stored else "max_size")
    for place, images in ((0, 40), (1, 40 if stored else 20)):
        callback = RobustEval(ATTACKS, dataloader_idx=place)
        run = trainer(callback, max_epochs=1)
        run.fit(Classifier(), DataLoader(DATA, 10), loaders)
        assert len(callback.result.index) == images
        assert "val/robust/pgd" in run.callback_metrics
    with pytest.raises(ValueError, match="one of 2 data loaders: say which by dataloader_idx"):
        evaluated(RobustEval(ATTACKS), loaders=[few, few])


def test_trainers_in_which_nothing_can_be_measured_are_refused():
    callback = RobustEval(ATTACKS)
    sharded = trainer(callback)
    sharded.strategy.__class__ = type("Sharded", (FSDPStrategy,), {})
    with pytest.raises(MisconfigurationException, match="Sharded shards them: train with"):
        callback.setup(sharded, Classifier(), "fit")
    with pytest.raises(MisconfigurationException, match=r"import lightning\.pytorch as pl"):
        callback.setup(trainer(), TinyNet(), "fit")


def test_bad_inputs():
    loader = DataLoader(DICTIONARIES, 7)
    with pytest.raises(TypeError, match="got dict: give unpack"):
        evaluated(RobustEval(ATTACKS), loaders=loader)
    with pytest.raises(ValueError, match=r"images must lie in \[0.0, 1.0\]"):
        evaluated(RobustEval(ATTACKS, unpack=lambda b: (b["image"], b["label"])), loaders=loader)
    with pytest.raises(ValueError, match="preprocess is for plain networks, got Ensemble"):
        evaluate(Ensemble([TinyNet()]), ATTACKS, [DATA[:4]], preprocess=normalized)
    callbacks = RobustEval(ATTACKS), RobustEval(ATTACKS, preprocess=normalized)
    with pytest.raises(ValueError, match="need the same unpack, preprocess and"):
        trainer(*callbacks).test(Classifier(), DataLoader(DATA, 7), verbose=False)


def test_averaged_weights_are_evaluated_wherever_the_callback_stands():
    callback, averaging = RobustEval(ATTACKS), EMAWeightAveraging(decay=0.5)
    run = trainer(averaging, callback, max_epochs=2)
    run.fit(Classifier(), DataLoader(DATA, 10), DataLoader(DATA, 10))
    # At the end of the fit the module has the averaged weights.
    assert torch.equal(callback.result.scores, expected(run.lightning_module.net).scores)


def test_hooks_of_the_data_are_called_before_the_batch_is_unpacked():
    class Greyed(Classifier):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return {"image": batch["image"].clamp(-1, 1), "label": batch["label"]}

    callback = RobustEval(ATTACKS, unpack=unnormalized)
    evaluated(callback, Greyed(), DataLoader(DICTIONARIES, 7))
    x, y = DATA[:]
    found = expected(data=TensorDataset(x.clamp(0.25, 0.75), y))
    assert torch.allclose(callback.result.scores, found.scores)


def test_callbacks_that_have_left_the_trainer_are_forgotten(tmp_path):
    """Each of the two tests leaves a file."""
    first, second = RobustEval(ATTACKS), RobustEval(ATTACKS)
    run = trainer(first, logger=CSVLogger(tmp_path))
    for callback in (first, second):
        run.callbacks = [callback]
        (logged,) = run.test(Classifier(), DataLoader(DATA, 7), verbose=False)
        assert logged["test/robust/clean"] == pytest.approx(expected().accuracy("clean"))
    assert [result.name for result in second.results] == ["clean", "weak", "pgd", "worst"]
    files = sorted(path.name for path in tmp_path.rglob("*.csv") if path.parent.name == "images")
    assert files == ["test-weak+pgd-2.csv", "test-weak+pgd.csv"]
