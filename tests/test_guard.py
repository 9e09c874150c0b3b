"""A script without a main guard ends with one line, wherever it starts processes."""

import multiprocessing
import random
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import sentence, write_jsonl

from cramming_nb.app import finetuning
from cramming_nb.app.run import Run
from cramming_nb.data import BATCH
from cramming_nb.engine.files import NO_GUARD, NO_GUARD_CODE, lock
from cramming_nb.engine.jobs import Local, Processes
from cramming_nb.lab import bench
from cramming_nb.lab.experiments import execute_all
from cramming_nb.recipes import load_recipe

SCRIPT = """
from pathlib import Path
from cramming_nb.corpus import CorpusConfig, get_corpus
from cramming_nb.engine.jobs import Local
get_corpus("files:t.jsonl", CorpusConfig(vocab_size=300), Path("cache"), False, engine=Local(2))
"""


def test_a_script_without_a_guard_ends_with_one_line(tmp_path):
    """Its workers would wait for the lock that it holds, and it for its workers."""
    rng = random.Random(0)
    text = " ".join(sentence(rng) for _ in range(200))
    rows = [dict(text=f"{number} {text}") for number in range(3 * BATCH // 2 // len(text))]
    write_jsonl(tmp_path / "t.jsonl", rows)  # two jobs
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    said = done.stderr.splitlines()
    assert done.returncode == 1 and said[-1].endswith(NO_GUARD)
    assert done.stderr.count("Traceback") == 1  # of the script itself


def fine_tune():
    list(finetuning.run_together(None, [("one",), ("two",)], finetuning.Workers(1, 2, 1)))


STARTS = dict(
    lock=lambda: lock("folder").__enter__(),
    jobs=lambda: list(Local(2).map(pow, [(1, 2), (3, 4)])),
    fine_tuning=fine_tune,
    bench=lambda: bench.take_turn(print),
    processes=lambda: list(Processes(2).map(pow, [(1, 2)])),
    lab=lambda: execute_all([Run(load_recipe("pocket"), folder=Path(name)) for name in "ab"], jobs=2, progress=False),
)


@pytest.mark.parametrize("name", STARTS)
def test_a_worker_that_imports_the_script_starts_nothing(name, monkeypatch, capsys):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(SystemExit) as ended:
        STARTS[name]()
    assert ended.value.code == NO_GUARD_CODE and capsys.readouterr().err == f"cramming_nb: {NO_GUARD}\n"
