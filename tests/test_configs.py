"""Every YAML that is shipped runs."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from torch import nn

from lightning_rob import RobustEval, evaluate
from lightning_rob.attacks.nested import walk
from lightning_rob.callbacks.base import EvaluationCallback
from lightning_rob.cli.lightning_cli import RobustCLI
from lightning_rob.data import ImageData
from lightning_rob.nets import (
    VGG16,
    WRN28_4,
    MobileNetV1,
    PreActResNet18,
    ResNet20,
    SmallCNN,
    ZooNet,
)
from lightning_rob.recipes.plugins import expand
from lightning_rob.threat import Threat, pixels
from lightning_rob.transforms import named
from tests.nets.test_weights import dverge_state
from tests.tiny import ROOT, pgd, recipe, records, robust_eval, run, same_weights, weights

NETS = sorted((ROOT / "configs/mixins").glob("net_*.yaml"))
GROUPS = sorted((ROOT / "configs/mixins").glob("group_*.yaml"))
OTHER_MIX_INS = {"ddp", "debug", "ema", "finetune", "rt_released"}
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
ASSEMBLED = [p for p in CONFIGS if "class_path: PretrainedEnsemble" in p.read_text()]
RECIPES = [p for p in CONFIGS if p not in ASSEMBLED]
PLUGINS = sorted((ROOT / "callbacks").glob("*.yaml"))
RT_ONLY = [p for p in PLUGINS if p.stem.startswith("rt_")]
VOTERS = [  # on transformation ensembles, or of many steps
    p for p in PLUGINS if re.search(r"TAA|PAA|VotingRuleEval|Algorithm 2\)", p.read_text())
]
SUITES = ["cw_all", "rec_all", "rec_suite"]
OF_32_PIXELS = ["corruptions"]  # tests/callbacks/test_corruption_eval.py
NOT_TINY = [*SUITES, *OF_32_PIXELS]
CALLBACKS = [p for p in PLUGINS if p not in (*RT_ONLY, *VOTERS) and p.stem not in NOT_TINY]
# Four images of noise, of the size of the recipe's own: no download, nothing to decode.
EMBEDDED = "--data=tests.test_configs.Colour"
GREY = "--data=tests.test_configs.Grey"
PAIR = """--data={class_path: SourceTargetData, init_args: {source: {class_path: Digits5k,
init_args: {limit_train: 4, batch_size: 4, eval_batch_size: 2, workers: 0}}}}"""
SMALL = [
    "--trainer.fast_dev_run=true",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]


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


def plugged(file):
    """Return the callback of a plug-in file, of a suite with its parts joined."""
    (callback,) = expand([{str(file): {}}], ROOT)
    return callback


def of(file, data):
    """Return whether the recipe's data set is one of these."""
    return yaml.safe_load(file.read_text())["data"]["class_path"] in data


def make_folders(file):
    """Create the folders of the classes."""
    root = Path(yaml.safe_load(file.read_text())["data"]["init_args"]["root"])
    for part in ("train", "val"):
        for k in range(1000 if root.name == "imagenet" else 10):
            (root / part / f"{k:04}").mkdir(parents=True)


MOST = {  # of each number
    **dict.fromkeys(("steps", "epochs", "copies", "binary_steps", "untargeted", "targeted"), 1),
    **dict.fromkeys(("rounds", "draws", "replays", "max_images"), 2),
    "neighbours": 8,
    "hidden": 16,
}
CHEAP = {  # class -> options
    "AutoAttack": {"version": "custom", "attacks": ["apgd-ce"]},
    "PAA": {"rounds": 1},
    "RMC": {"epochs": 1},
    "URejectron": {"epochs": 1},
    "HighConfidence": {"untargeted": 1, "targeted": 1},
    "AthenaCNN": {"hidden": 16},
}
NARROW = {
    "ResNet20": {"widths": [4, 4, 4]},
    "ResNet32": {"widths": [4, 4, 4]},
    "DANNResNet18": {"width": 4},
    "MNISTNet": {"width": 4},
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


def shortened(file, **options):
    """Write a recipe with fewer of everything that takes time into the working folder."""
    content = yaml.safe_load(file.read_text())
    callbacks = content["trainer"].get("callbacks+", [])
    content["trainer"]["callbacks+"] = expand(callbacks, ROOT)  # plug-ins are shortened, too
    path = Path(file.name)
    path.write_text(yaml.safe_dump(shrunk(content, **options)))
    return path


def like_its_own(file):
    """Return the option of images of the size of a recipe's own."""
    if of(file, ["SourceTargetData"]):
        return PAIR
    return GREY if of(file, ["MNIST", "FashionMNIST", "Digits5k"]) else EMBEDDED


GAMES = [p for p in RECIPES if "class_path: GMSA" in p.read_text()]


def runs_by_default(file):
    """Return whether no other recipe that runs has the same training, of digits or in linf."""
    digits = file.with_stem(file.stem.partition("_")[0] + "_digits")
    return "digits" in file.stem or not (digits.exists() or file.stem.endswith("_l2"))


def each(files):
    return [
        pytest.param(p, id=p.stem, marks=() if runs_by_default(p) else pytest.mark.slow)
        for p in files
    ]


@pytest.mark.parametrize("file", each(p for p in RECIPES if p not in GAMES))
def test_recipe_runs(file, tmp_path, monkeypatch):
    """A batch of training and one of validation under each of its attacks, of a step each.

    Its own network, which may be wider, is built by `test_recipe_builds_with_its_own_data`.
    """
    monkeypatch.chdir(tmp_path)
    recipe = shortened(file, most=MOST | {"every_n_epochs": 1}, cheap=CHEAP | NARROW)
    run("fit", "--config", recipe, like_its_own(file), *SMALL)


@pytest.mark.parametrize("file", RECIPES, ids=lambda p: p.stem)
def test_recipe_builds_with_its_own_data(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if of(file, ["Images"]):
        make_folders(file)
    content = yaml.safe_load(file.read_text())
    if runs_by_default(file):
        content["trainer"].pop("callbacks+", None)  # parsed there
    Path("recipe.yaml").write_text(yaml.safe_dump(content))
    built = RobustCLI(["--config=recipe.yaml", "--trainer.accelerator=cpu"], run=False)
    heads = [
        part
        for name, part in built.model.named_modules()
        if isinstance(part, nn.Linear) and not {"discriminator", "judge"} & {*name.split(".")}
    ]
    assert built.datamodule.classes == heads[-1].out_features
    if "resnet20" in file.stem:
        layer = built.model.members[0].normalize
        assert layer.mean.flatten().tolist() == pytest.approx(built.datamodule.mean)
        assert layer.std.flatten().tolist() == pytest.approx(built.datamodule.std)


def write_checkpoints(file):
    """Write the checkpoints that a recipe of trained networks reads."""
    options = yaml.safe_load(file.read_text())["model"]["init_args"]
    if options.get("members") == 1:
        found = {options["checkpoints"]: PreActResNet18().state_dict()}
    elif isinstance(options["checkpoints"], str):
        states = [dverge_state(ResNet20(shortcut="B").state_dict()) for _ in range(3)]
        found = {options["checkpoints"]: {f"model{i}": s for i, s in enumerate(states)}}
    else:
        zoo = "ZooNet" in file.read_text()
        nets = [ZooNet("resnet18", classes=1000)] * 2 if zoo else [ResNet20(), PreActResNet18()]
        found = {p: n.state_dict() for p, n in zip(options["checkpoints"], nets, strict=True)}
    for path, state in found.items():
        Path(path).parent.mkdir(exist_ok=True)
        torch.save(state, path)


@pytest.mark.parametrize("file", each(GAMES))
def test_recipe_attacks_an_adapting_defense_in_rounds(file, tmp_path, monkeypatch):
    """Shrunk to one round of two images, one epoch and a step or two of everything."""
    monkeypatch.chdir(tmp_path)
    limits = ["--trainer.max_epochs=1", *SMALL[1:], "--trainer.logger.name=run"]
    recipe = shortened(file, cheap=CHEAP | NARROW)
    run("fit", "--config", recipe, like_its_own(file), *limits)
    (log,) = tmp_path.rglob("robust.jsonl")
    found = {record["name"]: record for record in map(json.loads, log.read_text().splitlines())}
    assert {"clean", "fpa", "gmsa_avg", "gmsa_min", "worst"} <= found.keys()
    assert found["gmsa_min"]["protocol"]["defender"] in ("stateless", "stateful")
    assert found["gmsa_min"]["n"] == 2


@pytest.mark.parametrize("file", ASSEMBLED, ids=lambda p: p.stem)
def test_recipe_of_trained_networks_tests(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run("test", "--config", file, EMBEDDED, *SMALL)
    assert "No such file or directory: 'checkpoints/" in capsys.readouterr().err
    write_checkpoints(file)
    run("test", "--config", shortened(file), EMBEDDED, *SMALL)
    told = capsys.readouterr().out
    assert all(
        name in told for name in ("PretrainedEnsemble", "clean", "worst", *named_attacks(file))
    )


def named_attacks(file):
    return ["transfer_pgd"] if "DENT" in file.read_text() else ["adaptive_pgd", "arc"]


@pytest.mark.parametrize("file", CALLBACKS, ids=lambda p: p.stem)
def test_callback_plugs_into_a_recipe(file, tmp_path):
    plain = recipe(tmp_path, **{"trainer__callbacks+": [], "model__init_args__monitor": None})
    small = ["--trainer.max_epochs=2", "--model.epochs=1", "--data.train_size=64"]
    content = plugged(file)
    plugin = tmp_path / "plugin.yaml"
    plugin.write_text(yaml.safe_dump(shrunk(content)))
    run("fit", "--config", plain, *small, f"--trainer.callbacks+={plugin}")
    written = [path.read_text() for path in (tmp_path / "run/version_0").glob("*.jsonl")]
    found = {json.loads(line)["name"] for text in written for line in text.splitlines()}
    assert set(content["init_args"].get("attacks", ())) <= found
    saved = yaml.safe_load((tmp_path / "run/version_0/config.yaml").read_text())
    assert saved["trainer"]["callbacks+"][-1]["class_path"].endswith(content["class_path"])


def test_plugins_add_up_and_an_attack_in_several_runs_once(tmp_path):
    plain = recipe(tmp_path, **{"trainer__callbacks+": [], "model__init_args__monitor": None})
    plugins = [f"--trainer.callbacks+={name}" for name in ("adaptive_pgd", "rec_suite")]
    run("fit", "--config", plain, "--trainer.max_epochs=2", "--model.epochs=1", *plugins)
    found = [r["name"] for r in records(tmp_path) if r["epoch"] == 0]
    names = [name for name in found if name != "clean"]
    assert sorted(names) == sorted({*names})
    assert {"adaptive_pgd", "adaptive_pgd_logits", "arc", "worst"} <= set(names)
    worst = next(r for r in records(tmp_path) if r["name"] == "worst")
    assert worst["over"][0] == "adaptive_pgd"
    assert {"arc", "climb"} <= {*worst["over"]}


@pytest.mark.parametrize("file", RT_ONLY, ids=lambda p: p.stem)
def test_callback_plugs_into_random_transforms(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changed = plugged(file)
    for game in changed["init_args"]["attacks"].values():
        made = game["init_args"].get("attack", game)["init_args"]
        made |= {"steps": 2, "draws": 2} if "steps" in made else {"batch_size": 2}
    Path("callback.yaml").write_text(yaml.safe_dump(changed))
    plain = yaml.safe_load((ROOT / "configs/rt_cifar10_small.yaml").read_text())
    del plain["trainer"]["callbacks+"], plain["data"]
    Path("plain.yaml").write_text(yaml.safe_dump(plain))
    shrunk = ["--model.defense.size=2", "--model.defense.draws=2", "--model.net.widths=[4,4,4]"]
    base = ["--config", "plain.yaml", EMBEDDED, *shrunk, *SMALL]
    run("fit", *base, "--trainer.callbacks+=callback.yaml")


@pytest.mark.parametrize("file", VOTERS, ids=lambda p: p.stem)
def test_callback_plugs_into_transformation_ensembles(file, tmp_path, monkeypatch):
    """All sub-models have random weights; two images, few steps."""
    monkeypatch.chdir(tmp_path)
    changed = shrunk(plugged(file))
    changed["init_args"].pop("only", None)
    Path("callback.yaml").write_text(yaml.safe_dump(changed))
    plain = yaml.safe_load((ROOT / "configs/athena_digits.yaml").read_text())
    if changed["class_path"].endswith("TransferMatrixEval"):
        plain["model"]["init_args"]["transforms"] = ["clean", "rotate_90", "flip_horizontal"]
    if file.stem.startswith("compositions"):
        small = {"14r": "reversible", "2i": "2i"}
        changed["init_args"] |= {"ensembles": small, "draws": 1}
        plain["model"]["init_args"]["transforms"] = ["clean", "14r+2i"]
        Path("callback.yaml").write_text(yaml.safe_dump(changed))
    del plain["trainer"]["callbacks+"], plain["data"]
    plain.pop("test_after_fit", None)
    Path("plain.yaml").write_text(yaml.safe_dump(plain))
    limits = [
        "--model.net.hidden=16",
        "--trainer.limit_test_batches=1",
        "--trainer.logger.name=run",
    ]
    base = ["--config", "plain.yaml", GREY, *limits, *SMALL[1:]]
    run("test", *base, "--trainer.callbacks+=callback.yaml")
    (log,) = [path for path in tmp_path.rglob("*.jsonl") if path.parent.name.startswith("version")]
    found = {record["name"] for record in map(json.loads, log.read_text().splitlines())}
    attacks = changed["init_args"]["attacks"]
    each = changed["init_args"].get("each_target")
    assert len(found - {"clean", "worst"}) == (15 * len(attacks) if each else len(attacks))


def test_plugins_can_be_saved_with_a_run(tmp_path):
    """The others are saved by the runs above."""
    names = [*(p.stem for p in [*RT_ONLY, *VOTERS]), *SUITES]
    args = ["--config", str(recipe(tmp_path)), f"--trainer.callbacks+={json.dumps(names)}"]
    built = RobustCLI(args, run=False)
    dumped = built.parser.dump(built.config, skip_none=False, skip_validation=True)
    saved = yaml.safe_load(dumped)
    for name, callback in zip(names, saved["trainer"]["callbacks+"][1:], strict=True):
        content = plugged(name)
        assert callback["class_path"].endswith(content["class_path"])
        assert list(callback["init_args"]["attacks"]) == list(content["init_args"]["attacks"])
        assert "Unable to serialize" not in str(callback)


IN_L2 = {  # plug-in -> the lengths of its attacks at l2 128/255, in 255ths
    "adaptive_pgd": [32],
    "adaptive_pgd_logits": [32],
    "adaptive_pgd_restarts": [32],
    "arc": [32],
    "arc_top4": [32],
    "arc_two_radii": [32, 128],
    "arc_warm": [16, 32, 32, 32, 128],
    "autoattack": [],
    "climb": [],
    "deepfool": [],
    "first_member": [32],
    "first_member_arc": [16, 32, 32, 32, 32, 32, 128, 128],
    "gallery": [32, 32, 128],
    "members": [32, 32, 32, 128],
    "pgd": [32],
    "pgd_one_member": [32],
    "pgd_random_member": [32],
    "rec_all": [16, *[32] * 12, 128, 128],
    "rec_suite": [16, *[32] * 8, 128, 128],
}


def test_plugins_in_another_norm(tmp_path):
    """PGD and ARC of the ARC paper at l2 128/255; of ARC the local radius is eps/4 there."""
    entries = json.dumps([{name: {"norm": "l2", "eps": "128/255"}} for name in IN_L2])
    args = ["--config", str(recipe(tmp_path)), f"--trainer.callbacks+={entries}"]
    callbacks = RobustCLI(args, run=False).trainer.callbacks
    changed = [one for one in callbacks if isinstance(one, EvaluationCallback)][1:]
    for (name, expected), callback in zip(IN_L2.items(), changed, strict=True):
        attacks = callback.attacks if name != "gallery" else {0: callback.weak, 1: callback.strong}
        parts = [part for attack in attacks.values() for part in walk(attack)]
        assert {part.threat for part in parts} == {Threat("l2", 128 / 255)}
        lengths = [getattr(p, "local_radius", getattr(p, "step_size", None)) for p in parts]
        assert sorted(filter(None, lengths)) == pytest.approx([n / 255 for n in expected]), name


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
WITHOUT_A_GRADIENT = {
    "AdaptiveHistogram",
    "ContrastStretch",
    "EqualizeHistogram",
    "ChambolleDenoise",
}


@pytest.mark.parametrize(
    ("name", "expected", "count"),
    [
        ("bart_differentiable_imagenette", BART, 21),
        ("bart_imagenette", BART | WITHOUT_A_GRADIENT, 25),
    ],
)
def test_bart_has_the_transforms_and_the_ranges_of_the_paper(name, expected, count):
    options = yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())["model"]["init_args"]
    made = named(options["defense"]["init_args"]["transforms"])
    assert set(made) == expected
    assert len(made) == count
    assert {n for n, one in made.items() if not one.differentiable} == expected - BART
    x, chance = torch.rand(2000, 3, 1, 1), torch.Generator().manual_seed(0)
    spans = {
        n: [(float(p.min()), float(p.max())) for p in made[n].sample(x, chance)]
        for n in ("Bilateral", "GaussianBlur", "JPEG", "MedianBlur", "Swirl", "HSV", "LAB", "YUV")
    }
    assert spans["Bilateral"][2] == (3, 19)
    assert spans["GaussianBlur"][0] == (19, 19)
    assert spans["GaussianBlur"][1] == pytest.approx((0.1, 3), abs=0.01)
    assert spans["JPEG"] == [(55, 95)]
    assert spans["MedianBlur"] == [(5, 9)]
    assert spans["Swirl"][1:] == [pytest.approx(r, abs=0.5) for r in ((10, 200), (0.01, 2))]
    for n, largest in (
        ("HSV", (0.05, 0.25, 0.25)),
        ("LAB", (5, 2, 2)),
        ("YUV", (0.05, 0.02, 0.02)),
    ):
        (shift,) = made[n].sample(x, chance)
        assert shift.abs().amax(0).tolist() == pytest.approx(largest, rel=0.01)
    (box,) = made["Crop"].sample(torch.zeros(1, 3, 224, 224).expand(2000, -1, -1, -1), chance)
    assert (int(box[:, 2:].min()), int(box[:, 2:].max())) == (156, 224)


@pytest.mark.parametrize("name", ["rt_cifar10", "advrt_imagenette", "bart_imagenette"])
def test_released_mix_in_keeps_all_but_the_slips(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = ROOT / f"configs/{name}.yaml"
    if of(file, ["Images"]):
        make_folders(file)
    configs = ["--config", str(file), "--trainer.accelerator=cpu"]
    plain = RobustCLI(configs, run=False).model.defense
    mix_in = ["--config", "rt_released"]
    released = RobustCLI([*configs, *mix_in], run=False).model.defense
    assert not plain.released_code
    assert released.released_code
    expected = {name: one.as_released() for name, one in plain.transforms.items()}
    assert released.transforms == expected
    assert expected != plain.transforms
    assert (released.size, released.draws) == (plain.size, plain.draws)


@pytest.mark.parametrize("mix_in", ["ddp", "debug"])
def test_mix_in_parses(mix_in, tmp_path):
    args = ["--config", str(recipe(tmp_path)), "--config", mix_in]
    built = RobustCLI([*args, "--trainer.devices=1", "--trainer.accelerator=cpu"], run=False)
    strategy = type(built.trainer.strategy).__name__
    assert strategy == ("DDPStrategy" if mix_in == "ddp" else "SingleDeviceStrategy")


class Average(Callback):
    """Keeps the moving average of the weights by its definition."""

    mean: dict[str, torch.Tensor] | None = None

    def on_train_batch_end(self, trainer, module, *_):
        now = {k: v.clone() for k, v in module.state_dict().items() if v.is_floating_point()}
        old = self.mean or now
        self.mean = {k: 0.999 * old[k] + 0.001 * now[k] for k in now}


def test_ema_mix_in_evaluates_saves_and_tests_the_average(tmp_path):
    """A test by the trainer of the fit too, to which Lightning would give the trained weights."""
    model = {
        "class_path": "AdversarialTraining",
        "init_args": {"net": {"class_path": "tests.tiny.TinyNet"}},
    }
    callbacks = [robust_eval({"adaptive_pgd": pgd()}), {"class_path": "RobustCheckpoint"}]
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


def test_finetune_mix_in_starts_from_a_file_at_a_low_learning_rate(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    start = SmallCNN()
    torch.save(start.state_dict(), "start.pt")
    args = ["--config", "madry_digits", "--config", "finetune", GREY, *SMALL]
    built = RobustCLI([*args, "--model.weights=start.pt"], run=False)
    built.trainer.fit(built.model, built.datamodule)
    trained = dict(built.model.defense.net.named_parameters())
    steps = [(trained[name] - w).abs().max() for name, w in start.named_parameters()]
    assert max(steps).item() == pytest.approx(0.001, rel=0.01)  # Adam's first step is the rate
    with pytest.raises(SystemExit):
        run("fit", *args)
    assert "pretrained.pt" in capsys.readouterr().err


ARCHITECTURES = {
    "net_mobilenetv1": (MobileNetV1, 2e-4),
    "net_preact18": (PreActResNet18, 5e-4),
    "net_vgg16": (VGG16, 5e-4),
    "net_wrn28_4": (WRN28_4, 5e-4),
}


@pytest.mark.parametrize("mix_in", NETS, ids=lambda p: p.stem)
def test_network_mix_in_changes_the_network_and_its_weight_decay(mix_in):
    args = ["--config", "bat_cifar10_resnet20_linf", "--trainer.accelerator=cpu"]
    plain = RobustCLI(args, run=False)
    built = RobustCLI([*args, "--config", str(mix_in)], run=False)
    kind, weight_decay = ARCHITECTURES[mix_in.stem]
    assert [type(member) for member in built.model.members] == [kind, kind]
    groups = [c.model.configure_optimizers()["optimizer"].param_groups[0] for c in (plain, built)]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    assert settings[1] == settings[0] | {"weight_decay": weight_decay}
    assert settings[0]["lr"] == 0.1
    assert plain.model.attack == built.model.attack
    assert plain.model.epochs == built.model.epochs == [200, 200]
    names = [[type(c).__name__ for c in one.trainer.callbacks] for one in (plain, built)]
    assert names[0] == names[1]
    assert names[0].count("RobustEval") == 3


@pytest.mark.parametrize("mix_in", NETS, ids=lambda p: p.stem)
def test_recipe_runs_with_a_network_mix_in(mix_in, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = shortened(ROOT / "configs/bat_cifar10_resnet20_linf.yaml")
    content = yaml.safe_load(base.read_text())
    content["trainer"]["callbacks+"] = [
        shrunk(plugged("adaptive_pgd"))
    ]  # the others do not see the net
    base.write_text(yaml.safe_dump(content))
    run("fit", "--config", base, "--config", mix_in, EMBEDDED, *SMALL)


def test_a_network_mix_in_keeps_the_classes_and_statistics_of_other_data():
    args = ["--config", "bat_cifar100_resnet20_linf", "--config", "net_vgg16"]
    net = RobustCLI([*args, "--trainer.accelerator=cpu"], run=False).model.members[0]
    assert net.classifier.out_features == 100
    assert net.normalize.mean.flatten().tolist() == pytest.approx([0.50708, 0.48655, 0.44092])


def attacks_in(content):
    """Return every attack with its name, however deep in a recipe or plug-in."""
    if isinstance(content, list):
        return [pair for part in content for pair in attacks_in(part)]
    if not isinstance(content, dict):
        return []
    here = content.get("attacks")
    found = list(here.items()) if isinstance(here, dict) else []
    return found + [pair for part in content.values() for pair in attacks_in(part)]


def test_attacks_called_arc_are_the_papers():
    """One local radius: eps for linf, PGD's step of eps / 4 for l2; `arc_two_radii` has both."""
    files = [*CONFIGS, *PLUGINS]
    attacks = [pair for p in files for pair in attacks_in(yaml.safe_load(p.read_text()))]
    single = [attack for name, attack in attacks if name in ("arc", "arc_top4", "member_1_arc")]
    double = [attack for name, attack in attacks if name in ("arc_two_radii", "member_1_two")]
    assert len(single) >= 10 and len(double) >= 9
    for attack in single:
        norm = attack["init_args"]["threat"]["norm"]
        assert local_radius(attack) in (None, pytest.approx({"linf": 1, "l2": 0.25}[norm]))
    for attack in double:
        radii = [local_radius(part) for part in attack["init_args"]["attacks"]]
        assert sorted(radii) == pytest.approx([0.25, 1])


def local_radius(attack):
    """Return the local radius as a share of eps; None if it is left to ARC."""
    assert attack["class_path"].endswith("ARC")
    options = attack["init_args"]
    radius = options.get("step_size")
    return radius and pixels(radius) / pixels(options["threat"]["eps"])


def test_the_first_member_is_attacked_as_the_ensemble_is():
    """The same attacks in the same order, so that their rows can be paired."""

    def attacks(*names):
        return [attack for n in names for attack in plugged(n)["init_args"]["attacks"].values()]

    alone = attacks("first_member", "first_member_arc")
    assert alone == attacks("adaptive_pgd", "arc", "arc_two_radii", "arc_warm")
    demo = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())["trainer"]["callbacks+"]
    each, twice, first = (callback["init_args"] for callback in demo[1:])
    whole = each["attacks"] | twice["attacks"]
    assert list(first["attacks"].values()) == list(whole.values())


def test_no_yaml_drops_callbacks():
    for file in [*(ROOT / "configs").rglob("*.yaml"), *PLUGINS]:
        assert "callbacks:" not in file.read_text()


def test_every_file_is_a_recipe_a_mix_in_or_a_search_space():
    mix_ins = {path.stem for path in (ROOT / "configs/mixins").iterdir()}
    assert mix_ins == OTHER_MIX_INS | {path.stem for path in [*NETS, *GROUPS]}
    assert all("class_path" in yaml.safe_load(path.read_text())["model"] for path in CONFIGS)
