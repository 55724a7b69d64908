"""One process and two give the same figures; monitoring changes nothing."""

import pytest

from tests.tiny import arc, pgd, recipe, records, robust_eval, same_weights, shell, weights

TWO = ["--trainer.strategy=ddp_find_unused_parameters_true", "--trainer.devices=2"]
CHECKPOINT = "run/version_0/checkpoints/epoch=3-step=16.ckpt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    done = shell("fit", "--config", recipe(folder))
    assert done.returncode == 0, done.stderr
    return folder / CHECKPOINT


def evaluate(folder, checkpoint, batch_size, *args):
    attacks = {"apgd": pgd(random_start=True, restarts=2), "arc": arc(random_start=True)}
    data = {"class_path": "tests.tiny.Blobs", "init_args": {"test_size": 101}}
    callbacks = [robust_eval(attacks, repeats=2), robust_eval({"few": pgd()}, max_images=50)]
    file = recipe(folder, data=data, **{"trainer__callbacks+": callbacks})
    size = f"--data.init_args.eval_batch_size={batch_size}"
    done = shell("test", "--config", file, "--ckpt_path", checkpoint, size, *args)
    assert done.returncode == 0, done.stderr
    return {r["name"]: (r["n"], r["accuracy"]) for r in records(folder) if r["name"] != "clean"}


def test_two_processes_and_any_batch_size_give_the_same_robust_accuracy(trained, tmp_path):
    results = []
    for name, size, args in [
        ("a", 101, []),
        ("b", 32, []),
        ("c", 7, []),
        ("d", 32, TWO),
        ("e", 7, TWO),
    ]:
        (tmp_path / name).mkdir()
        results.append(evaluate(tmp_path / name, trained, size, *args))
    first = results[0]
    assert {name: n for name, (n, _) in first.items()} == {
        "apgd": 101,
        "arc": 101,
        "few": 50,
        "worst": 50,
    }
    assert 0 < first["apgd"][1] < 1
    assert all(other == first for other in results)


def test_two_processes_train_an_ensemble(tmp_path):
    done = shell("fit", "--config", recipe(tmp_path), *TWO)
    assert done.returncode == 0, done.stderr
    assert {r["n"] for r in records(tmp_path)} == {32}


def test_training_is_the_same_with_and_without_callbacks(tmp_path):
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    unmonitored = {"model__init_args__monitor": None}
    random = robust_eval({"apgd": pgd(), "arc": arc(random_start=True)}, repeats=2)
    shell(
        "fit",
        "--config",
        recipe(tmp_path / "with", **unmonitored, **{"trainer__callbacks+": [random]}),
    )
    shell(
        "fit",
        "--config",
        recipe(tmp_path / "without", **unmonitored, **{"trainer__callbacks+": []}),
    )
    one, other = (weights(tmp_path / name / CHECKPOINT) for name in ("with", "without"))
    assert same_weights(one, other)
    assert (tmp_path / "with/run/version_0/robust.jsonl").exists()
