"""GAL against the paper's formula in slow loops."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_rob.modules import GAL
from lightning_rob.modules.gal import gal
from tests.modules.support import batch
from tests.tiny import TinyNet


def reference_gal(gradients):
    """Kariyappa and Qureshi 2019: log sum over a < b of exp(cos)."""
    members, images, _ = gradients.shape
    values = []
    for b in range(images):
        total = 0.0
        for i in range(members):
            for j in range(i + 1, members):
                u, v = gradients[i, b], gradients[j, b]
                total += np.exp((u @ v) / np.sqrt((u @ u) * (v @ v)))
        values.append(np.log(total))
    return np.array(values)


def test_the_loss_is_the_mean_cross_entropy_and_the_alignment():
    module = GAL(TinyNet, strength=0.7, members=3).double().eval()
    x, y = batch()
    x = x.double().requires_grad_()
    ce, gradients = 0, []
    for member in module.members:
        loss = nn.functional.cross_entropy(member(x), y)
        gradients.append(torch.autograd.grad(loss, x, retain_graph=True)[0].flatten(1))
        ce += loss.item() / 3
    expected = ce + 0.7 * reference_gal(torch.stack(gradients).numpy()).mean()
    assert module.loss(x, y).item() == pytest.approx(expected, abs=1e-6)
    assert not module.members[0].first.weight.grad


def test_tiny_gradients_keep_their_directions():
    gradients = torch.randn(3, 5, 20, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gal(1e-25 * gradients), gal(gradients))
    assert gal(torch.zeros(3, 4, 10)).isfinite().all()


def test_sure_images_give_weights_finite_gradients():
    """Their gradient is exactly zero, and has no direction."""
    module = GAL(TinyNet, members=2).eval()
    module.members[0].last.weight.data *= 1e5
    x, _ = batch()
    module.loss(x.requires_grad_(), module.members[0](x).argmax(1)).backward()
    assert all(weight.grad.isfinite().all() for weight in module.parameters())
