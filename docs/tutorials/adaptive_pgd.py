# %% [markdown]
# # Why adaptive PGD overestimates an ensemble
#
# Compare PGD with ARC and the climb on a randomized ensemble, which draws one of its members for
# each prediction. Two members that are linear in the two pixels of an image show how PGD fails.
# Each member is wrong beyond its own line:

# %%
import logging

import matplotlib.pyplot as plt
import torch
from lightning.pytorch import Trainer, seed_everything
from matplotlib.patches import Circle
from torch import nn

from lightning_rob import ARC, BAT, PGD, Ensemble, LatticeClimber, Threat, evaluate
from lightning_rob.data import Patches10
from lightning_rob.nets import SmallCNN


def linear_member(weights, distance):
    """Logits (margin, 0): class 0 is predicted up to `distance` from the centre of the image."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    weights = torch.tensor(weights)
    with torch.no_grad():
        net[1].weight.copy_(torch.stack([-weights, torch.zeros(2)]))
        net[1].bias.copy_(torch.tensor([weights.norm() * distance + weights.sum() / 2, 0.0]))
    return net


ensemble = Ensemble([linear_member([60.0, 0.0], 0.1), linear_member([0.0, 3.0], 0.15)])
image, label = torch.full((1, 1, 1, 2), 0.5), torch.tensor([0])
threat = Threat("l2", 0.25)


def paths():
    for steps in range(13):
        pgd = PGD(threat, steps, 0.05, random_start=False) if steps else None
        arc = ARC(threat, steps, 0.25) if steps else None
        yield [
            (attack(ensemble, image, label) if attack else image).flatten() for attack in (pgd, arc)
        ]


pgd_path, arc_path = (torch.stack(path) for path in zip(*paths(), strict=True))

grid = torch.linspace(0.2, 0.8, 240)
points = torch.cartesian_prod(grid, grid).reshape(-1, 1, 1, 2)
right = ensemble(points)[:, 0].detach().reshape(240, 240).T
figure, axis = plt.subplots(figsize=(5, 4.4), layout="constrained")
shades = axis.pcolormesh(grid, grid, right, cmap="Blues", vmin=0, vmax=1, rasterized=True)
axis.add_patch(Circle((0.5, 0.5), threat.eps, fill=False, linestyle="--"))
axis.plot(*pgd_path.T, "o-", color="#D55E00", label="adaptive PGD")
axis.plot(*arc_path.T, "s-", color="black", label="ARC")
axis.set(xlabel="pixel 1", ylabel="pixel 2", aspect="equal")
axis.legend(loc="lower left")
figure.colorbar(shades, label="probability of a right prediction")
plt.savefig("adaptive_pgd_1.png")
plt.show()

# %% [markdown]
# PGD maximizes the expected loss. It crosses the white corner, in which both members are
# wrong, and leaves it again. The loss of the first member has no upper bound and a slope twenty
# times that of the second, so moving the first member further beyond its line increases the loss
# more than keeping the second wrong. ARC attacks member by member, and stays in the corner:

# %%
for name, path in {"adaptive PGD": pgd_path, "ARC": arc_path}.items():
    final = path[-1].reshape(1, 1, 1, 2)
    print(f"{name:12} leaves a right prediction with probability {ensemble(final)[0, 0]:.0%}")

# %% [markdown]
# ## A trained ensemble
#
# Boosted adversarial training (BAT) trains the second member on adversarial images of the
# first. This is a short training on ten photographs:

# %%
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
seed_everything(0, verbose=False)
linf = Threat("linf", 8 / 255)
module = BAT(
    lambda: SmallCNN(channels=3),
    PGD(linf, steps=2, step_size=6 / 255),
    epochs=5,
    probs=[0.8, 0.2],
    monitor=None,
    optimizer=lambda weights: torch.optim.Adam(weights, 0.02),
)
data = Patches10(batch_size=128, train_size=4000, val_size=50, test_size=300, workers=0)
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
trainer = Trainer(max_epochs=10, accelerator="cpu", enable_checkpointing=False, **quiet)
trainer.fit(module, data)

# %%
pgd = PGD(linf, steps=20, step_size=2 / 255, random_start=False)
attacks = {
    "adaptive_pgd": pgd,
    "arc": ARC(linf, steps=20, step_size=8 / 255, neighbours=4, early_stop=True),
    "climb": LatticeClimber(linf),
}
data.setup("test")
result = evaluate(module, attacks, data.test_dataloader(), progress=False)
first = evaluate(module.members[0], {"pgd": pgd}, data.test_dataloader(), progress=False)

bars = {"first member\nPGD": first.accuracy("pgd")}
bars |= {f"ensemble\n{name}": result.accuracy(name) for name in attacks}
figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
shown = axis.bar(list(bars), list(bars.values()), color=["0.6", "#D55E00", "#0072B2", "#0072B2"])
axis.bar_label(shown, [f"{value:.1%}" for value in bars.values()])
axis.set(ylabel="robust accuracy", ylim=(0, 1))
plt.savefig("adaptive_pgd_2.png")
plt.show()

# %%
print(result.table())

# %% [markdown]
# The last three accuracies are of the same ensemble, for the same images in the same ball, and
# differ only by the attack. An evaluation with adaptive PGD alone would report the orange bar.
#
# Attack a randomized ensemble with the climb, and report `worst`. This command runs all attacks:
#
# ```bash
# lightning-rob test --ckpt_path last.ckpt --trainer.callbacks+=rec_suite
# ```
#
# Next: [randomized ensembles](../randomized_ensembles.md), with the studies of the paper.
