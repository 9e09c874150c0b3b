"""A run in time lets fewer threads compute where that is faster; a run that promises its bits never does."""

import pytest
import torch
from conftest import command

from cramming_nb.engine.hardware import Threads


@pytest.fixture
def used(monkeypatch):
    """The numbers of threads that runs ask for, on two threads."""
    asked, use = [], Threads.use

    def spy(self, number):
        asked.append(number)
        use(self, number)

    monkeypatch.setattr(Threads, "use", spy)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield asked
    torch.set_num_threads(before)


def pretrain(tiny, home, budget: str):
    said = command("pretrain", *tiny.options(budget), "--name", "run", cwd=home, cache=tiny.cache)
    assert said.code == 0, said.err


def test_a_run_in_time_tries_both_and_leaves_the_threads_as_they_were(used, tiny, tmp_path):
    pretrain(tiny, tmp_path, "3s")
    assert used[:4] == [2, 2, 1, 1] and used[-1] == 2
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("budget", ["2048tok", "1s@4000tok/s"])
def test_a_run_that_promises_its_bits_keeps_its_threads(budget, used, tiny, tmp_path):
    pretrain(tiny, tmp_path, budget)
    assert used == [] and torch.get_num_threads() == 2


def test_every_choice_is_timed_twice_and_the_fastest_goes_on():
    seconds = {4: 3.0, 3: 1.0, 2: 1.5}
    threads = Threads(lambda number: None)
    threads.choices = sorted(seconds, reverse=True)
    threads.begin()
    order = []
    for _ in range(6):
        order.append(threads.number)
        threads.note(seconds[threads.number], 100)
    assert order == [4, 4, 3, 3, 2, 2] and threads.number == 3


def test_a_single_thread_has_no_choice():
    asked = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    threads = Threads(asked.append)
    torch.set_num_threads(before)
    for _ in range(30):
        threads.note(1.0, 100)
    assert set(asked) == {1}
