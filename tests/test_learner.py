"""What a trainer adds up, counts and restores, looked at without a run."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import command

from cramming_nb.budget import Budget, Clock, Spent
from cramming_nb.corpus import Corpus
from cramming_nb.hardware import Hardware
from cramming_nb.recipes import load_recipe
from cramming_nb.schedule import LEVELS
from cramming_nb.training import (
    NoLogger,
    ProcessGroup,
    Progress,
    Trainer,
    TrainingRun,
    compiled_by_levels,
    find_micro_batch,
    outcome,
)


class Imagined(ProcessGroup):
    """Process `rank` of `size`, of which the others are imagined to have nothing to add."""

    def __init__(self, rank: int = 0, size: int = 1):
        super().__init__()
        self.rank, self.size = rank, size

    def all_reduce(self, tensor, op=None):
        return tensor

    def gather(self, tensor):
        return [tensor] * self.size

    def wait_long(self):
        return None


@pytest.fixture(scope="module")
def make(tiny):
    """Makes trainers of the tiny recipe, as process `rank` of `size`, with some of their settings changed."""
    assert command("data", "build", *tiny.options()[:3], cache=tiny.cache).code == 0
    corpus, r = Corpus(next(tiny.cache.glob("corpus-*"))), load_recipe(str(tiny.recipe))
    arch = replace(r.architecture, vocab_size=r.corpus.vocab_size, max_length=r.corpus.seq_length)

    def trainer(rank: int = 0, size: int = 1, optimizer=(), training=(), compiled: bool = False):
        group = Imagined(rank, size)
        settings = replace(r.optimizer, **dict(optimizer)), r.schedule, replace(r.training, **dict(training))
        exact = Hardware.detect(torch.float32)
        return Trainer(corpus, arch, r.objective, *settings, exact, compiled=compiled, group=group)

    return trainer


def learn(trainer: Trainer, steps: int):
    for step in range(steps):
        trainer.micro_batch(*trainer.corpus.batch(8 * step, 8, 0), 0.5)
        trainer.update(0.5)


@pytest.mark.parametrize("most", [7, 10**6])
def test_held_out_rows_are_spread_over_all_there_are(make, monkeypatch, most):
    seen, trainer = [], make(training=dict(heldout_rows=most))
    monkeypatch.setattr(trainer, "loss", lambda ids, rows, *_: seen.extend(rows) or (torch.zeros(()), torch.ones(())))
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
    progress = Progress(spent=spent, curve=[dict(heldout_loss=1.0)], rates=[1e9, 4e9, 2e9])
    one, four = (outcome(make(size=size), budget, progress, clock) for size in (1, 4))
    assert one["mfu"] == pytest.approx(0.25)  # of the median rate
    assert four["mfu"] == pytest.approx(one["mfu"] / 4) and four["devices"] == 4


def test_no_process_tries_more_rows_than_its_share(make):
    trainer = make(size=4)
    assert find_micro_batch(trainer) <= -(-trainer.schedule.batch_size // 4)


def test_what_is_loaded_is_all_that_is_there(make):
    trainer, fresh = make(), make()
    before = {name: t.clone() for name, t in trainer.state().items()}
    learn(trainer, 3)
    trainer.load(before)
    assert not any(rule.state for rule in trainer.optimizer.optimizers)
    learn(trainer, 2)
    learn(fresh, 2)
    ours, theirs = trainer.state(), fresh.state()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


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
    run.log()
    assert run.progress.stopped == stopped and run.progress.skipped == 1


def test_a_graph_for_each_level_is_allowed():
    compiled_by_levels(lambda x: x)
    assert torch._dynamo.config.recompile_limit > 2 * LEVELS + 1
