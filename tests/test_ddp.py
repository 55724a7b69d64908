"""One process and two give the same figures; monitoring changes nothing."""

import os

import torch
from PIL import Image
from torch.utils.data import DataLoader, Sampler

from lightning_rob import PGD, RobustEval, Threat
from tests.callbacks.test_any_module import DATA, STORED, Classifier, Repeated, trainer
from tests.forked import forked, two_processes, two_ranks
from tests.pieces import lines_of, records, spec
from tests.schema import checked
from tests.tiny import arc, pgd, recipe, robust_eval, run, weights

TWO = ["--trainer.strategy=ddp_find_unused_parameters_true", "--trainer.devices=2"]


def start(*args):
    """Run in this process, or in two."""
    if TWO[0] in args:
        done = two_ranks(*args)
        assert done.returncode == 0, done.stderr
    else:
        run(*args)


def auto(*attacks, **options):
    threat = {"norm": "linf", "eps": "16/255"}
    init = {"threat": threat, "version": "custom", "attacks": attacks, "queries": 20, **options}
    return spec("lightning_rob.attacks.AutoAttack", **init)


def evaluate(folder, checkpoint, batch_size, *args):
    """What a test of 53 images leaves: records, scores, matrices, a gallery, an audit."""
    attacks = {"apgd": pgd(random_start=True, restarts=2), "arc": arc(random_start=True)}
    attacks |= {"square": auto("square"), "autoattack": auto("apgd-ce", "apgd-dlr", passes=30)}
    matrices = {"pgd": pgd(random_start=True), "arc": arc()}
    weak, strong = pgd(steps=1, random_start=True), pgd(steps=10, random_start=False)
    data = spec("tests.tiny.Blobs", test_size=53, eval_batch_size=batch_size)
    callbacks = [
        robust_eval(attacks, repeats=2, group_size=16),
        robust_eval({"few": pgd()}, max_images=20),
        spec("TransferMatrixEval", attacks=matrices, max_images=40, group_size=16),
        spec("Gallery", weak=weak, strong=strong, count=2, group_size=16),
        spec("RobustAudit", threat=pgd()["init_args"]["threat"], steps=2, queries=1, max_images=20),
    ]
    file = recipe(folder, data=data, **{"trainer__callbacks+": callbacks})
    start("test", "--config", file, "--ckpt_path", checkpoint, *args)
    place = folder / "run/version_0"
    left = {name: lines_of(place / f"{name}.jsonl") for name in ("robust", "transfer", "gallery")}
    for line in (line for lines in left.values() for line in lines):
        line |= {"seconds": 0, "session": ""}
    audited = checked((place / "audit.json").read_text())["attacks"]
    # Noise of Square depends on the batch.
    found = {row["name"]: row["accuracy"] for row in audited if row["name"] != "square"}
    with Image.open(place / "gallery.png") as picture:
        shown = picture.tobytes()
    images = [path.read_bytes() for path in sorted(place.glob("images/*.csv"))]
    return left, images, shown, found


def test_two_processes_and_any_batch_size_leave_the_same_records(trained, tmp_path):
    first, *others = [
        evaluate(tmp_path / f"{size}{len(args)}", trained, size, *args)
        for size, args in [(53, []), (20, []), (32, TWO)]
    ]
    left, images, *_ = first
    figures = {line["name"]: line for line in left["robust"] if line["name"] != "clean"}
    whole = ("apgd", "arc", "square", "autoattack")
    expected = dict.fromkeys(whole, 53) | {"few": 20, "worst": 20}
    assert {name: line["n"] for name, line in figures.items()} == expected
    assert figures["apgd"]["group_size"] == 16
    assert all(0 < figures[name]["accuracy"] < 1 for name in expected)
    assert [line["n"] for line in left["transfer"]] == [40, 40]
    (gallery,) = left["gallery"]
    assert gallery["n"] == 53 and gallery["fooled"] > 0
    assert len(images) == 2 and all(other == first for other in others)


def test_two_processes_perturb_weights_like_one(tmp_path):
    """The perturbation follows the mean gradient: of one batch of 16 images, or two of 8."""
    init = {"net": spec("tests.modules.support.WithoutNorm"), "attack": pgd(), "trades_beta": 6.0}
    init |= {"awp": 0.1, "optimizer": spec("torch.optim.SGD", lr=0.1)}
    options = {"data": spec("tests.tiny.Blobs", train_size=48), "trainer__callbacks+": []}
    options["model"] = spec("AdversarialTraining", **init)
    trained = []
    for name, processes in {"one": [], "two": TWO}.items():
        start("fit", "--config", recipe(tmp_path / name, **options), *processes)
        trained.append(weights(tmp_path / name / "run/version_0/checkpoints/epoch=3-step=4.ckpt"))
    for one, other in zip(*(each.values() for each in trained), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_processes_of_a_notebook_train_and_test(tmp_path):
    """They are forked, and hand the weights over to the process that started them."""
    more = ["--trainer.devices=2", "--trainer.strategy=ddp_notebook_find_unused_parameters_true"]
    more += ["--trainer.max_epochs=2", "--model.epochs=1", "--test_after_fit=true"]
    done = forked("fit", "--config", recipe(tmp_path), *more)
    assert done.returncode == 0, done.stderr
    assert {(r["stage"], r["n"]) for r in records(tmp_path)} == {("val", 32), ("test", 33)}
    more.append("--trainer.callbacks.dataloader_idx=3")
    done = forked("fit", "--config", recipe(tmp_path), *more)
    assert done.returncode == 1
    assert "evaluates one of 1 data loaders" in done.stderr.splitlines()[-1]


def test_two_processes_predict_into_one_file(trained, tmp_path):
    """Of 33 images one process has 17, the other 16."""
    import pandas  # takes half a second

    files = []
    for args in ([], TWO):
        folder = tmp_path / str(len(args))
        start("predict", "--config", recipe(folder), "--ckpt_path", trained, *args)
        files.append(pandas.read_csv(folder / "run/version_0/predictions.csv"))
    assert files[0]["index"].tolist() == list(range(33))
    pandas.testing.assert_frame_equal(*files, atol=1e-5)


class Odd(Sampler):
    """A sampler of one's own: 13 images, shuffled."""

    def __iter__(self):
        return iter((2 * torch.randperm(13) + 1).tolist())

    def __len__(self):
        return 13


class NoisyAtNine(Classifier):
    """Adds noise to the logits of image 9, which is in the second group of those of `Odd`."""

    def forward(self, x):
        near = (x - DATA.tensors[0][9].to(x)).flatten(1).abs().amax(1) < 0.15
        return self.net(x) + near[:, None] * torch.randn(len(x), 1, device=x.device)


def validated(out, processes):
    """Write index and scores under a sampler and of stored batches, and try a stream."""
    stored, found = DataLoader(STORED, batch_size=None), []
    odd = DataLoader(DATA, 4, sampler=Odd())
    runs = [(odd, None, Classifier), (stored, None, Classifier), (stored, 12, Classifier)]
    for loader, number, module in [*runs, (odd, None, NoisyAtNine)]:
        torch.manual_seed(int(os.environ.get("LOCAL_RANK", "0")))  # processes shuffle differently
        attacks = {"pgd": PGD(Threat("linf", 0.1), 2, 0.05)}
        callback = RobustEval(attacks, max_images=number, group_size=4)
        run = trainer(callback, devices=processes, strategy="ddp" if processes > 1 else "auto")
        run.validate(module(), loader, verbose=False)
        found.append((callback.result.index, callback.result.scores))
    found.append([one.name for one in callback.result.findings])
    if run.is_global_zero:
        torch.save(found, out)
    if processes > 1:
        run.validate(Classifier(), Repeated(DataLoader(DATA, 20)), verbose=False)


def test_every_image_counts_once_under_any_sampler(tmp_path):
    validated(tmp_path / "one", 1)
    done = two_processes(validated, tmp_path / "two", 2)
    assert "2 processes are served the same images" in done.stderr
    one, two = (torch.load(tmp_path / name) for name in ("one", "two"))
    assert one[0][0].tolist() == list(range(1, 26, 2)) and all(map(torch.equal, one[0], two[0]))
    assert [len(set(index.tolist())) for index, _ in two[:3]] == [13, 40, 12]
    assert "randomness" in two[4]  # which the second process alone has found
    assert one[1][1][:, 0].sum() == two[1][1][:, 0].sum() > 0  # clean
