"""The project agrees with itself: versions, chapters, size, and nothing of the machine that made it."""

import ast
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

from cramming_nb.app.cli import COMMANDS

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
    assert "cram=cramming_nb.app.__main__:program" in given["entry_points"]["console_scripts"]


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
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_front_page_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 650


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_commands_and_files_that_are_told_are_there(name):
    text = (ROOT / name).read_text()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    code = "\n".join(re.findall(r"^    .+|`[^`\n]+`", text, re.M))
    made, crammed = (set(re.findall(rf"\b{command} ([a-z][\w-]*)", code)) for command in ("make", "cram"))
    assert "test" in made and made <= set(targets) and crammed <= set(COMMANDS)
    links = re.findall(r"\]\((?!\w+:|#)([^)]+)\)", re.sub(r"`[^`\n]+`", "", text))
    assert [link for link in links if not (ROOT / link.partition("#")[0]).is_file()] == []
    files = re.findall(r"\b(?:nbs|tools|tests|experiments|cramming_nb)/[\w/.-]+[.](?:py|ipynb|png)\b", code)
    assert [path for path in files if not (ROOT / path).is_file()] == []


def test_places_to_start_reading_are_in_the_code():
    places = re.findall(r"\| `([\w.]+)` \| `(cramming_nb/[\w/]+[.]py)` \|", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(places) == 5
    for name, path in places:
        found = ast.parse((ROOT / path).read_text())
        for part in name.split("."):
            found = next((node for node in found.body if getattr(node, "name", "") == part), None)
            assert found, f"CONTRIBUTING.md: {path} has no {name}"


METHOD = """budget data tokenizer sequences corpus architecture objective replaced optimizer schedule counts training tasks glue recipes""".split()  # in the order of the chapters


def module_name(path: Path) -> str:
    """The name of a module within the package, such as `engine.hardware`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {module_name(p): p for p in sorted(PACKAGE.rglob("*.py")) if p.name not in ("__init__.py", "_modidx.py")}


def imports(name: str) -> set[str]:
    """The modules of this package that a module imports anywhere in its code."""
    package, found = f"cramming_nb.{name}".split(".")[:-1], set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            found |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return {path.removeprefix("cramming_nb.") for path in found if path.startswith("cramming_nb.")} & set(MODULES)


def may_import(name: str, other: str) -> bool:
    """The rule of the house: which module may import which."""
    wing, _, _ = name.rpartition(".")
    of, _, _ = other.rpartition(".")
    if wing == "":
        return of == "engine" or of == "" and METHOD.index(other) < METHOD.index(name)
    if wing == "engine":
        return of == "engine"
    if wing == "app":
        return of in ("", "engine", "app") or name == "app.cli"
    return True


@pytest.mark.parametrize("name", MODULES)
def test_rule_of_imports(name):
    """A chapter imports earlier chapters and the engine; the engine nothing above itself; only `cram` the lab."""
    broken = [other for other in sorted(imports(name)) if not may_import(name, other)]
    assert not broken, f"{name} imports {broken}: pass in what points back"


def test_every_module_of_the_method_has_its_place_in_the_book():
    assert {name for name in MODULES if "." not in name} == set(METHOD)


def test_pages_stand_in_the_folder_of_their_wing():
    for page in (ROOT / "nbs").rglob("*.ipynb"):
        found = re.search(r"#\| default_exp ([\w.]+)", page.read_text())
        if found and ".ipynb_checkpoints" not in page.parts:
            wing = found[1].rpartition(".")[0].replace(".", "/") or "."
            assert page.relative_to(ROOT / "nbs").parent.as_posix() == wing, f"{page.name} exports {found[1]}"


FORMER_MODULES = "|".join(["stages", "planning", *(name.rpartition(".")[2] for name in MODULES if "." in name)])
FORMER_CHAPTERS = "|".join(
    """00_budget 00a_storage 10a_finetuning 01_data 02_tokenizer 03_corpus 04_hardware 05_architecture 09_checkpoint 09a_distributed
    10_training 11_glue 11a_probes 11b_fast_finetuning 11c_scores 11d_counting 12_recipes 13_records 14_export 15_bench
    16_run 16a_labels 17_experiments 17a_plan 18_cli""".split()
)
FORMER_PAGES = "start|lab/changes|lab/crossing|lab/domain|lab/pocket_glue|lab/probes|lab/sizes|lab/understanding"
SCRIPTS = "|".join(path.stem for folder in ("tools", "experiments") for path in (ROOT / folder).glob("*.py"))
MOVED = re.compile(
    rf"\bcramming_nb\.({FORMER_MODULES})\b(?!-)"
    rf"|\bcramming_nb/({FORMER_MODULES})\.py\b"
    rf"|\bfrom cramming_nb import [\w, ]*\b({FORMER_MODULES})\b"
    rf"|\b({FORMER_CHAPTERS})\b"
    rf"|(?<![\w/])(\.\./|nbs/)*({FORMER_PAGES})\.ipynb\b"
    rf"|\btests/({SCRIPTS})\.py\b"
)


def texts() -> dict[str, str]:
    """What is written by hand, by path: text files whole, and the sources of a notebook's cells."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = {}
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix == ".ipynb" and path.is_file():
            cells = json.loads(path.read_text())["cells"]
            found[name] = "\n".join("".join(cell["source"]) for cell in cells)
        elif path.suffix in (".py", ".md", ".yml", ".yaml", ".toml", ".ini", ".qmd", ".bib", "") and path.is_file():
            found[name] = path.read_text(encoding="utf-8", errors="replace")
    return found


def test_nothing_names_a_module_or_page_where_it_was():
    here = Path(__file__).relative_to(ROOT).as_posix()
    found = [
        f"{name}: {moved[0]}"
        for name, text in texts().items()
        if name not in ("CHANGELOG.md", here)
        for moved in MOVED.finditer(text)
    ]
    assert not found, found


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


def test_no_output_holds_a_progress_bar():
    for page in (ROOT / "nbs").rglob("*.ipynb"):
        for cell in json.loads(page.read_text())["cells"]:
            errors = [output for output in cell.get("outputs", []) if output.get("name") == "stderr"]
            assert not errors, f"{page.name}: {cell['source'][0]}"


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


def code_of_pages() -> set[str]:
    """The words of all cells that are code and not exported, and of the scripts beside the package."""
    found = set()
    for page in (ROOT / "nbs").rglob("*.ipynb"):
        for cell in json.loads(page.read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and not re.match(r"#\|\s*exports?i?\b", source):
                found |= set(re.findall(r"\w+", source))
    for folder in ("tools", "experiments"):
        for script in (ROOT / folder).glob("*.py"):
            found |= set(re.findall(r"\w+", script.read_text()))
    return found


def test_every_exported_name_has_a_user():
    """What `__all__` names is used by another module, a page or a script; the rest is marked `#| exporti`."""
    words = {name: set(re.findall(r"\w+", path.read_text())) for name, path in MODULES.items()}
    outside, unused = code_of_pages(), []
    for name, path in MODULES.items():
        others = set().union(*(found for other, found in words.items() if other != name))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                unused += [f"{name}.{x}" for x in ast.literal_eval(node.value) if x not in others | outside]
    assert not unused, unused


def test_no_two_definitions_share_a_name():
    """Not even by case or underscores: `Report` beside `report` is one name to a reader."""
    places = {}
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                places.setdefault(node.name.lower().replace("_", ""), []).append(f"{name}.{node.name}")
    assert not [found for found in places.values() if len(found) > 1]
