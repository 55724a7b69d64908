"""The callback: what it logs, when, and on which images."""

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_rob.attacks import PGD
from lightning_rob.callbacks import RobustEval
from lightning_rob.callbacks.loggers import image_grid
from lightning_rob.defenses import Defense, first_member
from lightning_rob.metrics import student
from lightning_rob.modules import AdversarialTraining
from lightning_rob.randomness import uniform
from lightning_rob.rules import mean_probs
from lightning_rob.threat import Threat
from tests.callbacks.test_any_module import trainer
from tests.counting import Shared
from tests.pieces import lines_of, records
from tests.tiny import Blobs, TinyNet, images_of, pgd, recipe, robust_eval, run

THREAT = Threat("linf", 16 / 255)
ATTACK = PGD(THREAT, steps=2, step_size=8 / 255)
LONGER = PGD(THREAT, steps=4, step_size=8 / 255)
blind = pytest.mark.filterwarnings("ignore::lightning_rob.runtime.errors.ZeroGradientWarning")


def test_robust_accuracy_is_that_of_the_attack_by_hand():
    torch.manual_seed(0)
    attack = PGD(THREAT, steps=5, step_size=8 / 255, random_start=False)
    module, data = AdversarialTraining(TinyNet), Blobs(test_size=50)
    run = trainer(RobustEval({"pgd": attack}), max_epochs=3)
    run.fit(module, data)
    logged = run.test(module, data, verbose=False)[0]
    x, y = images_of(data)
    module.defense.eval()
    right = module.defense(attack(module.defense, x, y)).argmax(1) == y
    assert logged["test/robust/pgd"] == pytest.approx(right.float().mean().item())
    assert logged["test/robust/worst"] == logged["test/robust/pgd"]
    clean = (module.defense(x).argmax(1) == y).float().mean().item()
    assert logged["test/acc"] == pytest.approx(clean) and clean > logged["test/robust/pgd"]


def test_findings_and_blindness_are_logged_once():
    """The gradient of logits that are constant is zero: no attack moves."""
    module = AdversarialTraining(TinyNet)
    callbacks = [RobustEval({"pgd": ATTACK}), RobustEval({"few": LONGER}, max_images=20)]
    logged = trainer(*callbacks).test(module, Blobs(), verbose=False)[0]
    assert logged["test/robust/findings"] == logged["test/robust/blind"] == 0
    torch.nn.init.zeros_(module.defense.net.last.weight)
    logged = trainer(*callbacks).test(module, Blobs(), verbose=False)[0]
    assert logged["test/robust/blind"] == 1
    results = [callback.result for callback in callbacks]
    texts = {one.text for found in results for one in found.findings if one.flagged}
    assert logged["test/robust/findings"] == len(texts) >= 4


@pytest.mark.parametrize("bar", [True, False])
def test_a_log_without_a_terminal_has_a_line_for_each_epoch(bar, capsys):
    run = trainer(RobustEval({"pgd": ATTACK}), max_epochs=2, enable_progress_bar=bar)
    run.fit(AdversarialTraining(TinyNet), Blobs())
    lines = [line for line in capsys.readouterr().out.splitlines() if "accuracy in %" in line]
    assert [line.split(",")[0] for line in lines] == ["Epoch 0", "Epoch 1"] * bar
    worst = 100 * run.callback_metrics["val/robust/worst"]
    assert not bar or lines[-1].endswith(f"worst {worst:.1f}")


class Heard(AdversarialTraining):
    """Hears of each robust evaluation, and counts predictions of its network in eval mode."""

    def __init__(self):
        super().__init__(TinyNet)
        self.heard, self.calls = [], Shared()
        self.defense.net.register_forward_hook(lambda *_: self.calls.append(1))

    def on_robust_evaluation(self, metrics):
        self.heard.append(sorted(name.removeprefix("test/robust/") for name in metrics))


def test_attacks_of_several_callbacks_are_one_evaluation(tmp_path, capsys):
    """One file for each target and settings; names of other attacks are numbered."""
    callbacks = [RobustEval({"a": attack}) for attack in (ATTACK, LONGER, ATTACK)]
    callbacks.insert(2, RobustEval({"b": LONGER}, target=first_member))
    callbacks.append(RobustEval({"a": ATTACK}, max_images=20))
    module = Heard()
    run = trainer(*callbacks, logger=CSVLogger(tmp_path))
    run.test(module, Blobs(), verbose=False)
    names = [list(callback.attacks) for callback in callbacks]
    assert names == [["a"], ["a_2"], ["b"], [], ["a_3"]]
    found = [(row.name, row.details["target"], row.n) for row in callbacks[0].results]
    full, first = "full_defense", "first_member"
    assert found == [
        *[(name, full, 33) for name in ("clean", "a", "a_2")],
        *[(name, first, 33) for name in ("clean", "b")],
        *[("clean", full, 20), ("a_3", full, 20), ("worst", full, 20)],
    ]
    assert callbacks[0].results[-1].details["over"] == ["a", "a_2", "a_3"]
    assert not any(callback.results for callback in callbacks[1:])
    files = sorted(path.name for path in tmp_path.rglob("*.csv") if path.parent.name == "images")
    assert files == ["test-a+a_2.csv", "test-a_3.csv", "test-first_member-b.csv"]
    assert module.heard == [["a", "a_2", "a_3", "b", "worst"]]
    assert capsys.readouterr().out.count("┏") == 1  # one table


def test_what_is_raised_after_the_attacks_takes_no_record(tmp_path):
    class Raises(RobustEval):
        def log_more(self, pl_module, stage):
            raise ArithmeticError

    run = trainer(Raises({"a": ATTACK}), logger=CSVLogger(tmp_path))
    with pytest.raises(ArithmeticError):
        run.test(AdversarialTraining(TinyNet), Blobs(), verbose=False)
    (record,) = tmp_path.rglob("robust.jsonl")
    assert [line["name"] for line in lines_of(record)] == ["clean", "a", "worst"]


def test_worst_is_the_minimum_per_image_over_all_callbacks(tmp_path):
    """Attacks on a part of the defense do not count; each callback keeps its interval."""
    strong = pgd(steps=10, step_size="16/255")
    alone = robust_eval({"alone": pgd()}, target="lightning_rob.defenses.first_member")
    callbacks = [robust_eval({"weak": pgd(steps=1)}), alone, robust_eval({"strong": strong})]
    alone["init_args"] |= {"every_n_epochs": 2, "max_images": 10}
    run("fit", "--config", recipe(tmp_path, **{"trainer__callbacks+": callbacks}))
    found = records(tmp_path)
    assert [(r["epoch"], r["n"]) for r in found if r["name"] == "alone"] == [(1, 10), (3, 10)]
    assert {r["target"] for r in found if r["name"] == "alone"} == {"first_member"}
    for epoch in range(4):
        rows = {r["name"]: r for r in found if r["epoch"] == epoch}
        assert rows["worst"]["over"] == ["weak", "strong"]
        both = min(rows["weak"]["accuracy"], rows["strong"]["accuracy"])
        assert rows["worst"]["accuracy"] <= both + 1e-9
    events = EventAccumulator(str(tmp_path / "run/version_0"), {"images": 0, "scalars": 0}).Reload()
    logged = {"val/acc", "val/robust/weak", "val/robust/alone", "val/robust/worst"}
    assert logged <= set(events.Tags()["scalars"])
    assert len(events.Images("val/adversarial/strong")) == 4


def test_a_panel_shows_clean_perturbation_and_adversarial():
    x = torch.full((2, 3, 4, 4), 0.5)
    x_adv = x.clone()
    x_adv[0, :, :2], x_adv[1, :, :, 0] = 0.7, 0.3
    picture = image_grid(x, x_adv)
    assert picture.shape == (3, 3 * 96, 2 * 96)
    clean, middle, adversarial = picture[0].split(96)
    assert (clean == 0.5).all()
    found = middle[0, 0].item(), middle[0, 96].item(), middle[-1, 50].item()
    assert found == pytest.approx((1, 0, 0.5), abs=0.01)
    assert adversarial[0, 0].item() == pytest.approx(0.7)


class Noisy(Defense):
    """Right with probability 1/4 at every draw, for any image."""

    def __init__(self, net=None):
        super().__init__(torch.ones(1), mean_probs)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def logits(self, x, generator=None):
        coin = uniform(x, 4, generator=generator) + 0 * x.flatten(1)[:, :4]
        return (self.scale * coin)[None]


def noisy_run(batch_size=None, **options):
    callback = RobustEval({"pgd": ATTACK}, **options)
    data = Blobs(test_size=101, eval_batch_size=batch_size)
    trainer(callback).test(AdversarialTraining(TinyNet, defense=Noisy), data, verbose=False)
    return callback


@blind
def test_noise_is_keyed_by_image_and_seed_and_averaged_over_repeats():
    def accuracy(batch_size, **options):
        return noisy_run(batch_size, **options).results[1].accuracy

    first = accuracy(101)
    assert accuracy(7) == first and accuracy(101, seed=1) != first
    assert abs(accuracy(32, repeats=15) - 0.25) < 0.03


@blind
def test_inferences_are_averaged_per_image_and_have_an_interval_of_their_own(capsys):
    one = noisy_run()
    assert "±" not in capsys.readouterr().out
    ten = noisy_run(inferences=10)
    assert "±" in capsys.readouterr().out
    single = ten.result.scores
    assert ten.results[1].accuracy == pytest.approx(single[:, 1].mean().item())
    assert set(single.unique().tolist()) == {0.0, 1.0}
    accuracies = single.mean(0)
    assert len(accuracies[1].unique()) > 3  # they are independent
    low, high = ten.results[1].details["over_inferences"]
    assert (low, high) == pytest.approx(student(accuracies[1].tolist()))
    assert low < 0.25 < high or abs(ten.results[1].accuracy - 0.25) < 0.05
    assert torch.equal(one.result.scores[..., 0], single[..., 0])  # the first of several
    assert all("over_inferences" not in result.details for result in one.results)
