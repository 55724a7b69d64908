"""The callback: what it logs, when, and on which images."""

import pytest
import torch
from lightning.pytorch import Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_rob.attacks import ARC, PGD, OnMember, Strongest
from lightning_rob.callbacks import RobustEval, base
from lightning_rob.callbacks.image_grid import image_grid
from lightning_rob.defenses import Defense, Single, first_member
from lightning_rob.defenses.copies import original
from lightning_rob.evaluation import evaluate
from lightning_rob.metrics import student
from lightning_rob.modules import AdversarialTraining
from lightning_rob.randomness import uniform
from lightning_rob.rules import mean_probs
from lightning_rob.runtime.errors import FindingWarning
from lightning_rob.threat import Threat
from tests.counting import Shared
from tests.tiny import Blobs, TinyNet, pgd, recipe, records, robust_eval, run

THREAT = Threat("linf", 16 / 255)
ATTACK = PGD(THREAT, steps=2, step_size=8 / 255)
blind = pytest.mark.filterwarnings("ignore::lightning_rob.runtime.errors.ZeroGradientWarning")
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def test_robust_accuracy_is_that_of_the_attack_by_hand(tmp_path):
    torch.manual_seed(0)
    attack = PGD(THREAT, steps=5, step_size=8 / 255, random_start=False)
    module, data = AdversarialTraining(TinyNet), Blobs(test_size=50)
    trainer = Trainer(max_epochs=3, callbacks=[RobustEval({"pgd": attack})], **QUIET)
    trainer.fit(module, data)
    logged = trainer.test(module, data, verbose=False)[0]
    x = torch.stack([data.parts["test"][i][0] for i in range(50)])
    y = torch.tensor([data.parts["test"][i][1] for i in range(50)])
    module.defense.eval()
    right = module.defense(attack(module.defense, x, y)).argmax(1) == y
    assert logged["test/robust/pgd"] == pytest.approx(right.float().mean().item())
    assert logged["test/robust/worst"] == logged["test/robust/pgd"]
    clean = (module.defense(x).argmax(1) == y).float().mean().item()
    assert logged["test/acc"] == pytest.approx(clean)
    assert clean > logged["test/robust/pgd"]


def test_standalone_validate_and_test_have_gradients():
    module = AdversarialTraining(TinyNet)
    trainer = Trainer(callbacks=[RobustEval({"arc": ARC(THREAT, 2, 16 / 255)})], **QUIET)
    assert "val/robust/arc" in trainer.validate(module, Blobs(), verbose=False)[0]
    assert "test/robust/arc" in trainer.test(module, Blobs(), verbose=False)[0]


class Reader(TinyNet):
    """Reads the network of which it is a copy whenever an attack or a prediction calls it."""

    def __init__(self):
        super().__init__()
        self.seen = Shared()

    def forward(self, x):
        own = original(self)
        weights = {name: value.clone() for name, value in own.state_dict().items()}
        grads = {weight.requires_grad for weight in own.parameters()}
        self.seen.append((own is self, weights, grads, {part.training for part in own.modules()}))
        return super().forward(x)


def test_a_reader_amid_an_attack_sees_the_network_as_it_is():
    """As a signal handler that saves a checkpoint: no folded or frozen weights, no eval mode."""
    net = Reader()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x, y = torch.rand(20, 3, 8, 8), torch.randint(4, (20,))
    evaluate(net, {"pgd": ATTACK, "arc": ARC(THREAT, 2, 16 / 255)}, [(x, y)], progress=False)
    ATTACK(Single(net), x, y)
    assert len(net.seen) > 10
    for itself, weights, grads, modes in net.seen:
        assert not itself
        assert weights.keys() == before.keys()
        assert all(torch.equal(weights[name], value) for name, value in before.items())
        assert grads == {True} and modes == {True}


def test_findings_and_blindness_are_logged():
    """The gradient of logits that are constant is zero: no attack moves."""
    module = AdversarialTraining(TinyNet)
    honest = Trainer(callbacks=[RobustEval({"pgd": ATTACK})], **QUIET)
    logged = honest.test(module, Blobs(), verbose=False)[0]
    assert logged["test/robust/findings"] == logged["test/robust/blind"] == 0
    torch.nn.init.zeros_(module.defense.net.last.weight)
    trainer = Trainer(callbacks=[RobustEval({"pgd": ATTACK})], **QUIET)
    with pytest.warns(FindingWarning):
        logged = trainer.test(module, Blobs(), verbose=False)[0]
    assert logged["test/robust/blind"] == 1
    assert logged["test/robust/findings"] >= 2


@pytest.mark.parametrize(("epochs", "reported"), [(1, 1), (2, 0)])
def test_a_fit_that_ends_before_its_attacks_reports_it(monkeypatch, epochs, reported):
    shown = []
    monkeypatch.setattr(base, "rank_zero_info", shown.append)
    callback = RobustEval({"pgd": ATTACK}, every_n_epochs=2)
    Trainer(max_epochs=epochs, callbacks=[callback], **QUIET).fit(
        AdversarialTraining(TinyNet), Blobs()
    )
    assert [f"in none of these {epochs}" in text for text in shown] == [True] * reported


def test_every_n_epochs_and_images(tmp_path):
    callbacks = {
        "trainer__callbacks+": [robust_eval({"few": pgd()}, every_n_epochs=2, max_images=10)]
    }
    run("fit", "--config", recipe(tmp_path, model__init_args__monitor=None, **callbacks))
    assert [(r["epoch"], r["n"]) for r in records(tmp_path) if r["name"] == "few"] == [
        (1, 10),
        (3, 10),
    ]


def test_worst_is_the_minimum_per_image_over_all_callbacks(tmp_path):
    strong = pgd(steps=10, step_size="16/255")
    alone = robust_eval({"alone": pgd()}, target="lightning_rob.defenses.first_member")
    callbacks = [robust_eval({"weak": pgd(steps=1)}), alone, robust_eval({"strong": strong})]
    run("fit", "--config", recipe(tmp_path, **{"trainer__callbacks+": callbacks}))
    for epoch in range(4):
        found = {r["name"]: r for r in records(tmp_path) if r["epoch"] == epoch}
        assert found["worst"]["over"] == ["weak", "strong"]
        both = min(found["weak"]["accuracy"], found["strong"]["accuracy"])
        assert found["worst"]["accuracy"] <= both + 1e-9
        assert found["alone"]["target"] == "first_member"


class Moody(Defense):
    """Answers right with probability a half: a defense whose draws need a generator."""

    def __init__(self):
        super().__init__(torch.ones(1), lambda logits, weights: logits[0].softmax(-1).round())

    def logits(self, x, generator=None):
        from lightning_rob.randomness import uniform

        coin = uniform(x, generator=generator) < 0.5
        scores = 20.0 * torch.stack([coin, ~coin, coin & ~coin, coin & ~coin], 1)
        return (scores + 0 * x.flatten(1).sum(1, keepdim=True)).unsqueeze(0)


def evaluate_moody(batch_size, **options):
    module = AdversarialTraining(TinyNet)
    module.defense = Moody()
    evaluation = RobustEval({"pgd": ATTACK}, **options)
    trainer = Trainer(callbacks=[evaluation], **QUIET)
    data = Blobs(test_size=101, labels=2, eval_batch_size=batch_size)
    return trainer.test(module, data, verbose=False)[0]["test/robust/pgd"]


@blind
def test_noise_is_keyed_by_image_and_seed_and_averaged_over_repeats():
    first = evaluate_moody(101)
    assert evaluate_moody(7) == first
    assert evaluate_moody(101, seed=1) != first
    assert abs(evaluate_moody(32, repeats=200) - 0.5) < 0.02


def test_pictures_and_curves_are_in_tensorboard(tmp_path):
    run("fit", "--config", recipe(tmp_path))
    events = EventAccumulator(str(tmp_path / "run/version_0"), {"images": 0, "scalars": 0}).Reload()
    assert {"val/acc", "val/robust/apgd", "val/robust/arc", "val/robust/worst"} <= set(
        events.Tags()["scalars"]
    )
    assert len(events.Images("val/adversarial/arc")) == 4


def test_a_panel_shows_clean_perturbation_and_adversarial():
    x = torch.full((2, 1, 4, 4), 0.5)
    x_adv = x.clone()
    x_adv[0, 0, :2], x_adv[1, 0, :, 0] = 0.7, 0.3
    answers = torch.eye(4)[[1, 2]]
    picture = image_grid(x, x_adv, torch.tensor([1, 2]), answers, answers.flip(0))
    assert picture.shape == (3, 3 * 96 + 14, 2 * 96)
    middle = picture[0, 14 + 96 : 14 + 2 * 96]
    assert middle[0, 0] == 1
    assert middle[0, 96] == 0
    assert middle[-1, 50].item() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attacks": {}}, "at least one attack"),
        ({"attacks": {"worst": ATTACK}}, "no attack can be called 'worst'"),
        ({"attacks": {"a": ATTACK}, "repeats": 0}, "repeats must be at least 1, got 0"),
        ({"attacks": {"a": ATTACK}, "max_images": 0}, "max_images must be at least 1"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        RobustEval(**options)


def test_first_member_is_alone():
    from lightning_rob.defenses import Ensemble

    nets = [TinyNet(), TinyNet()]
    assert first_member(Ensemble(nets)).classifiers == nets[:1]


def test_another_attack_of_the_same_name_is_numbered(tmp_path):
    callbacks = [
        robust_eval({"a": pgd()}),
        robust_eval({"a": pgd(steps=1)}),
        robust_eval({"a": pgd()}),
    ]
    run("fit", "--config", recipe(tmp_path, **{"trainer__callbacks+": callbacks}))
    worst = [r["over"] for r in records(tmp_path) if r["name"] == "worst"]
    assert worst == [["a", "a_2"]] * 4


def test_another_radius_for_all_attacks():
    warm = ARC(THREAT, 2, THREAT.eps, start=Strongest((ATTACK, OnMember(ATTACK, 0))))
    callback = RobustEval({"pgd": ATTACK, "warm": warm}, eps="32/255")
    wide = Threat("linf", 32 / 255)
    pgd_wide = PGD(wide, steps=2, step_size=16 / 255)
    assert callback.attacks == {
        "pgd": pgd_wide,
        "warm": ARC(wide, 2, wide.eps, start=Strongest((pgd_wide, OnMember(pgd_wide, 0)))),
    }
    assert RobustEval({"pgd": ATTACK}).attacks == {"pgd": ATTACK}


class Noisy(Defense):
    """Right with probability 1/2 at every draw, whatever the image."""

    def __init__(self, net=None):
        super().__init__(torch.ones(1), mean_probs)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def logits(self, x, generator=None):
        coin = uniform(x, 4, generator=generator) + 0 * x.flatten(1)[:, :4]
        return (self.scale * coin)[None]


def noisy_run(inferences, attacks=None, **options):
    module = AdversarialTraining(TinyNet, defense=Noisy)
    callback = RobustEval(
        attacks or {"pgd": ATTACK}, inferences=inferences, record="r.jsonl", **options
    )
    trainer = Trainer(callbacks=[callback], **QUIET)
    trainer.test(module, Blobs(test_size=200), verbose=False)
    return callback


@blind
def test_inferences_are_averaged_per_image_and_have_an_interval_of_their_own():
    callback = noisy_run(10)
    single = callback.result.scores
    assert callback.results[1].accuracy == pytest.approx(single[:, 1].mean().item())
    assert set(single.unique().tolist()) == {0.0, 1.0}
    accuracies = single.mean(0)
    assert len(accuracies[1].unique()) > 3  # they are independent
    low, high = callback.results[1].details["over_inferences"]
    assert (low, high) == pytest.approx(student(accuracies[1].tolist()))
    assert low < 0.25 < high or abs(callback.results[1].accuracy - 0.25) < 0.05


@blind
def test_one_inference_is_the_first_of_several_and_has_no_such_interval():
    one, ten = noisy_run(1), noisy_run(10)
    assert torch.equal(one.result.scores[..., 0], ten.result.scores[..., 0])
    assert all("over_inferences" not in result.details for result in one.results)


@blind
def test_the_table_tells_the_defenses_own_chance(capsys):
    noisy_run(10)
    several = capsys.readouterr().out
    noisy_run(1)
    assert "±" in several
    assert "±" not in capsys.readouterr().out


def test_the_same_attack_on_other_images_is_another_figure():
    """A callback that asks for all images is not dropped for one that takes two."""
    few = RobustEval({"pgd": ATTACK}, max_images=2, record="r.jsonl")
    every = RobustEval({"pgd": ATTACK}, record="r.jsonl")
    again = RobustEval({"pgd": ATTACK}, record="r.jsonl")
    trainer = Trainer(callbacks=[few, every, again], **QUIET)
    trainer.test(AdversarialTraining(TinyNet), Blobs(test_size=20), verbose=False)
    found = {r.name: r.n for part in (few, every, again) for r in part.results}
    assert (found["pgd"], found["pgd_2"]) == (2, 20)
    assert not again.results
