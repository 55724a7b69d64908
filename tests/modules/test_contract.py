"""Contract of all training methods: each learns, is evaluated every epoch and resumes exactly."""

import csv
from inspect import isabstract, isclass

import pytest
import torch

from lightning_rob import PGD, Threat, modules
from lightning_rob.evaluation.evaluator import Evaluator
from lightning_rob.modules import DVERGE, TRS, AdversarialTraining
from lightning_rob.randomness import Streams
from tests.modules.support import FOLDER, batch, saving
from tests.tiny import TinyNet, pgd, recipe, records, robust_eval, run, same_weights, weights

LINF = {"norm": "linf", "eps": 0.03}
THREAT = Threat(**LINF)
METHODS = {
    "AdversarialTraining": {"attack": pgd(), "fraction": 0.5},
    "BAT": {"attack": pgd(), "epochs": 2, "probs": [0.9, 0.1]},
    "IAT": {"attack": pgd(), "epochs": 2},
    "BARRE": {
        "attack": pgd(),
        "epochs": 2,
        "search": pgd(),
        "search_from": 2,
        "search_every": 1,
        "search_images": 20,
    },
    "ADP": {"members": 3, "alpha": 0.5, "beta": 0.1, "attack": pgd()},
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
    "lightning_rob.modules.DANN": {"net": {"class_path": "tests.tiny.TinyDANN"}, "scale": 0.5},
}
CHANGES_AFTER_EPOCH_2 = {"BAT", "BARRE", "IAT", "DVERGE"}  # another member or another loss
STARTS = [(name, "at-step=10") for name in METHODS]  # inside of an epoch
STARTS += [("DVERGE", "end-epoch=1"), ("BAT", "end-epoch=1")]  # before the optimizer restarts
STARTS += [("BARRE", "end-epoch=2")]  # after a search
CHECKPOINTS = saving(10)


def method(folder, name, data=None):
    """A recipe of four epochs of a method, whose losses are written as CSV."""
    init = {
        "net": {"class_path": "tests.tiny.TinyNet"},
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "lr_scheduler": {
            "class_path": "torch.optim.lr_scheduler.StepLR",
            "init_args": {"step_size": 1, "gamma": 0.9},
        },
    }
    logger = {"save_dir": str(folder), "name": "run", "version": 0}
    blobs = {"class_path": "tests.tiny.Blobs"}
    target = blobs | {"init_args": {"test_size": 40}}
    if name.endswith("DANN"):
        domains = "lightning_rob.data.source_target.SourceTargetData"
        blobs = {"class_path": domains, "init_args": {"source": blobs, "target": target}}
    return recipe(
        folder,
        model={"class_path": name, "init_args": init | METHODS[name]},
        data=data or blobs,
        trainer__logger={"class_path": "CSVLogger", "init_args": logger},
        **{"trainer__callbacks+": [robust_eval({"apgd": pgd()})]},
    )


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Other files test the checks of each evaluation, which take as long as the training."""
    monkeypatch.setattr(Evaluator, "_check", lambda *_: None)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the folder of a method's run, which the first test that asks for it trains."""
    folders = {}

    def folder_of(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("uninterrupted")
            run("fit", "--config", method(folders[name], name), *CHECKPOINTS)
        return folders[name]

    return folder_of


def test_every_method_is_in_the_list():
    listed = {name.rpartition(".")[2] for name in METHODS} | {"TransformTraining"}
    assert listed | {"PretrainedEnsemble"} >= {
        name for name, kind in vars(modules).items() if isclass(kind) and not isabstract(kind)
    }


def losses(folder):
    with (folder / "run/version_0/metrics.csv").open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_falls_and_each_epoch_is_evaluated_under_attack(uninterrupted, name):
    folder = uninterrupted(name)
    found = losses(folder)
    assert len(found) == 4
    if name in CHANGES_AFTER_EPOCH_2:
        assert found[1] < 0.9 * found[0]
        assert found[3] < found[2]
    else:
        assert found[-1] < found[0] - 0.2 * abs(found[0])
    accuracy = {k: [r for r in records(folder) if r["name"] == k] for k in ("clean", "apgd")}
    assert [(r["epoch"], r["n"]) for r in accuracy["apgd"]] == [(epoch, 32) for epoch in range(4)]
    assert accuracy["clean"][-1]["accuracy"] > (0.6 if name.endswith("DANN") else 0.8)


@pytest.mark.parametrize(("name", "start"), STARTS)
def test_resuming_gives_the_same_weights(uninterrupted, tmp_path, name, start):
    folder = uninterrupted(name)
    args = [*CHECKPOINTS, "--ckpt_path", folder / FOLDER / f"{start}.ckpt"]
    run("fit", "--config", method(tmp_path, name), *args)
    expected, got = (weights(part / FOLDER / "end-epoch=3.ckpt") for part in (folder, tmp_path))
    assert same_weights(expected, got)


def test_each_member_of_bat_ends_with_its_best_weights(uninterrupted):
    folder = uninterrupted("BAT")
    final = torch.load(folder / FOLDER / "end-epoch=3.ckpt", weights_only=True)
    worst = {r["epoch"]: r["accuracy"] for r in records(folder) if r["name"] == "worst"}
    best = final["staged"]["best"]
    assert best["value"] == pytest.approx(max(worst[2], worst[3]))
    assert worst[best["epoch"]] == best["value"]
    second = {k.removeprefix("members.1."): v for k, v in final["state_dict"].items() if ".1." in k}
    assert same_weights(second, best["weights"])


def test_dverge_restarts_optimizer_and_schedule_after_the_warm_up(uninterrupted):
    steps = []
    for epoch in range(4):
        path = uninterrupted("DVERGE") / FOLDER / f"end-epoch={epoch}.ckpt"
        state = torch.load(path, weights_only=True)
        optimizer, schedule = state["optimizer_states"][0], state["lr_schedulers"][0]
        steps.append((int(optimizer["state"][0]["step"]), schedule["last_epoch"]))
    assert steps == [(4, 1), (8, 2), (4, 1), (8, 2)]


@pytest.mark.parametrize(
    "build",
    [
        lambda: AdversarialTraining(TinyNet, PGD(THREAT, 2, 0.02), trades_beta=4.0),
        lambda: DVERGE(TinyNet, members=2),
        lambda: TRS(TinyNet, THREAT, members=2),
    ],
)
def test_searches_for_a_batch_work_in_parts_of_it(build, monkeypatch):
    """Where caches or memory hold only some images: targets and labels go with them."""

    def loss(at_once):
        monkeypatch.setattr("lightning_rob.attacks.base.images_at_once", lambda *_: at_once)
        torch.manual_seed(0)
        module = build().double().train()
        module.noise = Streams.from_index(torch.arange(8), 1)
        x, y = batch()
        return module.loss(x.double(), y)

    torch.testing.assert_close(loss(3), loss(8))
