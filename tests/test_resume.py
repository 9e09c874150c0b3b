"""Whatever stops a run, the same command goes on: to the same bits where the budget is in tokens."""

import json
import os
import random
import shutil
import signal
import stat
import time
from itertools import count
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from conftest import Killable, command, contents, hidden, pretraining
from safetensors.torch import load_file

from cramming_nb.engine.checkpoint import (
    CheckpointWriter,
    collect_signals,
    load_checkpoint,
    save_checkpoint,
    watch_signals,
)
from cramming_nb.engine.hooks import read_log
from cramming_nb.training import Learner

TOKENS = 20_000
BUDGET = f"{TOKENS}tok"


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*"))


def state(folder: Path) -> dict:
    return json.loads((newest(folder) / "state.json").read_text())


def learned(folder: Path) -> tuple[dict, list]:
    """What must come out the same: every tensor of the last checkpoint as bytes, and the held-out losses."""
    tensors = load_file(newest(folder) / "tensors.safetensors")
    assert state(folder)["finished"]
    curve = [{key: point[key] for key in ("fraction", "tokens", "heldout_loss")} for point in state(folder)["curve"]]
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}, curve


def progress(folder: Path) -> int:
    """Bytes of log: they grow as the run goes on."""
    log = folder / "log.jsonl"
    return log.stat().st_size if log.exists() else 0


@pytest.fixture(scope="session")
def options(tiny) -> list[str]:
    """A longer run, which saves itself every 4 % of its budget."""
    more = ["--set", "training.checkpoint_fraction=0.04", "training.validations=20"]
    return ["pretrain", *tiny.options(BUDGET), "--name", "run", *more]


@pytest.fixture(scope="session")
def undisturbed(tiny, options, tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("undisturbed")
    assert command(*options, cwd=home, cache=tiny.cache).code == 0
    return home / "runs" / "run"


def parts(folder: Path) -> list[Path]:
    """Checkpoints that are being written, or whose writing was cut short."""
    return list(folder.glob("checkpoints/.part-*"))


def kill_and_resume(times: int, home: Path, tiny, options) -> tuple[Path, int]:
    """Kill a run so many times, each time a little further on, then let it finish; also how many kills cut a save.

    Every other kill waits for a checkpoint that is being written; the rest come at random moments.
    """
    folder, rng, cut = home / "runs" / "run", random.Random(7), 0
    for number in range(times):
        stale, before, more = parts(folder), progress(folder), rng.randint(1, 2000 // times)
        run = Killable(*options, cwd=home, cache=tiny.cache)
        run.wait_for(lambda at=before + more: progress(folder) > at)
        if number % 2:
            run.wait_for(lambda old=stale: set(parts(folder)) - set(old), pause=0)
        assert run.send(signal.SIGKILL) == -signal.SIGKILL
        cut += bool(set(parts(folder)) - set(stale))
        assert not pretraining(folder)
    assert Killable(*options, cwd=home, cache=tiny.cache).end() == 0
    return folder, cut


@pytest.mark.parametrize("times", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_run_ends_in_the_same_bits(times, tiny, options, undisturbed, tmp_path):
    folder, cut = kill_and_resume(times, tmp_path, tiny, options)
    assert cut > 0
    assert not parts(folder)
    assert learned(folder) == learned(undisturbed)
    found = pretraining(folder)
    assert found["spent"]["tokens"] == pretraining(undisturbed)["spent"]["tokens"]


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_interrupted_run_saves_and_goes_on(signum, code, tiny, options, undisturbed, tmp_path):
    run, folder = Killable(*options, cwd=tmp_path, cache=tiny.cache), tmp_path / "runs" / "run"
    run.wait_for(lambda: progress(folder) > 200)
    assert run.send(signum) == code, run.output.read_text()
    assert "the same command goes on from here" in run.output.read_text()
    saved = state(folder)
    assert not saved["finished"] and 0 < saved["spent"]["tokens"] < TOKENS
    assert hidden(folder) == []
    assert command(*options, cwd=tmp_path, cache=tiny.cache).code == 0
    assert learned(folder) == learned(undisturbed)


def test_a_run_whose_folder_was_moved_says_so_and_goes_on_when_it_is_back(tiny, options, undisturbed, tmp_path):
    run, folder = Killable(*options, cwd=tmp_path, cache=tiny.cache), tmp_path / "runs" / "run"
    run.wait_for(lambda: progress(folder) > 200)
    folder.rename(tmp_path / "moved")
    assert run.send(signal.SIGINT) == 2, run.output.read_text()
    assert "runs/run is gone, moved or deleted" in run.output.read_text()
    assert not folder.exists()
    (tmp_path / "moved").rename(folder)
    assert command(*options, cwd=tmp_path, cache=tiny.cache).code == 0
    assert learned(folder) == learned(undisturbed)


@pytest.fixture(scope="module")
def short(tiny) -> list[str]:
    """A run of 32 steps, which saves itself after each third one."""
    return ["pretrain", *tiny.options("8192tok"), "--name", "run", "--set", "training.checkpoint_fraction=0.1"]


@pytest.fixture(scope="module")
def whole(tiny, short, tmp_path_factory) -> Path:
    """The short run, with nothing in its way."""
    home = tmp_path_factory.mktemp("whole")
    assert command(*short, cwd=home, cache=tiny.cache).code == 0
    return home / "runs" / "run"


@pytest.fixture(scope="module")
def halfway(tiny, short, tmp_path_factory) -> Path:
    """The short run stopped halfway, with two checkpoints."""
    home, really, updates = tmp_path_factory.mktemp("halfway"), Learner.update, count(1)

    def update(learner, t):
        really(learner, t)
        if next(updates) == 16:
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "update", update)
        assert command(*short, cwd=home, cache=tiny.cache).code == 143
    assert len(list(home.glob("runs/run/checkpoints/step-*"))) == 2
    return home


def test_second_process_is_refused(tiny, options, undisturbed, tmp_path):
    run = Killable(*options, cwd=tmp_path, cache=tiny.cache)
    run.wait_for(lambda: progress(tmp_path / "runs" / "run") > 0)
    os.kill(run.process.pid, signal.SIGSTOP)  # else it might be done before the other one asks
    for verb in ("pretrain", "run"):
        said = command(verb, *options[1:], cwd=tmp_path, cache=tiny.cache)
        assert said.code == 2 and f"another process ({run.process.pid} on " in said.err and "--name" in said.err
    os.kill(run.process.pid, signal.SIGCONT)
    assert run.end() == 0
    assert learned(tmp_path / "runs" / "run") == learned(undisturbed)


def test_second_signal_leaves_at_once():
    with pytest.raises(KeyboardInterrupt), watch_signals() as caught:
        signal.raise_signal(signal.SIGINT)
        assert caught == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        caught.append("not reached")
    assert caught == [signal.SIGINT]


def test_a_closed_terminal_is_a_signal_unless_it_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    with collect_signals(caught := []):
        signal.raise_signal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.default_int_handler)
        with collect_signals(caught):
            signal.raise_signal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)
    assert caught == [signal.SIGHUP]


def test_signals_are_collected_until_the_stack_is_closed():
    before, caught = signal.getsignal(signal.SIGTERM), []
    handlers = collect_signals(caught)
    signal.raise_signal(signal.SIGTERM)
    assert caught == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is before  # a second one ends the process
    handlers = collect_signals(caught)
    assert signal.getsignal(signal.SIGTERM) is not before
    handlers.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_the_main_thread_no_handler_is_changed():
    before, found = signal.getsignal(signal.SIGTERM), []

    def work():
        with collect_signals([]):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]


def test_what_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a job in the background
    try:
        with watch_signals() as caught:
            signal.raise_signal(signal.SIGINT)
        assert caught == [] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_shares_are_the_seconds_and_the_pause_is_not_counted(tiny, tmp_path):
    """A budget of time, spent in two sittings: the shares add up to it, and so do the two stretches of wall clock."""
    options, folder = ["pretrain", *tiny.options("4s"), "--name", "run"], tmp_path / "runs" / "run"
    options += ["--set", "training.checkpoint_fraction=0.2", "schedule.batch_size=24"]  # three micro-batches a step
    run = Killable(*options, cwd=tmp_path, cache=tiny.cache)
    run.wait_for(lambda: any(line["seconds"] > 1.5 for line in read_log(folder / "log.jsonl")))
    assert run.send(signal.SIGTERM) == 143
    saved = state(folder)
    assert 1.5 < saved["spent"]["seconds"] < 4 and sum(saved["shares"].values()) == pytest.approx(
        saved["spent"]["seconds"], rel=0.05
    )
    log = read_log(folder / "log.jsonl")
    last = max(line["seconds"] for line in log if "seconds" in line)
    lost = saved["shares"].get("lost", 0) + max(0, last - saved["spent"]["seconds"])
    time.sleep(1.5)  # the pause
    begun = time.perf_counter()
    assert command(*options, cwd=tmp_path, cache=tiny.cache).code == 0
    sitting = time.perf_counter() - begun
    found = pretraining(folder)
    seconds, shares = found["spent"]["seconds"], found["shares"]
    assert sum(shares.values()) == pytest.approx(seconds, rel=0.05)
    assert {"step", "data", "validation", "logging", "checkpoint"} <= set(shares)
    # The step under way is lost, and no more.
    assert shares.get("lost", 0) == pytest.approx(lost)
    assert saved["spent"]["tokens"] >= max(line["tokens"] for line in log)
    assert 4 <= seconds and seconds - saved["spent"]["seconds"] < sitting
    assert found["overshoot"] == pytest.approx(seconds - 4)


def test_batch_that_no_micro_batch_divides(tiny, undisturbed, options, tmp_path):
    """A signal may come in the middle of a step: its rows are neither dropped nor taken twice."""
    options = [*options, "schedule.batch_size=20", "schedule.batch_start=12", "schedule.batch_ramp=0.7"]
    run, folder = Killable(*options, cwd=tmp_path, cache=tiny.cache), tmp_path / "runs" / "run"
    (tmp_path / "whole").mkdir()
    assert command(*options, cwd=tmp_path / "whole", cache=tiny.cache).code == 0
    run.wait_for(lambda: not run.process.is_alive() or progress(folder) > 500)
    run.send(signal.SIGTERM)
    command(*options, cwd=tmp_path, cache=tiny.cache)
    assert learned(folder) == learned(tmp_path / "whole" / "runs" / "run")
    rows = state(folder)["cursor"]
    assert rows * 32 == state(folder)["spent"]["tokens"] and TOKENS <= rows * 32 < TOKENS + 8 * 32


def test_snapshots_stay(tiny, options, undisturbed, tmp_path):
    argv = [*options[: options.index("--set")], "--snapshots", "0.25", "0.5", *options[options.index("--set") :]]
    assert command(*argv, cwd=tmp_path, cache=tiny.cache).code == 0
    folder = tmp_path / "runs" / "run"
    spent = {path.name: load_checkpoint(path)[1]["spent"]["tokens"] for path in (folder / "snapshots").iterdir()}
    assert sorted(spent) == ["0.250", "0.500"]
    assert all(0 <= tokens - float(name) * TOKENS < 8 * 32 for name, tokens in spent.items())
    assert learned(folder) == learned(undisturbed)


def test_snapshot_that_comes_too_late_is_said(halfway, tiny, short, tmp_path):
    """Folders of fractions that agree to three digits differ; one that the run is past is named in one line."""
    shutil.copytree(halfway / "runs", tmp_path / "runs")
    at = short.index("--set")
    argv = [*short[:at], "--snapshots", "0.25", "0.75", "0.7501", *short[at:]]
    said = command(*argv, cwd=tmp_path, cache=tiny.cache)
    assert said.code == 0, said.err
    [line] = [line for line in (said.out + said.err).splitlines() if "no snapshot" in line]
    assert "no snapshot at 0.25:" in line and "0.75," not in line and "--name" in line
    found = sorted(path.name for path in (tmp_path / "runs" / "run" / "snapshots").iterdir())
    assert found == ["0.750", "0.7501"]


def test_a_finished_run_says_which_snapshots_it_lacks(undisturbed, tiny, options, tmp_path):
    shutil.copytree(undisturbed.parents[1] / "runs", tmp_path / "runs")
    at = options.index("--set")
    said = command(*options[:at], "--snapshots", "0.5", *options[at:], cwd=tmp_path, cache=tiny.cache)
    assert said.code == 0 and "no snapshot at 0.5:" in said.out, said.err
    assert not (tmp_path / "runs" / "run" / "snapshots").exists()


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE = {  # name: (file of the newest checkpoint, what happens to it)
    "tensors torn": ("tensors.safetensors", lambda data: data[: len(data) // 3]),
    "tensors empty": ("tensors.safetensors", lambda data: b""),
    "tensors flipped": ("tensors.safetensors", lambda data: flip(data, len(data) - 5)),
    "header flipped": ("tensors.safetensors", lambda data: flip(data, 30)),
    "state torn": ("state.json", lambda data: data[: len(data) // 2]),
    "state flipped": ("state.json", lambda data: flip(data, data.index(b"cursor") + len(b'cursor": '))),
    "tensors gone": ("tensors.safetensors", None),
    "state gone": ("state.json", None),
}


@pytest.mark.parametrize("what", DAMAGE.values(), ids=DAMAGE)
def test_damaged_checkpoint_is_skipped_for_the_one_before(what, halfway, tiny, short, whole, tmp_path):
    name, damage = what
    shutil.copytree(halfway / "runs", tmp_path / "runs")
    folder = tmp_path / "runs" / "run"
    path = newest(folder) / name
    path.unlink() if damage is None else path.write_bytes(damage(path.read_bytes()))
    said = command(*short, cwd=tmp_path, cache=tiny.cache)
    assert said.code == 0, said.err
    assert "skipped for the one before" in said.out + said.err
    assert learned(folder) == learned(whole)


def test_damaged_checkpoint_counts_for_nothing_when_its_step_is_saved_again(tmp_path):
    def save(step: int):
        save_checkpoint(tmp_path, step, {"weight": torch.full((3,), float(step))}, dict(step=step))

    for step in (100, 200):
        save(step)
    (tmp_path / "step-00000200" / "tensors.safetensors").write_bytes(b"damaged")
    save(200)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000100", "step-00000200+"]
    (tmp_path / "step-00000200+" / "tensors.safetensors").write_bytes(b"damaged, too")
    assert load_checkpoint(tmp_path)[1] == dict(step=100)


def test_saving_in_the_background_keeps_the_type_of_numbers(tmp_path):
    writer = CheckpointWriter(tmp_path)
    for step, numbers in enumerate((torch.tensor([1, 2, 3]), torch.tensor([1.5, 2.5, 3.5]))):
        writer.save(step, {"numbers": numbers}, dict(step=step))
        writer.wait()
        assert torch.equal(load_checkpoint(tmp_path)[0]["numbers"], numbers)


def test_a_run_goes_on_while_its_checkpoint_is_written(tmp_path, monkeypatch):
    disk = Event()
    monkeypatch.setattr("cramming_nb.engine.checkpoint.save_checkpoint", lambda *_: disk.wait(60))
    writer = CheckpointWriter(tmp_path)
    writer.save(1, {"weight": torch.ones(3)}, dict(step=1))
    assert writer.thread.is_alive()  # the disk is still at work
    disk.set()
    writer.wait()


def test_what_a_killed_save_left_is_cleared(halfway, tiny, short, whole, tmp_path):
    shutil.copytree(halfway / "runs", tmp_path / "runs")
    folder = tmp_path / "runs" / "run"
    (folder / "checkpoints" / ".part-4194305").mkdir()  # no process has this number
    (folder / "checkpoints" / ".part-4194305" / "tensors.safetensors").write_bytes(b"half")
    assert command(*short, cwd=tmp_path, cache=tiny.cache).code == 0
    assert hidden(folder) == []
    assert learned(folder) == learned(whole)


def test_lost_work_is_counted(halfway, tiny, short, whole, tmp_path):
    shutil.copytree(halfway / "runs", tmp_path / "runs")
    folder = tmp_path / "runs" / "run"
    with open(folder / "log.jsonl", "a") as log:  # it went on for seven seconds after its last checkpoint
        log.write(json.dumps(dict(seconds=state(folder)["spent"]["seconds"] + 7)) + "\n")
    assert command(*short, cwd=tmp_path, cache=tiny.cache).code == 0
    found = pretraining(folder)
    assert 7 <= found["shares"]["lost"] < 7.5 and found["spent"]["seconds"] > 7
    assert learned(folder) == learned(whole)


def test_torn_log_line_is_left_out(halfway, tiny, short, whole, tmp_path):
    shutil.copytree(halfway / "runs", tmp_path / "runs")
    folder = tmp_path / "runs" / "run"
    with open(folder / "log.jsonl", "a") as log:
        log.write('{"fraction": 0.3, "tok')
    assert command(*short, cwd=tmp_path, cache=tiny.cache).code == 0
    assert learned(folder) == learned(whole)
    torn = [line for line in (folder / "log.jsonl").read_text().splitlines() if not line.endswith("}")]
    assert torn == ['{"fraction": 0.3, "tok']


@pytest.mark.parametrize("signum, code", [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_fine_tuning_keeps_finished_tasks(signum, code, a_copy):
    for path in [a_copy.folder / "record.json", *(a_copy.folder / "glue").iterdir()]:
        path.unlink()
    argv = ["run", *a_copy.tiny.options(), "--name", "first"]
    run = Killable(*argv, cwd=a_copy.home, cache=a_copy.tiny.cache)
    run.wait_for(lambda: len(list(a_copy.folder.glob("glue/[!.]*"))) >= 2)
    assert run.send(signum) == code, run.output.read_text()
    done = {name: kept for name, kept in contents(a_copy.folder / "glue").items() if name[0] != "."}
    assert 2 <= len(done) < 10
    said = a_copy.command(*argv)
    assert said.code == 0
    after = contents(a_copy.folder / "glue")
    assert done.items() <= after.items()  # the seconds in them would not come out the same
    assert scores(said.out) == scores(a_copy.said.out)


def scores(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith(("| no pretraining", "| pretrained"))]


def test_killed_while_the_corpus_is_built(tiny, tmp_path):
    run = Killable("data", "build", *tiny.options()[:3], cwd=tmp_path, cache=tmp_path / "cache")
    run.wait_for(lambda: run.output.exists() and "reading text" in run.output.read_text())
    assert run.send(signal.SIGKILL) in (-9, 0)
    said = command("data", "build", *tiny.options()[:3], cwd=tmp_path, cache=tmp_path / "cache")
    assert said.code == 0 and len(list((tmp_path / "cache").glob("corpus-*/manifest.json"))) == 1


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077], ids=oct)
def test_files_of_a_checkpoint_have_the_permissions_of_new_files(umask, tmp_path):
    before = os.umask(umask)
    try:
        path = save_checkpoint(tmp_path / "checkpoints", 1, dict(weight=torch.ones(2)), dict(step=1))
    finally:
        os.umask(before)
    modes = {file.name: oct(stat.S_IMODE(file.stat().st_mode)) for file in path.iterdir()}
    assert modes == dict.fromkeys(("tensors.safetensors", "state.json"), oct(0o666 & ~umask))
