"""Numbers outside their limits, which would make an attack weak without a word, are refused."""

import pytest

from lightning_rob.attacks import (
    CW,
    DDN,
    PGD,
    SGM,
    Adam,
    AggMo,
    DeepFool,
    HighConfidence,
    InsideBounds,
    LinBP,
    Nesterov,
    Square,
    SurrogateGradient,
)
from lightning_rob.threat import Threat

L2, LINF = Threat("l2", 1.0), Threat("linf", 0.1)
WRONG = {
    "cw_step": lambda: CW(L2, step_size=-1),
    "cw_confidence": lambda: CW(L2, confidence=-1),
    "ddn": lambda: DDN(L2, gamma=2),
    "deepfool": lambda: DeepFool(L2, overshoot=-0.1),
    "confident": lambda: HighConfidence(PGD(LINF, 5, 0.05), untargeted=0, targeted=0),
    "square": lambda: Square(LINF, p=1.5),
    "pgd": lambda: PGD(LINF, 5, 0.05, momentum=(2.0,)),
    "aggmo": lambda: AggMo((0.9, -0.1)),
    "nesterov": lambda: Nesterov(1.5),
    "adam": lambda: Adam((0.9, 1.1)),
    "sgm": lambda: SGM(-1),
    "linbp": lambda: LinBP(1.5),
    "inside": lambda: InsideBounds(0.7),
    "surrogate": lambda: SurrogateGradient(PGD(LINF, 5, 0.05), noise=0.1),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_a_number_outside_its_limits_is_refused(make):
    with pytest.raises(ValueError, match=r"must be|give noise and copies"):
        make()
