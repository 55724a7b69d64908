"""DANN's networks have the papers' numbers of weights."""

import pytest
import torch
from torch import nn

from lightning_rob.nets.dann import DANNNet, DANNResNet18


def count(net):
    return sum(parameter.numel() for parameter in net.parameters())


def test_the_mnist_network_is_the_papers():
    """2.74M weights: table of appendix A.4.1, with one input channel."""
    net = DANNNet()
    conv, linear = 9 * 128 * 128 + 128, 2048 * 256 + 256
    encoder = (25 * 64 + 64) + 2 * 64 + (25 * 64 * 128 + 128) + 2 * 128 + 2 * (conv + 256)
    predictor = 3 * (conv + 256) + linear + 2 * 256 + 256 * 10 + 10
    assert count(net) == encoder + predictor + 5 * conv + linear + 256 * 2 + 2 == 2_736_780
    assert net.normalize.mean.item() == pytest.approx(0.1307)
    assert net.normalize.std.item() == pytest.approx(0.3015)
    assert not [m for m in net.discriminator if isinstance(m, nn.BatchNorm2d | nn.Dropout2d)]
    assert [m.p for m in net.modules() if isinstance(m, nn.Dropout2d)] == [0.5]


def test_the_cifar_network_is_resnet18_in_two():
    """The discriminator of appendix A.4.2: two BasicBlocks of 512, the first of stride 2."""
    net = DANNResNet18()
    blocks = 9 * (256 + 3 * 512) * 512 + 256 * 512 + 5 * 2 * 512
    judged = count(net.discriminator) + count(net.judge)
    assert judged == blocks + 512 * 2 + 2 == 8_394_754
    assert count(net) - judged == 11_173_962
    small = DANNResNet18(width=4)
    features = small.features(torch.rand(2, 3, 32, 32))
    assert features.shape == (2, 16, 8, 8)
    assert small.discriminator(features).shape == (2, 32, 4, 4)
    assert small.domain(features).shape == (2, 2)
