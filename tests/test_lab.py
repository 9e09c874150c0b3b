"""Lists of runs: what has a record is left alone, several processes share one list, and a killed lab goes on."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import Forked, Killable, command, lines

from cramming_nb.app.finetuning import plan_workers
from cramming_nb.app.records import RunRecord
from cramming_nb.app.run import run_name
from cramming_nb.budget import Budget
from cramming_nb.engine import jobs as engine
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.files import Busy, acquire, lock
from cramming_nb.engine.hardware import Device, Hardware
from cramming_nb.engine.hooks import read_log
from cramming_nb.engine.jobs import Local, Processes
from cramming_nb.lab import experiments
from cramming_nb.lab.experiments import Entry, plan_runs, read_list


class Lab:
    """A list of tiny runs, and the folder in which it is worked through."""

    def __init__(self, tiny, home: Path):
        self.tiny, self.home, self.runs = tiny, home, home / "runs" / "lab"
        self.entry = dict(recipe=str(tiny.recipe), source=f"files:{tiny.text}", budget="2ktok", finetune_seeds=0)

    def write(self, *changes: dict) -> "Lab":
        (self.home / "list.yaml").write_text(json.dumps([self.entry | change for change in changes]))
        return self

    def __call__(self, *argv):
        return command("lab", "list.yaml", *argv, cwd=self.home, cache=self.tiny.cache)

    def start(self, *argv) -> Killable:
        return Killable("lab", "list.yaml", *argv, cwd=self.home, cache=self.tiny.cache)

    def records(self) -> list[RunRecord]:
        return [RunRecord.read(path) for path in sorted(self.runs.glob("*/record.json"))]


@pytest.fixture
def lab(tiny, tmp_path) -> Lab:
    return Lab(tiny, tmp_path)


def beginnings(folder: Path) -> int:
    """How often a run was begun."""
    return sum(line.get("tokens") == 0 for line in read_log(folder / "log.jsonl"))


def test_what_has_a_record_is_only_read(lab):
    lab.write(dict(name="slow", seeds=[0, 1], set={"optimizer.lr": 0.001}), dict(name="fast"))
    result = lab()
    assert result.code == 0, result.err
    found = lab.records()
    assert [(r.recipe["name"], r.seed) for r in found] == [("fast", 0), ("slow", 0), ("slow", 1)]
    assert len({r.key for r in found}) == 3 and all(r.name in result.out for r in found)
    before = {path: path.stat().st_mtime_ns for path in lab.runs.rglob("record.json")}
    assert lab().out == result.out
    assert {path: path.stat().st_mtime_ns for path in lab.runs.rglob("record.json")} == before


def test_one_entry_by_name(lab):
    lab.write(dict(name="slow", set={"optimizer.lr": 0.001}), dict(name="fast"))
    assert lab("--only", "fast").code == 0
    assert [r.recipe["name"] for r in lab.records()] == ["fast"]
    assert lab("--only", "fats").code == 2 and "there are slow, fast" in lab("--only", "fats").err


def test_a_finished_run_gets_the_fine_tuning_it_lacks(lab, glue):
    assert lab.write({})().code == 0
    (bare,) = lab.records()
    result = lab.write(dict(finetune_seeds=2, glue_dir=str(glue)))()
    assert result.code == 0, result.err
    (full,) = lab.records()
    assert bare.results == [] and bare.pretraining == full.pretraining
    tuned = [(i, s) for i in ("pretrained", "random") for s in (0, 1)]
    expected = [(t, *which) for t in ("cola", "stsb", "rte") for which in [("constant", 0), ("counting", 0), *tuned]]
    assert sorted((r["task"], r["init"], r["seed"]) for r in full.results) == sorted(expected)
    assert lab.write(dict(finetune_seeds=2))().code == 0  # without --glue-dir, what is there is printed
    assert lab.records() == [full]


def test_scores_on_other_rows_take_the_place_of_the_old(lab, glue):
    wish = dict(finetune_seeds=2, glue_dir=str(glue))
    assert lab.write(wish)().code == 0
    (before,) = lab.records()
    rows = (glue / "CoLA" / "dev.jsonl").read_text().splitlines(keepends=True)
    (glue / "CoLA" / "dev.jsonl").write_text("".join(rows[:8]))
    assert lab.write(wish | dict(finetune_seeds=1))().code == 0
    (after,) = lab.records()
    of_cola = [(r["init"], r["seed"]) for r in after.results if r["task"] == "cola"]
    assert sorted(of_cola) == [(init, 0) for init in ("constant", "counting", "pretrained", "random")]
    assert {r["dev_rows"]["cola"] for r in after.results if r["task"] == "cola"} == {8}
    others = [[r for r in record.results if r["task"] != "cola"] for record in (before, after)]
    assert others[0] == others[1] and len(others[0]) == 12


def test_a_throughput_normalised_budget_is_the_same_whatever_the_machine_does(lab):
    lab.entry["set"] = {"training.compile": "never"}  # as a long run, each of these would be compiled for seconds
    lab.write(dict(name="one", throughput_normalised=True, budget="1s"))
    rates = lab.home / "rates.json"
    pace = {"corpus.seq_length": 32, "architecture.max_length": 64, "architecture.hidden_size": 32}
    assert lab().code == 0
    (measured,) = json.loads(rates.read_text())
    assert pace.items() <= measured["pace"].items() and measured["tokens_per_second"] > 0
    rates.write_text(json.dumps([measured | dict(tokens_per_second=3000)]))
    two = dict(name="two", throughput_normalised=True, budget="1s")
    three = dict(name="three", throughput_normalised=True, budget="0.5s")
    assert lab.write(two, three)().code == 0
    found = {r.recipe["name"]: r for r in lab.records()}
    assert (found["two"].budget, found["three"].budget) == ("1s@3000tok/s", "0.5s@3000tok/s")
    assert 3000 <= found["two"].pretraining["spent"]["tokens"] < 3000 + 256
    assert 1500 <= found["three"].pretraining["spent"]["tokens"] < 1500 + 256
    for record in found.values():  # the rules' day is of real seconds
        assert record.provenance["seconds"] == pytest.approx(sum(record.pretraining["shares"].values()))


def test_two_processes_share_a_list(lab):
    lab.write(dict(seeds=[0, 1, 2, 3]))
    both = [lab.start(), lab.start()]
    assert [p.end() for p in both] == [0, 0]
    assert [r.seed for r in lab.records()] == [0, 1, 2, 3]
    assert [beginnings(folder) for folder in sorted(lab.runs.iterdir())] == [1, 1, 1, 1]


def test_a_stopped_lab_stops_its_processes_and_goes_on(lab):
    lab.write(dict(seeds=[0, 1, 2], budget="30ktok"))
    started = lab.start("--jobs", "2")
    started.wait_for(lambda: sum(beginnings(path.parent) for path in lab.runs.glob("*/log.jsonl")) == 2)
    assert started.send(signal.SIGTERM) == 143
    for folder in lab.runs.iterdir():
        with lock(folder):  # refused while another process is at work on the run
            pass
        assert (folder / "record.json").exists() or list(folder.glob("checkpoints/step-*"))  # each has saved
    assert len(lab.records()) < 3
    assert lab("--jobs", "2").code == 0
    assert [r.seed for r in lab.records()] == [0, 1, 2]


def test_the_processes_of_a_killed_lab_end_with_it(lab):
    lab.write(dict(seeds=[0, 1, 2], budget="3Mtok"))
    started = lab.start("--jobs", "2")
    started.wait_for(lambda: len(list(lab.runs.glob("*/log.jsonl"))) == 2)
    assert started.send(signal.SIGKILL) == -signal.SIGKILL
    folders = sorted(path.parent for path in lab.runs.glob("*/log.jsonl"))

    def free(folder: Path) -> bool:  # a lock is refused while another process is at work on the run
        try:
            with lock(folder):
                return True
        except Busy:
            return False

    end = time.monotonic() + 300  # a run that went on would end in less, and leave a record
    while not all(map(free, folders)):
        assert time.monotonic() < end, "a process works on without its parent"
        time.sleep(0.2)
    assert lab.records() == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_mistake_is_said_in_a_line_and_does_not_end_the_others(lab, cram, jobs):
    """The others come after it, or, in processes that start anew, beside it."""
    others = [dict(name="later"), {}][: 3 - jobs]
    lab.write(dict(source="files:nothing-*.txt", name="lost"), *others)
    result = cram("lab", "list.yaml", "--jobs", jobs)  # with all that its processes say
    assert result.code == 2 and "Traceback" not in result.err
    assert "nothing-*.txt" in result.err and "the same command goes on" in result.err
    (line,) = [line for line in lines(result.err) if line.startswith("cram: ")]
    assert f"1 of {1 + len(others)} runs failed (lost-" in line
    assert [r.recipe["name"] for r in lab.records()] == ["later", "tiny"][: len(others)]
    assert all(r.name in result.out for r in lab.records())  # the table of those that are finished


def test_a_folder_that_is_a_file_is_told_with_advice(lab, cram):
    lab.write({})
    result = cram("lab", "list.yaml", "--folder", "list.yaml")
    assert result.code == 2 and "move the file or folder that is in its place" in lines(result.err)[-1], result.err


def test_what_waits_for_a_process_is_begun_after_a_mistake(lab):
    lab.write(dict(source="files:nothing-*.txt", name="lost"), {}, dict(name="later"))
    result = lab("--jobs", "2")
    assert result.code == 2 and "1 of 3 runs failed (lost-" in result.err
    assert [r.recipe["name"] for r in lab.records()] == ["later", "tiny"]


def test_a_process_that_is_killed_ends_its_own_run_alone(lab):
    lab.write(dict(seeds=[0], budget="3Mtok"), dict(name="later"))
    started = lab.start("--jobs", "2")
    started.wait_for(lambda: any(beginnings(path) for path in lab.runs.glob("tiny-*")))
    started.wait_for(lambda: list(lab.runs.glob("later-*/record.json")))
    (lost,) = [pid for pid in Forked.all() if holds(pid, f"{lab.runs}/tiny-")]
    os.kill(lost, signal.SIGKILL)
    assert started.end() == 2
    said = started.output.read_text()
    assert "1 of 2 runs failed" in said and "probably ran out of memory" in said and "Traceback" not in said
    assert [r.recipe["name"] for r in lab.records()] == ["later"]


def holds(pid: int, beginning: str) -> bool:
    """Whether a process has a file open whose path begins so."""
    opened = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return any(path.startswith(beginning) for path in opened)


def test_entries_of_one_folder_are_done_one_after_the_other(tmp_path, monkeypatch):
    """They are one job, so that none of them finds the folder busy; what differs is done side by side."""
    done = []
    monkeypatch.setattr(experiments, "execute", lambda run: done.append((run.folder.name, run.finetune_seeds)))
    monkeypatch.setattr(experiments, "engine_for", lambda name, jobs: Local(1))
    entries = [Entry(finetune_seeds=0), Entry(name="other"), Entry()]
    assert experiments.execute_all(plan_runs(entries, tmp_path), progress=False) == []
    first, other = (run_name(name, "machine", "3m", 0) for name in ("pocket", "other"))
    assert done == [(first, 0), (first, 1), (other, 1)]


ALIKE = [
    [dict(set={"optimizer.lr": 0.001}), dict(set={"protocol.lr": 0.001})],
    [dict(source="files:/tmp/a/x.txt"), dict(source="files:/tmp/b/x.txt")],
    [dict(throughput_normalised=True, budget="3s"), dict(budget="3s")],
    [dict(name="one"), dict(name="one", set={"schedule.batch_size": 64})],
]


@pytest.mark.parametrize("changes", ALIKE, ids=["fields", "texts", "clocks", "names"])
def test_different_runs_of_one_folder_are_refused_before_anything_is_done(lab, monkeypatch, changes):
    monkeypatch.setattr(experiments, "throughputs", None)  # nothing is measured
    result = lab.write(dict(name="first"), *changes)()
    (line,) = lines(result.err)
    assert result.code == 2 and "entries 2 and 3 of the list differ" in line and "name: " in line
    assert not lab.runs.exists()


def test_entries_that_are_one_run_share_its_folder(tmp_path):
    entries = [Entry(finetune_seeds=0), Entry(), Entry(seeds=[0, 1])]
    assert len({run.folder for run in plan_runs(entries, tmp_path)}) == 2


def test_rates_are_measured_under_a_lock_of_their_file(tmp_path, monkeypatch):
    """Two lists of one folder, with folders of runs of their own: the second finds what the first has measured."""
    rates, measured = tmp_path / "lists" / "rates.json", []

    def bench(recipes, *_):
        with pytest.raises(Busy):
            lock_elsewhere(rates.parent)
        measured.append(len(recipes))
        return [[1000.0]] * len(recipes)

    monkeypatch.setattr(experiments, "bench_recipes", bench)
    entries = [Entry(throughput_normalised=True)]
    assert [run.budget for run in plan_runs(entries, tmp_path / "runs", rates)] == ["3m@1000tok/s"]
    plan_runs(entries, tmp_path / "others", rates)
    assert measured == [2]  # the recipe, and itself as the baseline


@pytest.mark.parametrize(
    "row",
    [dict(pace={"architecture.widths": 1}, tokens_per_second=1), dict(pace={}, tokens_per_second=0)],
    ids=["a field that is gone", "no speed"],
)
def test_a_file_of_rates_that_cannot_be_used(row, tmp_path):
    (tmp_path / "rates.json").write_text(json.dumps([row]))
    with pytest.raises(UserError, match=r"rates.json: .*; delete it, and they are measured again"):
        plan_runs([Entry(throughput_normalised=True)], tmp_path / "runs", tmp_path / "rates.json")


def lock_elsewhere(folder: Path):
    """Lock a folder as another process would."""
    with open(folder / ".lock", "a+") as file:
        acquire(file, folder, wait=False)


@pytest.mark.parametrize(
    ("cores", "limit", "jobs", "threads"), [(8, None, 2, 4), (8, 2, 2, 2), (8, 8, 2, 4), (2, None, 4, 1)]
)
def test_processes_share_out_the_cores_that_may_be_used(monkeypatch, cores, limit, jobs, threads):
    monkeypatch.setattr(engine, "usable_cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if limit:
        monkeypatch.setenv("OMP_NUM_THREADS", str(limit))
        monkeypatch.setattr(experiments.torch, "get_num_threads", lambda: limit)
    assert experiments.threads_each(Processes(jobs).cores) == threads


class Visible(Device):
    """As many devices as CUDA would see of six."""

    def count(self) -> int:
        return len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5").split(","))


@pytest.mark.parametrize(("seen", "expected"), [(None, "2"), ("5,4,GPU-7f", "GPU-7f")])
def test_a_run_fine_tunes_on_the_gpu_of_its_process_alone(monkeypatch, seen, expected):
    machine = Hardware(Visible(), torch.float32, "explicit", threads=8, name="made up")
    planned = SimpleNamespace(send=lambda workers: sent.append(workers.devices))
    sent = []
    monkeypatch.setattr(engine, "exit_with_parent", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen or "")
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert plan_workers(machine, jobs=12, bytes_each=1).devices > 2
    engine.send_outcome(planned, 2, plan_workers, (machine, 12, 1))
    assert sent == [1] and os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_each_process_has_a_device_while_it_works(tmp_path):
    """Three jobs on two devices: the third gets the device that is free first."""
    with Processes(2, devices=2) as workers:
        found = list(workers.map(visible_devices, [(tmp_path, number) for number in range(3)]))
    assert found[2] == found[0] != found[1] and set(found) == {"0", "1"}


def visible_devices(folder: Path, number: int) -> str:
    """The GPUs that this process may see; the second job ends after the third."""
    visible = os.environ["CUDA_VISIBLE_DEVICES"]
    if number == 1:
        wait_until((folder / "2").exists)
    (folder / str(number)).touch()
    return visible


def wait_until(true):
    """Waits, at most for five minutes."""
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ray_that_is_not_installed_is_asked_for(lab, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = lab.write({})("--engine", "ray")
    assert result.code == 2 and "pip install 'cramming_nb[ray]'" in result.err
    assert len(lines(result.err)) == 1 and not lab.records()


def test_entries_of_one_name_have_speeds_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "cramming_nb.lab.experiments.throughputs",
        lambda recipes, *_: [1000 * r.architecture.num_layers for r in recipes],
    )
    entries = [
        Entry("pocket", name="x", throughput_normalised=True, budget=budget, set={"architecture.num_layers": layers})
        for budget, layers in (("1m", 2), ("2m", 8))
    ]
    assert [run.budget for run in plan_runs(entries, tmp_path)] == ["1m@2000tok/s", "2m@8000tok/s"]


def test_the_list_for_a_gpu_is_a_list_of_runs_each_with_a_prediction():
    path = Path(__file__).resolve().parents[1] / "records" / "lab" / "gpu.yaml"
    runs = plan_runs(read_list(path), Path("runs/lab"), progress=False)
    names = [run.recipe.name for run in runs]
    assert len(runs) == len({*names}) == 10
    assert {"crammed-v2", "crammed-v1", "bert-original-stopped", "full size batch 1536"} <= {*names}
    text = path.read_text().splitlines()
    for number, line in enumerate(text):
        if line.startswith("- "):
            comment = text[number - 1]
            assert comment.startswith("# Predicted: ") and any(c.isdigit() for c in comment), line
    ids = set(re.findall(r"\b[A-Z]\d+[a-z]?\b", " ".join(re.findall(r"Claims? (.+?)\.$", "\n".join(text), re.M))))
    known = {row["id"] for row in yaml.safe_load((path.parents[1] / "claims.yaml").read_text())}
    assert ids and ids <= known
    for run in runs:  # an A6000's day at most, of the model's own arithmetic
        assert Budget.parse(run.budget).unit == "flops" and run.finetune_seeds == 5
