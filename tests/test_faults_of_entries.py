"""Mistakes in lists, tables and the environment: the line names the file and the entry, and says what is right."""

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import command, lines, write_jsonl
from test_bad_input import refused
from tokenizers import Tokenizer

from cramming_nb.app.export import DEMO
from cramming_nb.app.labels import read_labels
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.hardware import is_out_of_memory
from cramming_nb.recipes import RECIPES, change

LISTS = {  # text of a list of runs -> words of the line
    "": ["no list of runs", "write `- {recipe: pocket, budget: 3m}` for each"],
    "[]": ["no list of runs"],
    "# only a remark": ["no list of runs"],
    "- {recipe: pocket}\n-": ["run 2: None; write fields and values, with some of recipe, source"],
    "- pocket": ["run 1: 'pocket'; write fields and values"],
    "- {recipe: }": ["run 1: recipe has no value; write text", "such as recipe: pocket"],
    "- {budget: 3}": ["run 1: budget 3; write text", "such as budget: 3m"],
    "- {probes: 1}": ["run 1: probes 1; write true or false"],
    "- {seeds: []}": ["run 1: seeds []; give at least one, such as seeds: [0, 1]"],
    "- {seeds: [0]}\n- {seeds: [true]}": ["run 2: seed True: give a whole number"],
    "- {seeds: [1.5]}": ["run 1: seed 1.5: give a whole number"],
    "- {finetune_seeds: -1}": ["run 1: finetune_seeds -1"],
    "- {budget: 1ktok}\n- {budget: 3x}": ["run 2: budget '3x'"],
    "- {recipe: nosuch.yaml}": ["run 1: nosuch.yaml: No such file"],
    "- {set: {schedule.batch_size: 0}}": ["run 1: schedule.batch_size 0: give a number at least 1"],
    "- {set: {schedule.batchsize: 1}}": ["run 1: recipe field 'schedule.batchsize' is unknown"],
    "- {throughput_normalised: true, budget: 3Mtok}": ["run 1: budget '3Mtok'", "give a time"],
}


@pytest.mark.parametrize("text", LISTS)
def test_an_entry_of_a_list_of_runs_is_named(text, tmp_path):
    (tmp_path / "list.yaml").write_text(text)
    refused(command("lab", "list.yaml", cwd=tmp_path, cache=tmp_path / "cache"), "cram: list.yaml", *LISTS[text])
    assert not (tmp_path / "runs").exists()


RECIPE_FILES = {
    "optimizer: {lr: .nan}": "my.yaml: optimizer.lr nan: give a finite number at least 0",
    "optimizer: {lr: .inf}": "my.yaml: optimizer.lr inf: give a finite number at least 0",
    "optimizer: 3": "my.yaml: 'optimizer' must hold fields",
    "trainin: {}": "my.yaml: 'trainin' is no part of a recipe",
    "architecture: {ffn_size: 1}": "the gates of gelu_glu halve ffn_size 1; give 2 or more",
    "1: {a: 3}": "my.yaml: recipe field '1.a' is unknown",
    "name: [a]": "my.yaml: name ['a']; write text",
    "name:": "my.yaml: name None; write text",
    "": "my.yaml: not a recipe",
}


@pytest.mark.parametrize("text", RECIPE_FILES)
def test_a_file_of_a_recipe_is_named(text, tmp_path):
    (tmp_path / "my.yaml").write_text(text)
    refused(command("recipes", "show", "my.yaml", cwd=tmp_path), RECIPE_FILES[text])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_recipe_in_the_encodings_of_editors_is_read(encoding, tmp_path):
    (tmp_path / "my.yaml").write_text("name: caf\xe9\r\noptimizer: {lr: 0.5}\r\n", encoding)
    assert "lr: 0.5" in command("recipes", "show", "my.yaml", cwd=tmp_path).out


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_told_so(number):
    with pytest.raises(UserError, match=f"corpus.filter_threshold {number}: give a finite number at least 0"):
        change(RECIPES["pocket"], {"corpus.filter_threshold": number})


def table_of(folder, labels: list) -> str:
    path = folder / "t.csv"
    path.write_text("text,label\n" + "".join(f"a garden of {i} rivers,{label}\n" for i, label in enumerate(labels)))
    return path


def labels_of(finished, path, **options):
    return read_labels(path, Tokenizer.from_file(str(finished.folder / "tokenizer.json")), **options)


def test_a_slip_in_a_column_of_numbers_is_refused(finished, tmp_path):
    path = table_of(tmp_path, ["4.O" if i == 33 else i % 30 / 4 for i in range(120)])
    with pytest.raises(UserError, match="t.csv, line 35: '4.O' in column 'label' is no number .* --kind classes"):
        labels_of(finished, path)
    assert "4.O" in labels_of(finished, path, kind="classes").classes


def test_a_word_among_classes_that_are_numbers_is_told(finished, tmp_path):
    found = labels_of(finished, table_of(tmp_path, ["4.O" if i == 33 else i % 5 for i in range(120)]))
    assert "'4.O' is a class, though the other labels are numbers" in found.describe()
    found = labels_of(finished, table_of(tmp_path, [("yes", 1, 2)[i % 3] for i in range(120)]))
    assert found.classes == ("1", "2", "yes") and "though" not in found.describe()


ALONE = {  # labels -> words of the line
    ("",): "nothing in column 'label' of any row",
    ("None",): "no row has a label in column 'label'",
    ("None", "yes"): r"every row has the label 'yes' .*\(60 rows without a label are left out\)",
    ("1.5",): "every row has the label '1.5'",
}


@pytest.mark.parametrize("labels", ALONE)
def test_labels_that_tell_nothing_apart_are_named(labels, finished, tmp_path):
    path = table_of(tmp_path, [labels[i % len(labels)] for i in range(120)])
    with pytest.raises(UserError, match=f"t.csv: {ALONE[labels]}"):
        labels_of(finished, path)


def test_a_filter_that_keeps_few_documents_is_told(tiny, tmp_path):
    argv = ["data", "build", tiny.recipe, "--source", tiny.text, "--set", "corpus.seq_length=16"]
    few = command(*argv, "corpus.filter_threshold=0.176", cwd=tmp_path, cache=tmp_path / "cache")
    note = r"files:.*tiny.jsonl: the filter keeps \d+ of 241 documents, at 0.176 tokens a character; keep all of them"
    assert few.code == 0 and re.search(note, few.out), few
    assert "the filter keeps" not in command(*argv, cwd=tmp_path, cache=tmp_path / "cache").out


TEXTS = {  # (documents, change to the recipe) -> words of the line
    (2, "corpus.filter_threshold=0"): "the text has 2 usable documents",
    (240, "corpus.filter_threshold=0.01"): "the filter leaves 0 of 240 documents",
    (240, "corpus.seq_length=40000"): "the text is too short: .* in the text to train on; .* corpus.seq_length",
}


@pytest.mark.parametrize("case", TEXTS)
def test_the_source_that_makes_no_corpus_is_named(case, tiny, tmp_path):
    count, setting = case
    (tmp_path / "a.jsonl").write_text("".join(tiny.text.read_text().splitlines(keepends=True)[:count]))
    argv = ["data", "build", tiny.recipe, "--source", "a.jsonl", "--set", setting]
    said = command(*argv, cwd=tmp_path, cache=tmp_path / "cache")
    refused(said)
    assert re.search(f"cram: files:a.jsonl: {TEXTS[case]}", lines(said.err)[0])


JOBS = {  # environment -> words of the line
    "WORLD_SIZE=abc": "WORLD_SIZE=abc in the environment",
    "WORLD_SIZE=0": "a whole number, 1 or more",
    "RANK=x": "RANK=x in the environment",
    "WORLD_SIZE=2": "WORLD_SIZE=2 RANK= LOCAL_RANK= MASTER_ADDR= MASTER_PORT= in the environment",
}


@pytest.mark.parametrize("setting", JOBS)
def test_an_environment_of_no_job_is_refused(setting, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv(*setting.split("="))
    said = command("pretrain", *tiny.options(), cwd=tmp_path, cache=tmp_path / "cache")
    refused(said, JOBS[setting], "unset")


def test_a_backend_of_pictures_that_is_unknown_is_no_matter(finished, tmp_path):
    call = [sys.executable, "-m", "cramming_nb.app", "report", finished.folder, "--to", tmp_path / "r.html"]
    done = subprocess.run(call, env=os.environ | dict(MPLBACKEND="foo"), capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "r.html").exists(), done.stderr


def test_a_mistake_in_the_last_part_of_a_field_names_all_fields(tmp_path):
    said = command("data", "--set", "lr=3", cwd=tmp_path, cache=tmp_path / "cache")
    refused(said, "did you mean 'optimizer.lr' or 'schedule.lr' or 'protocol.lr'?")


@pytest.mark.parametrize("number", ["9" * 400, "1e400", "1e17"])
def test_a_whole_number_that_no_machine_counts_to_is_refused(number):
    with pytest.raises(UserError, match="schedule.batch_size = .*: expected a whole number"):
        change(RECIPES["pocket"], {"schedule.batch_size": int(number) if number.isdigit() else number})


@pytest.mark.parametrize("cell, words", {"0,5": "'0,5' in column 'label' is no number", "7%": "'7%' in column"}.items())
def test_numbers_of_another_spelling_are_not_classes(cell, words, finished, tmp_path):
    rows = [{"text": f"a garden of {i} rivers", "label": cell.replace(cell[0], str(i))} for i in range(60)]
    with pytest.raises(UserError, match="line 1: .*is no number such as 0.5"):
        labels_of(finished, write_jsonl(tmp_path / "t.jsonl", rows))


@pytest.mark.parametrize(
    "row, words",
    {
        "a list in column 'text'": dict(text=["a"], label="a"),
        "a dict in column 'label'": dict(text="a", label={"a": 1}),
    }.items(),
)
def test_a_cell_that_is_no_text_is_refused(row, words, finished, tmp_path):
    other = dict(text="a garden", label="b", more=[1, 2])  # a column that nobody asked for
    path = write_jsonl(tmp_path / "t.jsonl", [other, words | dict(more=[])])
    with pytest.raises(UserError, match=f"t.jsonl, line 2: {row}; give one text or number"):
        labels_of(finished, path)


def test_numbers_that_float32_cannot_tell_apart_are_refused(finished, tmp_path):
    with pytest.raises(UserError, match="t.csv: the numbers in column 'label' are too small"):
        labels_of(finished, table_of(tmp_path, [f"{i}e-300" for i in range(60)]))


def test_a_column_named_twice_is_refused(finished, tmp_path):
    with pytest.raises(UserError, match="which columns are the text and the label"):
        labels_of(finished, table_of(tmp_path, range(60)), texts=("text", "text"), label="label")


def test_a_table_from_a_pipe_needs_a_name(finished):
    refused(finished.command("finetune", "first", "-"), "-: this table has no name", "--name")


def test_an_empty_pipe_is_named_by_its_dash(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    said = command("data", "build", tiny.recipe, "--source", "-", cwd=tmp_path, cache=tmp_path / "cache")
    refused(said, "cram: -: there is no text in it")


def test_a_model_too_large_for_memory_is_told(tiny, tmp_path):
    said = command(
        "pretrain", *tiny.options(), "--set", "architecture.ffn_size=1000000000000000", cwd=tmp_path, cache=tiny.cache
    )
    assert said.code == 2 and "too little memory" in lines(said.err)[-1] and "smaller model" in lines(said.err)[-1]


def test_a_folder_that_is_missing_is_named_without_temporary_files(finished):
    refused(finished.command("report", "first", "--to", "nosuch/r.html"), "cram: nosuch/r.html: No such file", "make")


def test_a_tokenizer_of_another_model_is_refused(a_copy):
    shutil.copy(DEMO / "tokenizer.json", a_copy.folder / "export")
    refused(a_copy.command("predict", "first", "a [MASK]"), "its tokenizer.json has 8,192 tokens and the model 400")


CONFIGS = {  # words of the line -> change of a classifier's config.json
    "config.json: a classifier: field 'learned_length' is missing": lambda config: config.pop("learned_length"),
    "config.json: a classifier: field 'problem_type' is missing": lambda config: config.pop("problem_type"),
    "config.json: a classifier: field 'id2label' is missing or no dict": lambda config: config.update(id2label=["a", "b"]),
    "config.json: id2label: field '1' is missing": lambda config: config.update(id2label={"0": "a", "2": "b"}),
    "config.json: learned_length -1; the model reads up to": lambda config: config.update(learned_length=-1),
    "learned_length 1000000; ": lambda config: config.update(learned_length=1_000_000),
    "architecture: num_heads 2.0; write a whole number": lambda config: config["architecture"].update(num_heads=2.0),
    "architecture: tie_embeddings {}; write true or": lambda config: config["architecture"].update(tie_embeddings={}),
    "model.safetensors does not fit config.json": lambda config: config["architecture"].update(ffn_size=8),
}


def test_a_classifier_whose_configuration_is_changed(a_copy):
    table = table_of(a_copy.home, [("b", "a")[i % 2] for i in range(60)])
    assert a_copy.command("finetune", "first", table, "--epochs", "1").code == 0
    path, argv = a_copy.folder / "t" / "export" / "config.json", ["predict", "first/t", "a garden"]
    before, text = a_copy.command(*argv).out, path.read_text()
    for words, damage in CONFIGS.items():
        config = json.loads(text)
        damage(config)
        path.write_text(json.dumps(config))
        refused(a_copy.command(*argv), words)
    path.write_text(json.dumps(json.loads(text) | dict(id2label={"1": "b", "0": "a"})))
    assert a_copy.command(*argv).out == before


@pytest.mark.parametrize("content", ["{", "[1]", '[{"pace": {}}]', "3"])
def test_a_file_of_throughputs_that_is_damaged_is_named(content, tiny, tmp_path):
    (tmp_path / "rates.json").write_text(content)
    (tmp_path / "list.yaml").write_text("- {throughput_normalised: true}")
    said = command("lab", "list.yaml", cwd=tmp_path, cache=tmp_path / "cache")
    refused(said, "rates.json: ", "delete it, and they are measured again")


def test_a_filter_tokenizer_that_is_none_is_named(tiny, tmp_path):
    argv = ["data", "build", tiny.recipe, "--source", f"files:{tiny.text}", "--set"]
    said = command(*argv, f"corpus.filter_tokenizer={tiny.recipe}", cwd=tmp_path, cache=tmp_path / "cache")
    refused(said, f"filter_tokenizer {tiny.recipe}: no tokenizer.json")


def test_more_seeds_than_runs_keep_apart_are_refused(finished):
    refused(finished.command("glue", "first", "--seeds", "99999999999"), "give a number of runs up to 1000")


@pytest.mark.parametrize("content", [b"", b"%PDF-1.7 \x00\xff"])
def test_a_pipe_without_text_is_read_once(content, tiny, tmp_path):
    """It would be waited for for ever the second time."""
    os.mkfifo(tmp_path / "pipe")
    call = [sys.executable, "-c", "import sys; open('pipe', 'wb').write(bytes.fromhex(sys.argv[1]))", content.hex()]
    with subprocess.Popen(call, cwd=tmp_path):
        said = command("pretrain", tiny.recipe, "--source", "pipe", cwd=tmp_path, cache=tmp_path / "cache")
    refused(said, "pipe: ")


def test_a_plan_that_lacks_its_numbers_is_refused(a_copy):
    path = a_copy.folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(plan=dict(line="x", notes=[], recipe={}))))
    refused(a_copy.command("export", "first"), "run.json: plan: field")


def test_a_bug_is_no_lack_of_memory():
    try:
        try:
            raise MemoryError
        except MemoryError:
            raise KeyError("a bug") from None
    except KeyError as error:
        assert not is_out_of_memory(error)
