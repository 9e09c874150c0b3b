"""Counting words: the same result each time, no crash on odd tasks, and records that agree with the code."""

import itertools
import json
import os
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from counting_records import choose, containing_rows, deciding, held_back_score, main, training_rows

from cramming_nb.app.counting import (
    CountingConfig,
    PairOverlap,
    bag_of_words,
    fit_counts,
    same_answer,
)
from cramming_nb.app.probes import probe_tasks
from cramming_nb.app.scores import ScoreTable, compare
from cramming_nb.engine.errors import UserError
from cramming_nb.glue import TASKS, Task, TaskData, accuracy, load_glue

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "records" / "counting"
GLUE = Path(os.environ.get("GLUE_DIR", ROOT.parent / "shared" / "data" / "glue"))
NOUNS = "lamp kettle engine garden letter bridge".split()
WORDS = {1: ("good", "fine", "bright"), 0: ("bad", "dull", "broken")}


def single(task: str = "sst2") -> TaskData:
    """A task of one sentence that single words decide."""
    rows = [(f"The {noun} is {word}.", None, label) for label in WORDS for word in WORDS[label] for noun in NOUNS]
    return TaskData(TASKS[task], rows[::2], {task: rows[1::2]})


def pairs(task: str) -> TaskData:
    """A task of two sentences that have the same noun or do not."""
    rows = []
    for one, two, word in itertools.product(NOUNS, NOUNS[:3], WORDS[1]):
        label = int(one == two)
        rows.append((f"The {one} is {word}.", f"A {word} {two}.", 5.0 * label if task == "stsb" else label))
    return TaskData(TASKS[task], rows[::2], {column: rows[1::2] for column in TASKS[task].columns})


DATA = {name: pairs(name) if task.pair else single(name) for name, task in TASKS.items()}


@pytest.mark.parametrize("name", TASKS)
def test_each_task_has_a_result_like_that_of_a_fine_tuning(name):
    result = bag_of_words(DATA[name])
    assert (result["task"], result["init"], result["seed"]) == (name, "counting", 0)
    assert set(result["scores"]) == set(result["intervals"]) == set(result["replicates"]) == set(TASKS[name].columns)
    assert all(len(drawn) == 200 for drawn in result["replicates"].values())
    assert result["train_rows"] == len(DATA[name].train) and result["data"] == DATA[name].digest
    assert json.loads(json.dumps(result))["scores"] == result["scores"]


@pytest.mark.parametrize("name", ["sst2", "stsb", "mrpc"])
def test_the_same_seed_gives_the_same_result(name):
    one, two = (bag_of_words(DATA[name], seed=3) for _ in range(2))
    assert {**one, "seconds": 0} == {**two, "seconds": 0}


@pytest.mark.parametrize("name", ["sst2", "stsb", "mrpc"])
def test_words_that_decide_are_found(name):
    counted, constant = bag_of_words(DATA[name])["scores"][name], same_answer(DATA[name])["scores"][name]
    assert counted > 0.75 > constant


def test_results_are_compared_and_shown_like_those_of_models():
    counted, constant = [bag_of_words(DATA["sst2"])], [same_answer(DATA["sst2"])]
    difference, low, high = compare(counted, constant, ("counting", "constant"))["sst2"]
    assert 0 < low <= difference <= high
    assert "1 of 9" in ScoreTable(counted).coverage()


@pytest.mark.parametrize("name", TASKS)
def test_without_training_rows_there_is_one_clear_line(name):
    empty = replace(DATA[name], train=[])
    for baseline in (bag_of_words, same_answer):
        with pytest.raises(UserError, match="no training rows"):
            baseline(empty)


def test_training_rows_without_words_are_refused():
    with pytest.raises(UserError, match="no training rows with words"):
        fit_counts(TASKS["mrpc"], [(" ", "", 0), ("", "", 1)])


@pytest.mark.parametrize("name", ["sst2", "mrpc", "mnli", "stsb"])
def test_one_label_only_is_repeated_and_noted(name):
    data = DATA[name]
    same = replace(data, train=[(first, second, 1) for first, second, _ in data.train])
    result = bag_of_words(same)
    assert any("one class in training" in note for note in result["notes"])
    assert any("the same answer to every row" in note for note in result["notes"])
    model = fit_counts(data.task, same.train)
    (rows, *_) = data.dev.values()
    assert np.allclose(model.predict(rows), 1)


ODD = {
    "nothing shared": ("The lamp is on.", "Kettles boil slowly"),
    "empty second sentence": ("The lamp is on.", ""),
    "empty first sentence": ("", "The lamp is on."),
    "both empty": ("", ""),
    "no letters": ("?!", "..."),
    "another script": ("灯亮着。", "灯不亮。"),
    "no second sentence": ("The lamp is on.", None),
}


@pytest.mark.parametrize("row", ODD.values(), ids=ODD)
@pytest.mark.parametrize("name", ["stsb", "mrpc", "mnli"])
def test_odd_pairs_are_answered(name, row):
    with warnings.catch_warnings(action="error"):
        (found,) = fit_counts(TASKS[name], DATA[name].train).predict([(*row, 0)])
    assert np.isfinite(found)


@pytest.mark.parametrize("row", ODD.values(), ids=ODD)
def test_pairs_that_are_odd_in_training_are_learned_from(row):
    if not any(text and text.strip() for text in row):
        row = (*row[:1], "word")
    rows = [(*row, label) for label in (0, 1)] * 3
    for name in ("stsb", "mrpc"):
        assert np.isfinite(fit_counts(TASKS[name], rows).predict(rows)).all()


def test_two_rows_are_enough():
    for name in ("sst2", "stsb", "mrpc"):
        by_label = {row[2]: row for row in DATA[name].train}
        rows = list(by_label.values())
        assert len(rows) == 2
        assert np.isfinite(fit_counts(TASKS[name], rows).predict(rows)).all()


def test_more_than_two_classes_are_told_apart():
    task = Task("colour", "", False, ("red", "green", "blue"), accuracy)
    rows = [(f"The {noun} is {task.labels[label]}.", None, label) for noun in NOUNS for label in range(3)]
    data = TaskData(task, rows[:12], {"colour": rows[12:]})
    assert bag_of_words(data)["scores"]["colour"] == 1.0


def test_overlap_is_within_its_bounds():
    rows = [(*row, 0) for row in ODD.values()] + DATA["mrpc"].train
    found = PairOverlap().fit(DATA["mrpc"].train).transform(rows).toarray()
    assert found.shape == (len(rows), 15) and np.isfinite(found).all()
    assert found.min() >= -1 and found.max() <= 1 + 1e-9
    assert (found[0, :5] < 0.5).all()


def test_a_row_goes_with_the_longest_row_that_contains_it():
    texts = ["a good film", "it is a good film today", "good", "a goo", "A Good  film", "another film"]
    assert containing_rows([(text, None, 0) for text in texts]).tolist() == [1, 1, 1, 3, 1, 5]


def test_held_back_rows_are_not_learned_from():
    """Labels at random: a row's own phrases give its label away to random folds, and to no others."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(60):
        label = int(rng.integers(2))
        words = [f"w{number}x{place}" for place in range(6)]
        rows += [(" ".join(words[:length]), None, label) for length in (6, 4, 3)]
    data, config = TaskData(TASKS["sst2"], rows, {}), CountingConfig(words=1, min_rows=1)
    assert held_back_score(data, config, together=False) > 80
    assert held_back_score(data, config) < 65


def test_choosing_reads_no_development_row(tmp_path):
    for name in ("sst2", "mrpc"):
        folder = tmp_path / TASKS[name].folder
        folder.mkdir()
        lines = []
        for first, second, label in DATA[name].train:
            texts = dict(sentence=first) if second is None else dict(sentence1=first, sentence2=second)
            lines.append(json.dumps(texts | dict(label=label)))
        (folder / "train.jsonl").write_text("\n".join(lines))
    tasks = training_rows(str(tmp_path))  # without dev.jsonl, a reader of it would fail
    assert list(tasks) == ["sst2", "mrpc"] and all(data.dev == {} for data in tasks.values())
    found = choose(tasks, {"words": (1, 2), "alpha": (1.0, 3.0)}, CountingConfig(words=1))
    best = max(found["trials"], key=lambda trial: trial["mean"])
    assert best["settings"] == found["chosen"] and set(found["random_folds"]) == {"sst2", "mrpc"}


def test_a_setting_that_decides_nothing_is_not_tried_twice():
    one, two = CountingConfig(), CountingConfig(alpha=9.0, shared=False)
    assert deciding(DATA["sst2"], one) == deciding(DATA["sst2"], two)
    assert deciding(DATA["mrpc"], one) != deciding(DATA["mrpc"], two)
    assert deciding(DATA["stsb"], one) != deciding(DATA["stsb"], two)


def test_probes_are_counted():
    lines = [
        f"{noun} number {number} stands near the old {other} today."
        for noun, other in itertools.permutations(NOUNS, 2)
        for number in range(3)
    ]
    docs = [dict(text=" ".join(lines[start : start + 9]), source=("a", "b")[start % 2]) for start in range(80)]
    for name, data in probe_tasks(docs, train=60, dev=30).items():
        assert np.isfinite(bag_of_words(data)["scores"][name])


# The records


def read(name: str) -> dict:
    return json.loads((RECORDS / name).read_text())


def test_the_defaults_are_what_was_chosen():
    found = read("choice.json")
    best = max(found["trials"], key=lambda trial: trial["mean"])
    assert best["settings"] == found["chosen"] == asdict(CountingConfig()) == read("glue.json")["settings"]


def test_the_record_of_glue_has_both_baselines_on_the_official_rows():
    results = read("glue.json")["results"]
    constant = json.loads((ROOT / "records/glue/constant.json").read_text())["scores"]
    assert {r["task"]: round(r["scores"][r["task"]], 4) for r in results if r["init"] == "constant"} == constant
    for result in results:
        task = TASKS[result["task"]]
        assert (result["train_rows"], *result["dev_rows"].values()) == task.rows


@pytest.mark.skipif(not GLUE.is_dir(), reason="no GLUE here; name its folder in GLUE_DIR")
@pytest.mark.parametrize("name", ["rte", "cola", "stsb"])
def test_the_record_of_glue_is_made_again(name):
    (kept,) = (r for r in read("glue.json")["results"] if (r["task"], r["init"]) == (name, "counting"))
    found = bag_of_words(load_glue(GLUE, (name,))[name])
    assert found["data"] == kept["data"]
    assert found["scores"][name] == pytest.approx(kept["scores"][name], abs=0.002)


def test_the_script_writes_a_record(tmp_path, capsys):
    folder = tmp_path / "CoLA"
    folder.mkdir()
    lines = [json.dumps(dict(sentence=first, label=label)) for first, _, label in DATA["cola"].train]
    for split in ("train", "dev"):
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    main(["score", str(tmp_path), str(tmp_path / "out" / "glue.json")])
    found = json.loads((tmp_path / "out" / "glue.json").read_text())
    assert [result["init"] for result in found["results"]] == ["counting", "constant"]
    assert "glue.json" in capsys.readouterr().out
