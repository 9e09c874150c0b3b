"""The project agrees with itself: versions, chapters, size, and nothing of the machine that made it."""

import ast
import inspect
import json
import re
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pages import LOCAL_PATH

from cramming_nb.training import TrainingRun

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cramming_nb"
HOSTS = re.compile(r"pypi[.]org|pythonhosted[.]org|download[.]pytorch[.]org|conda[.]anaconda[.]org", re.I)


def settings() -> dict[str, str]:
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini")
    return dict(parser["DEFAULT"])


def direct() -> list[Requirement]:
    """What settings.ini asks for, in the core and in the extras."""
    cfg = settings()
    return [Requirement(r) for key in cfg if key.endswith("requirements") for r in cfg[key].split()]


def constraints() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


def test_setup_says_what_settings_say(monkeypatch):
    setuptools = pytest.importorskip("setuptools")
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **kwargs: given.update(kwargs))
    path = ROOT / "setup.py"
    exec(compile(path.read_text(), path, "exec"), {"__file__": str(path)})
    cfg = settings()
    assert (given["name"], given["version"]) == (cfg["lib_name"], cfg["version"])
    assert given["install_requires"] == cfg["requirements"].split()
    assert {f"{extra}_requirements" for extra in given["extras_require"]} == {
        k for k in cfg if k.endswith("_requirements")
    }
    assert "cram=cramming_nb.cli:main" in given["entry_points"]["console_scripts"]


@pytest.mark.parametrize("requirement", direct(), ids=str)
def test_tested_version_is_one_we_ask_for(requirement):
    tested = constraints()[canonicalize_name(requirement.name)]
    exact = [s.version for s in tested.specifier if s.operator == "=="]
    assert all(v in requirement.specifier for v in exact) if exact else tested.specifier == requirement.specifier


def test_no_version_is_pinned_for_nothing():
    assert set(constraints()) == {canonicalize_name(r.name) for r in direct()}


def test_version_in_package_and_changelog():
    version = settings()["version"]
    assert f'__version__ = "{version}"' in (PACKAGE / "__init__.py").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def module_of(chapter: Path) -> str:
    """The module that a notebook exports."""
    return re.search(r"#\| default_exp (\w+)", chapter.read_text())[1]


CHAPTERS = {module_of(chapter): chapter for chapter in sorted((ROOT / "nbs").glob("[0-9][0-9]*_*.ipynb"))}


def imports(chapter: Path) -> set[str]:
    """The modules of this package that the exported cells of a notebook import."""
    found = set()
    for cell in json.loads(chapter.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or not re.search(r"^#\|\s*exports?i?\b", source, re.M):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("cramming_nb.")}
            elif isinstance(node, ast.ImportFrom):
                inside = node.level or (node.module or "").split(".")[0] == "cramming_nb"
                name = (node.module or "").removeprefix("cramming_nb").strip(".")
                found |= {name} if name and inside else {alias.name for alias in node.names} if inside else set()
    return {name.split(".")[0] for name in found}


@pytest.mark.parametrize("name", CHAPTERS)
def test_chapter_imports_only_earlier_chapters(name):
    later = [m for m in sorted(imports(CHAPTERS[name]) & set(CHAPTERS)) if CHAPTERS[m].name > CHAPTERS[name].name]
    assert not later, f"{CHAPTERS[name].name} imports {later}: pass in what points back"


def test_site_asks_no_other_host_and_links_what_there_is():
    given = yaml.safe_load((ROOT / "_quarto.yml").read_text())
    pages = [entry["href"] for entry in given["website"]["navbar"]["left"] if "://" not in entry["href"]]
    files = [
        given["website"]["favicon"],
        given["format"]["html"]["css"],
        *given["format"]["html"]["theme"]["light"][1:],
    ]
    assert pages and [name for name in pages + files if not (ROOT / "nbs" / name).is_file()] == []
    assert given["format"]["html"]["html-math-method"] == "mathml"  # the default is a script of another host
    assert "$web-font-path: false" in (ROOT / "nbs/theme.scss").read_text()


def test_a_cell_with_a_caption_shows_one_thing():
    """Of several outputs, Quarto would make parts (a) and (b) of a figure."""
    for chapter in (ROOT / "nbs").rglob("*.ipynb"):
        for cell in json.loads(chapter.read_text())["cells"]:
            if re.match(r"(#\|.*\n)*#\| label: (fig|tbl)-", "".join(cell["source"])):
                assert len(cell["outputs"]) == 1, f"{chapter.name}: {cell['source'][0]}"


def test_no_trace_of_a_machine():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix not in (".png", ".svg", ".ipynb"):  # the page check reads notebooks
            text = path.read_text(encoding="utf-8", errors="replace")
            if name.startswith(".github/workflows/"):
                text = re.sub(
                    r"https://download[.]pytorch[.]org/whl/cpu", "", text
                )  # PyTorch for CPU, in workflows alone
            found += [f"{name}: {m[0]}" for pattern in (HOSTS, LOCAL_PATH) for m in pattern.finditer(text)]
    assert not found, found


def definitions(path: Path) -> set[str]:
    """The names that a module defines: functions, classes, and methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def headings(notebook: Path) -> dict[str, str]:
    """The headings of a notebook that have an anchor, by anchor."""
    cells = json.loads(notebook.read_text())["cells"]
    lines = [line for c in cells if c["cell_type"] == "markdown" for line in "".join(c["source"]).splitlines()]
    found = [re.fullmatch(r"#+ (.*\S) \{#([\w-]+)\}", line) for line in lines]
    return {match[2]: match[1] for match in found if match}


def test_five_places_are_where_the_readme_says():
    # The README has the same table, with links to the site.
    cells = json.loads((ROOT / "nbs" / "index.ipynb").read_text())["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    section = text.split("### Five places in the code\n")[1].split("\n## ")[0]
    row = re.compile(
        r"\| .* \| `(\w+)`(?: of `(\w+)`)? in `(cramming_nb/\w+\.py)` \| "
        r"\[(\w+): ([^\]]*)\]\((\w+\.ipynb)#([\w-]+)\)(?:, \[.*)? \|"
    )
    _, _, *lines = [line for line in section.splitlines() if line.startswith("|")]  # two lines of the head
    places = [row.fullmatch(line) for line in lines]
    assert len(places) == 5 and all(places)
    for place in places:
        name, owner, file, chapter, heading, notebook, anchor = place.groups()
        assert (f"{owner}.{name}" if owner else name) in definitions(ROOT / file)
        assert Path(notebook).name.startswith(f"{chapter}_")
        assert headings(ROOT / "nbs" / notebook)[anchor] == heading
    assert "`train_step`" in section and "TrainingRun.train_step" in definitions(PACKAGE / "training.py")
    assert "self.trainer.update(t)" in inspect.getsource(TrainingRun.train_step)
