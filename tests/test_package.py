"""The package reads easily, and only one chapter asks what kind of device it runs on."""

import re
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
