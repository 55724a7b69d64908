"""A run folder of its own and pictures under every logger, with the real packages."""

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch.utils.data import DataLoader

from lightning_rob import RobustEval
from lightning_rob.callbacks import RobustAudit
from tests.callbacks.test_any_module import ATTACKS, DATA, THREAT, Classifier, trainer
from tests.pieces import lines_of


def wandb(folder):
    pytest.importorskip("wandb")
    return WandbLogger(save_dir=folder, offline=True)


def mlflow(folder):
    pytest.importorskip("mlflow")
    return MLFlowLogger(tracking_uri=f"file:{folder}")


def mlflow_server(folder):
    """No folder of its own: the tracking server is a data base."""
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    return MLFlowLogger(tracking_uri=f"sqlite:///{folder}/mlflow.db")


def several(folder):
    return [CSVLogger(folder), TensorBoardLogger(folder / "board")]


MADE = (wandb, mlflow, mlflow_server, several)


def pictures(folder, make):
    """Number of the pictures that the logger has stored."""
    if make is wandb:
        return len(list(folder.rglob("media/images/test/adversarial/*.png")))
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    tags = []
    for file in folder.rglob("events.out*"):
        tags += event_accumulator.EventAccumulator(str(file)).Reload().Tags()["images"]
    return len([tag for tag in tags if tag.startswith("test/adv")])


@pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow", "ignore:The ``noload``")
@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_two_runs_have_a_folder_and_pictures_each(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for number in (1, 2):
        callbacks = RobustEval(ATTACKS), RobustAudit(THREAT, 2, 10, max_images=8)
        run = trainer(*callbacks, logger=make(tmp_path), default_root_dir=tmp_path, max_epochs=1)
        loader = DataLoader(DATA, 20)
        run.fit(Classifier(), loader, loader)
        assert len([*tmp_path.rglob("audit.json")]) == number
        run.test(run.lightning_module, loader, verbose=False)
        if make is wandb:
            run.logger.experiment.finish()
    files = sorted(tmp_path.rglob("robust.jsonl"))
    assert len(files) == 2
    for file in files:
        assert [line["stage"] for line in lines_of(file)] == ["val"] * 4 + ["test"] * 4
        assert len(list((file.parent / "images").glob("*.csv"))) == 2
        assert (file.parent / "audit.json").exists()
    if make not in (mlflow, mlflow_server):
        assert pictures(tmp_path, make) == 4
