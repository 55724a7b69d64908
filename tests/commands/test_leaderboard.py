"""A leaderboard ranks what follows its protocol, and says why others have no rank."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from lightning_rob.commands.checkpoints import RECIPE
from lightning_rob.commands.leaderboard import submissions
from lightning_rob.commands.leaderboard.ranks import agreement, difference, ranks
from lightning_rob.defenses import DENT, Single
from lightning_rob.nets import SmallCNN
from lightning_rob.recipes.shipped import shipped_folder
from lightning_rob.threat import Threat
from tests.pieces import spec
from tests.tiny import Blobs, TinyNet, exit_code, fit, pgd, refused


class Shuffled(Blobs):
    """Test images that come in another order than in the source, as those of folders do."""

    def test_order(self, count):
        return torch.arange(count).flip(0)


PROTOCOL = {
    "title": "Blobs",
    "data": spec(f"{__name__}.Shuffled"),
    "radii": {"linf": 0.1, "l2": 0.1},
}
PROTOCOL |= {"images": 30, "passes": 60, "steps": 4, "power": 1, "certified": 200, "training": 100}


class SeesGradients(TinyNet):
    """A network that shows another face where it is asked for gradients."""

    def forward(self, x):
        return super().forward(x.flip(1) if x.requires_grad else x)


class Quits(TinyNet):
    """A network that ends the process in which it predicts."""

    def forward(self, x):
        raise SystemExit


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """A scored leaderboard: BAT of two seeds, a smoothed network, one that detects gradients."""
    folder = tmp_path_factory.mktemp("board")
    (folder / "protocol.yaml").write_text(yaml.safe_dump(PROTOCOL, sort_keys=False))
    net, sees = spec("tests.tiny.TinyNet"), spec(f"{__name__}.SeesGradients")
    smoothed = spec("Smoothing", sigma=0.1, draws=8)
    models = {
        "BAT 0": {},
        "BAT 1": {"seed_everything": 1},
        "Smoothed": {"model": spec("AdversarialTraining", net=net, defense=smoothed)},
        "Sees": {"model": spec("AdversarialTraining", net=sees, attack=pgd())},
    }
    for name, changes in models.items():
        own = folder / name.replace(" ", "_")
        shutil.move(fit(own, **changes), own)
        about = {"name": name.split()[0], "seed": int("1" in name), "training": 40}
        (own / "submission.yaml").write_text(yaml.safe_dump(about))
    told(folder, "--evaluate")
    return folder


def told(folder, *args):
    """Return what is published; the exit code says whether a submission has no rank."""
    code = exit_code("leaderboard", folder, *args, "--allow-import=tests")
    assert code == ("Without a rank" in (folder / "leaderboard.md").read_text())
    return json.loads((folder / "leaderboard.json").read_text())


def test_the_table(board, capsys):
    content = told(board)
    out = capsys.readouterr().out
    rows = {row["defense"]: row for row in content["norms"]["l2"]}
    assert list(rows) and set(rows) == {"BAT", "Smoothed"}
    assert rows["BAT"]["seeds"] == 2
    scores = [json.loads((board / f"BAT_{i}/scores.json").read_text()) for i in (0, 1)]
    by_seed = [np.mean(one["norms"]["l2"]["images"]["worst"]) for one in scores]
    assert rows["BAT"]["worst"] == pytest.approx(np.mean(by_seed))
    assert "climb" in scores[0]["norms"]["l2"]["images"]
    assert rows["BAT"]["resubmitted"] <= rows["BAT"]["worst"] + 1e-9
    assert rows["BAT"]["known_noise"] <= rows["BAT"]["worst"] + 1e-9
    assert 0 < rows["Smoothed"]["certified"] <= rows["Smoothed"]["worst"]
    assert rows["Smoothed"]["prediction"] > 2 > 0 < rows["BAT"]["prediction"]
    assert "Sees: severe findings within linf: gradients_seen: " in out
    page = (board / "leaderboard.html").read_text()
    assert "Without a rank" in page and "<script>" in page


@pytest.fixture
def content(board):
    """What the board publishes."""
    return json.loads((board / "leaderboard.json").read_text())


def test_a_submission_is_ranked_beside_published_ones(board, content, tmp_path, capsys):
    """By its scores alone: the others' models are elsewhere."""
    shutil.copytree(board, tmp_path / "theirs", ignore=shutil.ignore_patterns("BAT_1"))
    told(tmp_path / "theirs")
    mine, theirs = tmp_path / "mine", tmp_path / "theirs/leaderboard.json"
    for name in ("BAT_1", "Smoothed"):
        shutil.copytree(board / name, mine / name)
    capsys.readouterr()
    found = told(mine, f"--beside={theirs}")
    assert found["norms"] == content["norms"]
    out = capsys.readouterr().out
    assert "Smoothed with the seed of Smoothed (published)" in out and "1 of 2 submissions" in out
    assert "BAT_1: another training of BAT, published" in out and "Smoothed (yours)" not in out
    tau = [re.search("tau.*", (f / "leaderboard.md").read_text()) for f in (board, mine)]
    assert str(tau[0]) == str(tau[1])  # trainings are paired as in one folder
    assert {one["folder"] for one in found["submissions"]} == {"BAT_0", "BAT_1", "Smoothed"}
    again = told(mine, f"--beside={mine / 'leaderboard.json'}")  # with those that it has itself
    assert again["norms"] == content["norms"]


def published(content, board, tmp_path):
    """A folder with a submission, and the option of others' scores."""
    (tmp_path / "theirs.json").write_text(json.dumps(content))
    shutil.copytree(board / "BAT_1", tmp_path / "mine/BAT_1")
    shutil.copy(board / "protocol.yaml", tmp_path / "mine")
    return tmp_path / "mine", f"--beside={tmp_path / 'theirs.json'}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.pop("submissions"), "is no leaderboard.json with the scores"),
        (lambda c: c["submissions"][0].pop("about"), "KeyError: 'about'"),
        (lambda c: c["submissions"][0]["about"].update(name="\ud800"), "surrogates not allowed"),
        (lambda c: c["protocol"].pop("radii"), "missing 1 required positional argument: 'radii'"),
        (lambda c: c["protocol"].update(images=20.5), "images must be a whole number, got 20.5"),
    ],
)
def test_another_file_beside_is_one_line(change, said, board, content, tmp_path, capsys):
    change(content)
    args = published(content, board, tmp_path)
    (tmp_path / "mine/protocol.yaml").unlink()
    assert said in refused(capsys, "leaderboard", *args, "--allow-import=tests")


def test_odd_published_scores_stop_no_others(board, content, tmp_path, capsys):
    changes = [
        lambda one: one["scores"].pop("weights"),
        lambda one: one["scores"].update(weights=[1]),
        lambda one: one["scores"]["norms"].pop("l2"),
    ]
    for change, one in zip(changes, content["submissions"], strict=True):
        change(one)
    content["protocol"].pop("inferences")  # takes the default, as in protocol.yaml
    found = told(*published(content, board, tmp_path))
    assert [one["folder"] for one in found["submissions"]] == ["BAT_1"]
    out = capsys.readouterr().out
    assert "BAT_0: KeyError: 'weights'" in out and "Smoothed: KeyError: 'l2'" in out
    assert "BAT_1: TypeError: " in out


def test_published_scores_of_another_protocol_have_no_rank(board, content, tmp_path, capsys):
    content["protocol"]["passes"] = 7
    found = told(*published(content, board, tmp_path))
    assert [one["folder"] for one in found["submissions"]] == ["BAT_1"]
    out = capsys.readouterr().out
    assert "BAT_0, BAT_1, Smoothed: another protocol: passes is 7, not 60" in out


@pytest.fixture
def folder(board, tmp_path):
    """A copy of the board, to be changed."""
    return shutil.copytree(board, tmp_path / "board")


def forge(folder, change):
    """Change the scores of a submission."""
    scores = json.loads((folder / "scores.json").read_text())
    change(scores)
    (folder / "scores.json").write_text(json.dumps(scores))


def shift_weight(path, by):
    """Change a weight of a checkpoint."""
    checkpoint = torch.load(path, weights_only=False)
    next(v for v in checkpoint["state_dict"].values() if v.dim() == 2)[0, 0] += by
    torch.save(checkpoint, path)


def other_index(scores):
    scores["norms"]["l2"]["index"][0] = 1


FORGED = {
    "other_index": (other_index, "scores within l2 are not of the protocol's images"),
    "no_norm": (lambda s: s["norms"].pop("l2"), "KeyError: 'l2'"),
    "nan": (
        lambda s: s["norms"]["l2"]["images"].update(worst=[float("nan")] * 30),
        "worst within l2 must be 30 numbers in [0, 1]",
    ),
    "worst_alone": (
        lambda s: s["norms"]["l2"]["images"].update(worst=[1.0] * 30, usual=[0.0] * 30),
        "worst within l2 is above usual, one of its attacks",
    ),
    "certified": (lambda s: s.update(certified=7.0), "certified must be in [0, 1], got 7.0"),
    "infinite": (lambda s: s.update(prediction=float("inf")), "prediction must be in [0, 1e12)"),
    "surrogate": (
        lambda s: s["norms"]["l2"].update(findings=[["severe", "\ud800", ""]]),
        r"severe findings within l2: \ud800",
    ),
    "list": (lambda s: s["norms"].update(l2=[]), "TypeError"),
    "weights": (lambda s: s.update(weights=[1]), "other weights: the scores are not of"),
    "nan_unused": (lambda s: s["norms"]["l2"].update(more=float("nan")), "Out of range float"),
}
ABOUT = {
    "no_name": ({"seed": 0, "training": 40}, "submission.yaml has no name"),
    "training_text": ({"name": "t", "training": "many"}, "training must be a number of passes"),
    "name_list": ({"name": ["BAT"]}, "name must be of type str, got ['BAT']"),
    "training_nan": ({"name": "nan", "training": float("nan")}, "training must be a number"),
    "training_huge": (f"{{name: x, training: {'9' * 400}/1}}", "a value does not fit its tag"),
    "spaces": ({"name": "BAT ", "training": 40}, "name must be plain text without spaces around"),
    "misspelt": (
        {"name": "x", "sed": 1},
        "submission.yaml: there is no key 'sed', did you mean seed",
    ),
    "twice": ({"name": "BAT", "training": 40}, "BAT with the seed of BAT_0"),
    "renamed": ({"name": "New", "seed": 7, "training": 40}, "New with the weights of BAT_0"),
    "broken": (": [", "broken/submission.yaml"),
}


def test_no_submission_stops_the_others(folder, capsys):
    """Each has its reason in the table, whatever its files hold; a name is text on the page."""
    (folder / "linked").symlink_to(folder / "BAT_0")
    quits = shutil.copytree(folder / "Sees", folder / "quits")
    checkpoint = torch.load(quits / "last.ckpt", weights_only=False)
    checkpoint[RECIPE] = checkpoint[RECIPE].replace("SeesGradients", "Quits")
    torch.save(checkpoint, quits / "last.ckpt")
    (quits / "submission.yaml").write_text("{name: Quits, training: 40}")
    for name, (change, _) in FORGED.items():
        forge(shutil.copytree(folder / "BAT_0", folder / name), change)
        about = yaml.safe_dump({"name": name, "training": 40})
        (folder / name / "submission.yaml").write_text(about)
    for name, (about, _) in ABOUT.items():
        shutil.copytree(folder / "BAT_0", folder / name)
        text = about if isinstance(about, str) else yaml.safe_dump(about)
        (folder / name / "submission.yaml").write_text(text)
    shutil.copytree(folder / "BAT_0", folder / "no_json")
    (folder / "no_json/scores.json").write_text("{")
    shutil.copytree(folder / "BAT_0", folder / "pipe", ignore=lambda *_: ["last.ckpt"])
    os.mkfifo(folder / "pipe/last.ckpt")
    shutil.copytree(folder / "BAT_0", folder / "markup")
    (folder / "markup/scores.json").unlink()
    shift_weight(folder / "markup/last.ckpt", 0.001)
    markup = "<script>alert(1)</script> | \x1b[31m\n# x"
    (folder / "markup/submission.yaml").write_text(yaml.safe_dump({"name": markup, "training": 1}))
    for name in ("shape", "narrow"):
        (folder / name).mkdir()
        (folder / name / "submission.yaml").write_text("{name: x, training: 1}")
    shutil.copy(shipped_folder() / "zoo/digits_standard/checkpoints/last.ckpt", folder / "shape")
    narrow = torch.load(folder / "BAT_0/last.ckpt", weights_only=True)
    narrow["state_dict"] = {k: v[:2] if v.dim() else v for k, v in narrow["state_dict"].items()}
    torch.save(narrow, folder / "narrow/last.ckpt")
    shutil.copytree(folder / "BAT_0", folder / "bare", ignore=lambda *_: ["submission.yaml"])
    content = told(folder, "--evaluate")
    out = capsys.readouterr().out
    assert "shape: the network does not take the protocol's images, [C, H, W] = [3, 8, 8]" in out
    assert "narrow: the checkpoint is of another architecture than the model: " in out
    assert "is a submission of" in refused(capsys, "leaderboard", folder / "BAT_0")
    names = {row["defense"]: row for row in content["norms"]["l2"]}
    assert set(names) == {"BAT", "Smoothed", markup} and names["BAT"]["seeds"] == 2
    for name, (_, reason) in (FORGED | ABOUT).items():
        said = [line for line in out.splitlines() if line.startswith(f"{name}: ")]
        assert any(reason in line for line in said), name
    assert "pipe: last.ckpt is no file" in out and "quits: SystemExit: " in out
    assert "linked: linked is a link to what is elsewhere: give the files" in out
    assert "bare: a model without a submission.yaml, passed over" in out
    assert "no_json: scores.json is damaged" in out and "\x1b" not in out
    assert "<script>alert" not in (folder / "leaderboard.html").read_text()
    assert "<script>alert" not in (folder / "leaderboard.md").read_text()


def test_a_check_finds_what_is_cut_or_forged(folder, content, capsys):
    """Without noise the same images fall again: each is seen, not their mean alone."""
    forge(folder / "Sees", lambda s: [one.update(findings=[]) for one in s["norms"].values()])

    def forged(scores):
        found = scores["norms"]["linf"]["images"]
        for place in [place for place, score in enumerate(found["worst"]) if score < 0.9][:5]:
            found["worst"][place] = found["usual"][place] = 1.0

    forge(folder / "BAT_1", forged)
    forge(folder / "Smoothed", forged)  # few enough to pass for other draws
    for name in ("BAT_0", "Smoothed"):
        shutil.copytree(folder / name, folder / f"other {name}")
    shift_weight(folder / "other BAT_0/last.ckpt", 0.5)
    forge(folder / "other Smoothed", lambda s: s["protocol"]["radii"].update(linf=0.05))
    ranked = {row["defense"]: row for row in told(folder, "--check=30")["norms"]["l2"]}
    assert ranked.keys() == {"BAT", "Smoothed"} and ranked["BAT"]["seeds"] == 1
    (honest,) = (row for row in content["norms"]["l2"] if row["defense"] == "Smoothed")
    assert ranked["Smoothed"]["worst"] == pytest.approx(honest["worst"], abs=0.01)
    out = capsys.readouterr().out
    assert "BAT_0: images attacked again agree" in out and "BAT_0: worst of" not in out
    assert "Sees: severe findings of 30 images attacked again within linf: gradients_seen" in out
    assert "BAT_1: worst of 30 images attacked again" in out
    assert "other BAT_0: other weights: the scores are not of this model; delete scores" in out
    assert "Smoothed: another protocol: radii is {'linf': 0.05, 'l2': 0.1}, not" in out


def test_a_run_that_was_stopped_keeps_the_norms_that_had_ended(folder, monkeypatch):
    for name in ("BAT_1", "Smoothed", "Sees"):
        shutil.rmtree(folder / name)
    path, scored, attacked = folder / "BAT_0/scores.json", submissions.scored, []
    norms = json.loads(path.read_text())["norms"]
    path.unlink()

    def stopped(defense, protocol, threat, *rest, **options):
        attacked.append(threat.norm)
        if attacked == ["linf", "l2"]:
            os.kill(os.getpid(), signal.SIGTERM)
        return scored(defense, protocol, threat, *rest, **options)

    monkeypatch.setattr(submissions, "scored", stopped)
    assert exit_code("leaderboard", folder, "--evaluate", "--allow-import=tests") == 143
    told(folder, "--evaluate")
    assert attacked == ["linf", "l2", "l2"]
    assert json.loads(path.read_text())["norms"] == norms
    assert not (folder / ".scoring").exists()


def test_each_check_chooses_other_images(monkeypatch):
    """The default stream of torch begins alike in each process: one who knows it may forge."""
    seen = []

    def attacked(defense, protocol, threat, batches):
        seen.append(torch.cat([index for _, _, index in batches]).tolist())
        raise InterruptedError

    monkeypatch.setattr(submissions, "scored", attacked)
    index, protocol = torch.arange(100), submissions.Protocol("", {}, {"l2": 1.0}, 100)
    one = submissions.Submission(Path(), "x")
    one.scores = {"norms": {"l2": {"index": index.tolist()}}}
    plain = Single(TinyNet())
    for defense in (plain, plain, DENT(SmallCNN(4, 3, 4))):
        torch.manual_seed(0)
        with pytest.raises(InterruptedError):
            batches = [(torch.zeros(100, 1), index, index)]
            one._attack_again(defense, protocol, Threat("l2", 1.0), batches, 20)
    assert seen[0] != seen[1] and len(seen[0]) == 20
    assert len(seen[2]) == 100  # a round of fewer images would be another defense


def test_a_check_finds_a_defense_that_was_trained_on_the_images_of_the_protocol():
    part, y = torch.rand(80, 3, 8, 8), torch.arange(40) % 4
    protocol = submissions.Protocol("", {}, {"linf": 0.1}, 40, passes=60, steps=2)
    defense, threat = Single(TinyNet()), Threat("linf", 0.1)
    own, others = ([(part[at : at + 40], y, torch.arange(40))] for at in (0, 40))
    honest = submissions.scored(defense, protocol, threat, own, ("usual",))
    honest = {name: honest.per_image(name).tolist() for name in honest.names}
    for scores, said in ((honest, 0), (dict.fromkeys(("clean", "usual"), [1.0] * 40), 2)):
        one = submissions.Submission(Path(), "x")
        one.scores = {"norms": {"linf": {"images": scores}}}
        one._attack_others(defense, protocol, threat, others)
        assert len(one.reasons) == said


class Noisy(TinyNet):
    """A network that draws noise."""

    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


def test_one_network_that_draws_noise_is_attacked_as_a_random_defense():
    x, y = torch.rand(8, 3, 8, 8), torch.arange(8) % 4
    protocol = submissions.Protocol("", {}, {"linf": 0.1}, 8, passes=60, steps=2)
    for net, adaptive in ((TinyNet(), set()), (Noisy(), {"linear_aggmo"})):
        defense, batches = Single(net), [(x, y, torch.arange(8))]
        found = submissions.scored(defense, protocol, Threat("linf", 0.1), batches)
        assert {*found.attacks} == {"usual", "auto"} | adaptive


def test_timing_a_prediction_changes_no_buffer():
    """BatchNorm in training mode counts batches: the scores would be of another model."""
    net = torch.nn.Sequential(torch.nn.BatchNorm2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 2))
    defense = Single(net.train())
    assert submissions.relative_time(defense, torch.rand(8, 1, 2, 2)) > 0
    assert net[0].num_batches_tracked == 0


WIDE, MANY = PROTOCOL | {"radii": {"linf": "wide"}}, PROTOCOL | {"images": 34}


@pytest.mark.parametrize("content", [{"tittle": "x"}, {"title": "x"}, WIDE, MANY])
def test_a_wrong_protocol_is_one_line(content, tmp_path, capsys):
    (tmp_path / "protocol.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "one").mkdir()
    (tmp_path / "one/submission.yaml").write_text("name: x")
    refused(capsys, "leaderboard", tmp_path)


def crossed(generator, means, trainings=5, images=60):
    """Scores of defenses that differ by training and by image, some images hard for all."""
    hard = generator.normal(0, 0.8, images)
    found = []
    for mean in means:
        own = generator.normal(0, 0.25, (trainings, 1)) + generator.normal(0, 0.5, images)
        chance = 1 / (1 + np.exp(-(mean + own + hard)))
        found.append((generator.random((trainings, images)) < chance).astype(float))
    return found


def test_rank_intervals_hold_the_true_ranks():
    """With a probability of 95 % for each defense, also where some are equal."""
    means, times = (-1.0, 0.0, 0.0, 0.1, 1.5), 200
    generator, missed = np.random.default_rng(0), np.zeros(len(means))
    for _ in range(times):
        for place, (best, worst) in enumerate(ranks(crossed(generator, means))):
            above = sum(mean > means[place] for mean in means)
            below = sum(mean < means[place] for mean in means)
            missed[place] += best > above + 1 or worst < len(means) - below
    assert missed.max() <= 0.05 * times + 2 * np.sqrt(0.05 * 0.95 * times)
    best, worst = ranks(crossed(generator, means))[0]
    assert best == worst == 5  # and tell what is far apart


def test_ranks_do_not_tell_a_network_from_an_ensemble_of_its_accuracy():
    """The t test alone separates 36 % of them: most images have the same difference."""
    draws, same = np.random.default_rng(3).random((100, 1, 100)) < 0.99, np.full((1, 100), 0.99)
    told_apart = [ranks([network.astype(float), same]) != [(1, 2), (1, 2)] for network in draws]
    assert np.mean(told_apart) <= 0.05


def test_one_training_alone():
    generator = np.random.default_rng(1)
    first, second = crossed(generator, (0.0, 0.0), trainings=1)
    gaps = (first - second)[0]
    found = difference(first, second)
    assert found.mean == pytest.approx(gaps.mean())
    assert found.error == pytest.approx(gaps.std(ddof=1) / np.sqrt(len(gaps)))
    assert ranks([first]) == [(1, 1)] and ranks([first, first]) == [(1, 2), (1, 2)]


def test_agreement_between_trainings(monkeypatch):
    monkeypatch.setattr("lightning_rob.commands.leaderboard.ranks.RESAMPLES", 100)
    generator = np.random.default_rng(2)
    apart = crossed(generator, (-3.0, -1.5, 0.0, 1.5, 3.0))
    tau, low, high = agreement(apart)
    assert tau > 0.95 and low <= tau <= high
    assert agreement(crossed(generator, [0.0] * 8))[0] < 0.5
    assert np.isnan(agreement(apart[:2])[0]) and np.isnan(agreement([s[:1] for s in apart])[0])
