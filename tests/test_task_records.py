"""Scores on held-back training rows: development rows are not read, and the record goes on where it stopped."""

import json

import task_records


def test_record_of_tasks(finished, glue, tmp_path, monkeypatch):
    monkeypatch.setattr(task_records, "FROZEN", ("cola", "stsb"))
    for path in glue.glob("*/dev.jsonl"):
        path.unlink()
    call = [str(tmp_path / "out.json"), str(finished.folder), "--glue-dir", str(glue)]
    task_records.main(call)
    first = json.loads((tmp_path / "out.json").read_text())
    assert [(row["how"], row["task"]) for row in first] == [
        ("frozen", "cola"), ("frozen", "stsb"), ("tuned", "stsb"), ("first token", "stsb"), ("batch 32", "stsb"),
    ]  # fmt: skip
    (tmp_path / "out.json").write_text(json.dumps(first[:3]))
    task_records.main(call)
    again = json.loads((tmp_path / "out.json").read_text())
    assert again[:3] == first[:3] and [row["score"] for row in again] == [row["score"] for row in first]
