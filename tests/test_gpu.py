"""What a CPU cannot show of a GPU. Each test also runs on the CPU, as far as it has a meaning there.

make test-gpu runs those marked gpu; without a GPU they are skipped.
"""

import signal
import time
from dataclasses import replace
from itertools import count

import pytest
import torch

from cramming_nb.app.finetuning import evaluate
from cramming_nb.app.probes import probe_tasks
from cramming_nb.budget import Budget
from cramming_nb.corpus import get_corpus
from cramming_nb.engine.checkpoint import Interrupted, load_checkpoint
from cramming_nb.engine.hardware import (
    DEVICES,
    Device,
    Hardware,
    Pace,
    datasheet_rate,
    is_out_of_memory,
    matrix_rate,
)
from cramming_nb.glue import FineTuner
from cramming_nb.objective import ObjectiveConfig, mask_rows
from cramming_nb.recipes import change, load_recipe
from cramming_nb.training import Gradients, Learner, choose_micro_batch, heldout_loss, pretrain

there = torch.cuda.is_available()
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not there, reason="there is no GPU")])
slow_cpu = pytest.param("cpu", marks=pytest.mark.slow)  # compiling takes long on a CPU


@pytest.fixture(params=["cpu", GPU])
def hardware(request) -> Hardware:
    """Each device of this machine, with its fastest number format."""
    return Hardware.detect(device=DEVICES[request.param])


@pytest.fixture
def on_gpu() -> Hardware:
    """The GPU."""
    return Hardware.detect(device=DEVICES["cuda"])


def only_gpu(test):
    """Mark a test that has no meaning on a CPU."""
    return pytest.mark.gpu(pytest.mark.skipif(not there, reason="there is no GPU")(test))


@pytest.fixture
def make_learner(tiny):
    """A function that makes a learner of the tiny recipe, with changes."""

    def make(hardware: Hardware, changes: dict | None = None, compiled: bool = False, seed: int = 0) -> Learner:
        r = change(load_recipe(str(tiny.recipe)), changes or {})
        corpus = get_corpus(f"files:{tiny.text}", r.corpus, tiny.cache, progress=False)
        parts = (r.architecture, r.objective, r.optimizer, r.schedule, r.training)
        return Learner(corpus, *parts, hardware, seed, compiled)

    return make


# Speed and the queue


def wait(hardware: Hardware):
    """Wait until the device has done all that is queued."""
    if hardware.device.runs_ahead:
        torch.cuda.synchronize()


def test_the_matrix_rate_is_plausible(hardware):
    rates = [matrix_rate(hardware) for _ in range(3)]
    assert all(1e9 < rate < 1e16 for rate in rates)
    sheet = datasheet_rate(hardware.name)
    if sheet:
        assert 0.2 * sheet < max(rates) < 1.05 * sheet


@only_gpu
def test_the_gpu_is_in_the_table_of_data_sheets(on_gpu):
    assert datasheet_rate(on_gpu.name), f"add {on_gpu.name} to GPU_TFLOPS"


def test_a_rate_leaves_the_random_numbers_of_a_run_alone(hardware):
    before = hardware.device.random_state()
    matrix_rate(hardware, seconds=0.01, size=64)
    after = hardware.device.random_state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def products(hardware: Hardware, number: int = 20, size: int = 0):
    """Work that takes long, and returns at once where the device has a queue."""
    size = size or hardware.device.matrix_size
    a = torch.ones(size, size, dtype=hardware.dtype, device=hardware.kind)

    def work():
        for _ in range(number):
            torch.mm(a, a)

    return work


def test_seconds_are_those_of_the_device(hardware):
    work, device = products(hardware, number=3), hardware.device
    work()
    wait(hardware)
    ratios = []
    for _ in range(5):
        start = time.perf_counter()
        own = device.seconds(work, repeats=2)
        wait(hardware)
        ratios.append(2 * own / (time.perf_counter() - start))
    assert 0.5 < sorted(ratios)[2] < 1.1


def test_the_host_is_at_most_two_micro_batches_ahead(hardware):
    work, pace = products(hardware), Pace(hardware.device)
    work()
    wait(hardware)
    events = []
    for _ in range(6):
        work()
        pace.mark()
        events = [*events, *[e for e in pace.events if e not in events]]
        assert len(pace.events) <= 2
        assert all(event.query() for event in events[:-2])
    pace.settle()
    assert not pace.events and all(event.query() for event in events)
    assert len(events) == (6 if hardware.device.runs_ahead else 0)


@only_gpu
def test_a_queue_returns_before_the_work_is_done(on_gpu):
    work = products(on_gpu, number=200)
    work()
    wait(on_gpu)
    start = time.perf_counter()
    work()
    queued = time.perf_counter() - start
    wait(on_gpu)
    assert queued < 0.5 * (time.perf_counter() - start)


@only_gpu
def test_energy_is_counted_while_it_works(on_gpu):
    before = on_gpu.device.joules()
    if before is None:
        pytest.skip("this driver, or the lack of nvidia-ml-py, tells no energy")
    start, work = time.perf_counter(), products(on_gpu)
    while time.perf_counter() - start < 2:
        work()
        wait(on_gpu)
    joules = on_gpu.device.joules() - before
    assert 40 < joules / (time.perf_counter() - start) < 2000  # watts


@only_gpu
def test_the_driver_is_told(on_gpu):
    facts = on_gpu.device.facts()
    assert facts["cuda"] and facts["triton"]


# The same on every device


@pytest.mark.parametrize("exact", [True, False])
def test_masks_are_the_same_bit_for_bit(hardware, exact):
    ids = torch.randint(0, 512, (64, 128), generator=torch.Generator().manual_seed(0))
    rows, epochs = torch.arange(64) * 1_000_003, torch.arange(64) % 3
    config = ObjectiveConfig(mlm_probability=0.25, exact=exact)
    here = mask_rows(ids, rows, epochs, 7, config, 512)
    there = mask_rows(*(t.to(hardware.kind) for t in (ids, rows, epochs)), 7, config, 512)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))


def take_steps(learner: Learner, number: int = 4) -> list[float]:
    """Held-out losses after some optimizer steps."""
    losses, cursor = [], 0
    for _ in range(number):
        size = learner.gradients.micro_batch_size
        for _ in range(0, learner.schedule.batch_size(0.5, size), size):
            learner.gradients.add(*learner.read.read(cursor, size), 0.5)
            cursor += size
        learner.update(0.5)
        losses.append(heldout_loss(learner))
    return losses


@pytest.mark.skipif(not Device().compiler(), reason="there is no C++ compiler")
@pytest.mark.parametrize("by", ["model", "block"])
@pytest.mark.parametrize("name", [slow_cpu, GPU])
def test_a_compiled_step_is_the_eager_one(make_learner, name, by):
    hardware = Hardware.detect(device=DEVICES[name])
    changes = {"training.compile_by": by}
    eager, compiled = (make_learner(hardware, changes, compiled=compiled) for compiled in (False, True))
    ours, theirs = take_steps(compiled), take_steps(eager)
    assert compiled.predictor.compiled  # it did not fall back
    assert ours == pytest.approx(theirs, abs=0.02)
    for a, b in zip(compiled.model.parameters(), eager.model.parameters(), strict=True):
        difference = (a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-3)
        assert difference < 0.05


def test_a_step_is_that_of_the_cpu(make_learner, hardware):
    exact = [replace(h, dtype=torch.float32) for h in (Hardware.detect(device=DEVICES["cpu"]), hardware)]
    here, there = (take_steps(make_learner(h)) for h in exact)
    assert there == pytest.approx(here, abs=5e-3)  # a GPU's float32 products have ten binary digits


def test_fused_attention_is_the_explicit_one(make_learner, hardware):
    losses = []
    for attention in ("explicit", "sdpa"):
        exact = replace(hardware, dtype=torch.float32, attention=attention)
        losses.append(take_steps(make_learner(exact), 2))
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


def test_a_run_that_was_killed_goes_on_as_if_it_were_not(make_learner, hardware, tmp_path, monkeypatch):
    def run(name: str) -> tuple[dict, dict]:
        learner = make_learner(hardware, {"training.checkpoint_fraction": 1.0})
        found = pretrain(learner, Budget.parse("16step"), tmp_path / name, progress=False)
        return found, load_checkpoint(tmp_path / name / "checkpoints")[0]

    whole, tensors = run("whole")
    really, updates = Learner.update, count(1)

    def update(learner, t):
        really(learner, t)
        if next(updates) == 8:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Learner, "update", update)
        run("killed")
    killed, others = run("killed")
    assert killed["spent"]["steps"] == whole["spent"]["steps"] == 16
    assert killed["spent"]["tokens"] == whole["spent"]["tokens"]
    ours, theirs = ([point["heldout_loss"] for point in found["curve"]] for found in (killed, whole))
    if hardware.device.runs_ahead:  # a GPU adds gradients of an embedding in any order
        assert ours == pytest.approx(theirs, abs=0.02)
    else:
        assert ours == theirs
        assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    assert tensors.keys() == others.keys()


# Memory


def test_a_real_lack_of_memory_is_recognised(hardware):
    with pytest.raises((RuntimeError, MemoryError)) as error:
        torch.empty(1 << 50, dtype=torch.uint8, device=hardware.kind)
    assert is_out_of_memory(error.value)
    assert torch.ones(8, device=hardware.kind).sum().item() == 8  # and the device still works


@only_gpu
def test_free_memory_counts_what_is_cached(on_gpu):
    device = on_gpu.device
    device.release_memory()
    before = device.free_memory()
    block = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    taken = before - device.free_memory()
    del block
    assert taken == pytest.approx(1 << 28, rel=0.2)
    assert device.free_memory() == pytest.approx(before, rel=0.05)  # cached, and free all the same


def test_the_micro_batch_fits_into_what_others_leave(make_learner, hardware):
    device, ballast = hardware.device, []
    device.release_memory()
    free = device.free_memory()
    if free is not None:  # another program has all but two gigabytes
        ballast.append(torch.empty(max(0, free - 2 * 10**9), dtype=torch.uint8, device=hardware.kind))
    wide = {
        "architecture.hidden_size": 512,
        "architecture.num_layers": 8,
        "architecture.num_heads": 8,
        "architecture.ffn_size": 2048,
        "schedule.batch_size": 4096,
        "training.micro_batch_size": 0,
    }
    small = wide | {"architecture.hidden_size": 32, "architecture.num_layers": 1, "schedule.batch_size": 64}
    learner = make_learner(hardware, small if free is None else wide)
    choose_micro_batch(learner)
    rows = learner.gradients.micro_batch_size
    assert 1 <= rows <= device.first_rows
    losses = take_steps(learner, 2)
    assert learner.gradients.micro_batch_size == rows  # memory did not run out in the steps either
    assert losses[0] == losses[0]
    del ballast


def test_memory_that_runs_out_halves_the_micro_batch(make_learner, hardware, monkeypatch):
    learner = make_learner(hardware, {"schedule.batch_size": 64, "training.micro_batch_size": 64})
    really = Gradients.forward_backward

    def forward_backward(self, batch, t):
        if len(batch[0]) > 16:
            return torch.empty(1 << 50, dtype=torch.uint8, device=hardware.kind)
        return really(self, batch, t)

    monkeypatch.setattr(Gradients, "forward_backward", forward_backward)
    gradients = learner.gradients
    gradients.add(*learner.read.read(0, 64), 0.5)
    learner.update(0.5)
    assert gradients.micro_batch_size == 16 and gradients.rows_asked == 64


# Fine-tuning


@only_gpu
def test_recorded_steps_are_the_plain_ones(make_learner, on_gpu, monkeypatch):
    learner = make_learner(on_gpu)
    task = probe_tasks(list(learner.corpus.probe_documents()), train=90, dev=16)["overlap"]
    arch = replace(learner.schedule.architecture, dropout=0.0)
    protocol = replace(load_recipe("pocket").protocol, epochs=8, max_length=64)
    weights, numbers = {}, {}
    for recorded in (True, False):
        if not recorded:
            monkeypatch.setattr(type(on_gpu.device), "recorder", lambda device: None)
        tuner = FineTuner(arch, None, learner.corpus.tokenizer, task, protocol, 0, on_gpu)
        before = {name: weight.detach().clone() for name, weight in tuner.optimizer.named.items()}
        tuner.train()
        weights[recorded] = dict(tuner.optimizer.named)
        numbers[recorded] = len(tuner.give_gradients.by_shape) if recorded else 0
    assert {len(batch) for batch in tuner.batches} == {16, 90 % 16}  # each epoch ends with a short batch
    assert 1 <= numbers[True] < len(tuner.batches) / 4
    for name, weight in weights[False].items():
        moved = (weight - before[name]).norm()
        assert (weights[True][name] - weight).norm() <= 0.02 * moved + 1e-6  # a GPU may add in any order


@only_gpu
def test_a_recording_draws_new_random_numbers_each_time(on_gpu):
    ones, dropped = torch.ones(10_000, device="cuda"), torch.zeros(10_000, device="cuda")
    state = torch.cuda.get_rng_state()
    repeat = on_gpu.device.recorder().record(lambda: dropped.copy_(torch.nn.functional.dropout(ones, 0.5)))
    assert torch.cuda.get_rng_state().equal(state)
    kept = []
    for _ in range(3):
        repeat()
        kept.append(dropped.clone())
    assert not kept[0].equal(kept[1]) and not kept[1].equal(kept[2])
    assert all(0.45 < float((some == 0).float().mean()) < 0.55 for some in kept)


def test_several_fine_tunings_at_a_time_score_as_one_after_the_other(make_learner, hardware, tmp_path, monkeypatch):
    learner = make_learner(hardware)
    pretrain(learner, Budget.parse("4step"), tmp_path / "run", progress=False)
    corpus = learner.corpus
    probes = probe_tasks(list(corpus.probe_documents()), train=48, dev=16)
    tasks = {name: probes[name] for name in ("order", "overlap")}
    protocol = load_recipe("pocket").protocol
    protocol = replace(protocol, epochs=1, max_length=64)
    scores = {}
    for number in (1, 2):
        monkeypatch.setattr(type(hardware.device), "finetune_jobs", number)
        results = evaluate(
            tasks,
            learner.schedule.architecture,
            tmp_path / "run" / "checkpoints",
            str(corpus.folder / "tokenizer.json"),
            protocol,
            tmp_path / f"glue-{number}",
            replace(hardware, threads=number),  # one for each: the number of threads decides how sums round
            progress=False,
        )
        scores[number] = {(r["task"], r["init"]): next(iter(r["scores"].values())) for r in results}
    assert len(scores[1]) == 4
    tolerance = 0.1 if hardware.device.runs_ahead else 1e-6  # a GPU adds in any order
    assert scores[2] == pytest.approx(scores[1], abs=tolerance)
