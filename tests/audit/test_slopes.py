"""Checks of gradients: slopes of the predictions, and pixels at a bound; and of one odd image."""

import torch
from torch.nn.functional import conv2d

from lightning_rob.audit.auditor import audit
from lightning_rob.defenses import DENT, Ensemble, RandomTransforms, Single, TransformEnsemble
from lightning_rob.evaluation.checks import bounds, slope
from lightning_rob.nets import SmallCNN
from lightning_rob.rules import mean_logits
from tests.audit.planted import (
    LARGE,
    PLANTED,
    THREAT,
    Decoy,
    Through,
    clamped,
    honest,
    straight_through,
)


def by_slope(defense, x, y, **options):
    (found,) = audit(defense, x, y, THREAT, checks=[slope], **options).findings
    return found


def test_the_gradient_of_another_network_is_not_the_slope(nets, blobs):
    assert by_slope(Single(Decoy(nets[0], nets[1])), *blobs).severity == "severe"
    same = by_slope(Single(Decoy(nets[1], nets[1])), *blobs)
    assert same.severity == "fine" and same.values["near"] > 0.95


def test_an_honest_gradient_is_the_slope(nets, blobs):
    plain = nets[0]
    moved = TransformEnsemble(nets[:2], ["flip_horizontal", "quantize_4_colors"])
    defenses = honest(*nets) | {
        "eight_bit": Single(Through(plain, straight_through)),
        "large_logits": Single(Through(plain, after=lambda z: 5 * z)),
        "means": Ensemble(nets, rule=mean_logits),
        "one_member_without_a_gradient": moved,
    }
    for name, defense in defenses.items():
        found = by_slope(defense, *blobs)
        assert found.severity == "fine", name
        assert max(found.values["near"], found.values["far"]) > 0.95, name
    rounded = by_slope(defenses["eight_bit"], *blobs).values
    assert rounded["near"] < rounded["far"]


def test_the_gradient_of_a_transform_may_be_an_estimate(nets, blobs):
    """But not that of the network behind it."""
    cut = PLANTED["half_detached"][0](nets[0]).net
    found = [by_slope(RandomTransforms(net, {"JPEG": {}}, 1, 2), *blobs) for net in (nets[0], cut)]
    assert [finding.severity for finding in found] == ["note", "severe"]
    assert found[0].values["far"] < 0.8


def by_bounds(defense, x, y, **options):
    (found,) = audit(defense, x, y, LARGE, checks=[bounds], **options).findings
    return found


def test_pixels_that_a_clamp_hides_from_attacks(nets, contrasty):
    plain, *both = (Through(net, clamped) for net in nets)
    found = by_bounds(Single(plain), *contrasty)
    assert found.severity == "warning" and found.values["images"] > 0.9
    assert "InsideBounds" in found.advice
    kinds = {
        "randomized": Ensemble(both),
        "transformed": TransformEnsemble(both, ["flip_both", "rotate_180"]),
        "random": RandomTransforms(both[0], {"HorizontalFlip": {}}, 1, 2),
        "one_bound": Single(Through(nets[1], lambda x: x.relu())),
    }
    for name, defense in kinds.items():
        assert by_bounds(defense, *contrasty).values["pixels"] > 0.9, name


def _edges(x):
    """Return edges: exactly 0 on black parts, 0 up to rounding on other flat parts."""
    kernel = torch.arange(1.0, 10.0).to(x).view(1, 1, 3, 3).expand(3, 1, 3, 3) / 45
    return (x - conv2d(x, kernel, padding=1, groups=3)).abs()


def test_honest_pixels_at_a_bound(nets, contrasty):
    """Flat ones too: dead there and just inside, or where slopes just inside are rounding."""
    x, y = contrasty
    mostly_black = torch.zeros_like(x)
    mostly_black[..., :3, :3] = x[..., :3, :3]
    dead = Through(nets[0], lambda x: (x - 0.2).relu())
    plain = honest(*nets) | {"dead": Single(dead)}
    cases = [(name, defense, x) for name, defense in plain.items()]
    cases += [("edges", Single(Through(nets[0], _edges)), mostly_black)]
    for name, defense, images in cases:
        assert by_bounds(defense, images, y).severity == "fine", name


def test_few_pixels_at_a_bound_are_no_verdict(nets, blobs, contrasty):
    defense, (x, y) = Single(Through(nets[0], clamped)), contrasty
    for images in (blobs[0], x.clamp(0.01, 0.99), torch.cat([x[:1], blobs[0][1:]])):
        found = by_bounds(defense, images, y)
        assert found.severity == "note" and "at least 2 are needed" in found.text
    adapts = by_bounds(DENT(SmallCNN(4, 3, 4), steps=1), x, y)
    assert adapts.severity == "note" and "adapts" in adapts.text
