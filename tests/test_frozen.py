"""The frozen protocol: vectors without padding, constants chosen without development rows, results that join the record."""

import json
from dataclasses import replace

import frozen_rows
import numpy as np
import pytest
import torch
from conftest import contents, lines
from frozen_records import main
from test_glue import SMALL, word_rows, word_tokenizer

from cramming_nb.app import frozen
from cramming_nb.app.records import RunRecord
from cramming_nb.architecture import POOLINGS, Encoder, pair_features
from cramming_nb.engine.hardware import DEVICES
from cramming_nb.glue import TASKS, TaskData, collate, encode

CPU = DEVICES["cpu"]


@pytest.fixture
def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder(SMALL).eval()


def task_data(name: str, count: int = 60) -> TaskData:
    rows = word_rows(count + 20, TASKS[name].pair, 6 if name == "stsb" else 2)
    return TaskData(TASKS[name], rows[:count], {name: rows[count:]})


@pytest.mark.parametrize("name", ["cola", "rte"])
@pytest.mark.parametrize("tokens", [1, 50, 10**6])
def test_vectors_are_those_of_padded_batches(name, tokens, encoder, monkeypatch):
    """Whatever the size of a batch; rows that repeat are encoded once, and keep their places."""
    monkeypatch.setattr(frozen, "TOKENS", tokens)
    rows = task_data(name).train
    rows = [*rows[:9], *rows[:3], *rows[:9]]
    encoded = encode(word_tokenizer(), rows, 16, pairs="both")
    views = len(encoded[0])
    with torch.no_grad():
        ids, mask = collate(encoded, CPU)
        pooled = POOLINGS["mean"](encoder(ids, attention_mask=mask), mask)
        expected = pair_features(pooled.unflatten(0, (-1, views)))
    seen, really = [], encoder.forward
    monkeypatch.setattr(encoder, "forward", lambda ids: seen.append(len(ids)) or really(ids))
    found = frozen.frozen_features(encoder, encoded, CPU)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    assert sum(seen) == len({tuple(view) for views in encoded for view in views})


@pytest.mark.parametrize("name", ["cola", "rte", "stsb"])
def test_development_rows_choose_nothing(name, encoder):
    """Other development labels change the scores, and neither constants nor answers."""
    data = task_data(name)
    other = replace(data, dev={name: [(*row[:2], 1 - row[2] % 2) for row in data.dev[name]]})
    one, two = (frozen.score_frozen(d, encoder, word_tokenizer(), CPU) for d in (data, other))
    for kind in ("frozen", "both"):
        assert (one[kind]["C"], one[kind].get("weight")) == (two[kind]["C"], two[kind].get("weight"))
        assert one[kind]["scores"] != two[kind]["scores"]
        assert one[kind]["C"] in frozen.CONSTANTS and one["both"]["weight"] in frozen.WEIGHTS


def test_what_the_vectors_say_is_learned(encoder):
    """Whether a sentence begins with w4: a bag of words cannot know when w4 is in every sentence."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(400):
        words = ["w4", *(f"w{i}" for i in rng.integers(5, 30, 4))]
        label = number % 2
        if not label:
            words = [*words[1:], "w4"]
        rows.append((" ".join(words), None, label))
    data = TaskData(TASKS["sst2"], rows[:300], {"sst2": rows[300:]})
    found = frozen.score_frozen(data, encoder, word_tokenizer(), CPU)
    assert found["frozen"]["scores"]["sst2"] > 0.8


@pytest.mark.parametrize("name", ["cola", "stsb"])
def test_one_label_only(name, encoder):
    rows = [(*row[:2], 1) for row in task_data(name).train]
    found = frozen.score_frozen(TaskData(TASKS[name], rows, {name: rows[:9]}), encoder, word_tokenizer(), CPU)
    assert f"{name}: one class in training" in found["frozen"]["notes"]
    assert np.isfinite(found["both"]["scores"][name])


def test_large_tasks_are_drawn_from(encoder, monkeypatch):
    monkeypatch.setattr(frozen, "MOST_ROWS", 40)
    data = task_data("cola")
    found = frozen.score_frozen(data, encoder, word_tokenizer(), CPU)["frozen"]
    assert found["train_rows"] == 40 and found["data"] == data.digest


def test_frozen_scores_join_the_record(a_copy, glue):
    argv = ["glue", "first", "--glue-dir", glue, "--protocol", "frozen"]
    said = a_copy.command(*argv, "--seeds", "2")
    assert said.code == 0, said.err
    for line in ("majority baseline", "bag of words", "frozen, no pretraining", "frozen", "bag of words + frozen"):
        assert f"\n| {line} | " in said.out
    record = RunRecord.read(a_copy.folder / "record.json")
    inits = [(r["init"], r["seed"]) for r in record.results if r["task"] == "rte"]
    assert sorted(inits) == [
        ("both", 0), ("constant", 0), ("counting", 0), ("frozen", 0), ("frozen random", 0), ("frozen random", 1),
    ]  # fmt: skip
    before = contents(a_copy.folder)
    assert a_copy.command(*argv, "--seeds", "2").out == said.out and contents(a_copy.folder) == before
    (path,) = (a_copy.folder / "glue").glob("rte-frozen-0-*.json")
    assert {r["init"] for r in json.loads(path.read_text())} == {"frozen", "both"}


def test_baseline_is_left_out_and_submission_refused(a_copy, glue):
    said = a_copy.command("glue", "first", "--glue-dir", glue, "--protocol", "frozen", "--no-baseline")
    assert said.code == 0 and "no pretraining" not in said.out and "\n| frozen | " in said.out
    said = a_copy.command("glue", "first", "--glue-dir", glue, "--protocol", "frozen", "--submission")
    (line,) = lines(said.err)
    assert said.code == 2 and "a protocol that fine-tunes" in line


def test_record_of_costs_and_ranks(finished, glue, tmp_path):
    """Frozen beside fine-tuned scores; what is known is not measured again."""
    call = [str(tmp_path / "out.json"), str(finished.folder), "--glue-dir", str(glue), "--tasks"]
    main([*call, "rte"])
    main([*call, "rte", "cola"])
    first, second = json.loads((tmp_path / "out.json").read_text())["scores"]
    assert (first["task"], second["task"]) == ("rte", "cola") and first["encoding"] > 0 < first["fitting"]
    assert first["fine_tuned"] == [] and 0 <= first["scores"]["rte"] <= 1


def test_record_of_rows(finished, glue, tmp_path):
    (glue / "CoLA").rename(glue / "SST-2")
    (glue / "SST-2" / "dev.jsonl").unlink()
    frozen_rows.main([str(tmp_path / "out.json"), str(finished.folder), "--glue-dir", str(glue)])
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["held_back"] == 2 and record["encoding"] > 0 and {row["rows"] for row in record["scores"]} == {22}
