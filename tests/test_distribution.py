"""Several processes, one run: the same losses, the same stop, and nothing lost when one of them dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Killable, child, command, pretraining
from safetensors.torch import load_file
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cramming_nb.engine.hooks import read_log

MORE = ["--set", "training.dtype=float32", "schedule.batch_size=20", "training.checkpoint_fraction=0.2"]


def options(tiny, name: str, budget: str = "100step") -> list[str]:
    return ["pretrain", *tiny.options(budget), "--name", name, *MORE]


class Job:
    """`torchrun` with two processes, its output in a file."""

    def __init__(self, *argv, cwd: Path, cache: Path):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        env = {**os.environ, "CRAM_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        self.output = cwd / "job.txt"
        with open(self.output, "w") as file:
            call = [*torchrun, "-m", "cramming_nb.app.cli", *map(str, argv)]
            self.process = subprocess.Popen(call, cwd=cwd, env=env, stdout=file, stderr=subprocess.STDOUT)

    def end(self, seconds: float = 300) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"did not end: {self.output.read_text()}") from None


def rank_of_launched(argv: list[str], cwd: str, *where: str):
    """The body of one process of a job with an agent; it leaves its number in a file."""
    Path(cwd, f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
    child(argv, cwd, *where, mode="a")


def launch(*args):
    """The body of the agent."""
    job = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="job", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=0, start_method="fork",
    )  # fmt: skip
    elastic_launch(job, rank_of_launched)(*args)


class Launched(Killable):
    """The agent that `torchrun --standalone` is, with two processes: all forked from a server that has loaded torch."""

    body = staticmethod(launch)

    def pid(self, rank: int) -> int:
        """The process with this rank."""
        return int((self.output.parent / f"rank-{rank}").read_text())


class Ranks:
    """The processes that an agent would start, without one: nobody but the test signals them or sees them end."""

    def __init__(self, *argv, cwd: Path, cache: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.output = cwd / "job.txt"
        self.output.write_text("")
        self.processes = []
        for rank in (0, 1):
            env = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            call = [str(a) for a in argv], {name: str(value) for name, value in env.items()}
            args = (*call, str(cwd), str(cache), str(self.output))
            self.processes.append(Killable.server.Process(target=rank_of_job, args=args))
        for process in self.processes:
            process.start()

    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def send(self, signum: int):
        """Send a signal to every process, as `torchrun` does."""
        for process in self.processes:
            os.kill(process.pid, signum)

    def end(self, seconds: float = 300) -> list[int]:
        """The exit codes."""
        for process in self.processes:
            process.join(seconds)
            if process.exitcode is None:
                process.kill()
                raise AssertionError(f"did not end: {self.output.read_text()}")
        return [process.exitcode for process in self.processes]


def rank_of_job(argv: list[str], env: dict[str, str], *where: str):
    """The body of one process of a job."""
    os.environ.update(env)
    child(argv, *where, mode="a")


def outcome(folder: Path) -> dict:
    return pretraining(folder)


def told(folder: Path) -> int:
    return sum("loss" in line for line in read_log(folder / "log.jsonl"))


def same_curve(a: Path, b: Path):
    """Held-out losses and tokens of two runs agree."""
    a, b = outcome(a), outcome(b)
    assert [p["tokens"] for p in a["curve"]] == [p["tokens"] for p in b["curve"]]
    assert [p["heldout_loss"] for p in a["curve"]] == pytest.approx([p["heldout_loss"] for p in b["curve"]], abs=1e-4)
    assert (a["spent"]["steps"], a["spent"]["tokens"]) == (b["spent"]["steps"], b["spent"]["tokens"])


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("alone")
    assert command(*options(tiny, "run"), cwd=home, cache=tiny.cache).code == 0
    return home / "runs" / "run"


def test_two_processes_have_the_losses_of_one(tiny, alone, tmp_path):
    job = Job(*options(tiny, "run"), cwd=tmp_path, cache=tiny.cache)
    assert job.end() == 0, job.output.read_text()
    same_curve(tmp_path / "runs" / "run", alone)
    assert outcome(tmp_path / "runs" / "run")["devices"] == 2
    assert job.output.read_text().count("held-out loss") == 1  # the first process speaks for all
    assert "destroy_process_group" not in job.output.read_text()  # torch warns of groups that are left open
    losses = [
        [line["loss"] for line in read_log(f / "log.jsonl") if "loss" in line]
        for f in (tmp_path / "runs" / "run", alone)
    ]
    assert losses[0][-1] == pytest.approx(losses[1][-1], abs=0.5)


def test_gradients_may_travel_in_half_the_bytes(tiny, alone, tmp_path):
    """In bfloat16 the losses are those of one process within its rounding, and not to the last digit."""
    asked = [*options(tiny, "run", "40step"), "training.gradient_exchange=bfloat16"]
    job = Ranks(*asked, cwd=tmp_path, cache=tiny.cache)
    assert job.end() == [0, 0], job.output.read_text()
    found = outcome(tmp_path / "runs" / "run")
    exact = command(*options(tiny, "exact", "40step"), cwd=tmp_path, cache=tiny.cache)
    assert exact.code == 0
    ours, theirs = found["heldout_loss"], outcome(tmp_path / "runs" / "exact")["heldout_loss"]
    assert 0 < abs(ours - theirs) < 0.05


def test_each_process_keeps_random_numbers_of_its_own(tiny, tmp_path):
    """With dropout on, a job of two processes that was stopped ends like one that was not."""
    more = [*options(tiny, "run", "40step"), "training.dropout=true", "schedule.batch_ramp=0"]
    states = {}
    for name in ("whole", "stopped"):
        home = tmp_path / name
        home.mkdir()
        if name == "stopped":
            job = Ranks(*more, cwd=home, cache=tiny.cache)
            while told(home / "runs" / "run") < 12:
                assert job.is_alive(), job.output.read_text()
                time.sleep(0.02)
            job.send(signal.SIGTERM)
            assert job.end() == [128 + signal.SIGTERM] * 2
            assert not pretraining(home / "runs" / "run")
        job = Ranks(*more, cwd=home, cache=tiny.cache)
        assert job.end() == [0, 0], job.output.read_text()
        states[name] = load_file(max((home / "runs" / "run" / "checkpoints").glob("step-*")) / "tensors.safetensors")
    one, two = states["whole"]["random.cpu.0"], states["whole"]["random.cpu.1"]
    assert not one.equal(two)
    weights = [name for name in states["whole"] if name.startswith("master.")]
    assert weights and all(states["whole"][name].equal(states["stopped"][name]) for name in weights)


def test_dead_process_ends_the_job_and_loses_nothing(tiny, alone, tmp_path):
    """Killed in the middle; what the first process had is saved, and the same command goes on from there."""
    folder = tmp_path / "runs" / "run"
    job = Launched(*options(tiny, "run"), cwd=tmp_path, cache=tiny.cache)
    job.wait_for(lambda: told(folder) >= 20)
    before = told(folder)
    os.kill(job.pid(1), signal.SIGKILL)
    assert job.end() != 0
    said = job.output.read_text().count("another process of this job has ended")
    assert said <= 1 and "Traceback" not in job.output.read_text()  # the agent may end it before it speaks
    kept = max((folder / "checkpoints").glob("step-*"))
    saved = json.loads((kept / "state.json").read_text())
    assert saved["spent"]["steps"] >= before - 1 and saved["processes"] == 2
    job = Ranks(*options(tiny, "run"), cwd=tmp_path, cache=tiny.cache)
    assert job.end() == [0, 0], job.output.read_text()
    same_curve(folder, alone)
    assert outcome(folder)["devices"] == 2


def test_a_run_keeps_its_number_of_processes(tiny, alone, tmp_path):
    """Begun by two and stopped, it refuses one process in one line, touches nothing, and goes on with two."""
    folder = tmp_path / "runs" / "run"
    job = Ranks(*options(tiny, "run"), cwd=tmp_path, cache=tiny.cache)
    while told(folder) < 20:
        assert job.is_alive(), job.output.read_text()
        time.sleep(0.02)
    job.send(signal.SIGTERM)
    assert job.end() == [128 + signal.SIGTERM] * 2
    kept = {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()}
    refused = command(*options(tiny, "run"), cwd=tmp_path, cache=tiny.cache)
    assert refused.code == 2 and len(refused.err.strip().splitlines()) == 1, refused.err
    assert "started with 2 processes, not 1" in refused.err and "torchrun --nproc-per-node 2" in refused.err
    assert kept == {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()}
    job = Ranks(*options(tiny, "run"), cwd=tmp_path, cache=tiny.cache)
    assert job.end() == [0, 0], job.output.read_text()
    same_curve(folder, alone)
    assert outcome(folder)["devices"] == 2


def test_the_whole_job_is_for_one_process(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = command("run", *tiny.options(), cwd=tmp_path, cache=tiny.cache)
    assert said.code == 2 and "torchrun" in said.err and not (tmp_path / "runs").exists()
