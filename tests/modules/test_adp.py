"""ADP against the paper's formula in slow loops."""

import numpy as np
import pytest
import torch

from lightning_rob.modules import ADP
from lightning_rob.modules.adp import adp
from tests.modules.support import batch
from tests.tiny import TinyNet


def reference_adp(logits, y, alpha, beta):
    """Pang et al. 2019, one image at a time: softmax, strike the true class, normalise, det."""
    members, images, _ = logits.shape
    values = []
    for b in range(images):
        probs = [np.exp(logits[m, b]) / np.exp(logits[m, b]).sum() for m in range(members)]
        mean = sum(probs) / members
        entropy = -sum(p * np.log(p) for p in mean)
        rows = np.stack([np.delete(p, y[b]) for p in probs])
        rows = rows / np.sqrt((rows**2).sum(1, keepdims=True))
        diversity = np.linalg.det(rows @ rows.T + 1e-6 * np.eye(members))
        values.append(alpha * entropy + beta * np.log(diversity))
    return np.array(values)


def test_it_is_differentiable_where_probabilities_round_to_zero():
    logits = 500 * torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(1))
    logits.requires_grad_()
    value = adp(logits, logits.sum(0).argmax(-1), 2.0, 0.5).sum()
    (gradient,) = torch.autograd.grad(value, logits)
    assert value.isfinite() and gradient.isfinite().all()


def test_the_loss_is_the_sum_of_cross_entropies_less_the_regulariser():
    torch.manual_seed(0)  # float32 would lose digits: these members are similar
    module = ADP(TinyNet, alpha=1.5, beta=0.3, members=3).double()
    x, y = batch()
    x = x.double()
    logits = torch.stack([member(x) for member in module.members])
    ce = sum(torch.nn.functional.cross_entropy(z, y).item() for z in logits)
    regulariser = reference_adp(logits.detach().double().numpy(), y.tolist(), 1.5, 0.3).mean()
    assert module.loss(x, y).item() == pytest.approx(ce - regulariser, abs=1e-4)


def test_half_precision_is_computed_in_single():
    logits = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = torch.tensor([0, 1, 2, 3, 0])
    assert torch.equal(adp(logits, y, 2, 0.5), adp(logits.float(), y, 2, 0.5))
