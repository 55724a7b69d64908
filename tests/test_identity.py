"""Identity: equal for what is equal, different for all else, and readable as a recipe."""

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jsonargparse
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_rob import Ensemble, Mixture, RandomTransforms, Single, TransformEnsemble
from lightning_rob.attacks import ARC, PAA, PGD, Attack, OnMember, Quantized8Bit, Strongest
from lightning_rob.objectives import ce_of_mean_logits
from lightning_rob.rules import majority
from lightning_rob.runtime.identity import attack_spec, cache_key, fingerprint
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise, HorizontalFlip
from tests.forked import Forked
from tests.tiny import TinyNet, quiet_trainer

THREAT = Threat("l2", 0.5)
PLAIN = PGD(THREAT, 3, 0.1, objective=ce_of_mean_logits, draws=4)
NOISE = GaussianNoise(alpha=0.1)
DEFENSES = {
    "net": lambda net: Single(net),
    "ensemble": lambda net: Ensemble([net, net]),
    "majority": lambda net: Ensemble([net, net], rule=majority),
    "noise": lambda net: RandomTransforms(net, [NOISE], 1, 2),
    "flip": lambda net: RandomTransforms(net, [HorizontalFlip()], 1, 2),
    "identity": lambda net: RandomTransforms(net, [NOISE], 1, 2, gradients="identity"),
    "flips": lambda net: TransformEnsemble([net, net], ["flip_both", "clean"]),
    "mixture": lambda net: Mixture([Single(net), Ensemble([net, net])]),
    "mixture of majority": lambda net: Mixture([Single(net), Ensemble([net, net], rule=majority)]),
}


@dataclass(frozen=True)
class Scaled:
    GAIN = 1.0
    by: Any


def test_a_fingerprint_distinguishes_defenses_of_the_same_weights():
    net = TinyNet()
    prints = {name: fingerprint(make(net)) for name, make in DEFENSES.items()}
    assert len(set(prints.values())) == len(prints)
    assert prints == {name: fingerprint(make(net)) for name, make in DEFENSES.items()}
    net.strength = 2.0
    assert fingerprint(Single(net)) != prints["net"]


def test_local_classes_of_one_name_are_distinguished_by_what_they_hold():
    def made(by):
        class Net(TinyNet):
            def forward(self, x):
                return by * super().forward(x)

        torch.manual_seed(0)
        return Net()

    prints = [fingerprint(made(by)) for by in (1.0, 2.0, 1.0)]
    assert prints[0] == prints[2] != prints[1]


class Helper:
    """Holds the network that holds it."""

    def __init__(self, net, gain):
        self.net, self.gain = net, gain


PAIRS = {
    "number": lambda net, by: setattr(net, "_gain", by),
    "mapping": lambda net, by: setattr(net, "_gain", {"a": by}),
    "array": lambda net, by: setattr(net, "_gain", np.float32(by)),
    "dataclass": lambda net, by: setattr(net, "_gain", Scaled(by)),
    "lambda": lambda net, by: setattr(net, "_gain", lambda x: x * by),
    "object": lambda net, by: setattr(net, "_gain", Helper(net, by)),
    "type": lambda net, by: setattr(net, "_act", nn.Tanh if by == 1 else nn.ReLU),
}


@pytest.mark.parametrize("change", PAIRS.values(), ids=PAIRS.keys())
def test_a_fingerprint_covers_the_attributes_of_a_users_network(change):
    found = []
    for by in (1.0, 2.0, 1.0):
        torch.manual_seed(0)
        net = type("Net", (TinyNet,), {})()
        change(net, by)
        found.append(fingerprint(Single(net)))
    assert found[0] != found[1] and found[0] == found[2]


NET = """
from torch import nn
from . import layers
scale = 1.0
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 3.0
    def forward(self, x):
        return layers.act(x) * self.scale
"""
LAYERS = "from users.settings import GAIN\n\ndef act(x):\n    return x * GAIN"
FILES = {"__init__": "", "settings": "GAIN = 2.0", "unread": "GAIN = 2.0"}
FILES |= {"layers": LAYERS, "net": NET}


def print_fingerprint(folder, change):
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    net = import_module("users.net")
    import_module("users.unread")
    exec(change, {"users": sys.modules["users"]})
    print(fingerprint(net.Net()))


def test_a_fingerprint_covers_the_files_that_a_users_network_imports(tmp_path):
    def printed(change="", **edited):
        (tmp_path / "users").mkdir(exist_ok=True)
        for name, text in FILES.items():
            (tmp_path / f"users/{name}.py").write_text(text + edited.get(name, ""))
        done = Forked(print_fingerprint, str(tmp_path), change).wait()
        assert done.returncode == 0, done.stderr
        return done.stdout

    before = printed()
    # A global of the name of an attribute, and a file that the network does not import:
    assert printed("users.net.scale = 5.0", unread="# changed") == before
    assert printed(net="\n# changed") != before and printed(settings="\n# changed") != before


class Logged(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)

    def test_step(self, batch):
        self.log("mean", self.net(batch).mean())


class Watched(Callback):
    def __init__(self):
        self.seen = []

    def on_test_batch_end(self, trainer, module, *_):
        self.seen.append(fingerprint(module))


def test_a_run_does_not_change_a_fingerprint():
    module, watch = Logged(), Watched()
    before = fingerprint(module)
    quiet_trainer(watch).test(module, DataLoader(torch.ones(2, 2)), verbose=False)
    assert watch.seen == [before] * 2


def test_an_object_without_description_is_equal_to_none_of_another_process():
    class Opaque:
        __slots__ = ()

    assert cache_key(a=Opaque()) != cache_key(a=Opaque())
    function = lambda x: x + 1  # noqa: E731
    assert cache_key(a=function) == cache_key(a=function) != cache_key(a=lambda x: x + 1)
    assert cache_key(a=1, b=(2, None)) == cache_key(b=(2, None), a=1)


def test_code_without_a_file_is_equal_to_none_of_another_process():
    notebook: dict[str, Any] = {"__name__": "no_file"}
    exec("class Cell: pass\ndef act(x): return x", notebook)
    for value in (notebook["Cell"](), notebook["act"]):
        assert cache_key(a=value) != cache_key(a=value)


NESTED = Strongest((PLAIN, ARC(THREAT, 5, 0.5))), OnMember(PLAIN, 1), Quantized8Bit(PLAIN)


@pytest.mark.parametrize("attack", [PLAIN, *NESTED, PAA(PLAIN)], ids=lambda a: type(a).__name__)
def test_a_spec_is_a_recipe_of_the_attack(attack):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--attack", type=Attack)
    config = parser.parse_object({"attack": attack_spec(attack)})
    assert parser.instantiate(config).attack == attack
