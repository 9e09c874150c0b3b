"""Scores on held-back training rows: development rows are not read, and the record goes on where it stopped."""

import json

import task_records


def test_record_of_tasks(finished, glue, tmp_path, monkeypatch):
    monkeypatch.setattr(task_records, "FROZEN", ("cola", "stsb"))
    for path in glue.glob("*/dev.jsonl"):
        path.unlink()
    call = [str(tmp_path / "out.json"), str(finished.folder), "--glue-dir", str(glue)]
    task_records.main(call)
    whole = json.loads((tmp_path / "out.json").read_text())
    first = whole["rows"]
    name = first[0]["recipe"]
    assert [(row["how"], row["task"]) for row in first] == [
        ("frozen", "cola"), ("frozen", "stsb"), ("tuned", "stsb"), ("first token", "stsb"), ("batch 32", "stsb"),
    ]  # fmt: skip
    scores = [row["score"] for row in first]
    assert whole["frozen"] == {name: [round((scores[0] + scores[1]) / 2, 3)]}
    assert whole["stsb"] == {name: scores[2:3], f"{name}, first token": scores[3:4], f"{name}, batch 32": scores[4:]}
    task_records.write(tmp_path / "out.json", first[:3])
    task_records.main(call)
    again = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert again[:3] == first[:3] and [row["score"] for row in again] == [row["score"] for row in first]
