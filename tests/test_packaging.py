"""The address of the repository, and the conda recipe, are those of pyproject.toml."""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
RECIPE = yaml.safe_load((ROOT / ".github/conda/recipe.yaml").read_text())
CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base"}  # names that differ


def bounds(lines):
    """Name and versions of each requirement of conda."""
    pairs = (line.partition(" ")[::2] for line in lines)
    return {canonicalize_name(name): SpecifierSet(versions) for name, versions in pairs}


def test_the_conda_recipe_has_the_dependencies_of_the_wheel():
    needed = [Requirement(line) for line in PROJECT["dependencies"]]
    expected = {CONDA.get(r.name, canonicalize_name(r.name)): r.specifier for r in needed}
    parser = next(r for r in needed if r.extras)  # conda has no extras
    assert (parser.name, parser.extras) == ("jsonargparse", {"signatures"})
    of_extra = {
        canonicalize_name(r.name)
        for r in map(Requirement, requires("jsonargparse"))
        if r.marker and 'extra == "signatures"' in str(r.marker) and r.name != "jsonargparse"
    }
    python, *run = RECIPE["requirements"]["run"]
    found = bounds(run)
    assert of_extra and of_extra <= found.keys()
    assert {name: found[name] for name in found.keys() - of_extra} == expected
    assert python == "python >=${{ python_min }}"
    assert f">={RECIPE['context']['python_min']}" == PROJECT["requires-python"]
    host = {line.partition(" ")[0] for line in RECIPE["requirements"]["host"]}
    built_by = map(Requirement, PYPROJECT["build-system"]["requires"])
    assert {canonicalize_name(part.name) for part in built_by} <= host


def test_the_conda_recipe_has_the_facts_of_the_wheel():
    ((name, entry),) = PROJECT["scripts"].items()
    assert RECIPE["build"]["python"]["entry_points"] == [f"{name} = {entry}"]
    assert RECIPE["package"]["name"] == PROJECT["name"]
    assert RECIPE["context"]["version"] == PROJECT["version"]
    about, urls = RECIPE["about"], PROJECT["urls"]
    assert about["summary"] == PROJECT["description"] and about["license"] == PROJECT["license"]
    assert about["license_file"] == PROJECT["license-files"]
    assert about["homepage"] == about["repository"] == urls["Repository"]
    assert about["documentation"] == urls["Documentation"]


def test_there_is_one_address():
    """README is the page of the package index, too, where relative links lead nowhere."""
    repository = PROJECT["urls"]["Repository"]
    pictures = repository.replace("//github.com", "//raw.githubusercontent.com") + "/main/"
    page = (ROOT / "README.md").read_text()
    assert repository not in page  # a link is relative: it works in a clone of any address
    for step in PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        page = re.sub(step["pattern"], step["replacement"], page)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", re.sub(r"```.*?```", "", page, flags=re.S))
    assert len(links) > 15
    for is_picture, link in links:
        assert link.startswith(pictures if is_picture else f"{repository}/blob/main/")
    for name in ("CITATION.cff", "mkdocs.yml"):
        (address,) = set(re.findall(r"https://github\.com/[\w./-]+", (ROOT / name).read_text()))
        assert address == repository
