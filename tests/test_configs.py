"""Every YAML that is shipped runs."""

import json
import re
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from torch import nn

from lightning_rob import RobustEval, evaluate
from lightning_rob.attacks.nested import walk
from lightning_rob.callbacks.base import EvaluationCallback
from lightning_rob.cli.lightning_cli import RobustCLI
from lightning_rob.data import Digits5k, ImageData, SourceTargetData
from lightning_rob.evaluation.evaluator import Evaluator
from lightning_rob.nets import PreActResNet18, ResNet20, SmallCNN, ZooNet
from lightning_rob.recipes.plugins import expand
from lightning_rob.threat import Threat, pixels
from lightning_rob.transforms import named
from tests.nets.test_weights import dverge_state
from tests.pieces import ROOT, lines_of, spec
from tests.tiny import exit_code, pgd, recipe, refused, robust_eval, run, same_weights, weights


def attacks_in(content):
    """Return every attack with its name, however deep in a recipe or plug-in."""
    if isinstance(content, list):
        return [pair for part in content for pair in attacks_in(part)]
    if not isinstance(content, dict):
        return []
    here = content.get("attacks")
    found = list(here.items()) if isinstance(here, dict) else []
    return found + [pair for part in content.values() for pair in attacks_in(part)]


GROUPS = sorted((ROOT / "configs/mixins").glob("group_*.yaml"))
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
ASSEMBLED = [p for p in CONFIGS if "class_path: PretrainedEnsemble" in p.read_text()]
RECIPES = [p for p in CONFIGS if p not in ASSEMBLED]
PLUGINS = sorted((ROOT / "callbacks").glob("*.yaml"))
RT_ONLY = [p for p in PLUGINS if p.stem.startswith("rt_")]  # `rt_suite` has `rt_best` as a part
VOTERS = [  # on transformation ensembles, or of many steps
    p for p in PLUGINS if re.search(r"TAA|PAA|VotingRuleEval|Algorithm 2\)", p.read_text())
]
# Suites of what runs alone, and a plug-in for 32 pixels (tests/callbacks/test_corruption_eval.py).
NOT_TINY = ["cw_all", "rec_all", "rec_suite", "corruptions"]
CALLBACKS = [p for p in PLUGINS if p not in (*RT_ONLY, *VOTERS) and p.stem not in NOT_TINY]
# Four images of noise, of the size of the recipe's own: no download, nothing to decode.
EMBEDDED, GREY = (f"--data=tests.test_configs.{name}" for name in ("Colour", "Grey"))
SMALL = ["--trainer.fast_dev_run=true", "--trainer.accelerator=cpu"]
SMALL += [f"--trainer.enable_{part}=false" for part in ("progress_bar", "model_summary")]


class Colour(ImageData):
    """Images of noise, of the size and number of classes of CIFAR-10: one batch of each part."""

    classes, channels, size, mean, std = 10, 3, 32, (0.5,) * 3, (0.25,) * 3

    def __init__(self) -> None:
        super().__init__(4, 2, val_size=2, workers=0)

    def source(self, train: bool):
        x = torch.rand(6 if train else 2, self.channels, self.size, self.size)
        return [(image, i % self.classes) for i, image in enumerate(x)]


class Grey(Colour):
    """The same of the size of MNIST."""

    channels, size, mean, std = 1, 28, (0.5,), (0.25,)


class Pair(SourceTargetData):
    """Labelled digits and the same without labels."""

    def __init__(self) -> None:
        super().__init__(Digits5k(batch_size=4, eval_batch_size=2, limit_train=4, workers=0))


@pytest.fixture(autouse=True)
def few_checks(tmp_path, monkeypatch, request):
    """A folder of its own; checks of a recipe's clean images alone, along two directions each.

    Other files test the checks, which take longer than the attacks.
    """
    monkeypatch.chdir(tmp_path)
    check, of_recipe = Evaluator._check, request.node.originalname.startswith("test_recipe")

    def of_clean(self, name, *images):
        if of_recipe and name == "clean":
            check(self, name, *images)

    monkeypatch.setattr("lightning_rob.evaluation.columns.FEWEST_PAIRS", 4)
    monkeypatch.setattr(Evaluator, "_check", of_clean)


def content_of(file):
    return yaml.safe_load(file.read_text())


def written(content, name):
    """Write YAML into the working folder."""
    Path(name).write_text(yaml.safe_dump(content))
    return name


def plugged(file):
    """Return the callback of a plug-in file, of a suite with its parts joined."""
    (callback,) = expand([{str(file): {}}], ROOT)
    return callback


@cache
def class_folders(count):
    """Return a folder of as many empty ones, which all recipes share: to delete them takes long."""
    root = Path(mkdtemp(dir=Path.cwd()))
    for k in range(count):
        (root / f"{k:04}").mkdir()
    return root


def make_folders(file):
    """Create the folders of the classes, where a recipe reads image files."""
    data = content_of(file)["data"]
    if data["class_path"] == "Images":
        root = Path(data["init_args"]["root"])
        root.mkdir(parents=True)
        for part in ("train", "val"):
            (root / part).symlink_to(class_folders(1000 if root.name == "imagenet" else 10))


MOST = {  # largest value of each option
    **dict.fromkeys(("steps", "epochs", "copies", "binary_steps", "untargeted", "targeted"), 1),
    **dict.fromkeys(("rounds", "draws", "replays", "max_images"), 2),
    **{"neighbours": 8, "hidden": 16},
}
CHEAP = {  # class -> options
    "AutoAttack": {"version": "custom", "attacks": ["apgd-ce"]},
    **{"PAA": {"rounds": 1}, "RMC": {"epochs": 1}, "URejectron": {"epochs": 1}},
    **{"HighConfidence": {"untargeted": 1, "targeted": 1}, "AthenaCNN": {"hidden": 16}},
}
NARROW = {
    **{name: {"widths": [4, 4, 4]} for name in ("ResNet20", "ResNet32")},
    **{name: {"width": 4} for name in ("DANNResNet18", "MNISTNet", "PreActResNet18")},
}


def shrunk(content, most=MOST, cheap=CHEAP):
    """Return a configuration with fewer of everything that takes time."""
    if isinstance(content, list):
        return [shrunk(part, most, cheap) for part in content]
    if not isinstance(content, dict):
        return content
    small = {
        k: min(v, most[k]) if k in most and isinstance(v, int) else shrunk(v, most, cheap)
        for k, v in content.items()
    }
    kind = str(content.get("class_path")).rpartition(".")[2]
    if kind in cheap:
        small["init_args"] = small.get("init_args", {}) | cheap[kind]
    return small


def shortened(file, *options):
    """Write a recipe with fewer of everything that takes time into the working folder."""
    content = content_of(file)
    callbacks = content["trainer"].get("callbacks+", [])
    content["trainer"]["callbacks+"] = expand(callbacks, ROOT)  # plug-ins are shortened, too
    return written(shrunk(content, *options), file.name)


def like_its_own(file):
    """Return images of the size of a recipe's own."""
    data = content_of(file)["data"]["class_path"]
    if data == "SourceTargetData":
        return Pair
    return Grey if data in ("MNIST", "FashionMNIST", "Digits5k") else Colour


GAMES = [p for p in RECIPES if "class_path: GMSA" in p.read_text()]


def runs_by_default(file):
    """Return whether no other recipe that runs has the same training, of digits or in linf."""
    digits = file.with_stem(file.stem.partition("_")[0].removeprefix("adv") + "_digits")
    return "digits" in file.stem or not (digits.exists() or file.stem.endswith("_l2"))


RUNS = [pytest.param(p, runs_by_default(p), id=p.stem) for p in RECIPES]
OTHERS = [p for p in RECIPES if not runs_by_default(p)]
RUNS += [pytest.param(p, True, id=f"{p.stem} runs", marks=pytest.mark.slow) for p in OTHERS]


@pytest.mark.parametrize(("file", "runs"), RUNS)
def test_recipe_builds_with_its_own_data_and_runs(file, runs, tmp_path):
    """A batch of training and one of validation under each of its attacks, of a step each.

    An adapting defense is attacked in a round of two images.
    """
    make_folders(file)
    game = file in GAMES
    config = shortened(file, MOST | {"every_n_epochs": 1}, CHEAP | (NARROW if game else {}))
    whole = ["--trainer.max_epochs=1", "--trainer.logger.name=run", *SMALL[1:]]
    built = RobustCLI([f"--config={config}", *(whole if game else SMALL)], run=False)
    layers = {n: part for n, part in built.model.named_modules() if isinstance(part, nn.Linear)}
    heads = [n for n in layers if not {"discriminator", "judge"} & {*n.split(".")}]
    assert built.datamodule.classes == layers[heads[-1]].out_features
    if "resnet20" in file.stem:
        layer = built.model.members[0].normalize
        assert layer.mean.flatten().tolist() == pytest.approx(built.datamodule.mean)
        assert layer.std.flatten().tolist() == pytest.approx(built.datamodule.std)
    if runs:
        built.trainer.fit(built.model, like_its_own(file)())
    if runs and game:
        (log,) = tmp_path.rglob("robust.jsonl")
        found = {record["name"]: record for record in lines_of(log)}
        assert {"clean", "fpa", "gmsa_avg", "gmsa_min", "worst"} <= found.keys()
        assert found["gmsa_min"]["protocol"]["defender"] in ("stateless", "stateful")
        assert found["gmsa_min"]["n"] == 2


def write_checkpoints(file):
    """Write the checkpoints that a recipe of trained networks reads."""
    options, small = content_of(file)["model"]["init_args"], PreActResNet18(width=4)
    widths = NARROW["ResNet20"]
    if options.get("members") == 1:
        found = {options["checkpoints"]: small.state_dict()}
    elif isinstance(options["checkpoints"], str):
        states = [dverge_state(ResNet20(shortcut="B", **widths).state_dict()) for _ in range(3)]
        found = {options["checkpoints"]: {f"model{i}": s for i, s in enumerate(states)}}
    else:
        zoo = "ZooNet" in file.read_text()
        nets = [ZooNet("resnet18", classes=1000)] * 2 if zoo else [ResNet20(**widths), small]
        found = {p: n.state_dict() for p, n in zip(options["checkpoints"], nets, strict=True)}
    for path, state in found.items():
        Path(path).parent.mkdir(exist_ok=True)
        torch.save(state, path)


@pytest.mark.parametrize("file", ASSEMBLED, ids=lambda p: p.stem)
def test_recipe_of_trained_networks_tests(file, capsys):
    if file == ASSEMBLED[0]:
        line = refused(capsys, "test", "--config", file, EMBEDDED, *SMALL)
        assert "No such file or directory: 'checkpoints/" in line
    write_checkpoints(file)
    run("test", "--config", shortened(file, MOST, CHEAP | NARROW), EMBEDDED, *SMALL)
    shown = capsys.readouterr().out
    attacks = ["transfer_pgd"] if "DENT" in file.read_text() else ["adaptive_pgd", "arc"]
    for name in ("PretrainedEnsemble", "clean", "worst", *attacks):
        assert name in shown


def names_in(folder):
    """Return the names of what a run has measured."""
    logs = [path for path in folder.rglob("*.jsonl") if path.parent.name.startswith("version")]
    return {line["name"] for path in logs for line in lines_of(path)}


PARTS = [CALLBACKS[i::4] for i in range(4)]


@pytest.mark.parametrize("files", PARTS, ids=lambda files: " ".join(p.stem for p in files))
def test_callbacks_plug_into_a_recipe(files, tmp_path):
    plain = recipe(tmp_path, **{"trainer__callbacks+": [], "model__init_args__monitor": None})
    contents = [plugged(file) for file in files]
    written_to = [written(shrunk(c), f.name) for c, f in zip(contents, files, strict=True)]
    plugs = [f"--trainer.callbacks+={name}" for name in written_to]
    run("test", "--config", plain, "--data.test_size=8", *plugs)
    found, saved = names_in(tmp_path), content_of(tmp_path / "run/version_0/config.yaml")
    kinds = [callback["class_path"] for callback in saved["trainer"]["callbacks+"]]
    for content, kind in zip(contents, kinds[-len(files) :], strict=True):
        assert set(content["init_args"].get("attacks", ())) <= found
        assert kind.endswith(content["class_path"])


@pytest.mark.parametrize("file", [p for p in RT_ONLY if p.stem != "rt_best"], ids=lambda p: p.stem)
def test_callback_plugs_into_random_transforms(file):
    changed = plugged(file)
    changed["init_args"]["inferences"] = 2
    for game in changed["init_args"]["attacks"].values():
        made = game["init_args"].get("attack", game)["init_args"]
        made |= {"steps": 2, "draws": 2} if "steps" in made else {"batch_size": 2}
    plain = content_of(ROOT / "configs/rt_cifar10_small.yaml")
    del plain["trainer"]["callbacks+"], plain["data"]
    small = ["--model.defense.size=2", "--model.defense.draws=2", "--model.net.widths=[4,4,4]"]
    plugin = f"--trainer.callbacks+={written(changed, 'callback.yaml')}"
    run("fit", "--config", written(plain, "plain.yaml"), EMBEDDED, *small, *SMALL, plugin)


@pytest.mark.parametrize("file", VOTERS, ids=lambda p: p.stem)
def test_callback_plugs_into_transformation_ensembles(file, tmp_path):
    """Three sub-models of random weights; two images, few steps."""
    changed = shrunk(plugged(file))
    options = changed["init_args"]
    options.pop("only", None)
    plain = content_of(ROOT / "configs/athena_digits.yaml")
    plain["model"]["init_args"]["transforms"] = ["clean", "rotate_90", "flip_horizontal"]
    if file.stem.startswith("compositions"):
        options |= {"ensembles": {"14r": "reversible", "2i": "2i"}, "draws": 1}
        plain["model"]["init_args"]["transforms"] = ["clean", "14r+2i"]
    del plain["trainer"]["callbacks+"], plain["data"], plain["test_after_fit"]
    limits = ["--model.net.hidden=16", "--trainer.limit_test_batches=1", *SMALL[1:]]
    plugin = f"--trainer.callbacks+={written(changed, 'callback.yaml')}"
    base = ["--config", written(plain, "plain.yaml"), GREY, "--trainer.logger.name=run"]
    run("test", *base, *limits, plugin)
    count = len(options["attacks"]) * (3 if options.get("each_target") else 1)
    assert len(names_in(tmp_path) - {"clean", "worst"}) == count


IN_L2 = {  # plug-in -> the number of its attacks with a length at l2 128/255, which is 32/255
    **{"adaptive_pgd": 1, "arc": 1, "climb": 0, "deepfool": 0, "first_member": 1, "gallery": 1},
    **{"members": 2, "pgd_random_member": 1, "rec_suite": 4},
}


def test_plugins_in_another_norm(tmp_path):
    """PGD and ARC of the ARC paper at l2 128/255; of ARC the local radius is eps/4 there."""
    entries = json.dumps([{name: {"norm": "l2", "eps": "128/255"}} for name in IN_L2])
    args = ["--config", str(recipe(tmp_path)), f"--trainer.callbacks+={entries}"]
    callbacks = RobustCLI(args, run=False).trainer.callbacks
    changed = [one for one in callbacks if isinstance(one, EvaluationCallback)][1:]
    for (name, count), callback in zip(IN_L2.items(), changed, strict=True):
        attacks = callback.attacks if name != "gallery" else {0: callback.weak, 1: callback.strong}
        parts = [part for attack in attacks.values() for part in walk(attack)]
        assert {part.threat for part in parts} == {Threat("l2", 128 / 255)}
        lengths = [getattr(p, "local_radius", getattr(p, "step_size", None)) for p in parts]
        assert sorted(filter(None, lengths)) == pytest.approx([32 / 255] * count), name


NETS = ("net_mobilenetv1", "net_preact18", "net_vgg16", "net_wrn28_4")
MIX_INS = {  # mix-in -> a recipe that it changes
    **{"advrt": "rt_digits", "advrt_paper": "advrt_cifar10", "fashion": "athena_mnist"},
    **{"standard": "madry_digits", "standard_sgd": "madry_imagenette", "trades": "madry_cifar10"},
    **dict.fromkeys(("barre", "ddp", "debug"), "bat_mnist_l2"),
    **dict.fromkeys((*NETS, "svhn"), "bat_cifar10_resnet20_l2"),
}
HAVE_TESTS_OF_THEIR_OWN = {"bart_differentiable", "ema", "finetune", "rt_released", "union"}


@cache
def printed(*names):
    """The configuration of a recipe with mix-ins."""
    with redirect_stdout(StringIO()) as out:
        assert exit_code("fit", *(f"--config={name}" for name in names), "--print_config") == 0
    return out.getvalue()


@pytest.mark.parametrize("mix_in", MIX_INS)
def test_mix_in_changes_a_recipe(mix_in):
    assert printed(MIX_INS[mix_in]) != printed(MIX_INS[mix_in], mix_in)


@pytest.mark.parametrize("mix_in", GROUPS, ids=lambda p: p.stem)
def test_group_mix_in_leaves_nothing_but_the_group(mix_in):
    from lightning_rob.transforms import GROUPS as KINDS

    base = ["--config", str(ROOT / "configs/rt_cifar10.yaml"), "--config", str(mix_in)]
    defense = RobustCLI([*base, "--trainer.accelerator=cpu"], run=False).model.defense
    kinds = KINDS[mix_in.stem.removeprefix("group_")]
    assert [type(transform) for transform in defense.transforms.values()] == list(kinds)
    assert defense.size == len(kinds)


BART = {  # the list of Sitawarin et al. 2022, by the names here
    *("Bilateral", "BoxBlur", "GaussianBlur", "MedianBlur", "FFT", "JPEG", "ColorPrecision"),
    *("Gray", "GrayOneChannel", "GrayTwoChannels", "GrayMix", "HSV", "LAB", "XYZ", "YUV"),
    *("GaussianNoise", "Pepper", "PoissonNoise", "Salt", "Swirl", "Crop"),
}
SPANS = {  # transform -> smallest and largest value of each of its parameters
    "Bilateral": [None, None, (3, 19)],
    "GaussianBlur": [(19, 19), (0.1, 3)],
    "JPEG": [(55, 95)],
    "MedianBlur": [(5, 9)],
    "Swirl": [None, (10, 200), (0.01, 2)],
}
LARGEST = {"HSV": (0.05, 0.25, 0.25), "LAB": (5, 2, 2), "YUV": (0.05, 0.02, 0.02)}


@pytest.mark.parametrize("mix_in", [False, True])
def test_bart_has_the_transforms_and_the_ranges_of_the_paper(mix_in):
    file = f"configs/{'mixins/bart_differentiable' if mix_in else 'bart_imagenette'}.yaml"
    options = content_of(ROOT / file)["model"]["init_args"]["defense"]
    made = named(options["init_args"]["transforms"])
    others = {"AdaptiveHistogram", "ContrastStretch", "EqualizeHistogram", "ChambolleDenoise"}
    assert set(made) == (BART if mix_in else BART | others)
    assert {n for n, one in made.items() if not one.differentiable} == set(made) - BART
    x, noise = torch.rand(2000, 3, 1, 1), torch.Generator().manual_seed(0)
    for name, expected in SPANS.items():
        for drawn, span in zip(made[name].sample(x, noise), expected, strict=True):
            found = float(drawn.min()), float(drawn.max())
            assert span is None or found == pytest.approx(span, rel=0.005, abs=0.01), name
    for name, largest in LARGEST.items():
        (shift,) = made[name].sample(x, noise)
        assert shift.abs().amax(0).tolist() == pytest.approx(largest, rel=0.01)
    (box,) = made["Crop"].sample(torch.zeros(1, 3, 224, 224).expand(2000, -1, -1, -1), noise)
    assert (int(box[:, 2:].min()), int(box[:, 2:].max())) == (156, 224)


def test_released_mix_in_keeps_all_but_the_slips():
    configs = ["--config", "rt_cifar10", "--trainer.accelerator=cpu"]
    plain = RobustCLI(configs, run=False).model.defense
    mix_in = ["--config", "rt_released"]
    released = RobustCLI([*configs, *mix_in], run=False).model.defense
    assert not plain.released_code
    assert released.released_code
    expected = {name: one.as_released() for name, one in plain.transforms.items()}
    assert released.transforms == expected and expected != plain.transforms
    assert (released.size, released.draws) == (plain.size, plain.draws)


class Average(Callback):
    """Keeps the moving average of the weights by its definition."""

    mean: dict[str, torch.Tensor] | None = None

    def on_train_batch_end(self, trainer, module, *_):
        now = {k: v.clone() for k, v in module.state_dict().items() if v.is_floating_point()}
        old = self.mean or now
        self.mean = {k: 0.999 * old[k] + 0.001 * now[k] for k in now}


def test_ema_mix_in_evaluates_saves_and_tests_the_average(tmp_path):
    """A test by the trainer of the fit too, to which Lightning would give the trained weights."""
    model = spec("AdversarialTraining", net=spec("tests.tiny.TinyNet"))
    callbacks = [robust_eval({"adaptive_pgd": pgd()}), spec("RobustCheckpoint")]
    file = recipe(tmp_path, model=model, **{"trainer__callbacks+": callbacks})
    args = ["--config", str(file), "--config", "ema", "--trainer.max_epochs=2"]
    built, average = RobustCLI(args, run=False), Average()
    trainer, module = built.trainer, built.model
    trainer.callbacks.append(average)
    trainer.fit(module, built.datamodule)
    for name, value in average.mean.items():
        torch.testing.assert_close(module.state_dict()[name], value)
    (evaluation,) = [c for c in trainer.callbacks if isinstance(c, RobustEval)]
    found = evaluate(module, evaluation.attacks, built.datamodule.val_dataloader(), progress=False)
    assert torch.equal(found.scores, evaluation.result.scores)
    best = trainer.checkpoint_callback.best_model_path
    trainer.test(module, built.datamodule, ckpt_path=best, verbose=False, weights_only=True)
    assert same_weights(module.state_dict(), weights(best))


def test_finetune_mix_in_starts_from_a_file_at_a_low_learning_rate(capsys):
    start = SmallCNN()
    torch.save(start.state_dict(), "start.pt")
    args = ["--config", "madry_digits", "--config", "finetune", GREY, *SMALL]
    built = RobustCLI([*args, "--model.weights=start.pt"], run=False)
    built.trainer.fit(built.model, built.datamodule)
    trained = dict(built.model.defense.net.named_parameters())
    steps = [(trained[name] - w).abs().max() for name, w in start.named_parameters()]
    assert max(steps).item() == pytest.approx(0.001, rel=0.01)  # Adam's first step is the rate
    assert "pretrained.pt" in refused(capsys, "fit", *args)


def test_every_file_is_a_recipe_a_mix_in_or_a_search_space():
    mix_ins = {path.stem for path in (ROOT / "configs/mixins").iterdir()}
    assert mix_ins == {*MIX_INS, *(path.stem for path in GROUPS)} | HAVE_TESTS_OF_THEIR_OWN
    assert all("class_path" in content_of(path)["model"] for path in CONFIGS)
    for path in [*(ROOT / "configs").rglob("*.yaml"), *PLUGINS]:
        assert "callbacks:" not in path.read_text()  # it would drop those of other files


def test_union_trains_and_is_evaluated_in_the_same_three_balls():
    files = [ROOT / "configs/madry_digits.yaml", ROOT / "configs/mixins/union.yaml"]
    trained = content_of(files[1])["model"]["init_args"]["attack"]
    evaluated = [attack for path in files for _, attack in attacks_in(content_of(path))]
    balls = [
        {(t["norm"], t["eps"]) for t in (attack["init_args"]["threat"] for attack in attacks)}
        for attacks in (trained, evaluated)
    ]
    assert balls[0] == balls[1] == {("linf", 0.1), ("l2", 1.0), ("l1", 5.0)}
    configs = [part for path in files for part in ("--config", str(path))]
    run("fit", *configs, GREY, *SMALL)


def test_attacks_called_arc_are_the_papers():
    """One local radius: eps for linf, PGD's step of eps / 4 for l2."""
    files = [*CONFIGS, *PLUGINS]
    attacks = [pair for p in files for pair in attacks_in(content_of(p))]
    single = [attack for name, attack in attacks if name in ("arc", "arc_top4", "member_1_arc")]
    assert len(single) >= 10
    for options in (attack["init_args"] for attack in single):
        radius, threat = options.get("step_size"), options["threat"]
        share = {"linf": 1, "l2": 0.25}[threat["norm"]]
        assert radius is None or pixels(radius) / pixels(threat["eps"]) == pytest.approx(share)
    assert all(attack["class_path"].endswith("ARC") for attack in single)
