"""Networks of other people: what they return, in which precision, and in which wrapper."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_rob.attacks import ARC, PGD, DeepFool, InsideBounds, WithBackward
from lightning_rob.audit.auditor import audit
from lightning_rob.defenses import (
    DENT,
    Ensemble,
    Mixture,
    RandomTransforms,
    Single,
    TransformEnsemble,
)
from lightning_rob.defenses.network import Preprocessed, network_logits
from lightning_rob.evaluation import evaluate
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise
from tests.attacks.common import images, seeded, trained_net
from tests.audit.planted import Through

THREAT = Threat("linf", "32/255")
ATTACKS = {
    "pgd": PGD(THREAT, 3, "16/255"),
    "arc": ARC(THREAT, 2, THREAT.eps),
    "deepfool": DeepFool(THREAT, 3),
    "inside": WithBackward(PGD(THREAT, 2, "16/255"), InsideBounds()),
}


UNDERSTOOD = {
    "object": lambda logits: SimpleNamespace(logits=logits, hidden_states=None),
    "dict": lambda logits: {"loss": None, "logits": logits},
    "half": lambda logits: logits.half(),
}
KINDS = {
    "single": Single,
    "ensemble": lambda net: Ensemble([net, net]),
    "mixture": lambda net: Mixture([Single(net), Single(net)]),
    "random transforms": lambda net: RandomTransforms(net, [GaussianNoise(alpha=0.1)], 1, 3),
    "transform ensemble": lambda net: TransformEnsemble([net, net], ["flip_both", "rotate_180"]),
    "adapting": lambda net: DENT(net, steps=2),
    "preprocessed": lambda net: Single(Preprocessed(lambda x: 1 - x, net)),
}


@pytest.mark.parametrize("change", UNDERSTOOD.values(), ids=UNDERSTOOD.keys())
@pytest.mark.parametrize("wrap", KINDS.values(), ids=KINDS.keys())
def test_logits_are_found(wrap, change):
    x, _ = images(4)
    plain, other = (wrap(Through(trained_net(1), after=f)).eval() for f in (nn.Identity(), change))
    expected, found = (d.adapt(x, seeded(1)).logits(x, seeded()) for d in (plain, other))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)  # of half precision


REFUSED = {
    "tuple": (lambda z: (z, 5), "tuple"),
    "other keys": (lambda z: {"out": z, "aux": z}, "dict with keys out, aux"),
    "vector": (lambda z: z[:, 0], r"Tensor \[3\] of torch.float32"),
    "segmentation": (lambda z: z[..., None, None].expand(-1, -1, 2, 2), r"Tensor \[3, 4, 2"),
    "classes": (lambda z: z.argmax(1), r"Tensor \[3\] of torch.int64"),
    "fewer, in an object": (lambda z: SimpleNamespace(logits=z[:-1]), r"Tensor \[2, 4\]"),
    "array": (lambda z: z.detach().numpy(), "ndarray"),
}


@pytest.mark.parametrize(("change", "what"), REFUSED.values(), ids=REFUSED.keys())
def test_other_outputs_are_named(change, what):
    x, y = images(3)
    net = Through(trained_net(1), after=change)
    wanted = rf"Through returned {what}.* logits \[B, K\] are wanted, here .*\[3, K\].*: wrap"
    for defense in (Single(net), Ensemble([net, net])):
        with pytest.raises((TypeError, ValueError), match=wanted):
            defense(x)
    with pytest.raises((TypeError, ValueError), match=wanted):
        ATTACKS["arc"](Ensemble([net, net]), x, y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_network_runs_in_its_own_precision(dtype):
    x, _ = images(3)
    net = trained_net(1).eval().to(dtype)
    z = x.double().requires_grad_()
    logits = network_logits(net, z)
    assert torch.equal(logits.double(), net(x.to(dtype)).double())
    assert logits.dtype == torch.promote_types(dtype, torch.float32)
    (gradient,) = torch.autograd.grad(logits[:, 0].sum(), z)
    assert gradient.dtype == torch.float64
    assert gradient.flatten(1).any(1).all()


def test_a_preprocessing_runs_in_the_precision_of_the_images():
    seen = []
    behind = Preprocessed(lambda x: seen.append(x.dtype) or x, trained_net(1).bfloat16())
    network_logits(behind, images(3)[0])
    assert seen == [torch.float32]


def scripted(net, folder):
    """A network that was saved as TorchScript and loaded again."""
    torch.jit.trace(net, images(2)[0]).save(folder / "net.pt")
    return torch.jit.load(folder / "net.pt")


def compiled(net, folder):
    return torch.compile(net, backend="eager")


def scores_and_flags(net):
    x, y = images(16, seed=5)
    report = audit(Single(net), x, y, THREAT, steps=5, queries=20)
    flags = [(one.name, one.severity) for one in report.findings]
    return evaluate(net, ATTACKS, [(x, y)]).scores, flags


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("made", [scripted, compiled])
def test_torchscript_and_compiled_networks(made, tmp_path):
    """Attacked, evaluated and audited like the network they were made of."""
    expected, flags = scores_and_flags(trained_net(1).eval())
    found, others = scores_and_flags(made(trained_net(1).eval(), tmp_path))
    torch.testing.assert_close(found, expected)
    assert others == flags


def test_images_of_another_size_than_the_network_wants():
    """Of torchvision, which only asserts."""
    from torchvision.models import VisionTransformer

    small = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 16, "num_classes": 4}
    net = VisionTransformer(32, 8, **small).eval()
    with pytest.raises(ValueError, match=r"images of 3x48x48: .*Expected 32 but got 48"):
        Single(net)(torch.rand(2, 3, 48, 48))


def test_a_classifier_of_hugging_face():
    """Built from a configuration: nothing is downloaded."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        num_channels=1, embedding_size=4, hidden_sizes=[4], depths=[1], num_labels=4
    )
    net = transformers.ResNetForImageClassification(config).eval()
    x, _ = images(4)
    y = net(x).logits.argmax(1)
    found = evaluate(net, ATTACKS, [(x, y)])
    assert found.accuracy("clean") == 1
    assert (found.per_image("worst") <= found.per_image("clean")).all()
