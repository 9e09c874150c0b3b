"""Own text as people have it: a book in one file, a folder, a bare path, a text that fills few pieces."""

import fcntl
import gzip
import io
import json
import os
import sys
import threading
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from conftest import command, lines
from tokenizers import Tokenizer

from cramming_nb.app.export import fill_mask, load_model
from cramming_nb.app.records import RunRecord
from cramming_nb.corpus import CorpusConfig, get_corpus
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.sources import (
    FEW_FILES,
    Source,
    documents,
    full_source,
    source_bytes,
    source_files,
    source_identity,
    source_notes,
    source_tokenizer,
    sources,
)
from cramming_nb.tokenizer import train_tokenizer


def book(tiny) -> str:
    """The tiny text as one file with a blank line between its documents."""
    rows = [json.loads(line) for line in tiny.text.read_text().splitlines()]
    return "\n\n".join(row["text"] for row in rows if row["source"] != "noise")


def test_a_book_named_by_its_path_trains(tiny, tmp_path):
    (tmp_path / "book.txt").write_text(book(tiny))
    argv = ["pretrain", tiny.recipe, "--source", "book.txt", "--budget", "1ktok", "--name", "mine"]
    result = command(*argv, cwd=tmp_path, cache=tmp_path / "cache")
    assert result.code == 0, result.err
    assert "book.txt: cut into documents" in result.out
    assert json.loads((tmp_path / "runs/mine/run.json").read_text())["source"] == "files:book.txt"
    same = ["pretrain", tiny.recipe, "--source", "files:book.txt", *argv[4:]]
    assert command(*same, cwd=tmp_path, cache=tmp_path / "cache").code == 0


def test_a_folder_is_read_with_what_is_inside(tmp_path):
    for name in ("b.txt", "deep/er/a.md", "c.jsonl", "picture.png", ".hidden/d.txt", "deep/.e.txt"):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text('{"text": "The old garden."}\n' if "json" in name else "A quiet river.")
    found = [path.removeprefix(f"{tmp_path}/texts/") for path in source_files(str(tmp_path / "texts"))]
    assert found == ["b.txt", "c.jsonl", "deep/er/a.md"]
    assert len(list(documents(str(tmp_path / "texts")))) == len(list(documents(f"files:{tmp_path}/texts"))) == 3


def test_many_files_are_not_cut(tmp_path):
    for number in range(FEW_FILES):
        (tmp_path / f"{number}.txt").write_text("The old garden follows a river.\n\n" * 400)
    assert len(list(documents(str(tmp_path)))) == FEW_FILES
    (tmp_path / "0.txt").unlink()
    assert len(list(documents(str(tmp_path)))) > 5 * FEW_FILES


def test_a_vocabulary_that_is_not_filled_is_padded(tiny, tmp_path):
    """The model has a row for each id of the recipe; those beyond the tokenizer's are never produced."""
    argv = ["run", *tiny.options("1ktok"), "--name", "few", "--set"]
    first = command(*argv, "corpus.vocab_size=9000", cwd=tmp_path, cache=tmp_path / "cache")
    assert first.code == 0, first.err
    assert "for a vocabulary of 9,000: the other ids stay unused" in first.out
    folder = tmp_path / "runs/few"
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    record = RunRecord.read(folder / "record.json")
    assert size < 9000 == record.recipe["architecture"]["vocab_size"]
    model, tokenizer = load_model(folder / "export")
    assert len(model.encoder.embedding.weight) == 9000
    (guesses,) = fill_mask(model, tokenizer, "the [MASK] river", top=size)
    assert {word for word, _ in guesses} == set(tokenizer.get_vocab())
    assert command(*argv, "corpus.vocab_size=9000", cwd=tmp_path, cache=tmp_path / "cache").code == 0
    other = command(*argv, f"corpus.vocab_size={size}", cwd=tmp_path, cache=tmp_path / "cache")
    assert other.code == 2 and "another run" in lines(other.err)[0]


def test_each_tokenizer_may_have_fewer_pieces(tiny, tmp_path):
    for tokenizer in ("wordpiece", "bpe", "unigram"):
        config = CorpusConfig(tokenizer, vocab_size=9000, seq_length=32, filter_threshold=0, heldout=0.05)
        corpus = get_corpus(f"files:{tiny.text}", config, tmp_path, progress=False)
        size = corpus.tokenizer.get_vocab_size()
        assert 100 < size < 9000 and corpus.rows[:].max() < size


def test_a_row_keeps_its_id_even_if_it_is_zero(tmp_path):
    rows = [dict(text="one", id=0), dict(text="two", id="x"), dict(text="three"), dict(text="four", id=None)]
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [document["id"] for document in documents(f"files:{path}")]
    assert found == ["0", "x", "some.jsonl-2", "some.jsonl-3"]


@pytest.mark.parametrize(
    "name, text",
    [("a.csv", "text,n\nthe garden,1\n"), ("a.jsonl", '{"text": "the garden"}\n'), ("a.txt", "the garden")],
)
def test_a_byte_order_mark_is_no_part_of_the_text(name, text, tmp_path):
    """Excel's "CSV UTF-8" begins with one."""
    (tmp_path / name).write_bytes(text.encode("utf-8-sig"))
    assert [document["text"] for document in documents(f"files:{tmp_path / name}")] == ["the garden"]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl.gz", ".parquet"])
def test_a_file_whose_name_is_not_utf8_is_read(suffix, tmp_path, capsys):
    """Names in old archives are in Latin-1; Python keeps such bytes as halves of surrogate pairs."""
    texts = [f"The old garden number {i} follows a quiet river to the sea." for i in range(400)]
    path = f"{tmp_path}/caf\udce9{suffix}"
    if suffix == ".parquet":
        with open(path, "wb") as file:
            pyarrow.parquet.write_table(pyarrow.table(dict(text=texts)), file)
    else:
        rows = "".join(json.dumps(dict(text=text)) + "\n" for text in texts)
        with gzip.open(path, "wt") if suffix.endswith(".gz") else open(path, "w") as file:
            file.write(rows if ".jsonl" in suffix else "\n\n".join(texts))
    config = CorpusConfig(vocab_size=200, seq_length=32, filter_threshold=0, heldout=0.1, probe=0.2)
    corpus = get_corpus(str(tmp_path), config, tmp_path / "cache")
    assert {document["source"] for document in corpus.probe_documents()} == {"caf"}
    assert ("caf .txt: cut into documents" in capsys.readouterr().out) == (suffix == ".txt")


def test_halves_of_surrogate_pairs_in_ids_and_sources(tmp_path):
    half = "web \ud83d"
    rows = [dict(text=f"garden {i} and a river", id=f"{half}{i}", source=half) for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = CorpusConfig(vocab_size=120, seq_length=16, filter_threshold=0, heldout=0.2, probe=0.2)
    corpus = get_corpus(f"files:{tmp_path}/a.jsonl", config, tmp_path / "cache", progress=False)
    assert {document["source"] for document in corpus.probe_documents()} == {"web"}


def test_halves_of_surrogate_pairs_in_sources_of_token_ids(tmp_path):
    tokenizer = train_tokenizer(["garden and river"] * 9, 100)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rows = [dict(input_ids=tokenizer.encode(f"garden {'and ' * i}").ids, source="web \ud83d") for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = CorpusConfig(vocab_size=tokenizer.get_vocab_size(), seq_length=16, heldout=0.2, probe=0.2)
    corpus = get_corpus(f"files:{tmp_path}/a.jsonl#input_ids", config, tmp_path / "cache", progress=False)
    assert {document["source"] for document in corpus.probe_documents()} == {"web"}


def test_a_path_with_the_sign_of_a_column_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "C#" / "tokenizer").mkdir(parents=True)
    (tmp_path / "C#" / "a.jsonl").write_text('{"text": "the garden", "body": "a river", "input_ids": [7]}\n')
    (tmp_path / "C#" / "tokenizer" / "tokenizer.json").write_text("{}")
    for source, text in (("C#/a.jsonl", "the garden"), ("C#/*.jsonl#body", "a river"), ("C#/a.jsonl#body", "a river")):
        for named in (source, f"files:{source}"):
            assert [document["text"] for document in documents(named)] == [text]
            assert source_notes(named) == []
    sources = ["files:C#/a.jsonl", "files:C#/a.jsonl#body"]
    found = [source_identity(source)["source"] for source in sources]
    assert found == ["files:a.jsonl", "files:a.jsonl#body"]
    assert source_tokenizer("files:C#/a.jsonl#input_ids") == "C#/tokenizer/tokenizer.json"
    assert source_tokenizer("files:C#/a.jsonl") is None


def test_paths_are_joined_without_their_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "c + d.txt"):
        (tmp_path / name).write_text(name)
    found = {
        "a.txt + b.txt": ["a.txt", "b.txt"],
        "files:a.txt + b.txt": ["a.txt", "b.txt"],
        "c + d.txt": ["c + d.txt"],
        "a.txt + files:b.txt": ["a.txt", "b.txt"],
        "a.txt + files:c + d.txt": ["a.txt", "c + d.txt"],
    }
    for source, names in found.items():
        assert [document["text"] for document in documents(source)] == names
        assert full_source(source) == " + ".join(f"files:{name}" for name in names)
    assert sources("hub:name:train + test") == [Source("hub", "name", split="train + test")]  # as the hub writes it
    with pytest.raises(UserError, match="source 'nosuch.txt' is no file"):
        list(documents("nosuch.txt + b.txt"))


def test_a_linked_folder_is_followed_once(tmp_path):
    (tmp_path / "texts" / "inner").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "texts" / "inner" / "a.txt").write_text("The old garden.")
    (tmp_path / "elsewhere" / "b.txt").write_text("A quiet river.")
    (tmp_path / "texts" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "texts" / "inner" / "back").symlink_to(tmp_path / "texts")  # a circle
    found = [path.removeprefix(f"{tmp_path}/texts/") for path in source_files(str(tmp_path / "texts"))]
    assert found == ["inner/a.txt", "link/b.txt"]


def test_a_pattern_that_matches_files_and_folders_reads_both(tmp_path):
    (tmp_path / "data" / "more").mkdir(parents=True)
    (tmp_path / "data" / "a.txt").write_text("The old garden.")
    (tmp_path / "data" / "more" / "b.txt").write_text("A quiet river.")
    (tmp_path / "data" / "more" / "c.png").write_text("")
    assert [path[-5:] for path in source_files(f"{tmp_path}/data/*")] == ["a.txt", "b.txt"]
    (note,) = source_notes(f"{tmp_path}/data/*")
    assert note.endswith("2 files are read; left out: 1 of other kinds (.png)")


def test_the_folder_of_a_run_is_no_text(tmp_path):
    for name in ("book.txt", "runs/mine/run.json", "runs/mine/log.jsonl", "runs/mine/report.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("The old garden.")
    assert [path.removeprefix(f"{tmp_path}/") for path in source_files(str(tmp_path))] == ["book.txt"]


def test_a_folder_of_many_files_is_listed_once(tmp_path):
    for number in range(3000):
        (tmp_path / f"{number}.txt").touch()
    visited, scandir = [], os.scandir
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", lambda path: visited.append(path) or scandir(path))
        assert len(source_files(str(tmp_path))) == 3000
    assert len(visited) == 1  # the time is that of the files, not of their square


PIPED = [
    (b'{"text": "the garden"}\n', ["the garden"]),
    (b"A river.\n", ["A river.\n"]),
    (b"text,n\nA river,1\n", ["A river"]),
    (gzip.compress(b'{"text": "the garden"}\n', mtime=0), ["the garden"]),
]


@pytest.mark.parametrize("text, words", PIPED)
@pytest.mark.parametrize("kind", ["standard input", "pipe"])
def test_a_stream_is_read_once_and_kept(kind, text, words, tmp_path, monkeypatch):
    monkeypatch.setenv("CRAM_CACHE", str(tmp_path / "cache"))
    path = "-"
    if kind == "pipe":
        path = str(tmp_path / "pipe")
        os.mkfifo(path)
        threading.Thread(target=lambda: open(path, "wb").write(text), daemon=True).start()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    source = full_source(path)
    for _ in range(2):
        assert [document["text"] for document in documents(source)] == words


def test_a_list_of_sources_in_yaml_is_their_short_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"body": "the garden"}\n' * 3)
    (tmp_path / "mix.yaml").write_text("- {kind: files, path: a.jsonl, column: body, first: 2}\n- machine:python\n")
    assert full_source("mix.yaml") == "files:a.jsonl[:2]#body + machine:python"
    assert full_source([dict(kind="machine", path="python")]) == "machine:python"
    for wrong, words in (
        (dict(kind="web"), "write machine"),
        (dict(folder="a"), "known are kind"),
        ("0*machine", "a share"),
        (dict(kind="hub", path="a/b/c/d"), "another source"),
    ):
        with pytest.raises(UserError, match=words):
            sources(wrong)


def test_a_cache_is_listed_and_freed(tiny, tmp_path):
    cache = tmp_path / "cache"
    built = ["data", "build", *tiny.options()[:3], "--keep"]
    assert command(*built, cwd=tmp_path, cache=cache).code == 0
    listed = command("data", "list", cwd=tmp_path, cache=cache)
    assert listed.code == 0 and f"files:{tiny.text.name}" in listed.out and "documents-" in listed.out
    refused = command("data", "clean", cwd=tmp_path, cache=cache)
    assert refused.code == 2 and "add --yes" in refused.err and list(cache.glob("corpus-*"))
    freed = command("data", "clean", "--yes", cwd=tmp_path, cache=cache)
    assert freed.code == 0 and not list(cache.glob("*-*"))


def test_a_cache_keeps_what_another_process_builds(tiny, tmp_path):
    cache = tmp_path / "cache"
    assert command("data", "build", *tiny.options()[:3], "--keep", cwd=tmp_path, cache=cache).code == 0
    (documents,) = cache.glob("documents-*")
    with open(documents / ".lock", "a+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        freed = command("data", "clean", "--yes", cwd=tmp_path, cache=cache)
    assert freed.code == 0 and f"{documents.name} stays: another process" in freed.out
    assert [path.name for path in cache.glob("*-*")] == [documents.name]


def test_what_a_build_kept_stays_after_builds_that_keep_nothing(tmp_path):
    docs = [dict(text=f"the garden number {i} waits for rain") for i in range(200)]
    for order, keep in (("random", True), ("fragment", False), ("unigram", False)):
        config = CorpusConfig(vocab_size=100, seq_length=16, filter_threshold=0, order=order)
        get_corpus(docs, config, tmp_path, progress=False, keep=keep)
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["corpus"] * 3 + ["documents"]


def test_documents_need_nothing_but_a_text(tmp_path):
    config = CorpusConfig(vocab_size=100, seq_length=16, filter_threshold=0, probe=0.1)
    docs = [dict(text=f"the garden number {i} waits for rain") for i in range(200)]
    corpus = get_corpus(docs, config, tmp_path, progress=False)
    assert all(docs[int(probe["id"])]["text"] == probe["text"] for probe in corpus.probe_documents())
    with pytest.raises(UserError, match="document 1: its text is NoneType; give a str"):
        get_corpus([dict(text="a"), dict(text=None)], config, tmp_path, progress=False)
    with pytest.raises(UserError, match="known are kind, path"):
        get_corpus([dict(body="a")], config, tmp_path, progress=False)


def test_files_that_only_differ_within_are_told_apart(tmp_path):
    named = []
    for name in "ab":
        path = tmp_path / name / "data.txt"
        path.parent.mkdir()
        path.write_text(f"the garden {name} waits")
        os.utime(path, (1, 1))
        (tmp_path / name / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: data.txt\n---\n")
        named.append(source_identity(f"files:{path}"))
    assert named[0]["source"] == named[1]["source"] and named[0] != named[1]
    hubs = [source_identity(f"hub:{tmp_path}/{name}") for name in "ab"]
    assert hubs[0]["revision"] != hubs[1]["revision"]


def test_the_hub_is_named_as_its_users_write_it(tmp_path, monkeypatch):
    slashed = sources("hub:a/b@refs/convert/parquet/en:train[:10%]#body")
    assert slashed == [Source("hub", "a/b", "body", "refs/convert/parquet", "en", "train[:10%]")]
    assert sources(str(slashed[0])) == slashed and "@refs%2Fconvert%2Fparquet/en" in str(slashed[0])
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "deep" / "down" / "texts"
    folder.mkdir(parents=True)
    (folder / "train.csv").write_text("text\n" + "".join(f"garden {i}\n" for i in range(50)))
    found = {part: [doc["text"] for doc in documents(f"hub:{folder}:train{part}")] for part in ("", "[:10%]", "[20:22]")}
    assert found["[:10%]"] == found[""][:5] and found["[20:22]"] == found[""][20:22] and len(found[""]) == 50
    with pytest.raises(UserError, match="check the split and the network"):
        list(documents(f"hub:{folder}:train[five]"))
    (folder / "state.json").write_text("{}")
    with pytest.raises(UserError, match="written by save_to_disk.*to_parquet"):
        list(documents(f"hub:{folder}"))


def test_the_size_of_a_dataset_without_a_network_is_one_line(monkeypatch):
    config = SimpleNamespace(data_files={"train": ["http://127.0.0.1:9/train.parquet"]})
    monkeypatch.setattr("cramming_nb.engine.sources.hub_builder", lambda source: SimpleNamespace(config=config))
    with pytest.raises(UserError, match="^hub:a/b: .*; check the network$"):
        source_bytes("hub:a/b")
