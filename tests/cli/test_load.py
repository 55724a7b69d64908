"""Checkpoints and plug-ins from Python, and the command line on anybody's module and data."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

import lightning_rob
from lightning_rob import ARC, PGD, Threat, evaluate
from lightning_rob.callbacks import RobustEval
from lightning_rob.cli import main
from lightning_rob.commands.checkpoints import RECIPE
from lightning_rob.recipes.environment import VARIABLE, callbacks
from lightning_rob.recipes.trust import VARIABLE as ALLOWED
from lightning_rob.runtime.errors import InputError
from tests.callbacks.test_any_module import DATA, Classifier
from tests.pieces import lines_of
from tests.tiny import TinyNet, quiet_trainer, refused


class OwnImages(LightningDataModule):
    """Batches (x, y) of people's own data."""

    def train_dataloader(self):
        return DataLoader(DATA, 20)

    val_dataloader = test_dataloader = train_dataloader


HERE = "tests.cli.test_load"
OURS = [f"--model={Classifier.__module__}.Classifier", f"--data={HERE}.OwnImages"]
OURS += ["--trainer.accelerator=cpu", "--allow-import=tests"]
ATTACKS = {"pgd": PGD(Threat("linf", 0.1), 3, 0.05)}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """The run of a module of people's own."""
    folder = tmp_path_factory.mktemp("foreign")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["fit", *OURS, "--trainer.max_epochs=1", "--trainer.callbacks+=pgd"])
    return folder / "logs" / "version_0"


def checkpoint_of(run):
    (found,) = (run / "checkpoints").glob("*.ckpt")
    return found


def test_a_defense_of_ours(trained):
    defense = lightning_rob.load(trained, ["tests"])
    arguments = {"net": TinyNet, "attack": ATTACKS["pgd"], "epochs": 2, "probs": [0.9, 0.1]}
    same = lightning_rob.BAT.load_from_checkpoint(trained, **arguments).defense.eval()
    assert torch.equal(same.logits(DATA[:4][0]), defense.logits(DATA[:4][0]))
    with pytest.raises(TypeError, match=r"'net'.*lightning_rob.load_module\('.*ckpt'\) takes them"):
        lightning_rob.BAT.load_from_checkpoint(trained)
    state = torch.load(trained, weights_only=True)["state_dict"]
    assert not defense.training
    for name, value in defense.state_dict().items():
        assert torch.equal(value, state[name])
    assert evaluate(defense, ATTACKS, DataLoader(DATA, 40), progress=False).accuracy("pgd") <= 1


def test_a_module_of_others(foreign, monkeypatch):
    path = checkpoint_of(foreign)
    module = lightning_rob.load_module(path, ["tests"])
    assert type(module).__name__ == "Classifier"
    x = DATA[:4][0]
    module.eval()
    with torch.no_grad():
        logits = lightning_rob.load(path, ["tests"]).logits(x)[0]
        assert torch.equal(logits, module(x))
    monkeypatch.delenv(ALLOWED)
    with pytest.raises(InputError, match="runs only with --allow-import tests"):
        lightning_rob.load(path)


def test_the_next_command_after_a_fit_suits_the_module(monkeypatch, capsys):
    monkeypatch.delattr(Classifier, "test_step")
    main(["fit", *OURS, "--trainer.max_epochs=1"])
    advised = next(filter(re.compile("Next: ").match, capsys.readouterr().out.splitlines()))
    command = shlex.split(advised)[2:]
    assert command[0] == "validate"  # Lightning tests no module without a test step
    main([part.replace("=autoattack", "=pgd") for part in command])  # which takes long
    assert "worst" in capsys.readouterr().out


def test_bad_checkpoints(tmp_path):
    with pytest.raises(InputError, match="there is no checkpoint"):
        lightning_rob.load(tmp_path / "none.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="does not say what it is a checkpoint of: build"):
        lightning_rob.load(tmp_path / "plain.ckpt")


def test_a_recipe_of_another_version(trained, tmp_path, capsys):
    content = torch.load(trained, weights_only=True)
    epochs = re.compile(r"^    epochs:", re.M)
    content[RECIPE] = epochs.sub("    tf32: false\n    epochs:", content[RECIPE])
    torch.save(content, tmp_path / "old.ckpt")
    with pytest.raises(InputError, match=r"recipe in .*old.ckpt is perhaps of another version: .*"):
        lightning_rob.load(tmp_path / "old.ckpt", "tests")
    command = ["test", str(tmp_path / "old.ckpt"), "--allow-import=tests"]
    assert "is perhaps of another version: Parser" in refused(capsys, *command)
    assert "another version" not in refused(capsys, *command, "--model.tf32=true")


def brighter(x):
    return 0.5 * x + 0.5


def test_commands_on_a_module_of_others(foreign, capsys):
    """They take the preprocessing of the plug-in."""
    checkpoint = f"--ckpt_path={checkpoint_of(foreign)}"
    quick = ["--images=8", "--queries=5", "--steps=2"]
    plug = ["--trainer.callbacks+=pgd", f"--trainer.callbacks.preprocess={HERE}.brighter"]
    main(["test", checkpoint, "--allow-import=tests", *plug[:1]])
    main(["audit", checkpoint, "--allow-import=tests", *quick])
    sweep = ["--over=eps", "--values=1/255,2/255", *plug, "--out=sweep"]
    main(["sweep", checkpoint, "--allow-import=tests", *sweep])
    watch = [str(foreign), "--once", "--suite=pgd", plug[1], "--allow-import=tests", "--out=m"]
    main(["monitor", *watch])
    net, accuracies = lightning_rob.load_module(checkpoint_of(foreign), "tests"), []
    for inputs in ({"preprocess": brighter}, {}):
        found = evaluate(net, ATTACKS, DataLoader(DATA, 40), progress=False, **inputs)
        accuracies.append(found.accuracy("clean"))
    assert accuracies[0] != accuracies[1]
    for file in ("sweep/sweep.jsonl", "m/monitor.jsonl"):
        named = (line for line in lines_of(Path(file)) if line.get("name") == "clean")
        (found,) = {line["accuracy"] for line in named}
        assert found == pytest.approx(accuracies[0])
    main(["export", checkpoint, "--allow-import=tests", "--out=net.pt2"])
    program = torch.export.load("net.pt2").module()
    x = DATA[:4][0]
    expected = lightning_rob.load(checkpoint_of(foreign), ["tests"])(x)
    assert torch.equal(program(x), expected)
    line = refused(capsys, "predict", checkpoint, "--allow-import=tests")
    assert "predict is for modules of lightning_rob.modules" in line


def test_plug_ins_by_short_name():
    first, second = lightning_rob.load_callbacks(["arc", "pgd"])
    assert isinstance(first, RobustEval) and isinstance(first.attacks["arc"], ARC)
    assert list(second.attacks) == ["pgd"]
    with pytest.raises(InputError, match="nothing here is called 'arcc'"):
        lightning_rob.load_callbacks(["arcc"])


def test_any_trainer_takes_plug_ins_from_the_environment(monkeypatch):
    assert callbacks() == []
    monkeypatch.setenv(VARIABLE, "pgd, arc")
    assert [list(c.attacks) for c in callbacks()] == [["pgd"], ["arc"]]
    run = quiet_trainer()
    if any(isinstance(c, RobustEval) for c in run.callbacks):  # installed with this entry point
        (logged,) = run.test(Classifier(), DataLoader(DATA, 20))
        assert "test/robust/arc" in logged
