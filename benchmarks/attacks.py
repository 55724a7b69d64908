"""Every attack beside torchattacks, foolbox, ART, adv-lib and a plain loop: time and strength.

    pip install -e ".[bench]"
    python benchmarks/attacks.py                     # half an hour on two cores
    python benchmarks/attacks.py --only pgd arc9 --rounds 5

All attack the same networks (ResNet-20, trained here on Patches10 for a minute or two) with
trainable weights, as users pass them, on the same images, in one process, in turn. "floor" is a
plain loop of forward passes and backward passes to the images with frozen weights, as many as the
attack has steps, or twenty. Ratios are medians over rounds of CPU time (on a GPU: of time between
CUDA events) to that of the same round. Peers that are not installed are left out and named.
"""

import argparse
import warnings
from importlib.util import find_spec

import timing
import torch

from lightning_rob.attacks import (
    ARC,
    CW,
    GMSA,
    PAA,
    PGD,
    TAA,
    Accelerated,
    Chunked,
    DeepFool,
    SurrogateTransforms,
)
from lightning_rob.attacks.arc import expected_accuracy
from lightning_rob.defenses import Ensemble, RandomTransforms, Single, TransformEnsemble
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from lightning_rob.transforms import catalogue
from tests import plain

PEERS = {"torchattacks": "torchattacks", "foolbox": "foolbox", "ART": "art", "adv-lib": "adv_lib"}
GROUPS = ("pgd", "adaptive", "cw", "deepfool", "eot", "gmsa", "transformation")
GROUPS += ("arc9", "arc9-robust", "arc4", "arc4-robust")
NO_BUDGET = Threat("l2", 1e3)
EPS, STEP, STEPS = 4 / 255, 1 / 255, 20


def floor(nets, x, y, passes):
    """Run plain forward and backward passes of each network."""
    weights = [weight for net in nets for weight in net.parameters()]
    for weight in weights:
        weight.requires_grad_(False)
    for _ in range(passes):
        for net in nets:
            image = x.clone().requires_grad_()
            torch.autograd.grad(torch.nn.functional.cross_entropy(net(image), y), image)
    for weight in weights:
        weight.requires_grad_(True)
    return x


def installed(name):
    return find_spec(PEERS[name]) is not None


def foolbox_attack(net, attack, eps):
    import foolbox

    model = foolbox.PyTorchModel(net, bounds=(0, 1), device=str(timing.device()))
    return lambda x, y: attack(model, x, y, epsilons=eps)[1]


def art_attack(net, make):
    from art.estimators.classification import PyTorchClassifier

    kind = "gpu" if torch.cuda.is_available() else "cpu"
    loss = torch.nn.CrossEntropyLoss()
    model = PyTorchClassifier(net, loss, (3, 32, 32), 10, clip_values=(0, 1), device_type=kind)
    attack = make(model)
    return lambda x, y: torch.from_numpy(attack.generate(x.cpu().numpy(), y.cpu().numpy())).to(x)


def pgd(nets, x, y, options):
    """PGD-20 on one network."""
    net = nets[0]
    attack = PGD(Threat("linf", EPS), STEPS, STEP, random_start=False)
    drop = PGD(Threat("linf", EPS), STEPS, STEP, random_start=False, early_stop=True)
    whole = Chunked(attack, images=len(x))
    found = {
        "floor": lambda: floor([net], x, y, STEPS),
        "lightning-rob": lambda: attack(Single(net), x, y),
        "lightning-rob, the whole batch at once": lambda: whole(Single(net), x, y),
        "lightning-rob, early_stop": lambda: drop(Single(net), x, y),
        "lightning-rob, bfloat16": lambda: Accelerated(attack, autocast="bfloat16")(
            Single(net), x, y
        ),
    }
    if installed("torchattacks"):
        import torchattacks

        theirs = torchattacks.PGD(net, EPS, STEP, STEPS, random_start=False)
        found["torchattacks"] = lambda: theirs(x, y)
    if installed("foolbox"):
        import foolbox

        kind = foolbox.attacks.LinfPGD(abs_stepsize=STEP, steps=STEPS, random_start=False)
        with_foolbox = foolbox_attack(net, kind, EPS)
        found["foolbox"] = lambda: with_foolbox(x, y)
    if installed("ART"):
        from art.attacks.evasion import ProjectedGradientDescentPyTorch

        with_art = art_attack(
            net,
            lambda model: ProjectedGradientDescentPyTorch(
                model, "inf", EPS, STEP, max_iter=STEPS, batch_size=len(x), verbose=False
            ),
        )
        found["ART"] = lambda: with_art(x, y)
    if installed("adv-lib"):
        from adv_lib.attacks import pgd_linf

        found["adv-lib"] = lambda: pgd_linf(
            net, x, y, EPS, steps=STEPS, random_init=False, absolute_step_size=STEP
        )
    return f"PGD-{STEPS}, linf {255 * EPS:.0f}/255", Single(net), found


def adaptive(nets, x, y, options):
    """Adaptive PGD on a randomized ensemble: each member once a step."""
    defense, threat = Ensemble(nets), Threat("linf", EPS)
    attack = PGD(threat, STEPS, STEP, random_start=False)
    drop = PGD(threat, STEPS, STEP, random_start=False, early_stop=True)
    return (
        f"adaptive PGD-{STEPS}, two members",
        defense,
        {
            "floor": lambda: floor(nets, x, y, STEPS),
            "lightning-rob": lambda: attack(defense, x, y),
            "lightning-rob, early_stop": lambda: drop(defense, x, y),
        },
    )


def arc_at(eps, neighbours, steps=STEPS):
    """ARC beside Algorithm 2 as it is written, at a radius."""

    def group(nets, x, y, options):
        defense, threat = Ensemble(nets), Threat("linf", eps)
        attack = ARC(threat, steps, eps, neighbours)
        drop = ARC(threat, steps, eps, neighbours, early_stop=True)

        def straight():
            weights = [weight for net in nets for weight in net.parameters()]
            for weight in weights:
                weight.requires_grad_(False)
            x_adv = plain.arc(nets, defense.weights, x, y, threat, steps, eps, neighbours)
            for weight in weights:
                weight.requires_grad_(True)
            return x_adv

        title = f"ARC, two members, linf {255 * eps:.2g}/255, G = {neighbours}, K = {steps}"
        found = {
            "floor": lambda: floor(nets, x, y, steps),
            "Algorithm 2 as written": straight,
            "lightning-rob": lambda: attack(defense, x, y),
            "lightning-rob, early_stop": lambda: drop(defense, x, y),
        }
        return title, defense, found

    return group


def carlini_wagner(nets, x, y, options):
    """C&W, nine constants of fifty steps."""
    net = nets[0]
    ours = CW(NO_BUDGET, 50, 0.01, 9, initial_const=0.01)
    found = {
        "floor": lambda: floor([net], x, y, 20),
        "lightning-rob": lambda: ours(Single(net), x, y),
    }
    if installed("foolbox"):
        import foolbox

        theirs = foolbox_attack(
            net, foolbox.attacks.L2CarliniWagnerAttack(9, 50, 0.01, 0, 0.01), None
        )
        found["foolbox"] = lambda: theirs(x, y)
    if installed("adv-lib"):
        from adv_lib.attacks import carlini_wagner_l2

        found["adv-lib"] = lambda: carlini_wagner_l2(
            net,
            x,
            y,
            learning_rate=0.01,
            initial_const=0.01,
            binary_search_steps=9,
            max_iterations=50,
        )
    if options.slow and installed("ART"):
        from art.attacks.evasion import CarliniL2Method

        with_art = art_attack(
            net,
            lambda model: CarliniL2Method(
                model,
                learning_rate=0.01,
                binary_search_steps=9,
                max_iter=50,
                initial_const=0.01,
                batch_size=len(x),
                verbose=False,
            ),
        )
        found["ART"] = lambda: with_art(x, y)
    return "C&W l2, 9 x 50 steps", Single(net), found


def deepfool(nets, x, y, options):
    """DeepFool, all nine wrong classes."""
    net = nets[0]
    ours = DeepFool(NO_BUDGET, steps=50)
    found = {
        "floor": lambda: floor([net], x, y, 20),
        "lightning-rob": lambda: ours(Single(net), x, y),
    }
    if installed("adv-lib"):
        from adv_lib.attacks import df

        found["adv-lib"] = lambda: df(net, x, y, steps=50, overshoot=0.02, norm=2)
    if installed("foolbox"):
        import foolbox

        theirs = foolbox_attack(
            net, foolbox.attacks.L2DeepFoolAttack(steps=50, candidates=10), None
        )
        found["foolbox"] = lambda: theirs(x, y)
    if installed("torchattacks"):
        import torchattacks

        one_by_one = torchattacks.DeepFool(net, steps=50, overshoot=0.02)
        found["torchattacks"] = lambda: one_by_one(x, y)
    if options.slow and installed("ART"):
        from art.attacks.evasion import DeepFool as Theirs

        with_art = art_attack(
            net,
            lambda model: Theirs(model, 50, 0.02, nb_grads=10, batch_size=len(x), verbose=False),
        )
        found["ART"] = lambda: with_art(x, y)
    return "DeepFool l2", Single(net), found


def eot(nets, x, y, options):
    """Expectation over transforms: 32 images, ten draws of 14 of the 33 transforms, four steps."""
    x, y = x[:32], y[:32]
    kinds = [kind() for kind in catalogue().values()]
    defense = RandomTransforms(nets[0], kinds, 14, 10)
    own = PGD(Threat("linf", EPS), 4, STEP)
    shared = PGD(Threat("linf", EPS), 4, STEP, backward=SurrogateTransforms())
    batch = PGD(Threat("linf", EPS), 4, STEP, backward=SurrogateTransforms(shared_order="batch"))
    noise = Streams.from_index(torch.arange(len(x), device=x.device), 0)
    copies, labels = x.repeat(10, 1, 1, 1), y.repeat(10)
    found = {
        "floor": lambda: floor(nets[:1], copies, labels, 4)[: len(x)],
        "lightning-rob, an order for each batch": lambda: batch(defense, x, y, noise),
        "lightning-rob, an order for each image": lambda: shared(defense, x, y, noise),
        "lightning-rob, an order for each draw": lambda: own(defense, x, y, noise),
    }
    return "EoT through random transforms, S = 14, n = 10, four steps", defense, found


def gmsa(nets, x, y, options):
    """GMSA on a defense that learns nothing: the pace of the attack itself, five rounds."""
    defense = Single(nets[0])
    inner = PGD(Threat("linf", EPS), 5, STEP)
    passes = sum(5 * models for models in range(1, 6))

    class Relearning(Single):
        def adapt(self, x, generator=None):
            return Single(nets[1])

        @property
        def adapted_model(self):
            return Single(self.net)

    found = {
        "floor": lambda: floor(nets[:1], x, y, passes),
        "lightning-rob": lambda: GMSA(inner, rounds=5)(Relearning(nets[0]), x, y),
    }
    return "GMSA, five rounds of five steps", defense, found


def transformation(nets, x, y, options):
    """TAA and PAA on four sub-models."""
    names = ["clean", "flip_horizontal", "shift_left", "rotate_90"]
    defense = TransformEnsemble([nets[i % 2] for i in range(4)], names)
    inner = PGD(Threat("linf", EPS), 10, STEP, random_start=False)
    one = TAA(inner, target="clean")
    every = PAA(PGD(Threat("linf", EPS / 10), 10, EPS / 40), max_dissimilarity=0.05, rounds=3)
    noise = Streams.from_index(torch.arange(len(x), device=x.device), 0)
    found = {
        "floor": lambda: floor(nets[:1], x, y, 10),
        "lightning-rob, TAA of ten steps": lambda: one(defense, x, y, noise),
        "lightning-rob, PAA of 3 x 4 x 10 steps": lambda: every(defense, x, y, noise),
    }
    return "transformation ensemble of four", defense, found


def half_radius(nets, x, y):
    """The radius of a list at which ARC leaves nearest to half of the expected accuracy."""
    defense, best = Ensemble(nets), (1.0, 0.0)
    for eps in (k / 255 for k in (0.5, 1, 1.5, 2, 3, 4, 5, 6, 6.5, 7, 7.5, 8)):
        x_adv = ARC(Threat("linf", eps), 10, eps, 4, early_stop=True)(defense, x, y)
        left = float(expected_accuracy(nets, defense.weights, x_adv, y).mean())
        best = min(best, (abs(left - 0.5), eps))
        if left < 0.4:
            break
    return best[1]


def groups(options, nets, x, y):
    found = {
        "pgd": pgd,
        "adaptive": adaptive,
        "cw": carlini_wagner,
        "deepfool": deepfool,
        "eot": eot,
        "gmsa": gmsa,
        "transformation": transformation,
    }
    if not options.only or any(name.startswith("arc") for name in options.only):
        half = half_radius(nets, x, y)
        for neighbours in (9, 4):
            found[f"arc{neighbours}"] = arc_at(half, neighbours)
            found[f"arc{neighbours}-robust"] = arc_at(1e-3 / 255, neighbours)
    return {k: v for k, v in found.items() if not options.only or k in options.only}


def rows(defense, results, times, kept, x, y):
    for name, x_adv in results.items():
        images = x_adv.detach()
        n = len(images)
        with torch.no_grad():
            right = defense(images, Streams.from_index(torch.arange(n, device=x.device), 9))
            right = right.gather(1, y[:n, None])[:, 0]
        size = (images - x[:n]).flatten(1).norm(dim=1)
        fooled = size[right == 0]
        yield (
            name,
            f"{sorted(times[name])[len(times[name]) // 2]:.2f}",
            f"{timing.ratio(times[name], times['floor']):.2f}",
            f"{100 * float(right.mean()):.1f} %",
            f"{float(fooled.mean()):.4f}" if len(fooled) else "",
            f"{kept[name] / n / 2**20:.2f}",
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--only", nargs="+", choices=GROUPS, help="some of the groups")
    parser.add_argument("--slow", action="store_true", help="also ART's C&W and DeepFool: an hour")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if missing := [name for name in PEERS if not installed(name)]:
        print("not installed, left out:", ", ".join(missing))
    print("training two networks, a minute or two", flush=True)
    nets = [timing.trained(seed) for seed in (0, 1)]
    x, y = timing.photographs(False, options.batch)
    for group in groups(options, nets, x, y).values():
        title, defense, contenders = group(nets, x, y, options)
        results, times, kept = timing.in_turn(contenders, options.rounds)
        columns = ("", "seconds", "/ floor", "accuracy", "l2 of the fooled", "MiB kept an image")
        found = rows(defense, results, times, kept, x, y)
        timing.printed(f"{title}; {len(x)} images, medians of {options.rounds}", columns, found)


if __name__ == "__main__":
    main()
