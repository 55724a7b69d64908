"""`evaluate` from a script: the same scores as `RobustEval`, any batches, resumption, bad input."""

from dataclasses import replace
from weakref import WeakKeyDictionary

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_rob import PGD, Ensemble, RobustEval, Single, Strongest, Threat, evaluate
from lightning_rob.attacks import Attack, MinimalNorm, NoAttack, RandomStart
from lightning_rob.defenses import DENT
from lightning_rob.evaluation import EvaluationResult, RoundProtocol
from lightning_rob.evaluation.results import worst_measurement, worst_over
from lightning_rob.evaluation.store import PerImageRows
from lightning_rob.metrics import paired, wilson
from lightning_rob.modules import AdversarialTraining
from lightning_rob.nets import SmallCNN
from tests.attacks.test_smallest_norm import plane
from tests.callbacks.test_any_module import trainer
from tests.tiny import Blobs, TinyNet

THREAT = Threat("linf", 16 / 255)
ATTACKS = {"weak": PGD(THREAT, 1, 4 / 255), "pgd": PGD(THREAT, 3, 8 / 255)}


class Centering(nn.Module):
    """Subtract the mean from the caller's images."""

    def forward(self, x):
        return x.sub_(0.5)


def one_logit():
    return nn.Sequential(nn.Flatten(), nn.Linear(X[0].numel(), 1))


class OneLogit(Single):
    """A defense that computes its logits itself."""

    def logits(self, x, generator=None):
        return self.net(x).unsqueeze(0)


STATE = WeakKeyDictionary()


class Stopping(Attack):
    """Counts its batches, and stops at one; equal to others of its class for a cache."""

    results = ("its own",)  # an attack of others may have any attribute

    def __init__(self, fail_at=None):
        self.threat = THREAT
        STATE[self] = [fail_at, []]

    @property
    def sizes(self):
        return STATE[self][1]

    def perturb(self, defense, x, y, generator):
        fail_at, sizes = STATE[self]
        if len(sizes) == fail_at:
            raise KeyboardInterrupt
        sizes.append(len(x))
        return x.clone()


def data(count=50):
    torch.manual_seed(1)
    return TensorDataset(torch.rand(count, 3, 8, 8), torch.randint(4, (count,)))


X, Y = data(5).tensors


def net(seed=0):
    torch.manual_seed(seed)
    return TinyNet().eval()


def test_numbers_follow_from_the_scores():
    found = evaluate(net(), ATTACKS, DataLoader(data(), batch_size=50), progress=False)
    scores = found.scores[..., 0]
    assert found.names == ["clean", "weak", "pgd"]
    assert found.accuracy("pgd") == pytest.approx(scores[:, 2].mean().item())
    assert found.accuracy("worst") == pytest.approx(scores.amin(1).mean().item())
    assert found.interval("pgd") == pytest.approx(wilson(found.accuracy("pgd"), 50))
    assert found.compare("clean", "pgd") == paired(scores[:, 0], scores[:, 2])
    with pytest.raises(KeyError, match="choose from clean, weak, pgd, worst"):
        found.accuracy("arc")


def test_batches_and_order_change_nothing():
    images = data()
    indexed = TensorDataset(*images.tensors, torch.arange(50))
    expected = evaluate(net(), ATTACKS, DataLoader(images, 50), group_size=16, progress=False)
    x, y = images.tensors
    chunks = [(x[i : i + 9], y[i : i + 9]) for i in range(0, 50, 9)]
    for batches in (
        DataLoader(images, batch_size=7),
        DataLoader(indexed, batch_size=7, shuffle=True),
        chunks,
        iter(chunks),
    ):
        found = evaluate(net(), ATTACKS, batches, group_size=16, progress=False)
        assert torch.equal(found.index, expected.index)
        assert torch.equal(found.scores, expected.scores)


def test_one_word_for_attacks():
    images = DataLoader(data(), batch_size=50)
    options = {"eps": "8/255", "progress": False}
    found = evaluate(net(), "pgd", images, **options)
    named = {"pgd": PGD(Threat("linf", "8/255"), 20, 2 / 255)}
    assert torch.equal(found.scores, evaluate(net(), named, images, progress=False).scores)
    auto = evaluate(net(), "auto", images, norm="l2", max_images=4, **options)
    assert {str(attack.threat) for attack in auto.attacks.values()} == {"l2 8/255"}
    assert auto.names == ["clean", "auto"]
    ensemble = Ensemble([net(), net()])
    assert evaluate(ensemble, "climb", images, max_images=4, **options).names == ["clean", "climb"]
    adapting = DENT(SmallCNN(4, 3, 4))  # whose suite has no PGD of this name
    assert evaluate(adapting, "pgd", images, max_images=4, **options).names == ["clean", "pgd"]
    sparse = {"norm": "l1", "eps": 50.0, "max_images": 4, "progress": False}  # fooled at once
    found = evaluate(net(), "suite", images, **sparse)
    assert {str(attack.threat) for attack in found.attacks.values()} == {"l1 50"}
    assert found.accuracy("worst") == 0
    with pytest.raises(ValueError, match="by one word are for linf, l2 and l1, got norm 'l3'"):
        evaluate(net(), "pgd", images, **sparse | {"norm": "l3"})
    with pytest.raises(ValueError, match=r"l2 128, holds every image: did you mean 128/255"):
        evaluate(net(), "pgd", images, eps=128, norm=2)
    for attacks, eps, message in (
        ("pdg", 0.1, "no attack on a Single is called 'pdg', did you mean pgd?"),
        ("climb", 0.1, "is called 'climb': give a mapping, or one of suite, auto, .*square"),
        ("pgd", 8, "the ball of 'pgd', linf 8, holds every image: did you mean 8/255?"),
        ("pgd", None, "the word 'pgd' needs a radius, such as eps=8/255"),
        (ATTACKS, 0.1, "each attack of a mapping has its own threat"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(net(), attacks, images, eps=eps)
    with pytest.raises(
        TypeError, match=r"got a DataLoader: the order is evaluate\(net, attacks, batches\)"
    ):
        evaluate(net(), images, "pgd", eps=0.1)


def test_a_part_of_the_images_is_chosen_by_the_seed():
    loader = DataLoader(data(), batch_size=7)
    first, again, other = (
        evaluate(net(), ATTACKS, loader, max_images=10, seed=seed, progress=False).index.tolist()
        for seed in (0, 0, 1)
    )
    assert len(first) == 10
    assert first == again != other


class Noise(nn.Module):
    def forward(self, x):
        return x + 0.5 * torch.randn_like(x)


def test_resubmission_of_an_ensemble_is_exact():
    defense = Ensemble([net(0), net(1)], [0.8, 0.2])
    found = evaluate(defense, ATTACKS, DataLoader(data(), 50), progress=False)
    assert found.covers == "images"
    p = found.per_image("pgd")
    assert found.resubmitted("pgd", 1).accuracy == pytest.approx(float(p.mean()))
    assert found.resubmitted("pgd", 3).accuracy == pytest.approx(float((p**3).mean()))


def test_resubmission_of_a_random_defense_is_unbiased():
    torch.manual_seed(0)
    p = torch.rand(2000, dtype=torch.float64)
    scores = (torch.rand(2000, 1, 6, dtype=torch.float64) < p[:, None, None]).double()
    rows = PerImageRows(torch.arange(2000), None, scores, None, None, None)
    found = EvaluationResult({}, rows, random=True)
    for times in (1, 2, 4):
        estimate = found.resubmitted("clean", times).accuracy
        assert estimate == pytest.approx(float((p**times).mean()), abs=0.03)
    with pytest.raises(ValueError, match=r"7 submissions need .* inferences=7 or more"):
        found.resubmitted("clean", 7)
    halved = EvaluationResult({}, replace(rows, scores=scores / 2), random=True)
    with pytest.raises(ValueError, match="or more and repeats=1"):
        halved.resubmitted("clean", 2)
    averaged = replace(halved, random=False, details={"repeats": 2})
    with pytest.raises(ValueError, match="repeats=1"):
        averaged.resubmitted("clean", 2)


def test_the_worst_case_is_over_the_evaluations_by_the_last_protocol():
    """Of a defense that adapts, each protocol is another attacker; to others it makes no odds."""
    found, still = [], []
    for protocol, score in (("sees its state", 0.1), ("rehearses", 0.6), ("rehearses", 0.4)):
        zeros, scores = torch.zeros(5, 1).long(), torch.full((5, 1, 1), score)
        rows = PerImageRows(torch.arange(5), zeros[:, 0], scores, zeros, None, None)
        found.append(EvaluationResult({}, rows, joint=True, details={"protocol": protocol}))
        still.append(EvaluationResult({}, rows, details={"protocol": protocol}))
    assert float(worst_over(still).scores.mean()) == pytest.approx(0.1)
    worst = worst_over(found)
    assert float(worst.scores.mean()) == pytest.approx(0.4)
    assert worst_measurement(found).accuracy == pytest.approx(0.4)


def test_distances_of_one_run_are_the_accuracies_of_all_radii():
    plane_net, x, y, distance = plane("linf")
    x, y, distance = x.float(), y.clone(), distance.float()
    y[:5] = 1 - y[:5]
    threat = Threat("linf", distance[5:].median().item())
    attacks = {"search": MinimalNorm(PGD(threat, 10, threat.eps / 4), 12)}
    found = evaluate(plane_net.float(), attacks, [(x, y)], progress=False)
    expected = distance.masked_fill(distance > threat.eps, torch.inf)
    expected[:5] = 0
    moved = found.distances("search").float()
    row = found.measurement("search")
    assert row.details["median_distance"] == float(found.distances("search").median())
    assert f" {row.details['median_distance']:.4f} " in found.table()
    assert "median_distance" not in found.measurement("clean").details
    torch.testing.assert_close(moved, expected, rtol=0, atol=threat.eps / 2**10)
    for radius in (0.0, threat.eps / 2, threat.eps):
        within = (moved > radius).float().mean().item()
        assert within == pytest.approx(((distance > radius)[5:].sum() / 40).item(), abs=0.03)
    with pytest.raises(KeyError, match="no attack is called 'clean': choose from search"):
        found.distances("clean")
    with pytest.raises(ValueError, match="a defense that predicts the same each time"):
        replace(found, random=True).distances("search")


def test_images_on_the_surface_are_fooled_within_eps():
    threat = Threat("linf", 0.05)  # sizes round to more
    attacks = {"pgd": PGD(threat, 3, 0.05)}
    found = evaluate(net(), attacks, [data().tensors], progress=False)
    assert 0 < found.accuracy("pgd") < found.accuracy("clean")
    assert (found.distances("pgd") > 0.05).double().mean() == found.accuracy("pgd")
    with pytest.raises(ValueError, match=r"one run \(repeats=1\)"):
        evaluate(net(), attacks, [(X, Y)], repeats=2, progress=False).distances("pgd")


def test_an_adapting_defense_is_attacked_in_rounds():
    torch.manual_seed(0)
    defense, attack = DENT(SmallCNN(4, 3, 4)), Stopping()
    loader = DataLoader(data(), batch_size=20)
    found = evaluate(defense, {"count": attack}, loader, progress=False)
    assert attack.sizes == [20, 20, 10]
    assert found.joint
    attack = Stopping()
    rounds = RoundProtocol("by_label", images=15)
    again = evaluate(defense, {"count": attack}, loader, protocol=rounds, progress=False)
    assert attack.sizes == [15, 15, 15, 5]
    assert torch.equal(again.index, torch.arange(50))


def test_a_killed_evaluation_resumes_at_the_attack_it_had_reached(tmp_path):
    batches, first = DataLoader(data(), 50), Stopping()
    settings = {"group_size": 10, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        evaluate(net(), {"a": first, "b": Stopping(3)}, batches, resume=tmp_path, **settings)
    assert len(first.sizes) == 4
    assert list(tmp_path.glob("*/*.jsonl"))
    resumed = {"a": Stopping(), "b": Stopping()}
    found = evaluate(net(), resumed, batches, resume=tmp_path, **settings)
    assert [len(attack.sizes) for attack in resumed.values()] == [1, 2]
    expected = evaluate(net(), {"a": Stopping(), "b": Stopping()}, batches, **settings)
    assert torch.equal(found.scores, expected.scores)
    assert not list(tmp_path.glob("*/*.jsonl"))


def test_nothing_is_left_behind():
    model, batches = net().train(), DataLoader(data(), 50)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.random.get_rng_state()
    with torch.inference_mode():
        evaluate(model, {"a": Strongest(tuple(ATTACKS.values()))}, batches, progress=False)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.training
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"attacks": {}}, ValueError, "at least one attack"),
        ({"private_draws": 2}, ValueError, "private_draws is for defenses that adapt, Single"),
        ({"batches": [torch.rand(5, 3, 8, 8)]}, TypeError, r"batches must be \(images, labels\)"),
        ({"batches": data(5)}, TypeError, r"data set: give DataLoader\(TensorDataset"),
        *(
            ({"model": nn.Conv2d(1, 4, 3), "batches": [(x, Y)]}, ValueError, message)
            for x, message in (
                (X, r"shape \[B, 3, 8, 8\]: Given"),
                (X[:, 0], r"images must be \[B, C"),
            )
        ),
        ({"batches": [(X[..., 0], Y)]}, ValueError, r"of shape \[B, 3, 8\]: mat1"),
        ({"batches": [(255 * X, Y)]}, ValueError, r"images must lie in \[0.0, 1.0\]"),
        ({"attacks": {"a": PGD(Threat("linf", 8), 1, 2)}}, ValueError, "did you mean 8/255"),
        ({"attacks": {"a": PGD(Threat(3), 1, 2)}}, ValueError, "'a': PGD is for linf, l2 and l1"),
        ({"attacks": ["pgd"]}, TypeError, 'got a list: give {"pgd": PGD'),
        ({"attacks": ATTACKS["weak"]}, TypeError, 'got a PGD: give {"pgd": PGD'),
        ({"batches": Blobs(), "attacks": "pgd"}, TypeError, "data module Blobs: give a loader of"),
        ({"max_images": "20"}, ValueError, "max_images must be a number, got '20'"),
        ({"attacks": {"a": PGD}}, TypeError, "attack 'a' must be such as PGD"),
        ({"batches": [(X, Y + 3)]}, ValueError, "labels must be 0 … 3 for 4 classes"),
        *(
            ({"model": model, "batches": [(X, 0 * Y)]}, ValueError, "two logits or more, got 1")
            for model in (one_logit(), OneLogit(one_logit()))
        ),
        ({"model": nn.Sequential(Centering(), net())}, ValueError, "changes its input"),
        ({"attacks": ATTACKS | {"pgd_size": ATTACKS["weak"]}}, ValueError, "called 'pgd_size'"),
        *(
            ({"model": Single(net(), rule)}, ValueError, "return probabilities that sum to one")
            for rule in (lambda z, _: z.mean(0), lambda z, _: z.softmax(-1).sum(0) * 2)
        ),
        ({"batches": [(X, Y, torch.arange(5) % 3)]}, ValueError, "two different images have the"),
    ],
)
def test_bad_input(change, error, message):
    given = {"model": net(), "attacks": ATTACKS, "batches": DataLoader(data(5), 5)} | change
    with pytest.raises(error, match=message):
        evaluate(**given, progress=False)


class Inverting(TinyNet):
    def forward(self, x):
        return super().forward(1 - x)


def of_other_code():
    other = net()
    other.__class__ = Inverting
    return other


@pytest.mark.parametrize(
    "change",
    [
        {"model": net(1)},
        {"model": of_other_code()},
        {"attacks": {"weak": ATTACKS["pgd"]}},
        {"seed": 1},
        {"repeats": 2},
        {"protocol": RoundProtocol(images=10)},
    ],
    ids=["weights", "code", "attack", "seed", "repeats", "rounds"],
)
def test_another_evaluation_does_not_resume(tmp_path, change):
    weak = {"weak": ATTACKS["weak"]}
    given = {"model": net(), "attacks": weak, "batches": DataLoader(data(), 50)}
    settings = {"group_size": 10, "progress": False, "resume": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        evaluate(**given | {"attacks": given["attacks"] | {"a": Stopping(3)}}, **settings)
    given |= change
    last = Stopping()
    evaluate(**given | {"attacks": given["attacks"] | {"a": last}}, **settings)
    assert len(last.sizes) == 5 * change.get("repeats", 1)


def test_a_shorter_round_does_not_resume_a_longer_one(tmp_path):
    def dent():
        torch.manual_seed(0)
        return DENT(SmallCNN(4, 3, 4))

    def played(images, *attacks):
        batches, names = DataLoader(images, 20), dict(zip("ab", attacks, strict=True))
        return evaluate(dent(), names, batches, progress=False, resume=tmp_path)

    with pytest.raises(KeyboardInterrupt):
        played(data(), Stopping(), Stopping(1))  # the second round is known under one attack
    resumed = Stopping(), Stopping()
    played(Subset(data(), range(23)), *resumed)
    assert [attack.sizes for attack in resumed] == [[3], [3]]


def test_a_loader_may_reuse_its_buffers():
    x, y = data().tensors

    def batches():
        buffer = torch.empty(10, 3, 8, 8)
        for i in range(0, 50, 10):
            yield buffer.copy_(x[i : i + 10]), y[i : i + 10]

    found = evaluate(net(), ATTACKS, batches(), progress=False)
    expected = evaluate(net(), ATTACKS, DataLoader(data(), 50), progress=False)
    assert torch.equal(found.scores, expected.scores)


def test_a_callback_that_had_finished_before_a_crash_attacks_no_more(tmp_path):
    class Crash(Callback):
        def on_test_epoch_end(self, *_):
            raise OSError

    module, blobs = AdversarialTraining(TinyNet), Blobs(test_size=40)

    def tested(attack, *others):
        run = trainer(RobustEval({"a": attack}), *others, logger=CSVLogger(tmp_path))
        run.test(module, blobs, verbose=False)

    with pytest.raises(OSError):
        tested(Stopping(), Crash())
    again = Stopping()
    tested(again)
    assert not again.sizes
    assert not list(tmp_path.rglob("unfinished/*"))


def test_worst_is_over_all_callbacks_that_evaluate_in_an_epoch():
    """Also where they leave out epochs, and in a test after the fit."""
    weak = RobustEval({"weak": ATTACKS["weak"]}, every_n_epochs=2)
    strong = RobustEval({"pgd": ATTACKS["pgd"]})
    callbacks = [weak, strong]
    run = trainer(*callbacks, max_epochs=3)
    module, blobs = AdversarialTraining(TinyNet), Blobs(test_size=40)
    run.fit(module, blobs)
    for _ in range(2):
        logged = run.test(module, blobs, verbose=False)[0]
        (worst,) = [r for c in callbacks for r in c.results if r.name == "worst"]
        assert worst.details["over"] == ["weak", "pgd"]
        assert "images" not in worst.details  # both have all
        assert [r.name for c in callbacks for r in c.results] == ["clean", "weak", "pgd", "worst"]
        assert logged["test/robust/worst"] <= logged["test/robust/pgd"]
    trainer(strong).test(module, blobs, verbose=False)
    assert [r.name for r in strong.results] == ["clean", "pgd", "worst"]


def test_each_repeat_attack_and_inference_has_noise_of_its_own():
    noisy, batches = Single(nn.Sequential(net(), Noise())), [data().tensors]
    found = evaluate(noisy, {"none": NoAttack(THREAT)}, batches, repeats=2, progress=False)
    assert set(found.per_image("none").tolist()) == {0.0, 0.5, 1.0}
    twice = {name: RandomStart(THREAT) for name in "ab"}
    found = evaluate(net(), twice, batches, progress=False)
    assert not torch.equal(found.rows.sizes[:, 1], found.rows.sizes[:, 2])
    found = evaluate(noisy, ATTACKS, batches, inferences=4, progress=False)
    assert found.scores.shape == (50, 3, 4)
    assert found.random
    assert found.covers == "images and inferences"


def test_the_strongest_attack_has_a_threat_if_it_is_that_of_all():
    batches = DataLoader(data(), 50)
    worst = evaluate(net(), ATTACKS, batches).measurement("worst").details
    assert worst["ball"] == str(THREAT) and worst["threat"]["init_args"]["eps"] == THREAT.eps
    far = {**ATTACKS, "far": PGD(Threat("linf", 0.2), 1, 0.2)}
    worst = evaluate(net(), far, batches).measurement("worst").details
    assert "threat" not in worst
    assert worst["ball"] == "several"
