"""URejectron: answer only on images that cannot be told from training images."""

from collections.abc import Callable, Iterable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_rob.defenses.learning import Transductive, shown, shuffled
from lightning_rob.defenses.source import Source, SourceData
from lightning_rob.nets import SmallCNN
from lightning_rob.randomness import Generator
from lightning_rob.rules import Rule, mean_probs

TEST = 1  # the discriminator's class of test images; training images are 0


class URejectron(Transductive):
    """A network that refuses what a discriminator takes for a test image (Goldwasser et al. 2020).

    `adapt` trains a discriminator of training images against the test batch x~. The network stays
    as it is; an image that is of x~ with a probability above tau gets a row of zeros for an answer.
    Of images that could be of either kind it is the share that are test images: a third where a
    clean half of x~ meets as many training images as x~ has, as in the paper. Where all of x~ is
    clean, such a discriminator tosses a coin at a tau of 0.5.

    Args:
        net: [B, C, H, W] -> [B, K] logits, the classifier.
        tau: the largest probability of being a test image that is accepted, in [0, 1].
        discriminator: makes the network that is trained, [B, C, H, W] -> [B, 2]; None makes a
            `SmallCNN`, where the paper has a ResNet-18.
        epochs: each has all training images and all test images once, shuffled together.
        batch_size: images of both kinds together.
        optimizer: parameters -> optimizer.
        source_size: so many training images only, drawn anew by each `adapt`; None takes all.
        rule: any; there is one draw.
        source: the training images; their labels are not looked at.

    Raises:
        ValueError: tau outside [0, 1], or a count below 1; when adapting, a discriminator of
            other than two classes.
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
        rule: Rule = mean_probs,
        source: SourceData | None = None,
    ) -> None:
        super().__init__(net, rule, source)
        if not 0 <= tau <= 1:
            raise ValueError(f"tau must be in [0, 1], got {tau}")
        counts = {"epochs": epochs, "batch_size": batch_size, "source_size": source_size}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        self.tau = tau
        self.discriminator = discriminator
        self.epochs = epochs
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.source_size = source_size
        self.judge: nn.Module | None = None

    @property
    def foldable_networks(self) -> list[nn.Module]:
        """The classifier, which is never copied."""
        return [self.net]

    def forward(self, x: Tensor, generator: Generator = None) -> Tensor:
        """[B, C, H, W] -> [B, K], the probability of each answer; zeros where x is rejected."""
        answers = super().forward(x, generator)
        if self.judge is None:
            return answers
        return answers * (self.scores(x) <= self.tau)[:, None]

    def scores(self, x: Tensor) -> Tensor:
        """The probability [B] that an image [B, C, H, W] is a test image.

        Raises:
            RuntimeError: the defense has not adapted to a batch yet.
        """
        if self.judge is None:
            raise RuntimeError("URejectron has no discriminator before it has adapted to a batch")
        logits: Tensor = self.judge(x)
        return logits.softmax(1)[:, TEST]

    def fit_to_batch(self, x: Tensor, chance: torch.Generator) -> Self:
        """The defense with a discriminator of the training images against x [B, C, H, W]."""
        judge = (self.discriminator or (lambda: SmallCNN(2, x.shape[1])))().to(x)
        source = self.source
        chosen = torch.randperm(len(source), generator=chance)[: self.source_size]
        optimizer = self.optimizer(judge.train().parameters())
        for _ in shown(range(self.epochs), "URejectron", self.epochs):
            for rows in shuffled(len(chosen) + len(x), self.batch_size, chance):
                batch, is_test = _mixed(source, chosen, x, rows)
                loss = cross_entropy(_two(judge(batch)), is_test)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return self.copy_with(judge=judge.eval().requires_grad_(False))


def _mixed(source: Source, chosen: Tensor, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Images and kinds [B] of positions in the training images, behind which are those of x."""
    is_test = rows >= len(chosen)
    ours = chosen[rows[~is_test]]
    theirs = x[(rows[is_test] - len(chosen)).to(x.device)]
    known = [source.take(ours)[0].to(x)] if len(ours) else []
    return torch.cat([*known, theirs]), is_test.sort().values.long().to(x.device)


def _two(logits: Tensor) -> Tensor:
    if logits.shape[1:] != (2,):
        raise ValueError(f"discriminator must give logits [B, 2], got {list(logits.shape)}")
    return logits
