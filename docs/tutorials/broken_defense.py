# %% [markdown]
# # Break a defense that only seems robust
#
# Find out that a defense is not robust, and break it. This defense rounds every pixel to five grey
# levels before the network, so that PGD fails:

# %%
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from torch import nn

from lightning_rob import PGD, Attack, Auto, Single, Threat, evaluate, load
from lightning_rob.audit import power
from lightning_rob.audit.auditor import audit
from lightning_rob.certify import certify
from lightning_rob.data import Digits5k
from lightning_rob.defenses import Smoothing

torch.manual_seed(0)
net = load("zoo:digits_standard").net  # trained on clean digits


class Rounded(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net((4 * x).round() / 4)


test = Digits5k().source(train=False)
images, labels = test.images[:100] / 255, test.labels[:100]
threat = Threat("linf", 0.15)
pgd = PGD(threat, steps=20, step_size=0.03)
plain = evaluate(net, {"pgd": pgd}, [(images, labels)], progress=False)
rounded = evaluate(Rounded(net), {"pgd": pgd}, [(images, labels)], progress=False)

figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
bars = axis.bar(
    ["network", "network behind rounding"], [plain.accuracy("pgd"), rounded.accuracy("pgd")]
)
axis.bar_label(bars, fmt="{:.0%}")
axis.set(ylabel="accuracy under PGD", ylim=(0, 1.1))
plt.savefig("broken_defense_1.png")
plt.show()

# %% [markdown]
# ## The audit
#
# PGD fails because rounding has a slope of 0. The audit runs other attacks, checks
# gradients and predictions, and reports doubtful accuracies:

# %%
report = audit(Single(Rounded(net)), images, labels, threat, queries=300)
print(report.summary())
for finding in report.flags:
    print(f"\n{finding.severity}: {finding.name}\n  {finding.text}\n  {finding.advice}")

# %% [markdown]
# ## An adaptive attack
#
# The audit recommends BPDA (Athalye et al. 2018): keep the rounding in the forward pass, and use
# the gradient of the identity in the backward pass. An attack is a frozen dataclass with a
# `threat` and `perturb`. This one attacks a copy of the network with the other gradient; the
# evaluation scores its images on the defense:


# %%
class StraightThrough(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x + ((4 * x).round() / 4 - x).detach())


@dataclass(frozen=True)
class BPDA(Attack):
    attack: PGD

    @property
    def threat(self):
        return self.attack.threat

    def perturb(self, defense, x, y, generator):
        rounded = defense.classifiers[0]
        return self.attack.perturb(Single(StraightThrough(rounded.net)), x, y, generator)


result = evaluate(Rounded(net), {"pgd": pgd, "bpda": BPDA(pgd)}, [(images, labels)], progress=False)
figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
names = ["clean", "pgd", "bpda"]
bars = axis.bar(names, [result.accuracy(name) for name in names], color=["0.6", "0.6", "#D55E00"])
axis.bar_label(bars, fmt="{:.0%}")
axis.set(ylabel="accuracy behind rounding", ylim=(0, 1.1))
plt.savefig("broken_defense_2.png")
plt.show()

# %%
print(result.table())

# %% [markdown]
# The rounding gains nothing: under the adaptive attack the defense is as vulnerable as the plain
# network. A high accuracy under an unsuitable attack is no robustness.
#
# ## `Auto` and the test of power
#
# `Auto` needs no knowledge of the defense: it inspects the network, tries attacks for its findings,
# and returns the strongest. The test of power measures whether an attack finds planted adversarial
# images. PGD fails the test, and the attack of `Auto` passes it.

# %%
found = Auto(threat, passes=1000).find(Single(Rounded(net)), images, labels)
print("found:", *found.findings, sep="\n  ")
right = (Rounded(net)(found.x_adv).argmax(1) == labels).float().mean()
print(f"left by Auto: {right:.0%}\n")
for name, attack in (("PGD", pgd), ("found", found.attack)):
    print(f"{name}: {power(Rounded(net), attack, images[:30], labels[:30])}")

# %% [markdown]
# ## A lower bound
#
# An attack gives an upper bound of the robust accuracy, and randomized smoothing a lower bound: if
# the network predicts by votes over Gaussian noise, a share of the images is certified within a
# radius. An attacker who knows the noise of a prediction may fool more images, because the
# certificate is that of the expected vote. This network was trained without noise, so its smoothed
# accuracy is low.

# %%
smoothed = Smoothing(load("zoo:digits_robust"), sigma=0.25, draws=20)
batches = [(images, labels, torch.arange(100))]
certified = certify(smoothed, batches, draws=1000, radii=[0.5], progress=False)
attack = PGD(Threat("l2", 0.5), steps=20, step_size=0.1, draws=8)
attacked = evaluate(
    smoothed, {"pgd": attack}, batches, inferences=10, known_noise=True, progress=False
)
print(f"clean                     {attacked.accuracy('clean'):.1%}")
print(f"certified within l2 0.5   {certified.certified(0.5):.1%}")
print(f"attacked                  {attacked.accuracy('pgd'):.1%}")
print(f"attacker knows the noise  {attacked.known_noise.accuracy:.1%}")

# %% [markdown]
# ```bash
# lightning-rob audit --ckpt_path zoo:digits_robust --eps 0.1 --strict
# ```
#
# This command audits a checkpoint; `lightning-rob attack` and `certify` also accept one.
#
# Next: [what a robust accuracy means](../truth.md).
