"""What others install: the source distribution makes the wheel, the wheel holds the package and no more, and works."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("setuptools")
pytest.importorskip("wheel")
from package_check import ROOT, build

TEMPLATES = ("app/report.html.jinja", "app/report.md.jinja", "app/report.sections.jinja", "app/card.md.jinja")
DATA = {f"cramming_nb/{name}" for name in ("py.typed", "lab/sizes.json", *TEMPLATES)}
PACKAGE = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cramming_nb").rglob("*.py")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    return message_from_bytes(archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))))


def test_source_distribution_is_the_book(wheel):
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    book = {str(p.relative_to(ROOT)) for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts}
    assert {"LICENSE", "README.md", "settings.ini", "constraints.txt", "references.bib", "tests/conftest.py"} <= names
    assert book | PACKAGE <= names
    assert not [n for n in names if re.search(r"__pycache__|_proc|_docs|runs/|\.venv|-checkpoint\.ipynb", n)]


def test_wheel_is_the_package_and_no_more(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    outside = {name for name in names if not name.startswith("cramming_nb-")}
    demo = {str(p.relative_to(ROOT)) for p in (ROOT / "cramming_nb" / "app" / "demo").rglob("*.*")}
    assert "cramming_nb/app/demo/model.safetensors" in demo
    assert outside == PACKAGE | demo | DATA
    assert any(name.endswith("licenses/LICENSE") for name in names - outside)


def test_extras_of_the_wheel(metadata):
    assert {"hf", "optim", "dedup", "onnx", "track", "ray", "book", "dev"} == set(metadata.get_all("Provides-Extra"))
    core = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert core and not any(name in " ".join(core) for name in ("nbdev", "fastcore", "transformers", "ray"))


def test_links_of_the_description_lead_somewhere_from_an_index(metadata):
    links = re.findall(r"\]\(([^)]*)\)", metadata.get_payload())
    assert len(links) > 10 and [url for url in links if not re.match(r"https?://|#", url)] == []


def test_installed_wheel_answers(wheel, tmp_path):
    site, home = tmp_path / "site", tmp_path / "home"
    home.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site]
    subprocess.run([*pip, wheel], check=True)
    env = {**os.environ, "PYTHONPATH": str(site)}

    def said(*argv) -> str:
        return subprocess.run(argv, cwd=home, env=env, capture_output=True, text=True, check=True).stdout.strip()

    assert Path(said(sys.executable, "-c", "import cramming_nb; print(cramming_nb.__file__)")).parent.parent == site
    assert said(site / "bin" / "cram", "--version") == version("cramming_nb")
    assert "crammed-v2" in said(site / "bin" / "cram", "recipes")
    assert not any(home.iterdir())
