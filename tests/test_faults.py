"""Faults other than those of test_resume, test_distribution and test_bad_input: what the user reads, and what is kept.

A fault is a function of a `Scene`. Every table says what is done to a run, what is read, and what mends it; each test
ends with the same command again, which must end in the bits of a run that nothing happened to.
"""

import json
import math
import os
import shutil
import signal
import time
from errno import ENOSPC, EROFS
from itertools import count
from pathlib import Path

import pytest
import torch
from conftest import command, contents, hidden, lines, pretraining
from safetensors.torch import load_file
from test_resume import flip, learned, newest, state

import cramming_nb.app.run
import cramming_nb.corpus
import cramming_nb.engine.checkpoint
import cramming_nb.training
from cramming_nb.app.run import corpus_of, load_run
from cramming_nb.engine.checkpoint import load_checkpoint
from cramming_nb.engine.distributed import name_lost_peers
from cramming_nb.engine.hooks import read_log
from cramming_nb.training import Learner, Predictor

STEPS, TOKENS = 24, 24 * 8 * 32  # of the whole run, which saves itself after each third step and logs each
SET = ["training.dtype=float32", "training.checkpoint_fraction=0.1"]


class Scene:
    """A run in a folder of its own, with its text and its corpus beside it, and what may happen to it."""

    def __init__(self, home: Path, recipe: Path, patch: pytest.MonkeyPatch):
        self.home, self.recipe, self.patch = home, recipe, patch
        self.folder, self.cache, self.text = home / "runs" / "run", home / "cache", home / "tiny.jsonl"

    def run(self, *more: str, budget: str = f"{TOKENS}tok", verb: str = "pretrain"):
        """The command that begins the run, and resumes it; `more` are changes to the recipe."""
        argv = [verb, self.recipe, "--source", "files:tiny.jsonl", "--budget", budget, "--name", "run"]
        return command(*argv, "--set", *SET, *more, cwd=self.home, cache=self.cache)

    def before(self, method: str, calls, act, owner=Learner):
        """Let something happen right before some calls, counted from 1, of a method."""
        really, number = getattr(owner, method), count(1)

        def wrapped(*args):
            if next(number) in calls:
                act(args[0])
            return really(*args)

        self.patch.setattr(owner, method, wrapped)

    def corpus(self) -> Path:
        (folder,) = self.cache.glob("corpus-*")
        return folder

    def shard(self, name: str) -> Path:
        return self.corpus() / f"{name}.npy"

    def outcome(self) -> dict:
        return pretraining(self.folder)


def terminate(*_):
    signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def new(tiny, tmp_path_factory) -> Path:
    """A folder with the text and its corpus, and no run."""
    home = tmp_path_factory.mktemp("new")
    shutil.copy2(tiny.text, home)
    with pytest.MonkeyPatch.context() as patch:
        assert Scene(home, tiny.recipe, patch).run(budget="1step").code == 0
    shutil.rmtree(home / "runs")
    return home


@pytest.fixture(scope="module")
def played(new, tiny, tmp_path_factory):
    """Runs a scene of its own, after something was done to it; gives back the scene and what was result."""

    def play(prepare=lambda scene: None):
        home = shutil.copytree(new, tmp_path_factory.mktemp("played") / "home")
        with pytest.MonkeyPatch.context() as patch:
            scene = Scene(home, tiny.recipe, patch)
            prepare(scene)
            return scene, scene.run()

    return play


@pytest.fixture(scope="module")
def halfway(played) -> Path:
    """A folder with a run that was stopped after half of its steps."""
    scene, result = played(lambda scene: scene.before("update", [STEPS // 2], terminate))
    assert result.code == 143 and state(scene.folder)["spent"]["steps"] == STEPS // 2
    assert lines(result.err) == ["cram: stopped and saved; the same command goes on from here"]
    return scene.home


@pytest.fixture(scope="module")
def undisturbed(played) -> Path:
    scene, result = played()
    assert result.code == 0
    return scene.folder


@pytest.fixture
def scene(new, tiny, tmp_path, monkeypatch) -> Scene:
    return Scene(shutil.copytree(new, tmp_path / "home"), tiny.recipe, monkeypatch)


@pytest.fixture
def stopped(halfway, tiny, tmp_path, monkeypatch) -> Scene:
    return Scene(shutil.copytree(halfway, tmp_path / "home"), tiny.recipe, monkeypatch)


def one_line(result, *words: str):
    """Exit code 2 and one line with all the words, beside progress bars and what the run says of itself."""
    (line,) = [line for line in lines(result.err) if line.startswith("cram: ")]
    assert result.code == 2 and "Traceback" not in result.err
    assert not [word for word in words if word not in line], line


def edit(path: Path, change):
    path.write_bytes(change(path.read_bytes()))


BETWEEN = {  # name: (harm between stop and resume, words of the line that refuses, what mends it)
    "shard gone": (
        lambda s: s.shard("train").unlink(),
        ["train.npy is damaged", "delete the folder", "run again"],
        lambda s: shutil.rmtree(s.corpus()),
    ),
    "shard flipped": (
        lambda s: edit(s.shard("train"), lambda data: flip(data, 5000)),
        ["train.npy is damaged", "delete the folder", "run again"],
        lambda s: shutil.rmtree(s.corpus()),
    ),
    "held-out rows flipped": (
        lambda s: edit(s.shard("heldout"), lambda data: flip(data, 100)),
        ["heldout.npy is damaged", "delete the folder", "run again"],
        lambda s: shutil.rmtree(s.corpus()),
    ),
    "corpus gone": (lambda s: shutil.rmtree(s.cache), [], None),
    "text gone": (lambda s: s.text.unlink(), [], None),
    "corpus and text gone": (
        lambda s: (shutil.rmtree(s.cache), s.text.rename(s.home / "elsewhere")),
        ["tiny.jsonl", "no such file"],
        lambda s: (s.home / "elsewhere").rename(s.text),
    ),
    "log gone": (lambda s: (s.folder / "log.jsonl").unlink(), [], None),
    "log of zeros": (lambda s: edit(s.folder / "log.jsonl", lambda data: data + bytes(4096)), [], None),
    "checkpoints gone": (lambda s: shutil.rmtree(s.folder / "checkpoints"), [], None),
    "lock gone": (lambda s: (s.folder / ".lock").unlink(), [], None),
    "run.json gone": (
        lambda s: (s.folder / "run.json").rename(s.home / "run.json"),
        ["run.json: cannot be read", "put it back"],
        lambda s: (s.home / "run.json").rename(s.folder / "run.json"),
    ),
}


@pytest.mark.parametrize("what", BETWEEN.values(), ids=BETWEEN)
def test_harm_between_stop_and_resume(what, stopped, undisturbed):
    harm, words, mend = what
    harm(stopped)
    before = contents(stopped.home)
    result = stopped.run()
    if words:
        one_line(result, *words)
        assert contents(stopped.home) == before  # nothing was trained on what is not what it was
        mend(stopped)
        result = stopped.run()
    assert result.code == 0, result.err
    assert learned(stopped.folder) == learned(undisturbed)


def test_every_change_is_named(stopped, undisturbed):
    """Recipe, source, budget and seed: a run that is half done goes on as it began, or not at all."""
    shutil.copy2(stopped.text, stopped.home / "other.jsonl")
    before = contents(stopped.home)
    argv = ["pretrain", stopped.recipe, "--source", "files:other.jsonl", "--budget", "1ktok", "--seed", "1"]
    more = ["--name", "run", "--set", *SET, "schedule.batch_size=16", "optimizer.lr=0.1"]
    result = command(*argv, *more, cwd=stopped.home, cache=stopped.cache)
    differences = ["schedule.batch_size 8 -> 16", "optimizer.lr 0.003 -> 0.1", "seed 0 -> 1"]
    differences += [f"budget '{TOKENS}tok' -> '1ktok'", "source 'files:tiny.jsonl' -> 'files:other.jsonl'"]
    one_line(result, *differences, "choose another --name")
    assert contents(stopped.home) == before
    assert stopped.run().code == 0
    assert learned(stopped.folder) == learned(undisturbed)


@pytest.fixture
def read_only(monkeypatch):
    """A disk on which, while the argument was true, no checkpoint may be begun."""
    really, refusing = os.mkdir, []

    def mkdir(path, *more, **options):
        if refusing and Path(path).name.startswith(".part-"):
            raise OSError(EROFS, os.strerror(EROFS), str(path))
        return really(path, *more, **options)

    monkeypatch.setattr("os.mkdir", mkdir)
    return lambda on: refusing.append(on) if on else refusing.clear()


@pytest.fixture(params=["full", "read-only"])
def spoil(request, scene, disk, read_only):
    """Lets saves for which something is true of the run's state meet a full disk, or one that may only be read."""
    really, limit = cramming_nb.engine.checkpoint.save_checkpoint, {"full": lambda on: disk(on and 100_000)}
    refuse = limit.get(request.param, read_only)

    def when(condition):
        def save(folder, step, tensors, state, keep):
            refuse(condition(state))
            try:
                return really(folder, step, tensors, state, keep)
            finally:
                refuse(False)

        scene.patch.setattr(cramming_nb.engine.checkpoint, "save_checkpoint", save)

    return when


def test_disk_refuses_a_checkpoint_on_the_way(spoil, scene, undisturbed):
    spoil(lambda state: state["spent"]["steps"] == 6)
    kept = []
    scene.before("update", [16], lambda _: kept.extend(path.name for path in scene.folder.glob("checkpoints/step-*")))
    result = scene.run()
    told = [line for line in lines(result.out) if "could not be written" in line]
    assert result.code == 0 and len(told) == 1, told
    assert "training goes on, the next one is tried at its time" in told[0]
    assert kept and min(kept) > "step-00000006"  # those that came after were saved
    assert hidden(scene.folder) == []
    assert learned(scene.folder) == learned(undisturbed)


def test_disk_refuses_the_last_checkpoint(spoil, scene, undisturbed):
    with pytest.MonkeyPatch.context() as scene.patch:
        spoil(lambda state: state["finished"])
        one_line(scene.run(), "make room, or choose a folder you may write to")
    assert hidden(scene.folder) == [] and not pretraining(scene.folder)
    assert STEPS - 6 <= load_checkpoint(scene.folder / "checkpoints")[1]["spent"]["steps"] < STEPS
    assert scene.run().code == 0
    assert learned(scene.folder) == learned(undisturbed)


def test_disk_refuses_the_checkpoint_of_a_run_that_is_stopped(spoil, scene, undisturbed):
    with pytest.MonkeyPatch.context() as scene.patch:
        spoil(lambda state: state["spent"]["steps"] == 14)
        scene.before("update", [14], terminate)
        one_line(scene.run(), "make room, or choose a folder you may write to")
    assert load_checkpoint(scene.folder / "checkpoints")[1]["spent"]["steps"] in (12, 13)
    assert scene.run().code == 0
    assert learned(scene.folder) == learned(undisturbed)


def test_disk_refuses_the_log(disk, scene, undisturbed):
    """A log line that cannot be written is no reason to end; the last checkpoint, which cannot be either, is."""
    scene.before("update", [14], lambda _: disk(100))
    result = scene.run()
    disk(0)
    assert result.code == 2 and "make room" in lines(result.err)[-1]
    assert 6 <= load_checkpoint(scene.folder / "checkpoints")[1]["spent"]["steps"] < 15
    assert scene.run().code == 0
    assert learned(scene.folder) == learned(undisturbed)


def test_disk_refuses_the_outcome(scene, undisturbed):
    really = cramming_nb.app.run.write_text

    def write_text(path, text):
        if path.name == "run.json" and "pretrained" in text:
            raise OSError(ENOSPC, os.strerror(ENOSPC), str(path))
        really(path, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cramming_nb.app.run, "write_text", write_text)
        one_line(scene.run(), "run.json", "No space left", "make room")
    before = contents(scene.folder / "checkpoints")
    assert scene.run().code == 0
    assert contents(scene.folder / "checkpoints") == before  # there was nothing left to train
    assert learned(scene.folder) == learned(undisturbed)


@pytest.mark.parametrize("room", [100, 20_000])
def test_disk_refuses_an_export(room, disk, a_copy):
    """The weights, or the first small file, find no room: one line, and the former export is as it was."""
    before = contents(a_copy.folder / "export")
    disk(room)
    result = a_copy.command("export", "first")
    disk(0)
    one_line(result, "make room, or choose a folder you may write to")
    assert contents(a_copy.folder / "export") == before and hidden(a_copy.home) == []
    assert a_copy.command("export", "first").code == 0


def test_log_deleted_under_way(scene, undisturbed):
    scene.before("update", [8], lambda _: (scene.folder / "log.jsonl").unlink())
    assert scene.run().code == 0
    assert learned(scene.folder) == learned(undisturbed)


def test_wall_clock_that_jumps_backwards(scene):
    """The run counts its own seconds: neither its end nor its bookings hear of the change."""
    really = time.time
    scene.before("update", [2], lambda _: scene.patch.setattr(time, "time", lambda: really() - 20))
    result = scene.run(budget="1s")
    assert result.code == 0 and time.time() < really() - 15
    found, told = scene.outcome(), [line["seconds"] for line in read_log(scene.folder / "log.jsonl")]
    assert told == sorted(told) and 1 <= found["spent"]["seconds"]
    assert sum(found["shares"].values()) == pytest.approx(found["spent"]["seconds"], abs=0.5)
    assert min(found["shares"].values()) >= 0


def poison(trainer):
    trainer.optimizer.masters[0].grad.view(-1)[7] = math.nan


def all_finite(folder: Path) -> bool:
    tensors = load_file(newest(folder) / "tensors.safetensors")
    return all(t.isfinite().all() for t in tensors.values() if t.is_floating_point())


def test_gradient_that_is_not_finite_is_skipped(scene):
    scene.before("update", [8, 9, STEPS], poison)
    assert scene.run("training.nonfinite=skip").code == 0
    found = scene.outcome()
    assert (found["skipped_steps"], found["stopped"]) == (3, "")
    assert found["spent"]["tokens"] == TOKENS and all_finite(scene.folder)
    assert found["heldout_loss"] < found["curve"][0]["heldout_loss"]


def test_gradient_that_is_not_finite_ends_the_run(scene):
    scene.before("update", [8], poison)
    result = scene.run("training.nonfinite=stop")
    assert result.code == 0 and "stopped early: a gradient was not finite" in result.out
    found = scene.outcome()
    assert found["spent"]["steps"] == 8 and found["skipped_steps"] == 1 and all_finite(scene.folder)
    assert scene.run("training.nonfinite=stop").out == result.out  # and stays ended


def memory_for(scene: Scene, rows: int, first: int = 1, looks: bool = False):
    """From some prediction on, there is memory for the gradients of so many rows, or for looks at so many too."""
    really, number = Predictor.__call__, count(1)

    def predict(predictor, batch, *args):
        if next(number) >= first and len(batch[0]) > rows and (looks or torch.is_grad_enabled()):
            raise torch.OutOfMemoryError("out of memory")
        return really(predictor, batch, *args)

    scene.patch.setattr(Predictor, "__call__", predict)


MEMORY = {  # name: (micro-batch that is asked for, rows there is memory for, from which call on, what is logged)
    "in the first step": (0, 4, 1, ["at 8 rows at a time; 4 from now on"]),
    "but for one row": (0, 1, 1, [f"at {rows} rows at a time; {rows // 2} from now on" for rows in (8, 4, 2)]),
    "later": (0, 4, 20, ["at 8 rows at a time; 4 from now on"]),
    "more than once": (8, 2, 20, ["at 8 rows at a time; 4 from now on", "at 4 rows at a time; 2 from now on"]),
    "in the middle of a step": (4, 2, 12, ["at 4 rows at a time; 2 from now on"]),
}


@pytest.mark.parametrize("what", MEMORY.values(), ids=MEMORY)
def test_memory_runs_out(what, scene, undisturbed):
    asked, rows, first, told = what
    memory_for(scene, rows, first)
    result = scene.run(f"training.micro_batch_size={asked}")
    assert result.code == 0, result.err
    assert [line for line in lines(result.out) if "memory" in line] == [f"memory ran out {words}" for words in told]
    found, whole = scene.outcome(), pretraining(undisturbed)
    assert found["micro_batch_size"] == rows
    for name in ("tokens", "heldout_loss"):
        assert [p[name] for p in found["curve"]] == pytest.approx([p[name] for p in whole["curve"]], abs=1e-4)


def test_not_one_row_fits(scene):
    memory_for(scene, 0)
    one_line(scene.run("training.micro_batch_size=0"), "not one row of 32 tokens fits", "smaller architecture")


def during_corpus(name: str):
    """SIGTERM right before a function of chapter 4 is called."""

    def fault(scene: Scene):
        shutil.rmtree(scene.cache)
        really = getattr(cramming_nb.corpus, name)
        scene.patch.setattr(cramming_nb.corpus, name, lambda *a, **k: (terminate(), really(*a, **k))[1])

    return fault


def during_probe(scene: Scene):
    scene.before("__call__", [2], terminate, Predictor)


def during_last_look(scene: Scene):
    scene.before("heldout_loss", [6], terminate, cramming_nb.training)


def during_last_save(scene: Scene):
    really = cramming_nb.engine.checkpoint.save_checkpoint

    def save(folder, step, tensors, state, keep):
        if state["finished"]:
            os.kill(os.getpid(), signal.SIGTERM)
        return really(folder, step, tensors, state, keep)

    scene.patch.setattr(cramming_nb.engine.checkpoint, "save_checkpoint", save)


SIGTERM = {  # name: (when the signal comes, exit codes)
    "tokenizer": (during_corpus("corpus_tokenizer"), [143]),
    "rows": (during_corpus("pack"), [143]),
    "probe documents": (during_corpus("save_corpus"), [143]),
    "probe": (during_probe, [143]),
    "last look": (during_last_look, [143]),
    "last save": (during_last_save, [143]),
}


@pytest.mark.parametrize("what", SIGTERM.values(), ids=SIGTERM)
def test_sigterm_at_any_time(what, scene, undisturbed):
    fault, codes = what
    with pytest.MonkeyPatch.context() as scene.patch:
        fault(scene)
        result = scene.run("training.micro_batch_size=0")
    assert result.code in codes and len([line for line in lines(result.err) if line.startswith("cram: ")]) <= 1
    assert hidden(scene.home) == []
    assert scene.run("training.micro_batch_size=0").code == 0
    assert learned(scene.folder) == learned(undisturbed)


JUNK = {
    "byte": b'{"seconds": 1.0, "\xff": 2}\n',
    "number": b"1\n",
    "empty": b"{}\n",
    "null": b'{"seconds": null}\n',
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_a_damaged_line_of_the_log_does_not_end_a_run(junk, stopped, undisturbed):
    with open(stopped.folder / "log.jsonl", "ab") as log:
        log.write(junk)
    assert stopped.run().code == 0
    assert learned(stopped.folder) == learned(undisturbed)


def test_text_changed_between_stop_and_resume(stopped, undisturbed):
    """The first half of the run was on another text: it must not go on as though nothing had happened."""
    was = stopped.text.read_text()
    stopped.text.write_text(was.replace("garden", "harbor"))
    corpus, before = stopped.corpus(), contents(stopped.folder)
    corpus.rename(stopped.home / "away")
    result = stopped.run()
    assert contents(stopped.folder) == before, result.out
    one_line(result, "tiny.jsonl", "put it back")
    (stopped.home / "away").rename(corpus)  # now there are two, and the run goes on with its own
    result = stopped.run()
    assert result.code == 0 and "goes on with the corpus it began with" in result.out
    assert learned(stopped.folder) == learned(undisturbed)


def test_of_two_corpora_with_the_same_sequences_a_run_takes_its_own(stopped):
    own = stopped.corpus()
    for name in ("corpus-0", "corpus-z"):
        shutil.copytree(own, stopped.cache / name)
    assert json.loads((stopped.folder / "run.json").read_text())["corpus"] == own.name
    run = load_run(stopped.folder, data_dir=stopped.cache)
    assert corpus_of(run).folder.name == own.name


def test_run_json_gone_does_not_let_another_run_in(stopped, undisturbed):
    (stopped.folder / "run.json").unlink()
    argv = ["pretrain", stopped.recipe, "--source", "files:tiny.jsonl", "--budget", f"{TOKENS}tok", "--seed", "1"]
    one_line(command(*argv, "--name", "run", "--set", *SET, cwd=stopped.home, cache=stopped.cache), "run.json")


def test_full_disk_under_way_does_not_end_the_run(disk, scene, undisturbed):
    """The log is written every second, checkpoints every ten minutes: a full disk is met by the log first."""
    scene.before("update", [11], lambda _: disk(100))
    scene.before("update", [14], lambda _: disk(0))
    result = scene.run()
    assert result.code == 0, result.err
    assert learned(scene.folder) == learned(undisturbed)


def test_memory_runs_out_in_a_look(scene, undisturbed):
    memory_for(scene, 4, looks=True)
    result = scene.run("training.micro_batch_size=8")
    assert result.code == 0, result.err
    whole = pretraining(undisturbed)
    assert scene.outcome()["heldout_loss"] == pytest.approx(whole["heldout_loss"], abs=1e-4)


@pytest.mark.parametrize("asked, first", [(1, 1), (4, 20)])
def test_memory_for_not_one_row(asked, first, scene):
    memory_for(scene, 0, first, looks=True)
    one_line(scene.run(f"training.micro_batch_size={asked}"), "not one row of 32 tokens fits")


def test_loss_that_is_not_a_number_is_hopeless(scene):
    result = scene.run("optimizer.lr=1e30", "training.early_stop_loss=4")
    assert result.code == 0 and "stopped early" in result.out
    assert "NaN" not in (scene.folder / "run.json").read_text()


@pytest.mark.parametrize("policy, stopped", [("stop", "a gradient was not finite"), ("skip", "")])
def test_last_gradient_that_is_not_finite(policy, stopped, scene):
    scene.before("update", [STEPS], poison)
    result = scene.run(f"training.nonfinite={policy}")
    assert stopped in result.out and scene.outcome()["stopped"] == stopped


def test_sigterm_in_the_last_look_ends_the_whole_job(scene):
    reached = []
    scene.patch.setattr(cramming_nb.app.run, "glue_run", lambda *a: reached.append(a) or [])
    during_last_look(scene)
    result = scene.run(verb="run")
    assert result.code == 143 and not reached
    assert lines(result.err)[-1] == "cram: stopped and saved; the same command goes on from here"


def test_process_lost_while_gradients_are_added_up(scene, undisturbed):
    """The last moment of a step: its rows are read, its update has not happened, and nothing of it may be kept."""

    def lose(_):
        with name_lost_peers():
            raise RuntimeError("connection closed by peer")

    with pytest.MonkeyPatch.context() as scene.patch:
        scene.before("update", [12], lose)
        one_line(scene.run(), "another process of this job has ended")
    tensors, kept = load_checkpoint(scene.folder / "checkpoints")
    assert kept["spent"]["steps"] == 11 and kept["cursor"] == 11 * 8
    assert "flat_grads" not in tensors
    assert scene.run().code == 0
    assert learned(scene.folder) == learned(undisturbed)
