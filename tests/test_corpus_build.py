"""A corpus is the same whoever builds it, and whatever happens meanwhile."""

import errno
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import Forked, Killable, child, command, hidden, lines, sentence, write_jsonl

from cramming_nb import corpus as corpus_module
from cramming_nb.corpus import SHUFFLED_BLOCKS, Corpus, CorpusConfig, get_corpus, pack, shuffled_tokens
from cramming_nb.data import BATCH, compressible
from cramming_nb.engine import build as build_module
from cramming_nb.engine.build import TEXT, Store, chosen_tokens, tokens_schema
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.files import atomic_write, lock, read_arrow, write_arrow
from cramming_nb.engine.jobs import Local, Unfinished, run_stage
from cramming_nb.engine.sources import Source, documents
from cramming_nb.tokenizer import count_tokens, tokenise, train_tokenizer

CONFIG = CorpusConfig(vocab_size=400, seq_length=32, filter_threshold=0.6, heldout=0.05, sample=200_000)
SETTINGS = "corpus.vocab_size=400 corpus.seq_length=32 corpus.filter_threshold=0.6 corpus.order=sentence_length".split()


SMALL = BATCH // 8  # characters of a batch, so that an eighth of the text makes as many blocks


@pytest.fixture(scope="module", autouse=True)
def small_batches():
    """Let builds of this process read in small batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "BATCH", SMALL)
        yield


def build(*given):
    """The body of a process that builds a corpus, also in small batches."""
    corpus_module.BATCH = SMALL
    child(*given)


class Build(Killable):
    """A build in a process that can be killed."""

    body = staticmethod(build)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """Three files of 650,000 characters each: several chunks."""
    folder, rng = tmp_path_factory.mktemp("large"), random.Random(7)
    known = [sentence(rng) for _ in range(3000)]
    for name in "abc":
        docs = [dict(text=" ".join(rng.choices(known, k=rng.randint(3, 60)))) for _ in range(340)]
        write_jsonl(folder / f"{name}.jsonl", docs + docs[:20])  # some documents twice
    return folder


@pytest.fixture(scope="module")
def source(large) -> str:
    return f"files:{large}/a.jsonl + files:{large}/[bc].jsonl"


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory) -> Corpus:
    """What one process makes of it."""
    return get_corpus(source, CONFIG, tmp_path_factory.mktemp("one"), progress=False, engine=Local(1), keep=True)


def same(corpus: Corpus, other: Corpus) -> bool:
    return corpus.manifest["files"] == other.manifest["files"]


def test_rows_do_not_depend_on_the_number_of_workers(source, expected, tmp_path):
    assert len(list(expected.folder.parent.glob("documents-*/tokens-*.arrow"))) > 3
    for count in (2, 3):
        assert same(get_corpus(source, CONFIG, tmp_path / str(count), progress=False, engine=Local(count)), expected)


def test_rows_depend_on_every_setting(large, tmp_path):
    source, seen = f"files:{large}/a.jsonl", set()
    changes = [{}] + [
        dict([change])
        for change in dict(
            vocab_size=500,
            seq_length=48,
            filter_threshold=0.184,  # leaves half of the documents
            order="fragment",
            heldout=0.1,
            dedup=75,
            normalizer="unicode",
        ).items()
    ]
    for change in changes:
        config = CorpusConfig(**dict(vocab_size=400, seq_length=32, filter_threshold=0.6, sample=200_000) | change)
        corpus = get_corpus(source, config, tmp_path, progress=False, engine=Local(1), keep=True)
        seen.add(corpus.manifest["files"]["train"]["sha256"])
    assert len(seen) >= len(changes) - 1  # the normaliser does not matter to plain ASCII
    kinds = [path.name.split("-")[0] for path in tmp_path.iterdir()]
    assert kinds.count("documents") == 4  # another vocabulary, dedup, another normaliser


def test_documents_are_deleted_when_the_rows_stand(large, tmp_path):
    source, other = f"files:{large}/a.jsonl", CorpusConfig(**{**CONFIG.__dict__, "order": "unigram"})
    first = get_corpus(source, CONFIG, tmp_path, progress=False, engine=Local(1))
    assert [path.name for path in tmp_path.iterdir()] == [first.folder.name]
    kept = get_corpus(source, other, tmp_path, progress=False, engine=Local(1), keep=True)
    (stage,) = tmp_path.glob("documents-*")
    made = {path: path.stat().st_mtime_ns for path in stage.glob("*.arrow")}
    third = CorpusConfig(**{**CONFIG.__dict__, "order": "fragment"})
    get_corpus(source, third, tmp_path, progress=False, engine=Local(1), keep=True)
    assert {path: path.stat().st_mtime_ns for path in stage.glob("*.arrow")} == made
    assert np.array_equal(np.sort(kept.rows[:], 0), np.sort(first.rows[:], 0))  # the same tokens, in another order


MOMENTS = {  # a step, and what is there when it is killed
    "read": "documents-*/text-00000.arrow",
    "tokenizer": "documents-*/text-00001.arrow",
    "tokenise": "documents-*/tokens-*.arrow",
    "rows": "documents-*/manifest.json",
    "order": "corpus-*/packed.npy",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_build_goes_on(moment, source, expected, tmp_path):
    cache = tmp_path / "cache"
    argv = ["data", "build", "--source", source, "--set", *SETTINGS, "corpus.sample=200000", "corpus.heldout=0.05"]
    run = Build(*argv, cwd=tmp_path, cache=cache)
    run.wait_for(lambda: list(cache.glob(MOMENTS[moment])))
    workers = Forked.all() - {run.process.pid}
    assert run.send(signal.SIGKILL) in (-9, 0)
    finished = {path: path.stat().st_mtime_ns for path in cache.glob("documents-*/t*.arrow")}
    said = command(*argv, "--keep", cwd=tmp_path, cache=cache)
    assert said.code == 0, said.err
    (manifest,) = cache.glob("corpus-*/manifest.json")
    assert same(Corpus(manifest.parent), expected)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished, "something finished was made again"
    assert not hidden(cache) and not list(cache.glob("*/packed*"))
    for _ in range(600):
        if not workers & Forked.all():
            break
        time.sleep(0.1)
    else:
        raise AssertionError("workers outlive a build that was killed")


def test_a_corpus_without_probes(tmp_path):
    config = CorpusConfig(**{**CONFIG.__dict__, "probe": 0})
    corpus = get_corpus(documents_of(100), config, tmp_path, progress=False)
    assert corpus.probe_documents() == [] and len(corpus.heldout) > 0
    corpus.verify()


def documents_in_blocks(folder: Path, num_blocks: int, documents_each: int) -> pyarrow.Table:
    """Blocks of short documents; all tokens of a document are its number."""
    schema = tokens_schema(400).append(TEXT.field("fingerprint"))

    def blocks():
        for block in range(num_blocks):
            numbers = block * documents_each + np.arange(documents_each)
            ones = np.ones(documents_each, np.int64)
            tokens = [[number] * 3 for number in numbers]
            yield dict(tokens=tokens, length=3 * ones, cost=ones, fingerprint=numbers.astype(np.uint64))

    write_arrow(folder / "tokens.arrow", blocks(), schema)
    return read_arrow(folder / "tokens.arrow")


def test_documents_are_shuffled_over_blocks_and_a_few_blocks_are_held(tmp_path, monkeypatch):
    each, num_blocks = 20, 3 * SHUFFLED_BLOCKS + 1
    table = documents_in_blocks(tmp_path, num_blocks, each)
    chosen = np.arange(0, num_blocks * each, 2)  # half of the documents
    read, block_tokens = [], corpus_module.block_tokens

    def noted(documents, number, positions):
        read.append(number)
        return block_tokens(documents, number, positions)

    monkeypatch.setattr(corpus_module, "block_tokens", noted)
    parts, read_before = [], [0]
    for part in shuffled_tokens(table, chosen):
        parts.append(part.reshape(-1, 3))
        read_before.append(len(read))
    assert max(np.diff(read_before)) <= SHUFFLED_BLOCKS  # so many are in memory at a time
    assert sorted(read) == list(range(num_blocks)) and read != sorted(read)  # each once, in another order
    found = np.concatenate(parts)
    assert (found == found[:, :1]).all() and sorted(found[:, 0]) == chosen.tolist()
    from_blocks = found[:, 0] // each
    assert len(set(from_blocks[:50].tolist())) > 8
    assert np.mean(from_blocks[1:] == from_blocks[:-1]) < 0.2
    assert np.array_equal(np.concatenate(list(shuffled_tokens(table, chosen))).reshape(-1, 3), found)
    assert list(shuffled_tokens(table, chosen[:0])) == []
    in_order = np.concatenate(list(chosen_tokens(table, chosen))).reshape(-1, 3)
    assert in_order[:, 0].tolist() == chosen.tolist()


def test_training_documents_are_shuffled_and_held_out_ones_keep_their_order(tmp_path):
    letters = "abcdefghij"
    names = [f"{a}x{b}" for a in letters for b in letters]  # a word of its own for each document
    docs = [dict(text=f"{name} and then " * 20, id=name, source=name[0]) for name in names]
    config = CorpusConfig(vocab_size=120, seq_length=16, filter_threshold=0, heldout=0.2, order="random")
    corpus = get_corpus(docs, config, tmp_path, progress=False)

    def order_of(rows: np.ndarray) -> list[str]:
        words = " ".join(corpus.tokenizer.decode_batch(rows[:].tolist())).split()
        return list(dict.fromkeys(word for word in words if word in names))

    train, heldout = order_of(corpus.rows), order_of(corpus.heldout)
    assert len(train) > 60 and len(heldout) > 10
    assert heldout == sorted(heldout)
    neighbours = [a[0] == b[0] for a, b in zip(train, train[1:], strict=False)]
    assert np.mean(neighbours) < 0.3  # in the order of the text, nine of ten would be of one source


def test_held_out_rows_are_packed_in_the_order_of_the_text(expected):
    (stage,) = expected.folder.parent.glob("documents-*")
    table = Store(stage, Local(1)).open()
    prints, sizes, costs = (table[name].to_numpy() for name in ("fingerprint", "characters", "cost"))
    unique = corpus_module.first_copies(prints)
    kept = unique[compressible(costs[unique], sizes[unique], CONFIG.filter_threshold)]
    split = corpus_module.split_documents(prints[kept], sizes[kept], CONFIG.heldout, CONFIG.probe)
    rows = np.concatenate(list(pack(chosen_tokens(table, kept[split == 1]), CONFIG.seq_length)))
    assert np.array_equal(expected.heldout, rows)


def test_two_builds_at_once(source, expected, tmp_path):
    argv = ["data", "build", "--source", source, "--set", *SETTINGS, "corpus.sample=200000", "corpus.heldout=0.05"]
    for name in "ab":
        (tmp_path / name).mkdir()
    runs = [Build(*argv, cwd=tmp_path / name, cache=tmp_path / "cache") for name in "ab"]
    assert [run.end() for run in runs] == [0, 0]
    (manifest,) = (tmp_path / "cache").glob("corpus-*/manifest.json")
    assert same(Corpus(manifest.parent), expected)


@pytest.fixture(scope="module")
def built(large, tmp_path_factory) -> Path:
    """All stages of one of the files."""
    folder = tmp_path_factory.mktemp("built")
    get_corpus(f"files:{large}/a.jsonl", CONFIG, folder, progress=False, engine=Local(1), keep=True)
    return folder


@pytest.mark.parametrize("name", ["documents-*/text-*.arrow", "documents-*/tokens-*.arrow", "documents-*/manifest.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_damaged_stage_is_not_used(name, how, built, large, tmp_path):
    source = f"files:{large}/a.jsonl"
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    path = sorted(tmp_path.glob(name))[-1]
    data = path.read_bytes()
    if how == "flipped" and path.name != "manifest.json":
        path.write_bytes(data[:500] + bytes([data[500] ^ 4]) + data[501:])
    elif how == "gone" and path.name != "manifest.json":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2])
    other = CorpusConfig(**{**CONFIG.__dict__, "order": "unigram"})
    with pytest.raises(UserError, match=r"(damaged|cannot be read .*); delete the folder"):
        get_corpus(source, other, tmp_path, progress=False, engine=Local(1))


def test_a_corpus_opens_by_its_sizes_and_is_verified_by_its_hashes(expected, tmp_path):
    folder = shutil.copytree(expected.folder, tmp_path / "corpus")
    rows, probes = folder / "train.npy", folder / "probe.jsonl"
    Corpus(folder).verify()
    for path, use in ((rows, Corpus.verify), (probes, Corpus.verify), (probes, Corpus.probe_documents)):
        data = path.read_bytes()
        path.write_bytes(data[:500] + bytes([data[500] ^ 4]) + data[501:])
        with pytest.raises(UserError, match=f"{path.name} is damaged"):
            use(Corpus(folder))
        path.write_bytes(data)
    os.truncate(rows, rows.stat().st_size - 1)
    with pytest.raises(UserError, match=f"{rows.name} is damaged"):
        Corpus(folder)


def documents_of(count: int) -> list[dict]:
    rng = random.Random(3)
    return [dict(text=" ".join(sentence(rng) for _ in range(8)), id=str(i), source="s") for i in range(count)]


def extra(*texts: str) -> list[dict]:
    return [dict(text=text, id=f"x{i}", source="x") for i, text in enumerate(texts)]


ODD = {  # documents beside ordinary ones, and how many of them should be read, kept after cleaning, kept by the filter
    "empty": (["", " ", "\n\t", "\0\0"], 4, 0, 0),
    "one letter": (["a", "b"], 2, 2, 0),
    "NUL bytes": (["the\0 old\0 garden " * 20] * 1, 1, 1, 1),
    "not UTF-8": (["the \ufffd old \udcff garden \ud83d " * 20], 1, 1, 1),
    "copies": (["The old garden waits. " * 9, "the OLD garden\nwaits. " * 9], 2, 1, 1),
    "a word of a million letters": (["x" * 1_000_000], 1, 1, 0),
    "a thousand lines": (["the old garden\n" * 1000], 1, 1, 1),
    "control characters": (["the \x1b[31m old \x07 garden \u2028 and \x85 kettle " * 9], 1, 1, 1),
    "combining": (["e\u0301te\u0301 \u0301 ¨ the old garden waits for rain " * 9], 1, 1, 1),
}


@pytest.mark.parametrize("what", ODD)
def test_odd_documents(what, tmp_path):
    texts, read, clean, kept = ODD[what]
    corpus = get_corpus(documents_of(200) + extra(*texts), CONFIG, tmp_path, progress=False)
    found = {s["stage"]: s["documents"] for s in corpus.manifest["stages"]}
    assert (found["read"], found["clean"], found["filter"]) == (200 + read, 200 + clean, 200 + kept)


def test_very_many_documents_of_one_word(tmp_path):
    docs = [dict(text=f"w{i}", id="", source="") for i in range(125_000)]
    config = CorpusConfig(vocab_size=300, seq_length=32, filter_threshold=0, sample=100_000)
    corpus = get_corpus(docs, config, tmp_path, progress=False, keep=True)
    assert corpus.manifest["stages"][1]["documents"] == 125_000
    assert len(list(tmp_path.glob("documents-*/tokens-*.arrow"))) > 10


def test_one_document_of_many_chunks(tmp_path):
    rng = random.Random(1)
    known = [sentence(rng) for _ in range(1000)]
    huge = " ".join(rng.choices(known, k=190_000))
    write_jsonl(tmp_path / "huge.jsonl", [dict(text=huge)])
    write_jsonl(tmp_path / "others.jsonl", documents_of(300))
    corpus = get_corpus(f"files:{tmp_path}/huge.jsonl + files:{tmp_path}/others.jsonl", CONFIG, tmp_path, progress=False)
    assert len(huge) > 20 * BATCH // 8 and len(corpus.rows) > 12_500


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("cut.jsonl", b'{"text": "the old garden"}\n{"text": "cut o', "line 2: not JSON"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "the old garden"}\n' * 999, mtime=0)[:-9], "cannot be read to its end"),
        ("bytes.jsonl", b'{"text": "\xff\xfe and so on"}\n', "8.0% of its bytes are not UTF-8"),
        ("quote.csv", b'text,n\nthe garden,1\n"the river,2\nthe kettle,3\n', "line 3: .*check its quotes"),
        ("quoted.csv", b'text,n\n"the garden" and more,1\n', "line 2: .*check its quotes"),
        ("short.csv", b'n,text\n1,the garden\nand a river\n', "line 3: fewer cells than the header"),
        ("absent.jsonl", b'{"text": "the garden"}\n{"n": 1}\n', "line 2: no text in column 'text'"),
        ("nulls.jsonl", b'{"text": null}\n' * 9, "the text has 0 usable documents"),
        ("nul.jsonl", b'{"text": "a"}\n\0\0\0\n', "line 2: not JSON"),
        ("tokens.jsonl#input_ids", b'{"input_ids": [1, -2]}\n', "tokenizer"),
    ],
)
def test_files_that_are_not_what_they_seem(name, content, words, tmp_path):
    (tmp_path / name.partition("#")[0]).write_bytes(content)
    with pytest.raises(UserError, match=words):
        get_corpus(f"files:{tmp_path / name}", CONFIG, tmp_path / "cache", progress=False)
    assert not list((tmp_path / "cache").glob("*/*"))


@pytest.mark.parametrize("rows, different", [([], 0), ([[7, 8, 9]] * 9, 1), ([[7, 8], [8, 7]], 2)])
def test_too_few_rows_of_token_ids(rows, different, tmp_path):
    tokenizer = train_tokenizer(["garden"] * 9, 100)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_jsonl(tmp_path / "rows.jsonl", [dict(input_ids=row) for row in rows])
    config = CorpusConfig(vocab_size=tokenizer.get_vocab_size(), seq_length=16)
    with pytest.raises(UserError, match=f"the text has {different} different rows of token ids; at least 3"):
        get_corpus(f"files:{tmp_path}/rows.jsonl#input_ids", config, tmp_path / "cache", progress=False)
    assert not list((tmp_path / "cache").glob("*/*"))


def test_borrowed_tokenizer_counts_for_the_filter(finished, tmp_path):
    borrowed = next(finished.tiny.cache.glob("corpus-*/tokenizer.json"))
    docs = documents_of(200)
    kept = []
    for threshold in (0.1, 0.6):
        config = CorpusConfig(**{**CONFIG.__dict__, "filter_tokenizer": str(borrowed), "filter_threshold": threshold})
        try:
            corpus = get_corpus(docs, config, tmp_path, progress=False)
            kept.append(next(s["documents"] for s in corpus.manifest["stages"] if s["stage"] == "filter"))
        except UserError as error:
            assert "leaves 0" in str(error)
            kept.append(0)
    assert kept == [0, 200]
    with pytest.raises(UserError, match="no such file"):
        get_corpus(docs, CorpusConfig(filter_tokenizer="nosuch.json"), tmp_path, progress=False)


@pytest.mark.parametrize("setting", ["none", "truncation", "padding"])
def test_borrowed_tokenizer_counts_all_tokens_of_the_text_alone(setting, tmp_path):
    """What its file says about cutting, padding and special tokens is for other uses."""
    texts = ["the old garden follows a river " * 40, "a short one"]
    own, borrowed = (train_tokenizer(texts, size) for size in (200, 120))
    plain = [len(borrowed.encode(text).ids) for text in texts]  # with [CLS] and [SEP], as the reference counts
    if setting == "truncation":
        borrowed.enable_truncation(16)
    if setting == "padding":
        borrowed.enable_padding()
    own.save(str(tmp_path / "own.json"))
    borrowed.save(str(tmp_path / "borrowed.json"))
    _, _, costs = tokenise(texts, str(tmp_path / "own.json"), str(tmp_path / "borrowed.json"))
    assert costs.tolist() == plain and plain[0] > 10 * plain[1]


def test_borrowed_tokenizer_is_read_again_if_its_file_changed(tmp_path):
    texts, path, counts = ["garden " * 9], tmp_path / "borrowed.json", []
    for number, known in enumerate(("garden", "g a r d e n")):
        train_tokenizer([known] * 9, 400).save(str(path))
        os.utime(path, (number, number))
        counts.append(count_tokens(texts, str(path)).item())
    assert counts == [2 + 9, 2 + 9 * 6]  # [CLS] and [SEP], too


def test_hub_dataset_from_a_local_builder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo" / "texts" / "data").mkdir(parents=True)
    docs = documents_of(200)
    write_jsonl(tmp_path / "demo" / "texts" / "data" / "train.jsonl", docs)
    first = get_corpus("hub:demo/texts", CONFIG, tmp_path, progress=False)
    part = get_corpus("hub:demo/texts:train[:150]", CONFIG, tmp_path, progress=False)
    assert [c.manifest["stages"][0]["documents"] for c in (first, part)] == [200, 150]
    assert len(first.manifest["identity"]["revision"]) == 40
    write_jsonl(tmp_path / "demo" / "texts" / "data" / "train.jsonl", docs[:180])
    again = get_corpus("hub:demo/texts", CONFIG, tmp_path, progress=False)
    assert again.manifest["identity"]["revision"] != first.manifest["identity"]["revision"]
    assert again.manifest["stages"][0]["documents"] == 180


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_rows_whose_text_is_null_are_counted_and_dropped(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    rows = documents_of(200)
    for i in (0, 7, 199):
        rows[i]["text"] = None
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "texts/train.parquet")
    else:
        write_jsonl(tmp_path / "texts" / "train.jsonl", rows)
    source = "hub:texts" if kind == "hub" else f"files:texts/train.{kind}"
    corpus = get_corpus(source, CONFIG, tmp_path / "cache", progress=False)
    assert [stage["documents"] for stage in corpus.manifest["stages"][:2]] == [200, 197]


def test_sentences_are_reported_and_removed(tmp_path):
    docs, test = documents_of(200), "Nobody who knows the harbor at night would ever paint a lantern there twice."
    docs[7]["text"] += f" {test.upper()}"
    reported = get_corpus(docs, CONFIG, tmp_path, progress=False, avoid=[test, "Short."])
    removed = get_corpus(
        docs, CorpusConfig(**{**CONFIG.__dict__, "decontaminate": True}), tmp_path, progress=False, avoid=[test]
    )
    assert reported.manifest["overlap"]["documents"] == removed.manifest["overlap"]["documents"] == 1
    documents = [
        next(s["documents"] for s in c.manifest["stages"] if s["stage"] == "overlap") for c in (reported, removed)
    ]
    assert documents == [200, 199]


@pytest.mark.filterwarnings("error")
def test_sentences_that_remove_almost_every_document_are_named(tmp_path):
    docs = documents_of(30)
    config = CorpusConfig(**{**CONFIG.__dict__, "decontaminate": True})
    for left in (0, 2):
        avoid = [doc["text"] for doc in docs[left:]]
        with pytest.raises(UserError, match=f"decontamination leaves {left} of 30 .*corpus.decontaminate=false"):
            get_corpus(docs, config, tmp_path, progress=False, avoid=avoid)
    assert not list(tmp_path.glob("corpus-*"))


def test_inspect_shows_rows_and_statistics(finished, tmp_path):
    said = (
        finished.tiny,
        command("data", "inspect", *finished.tiny.options()[:3], cwd=tmp_path, cache=finished.tiny.cache),
    )
    assert said[1].code == 0 and "documents a row" in said[1].out and "| seconds |" in said[1].out


# Large sources


def dataset(folder: Path, num_files: int, each: int = 40) -> str:
    """A folder with the layout of a dataset on the hub."""
    (folder / "data").mkdir(parents=True)
    docs = documents_of(num_files * each)
    for number in range(num_files):
        rows = [dict(text=doc["text"]) for doc in docs[number * each : (number + 1) * each]]
        write_jsonl(folder / "data" / f"train-{number:05}.jsonl", rows)
    return f"hub:{folder}"


def test_a_build_from_the_hub_goes_on_at_the_next_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset(Path("texts"), 10)
    whole = get_corpus("hub:texts", CONFIG, tmp_path / "whole", progress=False, engine=Local(1))
    read_part, begun = build_module.read_part, []

    def lost(path, *more):
        begun.append(path.name)
        if len(begun) == 5:
            raise Unfinished("the connection was lost")
        return read_part(path, *more)

    monkeypatch.setattr(build_module, "read_part", lost)
    with pytest.raises(Unfinished):
        get_corpus("hub:texts", CONFIG, tmp_path / "lost", progress=False, engine=Local(1))
    assert len(list(tmp_path.glob("lost/documents-*/text-*.arrow"))) == 4
    assert same(get_corpus("hub:texts", CONFIG, tmp_path / "lost", progress=False, engine=Local(1)), whole)
    assert begun[5:] == [f"text-{number:05}.arrow" for number in range(4, 10)]
    monkeypatch.setattr(build_module, "read_part", read_part)
    assert same(get_corpus("hub:texts", CONFIG, tmp_path / "two", progress=False, engine=Local(2)), whole)


def test_a_stream_that_breaks_off_is_told_in_one_line(tmp_path, monkeypatch):
    from datasets import IterableDataset

    monkeypatch.chdir(tmp_path)
    dataset(Path("texts"), 1)
    whole = IterableDataset.__iter__

    def breaks(self):
        for number, row in enumerate(whole(self)):
            if number == 7:
                raise ConnectionError("Server Disconnected")
            yield row

    monkeypatch.setattr(IterableDataset, "__iter__", breaks)
    with pytest.raises(Unfinished, match="hub:texts: row 8: Server Disconnected; what was read stays, so run it again"):
        list(documents("hub:texts"))


def test_a_large_source_is_forecast_and_refused_if_the_disk_is_too_small(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    dataset(Path("texts"), 12)
    check_estimate, estimates = build_module.check_estimate, []

    def noted(found, *more):
        estimates.append(found)
        return check_estimate(found, *more)

    monkeypatch.setattr(build_module, "check_estimate", noted)
    corpus = get_corpus("hub:texts", CONFIG, tmp_path / "cache", engine=Local(1), keep=True)
    said = capsys.readouterr()
    line = next(line for line in (said.out + said.err).splitlines() if line.startswith("about "))
    assert line.startswith("about 480 documents, 0 million tokens; 0.0 GB to read, ")
    (stage,) = tmp_path.glob("cache/documents-*")
    tokens = Store(stage, Local(1)).open()["length"].to_numpy().sum()
    assert 0.8 < estimates[0]["tokens"] / tokens < 1.25
    on_disk = sum(path.stat().st_size for path in stage.glob("*.arrow"))
    assert on_disk < estimates[0]["disk"] < 3 * on_disk
    full = shutil._ntuple_diskusage(10**9, 10**9, 1000)
    monkeypatch.setattr(build_module.shutil, "disk_usage", lambda path: full)
    with pytest.raises(UserError, match="has room for 0.0 GB: name another folder with --data-dir, or read less"):
        get_corpus("hub:texts", CONFIG, tmp_path / "small", progress=False, engine=Local(1))
    assert len(list(tmp_path.glob("small/documents-*/text-*.arrow"))) == 1  # what was read stays
    assert corpus.rows.shape[1] == 32


def test_a_mixture_reads_a_share_of_each_source(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", documents_of(400))
    write_jsonl(tmp_path / "b.jsonl", [dict(text=f"number {i}", id=f"b{i}") for i in range(400)])
    mix = [Source("files", f"{tmp_path}/a.jsonl", share=0.25), dict(kind="files", path=f"{tmp_path}/b.jsonl", first=10)]
    found = list(documents(mix))
    assert found == list(documents(f"0.25*files:{tmp_path}/a.jsonl + {tmp_path}/b.jsonl[:10]"))
    assert 60 < sum(doc["id"][0] != "b" for doc in found) < 140 and found[-1]["id"] == "b9"
    assert get_corpus(mix, CONFIG, tmp_path / "cache", progress=False).manifest["stages"][0]["documents"] == len(found)


# The mechanics of stages


def test_a_stage_is_complete_or_goes_on(tmp_path):
    folder, calls = tmp_path / "stage", []

    def stopped(folder):
        calls.append(1)
        (folder / "block").touch()
        raise KeyboardInterrupt

    def mistaken(folder):
        raise UserError("no")

    with pytest.raises(KeyboardInterrupt):
        run_stage(folder, stopped)
    assert (folder / "block").exists()
    assert run_stage(folder, lambda folder: dict(answer=42))["answer"] == 42
    assert run_stage(folder, stopped)["answer"] == 42 and calls == [1]
    with pytest.raises(UserError):
        run_stage(tmp_path / "other", mistaken)
    assert not (tmp_path / "other").exists()


def test_a_lock_outlives_the_folder_it_was_for(tmp_path):
    with lock(tmp_path / "a", wait=True):
        shutil.rmtree(tmp_path / "a")
    with lock(tmp_path / "a", wait=True):
        assert (tmp_path / "a").is_dir()


def test_a_file_is_complete_or_absent(tmp_path):
    with pytest.raises(ZeroDivisionError), atomic_write(tmp_path / "a") as part:
        part.write_text("half")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_files_are_utf8_in_any_locale(tmp_path):
    """An ASCII locale knows neither the letters of a vocabulary nor the dash of a report."""
    code = r"""if True:
        import sys
        from pathlib import Path
        from cramming_nb.corpus import CorpusConfig, get_corpus
        from cramming_nb.engine.files import write_text
        assert sys.flags.utf8_mode == 0
        folder = Path(sys.argv[1])
        write_text(folder / "report.md", "1\u20132")
        docs = [dict(text=f"\u03bb\u03cc\u03b3\u03bf\u03c2 {i}", id=str(i), source="s") for i in range(60)]
        config = CorpusConfig(vocab_size=60, normalizer="unicode", seq_length=8, filter_threshold=0, heldout=0.2)
        get_corpus(docs, config, folder, progress=False, engine="local")
        """
    ascii_locale = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    run = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(run, env=os.environ | ascii_locale, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == "1\u20132"
    (path,) = tmp_path.glob("corpus-*/tokenizer.json")
    assert "λόγος" in json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]


def test_a_lost_worker_is_told_in_one_line(tmp_path):
    with pytest.raises(UserError, match="a worker process ended"), Local(2) as workers:
        list(workers.map(_leave, [(1,), (2,), (3,)]))


def _leave(code: int):
    os._exit(code)


def test_manifest_is_small_and_says_everything(expected):
    manifest = json.loads((expected.folder / "manifest.json").read_text())
    assert {"identity", "config", "stages", "files", "unigram_entropy", "overlap", "schema"} <= set(manifest)
    names = [s["stage"] for s in manifest["stages"]]
    assert names == ["read", "clean", "tokenizer", "tokenise", "filter", "pack", "order"]
    assert manifest["stages"][1]["documents"] == manifest["stages"][0]["documents"] - 60


def test_a_disk_without_room_for_the_rows_is_told_before_they_are_written(tiny, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    result = command("data", "build", *tiny.options()[:3], cwd=tmp_path, cache=tmp_path / "cache")
    assert result.code == 2 and "No space left on device" in lines(result.err)[-1]
    monkeypatch.undo()
    result = command("data", "build", *tiny.options()[:3], cwd=tmp_path, cache=tmp_path / "cache")
    assert result.code == 0, result.err
