"""Digits, training, and the ascent of the hand-written attacks on broken defenses."""

import os
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_rob import PGD, Single, Threat
from lightning_rob.data import Digits5k

EPS = 0.15
THREAT = Threat("linf", EPS)
CACHE = Path(os.environ.get("BROKEN_CACHE", "logs/broken"))  # fitted weights, not in git


def digits(kind, count):
    """Return the first digits of a part of the data, "train" or "test", and their labels."""
    data = Digits5k()
    data.prepare_data()
    data.setup("fit" if kind == "train" else "test")
    samples = data.parts[kind]
    chosen = [samples[i] for i in range(count)]
    return torch.stack([one[0] for one in chosen]), torch.tensor([one[1] for one in chosen])


def cnn(outputs=10, act=nn.ReLU, width=16, hidden=64):
    """Return two convolutions and two linear layers."""
    first = (nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), act(), nn.MaxPool2d(2))
    second = (nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), act())
    head = (nn.Flatten(), nn.Linear(2 * width * 49, hidden), act(), nn.Linear(hidden, outputs))
    return nn.Sequential(*first, *second, nn.MaxPool2d(2), *head)


def fit(net, loss=None, epochs=4, count=3500, change=None, rate=2e-3):
    """Train a network on digits: loss(net, x, y), on images that `change(x, y)` alters first."""
    x, y = digits("train", count)
    loss = loss or (lambda net, x, y: cross_entropy(net(x), y))
    optimizer = torch.optim.Adam(net.parameters(), rate)
    steps = epochs * -(-count // 128)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3 * rate, total_steps=steps)
    net.train()
    for _ in range(epochs):
        for rows in torch.randperm(count).split(128):
            inputs = x[rows] if change is None else change(x[rows], y[rows])
            optimizer.zero_grad()
            loss(net, inputs, y[rows]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def adversarial(net, eps=EPS, steps=7):
    """Return a change of images by PGD on a network in training."""

    def change(x, y):
        attack = PGD(Threat("linf", eps), steps, 2.5 * eps / steps)
        return attack(Single(net), x, y)

    return change


def margin(logits, y, target=None):
    """Compute the largest wrong logit, or that of a target, minus the label's: [B, K] -> [B]."""
    right = logits.gather(1, y[:, None])[:, 0]
    if target is not None:
        return logits.gather(1, target[:, None])[:, 0] - right
    return logits.scatter(1, y[:, None], -torch.inf).amax(1) - right


def wrong(scores, y, rejects):
    """Return where a defense accepts and is wrong, by its scores [B, K]."""
    found = scores.argmax(1)
    return (found != y) & (found != (-1 if rejects is None else rejects))


@torch.no_grad()
def left(net, x, y, inferences=10):
    """Return the share [B] of predictions that are right or rejected."""
    torch.manual_seed(1)
    runs = [~wrong(net(x), y, net.rejects) for _ in range(inferences if net.random else 1)]
    return torch.stack(runs).float().mean(0)


def ascend(net, loss, x, y, steps=40, step=None, draws=1, restarts=1, noise=0.0):
    """Climb loss(x_adv) -> [B] by sign gradients, averaged over draws.

    A deterministic defense `net` decides at each step which images fool it, and they stay; of a
    random one the last iterates count.
    """
    step, best = step or 4 * EPS / steps, x.clone()
    done = torch.zeros(len(x), dtype=torch.bool)
    for _ in range(restarts):
        x_adv = (x + EPS * (2 * torch.rand_like(x) - 1)).clamp(0, 1)
        for _ in range(steps):
            total = torch.zeros_like(x)
            for _ in range(draws):
                inside = x_adv.detach() + noise * torch.randn_like(x)
                inside.requires_grad_()
                total += torch.autograd.grad(loss(inside).sum(), inside)[0]
            x_adv = x_adv + step * total.sign()
            x_adv = torch.min(torch.max(x_adv, x - EPS), x + EPS).clamp(0, 1)
            if not net.random:
                with torch.no_grad():
                    fools = wrong(net(x_adv), y, net.rejects)
                best[fools & ~done] = x_adv[fools & ~done]
                done |= fools
                if done.all():
                    return best
        best[~done] = x_adv[~done]
    return best


def by_target(net, loss, x, y, ranks=5, **options):
    """Climb loss(x_adv, y, target) towards wrong classes in turn, from the runner-up on."""
    best = x.clone()
    with torch.no_grad():
        order = net(x)[:, :10].scatter(1, y[:, None], -torch.inf).argsort(1, descending=True)
    for rank in range(ranks):
        rows = (left(net, best, y) > 0).nonzero()[:, 0]
        if not len(rows):
            break
        target = order[rows, rank]
        climbed = lambda z, target=target, labels=y[rows]: loss(z, labels, target)  # noqa: E731
        best[rows] = ascend(net, climbed, x[rows], y[rows], **options)
    return best


class Broken(nn.Module):
    """A defense, with its paper's attack and the attack by hand on it."""

    rejects = None  # index of the class of rejection
    random = False
    together = False  # whether predictions depend on the batch
    view = "own"  # which slope `forward` has: its own, the one "by hand", that of its "paper"
    climb: ClassVar = {}  # options of `ascend` by hand
    paper = ""
    weak_is = "PGD-20"

    def __init__(self, net=None):
        super().__init__()
        self.net = cnn() if net is None else net

    def fit(self):
        """Train all parts."""
        fit(self.net)

    def load(self):
        """Take the weights from the cache, or train."""
        file = CACHE / f"{type(self).__name__}.pt"
        if file.exists():
            self.load_state_dict(torch.load(file, weights_only=True))
        else:
            torch.manual_seed(0)
            self.fit()
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.state_dict(), file)
        return self.eval()

    def weak(self, x, y):
        """Run the attack that the paper, or its users, report: PGD on the defense as it is."""
        return PGD(THREAT, 20, EPS / 8)(self.defense(), x, y, torch.Generator().manual_seed(0))

    def hand(self, x, y):
        """Run the adaptive attack that was written for this defense."""
        raise NotImplementedError

    def defense(self):
        return Single(self, rejects=self.rejects)

    @contextmanager
    def seen_as(self, view):
        """Give all parts another slope inside this context."""
        parts = [part for part in self.modules() if hasattr(part, "view")]
        for part in parts:
            part.view = view
        try:
            yield
        finally:
            for part in parts:
                part.view = "own"

    def pass_through(self, x, change):
        """Change images [B, 1, 28, 28]: by hand with a slope of 1, by the paper not at all."""
        if self.view == "paper":
            return x
        changed = change(x)
        return x + (changed - x).detach() if self.view == "by hand" else changed

    def climb_margin(self, x, y):
        """Climb the margin of accepted classes over label and rejection, with the slope by hand."""

        def loss(z):
            scores = self(z)
            if self.rejects is None:
                return margin(scores, y)
            right = torch.maximum(scores.gather(1, y[:, None])[:, 0], scores[:, self.rejects])
            return scores[:, : self.rejects].scatter(1, y[:, None], -torch.inf).amax(1) - right

        with self.seen_as("by hand"):
            return ascend(self, loss, x, y, **self.climb)


def on_net(net, x, y, steps=20):
    """Run PGD on a network that a defense wraps: the attack of papers that call it gray-box."""
    return PGD(THREAT, steps, EPS / 8)(Single(net), x, y, torch.Generator().manual_seed(0))


def trained(case):
    """Return a defense of this class: the same weights in any order and from any benchmark."""
    torch.manual_seed(0)  # for those that the constructor draws
    return case().load()
