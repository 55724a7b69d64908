"""Identity: equal for what is equal, different for all else, and readable as a recipe."""

from dataclasses import dataclass
from typing import Any

import jsonargparse
import pytest
import torch

from lightning_rob import Ensemble, Mixture, RandomTransforms, Single, TransformEnsemble
from lightning_rob.attacks import ARC, PAA, PGD, Attack, OnMember, Quantized8Bit, Strongest
from lightning_rob.identity import (
    PROCESS,
    attack_spec,
    cache_key,
    check_describable,
    fingerprint,
    to_plain_data,
)
from lightning_rob.objectives import ce_of_mean_logits
from lightning_rob.rules import majority
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise, HorizontalFlip
from tests.tiny import TinyNet

THREAT = Threat("l2", 0.5)
PLAIN = PGD(THREAT, 3, 0.1, objective=ce_of_mean_logits, draws=4)

DEFENSES = {
    "net": lambda net: Single(net),
    "ensemble": lambda net: Ensemble([net, net]),
    "majority": lambda net: Ensemble([net, net], rule=majority),
    "noise": lambda net: RandomTransforms(net, [GaussianNoise(alpha=0.1)], 1, 2),
    "more": lambda net: RandomTransforms(net, [GaussianNoise(alpha=0.9)], 1, 2),
    "flip": lambda net: RandomTransforms(net, [HorizontalFlip()], 1, 2),
    "identity": lambda net: RandomTransforms(
        net, [GaussianNoise(alpha=0.1)], 1, 2, gradients="identity"
    ),
    "draws": lambda net: RandomTransforms(net, [GaussianNoise(alpha=0.1)], 1, 3),
    "flips": lambda net: TransformEnsemble([net, net], ["flip_both", "clean"]),
    "turns": lambda net: TransformEnsemble([net, net], ["rotate_180", "clean"]),
    "mixture": lambda net: Mixture([Single(net), Ensemble([net, net])]),
    "mixture of majority": lambda net: Mixture([Single(net), Ensemble([net, net], rule=majority)]),
}


def test_a_fingerprint_distinguishes_defenses_of_the_same_weights():
    net = TinyNet()
    prints = {name: fingerprint(make(net)) for name, make in DEFENSES.items()}
    assert len(set(prints.values())) == len(prints)
    assert prints == {name: fingerprint(make(net)) for name, make in DEFENSES.items()}
    net.strength = 2.0
    assert fingerprint(Single(net)) != prints["net"]


@pytest.mark.parametrize("values", [(1.0, 2.0), ([1.0], [2.0]), ({"a": 1}, {"a": 2}), ({1}, {2})])
def test_a_fingerprint_covers_private_values_of_a_users_network(values):
    net = TinyNet()
    for value in (*values, None):
        before, net._values = fingerprint(Single(net)), value
        assert fingerprint(Single(net)) != before


def test_an_object_without_description_is_equal_to_none_of_another_process():
    class Opaque:
        __slots__ = ()

    assert PROCESS in str(to_plain_data(Opaque()))
    assert to_plain_data(lambda x: x + 1) == to_plain_data(lambda x: x + 1)
    assert to_plain_data(lambda x: x + 1) != to_plain_data(lambda x: x + 2)
    assert to_plain_data({"a": 1, "b": (2, None)}) == to_plain_data({"b": (2, None), "a": 1})
    with pytest.raises(ValueError, match="make it a frozen dataclass"):
        check_describable([Opaque()])
    check_describable(PLAIN)


@dataclass(frozen=True)
class Scaled:
    by: Any


def test_a_key_depends_on_arrays_functions_and_nested_values():
    values = (1, 1.0, "1", None, [1], torch.ones(1), torch.ones(2), Scaled(1), Scaled(len), Scaled)
    assert len({cache_key(value=value) for value in values}) == len(values)
    assert cache_key(a=1, b=Scaled(torch.ones(2))) == cache_key(b=Scaled(torch.ones(2)), a=1)


def test_a_class_with_annotations_is_described_to_the_end():
    class Annotated(TinyNet):
        scale: Any = 2.0

    assert PROCESS not in str(to_plain_data(Annotated()))


@pytest.mark.parametrize(
    "attack",
    [
        PLAIN,
        Strongest((PLAIN, ARC(THREAT, 5, 0.5))),
        OnMember(PLAIN, 1),
        Quantized8Bit(PLAIN),
        PAA(PLAIN),
    ],
    ids=lambda attack: type(attack).__name__,
)
def test_a_spec_is_a_recipe_of_the_attack(attack):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--attack", type=Attack)
    config = parser.parse_object({"attack": attack_spec(attack)})
    assert parser.instantiate(config).attack == attack


def test_a_spec_has_import_paths():
    assert attack_spec(PLAIN)["class_path"] == "lightning_rob.PGD"
    arguments = attack_spec(PLAIN)["init_args"]
    assert arguments["objective"] == "lightning_rob.objectives.ce_of_mean_logits"
    assert arguments["threat"]["init_args"]["bounds"] == [0.0, 1.0]
    assert attack_spec(Threat(float("inf")))["init_args"]["norm"] == "inf"  # as JSON has none
