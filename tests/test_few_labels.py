"""Few labels: what is drawn, and that a record goes on where it stopped."""

import json

import few_labels
import pytest
from few_labels import draw, main

from cramming_nb.glue import TASKS, TaskData, load_glue


@pytest.fixture
def glue(tmp_path):
    """A folder with one small task of GLUE."""
    folder = tmp_path / "glue" / "SST-2"
    folder.mkdir(parents=True)
    rows = [dict(idx=i, sentence="good " * (i % 2) + f"film {i}", label=i % 2) for i in range(40)]
    for split, some in (("train", rows), ("dev", rows[:10])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return str(tmp_path / "glue")


def test_a_larger_draw_holds_the_smaller_one():
    rows = [(f"text {i}", None, i % 2) for i in range(50)]
    data = TaskData(TASKS["sst2"], rows, {"sst2": rows[:5]})
    few, more = draw(data, 10, 3).train, draw(data, 20, 3).train
    assert more[:10] == few and len(set(more)) == 20
    assert draw(data, 10, 4).train != few and draw(data, 10, 3).dev == data.dev


def test_the_record_goes_on(finished, glue, tmp_path, monkeypatch):
    monkeypatch.setattr(few_labels, "EPOCHS", {8: 1})
    out = tmp_path / "out.json"
    asked = [glue, str(out), str(finished.folder), "--draws", "1"]
    main(asked)
    scores = json.loads(out.read_text())["scores"]
    assert [row["init"] for row in scores] == ["constant", "counting", "pretrained", "random"]
    assert all(row["task"] == "sst2" and 0 <= row["score"] <= 100 for row in scores)
    assert list(load_glue(glue)) == ["sst2"]

    changed = json.loads(out.read_text())
    changed["scores"] = [row | dict(score=-1) for row in scores[:3]]
    out.write_text(json.dumps(changed))
    main(asked)
    again = json.loads(out.read_text())["scores"]
    assert [row["score"] for row in again[:3]] == [-1] * 3 and again[3] == scores[3]

