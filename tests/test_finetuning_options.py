"""The options of fine-tuning on training rows: what is scored, and that the record goes on where it stopped."""

import json

from finetuning_options import main, sample


def test_record_of_options(finished, glue, tmp_path, capsys):
    call = [str(tmp_path / "out.json"), str(finished.folder), "--glue-dir", str(glue), "--tasks", "rte", "cola"]
    main([*call, "--seeds", "1"])
    first = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(r["task"], r["trial"]) for r in first] == [
        ("rte", "as it is"), ("rte", "layer decay 0.8"), ("rte", "twice the epochs"),
        ("cola", "as it is"), ("cola", "layer decay 0.8"),
    ]  # fmt: skip
    main([*call, "--seeds", "2"])
    assert json.loads((tmp_path / "out.json").read_text())["results"][:5] == first
    capsys.readouterr()
    main([*call, "--show"])
    assert "twice the epochs     rte " in capsys.readouterr().out


def test_development_rows_are_not_read(glue):
    rows = [json.loads(line) for line in (glue / "RTE" / "train.jsonl").read_text().splitlines()]
    (glue / "RTE" / "dev.jsonl").unlink()
    data = sample(str(glue), "rte")
    (scored,) = data.dev.values()
    assert len(data.train) == len(scored) == len(rows) // 2
    texts = sorted((row["sentence1"], row["sentence2"]) for row in rows)
    assert sorted(row[:2] for row in data.train + scored) == texts
