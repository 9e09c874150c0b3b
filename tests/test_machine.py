"""The text of `machine:` is that of a plain search of every file, however it is read, and is read once."""

import ast
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from cramming_nb.engine import sources
from cramming_nb.engine.sources import docstrings, machine_documents, machine_packages, package_files, stdlib_files

PACKAGES = "h11,tqdm"
NESTED = '''
"""Module."""
if unknown:
    def first():
        "In an if."
elif other:
    class Second:
        "In an elif."
        async def third(self): "On one line."
else:
    for _ in range(3):
        def fourth(): "In a for."
    else:
        def fifth(): "In the else of a for."
try:
    def sixth(): "In a try."
except* ValueError:
    def seventh(): "In an except."
else:
    def eighth(): "In the else of a try."
finally:
    with open(name) as file, lock:
        @decorator(lambda: (x for x in ()))
        def ninth():
            def tenth():
                """
                In a function, on several
                    lines.
                """
match value:
    case [1, *_]:
        def eleventh(): "In a case."
    case _ if (lambda: True)():
        while True:
            class Twelfth: "In a while."; thirteenth = lambda self: "of no interest"
class A: "One."; B = 1
def b(): "Two."; "not a docstring"
def c(): b"Bytes."
def d(): f"Formatted {b}."
'''


def plain_docstrings(path: str) -> list[str]:
    """All docstrings of a file, found by a walk over its whole syntax tree."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    found = [ast.get_docstring(node) for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0))]
    return list(filter(None, found))


def plain_documents(packages: list[str]) -> list[dict]:
    """The documents of `machine:`, one file after the other, without processes and without a cache."""
    docs = [dict(text=text, id=f"topics/{name}", source="topics") for name, text in sorted(topics.items())]
    seen = set()
    for package in packages:
        for path in package_files(package):
            new = [text for text in dict.fromkeys(plain_docstrings(path)) if text not in seen]
            seen.update(new)
            if new:
                name = f"{package}/{Path(path).stem}-{len(docs)}"
                docs.append(dict(text="\n\n".join(new), id=name, source=package))
    return docs


@pytest.fixture
def read(monkeypatch, tmp_path) -> list[str]:
    """The files that are read from now on, with an empty cache."""
    files, really = [], sources.docstrings

    def noted(path):
        files.append(path)
        return really(path)

    monkeypatch.setenv("CRAM_CACHE", str(tmp_path))
    monkeypatch.setattr(sources, "docstrings", noted)
    return files


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_every_docstring_is_found_wherever_its_definition_stands(tmp_path):
    (tmp_path / "nested.py").write_text(NESTED)
    found = docstrings(tmp_path / "nested.py")
    assert found == plain_docstrings(tmp_path / "nested.py") and len(found) == 14
    for path in stdlib_files()[::25]:
        assert docstrings(path) == plain_docstrings(path), path


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_the_documents_are_those_of_a_plain_search(read):
    expected = plain_documents(PACKAGES.split(","))
    assert list(machine_documents(PACKAGES, progress=False)) == expected
    assert list(machine_documents(PACKAGES, progress=False)) == expected
    assert len(read) == len(set(read)) == sum(len(package_files(name)) for name in PACKAGES.split(","))


def test_processes_read_the_same_as_one(tmp_path):
    files = []
    for number in range(3):
        files.append(str(tmp_path / f"{number}.py"))
        Path(files[-1]).write_text(f'"Module {number}."\ndef f():\n  "Function {number}."')
    alone = sources.read_docstrings(files, progress=False)
    assert alone[1] == ["Module 1.", "Function 1."]
    assert sources.read_docstrings(files * 700, progress=False) == alone * 700  # more than 2,000


def test_after_an_upgrade_only_that_package_is_read(read, monkeypatch):
    list(machine_documents(PACKAGES, progress=False))
    read.clear()
    upgraded = machine_packages(PACKAGES) | {"tqdm": "999.0"}
    monkeypatch.setattr(sources, "machine_packages", lambda names: upgraded)
    list(machine_documents(PACKAGES, progress=False))
    assert read == package_files("tqdm")
    read.clear()
    list(machine_documents("h11", progress=False))
    assert read == []
