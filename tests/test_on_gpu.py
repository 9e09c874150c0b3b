"""The command for a day on a GPU, tried without one: it leaves what it knows, stops on time and goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import on_gpu
import pytest
import torch
from conftest import Killable, work_briefly

from cramming_nb.app.records import RunRecord
from cramming_nb.engine import hardware
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.hardware import Device
from cramming_nb.engine.hooks import read_log
from cramming_nb.lab import bench

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = ("datasets", "tyro", "pynvml")  # what such a machine may lack


@pytest.fixture
def bare(tmp_path) -> dict[str, str]:
    """An environment in which the optional packages cannot be imported."""
    folder = tmp_path / "missing"
    folder.mkdir()
    for name in OPTIONAL:
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} is missing')\n")
    return os.environ | dict(PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")


def options(tiny, home: Path, *more, budget: str = "5s") -> list[str]:
    """A command line for the tiny text and recipe."""
    given = [home / "out", "--text", tiny.text, "--work", home / "work", "--recipes", tiny.recipe, "--budget", budget]
    return [str(x) for x in (*given, "--compile", "never", "--without-gpu", *more)]


def results(home: Path) -> dict:
    """What came back."""
    return json.loads((home / "out" / "results.json").read_text())


def check_the_run(home: Path) -> RunRecord:
    """A run that was stopped on its way and went on: its record, and what the summary says of it."""
    found, record = results(home), RunRecord.read(home / "out" / "tiny.record.json")
    assert found["kill"]["exit_code"] == on_gpu.STOPPED and found["kill"]["fraction"] >= 0.2
    assert record.pretraining["spent"]["steps"] > found["kill"]["steps"] > 0
    assert {r["init"] for r in record.results} == {"constant", "counting", "pretrained", "random"}
    summary = (home / "out" / "summary.md").read_text()
    assert "Stopped by SIGTERM" in summary and "from random weights" in summary
    names = [path.name for path in (home / "out").iterdir()]
    assert len(names) <= 8 and all((home / "out" / name).is_file() for name in names)
    return record


@pytest.mark.slow
def test_a_day_with_a_kill_on_its_way_and_without_optional_packages(tiny, tmp_path, bare):
    given = options(tiny, tmp_path, "--skip", "tests", "bench", budget="3s")
    call = [sys.executable, ROOT / "tools" / "on_gpu.py", *given]
    done = subprocess.run([str(c) for c in call], cwd=tmp_path, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    record = check_the_run(tmp_path)
    assert record.pretraining["overshoot"] < 5 and record.pretraining["joules"] is None
    log = read_log(tmp_path / "out" / "tiny.log.jsonl")
    tokens = [line["tokens"] for line in log]
    assert tokens == sorted(tokens)  # it went on, and not from the start
    assert results(tmp_path)["status"][f"run:{tiny.recipe}"] == "done"
    again = subprocess.run([str(c) for c in call], cwd=tmp_path, env=bare, capture_output=True, text=True)
    assert again.returncode == 0 and set(results(tmp_path)["status"].values()) == {"done before", "left out: asked for"}


@pytest.mark.slow
@pytest.mark.skipif(Device().compiler() is None, reason="there is no C++ compiler")
def test_a_compiled_day_with_a_kill_on_its_way(tiny, tmp_path, bare):
    given = options(tiny, tmp_path, "--skip", "tests", "bench", "--minutes", "20", budget="45s")
    given[given.index("never")] = "always"
    call = [sys.executable, str(ROOT / "tools" / "on_gpu.py"), *given]
    done = subprocess.run(call, cwd=tmp_path, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    record = check_the_run(tmp_path)
    assert record.pretraining["compiled"] and record.pretraining["shares"]["compile"] > 0


def do_part(argv: list[str], cwd: str):
    """The body of a process that does one part."""
    os.chdir(cwd)
    work_briefly()
    on_gpu.do_part(on_gpu.arguments(argv))


class Forked:
    """What `subprocess.Popen` would start, forked from a server that has loaded torch: no wait for imports."""

    def __init__(self, call: list[str], cwd: Path):
        self.process = Killable.server.Process(target=do_part, args=(call[2:], str(cwd)))
        self.process.start()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a part", timeout)
        return self.returncode

    def send_signal(self, signum: int):
        os.kill(self.process.pid, signum)


class Call:
    """The command in this process, with other limits; its parts in processes that are forked."""

    def __init__(self, monkeypatch):
        self.patch = monkeypatch
        self.handler = signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr(on_gpu, "LEAST", dict.fromkeys(on_gpu.LEAST, 0))
        monkeypatch.setattr(on_gpu.subprocess, "Popen", Forked)

    def __call__(self, *argv) -> int:
        self.patch.setattr(sys, "argv", ["on_gpu.py", *map(str, argv)])
        try:
            return on_gpu.main()
        finally:
            signal.signal(signal.SIGTERM, self.handler)


@pytest.fixture
def call(monkeypatch) -> Call:
    return Call(monkeypatch)


def test_nothing_is_begun_when_the_time_is_over(tiny, tmp_path, call, monkeypatch):
    monkeypatch.setattr(on_gpu, "LEAST", dict(text=30, tests=30, bench=30, run=30))
    assert call(*options(tiny, tmp_path, "--minutes", "0.1")) == 0
    status = results(tmp_path)["status"]
    assert len(status) == 4 and all(state.startswith("not begun") for state in status.values())
    assert not (tmp_path / "work" / "data").exists()


@pytest.mark.slow
def test_what_runs_when_the_time_is_over_is_stopped_and_goes_on(tiny, tmp_path, call, monkeypatch):
    given = options(tiny, tmp_path, "--skip", "tests", "bench", "kill", budget="3s")
    log = tmp_path / "work" / "tiny" / "log.jsonl"
    really = on_gpu.Day.left
    monkeypatch.setattr(on_gpu.Day, "left", lambda day: 0.05 if on_gpu.spent(log) > 0.05 else 0.5)
    wait = Forked.wait

    def patiently(process, timeout=None):
        """Wait as the command does, for as long as it has time."""
        while timeout is not None and timeout < 1 and process.poll() is None and on_gpu.spent(log) < 0.05:
            time.sleep(0.1)
        return wait(process, timeout)

    monkeypatch.setattr(Forked, "wait", patiently)
    assert call(*given) == 0
    assert results(tmp_path)["status"][f"run:{tiny.recipe}"].startswith("stopped and saved")
    assert 0 < results(tmp_path)["parts"]["run-tiny"]["last"]["tokens"]
    assert "% of the budget" in (tmp_path / "out" / "summary.md").read_text()
    monkeypatch.setattr(Forked, "wait", wait)
    monkeypatch.setattr(on_gpu.Day, "left", really)
    before = results(tmp_path)["parts"]["run-tiny"]["last"]["tokens"]
    shutil.rmtree(tmp_path / "out")  # on such a machine it is empty at each call
    assert call(*given) == 0
    record = RunRecord.read(tmp_path / "out" / "tiny.record.json")
    assert record.pretraining["spent"]["tokens"] > before


def test_a_part_that_fails_is_named_and_the_rest_is_tried(tiny, tmp_path, call):
    given = options(tiny, tmp_path, "--skip", "tests", "bench")
    given[given.index("--text") + 1] = "nosuch.txt"
    assert call(*given) == 1
    status = results(tmp_path)["status"]
    assert status["text"].startswith("failed with exit code") and "tests" in status


def test_tests_that_failed_stay_failed_and_those_that_were_stopped_are_run_again(tiny, tmp_path, call, monkeypatch):
    given = options(tiny, tmp_path, "--skip", "bench", "--recipes")
    codes = iter((on_gpu.STOPPED, 1))
    monkeypatch.setattr(on_gpu.Day, "start", lambda day, part: on_gpu.write(on_gpu.part_file(day.a, part), {}) or 0)
    monkeypatch.setattr(on_gpu.Day, "wait", lambda day, process: next(codes))
    monkeypatch.setattr(on_gpu.subprocess, "Popen", lambda *_, **__: None)
    for code, state in ((0, "stopped and saved"), (1, "failed with exit code 1"), (1, "failed before")):
        assert call(*given) == code
        assert results(tmp_path)["status"]["tests"].startswith(state)


def test_the_bench_takes_fewer_rows_where_memory_runs_out(monkeypatch):
    tried = []

    def bench_train(size, rounds, rows, progress):
        tried.append(rows)
        if rows > 64:
            raise UserError("reference: out of memory: tried to allocate 20 GB")
        return json.loads((ROOT / "records" / "bench" / "train-small.json").read_text())

    monkeypatch.setattr(bench, "bench_train", bench_train)
    on_gpu.bench(SimpleNamespace(size="full", rounds=1, rows=256))
    assert tried == [256, 128, 64]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so(tiny, tmp_path):
    given = options(tiny, tmp_path)
    given.remove("--without-gpu")
    done = subprocess.run([sys.executable, ROOT / "tools" / "on_gpu.py", *given], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("PyTorch finds no GPU")


def test_large_batches_are_cut_for_minutes(tmp_path):
    given = on_gpu.arguments([str(tmp_path), "--text", "text.txt"])
    for recipe in given.recipes:
        schedule = on_gpu.run_of(given, recipe).recipe.schedule
        assert (schedule.batch_size, schedule.batch_ramp) == (512, 0)


def test_missing_packages_are_named(tiny, tmp_path, call, monkeypatch, capsys):
    monkeypatch.setattr(on_gpu, "find_spec", lambda name: None if name in ("scipy", "yaml") else name)
    assert call(*options(tiny, tmp_path)) == 2
    assert capsys.readouterr().err == "missing packages: yaml, scipy\n"


def test_the_bench_comes_back_as_a_table(tiny, tmp_path, call, monkeypatch):
    stored = json.loads((ROOT / "records" / "bench" / "train-small.json").read_text())
    monkeypatch.setattr(bench, "bench_train", lambda *_, **__: stored)

    def here(day, part):
        on_gpu.do_part(on_gpu.arguments([*sys.argv[1:], "--part", part]))
        return 0

    monkeypatch.setattr(on_gpu.Day, "start", here)
    assert call(*options(tiny, tmp_path, "--skip", "tests", "--recipes")) == 0
    assert results(tmp_path)["parts"]["bench"] == stored
    assert bench.bench_table(stored) in (tmp_path / "out" / "summary.md").read_text()


class MadeUpGPU(Device):
    """A device with a queue and little memory, which counts what it is asked."""

    runs_ahead, finetune_jobs = True, 1

    def __init__(self):
        self.recorded, self.waited, self.selected = 0, 0, []

    def event(self):
        def record():
            self.recorded += 1

        def synchronize():
            self.waited += 1

        return SimpleNamespace(record=record, synchronize=synchronize)

    def free_memory(self) -> int:
        return 2 * 10**9

    def facts(self) -> dict:
        return dict(driver="1.0", cuda="99")


def test_a_run_on_a_made_up_gpu(tiny, tmp_path, monkeypatch):
    gpu = MadeUpGPU()
    monkeypatch.setitem(hardware.DEVICES, "cpu", gpu)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        on_gpu.do_part(on_gpu.arguments(options(tiny, tmp_path, "--part", f"run:{tiny.recipe}", budget="30step")))
    finally:
        signal.signal(signal.SIGTERM, handler)
    record = RunRecord.read(tmp_path / "work" / "tiny" / "record.json")
    assert record.pretraining["spent"]["steps"] == 30 and record.environment["cuda"] == "99"
    assert gpu.recorded >= 30 and gpu.waited >= 28  # at most two micro-batches are ahead
