"""YAML that is plain data of a sane size: no Python tags, cycles or duplicate keys."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import jsonargparse
import yaml
from yaml.composer import Composer

from lightning_rob.recipes.trust import install
from lightning_rob.runtime.errors import InputError

TAG = "tag:yaml.org,2002:"
PLAIN_TAGS = ("str", "int", "float", "bool", "null", "seq", "map")
MAX_CHARACTERS, MAX_NODES, MAX_DEPTH = 2_000_000, 200_000, 60
FRACTION = re.compile(r"(-?\d+(?:\.\d+)?)\s*/\s*(?!0+(?:\.0+)?$)(\d+(?:\.\d+)?)")  # not by 0
FLOAT = re.compile(  # also 1e-3, which is a text in YAML 1.1
    r"[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.[\d_]+(?:[eE][-+]?\d+)?"
    r"|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
CSafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Loader(Composer, CSafeLoader):  # type: ignore[misc]
    """Loader that refuses a document while its tree grows, before deep ones overflow the stack."""

    yaml_implicit_resolvers: ClassVar = {  # a date is a text
        letter: [pair for pair in pairs if pair[0] not in (f"{TAG}timestamp", f"{TAG}float")]
        for letter, pairs in CSafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        CSafeLoader.__init__(self, text)
        Composer.__init__(self)
        self.depth = 0
        self.sizes: dict[yaml.Node, int] = {}  # with aliases written out

    def _refuse(self, mark: yaml.Mark, reason: str) -> NoReturn:
        raise InputError(f"YAML: line {mark.line + 1}: {reason}")

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node, and refuse a tag, a duplicate key, a cycle, a deep or large tree."""
        event = self.peek_event()
        mark = event.start_mark
        tag = getattr(event, "tag", None) or ""
        if tag.startswith(TAG) and (kind := tag.removeprefix(TAG)) not in PLAIN_TAGS:
            self._refuse(mark, f"the tag !!{kind} asks for Python objects: a recipe is plain data")
        if self.depth > MAX_DEPTH:
            self._refuse(mark, f"more than {MAX_DEPTH} levels of lists and mappings")
        self.depth += 1
        node: Any = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if node not in self.sizes:  # it is still open
                self._refuse(mark, "an alias is inside what it stands for: a cycle")
            return node
        parts: list[yaml.Node] = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
            keys = set()
            for key, _ in node.value:
                name = key.value if isinstance(key, yaml.ScalarNode) else key
                if name in keys:
                    self._refuse(
                        key.start_mark, f"the key {name!r} is given twice: keep one of them"
                    )
                keys.add(name)
        # Lists of aliases of lists of aliases are small here, and fill the memory once written out.
        self.sizes[node] = 1 + sum(self.sizes[part] for part in parts)
        if self.sizes[node] > MAX_NODES:
            self._refuse(mark, f"more than {MAX_NODES:,} values, aliases written out")
        return node


Loader.add_implicit_resolver(f"{TAG}float", FLOAT, list("-+0123456789."))


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
    """Replace the fraction of an argument such as `--eps=8/255` by its number."""
    # jsonargparse reads simple values of the command line without the loader.
    option, equals, value = arg.partition("=")
    return f"{option}{equals}{parse_fractions(value)}"


def one_line(content: Any) -> str:
    """Return plain data as YAML of one line."""
    text = yaml.safe_dump(content, default_flow_style=True, width=float("inf"), sort_keys=False)
    return str(text).strip().removesuffix("...").strip()  # which ends a document of one value


@lru_cache(maxsize=64)  # the same texts are read to check them, and again by jsonargparse
def _load(text: str) -> Any:
    if len(text) > MAX_CHARACTERS:
        raise InputError(
            f"YAML: {len(text):,} characters of YAML, at most {MAX_CHARACTERS:,} are read"
        )
    try:
        return parse_fractions(yaml.load(text, Loader=Loader))
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise InputError(f"YAML: a value does not fit its tag: {error}") from error


def load(text: str) -> Any:
    """Return the content of a YAML text, with fractions as numbers."""
    return deepcopy(_load(text))  # callers may change what they get


def load_file(path: Path, kind: str) -> Any:
    """Return the content of a YAML file as `load` does; `kind` names it in errors."""
    try:
        return load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as {kind}: {error}") from error
    except (InputError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {str(error).removeprefix('YAML: ')}") from error


@contextmanager
def reading_recipes() -> Iterator[None]:
    """Let jsonargparse read by `load` in the block, and import trusted names only."""
    install()
    previous = jsonargparse.get_loader("yaml")
    jsonargparse.set_loader("yaml", load, exceptions=(yaml.YAMLError,))
    try:
        yield
    finally:
        jsonargparse.set_loader("yaml", previous, exceptions=(yaml.YAMLError,))
