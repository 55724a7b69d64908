"""YAML that is plain data of a sane size: no Python tags, cycles or duplicate keys."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from lightning_rob.runtime.errors import InputError

PLAIN_TAGS = ("str", "int", "float", "bool", "null", "seq", "map")
MAX_CHARACTERS, MAX_NODES, MAX_DEPTH = 2_000_000, 200_000, 60
FRACTION = re.compile(r"(-?\d+(?:\.\d+)?)\s*/\s*(?!0+(?:\.0+)?$)(\d+(?:\.\d+)?)")  # not by 0
Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def validate(text: str) -> None:
    """Check a YAML text without building objects from it.

    Raises:
        ValueError: a Python tag, a duplicate key, a cycle, too deep or too large.
        yaml.YAMLError: not YAML.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{len(text):,} characters of YAML, at most {MAX_CHARACTERS:,} are read")
    # Events come one by one: the tree is built only once it is known to be flat and small, for
    # deep ones overflow the stack.
    depth = nodes = 0
    for event in yaml.parse(text, Loader=Loader):
        line = event.start_mark.line + 1 if event.start_mark else 0
        tag = getattr(event, "tag", None) or ""
        kind = tag.removeprefix("tag:yaml.org,2002:")
        if kind != tag and kind not in PLAIN_TAGS:
            raise ValueError(
                f"line {line}: the tag !!{kind} asks for Python objects: a recipe is plain data"
            )
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        nodes += isinstance(event, yaml.NodeEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"line {line}: more than {MAX_DEPTH} levels of lists and mappings")
        _check_size(nodes, line)
    if (root := yaml.compose(text, Loader=Loader)) is not None:
        _count(root, {})


def _count(node: yaml.Node, counted: dict[yaml.Node, int | None]) -> int:
    """Return the number of nodes in a tree with aliases written out, and check its keys.

    Args:
        node: root of the tree.
        counted: numbers of the nodes seen so far; None while a node is open.
    """
    line = node.start_mark.line + 1
    if node in counted:
        if (known := counted[node]) is None:
            raise ValueError(f"line {line}: an alias is inside what it stands for: a cycle")
        return known
    counted[node] = None
    children: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    elif isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
        keys: set[str | yaml.Node] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                at = key.start_mark.line + 1
                raise ValueError(
                    f"line {at}: the key {key.value!r} is given twice: keep one of them"
                )
            keys.add(key.value if isinstance(key, yaml.ScalarNode) else key)
    nodes = 1
    for child in children:
        nodes += _count(child, counted)
        _check_size(nodes, line)
    counted[node] = nodes
    return nodes


def _check_size(nodes: int, line: int) -> None:
    if nodes > MAX_NODES:
        raise ValueError(f"line {line}: more than {MAX_NODES:,} values, aliases written out")


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
