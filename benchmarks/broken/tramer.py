"""The thirteen defenses that Tramèr et al. (2020) broke, rebuilt small from their papers."""

import math
from typing import ClassVar

import numpy as np
import torch
from broken.parts import (
    EPS,
    THREAT,
    Broken,
    ascend,
    by_target,
    cnn,
    digits,
    fit,
    margin,
    on_net,
)
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot, relu

from lightning_rob import PGD


class Winners(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.share = share

    def forward(self, x):
        flat = x.flatten(1)
        least = flat.topk(max(int(self.share * flat.shape[1]), 1), 1).values[:, -1:]
        return (flat * (flat >= least)).view_as(x)


class KWTA(Broken):
    """k-winners-take-all in place of ReLU: gradients of one point say little of the next."""

    paper = "Xiao et al. 2020"

    def __init__(self):
        super().__init__(cnn(act=lambda: Winners(0.1)))

    climb: ClassVar = {"draws": 20, "noise": 0.1}

    def forward(self, x):
        return self.net(x)

    def hand(self, x, y):
        """Average the margin's gradient over 20 noisy copies."""
        return self.climb_margin(x, y)


class Odds(Broken):
    """Reject where noise moves the logits towards another class more than on clean digits."""

    paper = "Roth et al. 2019"
    climb: ClassVar = {"restarts": 5}
    weak_is = "PGD-20 on the network"
    rejects = 10

    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.zeros(8, 1, 28, 28))
        self.register_buffer("mean", torch.zeros(10, 10))
        self.register_buffer("spread", torch.ones(10, 10))
        self.register_buffer("most", torch.zeros(()))

    def fit(self):
        fit(self.net)
        self.noise.copy_(0.3 * torch.randn(8, 1, 28, 28))
        x, y = digits("train", 1000)
        with torch.no_grad():
            moved = self.moves(x, self.net(x))
            for label in range(10):
                mine = moved[y == label]
                self.mean[label], self.spread[label] = mine.mean(0), mine.std(0) + 1e-3
            self.most.copy_(self.statistic(x, self.net(x)).quantile(0.97))

    def moves(self, x, logits):
        noisy = self.net((x[:, None] + self.noise).flatten(0, 1)).view(len(x), 8, 10)
        own = logits.argmax(1)[:, None, None].expand(-1, 8, 1)
        lead = logits - logits.gather(1, own[:, 0])
        return (noisy - noisy.gather(2, own) - lead[:, None]).mean(1)

    def statistic(self, x, logits):
        own = logits.argmax(1)
        scores = (self.moves(x, logits) - self.mean[own]) / self.spread[own]
        return scores.scatter(1, own[:, None], -torch.inf).amax(1)

    def forward(self, x):
        logits = self.net(x)
        reject = logits.amax(1) + self.statistic(x, logits) - self.most
        return torch.cat([logits, reject[:, None]], 1)

    def weak(self, x, y):
        return on_net(self.net, x, y)

    def hand(self, x, y):
        """Match the logits of another class's digits, on the image and on its noisy copies."""
        train, labels = digits("train", 1000)
        with torch.no_grad():
            clean = self.net(train)
            noisy = self.net(train + 0.3 * torch.randn_like(train))
            means = torch.stack([clean[labels == k].mean(0) for k in range(10)])
            means_noisy = torch.stack([noisy[labels == k].mean(0) for k in range(10)])

        def loss(z, labels, target):
            copies = self.net((z[:, None] + self.noise).flatten(0, 1)).view(len(z), 8, 10)
            return -(self.net(z) - means[target]).square().sum(1) - (
                copies - means_noisy[target][:, None]
            ).square().sum(2).mean(1)

        def accepted(z, labels, target):
            scores = self(z)
            lead = scores.gather(1, target[:, None])[:, 0]
            return lead - scores.scatter(1, target[:, None], -torch.inf).amax(1)

        found = by_target(self, loss, x, y)
        rows = ((scores := self(found)).argmax(1) == y) | (scores.argmax(1) == 10)
        if rows.any():
            found[rows] = by_target(self, accepted, x[rows], y[rows])
        return found


class Generative(Broken):
    """Predict the class under which a VAE finds an image most likely; reject unlikely ones."""

    paper = "Li et al. 2019"
    climb: ClassVar = {"restarts": 5}
    weak_is = "PGD-20 on the classes"
    rejects = 10

    def __init__(self):
        super().__init__(nn.Identity())
        inputs = nn.Linear(794, 200)
        self.encoder = nn.Sequential(inputs, nn.ReLU(), nn.Linear(200, 32))
        self.decoder = nn.Sequential(nn.Linear(26, 200), nn.ReLU(), nn.Linear(200, 784))
        self.register_buffer("noise", torch.zeros(4, 16))
        self.register_buffer("least", torch.zeros(()))

    def elbo(self, x, y, noise):
        flat, label = x.flatten(1), one_hot(y, 10).float()
        mean, log = self.encoder(torch.cat([flat, label], 1)).chunk(2, 1)
        z = mean[:, None] + (log / 2).exp()[:, None] * noise
        both = torch.cat([z, label[:, None].expand(-1, z.shape[1], -1)], 2)
        drawn = self.decoder(both).sigmoid()
        likely = -(drawn - flat[:, None]).square().sum(2).mean(1) / 0.05
        return likely + 0.5 * (1 + log - mean.square() - log.exp()).sum(1)

    def fit(self):
        def loss(net, x, y):
            own = self.elbo(x, y, torch.randn(len(x), 1, 16))
            return -own.mean() / 100 + 0.5 * cross_entropy(self.all(x, torch.randn(1, 16)) / 10, y)

        fit(self, loss, epochs=10)
        self.noise.normal_()
        with torch.no_grad():
            scores = self.all(digits("train", 1000)[0], self.noise)
        self.least.copy_(scores.amax(1).quantile(0.03))

    def all(self, x, noise):
        every = torch.arange(10).repeat(len(x))
        return self.elbo(x.repeat_interleave(10, 0), every, noise).view(len(x), 10)

    def forward(self, x):
        scores = self.all(x, self.noise)
        return torch.cat([scores, self.least.expand(len(x), 1)], 1)

    def weak(self, x, y):
        classes = nn.Module()
        classes.forward = lambda z: self.all(z, self.noise)
        return on_net(classes, x, y)

    def hand(self, x, y):
        """Raise the target's likelihood over that of the label and over the threshold."""

        def loss(z, labels, target):
            scores = self(z)
            wanted = scores.gather(1, target[:, None])[:, 0]
            return wanted - scores.scatter(1, target[:, None], -torch.inf).amax(1)

        return by_target(self, loss, x, y)


class SparseFourier(Broken):
    """Keep the largest 60 cosine coefficients of an image, computed in numpy."""

    paper = "Bafna et al. 2018"
    weak_is = "PGD-20 on the network"

    def __init__(self):
        super().__init__()
        k, n = np.mgrid[:28, :28]
        basis = np.cos(math.pi / 28 * (n + 0.5) * k) * math.sqrt(2 / 28)
        basis[0] /= math.sqrt(2)
        self.basis = basis

    def sparse(self, x):
        waves = self.basis @ x.detach().double().numpy() @ self.basis.T
        flat = np.abs(waves).reshape(len(x), -1)
        least = np.partition(flat, -60, 1)[:, -60][:, None, None, None]
        kept = self.basis.T @ np.where(np.abs(waves) >= least, waves, 0) @ self.basis
        return torch.from_numpy(kept).float()

    def fit(self):
        fit(self.net, change=lambda x, y: self.sparse(x))

    def forward(self, x):
        return self.net(self.pass_through(x, self.sparse))

    def weak(self, x, y):
        return on_net(self.net, x, y)

    def hand(self, x, y):
        """Take the network's gradient at the sparse image for that at the image (BPDA)."""
        return self.climb_margin(x, y)


class MaxMahalanobis(Broken):
    """Train features towards fixed centers; logits are minus squared distances."""

    paper = "Pang et al. 2020a"
    climb: ClassVar = {"restarts": 5}

    def __init__(self):
        super().__init__(cnn(outputs=32))
        centers = torch.eye(10) - 0.1
        self.register_buffer(
            "centers", nn.functional.pad(10 * centers / centers.norm(dim=1), (0, 22))
        )

    def fit(self):
        fit(self.net, lambda net, x, y: (net(x) - self.centers[y]).square().sum(1).mean() / 30, 6)

    def forward(self, x):
        return -torch.cdist(self.net(x), self.centers).square()

    def weak(self, x, y):
        """Climb the loss that the paper trains: the distance from the label's center."""
        away = lambda z: -self(z).gather(1, y[:, None])[:, 0]  # noqa: E731
        return ascend(self, away, x, y, 10, EPS / 4)

    def hand(self, x, y):
        """Climb each target's lead in distance."""
        return by_target(self, lambda z, labels, t: margin(self(z), labels, t), x, y)


class OutputCodes(Broken):
    """Networks that each decide bits of an error-correcting code; the result is probabilities."""

    paper = "Verma and Swami 2019"
    climb: ClassVar = {"restarts": 5}

    def __init__(self):
        super().__init__(nn.Identity())
        self.nets = nn.ModuleList(cnn(outputs=4, width=8) for _ in range(4))
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("codes", torch.randint(0, 2, (10, 16), generator=generator) * 2.0 - 1)

    def bits(self, x):
        return torch.cat([net(x) for net in self.nets], 1)

    def fit(self):
        def loss(net, x, y):
            return relu(1 - 0.1 * net.bits(x) * net.codes[y]).square().mean() * 20

        fit(self, loss, 6)

    def forward(self, x):
        bits = self.bits(x)
        if self.view == "by hand":  # tanh and relu let all of the slope through
            sure = bits + (bits.tanh() - bits).detach()
            match = sure @ self.codes.T
            match = match + (relu(match) - match).detach()
        else:
            match = relu(bits.tanh() @ self.codes.T)
        return match / match.sum(1, keepdim=True).clamp_min(1e-9)

    def hand(self, x, y):
        """Climb the code of each target in the bits before tanh."""

        def loss(z, labels, target):
            return (self.bits(z) * (self.codes[target] - self.codes[labels])).sum(1)

        return by_target(self, loss, x, y)


class Diversity(Broken):
    """Three networks trained to disagree on wrong classes (ADP)."""

    paper = "Pang et al. 2019"
    weak_is = "PGD-10 of small steps"
    climb: ClassVar = {"steps": 200, "restarts": 2}

    def __init__(self):
        super().__init__(nn.Identity())
        self.nets = nn.ModuleList(cnn(width=8) for _ in range(3))

    def probs(self, x):
        return torch.stack([net(x).softmax(1) for net in self.nets])

    def fit(self):
        def loss(net, x, y):
            probs = net.probs(x)
            picked = probs.gather(2, y.expand(3, -1)[..., None]).clamp_min(1e-9).log()
            mean = probs.mean(0).clamp_min(1e-9)
            entropy = -(mean * mean.log()).sum(1)
            others = probs.scatter(2, y.expand(3, -1)[..., None], 0).transpose(0, 1)
            others = others / others.norm(dim=2, keepdim=True).clamp_min(1e-6)
            volume = torch.linalg.det(others @ others.transpose(1, 2) + 1e-4 * torch.eye(3))
            return (-picked.mean(0) - 2 * entropy - 0.5 * volume.clamp_min(1e-6).log()).mean()

        fit(self, loss, 6)

    def forward(self, x):
        return self.probs(x).mean(0).clamp_min(1e-20).log()

    def weak(self, x, y):
        return PGD(THREAT, 10, EPS / 10)(self.defense(), x, y, torch.Generator().manual_seed(0))

    def hand(self, x, y):
        """Climb 200 small steps on the margin, from two starts."""
        return self.climb_margin(x, y)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, levels):
        return (x * levels).round() / levels

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Levels(nn.Module):
    """Activations in [0, 1], rounded to a few levels, with a slope in training and by hand."""

    view = "own"

    def __init__(self, levels):
        super().__init__()
        self.levels = levels

    def forward(self, x):
        x = x.clamp(0, 1)
        through = self.training or self.view == "by hand"
        return (
            _Rounded.apply(x, self.levels) if through else (x * self.levels).round() / self.levels
        )


class EMPIR(Broken):
    """A network of full and two of low precision, which vote."""

    paper = "Sen et al. 2020"
    weak_is = "PGD-20 on the mean probability"

    def __init__(self):
        super().__init__(nn.Identity())
        self.full = cnn(width=8)
        self.low = nn.ModuleList([cnn(act=lambda: Levels(15)), cnn(act=lambda: Levels(3))])

    def fit(self):
        for net in (self.full, *self.low):
            fit(net)

    def members(self, x):
        return torch.stack([net(x) for net in (self.full, *self.low)])

    def forward(self, x):
        logits = self.members(x)
        probs = logits.softmax(2).mean(0)
        if self.view == "paper":
            return probs.log()
        votes = one_hot(logits.argmax(2), 10).float().mean(0)
        if self.view == "by hand":
            votes = votes + probs - probs.detach()
        return votes + 1e-3 * probs  # which decides where each votes for another class

    climb: ClassVar = {"restarts": 3}

    def weak(self, x, y):
        with self.seen_as("paper"):
            return on_net(self, x, y)

    def hand(self, x, y):
        """Pass gradients straight through the rounding, and climb all members' margins."""
        loss = lambda z: sum(margin(one, y).clamp_max(3) for one in self.members(z))  # noqa: E731
        with self.seen_as("by hand"):
            return ascend(self, loss, x, y, **self.climb)


class Consistency(Broken):
    """Reject where the upper half of the image is another class: a part must agree.

    The image counterpart of temporal dependency, which compares the transcript of a part of a
    recording with that part of the whole transcript.
    """

    paper = "Yang et al. 2019a"
    climb: ClassVar = {"restarts": 5}
    weak_is = "PGD-20 on the network"
    rejects = 10

    def part(self, x):
        return torch.cat([x[..., :13, :], torch.zeros_like(x[..., 13:, :])], 2)

    def fit(self):
        fit(
            self.net,
            lambda net, x, y: cross_entropy(net(x), y) + cross_entropy(net(self.part(x)), y),
        )

    def forward(self, x):
        whole, part = self.net(x), self.net(self.part(x))
        agree = whole.argmax(1) == part.argmax(1)
        reject = torch.where(agree, whole.amin(1) - 1, whole.amax(1) + 1)
        if self.view == "by hand":  # it rejects the less, the more the part agrees
            soft = margin(part, whole.argmax(1))
            reject = reject.detach() + soft - soft.detach()
        return torch.cat([whole, reject[:, None]], 1)

    def weak(self, x, y):
        return on_net(self.net, x, y)

    def hand(self, x, y):
        """Climb the target in the whole and in the part."""

        def loss(z, labels, target):
            both = (self.net(z), self.net(self.part(z)))
            return sum(margin(one, labels, target).clamp_max(3) for one in both)

        return by_target(self, loss, x, y)


class MixupInference(Broken):
    """Mix the image with digits of other classes, and average the predictions."""

    paper = "Pang et al. 2020b"
    weak_is = "PGD-20 on the network"
    random = True

    def __init__(self):
        super().__init__()
        self.register_buffer("pool", torch.zeros(10, 20, 1, 28, 28))

    def fit(self):
        def loss(net, x, y):
            share, other = torch.rand(()), torch.randperm(len(x))
            logits = net(share * x + (1 - share) * x[other])
            return share * cross_entropy(logits, y) + (1 - share) * cross_entropy(logits, y[other])

        fit(self.net, loss, 6)
        x, y = digits("train", 400)
        self.pool.copy_(torch.stack([x[y == k][:20] for k in range(10)]))

    climb: ClassVar = {"steps": 50, "draws": 4}

    def forward(self, x):
        if self.view == "paper":
            return self.net(x)
        total, own = 0, self.net(x).argmax(1)
        for _ in range(8):
            other = (own + torch.randint(1, 10, (len(x),))) % 10
            mixed = (x + self.pool[other, torch.randint(20, (len(x),))]) / 2
            total = total + self.net(mixed).softmax(1) / 8
        return total.clamp_min(1e-9).log()

    def weak(self, x, y):
        return on_net(self.net, x, y)

    def hand(self, x, y):
        """Average gradients over the mixtures (EoT)."""
        return self.climb_margin(x, y)


class MENet(Broken):
    """Drop half of the pixels, and complete the image by a matrix of low rank."""

    paper = "Yang et al. 2019b"
    weak_is = "PGD-20 on the network"
    random = True

    @torch.no_grad()
    def completed(self, x, mask=None):
        mask = (torch.rand_like(x) < 0.5).float() if mask is None else mask
        u, s, v = torch.linalg.svd(x * mask * 2, full_matrices=False)
        return (u[..., :8] * s[..., None, :8] @ v[..., :8, :]).clamp(0, 1)

    def fit(self):
        fit(self.net, change=lambda x, y: self.completed(x), epochs=5)

    climb: ClassVar = {"steps": 50, "draws": 10}

    def forward(self, x):
        return self.net(self.pass_through(x, self.completed))

    def weak(self, x, y):
        return on_net(self.net, x, y)

    def hand(self, x, y):
        """Average over masks; the completion passes gradients straight through (BPDA, EoT)."""
        return self.climb_margin(x, y)


class Asymmetric(Broken):
    """Reject where the detector of the predicted class, trained adversarially, does not fire."""

    paper = "Yin et al. 2020"
    climb: ClassVar = {"steps": 60, "restarts": 5}
    weak_is = "PGD-20 on the network"
    rejects = 10

    def __init__(self):
        super().__init__()
        self.detectors = cnn()
        self.register_buffer("least", torch.zeros(()))

    def fit(self):
        fit(self.net)
        # A detector sees others' digits, changed towards its class; its own are clean.
        targets = {}

        def change(x, y):
            target = (y + torch.randint(1, 10, y.shape)) % 10
            targets["now"] = target
            x_adv = x.clone()
            for _ in range(7):
                x_adv.requires_grad_()
                score = self.detectors(x_adv).gather(1, target[:, None]).sum()
                step = EPS / 3 * torch.autograd.grad(score, x_adv)[0].sign()
                x_adv = torch.min(torch.max(x_adv.detach() + step, x - EPS), x + EPS).clamp(0, 1)
            return torch.cat([x, x_adv])

        def loss(net, x, y):
            clean, attacked = net(x).chunk(2)
            wanted = one_hot(y, 10).float()
            lies = attacked.gather(1, targets["now"][:, None])
            return binary_cross_entropy_with_logits(
                clean, wanted
            ) * 5 + binary_cross_entropy_with_logits(lies, torch.zeros_like(lies))

        fit(self.detectors, loss, change=change)
        with torch.no_grad():
            x = digits("train", 1000)[0]
            own = self.detectors(x).gather(1, self.net(x).argmax(1)[:, None])
        self.least.copy_(own.quantile(0.05))

    def forward(self, x):
        logits = self.net(x)
        own = self.detectors(x).gather(1, logits.argmax(1)[:, None])
        return torch.cat([logits, logits.amax(1, keepdim=True) + self.least - own], 1)

    def weak(self, x, y):
        return on_net(self.net, x, y)

    def hand(self, x, y):
        """Climb the target in the network until it leads, and in its detector."""

        def loss(z, labels, target):
            logits = self.net(z)
            lead = logits.gather(1, target[:, None])[:, 0]
            lead = lead - logits.scatter(1, target[:, None], -torch.inf).amax(1)
            fires = self.detectors(z).gather(1, target[:, None])[:, 0]
            return lead.clamp_max(1) * 2 + fires

        return by_target(self, loss, x, y, steps=60)


class Weakness(Broken):
    """Reject where noise changes the prediction, or where few steps do not: both are rare."""

    paper = "Hu et al. 2019"
    climb: ClassVar = {"steps": 60, "restarts": 5}
    weak_is = "PGD-20 on the network"
    rejects = 10
    steps = 20

    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.zeros(8, 1, 28, 28))
        self.register_buffer("most", torch.zeros(2))

    def fit(self):
        fit(self.net)
        self.noise.copy_(0.15 * torch.randn(8, 1, 28, 28))
        x, _ = digits("train", 500)
        shake, steps = self.criteria(x)
        self.most.copy_(torch.stack([shake.quantile(0.97), steps.quantile(0.97)]))

    def criteria(self, x):
        x = x.detach()
        with torch.no_grad():
            logits = self.net(x)
            own = logits.argmax(1)
            noisy = self.net((x[:, None] + self.noise).flatten(0, 1)).view(len(x), 8, 10)
            shake = (noisy.softmax(2) - logits.softmax(1)[:, None]).abs().sum(2).mean(1)
        steps, x_adv = torch.zeros(len(x)), x.clone()
        for _ in range(self.steps):
            with torch.enable_grad():
                x_adv.requires_grad_()
                logits = self.net(x_adv)
                steps = steps + (logits.argmax(1) == own)
                loss = margin(logits, own).sum()
                x_adv = (x_adv + 0.02 * torch.autograd.grad(loss, x_adv)[0].sign()).detach()
        return shake, steps

    def forward(self, x):
        logits = self.net(x)
        shake, steps = self.criteria(x)
        odd = (shake > self.most[0]) | (steps > self.most[1])
        reject = torch.where(odd, logits.amax(1) + 1, logits.amin(1) - 1)
        if self.view == "by hand":  # it rejects the less, the surer the noisy copies are
            noisy = self.net((x[:, None] + self.noise).flatten(0, 1)).view(len(x), 8, 10)
            own = logits.argmax(1)[:, None, None].expand(-1, 8, 1)
            soft = -noisy.log_softmax(2).gather(2, own).mean((1, 2))
            reject = reject.detach() + soft - soft.detach()
        return torch.cat([logits, reject[:, None]], 1)

    def weak(self, x, y):
        return on_net(self.net, x, y)

    def hand(self, x, y):
        """Climb the target under noise in small steps: on the way both criteria hold somewhere."""

        def loss(z, labels, target):
            noisy = self.net((z[:, None] + self.noise).flatten(0, 1)).view(len(z), 8, 10)
            own = torch.log_softmax(self.net(z), 1).gather(1, target[:, None])[:, 0]
            chosen = target[:, None, None].expand(-1, 8, 1)
            return own + torch.log_softmax(noisy, 2).gather(2, chosen)[..., 0].mean(1)

        return by_target(self, loss, x, y, steps=60)


TRAMER = [
    KWTA,
    Odds,
    Generative,
    SparseFourier,
    MaxMahalanobis,
    OutputCodes,
    Diversity,
    EMPIR,
    Consistency,
    MixupInference,
    MENet,
    Asymmetric,
    Weakness,
]
