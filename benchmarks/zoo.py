"""Train and test the networks in `zoo/`, and write their run folders and model cards.

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/zoo.py digits_standard

A recipe trains each network; its last checkpoint, without what only a resumed training needs, is
tested by the plug-ins that stand here, and exported for the model card. The commands stand in the
card. Other processors, or numbers of threads, train other weights.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

import torch

from lightning_rob.commands.checkpoints import RECIPE
from lightning_rob.commands.export.model_folder import TRAINING
from lightning_rob.runtime.files import atomic_save

KEPT = ("state_dict", RECIPE)
ROOT = Path(__file__).parents[1]
PGD = "--trainer.callbacks+=pgd --trainer.callbacks.eps=0.1"
AUTOATTACK = "--trainer.callbacks+=autoattack --trainer.callbacks.eps=0.1"
NETWORKS = {  # name: recipe, plug-ins of the test, the card's first sentence
    "digits_standard": (
        "madry_digits --config standard",
        f"{PGD} {AUTOATTACK}",
        "A small network trained on clean digits: accurate, and not robust.",
    ),
    "digits_robust": (
        "madry_digits",
        f"{PGD} {AUTOATTACK}",
        "The same network trained on adversarial digits, linf 0.1.",
    ),
}

MADE_BY = """## Made by

```bash
python benchmarks/zoo.py {name}  # in the clone
```

which runs these commands, and keeps of the last checkpoint what a test needs:

```bash
{fit}
{test}
```
"""


def run(line, folder):
    """Run a command line of this package in a folder."""
    print(f"$ {line}", flush=True)
    arguments = [sys.executable, "-m", *shlex.split(line.replace("-", "_", 1))]
    subprocess.run(arguments, cwd=folder, check=True)


def build(name, recipe, attacks, sentence):
    """Train, test and export in an empty folder, and copy what is written to `zoo/NAME`."""
    work, made = Path(mkdtemp()), ROOT / "zoo" / name
    fit = f"lightning-rob fit --config {recipe} --test_after_fit=false"
    test = f"lightning-rob test --ckpt_path zoo:{name} {attacks}"
    file = "logs/version_0/checkpoints/last.ckpt"
    run(fit, work)
    content = torch.load(work / file, weights_only=True)
    kept = {k: v for k, v in content.items() if k in KEPT or not TRAINING.fullmatch(k)}
    atomic_save(kept, work / file)
    run(test.replace(f"zoo:{name}", file), work)
    run(f"lightning-rob export --ckpt_path {file} --format safetensors --out card", work)
    shutil.rmtree(made, ignore_errors=True)
    (made / "checkpoints").mkdir(parents=True)
    shutil.copy(work / file, made / "checkpoints")
    tested = work / "logs/version_1"
    shutil.copytree(tested / "images", made / "images")
    shutil.copy(tested / "robust.jsonl", made)
    shutil.copy(work / "logs/version_0/config.yaml", made)
    card = (work / "card/README.md").read_text(encoding="utf-8")
    card = card.replace('"hf-hub:OWNER/NAME")  # or the path of this folder', f'"zoo:{name}")')
    title, body = card.split("\n\n", 2)[1:]
    made_by = MADE_BY.format(name=name, fit=fit, test=test)
    (made / "README.md").write_text(f"{title}\n\n{sentence}\n\n{body}\n{made_by}", "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="+", choices=NETWORKS)
    for name in parser.parse_args().names:
        build(name, *NETWORKS[name])
