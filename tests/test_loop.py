"""What the loop costs, in time and in memory, over the steps it takes: minutes, so they run with `make test-slow`."""

import time
from dataclasses import replace
from statistics import median

import pytest
from conftest import Killable, command

from cramming_nb.budget import Budget
from cramming_nb.corpus import Corpus
from cramming_nb.engine import hardware, hooks
from cramming_nb.engine.hardware import Hardware
from cramming_nb.engine.hooks import read_log
from cramming_nb.recipes import RECIPES, load_recipe
from cramming_nb.training import Learner, pretrain

pytestmark = pytest.mark.slow
STEPS, ROWS = 300, 32


@pytest.fixture(scope="module")
def learner(tiny):
    """Makes learners of the size of `pocket` on the tiny text."""
    assert command("data", "build", *tiny.options()[:3], cache=tiny.cache).code == 0
    corpus, arch = Corpus(next(tiny.cache.glob("corpus-*"))), RECIPES["pocket"].architecture
    r = load_recipe(str(tiny.recipe))
    arch = replace(arch, vocab_size=r.corpus.vocab_size, max_length=r.corpus.seq_length)
    schedule = replace(r.schedule, batch_size=ROWS)
    training = replace(r.training, micro_batch_size=ROWS, validations=1, checkpoint_fraction=0.25)
    return lambda: Learner(corpus, arch, r.objective, r.optimizer, schedule, training, Hardware.detect())


@pytest.fixture(autouse=True)
def in_full(monkeypatch):
    """Measure the matrix rate for as long as users wait for it: here it is part of what is timed."""
    monkeypatch.setattr(hooks, "matrix_rate", hardware.matrix_rate)


def bare(learner: Learner) -> float:
    """Seconds of the steps alone."""
    begun = time.perf_counter()
    for step in range(STEPS):
        learner.gradients.add(*learner.corpus.batch(ROWS * step, ROWS, 0), 0.5)
        learner.update(0.5)
    return time.perf_counter() - begun


def test_loop_log_and_checkpoints_cost_under_three_percent(learner, tmp_path):
    ratios = []
    for number in range(5):
        alone = bare(learner())
        run = pretrain(learner(), Budget.parse(f"{STEPS}step"), tmp_path / str(number), progress=False)
        ratios.append((run["spent"]["seconds"] - run["shares"]["validation"]) / alone)
    assert median(ratios) < 1.03, ratios


def test_memory_does_not_grow(tiny, tmp_path):
    run = Killable("pretrain", *tiny.options("60s"), "--name", "run", cwd=tmp_path, cache=tiny.cache)
    assert run.end() == 0
    told = [line for line in read_log(tmp_path / "runs" / "run" / "log.jsonl") if "memory" in line]
    # The matrices that measure the machine are first held beside a step at a quarter of the budget, and at half.
    warm = next(line["memory"] for line in told if line["fraction"] > 0.55)
    assert told[-1]["memory"] <= 1.01 * warm
