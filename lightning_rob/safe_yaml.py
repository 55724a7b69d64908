"""YAML that is plain data of a sane size: no Python tags, cycles or duplicate keys."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from lightning_rob.errors import InputError

PLAIN_TAGS = ("str", "int", "float", "bool", "null", "seq", "map")
MAX_CHARACTERS, MAX_NODES, MAX_DEPTH = 2_000_000, 200_000, 60
FRACTION = re.compile(r"(-?\d+(?:\.\d+)?)\s*/\s*(?!0+(?:\.0+)?$)(\d+(?:\.\d+)?)")  # not by 0
Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass
class OpenNode:
    """A mapping or list whose end has not been read yet.

    Args:
        anchor: its name for aliases.
        keys: of a mapping, the keys read so far; None for a list.
        children: number read so far, keys and values alike.
        nodes: number of nodes in it, including itself, with aliases written out.
    """

    anchor: str | None
    keys: set[str] | None = None
    children: int = 0
    nodes: int = 1


@dataclass
class ParserState:
    """State of the validation after the events read so far.

    Args:
        stack: open nodes, outermost first.
        sizes: number of nodes under each anchor; None while the node is open.
    """

    stack: list[OpenNode] = field(default_factory=lambda: [OpenNode(None)])
    sizes: dict[str, int | None] = field(default_factory=dict)

    def add(self, nodes: int, line: int, key: str | None = None) -> None:
        """Add a child to the innermost open node."""
        parent = self.stack[-1]
        if parent.keys is not None and parent.children % 2 == 0 and key is not None:
            if key in parent.keys:
                raise ValueError(f"line {line}: the key {key!r} is given twice: keep one of them")
            parent.keys.add(key)
        parent.children += 1
        parent.nodes += nodes
        if parent.nodes > MAX_NODES:
            raise ValueError(f"line {line}: more than {MAX_NODES:,} values, aliases written out")


def validate(text: str) -> None:
    """Check a YAML text event by event, without building objects from it.

    Raises:
        ValueError: a Python tag, a duplicate key, a cycle, too deep or too large.
        yaml.YAMLError: not YAML.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{len(text):,} characters of YAML, at most {MAX_CHARACTERS:,} are read")
    state = ParserState()
    for event in yaml.parse(text, Loader=Loader):
        line = event.start_mark.line + 1 if event.start_mark else 0
        tag = getattr(event, "tag", None) or ""
        kind = tag.removeprefix("tag:yaml.org,2002:")
        if kind != tag and kind not in PLAIN_TAGS:
            raise ValueError(
                f"line {line}: the tag !!{kind} asks for Python objects: a recipe is plain data"
            )
        _advance(state, event, line)


def _advance(state: ParserState, event: yaml.Event, line: int) -> None:
    if isinstance(event, yaml.AliasEvent):
        size = state.sizes.get(event.anchor or "", 1)
        if size is None:
            raise ValueError(f"line {line}: *{event.anchor} is inside what it stands for: a cycle")
        state.add(size, line)
    elif isinstance(event, yaml.ScalarEvent):
        if event.anchor:
            state.sizes[event.anchor] = 1
        state.add(1, line, event.value)
    elif isinstance(event, yaml.CollectionStartEvent):
        if len(state.stack) > MAX_DEPTH:
            raise ValueError(f"line {line}: more than {MAX_DEPTH} levels of lists and mappings")
        keys: set[str] | None = set() if isinstance(event, yaml.MappingStartEvent) else None
        state.stack.append(OpenNode(event.anchor, keys))
        if event.anchor:
            state.sizes[event.anchor] = None
    elif isinstance(event, yaml.CollectionEndEvent):
        closed = state.stack.pop()
        if closed.anchor:
            state.sizes[closed.anchor] = closed.nodes
        state.add(closed.nodes, line)


def parse_fractions(value: Any) -> Any:
    """Replace every text such as "8/255" in nested lists and mappings by its number."""
    if isinstance(value, dict):
        return {key: parse_fractions(part) for key, part in value.items()}
    if isinstance(value, list):
        return [parse_fractions(part) for part in value]
    if isinstance(value, str) and (parts := FRACTION.fullmatch(value.strip())):
        return float(Fraction(parts[1]) / Fraction(parts[2]))
    return value


def parse_fraction_arg(arg: str) -> str:
    """Replace the fraction of an argument such as `--eps=8/255` by its number.

    jsonargparse reads simple values of the command line without the loader.
    """
    option, equals, value = arg.partition("=") if arg.startswith("--") else ("", "", arg)
    return f"{option}{equals}{parse_fractions(value)}"


_default_load = jsonargparse.get_loader("yaml")


@lru_cache(maxsize=64)  # a file is read to check it, and again by jsonargparse
def _load(text: str) -> Any:
    try:
        validate(text)
    except ValueError as error:
        raise InputError(f"YAML: {error}") from error
    try:
        return parse_fractions(_default_load(text))
    except (ValueError, LookupError) as error:
        raise InputError(f"YAML: a value does not fit its tag: {error}") from error


def load(text: str) -> Any:
    """Return the content of a YAML text as jsonargparse reads it, with fractions as numbers.

    Raises:
        InputError: not plain data of a sane size.
        yaml.YAMLError: not YAML.
    """
    return deepcopy(_load(text))


def load_file(path: Path, kind: str) -> Any:
    """Return the content of a YAML file as `load` does.

    Args:
        path: the file.
        kind: of file, for the error, such as "a plug-in".

    Raises:
        InputError: it cannot be read, or is not plain data of a sane size.
    """
    try:
        return load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as {kind}: {error}") from error
    except (InputError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {str(error).removeprefix('YAML: ')}") from error


@contextmanager
def plain_yaml() -> Iterator[None]:
    """Let jsonargparse read every file and every value of an option by `load` in the block."""
    previous = jsonargparse.get_loader("yaml")
    jsonargparse.set_loader("yaml", load, exceptions=(yaml.YAMLError,))
    try:
        yield
    finally:
        jsonargparse.set_loader("yaml", previous, exceptions=(yaml.YAMLError,))
