"""Which images are attacked together, and the worst case without the luck of the draw."""

from statistics import fmean

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_rob.attacks import PGD, NoAttack
from lightning_rob.callbacks import RobustEval
from lightning_rob.defenses import Ensemble, Mixture, RandomTransforms, Single, TransformEnsemble
from lightning_rob.defenses.transductive import Transductive
from lightning_rob.evaluation import (
    canonical_groups,
    group_loader,
    is_random,
    serves_once,
    worst_case,
)
from lightning_rob.evaluation.groups import served_positions
from lightning_rob.evaluation.protocol import AttackerDefenderSession
from lightning_rob.metrics import robust_accuracy, wilson
from lightning_rob.modules import AdversarialTraining
from lightning_rob.rules import majority, mean_probs
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise, HorizontalFlip
from tests.audit.planted import Through
from tests.callbacks.test_any_module import trainer
from tests.tiny import Blobs, TinyNet

NOTHING = PGD(Threat("linf", 1e-9), 1, 1e-9)
ATTACKS = 9


def test_groups_are_of_positions_whatever_their_order():
    positions = torch.randperm(101, generator=torch.Generator().manual_seed(0))
    alone = canonical_groups(positions, 16)
    assert [len(group) for group in alone] == [16] * 6 + [5]
    assert torch.cat(alone).tolist() == list(range(101))
    assert canonical_groups(torch.arange(0), 16) == []
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        canonical_groups(positions, 0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


DATA = TensorDataset(torch.arange(12))


class Own(BatchSampler):
    pass


class Shouting(Dataset):
    """Images under names instead of numbers."""

    def __getitem__(self, name):
        return name.upper()


ALL = list(range(12))
SHARED = torch.Generator().manual_seed(1)


@pytest.mark.parametrize(
    ("loader", "once", "served"),
    [
        (DataLoader(DATA, 5), True, ALL),
        (DataLoader(DATA, 5, shuffle=True, drop_last=True), True, ALL),
        (DataLoader(DATA, 5, sampler=DistributedSampler(DATA, 1, 0)), True, ALL),
        (
            DataLoader(DATA, 5, sampler=DistributedSampler(DATA, 2, 0, shuffle=False)),
            False,
            ALL[::2],
        ),
        (DataLoader(DATA, 5, sampler=SequentialSampler(range(10))), False, ALL[:10]),
        (DataLoader(DATA, batch_sampler=Own(SequentialSampler(DATA), 4, True)), False, ALL),
        (DataLoader(DATA, batch_sampler=BatchSampler([8, 3, 3], 2, False)), False, [3, 8]),
        (DataLoader(DATA, 5, sampler=RandomSampler(DATA, num_samples=5)), False, 5),
        (DataLoader(DATA, 5, sampler=WeightedRandomSampler([1.0] + [0.0] * 11, 12)), False, [0]),
        (DataLoader(DATA, 5, sampler=SubsetRandomSampler([7, 2], SHARED)), False, [2, 7]),
        (DataLoader(DATA, 5, sampler=[3, 1, 2]), False, [1, 2, 3]),
        (DataLoader(Shouting(), 5, sampler=["a", "b"]), False, None),
        (DataLoader(DATA, 5, sampler=iter(range(12))), False, None),
        (DataLoader([torch.zeros(3, 1)] * 4, batch_size=None), False, None),
        (DataLoader(Stream(), 5), False, None),
        ([DATA[:5]], False, None),
    ],
)
def test_which_images_a_loader_serves(loader, once, served):
    states = torch.get_rng_state(), SHARED.get_state()
    assert serves_once(loader) is once
    found = served_positions(loader)
    assert found == served_positions(loader)
    assert found == served or len(found) == served
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], SHARED.get_state())


def integers(items):  # a worker of Python 3.14 imports it
    return [int(item[0]) for item in items]


def test_groups_come_through_the_loaders_own_workers_and_collation():
    loader = DataLoader(DATA, 5, num_workers=1, collate_fn=integers)
    assert list(group_loader(loader, [])) == []
    state = torch.get_rng_state()
    assert list(group_loader(loader, [torch.tensor([7, 2]), torch.tensor([0])])) == [[7, 2], [0]]
    assert torch.equal(torch.get_rng_state(), state)


def test_without_randomness_the_worst_is_each_images_minimum_over_all_tables():
    first = torch.tensor([1, 3, 8]), torch.tensor([[[0.5], [0.7]], [[1.0], [0.9]], [[0.1], [0.0]]])
    second = torch.tensor([0, 3, 8, 9]), torch.tensor([[[0.0]], [[0.2]], [[0.6]], [[0.0]]])
    assert worst_case([first]).scores[:, 0].tolist() == pytest.approx([0.5, 0.9, 0.0])
    for tables in ([first, second], [second, first]):
        found = worst_case(tables)
        assert found.index.tolist() == [3, 8]
        assert found.scores[:, 0].tolist() == pytest.approx([0.2, 0.0])


def test_choice_by_half_of_the_inferences_by_hand():
    first = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])  # 3/4 and 1/2 right
    second = torch.tensor([[1.0, 0.2], [0.3, 0.4], [0.5, 0.6], [0.7, 0.8]])
    found = worst_case([(torch.arange(4), torch.stack([first, second], 2))], random=True)
    # By the first half image 0 is a tie, (0 + 4 * 0.75) / 5 = (1 + 4 * 0.5) / 5, and goes to attack
    # 0; the others go to attack 1. By the second half all images go to attack 1.
    assert found.scores[:, 0].tolist() == pytest.approx([1.0, 0.4, 0.6, 0.8])
    assert found.scores[:, 1].tolist() == pytest.approx([1.0, 0.0, 0.0, 1.0])


def test_choice_by_half_of_the_images_by_hand():
    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])[..., None]
    found = worst_case([(torch.arange(4), scores)], random=True)
    # On images 0 and 2 attack 0 is the stronger, on 1 and 3 attack 1: each is scored elsewhere.
    assert found.scores[:, 0].tolist() == [1.0, 1.0, 1.0, 1.0]


def test_where_predictions_depend_on_the_batch_one_attack_is_chosen():
    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    found = worst_case([(torch.arange(3), scores[..., None])], joint=True)
    assert found.scores[:, 0].tolist() == [1.0, 0.0, 0.0]
    # Draw 1 says attack 1, draw 2 attack 0: each is scored by the other draw.
    draws = torch.stack([scores, 1 - scores], 2)
    found = worst_case([(torch.arange(3), draws)], joint=True)
    assert found.scores.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


SPREADS = {"coins": (1e6, 1e6), "mostly sure": (0.6, 0.2)}


@pytest.mark.parametrize("inferences", [1, 3, 10])
@pytest.mark.parametrize("spread", list(SPREADS))
def test_attacks_that_do_nothing_do_not_bias_the_worst(spread, inferences):
    """Independent noise for every attack, images that are right with probability p ~ Beta."""
    torch.manual_seed(inferences)
    n, runs, gaps, inside = 300, 200, [], 0
    beta = torch.distributions.Beta(*SPREADS[spread])
    for _ in range(runs):
        p = beta.sample((n, 1, 1)).expand(n, 1 + ATTACKS, inferences)
        scores = torch.bernoulli(p)
        clean = float(scores[:, 0].mean())
        worst = float(worst_case([(torch.arange(n), scores)], random=True).scores.mean())
        gaps.append(worst - clean)
        low, high = wilson(clean, n)
        inside += low <= worst <= high
    naive = float(torch.bernoulli(p).mean(2).amin(1).mean()) - float(p.mean())
    assert fmean(gaps) > naive / 10  # which is -0.1 to -0.5
    assert abs(fmean(gaps)) < 0.01
    if spread == "mostly sure":  # else two predictions of one image differ more than two images do
        assert inside >= 0.94 * runs


def noisy(net):
    """A defense whose network has noise of its own, from torch's global stream."""
    return Single(Through(net, lambda x: x + 0.2 * torch.randn_like(x)))


class Whim(Transductive):
    """Adapts at random: some of its network's weights change by the defender's private draw."""

    needs_source = False

    def fit_to_batch(self, x, private):
        own = self.net[1].weight
        net = nn.Sequential(nn.Flatten(), nn.Linear(own.shape[1], 4))
        with torch.no_grad():
            net[1].weight.copy_(own + 0.3 * torch.randn(own.shape, generator=private))
            net[1].bias.copy_(self.net[1].bias)
        return self.copy_with(adapted=net)


class Moods(Whim):
    """The same, and goes on from what it has become."""

    stateful = True

    def after_batch(self, generator=None):
        return self.copy_with(net=self.adapted, adapted=None)


def linear(seed=0, inputs=3 * 4 * 4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 4))


def transformed(copies=1, rule=mean_probs):
    return RandomTransforms(linear(), [GaussianNoise(0.3), HorizontalFlip()], 2, copies, rule=rule)


KINDS = {
    "network": (lambda: Single(linear()), False),
    "randomized ensemble": (lambda: Ensemble([linear(), linear(1)], [0.7, 0.3]), False),
    "mean probabilities": (lambda: Ensemble([linear(), linear(1)], rule=mean_probs), False),
    "fixed votes": (
        lambda: TransformEnsemble([linear(), linear(1)], ["clean", "flip_horizontal"]),
        False,
    ),
    "random transforms": (transformed, True),
    "random transforms, majority": (lambda: transformed(3, majority), True),
    "mixture": (lambda: Mixture([transformed(), Single(linear(1))]), True),
    "noise of its own": (lambda: noisy(linear()), True),
    "adapts": (lambda: Whim(linear()), False),
    "adapts and remembers": (lambda: Moods(linear()), False),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_randomness_is_noticed(kind):
    make, expected = KINDS[kind]
    x = torch.rand(8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert is_random(make(), x, torch.arange(8)) is expected


@pytest.mark.parametrize("kind", list(KINDS))
def test_attacks_that_do_nothing_are_scored_by_the_draws_of_clean_images(kind):
    """As RobustEval plays it: the worst of nine is the clean accuracy, without the luck of a draw.

    Of a defense that adapts each inference is a private draw.
    """
    torch.manual_seed(0)
    defense, (_, random) = KINDS[kind][0](), KINDS[kind]
    joint, nothing, index = defense.transductive, NoAttack(NOTHING.threat), torch.arange(50)
    x, y = torch.rand(50, 3, 4, 4), torch.randint(4, (50,))
    draws, asked = (4, 1) if joint else (1, 4)
    scores = []
    for name in range(1 + ATTACKS):
        match = AttackerDefenderSession(nothing, defense, 0, 0, name, private=(0, 0), draws=draws)
        found = match.step(x, y, index, asked)[1]
        scores.append(torch.stack([robust_accuracy(a, y) for a in found], 1))
    assert all(torch.equal(scores[0], each) for each in scores[1:])
    assert (len(scores[0].unique(dim=1).T) > 1) == (random or joint)  # draws differ
    worst = worst_case([(index, torch.stack(scores, 1))], random, joint).scores
    assert float(worst.mean()) == pytest.approx(float(scores[0].mean()))


def evaluate(module, *callbacks, data=None, **options):
    run = trainer(*callbacks, **options)
    return run.test(module, data or Blobs(test_size=33), verbose=False)[0]


def test_private_draws_widen_the_interval_and_are_recorded():
    torch.manual_seed(0)
    module = AdversarialTraining(lambda: linear(inputs=192), defense=Whim)
    one, many = RobustEval({"pgd": NOTHING}), RobustEval({"pgd": NOTHING}, private_draws=5)
    for callback in (one, many):
        evaluate(module, callback)
    assert many.result.scores.shape == (33, 2, 5)
    assert torch.equal(many.result.scores[..., 0], one.result.scores[..., 0])  # as the first
    assert one.results[0].details["interval_covers"] == "images"
    for result in many.results:
        spread = result.interval[1] - result.interval[0]
        alone = wilson(result.accuracy, 33)
        assert spread > alone[1] - alone[0]
        assert result.details["interval_covers"] == "images and private draws"
    assert len(set(many.result.scores[:, 0].mean(0).tolist())) > 1
    assert many.results[1].details["over_private_draws"]
    with pytest.raises(ValueError, match="sees the defender's state plays against one"):
        AttackerDefenderSession(NOTHING, Moods(linear()), 0, draws=2, attacker_sees_state=True)


def test_a_network_with_noise_of_its_own_is_evaluated_reproducibly():
    """Whatever the global random state, which is left as it was."""
    torch.manual_seed(0)
    module = AdversarialTraining(TinyNet, defense=noisy)
    attack = PGD(Threat("linf", 0.1), 2, 0.05)
    found = []
    for seed in (1, 2):
        callback = RobustEval({"pgd": attack})
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        x, y, index = torch.rand(8, 3, 8, 8), torch.arange(8) % 4, torch.arange(8)
        torch.set_rng_state(before)
        AttackerDefenderSession(attack, module.defense, 0).step(x, y, index)
        is_random(module.defense, x, index)
        assert torch.equal(torch.get_rng_state(), before)
        evaluate(module, callback, data=Blobs(test_size=33, eval_batch_size=seed * 7))
        found.append(callback.result.scores)
    assert torch.equal(*found)


def test_randomness_is_looked_for_in_every_group():
    class Late(nn.Module):
        """Random only where the first pixel is bright."""

        def forward(self, x):
            bright = (x[:, :1, 0, 0] > 0.6).float()
            return x.flatten(1)[:, :4] + bright * torch.randn(len(x), 4)

    callback = RobustEval({"pgd": NOTHING}, group_size=4)
    evaluate(AdversarialTraining(Late), callback)
    assert callback.result.random


class Loaded(Blobs):
    """Test images by the loader that a function makes of them."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def test_dataloader(self):
        return self.make(self.parts["test"])


def test_images_of_the_same_index_are_refused():
    """Two sets in one, each numbered from 0."""
    clashing = Loaded(lambda part: DataLoader(ConcatDataset([part, part]), 8))
    with pytest.raises(ValueError, match="66 images have 33 different indices"):
        evaluate(AdversarialTraining(TinyNet), RobustEval({"pgd": NOTHING}), data=clashing)


class Streamed(IterableDataset):
    """Images without a number of them."""

    def __init__(self, part):
        self.part = part

    def __iter__(self):
        return (self.part[i] for i in range(len(self.part)))


def weighted(part):
    """A loader whose sampler decides what is evaluated, some images several times."""
    sampler = WeightedRandomSampler([1.0] * len(part), 20, generator=torch.Generator())
    return DataLoader(part, 8, sampler=sampler)


def sampled(part):
    """A loader of a part of the images."""
    return DataLoader(part, 7, sampler=SubsetRandomSampler(range(20)))


@pytest.mark.parametrize(
    ("data", "options", "limits", "group_size", "images"),
    [
        (Loaded(lambda part: DataLoader(Streamed(part), 8)), {}, {}, 128, (33, 33)),
        (Loaded(weighted), {"group_size": 7}, {}, 7, (1, 19)),
        (Loaded(sampled), {"max_images": 10}, {}, 128, (10, 10)),
        (Blobs(test_size=33), {"max_images": 5}, {"limit_test_batches": 1}, 128, (5, 5)),
    ],
)
def test_which_images_count(data, options, limits, group_size, images):
    """All of a stream; each image that a sampler repeats once; a choice after limits on batches."""
    callback = RobustEval({"pgd": NOTHING}, **options)
    evaluate(AdversarialTraining(TinyNet), callback, data=data, **limits)
    result, index = callback.results[0], callback.result.index.tolist()
    assert (result.details["group_size"], result.n) == (group_size, len(set(index)))
    assert images[0] <= result.n <= images[1]


def test_the_worst_of_a_game_is_over_all_callbacks():
    strong = PGD(Threat("linf", 1.0), 3, 0.5)
    torch.manual_seed(0)
    module = AdversarialTraining(lambda: linear(inputs=192), defense=Whim)
    callbacks = [RobustEval({"strong": strong}), RobustEval({"weak": NOTHING}, max_images=20)]
    evaluate(module, *callbacks)
    worst = callbacks[0].results[-1]
    assert worst.details["over"] == ["strong", "weak"]
    assert (worst.n, worst.details["images"]) == (20, "those that all attacks have")
    assert worst.accuracy < callbacks[0].results[3].accuracy
