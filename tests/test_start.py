"""The first page, and the lines of it that each chapter replaces."""

import ast
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

NBS = Path(__file__).resolve().parents[1] / "nbs"
CORE = """01_budget 02_text 03_tokenizer 04_sequences 05_model 06_objective 07_optimizer 08_schedule 09_training
10_glue 10b_recipes app/probes app/scores app/counting""".split()
FIRST = re.compile(r"\[Start\]\((\.\./)?00_start\.ipynb\)")
FENCED = re.compile(r"^```python\n(.*?)\n```$", re.M | re.S)


def cells(name: str, kind: str) -> list[str]:
    """The sources of a notebook's cells of one kind, in order."""
    found = json.loads((NBS / f"{name}.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


START = [line.strip() for cell in cells("00_start", "code") for line in cell.splitlines()]


def about_start(name: str) -> list[str]:
    """The code in the cells of a chapter that speak of the first page: of the opening, and of the closing."""
    return [FENCED.search(cell)[1] for cell in cells(name, "markdown") if FIRST.search(cell)]


@pytest.mark.parametrize("name", CORE)
def test_a_chapter_opens_with_a_line_of_the_first_page(name):
    opening, _ = about_start(name)
    assert opening in START
    assert FIRST.search(cells(name, "markdown")[2])
    row = next(
        line for cell in cells("00_start", "markdown") for line in cell.splitlines() if f"]({name}.ipynb) |" in line
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
