"""Every YAML that is shipped runs."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from lightning_rob.nets import VGG16, WRN28_4, MobileNetV1, PreActResNet18, ResNet20, ZooNet
from lightning_rob.threat import pixels
from lightning_rob.transforms import named
from tests.nets.test_weights import dverge_state
from tests.tiny import ROOT, recipe, records, run

NETS = sorted((ROOT / "configs").glob("net_*.yaml"))
SPACES = sorted((ROOT / "configs").glob("tune_*.yaml"))
GROUPS = sorted((ROOT / "configs").glob("group_*.yaml"))
MIX_INS = [*NETS, *SPACES, *GROUPS] + [
    ROOT / f"configs/{name}.yaml" for name in ("ddp", "debug", "rt_released")
]
CONFIGS = sorted(p for p in (ROOT / "configs").glob("*.yaml") if p not in MIX_INS)
ASSEMBLED = [p for p in CONFIGS if "class_path: PretrainedEnsemble" in p.read_text()]
RECIPES = [p for p in CONFIGS if p not in ASSEMBLED]
RT_ONLY = sorted((ROOT / "callbacks").glob("rt_*.yaml"))
VOTERS = [  # on transformation ensembles, or of many steps
    p
    for p in sorted((ROOT / "callbacks").glob("*.yaml"))
    if re.search(r"TAA|PAA|callbacks\.VotingRuleEval|Algorithm 2\)", p.read_text())
]
CALLBACKS = sorted({*(ROOT / "callbacks").glob("*.yaml")} - {*RT_ONLY, *VOTERS})
# Data that a fresh machine lacks is replaced by embedded images of the same size.
TINY = "{train_size: 10, test_size: 2, val_size: 2, workers: 0}"
EMBEDDED = f"--data={{class_path: Patches10, init_args: {TINY}}}"
GREY = (
    "--data={class_path: Digits5k, init_args: "
    "{limit_train: 10, val_size: 20, eval_batch_size: 2, workers: 0}}"
)
PAIR = """--data={class_path: SourceTargetData, init_args: {source: {class_path: Digits5k,
init_args: {limit_train: 10, batch_size: 10, eval_batch_size: 2, workers: 0}}}}"""
SMALL = [
    "--trainer.fast_dev_run=true",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]


def of(file, data):
    """The recipe's data set is one of these."""
    return yaml.safe_load(file.read_text())["data"]["class_path"] in data


def make_folders(file):
    """The folders of the classes."""
    root = Path(yaml.safe_load(file.read_text())["data"]["init_args"]["root"])
    for part in ("train", "val"):
        for k in range(1000 if root.name == "imagenet" else 10):
            (root / part / f"{k:04}").mkdir(parents=True)


@pytest.mark.parametrize("file", RECIPES, ids=lambda p: p.stem)
def test_recipe_runs(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if of(file, ["Images"]):
        make_folders(file)
    if of(file, ["SourceTargetData"]):
        data = [PAIR]
    else:
        grey = of(file, ["MNIST", "FashionMNIST", "Digits5k"])
        data = [GREY if grey else EMBEDDED, "--data.init_args.batch_size=10"]
    run("fit", "--config", file, *data, *SMALL)


@pytest.mark.parametrize("file", RECIPES, ids=lambda p: p.stem)
def test_recipe_builds_with_its_own_data(file, tmp_path, monkeypatch):
    from lightning_rob.cli.lightning_cli import RobustCLI

    monkeypatch.chdir(tmp_path)
    if of(file, ["Images"]):
        make_folders(file)
    built = RobustCLI(["--config", str(file), "--trainer.accelerator=cpu"], run=False)
    heads = [
        part
        for name, part in built.model.named_modules()
        if isinstance(part, nn.Linear) and not {"discriminator", "judge"} & {*name.split(".")}
    ]
    assert built.datamodule.classes == heads[-1].out_features


def write_checkpoints(file):
    """What a recipe of networks that are trained already expects to find."""
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


GAMES = [p for p in RECIPES if "attacks.GMSA" in p.read_text()]


@pytest.mark.parametrize("file", GAMES, ids=lambda p: p.stem)
def test_the_game_of_a_recipe_is_played(file, tmp_path, monkeypatch):
    """Shrunk to one round of two images, one epoch and a step or two of everything."""
    monkeypatch.chdir(tmp_path)
    content = shrunk(yaml.safe_load(file.read_text()))
    Path("recipe.yaml").write_text(yaml.safe_dump(content))
    grey = of(file, ["MNIST", "FashionMNIST", "Digits5k"])
    data = [GREY if grey else EMBEDDED, "--data.init_args.batch_size=10"]
    limits = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=1"]
    run("fit", "--config", "recipe.yaml", *data, *limits, *SMALL[1:], "--trainer.logger.name=run")
    (log,) = tmp_path.rglob("robust.jsonl")
    found = {record["name"]: record for record in map(json.loads, log.read_text().splitlines())}
    assert {"clean", "fpa", "gmsa_avg", "gmsa_min", "worst"} <= found.keys()
    assert found["gmsa_min"]["protocol"]["defender"] in ("stateless", "stateful")
    assert found["gmsa_min"]["n"] == 2


NUMBERS = {
    "steps": 1,
    "rounds": 2,
    "neighbours": 8,
    "copies": 1,
    "binary_steps": 1,
    "untargeted": 1,
    "targeted": 1,
}


def shrunk(content):
    """The same with fewer of everything that takes time, and with the cheapest AutoAttack."""
    if isinstance(content, list):
        return [shrunk(part) for part in content]
    if not isinstance(content, dict):
        return content
    small = {k: NUMBERS[k] if k in NUMBERS else shrunk(v) for k, v in content.items()}
    if str(content.get("class_path")).endswith(".AutoAttack"):
        small["init_args"] |= {"version": "custom", "attacks": ["apgd-ce"]}
    if str(content.get("class_path")).rpartition(".")[2] in ("RMC", "DANN", "TADV"):
        small["init_args"]["epochs"] = 1
    if str(content.get("class_path")).endswith(".PAA"):
        small["init_args"]["rounds"] = 1
    if str(content.get("class_path")).endswith(".HighConfidence"):
        small["init_args"] |= {"untargeted": 1, "targeted": 1}
    if "max_images" in content:
        small["max_images"] = 2
    return small


@pytest.mark.parametrize("file", ASSEMBLED, ids=lambda p: p.stem)
def test_recipe_of_trained_networks_tests(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run("test", "--config", file, EMBEDDED, *SMALL)
    assert "No such file or directory: 'checkpoints/" in capsys.readouterr().err
    write_checkpoints(file)
    run("test", "--config", file, EMBEDDED, *SMALL)
    told = capsys.readouterr().out
    assert all(
        name in told for name in ("PretrainedEnsemble", "clean", "worst", *named_attacks(file))
    )


def named_attacks(file):
    return ["transfer_pgd"] if "DENT" in file.read_text() else ["apgd", "arc"]


@pytest.mark.parametrize("file", CALLBACKS, ids=lambda p: p.stem)
def test_callback_plugs_into_a_recipe(file, tmp_path):
    plain = recipe(tmp_path, **{"trainer__callbacks+": [], "model__init_args__monitor": None})
    small = ["--trainer.max_epochs=2", "--model.epochs=1", "--data.train_size=64"]
    plugin = tmp_path / "plugin.yaml"
    text = file.read_text()
    slow = any(word in text for word in ("GMSA", "AutoAttack"))
    slow = slow or file.stem.startswith(("rec_all", "cw_paper"))
    content = yaml.safe_load(text)
    plugin.write_text(yaml.safe_dump(shrunk(content) if slow else content))
    run("fit", "--config", plain, *small, f"--trainer.callbacks+={plugin}")
    names = set(yaml.safe_load(file.read_text())["init_args"].get("attacks", ()))
    written = [path.read_text() for path in (tmp_path / "run/version_0").glob("*.jsonl")]
    assert names <= {json.loads(line)["name"] for text in written for line in text.splitlines()}


def test_callbacks_add_up_and_what_is_there_twice_runs_once(tmp_path):
    plain = recipe(tmp_path, **{"trainer__callbacks+": [], "model__init_args__monitor": None})
    plugins = [f"--trainer.callbacks+={ROOT}/callbacks/{n}.yaml" for n in ("apgd", "rec_suite")]
    run("fit", "--config", plain, "--trainer.max_epochs=2", "--model.epochs=1", *plugins)
    found = [r["name"] for r in records(tmp_path) if r["epoch"] == 0]
    names = [name for name in found if name != "clean"]
    assert sorted(names) == sorted({*names})
    assert {"apgd", "apgd_logits", "arc", "worst"} <= set(names)
    worst = next(r for r in records(tmp_path) if r["name"] == "worst")
    assert worst["over"][0] == "apgd"
    assert {"arc", "arc_two_radii"} <= {*worst["over"]}


@pytest.mark.parametrize("file", RT_ONLY, ids=lambda p: p.stem)
def test_callback_plugs_into_random_transforms(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changed = yaml.safe_load(file.read_text())
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
    """All sub-models stand, with random weights; two images, few steps."""
    monkeypatch.chdir(tmp_path)
    changed = shrunk(yaml.safe_load(file.read_text()))
    Path("callback.yaml").write_text(yaml.safe_dump(changed))
    plain = yaml.safe_load((ROOT / "configs/athena_digits.yaml").read_text())
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


@pytest.mark.parametrize("file", [*CALLBACKS, *RT_ONLY, *VOTERS], ids=lambda p: p.stem)
def test_callback_can_be_saved_with_a_run(file, tmp_path):
    from lightning_rob.cli.lightning_cli import RobustCLI

    args = ["--config", str(recipe(tmp_path)), f"--trainer.callbacks+={file}"]
    built = RobustCLI(args, run=False)
    saved = yaml.safe_load(built.parser.dump(built.config, skip_none=False))
    plugged = saved["trainer"]["callbacks"][-1]
    assert plugged["class_path"].endswith(yaml.safe_load(file.read_text())["class_path"])
    assert "Unable to serialize" not in str(plugged)


@pytest.mark.parametrize("mix_in", GROUPS, ids=lambda p: p.stem)
def test_group_mix_in_leaves_nothing_but_the_group(mix_in):
    from lightning_rob.cli.lightning_cli import RobustCLI
    from lightning_rob.transforms import GROUPS as KINDS

    base = ["--config", str(ROOT / "configs/rt_cifar10.yaml"), "--config", str(mix_in)]
    defense = RobustCLI([*base, "--trainer.accelerator=cpu"], run=False).model.defense
    kinds = KINDS[mix_in.stem.removeprefix("group_")]
    assert [type(transform) for transform in defense.transforms.values()] == list(kinds)
    assert defense.size == len(kinds)


BART = {  # the list of Sitawarin et al. 2022, by our names
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
    from lightning_rob.cli.lightning_cli import RobustCLI

    monkeypatch.chdir(tmp_path)
    file = ROOT / f"configs/{name}.yaml"
    if of(file, ["Images"]):
        make_folders(file)
    configs = ["--config", str(file), "--trainer.accelerator=cpu"]
    plain = RobustCLI(configs, run=False).model.defense
    mix_in = ["--config", str(ROOT / "configs/rt_released.yaml")]
    released = RobustCLI([*configs, *mix_in], run=False).model.defense
    assert not plain.released_code
    assert released.released_code
    expected = {name: one.as_released() for name, one in plain.transforms.items()}
    assert released.transforms == expected
    assert expected != plain.transforms
    assert (released.size, released.draws) == (plain.size, plain.draws)


@pytest.mark.parametrize("mix_in", ["ddp", "debug"])
def test_mix_in_parses(mix_in, tmp_path):
    from lightning_rob.cli.lightning_cli import RobustCLI

    args = ["--config", str(recipe(tmp_path)), "--config", str(ROOT / f"configs/{mix_in}.yaml")]
    built = RobustCLI([*args, "--trainer.devices=1", "--trainer.accelerator=cpu"], run=False)
    strategy = type(built.trainer.strategy).__name__
    assert strategy == ("DDPStrategy" if mix_in == "ddp" else "SingleDeviceStrategy")


ARCHITECTURES = {
    "net_mobilenetv1": (MobileNetV1, 2e-4),
    "net_preact18": (PreActResNet18, 5e-4),
    "net_vgg16": (VGG16, 5e-4),
    "net_wrn28_4": (WRN28_4, 5e-4),
}


@pytest.mark.parametrize("base", ["cifar10_resnet20_linf", "cifar10_resnet20_l2"])
@pytest.mark.parametrize("mix_in", NETS, ids=lambda p: p.stem)
def test_network_mix_in_changes_the_network_and_its_weight_decay(mix_in, base):
    from lightning_rob.cli.lightning_cli import RobustCLI

    args = ["--config", str(ROOT / f"configs/bat_{base}.yaml"), "--trainer.accelerator=cpu"]
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
    configs = ["--config", ROOT / "configs/bat_cifar10_resnet20_linf.yaml", "--config", mix_in]
    run("fit", *configs, EMBEDDED, "--data.init_args.batch_size=4", *SMALL)


def test_a_network_mix_in_keeps_the_classes_and_statistics_of_other_data():
    from lightning_rob.cli.lightning_cli import RobustCLI

    configs = [ROOT / f"configs/{n}.yaml" for n in ("bat_cifar100_resnet20_linf", "net_vgg16")]
    args = [arg for file in configs for arg in ("--config", str(file))]
    net = RobustCLI([*args, "--trainer.accelerator=cpu"], run=False).model.members[0]
    assert net.classifier.out_features == 100
    assert net.normalize.mean.flatten().tolist() == pytest.approx([0.50708, 0.48655, 0.44092])


@pytest.mark.parametrize("file", [p for p in RECIPES if "resnet20" in p.stem], ids=lambda p: p.stem)
def test_recipe_normalises_as_its_data_says(file):
    from lightning_rob.cli.lightning_cli import RobustCLI

    built = RobustCLI(["--config", str(file), "--trainer.accelerator=cpu"], run=False)
    layer = built.model.members[0].normalize
    assert layer.mean.flatten().tolist() == pytest.approx(built.datamodule.mean)
    assert layer.std.flatten().tolist() == pytest.approx(built.datamodule.std)


def attacks_in(content):
    """Every attack with its name, however deep in a recipe or plug-in."""
    if isinstance(content, list):
        return [pair for part in content for pair in attacks_in(part)]
    if not isinstance(content, dict):
        return []
    here = content.get("attacks")
    found = list(here.items()) if isinstance(here, dict) else []
    return found + [pair for part in content.values() for pair in attacks_in(part)]


def test_what_is_called_arc_is_the_papers():
    """One local radius: eps for linf, PGD's step of eps / 4 for l2; `arc_two_radii` tries both."""
    files = [*(ROOT / "configs").glob("*.yaml"), *(ROOT / "callbacks").glob("*.yaml")]
    attacks = [pair for p in files for pair in attacks_in(yaml.safe_load(p.read_text()))]
    single = [attack for name, attack in attacks if name in ("arc", "arc_top4", "member_1_arc")]
    double = [attack for name, attack in attacks if name in ("arc_two_radii", "member_1_two")]
    assert len(single) >= 20 and len(double) >= 15
    for attack in single:
        share = {"linf": 1, "l2": 0.25}[attack["init_args"]["threat"]["norm"]]
        assert local_radius(attack) == pytest.approx(share)
    for attack in double:
        radii = [local_radius(part) for part in attack["init_args"]["attacks"]]
        assert sorted(radii) == pytest.approx([0.25, 1])


def local_radius(attack):
    """As a share of eps."""
    assert attack["class_path"].endswith(".ARC")
    options = attack["init_args"]
    return pixels(options["step_size"]) / pixels(options["threat"]["eps"])


@pytest.mark.parametrize("twin", ["", "_l2"])
def test_the_first_member_is_attacked_as_the_ensemble_is(twin):
    """Like for like: the same attacks in the same order, so that their rows can be paired."""

    def attacks(*names):
        read = [yaml.safe_load((ROOT / f"callbacks/{n}{twin}.yaml").read_text()) for n in names]
        return [attack for part in read for attack in part["init_args"]["attacks"].values()]

    alone = attacks("first_member", "first_member_arc")
    assert alone == attacks("apgd", "arc", "arc_two_radii", "arc_warm")
    demo = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())["trainer"]["callbacks+"]
    each, twice, first = (callback["init_args"] for callback in demo[1:])
    whole = each["attacks"] | twice["attacks"]
    assert list(first["attacks"].values()) == list(whole.values())


def test_no_yaml_drops_callbacks():
    for file in [*(ROOT / "configs").glob("*.yaml"), *CALLBACKS]:
        assert "callbacks:" not in file.read_text()
