"""The order of the package: each file or folder imports only what stands before it."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from inspect import isabstract
from pathlib import Path

import pytest

import lightning_rob
from lightning_rob.attacks import Attack
from lightning_rob.defenses import Defense
from tests.pieces import python

ROOT = Path(lightning_rob.__file__).parent
LOWER = [  # works without Lightning
    *("runtime", "randomness", "rules", "threat", "objectives", "comparisons"),
    *("nets", "transforms", "defenses", "attacks", "metrics", "plots", "tables"),
    *("evaluation", "audit", "certify"),
]
UPPER = ["data", "modules", "callbacks", "recipes", "commands", "cli"]
ORDER = [*LOWER, *UPPER]
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}


def place(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    return ".".join(("lightning_rob", *path.relative_to(ROOT).with_suffix("").parts))


FILES = [path for path in sorted(ROOT.rglob("*.py")) if not place(path).startswith("__")]


@cache
def imports(path: Path) -> list[str]:
    """Every module that is imported anywhere in a file, also inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def own_imports(path: Path) -> list[list[str]]:
    parts = (name.split(".") for name in imports(path))
    return [names for names in parts if names[0] == "lightning_rob" and len(names) > 1]


def test_the_order_holds_every_part():
    assert {place(path) for path in FILES} == set(ORDER)


def test_no_import_goes_up():
    for path in FILES:
        for _, name, *_ in own_imports(path):
            if name in ORDER:
                assert ORDER.index(name) <= ORDER.index(place(path)), f"{path} imports {name}"


def test_there_is_no_circle_of_files():
    """Imports inside functions count: they would only hide a circle."""
    known = {dotted(path): path for path in FILES}
    graph = {n: known.keys() & {*map(".".join, own_imports(known[n]))} for n in known}
    graph = {name: after for name, after in graph.items() if not name.endswith("__init__")}
    assert "lightning_rob.attacks.base" in graph["lightning_rob.attacks.pgd"]
    TopologicalSorter(graph).prepare()  # a circle is a CycleError, which names it


def test_lower_parts_do_not_import_lightning():
    for path in FILES:
        if place(path) in LOWER:
            assert not LIGHTNING & {name.split(".")[0] for name in imports(path)}, path


def test_lower_parts_work_without_lightning():
    """They can be imported, and a plain network can be evaluated.

    The attacks load little beside torch: kornia, scipy and the like are loaded by the transform or
    metric that calls them.
    """
    modules = [dotted(path) for path in FILES if place(path) in LOWER and path.stem != "__init__"]
    code = f"""
import importlib, sys, torch
before = set(sys.modules)
import lightning_rob.attacks
print(*(name for name in set(sys.modules) - before if not name.startswith("lightning_rob")))
from lightning_rob import PGD, Threat, evaluate
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
x, y = torch.rand(20, 3, 2, 2), torch.randint(3, (20,))
batches = [(x[:7], y[:7]), (x[7:], y[7:])]
result = evaluate(net, {{"pgd": PGD(Threat("linf", 0.1), 3, 0.05)}}, batches, progress=False)
assert result.accuracy("worst") <= result.accuracy("clean")
assert "95 % interval" in result.table()
for name in {modules}:
    importlib.import_module(name)
    if loaded := {LIGHTNING} & set(sys.modules):
        print(name, *loaded)
        break
print("done")
"""
    *loaded, last = python("-c", code).split()
    assert last == "done"
    heavy = {"kornia", "scipy", "torchvision", "torchmetrics", "lightning", "matplotlib", "sklearn"}
    assert not heavy & {name.partition(".")[0] for name in loaded}
    assert len(loaded) <= 50, sorted(loaded)  # 16 today; kornia alone has 400, scipy's ndimage 200


def test_importing_the_package_loads_nothing_heavy():
    """The command line answers `--help` before torch is imported."""
    heavy = "{'torch', 'lightning', 'torchvision', 'torchmetrics', 'numpy', 'matplotlib'}"
    code = f"import sys, lightning_rob as r; print(*({heavy} & set(sys.modules)), r.__version__)"
    assert python("-c", code).split() == [lightning_rob.__version__]


def concrete(kind: type) -> set[str]:
    """The names of the package's classes of a kind that are not abstract."""
    found = set()
    for child in kind.__subclasses__():
        own = child.__module__.startswith("lightning_rob.") and not isabstract(child)
        found |= concrete(child) | ({child.__name__} if own else set())
    return found


def test_concrete_classes_are_told_apart_in_their_own_file_only():
    # A network and an ensemble of networks are what functions build, and ask for, themselves.
    classes = concrete(Attack) | concrete(Defense) - {"Single", "Ensemble"}
    assert {"PGD", "TAA", "Mixture", "RMC"} <= classes
    for path in FILES:
        tree = ast.parse(path.read_text())
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                asked = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
                assert not asked & classes - own, f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_every_public_name_is_there():
    for name in lightning_rob.__all__:
        assert getattr(lightning_rob, name) is not None, name
        assert getattr(getattr(lightning_rob, name), "__name__", name) == name
    with pytest.raises(AttributeError, match="module 'lightning_rob' has no attribute 'Nonsense'"):
        lightning_rob.Nonsense  # noqa: B018
