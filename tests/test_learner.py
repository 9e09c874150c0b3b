"""What a trainer adds up, counts and restores, looked at without a run."""

import json
import math
import shutil
import signal
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import command

from cramming_nb.budget import Budget, Clock, Spent
from cramming_nb.corpus import Corpus
from cramming_nb.engine.checkpoint import load_checkpoint, save_checkpoint
from cramming_nb.engine.distributed import ProcessGroup
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.hardware import DEVICES, Device, Hardware
from cramming_nb.recipes import load_recipe
from cramming_nb.schedule import LEVELS
from cramming_nb.training import (
    Checkpoints,
    Interval,
    Logger,
    NoLogger,
    Progress,
    Trainer,
    TrainingConfig,
    TrainingRun,
    Validation,
    choose_micro_batch,
    compiled_by_levels,
    outcome,
    pretrain,
    read_log,
    reason_to_stop,
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
    """Makes trainers of the tiny recipe, as process `rank` of `size`, with some of their settings changed."""
    assert command("data", "build", *tiny.options()[:3], cache=tiny.cache).code == 0
    corpus, r = Corpus(next(tiny.cache.glob("corpus-*"))), load_recipe(str(tiny.recipe))
    arch = replace(r.architecture, vocab_size=r.corpus.vocab_size, max_length=r.corpus.seq_length)

    def trainer(rank=0, size=1, optimizer=(), training=(), objective=(), compiled=False, dtype=torch.float32):
        group, masks = MadeUpGroup(rank, size), replace(r.objective, **dict(objective))
        settings = replace(r.optimizer, **dict(optimizer)), r.schedule, replace(r.training, **dict(training))
        hardware = Hardware.detect(dtype)
        return Trainer(corpus, arch, masks, *settings, hardware, compiled=compiled, group=group)

    return trainer


def learn(trainer: Trainer, steps: int):
    for step in range(steps):
        trainer.accumulate_gradients(*trainer.corpus.batch(8 * step, 8, 0), 0.5)
        trainer.update(0.5)


@pytest.mark.parametrize("most", [7, 10**6])
def test_held_out_rows_are_spread_over_all_there_are(make, monkeypatch, most):
    seen, trainer = [], make(training=dict(heldout_rows=most))
    monkeypatch.setattr(trainer, "predict", lambda ids, rows, *_: seen.extend(rows) or 4 * (torch.zeros(()),))
    trainer.heldout_sums()
    there = len(trainer.corpus.heldout)
    apart = -(-there // len(seen))  # rows, at most
    assert seen == sorted({*seen}) and len(seen) == min(most, there)
    assert max(np.diff([*seen, there])) <= apart and seen[0] == 0


@pytest.mark.parametrize("size", [2, 3, 40])
def test_processes_read_each_held_out_row_once_whatever_their_micro_batches(make, size):
    alone = make().heldout_sums()
    parts = [make(rank, size) for rank in range(size)]
    for rank, part in enumerate(parts):
        part.micro_batch_size = (8, 3, 5)[rank % 3]
    total = sum(part.heldout_sums() for part in parts)
    assert total[1] == alone[1] and total[0].item() == pytest.approx(alone[0].item(), rel=1e-5)


def test_utilisation_is_of_all_devices(make):
    budget, clock = Budget.parse("10step"), SimpleNamespace(shares=dict(step=2.0))
    spent = Spent(tokens=10, seconds=2.0, flops=1e9)
    progress = Progress(spent=spent, curve=[dict(heldout_loss=1.0)], matrix_rates=[1e9, 4e9, 2e9])
    one, four = (outcome(make(size=size), budget, replace(progress, processes=size), clock) for size in (1, 4))
    assert one["mfu"] == pytest.approx(0.25)  # of the median rate
    assert four["mfu"] == pytest.approx(one["mfu"] / 4) and four["devices"] == 4


def test_energy_is_reported_only_if_all_of_it_is_known(make, tmp_path):
    log = tmp_path / "log.jsonl"
    for logged, saved, known in ((70.0, 50.0, 70.0), (None, 50.0, None), (70.0, None, None)):
        log.write_text(json.dumps(dict(tokens=1, joules=logged)) + "\n")
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        state = asdict(Progress(spent=Spent(tokens=1), joules=saved))
        save_checkpoint(tmp_path / "checkpoints", 1, make().state(), state)
        assert resume(make(), tmp_path, Clock(50_000)).joules == known
    assert resume(make(), tmp_path / "new", Clock(50_000)).joules == 0


def test_last_validation_stops_nothing():
    config = TrainingConfig(early_stop_loss=4.0)
    assert reason_to_stop(config, 5.0, t=0.99) and not reason_to_stop(config, 5.0, t=1.0)
    assert reason_to_stop(config, float("nan"), t=1.0)


def test_line_behind_one_that_was_cut_off_is_kept(tmp_path):
    path, lines = tmp_path / "log.jsonl", [dict(tokens=number) for number in (1, 2, 3)]
    path.write_text(json.dumps(lines[0]) + '\n{"tokens": 9, "lo')
    logger = Logger(tmp_path, Budget.parse("10step"), Spent(), progress=False, tensorboard=False)
    logger.log(lines[1])
    file, logger.file = logger.file, SimpleNamespace(write=lambda data: file.write(data[:5]))  # the disk is full
    logger.log(dict(tokens=8))
    logger.file = file
    logger.log(lines[2])
    logger.close()
    assert read_log(path) == lines and path.read_bytes().count(b"\n") == 5


def test_no_process_tries_more_rows_than_its_share(make):
    trainer = make(size=4)
    choose_micro_batch(trainer)
    assert trainer.micro_batch_size <= -(-trainer.schedule.config.batch_size // 4)


@pytest.mark.parametrize("adaptive", [False, True])
def test_what_is_loaded_is_all_that_is_there(make, adaptive):
    trainer, fresh = (make(objective=dict(adaptive=adaptive)) for _ in range(2))
    before = {name: t.clone() for name, t in trainer.state().items()}
    learn(trainer, 3)
    trainer.load(before)
    assert not any(inner.state for inner in trainer.optimizer.inner.optimizers)
    learn(trainer, 2)
    learn(fresh, 2)
    ours, theirs = trainer.state(), fresh.state()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_masks_that_adapt_are_resumed_to_the_bit_and_validated_as_all_are(make):
    whole, first, second = (make(objective=dict(adaptive=True)) for _ in range(3))
    assert whole.heldout_loss() == make().heldout_loss()
    learn(whole, 4)
    learn(first, 2)
    first.accumulate_gradients(*first.corpus.batch(16, 8, 0), 0.5)  # a step that is never finished
    first.drop()
    second.load({name: t.clone() for name, t in first.state().items()})
    for step in (2, 3):
        second.accumulate_gradients(*second.corpus.batch(8 * step, 8, 0), 0.5)
        second.update(0.5)
    ours, theirs = second.state(), whole.state()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ours["token_scores"][1].sum() > 0
    rest = whole.seed, whole.length, whole.schedule.masking(0.5)
    before, *_, tokens = whole.predict(*whole.batch(0, 8), *rest)
    whole.token_scores.sums[:, ::2] = torch.tensor([[90.0], [100.0]])  # every other token is predicted well
    after, *_, as_many = whole.predict(*whole.batch(0, 8), *rest)
    assert before != after and tokens.sum() == as_many.sum()


def test_processes_share_what_they_count(make, monkeypatch):
    trainer = make(size=2, objective=dict(adaptive=True))
    scores = trainer.token_scores

    def as_if_the_other_had_the_same(tensor, *_):
        return tensor.mul_(2)

    monkeypatch.setattr(trainer.group, "all_reduce", as_if_the_other_had_the_same)
    trainer.accumulate_gradients(*trainer.batch(0, 8), 0.5)
    own = scores.new.clone()
    trainer.update(0.5)
    assert own[1].any() and not scores.new.any()
    assert torch.equal(scores.sums, 2 * own / scores.UNIT)


def test_what_does_not_fit_is_not_counted_twice(make, monkeypatch):
    """Memory runs out in a backward pass, and the sequences are computed again in halves."""
    plain, cramped = (make(objective=dict(adaptive=True), training=dict(micro_batch_size=8)) for _ in range(2))
    backward, calls = cramped.gradients.backward, []

    def out_of_memory_once(loss):
        calls.append(loss)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("out of memory")
        backward(loss)

    monkeypatch.setattr(cramped.gradients, "backward", out_of_memory_once)
    for trainer in (plain, cramped):
        trainer.accumulate_gradients(*trainer.batch(0, 8), 0.5)
    assert len(calls) == 3
    found, expected = cramped.token_scores.new, plain.token_scores.new
    assert found[1].equal(expected[1])
    torch.testing.assert_close(found[0].double(), expected[0].double(), rtol=0.01, atol=8)


@pytest.mark.parametrize("average", ["ema", "lawa"])
def test_before_the_first_step_an_average_is_the_weights(make, average):
    assert make(optimizer=dict(average=average)).heldout_loss() == make().heldout_loss()


@pytest.mark.parametrize("scale, stopped", [(2.0**16, ""), (1.0, "a gradient was not finite")])
def test_float16_may_search_for_its_loss_scale(make, tmp_path, scale, stopped):
    trainer = make(training=dict(nonfinite="stop"))
    run = TrainingRun(trainer, Budget.parse("10step"), tmp_path, Clock(50_000).start(), Progress(), NoLogger())
    run.train_step(0.0)
    trainer.optimizer.loss_scale.value.fill_(scale)
    trainer.optimizer.skipped.fill_(1)
    run.write_log()
    assert run.progress.stopped == stopped and run.progress.skipped_steps == 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype, scale", [(torch.float32, 1), (torch.float16, 2**16)])
def test_a_run_says_that_its_loss_scale_begins_anew(make, tmp_path, capsys, dtype, scale, rank):
    """In one line, by the first process, if the number format is another one."""
    saved, clock = make(), Clock(50_000)
    checkpoints = Checkpoints(tmp_path, saved, Budget.parse("10step"), clock, Progress())
    checkpoints.save()
    checkpoints.wait()
    resumed = make(rank, dtype=dtype)
    resume(resumed, tmp_path, clock)
    assert resumed.optimizer.loss_scale.value == scale
    said = "float16, another number format; its loss scale is 65536 now" in capsys.readouterr().out
    assert said == (dtype is torch.float16 and rank == 0)


def test_a_signal_in_the_step_that_crosses_a_snapshot_loses_nothing(make, tmp_path):
    """The 15th of 30 steps begins before 0.49 and ends behind it; then the run is asked to leave."""
    trainer, progress, signals = make(), Progress(), []
    take, folders = trainer.update, {f: tmp_path / str(f) for f in (0.49, 0.51)}
    state = Clock(50_000).start(), progress, NoLogger()
    run = TrainingRun(trainer, Budget.parse("30step"), tmp_path, *state, folders, signals)

    def update(t):
        take(t)
        if progress.spent.steps == 14:
            signals.append(signal.SIGTERM)

    trainer.update = update
    run.fit()
    _, saved = load_checkpoint(folders[0.49])
    assert (progress.spent.steps, saved["spent"]["steps"], progress.finished) == (15, 15, False)
    assert not folders[0.51].exists()


@pytest.mark.parametrize("broken, stopped", [(4, True), (3, False)])
def test_a_run_that_left_out_all_steps_says_so(make, tmp_path, broken, stopped):
    """Of four steps, the first `broken` have a gradient that is not finite."""
    trainer = make()
    good, compute = trainer.gradients.full_batch, trainer.accumulate_gradients

    def accumulate_gradients(ids, rows, epochs, t):
        trainer.gradients.full_batch = math.nan if t < broken / 4 else good
        compute(ids, rows, epochs, t)

    trainer.accumulate_gradients = accumulate_gradients
    found = pretrain(trainer, Budget.parse("4step"), tmp_path, Clock(50_000), progress=False)
    assert found["skipped_steps"] == broken
    assert found["stopped"].startswith("none of the 4 steps") == stopped


def test_a_run_that_stops_before_its_first_step_has_a_speed_of_zero(make, tmp_path):
    trainer = make(training=dict(early_stop_at=0.0, early_stop_loss=0.5))
    found = pretrain(trainer, Budget.parse("10s@1000tok/s"), tmp_path, progress=False)
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
    """A trainer that has chosen its micro-batch on such a device, where so many sequences fit in fact; and the device."""
    trainer = make(training=dict(micro_batch_size=0))
    device = Counting()
    device.room, device.first_rows = room, 512
    trainer.hardware = replace(trainer.hardware, device=device)
    trainer.schedule.config = replace(trainer.schedule.config, batch_size=256)

    def forward_backward(ids, *_):
        device.peak = max(device.peak, 1000 * len(ids))
        if len(ids) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.zeros(2)

    trainer.forward_backward = forward_backward
    choose_micro_batch(trainer)
    return trainer, device


def test_the_micro_batch_leaves_room_for_moments_and_a_tenth(make):
    moments = 8 * make().optimizer.flat_grads.numel() / 1000  # in sequences
    trainer, device = choosing(make, room=(60 + moments) / 0.9 + 0.01)
    assert 256 / 5 <= trainer.micro_batch_size <= 60  # five equal parts of a batch of 256
    assert device.released == 2  # after each pass


@pytest.mark.parametrize("fits, chosen", [(15, 8), (7, 8), (math.inf, 1)])
def test_where_an_estimate_fails_or_finds_nothing_few_sequences_are_tried(make, fits, chosen):
    trainer, _ = choosing(make, room=1 if fits == math.inf else 10**9, fits=fits)
    assert trainer.micro_batch_size == chosen


def test_a_device_that_does_not_tell_its_memory_gets_what_suits_it(make):
    trainer = make(training=dict(micro_batch_size=0))
    trainer.schedule.config = replace(trainer.schedule.config, batch_size=256)
    state = torch.get_rng_state()
    choose_micro_batch(trainer)
    assert trainer.micro_batch_size == trainer.hardware.device.first_rows
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("before, now, how", [(2, 1, "torchrun --nproc-per-node 2"), (1, 4, "without torchrun")])
def test_a_run_goes_on_with_as_many_processes_as_it_began_with(make, tmp_path, before, now, how):
    state = asdict(Progress(spent=Spent(tokens=1), processes=before))
    save_checkpoint(tmp_path / "checkpoints", 1, make().state(), state)
    with pytest.raises(UserError, match=f"started with {before} processes, not {now}; .*{how}"):
        resume(make(size=now), tmp_path, Clock(50_000))
    save_checkpoint(tmp_path / "checkpoints", 2, make().state(), state | dict(finished=True))
    assert resume(make(size=now), tmp_path, Clock(50_000)).processes == before  # nothing is left to do


def test_all_processes_use_the_smallest_micro_batch_and_hear_of_a_signal(make, tmp_path):
    class Agreeing(MadeUpGroup):
        def largest(self, *values):
            return [7.0, 15.0, -3.0] if len(values) == 3 else list(values)

    trainer = make(size=2)
    trainer.group = Agreeing(1, 2)
    signals = []
    clock = Clock(50_000).start()
    run = TrainingRun(trainer, Budget.parse("10s"), tmp_path, clock, Progress(), NoLogger(), signals=signals)
    assert run.run_clock.read() == 0.7 and trainer.micro_batch_size == 3
    assert run.run_clock.stop_signal == 15 and signals == [15]


def test_a_day_has_a_thousand_log_lines():
    budget, spent = Budget.parse("24h"), Spent()
    interval, lines = Interval(budget, spent, 1.0, 0.01, 0.001), 0
    for second in range(0, 24 * 3600, 5):
        spent.seconds = float(second)
        lines += interval.due()
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
    trainer, tried = make(), []

    def step(*_):
        tried.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.accumulate_gradients(*trainer.corpus.batch(0, 8, 0), 0.5)
    monkeypatch.setattr(trainer.optimizer, "step", step)
    with pytest.raises(UserError, match="choose a smaller training.micro_batch_size"):
        trainer.update(0.5)
    assert len(tried) == 1


def test_a_process_without_sequences_adds_nothing(make):
    trainer = make()
    learn(trainer, 1)
    trainer.optimizer.flat_grads.fill_(1.0)  # what the step before left
    trainer.gradients.reduce()
    assert not trainer.optimizer.flat_grads.any() and trainer.gradients.num_predicted == 0


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
    state = asdict(Progress(spent=Spent(tokens=1)))
    del state["schema"]  # the first version had none
    save_checkpoint(tmp_path / "checkpoints", 1, make().state(), state)
    with pytest.raises(UserError, match="another version of cramming_nb"):
        resume(make(), tmp_path, Clock(50_000))


@pytest.mark.parametrize("clock, due", [(Clock(), False), (Clock(50_000), True)])
def test_no_validation_begins_that_would_outlast_the_real_time_of_a_budget(make, clock, due):
    progress = Progress(spent=Spent(seconds=59.0), curve=[dict(fraction=0.2)])
    validation = Validation(make(), Budget.parse("60s"), clock, progress, NoLogger())
    validation.seconds = 2.0
    assert validation.is_due(0.98) == due
