"""Sub-models behind transformations: inputs, predictions, parts of the ensemble."""

import pytest
import torch

from lightning_rob.attacks import PGD, OnDifferentiable, attacking
from lightning_rob.defenses import TransformEnsemble
from lightning_rob.objectives import expected_ce
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from tests.tiny import TinyNet

NAMES = ["clean", "rotate_90", "shift_top_left", "noise_gaussian", "filter_median"]


def nets(count):
    torch.manual_seed(0)
    return [TinyNet().eval() for _ in range(count)]


@pytest.fixture
def x():
    return torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_members_predict_transformed_images(x):
    members = nets(2)
    ensemble = TransformEnsemble(members, ["rotate_90", "flip_both"])
    expected = [members[0](x.rot90(1, (2, 3))), members[1](x.flip((2, 3)))]
    assert torch.equal(ensemble.logits(x), torch.stack(expected))
    assert torch.equal(ensemble.weights, torch.full((2,), 0.5))


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        (["clean"], "2 members need as many transformations, got 1: clean"),
        (["clean", "rotate_9"], "no transformation 'rotate_9', did you mean rotate_90"),
    ],
)
def test_transformations_that_do_not_fit(transforms, message):
    with pytest.raises(ValueError, match=message):
        TransformEnsemble(nets(2), transforms)


def test_a_part_predicts_as_in_the_whole_ensemble(x):
    """Randomness is keyed by image and transformation: parts are scored from the same votes."""
    whole = TransformEnsemble(nets(5), NAMES)
    noise = Streams.from_index(torch.arange(6), 3)
    votes = whole.logits(x, noise)
    for members in ([3], [4, 3], [0, 2, 3]):
        part = whole.part(members).logits(x, Streams.from_index(torch.arange(6), 3))
        assert torch.equal(part, votes[members])
    alone = whole.one(3)(x[2:3], Streams.from_index(torch.tensor([2]), 3))
    assert torch.equal(alone.argmax(1), votes[3, 2:3].argmax(1))


def test_the_next_call_draws_anew_and_the_next_run_the_same(x):
    ensemble = TransformEnsemble(nets(1), ["noise_gaussian"])
    runs = []
    for _ in range(2):
        noise = Streams.from_index(torch.arange(6), 0)
        runs.append([ensemble.logits(x, noise) for _ in range(2)])
    assert torch.equal(torch.stack(runs[0]), torch.stack(runs[1]))
    assert not torch.equal(runs[0][0], runs[0][1])


def test_classifiers_are_the_members_behind_their_transformations(x):
    ensemble = TransformEnsemble(nets(2), ["rotate_90", "shift_left"])
    found = torch.stack([net(x) for net in ensemble.classifiers])
    assert torch.equal(found, ensemble.logits(x))
    with pytest.raises(TypeError, match="noise_gaussian is random"):
        _ = TransformEnsemble(nets(1), ["noise_gaussian"]).classifiers


def test_a_gradient_where_there_is_none_is_refused_and_not_zero(x):
    ensemble = TransformEnsemble(nets(2), ["clean", "quantize_4_colors"])
    y, pgd = torch.zeros(6, dtype=torch.long), PGD(Threat("linf", 0.1), 1, 0.1)
    with pytest.raises(RuntimeError, match="has no gradient"):
        pgd(ensemble, x, y)
    with attacking(ensemble) as ensemble, torch.no_grad():
        before, after = (
            expected_ce(ensemble.part([0]).logits(z), torch.ones(1), y).mean()
            for z in (x, OnDifferentiable(pgd)(ensemble, x, y))
        )
    assert after > before
