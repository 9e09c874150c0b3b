"""Compiling: when it is decided for, what happens where it fails, and that it changes nothing but the speed."""

import shutil
import signal
from itertools import count

import numpy as np
import pytest
import torch
from conftest import command, lines, pretraining

from cramming_nb.app.run import estimated_seconds, should_compile
from cramming_nb.architecture import MaskedLM
from cramming_nb.budget import Budget
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.hardware import Device, Hardware
from cramming_nb.objective import ObjectiveConfig
from cramming_nb.recipes import change, load_recipe
from cramming_nb.training import Learner, Predictor, TrainingConfig


def predictor(compiled: bool = True) -> Predictor:
    """One whose first use is what a test says."""
    return Predictor(torch.nn.Linear(1, 1), ObjectiveConfig(), 10, Hardware.detect(), compiled)


def fail(error: Exception):
    def first_use():
        raise error

    return first_use


def test_a_compiler_that_fails_is_done_without(capsys):
    found = predictor()
    found.compile(fail(RuntimeError("backend='inductor' raised:\nno such header")), "graph")
    assert not found.compiled
    assert capsys.readouterr().out.splitlines() == [
        "compiling failed (backend='inductor' raised:); training goes on without it"
    ]


@pytest.fixture
def by_block(tiny, monkeypatch) -> Predictor:
    """One that compiles block by block, by a compiler that changes nothing and counts its pieces."""
    pieces = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: pieces.append(function) or function)
    r = change(load_recipe(str(tiny.recipe)), {"architecture.num_layers": 3})
    model = MaskedLM(r.architecture).eval()
    found = Predictor(model, r.objective, r.architecture.vocab_size, Hardware.detect(), True, "block")
    found.pieces = pieces
    return found


def rows_of(predictor: Predictor) -> tuple:
    """Two sequences for a predictor."""
    ids = np.random.default_rng(0).integers(5, predictor.vocab_size, (2, 32))
    return ids, np.arange(2), np.zeros(2, dtype=np.int64)


def test_blocks_are_compiled_one_by_one(by_block):
    compiled = by_block(rows_of(by_block), 1, 32, ObjectiveConfig())[0]
    assert len(by_block.pieces) == 3 + 2  # the embedding, the blocks, the head
    by_block.compiled = False
    assert torch.equal(by_block(rows_of(by_block), 1, 32, ObjectiveConfig())[0], compiled)


def test_blocks_are_plain_again_after_a_compiler_that_fails(by_block):
    def first_use():
        by_block(rows_of(by_block), 1, 32, ObjectiveConfig())
        assert "forward" in vars(by_block.model.encoder.blocks[0])
        raise RuntimeError("no such header")

    by_block.compile(first_use, "graph")
    encoder = by_block.model.encoder
    assert not any({"forward", "embed"} & set(vars(part)) for part in (encoder, *encoder.blocks))


def test_a_compiler_that_must_work_is_an_error():
    with pytest.raises(UserError, match="training.compile=always, but compiling failed: no such header"):
        predictor().compile(fail(RuntimeError("no such header")), "graph", required=True)


def test_too_little_memory_is_no_failure_of_the_compiler():
    found = predictor()
    found.compile(fail(RuntimeError("Triton Error [CUDA]: out of memory")), "graph", required=True)
    assert found.compiled


def test_seconds_of_compiling_are_told_from_those_of_steps():
    found = predictor()
    found.compile(lambda: None, "first")
    assert [found.is_new(graph) for graph in ("first", "second", "second")] == [False, True, False]
    assert not predictor(compiled=False).is_new("any")


def test_a_run_whose_compiler_fails_learns_without_it(tiny, tmp_path, monkeypatch):
    """The gradients of the failed attempt are forgotten: the run has the bits of one that never tried."""

    def compiled(function, **options):
        return lambda *batch: (function(*batch)[0].backward(), fail(RuntimeError("no kernel"))())

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(Hardware, "compiling_pays", lambda self, seconds: True)
    monkeypatch.setattr(Device, "compiler", lambda self: "/usr/bin/g++")
    found = {}
    for name in ("auto", "never"):
        options = ["pretrain", *tiny.options("4step"), "--name", name, "--set", f"training.compile={name}"]
        said = command(*options, cwd=tmp_path, cache=tiny.cache)
        assert said.code == 0 and ("compiling failed (no kernel)" in said.out) == (name == "auto")
        found[name] = pretraining(tmp_path / "runs" / name)["heldout_loss"]
    assert found["auto"] == found["never"]


@pytest.mark.parametrize("budget, compiled", [("3m", False), ("24h", True), ("1Mtok", False), ("9Gtok", True)])
@pytest.mark.parametrize("unit", ["given", "flop", "step"])
def test_every_kind_of_budget_is_decided_by_the_time_it_takes(monkeypatch, budget, compiled, unit):
    monkeypatch.setattr(Device, "compiler", lambda self: "/usr/bin/g++")
    flops_per_token, tokens_per_step, rate = 600e6, 8192 * 128, 1e13
    parsed = Budget.parse(budget)
    if unit != "given" and parsed.unit == "tokens":  # the same work, told otherwise
        steps, flops = parsed.amount / tokens_per_step, parsed.amount * flops_per_token
        parsed = Budget.parse(f"{flops:.6e}flop".replace("e+", "e") if unit == "flop" else f"{steps:.6f}step")
    seconds = estimated_seconds(parsed, flops_per_token, tokens_per_step, lambda: rate)
    assert should_compile(TrainingConfig(), Hardware.detect(), seconds) == compiled
    assert should_compile(TrainingConfig(compile="always"), Hardware.detect(), seconds)
    assert not should_compile(TrainingConfig(compile="never"), Hardware.detect(), seconds)


def test_unknown_choices_are_refused(tiny, tmp_path):
    said = command(
        "pretrain", *tiny.options("1ktok"), "--set", "training.compile=maybe", cwd=tmp_path, cache=tiny.cache
    )
    assert said.code == 2 and "choose one of auto, always, never" in said.err


@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_CACHE_DIR", "TMPDIR"])
def test_a_path_with_blanks_is_told(variable, tmp_path, monkeypatch):
    """torch's own command for the compiler has no quotes."""
    monkeypatch.setattr(Device, "compiler", lambda self: "/usr/bin/g++")
    assert Device().compile_problem() == ""
    folder = tmp_path / "my files"
    folder.mkdir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv(variable, str(folder))
    with pytest.raises(UserError, match=f"training.compile=always: .*blanks in a path, as in {folder}"):
        should_compile(TrainingConfig(compile="always"), Hardware.detect(), 1e6)
    assert not should_compile(TrainingConfig(), Hardware.detect(), 1e6)


def test_without_a_compiler_a_run_says_so_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Device, "compiler", lambda self: None)
    options = ["pretrain", *tiny.options("1ktok"), "--name", "run", "--set"]
    said = command(*options, "training.compile=always", cwd=tmp_path, cache=tiny.cache)
    assert said.code == 2 and "needs a C++ compiler" in said.err
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    monkeypatch.setattr(Hardware, "compiling_pays", lambda self, seconds: True)
    said = command(*options, "training.compile=auto", cwd=tmp_path, cache=tiny.cache)
    assert said.code == 0 and sum("C++ compiler" in line for line in lines(said.out + said.err)) == 1
    assert not pretraining(tmp_path / "runs" / "run")["compiled"]


@pytest.mark.slow
@pytest.mark.skipif(Device().compiler() is None, reason="there is no C++ compiler")
def test_a_compiled_run_learns_the_same_and_resumes_without_its_compiler(tiny, tmp_path, monkeypatch):
    """One run is compiled and stopped half-way; then the compiler is gone, and the other half is not."""
    monkeypatch.setattr(Hardware, "compiling_pays", lambda self, seconds: True)
    more = ["--set", "training.dtype=float32", "schedule.batch_size=20", "training.checkpoint_fraction=1"]
    more.append("architecture.num_layers=1")  # half as much to compile
    options = ["pretrain", *tiny.options("16step")]
    eager = command(*options, "--name", "eager", *more, "training.compile=never", cwd=tmp_path, cache=tiny.cache)
    assert eager.code == 0, eager.err
    really, updates = Learner.update, count(1)

    def update(learner, t):
        really(learner, t)
        if next(updates) == 8:
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "update", update)
        assert command(*options, "--name", "compiled", *more, cwd=tmp_path, cache=tiny.cache).code == 143
    monkeypatch.setattr(Device, "compiler", lambda self: None)
    said = command(*options, "--name", "compiled", *more, cwd=tmp_path, cache=tiny.cache)
    assert said.code == 0, said.err
    eager, compiled = (
        pretraining(tmp_path / "runs" / name) for name in ("eager", "compiled")
    )
    assert compiled["shares"]["compile"] > 1 and not compiled["compiled"]  # at the end it was not
    ours, theirs = ([point["heldout_loss"] for point in run["curve"]] for run in (compiled, eager))
    assert ours == pytest.approx(theirs, abs=2e-3)
