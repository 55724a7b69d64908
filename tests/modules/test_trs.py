"""TRS against the paper's formula in slow loops; its search against a closed form."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_rob.modules import TRS
from lightning_rob.modules.trs import roughest
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from tests.modules.support import ConvNet, batch, directional_derivatives
from tests.tiny import TinyNet

THREAT = Threat("linf", 0.03)


def reference_pairs(gradients):
    """Yang et al. 2021: |cos| and the sum of both norms, averaged over pairs."""
    members, images, _ = gradients.shape
    alike, rough = np.zeros(images), np.zeros(images)
    pairs = [(i, j) for i in range(members) for j in range(i + 1, members)]
    for b in range(images):
        for i, j in pairs:
            u, v = gradients[i, b], gradients[j, b]
            length_u, length_v = np.sqrt((u**2).sum()), np.sqrt((v**2).sum())
            alike[b] += abs((u * v).sum()) / (length_u * length_v) / len(pairs)
            rough[b] += (length_u + length_v) / len(pairs)
    return alike, rough


def norms(members, x, y):
    """[B], the sum of the members' gradient norms in eval mode."""
    total = torch.zeros(len(x))
    for member in members:
        x = x.detach().requires_grad_()
        loss = nn.functional.cross_entropy(member.eval()(x), y, reduction="sum")
        total += torch.autograd.grad(loss, x)[0].flatten(1).norm(dim=1)
    return total


def test_the_search_finds_the_closed_form_of_a_linear_network():
    """||p_wrong (w_1 - w_0)|| is largest where p_wrong is: at a corner of the ball."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    x = 0.4 + 0.2 * torch.rand(8, 3, 8, 8)
    y = torch.randint(0, 2, (8,))
    apart = net[1].weight[1] - net[1].weight[0]
    sign = torch.where(y == 0, 1.0, -1.0)[:, None]
    corner = x + THREAT.eps * (sign * apart.sign()).view_as(x).detach()
    found = roughest([net, net], x, y, THREAT, 6, torch.Generator().manual_seed(0))
    torch.testing.assert_close(norms([net], found, y), norms([net], corner, y), rtol=1e-5, atol=0)


def test_the_loss_is_the_papers():
    module = TRS(TinyNet, THREAT, similarity_weight=4.0, roughness_weight=0.7, members=3)
    module.double().eval()
    x, y = batch()
    x = x.double()
    index = torch.arange(len(x))
    module.noise = Streams.from_index(index, 1)
    loss = module.loss(x, y).item()
    rough_x = roughest(module.members, x, y, THREAT, 6, Streams.from_index(index, 1))
    ce, terms = 0, []
    for point in (x, rough_x):
        point = point.detach().requires_grad_()
        values = [nn.functional.cross_entropy(m(point), y, reduction="sum") for m in module.members]
        gradients = [torch.autograd.grad(v, point, retain_graph=True)[0] for v in values]
        terms.append(reference_pairs(torch.stack(gradients).flatten(2).numpy()))
        ce = ce or sum(values).item() / len(x)
    expected = ce + 4.0 * terms[0][0].mean() + 0.7 * terms[1][1].mean()
    assert loss == pytest.approx(expected, abs=1e-6)


def test_the_double_backward_goes_through_batch_norm():
    torch.manual_seed(0)
    module = TRS(ConvNet, Threat("linf", 0), similarity_weight=3.0, members=2).double().train()
    x, y = batch()
    by_backward, by_differences = directional_derivatives(module, x.double(), y)
    assert by_backward == pytest.approx(by_differences, rel=1e-4)


def test_the_radius_grows_over_the_epochs(monkeypatch):
    module = TRS(TinyNet, Threat("linf", 0.03), initial_eps=0.01, growth_epochs=4)
    seen = []
    for epoch in (0, 2, 4, 9):
        monkeypatch.setattr(TRS, "current_epoch", epoch)
        seen.append(module.current_threat().eps)
    assert seen == pytest.approx([0.01, 0.02, 0.03, 0.03])
    assert TRS(TinyNet, THREAT).current_threat() == THREAT


def test_the_search_never_ends_at_a_smoother_place_than_it_began():
    torch.manual_seed(0)
    members = [TinyNet(), TinyNet()]
    x, y = batch()
    found = roughest(members, x, y, Threat("linf", 0.3), 2, torch.Generator().manual_seed(0))
    assert (norms(members, found, y) >= norms(members, x, y) - 1e-6).all()
