"""Compiling: when it is decided for, what happens where it fails, and that it changes nothing but the speed."""

import json
import shutil
import signal
from itertools import count

import pytest
import torch
from conftest import command, lines

from cramming_nb.budget import Budget
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.hardware import Device, Hardware
from cramming_nb.training import ModelLoss, Trainer, TrainingConfig, estimated_seconds, should_compile

BATCH = (torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(2), 0.0)


class PlainLoss(ModelLoss):
    """A loss that needs no model: the number of its calls."""

    calls = 0

    def plain(self, *batch):
        self.calls += 1
        return torch.tensor(float(self.calls))

    def step(self, graph: str = "training") -> torch.Tensor:
        return self.attempt(graph, lambda: self(*BATCH))


def broken(monkeypatch, error: Exception):
    """Let compiling succeed at first sight, and fail at the first call, as torch's does."""

    def fail(*batch):
        raise error

    monkeypatch.setattr(torch, "compile", lambda function, **options: fail)


def test_a_compiler_that_fails_is_done_without(monkeypatch, capsys):
    broken(monkeypatch, RuntimeError("backend='inductor' raised:\nno such header"))
    loss = PlainLoss(torch.nn.Linear(1, 1), compiled=True)
    assert [loss.step().item() for _ in range(2)] == [1.0, 2.0]
    assert not loss.compiled
    assert capsys.readouterr().out.splitlines() == [
        "compiling failed (backend='inductor' raised:); training goes on without it"
    ]


def test_a_compiler_that_must_work_is_an_error(monkeypatch):
    broken(monkeypatch, RuntimeError("no such header"))
    with pytest.raises(UserError, match="training.compile=always, but compiling failed: no such header"):
        PlainLoss(torch.nn.Linear(1, 1), compiled=True, required=True).step()


def test_too_little_memory_is_no_failure_of_the_compiler(monkeypatch):
    broken(monkeypatch, RuntimeError("Triton Error [CUDA]: out of memory"))
    loss = PlainLoss(torch.nn.Linear(1, 1), compiled=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        loss.step()
    assert loss.compiled


def test_an_error_after_a_compiled_step_worked_is_raised(monkeypatch):
    calls = []

    def fail_later(*batch):
        calls.append(batch)
        if len(calls) == 2:
            raise RuntimeError("device-side assert triggered")
        return torch.tensor(0.0)

    monkeypatch.setattr(torch, "compile", lambda function, **options: fail_later)
    loss = PlainLoss(torch.nn.Linear(1, 1), compiled=True)
    loss.step()
    with pytest.raises(RuntimeError, match="assert"):
        loss.step()


def test_each_graph_may_fail_at_its_first_use(monkeypatch):
    """Validation was compiled, and worked; the graph of training does not."""
    results = iter([torch.tensor(7.0), RuntimeError("no kernel for the backward pass")])

    def next_result(*batch):
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(torch, "compile", lambda function, **options: next_result)
    loss = PlainLoss(torch.nn.Linear(1, 1), compiled=True)
    assert [loss.step("validation").item(), loss.step("training").item()] == [7.0, 1.0]


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


def test_without_a_compiler_a_run_says_so_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Device, "compiler", lambda self: None)
    options = ["pretrain", *tiny.options("1ktok"), "--name", "run", "--set"]
    said = command(*options, "training.compile=always", cwd=tmp_path, cache=tiny.cache)
    assert said.code == 2 and "needs a C++ compiler" in said.err
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    monkeypatch.setattr(Hardware, "compiling_pays", lambda self, seconds: True)
    said = command(*options, "training.compile=auto", cwd=tmp_path, cache=tiny.cache)
    assert said.code == 0 and sum("C++ compiler" in line for line in lines(said.out + said.err)) == 1
    assert not json.loads((tmp_path / "runs" / "run" / "pretraining.json").read_text())["compiled"]


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
    really, updates = Trainer.update, count(1)

    def update(trainer, t):
        really(trainer, t)
        if next(updates) == 8:
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", update)
        assert command(*options, "--name", "compiled", *more, cwd=tmp_path, cache=tiny.cache).code == 143
    monkeypatch.setattr(Device, "compiler", lambda self: None)
    said = command(*options, "--name", "compiled", *more, cwd=tmp_path, cache=tiny.cache)
    assert said.code == 0, said.err
    eager, compiled = (
        json.loads((tmp_path / "runs" / name / "pretraining.json").read_text()) for name in ("eager", "compiled")
    )
    assert compiled["shares"]["compile"] > 1 and not compiled["compiled"]  # at the end it was not
    ours, theirs = ([point["heldout_loss"] for point in run["curve"]] for run in (compiled, eager))
    assert ours == pytest.approx(theirs, abs=2e-3)
