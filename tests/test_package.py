"""Modules import each other without a circle or a side effect, and only one chapter asks what kind of device it runs on."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "cramming_nb"
MODULES = sorted(path for path in PACKAGE.glob("*.py") if path.name not in ("_modidx.py", "hardware.py"))

# What a module would write to treat GPUs differently by itself. The bench speaks of CUDA where the code it compares
# with does; a line that merely names the word in prose is no question.
QUESTIONS = re.compile(r"\.is_cuda\b|torch\.cuda\.|[=!]= *[\"']cuda[\"']|[\"']cuda[\"'] *[=!]=|is_available\(\)")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_only_the_hardware_chapter_asks_whether_this_is_a_gpu(path):
    asking = [line.strip() for line in path.read_text().splitlines() if QUESTIONS.search(line)]
    if path.name == "bench.py":  # the reference step is written as the paper's code is
        asking = [line for line in asking if "reference" not in line]
    assert not asking


NAMES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "_modidx"))


def imported(path: Path) -> set[str]:
    """The modules of this package that a module imports, anywhere in its code, and the package itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "cramming_nb." * bool(node.level) + (node.module or "")
            names = [f"{module.rstrip('.')}.{alias.name}" for alias in node.names]
        else:
            continue
        inside = [name.split(".")[1] for name in names if name.startswith("cramming_nb.")]
        found |= set(inside) & set(NAMES)
    return found if path.stem == "__init__" else found | {"__init__"}  # Python imports that one first


def test_imports_form_no_circle():
    graph = {name: imported(PACKAGE / f"{name}.py") for name in [*NAMES, "__init__"]}
    assert graph["modeling"] == {"__init__", "architecture", "configuration"}  # the graph is not empty
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert order[0] == "__init__" and order.index("configuration") < order.index("modeling") < order.index("hf")


@pytest.mark.parametrize("name", NAMES)
def test_module_can_be_imported_alone(name, run_python):
    """In a new process, where it leaves no finder of ours among those by which Python imports modules."""
    done = run_python(f"""import sys, cramming_nb.{name}
for finder in (*sys.meta_path, *sys.path_hooks):
    kind = finder if hasattr(finder, "__module__") else type(finder)
    print(kind.__module__)""")
    assert done.code == 0, done.err
    modules = done.out.split()
    assert len(modules) > 3 and not [module for module in modules if module.startswith("cramming_nb")]


def test_import_of_the_package_has_no_effect_and_takes_no_time():
    """Neither torch nor transformers is loaded, nor anything else; Python's import system stays as it is."""
    code = """import sys
system = sys.meta_path, sys.path_hooks, sys.path
before, loaded = [list(part) for part in system], set(sys.modules)
import cramming_nb
assert [list(part) for part in system] == before
print(*sorted(set(sys.modules) - loaded))"""
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cramming_nb"]
    (microseconds,) = [line.split("|")[1] for line in done.stderr.splitlines() if line.endswith(" cramming_nb")]
    assert int(microseconds) < 100_000
