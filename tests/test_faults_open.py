"""Tests that fail today: each is a fault that the program does not meet yet. Copied beside tests/test_faults.py, they run."""

import json
import shutil

import pytest
import torch
from conftest import command, contents, lines
from test_faults import *  # noqa: F403
from test_faults import SET, STEPS, TOKENS, during_last_look, one_line, poison
from test_resume import learned

import cramming_nb.run
from cramming_nb.training import Trainer

LOG = {
    "byte": b'{"seconds": 1.0, "\xff": 2}\n',
    "number": b"1\n",
    "empty": b"{}\n",
    "null": b'{"seconds": null}\n',
}


@pytest.mark.parametrize("junk", LOG.values(), ids=LOG)
def test_a_damaged_line_of_the_log_does_not_end_a_run(junk, stopped, undisturbed):
    with open(stopped.folder / "log.jsonl", "ab") as log:
        log.write(junk)
    assert stopped.run().code == 0
    assert learned(stopped.folder) == learned(undisturbed)


def test_text_changed_between_stop_and_resume(stopped, undisturbed):
    """The first half of the run was on another text: it must not go on as though nothing had happened."""
    was = stopped.text.read_text()
    stopped.text.write_text(was.replace("garden", "harbor"))
    before = contents(stopped.folder)
    said = stopped.run()
    assert contents(stopped.folder) == before, said.out
    one_line(said, "tiny.jsonl")


def test_recipe_gone_does_not_let_another_run_in(stopped, undisturbed):
    (stopped.folder / "recipe.yaml").unlink()
    argv = ["pretrain", stopped.recipe, "--source", "files:tiny.jsonl", "--budget", f"{TOKENS}tok", "--seed", "1"]
    one_line(command(*argv, "--name", "run", "--set", *SET, cwd=stopped.home, cache=stopped.cache), "seed 0 -> 1")


def test_recipe_gone_and_another_size(stopped):
    (stopped.folder / "recipe.yaml").unlink()
    one_line(stopped.run("architecture.hidden_size=64"), "recipe.yaml")


def test_full_disk_under_way_does_not_end_the_run(disk, scene, undisturbed):
    """The log is written every second, checkpoints every ten minutes: a full disk is met by the log first."""
    scene.before("update", [11], lambda _: disk(100))
    scene.before("update", [14], lambda _: disk(0))
    said = scene.run()
    assert said.code == 0, said.err
    assert learned(scene.folder) == learned(undisturbed)


def test_full_disk_names_the_log(disk, scene):
    scene.before("update", [11], lambda _: disk(100))
    said = scene.run()
    disk(0)
    one_line(said, "log.jsonl")


MEMORY = {  # name: (rows that are asked for, rows that fit, from which call of the loss on)
    "first look": (8, 4, 1),
}


def memory_for(scene, rows: int, first: int):
    """Memory for no more than so many rows, also without gradients."""
    really, calls = Trainer.loss, iter(range(1, 1_000_000))

    def loss(trainer, ids, *args):
        if next(calls) >= first and len(ids) > rows:
            raise torch.OutOfMemoryError("out of memory")
        return really(trainer, ids, *args)

    scene.patch.setattr(Trainer, "loss", loss)


@pytest.mark.parametrize("what", MEMORY.values(), ids=MEMORY)
def test_memory_runs_out_in_a_look(what, scene, undisturbed):
    asked, rows, first = what
    memory_for(scene, rows, first)
    said = scene.run(f"training.micro_batch_size={asked}")
    assert said.code == 0, said.err
    whole = json.loads((undisturbed / "pretraining.json").read_text())
    assert scene.outcome()["heldout_loss"] == pytest.approx(whole["heldout_loss"], abs=1e-4)


@pytest.mark.parametrize("asked, first", [(1, 1), (4, 20)])
def test_memory_for_not_one_row(asked, first, scene):
    memory_for(scene, 0, first)
    one_line(scene.run(f"training.micro_batch_size={asked}"), "not one row of 32 tokens fits")


def test_loss_that_is_not_a_number_is_hopeless(scene):
    said = scene.run("optimizer.lr=1e30", "training.early_stop_loss=4")
    assert said.code == 0 and "given up" in said.out
    assert "NaN" not in (scene.folder / "pretraining.json").read_text()


@pytest.mark.parametrize("policy, words", [("stop", "a gradient was not finite"), ("rollback", "")])
def test_last_gradient_that_is_not_finite(policy, words, scene):
    scene.before("update", [STEPS], poison)
    said = scene.run(f"training.nonfinite={policy}")
    assert words in said.out and scene.outcome()["returns"] == (policy == "rollback")


def test_run_that_has_no_checkpoint_goes_back_to_its_beginning(scene):
    scene.before("update", [2], poison)
    said = scene.run("training.nonfinite=rollback")
    assert "given up" not in said.out and scene.outcome()["returns"] == 1


def test_return_to_a_checkpoint_while_the_disk_refuses(scene, spoil):
    spoil(lambda state: state["spent"]["steps"] == 9)
    scene.before("update", [11], poison)
    said = scene.run("training.nonfinite=rollback")
    assert said.code == 0, said.err
    assert scene.outcome()["returns"] == 1


def test_sigterm_in_the_last_look_ends_the_whole_job(scene):
    reached = []
    scene.patch.setattr(cramming_nb.run, "glue_run", lambda *a: reached.append(a) or [])
    during_last_look(scene)
    said = scene.run(verb="run")
    assert said.code == 143 and not reached
    assert lines(said.err)[-1] == "cram: stopped and saved; the same command goes on from here"


def test_shard_cut_off_under_way(new, tiny, tmp_path):
    """A mapped file that shrinks kills the process that reads it (SIGBUS, -7): no line is said."""
    import os

    from conftest import Killable

    home = shutil.copytree(new, tmp_path / "home")
    argv = ["pretrain", tiny.recipe, "--source", "files:tiny.jsonl", "--budget", "400ktok", "--name", "run", "--set"]
    run, log = Killable(*argv, *SET, cwd=home, cache=home / "cache"), home / "runs" / "run" / "log.jsonl"
    run.wait_for(lambda: log.exists() and log.stat().st_size > 2000)
    os.truncate(next((home / "cache").glob("corpus-*/train-*.bin")), 1000)
    assert run.end() == 2
    assert ".bin is damaged" in run.output.read_text()
