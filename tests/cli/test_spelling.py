"""Misspelt names end a command with one line that has the nearest name, options at once."""

import json

import pytest

from lightning_rob.cli.errors import shorten_jsonargparse_error
from lightning_rob.cli.options import read_command_line
from lightning_rob.cli.spelling import check_class
from lightning_rob.recipes.plugins import expand
from lightning_rob.recipes.shipped import shipped_folder
from lightning_rob.recipes.trust import VARIABLE
from tests.pieces import python
from tests.tiny import refused

DEMO = ["fit", "--config", "demo"]
ZOO = "zoo:digits_robust"
MISSPELT = [  # command line, and what the error must hold
    (["fti"], "did you mean fit?"),
    (["fit", "--cofig", "demo"], "did you mean --config"),
    (["fit", "--config", "demoo"], "there is no recipe demoo, did you mean demo"),
    (["fit", "demo"], "demo is a recipe: --config demo"),
    ([*DEMO, "--modle.epochs=3"], "there is no option --modle.epochs, did you mean --model"),
    ([*DEMO, "--config", "KEY.yaml"], "KEY.yaml: there is no key 'trianer', did you mean trainer?"),
    (["test", "zoo:digits_robus"], "did you mean zoo:digits_robust"),
    (["test", "KEY.yml"], "there is no checkpoint KEY.yml, did you mean KEY.yaml?"),
    (["audit", ZOO, "--image", "20"], "there is no option --image, did you mean --images?"),
    (["sweep", ZOO, "--over=epss", "--values=1"], "--over must be one of"),
    (["tune", "x"], "tune takes 'x' only as the value of an option"),
    (["test", "a.ckpt", "b.ckpt"], "test takes 'b.ckpt' only as the value of an option"),
    ([*DEMO, "--model=BATT"], "did you mean BAT?"),
    ([*DEMO, "--model.atack.steps=3"], "there is no option model.atack.steps, did you mean attack"),
    ([*DEMO, "--data.eval_batch_siz=3"], "did you mean eval_batch_size"),
    ([*DEMO, "--data=Digits6k"], "did you mean Digits5k"),
    ([*DEMO, "--trainer.max_epoch=3"], "did you mean max_epochs"),
    ([*DEMO, "--trainer.callback+=arc"], "no option trainer.callback, did you mean callbacks"),
    ([*DEMO, "--trainer.callbacks+=arcc"], "did you mean arc"),
    ([*DEMO, "--trainer.callbacks+=pgd", "--trainer.callbacks.epsilon=1"], "did you mean eps"),
    ([*DEMO, "--trainer.callbacks+=pgd", "--trainer.callbacks.epss=1"], "did you mean eps"),
    ([*DEMO, "--trainer.callbacks+=lightning_rob.RobustEvil"], "did you mean RobustEval"),
    ([*DEMO, "--trainer.logger", "CSVLoger"], "did you mean CSVLogger"),
]
CLASS = "--config={model: {attack: {class_path: lightning_rob.PGDD}}}"
ARGUMENT = "--config={model: {attack: {class_path: PGD, init_args: {stps: 3}}}}"
TEN = ("--trainer.callbacks+=pgd", "--trainer.callbacks.max_images=ten")
NESTED = [  # deeper classes and arguments, which jsonargparse refuses
    ([*DEMO, CLASS], "nothing here is called 'lightning_rob.PGDD'"),
    ([*DEMO, ARGUMENT], "there is no option stps, did you mean steps"),
    ([*DEMO, "--model.attack.stps", "3"], "there is no option stps, did you mean steps"),
    ([*DEMO, "--model.attack.threat.esp=0.1"], "no option threat.esp, did you mean eps?"),
    ([*DEMO, "--model.attack=PDG"], "nothing here is called 'PDG', did you mean PDGD or PGD?"),
    ([*DEMO, "--model=ZooNet"], "ZooNet is of another kind than what is wanted here"),
    (["fit", "--config=athena_digits", "--model.rule=majority"], "lightning_rob.rules.majority"),
    ([*DEMO, "--model.attack.objective=linear"], "lightning_rob.objectives.linear"),
    ([*DEMO, "--model.attack.help=PDG"], "nothing here is called 'PDG', did you mean PDGD or PGD?"),
    (["export", ZOO, "--format=onnx"], "expected one of 'pt2', 'safetensors'. Got value: onnx"),
    (["fit", "--model=PretrainedEnsemble", "--model.nets=ResNet20"], "give --data CLASS"),
    ([*DEMO, *TEN], 'key "max_images": expected a whole number. Got value: ten'),
    ([*DEMO, "--trainer.callbacks+=gone/pgd.yaml"], "there is no file gone/pgd.yaml; write pgd"),
]
RUN_ALL = """
import contextlib, io, json, sys, time
from lightning_rob.cli import main
found = []
for args in json.loads(sys.argv[1]):
    errors, start = io.StringIO(), time.process_time()
    with contextlib.redirect_stderr(errors), contextlib.suppress(SystemExit):
        main(args)
    found.append([errors.getvalue(), time.process_time() - start, "torch" in sys.modules])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("misspelt")
    (folder / "KEY.yaml").write_text("trianer: {max_epochs: 3}\n")
    args = json.dumps([args for args, _ in MISSPELT])
    return json.loads(python("-c", RUN_ALL, args, cwd=folder, **{VARIABLE: ""}))


@pytest.mark.parametrize("case", range(len(MISSPELT)))
def test_a_misspelt_name_is_refused_within_a_second(found, case):
    error, seconds, torch = found[case]
    assert MISSPELT[case][1] in error and error.count("\n") == 1
    assert seconds < 1
    assert not torch


@pytest.mark.parametrize(("args", "wanted"), NESTED)
def test_a_misspelt_class_or_argument_is_named(args, wanted, capsys):
    assert wanted in refused(capsys, *args)


def test_no_plug_in_is_taken_for_a_misspelt_one():
    folder = shipped_folder()
    for file in (folder / "callbacks").glob("*.yaml"):
        for callback in expand(str(file), folder):
            check_class(callback["class_path"])


CHECKPOINT = f"--ckpt_path={shipped_folder()}/zoo/digits_robust/checkpoints/last.ckpt"


@pytest.mark.parametrize(
    ("args", "read"),
    [
        (["test", ZOO], [CHECKPOINT]),
        (["test", "--trainer.max_epochs", "3", ZOO], ["--trainer.max_epochs=3", CHECKPOINT]),
        (["audit", "--strict", ZOO, "--eps", "1/5", "--allow-import=tests"], [CHECKPOINT]),
    ],
)
def test_a_checkpoint_needs_no_option(args, read):
    line = read_command_line(*args)
    assert (line.command, line.args) == (args[0], read)
    assert line.allowed == (["tests"] if args[-1].endswith("tests") else [])
    assert line.options is None or (line.options.strict, line.options.eps) == (True, 0.2)


def test_a_module_beside_the_recipe_gets_advice(tmp_path):
    error = "Parser key \"model\": No module named 'own'"
    assert "PYTHONPATH" not in shorten_jsonargparse_error(error)
    (tmp_path / "own.py").touch()
    assert shorten_jsonargparse_error(error).endswith("so set PYTHONPATH=.")
