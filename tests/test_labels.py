"""A person's own table of texts and labels becomes a classifier, or an error of one line."""

import csv
import gzip
import io
import json
import random
import re
import shlex
import shutil
import stat
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pyarrow.parquet
import pytest
import transformers
from conftest import DOES, LIKE, THINGS, command, contents, lines

import cramming_nb.app.hf  # noqa: F401
from cramming_nb.app.export import classify
from cramming_nb.app.labels import choose_columns, read_labels, table_name, train_classifier
from cramming_nb.app.run import load_run, tokenizer_of
from cramming_nb.engine.errors import UserError
from cramming_nb.glue import encode, hold_back
from cramming_nb.recipes import change
from cramming_nb.tokenizer import train_tokenizer


def rows_of(kind: str, count: int = 60) -> list[tuple]:
    """Rows of a table, with its header: classes, pairs or numbers."""
    rng = random.Random(3)
    texts = [f"The {rng.choice(LIKE)} {rng.choice(THINGS)} {rng.choice(DOES)} number {i}." for i in range(count)]
    if kind == "pairs":
        rows = [(text, texts[i - i % 2], ("no", "yes")[i % 2]) for i, text in enumerate(texts)]
        return [("question1", "question2", "label"), *rows]
    if kind == "numbers":
        return [("text", "score"), *((text, f"{10 + len(text) / 10:.1f}") for text in texts)]
    return [("text", "label"), *((text, ("good", "bad")["old" in text]) for text in texts)]


def write(path: Path, rows: list[tuple]) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


@pytest.mark.parametrize("kind", ["classes", "pairs", "numbers"])
def test_table_becomes_a_classifier(kind, a_copy, run_python, monkeypatch):
    write(a_copy.home / "mine.csv", rows_of(kind))
    argv = ["finetune", "first", "mine.csv", "--epochs", "1", "--name", "my table"]
    argv += ["--text", "question1", "question2"] if kind == "pairs" else []
    said = a_copy.command(*argv)
    assert said.code == 0, said.err
    for line in ("majority baseline", "bag of words", "the fine-tuned model"):
        assert re.search(rf"\| {line} \| -?\d+\.\d \(-?\d+\.\d–-?\d+\.\d\) \|", said.out), said.out
    folder = a_copy.folder / "my table"
    report = (folder / "report.md").read_text()
    shown = "with the largest errors" if kind == "numbers" else "that the model got wrong"
    assert re.findall("^## Held-back rows (.*)$", report, re.M) == [shown]
    (use,) = re.findall(r"^    cram (predict .*)$", report, re.M)
    shown = a_copy.command(*shlex.split(use))
    assert shown.code == 0 and shown.out.startswith("a text"), shown.err
    before = contents(folder)
    again = a_copy.command(*argv)
    assert again.code == 0 and said.out == again.out and contents(folder) == before
    usual = stat.S_IMODE((folder / "export" / "config.json").stat().st_mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder / "export").iterdir()} == {usual}

    texts = ["The old garden waits.", "The bright kettle sings."]
    ours = classify(folder / "export", texts)
    pipe = transformers.pipeline("text-classification", model=str(folder / "export"))
    asked = dict(text=texts[0], text_pair=texts[1]) if kind == "pairs" else texts[0]
    theirs = pipe(asked)
    theirs = theirs[0] if isinstance(theirs, list) else theirs
    assert theirs["label"] == ours[0][0][0] and theirs["score"] == pytest.approx(ours[0][0][1], abs=1e-4)
    if kind == "numbers":
        assert 10 < ours[0][0][1] < 16  # on the scale of the labels
    shown = a_copy.command("predict", "first/my table", *texts)
    assert shown.code == 0 and len(re.findall(r"^The", shown.out, re.M)) == (1 if kind == "pairs" else 2)

    if kind == "pairs":
        monkeypatch.setattr("sys.stdin", io.StringIO("The old garden\n\nThe kettle\nThe sea\n"))
        by_line = a_copy.command("predict", "first/my table")
        assert by_line.code == 0 and re.findall("^The.*", by_line.out, re.M) == [
            "The old garden / ",
            "The kettle / The sea",
        ]

    card = (folder / "export" / "README.md").read_text()
    assert "number 1." not in card and "pipeline_tag: text-classification" in card
    (snippet,) = re.findall(r"```python\n(.*?)```", card, re.S)
    code = snippet.replace("THIS FOLDER", str(folder / "export"))
    done = run_python(code)
    assert done.code == 0, done.err


def test_changed_table_takes_the_place_of_the_old(a_copy):
    write(a_copy.home / "mine.csv", rows_of("classes"))
    argv = ["finetune", "first", "mine.csv", "--epochs", "1"]
    first = a_copy.command(*argv)
    (a_copy.folder / "mine" / "results.json").unlink()  # as if it was killed before it wrote them
    write(a_copy.home / "mine.csv", rows_of("classes", 80))
    second = a_copy.command(*argv)
    assert (first.code, second.code) == (0, 0) and "80 rows" in second.out
    assert {path.name for path in (a_copy.folder / "mine").iterdir()} == {"export", "report.md", "results.json"}
    assert json.loads((a_copy.folder / "mine" / "results.json").read_text())["rows"] == 64


GOOD = "".join(f"text {i},{'ab'[i % 2]}\n" for i in range(50))
BAD_TABLES = {  # name: (content, options, words of the line)
    "empty": (b"", "", "has no rows"),
    "header alone": (b"text,label\n", "", "has no rows"),
    "JSON lines": (b'{"text": "a", "label": "b"}\n' * 50, "", "line 1", "this is JSON", ".jsonl"),
    "JSON": (b'[{"text": "a", "label": "b"}]', "", "line 1", "this is JSON", ".json"),
    "too close": (
        b"text,label\n" + b"".join(b"t %d,%d.5\n" % (i, 1_700_000_000 + 5 * i) for i in range(60)),
        "",
        "too little for their size",
        "subtract 1700000148 from each",
    ),
    "two labels": (b"text,Label,LABEL\none,a,b\n", "", "which columns", "text, Label, LABEL"),
    "half without a label": (
        b"text,label\n" + b"".join(b"t %d,%s\n" % (i, (b"a", b"None", b"b", b"None")[i % 4]) for i in range(60)),
        "",
        "of 30 rows",
        "30 rows",
        "label",
    ),
    "no label column": (b"id,text\n" + GOOD.encode(), "--label label", "'label'", "id, text"),
    "unknown columns": (b"a,b,c\n1,2,3\n", "", "a, b, c", "--text COLUMN"),
    "one class": (b"text,label\n" + GOOD.replace(",b", ",a").encode(), "", "'a'", "tell apart"),
    "empty text": (b"text,label\n" + GOOD.encode() + b" ,a\n", "", "line 52", "'text'"),
    "empty label": (b"text,label\n" + GOOD.encode() + b"more,\n", "", "line 52", "'label'"),
    "too few": (b"text,label\n" + GOOD[:200].encode().rpartition(b"\n")[0], "", "different texts", "40"),
    "repeated": (b"text,label\n" + b"the same,a\nthe same,b\n" * 50, "", "of 100 rows, 1 with", "40"),
    "latin": (b"text,label\n" + GOOD.encode() + b"caf\xe9,a\n", "", "not UTF-8", "iconv"),
    "latin of an old Mac": (
        b"text,label\r" + GOOD.encode().replace(b"\n", b"\r") + b"caf\xe9,a\r",
        "",
        "not UTF-8",
        "iconv",
    ),
    "quoted name": (b'"a, b, c";label\none;two;a\n', "", "line 2", "more cells than the header (a, b, c, label)"),
    "cells": (b"text,label\none, two,a\n", "", "line 2", "quotes"),
    "quotes": (b'text,label\n"open,a\n' + GOOD.encode(), "", "quotes"),
    "number": (b"text,label\n" + GOOD.encode(), "--kind numbers", "line 2", "'a'"),
    "number with a comma": (
        b"text;label\n" + b"".join(b"t %d;%d\n" % (i, i) for i in range(50)) + b"t;0,5\n",
        "--kind numbers",
        "line 52",
        "'0,5'",
        "0.5",
    ),
    "every row a label": (b"text,label\n" + b"".join(b"t %d,l%d\n" % (i, i) for i in range(50)), "", "--label"),
    "epochs": (b"text,label\n" + GOOD.encode(), "--epochs -1", "0 or more"),
    "name": (b"text,label\n" + GOOD.encode(), "--name export", "--name"),
}


@pytest.mark.parametrize("what", BAD_TABLES.values(), ids=BAD_TABLES)
def test_bad_table_is_refused_in_one_line(what, finished, tmp_path):
    content, options, *words = what
    (tmp_path / "bad.csv").write_bytes(content)
    before = contents(finished.folder)
    said = command("finetune", finished.folder, "bad.csv", *options.split(), cwd=tmp_path, cache=finished.tiny.cache)
    assert said.code == 2, said.out + said.err
    (line,) = lines(said.err)
    assert not [word for word in words if word not in line], line
    assert contents(finished.folder) == before


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([text for text, _ in rows_of("classes")[1:]] * 20, 300)


@pytest.mark.parametrize("pairs", [False, True], ids=["texts", "pairs"])
def test_no_row_is_learned_from_and_held_back_in_another_spelling(pairs, tokenizer, tmp_path):
    rows = []
    for text, label in rows_of("classes", 80)[1:]:
        other = text.upper().replace(" ", "  ").replace("A", "Á").replace(".", " .")
        rows += [(text, "The end.", label), (other, "the  END .", label)]
    header = ("text1", "text2", "label") if pairs else ("text", "label")
    names = header[:-1]
    path = write(tmp_path / "t.csv", [header, *((first, *[second] * pairs, label) for first, second, label in rows)])
    labels = read_labels(path, tokenizer, names)
    train = [row[:2] for row in labels.data.train]
    assert train == [(first, second if pairs else None) for first, second, _ in rows[::2]]
    assert labels.repeated == 80 and labels.contradicting == 0 and "another label" not in labels.describe()
    data = hold_back(labels.data, 0.2)
    seen = encode(tokenizer, data.train, 128)
    assert not [ids for ids in encode(tokenizer, data.dev["labels"], 128) if ids in seen]


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_contradicting_labels_are_counted(kind, tokenizer, tmp_path):
    rows = [(f"text {i}", i % 2) for i in range(50)]
    contradicting = [(f"TEXT {i}", 1 - i % 2) for i in range(7)]
    path = write(tmp_path / "t.csv", [("text", "label"), *rows, *contradicting, *rows[:3]])
    labels = read_labels(path, tokenizer, kind=kind)
    assert [row[2] for row in labels.data.train] == [value for _, value in rows]  # the first row stays
    assert "50 rows; 10 more repeat a text, 7 of them with another label;" in labels.describe()


def test_classifier_reads_as_much_as_it_learned_from(a_copy):
    run = load_run(a_copy.folder, progress=False)
    run = replace(run, recipe=change(run.recipe, {"protocol.max_length": 12}))
    assert run.recipe.architecture.max_length == 64
    labels = read_labels(write(a_copy.home / "mine.csv", rows_of("classes")), tokenizer_of(run))
    export = train_classifier(run, labels, epochs=1, progress=False).folder / "export"
    assert json.loads((export / "config.json").read_text())["learned_length"] == 12
    assert json.loads((export / "tokenizer_config.json").read_text())["model_max_length"] == 12
    text = "The old garden follows the quiet river. " * 3
    assert classify(export, [text]) == classify(export, [text + "The bright kettle sings."])


def labelled(*labels: str, text: str = "a text") -> str:
    """A CSV file with sixty rows, whose labels come in turns."""
    return "text,label\n" + "".join(f"{text} {i},{labels[i % len(labels)]}\n" for i in range(60))


def parquet(texts: list, labels: list) -> bytes:
    """A Parquet file with these texts and labels."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(dict(text=texts, label=labels)), file)
    return file.getvalue()


TEXTS = [f"a {i}" for i in range(60)]
READ = {  # name of the file: (its bytes, what it is understood as)
    "lines.jsonl": ("".join(json.dumps(dict(text=f"a {i}", label="ab"[i % 2])) + "\n" for i in range(60)), ("a", "b")),
    "truth.jsonl": (
        "".join(json.dumps(dict(text=f"a {i}", label=i % 2 == 0)) + "\n" for i in range(60)),
        ("false", "true"),
    ),
    "packed.csv.gz": (gzip.compress(labelled("a", "b").encode()), ("a", "b")),
    "sep.csv": ("sep=|\r\n" + labelled("a", "b").replace(",", "|"), ("a", "b")),
    "tabs.tsv": (labelled("a", "b", text='"open').replace(",", "\t"), ("a", "b")),
    "large.csv": (labelled("a", "b", text="w" * 200_000), ("a", "b")),
    "codes.csv": (labelled("007", "7", "7.0"), ("007", "7")),
    "underscore.csv": (labelled("1_000", "1000"), ("1000", "1_000")),
    "powers.csv": (labelled("1e0", "1E0", "2"), ("1E0", "1e0", "2")),
    "not there.csv": (labelled("a", "b", "a", "b", "nan", "None"), ("a", "b")),
    "NA.csv": (labelled("NA", "EU"), ("EU", "NA")),
    "decimal.parquet": (parquet(TEXTS, [Decimal(i % 2) for i in range(60)]), ("0", "1")),
    "halves.parquet": (parquet(TEXTS, [Decimal(i) / 2 for i in range(60)]), ()),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_read_as_it_is_meant(name, tokenizer, tmp_path):
    content, classes = READ[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    labels = read_labels(tmp_path / name, tokenizer)
    missing = 20 if name == "not there.csv" else 0
    assert labels.classes == classes and len(labels.data.train) == 60 - missing
    if name == "tabs.tsv":
        assert labels.data.train[0][0] == '"open 0'
    if name == "large.csv":
        assert len(labels.data.train[0][0]) > 200_000


def test_what_was_done_to_labels_is_said(tokenizer, tmp_path):
    def described(*labels: str, **options) -> str:
        (tmp_path / "t.csv").write_text(labelled(*labels))
        return read_labels(tmp_path / "t.csv", tokenizer, **options).describe()

    assert "; 7.0 is taken as 7" in described("7", "7.0", "8")
    assert "taken as" not in described("007", "7")
    assert "; 20 rows without a label are left out" in described("a", "b", "nan")
    assert "--kind classes" in described(*map(str, range(30)))
    assert "30 classes" in described(*map(str, range(30)), kind="classes")
    assert "--kind" not in described(*(str(i / 2) for i in range(30)))


NO_TABLES = {  # name of the file: (its bytes, words of the line)
    "book.xlsx": (b"PK\x03\x04 and more", "a ZIP archive", ".csv"),
    "cut.csv.gz": (gzip.compress(labelled("a", "b").encode())[:-20], "cannot be read to its end", "copy it again"),
    "cut.jsonl": (b'{"text": "a", "label": 1}\n{"text": "b", "la', "line 2", "not JSON"),
    "other.jsonl": (b'{"text": "a", "label": 1}\n{"text": "b"}', "line 2", "give each row all of text, label"),
    "deep.jsonl": (b"[" * 100_000, "line 1", "nested too deeply"),
    "null.jsonl": (b'{"text": "a", "label": null}\n', "nothing in column 'label' of any row"),
    "comment.csv": (b"# made by hand\n" + labelled("a", "b").encode(), "comment", "delete"),
    "escaped.csv": (b'text,label\n"he said \\"no\\"",a\n', "line 2", "written twice"),
    "huge.csv": (labelled("1e308", "-1e308", "0.5").encode(), "line 2", "1e308", "too large"),
    "none.csv": (labelled("nan").encode(), "no row has a label"),
    "folder.csv": (None, "directory"),
    "binary.parquet": (parquet([text.encode() for text in TEXTS], [0, 1] * 30), "row 1", "a bytes in column 'text'"),
}


@pytest.mark.parametrize("name", NO_TABLES)
def test_what_is_no_table_is_refused_in_one_line(name, tokenizer, tmp_path):
    content, *words = NO_TABLES[name]
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as said:
        read_labels(tmp_path / name, tokenizer)
    assert "\n" not in str(said.value) and not [word for word in words if word not in str(said.value)], said.value


@pytest.mark.parametrize("content", ["[]", "{}", "null"])
def test_damaged_results_are_refused_in_one_line(content, a_copy):
    write(a_copy.home / "mine.csv", rows_of("classes"))
    (a_copy.folder / "mine").mkdir()
    (a_copy.folder / "mine" / "report.md").touch()
    (a_copy.folder / "mine" / "results.json").write_text(content)
    said = a_copy.command("finetune", "first", "mine.csv")
    assert said.code == 2 and "results.json: " in said.err and "; delete it" in said.err
    assert len(lines(said.err)) == 1


def test_second_file_of_one_name_is_refused(a_copy):
    for folder in ("A", "B"):
        (a_copy.home / folder).mkdir()
        write(a_copy.home / folder / "train.csv", rows_of("classes", 60 if folder == "A" else 80))
    argv = ["--epochs", "1"]
    assert a_copy.command("finetune", "first", "A/train.csv", *argv).code == 0
    before = contents(a_copy.folder / "train")
    said = a_copy.command("finetune", "first", "B/train.csv", *argv)
    (line,) = lines(said.err)
    assert said.code == 2 and "A/train.csv" in line and "--name" in line and contents(a_copy.folder / "train") == before
    assert a_copy.command("finetune", "first", "B/train.csv", *argv, "--name", "other").code == 0


def test_the_best_answer_is_named_and_long_texts_are_counted(a_copy):
    rows = [
        (text + " and so on" * 60 if n < 7 else text, label) for n, (text, label) in enumerate(rows_of("classes")[1:])
    ]
    write(a_copy.home / "mine.csv", [("text", "label"), *rows])
    said = a_copy.command("finetune", "first", "mine.csv", "--epochs", "1")
    assert said.code == 0, said.err
    scores = dict(re.findall(r"^\| ([^|]+?) \| (\d+\.\d) \(", said.out, re.M))
    best = re.search(r"^(.+) scores highest: ", said.out, re.M)[1]
    offered = {name: float(score) for name, score in scores.items() if name != "majority baseline"}
    assert set(offered) == {"bag of words", "frozen features", "bag of words + frozen", "the fine-tuned model"}
    assert offered[best[0].lower() + best[1:]] == max(offered.values())
    assert said.out.count(" points (") == 3
    assert "7 rows have more tokens than the 64 that the model reads" in said.out


def test_too_little_memory_is_one_line(a_copy, monkeypatch):
    from cramming_nb.glue import FineTuner

    def full(*given):
        raise MemoryError

    monkeypatch.setattr(FineTuner, "step", full)
    write(a_copy.home / "mine.csv", rows_of("classes"))
    said = a_copy.command("finetune", "first", "mine.csv", "--epochs", "1")
    (line,) = lines(said.err)
    assert said.code == 2 and "too little memory" in line and not (a_copy.folder / "mine").exists()


def test_stars_are_classes_or_numbers(tokenizer, tmp_path):
    path = write(tmp_path / "stars.csv", [("text", "stars"), *((f"text {i}", 1 + i % 5) for i in range(60))])
    assert read_labels(path, tokenizer).classes == ("1", "2", "3", "4", "5")
    assert read_labels(path, tokenizer, kind="numbers").classes == ()


def test_spreadsheet_of_another_country(tokenizer, tmp_path):
    rows = [f'"a, b; {i}";{"ja" if i % 3 else "nein"}\r\n' for i in range(60)]
    text = "".join(['\ufeff"Text, as it is";Label\r\n', *rows])
    (tmp_path / "t.csv").write_text(text, encoding="utf-8", newline="")
    labels = read_labels(tmp_path / "t.csv", tokenizer, ("Text, as it is",))
    assert labels.classes == ("ja", "nein") and labels.data.train[0][0] == "a, b; 0"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["unix", "windows", "old mac"])
@pytest.mark.parametrize("before", ["", "{}", " {}{}", ";{}"], ids=["nothing", "an empty line", "two", "empty cells"])
def test_header_is_the_first_line_that_is_not_empty(before, end, tokenizer, tmp_path):
    rows = [f"a, b, {i};{'ja' if i % 3 else 'nein'}" for i in range(60)]
    text = before.replace("{}", end) + end.join(["Text;Label", *rows, ""])
    (tmp_path / "t.csv").write_text(text, encoding="utf-8-sig", newline="")
    labels = read_labels(tmp_path / "t.csv", tokenizer)
    assert labels.texts == ("Text",) and len(labels.data.train) == 60


def test_class_without_held_back_rows_is_named(a_copy):
    rows = rows_of("classes")
    for number, label in ((5, "rare"), (9, "rare"), (20, "once")):
        rows[number] = (rows[number][0], label)
    write(a_copy.home / "mine.csv", rows)
    said = a_copy.command("finetune", "first", "mine.csv", "--epochs", "1")
    assert said.code == 0, said.err
    note = "No held-back row has the class once, rare, so no score says how well it is known."
    assert note in said.out and note in (a_copy.folder / "mine" / "report.md").read_text()
    assert "are few; the intervals are rough. No held-back" in said.out
    write(a_copy.home / "mine.csv", rows_of("classes"))
    assert "No held-back row" not in a_copy.command("finetune", "first", "mine.csv", "--epochs", "1").out


@pytest.mark.parametrize("name", ["export", "Glue", "snapshots", "tensorboard"])
def test_table_takes_no_folder_that_the_run_will_make(name, a_copy):
    for folder in ("export", "glue"):  # as they are before the run is finished
        shutil.rmtree(a_copy.folder / folder)
    assert name not in [path.name for path in a_copy.folder.iterdir()]
    before = contents(a_copy.folder)
    for table, options in ((f"{name}.csv", []), ("mine.csv", ["--name", name])):
        write(a_copy.home / table, rows_of("classes"))
        said = a_copy.command("finetune", "first", table, "--epochs", "1", *options)
        assert said.code == 2 and f"--name {name}: " in said.err and "choose another --name" in said.err
    assert contents(a_copy.folder) == before


def test_a_long_label_is_cut_where_it_is_listed(finished, tmp_path):
    path = tmp_path / "t.csv"
    rows = "".join(f"a garden of {i} rivers,{'no' if i % 2 else chr(27) + '[31m' + 'y' * 99_999}\n" for i in range(60))
    path.write_text("text,label\n" + rows)
    said = read_labels(path, tokenizer_of(load_run(finished.folder))).describe()
    assert "yyyyyy… 30" in said and said.isprintable() and len(said) < 300


@pytest.mark.parametrize("header", ["Text,text,label,Label", "LABEL,Text,label,text"])
def test_the_exact_name_of_a_column_comes_first(header, tmp_path):
    columns = header.split(",")
    assert choose_columns(columns, (), "", tmp_path / "a.csv") == (("text",), "label")


@pytest.mark.parametrize("offset", [0, 1e5, -1e5])
def test_numbers_far_from_zero_are_learned_if_float32_tells_them_apart(offset, tokenizer, tmp_path):
    path = write(tmp_path / "a.csv", [("text", "label"), *((f"word {i} of it", offset + i + 0.5) for i in range(60))])
    found = read_labels(path, tokenizer)
    assert not found.classes and len(found.data.train) == 60


@pytest.mark.parametrize("text, told", [("привет мир и {} сад", True), ("the garden, naïve as in May {}", False)])
def test_a_text_in_letters_that_the_model_deletes_is_told(text, told, tokenizer, tmp_path):
    rows = [("text", "label"), *((text.format(i), "ab"[i % 2]) for i in range(100, 180))]
    found = read_labels(write(tmp_path / "a.csv", rows), tokenizer)
    assert any("% of the characters" in note and "normalizer=unicode" in note for note in found.notes) == told


@pytest.mark.parametrize(
    "file, name",
    [
        ("stars.csv", "stars"),
        ("2024.05.survey.csv", "2024.05.survey"),
        ("my.labels.JSONL.GZ", "my.labels"),
        ("stars", "stars"),
    ],
)
def test_the_name_of_a_table_is_that_of_its_file_without_what_tells_the_format(file, name):
    assert table_name(Path(file)) == name
