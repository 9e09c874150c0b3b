"""The bench: every implementation has the size that was asked for, and each turn a process of its own."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import command

from cramming_nb.app.run import load_run
from cramming_nb.architecture import Architecture, MaskedLM
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.hardware import Device, Hardware
from cramming_nb.glue import load_glue
from cramming_nb.lab import bench
from cramming_nb.lab.baselines import modernbert_step
from cramming_nb.recipes import RECIPES, Recipe, change, diff, flat

RATES = Path(__file__).resolve().parents[1] / "records" / "lab" / "rates.json"
TINY = Architecture(vocab_size=512, hidden_size=32, num_layers=2, num_heads=2, ffn_size=64, max_length=32)


@pytest.mark.parametrize("size", bench.SIZES)
def test_our_two_steps_differ_by_what_our_recipe_changed_and_have_one_size(size):
    paper, ours = (bench.of_size(name, size, 8) for name in ("crammed-v2", "crammed-nb"))
    changed = {name for name, *_ in diff(paper, ours) if name.startswith("architecture.")}
    assert changed == {"architecture.position", "architecture.neighbor_mixing"}
    assert ours.architecture == bench.of_size("sprint", size, 8).architecture
    for recipe in (paper, ours):
        assert (recipe.schedule.batch_size, recipe.training.micro_batch_size) == (8, 8)
        assert recipe.architecture.num_layers == dict(small=4, full=16)[size]


@pytest.mark.parametrize("changes", [{"corpus.seq_length": 64}, {"architecture.max_length": 512}])
def test_a_recipe_is_timed_on_rows_of_its_own_length(monkeypatch, changes):
    seen = []
    monkeypatch.setattr(
        bench,
        "Learner",
        lambda corpus, *_, **__: (
            seen.append(corpus.rows.shape) or SimpleNamespace(gradients=SimpleNamespace(micro_batch_size=8))
        ),
    )
    recipe = change(RECIPES["pocket"], changes)
    bench.recipe_steps(recipe, Hardware.detect())
    assert seen == [(recipe.schedule.batch_size, recipe.corpus.seq_length)]


def test_a_recipe_without_a_micro_batch_gets_the_largest_of_the_device():
    recipe = change(RECIPES["pocket"], {"training.micro_batch_size": 0, "schedule.batch_size": 80})
    steps = bench.recipe_steps(recipe, replace(Hardware.detect(), device=TwoRows()))
    learner = next(cell.cell_contents for cell in steps.__closure__ if isinstance(cell.cell_contents, bench.Learner))
    assert learner.gradients.micro_batch_size == 2


class TwoRows(Device):
    """A device with room for two sequences."""

    most_rows = 2


@pytest.mark.parametrize("name", bench.STEPS)
def test_a_baseline_has_our_shape_and_changes_its_weights(name):
    if name != "reference":
        pytest.importorskip("transformers")
    step = bench.STEPS[name](TINY, 4, Hardware.detect(), False)
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
    ours = MaskedLM(TINY, "explicit")
    theirs = model_of(modernbert_step(TINY, 4, Hardware.detect(), False))
    extra = TINY.hidden_size**2 + 2 * TINY.hidden_size + TINY.vocab_size  # its head, and the bias of its decoder
    numbers = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    assert numbers[1] == pytest.approx(numbers[0] + extra, rel=0.01)


def test_implementations_take_turns_and_the_warm_up_does_not_count():
    calls = []

    def note(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = bench.interleave({name: partial(note, name) for name in "AB"}, rounds=2)
    assert "".join(calls) == "ABABAB" and found == dict(A=[3, 5], B=[4, 6])


def test_a_speed_up_is_that_of_medians_and_its_range_that_of_rounds():
    found = bench.speedups(dict(ours=[1, 2, 1], baseline=[4, 4, 4]), amount=100, unit="tokens")
    assert found["ratio"] == dict(baseline=4.0) and found["ratio_range"] == dict(baseline=[2.0, 4.0])
    assert found["rate"] == dict(ours=100.0, baseline=25.0)


@pytest.mark.parametrize("watch_children", [False, True])
def test_a_turn_finds_nothing_that_another_has_done(watch_children):
    def make():
        if torch.get_default_dtype() == torch.float64 or hasattr(torch, "left_behind"):
            raise RuntimeError("another was here")
        torch.set_default_dtype(torch.float64)
        torch.left_behind = True
        return lambda: None

    assert bench.take_turn(make).seconds >= 0
    assert bench.take_turn(make, watch_children=watch_children).seconds >= 0
    assert not hasattr(torch, "left_behind")


def test_work_is_warmed_up_and_repeated_for_as_long_as_asked(monkeypatch):
    calls = []

    def seconds_of(device, work, repeats: int = 1) -> float:  # on a clock on which the work takes a hundredth
        for _ in range(repeats):
            work()
        return 0.01

    monkeypatch.setattr(type(Hardware.detect().device), "seconds", seconds_of)

    def turn(seconds: float, warmup: bool) -> int:
        calls.clear()
        elapsed, memory = bench.timed_turn(lambda: lambda: calls.append(0), (), seconds, warmup)
        assert elapsed == 0.01 and memory > 0
        return len(calls)

    assert turn(seconds=0.0, warmup=False) == 1
    assert turn(seconds=0.0, warmup=True) == 2
    assert turn(seconds=0.1, warmup=True) == 12  # to warm up, to see how long it takes, and ten


def test_lack_of_memory_is_told_as_such():
    def make():
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(UserError, match="out of memory: RuntimeError: CUDA error: out of memory"):
        bench.timed_turn(make, (), 0.0, True)


def test_memory_of_children_is_counted():
    def hold(megabytes):
        child = "import time; held = bytearray(%d); time.sleep(2)"
        return lambda: subprocess.run([sys.executable, "-c", child % (megabytes * 10**6)], check=True)

    little, much = (bench.take_turn(hold, m, warmup=False, watch_children=True).memory for m in (1, 200))
    assert 150e6 < much - little < 250e6


def test_a_turn_that_dies_or_is_interrupted_leaves_no_process(monkeypatch):
    with pytest.raises(UserError, match="ended before its work did"):
        bench.take_turn(lambda: lambda: os._exit(1))

    def interrupted(self, pipes):
        assert multiprocessing.active_children()
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.Processes, "ended", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.take_turn(lambda: lambda: time.sleep(60))
    assert not multiprocessing.active_children()


@pytest.fixture
def turns(monkeypatch):
    """Turns without a process, of fixed seconds; `broken` names the steps that cannot work."""
    broken = set()
    seconds = {"crammed-v2": 1.0, "crammed-nb": 1.25, "reference_step": 4.0, "bert_step": 2.0, "modernbert_step": 2.0}

    def take_turn(make, *arguments, **how):
        name = arguments[0].name if make is bench.recipe_steps else make.__name__
        if name in broken:
            raise UserError("an implementation could not work (out of memory)")
        return bench.Turn(seconds[name], 1)

    monkeypatch.setattr(bench, "take_turn", take_turn)
    monkeypatch.setattr(bench, "matrix_rate", lambda hardware: 1e12)
    return broken


def test_the_training_bench_compares_ours_with_each_baseline(turns):
    result = bench.bench_train("small", rounds=2, rows=4, progress=False)
    assert result["ratio"] == dict(reference=4.0, transformers=2.0, modernbert=2.0)
    assert result["rate"]["ours"] == pytest.approx(1.25 * result["rate"]["crammed-nb"])
    assert result["mfu"] == pytest.approx(1.25 * result["crammed-nb"]["mfu"], rel=0.01)  # mixing adds few FLOPs
    assert result["matrix_rates"] == [1e12, 1e12] and result["failed"] == {}
    assert json.loads(json.dumps(result)) == result
    table = bench.bench_table(result)
    assert "ours over reference: 4.00 (rounds 4.00–4.00)" in table and "over crammed-nb" not in table
    assert "MFU: " in table and "MFU of crammed-nb: " in table


def test_a_baseline_that_cannot_work_is_left_out_and_named(turns):
    turns |= {"reference_step"}
    result = bench.bench_train("small", rounds=1, rows=4, progress=False)
    assert list(result["ratio"]) == ["transformers", "modernbert"]
    assert "reference is left out" in bench.bench_table(result) and "out of memory" in result["failed"]["reference"]
    turns.add("crammed-nb")
    assert "crammed-nb is left out" in bench.bench_table(bench.bench_train("small", rounds=1, rows=4, progress=False))
    turns.add("crammed-v2")
    with pytest.raises(UserError, match="out of memory"):
        bench.bench_train("small", rounds=1, rows=4, progress=False)


def test_utilisation_is_by_the_rate_of_the_same_round():
    found = bench.mfu_of([1.0, 2.0, 1.0], [1e12, 5e11, 1e12], 8, TINY, "NVIDIA H200")
    assert found["mfu_range"][0] == pytest.approx(found["mfu_range"][1])  # rate and step slow down together
    assert found["mfu"] == pytest.approx(found["mfu_range"][0])
    assert found["mfu_datasheet"] == pytest.approx(found["mfu"] / 989.4)


def test_what_changes_no_step_is_none_of_its_fields():
    changes = {"corpus.sample": 10**6, "optimizer.lr": 0.1, "training.validations": 3, "protocol.epochs": 9}
    assert bench.step_fields(change(RECIPES["pocket"], changes)) == bench.step_fields(RECIPES["pocket"])
    for name, value in {"training.dropout": True, "corpus.seq_length": 64, "optimizer.name": "muon"}.items():
        assert bench.step_fields(change(RECIPES["pocket"], {name: value}))[name] == value


@pytest.mark.parametrize("beginning", [*bench.MATTER, *bench.NO_MATTER])
def test_the_beginnings_are_those_of_fields(beginning):
    assert any(name.startswith(beginning) for name in flat(Recipe()))


def test_the_measured_speeds_are_of_fields_that_still_decide_them():
    """The records of speeds name fields that decide a step's time; none of them has been dropped from these."""
    for measured in json.loads(RATES.read_text()):
        recipe = change(Recipe(), measured["pace"])
        assert bench.step_fields(recipe) == measured["pace"]


def test_both_fine_tune_by_the_protocol_that_is_asked_for(monkeypatch):
    """Started are several of ours and one reference, each with the recipe's protocol; the result says how pairs are read."""
    started, protocol = [], RECIPES["pocket"].protocol

    def take_turn(make, arch, tokenizer, task, steps, protocol, hardware, threads):
        started.append((protocol, hardware.dtype))
        return bench.Turn(1.0, 1)

    monkeypatch.setattr(bench, "take_turn", take_turn)
    task = SimpleNamespace(train=[()] * 32)
    found = bench.bench_glue(TINY, "tokenizer.json", dict(one=task), rounds=1, progress=False, protocol=protocol)
    reference = (replace(protocol, by_length=False), torch.float32)
    assert started.count(reference) == 1 and len(started) >= 2
    assert all(one in (reference, (protocol, Hardware.detect().dtype)) for one in started)
    assert found["pairs"] == protocol.pairs == "apart" and found["minutes"] > 0


def test_text_is_measured_on_its_way_to_sequences(tiny):
    found = bench.bench_data(f"files:{tiny.text}", 0.1, vocab_size=400, rounds=1, grow=20, progress=False)
    assert found["rate"].keys() == {"ours", "reference"} and found["memory"]["grown"] > 1e7
    table = bench.bench_table(found)
    assert "ours over reference: " in table and "memory at 20 times the text: " in table


def test_fine_tuning_is_measured_in_processes_of_its_own(finished, glue):
    arch, tokenizer = load_run(finished.folder).recipe.architecture, finished.folder / "export" / "tokenizer.json"
    found = bench.bench_glue(arch, str(tokenizer), dict(rte=load_glue(glue)["rte"]), steps=2, rounds=1, progress=False)
    assert found["ratio"]["reference"] > 0 and found["pairs"] == "joint"
    assert "three seeds of rte: " in bench.bench_table(found)


def test_a_picture_in_a_folder_that_is_not_there_is_refused_before_the_work(tmp_path):
    said = command("bench", "train", "--picture", tmp_path / "no" / "a.png")
    assert said.code == 2 and "no folder" in said.err and "make it first" in said.err
