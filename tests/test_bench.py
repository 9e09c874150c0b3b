"""The bench: every contestant has the size that was asked for."""

from dataclasses import replace

import pytest

from cramming_nb import bench
from cramming_nb.hardware import Hardware


@pytest.mark.parametrize("length", [64, 128, 256])
def test_our_step_has_the_size_that_was_asked_for(monkeypatch, length):
    seen = []
    monkeypatch.setattr(bench, "recipe_steps", lambda recipe, *_, **__: seen.append(recipe.architecture))
    small = replace(bench.SIZES["small"][0], max_length=length)
    bench.our_step(small, 8, Hardware.detect())
    assert seen == [small]
