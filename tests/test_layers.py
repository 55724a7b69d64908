"""What may import what: everything up to the metrics works without Lightning."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lightning_rob

ROOT = Path(lightning_rob.__file__).parent
LOWER = [
    "errors",
    "files",
    "threat",
    "rules",
    "objectives",
    "randomness",
    "precision",
    "comparisons",
    "nets",
    "transforms",
    "defenses",
    "attacks",
    "metrics",
    "identity",
    "evaluation",
    "plots",
    "tables",
    "audit",
]
UPPER = {
    *("modules", "callbacks", "data", "cli", "run", "sweep", "tune", "bpda"),
    *("monitor", "export", "commands"),
}


def present(name):
    return (ROOT / f"{name}.py").exists() or (ROOT / name / "__init__.py").exists()


def sources():
    for name in LOWER:
        yield from [ROOT / f"{name}.py"] if (ROOT / f"{name}.py").exists() else []
        yield from sorted((ROOT / name).rglob("*.py"))


SOURCES = {str(path.relative_to(ROOT)): path for path in sources()}


def run(code):
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_layers_are_found():
    assert {"threat.py", "attacks/arc.py", "metrics/per_image.py"} <= SOURCES.keys()
    assert len(SOURCES) >= 20


def test_importing_the_package_loads_nothing_heavy():
    """The command line answers `--help` before torch is there."""
    heavy = "{'torch', 'lightning', 'torchvision', 'torchmetrics', 'numpy', 'matplotlib'}"
    code = f"import sys, lightning_rob as r; print(*({heavy} & set(sys.modules)), r.__version__)"
    assert run(code) == [lightning_rob.__version__]


def test_lower_layers_work_without_lightning():
    """Each in the order of the layers; the first one to load it is named."""
    modules = [
        "lightning_rob." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in SOURCES
    ]
    code = f"""
import importlib, sys
for name in {modules}:
    importlib.import_module(name)
    loaded = {{"lightning", "pytorch_lightning", "jsonargparse"}} & set(sys.modules)
    above = {{m.split(".")[1] for m in sys.modules if m.startswith("lightning_rob.")}} & {UPPER}
    if loaded or above:
        print(name, *loaded, *above)
        break
print("done", len({modules}))
"""
    assert run(code) == ["done", str(len(SOURCES))]


def imports(tree):
    """Every module that is imported anywhere in a file, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_import_goes_up():
    for place, name in IMPORTS:
        parts = name.split(".")
        assert parts[0] not in {"lightning", "pytorch_lightning", "lightning_fabric"}, place
        up = parts[0] == "lightning_rob" and len(parts) > 1 and parts[1] in UPPER
        assert not up, f"{place} imports {name}"


IMPORTS = [
    (k, name) for k, path in SOURCES.items() for name in imports(ast.parse(path.read_text()))
]
ALLOWED = {
    "errors": set(),
    "files": set(),
    "threat": {"randomness"},
    "rules": set(),
    "objectives": {"rules"},
    "randomness": set(),
    "precision": set(),
    "comparisons": set(),
    "metrics": {"comparisons"},
    "identity": set(),
    "evaluation": {
        *("files", "randomness", "precision", "identity", "defenses", "attacks", "metrics"),
        *("threat", "objectives", "rules", "tables"),
    },
    "audit": {
        *("threat", "objectives", "randomness", "identity"),
        *("defenses", "attacks", "metrics", "evaluation", "tables"),
    },
    "plots": set(),
    "tables": {"comparisons", "evaluation"},
    "nets": {"files"},
    "transforms": {"randomness", "files"},
    "defenses": {"randomness", "rules", "transforms", "threat", "nets", "objectives"},
    "attacks": {
        *("threat", "rules", "objectives", "randomness", "precision"),
        *("defenses", "transforms", "nets"),
    },
}


def test_layers_lie_on_one_another():
    for place, name in IMPORTS:
        layer, parts = Path(place).parts[0].removesuffix(".py"), name.split(".")
        if parts[0] == "lightning_rob" and len(parts) > 1:
            assert parts[1] in ALLOWED[layer] | {layer}, f"{place} imports {name}"


def test_commands_do_not_import_the_command_line():
    """It hands them what they work on, so that they can be called from a script as well."""
    for path in (ROOT / "commands").glob("*.py"):
        for name in imports(ast.parse(path.read_text())):
            assert not name.startswith("lightning_rob.cli"), f"{path.name} imports {name}"


def test_attacks_import_one_another_in_one_direction():
    """Imports inside functions count: they would only hide a circle."""
    graph = {}
    for place, name in IMPORTS:
        module = "lightning_rob." + place.removesuffix(".py").replace("/", ".")
        if module.startswith("lightning_rob.attacks."):
            graph.setdefault(module.removesuffix(".__init__"), set()).add(name)
    assert "lightning_rob.attacks.base" in graph["lightning_rob.attacks.pgd"]
    TopologicalSorter(graph).prepare()  # a circle is a CycleError, which names it


def test_every_noun_is_there():
    for name in lightning_rob.__all__:
        assert getattr(lightning_rob, name) is not None, name
        assert getattr(getattr(lightning_rob, name), "__name__", name) == name


def test_no_such_noun():
    with pytest.raises(AttributeError, match="module 'lightning_rob' has no attribute 'Nonsense'"):
        lightning_rob.Nonsense  # noqa: B018


def test_what_a_folder_offers_is_there():
    for name in filter(present, LOWER):
        module = __import__(f"lightning_rob.{name}", fromlist=["_"])
        for noun in getattr(module, "__all__", []):
            assert getattr(getattr(module, noun), "__name__", noun) == noun, name
