"""Attacks as records hold them, {"class_path": …, "init_args": {…}}, for readers."""

import math
from collections.abc import Iterator
from typing import Any

Spec = dict[str, Any]
MANY_DIGITS = 6  # of a number that is rounded
IN_COLUMNS = ("threat", "steps", "step_size")  # arguments that tables show by themselves


def is_spec(value: Any) -> bool:
    """Whether a value is an object with its arguments."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("class_path"), str)
        and isinstance(value.get("init_args"), dict)
    )


def class_name(path: Any) -> str:
    """Return the last part of an import path."""
    return path.rpartition(".")[2] if isinstance(path, str) else ""


def arguments(spec: Any) -> Spec:
    """Return the arguments of an object; none of anything else."""
    return dict(spec["init_args"]) if is_spec(spec) else {}


def short(value: Any) -> str:
    """Return a value as text for readers: 0.03137254901960784 is 8/255."""
    if is_spec(value):
        inner = ", ".join(f"{key}={short(part)}" for key, part in value["init_args"].items())
        return f"{class_name(value['class_path'])}({inner})"
    if isinstance(value, list):
        return f"({', '.join(map(short, value))})"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {short(part)}" for key, part in value.items())
    if isinstance(value, str):
        imported = value.startswith("lightning_rob.") or "<" in value
        return class_name(value) if imported else value
    if not isinstance(value, float) or len(str(value)) <= MANY_DIGITS or not math.isfinite(value):
        return str(value)
    levels = value * 255
    is_level = 0 < value < 1 and abs(levels - round(levels)) < 1e-6
    rounded = f"{value:.4g}"
    # A momentum of 0.99999 is not 1.
    exact = abs(value) >= 1e4 or float(rounded).is_integer()
    return f"{levels:.0f}/255" if is_level else str(value) if exact else rounded


def _parts_in(value: Any) -> list[Spec]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if is_spec(v) and class_name(v["class_path"]) != "Threat"]


def inner_attacks(spec: Any) -> list[Spec]:
    """Return the attacks that an attack is made of."""
    return [part for value in arguments(spec).values() for part in _parts_in(value)]


def threat_of(spec: Any) -> Spec:
    """Return the threat of an attack, or the first one among its parts."""
    own: Any = arguments(spec).get("threat")
    if is_spec(own):
        return dict(own)
    return next((found for part in inner_attacks(spec) if (found := threat_of(part))), {})


def threat_text(threat: Any) -> str:
    """Return norm and radius of a threat, such as "linf 8/255"."""
    known = arguments(threat)
    text = [short(known[key]) for key in ("norm", "eps") if key in known]
    return " ".join([*text, *(["of the image's norm"] if known.get("relative") is True else [])])


def other_arguments(spec: Any) -> str:
    """Return all arguments but the threat, the steps and the attacks inside."""
    shown = {
        key: short(value)
        for key, value in arguments(spec).items()
        if key not in IN_COLUMNS and not _parts_in(value)
    }
    return ", ".join(f"{key}={value}" for key, value in shown.items())


def flat(spec: Any) -> dict[str, str]:
    """Return every argument; attacks inside have names such as "part 1.steps"."""
    own = {k: short(v) for k, v in arguments(spec).items() if not _parts_in(v)}
    for i, part in enumerate(inner_attacks(spec), start=1):
        own |= {f"part {i}.{key}": value for key, value in flat(part).items()}
    return {"method": class_name(spec["class_path"]) if is_spec(spec) else short(spec)} | own


def differences(one: Any, other: Any) -> Iterator[str]:
    """Yield each argument in which two attacks differ, of two methods those that both have."""
    first, second = flat(one), flat(other)
    same = first["method"] == second["method"]
    for key in dict.fromkeys([*first, *second]):
        # An argument that only another method has is no difference of its own.
        if (same or key in first.keys() & second.keys()) and first.get(key) != second.get(key):
            yield f"{key} ({first.get(key, 'none')} and {second.get(key, 'none')})"
