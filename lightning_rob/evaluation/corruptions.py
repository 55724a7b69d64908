"""Common corruptions as attacks that ignore the defense, and the errors under them."""

from collections.abc import Collection, Mapping, Sequence

from rich.table import Table

from lightning_rob.attacks import Attack, CommonCorruption
from lightning_rob.evaluation.results import EvaluationResult
from lightning_rob.metrics.corruption_error import ALEXNET_ERRORS
from lightning_rob.tables import literal
from lightning_rob.transforms.corruptions import Corruption

CORRUPTIONS = tuple(ALEXNET_ERRORS)  # the 15 of ImageNet-C and CIFAR-10-C
SEVERITIES = (1, 2, 3, 4, 5)


def common_corruptions(
    names: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    attacks: Mapping[str, Attack] | None = None,
) -> dict[str, Attack]:
    """Return the corruptions of ImageNet-C as attacks for `evaluate`, "fog_3" for severity 3.

    Args:
        attacks: name -> attack on the corrupted images too: "fog_3_pgd".
    """
    for given in (names, severities):
        if len(set(given)) != len(given):
            raise ValueError(f"each corruption and severity counts once, got {list(given)}")
    chosen: dict[str, Attack | None] = {"": None}
    chosen |= {f"_{name}": attack for name, attack in (attacks or {}).items()}
    return {
        f"{name}_{severity}{suffix}": CommonCorruption(Corruption(name, severity), attack)
        for suffix, attack in chosen.items()
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
    """
    return {n: [1 - result.accuracy(f"{n}_{s}") for s in severities] for n in names}


def corruption_table(
    result: EvaluationResult,
    names: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    attacks: Collection[str] = (),
) -> Table:
    """Return the accuracies: rows of a corruption, alone and under attacks, columns of severities.

    The result is that of an evaluation under `common_corruptions`; `rich.print` prints the table.
    """
    table = Table("corruption", "attack", *map(str, severities), title="Accuracy by severity, %")
    for name in names:
        for attack in ("", *attacks):
            under = [f"{name}_{s}{attack and f'_{attack}'}" for s in severities]
            cells = [f"{100 * result.accuracy(one):.1f}" for one in under]
            table.add_row(literal(name), literal(attack), *cells)
    return table
