"""The quarter of an hour on a GPU, rehearsed without one: rows travel, stages leave their results, and stop on time."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import on_gpu
import pytest
from conftest import write_glue, write_jsonl

from cramming_nb.app.records import RunRecord
from cramming_nb.engine import hardware
from cramming_nb.engine.hardware import Device

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = ("datasets", "tyro", "pynvml")  # what such a machine may lack
TINY = """architecture.hidden_size=16 architecture.num_heads=2 architecture.num_layers=3 architecture.ffn_size=32
architecture.classifier_size=16 corpus.vocab_size=200 schedule.batch_size=8 training.micro_batch_size=8
training.heldout_rows=8 protocol.epochs=1 corpus.filter_threshold=0""".split()


@pytest.fixture
def bare(tmp_path) -> dict[str, str]:
    """An environment in which the optional packages cannot be imported."""
    folder = tmp_path / "missing"
    folder.mkdir()
    for name in OPTIONAL:
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} is missing')\n")
    return os.environ | dict(PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")


def write_blimp(folder: Path) -> Path:
    """A BLiMP folder with one paradigm."""
    pair = dict(sentence_good="The sailor waits.", sentence_bad="The sailor wait.", linguistics_term="agreement")
    folder.mkdir()
    write_jsonl(folder / "one.jsonl", [pair] * 3)
    return folder


@pytest.fixture(scope="module")
def packed_once(tiny, tmp_path_factory) -> Path:
    """The tiny text, packed for two trips, and beside it the folder in which its rows were built."""
    home = tmp_path_factory.mktemp("packed")
    given = ["--text", f"files:{tiny.text}", "--glue-dir", write_glue(home / "glue"), "--work", home / "work"]
    given += ["--blimp", write_blimp(home / "blimp")]
    assert on_gpu.pack(arguments("pack", home / "packed", *given)) == 0
    return home


@pytest.fixture
def packed(packed_once, tmp_path) -> Path:
    """A copy of what is packed; the rows that it was made of are in `work` beside it."""
    for name in ("packed", "work"):
        shutil.copytree(packed_once / name, tmp_path / name)
    return tmp_path / "packed"


def arguments(*argv, compiled: str = "never"):
    """Arguments with the recipes at a hundredth of their size."""
    return on_gpu.arguments([str(a) for a in (*argv, "--set", *TINY, f"training.compile={compiled}")])


def options(packed: Path, home: Path, *more) -> tuple:
    """The arguments of a rehearsal."""
    given = ("--from", packed / "1", packed / "2", "--work", home / "gpu", "--budget", "20step", "--steps", "2")
    return ("run", home / "out", *given, "--variant-seconds", "0.1", "--processes", "1", *more)


def read(path: Path) -> object:
    return json.loads(path.read_text())


def test_the_plan_names_every_stage(capsys):
    on_gpu.plan(on_gpu.arguments(["plan"]))
    printed = capsys.readouterr().out
    assert all(f"{stage} " in printed for stage in on_gpu.STAGES) and " 88 s " in printed
    assert 500 < on_gpu.seconds_of_a_run(4) < 520 and on_gpu.seconds_of_a_run(100) > 330 + 170


def test_rows_arrive_as_they_left(packed, tmp_path, capsys):
    a = arguments(*options(packed, tmp_path))
    whole = on_gpu.corpus_from(a)
    first = np.load(next((tmp_path / "work" / "data").glob("corpus-*/train.npy")))
    assert np.array_equal(whole.rows, first) and whole.verify() is None
    a.trips = a.trips[:1]
    half = on_gpu.corpus_from(a)
    assert np.array_equal(half.rows, first[: len(first) // 2]) and half.verify() is None
    a.trips = [tmp_path]
    with pytest.raises(SystemExit, match="no packed rows"):
        on_gpu.corpus_from(a)


def test_damaged_rows_are_refused(packed, tmp_path):
    (packed / "2" / "rows-3.xz").write_bytes((packed / "2" / "rows-2.xz").read_bytes())
    with pytest.raises(SystemExit, match="damaged"):
        on_gpu.corpus_from(arguments(*options(packed, tmp_path)))


def test_a_trip_that_is_too_large_is_told(packed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(on_gpu, "TRIP", 1000)
    assert on_gpu.say_size(packed / "1") > 1000
    assert "too large" in capsys.readouterr().out


def test_a_rehearsal_of_every_stage(packed, tmp_path):
    a = arguments(*options(packed, tmp_path))
    for stage in ("profile", "variants", "sprint", "best", "extra", "steps", "at_once"):
        on_gpu.write(on_gpu.result_file(a, stage), on_gpu.STAGES[stage](a))
    profile = read(tmp_path / "out" / "profile.json")
    assert set(profile) == set(on_gpu.ARMS) and all(arm["tokens_per_second"] > 0 for arm in profile.values())
    tried, chosen = read(tmp_path / "out" / "variants.json"), read(on_gpu.result_file(a, "best"))
    losses = {name: outcome["heldout_loss"] for name, outcome in tried.items()}
    losses.pop("small, replaced tokens")  # its generator's, which compares with no other
    assert chosen["variant"] == min(losses, key=losses.get)
    for stage in ("sprint", "best"):
        record = RunRecord.read(tmp_path / "out" / f"{stage}.record.json")
        assert record.pretraining["spent"]["steps"] == 20
        tuned = read(tmp_path / "out" / f"{stage}.finetuning.json")
        jobs = {(result["task"], result["seed"]) for result in tuned}
        assert jobs == {(task, seed) for task in ("cola", "stsb", "rte") for seed in range(3)}
        assert [r["scores"] for r in record.results] == [r["scores"] for r in tuned]
    assert set(read(tmp_path / "out" / "extra.json")) == {"run", "blimp", "frozen"}
    assert all((tmp_path / "out" / f"{stage}.png").stat().st_size > 5000 for stage in ("profile", "variants", "sprint"))


def test_fine_tunings_that_are_done_are_not_done_again(packed, tmp_path, monkeypatch):
    a = arguments(*options(packed, tmp_path))
    done = [dict(task="cola", seed=0, scores={"cola": 0.5})]
    on_gpu.write(a.work / "results" / "sprint.finetuning.json", done)
    monkeypatch.setattr(on_gpu, "make_ready", lambda *_: None)
    tuning = on_gpu.Tuning(a, "sprint", None, on_gpu.tasks_from(a))
    tuning.do([("cola", 0)])
    assert tuning.done == done


def test_the_first_seed_of_all_tasks_comes_first(packed, tmp_path, monkeypatch):
    a = arguments(*options(packed, tmp_path))
    tasks = on_gpu.tasks_from(a)
    tasks["cola"].train[:] = tasks["cola"].train[:1]
    monkeypatch.setattr(on_gpu, "LARGE", 2)  # only CoLA is small

    def made_up(jobs: list[tuple]):
        for task, seed in jobs:
            yield dict(task=task, seed=seed, scores={task: 0.0})

    tuning = on_gpu.Tuning(a, "sprint", None, tasks)
    monkeypatch.setattr(tuning, "results", made_up)
    jobs = [(result["task"], result["seed"]) for result in tuning.all()]
    assert set(jobs[:3]) == {("cola", 0), ("stsb", 0), ("rte", 0)} and set(jobs[3:]) == {("cola", 1), ("cola", 2)}


def test_an_arm_that_fails_is_named_and_the_next_one_comes(packed, tmp_path, monkeypatch):
    monkeypatch.setitem(on_gpu.ARMS, "small", ("sprint", {"optimizer.betas": [2, 2]}))
    found = on_gpu.profile(arguments(*options(packed, tmp_path)))
    assert "betas" in found["small"]["error"] and found["crammed-v2"]["tokens_per_second"] > 0


def test_kernels_are_grouped():
    kernels = {"nvjet_sm90_tst": 3.0, "cudnn_sdpa_bprop": 1.0, "triton_poi_fused_addcmul_cat": 2.0, "fill": 0.5}
    assert on_gpu.grouped(kernels) == {"matrix products": 3, "attention": 1, "rotation": 2, "the rest": 0.5}


class MadeUpGPU(Device):
    """A device with a queue and little memory, which counts what it is asked."""

    runs_ahead = True

    def __init__(self):
        self.recorded, self.waited = 0, 0

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


def test_a_budget_on_a_made_up_gpu(packed, tmp_path, monkeypatch):
    gpu = MadeUpGPU()
    monkeypatch.setitem(hardware.DEVICES, "cpu", gpu)
    monkeypatch.setattr(on_gpu, "tasks_from", lambda a: {})
    on_gpu.pretrain_and_tune(arguments(*options(packed, tmp_path)), "best", on_gpu.MUON)
    record = RunRecord.read(tmp_path / "out" / "best.record.json")
    assert record.pretraining["spent"]["steps"] == 20 and record.environment["cuda"] == "99"
    assert gpu.recorded >= 20 and gpu.waited >= 18  # at most two micro-batches are ahead


def test_stages_stop_when_the_time_is_over(tmp_path, monkeypatch):
    a = on_gpu.arguments(["run", str(tmp_path / "out"), "--work", str(tmp_path), "--stages", "steps", "tests", "bench"])
    on_gpu.write(on_gpu.result_file(a, "steps"), {})
    a.minutes = 0.1
    assert on_gpu.run(a) == 1
    status = read(tmp_path / "out" / "status.json")["status"]
    assert status["steps"] == "done before" and status["tests"].startswith("not begun")


@pytest.mark.parametrize("obeys, code", [(True, 143), (False, -signal.SIGKILL)])
def test_a_process_is_stopped_when_its_time_is_over(obeys, code, monkeypatch):
    action = "lambda *_: sys.exit(143)" if obeys else "signal.SIG_IGN"
    source = f"import signal, sys, time; signal.signal(15, {action}); print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    process.stdout.readline()
    wait = process.wait
    monkeypatch.setattr(process, "wait", lambda seconds=None: wait(None if seconds is None else min(seconds, 2)))
    assert on_gpu.wait(process, 0.1) == code


def test_missing_packages_and_gpus_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "run", str(tmp_path)])
    monkeypatch.setattr(on_gpu, "finds_gpu", lambda: False)
    assert on_gpu.main() == 2 and "finds no GPU" in capsys.readouterr().err
    monkeypatch.setattr(on_gpu, "find_spec", lambda name: None if name in ("scipy", "yaml") else name)
    assert on_gpu.main() == 2 and capsys.readouterr().err == "missing packages: yaml, scipy\n"


@pytest.mark.slow
@pytest.mark.skipif(Device().compiler() is None, reason="there is no C++ compiler")
def test_a_compiled_rehearsal_that_is_stopped_and_goes_on(packed, tmp_path, bare):
    more = ("--stages", "profile", "variants", "best", "--without-gpu", "--set", *TINY, "training.compile=always")
    call = [sys.executable, str(ROOT / "tools" / "on_gpu.py"), *map(str, options(packed, tmp_path, *more))]
    call[call.index("20step")] = "4000step"
    process = subprocess.Popen(call, cwd=tmp_path, env=bare, start_new_session=True)
    log = tmp_path / "gpu" / "runs" / "best" / "log.jsonl"
    while not (log.exists() and '"steps": 1' in log.read_text()):
        assert process.poll() is None
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60)
    assert subprocess.call(call, cwd=tmp_path, env=bare) == 0
    status = read(tmp_path / "out" / "status.json")["status"]
    assert status["profile"] == status["variants"] == "done before" and status["best"].startswith("done in")
    record = RunRecord.read(tmp_path / "out" / "best.record.json")
    assert record.pretraining["compiled"] and record.pretraining["spent"]["steps"] == 4000
    assert record.pretraining["joules"] is None
