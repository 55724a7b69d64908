"""Find an attack that leads to small logits instead of across a boundary."""

import torch
from torch import Tensor

from lightning_rob.attacks import PGD, Attack, evaluating
from lightning_rob.attacks.auto import attack_gradients, step_across
from lightning_rob.attacks.inspection import SHRUNK
from lightning_rob.attacks.sight import watching
from lightning_rob.defenses import Defense
from lightning_rob.defenses.copies import fresh
from lightning_rob.evaluation.findings import Finding, is_gain
from lightning_rob.evaluation.protocol import AttackerDefenderSession
from lightning_rob.metrics import robust_accuracy
from lightning_rob.objectives import losses_of_rule, spread, without_scale
from lightning_rob.randomness import Streams, derive_seed, own_streams
from lightning_rob.rules import rejected_share
from lightning_rob.threat import PROJECTED

STEPS = 20  # of the attack on a loss without scale
PREDICTIONS, DRAWS = 4, 4  # of each image, and for each step, of a random defense


def scale(
    name: str,
    attack: Attack,
    defense: Defense,
    x: Tensor,
    x_adv: Tensor,
    y: Tensor,
    index: Tensor,
    seed: int,
    random: bool,
) -> Finding | None:
    """Find that images stand an attack of this name with small logits, and fall without scale.

    The logits of a network that is unsure away from its data are small there, and its margin is
    small where they are: an attack may end there. None where the logits of images x_adv
    [B, C, H, W] are not much smaller than those of x.
    """
    threat, (low, high) = attack.threat, attack.threat.bounds
    if threat.relative or threat.p not in PROJECTED or not 0 < threat.eps < high - low:
        return None  # a ball that holds every image, as of corruptions, says nothing
    noise, key = Streams.from_index(index, seed), derive_seed(seed, *index.tolist())
    with own_streams(key, x.device), evaluating(fresh(defense)) as copied, torch.no_grad():
        logits = [copied.logits(images, noise) for images in (x, x_adv)]
        stands = robust_accuracy(copied(x_adv, noise), y) > 0.5
    clean, attacked = (spread(one).mean(0)[:, 0] for one in logits)
    ratio = (attacked / clean)[stands]
    if len(ratio) < 2 or not float(ratio.median()) < SHRUNK:
        return None
    relative, rows = without_scale(logits[0].shape[-1]), stands.nonzero()[:, 0]
    own, broken = losses_of_rule(defense.rule, len(defense.weights))[0], []
    for loss in (relative, own):
        pgd = PGD(
            threat,
            STEPS,
            step_across(threat.eps, STEPS, 4),
            loss,
            draws=DRAWS if random else None,
            backward=attack_gradients(defense),
        )
        session = AttackerDefenderSession(pgd, defense, seed)
        try:
            with watching(len(rows), x.device):
                _, found = session.step(x[rows], y[rows], index[rows], PREDICTIONS if random else 1)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a network that this attack cannot run on is no finding of it
            return None
        right = torch.stack([robust_accuracy(one, y[rows]) for one in found]).mean(0)
        rejected = rejected_share(found, defense.rejects, defense.abstains).mean(0)
        broken.append((right + rejected.to(right) < 0.5).double())
    if not is_gain(broken[0] - broken[1], exact=not random):
        return None
    return Finding(
        "severe",
        f"{name} left images whose logits shrank, away from the data. PGD of {STEPS} steps breaks "
        f"more of them by a loss without scale than by {own}.",
        'Attack by evaluate(net, "auto", …) or `lightning-rob attack`, or by PGD with objective '
        f"lightning_rob.objectives.{relative}; the lowest accuracy counts.",
        {
            "attack": name,
            "images": len(rows),
            "size": float(ratio.median()),
            "broken": float(broken[0].mean()),
            "by_its_loss": float(broken[1].mean()),
        },
        "scale",
    )
