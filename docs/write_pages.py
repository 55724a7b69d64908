"""Write the pages of the site: those of this folder, the reference, the recipes, the tutorials.

    python docs/write_pages.py                     # into build/pages, from which mkdocs builds
    python docs/write_pages.py --without_output    # do not run the tutorials

A tutorial becomes a page with what its code prints and draws, and a notebook.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from run_tutorial import read_cells

from lightning_rob.cli.main import COMMANDS
from lightning_rob.commands.recipes import FOLDERS, shipped_files, summary

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = f"{PROJECT['urls']['Repository']}/blob/main"
REFERENCE = {  # page: title, and the modules whose public names it lists
    "evaluation": (
        "Evaluation",
        "evaluation.evaluate.evaluate",
        "evaluation",
        "evaluation.suites",
        "cli.load",
    ),
    "attacks": ("Attacks", "attacks"),
    "defenses": ("Defenses", "defenses"),
    "mathematics": ("Threats, rules, objectives", "threat", "rules", "objectives", "randomness"),
    "modules": ("Training methods", "modules"),
    "callbacks": ("Callbacks", "callbacks"),
    "metrics": (  # a function that is called as its file is named needs its whole path
        "Metrics",
        "metrics",
        "metrics.robust_accuracy.robust_accuracy",
        "metrics.gradient_spread.gradient_spread",
        "metrics.corruption_error.corruption_error",
    ),
    "audit": ("Audit", "audit.auditor", "audit.report", "audit.target"),
    "certify": ("Certificates", "certify.smoothing"),
    "nets": ("Networks", "nets"),
    "data": ("Data", "data"),
    "transforms": ("Transforms", "transforms", "transforms.nondifferentiable", "transforms.bpda"),
    "figures": ("Figures and precision", "plots", "runtime.precision"),
}


OWN = ("write_pages.py", "run_tutorial.py", "__pycache__")  # files that are no part of the site


def write(folder: Path, run: bool) -> None:
    """Write all pages; tutorials without what their code prints and draws unless they are run."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns(*OWN))
    pages: dict[str, str | bytes] = {
        "reference/recipes.md": recipes(),
        "reference/command_line.md": command_line(),
        "sort.js": (ROOT / "lightning_rob/commands/report/sort.js").read_text(encoding="utf-8"),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
    }
    for path in folder.glob("*.md"):
        # Links that leave the folder lead to the repository, those to tutorials to their pages.
        text = path.read_text(encoding="utf-8").replace("](../", f"]({REPOSITORY}/")
        pages[path.name] = re.sub(r"\]\((tutorials/\w+)\.py", r"](\1.md", text)
    for name in ("CONTRIBUTING", "SECURITY"):
        text = (ROOT / f".github/{name}.md").read_text(encoding="utf-8")
        pages[f"{name.lower()}.md"] = text.replace("](../docs/", "](")
    for name, (title, *modules) in REFERENCE.items():
        parts = "\n\n".join(map(reference, modules))
        pages[f"reference/{name}.md"] = f"# {title}\n\n{parts}\n"
    for script in sorted((ROOT / "docs/tutorials").glob("*.py")):
        pages |= tutorial(script, run)
    for place, content in pages.items():
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


def reference(module: str) -> str:
    """Return the directive for a module, or a name in it; of a folder it lists what is public."""
    init = ROOT / "lightning_rob" / module.replace(".", "/") / "__init__.py"
    text = init.read_text(encoding="utf-8") if init.exists() else ""
    # mkdocstrings takes what is imported for private, unless it is listed.
    names = re.findall(r"(?: as |^def )([A-Za-z]\w*)", text, re.MULTILINE)
    options = f"\n    options:\n      members: [{', '.join(names)}]" if names else ""
    return f"::: lightning_rob.{module}{options}"


def recipes() -> str:
    """Return the page of all shipped files: name, and the first sentence of each."""
    parts = ["# Recipes and plug-ins"]
    for kind, (folder, usage) in FOLDERS.items():
        command = usage if usage.startswith("--") else f"lightning-rob {usage}"
        rows = [
            f"| [`{name}`]({REPOSITORY}/{path.relative_to(ROOT)}) | {cell(summary(path))} |"
            for name, path in shipped_files(folder).items()
        ]
        parts += [
            f"## {kind.capitalize()}",
            f"`{command}`",
            "\n".join(["| name | |", "|---|---|", *rows]),
        ]
    return "\n\n".join(parts) + "\n"


def cell(text: str) -> str:
    """Return a text for a cell of a table."""
    return text.replace("|", "\\|")


def command_line() -> str:
    """Return the page with the help of each command."""
    parts = ["# Command line", block(command_help())]
    for command in COMMANDS:
        parts += [f"## {command}", block(command_help(command))]
    return "\n\n".join(parts) + "\n"


def command_help(*command: str) -> str:
    """Return what `lightning-rob COMMAND --help` prints."""
    line = [sys.executable, "-m", "lightning_rob", *command, "--help"]
    environment = os.environ | {"COLUMNS": "88", "NO_COLOR": "1"}
    return subprocess.run(
        line, capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    ).stdout


def block(text: str, language: str = "text") -> str:
    """Return a fenced block."""
    return f"```{language}\n{text.rstrip()}\n```"


def tutorial(script: Path, run: bool) -> dict[str, str | bytes]:
    """Return the page of a tutorial, its pictures and its notebook."""
    cells = read_cells(script.read_text(encoding="utf-8"))
    outputs = outputs_of(script) if run else [{"text": "", "pictures": []} for _ in cells]
    title = cells[0][1].splitlines()[0].lstrip("# ")
    parts, files = [], {}
    for number, ((kind, text), output) in enumerate(zip(cells, outputs, strict=True)):
        parts.append(text if kind == "markdown" else block(text, "python"))
        for i, picture in enumerate(output["pictures"]):
            name = f"{script.stem}-{number}-{i}.png"
            files[f"tutorials/{name}"] = bytes.fromhex(picture)
            parts.append(f"![{title}: what the code above draws]({name})")
        if output["text"].strip():
            parts.append(block(output["text"]))
    source = (
        f"[Download this page as a Python script]({script.name}), or "
        f"[download it as a notebook]({script.stem}.ipynb) for Jupyter."
    )
    parts[1:1] = [f"![{title}: a figure]({Path(name).name})" for name in list(files)[:1]]
    parts.append(source)
    files[f"tutorials/{script.stem}.ipynb"] = notebook(cells)
    return {f"tutorials/{script.stem}.md": "\n\n".join(parts) + "\n", **files}


def notebook(cells: list[tuple[str, str]]) -> str:
    """Return a tutorial as a Jupyter notebook (nbformat 4.4), without outputs."""
    found = []
    for kind, text in cells:
        cell: dict[str, Any] = {"cell_type": kind, "metadata": {}}
        if kind == "markdown":  # a notebook lies elsewhere: links lead to the repository
            text = text.replace("](../", f"]({REPOSITORY}/docs/")
            text = re.sub(r"\]\((\w+)\.md", rf"]({REPOSITORY}/docs/tutorials/\1.py", text)
        else:
            cell |= {"execution_count": None, "outputs": []}
        found.append(cell | {"source": text.splitlines(keepends=True)})
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    head = {"metadata": {"kernelspec": python}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps({"cells": found, **head}, indent=1) + "\n"


def outputs_of(script: Path) -> list[dict[str, Any]]:
    """Return what each cell printed and drew; a script runs once for each state of the package."""
    digest = hashlib.sha256(script.read_bytes() + Path(__file__).read_bytes())
    for path in sorted([*ROOT.glob("lightning_rob/**/*.py"), *ROOT.glob("zoo/**/*.ckpt")]):
        digest.update(path.read_bytes())
    store = ROOT / f"build/tutorials/{script.stem}-{digest.hexdigest()[:16]}.json"
    if not store.exists():
        runner = ROOT / "docs/run_tutorial.py"
        store.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory() as folder:  # the script saves its pictures
            command = [sys.executable, str(runner), str(script), str(store)]
            subprocess.run(command, check=True, cwd=folder)
    return json.loads(store.read_text(encoding="utf-8"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build/pages")
    parser.add_argument("--without_output", action="store_true")
    args = parser.parse_args()
    write(args.folder, run=not args.without_output)
