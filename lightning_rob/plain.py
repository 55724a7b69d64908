"""YAML that is plain data of a sane size: no tags of Python, cycles or keys given twice."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

MOST_CHARACTERS, MOST_NODES, DEEPEST = 2_000_000, 200_000, 60
Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass
class Open:
    """A mapping or list that is being read; a scalar at once.

    Args:
        anchor: its name for aliases.
        keys: of a mapping, those so far; None of a list.
        children: read so far, keys and values alike.
        nodes: in it, itself included, with what its aliases stand for.
    """

    anchor: str | None
    keys: set[str] | None = None
    children: int = 0
    nodes: int = 1


@dataclass
class Reading:
    """What is known half-way through a text.

    Args:
        stack: from the outermost mapping or list on.
        sizes: nodes under each anchor; None while it is open.
    """

    stack: list[Open] = field(default_factory=lambda: [Open(None)])
    sizes: dict[str, int | None] = field(default_factory=dict)

    def add(self, nodes: int, line: int, key: str | None = None) -> None:
        """Take up a child of the innermost."""
        parent = self.stack[-1]
        if parent.keys is not None and parent.children % 2 == 0 and key is not None:
            if key in parent.keys:
                raise ValueError(f"line {line}: the key {key!r} is given twice: keep one of them")
            parent.keys.add(key)
        parent.children += 1
        parent.nodes += nodes
        if parent.nodes > MOST_NODES:
            raise ValueError(f"line {line}: more than {MOST_NODES:,} values, aliases written out")


def check_plain(text: str) -> None:
    """Read a text without building anything of it.

    Raises:
        ValueError: a tag of Python, a key twice, a cycle, or too deep or too large.
        yaml.YAMLError: it is no YAML.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{len(text):,} characters of YAML, at most {MOST_CHARACTERS:,} are read")
    reading = Reading()
    for event, line in _events(text):
        tag = getattr(event, "tag", None) or ""
        if "python" in tag:
            raise ValueError(
                f"line {line}: the tag {tag.replace('tag:yaml.org,2002:', '!!')} asks for "
                "Python objects: a recipe is plain data"
            )
        _take(reading, event, line)


def _events(text: str) -> Iterator[tuple[yaml.Event, int]]:
    for event in yaml.parse(text, Loader=Loader):
        yield event, event.start_mark.line + 1 if event.start_mark else 0


def _take(reading: Reading, event: yaml.Event, line: int) -> None:
    if isinstance(event, yaml.AliasEvent):
        size = reading.sizes.get(event.anchor or "", 1)
        if size is None:
            raise ValueError(f"line {line}: *{event.anchor} is inside what it stands for: a cycle")
        reading.add(size, line)
    elif isinstance(event, yaml.ScalarEvent):
        if event.anchor:
            reading.sizes[event.anchor] = 1
        reading.add(1, line, event.value)
    elif isinstance(event, yaml.CollectionStartEvent):
        if len(reading.stack) > DEEPEST:
            raise ValueError(f"line {line}: more than {DEEPEST} levels of lists and mappings")
        keys: set[str] | None = set() if isinstance(event, yaml.MappingStartEvent) else None
        reading.stack.append(Open(event.anchor, keys))
        if event.anchor:
            reading.sizes[event.anchor] = None
    elif isinstance(event, yaml.CollectionEndEvent):
        done = reading.stack.pop()
        if done.anchor:
            reading.sizes[done.anchor] = done.nodes
        reading.add(done.nodes, line)
