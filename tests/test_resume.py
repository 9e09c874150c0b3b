"""Whatever stops a run, the same command goes on: to the same bits where the budget is in tokens."""

import json
import random
import shutil
import signal
from pathlib import Path

import pytest
from conftest import Killable, command, contents
from safetensors.torch import load_file

BUDGET = "40ktok"


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
    """A longer run, which saves itself every 2 % of its budget."""
    more = ["--set", "training.checkpoint_fraction=0.02", "training.validations=40"]
    return ["pretrain", *tiny.options(BUDGET), "--name", "run", *more]


@pytest.fixture(scope="session")
def undisturbed(tiny, options, tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("undisturbed")
    assert command(*options, cwd=home, cache=tiny.cache).code == 0
    return home / "runs" / "run"


def kill_and_resume(times: int, home: Path, tiny, options) -> Path:
    """Kill a run at random moments, so many times, each time a little further on; then let it finish."""
    folder, rng = home / "runs" / "run", random.Random(7)
    for _ in range(times):
        run, before, more = Killable(*options, cwd=home, cache=tiny.cache), progress(folder), rng.randint(1, 100)
        run.wait_for(lambda at=before + more: progress(folder) > at)
        assert run.send(signal.SIGKILL) == -signal.SIGKILL
        assert not (folder / "pretraining.json").exists()
    assert Killable(*options, cwd=home, cache=tiny.cache).end() == 0
    return folder


@pytest.mark.parametrize("times", [3, pytest.param(15, marks=pytest.mark.slow)])
def test_killed_run_ends_in_the_same_bits(times, tiny, options, undisturbed, tmp_path):
    folder = kill_and_resume(times, tmp_path, tiny, options)
    assert learned(folder) == learned(undisturbed)
    found = json.loads((folder / "pretraining.json").read_text())
    assert found["spent"]["tokens"] == json.loads((undisturbed / "pretraining.json").read_text())["spent"]["tokens"]


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_saves_and_goes_on(signum, code, tiny, options, undisturbed, tmp_path):
    run, folder = Killable(*options, cwd=tmp_path, cache=tiny.cache), tmp_path / "runs" / "run"
    run.wait_for(lambda: progress(folder) > 200)
    assert run.send(signum) == code
    assert "the same command goes on from here" in run.output.read_text()
    saved = state(folder)
    assert not saved["finished"] and 0 < saved["spent"]["tokens"] < 40_000
    assert not list(folder.rglob(".*"))
    assert command(*options, cwd=tmp_path, cache=tiny.cache).code == 0
    assert learned(folder) == learned(undisturbed)


@pytest.fixture(scope="module")
def halfway(tiny, options, tmp_path_factory) -> Path:
    """A run stopped halfway, with two checkpoints."""
    home = tmp_path_factory.mktemp("halfway")
    run = Killable(*options, cwd=home, cache=tiny.cache)
    run.wait_for(lambda: len(list(home.glob("runs/run/checkpoints/step-*"))) == 2)
    assert run.send(signal.SIGTERM) == 143
    return home


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
def test_damaged_checkpoint_is_skipped_for_the_one_before(what, halfway, tiny, options, undisturbed, tmp_path):
    name, damage = what
    shutil.copytree(halfway / "runs", tmp_path / "runs")
    folder = tmp_path / "runs" / "run"
    path = newest(folder) / name
    path.unlink() if damage is None else path.write_bytes(damage(path.read_bytes()))
    said = command(*options, cwd=tmp_path, cache=tiny.cache)
    assert said.code == 0, said.err
    assert "skipped for the one before" in said.out + said.err
    assert learned(folder) == learned(undisturbed)


def test_what_a_killed_save_left_is_cleared(halfway, tiny, options, undisturbed, tmp_path):
    shutil.copytree(halfway / "runs", tmp_path / "runs")
    folder = tmp_path / "runs" / "run"
    (folder / "checkpoints" / ".part-4194305").mkdir()  # no process has this number
    (folder / "checkpoints" / ".part-4194305" / "tensors.safetensors").write_bytes(b"half")
    assert command(*options, cwd=tmp_path, cache=tiny.cache).code == 0
    assert not list(folder.rglob(".*"))
    assert learned(folder) == learned(undisturbed)


def test_lost_work_is_counted(halfway, tiny, options, undisturbed, tmp_path):
    shutil.copytree(halfway / "runs", tmp_path / "runs")
    folder = tmp_path / "runs" / "run"
    with open(folder / "log.jsonl", "a") as log:  # it went on for seven seconds after its last checkpoint
        log.write(json.dumps(dict(seconds=state(folder)["spent"]["seconds"] + 7)) + "\n")
    assert command(*options, cwd=tmp_path, cache=tiny.cache).code == 0
    found = json.loads((folder / "pretraining.json").read_text())
    assert 7 <= found["shares"]["lost"] < 7.5 and found["spent"]["seconds"] > 7
    assert learned(folder) == learned(undisturbed)


def test_torn_log_line_is_left_out(halfway, tiny, options, undisturbed, tmp_path):
    shutil.copytree(halfway / "runs", tmp_path / "runs")
    folder = tmp_path / "runs" / "run"
    with open(folder / "log.jsonl", "a") as log:
        log.write('{"fraction": 0.3, "tok')
    assert command(*options, cwd=tmp_path, cache=tiny.cache).code == 0
    assert learned(folder) == learned(undisturbed)
    torn = [line for line in (folder / "log.jsonl").read_text().splitlines() if not line.endswith("}")]
    assert len(torn) <= 1


@pytest.mark.parametrize("signum, code", [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_fine_tuning_keeps_finished_tasks(signum, code, a_copy):
    for path in [a_copy.folder / "record.json", *(a_copy.folder / "glue").iterdir()]:
        path.unlink()
    argv = ["run", *a_copy.tiny.options(), "--name", "first"]
    run = Killable(*argv, cwd=a_copy.home, cache=a_copy.tiny.cache)
    run.wait_for(lambda: len(list(a_copy.folder.glob("glue/[!.]*"))) >= 2)
    assert run.send(signum) == code
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
