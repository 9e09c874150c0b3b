"""The records of the crossing: scores of random weights are not computed twice."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from crossing_records import known_baseline

from cramming_nb.app.records import RunRecord

LAB = Path(__file__).resolve().parents[1] / "records" / "lab"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder with the record of a run of three minutes, seed 2."""
    shutil.copy(LAB / "crossing_2x256-3m-2.json", tmp_path)
    return tmp_path


@pytest.fixture
def longer() -> RunRecord:
    """The record of ten minutes, with the same size and seed; its random weights were scored by themselves."""
    return RunRecord.read(LAB / "crossing_2x256-10m-2.json")


def scores(results: list[dict]) -> dict[str, dict]:
    """The scores of random weights by task."""
    return {result["task"]: result["scores"] for result in results if result["init"] == "random"}


def digests(record: RunRecord) -> dict[str, str]:
    """The digests of the tasks that a record has scores of."""
    return {result["task"]: result["data"] for result in record.results}


def test_another_budget_has_the_same_random_weights(out, longer):
    found = known_baseline(longer, out, digests(longer))
    assert len(found) == 5
    assert scores(found) == scores(longer.results)


@pytest.mark.parametrize("part, field, value", [("architecture", "num_layers", 3), ("protocol", "lr", 1e-3)])
def test_another_recipe_is_scored(out, longer, part, field, value):
    recipe = longer.recipe | {part: longer.recipe[part] | {field: value}}
    assert known_baseline(replace(longer, recipe=recipe), out, digests(longer)) == []


def test_another_seed_tokenizer_or_task_is_scored(out, longer):
    found = digests(longer)
    assert known_baseline(replace(longer, seed=3), out, found) == []
    files = {"tokenizer.json": {"file": "tokenizer.json", "sha256": "0"}}
    assert known_baseline(replace(longer, corpus=longer.corpus | {"files": files}), out, found) == []
    assert known_baseline(longer, out, found | {"rte": "other rows"}) == []
    assert known_baseline(longer, out, {"rte": found["rte"]}) == []


def test_nothing_is_known_in_an_empty_folder(tmp_path, longer):
    assert known_baseline(longer, tmp_path, digests(longer)) == []
