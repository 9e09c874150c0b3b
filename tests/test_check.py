"""What `make test` runs: every part, whatever failed before it, and one line at the end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1] / "tools" / "check.py"
SETTINGS = """[DEFAULT]
repo = made_up
lib_name = made_up
user = nobody
nbs_path = nbs
lib_path = made_up
tst_flags = slow gpu
"""


def notebook(source: str) -> str:
    cell = dict(cell_type="code", source=source, metadata={}, outputs=[], execution_count=None)
    kernel = dict(name="python3", display_name="Python", language="python")
    return json.dumps(dict(cells=[cell], metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5))


@pytest.fixture
def check(tmp_path):
    """A project of two notebooks and two tests, of which nothing fails; called, it is checked."""
    files = {
        "settings.ini": SETTINGS,
        "tools/book.py": "",
        "tools/pages.py": "",
        "nbs/first.ipynb": notebook("1 + 1"),
        "nbs/wing/second.ipynb": notebook("#| slow\nassert False"),
        "tests/test_one.py": "def test_good(): pass\n",
        "tests/test_two.py": "import pytest\n@pytest.mark.parametrize('x', ['a b', 'c'])\ndef test_each(x): assert x\n",
    }

    def checked(*marks: str, **changes: str) -> subprocess.CompletedProcess:
        for name, text in (files | changes).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return subprocess.run([sys.executable, CHECK, *marks], cwd=tmp_path, capture_output=True, text=True)

    return checked


def test_one_line_says_that_all_passed(check):
    done = check()
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "all checks passed", done.stderr


def test_the_last_line_names_each_part_that_failed(check):
    two = "import pytest\n@pytest.mark.parametrize('x', ['a b', 'c'])\ndef test_each(x): assert x == 'c'\n"
    broken = {"tools/pages.py": "raise SystemExit(3)", "nbs/first.ipynb": notebook("1 / 0"), "tests/test_two.py": two}
    done = check(**broken)
    said, *commands = done.stdout.splitlines()[-1].split("; ")
    assert done.returncode == 1 and said == "failed" and len(commands) == 3
    assert commands[0].endswith("/python tools/pages.py _docs_preview")
    assert commands[1].endswith("/nbdev_test --path nbs/first.ipynb")
    assert commands[2].endswith("/python -m pytest 'tests/test_two.py::test_each[a b]'")
    assert "ZeroDivisionError" in done.stderr and "1 failed, 2 passed" in done.stdout


def test_a_mark_adds_its_cells_and_a_file_of_tests_that_cannot_be_read_is_named(check):
    done = check("slow", **{"tests/test_one.py": "import nothing_of_this_name\n"})
    _, notebooks, tests = done.stdout.splitlines()[-1].split("; ")
    assert done.returncode == 1 and notebooks.endswith("/nbdev_test --flags slow --path nbs/wing/second.ipynb")
    assert tests.endswith("/python -m pytest -m slow tests/test_one.py")
