"""Attackers who know the draws that will predict, on linear defenses with exact answers."""

import json

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_rob import (
    PGD,
    Ensemble,
    Mixture,
    RandomTransforms,
    RobustEval,
    Single,
    Threat,
    TransformEnsemble,
    evaluate,
)
from lightning_rob.attacks import Square, SurrogateTransforms
from lightning_rob.defenses import Defense
from lightning_rob.defenses.known_noise import KnownNoise, drawn_parts
from lightning_rob.evaluation.evaluator import Evaluator
from lightning_rob.evaluation.protocol import PREDICT
from lightning_rob.randomness import Streams, normal
from lightning_rob.rules import majority, random_member
from tests.attacks.common import Hyperplane
from tests.schema import checked

EPS = 0.1
THREAT = Threat("linf", EPS)
WEAK = {"pgd": PGD(THREAT, 1, 1e-6, random_start=False)}


class Noisy(Defense):
    """A linear classifier whose margin has fresh noise for each image and draw."""

    def __init__(self, net, draws=3):
        super().__init__(torch.full((draws,), 1 / draws), majority)
        self.net = net

    def noise(self, x, generator):
        return 0.3 * normal(x, len(self.weights), generator=generator).T

    def logits(self, x, generator=None):
        z = self.net.margin(x) + self.noise(x, generator)
        return torch.stack([-z, z], -1)


NET = Hyperplane(torch.tensor([0.5, -0.5, 0.4, 0.2]))


def images(count):
    x = torch.rand((count, 1, 2, 2), generator=torch.Generator().manual_seed(0))
    x = 0.25 + 0.5 * x  # no pixel meets a bound within the ball
    return x, torch.ones(count).long()


def test_the_draws_that_predict_are_attacked():
    """Exactly: with noise known, the vote of a linear classifier has a distance."""
    x, y = images(150)  # in groups and chunks
    defense = Noisy(NET)
    found = evaluate(defense, WEAK, [(x, y)], known_noise=True, checks=False, progress=False)
    groups = [torch.arange(128), torch.arange(128, 150)]
    drawn = [defense.noise(x[g], Streams.from_index(g, 0, 0, PREDICT)) for g in groups]
    margins = NET.margin(x) + torch.cat(drawn, 1)
    left = (margins - EPS * NET.w.abs().sum() > 0).float().mean(0) > 0.5
    assert torch.equal(found.rows.known_noise, left.double())
    known = found.known_noise
    assert known.accuracy == float(left.double().mean()) < found.accuracy("pgd") - 0.1
    assert known.n == 150 and known.interval[0] < known.accuracy < known.interval[1]
    record = checked(json.dumps(found.measurement("worst").record()))
    assert record["known_noise"]["accuracy"] == known.accuracy
    assert "known noise" in found.table()


def test_images_without_noise_count_too():
    """They come first, in a group of their own, where nothing is random yet."""

    class OnBright(Noisy):
        def noise(self, x, generator):
            return super().noise(x, generator) * (x.flatten(1).mean(1) > 0.5)

    x, y = images(40)
    x = x[x.flatten(1).mean(1).argsort()]
    found = evaluate(OnBright(NET), WEAK, [(x, y)], known_noise=True, group_size=10, progress=False)
    assert found.rows.known_noise.isnan().any() and found.known_noise.n == 40
    assert found.known_noise.accuracy <= found.accuracy("pgd")


def test_within_no_radius_it_is_the_accuracy_of_the_draws():
    still = {"pgd": WEAK["pgd"].rescaled(0.0)}
    found = evaluate(Noisy(NET), still, [images(20)], known_noise=True, progress=False)
    assert found.known_noise.accuracy == found.accuracy("clean") < 1


@pytest.mark.parametrize(
    "defense",
    [
        TransformEnsemble([NET, NET], ["rotate_90", "noise_gaussian"], random_member),
        RandomTransforms(NET, {"GaussianNoise": {"alpha": 0.3}}, 1, 4, random_member).eval(),
    ],
)
def test_a_member_behind_a_random_transformation_is_drawn(defense):
    found = evaluate(defense, WEAK, [images(8)], known_noise=True, checks=False, progress=False)
    assert found.known_noise.accuracy <= found.accuracy("pgd") + 1e-6


def test_the_member_that_predicts_is_attacked():
    others = torch.tensor([[-0.3, 0.6, 0.1, 0.5], [0.1, 0.1, 0.9, -0.9]])
    nets, shares = [NET, *map(Hyperplane, others)], [0.5, 0.3, 0.2]
    x, y = images(40)
    alone = [(net.margin(x) > EPS * net.w.abs().sum()).double() for net in nets]
    expected = sum(share * right for share, right in zip(shares, alone, strict=True))
    flat, nested = Ensemble(nets, shares), Mixture([Single(net) for net in nets], shares)
    for defense in (flat, nested, Mixture([flat])):
        assert [round(share, 6) for share, _ in drawn_parts(defense)] == shares
        found = evaluate(defense, WEAK, [(x, y)], known_noise=True, checks=False, progress=False)
        assert torch.allclose(found.rows.known_noise, expected, atol=1e-6)
        assert found.known_noise.accuracy <= found.accuracy("worst") + 1e-6


def test_a_surrogate_and_a_part_of_the_images_keep_the_draws():
    kinds = {"GaussianNoise": {"alpha": 0.3}, "UniformNoise": {"alpha": 0.3}}
    defense = RandomTransforms(NET, kinds, 2, 4).eval()
    x, _ = images(6)
    noise = Streams.from_index(torch.arange(6), 3)
    exact = defense.logits(x, Streams.from_index(torch.arange(6), 3))
    known = KnownNoise(defense, noise)
    others = Streams.from_index(torch.arange(6), 9)
    with SurrogateTransforms(shared_order=True)(known):
        assert torch.equal(known.logits(x, others), exact)
        assert torch.equal(known.sample_logits(x, others, 2)[0], exact)
        rows = torch.tensor([4, 1])
        assert torch.equal(known.logits(x[rows], others[rows]), exact[:, rows])
    assert not torch.equal(defense.logits(x, others), exact)
    square = Square(THREAT, 20)  # it drops the images that it has fooled
    assert square(known, *images(6), Streams.from_index(torch.arange(6), 1)).shape == x.shape


def test_the_callback_logs_it():
    class Module(LightningModule):
        defense = Noisy(NET)

        def test_step(self, batch, batch_idx):
            pass

    loader = DataLoader(TensorDataset(*images(20)), 8)
    callback = RobustEval(WEAK, known_noise=True, inferences=2)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = Trainer(accelerator="cpu", callbacks=[callback], **quiet)
    (logged,) = trainer.test(Module(), loader, verbose=False)
    known = callback.results[-1].details["known_noise"]
    assert logged["test/robust/known_noise"] == pytest.approx(known["accuracy"])
    assert known["accuracy"] == callback.result.known_noise.accuracy < logged["test/robust/pgd"]


def test_where_there_is_no_noise_to_know():
    x, y = images(8)
    options = {"checks": False, "progress": False}
    for defense, asked in ((Single(NET), True), (Noisy(NET), False)):
        found = evaluate(defense, WEAK, [(x, y)], known_noise=asked, **options)
        with pytest.raises(ValueError, match="by known_noise=True"):
            _ = found.known_noise
        assert "known noise" not in found.table()
    with pytest.raises(ValueError, match="no attack can be called 'known_noise'"):
        evaluate(Single(NET), {"known_noise": WEAK["pgd"]}, [(x, y)], **options)


class Killed(Exception):
    pass


def test_it_resumes(tmp_path, monkeypatch):
    x, y = images(20)
    batches = [(x, y)]
    options = {"checks": False, "progress": False, "known_noise": True, "group_size": 10}
    whole = evaluate(Noisy(NET), WEAK, batches, **options)
    count, score = [], Evaluator.score

    def once(self, *args):
        if count:
            raise Killed
        count.append(1)
        score(self, *args)

    monkeypatch.setattr(Evaluator, "score", once)
    with pytest.raises(Killed):
        evaluate(Noisy(NET), WEAK, batches, resume=tmp_path, **options)
    monkeypatch.setattr(Evaluator, "score", score)
    attacked = []
    monkeypatch.setattr(
        Evaluator,
        "_with_known_noise",
        lambda self, *a, own=Evaluator._with_known_noise: attacked.append(1) or own(self, *a),
    )
    again = evaluate(Noisy(NET), WEAK, batches, resume=tmp_path, **options)
    assert attacked == [1]  # of the second group only
    assert torch.equal(again.rows.known_noise, whole.rows.known_noise)
