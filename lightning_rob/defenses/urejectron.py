"""URejectron: reject images that a discriminator separates from training images."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_rob.defenses.base import Defense, Single
from lightning_rob.defenses.network import network_logits
from lightning_rob.defenses.transductive import SourceData, Transductive, progress_bar, shuffled
from lightning_rob.nets import SmallCNN
from lightning_rob.randomness import Generator
from lightning_rob.runtime.errors import at_least

TEST = 1  # the discriminator's class of test images; that of training images is 0
WEIGHT = 10  # of its logits beside the classifier's, for attacks


class URejectron(Transductive):
    """A network that rejects images that look like test images (Goldwasser et al. 2020).

    `adapt` trains a discriminator of training images against the test batch x~; the network is not
    changed. An image whose probability of being from x~ is above tau is predicted by a row of
    zeros. For images that could be from either set this probability is the fraction of test images
    among them: a third where a clean half of x~ meets as many training images as x~ has, as in the
    paper. Where all of x~ is clean, a tau of 0.5 rejects half of it at random.

    Args:
        net: [B, C, H, W] -> [B, K] logits, the classifier.
        tau: the largest probability of being a test image that is accepted, in [0, 1].
        discriminator: returns the network to train, [B, C, H, W] -> [B, 2]; None makes a
            `SmallCNN`, where the paper has a ResNet-18.
        epochs: passes over all training and test images, shuffled together.
        source_size: number of training images, drawn anew by each `adapt`; None takes all.
        source: the training images; their labels are not used.
    """

    def __init__(
        self,
        net: nn.Module,
        tau: float = 0.5,
        discriminator: Callable[[], nn.Module] | None = None,
        epochs: int = 10,
        batch_size: int = 128,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.Adam,
        source_size: int | None = None,
        source: SourceData | None = None,
    ) -> None:
        super().__init__(net, source)
        if not 0 <= tau <= 1:
            raise ValueError(f"tau must be in [0, 1], got {tau}")
        at_least(1, epochs=epochs, batch_size=batch_size, source_size=source_size)
        self.tau = tau
        self.discriminator = discriminator
        self.epochs = epochs
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.source_size = source_size
        self.trained_discriminator: nn.Module | None = None
        self.classes = 0  # K, known once it has adapted

    @property
    def abstains(self) -> bool:
        return True

    @property
    def foldable_networks(self) -> list[nn.Module]:
        return [self.net]

    @property
    def adapted_model(self) -> Defense:
        """Once adapted, network and discriminator as one network: rejection is its last class."""
        if self.trained_discriminator is None:
            return self.base_model
        net = _Rejecting(self.net, self.trained_discriminator, self.tau)
        return Single(net, self.rule, rejects=self.classes)

    def forward(self, x: Tensor, generator: Generator = None) -> Tensor:
        """Predict [B, C, H, W] -> [B, K]; zeros where x is rejected."""
        predictions = super().forward(x, generator)
        if self.trained_discriminator is None:
            return predictions
        accepted = (self.scores(x) <= self.tau)[:, None]
        # Logits of the network that are not finite are no rejection.
        lost = accepted & (predictions.sum(1, keepdim=True) <= 0)
        return (predictions * accepted).masked_fill(lost, torch.nan)

    def scores(self, x: Tensor) -> Tensor:
        """Compute the probability [B] that images [B, C, H, W] are test images."""
        if self.trained_discriminator is None:
            raise RuntimeError("URejectron has no discriminator before it has adapted to a batch")
        return network_logits(self.trained_discriminator, x).softmax(1)[:, TEST]

    def fit_to_batch(self, x: Tensor, generator: torch.Generator) -> Self:
        net = (self.discriminator or (lambda: SmallCNN(2, x.shape[1])))().to(x.device)
        source = self.source
        # Drawn anew by each `adapt`, from the defender's private randomness.
        chosen = torch.randperm(len(source), generator=generator)[: self.source_size]
        optimizer = self.optimizer(net.train().parameters())
        for _ in progress_bar(range(self.epochs), "URejectron"):
            for rows in shuffled(len(chosen) + len(x), self.batch_size, generator):
                is_test = rows >= len(chosen)  # the chosen training images come first, then x
                images = [x[(rows[is_test] - len(chosen)).to(x.device)]]
                if len(known := chosen[rows[~is_test]]):
                    images.insert(0, source.gather(known)[0].to(x))
                logits = network_logits(net, torch.cat(images))
                if logits.shape[1:] != (2,):
                    raise ValueError(
                        f"discriminator must give logits [B, 2], got {list(logits.shape)}"
                    )
                # Labels sorted as the images are put together: training images first.
                loss = cross_entropy(logits, is_test.sort().values.long().to(x.device))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        optimizer.zero_grad()
        judge = net.eval().requires_grad_(False)
        with torch.no_grad():
            classes = network_logits(copy.deepcopy(self.net).eval(), x[:1]).shape[1]
        return self.copy_with(trained_discriminator=judge, classes=classes)


class _Rejecting(nn.Module):
    """Logits [B, K + 1] of the K classes and of rejection: an attack can follow both."""

    def __init__(self, net: nn.Module, discriminator: nn.Module, tau: float) -> None:
        super().__init__()
        self.net, self.discriminator, self.tau = net, discriminator, tau
        self.threshold = math.log((tau + 1e-9) / (1 - tau + 1e-9))

    def forward(self, x: Tensor) -> Tensor:
        logits, scores = (network_logits(net, x) for net in (self.net, self.discriminator))
        # Above the largest logit exactly where the probability of a test image is above tau. An
        # attack hardly follows a discriminator whose logits are small beside the classifier's.
        lead = WEIGHT * (scores[:, TEST] - scores[:, 1 - TEST] - self.threshold)
        # A score that is the threshold, as after a calibration, rounds to either side of it.
        rejected = scores.softmax(1)[:, TEST] > self.tau
        top = logits.amax(1)
        least = (4 * torch.finfo(top.dtype).eps * top.abs()).clamp(min=1e-3)
        sided = torch.where(rejected, lead.maximum(least), lead.minimum(-least))
        lead = lead + (sided - lead).detach()  # the gradient stays that of the score
        return torch.cat([logits, (top + lead)[:, None]], 1)
