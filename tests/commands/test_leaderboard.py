"""A leaderboard ranks what follows its protocol, and says why others have no rank."""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml

from lightning_rob.commands.leaderboard.ranks import agreement, difference, ranks
from tests.tiny import TinyNet, fit, pgd, run

PROTOCOL = {
    "title": "Blobs",
    "data": {"class_path": "tests.tiny.Blobs", "init_args": {}},
    "radii": {"linf": 0.1, "l2": 0.1},
    "images": 30,
    "passes": 60,
    "power": 5,
    "certified": 200,
    "training": 100,
}


class SeesGradients(TinyNet):
    """A network that shows another face where it is asked for gradients."""

    def forward(self, x):
        return super().forward(x.flip(1) if x.requires_grad else x)


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """A scored leaderboard: BAT of two seeds, a smoothed network, one that detects gradients."""
    folder = tmp_path_factory.mktemp("board")
    (folder / "protocol.yaml").write_text(yaml.safe_dump(PROTOCOL, sort_keys=False))
    net = {"class_path": "tests.tiny.TinyNet"}
    alone = {"class_path": "AdversarialTraining", "init_args": {"net": net}}
    smoothed = {"class_path": "Smoothing", "init_args": {"sigma": 0.1, "draws": 20}}
    sees = {"net": {"class_path": f"{__name__}.SeesGradients"}}
    models = {
        "BAT 0": {},
        "BAT 1": {"seed_everything": 1},
        "Smoothed": {"model": alone | {"init_args": {"net": net, "defense": smoothed}}},
        "Sees": {"model": alone | {"init_args": sees | {"attack": pgd()}}},
    }
    for name, changes in models.items():
        own = folder / name.replace(" ", "_")
        own.mkdir()
        monitor = {"model__init_args__monitor": None} if "BAT" in name else {}
        shutil.move(fit(own, **{"trainer__max_epochs": 4, **changes}, callbacks=(), **monitor), own)
        about = {"name": name.split()[0], "seed": int("1" in name), "training": 40}
        (own / "submission.yaml").write_text(yaml.safe_dump(about))
    run("leaderboard", folder, "--evaluate", "--allow-import=tests")
    return folder


def told(folder, *args):
    run("leaderboard", folder, *args, "--allow-import=tests")
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
    assert "Sees: severe findings within linf" in out
    page = (board / "leaderboard.html").read_text()
    assert "Without a rank" in page and "<script>" in page


def test_planted_submissions_have_no_rank(board, tmp_path, capsys):
    folder = tmp_path / "board"
    shutil.copytree(board, folder)
    checkpoint = torch.load(folder / "BAT_0/last.ckpt", weights_only=False)
    next(v for v in checkpoint["state_dict"].values() if v.dim() == 2)[0, 0] += 0.5
    torch.save(checkpoint, folder / "BAT_0/last.ckpt")
    path = folder / "Smoothed/scores.json"
    scores = json.loads(path.read_text())
    scores["protocol"]["radii"]["linf"] = 0.05
    path.write_text(json.dumps(scores))
    path = folder / "BAT_1/scores.json"
    scores = json.loads(path.read_text())
    images = scores["norms"]["linf"]["images"]
    images["worst"] = [1.0] * len(images["worst"])
    path.write_text(json.dumps(scores))
    content = told(folder, "--check=20")
    out = capsys.readouterr().out
    assert content["norms"]["linf"] == []
    assert "BAT_0: other weights: the scores are not of this model" in out
    assert "Smoothed: another protocol: radii is {'linf': 0.05, 'l2': 0.1}, not" in out
    assert "BAT_1: worst of 20 images attacked again: 100.0% of the scores for" in out


def test_a_true_submission_passes_its_check(board):
    assert {row["defense"] for row in told(board, "--check=20")["norms"]["l2"]} == {
        "BAT",
        "Smoothed",
    }


@pytest.mark.parametrize("content", [{"tittle": "x"}, ["title"]])
def test_unknown_keys_are_named(content, tmp_path):
    (tmp_path / "protocol.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit):
        run("leaderboard", tmp_path)


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


def test_one_training_alone():
    generator = np.random.default_rng(1)
    first, second = crossed(generator, (0.0, 0.0), trainings=1)
    gaps = (first - second)[0]
    found = difference(first, second)
    assert found.mean == pytest.approx(gaps.mean())
    assert found.error == pytest.approx(gaps.std(ddof=1) / np.sqrt(len(gaps)))
    assert ranks([first]) == [(1, 1)]
    assert ranks([first, first]) == [(1, 2), (1, 2)]


def test_agreement_between_trainings():
    generator = np.random.default_rng(2)
    apart = crossed(generator, (-3.0, -1.5, 0.0, 1.5, 3.0))
    tau, low, high = agreement(apart)
    assert tau > 0.95 and low <= tau <= high
    assert agreement(crossed(generator, [0.0] * 8))[0] < 0.5
    assert np.isnan(agreement(apart[:2])[0]) and np.isnan(agreement([s[:1] for s in apart])[0])
