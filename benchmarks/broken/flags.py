"""What the audit says of broken defenses, and of honest ones.

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/broken/flags.py

Audits each of the 23 broken defenses of `table.py` within linf 0.15, handed in as a network with
its class of rejection, and the honest ones of `checks.py`. Prints the findings:
those in brackets are warnings, the others are severe.
"""

import argparse
import sys
import warnings
from pathlib import Path

from torch.nn.functional import avg_pool2d

sys.path.insert(0, str(Path(__file__).parent.parent))

import checks
from broken.later import LATER
from broken.parts import THREAT, digits, trained
from broken.tramer import TRAMER

from lightning_rob.audit.auditor import audit

CASES = {case.__name__: case for case in (*TRAMER, *LATER)}


def flags(defense, x, y, threat):
    """Return the names of the findings that are flagged, warnings in brackets."""
    found = audit(defense, x, y, threat).findings
    severe = [one.name for one in found if one.severity == "severe"]
    return severe, [f"({one.name})" for one in found if one.severity == "warning"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="+", default=["broken", "honest"])
    parser.add_argument("--images", type=int, default=50)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    x, y = digits("test", options.images)
    cases = {"broken": ((name, THREAT, trained(case).defense()) for name, case in CASES.items())}
    small = avg_pool2d(x, 2)
    train = digits("train", 3500)
    cases["honest"] = checks.defenses(avg_pool2d(train[0], 2), train[1])
    for kind in options.kinds:
        count = {"severe": 0, "flagged": 0, "all": 0}
        for name, threat, defense in cases[kind]:
            severe, warned = flags(defense, x if kind == "broken" else small, y, threat)
            count["severe"] += bool(severe)
            count["flagged"] += bool(severe + warned)
            count["all"] += 1
            print(f"| {name} | {', '.join(severe + warned) or '-'} |", flush=True)
        print(f"{kind}: {count['flagged']} of {count['all']} flagged, {count['severe']} severe\n")


if __name__ == "__main__":
    main()
