"""Train the defenses of the leaderboard at equal cost, each with several seeds; resumable.

    export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
    python benchmarks/leaderboard/train.py digits --seeds 0 1 2          # or photographs, cifar10
    lightning-rob leaderboard benchmarks/leaderboard/digits --evaluate

Each training goes into a folder of its own, with submission.yaml and last.ckpt; one that is there
is left alone, and one that was stopped goes on from its last epoch. The scores of 107 trainings,
whose models are not here, are in docs/leaderboard_digits.json: more trainings are ranked among them
by --beside. The cost is counted: forward and backward passes of a training image through one
network, by the training itself (what a defense learns at the test is in its prediction). Epochs are
chosen so that it comes near the protocol's limit and stays below.
"""

import argparse
import shutil
from pathlib import Path

import yaml
from lightning.pytorch import Trainer

from lightning_rob import nets
from lightning_rob.cli.main import main as run_cli
from lightning_rob.recipes.shipped import find_recipe

HERE = Path(__file__).parent
IMAGES = 3800  # of digits and of photographs, for training
CIFAR_IMAGES = 8000
HELD_OUT = 200  # others that no defense sees
WIDE = "--model.net.init_args.width=16"
STAGES = {
    "IAT of 3": 3,
    "BAT of 2": 2,
    "BARRE of 2": 2,
    "Athena, 15 reversible": 15,
    "Athena, all 73": 73,
}
BART = """{BoxBlur: {size: 3}, FFT: {alpha: 0.95}, GaussianBlur: {sizes: [5], std: [0.1, 3.0]},
  JPEG: {quality: [55, 95]}, MedianBlur: {size: [3, 5]}, GaussianNoise: {alpha: 0.05},
  Pepper: {alpha: 0.01}, Salt: {alpha: 0.01}, PoissonNoise: {alpha: 0.01},
  ColorPrecision: {steps: [8, 200]}, Swirl: {radius: [5, 14], strength: [0.01, 2]},
  Crop: {sides: [0.6964, 1.0]}}"""  # of the paper's, for images of one channel
DIGITS = {  # name -> paper, recipe and mix-ins, epochs (of each of the stages), options
    "Standard": ("", "madry_digits standard", 75, []),
    "Adversarial training": ("Madry et al. 2018", "madry_digits", 12, []),
    "TRADES": ("Zhang et al. 2019", "madry_digits trades", 10, []),
    "MART": ("Wang et al. 2020", "madry_digits", 10, ["--model.mart_beta=5"]),
    "AWP": ("Wu et al. 2020", "madry_digits", 10, ["--model.awp=0.005"]),
    "Union of three norms": ("Tramer and Boneh 2019", "madry_digits union", 4, []),
    "Free": ("Shafahi et al. 2019", "madry_digits", 18, [
        "--model=FreeTraining", "--model.threat={norm: linf, eps: 0.1}", "--model.replays=4"]),
    "IAT of 3": ("Dbouk and Shanbhag 2022", "iat_digits", 5, [WIDE]),
    "BAT of 2": ("Pinot et al. 2020", "iat_digits", 7, ["--model=BAT", WIDE, "--model.members=2"]),
    "BARRE of 2": ("Dbouk and Shanbhag 2023", "iat_digits barre", 4, [
        WIDE, "--model.members=2", "--model.search_images=256"]),
    "ADP of 3": ("Pang et al. 2019", "adp_digits", 25, [WIDE]),
    "GAL of 3": ("Kariyappa and Qureshi 2019", "gal_digits", 16, [WIDE]),
    "TRS of 3": ("Yang et al. 2021", "trs_digits", 3, [WIDE]),
    "DVERGE of 3": ("Yang et al. 2020", "dverge_digits", 7, [WIDE]),
    "BaRT": ("Raff et al. 2019", "rt_digits", 36, [
        f"--model.defense.transforms={BART}", "--model.defense.size=5"]),
    "RT": ("Sitawarin et al. 2022", "rt_digits", 36, []),
    "RT of noise": ("Sitawarin et al. 2022", "rt_digits group_noise", 36, []),
    "AdvRT": ("Sitawarin et al. 2022", "rt_digits advrt", 6, []),
    "Smoothing": ("Cohen et al. 2019", "smoothing_digits", 75, []),
    "SmoothAdv": ("Salman et al. 2019", "smoothing_digits", 12, [
        "--model.attack=PGD", "--model.attack.threat={norm: l2, eps: 0.5}",
        "--model.attack.steps=5", "--model.attack.step_size=0.2", "--model.attack.draws=1"]),
    "RMC": ("Wu et al. 2020", "rmc_digits", 75, []),
    "DENT": ("Wang et al. 2021", "dent_digits", 12, []),
    "DANN": ("Ganin et al. 2016; Chen et al. 2022", "dann_digits", 75, []),
    "TADV": ("Chen et al. 2022", "tadv_digits", 18, []),
    "URejectron": ("Goldwasser et al. 2020", "urejectron_digits", 75, []),
    "Athena, 15 reversible": ("Meng et al. 2020", "athena_digits", 4, []),
    # After its only epoch a sub-model is validated on two images: on more by all that there are it
    # would cost as many passes as the training.
    "Athena, all 73": ("Meng et al. 2020", "athena_pool_digits", 1, [
        "--data.eval_batch_size=2", "--trainer.limit_val_batches=1",
        "--trainer.limit_train_batches=0.97"]),
}  # fmt: skip
EPS = "8/255"  # of attacks in training on photographs


def pgd(steps, share):
    """Return the options for PGD in training on photographs, in steps of a share of the radius."""
    return [f"--model.attack.threat.eps={EPS}", f"--model.attack.step_size={8 * share:g}/255",
            f"--model.attack.steps={steps}"]  # fmt: skip


PHOTOGRAPHS = {
    "Standard": ("", "madry_digits standard", 75, []),
    "Adversarial training": ("Madry et al. 2018", "madry_digits", 12, pgd(5, 0.3)),
    "TRADES": ("Zhang et al. 2019", "madry_digits trades", 10, pgd(5, 0.3)),
    "MART": ("Wang et al. 2020", "madry_digits", 10, ["--model.mart_beta=5", *pgd(5, 0.3)]),
    "AWP": ("Wu et al. 2020", "madry_digits", 10, ["--model.awp=0.005", *pgd(5, 0.3)]),
    "Free": ("Shafahi et al. 2019", "madry_digits", 18, [
        "--model=FreeTraining", f"--model.threat={{norm: linf, eps: {EPS}}}", "--model.replays=4"]),
    "IAT of 3": ("Dbouk and Shanbhag 2022", "iat_digits", 5, [WIDE, *pgd(4, 0.4)]),
    "BAT of 2": ("Pinot et al. 2020", "iat_digits", 7, [
        "--model=BAT", WIDE, "--model.members=2", *pgd(4, 0.4)]),
    "BARRE of 2": ("Dbouk and Shanbhag 2023", "iat_digits barre", 4, [
        WIDE, "--model.members=2", "--model.search_images=256", *pgd(4, 0.4)]),
    "ADP of 3": ("Pang et al. 2019", "adp_digits", 25, [WIDE]),
    "GAL of 3": ("Kariyappa and Qureshi 2019", "gal_digits", 16, [WIDE]),
    "TRS of 3": ("Yang et al. 2021", "trs_digits", 3, [
        WIDE, "--model.threat.eps=16/255", f"--model.initial_eps={EPS}"]),
    "DVERGE of 3": ("Yang et al. 2020", "dverge_digits", 7, [
        WIDE, f"--model.eps={EPS}", "--model.step_size=1.6/255"]),
    "RT of noise": ("Sitawarin et al. 2022", "rt_digits group_noise", 36, []),
    "Smoothing": ("Cohen et al. 2019", "smoothing_digits", 75, ["--model.defense.sigma=0.12"]),
    "DENT": ("Wang et al. 2021", "dent_digits", 12, pgd(5, 0.3)),
}  # fmt: skip
CIFAR_EPOCHS = {"DVERGE of 3": 5}  # of which four are without attacks; others: two fifths
CIFAR = {  # on ResNet-20, 15 minutes each on one core
    name: (
        paper,
        recipes,
        CIFAR_EPOCHS.get(name, round(0.4 * epochs)),
        [option for option in options if option != WIDE],
    )
    for name, (paper, recipes, epochs, options) in PHOTOGRAPHS.items()
    if name not in ("MART", "Free", "BARRE of 2", "GAL of 3", "TRS of 3")
}
BOARDS = {  # name -> defenses, training images, options of all
    "digits": (DIGITS, IMAGES, []),
    "photographs": (PHOTOGRAPHS, IMAGES, [
        "--data=Patches10", "--data.batch_size=128", "--data.eval_batch_size=100",
        f"--data.train_size={IMAGES}", "--data.test_size=400", "--model.net.init_args.channels=3"]),
    "cifar10": (CIFAR, CIFAR_IMAGES, [
        "--data=Images", "--data.root=cifar10", "--data.resize=32", "--data.crop=32",
        "--data.batch_size=128", "--data.eval_batch_size=100", f"--data.limit_train={CIFAR_IMAGES}",
        "--data.augment+=torchvision.transforms.v2.RandomCrop",
        "--data.augment.init_args.size=32", "--data.augment.init_args.padding=4",
        "--data.augment+=torchvision.transforms.v2.RandomHorizontalFlip",
        "--model.net=ResNet20", "--model.optimizer.init_args.lr=0.003"]),
}  # fmt: skip


class Passes:
    """Counts images that go forward and backward through any network of this package."""

    def __init__(self):
        self.count = 0
        self.save = Trainer.save_checkpoint
        Trainer.save_checkpoint = lambda *given, **named: self.saved(*given, **named)
        for kind in (nets.SmallCNN, nets.MNISTNet, nets.AthenaCNN, nets.DANNNet, nets.ResNet):
            self.watch(kind)

    def watch(self, kind):
        forward = kind.forward

        def counted(net, x, *rest):
            out = forward(net, x, *rest)
            self.count += len(x)
            first = out[0] if isinstance(out, tuple) else out
            if first.requires_grad:
                first.register_hook(self.backward)
            return out

        kind.forward = counted

    def backward(self, gradient):
        self.count += len(gradient)

    def saved(self, trainer, path, *rest, **named):
        """Write the count beside each checkpoint, for a training that goes on from it."""
        self.save(trainer, path, *rest, **named)
        Path(path).with_suffix(".passes").write_text(str(self.count))


def train(folder, images, common, name, seed, paper, recipes, epochs, options, passes):
    draft = folder.with_name(f".{folder.name}")
    # One that was killed before its count was written begins anew.
    ends = (path.resolve() for path in draft.rglob("last.ckpt"))  # of some recipes it is a link
    begun = [path for path in ends if path.with_suffix(".passes").exists()]
    if not begun:
        shutil.rmtree(draft, ignore_errors=True)
    stages = STAGES.get(name, 1)
    args = [f"--config={part}" for part in recipes.split()] + common + options
    args += [f"--model.epochs={epochs}"] if stages > 1 else []
    text = find_recipe(recipes.split()[0]).read_text()
    args += [f"--model.lr_scheduler.init_args.T_max={epochs}"] if "T_max" in text else []
    args += [f"--trainer.max_epochs={stages * epochs}", f"--seed_everything={seed}"]
    args += ["--test_after_fit=false", "--trainer.logger=false"]
    # Sub-models of Athena stop early by their validation loss.
    args += [] if "Athena" in name else ["--trainer.limit_val_batches=0"]
    args += [f"--trainer.default_root_dir={draft}", "--trainer.enable_progress_bar=false"]
    args += ["--trainer.num_sanity_val_steps=0", f"--data.val_size={HELD_OUT}"]
    args += [f"--ckpt_path={path}" for path in begun]
    passes.count = int(begun[0].with_suffix(".passes").read_text()) if begun else 0
    run_cli(["fit", *args])
    (checkpoint,) = draft.rglob("last.ckpt")
    cost = round(passes.count / images, 1)
    about = {"name": name, "paper": paper, "seed": seed, "training": cost}
    shutil.copy(checkpoint, draft / "last.ckpt")  # of several stages it is a link
    shutil.rmtree(draft / "checkpoints", ignore_errors=True)
    (draft / "submission.yaml").write_text(yaml.safe_dump(about))
    draft.rename(folder)
    print(folder.name, cost, flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("board", choices=list(BOARDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=list(DIGITS), help="these")
    options = parser.parse_args()
    defenses, images, common = BOARDS[options.board]
    passes = Passes()
    for seed in options.seeds:
        for name in options.only or defenses:
            short = name.lower().replace(" ", "_").replace(",", "")
            folder = HERE / options.board / f"{short}_{seed}"
            if not folder.exists():
                train(folder, images, common, name, seed, *defenses[name], passes)


if __name__ == "__main__":
    main()
