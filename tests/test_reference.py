"""The reference says what the source says, the copies set themselves up, and the address is one setting."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("griffe")
import book
import griffe
import handouts
import nbformat
import reference

SOURCE = '''"""Halves.

More."""
from dataclasses import dataclass, field
from typing import Annotated
from tyro.conf import arg
from .options import option

__all__ = ["Seeds", "PARTS", "Config", "Halver", "Fine", "half"]
Seeds = Annotated[int, arg(help=("How many "
                                 "seeds."))]
PARTS = 2  # of a whole

@dataclass
class Config:
    "How to halve."
    parts: int = 2  # pieces | shares
    rate: float = option(0.5, "share of `Halver`", above=0, at_most=1)
    kind: str = option("fair", "how", choices=("fair", "rough"))
    seeds: Seeds = 3
    names: list[str] = field(default_factory=list)  # of the *pieces*

class Halver:
    "Halves what it is given."
    unit = "cm"  # of lengths

    def __init__(
        self,
        of: "Config",  # what to do
        limit: float | None = None,  # at most, in cm
        *more: int,
    ):
        self.of = of

    @classmethod
    def build(cls, size: int) -> "Halver":  # in cm
        "Make one."

    @property
    def size(self) -> int:
        "How large."

    def _hidden(self):
        "No."

class Fine(Halver):
    def build(cls, size: int) -> "Halver":
        pass

def half(x: int, y: int = 0) -> int:
    """The half.

    >>> half(4)
    2
    """
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A package with one module, in place of ours."""
    folder = tmp_path / "halves"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "halving.py").write_text(SOURCE)
    reference.settings()  # kept before the root changes
    loaded = griffe.load("halves", search_paths=[tmp_path])
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    monkeypatch.setattr(reference, "package", lambda: loaded)
    return loaded["halving"]


def test_a_class_is_shown_as_a_class(module):
    expected = "class Halver(\n    of: Config,\n    limit: float | None = None,\n    *more: int,\n)"
    assert reference.signature(module["Halver"]) == expected
    assert reference.signature(module["Halver"], True).splitlines()[1:3] == [
        "    of: Config,  # what to do",
        "    limit: float | None = None,  # at most, in cm",
    ]
    assert reference.signature(module["Fine"]).startswith("class Fine(\n    of: Config,")
    assert reference.signature(module["Halver.build"]) == "@classmethod\ndef build(size: int) -> Halver  # in cm"
    assert reference.signature(module["Halver.size"]) == "@property\ndef size(self) -> int"
    assert reference.signature(module["half"]) == "def half(x: int, y: int = 0) -> int"


def test_meanings_come_from_comments_options_and_help(module):
    assert reference.parameters(module["Config"]) == [
        ("parts", "int", "2", "pieces | shares"),
        ("rate", "float", "0.5", "share of `Halver` (above 0, at most 1)"),
        ("kind", "str", "'fair'", "how: `fair`, `rough`"),
        ("seeds", "int", "3", "How many seeds."),
        ("names", "list[str]", "list()", "of the *pieces*"),
    ]
    table = reference.table(module["Config"])
    assert r"pieces \| shares" in table and r"of the \*pieces\*" in table
    assert "share of [`Halver`](halving.ipynb#Halver)" in table
    assert reference.table(module["half"]) == ""


def test_page_of_a_module(module):
    text = "\n\n".join(cell["source"] for cell in reference.page(module)["cells"])
    for part in (
        'title: "halving"',
        "`PARTS`",
        "of a whole",
        "## Halver {#Halver}",
        "### Halver.build {#Halver-build}",
        "Extends [`Halver`](halving.ipynb#Halver).",
        "| `unit` | of lengths | `'cm'` |",
        "```python\n>>> half(4)\n2\n```",
        "/halves/halving.py#L",
    ):
        assert part in text, part
    assert "_hidden" not in text and "__main__" not in text
    assert text.count("Make one.") == 2  # an overriding method has the docstring of what it overrides


def test_pages_are_written_line_by_line(module, tmp_path):
    reference.write(tmp_path)
    cells = json.loads((tmp_path / "api" / "halving.ipynb").read_text())["cells"]
    assert cells[0]["source"][:2] == ["---\n", 'title: "halving"\n']  # Quarto joins the lines of a single string
    assert all(isinstance(cell["source"], list) for cell in cells)


def test_every_module_has_a_page_with_all_its_names():
    found = {m.name for m in reference.modules()}
    assert found == {p.stem for p in (reference.ROOT / "cramming_nb").rglob("[a-z]*.py")}
    overview = reference.overview()
    for module in reference.modules():
        text = "\n".join(cell["source"] for cell in reference.page(module)["cells"])
        named = [m for m in reference.public(module) if m.is_class or m.is_function]
        assert all(f"{{#{m.name}}}" in text and f"#{m.name})" in overview for m in named)
        headings = re.findall(r"\{#([\w-]+)\}", text)
        assert len(headings) == len(set(headings)), module.name
        assert "option(" not in re.sub(r"def option\(", "", text) or module.name == "options"


def test_copies_fetch_the_book_first(tmp_path):
    handouts.write(tmp_path)
    written = {p.relative_to(tmp_path / "notebooks").as_posix() for p in tmp_path.rglob("*.ipynb")}
    assert {"01_budget.ipynb", "lab/search.ipynb", "guides/own_text.ipynb"} <= written and "reference.ipynb" not in written
    for name in ("01_budget.ipynb", "lab/search.ipynb"):
        ours = nbformat.read(book.NBS / name, as_version=4).cells
        title, first, *rest = nbformat.read(tmp_path / "notebooks" / name, as_version=4).cells
        assert [title, *rest] == ours
        assert f"git clone --quiet --depth 1 --branch main {book.settings()['git_url']} " in first["source"]
        folder = first["source"].splitlines()[-1].removeprefix("%cd ~/cramming_nb/")
        assert (book.ROOT / folder / Path(name).name).is_file()


def test_the_first_cell_of_a_copy_works(tmp_path):
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=book.ROOT, capture_output=True).returncode:
        pytest.skip("not a git checkout")
    subprocess.run(["git", "clone", "--quiet", "--bare", book.ROOT, tmp_path / "origin"], check=True)
    subprocess.run(["git", "branch", "--force", "main", "HEAD"], cwd=tmp_path / "origin", check=True)
    config = f'[url "file://{tmp_path}/origin"]\n  insteadOf = {book.settings()["git_url"]}\n'
    (tmp_path / ".gitconfig").write_text(config)
    clone = next(line[1:] for line in handouts.setup("01_budget.ipynb")["source"].splitlines() if line.startswith("!"))
    for _ in range(2):  # the second time, the book is there
        subprocess.run(clone, shell=True, check=True, env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert (tmp_path / "cramming_nb" / "records").is_dir() and (tmp_path / "cramming_nb" / "setup.py").is_file()
    assert set(handouts.EXTRAS.split(",")) <= {k.removesuffix("_requirements") for k in book.settings()}


def test_every_mention_of_the_address_is_the_one_in_settings():
    cfg, wrong = book.settings(), []
    texts = book.addresses() | {p: p.read_text() for p in (book.ROOT / "README.md", *book.ROOT.glob("*.yml"))}
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python tools/book.py address"
        wrong += [f"{path.name}: {m}" for m in book.mentions(text) - {cfg["git_url"], book.site()}]
    assert not wrong


def test_another_address_reaches_every_file(monkeypatch, tmp_path):
    other = book.settings() | {
        "user": "someone",
        "git_url": "https://github.com/someone/cramming_nb",
        "doc_host": "https://someone.github.io",
    }
    monkeypatch.setattr(book, "settings", lambda: other)
    monkeypatch.setattr(handouts, "settings", lambda: other)
    for path, text in book.addresses().items():
        assert book.mentions(text) <= {other["git_url"], book.site()}, path.name
    assert "github.com/someone/cramming_nb/blob/notebooks/01_budget.ipynb" in handouts.links("01_budget.ipynb")
    assert (
        "git clone --quiet --depth 1 --branch main https://github.com/someone/" in handouts.setup("a.ipynb")["source"]
    )
    assert "https://someone.github.io/cramming_nb/notebooks/" in handouts.links("01_budget.ipynb")


def test_readme_leads_to_sections_of_the_site():
    text = "[a](lab/search.ipynb#sec-sooner) [b](engine/files.ipynb#sec-x) [c](01_budget.ipynb)"
    site = book.site()
    assert book.section_links(text) == (
        f"[a]({site}/lab/search.html#sec-sooner) [b]({site}/engine/files.html#sec-x) [c](01_budget.ipynb)"
    )


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_commands_of_the_readme_do_not_depend_on_the_folder():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    made = subprocess.run(  # as from a shell, also where `make` runs these tests
        ["make", "--dry-run", "cram"], cwd=book.ROOT, capture_output=True, text=True, env=environment
    )
    assert made.returncode == 0 and "github.com" not in made.stdout and str(book.ROOT) not in made.stdout
