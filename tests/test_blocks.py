"""A reader can paste each code block of README and of the pages: this file runs them.

The blocks of a page run in order, in a folder that looks like a clone in which recipes and plug-ins
take a step of everything. Bash itself reads the bash blocks, but lists their commands.
"""

import argparse
import glob
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from functools import partial
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_rob.cli import main
from lightning_rob.cli.options import read_command_line
from lightning_rob.modules import AdversarialTraining
from lightning_rob.nets import ResNet, ZooNet
from lightning_rob.recipes import shipped
from lightning_rob.recipes.shipped import find_recipe
from tests.commands.test_notify import Receiver
from tests.test_configs import CHEAP, MOST, NARROW, like_its_own, shrunk, write_checkpoints
from tests.tiny import ROOT, Blobs

PAGES = {path.name: path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
BLOCK = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.M)
QUICK = {"README.md", "alternatives.md"}  # the pages that take seconds
# These clone, install, serve, or run all tests: not here.
ELSEWHERE = {"git", "model_signing", "pip", "pytest", "python3", "sbatch", "source", "tensorboard"}
LAUNCHERS = ("srun", "torchrun")  # start the command, here with one process
MODULES = {"mlflow", "ray"}  # need a server; ray runs in tests/test_torchrun.py
EXTRAS = ("adv_lib", "foolbox", "torchattacks")  # run where they are installed
GATES = ("--alarm", "--drop", "--fail_if_worse", "--fail_under", "--strict")
RECIPES = {  # page -> recipe of `last.ckpt` and `logs/version_0`, where it is not the demo
    "athena_tables.md": "athena_digits",
    "certify.md": "smoothing_digits",
    "random_transforms.md": "normal_patches",
}
# Files that the pages name, with folders of other machines below the current one.
CHECKPOINTS = [
    *("last.ckpt", "digits.ckpt", "models/resnet.ckpt", "models/production.ckpt"),
    "bucket/models/production.ckpt",
    "logs/ensembles/iat_digits/seed0/version_0/checkpoints/last.ckpt",
]
WEIGHTS = {  # file that a page loads -> network of RobustBench
    "models/cifar10/Linf/Carmon2019Unlabeled.pt": "Carmon2019Unlabeled",
    "Rice2020Overfitting.pt": "cifar10/L2/Rice2020Overfitting",
}
ONE = "--trainer.{}=1"
RUN = [
    *(f"--trainer.enable_{part}=false" for part in ("progress_bar", "model_summary")),
    *map(ONE.format, ("devices", "num_nodes", "limit_test_batches")),
    "--trainer.accelerator=cpu",
    "--trainer.strategy=auto",
]
FIT = [*RUN, *map(ONE.format, ("max_steps", "limit_train_batches", "limit_val_batches"))]
SHORT = {  # command -> options that shorten it
    "attack": [*RUN, "--images=2", "--passes=20"],
    "audit": [*RUN, "--images=2", "--queries=2", "--steps=1"],
    "bpda": ["--epochs=1", "--max_images=4"],
    "certify": [*RUN, "--images=2", "--draws=60", "--steps=1"],
    "export": [*RUN, "--images=2", "--allow-import=mine"],
    "test": [*RUN, "--allow-import=mine"],
    "tune": [*FIT, "--trials=1", "--random=1"],
    **{"fit": FIT, "monitor": [*RUN, "--once"], "sweep": RUN},
    **dict.fromkeys(("compare", "recipes", "report"), ()),
}
LISTING = r"""
set -eu
record() { printf '%s\0' "$@" $'\n'; }
cd() { record cd "$@"; }
source() { record source "$@"; }
command_not_found_handle() { record "$@"; }
"""
MINE = """
from tests.callbacks.test_any_module import Classifier as Digits
from tests.cli.test_load import OwnImages as DigitsData


def unpack(batch):
    return batch


def normalize(x):
    return (x - 0.5) / 0.25
"""


class Parsed(Exception):
    """Ends a script whose parser has accepted its arguments."""


class Page:
    """A page's blocks, and the folder and the names that they share."""

    def __init__(self, name, folder, runs, receiver, capsys):
        self.folder, self.runs, self.capsys = folder, runs, capsys
        self.names = vars(import_module("mine"))  # to which the page adds
        self.recipe = RECIPES.get(name, "demo")
        self.last = None
        places = ("/srv/", "/var/lib/", "/mnt/", "/shared/", "s3://")
        self.instead = {f"file://{place}": f"file://{folder}/" for place in places}
        self.instead |= {place: f"{folder}/" for place in places[:-1]}
        self.instead |= {"s3://": f"file://{folder}/", "https://alerts.example.com": receiver.url}
        self.instead |= {"eps=0.1, max_images=50": "eps=0.9, max_images=2", ".venv/bin/": ""}
        self.instead["9108"] = "0"

    def run(self, kind, code):
        """Run a block; its last checkpoint is the `last.ckpt` of the blocks below."""
        os.chdir(self.folder)
        for place in ("logs", *CHECKPOINTS):
            shutil.rmtree(place) if os.path.isdir(place) else Path(place).unlink(missing_ok=True)
        for written, meant in self.instead.items():
            code = code.replace(written, meant)
        if kind == "bash":
            self.bash(re.sub(r" +# exit code (\d)$", r" --exit-code=\1", code, flags=re.M))
        elif kind == "python":
            self.python(code)
        elif kind == "yaml":
            self.yaml(code)
        elif kind == "json":
            json.loads(code)
        else:  # a text is printed by a block above it, a diff is tested in tests/test_extending.py
            assert kind in ("", "diff"), f"unknown language {kind!r}"
        if found := sorted(Path("logs").rglob("*.ckpt"), key=os.path.getmtime):
            self.last = shutil.copy(found[-1], "kept.ckpt")

    def bash(self, code):
        """Run the commands of a block one after another."""
        commands = listed(code, self.folder)
        runs = [command for command in commands if {"fit", "test"} & {*command[1:2]}]
        first = runs[0] if runs else ["", ""]
        self.prepare(code, "" if "logs/" in "".join(first) else first[1])
        for name, *words in commands:
            if name == "cd":
                os.chdir(*words)
            elif name in ("lightning-rob", *LAUNCHERS):
                own = [word.replace("_", "-") for word in (name, *words)].index("lightning-rob")
                self.command(*words[own:])
            elif words[:1] == ["on_ray.py"]:
                self.command(*words[2:])
            elif name == "python" and words[0] == "-c":
                compile(words[1], "block", "exec")
            elif name == "python" and words[0] != "train.py":  # tests/test_docs.py runs that
                parse(*words)
            else:
                assert name in ELSEWHERE | {"python"}, f"neither run nor listed: {name}"

    def python(self, code):
        """Run a block after those above it; compile it alone where a package is missing."""
        self.prepare(code)
        self.names |= given()
        program = compile(code, "block", "exec")
        for file, net in WEIGHTS.items() if "ZooNet" in code else ():
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            torch.save(ZooNet(f"robustbench/{net}").net.state_dict(), file)
        if MODULES & {*re.findall(r"^import (\w+)", code, re.M)}:
            return
        try:
            exec(program, self.names)
        except ImportError as error:
            assert error.name in EXTRAS or "lightning-rob[" in str(error), error

    def prepare(self, code, first=""):
        """Put a run of the page's recipe, and its checkpoint, where a block expects them.

        Args:
            code: the block.
            first: the command of the block, if it starts the first run in `logs`.
        """
        if (first == "fit" and " last.ckpt" not in code) or not re.search(
            r"logs|ckpt|bucket|models.yaml", code
        ):
            return
        if self.recipe not in self.runs:
            self.command("fit", "--config", self.recipe, "--test_after_fit=true")
            self.runs[self.recipe] = self.folder.parent / f"{self.recipe}_run"
            shutil.move("logs/version_0", self.runs[self.recipe])
        run = self.runs[self.recipe]
        for place in CHECKPOINTS:
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.last or run / "checkpoints/last.ckpt", place)
        for place in () if first else ("logs/version_0", "bucket/run", "bucket/wide"):
            shutil.copytree(run, place, dirs_exist_ok=True)

    def command(self, name, *args):
        """Run a command in this process, shortened."""
        args = [file for arg in args for file in sorted(glob.glob(arg)) or [arg]]
        if name == "leaderboard":  # hours, of trained defenses: only its options are read
            read_command_line(name, *args)
            return
        codes = [int(arg[-1]) for arg in args if arg.startswith("--exit-code=")]
        gated = any(arg.startswith(GATES) for arg in args)
        args = [arg for arg in args if not arg.startswith("--exit-code=")]
        code = 0
        self.capsys.readouterr()
        try:
            main([name, *args, *SHORT[name], *of_recipe(name, args)])
        except SystemExit as end:
            code = end.code
        except ImportError as error:
            assert "lightning-rob[" in str(error), error
            return
        errors = self.capsys.readouterr().err
        if re.search(r"pip install .lightning-rob|Requirement 'wandb", errors):
            return
        assert "lightning-rob: error:" not in errors, errors
        allowed = codes or [0, 1 if gated or "alarm: " in errors else 0]
        assert code in allowed, f"{code}: {errors}"

    def yaml(self, code):
        """Run a configuration in a fit; keep any other file for the blocks below."""
        if code.startswith(" "):  # lines for the end of the last file
            self.file.write_text(self.file.read_text() + code)
            return
        content = yaml.safe_load(code)
        if named := re.match(r"# (\S+\.yaml)", code):
            self.file = Path(named[1])
            self.file.write_text(code)
            return
        if isinstance(content, list):  # steps of a workflow, not a recipe
            return
        if "attacks" in content:
            callback = {"class_path": "RobustEval", "init_args": content}
            content = {"trainer": {"callbacks+": [callback]}}
        content = shrunk(content, MOST | {"every_n_epochs": 1}, CHEAP | NARROW)
        Path("block.yaml").write_text(yaml.safe_dump(content))
        if "model" in content:
            write_checkpoints(Path("block.yaml"))
            self.command("test", "--config", "block.yaml")
        else:
            self.command("fit", "--config", self.recipe, "--config", "block.yaml")


def clone(folder):
    """Write the recipes and plug-ins into a folder, shortened."""
    for path in [*(ROOT / "callbacks").glob("*.yaml"), *(ROOT / "configs").rglob("*.yaml")]:
        content = yaml.safe_load(path.read_text())
        small = shrunk(content, MOST | {"every_n_epochs": 1}, CHEAP | NARROW)
        small = content if path.stem == "pgd" else small  # a page states what it finds
        if path.parent.name == "spaces":
            small["trial"] |= {key: 1 for key in small["trial"] if key.endswith("_epochs")}
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(yaml.safe_dump(small))
    for name in ("benchmarks", "zoo"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "lightning-rob").symlink_to(".")
    for name, end in product(("main", "new"), (".csv", ".json")):
        shutil.copy(ROOT / f"zoo/digits_robust/images/test-pgd{end}", folder / f"{name}{end}")
    shutil.copy(folder / "configs/madry_digits.yaml", folder / "recipe.yaml")
    (folder / "mine.py").write_text(MINE)


small_net = partial(ResNet, depth=14, widths=(4, 8, 8))


def given():
    """Return the names that a reader of any page is assumed to have."""
    torch.manual_seed(0)
    nets = [small_net() for _ in range(3)]
    x, y = torch.rand(4, 3, 32, 32), torch.arange(4)
    many = torch.rand(300, 3, 32, 32), torch.arange(300) % 10
    module = AdversarialTraining(small_net)
    data = Blobs()
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False)
    return {
        **{"net": nets[0], "other": nets[1], "nets": nets, "module": module},
        **{"x": x, "y": y, "x_train": many[0], "y_train": many[1], "images": x, "labels": y},
        **{"loader": DataLoader(TensorDataset(x, y), 2), "data": data, "trainer": trainer},
    }


def listed(code, folder):
    """Return the commands that Bash would run, each as a list of words."""
    variables = {"PATH": "/nowhere", "i": "0", "SLURM_CPUS_PER_TASK": "1"}
    done = subprocess.run(
        [shutil.which("bash"), "-c", LISTING + code],
        **{"env": variables, "cwd": folder, "capture_output": True, "text": True},
    )
    assert done.returncode == 0, done.stderr
    return [line.split("\0")[:-1] for line in done.stdout.split("\n\0")[:-1]]


def of_recipe(command, args):
    """Return the options that shorten the recipe of a command line: few images, all members."""
    files = [after for arg, after in pairwise(args) if arg == "--config"]
    file = find_recipe(files[0]) if files and command not in ("bpda", "tune") else None
    content = yaml.safe_load(file.read_text()) if file else {}
    model, data = (content.get(key, {}) for key in ("model", "data"))
    own = data.get("class_path", "tests.").startswith(("tests.", "lightning_rob."))
    options = [] if own else [f"--data=tests.test_configs.{like_its_own(file).__name__}"]
    kind = model.get("class_path", "").rpartition(".")[2]
    if command == "fit" and kind in ("BAT", "TransformTraining"):  # one after another
        members = model["init_args"].get("members", 73)
        options += ["--model.epochs=1", f"--trainer.max_epochs={members}", "--trainer.max_steps=-1"]
    return options


def parse(script, *args):
    """Import a script and let its parser read the arguments; the script ends there."""
    known = argparse.ArgumentParser.parse_known_args

    def reader(allowed):
        def read(parser, *_):
            rest = known(parser, args)[1]
            assert all(re.match(allowed, arg) for arg in rest), f"{script} has no {rest}"
            raise Parsed

        return read

    before = {*sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *args])
        patch.syspath_prepend(ROOT / Path(script).parent)
        some = r"--(model|data|trainer)\.|--ckpt_path|[^-]"
        patch.setattr(argparse.ArgumentParser, "parse_args", reader(r"(?!)"))
        patch.setattr(argparse.ArgumentParser, "parse_known_args", reader(some))
        with pytest.raises(Parsed):
            runpy.run_path(str(ROOT / script), run_name="__main__")
    for name in {*sys.modules} - before:
        if "benchmarks" in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture(scope="module")
def runs():
    """Return the folders of the runs of recipes."""
    return {}


@pytest.fixture
def receiver():
    with Receiver() as server:
        yield server
        server.shutdown()


@pytest.mark.filterwarnings("ignore")  # that a fit is short, or that a package is old
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in PAGES]
)
def test_blocks_run(name, tmp_path, monkeypatch, runs, receiver, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(shipped, "shipped_folder", lambda: tmp_path)
    monkeypatch.setattr("lightning_rob.evaluation.columns.FEWEST_PAIRS", 4)
    clone(tmp_path)
    page, text = Page(name, tmp_path, runs, receiver, capsys), PAGES[name].read_text()
    for block in BLOCK.finditer(text):
        try:
            page.run(*block.groups())
        except BaseException as error:
            line = text.count("\n", 0, block.start()) + 1
            error.add_note(f"in the block at {name}:{line}")
            raise
