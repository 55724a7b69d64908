"""Attacks as their records write them, such as "PGD(threat=Threat(norm='l2', …), steps=20)"."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

OPEN, CLOSE = "([{<", ")]}>"
MANY_DIGITS = 6


@dataclass(frozen=True)
class Call:
    """A class and what it was made with.

    Args:
        name: of the class.
        arguments: name -> its text.
    """

    name: str
    arguments: dict[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> list["Call"]:
        """The attacks it is made of."""
        inner = [
            call(item)
            for value in self.arguments.values()
            for item in (split(value[1:-1]) if value[:1] in ("(", "[") else [value])
        ]
        return [part for part in inner if part.arguments and part.name != "Threat"]

    @property
    def threat(self) -> "Call":
        """What it may do: its own, or that of its parts."""
        if "threat" in self.arguments:
            return call(self.arguments["threat"])
        return next((part.threat for part in self.parts), Call(""))

    @property
    def others(self) -> str:
        """All arguments but the threat, the steps and the attacks inside."""
        inner = {part.name for part in self.parts}
        shown = {
            key: value
            for key, value in self.arguments.items()
            if key not in ("threat", "steps", "step_size") and not _mentions(value, inner)
        }
        return ", ".join(f"{key}={short(value)}" for key, value in shown.items())

    @property
    def flat(self) -> dict[str, str]:
        """Every argument, those of the attacks inside under "part 1.steps" and the like."""
        inner = {part.name for part in self.parts}
        own = {k: short(v) for k, v in self.arguments.items() if not _mentions(v, inner)}
        for i, part in enumerate(self.parts, start=1):
            own |= {f"part {i}.{key}": value for key, value in part.flat.items()}
        return {"method": self.name} | own


def call(text: str) -> Call:
    """Parse what `repr` made of an object; text that is no call has a name only."""
    match = re.fullmatch(r"([A-Za-z_][\w.]*)\((.*)\)", text.strip(), re.DOTALL)
    if not match:
        return Call(text.strip())
    arguments = {}
    for i, part in enumerate(split(match[2])):
        key, equals, value = part.partition("=")
        named = equals and key.strip().isidentifier()
        arguments[key.strip() if named else str(i)] = value.strip() if named else part
    return Call(match[1], arguments)


def split(text: str) -> list[str]:
    """The parts between commas, but not between those inside brackets."""
    return [part for part in map(str.strip, _parts(text)) if part]


def _parts(text: str) -> Iterator[str]:
    depth, start = 0, 0
    for i, letter in enumerate(text):
        depth += (letter in OPEN) - (letter in CLOSE)
        if letter == "," and depth == 0:
            yield text[start:i]
            start = i + 1
    yield text[start:]


def _mentions(value: str, names: set[str]) -> bool:
    return any(f"{name}(" in value for name in names)


def short(text: str) -> str:
    """A number as one would say it: 0.03137254901960784 is 8/255; other text as it is."""
    try:
        value = float(text)
    except ValueError:
        return text.strip("'\"")
    levels = value * 255
    if len(text) <= MANY_DIGITS or not math.isfinite(value):
        return text
    whole = 0 < value < 1 and abs(levels - round(levels)) < 1e-6
    return f"{levels:.0f}/255" if whole else f"{value:.4g}" if abs(value) < 1e4 else text


def threat_of(text: str) -> str:
    """The norm and radius of a threat, such as "linf 8/255"."""
    arguments = call(text).arguments
    known = [short(arguments[key]) for key in ("norm", "eps") if key in arguments]
    relative = ["of the image's norm"] if arguments.get("relative") == "True" else []
    return " ".join(known + relative) or text
