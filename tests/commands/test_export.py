"""An exported defense predicts as the defense itself, also without this package."""

import json
from functools import cache

import pytest
import torch
from torch import nn

from lightning_rob import Ensemble, Mixture, RandomTransforms, Single, TransformEnsemble
from lightning_rob.commands.export.program import export
from lightning_rob.defenses import DENT
from lightning_rob.randomness import Streams
from lightning_rob.rules import majority, random_member
from lightning_rob.transforms import GaussianNoise, HorizontalFlip
from tests.pieces import python
from tests.tiny import TinyNet, blobs, run

SEED = 5
LOADER = """
import json, sys, torch
given = torch.load(sys.argv[1], weights_only=True)
program = torch.export.load(sys.argv[2]).module()
found = [program(*(part[:n] for part in given)) for n in (1, 3, 8)]
assert not any("lightning" in name for name in sys.modules), "the package was imported"
print(json.dumps([each.tolist() for each in found]))
"""


def nets(count):
    """Networks whose predictions differ from image to image."""
    torch.manual_seed(0)
    made = [TinyNet() for _ in range(count)]
    for net in made:
        images = torch.rand(64, 3, 8, 8)
        for _ in range(50):  # for BatchNorm to know them
            net(images)
        net.eval()
        net.last.bias.data -= net(images).mean(0)
    return made


@pytest.fixture(scope="module")
def x():
    return torch.rand(24, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def keys():
    return torch.randint(2**62, (24,), generator=torch.Generator().manual_seed(2))


def rt():
    kinds = [GaussianNoise(0.2), HorizontalFlip(p=0.5)]
    return RandomTransforms(nets(1)[0], kinds, size=2, draws=2, rule=random_member)


def behind(*names):
    return TransformEnsemble(nets(len(names)), names)


CASES = {
    "rt": rt,
    "mixture": lambda: Mixture([Ensemble(nets(2), rule=majority), behind("noise_gaussian")]),
}


@pytest.fixture(scope="module")
def written(x, keys, tmp_path_factory):
    """Return defense, file and program of a case; written and read once."""
    folder = tmp_path_factory.mktemp("written")

    @cache
    def of(case):
        defense, path = CASES[case](), folder / f"{case}.pt2"
        assert export(defense, path, x, keys, SEED) <= 1e-5
        return defense, path, torch.export.load(str(path)).module()

    return of


@pytest.mark.parametrize("case", CASES)
def test_the_program_predicts_as_the_defense_does(case, written, x, keys):
    defense, _, program = written(case)
    expected = defense(x, Streams.from_index(keys, SEED))
    for size in (1, 3, 8, 24):
        part = program(x[:size], keys[:size])
        torch.testing.assert_close(part, expected[:size], rtol=0, atol=1e-6)
    assert len(expected.argmax(1).unique()) > 1


def test_it_runs_where_this_package_is_not_imported(written, x, keys, tmp_path):
    defense, path, *_ = written("rt")
    torch.save([x, keys], tmp_path / "given.pt")
    printed = python("-c", LOADER, tmp_path / "given.pt", path, cwd=tmp_path)
    expected = defense(x, Streams.from_index(keys, SEED))
    for found in map(torch.tensor, json.loads(printed)):
        torch.testing.assert_close(found, expected[: len(found)], rtol=0, atol=1e-6)


def test_a_single_image_is_enough(x, tmp_path):
    """It is compared twice: a graph of one image would take no other number."""
    defense = Single(nets(1)[0])
    export(defense, tmp_path / "y.pt2", x[:1])
    program = torch.export.load(str(tmp_path / "y.pt2")).module()
    for size in (1, 3, 24):
        torch.testing.assert_close(program(x[:size]), defense(x[:size]), rtol=0, atol=1e-6)


class Fickle(TinyNet):
    """Another network while it is traced."""

    def forward(self, x):
        return super().forward(x) * (-1 if torch.compiler.is_exporting() else 1)


def test_a_program_with_other_predictions_is_not_written(x, tmp_path):
    net = Fickle().eval()
    net.load_state_dict(nets(1)[0].state_dict())
    with pytest.raises(ValueError, match="predicts otherwise, by up to 1 where 1e-05 is allowed"):
        export(Single(net), tmp_path / "x.pt2", x)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_program_is_refused(x, tmp_path):
    with pytest.raises(ValueError, match="DENT is transductive: it learns from every test batch"):
        export(DENT(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten())), tmp_path / "x.pt2", x)
    with pytest.raises(ValueError, match="TransformEnsemble cannot be exported"):
        export(behind("clean", "denoise_tv_chambolle"), tmp_path / "x.pt2", x)


def test_the_command_exports_a_checkpoint(trained, tmp_path, capsys):
    out = tmp_path / "defense.pt2"
    run("export", "--ckpt_path", trained, "--out", out, "--trainer.accelerator=cpu")
    printed = capsys.readouterr().out
    assert "Ensemble in " in printed and "33 test images differ by at most" in printed
    assert "It takes 1 to 4096 images of 3 x 8 x 8 at a time, and no others" in printed
    run("predict", "--ckpt_path", trained, "--trainer.accelerator=cpu")
    rows = next(tmp_path.rglob("predictions.csv")).read_text().splitlines()[1:]
    predicted = torch.tensor([[float(cell) for cell in row.split(",")[2:]] for row in rows])
    torch.testing.assert_close(torch.export.load(str(out)).module()(blobs(False)[0]), predicted)
