"""Train adversarially robust ensembles and tell the truth about them, every epoch."""

from importlib import import_module
from importlib.metadata import version
from typing import Any

__version__ = version("lightning-rob")

_HOMES = {
    "threat": ["Threat"],
    "defenses": [
        "DANN",
        "DENT",
        "RMC",
        "TADV",
        "Defense",
        "Ensemble",
        "Mixture",
        "RandomTransforms",
        "Single",
        "TransformEnsemble",
        "URejectron",
    ],
    "attacks": [
        "ARC",
        "CW",
        "PAA",
        "PGD",
        "PartialBatchAttack",
        "SGM",
        "TAA",
        "AggMo",
        "Attack",
        "AutoAttack",
        "CommonCorruption",
        "DeepFool",
        "Quantized8Bit",
        "GMSA",
        "HighConfidence",
        "InsideBounds",
        "LinBP",
        "OnDifferentiable",
        "OnMember",
        "TransferFromStatic",
        "RandomMember",
        "SurrogateTransforms",
        "Strongest",
        "Targeted",
        "ThroughAdaptation",
        "WithBackward",
        "arc_linear",
        "attacking",
    ],
    "metrics": [
        "GradientSpread",
        "RobustAccuracy",
        "SelectiveError",
        "TransferMatrix",
        "Transferability",
    ],
    "evaluation": [
        "AttackerDefenderSession",
        "EvaluationResult",
        "RoundProtocol",
        "evaluate",
    ],
    "modules": [
        "ADP",
        "BAT",
        "DVERGE",
        "GAL",
        "IAT",
        "TRS",
        "AdversarialTraining",
        "PretrainedEnsemble",
        "FreeTraining",
        "RobustModule",
        "TransformTraining",
    ],
    "callbacks": [
        "TransferMatrixEval",
        "Gallery",
        "TerminateOnNonFinite",
        "RobustAudit",
        "RobustCheckpoint",
        "RobustEarlyStopping",
        "RobustEval",
        "VotingRuleEval",
    ],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import a noun when it is first asked for: the command line answers before torch loads."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
