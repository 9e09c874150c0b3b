"""Modules import each other without a circle or a side effect, and only one chapter asks what kind of device it runs on."""

import re
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from test_project import MODULES, imports

# What a module would write to treat GPUs differently by itself. The bench speaks of CUDA where the code it compares
# with does; a line that merely names the word in prose is no question.
QUESTIONS = re.compile(r"\.is_cuda\b|torch\.cuda\.|[=!]= *[\"']cuda[\"']|[\"']cuda[\"'] *[=!]=|is_available\(\)")


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"engine.hardware"}))
def test_only_the_hardware_page_asks_whether_this_is_a_gpu(name):
    path = MODULES[name]
    asking = [line.strip() for line in path.read_text().splitlines() if QUESTIONS.search(line)]
    if path.name == "bench.py":  # the reference step is written as the paper's code is
        asking = [line for line in asking if "reference" not in line]
    assert not asking


def test_imports_form_no_circle():
    graph = {name: imports(name) for name in MODULES}
    assert graph["app.modeling"] == {"architecture", "app.configuration"}  # the graph is not empty
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("app.configuration") < order.index("app.modeling") < order.index("app.hf")


@pytest.mark.parametrize("name", MODULES)
def test_module_can_be_imported_alone(name, run_python):
    """In a new process, where it leaves no finder of ours among those by which Python imports modules."""
    done = run_python(f"""import sys, cramming_nb.{name}
for finder in (*sys.meta_path, *sys.path_hooks):
    kind = finder if hasattr(finder, "__module__") else type(finder)
    print(kind.__module__)""")
    assert done.code == 0, done.err
    modules = done.out.split()
    assert len(modules) > 3 and not [module for module in modules if module.startswith("cramming_nb")]


def test_import_of_the_package_has_no_effect():
    """Neither torch nor transformers is loaded, nor anything else; Python's import system stays as it is."""
    code = """import sys
system = sys.meta_path, sys.path_hooks, sys.path
before, loaded = [list(part) for part in system], set(sys.modules)
import cramming_nb
assert [list(part) for part in system] == before
print(*sorted(set(sys.modules) - loaded))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cramming_nb"]
