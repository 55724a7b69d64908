"""Ten later defenses, and honest ones beside them."""

import zlib

import torch
from broken.parts import (
    EPS,
    THREAT,
    Broken,
    adversarial,
    ascend,
    cnn,
    digits,
    fit,
    margin,
    on_net,
)
from torch import nn
from torch.nn.functional import cross_entropy, interpolate, pad, relu

from lightning_rob import Square


class CrossMax(Broken):
    """Heads at four depths, from whose logits the largest of each head and class is taken."""

    paper = "Fort and Lakshminarayanan 2024"

    def __init__(self):
        super().__init__()
        shapes = ((16, 7), (32, 7), (32, 7))
        self.probes = nn.ModuleList(nn.Linear(c * s * s, 10) for c, s in shapes)

    def heads(self, x):
        found = []
        for number, layer in enumerate(self.net):
            x = layer(x)
            if number in (3, 6, 7):
                size = nn.functional.adaptive_avg_pool2d(x, 7)
                found.append(self.probes[len(found)](size.flatten(1)))
        return torch.stack([*found, x])

    def fit(self):
        fit(self, lambda net, x, y: sum(cross_entropy(head, y) for head in net.heads(x)), 5)

    def forward(self, x):
        z = self.heads(x)
        z = z - z.amax(2, keepdim=True)
        z = z - z.amax(0, keepdim=True)
        return z.topk(2, 0).values[-1]

    def hand(self, x, y):
        """Climb the margins of all heads."""
        loss = lambda z: sum(margin(head, y).clamp_max(5) for head in self.heads(z))  # noqa: E731
        return ascend(self, loss, x, y, restarts=2)


class AntiAdversary(Broken):
    """Add what makes the network surer of its prediction."""

    paper = "Alfarra et al. 2022"

    def added(self, x):
        z, own = x.detach(), self.net(x).argmax(1)
        for _ in range(2):
            with torch.enable_grad():
                z.requires_grad_()
                loss = cross_entropy(self.net(z), own)
                z = (z - EPS * torch.autograd.grad(loss, z)[0].sign()).detach()
        return z - x.detach()

    def forward(self, x):
        return self.net(x + self.added(x))

    def hand(self, x, y):
        """Attack the network without it."""
        return ascend(self, lambda z: margin(self.net(z), y), x, y, restarts=2)


class Hedge(Broken):
    """Move the image to where the network is unsure of all classes; sure ones stay."""

    paper = "Wu et al. 2021"
    weak_is = "PGD-20 on the network"

    def moved(self, x):
        start = x.detach()
        z = start.clone()
        for _ in range(10):
            with torch.enable_grad():
                z.requires_grad_()
                loss = -self.net(z).log_softmax(1).sum()
                step = 0.03 * torch.autograd.grad(loss, z)[0].sign()
            z = torch.min(torch.max(z.detach() + step, start - 0.15), start + 0.15).clamp(0, 1)
        return z

    def forward(self, x):
        return self.net(self.moved(x))

    def weak(self, x, y):
        return on_net(self.net, x, y)

    def hand(self, x, y):
        """Take the gradient where the image is moved to (BPDA)."""
        loss = lambda z: margin(self.net(z + (self.moved(z) - z).detach()), y)  # noqa: E731
        found = ascend(self, loss, x, y)
        both = lambda z: loss(z) + margin(self.net(z), y)  # noqa: E731
        return ascend_on_left(self, both, found, x, y)


def ascend_on_left(net, loss, found, x, y, **options):
    """Climb another loss, and keep what it finds where the first attack failed."""
    other = ascend(net, loss, x, y, **options)
    with torch.no_grad():
        right = net(found).argmax(1) == y
    found[right] = other[right]
    return found


class Denoiser(Broken):
    """Remove noise by a small network that has no gradient, and round to 8 bits."""

    paper = "Liao et al. 2018"
    weak_is = "PGD-20 on the network"

    def __init__(self):
        super().__init__()
        first, last = nn.Conv2d(1, 16, 5, padding=2), nn.Conv2d(16, 1, 5, padding=2)
        self.denoise = nn.Sequential(
            first, nn.ReLU(), nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(), last
        )

    def fit(self):
        fit(self.net)
        attack = adversarial(self.net)

        def loss(net, x, y):
            z = torch.cat([attack(x, y), x + EPS * torch.randn_like(x)])
            return (net(z) - x.repeat(2, 1, 1, 1)).square().mean()

        fit(self.denoise, loss, 2)

    @torch.no_grad()
    def clean(self, x):
        return (255 * self.denoise(x).clamp(0, 1)).round() / 255

    def forward(self, x):
        return self.net(self.clean(x))

    def weak(self, x, y):
        return on_net(self.net, x, y)

    def hand(self, x, y):
        """Climb through the denoiser."""
        return ascend(self, lambda z: margin(self.net(self.denoise(z)), y), x, y, restarts=2)


class BatchStatistics(Broken):
    """Normalise by the statistics of the test batch (test-time BatchNorm adaptation)."""

    paper = "Schneider et al. 2020"
    weak_is = "PGD-20 on the network without adaptation"
    together = True

    def forward(self, x):
        norms = [part for part in self.modules() if isinstance(part, nn.BatchNorm2d)]
        for part in norms:
            part.training, part.momentum = True, 0.0
        try:
            return self.net(x)
        finally:
            for part in norms:
                part.training = False

    def weak(self, x, y):
        return on_net(self.net, x, y)

    def hand(self, x, y):
        """Attack the batch as a whole, by its sum of margins."""
        x_adv = x.clone()
        for _ in range(100):
            x_adv.requires_grad_()
            loss = margin(self(x_adv), y).clamp_max(2).sum()
            step = 0.01 * torch.autograd.grad(loss, x_adv)[0].sign()
            x_adv = torch.min(torch.max(x_adv.detach() + step, x - EPS), x + EPS).clamp(0, 1)
        return x_adv


class Sawtooth(Broken):
    """Change the scores so that the margin falls where it rose (AAA)."""

    paper = "Chen et al. 2022"
    weak_is = "Square, 500 queries"
    period = 4.0

    def forward(self, x):
        logits = self.net(x)
        top = logits.topk(2, 1)
        lead = top.values[:, :1] - top.values[:, 1:]
        tooth = (lead / self.period).floor() * self.period
        wanted = 2 * tooth + self.period - lead + 0.05
        return logits.scatter_add(1, top.indices[:, :1], wanted - lead)

    def weak(self, x, y):
        return Square(THREAT, 500)(self.defense(), x, y, torch.Generator().manual_seed(0))

    def hand(self, x, y):
        """Attack the network's own logits."""
        return ascend(self, lambda z: margin(self.net(z), y), x, y, restarts=2)


class ResizePad(Broken):
    """Resize and pad at random."""

    paper = "Xie et al. 2018"
    random = True

    def changed(self, x):
        size = int(torch.randint(22, 33, ()))
        left, top = torch.randint(33 - size, (2,)).tolist()
        resized = interpolate(x, size=(size, size), mode="nearest")
        return pad(resized, (left, 32 - size - left, top, 32 - size - top))[..., 2:30, 2:30]

    def fit(self):
        fit(self.net, change=lambda x, y: self.changed(x), epochs=6)

    def forward(self, x):
        return self.net(self.changed(x))

    def weak(self, x, y):
        return on_net(self.net, x, y)

    weak_is = "PGD-20 on the network"

    def hand(self, x, y):
        """Average over draws (EoT)."""
        return ascend(self, lambda z: margin(self(z), y), x, y, 60, draws=10)


class Pruned(nn.Module):
    """Keep activations drawn by their size, divided by the probability to be kept."""

    def __init__(self, share=0.3):
        super().__init__()
        self.share = share

    def forward(self, x):
        x = relu(x)
        if self.training:
            return x
        with torch.no_grad():
            flat = x.flatten(1)
            p = flat / flat.sum(1, keepdim=True).clamp_min(1e-9)
            kept = 1 - (1 - p) ** int(self.share * flat.shape[1])
            mask = (torch.rand_like(flat) < kept) / kept.clamp_min(1e-9)
        return x * mask.view_as(x)


class ActivationPruning(Broken):
    """Prune activations at random."""

    paper = "Dhillon et al. 2018"
    random = True

    def __init__(self):
        super().__init__(cnn(act=Pruned))

    def forward(self, x):
        return self.net(x)

    weak_is = "PGD-20 of one draw"

    def hand(self, x, y):
        """Average over draws (EoT)."""
        return ascend(self, lambda z: margin(self(z), y), x, y, 60, draws=10)


class Coarse(nn.Module):
    """Activations in [0, 1] rounded to 8 levels, by ceil and floor of numpy's kind."""

    def forward(self, x):
        x = x.clamp(0, 1)
        return x + ((x * 7).round() / 7 - x).detach() if self.training else (x * 7).round() / 7


class DefensiveQuantization(Broken):
    """Round all activations."""

    paper = "Lin et al. 2019"
    weak_is = "Square, 500 queries"

    def __init__(self):
        super().__init__(cnn(act=Coarse))

    def forward(self, x):
        return self.net((x * 7).round() / 7)

    def weak(self, x, y):
        return Square(THREAT, 500)(self.defense(), x, y, torch.Generator().manual_seed(0))

    def hand(self, x, y):
        """Pass gradients straight through all rounding."""

        def loss(z):
            for layer in self.net:
                if isinstance(layer, Coarse):
                    z = z.clamp(0, 1)
                    z = z + ((z * 7).round() / 7 - z).detach()
                else:
                    z = layer(z)
            return margin(z, y)

        inside = lambda z: loss(z + ((z * 7).round() / 7 - z).detach())  # noqa: E731
        return ascend(self, inside, x, y, restarts=2)


class HashNoise(Broken):
    """Add noise that a hash of the image seeds: each image has noise of its own."""

    paper = "no paper"

    def fit(self):
        fit(self.net, change=lambda x, y: x + 0.3 * torch.randn_like(x), epochs=6)

    def noise(self, x):
        seeds = [zlib.crc32(one.detach().numpy().tobytes()) for one in x]
        draw = lambda seed: torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(seed))  # noqa: E731
        return torch.stack([draw(seed) for seed in seeds])

    def forward(self, x):
        return self.net(x + 0.4 * self.noise(x))

    def hand(self, x, y):
        """Average over noise drawn anew, and try the defense at each step."""
        fresh = lambda z: margin(self.net(z + 0.4 * torch.randn_like(z)), y)  # noqa: E731
        return ascend(self, fresh, x, y, 60, draws=10)


class Detector(Broken):
    """Reject images that a second network takes for attacks on the first one."""

    paper = "Metzen et al. 2017"
    weak_is = "PGD-20 on the network"
    rejects = 10

    def __init__(self):
        super().__init__()
        self.detect = cnn(1)

    def fit(self):
        fit(self.net)
        attack = adversarial(self.net)

        def loss(net, x, y):
            noisy = (x + EPS * torch.randn_like(x).sign()).clamp(0, 1)
            flags = torch.tensor([0.0, 0.0, 1.0]).repeat_interleave(len(x))
            scores = net(torch.cat([x, noisy, attack(x, y)]))[:, 0]
            return nn.functional.binary_cross_entropy_with_logits(scores, flags)

        fit(self.detect, loss, 4)
        with torch.no_grad():  # 3 % of other images are rejected
            scores = self.detect(digits("train", 4000)[0][3500:])[:, 0]
            self.detect[-1].bias -= scores.quantile(0.97)

    def forward(self, x):
        z = pad(self.net(x), (0, 1), value=-50.0)
        z[self.detect(x)[:, 0] > 0] = 50.0 * torch.eye(11)[10]
        return z

    def weak(self, x, y):
        return on_net(self.net, x, y)

    def hand(self, x, y):
        """Climb the margin of the network, and lower the detector's score to a threshold."""

        def loss(z):
            return margin(self.net(z), y).clamp_max(2) - self.detect(z)[:, 0].clamp_min(-2)

        return ascend(self, loss, x, y, 60)


class Cascade(Detector):
    """Give images that a detector flags to a network that is trained adversarially."""

    paper = "no paper"
    rejects = None

    def __init__(self):
        super().__init__()
        self.robust = cnn()

    def fit(self):
        super().fit()
        fit(self.robust, change=adversarial(self.robust))

    def forward(self, x):
        z, flag = self.net(x), self.detect(x)[:, 0] > 0
        z[flag] = self.robust(x[flag])
        return z


class Honest(Broken):
    """Train adversarially: nothing is hidden."""

    paper = "Madry et al. 2018"

    def fit(self):
        fit(self.net, change=adversarial(self.net), epochs=4)

    def forward(self, x):
        return self.net(x)

    def hand(self, x, y):
        """Climb cross-entropy and the margin, from two starts each."""
        loss = lambda z: cross_entropy(self.net(z), y, reduction="none")  # noqa: E731
        found = ascend(self, loss, x, y, restarts=2)
        both = lambda z: margin(self.net(z), y)  # noqa: E731
        return ascend_on_left(self, both, found, x, y, restarts=2)


class HonestWide(Honest):
    """Train a wider network adversarially on a larger ball."""

    def __init__(self):
        super().__init__(cnn(act=nn.SiLU))

    def fit(self):
        fit(self.net, change=adversarial(self.net, 0.2, 4), epochs=5)


class HonestSmoothed(Broken):
    """Train adversarially, and average five predictions under noise."""

    paper = "Salman et al. 2019"
    random = True

    def fit(self):
        noisy = adversarial(self.net, EPS, 4)
        fit(self.net, change=lambda x, y: noisy(x, y) + 0.1 * torch.randn_like(x), epochs=4)

    def forward(self, x):
        copies = x.repeat(5, 1, 1, 1)
        logits = self.net(copies + 0.1 * torch.randn_like(copies))
        return logits.view(5, len(x), 10).softmax(2).mean(0).clamp_min(1e-20).log()

    def hand(self, x, y):
        """Average over draws (EoT)."""
        return ascend(self, lambda z: margin(self(z), y), x, y, 60, draws=2)


LATER = [
    CrossMax,
    AntiAdversary,
    Hedge,
    Denoiser,
    BatchStatistics,
    Sawtooth,
    ResizePad,
    ActivationPruning,
    DefensiveQuantization,
    HashNoise,
]
GUARDED = [Detector, Cascade]
HONEST = [Honest, HonestWide, HonestSmoothed]
