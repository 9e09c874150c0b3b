"""Bad input: one line that says what is wrong and what would be right, exit code 2, and nothing half-written."""

import gzip
import io
import json
import math
import shlex
import shutil
from errno import EROFS
from os import geteuid, strerror
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from conftest import GLUE_ROWS, command, contents, forget_pretraining, hidden, lines, write_jsonl

from cramming_nb.app.cli import parse_changes
from cramming_nb.budget import Budget
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.options import yaml_file
from cramming_nb.engine.sources import parse_source, sources
from cramming_nb.engine.tables import read_rows
from cramming_nb.recipes import RECIPES, change, load_recipe


@pytest.fixture(scope="session")
def bad(tiny, tmp_path_factory) -> Path:
    """A folder of everything that is wrong with files."""
    folder, text = tmp_path_factory.mktemp("bad"), tiny.text.read_bytes()
    files = {
        "empty.jsonl": b"",
        "empty.zst": b"",
        "blank.txt": b" \n\n ",
        "cut.jsonl": text[: len(text) // 2 + 7],
        "cut.jsonl.gz": gzip.compress(text)[:-3000],
        "cut.jsonl.zst": bytes(pyarrow.compress(text, "zstd", asbytes=True))[:-3000],
        "fake.jsonl.gz": b"not packed at all",
        "fake.jsonl.zst": b"not packed at all",
        "fake.parquet": b"no table, either",
        "list.jsonl": b"[1, 2]\n",
        "number.jsonl": b'{"text": 7}\n',
        "picture.png": b"\x89PNG",
        "list.yaml": b"- a\n- b\n",
        "torn.yaml": b"corpus: {vocab_size: [",
        "field.yaml": b"corpus: {vocabulary: 400}\n",
        "part.yaml": b"corps: {vocab_size: 400}\n",
        "lab-scalar.yaml": b"pocket\n",
        "lab-field.yaml": b"- {recipes: pocket}\n",
        "lab-recipe.yaml": b"- {recipe: pokcet}\n",
        "lab-number.yaml": b"- {recipe: 3}\n",
        "lab-budget.yaml": b"- {budget: 3x}\n",
        "lab-minutes.yaml": b"- {budget: 3}\n",
        "lab-seeds.yaml": b"- {seeds: 3}\n",
        "lab-one.yaml": b"- {seeds: 1, name: one}\n",
        "lab-rate.yaml": b"- {budget: 300Mtok@5tok/s}\n",
        "lab-good.yaml": b"- {budget: 1ktok, name: one}\n- {budget: 1ktok, name: two}\n",
        "lab-negative.yaml": b"- {seeds: [-1]}\n",
        "lab-rated.yaml": b"- {throughput_normalised: true, budget: 3Mtok}\n",
        "lab-set.yaml": b"- {set: [schedule.batch_size]}\n",
        "lab-torn.yaml": b"- {recipe: [",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    rows = [json.loads(line) for line in text.splitlines()]
    write_jsonl(folder / "column.jsonl", [dict(body=row["text"]) for row in rows])
    write_jsonl(
        folder / "short.jsonl", [dict(text=f"The {word} waits here.") for word in ("garden", "kettle", "river")]
    )
    write_jsonl(folder / "two.jsonl", rows[:2])
    write_jsonl(folder / "few.jsonl", rows[:12])
    write_jsonl(folder / "greek.jsonl", [dict(text=f"λόγος {i} καὶ θάλασσα καὶ γῆ καὶ οὐρανός") for i in range(300)])
    table = pyarrow.table({"text": [row["text"] for row in rows]})
    pyarrow.parquet.write_table(table, folder / "cut.parquet")
    (folder / "cut.parquet").write_bytes((folder / "cut.parquet").read_bytes()[:-2000])
    (folder / "folder.jsonl").mkdir()
    (folder / "glue-none").mkdir()
    return folder


def refused(result, *words: str):
    """Exit code 2, and on standard error one line that holds all the words."""
    assert result.code == 2, result.out + result.err
    assert len(found := lines(result.err)) == 1, result.err
    assert found[0].startswith("cram: ")
    assert not [word for word in words if word not in found[0]], found[0]


RUN = "run {tiny} --source files:{text} --budget 1ktok"
SOURCE = "run {tiny} --budget 1ktok --source files:{bad}/"
RECIPE = "run {bad}/%s --source files:{text} --budget 1ktok"
MISREAD = {  # name: (arguments, words of the explanation)
    "command": ("rnu", "rnu", "recipes", "cram --help"),
    "option": (f"{RUN} --sourse x", "--sourse", "--source SOURCE"),
    "options": (f"{RUN} --sourse x --seeed 3", "--sourse", "--seeed", "--seed INT"),
    "option of another command": (f"{RUN} --jobs 3", "--jobs", "cram lab --help"),
    "option without value": (f"{RUN} --seed", "--seed", "cram run --help"),
    "argument": (f"{RUN} more", "more", "--help"),
    "seed": (f"{RUN} --seed x", "--seed", "'x'"),
    "action": ("recipes shwo", "shwo", "show", "cram recipes --help"),
    "no run named": ("predict", "RUN", "cram predict --help"),
    "lab engine": ("lab {bad}/lab-good.yaml --engine slurm", "'slurm'", "ray", "cram lab --help"),
    "lab no file named": ("lab", "LIST", "cram lab --help"),
    "bench": ("bench trian", "trian", "train, data, glue"),
    "bench size": ("bench train --size huge", "'huge'", "small"),
}


@pytest.mark.parametrize("text", MISREAD.values(), ids=MISREAD)
def test_mistake_in_the_arguments_is_explained(text, bad, tiny, tmp_path):
    """By the library that reads them, in a few lines: what is wrong, and which help to look at."""
    argv, *words = text
    argv = [a.format(tiny=tiny.recipe, text=tiny.text, bad=bad) for a in shlex.split(argv)]
    result = command(*argv, cwd=tmp_path, cache=tmp_path / "cache")
    assert (result.code, result.out) == (2, "") and "Traceback" not in result.err
    assert not [word for word in words if word not in result.err], result.err
    assert contents(tmp_path) == {}


BAD_COMMANDS = {  # name: (command, words of the line: what is wrong, what would be right)
    "seed negative": (f"{RUN} --seed -1", "seed", "-1"),
    "seed of 65 bits": (f"{RUN} --seed {2**64}", "seed 18446744073709551616", "below 2**53"),
    "snapshot past the end": (f"{RUN} --snapshots 0.5 1.5", "snapshot", "1.5", "between 0 and 1"),
    "names": ("recipes diff pocket", "diff", "2 names"),
    "recipe": ("run pokcet", "pokcet", "did you mean pocket"),
    "recipe missing": ("run my.yaml", "my.yaml", "No such file"),
    "recipe list": (RECIPE % "list.yaml", "list.yaml", "cram recipes show"),
    "recipe torn": (RECIPE % "torn.yaml", "torn.yaml", "line 1"),
    "recipe field": (RECIPE % "field.yaml", "vocabulary", "corpus.vocab_size"),
    "recipe part": (RECIPE % "part.yaml", "corps", "corpus"),
    "source": ("run {tiny} --source web:text", "web:text", "files:GLOB"),
    "source empty": ("run {tiny} --source files:", "files:", "write machine"),
    "source package": ("run {tiny} --source machine:nosuch", "nosuch", "numpy"),
    "budget unit": ("run {tiny} --budget 3x", "'3x'", "3m"),
    "budget number": ("run {tiny} --budget fast", "'fast'", "3m"),
    "budget zero": ("run {tiny} --budget 0m", "'0m'", "positive"),
    "budget tokens at a rate": ("run {tiny} --budget 300Mtok@5tok/s", "300Mtok@5tok/s", "3m"),
    "budget rate zero": ("run {tiny} --budget 3m@0tok/s", "3m@0tok/s", "positive"),
    "set no value": (f"{RUN} --set schedule.batch_size", "schedule.batch_size", "FIELD=VALUE"),
    "set field": (f"{RUN} --set corpus.oder=random", "corpus.oder", "corpus.order"),
    "set type": (f"{RUN} --set schedule.batch_size=many", "'many'", "whole number"),
    "set choice": (f"{RUN} --set corpus.order=best", "'best'", "sentence_length"),
    "set yaml": (f"{RUN} --set corpus.order=[", "corpus.order", "FIELD=VALUE"),
    "set date": (f"{RUN} --set schedule.batch_size=2024-13-45", "2024-13-45", "FIELD=VALUE"),
    "set heads": (f"{RUN} --set architecture.num_heads=5", "hidden_size 32", "num_heads 5"),
    "name slash": (f"{RUN} --name a/b", "'a/b'", "without slashes"),
    "name above": (f"{RUN} --name ..", "'..'", "folder name"),
    "file missing": (SOURCE + "nosuch.jsonl", "nosuch.jsonl", "no such file"),
    "file folder": (SOURCE + "folder.jsonl", "folder.jsonl", "no file in this folder"),
    "file kind": (SOURCE + "picture.png", ".png", ".jsonl"),
    "file empty": (SOURCE + "empty.jsonl", "0 usable documents", "at least 3"),
    "file blank": (SOURCE + "blank.txt", "0 usable documents", "at least 3"),
    "zst empty": (SOURCE + "empty.zst", "empty.zst", ".jsonl"),
    "jsonl cut": (SOURCE + "cut.jsonl", "cut.jsonl, line", "cut off"),
    "gz cut": (SOURCE + "cut.jsonl.gz", "cut.jsonl.gz", "again"),
    "zst cut": (SOURCE + "cut.jsonl.zst", "cut.jsonl.zst", "again"),
    "parquet cut": (SOURCE + "cut.parquet", "cut.parquet", "again"),
    "gz fake": (SOURCE + "fake.jsonl.gz", "fake.jsonl.gz", "again"),
    "zst fake": (SOURCE + "fake.jsonl.zst", "fake.jsonl.zst", "again"),
    "parquet fake": (SOURCE + "fake.parquet", "fake.parquet", "again"),
    "column": (SOURCE + "column.jsonl", "'text'", "columns: body", "#COLUMN"),
    "column asked for": (SOURCE + "column.jsonl#bdy", "'bdy'", "columns: body"),
    "rows no objects": (SOURCE + "list.jsonl", "list.jsonl", "'text'"),
    "text a number": (SOURCE + "number.jsonl", "number.jsonl", "'text'"),
    "text short": (SOURCE + "short.jsonl", "too short", "more text"),
    "text two": (SOURCE + "two.jsonl", "2 usable documents", "at least 3"),
    "text Greek": (SOURCE + "greek.jsonl", "would delete", "--set corpus.normalizer=unicode"),
    "text filtered": (f"{RUN} --set corpus.filter_threshold=0.0001", "leaves 0", "--set corpus.filter_threshold=0"),
    "rows too long": (f"{RUN} --set corpus.seq_length=20000", "too short", "more text"),
    "glue missing": (f"{RUN} --glue-dir nosuch", "nosuch", "CoLA/"),
    "glue empty": (f"{RUN} --glue-dir {{bad}}/glue-none", "glue-none", "CoLA/"),
    "lab missing": ("lab nosuch.yaml", "nosuch.yaml", "No such file"),
    "lab no list": ("lab {bad}/lab-scalar.yaml", "list of runs", "recipe, source"),
    "lab field": ("lab {bad}/lab-field.yaml", "'recipes'", "recipe, source"),
    "lab recipe": ("lab {bad}/lab-recipe.yaml", "pokcet", "did you mean pocket"),
    "lab recipe number": ("lab {bad}/lab-number.yaml", "3", "recipe"),
    "lab budget": ("lab {bad}/lab-budget.yaml", "'3x'", "3m"),
    "lab budget number": ("lab {bad}/lab-minutes.yaml", "3", "3m"),
    "lab seeds": ("lab {bad}/lab-seeds.yaml", "seeds", "list"),
    "lab one seed": ("lab {bad}/lab-one.yaml", "seeds 1", "[0, 1]"),
    "lab rate": ("lab {bad}/lab-rate.yaml", "300Mtok@5tok/s", "3m"),
    "lab only": ("lab {bad}/lab-good.yaml --only three", "'three'", "one, two"),
    "lab seed negative": ("lab {bad}/lab-negative.yaml", "seed -1", "0 or more"),
    "lab rated tokens": ("lab {bad}/lab-rated.yaml", "'3Mtok'", "give a time"),
    "lab jobs": ("lab {bad}/lab-good.yaml --jobs -1", "--jobs -1", "1 or more"),
    "lab set": ("lab {bad}/lab-set.yaml", "set", "schedule.batch_size"),
    "lab torn": ("lab {bad}/lab-torn.yaml", "lab-torn.yaml", "line 1"),
    "bench rounds": ("bench train --rounds 0", "--rounds 0", "above 0"),
    "bench rows": ("bench train --rows -1", "--rows -1", "above 0"),
    "bench picture": ("bench train --picture x.foo", "--picture x.foo", ".png or .svg"),
    "bench source": ("bench data --source web:text", "web:text", "files:GLOB"),
    "bench megabytes": ("bench data --megabytes 0", "--megabytes 0", "above 0"),
    "bench grow": ("bench data --grow 0.5", "grow 0.5", "1 or more"),
    "bench steps": ("bench glue --steps 0", "--steps 0", "above 0"),
    "bench glue": ("bench glue --glue-dir nosuch", "nosuch", "CoLA/"),
    "run unknown": ("predict nosuch 'a [MASK]'", "nosuch", "cram run"),
    "report unknown": ("report nosuch", "nosuch", "cram run"),
}


@pytest.mark.parametrize("text", BAD_COMMANDS.values(), ids=BAD_COMMANDS)
def test_bad_input_is_refused_in_one_line(text, bad, tiny, tmp_path):
    argv, *words = text
    argv = [a.format(tiny=tiny.recipe, text=tiny.text, bad=bad) for a in shlex.split(argv)]
    refused(command(*argv, cwd=tmp_path, cache=tmp_path / "cache"), *words)
    assert nothing_half_done(tmp_path)


def nothing_half_done(folder: Path) -> bool:
    """Whether there is nothing but stages of a corpus that were finished before the mistake was found."""
    whole = {path.parent for path in folder.glob("cache/documents-*/manifest.json")}
    return not (folder / "runs").exists() and {p.parent for p in folder.rglob("*") if p.is_file()} <= whole


def test_text_too_short_for_probes_is_refused_before_pretraining(bad, tiny, tmp_path):
    argv = ["run", tiny.recipe, "--source", f"files:{bad / 'few.jsonl'}", "--budget", "1ktok"]
    result = command(*argv, "--set", "corpus.vocab_size=200", cwd=tmp_path, cache=tmp_path / "cache")
    refused(result, "need 8", "--glue-dir")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "changed",
    ["schedule.batch_size=0", "training.micro_batch_size=-1", "training.validations=0", "training.heldout_rows=0"]
    + ["corpus.seq_length=0", "corpus.vocab_size=3", "corpus.heldout=0", "corpus.probe=2", "protocol.batch_size=0"]
    + ["training.keep_checkpoints=0", "training.early_stop_at=2", "schedule.mask_start=1", "schedule.length_start=48"]
    + ["objective.mlm_probability=0", "objective.mlm_probability=1.5", "architecture.hidden_size=0"]
    + ["optimizer.betas=[2, 0.9]", "optimizer.betas=[0.9, 1]", "optimizer.betas=[-0.1, 0.9]"],
)
def test_recipe_that_cannot_run_is_refused(changed):
    key, value = changed.split("=")
    with pytest.raises(UserError, match=key.split(".")[1]):
        change(RECIPES["pocket"], {key: json.loads(value)})


@pytest.mark.parametrize(
    "changed, problem",
    [
        ({"objective.mlm_probability": 0.005}, "masking 0.005 of rows of 128 tokens, after 0%"),
        ({"objective.mlm_probability": 0.005, "schedule.mask_start": 0.3}, "masking 0.005 of rows of 128 .*after 88%"),
        ({"objective.mlm_probability": 0.3, "schedule.mask_start": 0.005}, "masking 0.005 of rows of 128"),
        (  # the mask rate falls faster than rows grow; at both ends there are tokens to predict
            {"objective.mlm_probability": 0.02, "schedule.mask_start": 0.3, "schedule.mask_ramp": 0.1}
            | {"schedule.length_start": 16, "schedule.length_ramp": 1.0},
            "masking 0.06 of rows of 16 tokens, after 8%",
        ),
    ],
)
def test_masks_that_leave_nothing_to_predict_are_refused(changed, problem):
    """At the start, at the end, or in between."""
    with pytest.raises(UserError, match=problem + ".*raise the mask rate or the row length"):
        change(RECIPES["pocket"], changed)


def test_masks_that_leave_a_token_everywhere_are_not_refused():
    """The lowest rate comes when rows have grown: of rows of 16 it would predict nothing."""
    changed = {"objective.mlm_probability": 0.02, "schedule.mask_start": 0.3}
    assert change(RECIPES["pocket"], changed | {"schedule.length_start": 16}).objective.mlm_probability == 0.02


@pytest.mark.parametrize("text", ["", "3", "m", "-3m", "3 m m", "1e999tok", "nanm", "3m\n4m"])
def test_budget_is_refused(text):
    with pytest.raises(UserError, match="such as 3m, 24h or 300Mtok"):
        Budget.parse(text)


def test_file_that_cannot_be_read(tiny, tmp_path):
    memory, link = Path("/proc/self/mem"), tmp_path / "secret.txt"
    if geteuid():
        link.write_text("the garden")
        link.chmod(0)
    elif memory.exists():  # root may read everything but this
        link.symlink_to(memory)
    else:
        pytest.skip("nothing here that root cannot read")
    argv = ["run", tiny.recipe, "--source", f"files:{link}", "--budget", "1ktok"]
    refused(command(*argv, cwd=tmp_path, cache=tmp_path / "cache"), "secret.txt", "check the name, or copy it again")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["runs", "cache"])
def test_folder_that_is_a_file(name, tiny, tmp_path):
    (tmp_path / name).write_text("mine")
    result = command("run", *tiny.options("1ktok"), cwd=tmp_path, cache=tmp_path / "cache")
    refused(result, name)
    assert "make room" not in result.err
    assert (tmp_path / name).read_text() == "mine"


def runs_is_a_file(folder: Path):
    (folder / "runs").write_text("mine")


def runs_is_a_broken_link(folder: Path):
    (folder / "runs").symlink_to(folder / "unmounted")


def run_is_a_file(folder: Path):
    (folder / "runs").mkdir()
    (folder / "runs" / "first").write_text("mine")


PLACES = {  # name: (what is done before, name of the run, words of the line)
    "runs is a file": (runs_is_a_file, "first", ("runs: Not a directory", "move the file")),
    "runs leads nowhere": (runs_is_a_broken_link, "first", ("runs: ", "")),
    "run is a file": (run_is_a_file, "first", ("first: Not a directory", "move the file")),
    "name too long": (Path.exists, "x" * 300, ("name too long", "choose a shorter name")),
    "name of two lines": (Path.exists, "a\nb", (r"runs/a\nb", "be printed here", "choose another --name")),
    "name not in UTF-8": (Path.exists, "\udcff", (r"runs/\udcff", "be printed here", "choose another --name")),
}


@pytest.mark.parametrize("verb", ["run", "pretrain"])
@pytest.mark.parametrize("prepare, name, words", PLACES.values(), ids=PLACES)
def test_a_place_for_results_is_checked_before_the_text_is_read(verb, prepare, name, words, tiny, tmp_path):
    prepare(tmp_path)
    before = contents(tmp_path)
    argv = [verb, *tiny.options("1ktok"), "--name", name]
    refused(command(*argv, cwd=tmp_path, cache=tmp_path / "cache"), *words)
    assert contents(tmp_path) == before and not (tmp_path / "cache").exists()


def test_name_of_a_classifier_that_is_too_long(a_copy):
    (a_copy.home / "t.csv").write_text("text,label\n" + "a garden,yes\na river,no\n" * 30)
    refused(a_copy.command("finetune", "first", "t.csv", "--name", "x" * 300), "name too long")


def test_name_of_a_classifier_that_cannot_be_printed(a_copy):
    (a_copy.home / "t.csv").write_text("text,label\n" + "a garden,yes\na river,no\n" * 30)
    refused(a_copy.command("finetune", "first", "t.csv", "--name", "a\tb"), r"a\tb", "choose another --name")


@pytest.mark.parametrize("verb", ["glue", "export"])
def test_folder_that_is_not_named_in_utf8(verb, a_copy):
    a_copy.folder.rename(a_copy.home / "\udcff")
    refused(a_copy.command(verb, "\udcff"), r"\udcff", "UTF-8")


@pytest.mark.parametrize("verb", ["run", "pretrain", "data"])
def test_read_only_disk(verb, tiny, tmp_path, monkeypatch):
    def mkdir(path, *more, **options):
        raise OSError(EROFS, strerror(EROFS), str(path))

    monkeypatch.setattr("os.mkdir", mkdir)
    argv = tiny.options("1ktok") if verb != "data" else ["build", *tiny.options()[:3]]
    said = command(verb, *argv, cwd=tmp_path, cache=tmp_path / "cache")
    refused(said, "Read-only file system; make room, or choose a folder you may write to")
    assert contents(tmp_path) == {}


FULL = {"recipe": 500, "tokenizer": 3_000, "rows": 40_000, "checkpoint": 150_000}


@pytest.mark.parametrize("room", FULL.values(), ids=FULL)
def test_full_disk(room, disk, tiny, tmp_path):
    disk(room)
    argv = ["pretrain", *tiny.options("2ktok"), "--name", "full"]
    result = command(*argv, cwd=tmp_path, cache=tmp_path / "cache")
    disk(0)
    refused(result, "write")
    assert hidden(tmp_path) == [], "half-written files"
    assert not [p for p in tmp_path.rglob("step-*")]
    result = command(*argv, cwd=tmp_path, cache=tmp_path / "cache")  # there is room again
    assert result.code == 0 and "held-out loss" in result.out


COLA, STSB = GLUE_ROWS["cola"][0], GLUE_ROWS["stsb"][0]
BAD_GLUE = {  # name: (file, its content or None, words of the line)
    "json": ("CoLA/train.jsonl", '{"sentence": "cut o', "line 1", "not JSON"),
    "column": ("CoLA/train.jsonl", json.dumps(dict(text="a", label=1)), "'sentence'", "label"),
    "one sentence": ("STS-B/dev.jsonl", json.dumps(dict(sentence1="a", label=1)), "'sentence2'", "sentence1"),
    "no object": ("CoLA/dev.jsonl", "[1]", "line 1", "sentence and label"),
    "label": ("CoLA/train.jsonl", json.dumps(COLA | dict(label=2)), "label 2", "0, 1"),
    "word": ("RTE/dev.jsonl", json.dumps(dict(sentence1="a", sentence2="b", label="maybe")), "'maybe'", "entailment"),
    "no number": ("STS-B/train.jsonl", json.dumps(STSB | dict(label="high")), "'high'", "number"),
    "not a number": ("STS-B/train.jsonl", json.dumps(STSB | dict(label=math.nan)), "nan", "number"),
    "empty": ("RTE/train.jsonl", "", "RTE/train.jsonl", "empty"),
    "no dev": ("CoLA/dev.jsonl", None, "dev.jsonl is missing", "CoLA"),
    "second line": ("CoLA/dev.jsonl", f"{json.dumps(COLA)}\n{{}}", "line 2", "'sentence'"),
}


@pytest.mark.parametrize("what", BAD_GLUE.values(), ids=BAD_GLUE)
def test_malformed_glue(what, tiny, glue, tmp_path):
    name, content, *words = what
    (glue / name).unlink() if content is None else (glue / name).write_text(content)
    result = command("run", *tiny.options("1ktok"), "--glue-dir", glue, cwd=tmp_path, cache=tmp_path / "cache")
    refused(result, Path(name).parent.name, *words)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "cache").exists()


def test_line_separators_within_a_sentence_are_text(glue):
    from cramming_nb.glue import load_glue

    row = dict(sentence="one\u2028two\x85three", label=1)
    (glue / "CoLA" / "dev.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert load_glue(glue)["cola"].dev["cola"] == [(row["sentence"], None, 1)]


BAD_ON_RUN = {  # name: (command, words of the line)
    "no mask": ("predict first 'the old garden'", "[MASK]", "the old garden"),
    "text too long": ("predict first '" + "garden " * 99 + "[MASK]'", "tokens", "64"),
    "too many guesses": ("predict first 'the [MASK]' --top 100000", "top", "400"),
    "no guesses": ("predict first 'the [MASK]' --top 0", "top", "1"),
    "export over a folder": ("export first --to mine", "mine", "empty"),
    "export without a name": ("export first --dry-run", "--dry-run", "--push-to USER/NAME"),
    "export to no name": ("export first --push-to mine", "'mine'", "USER/NAME"),
    "export to an address": ("export first --push-to a/b.git --dry-run", "'a/b.git'", "cannot end by"),
    "export to a hidden name": ("export first --push-to a/.b --dry-run", "'a/.b'", "cannot start or end with"),
    "export to a long name": (f"export first --push-to a/{'b' * 97} --dry-run", "bbb", "maximum length is 96"),
    "text in another encoding": ("predict first 'caf\udce9 [MASK]'", "not UTF-8", "iconv"),
    "report printed and written": ("report first --markdown --to r.md", "--markdown", "--to r.md", "one"),
    "finetune without a table": ("finetune first", "labels.csv", "No such file"),
    "export over a file": ("export first --to mine/letter.txt", "letter.txt", "empty"),
    "run": ("glue frist", "frist", "first"),
    "glue": ("glue first --glue-dir nosuch", "nosuch", "CoLA/"),
}


@pytest.mark.parametrize("what", BAD_ON_RUN.values(), ids=BAD_ON_RUN)
def test_bad_input_leaves_a_run_alone(what, a_copy):
    argv, *words = what
    (a_copy.home / "mine").mkdir()
    (a_copy.home / "mine" / "letter.txt").write_text("dear")
    before = contents(a_copy.home)
    result = a_copy.command(*shlex.split(argv))
    assert contents(a_copy.home) == before
    refused(result, *words)


@pytest.mark.parametrize(
    "given, words",
    [(b"the [MASK]\ncaf\xe9 [MASK]\n", ("not UTF-8", "iconv")), (b" \n\n", ("no text", "standard input"))],
    ids=["latin", "blank"],
)
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_bad_standard_input(given, words, errors, finished, monkeypatch):
    """Python reads it strictly or, in its UTF-8 mode, keeps what it cannot read as surrogates."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8", errors=errors))
    refused(finished.command("predict", "first"), *words)


@pytest.mark.parametrize("verb", ["report first", "export first", "predict first 'a [MASK]'", "glue first"])
def test_run_that_only_began(verb, finished, tmp_path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    shutil.copy(finished.folder / "run.json", tmp_path / "runs" / "first")
    forget_pretraining(tmp_path / "runs" / "first")
    refused(command(*shlex.split(verb), cwd=tmp_path, cache=finished.tiny.cache), "first", "cram ")


@pytest.mark.parametrize("content", ["[]", "{}", "null"])
@pytest.mark.parametrize("init", ["pretrained", "counting"])
def test_damaged_results_of_a_task(init, content, a_copy):
    path = next((a_copy.folder / "glue").glob(f"*-{init}-*.json"))
    path.write_text(content)
    refused(a_copy.command("glue", "first"), path.name, "is missing or no ", "; delete it")


@pytest.mark.parametrize("name", ["run.json", "record.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "\xff", '{"schema": 1}'])
def test_damaged_run_folder(name, content, a_copy):
    (a_copy.folder / name).write_text(content)
    refused(a_copy.command("run", *a_copy.tiny.options(), "--name", "first"), name)


DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "flipped": lambda data: data[:1000] + bytes([data[1000] ^ 1]) + data[1001:],
}
PARTS = ["train.npy", "heldout.npy", "tokenizer.json", "probe.jsonl", "manifest.json"]


def built_for(manifest: Path, text: Path) -> bool:
    """Whether a run on this text alone reads this corpus. Other tests build more of them in the same cache: of a newer
    copy of the file, or beside a folder of tasks."""
    found = json.loads(manifest.read_text())
    return found["identity"]["files"][0]["modified"] == text.stat().st_mtime_ns and not found["overlap"]


@pytest.mark.parametrize("name, how", [(n, h) for n in PARTS for h in DAMAGE if (n, h) != ("manifest.json", "flipped")])
def test_damaged_corpus(name, how, finished, tmp_path):
    cache = tmp_path / "cache"
    shutil.copytree(finished.tiny.cache, cache)
    (corpus,) = (path.parent for path in cache.glob("corpus-*/manifest.json") if built_for(path, finished.tiny.text))
    (path,) = corpus.glob(name)
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    result = command("run", *finished.tiny.options("1ktok"), "--name", "other", cwd=tmp_path, cache=cache)
    refused(result, str(path.parent), "damaged", "delete")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", ["1" * 5000, "0x" + "f" * 5000, "0b" + "1" * 20_000])
def test_a_number_of_thousands_of_digits_is_no_setting(number, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"optimizer: {{lr: {number}}}\n")
    with pytest.raises(UserError, match=r"a.yaml: a value cannot be read \(Exceeds the limit"):
        load_recipe(str(path))
    with pytest.raises(UserError, match="--set optimizer.lr=.*is not YAML"):
        parse_changes([f"optimizer.lr={number}"])


@pytest.mark.parametrize("text", ['name: "\\ud800"', '- "\\ud800"', '- {recipe: pocket, source: "\\ud800"}', '"\\udfff": 1'])
def test_half_of_a_character_in_a_yaml_file(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text + "\n")
    with pytest.raises(UserError, match=r"a.yaml: a value cannot be read \(.*surrogates not allowed\)"):
        yaml_file(tmp_path / "a.yaml")


def test_half_of_a_character_in_a_source():
    for text in ("\ud800.txt", "files:\ud800", "hub:a/\ud800"):
        with pytest.raises(UserError, match="no name has the character"):
            parse_source(text)
    assert parse_source("files:\udcff.txt").path == "\udcff.txt"  # a byte that is not UTF-8, as Python names it


def test_a_share_of_hundreds_of_digits(tmp_path):
    (tmp_path / "a.yaml").write_text(f"- {{kind: files, path: a.txt, share: 1{'0' * 400}}}\n")
    with pytest.raises(UserError, match="a share is above 0 and at most 1"):
        sources(str(tmp_path / "a.yaml"))


def test_a_message_does_not_repeat_a_text_that_was_taken_for_a_header(tmp_path):
    (tmp_path / "a.csv").write_text("A long text without a table. " * 10_000)
    with pytest.raises(UserError, match="no text in column 'text'") as refused:
        next(read_rows(str(tmp_path / "a.csv"), "text"))
    assert len(str(refused.value)) < 400
