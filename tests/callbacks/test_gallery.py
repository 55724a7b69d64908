"""The gallery: which images, how many, and what the figure says of them."""

import pytest
import torch

from lightning_rob.attacks import PGD, RandomMember
from lightning_rob.callbacks import Gallery
from lightning_rob.defenses import Ensemble
from lightning_rob.threat import Threat
from tests.callbacks.test_any_module import trainer
from tests.callbacks.test_cross_eval import ensemble, images_of, module_of
from tests.pieces import spec
from tests.schema import checked
from tests.tiny import Blobs, pgd, recipe, run

__all__ = ["ensemble"]

THREAT = Threat("linf", 28 / 255)
WEAK = PGD(THREAT, steps=2, step_size=14 / 255, random_start=False)
STRONG = PGD(THREAT, steps=10, step_size=8 / 255, random_start=False)


class Named(Blobs):
    class_names = ("north", "east", "south", "west")


def show(defense, *callbacks, batch_size=33, **data):
    blobs = Named(eval_batch_size=batch_size, **data)
    trainer(*callbacks).test(module_of(defense), blobs, verbose=False)
    return blobs


def right(defense, x, y):
    """[M, B]: which members are right."""
    return torch.stack([net(x).argmax(1) == y for net in defense.classifiers])


def test_counts_and_images_are_those_of_the_attacks_by_hand(ensemble, capsys):
    callback = Gallery(WEAK, STRONG, ["PGD-1", "PGD-10"], count=5)
    x, y = images_of(show(ensemble, callback, test_size=80, batch_size=30))
    weak, strong = WEAK(ensemble, x, y), STRONG(ensemble, x, y)
    after, end = right(ensemble, weak, y), right(ensemble, strong, y)
    left, both = after.any(0), after.any(0) & ~end.any(0)
    assert callback.counts == {"n": 80, "left": int(left.sum()), "fooled": int(both.sum())}
    assert 5 < both.sum() < left.sum() < 80
    expected = (ensemble.weights[:, None] * after).sum(0)
    order = sorted(both.nonzero()[:, 0].tolist(), key=lambda i: (-round(float(expected[i]), 5), i))
    assert [index for _, index, _ in callback.kept] == order[:5]
    said = f"PGD-10 fools every member on {both.sum()} of the {left.sum()} images on which PGD-1"
    assert said in capsys.readouterr().out
    fitting = trainer(callback)
    fitting.state.fn = "fit"
    assert not callback.due(fitting)
    for _, i, case in callback.kept:
        assert case.label == y[i] and torch.equal(case.clean, x[i])
        torch.testing.assert_close(case.weak.image, weak[i])
        torch.testing.assert_close(case.strong.image, strong[i])
        probs = torch.stack([net(strong[i : i + 1])[0].softmax(-1) for net in ensemble.classifiers])
        assert case.strong.classes.tolist() == probs.argmax(1).tolist()
        torch.testing.assert_close(case.strong.confidence, probs.amax(1).detach())


def test_members_of_probability_0_are_ignored(ensemble):
    first = Ensemble(ensemble.classifiers, [1.0, 0.0, 0.0])
    callback = Gallery(WEAK, STRONG)
    x, y = images_of(show(first, callback, test_size=60))
    after, end = (right(first, attack(first, x, y), y)[0] for attack in (WEAK, STRONG))
    assert callback.counts["left"] == int(after.sum())
    assert callback.counts["fooled"] == int((after & ~end).sum())


def test_nothing_to_show_is_said_and_not_drawn(tmp_path, capsys):
    plain = pgd(random_start=False)
    callbacks = [spec("lightning_rob.callbacks.Gallery", weak=plain, strong=plain)]
    run("test", "--config", recipe(tmp_path, **{"trainer__callbacks+": callbacks}))
    folder = tmp_path / "run/version_0"
    record = checked((folder / "gallery.jsonl").read_text())
    assert record["fooled"] == 0 and record["n"] == 33
    said = f"PGD fools every member on 0 of the {record['left']} images on which PGD leaves some"
    assert said in capsys.readouterr().out
    assert not (folder / "gallery.png").exists()


def test_bad_arguments(ensemble):
    for options, message in (
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"names": ["one"]}, "names must be two"),
    ):
        with pytest.raises(ValueError, match=message):
            Gallery(WEAK, STRONG, **options)
    with pytest.raises(ValueError, match="RandomMember draws one"):
        show(ensemble, Gallery(RandomMember(WEAK), WEAK))
