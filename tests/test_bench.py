"""The bench: every contestant has the size that was asked for."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from cramming_nb import bench
from cramming_nb.hardware import Hardware
from cramming_nb.recipes import RECIPES, change


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
