"""What a learner and its hooks add up, count and restore."""

import json
import math
import signal
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import command

from cramming_nb.architecture import ATTENTIONS
from cramming_nb.budget import Budget, Spent
from cramming_nb.corpus import Corpus
from cramming_nb.engine.checkpoint import load_checkpoint, save_checkpoint
from cramming_nb.engine.clock import Clock, SimulatedTime
from cramming_nb.engine.distributed import PeerLost, ProcessGroup
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.hardware import DEVICES, Device, Hardware
from cramming_nb.engine.hooks import (
    CheckGradients,
    EarlyStop,
    Energy,
    Hook,
    Interval,
    Log,
    LogFile,
    Save,
    Validate,
    read_log,
)
from cramming_nb.recipes import load_recipe
from cramming_nb.schedule import LEVELS
from cramming_nb.training import (
    Learner,
    Prefetcher,
    State,
    checkpoint,
    choose_micro_batch,
    compiled_by_levels,
    heldout_loss,
    heldout_rows,
    heldout_sums,
    load,
    outcome,
    prepare,
    pretrain,
    resume,
)


class MadeUpGroup(ProcessGroup):
    """Process `rank` of `size`, of which the others are imagined and have nothing to add."""

    def __init__(self, rank: int = 0, size: int = 1):
        super().__init__()
        self.rank, self.size = rank, size

    def all_reduce(self, tensor, op=None):
        return tensor

    def gather(self, tensor):
        return [tensor] * self.size


@pytest.fixture(scope="module")
def make(tiny):
    """Makes learners of the tiny recipe, as process `rank` of `size`, with some of their settings changed."""
    assert command("data", "build", *tiny.options()[:3], cache=tiny.cache).code == 0
    corpus, r = Corpus(next(tiny.cache.glob("corpus-*"))), load_recipe(str(tiny.recipe))
    arch = replace(r.architecture, vocab_size=r.corpus.vocab_size, max_length=r.corpus.seq_length)

    def learner(rank=0, size=1, optimizer=(), training=(), objective=(), compiled=False, dtype=torch.float32):
        group, masks = MadeUpGroup(rank, size), replace(r.objective, **dict(objective))
        settings = replace(r.optimizer, **dict(optimizer)), r.schedule, replace(r.training, **dict(training))
        hardware = Hardware.detect(dtype)
        return Learner(corpus, arch, masks, *settings, hardware, compiled=compiled, group=group)

    return learner


def add(learner: Learner, step: int):
    """Add the gradients of the eight sequences of a step."""
    learner.gradients.add(*learner.corpus.batch(8 * step, 8, 0), 0.5)


def learn(learner: Learner, steps: int):
    for step in range(steps):
        add(learner, step)
        learner.update(0.5)


def copy(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def tensors_of(learner: Learner) -> dict[str, torch.Tensor]:
    learner.clock = Clock(50_000)
    return checkpoint(learner)[0]


def at(learner: Learner, budget: str, clock: Clock | None = None, **state) -> Learner:
    """The learner in the middle of a run."""
    learner.budget, learner.clock, learner.hooks = Budget.parse(budget), clock or Clock(50_000).start(), []
    learner.state = replace(learner.state, **state)
    return learner


@pytest.mark.parametrize("most", [7, 10**6])
def test_held_out_rows_are_spread_over_all_there_are(make, most):
    corpus = make().corpus
    seen, there = list(heldout_rows(corpus, most)), len(corpus.heldout)
    apart = -(-there // len(seen))  # rows, at most
    assert seen == sorted({*seen}) and len(seen) == min(most, there)
    assert max(np.diff([*seen, there])) <= apart and seen[0] == 0


@pytest.mark.parametrize("size", [2, 3, 40])
def test_processes_read_each_held_out_row_once_whatever_their_micro_batches(make, size):
    alone = heldout_sums(make())
    parts = [make(rank, size) for rank in range(size)]
    for rank, part in enumerate(parts):
        part.gradients.micro_batch_size = (8, 3, 5)[rank % 3]
    total = sum(heldout_sums(part) for part in parts)
    assert total[1] == alone[1] and total[0].item() == pytest.approx(alone[0].item(), rel=1e-5)


def test_utilisation_is_of_all_devices(make):
    budget, clock = Budget.parse("10step"), SimpleNamespace(shares=dict(step=2.0))
    spent = Spent(tokens=10, seconds=2.0, flops=1e9)
    found = []
    for size in (1, 4):
        learner = make(size=size)
        rates = dict(matrix_rates=[1e9, 4e9, 2e9], processes=size)
        learner.state = State(spent=spent, curve=[dict(heldout_loss=1.0)], **rates)
        found.append(outcome(learner, budget, clock))
    one, four = found
    assert one["mfu"] == pytest.approx(0.25)  # of the median rate
    assert four["mfu"] == pytest.approx(one["mfu"] / 4) and four["devices"] == 4


def test_energy_is_reported_only_if_all_of_it_is_known(make, tmp_path):
    log = tmp_path / "log.jsonl"
    for logged, saved, known in ((70.0, 50.0, 70.0), (None, 50.0, None), (70.0, None, None)):
        log.write_text(json.dumps(dict(tokens=1, joules=logged)) + "\n")
        assert Energy(tmp_path).joules_so_far(saved) == known
    assert Energy(tmp_path / "new").joules_so_far(0.0) == 0


@pytest.mark.parametrize("loss, at_fraction, stops", [(5.0, 0.99, True), (5.0, 0.1, False), (3.9, 0.99, False)])
def test_a_hopeless_run_ends_early(make, loss, at_fraction, stops):
    learner = at(make(), "10step", curve=[dict(fraction=at_fraction, heldout_loss=loss)])
    EarlyStop(above=4.0, at=0.125).before_step(learner)
    assert bool(learner.state.stopped) == stops


@pytest.mark.parametrize("curve", [[], [dict(fraction=0.1, heldout_loss=2.0)]])
def test_a_loss_that_is_not_a_number_ends_a_run(make, curve):
    learner, validate = at(make(), "10step", curve=curve), Validate(lambda learner: math.nan)
    if curve:
        validate.take(learner, 1.0)
        assert "not a number after 100%" in learner.state.stopped and learner.state.curve == curve
    else:
        with pytest.raises(UserError, match="not a number before the first step"):
            validate.take(learner, 0.0)


def test_line_behind_one_that_was_cut_off_is_kept(tmp_path):
    path, lines = tmp_path / "log.jsonl", [dict(tokens=number) for number in (1, 2, 3)]
    path.write_text(json.dumps(lines[0]) + '\n{"tokens": 9, "lo')
    log = LogFile(tmp_path)
    log.before_fit(None)
    log.on_log(None, lines[1])
    file, log.file = log.file, SimpleNamespace(write=lambda data: file.write(data[:5]))  # the disk is full
    log.on_log(None, dict(tokens=8))
    log.file = file
    log.on_log(None, lines[2])
    log.close()
    assert read_log(path) == lines and path.read_bytes().count(b"\n") == 5


def test_no_process_tries_more_rows_than_its_share(make):
    learner = make(size=4)
    choose_micro_batch(learner)
    assert learner.gradients.micro_batch_size <= -(-learner.schedule.config.batch_size // 4)


@pytest.mark.parametrize("adaptive", [False, True])
def test_what_is_loaded_is_all_that_is_there(make, adaptive):
    learner, fresh = (make(objective=dict(adaptive=adaptive)) for _ in range(2))
    before = copy(tensors_of(learner))
    learn(learner, 3)
    load(learner, before, replace(State(), micro_batch_size=8))
    learn(learner, 2)
    learn(fresh, 2)
    ours, theirs = tensors_of(learner), tensors_of(fresh)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_masks_that_adapt_are_resumed_to_the_bit_and_validated_as_all_are(make):
    whole, first, second = (make(objective=dict(adaptive=True)) for _ in range(3))
    assert heldout_loss(whole) == heldout_loss(make())
    learn(whole, 4)
    learn(first, 2)
    add(first, 2)  # a step that is never finished
    first.gradients.drop()
    load(second, copy(tensors_of(first)), replace(State(), micro_batch_size=8))
    for step in (2, 3):
        add(second, step)
        second.update(0.5)
    ours, theirs = tensors_of(second), tensors_of(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ours["token_scores"][1].sum() > 0
    rest = whole.seed, whole.length, whole.schedule.masking(0.5)
    before, *_, tokens = whole.predictor(whole.read.read(0, 8), *rest)
    whole.predictor.token_scores.sums[:, ::2] = torch.tensor([[90.0], [100.0]])  # every other token is predicted well
    after, *_, as_many = whole.predictor(whole.read.read(0, 8), *rest)
    assert before != after and tokens.sum() == as_many.sum()


def test_processes_share_what_they_count(make, monkeypatch):
    learner = make(size=2, objective=dict(adaptive=True))
    scores = learner.predictor.token_scores

    def as_if_the_other_had_the_same(tensor, *_):
        return tensor.mul_(2)

    monkeypatch.setattr(learner.group, "all_reduce", as_if_the_other_had_the_same)
    learner.gradients.add(*learner.read.read(0, 8), 0.5)
    own = scores.new.clone()
    learner.update(0.5)
    assert own[1].any() and not scores.new.any()
    assert torch.equal(scores.sums, 2 * own / scores.UNIT)


def test_what_does_not_fit_is_not_counted_twice(make, monkeypatch):
    """Memory runs out in a backward pass, and the sequences are computed again in halves."""
    plain, cramped = (make(objective=dict(adaptive=True), training=dict(micro_batch_size=8)) for _ in range(2))
    backward, calls = cramped.optimizer.backward, []

    def out_of_memory_once(loss):
        calls.append(loss)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("out of memory")
        backward(loss)

    monkeypatch.setattr(cramped.optimizer, "backward", out_of_memory_once)
    for learner in (plain, cramped):
        learner.gradients.add(*learner.read.read(0, 8), 0.5)
    assert len(calls) == 3
    found, expected = cramped.predictor.token_scores.new, plain.predictor.token_scores.new
    assert found[1].equal(expected[1])
    torch.testing.assert_close(found[0].double(), expected[0].double(), rtol=0.01, atol=8)


def test_rows_that_are_read_ahead_are_those_that_are_asked_for():
    asked = []

    def read(cursor, count):
        asked.append((cursor, count))
        return cursor, count

    rows = Prefetcher(read)
    assert [rows(0, 8), rows(8, 8), rows(16, 4), rows(20, 8), rows(0, 8)] == [(0, 8), (8, 8), (16, 4), (20, 8), (0, 8)]
    rows.thread.shutdown()
    assert asked[:3] == [(0, 8), (8, 8), (16, 8)] and (24, 4) not in asked  # what is next is read, right or not


def test_an_error_of_the_reader_is_that_of_the_step():
    def read(cursor, count):
        if cursor:
            raise OSError("the disk is gone")
        return cursor, count

    rows = Prefetcher(read)
    rows(0, 8)
    with pytest.raises(OSError, match="the disk is gone"):
        rows(8, 8)


@pytest.mark.parametrize("average", ["ema", "lawa"])
def test_before_the_first_step_an_average_is_the_weights(make, average):
    assert heldout_loss(make(optimizer=dict(average=average))) == heldout_loss(make())


@pytest.mark.parametrize("scale, stopped", [(2.0**16, ""), (1.0, "a gradient was not finite")])
def test_float16_may_search_for_its_loss_scale(make, scale, stopped):
    learner = at(make(), "10step")
    hook = CheckGradients("stop")
    hook.before_fit(learner)
    learner.optimizer.loss_scale.value.fill_(scale)
    learner.state.skipped_steps = 1
    hook.before_step(learner)
    assert learner.state.stopped == stopped


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype, scale", [(torch.float32, 1), (torch.float16, 2**16)])
def test_a_run_says_that_its_loss_scale_begins_anew(make, tmp_path, capsys, dtype, scale, rank):
    """In one line, by the first process, if the number format is another one."""
    saved = at(make(), "10step")
    save = Save(tmp_path, checkpoint)
    save.save(saved)
    save.writer.wait()
    resumed = make(rank, dtype=dtype)
    resume(resumed, tmp_path, Clock(50_000))
    assert resumed.optimizer.loss_scale.value == scale
    said = "float16, another number format; its loss scale is 65536 now" in capsys.readouterr().out
    assert said == (dtype is torch.float16 and rank == 0)


def test_a_signal_in_the_step_that_crosses_a_snapshot_loses_nothing(make, tmp_path):
    """The 15th of 30 steps begins before 0.49 and ends behind it; then the run is asked to leave."""

    class Evict(Hook):
        def after_step(self, learner):
            if learner.state.spent.steps == 15:
                learner.signals.append(signal.SIGTERM)

    learner = make()
    hooks = [Evict(), Log(), Validate(heldout_loss), Save(tmp_path, checkpoint, snapshots=(0.49, 0.51))]
    learner.fit(Budget.parse("30step"), hooks, Clock(50_000))
    _, saved = load_checkpoint(tmp_path / "snapshots" / "0.490")
    assert (learner.state.spent.steps, saved["spent"]["steps"], learner.state.finished) == (15, 15, False)
    assert not (tmp_path / "snapshots" / "0.510").exists()


@pytest.mark.parametrize("broken, stopped", [(4, True), (3, False)])
def test_a_run_that_left_out_all_steps_says_so(make, tmp_path, broken, stopped):
    """Of four steps, the first `broken` have a gradient that is not finite."""
    learner = make()
    good, add = learner.gradients.full_batch, learner.gradients.add

    def add_broken(ids, rows, epochs, t):
        learner.gradients.full_batch = math.nan if t < broken / 4 else good
        add(ids, rows, epochs, t)

    learner.gradients.add = add_broken
    found = pretrain(learner, Budget.parse("4step"), tmp_path, Clock(50_000), progress=False)
    assert found["skipped_steps"] == broken
    assert found["stopped"].startswith("none of the 4 steps") == stopped


def test_a_run_that_stops_before_its_first_step_has_a_speed_of_zero(make, tmp_path):
    learner = make(training=dict(early_stop_at=0.0, early_stop_loss=0.5))
    found = pretrain(learner, Budget.parse("10s@1000tok/s"), tmp_path, progress=False)
    assert found["stopped"] and found["spent"]["seconds"] == found["tokens_per_second"] == 0


def test_a_graph_for_each_level_is_allowed():
    compiled_by_levels(lambda x: x)
    assert torch._dynamo.config.recompile_limit > 2 * LEVELS + 1


class Counting(Device):
    """A device with room for `room` sequences of 1,000 bytes, which counts what it is asked."""

    room, peak, released = 100, 0, 0

    def free_memory(self):
        return 1000 * self.room

    def peak_memory(self):
        return self.peak

    def reset_peak_memory(self):
        self.peak = 0

    def release_memory(self):
        self.released += 1


def choosing(make, room: float, fits: float = math.inf):
    """A learner that has chosen its micro-batch on such a device, where so many sequences fit in fact; and the device."""
    learner = make(training=dict(micro_batch_size=0))
    device = Counting()
    device.room, device.first_rows = room, 512
    learner.device = device
    learner.schedule.config = replace(learner.schedule.config, batch_size=256)

    def forward_backward(rows, t):
        device.peak = max(device.peak, 1000 * len(rows[0]))
        if len(rows[0]) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.zeros(2)

    learner.gradients.forward_backward = forward_backward
    choose_micro_batch(learner)
    return learner.gradients, device


def test_the_micro_batch_leaves_room_for_moments_and_a_tenth(make):
    moments = 8 * make().optimizer.flat_grads.numel() / 1000  # in sequences
    gradients, device = choosing(make, room=(60 + moments) / 0.9 + 0.01)
    assert 256 / 5 <= gradients.micro_batch_size <= 60  # five equal parts of a batch of 256
    assert device.released == 2  # after each pass


@pytest.mark.parametrize("fits, chosen", [(15, 8), (7, 8), (math.inf, 1)])
def test_where_an_estimate_fails_or_finds_nothing_few_sequences_are_tried(make, fits, chosen):
    gradients, _ = choosing(make, room=1 if fits == math.inf else 10**9, fits=fits)
    assert gradients.micro_batch_size == chosen


def test_a_device_that_does_not_tell_its_memory_gets_what_suits_it(make):
    learner = make(training=dict(micro_batch_size=0))
    learner.schedule.config = replace(learner.schedule.config, batch_size=256)
    choose_micro_batch(learner)
    assert learner.gradients.micro_batch_size == learner.device.first_rows


def test_preparation_draws_no_random_number_of_the_run(make):
    learner = at(make(training=dict(micro_batch_size=0, dropout=True)), "10step")
    device = Counting()
    device.room = 10**9
    learner.device = device
    state = torch.get_rng_state()
    prepare(learner)
    assert torch.equal(torch.get_rng_state(), state) and learner.gradients.micro_batch_size


@pytest.mark.parametrize("before, now, how", [(2, 1, "torchrun --nproc-per-node 2"), (1, 4, "without torchrun")])
def test_a_run_goes_on_with_as_many_processes_as_it_began_with(make, tmp_path, before, now, how):
    state = asdict(State(spent=Spent(tokens=1), processes=before))
    save_checkpoint(tmp_path / "checkpoints", 1, tensors_of(make()), state)
    with pytest.raises(UserError, match=f"started with {before} processes, not {now}; .*{how}"):
        resume(make(size=now), tmp_path, Clock(50_000))
    save_checkpoint(tmp_path / "checkpoints", 2, tensors_of(make()), state | dict(finished=True))
    learner = make(size=now)
    resume(learner, tmp_path, Clock(50_000))  # nothing is left to do
    assert learner.state.processes == before


def test_all_processes_use_the_smallest_micro_batch_and_hear_of_a_signal(make):
    class Agreeing(MadeUpGroup):
        def largest(self, *values):
            return [7.0, 15.0, -3.0, 0.0] if len(values) == 4 else list(values)

    learner = at(make(size=2), "10s")
    learner.group = Agreeing(1, 2)
    assert not learner.tick()
    assert learner.fraction == 0.7 and learner.gradients.micro_batch_size == 3
    assert learner.signal == 15 and learner.signals == [15]


def test_a_day_has_a_thousand_log_lines():
    spent, interval, lines = Spent(), Interval(1.0, 0.01, 0.001), 0
    learner = SimpleNamespace(state=SimpleNamespace(spent=spent), fraction=0.0)
    interval.start(learner)
    for second in range(0, 24 * 3600, 5):
        spent.seconds, learner.fraction = float(second), second / (24 * 3600)
        lines += interval.due(learner)
    assert 900 < lines <= 1000


def test_float32_on_a_gpu_multiplies_in_tf32(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    DEVICES["cuda"].prepare(torch.bfloat16)
    assert not asked
    DEVICES["cuda"].prepare(torch.float32)
    assert asked == ["high"]


def test_a_step_that_does_not_fit_is_told_and_not_tried_again(make, monkeypatch):
    """Its gradients may have been scaled already: a second try would scale them twice."""
    learner, tried = make(), []

    def step(*_):
        tried.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    add(learner, 0)
    monkeypatch.setattr(learner.optimizer, "step", step)
    with pytest.raises(UserError, match="choose a smaller training.micro_batch_size"):
        learner.update(0.5)
    assert len(tried) == 1


def test_a_process_without_sequences_adds_nothing(make):
    learner = make()
    learn(learner, 1)
    learner.optimizer.flat_grads.fill_(1.0)  # what the step before left
    learner.gradients.add_up()
    assert not learner.optimizer.flat_grads.any() and learner.gradients.predicted == 0


def test_processes_begin_with_the_same_weights_and_random_numbers_of_their_own(make):
    drawn, weights = [], []
    for rank in (0, 1):
        weights.append(make(rank, 2).optimizer.masters[0])
        drawn.append(torch.rand(4))
    assert torch.equal(*weights) and not torch.equal(*drawn)


def test_a_process_that_a_checkpoint_lacks_draws_new_random_numbers(make):
    numbers = make(rank=1, size=2).random
    first = torch.rand(4)
    others = {"random.cpu.0": torch.get_rng_state()}
    drawn = []
    for salt in (3, 3, 4):
        numbers.load(others, salt)
        drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], first)


def test_a_checkpoint_of_another_version_is_refused_in_one_line(make, tmp_path):
    state = asdict(State(spent=Spent(tokens=1)))
    del state["schema"]  # the first version had none
    save_checkpoint(tmp_path / "checkpoints", 1, tensors_of(make()), state)
    with pytest.raises(UserError, match="another version of cramming_nb"):
        resume(make(), tmp_path, Clock(50_000))


@pytest.mark.parametrize("attention, operation", [("auto", "bmm"), ("explicit", "bmm"), ("sdpa", "attention")])
def test_the_kernel_that_is_asked_for_runs_and_is_recorded(make, attention, operation):
    learner = make(training=dict(attention=attention))
    assert operation in learner.attention
    kernel = learner.model.encoder.blocks[0].attention.kernel
    assert kernel is ATTENTIONS["explicit" if attention == "auto" else attention]


@pytest.mark.parametrize("clock, due", [(Clock(), False), (Clock(50_000), True)])
def test_no_validation_begins_that_would_outlast_the_real_time_of_a_budget(make, clock, due):
    learner = at(make(), "60s", clock, spent=Spent(seconds=59.0), curve=[dict(fraction=0.2)])
    validate = Validate(heldout_loss)
    validate.seconds = 2.0
    assert validate.is_planned(learner) and validate.has_time(learner) == due


@pytest.mark.parametrize("unit", ["10step", "10s", "10000tok"])
def test_schedules_begin_with_the_first_step_whatever_came_before(make, unit):
    """Three tenths of a budget are spent before the first step, and its learning rate is still that of t = 0."""
    learner, asked = at(make(), unit), []
    learner.schedule.lr = lambda t: asked.append(t) or 1e-3
    unit = learner.budget.unit
    setattr(learner.state.spent, unit, 0.3 * learner.budget.amount)
    learner.clock = SimpleNamespace(
        seconds=lambda tokens: learner.state.spent.seconds, lap=lambda name: 0.0, shares={}, rate=0
    )
    learner.step()
    before = learner.state.spent
    setattr(learner.state.spent, unit, 0.65 * learner.budget.amount)
    assert (
        learner.state.first == pytest.approx(0.3) and learner.t == pytest.approx(0.5) and before is learner.state.spent
    )
    assert asked == [0.0]


class Delayed(Hook):
    """A start that takes as long as training does: what searches, and compiling, may take."""

    def before_step(self, learner):
        if not learner.state.spent.steps:
            learner.clock.before += 500.0


def test_where_a_schedule_began_is_kept_in_the_checkpoint(make, tmp_path):
    learner = make()
    hooks = [Delayed(), Log(), Validate(heldout_loss), Save(tmp_path, checkpoint)]
    learner.fit(Budget.parse("1000s"), [*hooks, Steps(3)])
    assert learner.state.first > 0.5 and learner.state.stopped == "enough"
    resumed = make()
    resume(resumed, tmp_path, Clock())
    assert resumed.state.first == learner.state.first


class Steps(Hook):
    """Ends a run after so many steps."""

    def __init__(self, number: int):
        self.number = number

    def after_step(self, learner):
        if learner.state.spent.steps == self.number:
            learner.stop("enough")


def test_validation_and_training_share_a_compiled_graph(make, monkeypatch):
    """Compiled code is made for gradients on or off, for a shape and for a mode: validation asks for what training has."""
    seen = set()

    def compiled(function, **options):
        def call(masked, *rest):
            seen.add((masked.shape, torch.is_grad_enabled(), learner.model.training))
            return function(masked, *rest)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    learner = at(make(compiled=True, objective=dict(mlm_probability=0.25)), "10step")
    add(learner, 0)
    heldout_loss(learner)
    assert len(seen) == 1


class Meter(Device):
    """A device whose counter of joules gives what a test says, or nothing."""

    def __init__(self, *readings):
        self.readings = list(readings)

    def joules(self):
        return self.readings.pop(0)


@pytest.mark.parametrize(
    "readings, known", [((10.0, 10.0, 25.0), 15.0), ((10.0, 10.0, None), 0.0), ((None, None, None), None)]
)
def test_energy_is_that_since_the_start_by_the_last_reading(make, tmp_path, readings, known):
    learner = at(make(), "10step")
    learner.hardware = replace(learner.hardware, device=Meter(*readings))
    energy = Energy(tmp_path)
    energy.before_fit(learner)
    energy.after_fit(learner)
    assert learner.state.joules == known


def test_a_hook_of_one_process_stops_all(make):
    class Stopped(MadeUpGroup):
        def largest(self, *values):
            return [*values[:3], 1.0] if len(values) == 4 else list(values)

    learner = at(make(size=2), "10step")
    learner.group = Stopped(0, 2)
    assert not learner.tick() and learner.state.stopped == "another process stopped the run"


def test_a_peer_lost_in_the_last_validation_leaves_a_run_to_be_finished(make, tmp_path):
    """What is saved is not called finished, and the resumed run validates once more, and once only."""

    def lose(learner):
        if learner.state.spent.steps == 10:
            raise PeerLost("connection closed by peer")
        return 5.0

    learner, budget = make(), Budget.parse("10step")
    with pytest.raises(PeerLost):
        learner.fit(budget, [Log(), Validate(lose), Save(tmp_path, checkpoint)], Clock(50_000))
    resumed, clock = make(), Clock(50_000)
    resume(resumed, tmp_path, clock)
    assert not resumed.state.finished and resumed.state.spent.steps == 10
    resumed.fit(budget, [Log(), Validate(heldout_loss), Save(tmp_path, checkpoint)], clock)
    fractions = [point["fraction"] for point in resumed.state.curve]
    assert resumed.state.finished and fractions.count(1.0) == 1 and fractions == sorted(fractions)


def test_a_peer_lost_before_the_clock_starts_is_told_as_such(make, tmp_path):
    class Lost(Hook):
        def before_fit(self, learner):
            raise PeerLost("connection closed by peer")

    with pytest.raises(PeerLost, match="connection closed"):
        make().fit(Budget.parse("10step"), [Save(tmp_path, checkpoint), Lost()])


def test_a_signal_while_a_loss_scale_is_searched_for_does_not_end_the_run_for_good(make, tmp_path):
    learner = at(make(), "10step", spent=Spent(steps=3), skipped_steps=3)
    learner.signal = signal.SIGTERM
    hook = CheckGradients()
    hook.before_fit(learner)
    hook.after_fit(learner)
    assert not learner.state.stopped


def test_a_step_that_is_taken_back_leaves_nothing(make):
    """Not even where the schedule began; hooks hear of no step, and the same learner can go on."""

    class Leave(Hook):
        steps = 0

        def on_tick(self, learner):
            if learner.before and not self.steps:
                learner.signals.append(signal.SIGTERM)

        def after_step(self, learner):
            self.steps += 1

    learner, hook = make(training=dict(micro_batch_size=2)), Leave()
    learner.fit(Budget.parse("4step"), [hook], Clock(50_000))
    state = learner.state
    assert (hook.steps, state.cursor, state.spent.tokens, state.first) == (0, 0, 0, None)
    assert not learner.gradients.losses.any() and not learner.optimizer.has_gradients
    learner.fit(Budget.parse("4step"), [], Clock(50_000))
    assert learner.state.spent.steps == 4


def test_every_second_is_booked_and_none_after_the_end(make, tmp_path):
    """On a clock that stands still but for three seconds a step, whatever hooks do at the end takes no budget."""
    time = SimulatedTime()

    class Slow(Hook):
        def after_step(self, learner):
            time.wait(3)

        def after_fit(self, learner):
            time.wait(50)

    learner = make()
    hooks = [Slow(), Log(), Validate(heldout_loss), Save(tmp_path, checkpoint)]
    learner.fit(Budget.parse("30s"), hooks, Clock(now=time))
    assert learner.state.spent.seconds == sum(learner.clock.shares.values()) == 30
