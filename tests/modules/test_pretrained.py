"""Trained networks become an ensemble, from Python and from the command line."""

import pytest
import torch
from torch import nn

from lightning_rob.defenses import Ensemble
from lightning_rob.modules import PretrainedEnsemble
from lightning_rob.nets import ResNet, ZooNet
from tests.nets.test_weights import OTHER_MEAN, OTHER_STD, dverge_state
from tests.tiny import (
    CKPT,
    TinyNet,
    arc,
    fit,
    pgd,
    recipe,
    records,
    refused,
    robust_eval,
    run,
    same_nets,
)

SHAPE = {"depth": 8, "widths": (4, 8, 16), "shortcut": "B"}


def saved(folder, *nets):
    paths = [str(folder / f"{i}.pth") for i in range(len(nets))]
    for path, net in zip(paths, nets, strict=True):
        torch.save(net.state_dict(), path)
    return paths


@pytest.fixture
def numbered(tmp_path):
    """A file of three members, and the members."""
    nets = [TinyNet() for _ in range(3)]
    path = tmp_path / "ensemble.ckpt"
    state = nn.ModuleDict({"members": nn.ModuleList(nets)}).state_dict()
    torch.save({"state_dict": state, "staged": {"best": nets[0].state_dict()}}, path)
    return nets, str(path)


def check(module, nets, probs):
    assert isinstance(module.defense, Ensemble)
    assert len(module.defense.members) == len(nets)
    assert all(same_nets(a, b) for a, b in zip(module.defense.members, nets, strict=True))
    assert module.defense.weights.tolist() == pytest.approx(probs)


def test_all_of_one_file_or_the_first(numbered):
    nets, path = numbered
    check(PretrainedEnsemble(TinyNet, path), nets, [1 / 3] * 3)
    check(PretrainedEnsemble([TinyNet] * 3, path, members=3), nets, [1 / 3] * 3)
    check(PretrainedEnsemble(TinyNet, path, members=2, probs=[0.7, 0.3]), nets[:2], [0.7, 0.3])
    check(PretrainedEnsemble([TinyNet] * 2, path), nets[:2], [0.5, 0.5])


def test_members_of_several_files_by_their_prefixes(numbered, tmp_path):
    nets, path = numbered
    torch.save({"net": nets[0].state_dict()}, tmp_path / "one.pth")
    paths = [path, str(tmp_path / "one.pth"), path]
    check(
        PretrainedEnsemble(TinyNet, paths, prefix=["members.2", None, "members.1"]),
        [nets[2], nets[0], nets[1]],
        [1 / 3] * 3,
    )


def test_a_file_of_the_authors_of_dverge(tmp_path):
    nets = [ResNet(**SHAPE) for _ in range(3)]
    states = [dverge_state(net.state_dict()) for net in nets]
    torch.save({f"model{i}": s for i, s in enumerate(states)}, tmp_path / "epoch_200.pth")
    module = PretrainedEnsemble(
        lambda: ResNet(**SHAPE, mean=OTHER_MEAN, std=OTHER_STD),
        str(tmp_path / "epoch_200.pth"),
        rename={"fc": "linear", "downsample": "shortcut"},
    )
    check(module, nets, [1 / 3] * 3)


class Trained(nn.Linear):
    """Comes with its weights."""

    def __init__(self):
        super().__init__(2, 2)
        nn.init.eye_(self.weight)
        nn.init.zeros_(self.bias)


def test_weights_may_come_from_the_factory(tmp_path):
    torch.save(ZooNet("squeezenet1_0", classes=4).state_dict(), tmp_path / "zoo.pth")
    path = str(tmp_path / "zoo.pth")

    def zoo():
        return ZooNet("squeezenet1_0", classes=4, weights=path)

    net = TinyNet()
    check(
        PretrainedEnsemble([zoo, TinyNet], [None, *saved(tmp_path, net)]), [zoo(), net], [0.5, 0.5]
    )
    check(PretrainedEnsemble([Trained, Trained]), [Trained(), Trained()], [0.5, 0.5])


BAD = {
    "random weights": ({"nets": [TinyNet, TinyNet]}, "a TinyNet has random weights"),
    "one without": ({"checkpoints": ["FILE", None], "prefix": "members.0"}, "has random weights"),
    "how many": ({}, "give the number of members"),
    "numbers": ({"checkpoints": ["FILE"], "members": 2}, "members and all .* must agree"),
    "too few": ({"checkpoints": "FILE", "members": 4}, "holds 3 members, not 4"),
    "one prefix": ({"checkpoints": "FILE", "prefix": ["a"]}, r"one checkpoint .* got \['a'\]"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_arguments_that_do_not_fit(options, message, numbered):
    options, path = {"nets": TinyNet} | options, numbered[1]
    if "checkpoints" in options:
        given = options["checkpoints"]
        paths = path if isinstance(given, str) else [one and path for one in given]
        options["checkpoints"] = paths
    with pytest.raises(ValueError, match=message):
        PretrainedEnsemble(**options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A BAT run with its test."""
    folder = tmp_path_factory.mktemp("trained")
    evaluation = robust_eval({"apgd": pgd(), "arc": arc()})
    fit(folder, "--test_after_fit=true", callbacks=[evaluation])
    return folder


def assembly(folder, **options):
    net = {"class_path": "tests.tiny.TinyNet", "init_args": {"width": 16}}
    model = {"class_path": "PretrainedEnsemble", "init_args": {"nets": net, **options}}
    folder.mkdir(exist_ok=True)
    return recipe(folder, model=model, **{"trainer__callbacks+": [robust_eval({"arc": arc()})]})


def outcome(folder):
    found = [r for r in records(folder) if r["stage"] == "test" and r["name"] in ("clean", "arc")]
    return {r["name"]: (r["accuracy"], r["n"]) for r in found}


def test_commands_measure_what_the_training_run_measured(trained, tmp_path):
    """In one numbered file, or by prefixes."""
    expected, probs = outcome(trained), [0.9, 0.1]
    assert len(expected) == 2
    file = assembly(tmp_path / "a", probs=probs, checkpoints=str(trained / CKPT))
    run("test", "--config", file)
    paths = {"checkpoints": [str(trained / CKPT)] * 2, "prefix": ["members.0", "members.1"]}
    run("test", "--config", assembly(tmp_path / "b", probs=probs, **paths))
    assert [outcome(tmp_path / name) for name in "ab"] == [expected] * 2


def test_validate_and_predict_work_and_fit_is_refused(trained, tmp_path, capsys):
    file = assembly(tmp_path, checkpoints=str(trained / CKPT))
    run("validate", "--config", file)
    assert {r["stage"] for r in records(tmp_path)} == {"val"}
    run("predict", "--config", file)
    rows = (tmp_path / "run/version_0/predictions.csv").read_text().splitlines()
    assert len(rows) == 1 + 33
    assert "PretrainedEnsemble has nothing to train" in refused(capsys, "fit", "--config", file)


def test_members_whose_training_has_not_started_are_left_out(tmp_path):
    nets = [TinyNet() for _ in range(3)]
    path = tmp_path / "stopped.ckpt"
    state = nn.ModuleDict({"members": nn.ModuleList(nets)}).state_dict()
    torch.save({"state_dict": state, "staged": {"stage": 1, "best": {}}}, path)
    members = PretrainedEnsemble(TinyNet, str(path)).defense.classifiers
    assert len(members) == 2
    assert all(same_nets(one, other) for one, other in zip(members, nets, strict=False))
    with pytest.raises(ValueError, match="holds 2 members, not 3"):
        PretrainedEnsemble(TinyNet, str(path), members=3)
