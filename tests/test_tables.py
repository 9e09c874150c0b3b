"""Texts and tables of all kinds: the right rows, or one line that says what would be right."""

import bz2
import gzip
import io
import json
import lzma
import os
import sys
import tarfile
import threading
import zipfile
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cramming_nb.engine.errors import UserError
from cramming_nb.engine.tables import FORMATS, file_suffix, open_text, read_rows, text_of

LINE = '{"text": "a füße"}\n'
PARQUET = io.BytesIO()
pq.write_table(pa.table(dict(text=["a"])), PARQUET)
ARCHIVE = io.BytesIO()
with zipfile.ZipFile(ARCHIVE, "w") as archive:
    archive.writestr("xl/sheet.xml", "a")
TAR = io.BytesIO()
with tarfile.open(fileobj=TAR, mode="w") as archive:
    archive.addfile(tarfile.TarInfo("a"))


def texts(path, column="text") -> list:
    """The texts of a file, in order."""
    return [text_of(row, column or "text", f"{path}, {place}") for place, row in read_rows(str(path), column)]


def written(folder, name: str, content: str | bytes):
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(path, column="text") -> str:
    with pytest.raises(UserError) as refused:
        texts(path, column)
    line = str(refused.value)
    assert "\n" not in line and str(path) in line
    return line


def zstd(data: bytes) -> bytes:
    return pa.compress(data, "zstd", asbytes=True)


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
def test_an_encoding_is_found(encoding, tmp_path):
    assert texts(written(tmp_path, "a.jsonl", (LINE * 5).encode(encoding))) == ["a füße"] * 5
    table = ("text,label\n" + "a füße,1\n" * 5).encode(encoding)
    assert texts(written(tmp_path, "a.csv", table)) == ["a füße"] * 5
    assert texts(written(tmp_path, "a.txt", "a füße\r\n".encode(encoding))) == ["a füße\r\n"]


FOREIGN = {
    "latin-1": ("Ich führe und erzähle.\n", "WINDOWS-1252"),
    "cp1252": ("He said “yes” and – well – went to the river.\n", "WINDOWS-1252"),
    "gb18030": ("我们在花园里读书。\n", "GB18030"),
    "koi8-r": ("мы читаем книгу в саду\n", "iconv -f KOI8-R"),
    "cp1251": ("мы читаем книгу в саду\n", "iconv -f CP1251"),
    "shift_jis": ("夕方に漁師は川で船を見つけました。\n", "iconv -f CP932"),
    "euc_kr": ("저녁에 어부는 강에서 배를 찾았습니다.\n", "iconv -f EUC-KR"),
    "iso2022_jp": ("夕方に漁師は川で船を見つけました。\n", "iconv -f ISO-2022-JP"),
}


@pytest.mark.parametrize("encoding", FOREIGN)
@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl", "a.txt.gz"])
def test_another_encoding_is_named(encoding, name, tmp_path):
    text, likely = FOREIGN[encoding]
    data = (text * 20).encode(encoding)
    line = refusal(written(tmp_path, name, gzip.compress(data) if name.endswith("gz") else data))
    assert likely in line and "iconv -f " in line and ("%" in line or "this is ISO-2022-JP" in line)
    assert ("unpack it and convert" in line) == name.endswith("gz")


def test_another_encoding_after_many_megabytes(tmp_path):
    late = b"a clean line\n" * 200_000 + "Ich führe und erzähle.\n".encode("latin-1") * 50_000
    assert "WINDOWS-1252" in refusal(written(tmp_path, "a.txt", late))


def test_a_number_of_thousands_of_digits_does_not_end_the_reading(tmp_path):
    row = '{"text": "a garden", "n": ' + "1" * 5000 + "}\n"
    assert texts(written(tmp_path, "a.jsonl", row * 2)) == ["a garden"] * 2
    array = '[{"text": "a garden", "n": ' + "1" * 5000 + '}, {"text": 5}]'
    assert "row 2" in (said := refusal(written(tmp_path, "a.json", array))) and "int" in said
    assert "float" in refusal(written(tmp_path, "b.jsonl", '{"text": ' + "1" * 5000 + "}\n"))


@pytest.mark.parametrize(
    "end, words",
    [("", "not JSON"), ('}{"a": 1}', "more follows the end of a value"), (', "d": ' + "[" * 200_000, "nested too deeply")],
)
def test_a_long_number_before_another_mistake(end, words, tmp_path):
    assert words in refusal(written(tmp_path, "a.jsonl", '{"text": "a", "n": ' + "1" * 5000 + end))


@pytest.mark.parametrize("lines", ['["a garden"]\n["a river"]\n', '"a garden" "a river"\n', '{"text": "a"} {"text": "b"}\n'])
def test_lines_of_json_that_are_no_objects(lines, tmp_path):
    assert "one object with columns such as 'text' on each line" in refusal(written(tmp_path, "a.jsonl", lines))


def test_blanks_around_a_column_are_not_part_of_its_name(tmp_path):
    assert texts(written(tmp_path, "a.csv", "\ufeff id,\u00a0text\u2009\n1,a garden\n")) == ["a garden"]


def test_few_stray_bytes_are_replaced(tmp_path):
    data = b"a clean line\n" * 200 + b"caf\xe9\n"
    assert texts(written(tmp_path, "a.txt", data))[0].endswith("caf\ufffd\n")
    genuine = "\ufffd" * 50  # a character of the text, not a fault of the file
    assert texts(written(tmp_path, "b.txt", genuine)) == [genuine]


PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}


@pytest.mark.parametrize("packer", PACK)
def test_packed(packer, tmp_path):
    data = "".join(f'{{"text": "line {number} of many"}}\n' for number in range(30_000)).encode()
    packed = PACK[packer](data)
    path = written(tmp_path, f"a.jsonl.{packer}", packed + packed)  # as `cat` joins two
    assert file_suffix(str(path)) == ".jsonl" and len(texts(path)) == 60_000
    assert len(texts(written(tmp_path, "named.jsonl", packed))) == 30_000
    assert len(texts(written(tmp_path, f"plain.jsonl.{packer}", data))) == 30_000
    assert "again" in refusal(written(tmp_path, f"cut.jsonl.{packer}", packed[:-300]))
    assert "compressed" in refusal(written(tmp_path, f"twice.jsonl.{packer}", PACK[packer](packed)))
    assert texts(written(tmp_path, f"none.jsonl.{packer}", PACK[packer](b""))) == []


KINDS = {
    "a.xlsx": (ARCHIVE.getvalue(), "ZIP", ".csv"),
    "a.csv": (ARCHIVE.getvalue(), "ZIP", "CSV"),
    "b.txt": (ARCHIVE.getvalue(), "ZIP"),
    "a.parquet": (ARCHIVE.getvalue(), "ZIP"),
    "a.pdf": (b"%PDF-1.7\n%\xe2\xe3", "PDF", ".txt"),
    "b.csv": (b"%PDF-1.7\n%\xe2\xe3", "PDF"),
    "c.csv": (b"<!DOCTYPE html><html>", "web page"),
    "c.jsonl": (b" \n<HTML>", "web page"),
    "d.csv": (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
    "e.txt": (PARQUET.getvalue(), "Parquet"),
    "f.txt.gz": (gzip.compress(TAR.getvalue()), "tar"),
    "a.parquet.gz": (gzip.compress(PARQUET.getvalue()), "unpack"),
    "g.csv": (b"\xd0\xcf\x11\xe0abc", "Excel"),
    "noext": (b"hello", "without suffix", ".jsonl"),
    "a.doc": (b"hello", ".doc", ".jsonl"),
    "fake.parquet": (b"text\na\n", "again"),
    "cut.parquet": (PARQUET.getvalue()[:-9], "again"),
    "empty.parquet": (b"", "again"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_is_named_for_what_it_is(name, tmp_path):
    content, *words = KINDS[name]
    line = refusal(written(tmp_path, name, content))
    assert all(word in line for word in words), line


def test_a_web_page_may_be_the_text(tmp_path):
    assert texts(written(tmp_path, "a.txt", "<html>a")) == ["<html>a"]


READ = {  # name: (content, column, texts)
    "a.json": ('[{"text": "a"},\n{"text": "b"}]', "text", ["a", "b"]),
    "lines.json": (LINE * 2, "text", ["a füße"] * 2),
    "one.json": (json.dumps(dict(text="a", more=[1]), indent=2), "text", ["a"]),
    "empty.json": ("", "text", []),
    "none.json": ("[]", "text", []),
    "a.ndjson": (LINE, "text", ["a füße"]),
    "array.jsonl": (f"[{LINE}]", "text", ["a füße"]),
    "marks.jsonl": ("\ufeff" + LINE + "\ufeff" + LINE, "text", ["a füße"] * 2),
    "mac.jsonl": ('{"text": "a"}\r{"text": "b"}\r', "text", ["a", "b"]),
    "blank.jsonl": ("\n\r\n" + LINE + " \n", "text", ["a füße"]),
    "separators.jsonl": ('{"text": "a\u2028b\x85c"}\n', "text", ["a\u2028b\x85c"]),
    "null.jsonl": ('{"text": null}\n', "text", [""]),
    "nested.jsonl": ('{"data": {"deep": {"text": "a"}}}', "data.deep.text", ["a"]),
    "literal.jsonl": ('{"a.b": "right", "a": {"b": "wrong"}}', "a.b", ["right"]),
    "no object.jsonl": ('{"data": null}', "data.text", [""]),
    "tokens.jsonl": ('{"input_ids": [1, 2]}\n{"input_ids": null}', "input_ids", [[1, 2], []]),
    "a.csv": ('text,label\n"a, b\n""c""",1\n', "text", ['a, b\n"c"']),
    "semicolons.csv": ("text;label\r\na, b;1\r\n", "text", ["a, b"]),
    "tabs.csv": ('text\tlabel\n"a ""b"""\t1\n', "text", ['a "b"']),
    "bars.csv": ("text|label\na, b|1\n", "text", ["a, b"]),
    "sep.csv": ("sep=;\r\ntext;label\r\na;1\r\n", "text", ["a"]),
    "sep mark.csv": ("\ufeffsep=,\ntext,label\na,1\n", "text", ["a"]),
    "two marks.csv": ("\ufeff\ufefftext,label\na,1\n", "text", ["a"]),
    "inner.csv": ('text,label\n5" disk,1\n', "text", ['5" disk']),
    "quoted name.csv": ('"text, or not";label\na;1\n', "text, or not", ["a"]),
    "unnamed.csv": (",text,,\n0,a,,\n", "text", ["a"]),
    "hash.csv": ("#id,text\n1,a\n", "text", ["a"]),
    "blank.csv": ("\n\ntext,label\n\n,\na,1\n", "text", ["a"]),
    "header.csv": ("text,label\n", "text", []),
    "empty.csv": ("", "text", []),
    "UPPER.CSV": ("text\na\n", "text", ["a"]),
    "long.csv": (f"text,label\n{'x' * 200_000},1\n", "text", ["x" * 200_000]),
    "all.csv": ("text,label\na,1\n", "", ["a"]),
    "a.tsv": ('text\tlabel\n"a\t1\n"b"\t2\n', "text", ['"a', '"b"']),
    "table.txt": ("text,label\na,1\n", "", ["a"]),
    "a.md": ("# A\ntext\n", "text", ["# A\ntext\n"]),
}


@pytest.mark.parametrize("name", READ)
def test_read(name, tmp_path):
    content, column, expected = READ[name]
    assert texts(written(tmp_path, name, content), column) == expected


REFUSED = {  # name: (content, column, words)
    "cut.jsonl": (LINE + '{"text": "cut o', "text", "line 2", "not JSON", "cut off"),
    "late.jsonl": ("\n\n" + LINE + "\r\n{bad\n", "text", "line 5"),
    "array.json": ('[{"text": "a"},\n{"text" "b"}]', "text", "line 2", "not JSON"),
    "deep.jsonl": (LINE + '{"a": ' * 100_000, "text", "line 2", "deeply"),
    "deep.json": ("[" * 100_000, "text", "line 1", "deeply"),
    "number.jsonl": ('{"text": 7}', "text", "line 1", "but int", "columns: text"),
    "list.jsonl": ('{"text": ["a"]}', "text", "list"),
    "no object.jsonl": (LINE + "[1]\n", "text", "line 2", "list", "'text'"),
    "numbers.json": ("[1, 2]", "text", "row 1", "int", "'text'"),
    "no column.jsonl": ('{"body": "a", "id": 1}', "text", "'text'", "columns: body, id", "#COLUMN"),
    "in list.jsonl": ('{"a": [{"b": "x"}]}', "a.b", "'a.b'", "columns: a"),
    "tokens.jsonl": ('{"input_ids": [1, -2]}', "input_ids", "list"),
    "text tokens.jsonl": ('{"input_ids": "a"}', "input_ids", "but str"),
    "more.csv": ("text\nthe garden, a river\n", "text", "line 2", "more cells", "quotes"),
    "fewer.csv": ('text,label\n"a\nb",1\nc\n', "text", "line 4", "fewer cells"),
    "mac.csv": ("text,label\ra,1\rb,2,3\r", "text", "line 3"),
    "twice.csv": ("text,text\na,b\n", "text", "line 1", "'text'", "rename"),
    "twice other.csv": ("text,n,n\na,b,c\n", "text", "'n'"),
    "comment.csv": ("# by hand\ntext,label\na,1\n", "text", "line 1", "comment"),
    "comment commas.csv": ("# by hand, today\ntext,label\na,1\n", "", "line 1", "comment"),
    "title.csv": ("Export of 2024\n\ntext,label\na,1\n", "", "line 3", "Export of 2024"),
    "stray.csv": ('text,label\na,1\n"Oh no,1\nb,0\n', "text", "line 3", "quotes"),
    "two stray.csv": ('text,label\n"Oh,1\n' + "a,1\n" * 30 + '"No,1\nb,0\n', "text", "line 2", "quotes"),
    "escaped.csv": ('text,label\n"he \\"said\\" so",1\n', "text", "line 2", "twice"),
    "column.csv": ("body,label\na,1\n", "text", "line 1", "columns: body, label"),
    "quotes over lines.tsv": ('text\tlabel\n"a\nb"\t1\n', "text", "line 2", "fewer cells"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    content, column, *words = REFUSED[name]
    line = refusal(written(tmp_path, name, content), column)
    assert all(word in line for word in words), line


def table_file(folder, **columns):
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return folder / "a.parquet"


FAR = pa.array([10_000_000], pa.int32()).cast(pa.date32())  # a year that Python has not
HARMLESS = {
    "far date": FAR,
    "duration": pa.array([1], pa.duration("us")),
    "unknown zone": pa.array([1], pa.timestamp("ns", tz="Mars/Base")),
    "decimal": pa.array([Decimal(1)]),
    "bytes": pa.array([b"\xff"]),
    "date within": pa.array([{"d": 10_000_000}], pa.struct({"d": pa.date32()})),
}


@pytest.mark.parametrize("other", HARMLESS)
def test_columns_that_nobody_asked_for(other, tmp_path):
    path = table_file(tmp_path, text=["a"], id=[7], source=pa.array(["s"]).dictionary_encode(), other=HARMLESS[other])
    assert list(read_rows(str(path), "text")) == [("row 1", {"text": "a", "id": 7, "source": "s"})]


def test_dates_are_no_text(tmp_path):
    path = table_file(tmp_path, text=["a"], when=FAR)
    assert "'when' but date32" in refusal(path, "when")
    assert list(read_rows(str(path))) == [("row 1", {"text": "a"})]


TEXTS = {
    "large": pa.array(["a", None], pa.large_string()),
    "view": pa.array(["a", None], pa.string_view()),
    "dictionary": pa.array(["a", None]).dictionary_encode(),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_kinds_of_parquet_text(kind, tmp_path):
    assert texts(table_file(tmp_path, text=TEXTS[kind])) == ["a", ""]
    nested = pa.StructArray.from_arrays([TEXTS[kind], FAR.take([0, 0])], ["text", "when"])
    assert texts(table_file(tmp_path, data=nested), "data.text") == ["a", ""]


def test_parquet_columns(tmp_path):
    assert texts(table_file(tmp_path, **{"a.b": ["right"], "a": [{"b": "wrong"}]}), "a.b") == ["right"]
    assert texts(table_file(tmp_path, input_ids=[[1, 2], None]), "input_ids") == [[1, 2], []]
    assert "bytes" in refusal(table_file(tmp_path, text=[b"a"]))
    assert "list" in refusal(table_file(tmp_path, text=[["a"]]))
    assert "columns: body" in refusal(table_file(tmp_path, body=["a"]))
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "a.parquet")
    assert "rename" in refusal(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "content, column, expected",
    [
        ("hello\nworld\n", "text", ["hello\nworld\n"]),
        (LINE * 2, "text", ["a füße"] * 2),
        (f"[{LINE}]", "text", ["a füße"]),
        ("id,text\n1,a\n", "text", ["a"]),
        ("text;n\na;1\n", "", ["a"]),
        ("", "text", [""]),
        ("word " * 40_000, "text", ["word " * 40_000]),  # longer than a cell that csv reads at first
    ],
)
def test_pipes(content, column, expected, tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=[content])
    writer.start()
    assert texts(pipe, column) == expected
    writer.join()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert texts("-", column) == expected


def test_closed_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert "closed" in refusal("-")


def test_what_cannot_be_opened(tmp_path):
    assert "No such file" in refusal(tmp_path / "missing.csv")
    for name in ("folder.csv", "folder.parquet"):
        (tmp_path / name).mkdir()
        assert "directory" in refusal(tmp_path / name)


@pytest.mark.parametrize("name", ["\udcff.csv", "a b.csv", "-.csv", "líne\nbreak.csv"])
def test_names_in_any_bytes(name, tmp_path):
    assert texts(written(tmp_path, name, "text\na\n")) == ["a"]
    pq.write_table(pa.table(dict(text=["a"])), pa.OSFile(os.fsencode(tmp_path / f"{name}.parquet"), "w"))
    assert texts(tmp_path / f"{name}.parquet") == ["a"]


def test_blocks_end_within_letters_and_lines(tmp_path):
    line = "".join(chr(number) for number in (0x65, 0xE9, 0x20AC, 0x1F600)) * 97 + "\n"
    text = line * 5_000  # some megabytes, so that a block ends in every part of a letter
    with open_text(str(written(tmp_path, "a.txt", text))) as file:
        assert file.read() == text
    with open_text(str(tmp_path / "a.txt")) as file:
        assert set(file) == {line}


def test_every_format_is_read(tmp_path):
    content = {".parquet": PARQUET.getvalue(), ".csv": "text\na\n", ".tsv": "text\na\n", ".txt": "a", ".md": "a"}
    for suffix in FORMATS:
        assert texts(written(tmp_path, f"a{suffix}", content.get(suffix, '{"text": "a"}'))) == ["a"]


@pytest.mark.parametrize("first", ["sep=\r\n", 'sep="\r\n'])
def test_a_line_that_names_no_delimiter_is_a_header(first, tmp_path):
    assert "no text in column 'text' (columns: sep=" in refusal(written(tmp_path, "a.csv", f"{first}text,n\r\na,1\r\n"))
