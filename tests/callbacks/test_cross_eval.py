"""The study of members: its matrix by hand, its figures, its independence of batch and process."""

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_rob.attacks import ARC, PGD
from lightning_rob.callbacks import RobustEval, TransferMatrixEval, VotingRuleEval
from lightning_rob.defenses import Ensemble, Single, TransformEnsemble, first_member
from lightning_rob.modules import AdversarialTraining
from lightning_rob.threat import Threat
from tests.callbacks.test_any_module import trainer
from tests.pieces import lines_of, spec
from tests.tiny import Blobs, TinyNet, arc, fit_all, images_of, pgd, recipe, run

THREAT = Threat("linf", 24 / 255)
PLAIN = PGD(THREAT, steps=4, step_size=8 / 255, random_start=False)
RANDOM = PGD(THREAT, steps=2, step_size=16 / 255)


@pytest.fixture(scope="module")
def ensemble():
    nets = [trained_net(seed, width) for seed, width in ((0, 16), (1, 8), (2, 24))]
    return Ensemble(nets, [0.5, 0.2, 0.3])


def trained_net(seed, width):
    torch.manual_seed(seed)
    net, data = TinyNet(width), Blobs()
    data.setup("fit")
    return fit_all(net, *images_of(data, "train"), 30)


def module_of(defense):
    module = AdversarialTraining(TinyNet)
    module.defense = defense
    return module


def study(defense, *callbacks, batch_size=33, **data):
    """Test with the callbacks: what was logged, and the data."""
    blobs = Blobs(eval_batch_size=batch_size, **data)
    return trainer(*callbacks).test(module_of(defense), blobs, verbose=False)[0], blobs


def matrix(callback, name):
    return next(r["matrix"] for r in callback.results if r["name"] == name)


def test_matrix_is_that_of_attacks_by_hand(ensemble):
    cross = TransferMatrixEval({"pgd": PLAIN, "arc": ARC(THREAT, 3, 24 / 255)})
    logged, data = study(ensemble, cross, test_size=50, batch_size=20)
    x, y = images_of(data)
    for name, attack in cross.attacks.items():
        for j, attacked in enumerate(ensemble.classifiers):
            x_adv = attack(Single(attacked), x, y)
            for i, net in enumerate(ensemble.classifiers):
                right = (net(x_adv).argmax(1) == y).double().mean().item()
                assert matrix(cross, name)[i][j] == pytest.approx(right, abs=1e-9)
        for i in range(3):
            assert logged[f"test/member_{i + 1}/{name}"] == pytest.approx(matrix(cross, name)[i][i])
    found = torch.tensor(matrix(cross, "pgd"))
    assert (found.diagonal() < found.max(1).values).all()
    for i, net in enumerate(ensemble.classifiers):
        clean = (net(x).argmax(1) == y).double().mean().item()
        assert cross.results[1]["clean"][i] == pytest.approx(clean)
        assert logged[f"test/member_{i + 1}/acc"] == pytest.approx(clean)


def test_first_member_gets_the_figure_that_robust_eval_gives_it(ensemble):
    cross, alone = TransferMatrixEval({"a": RANDOM}), RobustEval({"a": RANDOM}, target=first_member)
    logged, _ = study(ensemble, cross, alone, test_size=101)
    assert logged["test/member_1/a"] == logged["test/robust/a"]
    assert 0 < logged["test/member_1/a"] < 1


def cross_eval(attacks, **options):
    return spec("lightning_rob.callbacks.TransferMatrixEval", attacks=attacks, **options)


def transfers(folder):
    return lines_of(folder / "run/version_0/transfer.jsonl")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """The folder of a fit of two members, studied in every other epoch."""
    folder = tmp_path_factory.mktemp("fitted")
    callbacks = [cross_eval({"pgd": pgd(), "arc": arc()}, every_n_epochs=2, max_images=12)]
    plain = {"model__init_args__monitor": None, "trainer__callbacks+": callbacks}
    run("fit", "--config", recipe(folder, **plain))
    return folder


def test_run_leaves_records_pictures_and_curves_of_the_members_begun(fitted):
    found = transfers(fitted)
    expected = [("pgd", 1, 1), ("arc", 1, 1), ("pgd", 3, 2), ("arc", 3, 2)]
    assert [(r["name"], r["epoch"], len(r["matrix"])) for r in found] == expected
    assert all(r["n"] == 12 and r["stage"] == "val" for r in found)
    assert found[-1]["probs"] == pytest.approx([0.9, 0.1])
    assert found[0]["attack"]["class_path"] == "lightning_rob.PGD"
    assert found[0]["attack"]["init_args"]["threat"]["init_args"]["norm"] == "linf"
    low, high = found[-1]["intervals"][1][0]
    assert low <= found[-1]["matrix"][1][0] <= high
    events = EventAccumulator(str(fitted / "run/version_0"), {"images": 0, "scalars": 0}).Reload()
    logged = {"val/member_1/acc", "val/member_1/pgd", "val/member_2/arc"}
    assert logged <= set(events.Tags()["scalars"]) and len(events.Images("val/transfer/arc")) == 2
    for name in ("pgd", "arc"):
        with Image.open(fitted / f"run/version_0/transfer_{name}.png") as picture:
            assert min(picture.size) > 200


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (TransferMatrixEval, {"attacks": {}}, "at least one attack"),
        (TransferMatrixEval, {"attacks": {"acc": PLAIN}}, "no attack can be called 'acc'"),
        (TransferMatrixEval, {"every_n_epochs": 0}, "every_n_epochs must be at least 1"),
        (RobustEval, {"attacks": {"worst": PLAIN}}, "no attack can be called 'worst'"),
        (RobustEval, {"repeats": 0}, "repeats must be at least 1, got 0"),
        (VotingRuleEval, {"attacks": {"clean": PLAIN}}, "no attack can be called 'clean'"),
        (VotingRuleEval, {"draws": 0}, "draws must be at least 1, got 0"),
    ],
)
def test_bad_arguments(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**{"attacks": {"a": PLAIN}} | options)


def test_transferability_and_ranking_are_those_of_the_predictions(ensemble, capsys):
    cross = TransferMatrixEval({"pgd": PLAIN})
    _, data = study(ensemble, cross, test_size=50)
    x, y = images_of(data)
    result = cross.results[1]
    fooled = torch.empty(3, 3, 50, dtype=torch.bool)
    for j, attacked in enumerate(ensemble.classifiers):
        x_adv = PLAIN(Single(attacked), x, y)
        fooled[:, j] = torch.stack([net(x_adv).argmax(1) != y for net in ensemble.classifiers])
    for source in range(3):
        assert result["successes"][source] == fooled[source, source].sum()
        for target in range(3):
            both = (fooled[source, source] & fooled[target, source]).sum()
            share = (both / fooled[source, source].sum()).item()
            assert result["transferability"][source][target] == pytest.approx(share)
    others = [sum(result["matrix"][i][j] for i in range(3) if i != j) for j in range(3)]
    assert result["ranking"] == sorted(range(3), key=lambda j: others[j])
    names = ", ".join(str(j + 1) for j in result["ranking"])
    table = capsys.readouterr().out
    assert f"pgd transfers best from: {names}" in table
    for i, share in enumerate((0.5, 0.2, 0.3)):
        row = next(line for line in table.splitlines() if line.startswith(f"│ {i + 1} "))
        assert f" {share} " in row and f"{result['matrix'][i][i]:.1%}" in row
        assert f"{result['clean'][i]:.1%}" in row


def test_sub_models_are_attacked_in_their_own_space():
    nets = [trained_net(seed, 16) for seed in range(2)]
    turned = TransformEnsemble(nets, ["clean", "rotate_180"])
    cross = TransferMatrixEval({"pgd": PLAIN})
    _, data = study(turned, cross)
    x, y = images_of(data)
    x_adv = PLAIN(Single(nets[1]), x.rot90(2, (2, 3)), y).rot90(2, (2, 3))
    right = [(votes.argmax(1) == y).double().mean().item() for votes in turned.logits(x_adv)]
    assert [row[1] for row in matrix(cross, "pgd")] == pytest.approx(right)
    assert cross.results[1]["names"] == ["clean", "rotate_180"]


def test_sub_models_that_cannot_be_attacked_alone_are_refused_at_once():
    pair = TransformEnsemble([TinyNet().eval() for _ in range(2)], ["clean", "quantize_4_colors"])
    with pytest.raises(TypeError, match="quantize_4_colors can neither be undone"):
        study(pair, TransferMatrixEval({"pgd": PLAIN}))
