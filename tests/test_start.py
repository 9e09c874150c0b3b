"""The first page, and the lines of it that each chapter replaces."""

import ast
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

NBS = Path(__file__).resolve().parents[1] / "nbs"
ENGINEERING = set(re.findall(r"⚙ \w+ [^,]*, href: (\w+)\.ipynb", (NBS / "sidebar.yml").read_text()))
CORE = [path.stem for path in sorted(NBS.glob("[0-9]*_*.ipynb")) if path.stem not in ENGINEERING]
FENCED = re.compile(r"^```python\n(.*?)\n```$", re.M | re.S)


def cells(name: str, kind: str) -> list[str]:
    """The sources of a notebook's cells of one kind, in order."""
    found = json.loads((NBS / f"{name}.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


START = [line.strip() for cell in cells("start", "code") for line in cell.splitlines()]


def about_start(name: str) -> list[str]:
    """The code in the cells of a chapter that speak of the first page: of the opening, and of the closing."""
    return [FENCED.search(cell)[1] for cell in cells(name, "markdown") if "[Start](start.ipynb)" in cell]


def test_the_core_chapters_are_those_without_a_wheel():
    numbers = [name.partition("_")[0] for name in CORE]
    assert numbers == "00 01 02 03 05 06 07 08 10 11 11a 11c 11d 12".split()


@pytest.mark.parametrize("name", CORE)
def test_a_chapter_opens_with_a_line_of_the_first_page(name):
    opening, _ = about_start(name)
    assert opening in START
    assert "[Start](start.ipynb)" in cells(name, "markdown")[2]
    row = next(
        line for cell in cells("start", "markdown") for line in cell.splitlines() if f"]({name}.ipynb) |" in line
    )
    assert f"| `{opening}` |" in row


@pytest.mark.parametrize("name", CORE)
def test_a_chapter_closes_with_names_of_the_package_called_as_they_are(name):
    _, closing = about_start(name)
    tree, known = ast.parse(closing), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            known |= {alias.name: getattr(module, alias.name) for alias in node.names}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert set(known) <= used and any(value.__module__.startswith("cramming_nb.") for value in known.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in known:
            keywords = {keyword.arg: None for keyword in node.keywords}
            inspect.signature(known[node.func.id]).bind(*node.args, **keywords)
