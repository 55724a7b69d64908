"""Games with defenses that adapt: who sees what, which images are played together."""

import pytest
import torch

from lightning_rob.attacks import GMSA, PGD, Attack
from lightning_rob.callbacks import RobustEval
from lightning_rob.data.base import labelled_images
from lightning_rob.defenses import DENT, Defense
from lightning_rob.defenses.transductive import Transductive, give_source
from lightning_rob.evaluation import RoundProtocol
from lightning_rob.evaluation.protocol import AttackerDefenderSession
from lightning_rob.modules import AdversarialTraining
from lightning_rob.nets import SmallCNN
from lightning_rob.randomness import Streams
from lightning_rob.rules import mean_probs
from lightning_rob.threat import Threat
from tests.callbacks.test_any_module import trainer
from tests.forked import two_ranks
from tests.tiny import Blobs, TinyNet, pgd, recipe, records, robust_eval, run

THREAT = Threat("linf", 0.1)
WEAK = PGD(THREAT, 2, 0.05)
TWO = ["--trainer.devices=2", "--trainer.strategy=ddp"]


class Diary(Defense):
    """Its state is what it has seen and drawn; its predictions do not matter."""

    def __init__(self, pages=(), stateful=True, name="d"):
        super().__init__(torch.ones(1), mean_probs)
        self.pages, self.stateful, self.name = tuple(pages), stateful, name

    def logits(self, x, generator=None):
        return x.flatten(1)[None, :, :4]

    def adapt(self, x, generator=None):
        drawn = torch.rand(1, generator=generator).item()
        page = (len(x), round(float(x.sum()), 3), drawn)
        return Diary((*self.pages, page), self.stateful, self.name)

    def after_batch(self, generator=None):
        return Diary((*self.pages, torch.rand(1, generator=generator).item()), True, self.name)


class Reader(Attack):
    """Reads the diary, rehearses, and hands in the images as they are."""

    def __init__(self, rehearsals=0):
        self.threat, self.read, self.rehearsals = THREAT, [], rehearsals

    def perturb(self, defense, x, y, generator):
        self.read.append(defense.pages)
        for _ in range(self.rehearsals):
            defense = defense.adapt(x, torch.Generator().manual_seed(17))
        return x


def batches(count=3, size=4):
    noise = torch.Generator().manual_seed(0)
    for i in range(count):
        index = torch.arange(i * size, (i + 1) * size)
        yield torch.rand(size, 3, 8, 8, generator=noise), index % 4, index


def match(attack, defense, attacker_sees_state=False):
    game = AttackerDefenderSession(attack, defense, 5, attacker_sees_state=attacker_sees_state)
    for x, y, index in batches():
        game.step(x, y, index)
    return game


def test_a_stateful_defense_goes_on_with_what_it_has_become():
    """Each round has randomness of its own."""
    pages = match(Reader(), Diary()).defenders[0][0].pages
    assert len(pages) == 6
    seen = [(len(x), round(float(x.sum()), 3)) for x, _, _ in batches()]
    assert [page[:2] for page in pages[::2]] == seen
    assert len({*(page[2] for page in pages[::2]), *pages[1::2]}) == 6


def test_a_stateless_defense_begins_anew_and_leaves_nothing():
    first = Diary(stateful=False)
    attack = Reader()
    game = match(attack, first)
    assert game.defenders == [[first]]
    assert attack.read == [(), (), ()]


def test_an_attacker_sees_the_state_only_if_it_leaks():
    blind, sighted = Reader(), Reader()
    hidden = match(blind, Diary()).defenders[0][0].pages
    leaked = match(sighted, Diary(), attacker_sees_state=True).defenders[0][0].pages
    assert hidden == leaked
    assert sighted.read == [leaked[:0], leaked[:2], leaked[:4]]
    # It rehearses what it cannot see: the same images, randomness of its own.
    assert [page[:2] for page in blind.read[2][::2]] == [page[:2] for page in leaked[:4:2]]
    assert all(
        one[2] != other[2] for one, other in zip(blind.read[2][::2], leaked[::2], strict=False)
    )


@pytest.mark.parametrize("attacker_sees_state", [False, True])
def test_rehearsals_never_change_what_the_defender_draws(attacker_sees_state):
    games = [match(Reader(count), Diary(), attacker_sees_state) for count in (0, 1, 7)]
    first, *others = [game.defenders[0][0].pages for game in games]
    assert others == [first, first]


class Notes(RobustEval):
    """Notes the indices of each round; of several such callbacks the first one plays all rounds."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.played = []

    def attack_batch(self, trainer, pl_module, batch, images):
        self.played.append(batch[2].tolist())
        super().attack_batch(trainer, pl_module, batch, images)


def evaluate(*callbacks, data=None, **options):
    torch.manual_seed(0)
    module = AdversarialTraining(lambda: SmallCNN(4, 3, 4), defense=DENT)
    data = data or Blobs(test_size=33, eval_batch_size=8)
    return trainer(*callbacks, **options).test(module, data, verbose=False)[0], module


def test_the_worst_is_one_attack_for_all_images():
    """Predictions depend on the whole round: no round has images of several attacks."""
    attacks = {"weak": WEAK, "other": PGD(THREAT, 4, 0.05)}
    logged, _ = evaluate(RobustEval(attacks))
    both = [logged[f"test/robust/{name}"] for name in attacks]
    assert logged["test/robust/worst"] == pytest.approx(min(both))


def test_games_of_other_rules_are_games_of_their_own():
    """The same attack in another game has another name; the worst is that of the last game."""
    first = Notes({"pgd": WEAK}, max_images=5)
    other = Notes({"pgd": WEAK}, protocol=RoundProtocol("by_label", images=4))
    logged, _ = evaluate(first, other)
    assert [len(part) for part in first.played] == [5] + [4] * 8 + [1]
    (worst,) = [r for r in first.results if r.name == "worst"]
    assert worst.n == 33
    assert worst.details["over"] == ["pgd_2"]
    assert worst.details["protocol"]["images"] == 4
    assert logged["test/robust/worst"] == pytest.approx(worst.accuracy)
    assert "test/robust/clean" in logged  # of what has adapted, which test/acc is not


@pytest.mark.parametrize(
    ("limits", "images", "played"),
    [
        ({}, None, 33),
        ({"limit_test_batches": 2}, None, 16),
        ({"fast_dev_run": True}, 1, 1),
        ({"limit_test_batches": 2}, 1, 16),
        ({"limit_test_batches": 0.5}, 16, 16),
        ({}, 16, 33),
    ],
)
def test_rounds_are_the_batches_in_order_and_limits_count_images(limits, images, played):
    callback, size = Notes({"pgd": WEAK}, protocol=RoundProtocol(images=images)), images or 8
    evaluate(callback, **limits)
    assert callback.played == [[*range(i, min(i + size, played))] for i in range(0, played, size)]


def test_some_images_are_played_in_full_rounds():
    callback = Notes({"pgd": WEAK}, max_images=20, protocol=RoundProtocol(images=7))
    evaluate(callback)
    assert list(map(len, callback.played)) == [7, 7, 6]
    played = [index for part in callback.played for index in part]
    assert len(set(played)) == 20
    assert played != sorted(played)


def test_two_rounds_in_a_row_are_sorted_by_label():
    callback = Notes({"pgd": WEAK}, protocol=RoundProtocol("by_label"))
    evaluate(callback, data=(data := Blobs(33 + 63, 33, 4, 8)))
    labels = [data.parts["test"][i][1] for i in range(33)]
    expected = []
    for start in range(0, 33, 16):
        window = sorted(range(start, min(start + 16, 33)), key=labels.__getitem__)
        expected += [window[:8], window[8:]]
    assert callback.played == [part for part in expected if part]


def test_the_figure_is_that_of_the_game_by_hand():
    attack = GMSA(PGD(THREAT, 3, 0.05), rounds=2)
    data = Blobs(test_size=33, eval_batch_size=8)
    logged, module = evaluate(RobustEval({"gmsa": attack}), data=data)
    right = 0
    for start in range(0, 33, 8):
        items = [data.parts["test"][i] for i in range(start, min(start + 8, 33))]
        x = torch.stack([item[0] for item in items])
        y, index = (torch.tensor([item[i] for item in items]) for i in (1, 2))
        keys = (0, 0, *b"gmsa")
        x_adv = attack(module.defense, x, y, Streams.from_index(index, *keys, 0))
        final = module.defense.adapt(x_adv).eval()
        right += int((final(x_adv).argmax(1) == y).sum())
    assert logged["test/robust/gmsa"] == pytest.approx(right / 33)


def test_two_processes_play_the_rounds_of_one(tmp_path):
    gmsa = {"class_path": "lightning_rob.attacks.GMSA", "init_args": {"inner": pgd(), "rounds": 2}}
    init = {"classes": 4, "channels": 3, "width": 4}
    net = {"class_path": "lightning_rob.nets.SmallCNN", "init_args": init}
    init = {"net": net, "defense": "lightning_rob.defenses.DENT"}
    model = {"class_path": "AdversarialTraining", "init_args": init}
    rounds = {"order": "by_label", "images": 8}
    callback = robust_eval({"gmsa": gmsa, "pgd": pgd()}, protocol=rounds)
    config = recipe(tmp_path, model=model, **{"trainer__callbacks+": [callback]})
    run("test", "--config", config)
    one = {r["name"]: r for r in records(tmp_path)}
    assert one["gmsa"]["protocol"] == rounds | {"defender": "stateless"}
    assert one["gmsa"]["attack"]["class_path"] == "lightning_rob.GMSA"
    assert one["gmsa"]["attack"]["init_args"]["inner"]["class_path"] == "lightning_rob.PGD"
    assert one["gmsa"]["n"] == 33
    (tmp_path / "run/version_0/robust.jsonl").unlink()
    two_ranks("test", "--config", config, *TWO)
    two = {r["name"]: r for r in records(tmp_path)}
    assert {n: (r["accuracy"], r["n"]) for n, r in two.items()} == {
        n: (r["accuracy"], r["n"]) for n, r in one.items()
    }
    refused = two_ranks("test", "--config", config, "--trainer.callbacks.protocol.images=33", *TWO)
    assert refused.returncode == 2
    assert "all 33 images make one round" in refused.stderr


class Pupil(Transductive):
    """Adapts by looking at the first labelled image."""

    def fit_to_batch(self, x, generator):
        image, label = self.source.gather(torch.tensor([0]))
        return self.copy_with(seen=(image, int(label)))


def test_the_run_gives_its_training_images_unaugmented():
    module = AdversarialTraining(TinyNet, defense=Pupil)
    data = Blobs()
    trainer(RobustEval({"pgd": WEAK})).test(module, data, verbose=False)
    source = module.defense.source
    assert len(source) == 96 - 32
    x, y = source.gather(torch.tensor([3]))
    expected = data.parts["train"].source[int(data.parts["train"].indices[3])]
    assert torch.equal(x[0], expected[0])
    assert int(y) == expected[1]


def test_without_a_data_module_of_ours_the_source_must_be_given():
    pupil = Pupil(TinyNet())
    with pytest.raises(ValueError, match="Pupil learns from labelled images: give it source"):
        pupil.adapt(torch.rand(2, 3, 8, 8))
    given = Pupil(TinyNet(), source=(torch.rand(2, 3, 8, 8), torch.tensor([0, 3])))
    give_source(given, lambda: labelled_images(trainer()))
    assert given.adapt(torch.rand(2, 3, 8, 8)).seen[1] == 0
    for images, labels in ((2, 3), (0, 0)):
        with pytest.raises(ValueError, match="source must have"):
            Pupil(TinyNet(), source=(torch.rand(images, 1), torch.zeros(labels)))


def test_one_round_is_for_one_process():
    """The advice leaves no process without a round."""
    for options, message in (({"order": "sorted"}, "'natural' or"), ({"images": 0}, "at least 1")):
        with pytest.raises(ValueError, match=message):
            RoundProtocol(**options)
    for rounds, processes in ((1, 1), (2, 8), (8, 8), (9, 2)):
        RoundProtocol(images=10).check(None, 10 * rounds, processes)
    for processes, images in ((2, 5000), (8, 1250), (3, 3334)):
        advice = rf"all 10000 images make one round.* of {processes} processes"
        advice += rf".*--trainer\.devices=1.*protocol\.images={images} or fewer"
        with pytest.raises(ValueError, match=advice):
            RoundProtocol(images=10_000).check(None, 10_000, processes)
        RoundProtocol(images=images).check(None, 10_000, processes)
