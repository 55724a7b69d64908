# %% [markdown]
# # Your own defense that adapts
#
# Write a defense that adapts to the test batch, and evaluate it in rounds of attacker and defender.
# This one takes the statistics of its batch normalization from the test batch:

# %%
import copy

import matplotlib.pyplot as plt
import torch
from torch import nn

from lightning_rob import GMSA, PGD, RoundProtocol, Threat, TransferFromStatic, evaluate, load
from lightning_rob.data import Digits5k
from lightning_rob.defenses.transductive import Transductive


class BatchStatistics(Transductive):
    """Predict with the mean and variance of the test batch (Schneider et al. 2020)."""

    needs_source = False

    def fit_to_batch(self, x, generator):
        net = copy.deepcopy(self.net).train()
        for layer in net.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.reset_running_stats()
                layer.momentum = None  # the mean of all batches, here of one
        with torch.no_grad():
            net(x)
        return self.copy_with(adapted=net.eval())


torch.manual_seed(0)
net = load("zoo:digits_standard").net  # trained on clean digits
defense = BatchStatistics(net)
test = Digits5k().source(train=False)
images, labels = test.images[:400] / 255, test.labels[:400]

# %% [markdown]
# ## Two attackers
#
# The first attacks the network without adaptation, and transfers the images.
# The second knows the defense and rehearses it (GMSA): it adapts a copy to its images, attacks all
# copies so far, and repeats. In each round 100 images are attacked, the defense adapts to them
# without labels, and predicts.

# %%
threat = Threat("linf", 0.06)
pgd = PGD(threat, steps=10, step_size=0.015, keep_best=True)
attacks = {"transfer": TransferFromStatic(pgd)}
attacks |= {f"gmsa_{rounds}": GMSA(pgd, rounds=rounds) for rounds in (1, 2, 4)}
protocol = RoundProtocol(images=100)
result = evaluate(defense, attacks, [(images, labels)], protocol=protocol, progress=False)
static = evaluate(net, {"pgd": pgd}, [(images, labels)], progress=False)

figure, axis = plt.subplots(figsize=(6, 3.3), layout="constrained")
rounds = [1, 2, 4]
axis.plot(rounds, [result.accuracy(f"gmsa_{n}") for n in rounds], "o-", label="GMSA")
axis.axhline(result.accuracy("transfer"), color="#D55E00", linestyle="--", label="transfer")
axis.axhline(static.accuracy("pgd"), color="0.5", linestyle=":", label="without the defense, PGD")
axis.set(xlabel="rehearsals of the attacker", ylabel="accuracy", ylim=(0, 1), xticks=rounds)
axis.legend()
plt.savefig("your_defense.png")
plt.show()

# %%
print(result.table())

# %% [markdown]
# The attacker who rehearses more than once is stronger than the transfer attack, by a gap that
# grows with the rehearsals: an evaluation with transferred images overestimates the defense. The
# lowest accuracy is an upper bound. `worst` of a defense that adapts is the strongest attack as a
# whole, because each prediction depends on the whole batch.
#
# Your class only needs `fit_to_batch`; evaluation, audit, records and the command line accept
# it like the defenses of the package. [Extending](../extending.md#a-defense) adds it to the
# package.
#
# Next: [defenses that adapt to the test batch](../transductive.md).
