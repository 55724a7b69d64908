"""Common corruptions as attacks that ignore the defense, and the errors under them."""

from collections.abc import Sequence

from lightning_rob.attacks import Attack, CommonCorruption
from lightning_rob.evaluation.results import EvaluationResult
from lightning_rob.metrics.corruption_error import ALEXNET_ERRORS
from lightning_rob.transforms.corruptions import Corruption

CORRUPTIONS = tuple(ALEXNET_ERRORS)  # the 15 of ImageNet-C and CIFAR-10-C
SEVERITIES = (1, 2, 3, 4, 5)


def common_corruptions(
    names: Sequence[str] = CORRUPTIONS, severities: Sequence[int] = SEVERITIES
) -> dict[str, Attack]:
    """Return the corruptions of ImageNet-C as attacks for `evaluate`, "fog_3" for severity 3.

    Raises:
        ValueError: a severity is none of 1 to 5, or a name or a severity is given twice.
    """
    for given in (names, severities):
        if len(set(given)) != len(given):
            raise ValueError(f"each corruption and severity counts once, got {list(given)}")
    return {
        f"{name}_{severity}": CommonCorruption(Corruption(name, severity))
        for name in names
        for severity in severities
    }


def corruption_errors(
    result: EvaluationResult,
    names: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
) -> dict[str, list[float]]:
    """Return the error at each severity of each corruption, for `metrics.corruption_error`.

    The result is that of an evaluation under `common_corruptions(names, severities)`.

    Raises:
        KeyError: the evaluation left out a corruption.
    """
    return {n: [1 - result.accuracy(f"{n}_{s}") for s in severities] for n in names}
