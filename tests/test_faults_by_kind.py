"""Faults that were seen once, and their relatives: told before work begins, in one line, and never wrong in silence."""

import csv
import datetime
import errno
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from conftest import command, contents, hidden, lines, write_jsonl
from test_bad_input import refused
from tokenizers import Tokenizer

from cramming_nb import tasks
from cramming_nb.app import cli
from cramming_nb.app.__main__ import Notices
from cramming_nb.app.export import fill_mask, load_model
from cramming_nb.app.labels import check_cells, read_labels, read_table
from cramming_nb.app.records import RunRecord
from cramming_nb.app.run import add_results, load_run
from cramming_nb.budget import Budget
from cramming_nb.corpus import Corpus, CorpusConfig, get_corpus, pack_rows
from cramming_nb.engine import sources
from cramming_nb.engine.checkpoint import load_checkpoint
from cramming_nb.engine.distributed import ProcessGroup
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.files import atomic_write, lock
from cramming_nb.engine.jobs import Engine, Local, LostWorker, Processes, Ray
from cramming_nb.engine.options import read_yaml
from cramming_nb.engine.tables import read_rows
from cramming_nb.glue import TASKS, load_glue
from cramming_nb.lab import bench, experiments

TWICE = {  # name: (command, file, its text, words of the line)
    "recipe": ("recipes show a.yaml", "corpus: {vocab_size: 400, vocab_size: 500}", ("a.yaml", "'vocab_size' is given")),
    "part of a recipe": (
        "recipes show a.yaml",
        "corpus: {vocab_size: 400}\ncorpus: {seq_length: 64}\n",
        ("'corpus' is given twice", "line 2"),
    ),
    "sources": ("data --source a.yaml", "- {kind: files, path: b, path: c}", ("a.yaml", "'path' is given twice")),
    "list of runs": ("lab a.yaml", "- {budget: 3s, budget: 1ktok}", ("a.yaml", "'budget' is given twice")),
    "value": ("data --set optimizer.betas={a:1,a:2}", "", ("optimizer.betas",)),
}


@pytest.mark.parametrize("what", TWICE.values(), ids=TWICE)
def test_a_key_of_yaml_that_is_given_twice(what, tmp_path):
    argv, text, words = what
    (tmp_path / "a.yaml").write_text(text)
    refused(command(*argv.split(), cwd=tmp_path, cache=tmp_path / "cache"), *words)
    assert not (tmp_path / "cache").exists() and not (tmp_path / "runs").exists()


def test_yaml_that_is_right_is_read_as_before():
    text = "a: &base {lr: 1, x: [1, 2]}\nb: {<<: *base, lr: 2}\n1: {c: {a: 1}, d: {a: 2}}\n"
    assert read_yaml(text) == {"a": {"lr": 1, "x": [1, 2]}, "b": {"lr": 2, "x": [1, 2]}, 1: {"c": {"a": 1}, "d": {"a": 2}}}


def test_notices_that_find_no_room_end_nothing():
    with open("/dev/full", "wb", buffering=0) as full:
        notices = Notices(full, "utf-8", line_buffering=True, write_through=True)
        assert notices.write("a line\n") == 7
        notices.flush()
        notices.detach()


FULL = {  # a command whose standard error is on a full disk: (exit code, begin of its output)
    "predict first 'a [MASK]'": (0, "a [MASK]\n"),
    "predict nosuch 'a [MASK]'": (2, ""),
    "data build {recipe} --source files:{text} --set corpus.vocab_size=390": (0, "| stage"),
}


@pytest.mark.parametrize("argv", FULL)
def test_standard_error_on_a_full_disk(argv, finished, tmp_path):
    code, begin = FULL[argv]
    argv = argv.format(recipe=finished.tiny.recipe, text=finished.tiny.text)
    call = f"exec '{sys.executable}' -m cramming_nb.app {argv} 2>/dev/full"
    env = os.environ | dict(CRAM_CACHE=str(tmp_path))
    done = subprocess.run(call, shell=True, cwd=finished.home, env=env, capture_output=True, text=True)
    assert done.returncode == code and done.stdout.startswith(begin), done.stdout


@pytest.mark.parametrize("source", ["machine:python", "-"])
def test_a_cache_that_cannot_be_written_is_told_before_anything_is_read(source, tiny, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("mine")
    reads = []
    monkeypatch.setattr(sources, "read_docstrings", lambda *a: reads.append(a))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"text\n")))
    argv = ["data", "build", tiny.recipe, "--source", source, "--data-dir", tmp_path / "data"]
    refused(command(*argv, cwd=tmp_path, cache=tmp_path / "taken" / "cache"), "taken", "move the file")
    assert not reads and sys.stdin.buffer.read() == b"text\n"


def test_cleaning_takes_what_killed_processes_left(tmp_path):
    """Folders half deleted and files half made, but not those of a process that is at work."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    cache = tmp_path / "cache"
    left = cache / f".part-{child.pid}-documents-1-gone"
    left.mkdir(parents=True)
    (left / "text-0.arrow").write_bytes(bytes(2_000_000))
    for name in (f".part-{child.pid}-7-docstrings-a.jsonl", f".part-{os.getpid()}-7-docstrings-b.jsonl", "mine.txt"):
        (cache / name).write_bytes(bytes(1_000_000))
    said = command("data", "clean", "--yes", cwd=tmp_path, cache=cache)
    assert "3.0 MB in" in said.out and said.out.count("left by a process that was killed") == 2
    assert set(contents(cache)) == {f".part-{os.getpid()}-7-docstrings-b.jsonl", "mine.txt"}


def test_cleaning_leaves_what_others_wrote(tmp_path):
    mine = ["corpus/a.txt", "corpus-notes.txt", "documents-2024/tax.txt", "docstrings.md", "piped-water.md"]
    for name in mine:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    said = command("data", "clean", "--yes", "--data-dir", ".", cwd=tmp_path)
    assert said.code == 0 and "deleted" not in said.out and sorted(contents(tmp_path)) == sorted(mine)


@pytest.mark.parametrize("name, words", {"a.txt": "a.txt is a file", "nosuch": "nosuch is missing"}.items())
def test_a_cache_that_is_no_folder_is_not_listed(name, words, tmp_path):
    (tmp_path / "a.txt").write_text("mine")
    said = command("data", "list", "--data-dir", name, cwd=tmp_path)
    refused(said, f"{words}; name a folder of corpora with --data-dir")


def test_a_cache_whose_name_is_not_utf8_is_told_before_anything_is_read(tiny, tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr("cramming_nb.corpus.source_parts", lambda *a: reads.append(a))
    argv = ["data", "build", tiny.recipe, "--source", tiny.text, "--data-dir", "caf\udce9"]
    refused(command(*argv, cwd=tmp_path), r"'caf\udce9' cannot be written in UTF-8; choose another name")
    assert not reads and not list(tmp_path.iterdir())


def test_keep_holds_for_a_corpus_that_is_there(tiny, tmp_path):
    argv = ["data", "build", tiny.recipe, "--source", f"files:{tiny.text}"]
    first = command(*argv, cwd=tmp_path, cache=tmp_path)
    before = contents(tmp_path)
    assert not list(tmp_path.glob("documents-*"))
    again = command(*argv, "--keep", cwd=tmp_path, cache=tmp_path)
    assert (first.code, again.code) == (0, 0) and first.out == again.out
    assert list(tmp_path.glob("documents-*/tokens-*.arrow"))
    assert {name: digest for name, digest in contents(tmp_path).items() if name in before} == before


def test_an_export_tells_that_it_drops_the_onnx_file_of_the_former(a_copy):
    onnx = a_copy.folder / "export" / "model.onnx"
    onnx.write_bytes(b"of former weights")
    said = a_copy.command("export", "first")
    assert said.code == 0 and "model.onnx is gone; --onnx writes it again" in said.out and not onnx.exists()
    assert a_copy.command("export", "first").out == "runs/first/export\n"


@pytest.fixture
def table(a_copy) -> Path:
    rows = [f"the old garden number {i},yes\na quiet river of {i} letters,no\n" for i in range(30)]
    path = a_copy.home / "letters.csv"
    path.write_text("text,label\n" + "".join(rows))
    return path


@pytest.mark.parametrize("room", [50, 20_000])
def test_disk_refuses_a_classifier(room, disk, table, a_copy):
    """The report, or the weights, find no room: one line, and the same command goes on when there is some."""
    disk(room)
    said = a_copy.command("finetune", "first", table, "--epochs", "1")
    disk(0)
    assert said.code == 2 and "make room, or choose a folder you may write to" in lines(said.err)[-1]
    assert "Traceback" not in said.err and hidden(a_copy.home) == []
    assert not (a_copy.folder / "letters" / "results.json").exists()
    again = a_copy.command("finetune", "first", table, "--epochs", "1")
    assert again.code == 0, again.err
    assert a_copy.command("predict", "first/letters", "the old garden").code == 0


def test_a_classifier_of_another_seed_is_not_replaced_in_silence(table, a_copy):
    argv = ["finetune", "first", table, "--epochs", "1"]
    assert "is replaced" not in a_copy.command(*argv).out
    assert "is replaced" not in a_copy.command(*argv).out
    assert "held a classifier of other rows or settings; it is replaced" in a_copy.command(*argv, "--seed", "1").out


def test_an_error_of_the_system_comes_out_of_a_process(tmp_path):
    with pytest.raises(FileNotFoundError, match="nosuch"):
        list(Processes(1, method="fork").map(os.remove, [(str(tmp_path / "nosuch"),)]))


def end_of(path, number):
    """A job: the second one kills its process, the others leave a file."""
    if number == 1:
        os.kill(os.getpid(), 9)
    (path / str(number)).touch()


def test_a_worker_lost_while_no_result_is_asked_for(tmp_path):
    """The pool is broken when the next job is started; an engine that lost one starts another."""
    with Local(2) as workers:
        results = workers.map(end_of, [(tmp_path, number) for number in (0, 1, *range(2, 12))])
        with pytest.raises(LostWorker, match="ended before its work did"):
            for _ in results:
                while not workers.pool._broken:
                    time.sleep(0.01)
        assert list(workers.map(end_of, [(tmp_path, 20), (tmp_path, 21)])) == [None, None]


def test_results_that_wait_for_the_first_are_few(tmp_path):
    class AtOnce(Engine):
        count, begun = 2, 0

        def start(self, function, job):
            self.begun += 1
            return job

        def ended(self, jobs):
            others = [job for job in jobs if job != (0,)]
            return others[:1] or jobs

        def result(self, job):
            return job[0]

        def stop(self, jobs):
            assert not jobs

    engine = AtOnce()
    results = engine.map(None, [(number,) for number in range(50)])
    assert next(results) == 0 and engine.begun < 10
    assert list(results) == list(range(1, 50))


def test_a_lost_worker_of_a_list_names_its_run(tiny, tmp_path, monkeypatch):
    class Losing(Local):
        cores = 1

        def map(self, function, jobs):
            yield from (LostWorker("a worker process ended") for _ in jobs)

    monkeypatch.setattr(experiments, "engine_for", lambda name, jobs: Losing(1))
    runs = [experiments.Run(experiments.load_recipe(str(tiny.recipe)), folder=tmp_path / name) for name in ("a", "b")]
    with pytest.raises(UserError, match=r"2 of 2 runs failed \(a: a worker process ended\)"):
        experiments.execute_all(runs, progress=False)


@pytest.mark.parametrize("name, words", {"packed": "the text to train on", "heldout": "the held-out text"}.items())
def test_a_text_that_is_too_short_is_named(name, words, tmp_path):
    with pytest.raises(UserError, match=f"no row of 128 in {words}"):
        pack_rows(tmp_path / f"{name}.npy", [], 7, CorpusConfig())


def test_a_text_that_begins_in_another_script_is_judged_as_a_whole(tiny, tmp_path, capsys):
    """Of a source of many parts the first is tried out; it need not be like the others."""
    greek = write_jsonl(tmp_path / "greek.jsonl", [dict(text=f"λόγος {i} καὶ θάλασσα") for i in range(40)])
    rows = [json.loads(line) for line in tiny.text.read_text().splitlines()]
    parts = [write_jsonl(tmp_path / f"{i}.jsonl", rows[i::8]) for i in range(8)]
    config = CorpusConfig(vocab_size=400, seq_length=32, filter_threshold=0, heldout=0.05)
    source = " + ".join(f"files:{path}" for path in (greek, *parts))
    corpus = get_corpus(source, config, tmp_path / "cache", engine=Local(1))
    said = capsys.readouterr().out
    assert "in the beginning of the text: the normaliser 'paper' would delete" in said
    assert "garden" in corpus.tokenizer.get_vocab() and len(corpus.rows) > 300


@pytest.mark.parametrize("kind", ["AutoModelForMaskedLM", "AutoModelForTokenClassification"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_compute_again_have_the_same_gradients(kind, reentrant, finished):
    transformers = pytest.importorskip("transformers")
    import cramming_nb.app.hf  # noqa: F401

    torch.manual_seed(0)
    model = getattr(transformers, kind).from_pretrained(finished.folder / "export").train()
    batch = dict(input_ids=torch.randint(5, 300, (2, 12)), attention_mask=torch.ones(2, 12, dtype=torch.int64))
    calls = []

    def gradients() -> list:
        torch.manual_seed(1)  # of dropout
        model.zero_grad()
        calls.clear()
        model(**batch, labels=torch.zeros(2, 12, dtype=torch.int64)).loss.backward()
        return [weight.grad for weight in model.parameters()]

    for block in model.model.encoder.blocks:
        block.ffn.register_forward_hook(lambda *_: calls.append(1))
    plain, once = gradients(), len(calls)
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    assert model.is_gradient_checkpointing
    again = gradients()
    assert len(calls) == 2 * once and all(map(torch.equal, plain, again))
    model.gradient_checkpointing_disable()
    gradients()
    assert len(calls) == once and not model.is_gradient_checkpointing


@pytest.mark.parametrize("where", ["there", "new"])
def test_an_export_through_a_link(where, a_copy):
    """The large files of a run may lie on another disk, behind a link."""
    disk = a_copy.home / "disk"
    if where == "there":
        disk.mkdir()
    shutil.rmtree(a_copy.folder / "export")
    (a_copy.folder / "export").symlink_to(disk)
    said = a_copy.command("export", "first")
    assert said.code == 0 and said.out == "runs/first/export\n", said.err
    assert (a_copy.folder / "export").is_symlink() and (disk / "model.safetensors").is_file()
    assert a_copy.command("export", "first").code == 0 and hidden(a_copy.home) == []


def test_an_export_into_a_file(a_copy):
    (a_copy.home / "notes.txt").write_text("mine")
    refused(a_copy.command("export", "first", "--to", "notes.txt/a"), f"cram: {a_copy.home}/notes.txt/a: Not a directory")


def test_a_record_that_is_damaged_is_written_anew(a_copy):
    record = a_copy.folder / "record.json"
    before = record.read_text()
    for damage in (before[:500], before.replace('"budget": "20ktok"', '"budget": "3m"')):
        record.write_text(damage)
        said = a_copy.command("report", "first")
        refused(said, "runs/first/record.json: ", "delete it and give `cram run` with the same options")
    record.unlink()
    assert a_copy.command("run", *a_copy.tiny.options(), "--name", "first").code == 0
    assert record.read_text() == before


def test_a_run_without_a_record_names_the_command_that_writes_it(a_copy):
    (a_copy.folder / "record.json").unlink()
    said = a_copy.command("export", "first")
    refused(said, "runs/first is not finished", "`cram pretrain`, finishes it (with --finetune-seeds 0")
    done = a_copy.command("run", *a_copy.tiny.options(), "--name", "first", "--finetune-seeds", "0")
    assert done.code == 0 and a_copy.command("export", "first").out == "runs/first/export\n"


HYPHENS = {  # words of the command -> begin of its output
    ("first", "-x is a [MASK]"): "-x is a [MASK]\n",
    ("first", "--set [MASK]", "--top", "1"): "--set [MASK]\n",
    ("first", "--top", "1", "--", "--set=~/[MASK]"): "--set=~/[MASK]\n",
    ("first", "a [MASK]", "--", "-h[MASK]"): "a [MASK]\n",
    ("--demo", "--", "--[MASK]"): "--[MASK]\n",
    ("first", "a [MASK]", "--top", "2", "--", "-[MASK]"): "a [MASK]\n",
    ("--demo", "a [MASK]", "--top", "1", "--", "-x [MASK]"): "a [MASK]\n",
    ("first", "~/[MASK]"): "~/[MASK]\n",
}


@pytest.mark.parametrize("argv, begin", HYPHENS.items(), ids=map(" ".join, HYPHENS))
def test_a_text_that_begins_with_a_hyphen(argv, begin, finished):
    said = finished.command("predict", *argv)
    assert said.code == 0 and said.out.startswith(begin), said


def test_a_text_that_may_be_an_option_is_told(finished):
    said = finished.command("predict", "first", "--a=[MASK]")
    assert said.code == 2 and lines(said.err)[-1] == "cram: a text that begins with a hyphen goes after --"


def test_a_folder_in_the_place_of_a_report(a_copy):
    (a_copy.folder / "report.html").unlink()
    (a_copy.folder / "report.html").mkdir()
    refused(a_copy.command("report", "first"), "runs/first/report.html: Is a directory", "in its place")


def test_results_that_a_power_cut_emptied_are_made_again(table, a_copy):
    assert a_copy.command("finetune", "first", table, "--epochs", "1").code == 0
    scores, found = a_copy.command("glue", "first").out, [*(a_copy.folder / "glue").glob("*.json")]
    kept = {path.name: json.loads(path.read_bytes())["scores"] for path in found}
    for number, path in enumerate([*found, a_copy.folder / "letters" / "results.json"]):
        path.write_bytes(bytes(100) if number % 2 else b"")
    again = a_copy.command("glue", "first")
    assert again.code == 0 and again.out == scores
    assert {path.name: json.loads(path.read_bytes())["scores"] for path in found} == kept
    assert a_copy.command("finetune", "first", table, "--epochs", "1").code == 0


@pytest.mark.parametrize("verb", ["export first", "glue first"])
def test_checkpoints_that_are_gone(verb, a_copy):
    shutil.rmtree(a_copy.folder / "checkpoints")
    refused(a_copy.command(*verb.split()), "no good checkpoint", "copy those of a finished run back")


@pytest.mark.parametrize("count", [2, 3])
def test_labels_of_few_rows_each_are_refused(count, a_copy):
    rows = [f"a garden of {i} rivers,c{i // count}\n" for i in range(60)]
    (a_copy.home / "a.csv").write_text("text,label\n" + "".join(rows))
    said = a_copy.command("finetune", "first", "a.csv")
    refused(said, "a.csv: no label in column 'label' has 4 rows", "give 4 rows or more of each")


def test_a_label_of_two_lines_is_shown_in_one(a_copy):
    rows = [(f"a garden of {i} rivers", ("b", "one\ntwo")[i % 2]) for i in range(60)]
    with open(a_copy.home / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows, ("the only river", "rare\nlabel")])
    assert a_copy.command("finetune", "first", "a.csv", "--epochs", "1").code == 0
    report = (a_copy.folder / "a" / "report.md").read_text()
    assert "has the class rare label" in report and "one two 30" in report and "\ntwo" not in report
    words = [line.split("  ")[1] for line in a_copy.command("predict", "first/a", "the river").out.splitlines()[1:]]
    assert {"one two", "b", "rare label"} == {*words}


def test_a_column_of_dates_is_told(tmp_path):
    path = tmp_path / "a.parquet"
    rows = pyarrow.table({"text": ["a garden"] * 60, "label": [datetime.date(2020, 1, 1)] * 60})
    pyarrow.parquet.write_table(rows, path)
    with pytest.raises(UserError, match=r"There are text \(dates and times are not read; write them as text\)"):
        read_labels(path, None)


ALIKE = {  # name: (labels, what is said)
    "case": (("Pos", "pos"), "'Pos' and 'pos' look alike and are kept apart"),
    "Unicode": (("e\u0301", "\xe9"), "look alike and are kept apart"),
    "invisible": (("a", "a\u200b"), r"'a' and 'a\u200b' look alike"),
    "full width": (("1", "\uff11"), "look alike"),
    "spaces": (("very good", "very  good"), "'very  good' and 'very good' look alike"),
    "not alike": (("1", "01"), ""),
}


@pytest.mark.parametrize("labels, said", ALIKE.values(), ids=ALIKE)
def test_labels_that_look_alike_are_told(labels, said, finished, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f"a garden of {i} rivers,{labels[i % 2]}\n" for i in range(60)), "utf-8")
    found = read_labels(path, Tokenizer.from_file(str(finished.folder / "tokenizer.json")))
    assert set(found.classes) == set(labels)
    assert said in found.describe() and ("alike" in found.describe()) == bool(said)


@pytest.mark.parametrize("missing", ["NaN", "NAN", "Infinity", "-inf", "NaT", "<NA>", "null", "#N/A"])
def test_a_label_that_a_program_wrote_for_none(missing, finished, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f"a garden of {i} rivers,{(missing, 1, 2)[i % 3]}\n" for i in range(90)))
    found = read_labels(path, Tokenizer.from_file(str(finished.folder / "tokenizer.json")))
    assert found.classes == ("1", "2") and "30 rows without a label are left out" in found.describe()


def test_what_standard_input_holds_is_named_by_its_dash(tiny, tmp_path, monkeypatch):
    latin = "Ich f\xfchre, sie erz\xe4hlt, er tr\xe4umt.\n" * 500
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(latin.encode("latin-1"))))
    said = command("data", "build", tiny.recipe, "--source", "-", cwd=tmp_path, cache=tmp_path / "cache")
    refused(said, "cram: -: ", "iconv -f WINDOWS-1252 -t UTF-8 - > FILE")
    assert hidden(tmp_path) == []


def test_json_in_a_file_of_plain_text_is_told(tiny, tmp_path):
    (tmp_path / "rows.txt").write_bytes(tiny.text.read_bytes())
    argv = ["data", "build", tiny.recipe, "--set", "corpus.filter_threshold=0", "--source"]
    said = command(*argv, "rows.txt", cwd=tmp_path, cache=tmp_path / "cache")
    assert said.code == 0 and "rows.txt: read as plain text, although it looks like JSON" in said.out
    assert "looks like" not in command(*argv, tiny.text, cwd=tmp_path, cache=tmp_path / "cache").out


@pytest.mark.parametrize("columns", ["1", "abc"])
def test_a_terminal_of_one_column(columns):
    """The help was laid out without end."""
    call = [sys.executable, "-m", "cramming_nb.app", "run", "--help"]
    env = os.environ | dict(COLUMNS=columns)
    done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--budget" in done.stdout and done.stderr == ""


def test_a_cache_without_a_name_is_not_this_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("CRAM_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sources.cache_dir() == tmp_path / "cramming_nb"


HALF = "a b c\\ud800"


@pytest.mark.parametrize("text, label", [(HALF, "b"), ("a b c", HALF)])
def test_half_a_character_in_a_table_is_refused(text, label, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "label": "a"}\n' + f'{{"text": "{text}", "label": "{label}"}}\n')
    with pytest.raises(UserError, match="a.jsonl, line 2: half of a character"):
        read_table(path)


@pytest.mark.parametrize("row, words", {
    '{"sentence1": "a\\ud800", "sentence2": "b", "label": "entailment"}': "half of a character",
    '{"sentence1": "a", "sentence2": "b", "label": true}': "label True; rte has entailment",
    '{"sentence1": "a", "sentence2": "b", "label": ' + "1" * 5000 + "}": "a number too long",
    "[" * 100_000: "nested too deeply",
}.items(), ids=["half", "true", "long", "deep"])
def test_a_row_of_a_task_that_is_wrong_is_refused(row, words, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"sentence1": "a", "sentence2": "b", "label": "entailment"}\n' + row + "\n")
    with pytest.raises(UserError, match=f"train.jsonl, line 2: .*{words}"):
        tasks.rows_of(tasks.json_rows(path), TASKS["rte"], True, "rte")


@pytest.mark.parametrize("text, words", {
    "[]": "a.yaml: no list of sources",
    "# none": "a.yaml: no list of sources; write `- {kind: files, path: FILE}`",
    "- tiny.txt\n- null": "a.yaml, source 2: None; write fields and values",
    "- {path: 1}": "a.yaml, source 1: path 1; write text, with quotes around a number",
    "- {path: yes}": "a.yaml, source 1: path True; write text",
    "- {kind: [files]}": "source 1: kind \\['files'\\]; write text, .* such as kind: files",
    "- {path: tiny.txt, share: '0.5'}": "source 1: share '0.5'; write a number",
    "- {path: tiny.txt, share: .nan}": "source 1: .*a share is above 0",
    "- {path: tiny.txt, first: true}": "source 1: first True; write a whole number",
    "- {path: tiny.txt, column: }": "source 1: column has no value; write text, .* such as column: text",
    "- {path: tiny.txt, colum: text}": "source 1: unknown field 'colum'; known are kind, path, column",
    "- {path: tiny.txt, 1: text}": "source 1: unknown field 1",
    "- nosuch": "a.yaml, source 1: source 'nosuch' is no file",
}.items())
def test_a_list_of_sources_that_is_wrong_is_refused(text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.txt").write_text("a text")
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=words):
        sources.sources("a.yaml")


def test_a_source_without_a_kind_is_one_of_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "123").write_text("a text")
    (tmp_path / "a.yaml").write_text("- {path: '123'}")
    assert sources.full_source("a.yaml") == "files:123"


def test_a_seed_has_a_limit(table, a_copy):
    assert "a seed below 2**53" in a_copy.command("finetune", "first", table, "--seed", str(2**64)).err


@pytest.mark.parametrize("number", ["inf", "nan", "0"])
def test_a_bench_of_no_size_is_refused(number, a_copy):
    assert f"--megabytes {number}: give a number above 0" in a_copy.command("bench", "data", "--megabytes", number).err


DAMAGED = {  # change of a run.json -> words of the line
    "a part of the recipe": (lambda kept: kept["recipe"].update(corpus=3), "recipe: field 'corpus' is missing or no dict"),
    "its name": (lambda kept: kept["recipe"].pop("name"), "recipe: field 'name' is missing or no str"),
    "the files": (lambda kept: kept.update(manifest={}), "manifest: field 'identity' is missing or no dict"),
    "another size": (lambda kept: kept["recipe"]["architecture"].update(num_layers=3), "does not fit the recipe"),
    "an unknown part": (lambda kept: kept["recipe"].update(extra=3), "recipe: field 'extra' is missing or no dict"),
    "an unknown field": (lambda kept: kept["recipe"].update(extra={"a": 3}), "run.json: recipe: recipe field 'extra.a'"),
    "its outcome": (lambda kept: kept["pretraining"].pop("shares"), "pretraining: field 'shares' is missing or no dict"),
    "no outcome": (lambda kept: kept.update(pretraining=None), "field 'pretraining' is missing or no dict"),
    "what it spent": (lambda kept: kept["pretraining"].update(spent={}), "spent: field 'tokens' is missing or no int"),
    "a checksum": (
        lambda kept: kept["manifest"]["files"].update({"tokenizer.json": {}}),
        "tokenizer.json: field 'file' is missing or no str",
    ),
    "its seed": (lambda kept: kept.update(seed=True), "run.json: field 'seed' is missing or no int"),
    "its plan": (lambda kept: kept.update(plan={"line": 3}), "plan: field 'line' is missing or no str"),
}


@pytest.mark.parametrize("damage, words", DAMAGED.values(), ids=DAMAGED)
def test_a_run_that_is_damaged_inside_is_refused(damage, words, a_copy):
    path = a_copy.folder / "run.json"
    kept = json.loads(path.read_text())
    damage(kept)
    path.write_text(json.dumps(kept))
    shutil.rmtree(a_copy.folder / "export", ignore_errors=True)
    refused(a_copy.command("predict", "first", "a [MASK]"), words)
    if words == "does not fit the recipe":
        for argv in ("glue first --no-baseline --protocol frozen", "export first"):
            refused(a_copy.command(*argv.split()), words)


@pytest.mark.parametrize("name", ["run.json", "record.json"])
def test_a_file_of_a_run_that_is_nested_too_deeply(name, a_copy):
    (a_copy.folder / name).write_text("[" * 100_000)
    refused(a_copy.command("glue" if name == "run.json" else "report", "first"), f"runs/first/{name}", "recursion")


def test_a_corpus_that_was_changed_is_told_by_each_command(tiny, tmp_path):
    argv = ["data", "build", tiny.recipe, "--source", tiny.text]
    assert command(*argv, cwd=tmp_path, cache=tmp_path / "cache").code == 0
    (folder,) = (tmp_path / "cache").glob("corpus-*")
    rows = bytearray((folder / "train.npy").read_bytes())
    rows[-1] ^= 1
    (folder / "train.npy").write_bytes(rows)
    for action in ("build", "inspect"):
        argv[1] = action
        refused(command(*argv, cwd=tmp_path, cache=tmp_path / "cache"), "train.npy is damaged; delete the folder")
    for damage in ("[1]", '{"identity": 5}', "[" * 100_000):
        (folder / "manifest.json").write_text(damage)
        refused(command(*argv, cwd=tmp_path, cache=tmp_path / "cache"), "manifest.json: ", f"; delete the folder {folder} and run again")
        assert folder.name in command("data", "list", cwd=tmp_path, cache=tmp_path / "cache").out


def test_cleaning_takes_links_and_not_what_they_lead_to(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "train.npy").write_bytes(b"rows")
    for number, target in enumerate(("large", "nosuch")):
        (tmp_path / "cache" / f"corpus-0123456789abcde{number}").symlink_to(tmp_path / target)
    said = command("data", "clean", "--yes", cwd=tmp_path, cache=tmp_path / "cache")
    assert said.code == 0 and not list((tmp_path / "cache").iterdir()) and not (tmp_path / "nosuch").exists()
    assert (tmp_path / "large" / "train.npy").read_bytes() == b"rows"


def test_links_in_a_circle(a_copy):
    (a_copy.home / "a").symlink_to("a")
    refused(a_copy.command("export", "first", "--to", "a"), f"{a_copy.home}/a: Not a directory; move the file")
    said = a_copy.command("data", "build", a_copy.tiny.recipe, "--source", a_copy.tiny.text, "--data-dir", "a")
    refused(said, "Too many levels of symbolic links; move the file or folder that is in its place")


@pytest.mark.parametrize("source", ["texts", "files:texts/*"])
def test_a_pipe_among_files_is_refused(source, tiny, tmp_path):
    (tmp_path / "texts").mkdir()
    os.mkfifo(tmp_path / "texts" / "p.txt")
    shutil.copy(tiny.text, tmp_path / "texts")
    said = command("data", "build", tiny.recipe, "--source", source, cwd=tmp_path, cache=tmp_path / "cache")
    refused(said, "texts/p.txt: a pipe among other files; name it alone, or move it")


def test_an_open_file_is_read_where_it_is_open(tiny, tmp_path):
    """Other processes read the parts of a text, and have other files open."""
    with open(tiny.text) as file:
        argv = ["data", "build", tiny.recipe, "--source", f"/dev/fd/{file.fileno()} + {tiny.text}"]
        said = command(*argv, cwd=tmp_path, cache=tmp_path / "cache")
    assert said.code == 0 and "| read | 482 |" in said.out


COUNTS = {"[:0]": "[:0] reads nothing; give a number above 0", f"[:{10**30}]": "first is a number of documents, below 2**63",
          f"[:{'1' * 5000}]": "no such file or folder"}


@pytest.mark.parametrize("count, words", COUNTS.items())
def test_a_number_of_documents_has_limits(count, words, tiny, tmp_path):
    said = command("data", "build", tiny.recipe, "--source", f"files:{tiny.text}{count}", cwd=tmp_path)
    refused(said, words)


@pytest.mark.parametrize("field", ["corpus.dedup", "architecture.num_layers", "architecture.neighbor_mixing"])
def test_a_field_without_bounds_has_them(field, tiny, tmp_path):
    said = command("run", tiny.recipe, "--source", tiny.text, "--set", f"{field}=3000000000", cwd=tmp_path)
    refused(said, f"{field} 3000000000: give a number at least", "at most")


def test_a_budget_that_is_infinite_in_seconds():
    with pytest.raises(UserError, match="budget '1e308d': give a positive number"):
        Budget.parse("1e308d")


def test_a_text_that_changes_while_it_is_read_is_told(tiny, tmp_path, monkeypatch):
    """Else its corpus would be found again for the text as it was before."""
    shutil.copy(tiny.text, tmp_path / "a.jsonl")

    def grow(source):
        with open(tmp_path / "a.jsonl", "a") as file:
            file.write('{"text": "one garden more"}\n')
        return []

    monkeypatch.setattr("cramming_nb.corpus.source_notes", grow)
    said = command("data", "build", tiny.recipe, "--source", "a.jsonl", cwd=tmp_path, cache=tmp_path / "cache")
    refused(said, "files:a.jsonl: a file changed while the text was read; give the command again")
    assert not list((tmp_path / "cache").glob("*-*"))


def test_a_full_disk_is_told_with_the_file(disk, a_copy):
    disk(2000)
    said = a_copy.command("report", "first", "--to", "a.html")
    disk(0)
    refused(said, "cram: a.html: File too large; make room")


def test_a_field_of_a_list_of_runs_is_text(tmp_path):
    (tmp_path / "a.yaml").write_text("- {set: {1: 2}}")
    refused(command("lab", "a.yaml", cwd=tmp_path), "a.yaml, run 1: recipe field '1' is unknown")


def test_lists_of_sources_that_contain_each_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, other in (("a.yaml", "b.yaml"), ("b.yaml", "a.yaml")):
        (tmp_path / name).write_text(f"- {other}")
    with pytest.raises(UserError, match="a.yaml: this list of sources contains itself"):
        sources.sources("a.yaml")


ROWS = {  # name and text of a file -> words of the line
    ("a.jsonl", '{"text": "a"}\n{"text": "b", "text": "c"}\n'): "a.jsonl, line 2: 'text' is given twice, as 'b' and 'c'",
    ("a.json", '[{"text": "a"},\n{"text": {"x": 1, "x": 2}}]'): "a.json: 'x' is given twice, as '1' and '2'",
    ("b.jsonl", '{"text": %s, "a": 1, "a": 2}' % ("9" * 5000)): "b.jsonl, line 1: 'a' is given twice",
}


@pytest.mark.parametrize("name, text", ROWS, ids=[name for name, _ in ROWS])
def test_a_file_of_rows_that_says_two_things(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as error:
        read_table(tmp_path / name)
    assert ROWS[name, text] in str(error.value)


def test_empty_rows_of_a_table_are_skipped_as_before(tmp_path):
    (tmp_path / "a.csv").write_text("\ntext,label\n,\na,b\n\n")
    assert read_table(tmp_path / "a.csv") == (["text", "label"], [("line 4", {"text": "a", "label": "b"})])


def test_a_key_of_a_task_that_is_given_twice(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"label": 1, "label": 0}\n')
    with pytest.raises(UserError, match="a.jsonl, line 1: 'label' is given twice"):
        list(tasks.json_rows(tmp_path / "a.jsonl"))


def test_places_in_parquet(tmp_path):
    table = pyarrow.table({"text": [{"a": "x"}, {"a": "y"}], "label": [["b"], ["c"]]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    columns, rows = read_table(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="a.parquet, row 1: a list in column 'label'"):
        check_cells(tmp_path / "a.parquet", rows, ("label",))
    for column in ("text.c", "q.a"):
        with pytest.raises(UserError, match=r"no text in column .* \(columns: text, label\)"):
            list(read_rows(str(tmp_path / "a.parquet"), column))
    assert [row for _, row in read_rows(str(tmp_path / "a.parquet"), "text.a")] == table.select(["text"]).to_pylist()


def test_a_folder_in_the_place_of_run_json_is_no_run(tmp_path):
    (tmp_path / "runs" / "a" / "run.json").mkdir(parents=True)
    refused(command("predict", "a", "a [MASK]", cwd=tmp_path), "no run 'a'; start one with `cram run`")


def test_a_run_that_would_be_taken_for_an_option(tiny, tmp_path):
    refused(command("run", *tiny.options(), "--name=-x", cwd=tmp_path), "--name '-x': give a folder name")


def test_a_size_that_is_not_a_number_is_named(tmp_path):
    (tmp_path / "a.yaml").write_text("corpus: {vocab_size: .nan}")
    refused(command("recipes", "show", "a.yaml", cwd=tmp_path), "corpus.vocab_size = nan: expected a whole number")


def test_a_bench_of_no_vocabulary_is_refused_before_it_works(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "write_documents", lambda *a: pytest.fail("it worked"))
    refused(command("bench", "data", "--vocab-size", "1", cwd=tmp_path), "corpus.vocab_size 1")


def test_a_path_is_a_source(tiny):
    assert str(sources.sources(Path(tiny.text))[0]) == str(sources.sources(str(tiny.text))[0])


def test_advice_on_a_text_that_is_too_short_is_new(tmp_path):
    for length, words in ((64, "corpus.seq_length=32"), (32, "corpus.heldout=0.01")):
        with pytest.raises(UserError, match=words):
            pack_rows(tmp_path / "packed.npy", [], 1, CorpusConfig(seq_length=length))


def test_an_error_of_the_system_is_no_damage(tiny, a_copy, monkeypatch):
    """Too many open files, or a folder that may not be read: the reason is told, and nothing is to be deleted."""

    def refuse(number, name):
        def call(path, *more, **options):
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(name, call)

    refuse(errno.EMFILE, "cramming_nb.corpus.np.load")
    with pytest.raises(OSError, match="Too many open files"):
        Corpus(next(tiny.cache.glob("corpus-*")))
    refuse(errno.EACCES, "pathlib.Path.iterdir")
    with pytest.raises(OSError, match="Permission denied"):
        load_checkpoint(a_copy.folder / "checkpoints")


def test_permissions_that_are_missing_ask_for_permissions(a_copy, monkeypatch):
    def load(path, *more, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("cramming_nb.app.run.read_run", load)
    refused(a_copy.command("glue", "first"), "Permission denied; change its permissions, or choose a place")


def test_a_lock_that_finds_no_room_is_named(tmp_path, monkeypatch):
    def write(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.write", write)
    with pytest.raises(OSError) as error, lock(tmp_path):
        pass
    monkeypatch.undo()
    assert error.value.filename == str(tmp_path / ".lock")


def test_both_names_of_an_error_are_those_that_the_user_knows(tmp_path):
    with pytest.raises(OSError) as error, atomic_write(tmp_path / "a.txt") as part:
        shutil.copy(part, part.with_name(part.name + "-2"))
        raise AssertionError
    assert str(tmp_path / "a.txt") in str(error.value) and ".part" not in str(error.value)


def test_names_from_files_cannot_break_a_line(a_copy):
    path = a_copy.home / "a.jsonl"
    path.write_text(json.dumps({"my text\n2\x1b[31m": "a"}) + "\n")
    refused(a_copy.command("finetune", "first", path), r"my text\n2\x1b[31m")


def test_a_source_whose_name_is_not_utf_8(tiny, tmp_path):
    source = tmp_path / "q\udce9.jsonl"
    try:
        shutil.copy(tiny.text, source)
    except (OSError, UnicodeError):
        pytest.skip("no file has such a name here")
    options = ["--source", f"files:{source}", "--budget", "20step", "--name", "odd", "--finetune-seeds", "0"]
    said = command("run", tiny.recipe, *options, cwd=tmp_path, cache=tmp_path / "cache")
    assert said.code == 0, said.err
    assert r"q\udce9.jsonl" in (tmp_path / "runs" / "odd" / "export" / "README.md").read_text()
    assert command("report", "odd", cwd=tmp_path).code == 0


def test_a_link_to_what_never_ends(tmp_path):
    (tmp_path / "a.txt").symlink_to("/dev/zero")
    for path in (tmp_path / "a.txt", "/dev//zero"):
        with pytest.raises(UserError, match="never ends; name a file"):
            next(read_rows(str(path), "text"))


def test_a_mistake_of_an_option_of_predict_says_nothing_of_hyphens(finished):
    said = finished.command("predict", "first", "a [MASK]", "--top", "x")
    assert said.code == 2 and "hyphen" not in said.err


def test_a_rank_that_a_former_job_left_behind(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    assert ProcessGroup().rank == 0
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ProcessGroup().rank == 5


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_predict_that_a_signal_ends_says_nothing_of_hyphens(signum, monkeypatch, capsys):
    monkeypatch.setattr(cli.CRAM, "cli", lambda **given: cli.end_by_signal(signum, None))
    with pytest.raises(SystemExit) as stop:
        cli.perform(["predict", "--demo", "a [MASK]"])
    assert stop.value.code == 128 + signum and capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["record.json", "run.json", "report.md"])
def test_a_classifier_is_not_put_in_place_of_a_file_of_the_run(name, table, a_copy):
    said = a_copy.command("finetune", "first", table, "--name", name)
    refused(said, f"--name {name}", "choose another --name")


@pytest.mark.parametrize("name", ["tokenizer.json", "probe.jsonl"])
def test_a_file_that_a_run_lost_is_told_before_it_goes_on(name, a_copy):
    (a_copy.folder / "record.json").unlink()
    kept = json.loads((a_copy.folder / "run.json").read_text())
    (a_copy.folder / "run.json").write_text(json.dumps(kept | dict(state="begun", pretraining=None)))
    shutil.rmtree(a_copy.folder / "checkpoints")
    (a_copy.folder / name).unlink()
    said = a_copy.command("run", *a_copy.tiny.options(), "--name", "first")
    refused(said, name, "missing or damaged", "copy it from")
    assert not (a_copy.folder / "checkpoints").exists()


def test_a_home_in_the_name_of_the_cache(tiny, tmp_path, monkeypatch):
    """A quoted ~, as in the file of a job, means home everywhere."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CRAM_CACHE", "~/cache")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(tiny.text.read_bytes())))
    said = command("data", "build", tiny.recipe, "--source", "-", cwd=tmp_path)
    assert said.code == 0, said.err
    assert list((tmp_path / "home" / "cache").glob("corpus-*")) and not (tmp_path / "~").exists()


def test_a_result_of_a_classifier_without_replicates_is_named(table, a_copy):
    argv = ["finetune", "first", table, "--epochs", "1"]
    assert a_copy.command(*argv).code == 0
    path = a_copy.folder / "letters" / "results.json"
    kept = json.loads(path.read_text())
    del kept["results"][-1]["replicates"]
    path.write_text(json.dumps(kept))
    refused(a_copy.command(*argv), "results.json", "replicates")


@pytest.fixture(scope="module")
def diverged(tiny, tmp_path_factory) -> Path:
    """A folder with the run `first`, which diverged."""
    home = tmp_path_factory.mktemp("diverged")
    options = [*tiny.options(budget="20step"), "--set", "optimizer.weight_decay=1e30", "--finetune-seeds", "0"]
    said = command("run", *options, "--name", "first", cwd=home, cache=tiny.cache)
    assert said.code == 0 and "not a number" in said.out, said.err
    rows = "".join(f"a garden of {i} rivers,{'ab'[i % 2]}\n" for i in range(60))
    (home / "letters.csv").write_text(f"text,label\n{rows}")
    return home


@pytest.mark.parametrize(
    "argv",
    [
        "predict first 'the [MASK] is'",
        "predict runs/first/export 'the [MASK] is'",
        "finetune first letters.csv --epochs 1",
        "glue first --protocol frozen",
    ],
)
def test_a_model_that_diverged_is_not_used(argv, diverged, tiny):
    said = command(*shlex.split(argv), cwd=diverged, cache=tiny.cache)
    assert said.code == 2 and "no finite numbers, as its run diverged" in lines(said.err)[-1], said.err
    assert "nan" not in said.out


def test_a_run_comes_before_a_folder_of_its_name(a_copy):
    shutil.copytree(a_copy.folder / "export", a_copy.home / "first")
    assert a_copy.command("export", "first").out == "runs/first/export\n"
    (a_copy.home / "first" / "config.json").write_text("{}")
    assert a_copy.command("predict", "first", "the [MASK] is").code == 0


def test_a_result_without_the_checksum_of_its_rows_is_taken(a_copy):
    record = json.loads((a_copy.folder / "record.json").read_text())
    results = [{name: value for name, value in result.items() if name != "data"} for result in record["results"]]
    add_results(a_copy.folder / "record.json", results)
    assert len(RunRecord.read(a_copy.folder / "record.json").results) == len(results)


def test_a_pipe_in_place_of_a_record_is_not_waited_for(a_copy):
    record = a_copy.folder / "record.json"
    record.unlink()
    os.mkfifo(record)
    refused(a_copy.command("report", "first"), "record.json", "pipe")


def test_a_record_that_is_a_link_to_itself_is_named(a_copy):
    record = a_copy.folder / "record.json"
    record.unlink()
    record.symlink_to("record.json")
    refused(a_copy.command("report", "first"), "record.json", "symbolic links")


def test_a_folder_that_is_gone_is_told(tmp_path):
    code = "import os, sys; os.rmdir(os.getcwd()); from cramming_nb.app import cli; sys.exit(cli.main(['recipes']))"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (2, "cram: the current folder is gone; change to another\n")


def test_a_closed_terminal_leaves_the_tracker_of_semaphores_alone():
    """SIGHUP goes to the whole group. A tracker that it ended could not forget what others made."""
    code = """import os, signal
from multiprocessing import resource_tracker
from cramming_nb.app import cli
cli.chapters.budget
tracker = resource_tracker._resource_tracker
os.kill(tracker._pid, signal.SIGHUP)
os.close(tracker._fd)  # at which it ends by itself
print(os.waitpid(tracker._pid, 0)[1])"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("0\n", "")


def test_a_full_standard_output_is_named(monkeypatch, capsys):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stdout", Full())
    code = cli.main(["--version"])
    monkeypatch.undo()
    assert code == 2 and "standard output: No space left on device" in capsys.readouterr().err


def test_a_home_folder_of_nobody_is_a_name(tiny, tmp_path):
    where = "--data-dir=~nobody9/x"
    said = command("pretrain", *tiny.options("1step"), "--name", "q", where, cwd=tmp_path)
    assert said.code == 0 and list((tmp_path / "~nobody9" / "x").glob("corpus-*"))
    shutil.rmtree(tmp_path / "runs" / "q" / "checkpoints")
    assert command("data", "clean", where, "--yes", cwd=tmp_path).code == 0


def test_names_that_no_file_has(tmp_path):
    (tmp_path / "l.yaml").write_text('- recipe: "a\\0b.yaml"\n')
    refused(command("lab", "l.yaml", cwd=tmp_path), "no file has a NUL character in its name")
    refused(command("lab", "/dev/zero", cwd=tmp_path), "/dev/zero never ends; name a file")


def test_a_rate_is_finite():
    with pytest.raises(UserError, match="give a positive number"):
        Budget.parse(f"3m@1{'0' * 400}tok/s")


def test_ray_that_does_not_start_is_told_in_one_line(monkeypatch):
    def init(**options):
        raise Exception("The current node timed out during startup.\nMore of it.")

    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UserError, match=r"Ray does not start \(The current node timed out during startup.\); .* local"):
        Ray().__enter__()


def test_a_list_without_sources(tiny, tmp_path):
    (tmp_path / "es.yaml").write_text("- []\n")
    said = command("data", "build", str(tiny.recipe), "--source", "es.yaml", cwd=tmp_path)
    refused(said, "es.yaml, source 1: a list without a source; write")
    with pytest.raises(UserError, match="a list without a source"):
        sources.sources([])


def test_a_table_of_many_columns(tmp_path):
    """As many names are compared with each other in no time, and one that comes twice is found."""
    names = [f"c{i}" for i in range(50_000)]
    path = tmp_path / "a.csv"
    path.write_text(",".join([*names, "c7"]) + "\n")
    with pytest.raises(UserError, match="line 1: two columns have the name 'c7'"):
        list(read_rows(str(path), "text"))


def test_what_is_no_corpus_is_not_to_be_deleted(a_copy):
    with pytest.raises(UserError, match="holds no corpus: its manifest.json is missing") as error:
        Corpus(a_copy.folder)
    assert "delete" not in str(error.value)


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"none")])
def test_a_damaged_classifier_is_made_again(damage, table, a_copy):
    argv = ["finetune", "first", table, "--epochs", "1"]
    assert a_copy.command(*argv).code == 0
    before = a_copy.command("predict", "first/letters", "a garden").out
    damage(a_copy.folder / "letters" / "export" / "model.safetensors")
    again = a_copy.command(*argv)
    assert again.code == 0 and "held a damaged classifier; it is replaced" in again.out + again.err
    assert a_copy.command("predict", "first/letters", "a garden").out == before


def test_arguments_as_a_user_writes_them(a_copy, table, tmp_path):
    model, tokenizer = load_model(a_copy.folder / "export")
    with pytest.raises(UserError, match="half of a character"):
        fill_mask(model, tokenizer, "\ud800[MASK]")
    assert read_labels(str(table), tokenizer).classes == ("no", "yes")
    with pytest.raises(UserError, match="no CoLA; add it"):
        tasks_at = tmp_path / "glue"
        tasks_at.mkdir()
        load_glue(tasks_at, "cola")


@pytest.mark.parametrize("name", [" ", "-x", ".", "..", "a/b", "ok/export"])
def test_names_of_classifiers_that_are_no_names(name, table, a_copy):
    before = contents(a_copy.folder)
    refused(a_copy.command("finetune", "first", table, f"--name={name}"), f"--name {name!r}: no name of a folder")
    assert contents(a_copy.folder) == before


@pytest.mark.parametrize(
    "error",
    [ImportError("libtorch_cpu.so: failed to map segment from shared object"), MemoryError(),
     RuntimeError("can't start new thread"), RuntimeError("could not create a primitive")],
    ids=str,
)
def test_too_little_memory_is_told_wherever_it_shows(error):
    code, said = cli.ending(error, "run")
    assert code == 2 and said.startswith("too little memory")


def test_a_pool_whose_threads_cannot_start_ends_with_that_error(monkeypatch):
    def submit(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor.submit", submit)
    with pytest.raises(RuntimeError, match="can't start new thread"), Local(2) as engine:
        list(engine.map(len, [("a",), ("b",)]))


def test_a_script_from_standard_input_has_worker_processes(tiny, tmp_path):
    script = f"from cramming_nb.app.cli import main\nmain(['data', 'build', {str(tiny.recipe)!r}, '--source', {str(tiny.text)!r}])"
    env = os.environ | dict(CRAM_CACHE=str(tmp_path / "cache"))
    said = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert said.returncode == 0 and "Traceback" not in said.stderr, said.stderr
    assert list((tmp_path / "cache").glob("corpus-*"))


@pytest.mark.parametrize("source", ["locked", "files:locked", "files:locked/*.txt", "locked/nothing.txt"])
def test_a_folder_that_may_not_be_read_is_told(source, tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "locked")
    with pytest.raises(PermissionError) as refused:
        for single in sources.sources(source):
            sources.source_files(single.path)
    assert cli.explained(refused.value).startswith("locked: Permission denied; change its permissions")


def test_the_folder_of_a_run_may_be_given_as_text(finished):
    assert load_run(str(finished.folder)).folder == finished.folder
