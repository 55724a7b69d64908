"""Networks with an encoder, a predictor and a domain discriminator (Ganin et al. 2016)."""

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_rob.nets.normalize import CIFAR10_MEAN, CIFAR10_STD, Normalize
from lightning_rob.nets.pooling import spatial_mean
from lightning_rob.nets.resnet import BasicBlock, stage

GREY_STD = (0.3015,)  # the authors' value for MNIST, whose own is 0.3081


def reversed_gradient(x: Tensor, weight: float) -> Tensor:
    """Return features unchanged, but with their gradient times -weight (Ganin 2016, eq. 16, 17)."""
    return x.detach() - weight * (x - x.detach())


def _convolution(inputs: int, width: int, kernel: int, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(inputs, width, kernel, padding=padding), nn.BatchNorm2d(width)]


class DANNNet(nn.Module):
    """Network of DANN's MNIST experiments (Chen et al. 2022, appendix A.4.1).

    Encoder: two 5x5 convolutions without padding, each with pooling, the second with channel
    dropout, and two 3x3 convolutions. Predictor: three 3x3 convolutions and two linear layers.
    Discriminator: five 3x3 convolutions and two linear layers, without batch normalisation. At full
    width, for grey images, it has 2,736,780 weights.

    Args:
        channels: C; the authors' table says 3, their MNIST code 1.
        size: height and width of the images in pixels, at least 16.
        width: channels of the first convolution; all others have twice as many, the hidden linear
            layers four times as many.
        mean: [C] of images in [0, 1], like std; None: MNIST's for grey, CIFAR-10's for colour.
        std: [C], likewise; None is 0.3015 for grey, the authors' value.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 1,
        size: int = 28,
        width: int = 64,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if size < 16:
            raise ValueError(f"size must be at least 16 pixels, got {size}")
        wide, hidden = 2 * width, 4 * width
        # Two 5x5 convolutions without padding, each followed by pooling.
        inputs = wide * (((size - 4) // 2 - 4) // 2) ** 2
        self.normalize = Normalize.usual(
            channels, mean, std or (GREY_STD if channels == 1 else None)
        )
        self.encoder = nn.Sequential(
            *_convolution(channels, width, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            *_convolution(width, wide, 5),
            nn.Dropout2d(),
            nn.MaxPool2d(2),
            nn.ReLU(),
            *_convolution(wide, wide, 3, 1),
            nn.ReLU(),
            *_convolution(wide, wide, 3, 1),
            nn.ReLU(),
        )
        self.predictor = nn.Sequential(
            *(layer for _ in range(3) for layer in (*_convolution(wide, wide, 3, 1), nn.ReLU())),
            nn.Flatten(),
            nn.Linear(inputs, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )
        last = [nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 2)]
        pairs = [(nn.Conv2d(wide, wide, 3, padding=1), nn.ReLU()) for _ in range(5)]
        self.discriminator = nn.Sequential(*(layer for pair in pairs for layer in pair), *last)

    def features(self, x: Tensor) -> Tensor:
        """Return features [B, 2 width, h, h] of images [B, C, size, size] in [0, 1]."""
        return self.encoder(self.normalize(x))

    def classify(self, features: Tensor) -> Tensor:
        """Return class logits [B, K] of features."""
        return self.predictor(features)

    def domain(self, features: Tensor) -> Tensor:
        """Return domain logits [B, 2] (source, target) of features."""
        return self.discriminator(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


class DANNResNet18(nn.Module):
    """ResNet-18 of DANN's CIFAR-10 experiments, split after the third of its four stages.

    Chen et al. 2022, appendix A.4.2; He et al. 2016 for the stages. The discriminator is another
    fourth stage, the mean over the image and a linear layer: 8,394,754 weights at full width.
    Unlike the discriminator of `DANNNet` it has batch normalisation.

    Args:
        width: channels of the first stage; each of the others has twice as many as the one before.
        mean: [C] of images in [0, 1], like std, one number per channel.
    """

    def __init__(
        self,
        classes: int = 10,
        width: int = 64,
        mean: Sequence[float] = CIFAR10_MEAN,
        std: Sequence[float] = CIFAR10_STD,
    ) -> None:
        super().__init__()
        self.normalize = Normalize(mean, std)
        self.encoder = nn.Sequential(
            nn.Conv2d(len(mean), width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            stage(BasicBlock, width, width, 2, 1, "B"),
            stage(BasicBlock, width, 2 * width, 2, 2, "B"),
            stage(BasicBlock, 2 * width, 4 * width, 2, 2, "B"),
        )
        self.layer4 = stage(BasicBlock, 4 * width, 8 * width, 2, 2, "B")
        self.linear = nn.Linear(8 * width, classes)
        self.discriminator = stage(BasicBlock, 4 * width, 8 * width, 2, 2, "B")
        self.judge = nn.Linear(8 * width, 2)

    def features(self, x: Tensor) -> Tensor:
        """Return features [B, 4 width, H/4, W/4] of images [B, C, H, W] in [0, 1]."""
        return self.encoder(self.normalize(x))

    def classify(self, features: Tensor) -> Tensor:
        return self.linear(spatial_mean(self.layer4(features)))

    def domain(self, features: Tensor) -> Tensor:
        return self.judge(spatial_mean(self.discriminator(features)))

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))
