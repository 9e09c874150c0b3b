"""Text is read and lists of runs are executed on Ray, to the same results as without; one cluster for all tests."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import lines, sentence, write_jsonl
from test_corpus_build import CONFIG, same
from test_lab import Lab, beginnings

from cramming_nb.corpus import get_corpus
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.files import lock
from cramming_nb.engine.jobs import Local, Ray

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.slow]  # starting Ray takes long


@pytest.fixture(scope="module")
def cluster():
    """Ray on two cores of this machine, as a script starts it in the background, where SIGINT is ignored.

    Gives the address at which other processes find it.
    """
    import ray

    former = signal.signal(signal.SIGINT, signal.SIG_IGN)  # its processes take this over
    os.environ["RAY_worker_niceness"] = "0"  # Ray's own 15 would starve its tasks beside other tests
    for attempt in range(4):
        try:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
            break
        except Exception as error:  # Ray waits half a minute for its processes: too short on a busy machine
            ray.shutdown()
            if attempt == 3 or "timed out during startup" not in str(error):
                raise
    signal.signal(signal.SIGINT, former)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    del os.environ["RAY_worker_niceness"]


@pytest.fixture
def lab(tiny, tmp_path) -> Lab:
    return Lab(tiny, tmp_path)


def test_ray_makes_the_same_rows(cluster, tmp_path):
    rng = random.Random(7)
    known = [sentence(rng) for _ in range(3000)]
    for name in "ab":  # several chunks each
        docs = [dict(text=" ".join(rng.choices(known, k=rng.randint(3, 60)))) for _ in range(2600)]
        write_jsonl(tmp_path / f"{name}.jsonl", docs)
    source = f"files:{tmp_path}/a.jsonl + files:{tmp_path}/b.jsonl"
    expected = get_corpus(source, CONFIG, tmp_path / "one", progress=False, engine=Local(1), keep=True)
    assert len(list((tmp_path / "one").glob("documents-*/text-*.arrow"))) == 2
    with Ray() as workers:
        assert list(workers.map(pow, [(2, n) for n in range(9)])) == [2**n for n in range(9)]
        assert list(workers.map(pow, [])) == []
    assert same(get_corpus(source, CONFIG, tmp_path / "ray", progress=False, engine="ray"), expected)
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"body": "no text here"}\n')
    with pytest.raises(UserError, match="columns: body"):
        get_corpus(f"files:{wrong}", CONFIG, tmp_path / "ray", progress=False, engine="ray")


def test_ray_executes_a_list(lab, cluster):
    shutil.copy(lab.tiny.text, lab.home)
    lab.write(dict(name="slow", source="files:tiny.jsonl", set={"optimizer.lr": 0.001}), dict(name="fast"))
    result = lab("--engine", "ray")
    assert result.code == 0, result.err
    assert "2 of 2 runs to do, 1 at a time" in result.err
    records = lab.records()
    assert [r.recipe["name"] for r in records] == ["fast", "slow"] and all(r.name in result.out for r in records)
    corpora = {path.parent.name for path in lab.tiny.cache.glob("corpus-*/manifest.json")}
    assert len(corpora) >= 2 and not list(lab.home.rglob("manifest.json"))  # in the user's cache folder
    before = {path: path.stat().st_mtime_ns for path in lab.runs.rglob("*") if path.is_file()}
    assert lab("--engine", "ray", "--jobs", "2").out == result.out
    assert {path: path.stat().st_mtime_ns for path in lab.runs.rglob("*") if path.is_file()} == before
    lab.write({}, dict(source="files:nothing-*.txt", name="lost"))
    result = lab("--engine", "ray", "--jobs", "2")
    (line,) = [line for line in lines(result.err) if line.startswith("cram: ")]
    assert result.code == 2 and "1 of 2 runs failed (lost-" in line and "nothing-*.txt" in line
    assert "tiny" in [r.recipe["name"] for r in lab.records()]  # the other one was finished


def test_a_stopped_lab_on_ray_saves_its_runs(lab, cluster):
    lab.write(dict(seeds=[0, 1], budget="20Mtok"))
    call = [sys.executable, "-m", "cramming_nb.app.cli", "lab", "list.yaml", "--engine", "ray", "--jobs", "2"]
    env = {**os.environ, "CRAM_CACHE": str(lab.tiny.cache), "RAY_ADDRESS": cluster}
    process = subprocess.Popen(call, cwd=lab.home, env=env, stderr=subprocess.PIPE, text=True)
    while not any(beginnings(path.parent) for path in lab.runs.glob("*/log.jsonl")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert lines(process.stderr.read())[-1] == "cram: stopped and saved; the same command goes on from here"
    assert not lab.records() and list(lab.runs.glob("*/checkpoints/step-*"))
    for folder in lab.runs.iterdir():
        with lock(folder):  # refused while another process is at work on the run
            pass
        states = [json.loads(path.read_text()) for path in folder.glob("checkpoints/step-*/state.json")]
        assert not any(state["finished"] for state in states)  # so the same command goes on
