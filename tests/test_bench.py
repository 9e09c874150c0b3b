"""The bench: every implementation has the size that was asked for, and only one of them is in memory."""

import gc
import json
import os
import weakref
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from types import SimpleNamespace

import pytest
import torch

from cramming_nb import bench
from cramming_nb.budget import UserError
from cramming_nb.hardware import Device, Hardware
from cramming_nb.recipes import RECIPES, Recipe, change, flat

TINY = replace(
    bench.SIZES["small"][0], vocab_size=512, hidden_size=32, num_layers=2, num_heads=2, ffn_size=64, max_length=32
)


@pytest.mark.parametrize("length", [64, 128, 256])
def test_our_step_has_the_size_that_was_asked_for(monkeypatch, length):
    seen = []
    monkeypatch.setattr(bench, "recipe_steps", lambda recipe, *_, **__: seen.append(recipe.architecture))
    small = replace(bench.SIZES["small"][0], max_length=length)
    bench.our_step(small, 8, Hardware.detect())
    assert seen == [small]


@pytest.mark.parametrize("changes", [{"corpus.seq_length": 64}, {"architecture.max_length": 512}])
def test_a_recipe_is_timed_on_rows_of_its_own_length(monkeypatch, changes):
    seen = []
    monkeypatch.setattr(
        bench, "Trainer", lambda corpus, *_, **__: seen.append(corpus.rows.shape) or SimpleNamespace(micro_batch_size=8)
    )
    recipe = change(RECIPES["pocket"], changes)
    bench.recipe_steps(recipe, Hardware.detect())
    assert seen == [(recipe.schedule.batch_size, recipe.corpus.seq_length)]


def test_a_recipe_without_a_micro_batch_gets_the_largest_of_the_device():
    recipe = change(RECIPES["pocket"], {"training.micro_batch_size": 0, "schedule.batch_size": 80})
    steps = bench.recipe_steps(recipe, replace(Hardware.detect(), device=TwoRows()))
    trainer = next(cell.cell_contents for cell in steps.__closure__ if isinstance(cell.cell_contents, bench.Trainer))
    assert trainer.micro_batch_size == 2


class TwoRows(Device):
    """A device with room for two sequences."""

    most_rows = 2


@pytest.mark.parametrize("name", [*bench.BASELINES])
def test_a_baseline_has_our_shape_and_changes_its_weights(name):
    if name != "reference":
        pytest.importorskip("transformers")
    make, choices = bench.BASELINES[name]
    for choice in choices:
        step = make(TINY, 4, Hardware.detect(), False, *choice)
        model = model_of(step)
        before = [p.detach().clone() for p in model.parameters()]
        sizes = {tuple(p.shape) for p in model.parameters()}
        assert (TINY.vocab_size, TINY.hidden_size) in sizes
        step()
        changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert sum(changed) > 0.9 * len(changed)


def model_of(step) -> torch.nn.Module:
    """The model that a step trains."""
    return next(c.cell_contents for c in step.__closure__ if isinstance(c.cell_contents, torch.nn.Module))


def test_modernbert_has_the_weights_of_our_blocks():
    pytest.importorskip("transformers")
    ours = bench.MaskedLM(TINY, "explicit")
    theirs = model_of(bench.modernbert_step(TINY, 4, Hardware.detect(), False))
    extra = TINY.hidden_size**2 + 2 * TINY.hidden_size + TINY.vocab_size  # its head, and the bias of its decoder
    numbers = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    assert numbers[1] == pytest.approx(numbers[0] + extra, rel=0.01)


class Pipe:
    """The end of a pipe that asks a few times, and looks at what is alive when it gets an answer."""

    def __init__(self, asks: int):
        self.asks, self.models, self.answers, self.alive = asks, [], [], []

    def recv(self) -> bool:
        self.asks -= 1
        return self.asks >= 0

    def send(self, answer):
        gc.collect()
        self.answers.append(answer)
        self.alive.append(sum(model() is not None for model in self.models))


@pytest.mark.parametrize("keep, builds, alive", [(True, 1, 1), (False, 3, 0)])
def test_a_model_is_built_on_each_turn_and_freed_after_it(keep, builds, alive):
    pipe = Pipe(3)

    def make():
        step = bench.our_step(TINY, 4, Hardware.detect(), compiled=False)
        trainer = next(c.cell_contents for c in step.__closure__ if isinstance(c.cell_contents, bench.Trainer))
        pipe.models.append(weakref.ref(trainer.model))
        return step

    bench.serve(pipe, make, (), seconds=0.001, keep=keep)
    assert all(seconds > 0 and memory > 0 for seconds, memory in pipe.answers)
    assert len(pipe.models) == builds and pipe.alive == [alive] * 3


@pytest.mark.slow
@pytest.mark.skipif(Device().compiler() is None, reason="there is no C++ compiler")
def test_a_compiled_model_is_freed_as_well():
    pipe = Pipe(2)

    def make():
        step = bench.our_step(TINY, 4, Hardware.detect(), compiled=True)
        trainer = next(c.cell_contents for c in step.__closure__ if isinstance(c.cell_contents, bench.Trainer))
        pipe.models.append(weakref.ref(trainer.model))
        return step

    bench.serve(pipe, make, (), seconds=0.001, keep=False)
    assert len(pipe.models) == 2 and pipe.alive == [0, 0]


@pytest.mark.parametrize("watch_children", [False, True])
def test_an_implementation_finds_nothing_that_another_has_done(watch_children):
    def make():
        done = [torch.get_default_dtype() == torch.float64, hasattr(torch, "left_behind")]
        torch.set_default_dtype(torch.float64)
        torch.left_behind = True
        if any(done):
            raise RuntimeError("another was here")
        return lambda: None

    with bench.Implementation(make) as first, bench.Implementation(make, watch_children=watch_children) as second:
        assert first() >= 0 and second() >= 0
        assert len({first.process.pid, second.process.pid, os.getpid()}) == 3
        assert isinstance(second.process, SpawnProcess) or not watch_children  # shares no pages with a server
    assert not hasattr(torch, "left_behind")


def test_lack_of_memory_is_told_as_such():
    def make():
        raise RuntimeError("CUDA error: out of memory")

    pipe = Pipe(1)
    bench.serve(pipe, make, (), seconds=0.0, keep=True)
    assert pipe.answers == [(None, "out of memory: RuntimeError: CUDA error: out of memory")]


class Turn:
    """An implementation without a process: takes its seconds from a list, and knows whether it was ended."""

    started = []

    def __init__(self, make, *arguments, seconds, keep):
        self.make, self.arguments, self.keep, self.memory, self.ended = make, arguments, keep, 1, False
        Turn.started.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ended = True

    def __call__(self) -> float:
        name = self.arguments[4] if len(self.arguments) > 4 else self.make.__name__
        if name in Turn.broken:
            raise UserError("an implementation could not work (out of memory)")
        return dict(our_step=1.0, reference_step=4.0, eager=2.0, sdpa=3.0)[name]


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.setattr(bench, "Implementation", Turn)
    monkeypatch.setattr(bench, "matrix_rate", lambda hardware: 1e12)
    monkeypatch.setattr(bench, "profile_of", lambda *_, **__: {"matrix products": 0.75, "the rest": 0.25})
    Turn.started, Turn.broken = [], set()
    return Turn


@pytest.mark.parametrize("size, keep", [("small", True), ("full", False)])
def test_transformers_go_on_with_their_faster_attention(turns, size, keep):
    pytest.importorskip("transformers")
    result = bench.bench_train(size, rounds=2, rows=4, progress=False)
    assert result["attention"] == dict(transformers="eager", modernbert="eager")
    assert result["ratio"] == dict(reference=4.0, transformers=2.0, modernbert=2.0)
    assert all(turn.keep == keep for turn in turns.started)
    assert result["matrix_rates"] == [1e12, 1e12] and result["failed"] == {}
    assert json.loads(json.dumps(result)) == result
    assert "its faster attention: eager" in bench.table(result)
    assert "where our time goes: matrix products 75%, the rest 25%" in bench.table(result)


def test_a_baseline_that_cannot_work_is_left_out_and_named(turns):
    pytest.importorskip("transformers")
    turns.broken |= {"reference_step", "eager"}
    result = bench.bench_train("small", rounds=1, rows=4, progress=False)
    assert list(result["ratio"]) == ["transformers", "modernbert"]
    assert result["attention"] == dict(transformers="sdpa", modernbert="sdpa")
    assert "reference is left out" in bench.table(result) and "out of memory" in result["failed"]["reference"]
    turns.broken.add("our_step")
    with pytest.raises(UserError, match="out of memory"):
        bench.bench_train("small", rounds=1, rows=4, progress=False)


def test_where_time_goes_is_measured_in_a_process_of_its_own():
    shares = bench.profile_of(bench.our_step, TINY, 4, Hardware.detect(), False, calls=2)
    assert list(shares) == ["matrix products", "compiled loops", "optimizer", "the rest"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["matrix products"] > 0 and shares["optimizer"] > 0 and shares["compiled loops"] == 0


def test_more_products_take_a_larger_share_of_the_time():
    few, many = (torch.ones(size, size) for size in (8, 512))
    shares = [bench.time_by_kind(lambda x=x: [(x @ x, x + 1) for _ in range(20)]) for x in (few, many)]
    assert shares[0]["matrix products"] < shares[1]["matrix products"]


def test_utilisation_is_by_the_rate_of_the_same_round():
    found = bench.mfu_of([1.0, 2.0, 1.0], [1e12, 5e11, 1e12], 8, TINY, "NVIDIA H200")
    assert found["mfu_range"][0] == pytest.approx(found["mfu_range"][1])  # rate and step slow down together
    assert found["mfu"] == pytest.approx(found["mfu_range"][0])
    assert found["mfu_datasheet"] == pytest.approx(found["mfu"] / 989.4)


def test_fields_without_matter_are_those_of_a_recipe_and_no_part_of_its_pace():
    assert flat(Recipe()).keys() >= bench.NO_MATTER
    changes = {"corpus.sample": 10**6, "optimizer.lr": 0.1, "training.validations": 3, "protocol.epochs": 9}
    assert bench.pace(change(RECIPES["pocket"], changes)) == bench.pace(RECIPES["pocket"])
    for name, value in {"training.dropout": True, "corpus.seq_length": 64, "optimizer.name": "muon"}.items():
        assert bench.pace(change(RECIPES["pocket"], {name: value}))[name] == value


def test_both_fine_tune_by_the_protocol_that_is_asked_for(monkeypatch):
    """Started are several of ours and one reference, each with the recipe's protocol; the result says how pairs are read."""
    started, protocol = [], RECIPES["pocket"].protocol

    class Noted:
        def __init__(self, make, *arguments):
            started.append(arguments)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __call__(self):
            return 1.0

    monkeypatch.setattr(bench, "Implementation", Noted)
    monkeypatch.setattr(bench, "profile_of", lambda make, *arguments, calls: started.append(arguments))
    task = SimpleNamespace(train=[()] * 32)
    found = bench.bench_glue(TINY, "tokenizer.json", dict(one=task), rounds=1, progress=False, protocol=protocol)
    assert len(started) >= 3 and all(protocol in arguments for arguments in started)
    assert found["pairs"] == protocol.pairs == "apart"
