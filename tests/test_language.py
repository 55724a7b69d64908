"""The words of docstrings, comments and pages: the field's terms, and sentences with a subject."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSTEAD = {  # word -> the field's term
    r"tell|tells|told|telling": "report, show, return, log",
    r"(?:by|with|of|in|without|its|their|own|private|any|no) chance": "randomness",
    r"chance (?:in|of|that)": "randomness",
    r"hangs? on|hangs? together": "depends on",
    r"so many": "N, the given number of",
    r"likeliest": "most probable",
    r"answers?|answered|answering": "prediction, predict",
    r"learnt": "learned",
    r"drops? dead|sick": "non-finite",
    r"as (?:it|they) stands?": "current",
    r"goes by|go by": "depends on",
    r"unrepeatable|repeatable": "nondeterministic, deterministic",
    r"is no part of": "is excluded from",
    r"heeded|severed": "handled, lost",
    r"of ours|is ours|ours is": "of this package",
    r"whatever (?:it|they|the) (?:is|are|was|were)": "any",
    r"nobody|somebody": "name the subject",
}
OPENINGS = r"(?:What|Those|None that|So (?:it|is|are|do|does)|Whoever|Who|Nothing)\b"
WORDS = re.compile("|".join(rf"(?P<w{i}>\b(?:{word})\b)" for i, word in enumerate(INSTEAD)), re.I)
OPENING = re.compile(rf"(?:^|(?<=[.:?!] )){OPENINGS}", re.M)


def prose_of_code(text: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a Python file, each with its line number."""
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and (words := ast.get_docstring(node)) is not None:
            yield node.body[0].lineno, words
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield what a reader of the file reads, without code and tables' numbers."""
    text = path.read_text()
    if path.suffix == ".py":
        yield from prose_of_code(text)
    elif path.suffix == ".md":
        text = re.sub(r"```.*?```", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
        yield from enumerate(re.sub(r"`[^`\n]*`", "``", text).splitlines(), start=1)
    else:
        for number, line in enumerate(text.splitlines(), start=1):
            if (comment := re.search(r"(?:^|\s)#\s?(.*)", line)) is not None:
                yield number, comment[1]


def findings(path: Path) -> list[str]:
    """Return the sentences of a file that break a rule, with line number and remedy."""
    found = []
    for line, words in prose(path):
        words = re.sub(r"`[^`]*`", "``", words)
        for match in WORDS.finditer(words):
            assert match.lastgroup is not None
            better = list(INSTEAD.values())[int(match.lastgroup[1:])]
            found.append(f"{path.name}:{line}: {match[0]!r}: say {better}")
        found += [f"{path.name}:{line}: opens with {m[0]!r}" for m in OPENING.finditer(words)]
    return found


FILES = [
    *sorted((ROOT / "lightning_rob").rglob("*.py")),
    *sorted((ROOT / "configs").rglob("*.yaml")),
    *sorted((ROOT / "callbacks").rglob("*.yaml")),
    *sorted(path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".py")),
    *sorted((ROOT / ".github").glob("*.md")),
    ROOT / "README.md",
]


def test_words() -> None:
    found = [finding for path in FILES for finding in findings(path)]
    assert not found, "\n".join(found)


NAMES = {"told", "chance", "likeliest", "sick", "heed", "heeded", "severed", "untold"}


def test_names() -> None:
    for path in (path for path in FILES if path.suffix == ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "id", None) or getattr(node, "attr", None)
            name = name or getattr(node, "arg", None) or getattr(node, "name", None)
            assert name not in NAMES, f"{path.name}:{getattr(node, 'lineno', 0)}: {name}"


def test_the_rules_find_what_they_are_for(tmp_path: Path) -> None:
    file = tmp_path / "riddle.py"
    file.write_text('"""What is told of one run."""\n\nx = 1  # its chance hangs on the seed\n')
    assert len(findings(file)) == 4
    file.write_text('"""Return the report\'s section for one run: `told` is a name."""\n')
    assert findings(file) == []
