"""Joint training from the command line: it learns, starts from checkpoints and resumes exactly."""

import csv

import pytest
import torch

from lightning_rob.defenses import Ensemble
from lightning_rob.modules import ADP, GAL, JointTraining
from tests.test_modules import Spy, batch
from tests.tiny import TinyNet, pgd, recipe, records, run, same_weights, weights

LINF = {"norm": "linf", "eps": 0.03}
METHODS = {
    "ADP": {"members": 3, "alpha": 0.5, "beta": 0.1},
    "GAL": {"members": 3},
    "TRS": {
        "members": 3,
        "threat": LINF,
        "similarity_weight": 1.0,
        "roughness_weight": 0.1,
        "initial_eps": 0.01,
        "growth_epochs": 3,
    },
    "DVERGE": {"members": 3, "layers": ["first", ""], "warmup_epochs": 2},
    "FreeTraining": {"threat": LINF, "replays": 2},
}
CHECKPOINTS = [
    "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: "
    "{filename: 'at-{step}', every_n_train_steps: 3, save_top_k: -1}}",
    "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: "
    "{filename: 'end-{epoch}', save_top_k: -1}}",
]
FOLDER = "run/version_0/checkpoints"


def method(folder, name, **options):
    """A recipe of a method, whose losses are written as CSV."""
    init = {
        "net": {"class_path": "tests.tiny.TinyNet"},
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "lr_scheduler": {
            "class_path": "torch.optim.lr_scheduler.StepLR",
            "init_args": {"step_size": 1, "gamma": 0.9},
        },
    }
    logger = {"save_dir": str(folder), "name": "run", "version": 0}
    return recipe(
        folder,
        model={"class_path": name, "init_args": init | METHODS[name] | options},
        trainer__logger={
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": logger,
        },
    )


def losses(folder):
    with (folder / "run/version_0/metrics.csv").open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


@pytest.fixture(scope="module", params=METHODS)
def whole(request, tmp_path_factory):
    """A run of 4 epochs of 4 steps."""
    folder = tmp_path_factory.mktemp(request.param)
    run("fit", "--config", method(folder, request.param), *CHECKPOINTS)
    return request.param, folder


def test_training_lowers_the_loss_and_learns(whole):
    name, folder = whole
    found = losses(folder)
    assert len(found) == 4
    if name == "DVERGE":
        assert found[1] < 0.7 * found[0]  # warming up, and then it is another loss
        assert found[3] < found[2]
    else:
        assert found[-1] < found[0] - 0.3 * abs(found[0])
    clean = [r["accuracy"] for r in records(folder) if r["name"] == "clean"]
    assert clean[-1] > 0.9


@pytest.mark.parametrize("start", ["end-epoch=1", "at-step=9"])
def test_resuming_gives_the_same_weights(whole, tmp_path, start):
    name, folder = whole
    args = [*CHECKPOINTS, "--ckpt_path", folder / FOLDER / f"{start}.ckpt"]
    run("fit", "--config", method(tmp_path, name), *args)
    expected, got = (weights(part / FOLDER / "end-epoch=3.ckpt") for part in (folder, tmp_path))
    assert same_weights(expected, got)


def test_dverge_begins_anew_when_the_members_are_warm(tmp_path):
    run("fit", "--config", method(tmp_path, "DVERGE"), *CHECKPOINTS)
    steps = []
    for epoch in range(4):
        state = torch.load(tmp_path / FOLDER / f"end-epoch={epoch}.ckpt", weights_only=True)
        optimizer, schedule = state["optimizer_states"][0], state["lr_schedulers"][0]
        steps.append((int(optimizer["state"][0]["step"]), schedule["last_epoch"]))
    assert steps == [(4, 1), (8, 2), (4, 1), (8, 2)]


def test_the_defense_is_the_ensemble_and_all_of_it_is_trained():
    module = ADP(TinyNet, members=3, probs=[0.5, 0.3, 0.2])
    assert isinstance(module, JointTraining)
    assert isinstance(module.defense, Ensemble)
    torch.testing.assert_close(module.defense.weights, torch.tensor([0.5, 0.3, 0.2]))
    trained = module.configure_optimizers()["optimizer"].param_groups[0]["params"]
    assert len(trained) == 3 * len(list(TinyNet().parameters()))


def test_adversarial_images_are_of_the_whole_ensemble():
    spy = Spy()
    module = GAL(TinyNet, attack=spy, members=2).eval()
    x, y = batch()
    loss = module.loss(x, y)
    assert [defense for defense, _ in spy.seen] == [module.defense]
    module.attack = None
    torch.testing.assert_close(loss, module.loss(torch.ones_like(x), y))


def test_members_start_from_checkpoints(tmp_path):
    net = TinyNet()
    torch.save(net.state_dict(), tmp_path / "a.pt")
    module = ADP(TinyNet, members=2, checkpoints=[None, str(tmp_path / "a.pt")])
    assert same_weights(module.members[1].state_dict(), net.state_dict())
    assert not torch.equal(module.members[0].first.weight, net.first.weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": 1}, "members must be at least 2 to be trained jointly, got 1"),
        ({"probs": [1.0]}, "3 members need 3 probs"),
        ({"checkpoints": ["a.pt"]}, "checkpoints must be one per member"),
    ],
)
def test_numbers_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        ADP(TinyNet, **options)


@pytest.mark.parametrize("module", [ADP, GAL])
def test_labels_out_of_range(module):
    x, y = batch()
    with pytest.raises(ValueError, match="labels must be 0 … 3 for 4 classes"):
        module(TinyNet).loss(x, y + 2)


def test_adversarial_training_of_an_ensemble_from_the_command_line(tmp_path):
    run("fit", "--config", method(tmp_path, "ADP", attack=pgd()), "--trainer.max_epochs=2")
    found = losses(tmp_path)
    assert found[1] < found[0]
