"""The script for a borrowed GPU, tried without one and without the packages that such a machine lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

from cramming_nb.records import RunRecord

ROOT = Path(__file__).resolve().parents[1]
WITHOUT = "import sys; sys.modules.update(datasets=None, tyro=None); sys.argv = sys.argv[1:]; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"


def test_it_leaves_a_record_and_needs_neither_datasets_nor_tyro(tiny, tmp_path):
    args = [
        tmp_path / "out",
        "--text",
        tiny.text,
        "--work",
        tmp_path / "work",
        "--recipe",
        tiny.recipe,
        "--budget",
        "20step",
        "--rounds",
        0,
    ]
    call = [sys.executable, "-c", WITHOUT, ROOT / "tests" / "on_gpu.py", *args]
    done = subprocess.run(
        [str(c) for c in call],
        cwd=tmp_path,
        env=os.environ | dict(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    record = RunRecord.read(tmp_path / "out" / "record.json")
    assert record.pretraining["spent"]["steps"] == 20 and record.results
    assert (tmp_path / "out" / "report.html").exists()
    assert all(json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines())
