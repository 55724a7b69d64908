# %% [markdown]
# # Watch a fit
#
# Attack a network after every epoch of its training. This script trains the same network on clean
# and on adversarial images:

# %%
import csv
import logging
from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger

from lightning_rob import PGD, AdversarialTraining, RobustEval, Threat
from lightning_rob.data import Digits5k
from lightning_rob.nets import SmallCNN

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
threat = Threat("linf", 0.1)
attack = PGD(threat, steps=3, step_size=0.05)  # of the training: weak and cheap
strong = {"pgd": PGD(threat, steps=20, step_size=0.02)}  # of the evaluation


def fit(name, attack):
    seed_everything(0, verbose=False)
    module = AdversarialTraining(
        SmallCNN, attack, optimizer=lambda weights: torch.optim.Adam(weights, 0.005)
    )
    trainer = Trainer(
        max_epochs=6,
        accelerator="cpu",
        callbacks=[RobustEval(strong)],
        logger=CSVLogger(mkdtemp(), name),
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, Digits5k(batch_size=128, eval_batch_size=250, workers=0))
    lines = Path(trainer.logger.log_dir, "metrics.csv").read_text().splitlines()
    return [row for row in csv.DictReader(lines) if row["val/robust/pgd"]]


fits = {"clean images": fit("clean", None), "adversarial images": fit("adversarial", attack)}

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3.3), sharey=True, layout="constrained")
for axis, (name, epochs) in zip(axes, fits.items(), strict=True):
    for column, look, label in (("val/acc", "s--", "clean"), ("val/robust/pgd", "o-", "PGD")):
        axis.plot([float(row[column]) for row in epochs], look, label=label)
    axis.set(title=f"trained on {name}", xlabel="epoch", ylim=(0, 1))
axes[0].set_ylabel("validation accuracy")
axes[1].legend(loc="lower right")
plt.savefig("watch_a_fit.png")
plt.show()

# %% [markdown]
# Clean accuracy is high in both; robust accuracy differs. The last epoch logged these numbers:

# %%
for name, epochs in fits.items():
    clean, attacked = (float(epochs[-1][column]) for column in ("val/acc", "val/robust/pgd"))
    print(f"{name:20} clean {clean:.1%}, pgd {attacked:.1%}")

# %% [markdown]
# The callback `RobustEval` works in any `Trainer`, and logs `val/robust/<attack>`
# and `val/robust/worst` to any logger. `RobustCheckpoint()` keeps the weights with the highest
# `val/robust/worst`. The weights after training are the same with and without these callbacks.
#
# On the command line, this is the same fit with curves in TensorBoard:
#
# ```bash
# lightning-rob fit --config madry_digits --trainer.callbacks+=pgd
# ```
#
# Next: [evaluation in a fit](../evaluation.md#from-the-command-line), or
# [your own LightningModule](../yours.md).
