"""Common mistakes of users: a command line, the files it names, and a pattern of the error."""

import io
import pickle
import re
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import torch
import yaml

from lightning_rob.cli import main
from tests.tiny import Blobs, arc, pgd, recipe, robust_eval

Make = Callable[[Path], list[object]]
NAN, INF = float("nan"), float("inf")
SKEWED = {
    "nan": lambda x, y: (x * NAN, y),
    "inf": lambda x, y: (x + INF, y),
    "bytes": lambda x, y: (255 * x, y),
    "uint8": lambda x, y: ((255 * x).to(torch.uint8), y),
    "negative": lambda x, y: (x - 0.5, y),
    "gray": lambda x, y: (x[:1], y),
    "larger": lambda x, y: (x.repeat(1, 2, 2), y),
    "flat": lambda x, y: (x.flatten(), y),
    "label": lambda x, y: (x, y + 4),
    "below": lambda x, y: (x, y - 1),
}


class Skewed(Blobs):
    """Images or labels with a common mistake."""

    def __init__(self, how: str, train_size: int = 96, test_size: int = 33) -> None:
        super().__init__(train_size, test_size)
        self.how = how

    def source(self, train: bool):
        return [SKEWED[self.how](x, y) for x, y in super().source(train)]


class Refusing:
    """Pickles into a call of `print`."""

    def __reduce__(self):
        return print, ("code of a checkpoint was run",)


@cache
def trained() -> bytes:
    """A checkpoint of a short run."""
    folder = Path(mkdtemp())
    changes = {"trainer__callbacks+": [{"class_path": "ModelCheckpoint"}], "trainer__max_epochs": 1}
    file = recipe(folder, model__init_args__epochs=[1, 0], **changes)
    content = yaml.safe_load(file.read_text())
    content["model"]["init_args"]["monitor"] = None
    file.write_text(yaml.safe_dump(content))
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        main(["fit", "--config", str(file)])
    return next(folder.rglob("*.ckpt")).read_bytes()


def saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def changed(**parts: object) -> bytes:
    """The checkpoint with other parts; None removes one."""
    content = torch.load(io.BytesIO(trained()), weights_only=True) | parts
    return saved({key: part for key, part in content.items() if part is not None})


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def put(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def fit(*args: str) -> Make:
    return lambda folder: ["fit", "--config", recipe(folder), *args]


def attack(**options: object) -> Make:
    return fit(*(f"--model.init_args.attack.init_args.{k}={v}" for k, v in options.items()))


def evaluated(**options: object) -> Make:
    given = robust_eval({"apgd": pgd()}) | {}
    given["init_args"] = given["init_args"] | options
    return lambda folder: ["fit", "--config", recipe(folder, **{"trainer__callbacks+": [given]})]


def config(content: bytes | str, *more: str, command: str = "fit") -> Make:
    return lambda folder: [command, "--config", put(folder, "given.yaml", content), *more]


def beside(content: bytes | str) -> Make:
    """A good recipe and then another configuration file."""
    return lambda folder: [
        *("fit", "--config", recipe(folder)),
        *("--config", put(folder, "given.yaml", content)),
    ]


def ckpt(content: Callable[[], bytes | str], command: str = "test", *more: str) -> Make:
    return lambda folder: [command, "--ckpt_path", put(folder, "given.ckpt", content()), *more]


def manifested(content: Callable[[], bytes]) -> Make:
    """A file that changed after its manifest was written."""

    def make(folder: Path) -> list[object]:
        from lightning_rob.runtime.files import write_manifest

        path = put(folder, "given.ckpt", trained())
        write_manifest(path)
        path.write_bytes(content())
        return ["test", "--ckpt_path", path]

    return make


def skewed(how: str, *more: str) -> Make:
    data = {"class_path": "tests.cli.bad_inputs.Skewed", "init_args": {"how": how}}
    return lambda folder: ["fit", "--config", recipe(folder, data=data), *more]


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("setup.py", "print('code of a checkpoint was run')")
    return file.getvalue()


def weights_from(content: Callable[[], bytes | str]) -> Make:
    """A network that loads its weights from a file."""

    def make(folder: Path) -> list[object]:
        path = put(folder, "given.pt", content())
        return [*fit()(folder), f"--model.init_args.checkpoints=[{path}, null]"]

    return make


def images_from(content: Callable[[], bytes | str], name: str) -> Make:
    def make(folder: Path) -> list[object]:
        source = {"class_path": "tests.tiny.Blobs"}
        options = {"source": source, "images": str(put(folder, name, content()))}
        data = {"class_path": "lightning_rob.data.SourceTargetData", "init_args": options}
        return ["fit", "--config", recipe(folder, data=data)]

    return make


def given(*args: object) -> Make:
    return lambda folder: [str(arg).replace("FOLDER", str(folder)) for arg in args]


MODEL = "--model.init_args."
RECIPE_KEY = "lightning_rob_recipe"
EPS = "eps must be a finite radius >= 0, got"
ARGUMENTS: dict[str, tuple[Make, str]] = {
    "eps negative": (attack(**{"threat.eps": -1}), f"{EPS} -1.0"),
    "eps nan": (attack(**{"threat.eps": "nan"}), "a fraction such as 8/255, got 'nan'"),
    "eps .nan": (attack(**{"threat.eps": ".nan"}), f"{EPS} nan"),
    "eps fraction": (attack(**{"threat.eps": "-1/255"}), f"{EPS} -0.00"),
    "eps infinite": (attack(**{"threat.eps": ".inf"}), f"{EPS} inf"),
    "eps a word": (attack(**{"threat.eps": "large"}), "a fraction such as 8/255, got 'large'"),
    "eps by zero": (attack(**{"threat.eps": "8/0"}), "8/0"),
    "norm unknown": (attack(**{"threat.norm": "l7x"}), "norm must be 'linf', 'l2' or a number"),
    "norm below one": (attack(**{"threat.norm": 0.5}), "norm must be"),
    "bounds turned": (attack(**{"threat.bounds": "[1, 0]"}), "bounds"),
    "steps zero": (attack(steps=0), "steps must be at least 1, got 0"),
    "steps negative": (attack(steps=-3), "steps must be at least 1, got -3"),
    "steps half": (attack(steps=2.5), "expected a whole number. Got value: 2.5"),
    "steps a word": (attack(steps="many"), "expected a whole number"),
    "step_size zero": (attack(step_size=0), "step_size must be"),
    "step_size nan": (attack(step_size=".nan"), "step_size must be"),
    "restarts zero": (attack(restarts=0), "restarts must be at least 1, got 0"),
    "draws zero": (attack(draws=0), "draws must be at least 1, got 0"),
    "momentum one": (attack(momentum="[1.5]"), "momentum must be numbers"),
    "objective a word": (attack(objective="loss"), "nothing here is called 'loss'"),
    "objective unknown": (attack(objective="lightning_rob.objectives.loss"), "loss"),
    "attack option": (attack(speed=3), "PGD has no option 'speed'"),
    "attack unknown": (fit(f"{MODEL}attack=PGDD"), "did you mean PGD"),
    "attack no attack": (fit(f"{MODEL}attack=torch.nn.Linear"), "Attack"),
    "probs sum": (fit(f"{MODEL}probs=[0.9, 0.3]"), "probs must sum to 1, got 1.2"),
    "probs negative": (fit(f"{MODEL}probs=[1.5, -0.5]"), "probs must"),
    "probs nan": (fit(f"{MODEL}probs=[.nan, 0.5]"), "probs must"),
    "probs count": (fit(f"{MODEL}probs=[0.5, 0.3, 0.2]"), "probs"),
    "members zero": (fit(f"{MODEL}members=0"), "members"),
    "epochs negative": (fit(f"{MODEL}epochs=-1"), "epochs must"),
    "epochs list": (fit(f"{MODEL}epochs=[1, 2, 3]"), "epochs"),
    "epochs other": (fit("--trainer.max_epochs=3"), "trainer.max_epochs must be 4"),
    "net unknown": (fit(f"{MODEL}net=ResNet1000"), "ResNet1000"),
    "net a function": (fit(f"{MODEL}net=lightning_rob.objectives.linear"), "linear"),
    "net option": (
        fit(f"{MODEL}net.init_args.depth=3"),
        "no option 'depth'|'depth' is not accepted",
    ),
    "checkpoints missing": (fit(f"{MODEL}checkpoints=[no.pt, null]"), r"no\.pt"),
    "checkpoints count": (fit(f"{MODEL}checkpoints=[null]"), "checkpoints"),
    "monitor": (fit(f"{MODEL}monitor=val/robust/no"), "no evaluation logged 'val/robust/no'"),
    "lr a word": (fit(f"{MODEL}optimizer.init_args.lr=fast"), "expected a number"),
    "lr negative": (fit(f"{MODEL}optimizer.init_args.lr=-1"), "[lL]earning rate"),
    "optimizer unknown": (fit(f"{MODEL}optimizer=Adamm"), "Adamm"),
    "model unknown": (fit("--model=BATT"), "did you mean BAT"),
    "model of another kind": (fit("--model=torch.nn.Linear"), "LightningModule"),
    "model option": (fit(f"{MODEL}foo=1"), "BAT has no option 'foo'"),
    "batch_size zero": (fit("--data=Digits5k", "--data.batch_size=0"), "at least 1, got 0"),
    "batch_size a word": (
        fit("--data=Digits5k", "--data.batch_size=big"),
        "expected a whole number",
    ),
    "workers negative": (fit("--data.init_args.workers=-1"), "workers must be at least 0, got -1"),
    "val_size": (fit("--data.init_args.train_size=20"), "val_size must be below the 20 images"),
    "data unknown": (fit("--data=CIFAR11"), "did you mean CIFAR10"),
    "data missing": (fit("--data=CIFAR10", "--data.root=nowhere"), "CIFAR10 is not in"),
    "data option": (
        fit("--data.init_args.colour=red"),
        "no option 'colour'|'colour' is not accepted",
    ),
    "seed a word": (fit("--seed_everything=lucky"), "seed_everything"),
    "seed negative": (fit("--seed_everything=-5"), "-5 is not in bounds"),
    "devices zero": (fit("--trainer.devices=0"), "devices"),
    "accelerator": (fit("--trainer.accelerator=abacus"), "abacus"),
    "precision": (fit("--trainer.precision=7"), "precision|7"),
    "max_epochs a word": (fit("--trainer.max_epochs=all"), "expected a whole number"),
    "limit": (fit("--trainer.limit_val_batches=-1"), "limit_val_batches"),
    "strategy": (fit("--trainer.strategy=luck"), "luck"),
    "trainer option": (fit("--trainer.epochs=3"), "epochs"),
    "option": (fit("--learning_rate=0.1"), "learning_rate"),
    "option without value": (fit("--trainer.max_epochs"), "max_epochs"),
    "callbacks without +": (fit("--trainer.callbacks=x.yaml"), r"write --trainer.callbacks\+="),
    "callback missing": (
        fit("--trainer.callbacks+=callbacks/no.yaml"),
        "there is no file callbacks/no.yaml",
    ),
    "callback unknown": (fit("--trainer.callbacks+=RobustEvil"), "did you mean RobustEval"),
    "callback no callback": (fit("--trainer.callbacks+=torch.nn.Linear"), "Callback"),
    "attacks empty": (evaluated(attacks={}), "at least one attack, got an empty dict"),
    "attacks a list": (evaluated(attacks=[pgd()]), "dict|attacks"),
    "attacks reserved": (evaluated(attacks={"worst": pgd()}), "worst"),
    "every_n_epochs": (evaluated(every_n_epochs=0), "every_n_epochs must be at least 1, got 0"),
    "repeats": (evaluated(repeats=0), "repeats must be at least 1, got 0"),
    "max_images": (evaluated(max_images=0), "max_images must be at least 1, got 0"),
    "neighbours": (evaluated(attacks={"arc": arc(neighbours=0)}), "neighbours must be"),
    "radius": (evaluated(eps=-0.1), EPS),
    "allow nothing": (fit("--allow-import"), "--allow-import takes names such as"),
    "allow a path": (fit("--allow-import=./mine.py"), "--allow-import takes names such as"),
    "allow the parser": (fit("--allow-import=jsonargparse"), "would let a recipe change"),
}
CONFIGS: dict[str, tuple[Make, str]] = {
    "missing": (given("fit", "--config", "nowhere.yaml"), r"no recipe .*nowhere\.yaml: lightning-"),
    "misspelt": (given("fit", "--config", "demoo"), r"no recipe .*demoo, did you mean demo"),
    "a folder": (given("fit", "--config", "FOLDER"), "cannot be read as a configuration file"),
    "empty": (config(""), "must hold keys such as model"),
    "a list": (config("- model\n- data\n"), "must hold keys such as model"),
    "a word": (config("hello"), "must hold keys such as model"),
    "bytes": (config(bytes(range(256))), "cannot be read as a configuration file"),
    "nul": (config("model: a\0b"), "given.yaml"),
    "html": (config("<!DOCTYPE html><html><body>404</body></html>"), "must hold keys"),
    "brackets": (config("model: {class_path: BAT"), "given.yaml"),
    "tabs": (config("model:\n\tclass_path: BAT"), "given.yaml"),
    "indent": (config("model:\n  class_path: BAT\n init_args: {}"), "given.yaml"),
    "key twice": (beside("trainer:\n  max_epochs: 4\n  max_epochs: 5\n"), "'max_epochs' is given"),
    "model twice": (beside("model: {}\ndata: {}\nmodel: {}\n"), "line 3: the key 'model' is given"),
    "cycle": (beside("model: &a\n  init_args: *a\n"), "a cycle"),
    "cycle of includes": (
        lambda f: ["fit", "--config", put(f, "given.yaml", f"config: {f}/given.yaml\n")],
        "loop",
    ),
    "laughs": (
        beside(
            "a0: &a0 [x, x]\n"
            + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 9))
        ),
        "more than 200,000 values",
    ),
    "huge": (beside("x: " + 3_000_000 * "y"), "characters of YAML, at most"),
    "deep": (beside("x: " + 500 * "[" + 500 * "]"), "more than 60 levels"),
    "python tag": (beside("x: !!python/object/apply:print [y]\n"), "asks for Python objects"),
    "other tag": (beside("x: !thing {y: 1}\n"), "!thing"),
    "unknown key": (beside("modle: {class_path: BAT}\n"), "modle"),
    "key of trainer": (beside("trainer: {epochs: 3}\n"), "epochs"),
    "trainer a list": (beside("trainer: [3]\n"), "trainer"),
    "callbacks": (beside("trainer:\n  callbacks: []\n"), r"write `callbacks\+:`"),
    "model a number": (beside("model: 3\n"), "model.* must name a class"),
    "class_path a list": (beside("model: {class_path: [BAT]}\n"), "must name a class"),
    "init_args a list": (beside("model: {class_path: BAT, init_args: [3]}\n"), "model"),
    "class_path missing": (
        config("model: {init_args: {}}\ndata: Digits5k\n"),
        "needs its class: class_path is missing",
    ),
    "no model": (config("data: Digits5k\n"), "model"),
    "no data": (config("model: BAT\n"), "data|required"),
    "allowed by itself": (beside("allow_import: mine\n"), "allow_import"),
    "class of a stranger": (beside("model: {class_path: mine.Net}\n"), "--allow-import mine"),
    "weights_only": (beside("weights_only: false\n"), "weights_only must be true"),
    "ckpt_path": (beside("ckpt_path: no.ckpt\n"), r"there is no checkpoint no\.ckpt"),
    "ckpt_path far away": (beside("ckpt_path: http://x.invalid/a.ckpt\n"), "no checkpoint http"),
    "a date": (beside("seed_everything: 2020-01-01\n"), "seed_everything"),
    "fractions": (beside("trainer: {max_epochs: 1/3}\n"), "max_epochs.*expected a whole number"),
}
CHECKPOINTS: dict[str, tuple[Make, str]] = {
    "missing": (given("test", "--ckpt_path", "no.ckpt"), r"there is no checkpoint no\.ckpt"),
    "a folder": (given("test", "--ckpt_path", "FOLDER"), "is a folder without config.json"),
    "empty": (ckpt(lambda: b""), "it is empty"),
    "html": (ckpt(lambda: "<!DOCTYPE html>\n<html></html>"), "it is an HTML page"),
    "html after space": (ckpt(lambda: "\ufeff \n<html></html>"), "it is an HTML page"),
    "lfs": (ckpt(lambda: "version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "text": (ckpt(lambda: "weights"), "is not a PyTorch checkpoint"),
    "json": (ckpt(lambda: '{"state_dict": {}}'), "is not a PyTorch checkpoint"),
    "picture": (ckpt(lambda: b"\x89PNG\r\n\x1a\n" + bytes(99)), "is not a PyTorch checkpoint"),
    "zip": (ckpt(zipped), "is not a PyTorch checkpoint"),
    "half": (ckpt(lambda: trained()[: len(trained()) // 2]), "or is cut short"),
    "all but a byte": (ckpt(lambda: trained()[:-1]), "or is cut short"),
    "start": (ckpt(lambda: trained()[:10]), "is not a PyTorch checkpoint"),
    "bit flipped": (manifested(lambda: flipped(trained(), 20_000)), "is not the file that was"),
    "cut": (manifested(lambda: trained()[:-500]), "is not the file that was written"),
    "longer": (manifested(lambda: trained() + b"x"), "is not the file that was written"),
    "pickle": (ckpt(lambda: pickle.dumps(Refusing())), "is not a PyTorch checkpoint|holds a"),
    "code": (ckpt(lambda: saved({"state_dict": {}, "x": Refusing()})), r"holds a \S*print"),
    "tensor": (ckpt(lambda: saved(torch.zeros(3))), "has no state_dict"),
    "other dict": (ckpt(lambda: saved({"epoch": 3})), "has no state_dict"),
    "no recipe": (ckpt(lambda: saved({"state_dict": {}})), "add --config"),
    "recipe a list": (ckpt(lambda: changed(**{RECIPE_KEY: ["BAT"]})), "its recipe must be text"),
    "recipe a word": (ckpt(lambda: changed(**{RECIPE_KEY: "BAT"})), "its recipe must be text"),
    "recipe broken": (ckpt(lambda: changed(**{RECIPE_KEY: "model: {"})), "given.ckpt"),
    "recipe unknown": (ckpt(lambda: changed(**{RECIPE_KEY: "model: BATT\n"})), "BATT"),
    "recipe of a stranger": (
        ckpt(lambda: changed(**{RECIPE_KEY: "model: {class_path: mine.Net}\n"})),
        "--allow-import mine",
    ),
    "other width": (
        ckpt(trained, "test", f"{MODEL}net.init_args.width=8"),
        "another architecture than the model: 14 weights of another shape",
    ),
    "state a list": (ckpt(lambda: changed(state_dict=[1])), "state_dict"),
    "resume from a page": (
        lambda f: [*fit()(f), "--ckpt_path", put(f, "a.ckpt", "<html></html>")],
        "it is an HTML page",
    ),
    "resume from weights": (
        lambda f: [*fit()(f), "--ckpt_path", put(f, "a.ckpt", changed(staged=None))],
        "staged|checkpoint",
    ),
    "sweep of a page": (
        ckpt(lambda: "<html>", "sweep", "--over=eps", "--values=1/255"),
        "it is an HTML page",
    ),
    "member from a page": (weights_from(lambda: "<html></html>"), "it is an HTML page"),
    "member from nothing": (weights_from(lambda: b""), "it is empty"),
    "member of another net": (
        weights_from(lambda: saved({"conv.weight": torch.zeros(3)})),
        "does not fit TinyNet",
    ),
    "member not finite": (
        weights_from(lambda: saved({k: v * NAN for k, v in tiny_state().items()})),
        "are not finite",
    ),
}


def tiny_state() -> dict[str, torch.Tensor]:
    state = torch.load(io.BytesIO(trained()), weights_only=True)["state_dict"]
    return {k.removeprefix("members.0."): v for k, v in state.items() if "members.0." in k}


RANGE = r"images must lie in \[0.0, 1.0\]"
DATA: dict[str, tuple[Make, str]] = {
    "nan": (skewed("nan"), "images must"),
    "infinite": (skewed("inf"), RANGE),
    "to 255": (skewed("bytes"), RANGE),
    "uint8": (skewed("uint8"), "float|images must"),
    "below zero": (skewed("negative"), RANGE),
    "gray": (skewed("gray"), "images|channels"),
    "larger": (skewed("larger"), "images|size"),
    "flat": (skewed("flat"), "images|shape"),
    "labels above": (skewed("label"), "labels must be 0 … 3 for 4 classes"),
    "labels below": (skewed("below"), "labels must be 0 … 3 for 4 classes"),
    "no images": (fit("--data.init_args.train_size=0"), "val_size must be below the 0 images"),
    "one image": (fit("--data.init_args.train_size=1"), "val_size must be below the 1 images"),
    "one to train": (fit("--data.init_args.train_size=33"), "more than 1 value|batch"),
    "none to test": (
        lambda f: [
            *("test", "--config", recipe(f)),
            "--data.init_args.test_size=0",
        ],
        "test|images",
    ),
    "images a page": (images_from(lambda: "<html>", "x.pt"), "HTML page"),
    "images no array": (images_from(lambda: "hello", "x.npy"), "is not a file of images"),
    "images flat": (images_from(lambda: saved(torch.rand(5)), "x.pt"), r"images \[N, C, H, W\]"),
    "images none": (
        images_from(lambda: saved(torch.rand(0, 3, 8, 8)), "x.pt"),
        r"images \[N, C, H, W\]",
    ),
    "images to 255": (
        images_from(lambda: saved(255 * torch.rand(5, 3, 8, 8)), "x.pt"),
        r"must lie in \[0, 1\]",
    ),
    "images nan": (
        images_from(lambda: saved(torch.full((5, 3, 8, 8), NAN)), "x.pt"),
        r"must lie in \[0, 1\]",
    ),
}
SWEEP = partial(given, "sweep", "--ckpt_path=no.ckpt")
COMMANDS: dict[str, tuple[Make, str]] = {
    "unknown": (given("fti"), "unknown command 'fti', did you mean fit"),
    "nothing alike": (given("xyz"), "unknown command 'xyz', choose from"),
    "an option first": (given("--config", "x.yaml"), "unknown command '--config'"),
    "fit alone": (given("fit"), "say what to run: --config RECIPE"),
    "test alone": (given("test"), "say what to run"),
    "predict alone": (given("predict"), "say what to run"),
    "sweep alone": (given("sweep"), "--over must be one of"),
    "sweep over": (SWEEP("--over=luck", "--values=1"), "--over must be one of"),
    "sweep no values": (SWEEP("--over=eps"), "--values must name at least one value"),
    "sweep a word": (SWEEP("--over=eps", "--values=big"), "--values takes numbers"),
    "sweep nan": (SWEEP("--over=eps", "--values=nan"), "--values takes numbers"),
    "sweep by zero": (SWEEP("--over=eps", "--values=1/0"), "--values takes numbers"),
    "sweep below zero": (SWEEP("--over=eps", "--values=-1/255"), "eps must be above 0"),
    "sweep probability": (SWEEP("--over=probability", "--values=1.5"), r"in \[0, 1\]"),
    "sweep half a step": (SWEEP("--over=steps", "--values=2.5"), "whole and at least 1"),
    "sweep endless": (SWEEP("--over=eps", "--values=1:2:1e-9"), "values"),
    "sweep backwards": (SWEEP("--over=eps", "--values=2:1:1"), "values"),
    "sweep best": (SWEEP("--over=eps", "--values=1", "--best=a"), "--best has no meaning"),
    "sweep missing": (SWEEP("--over=eps", "--values=1/255"), r"no checkpoint no\.ckpt"),
    "tune alone": (given("tune"), "say what to search: --space FILE"),
    "tune trials": (
        lambda f: ["tune", "--config", recipe(f), "--space=x", "--trials=few"],
        "trials.*expected a whole number",
    ),
    "tune missing": (
        lambda f: ["tune", "--config", recipe(f), "--space", f / "no.yaml"],
        "cannot be read as a search space",
    ),
    "tune empty": (
        lambda f: ["tune", "--config", recipe(f), "--space", put(f, "s.yaml", "")],
        r"s\.yaml",
    ),
    "tune variables": (
        lambda f: [
            *("tune", "--config", recipe(f), "--space"),
            put(f, "s.yaml", "variables: {model.init_args.probs: {high: 1}}\n"),
        ],
        r"s\.yaml",
    ),
    "tune key twice": (
        lambda f: ["tune", "--config", recipe(f), "--space", put(f, "s.yaml", "a: 1\na: 2\n")],
        "'a' is given twice",
    ),
    "bpda alone": (given("bpda"), "say where the networks go to: --out FOLDER"),
    "bpda epochs": (given("bpda", "--out=x", "--epochs=0"), "--epochs must be at least 1, got 0"),
    "bpda recipe": (given("bpda", "--out=x", "--config=no.yaml"), r"no recipe no\.yaml"),
    "bpda transform": (
        given("bpda", "--out=FOLDER/x", "--data=Digits5k", "--transforms=Blurr"),
        "Blurr",
    ),
    "bpda data": (given("bpda", "--out=FOLDER/x", "--data=Digits6k"), "Digits6k"),
    "report missing": (given("report", "FOLDER/nowhere"), "nowhere"),
    "report option": (given("report", "FOLDER", "--colour=red"), "colour"),
}
GROUPS = {
    "arguments": ARGUMENTS,
    "config": CONFIGS,
    "checkpoint": CHECKPOINTS,
    "data": DATA,
    "command": COMMANDS,
}
CASES = {
    f"{group}: {name}": case for group, cases in GROUPS.items() for name, case in cases.items()
}


def complaint(name: str, folder: Path) -> str:
    """Describe how a command mishandles a bad input; "" for one clear line and exit code 2."""
    make, wanted = CASES[name]
    errors = io.StringIO()
    try:
        args = list(map(str, make(folder)))
        with redirect_stderr(errors), redirect_stdout(io.StringIO()):
            main(args)
    except SystemExit as stop:
        code = stop.code
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    else:
        return "it was run"
    lines = [line for line in errors.getvalue().splitlines() if "error:" in line]
    text = errors.getvalue()
    if code != 2 or len(lines) != 1 or "Traceback" in text or len(lines[0]) > 500:
        return f"exit code {code}, {text[-600:]}"
    return "" if re.search(wanted, lines[0]) else f"{wanted!r} is not in {lines[0]!r}"
