# %% [markdown]
# # Attack any network in ten lines
#
# Attack a small network, look at the images, and measure its robust accuracy. Network and digits
# are part of the package; replace them by yours.

# %%
import matplotlib.pyplot as plt
import torch

from lightning_rob import PGD, AutoAttack, Single, Threat, evaluate, load
from lightning_rob.data import Digits5k

torch.manual_seed(0)
net = load("zoo:digits_standard").net  # any nn.Module, [B, C, H, W] in [0, 1] to logits [B, K]
test = Digits5k().source(train=False)

# %% [markdown]
# The attack itself is one line. Every pixel may change by 0.1:

# %%
images, labels = test.images[:500] / 255, test.labels[:500]
threat = Threat("linf", 0.1)
adversarial = PGD(threat, steps=20, step_size=0.02)(Single(net), images, labels)

figure, axes = plt.subplots(3, 8, figsize=(9, 3.9), layout="constrained")
for column in range(8):
    clean, attacked = images[column, 0], adversarial[column, 0]
    before, after = (int(net(part[None, None]).argmax()) for part in (clean, attacked))
    for axis, picture in zip(
        axes[:, column], (clean, attacked - clean + 0.5, attacked), strict=True
    ):
        axis.imshow(picture.detach(), cmap="gray", vmin=0, vmax=1)
        axis.set_axis_off()
    axes[0, column].set_title(f"{before}")
    axes[2, column].set_title(f"{after}", color="firebrick" if after != before else "black")
plt.savefig("ten_lines_1.png")
plt.show()

# %% [markdown]
# The rows are the image with its prediction, the perturbation around grey, and the perturbed image
# with its prediction, which is red if it has changed.
#
# ## Robust accuracy
#
# `evaluate` scores the network image by image, under any number of attacks:

# %%
attacks = {
    "pgd": PGD(threat, steps=20, step_size=0.02),
    "autoattack": AutoAttack(threat, queries=500),
}
result = evaluate(net, attacks, [(images, labels)], progress=False)
print(result.table())

# %% [markdown]
# `worst` is the accuracy under the strongest attack, for a fixed network on each image. Report this
# accuracy. It is an upper bound, because a stronger attack may exist.
#
# ## Accuracy by radius

# %%
from lightning_rob.plots import COLORS

radii = [0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12]
results = [
    evaluate(net, {"pgd": PGD(Threat("linf", r), 20, r / 5)}, [(images, labels)], progress=False)
    for r in radii[1:]
]
accuracy = [result.accuracy("clean"), *(found.accuracy("pgd") for found in results)]
bands = [result.interval("clean"), *(found.interval("pgd") for found in results)]

figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
axis.plot(radii, accuracy, "o-", color=COLORS[0])
axis.fill_between(radii, *zip(*bands, strict=True), color=COLORS[0], alpha=0.15)
axis.set(xlabel="radius of the linf ball", ylabel="accuracy under PGD", ylim=(0, 1))
plt.savefig("ten_lines_2.png")
plt.show()

# %% [markdown]
# The band is the 95 % interval over images. If the curve does not fall to 0 for a large radius,
# the attack fails: see [break a defense that only seems robust](broken_defense.md).
#
# Next: [your own module, data and logger](../yours.md), or
# [which attack for my defense?](../which_attack.md).
