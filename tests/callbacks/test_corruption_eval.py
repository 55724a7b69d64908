"""Accuracies under corruptions, whose package is replaced by one with known results."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_rob import PGD, CorruptionEval, RobustAudit, RobustEval, Threat, evaluate
from lightning_rob.attacks import CommonCorruption
from lightning_rob.callbacks import CertifiedEval
from lightning_rob.defenses import Single
from lightning_rob.evaluation import common_corruptions, corruption_table
from lightning_rob.metrics import corruption_error
from lightning_rob.modules import AdversarialTraining
from tests.tiny import quiet_trainer
from tests.transforms import conftest

package = conftest.package  # stands in for imagecorruptions
REFERENCE = {"darker": 0.5, "grainy": 0.25}
PIXELS = torch.rand(12, 3, 32, 32, generator=torch.Generator().manual_seed(0)).mul(255).round()
LEVELS = torch.linspace(0.3, 1, 12).view(-1, 1, 1, 1)
X = (PIXELS * LEVELS).round() / 255
Y = (X.mean((1, 2, 3)) > 0.3).long()


class Mean(nn.Module):
    """Predicts 1 for images whose mean is above 0.3."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        level = self.scale * (x.mean((1, 2, 3)) - 0.3)
        return torch.stack([-level, level], 1)


def logged_by(*callbacks):
    loader = DataLoader(TensorDataset(X, Y, torch.arange(12)), 5)
    module = AdversarialTraining(Mean)
    (logged,) = quiet_trainer(*callbacks).test(module, loader, verbose=False)
    return logged


def test_logs_each_accuracy_and_both_means(package, capsys):
    threat = Threat("linf", 0.01)
    corruptions = CorruptionEval(list(REFERENCE), reference=REFERENCE)
    logged = logged_by(RobustEval({"pgd": PGD(threat, 1, 0.01)}), corruptions)
    darker = []
    for severity in range(1, 6):
        x = ((255 * X).round() * (1 - severity / 10)).floor() / 255
        darker.append((Mean()(x).argmax(1) != Y).float().mean().item())
        assert logged[f"test/robust/darker_{severity}"] == pytest.approx(1 - darker[-1])
    assert 0 < darker[0] < darker[-1]
    grainy = [1 - logged[f"test/robust/grainy_{severity}"] for severity in range(1, 6)]
    errors = {"darker": darker, "grainy": grainy}
    assert logged["test/corruption/error"] == pytest.approx(sum(darker + grainy) / 10)
    assert logged["test/corruption/mce"] == pytest.approx(corruption_error(errors, REFERENCE))
    assert logged["test/robust/worst"] == logged["test/robust/pgd"] > 1 - darker[-1]
    assert f"mCE {logged['test/corruption/mce']:.1%}" in capsys.readouterr().out


def test_one_table_of_corruption_severity_and_attack(package, capsys):
    """The attack starts at the corrupted image, and its ball is around that."""
    names, severities, step = ["darker"], [2, 5], PGD(Threat("linf", 0.1), 1, 0.1)
    attacks = common_corruptions(names, severities, {"pgd": step})
    assert list(attacks) == ["darker_2", "darker_5", "darker_2_pgd", "darker_5_pgd"]
    noise = torch.Generator().manual_seed(0)
    found = attacks["darker_5_pgd"](Single(Mean()), X, Y, noise)
    dark = attacks["darker_5"](Single(Mean()), X, Y)
    assert 0 < (found - dark).abs().max() <= 0.1 + 1e-6 < (found - X).abs().max()
    result = evaluate(Mean(), attacks, [(X, Y)], progress=False)
    shown = corruption_table(result, names, severities, ["pgd"])
    cells = [list(column.cells) for column in shown.columns]
    names_by_column = [["darker_2", "darker_2_pgd"], ["darker_5", "darker_5_pgd"]]
    under = [[f"{100 * result.accuracy(n):.1f}" for n in column] for column in names_by_column]
    assert cells == [["darker", "darker"], ["", "pgd"], *under]
    assert result.accuracy("darker_2_pgd") < result.accuracy("darker_2")
    logged = logged_by(CorruptionEval(names, severities, attacks={"pgd": step}))
    assert logged["test/robust/darker_5_pgd"] == pytest.approx(result.accuracy("darker_5_pgd"))
    assert "Accuracy by severity" in capsys.readouterr().out
    assert attacks["darker_2_pgd"].knowledge.endswith(f"then {step.knowledge}")
    assert isinstance(attacks["darker_2"], CommonCorruption)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"severities": [0]}, r"severity must be in \[1, 5\], got 0"),
        ({"severities": [1, 1]}, r"counts once, got \[1, 1\]"),
        ({"corruptions": ["fog"], "reference": "alexnet"}, "not of fog"),
        ({"severities": [1, 2], "reference": "alexnet"}, "needs the severities 1 to 5"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        CorruptionEval(**options)


def test_two_callbacks_are_refused(package):
    darker = {"corruptions": ["darker"]}
    for kind, options in ((CorruptionEval, darker), (RobustAudit, {}), (CertifiedEval, {})):
        with pytest.raises(ValueError, match=f"a run has one {kind.__name__}, for Lightning would"):
            logged_by(kind(**options), kind(**options))
