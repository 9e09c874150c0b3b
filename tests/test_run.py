"""The whole job on a tiny text: what a run leaves, and what the other commands make of it."""

import io
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pypandoc
import pytest
from conftest import command, contents, forget_pretraining, hidden, lines, write_jsonl

from cramming_nb.app.records import RunRecord, report
from cramming_nb.app.run import load_run, provenance_of
from cramming_nb.engine.hooks import read_log
from cramming_nb.recipes import change

FILES = ["run.json", "tokenizer.json", "probe.jsonl", "log.jsonl", "record.json", "report.html", "report.md"]
PROBES = {"order", "source", "adjacent", "relation", "overlap"}


class Page(HTMLParser):
    """The tags of a page with their attributes, its text, and which tags are still open."""

    VOID = {"meta", "img", "br", "link", "input", "hr"}

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def record(finished) -> RunRecord:
    return RunRecord.read(finished.folder / "record.json")


def test_run_folder_has_all_it_should(finished):
    assert [name for name in FILES if not (finished.folder / name).read_text().strip()] == []
    assert list((finished.folder / "checkpoints").glob("step-*/*.safetensors"))
    assert {path.name.split("-")[0] for path in (finished.folder / "glue").iterdir()} == PROBES
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(
        contents(finished.folder / "export")
    )
    assert hidden(finished.home) == hidden(finished.tiny.cache) == []
    assert (finished.folder / ".lock").read_text() == ""  # nobody holds it


def test_record_says_what_was_done(finished, record):
    p = record.pretraining
    assert (record.budget, record.seed, record.recipe["name"]) == ("20ktok", 0, "tiny")
    assert 20_000 <= p["spent"]["tokens"] < 20_000 + 8 * 32  # at most a micro-batch over the budget
    assert p["heldout_loss"] == p["curve"][-1]["heldout_loss"] < p["curve"][0]["heldout_loss"]
    assert [point["fraction"] for point in p["curve"]] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1], abs=0.02)
    assert {(r["task"], r["init"]) for r in record.results} == {
        (t, i) for t in PROBES for i in ("constant", "counting", "random", "pretrained")
    }
    assert record.samples and all(sample["text"].count("[MASK]") == 1 for sample in record.samples)
    text = finished.tiny.text.read_text().lower()
    for sample in record.samples:
        assert len(sample["word"]) > 3 and f" {sample['word']} " in text
        assert sample["fills"] and all(word.isalpha() for word, _ in sample["fills"])
    assert record.provenance["rules"] == "Rules"
    stages = {stage["stage"]: stage["documents"] for stage in record.corpus["stages"]}
    assert (stages["read"], stages["filter"]) == (241, 240)  # the noise is gone


@pytest.mark.parametrize(
    "changes, breaches",
    [
        ({"protocol.epochs": 5}, []),
        ({"protocol.epochs": 6}, ["fine-tuning with 6 epochs"]),
    ],
)
def test_fine_tuning_against_the_rules_is_labelled(changes, breaches, finished, record):
    run = load_run(finished.folder)
    run = replace(run, recipe=change(run.recipe, changes))
    found = provenance_of(run, dict(manifest=record.corpus, pretraining=record.pretraining, plan=None))
    assert (found["rules"], found["breaches"]) == ("Open" if breaches else "Rules", breaches)


def test_log_says_what_the_run_did(finished, record):
    told = [line for line in read_log(finished.folder / "log.jsonl") if "loss" in line]
    asked = record.recipe["schedule"]["batch_size"], record.recipe["corpus"]["seq_length"]
    assert {(line["batch_size"], line["row_length"]) for line in told} == {asked}
    assert told[-1]["remaining"] == 0 and told[-1]["lr"] < told[0]["lr"]
    assert all(line["mfu"] > 0 and line["gradient_norm"] > 0 and line["memory"] > 1e8 for line in told)
    flops, steps = told[-1]["flops"] - told[0]["flops"], told[-1]["step_seconds"] - told[0]["step_seconds"]
    rates = [line["mfu"] * record.pretraining["matrix_rate"] for line in told[1:]]
    assert min(rates) <= flops / steps <= max(rates)


def test_hopeless_run_is_given_up(tiny, tmp_path):
    argv = ["run", *tiny.options(), "--name", "first", "--set", "optimizer.lr=0", "training.early_stop_loss=4"]
    result = command(*argv, cwd=tmp_path, cache=tiny.cache)
    found = RunRecord.read(tmp_path / "runs" / "first" / "record.json")
    line = r"stopped early: held-out loss \d\.\d+ after \d+% of the budget, above 4"
    assert result.code == 0 and re.search(line, result.out)
    assert found.results == [] and found.pretraining["stopped"]
    assert found.pretraining["spent"]["tokens"] < 20_000 / 2
    assert found.pretraining["curve"][-1]["fraction"] >= found.recipe["training"]["early_stop_at"]
    assert command(*argv, cwd=tmp_path, cache=tiny.cache).out == result.out


def test_tensorboard_is_told_what_the_log_is(tiny, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    argv = ["pretrain", *tiny.options("5ktok"), "--name", "first", "--tensorboard"]
    assert command(*argv, cwd=tmp_path, cache=tiny.cache).code == 0
    told = read_log(tmp_path / "runs" / "first" / "log.jsonl")
    events = EventAccumulator(str(tmp_path / "runs" / "first" / "tensorboard")).Reload()
    for name in ("loss", "heldout_loss", "lr", "gradient_norm"):
        logged = [(line["tokens"], line[name]) for line in told if name in line]
        assert [(e.step, e.value) for e in events.Scalars(name)] == [(t, pytest.approx(v, rel=1e-5)) for t, v in logged]


def test_no_file_names_a_local_path(finished):
    home = str(finished.tiny.folder)
    shown = [p for p in finished.folder.rglob("*") if p.suffix in (".json", ".html", ".md", ".jsonl", ".yaml")]
    assert {p.name for p in shown if home in p.read_text()} <= {"run.json"}  # which resumes the run, and stays here


def test_report_needs_no_other_file(finished):
    page = Page((finished.folder / "report.html").read_text())
    assert page.open == []
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 2
    assert all(image["alt"].strip() and image["src"].startswith("data:image/png;base64,") for image in images)
    links = [
        a.get(name, "") for _, a in page.tags for name in ("src", "href", "srcset", "data", "action") if a.get(name)
    ]
    assert [link[:40] for link in links if not link.startswith(("data:", "#"))] == []
    assert not re.search(r"@import|url\(", (finished.folder / "report.html").read_text())
    assert "probe tasks, not GLUE" in page.text


EVIL = "<script>alert('&amp;')</script> | **b** [x](javascript:y)\n# z"


def evil(record: RunRecord, text: str = EVIL) -> RunRecord:
    """A record in which all that may come from outside is `text`."""
    return replace(
        record,
        budget=text,
        recipe=record.recipe | dict(name=text),
        environment=record.environment | {text: text},
        provenance=record.provenance | dict(rules=text),
        samples=[dict(text=text, fills=[(text, 0.5)])],
        results=[r | dict(scores={text: 0.5}, intervals={text: [0.4, 0.6]}) for r in record.results],
        corpus=record.corpus | dict(stages=[dict(stage=text, documents=1, characters=1)]),
    )


@pytest.mark.parametrize("count", [1, 2])
def test_report_escapes(count, record):
    records = [evil(record), replace(evil(record), seed=7)][:count]
    page = Page(report(*records))
    assert {"script", "a", "b"} & {tag for tag, _ in page.tags} <= ({"b"} if count == 1 else set())  # cards are bold
    assert page.open == []
    assert page.text.count("<script>alert('&amp;')</script>") >= 8


@pytest.mark.parametrize("count", [1, 2])
def test_markdown_report_escapes(count, record):
    records = [evil(record), replace(evil(record), seed=7)][:count]
    text = report(*records, markdown=True)
    shown = pypandoc.convert_text(text, "html", format="gfm", extra_args=["--wrap=none"])
    page = Page(shown)
    assert page.open == [] and not {"script", "a", "img"} & {tag for tag, _ in page.tags}
    assert page.text.count("<script>alert('&amp;')</script> | **b** [x](javascript:y) # z") >= 8
    assert [tag for tag, _ in page.tags].count("h1") == 1
    heads = re.findall(r"<h2>(.*?)</h2>", report(*records))
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", shown) == heads


def test_same_command_again_changes_nothing(finished):
    before = {path: path.stat().st_mtime_ns for path in finished.home.rglob("*")}
    result = finished.command("run", *finished.tiny.options(), "--name", "first")
    assert (result.code, result.out) == (0, finished.said.out)
    assert {path: path.stat().st_mtime_ns for path in finished.home.rglob("*")} == before


def test_table_is_printed(finished):
    assert "probe tasks, not GLUE" in finished.said.out
    for row in ("no pretraining", "pretrained"):
        cells = re.search(rf"^\| {row} \|(.+)\|$", finished.said.out, re.M)[1].split("|")
        assert len(cells) == len(PROBES) + 1 and all(-100 <= float(cell.split()[0]) <= 100 for cell in cells)


CHANGED = {
    "recipe": (["--set", "schedule.batch_size=16"], "schedule.batch_size 8 -> 16"),
    "seed": (["--seed", "1"], "seed 0 -> 1"),
    "budget": (["--budget", "1ktok"], "budget '20ktok' -> '1ktok'"),
}


@pytest.mark.parametrize("what", CHANGED.values(), ids=CHANGED)
def test_another_run_under_the_same_name_is_refused(what, finished):
    more, words = what
    before, given = contents(finished.home), finished.tiny.options()
    if more[0] in given:  # an option may be given once
        at = given.index(more[0])
        given = [*given[:at], *given[at + 2 :]]
    result = finished.command("run", *given, "--name", "first", *more)
    assert (result.code, len(lines(result.err))) == (2, 1)
    assert words in result.err and "--name" in result.err
    assert contents(finished.home) == before


def test_unfinished_run_goes_on_with_another_protocol(a_copy, glue):
    """As after memory ran out: what was pretrained stays, and all that is written names the new protocol."""
    argv = ["run", *a_copy.tiny.options(), "--name", "first", "--set", "protocol.epochs=6"]
    result = a_copy.command(*argv)  # it is finished
    assert (result.code, len(lines(result.err))) == (2, 1)
    assert "protocol.epochs 1 -> 6" in result.err and "delete runs/first/record.json" in result.err
    old = RunRecord.read(a_copy.folder / "record.json")
    (a_copy.folder / "record.json").unlink()
    before = contents(a_copy.folder / "checkpoints")
    assert a_copy.command(*argv).code == 0
    new = RunRecord.read(a_copy.folder / "record.json")
    assert contents(a_copy.folder / "checkpoints") == before and new.pretraining == old.pretraining
    assert new.recipe == old.recipe | dict(protocol=old.recipe["protocol"] | dict(epochs=6)) and new.key != old.key
    assert (new.provenance["rules"], new.provenance["breaches"]) == ("Open", ["fine-tuning with 6 epochs"])
    notes = [note for r in new.results if r["init"] == "pretrained" for note in r["notes"]]
    assert len([note for note in notes if "6 epochs" in note]) == len(PROBES)
    assert load_run(a_copy.folder).recipe.protocol.epochs == 6
    kept = contents(a_copy.home)
    assert a_copy.command(*argv).code == 0 and contents(a_copy.home) == kept
    assert a_copy.command("glue", "first", "--glue-dir", glue, "--no-baseline").code == 0
    joined = RunRecord.read(a_copy.folder / "record.json")  # by the protocol of the record
    assert "rte: outside the paper's rules (6 epochs)" in str(joined.results)


def test_another_text_under_the_same_name_is_refused(finished, tmp_path):
    text = tmp_path / "other.jsonl"
    shutil.copy(finished.tiny.text, text)
    argv = [finished.tiny.recipe, "--source", f"files:{text}", "--budget", "20ktok"]
    result = finished.command("run", *argv, "--name", "first")
    assert result.code == 2 and "other.jsonl" in result.err


def test_pretrain_on_a_finished_run_only_reads_it(finished, record):
    before = contents(finished.home)
    result = finished.command("pretrain", *finished.tiny.options(), "--name", "first")
    assert result.code == 0 and f"{record.pretraining['heldout_loss']:.3f} nats" in result.out
    assert contents(finished.home) == before


def guesses(out: str) -> list[list[tuple[str, float]]]:
    """What `cram predict` printed: for each mask the words and their chances."""
    masks = []
    for line in out.splitlines():
        if found := re.fullmatch(r"  (\S+) +([\d.]+)%( +█+)?", line):
            masks[-1].append((found[1], float(found[2])))
        else:
            masks.append([])
    return masks


TWO = "The [MASK] keeps the [MASK]."


def test_predict(finished):
    result = finished.command("predict", "first", TWO, "--top", "3")
    assert result.code == 0 and [len(mask) for mask in guesses(result.out)] == [3, 3]
    assert f"{TWO}  (mask 2 of 2)" in result.out.splitlines()
    for mask in guesses(result.out):
        chances = [chance for _, chance in mask]
        assert chances == sorted(chances, reverse=True) and sum(chances) <= 100.1


def test_predict_by_folder_by_export_and_by_checkpoint_is_the_same(a_copy):
    found = [a_copy.command("predict", name, TWO) for name in ("first", "runs/first", "runs/first/export")]
    shutil.rmtree(a_copy.folder / "export")
    found.append(a_copy.command("predict", "first", TWO))
    assert [(result.code, result.out) for result in found] == [(0, found[0].out)] * 4
    shutil.rmtree(a_copy.folder / "checkpoints")
    result = a_copy.command("predict", "first", TWO)
    assert (result.code, len(lines(result.err))) == (2, 1) and "no good checkpoint; run `cram pretrain`" in result.err


def test_predict_says_that_a_run_is_not_finished(a_copy):
    shutil.rmtree(a_copy.folder / "export")
    forget_pretraining(a_copy.folder)
    result = a_copy.command("predict", "first", TWO)
    assert result.code == 0 and len(guesses(result.out)) == 2
    assert lines(result.err) == ["runs/first: not finished; its last checkpoint is read"]


def test_predict_several_texts_or_lines(finished, monkeypatch):
    texts = [TWO, "The old [MASK]."]
    result = finished.command("predict", "first", *texts)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([texts[0], "", texts[1]])))
    assert result.code == 0 and len(guesses(result.out)) == 3
    assert finished.command("predict", "first").out == result.out
    result = finished.command("predict", "first", *texts, "nothing to fill")
    assert (result.code, result.out, len(lines(result.err))) == (2, "", 1) and "nothing to fill" in result.err


def test_export_again(a_copy):
    before = contents(a_copy.folder)
    shutil.rmtree(a_copy.folder / "export")
    assert a_copy.command("export", "first").code == 0
    assert contents(a_copy.folder) == before
    result = a_copy.command("export", "first", "--to", "mine/model")
    assert result.code == 0 and result.out.strip() == "mine/model"
    assert contents(a_copy.home / "mine" / "model") == contents(a_copy.folder / "export")


def test_export_replaces_nothing_but_the_export_of_the_run(a_copy):
    mine = a_copy.home / "mine"
    shutil.copytree(a_copy.folder / "export", mine)  # a model with the same file names, perhaps fine-tuned for a day
    (a_copy.folder / "export" / "notes.txt").write_text("dear")
    before = contents(a_copy.home)
    for argv, name in ((["--to", mine], "README.md"), ([], "notes.txt"), (["--to", mine / "README.md"], "is a file")):
        result = a_copy.command("export", "first", *argv)
        assert (result.code, len(lines(result.err))) == (2, 1) and name in result.err and "empty" in result.err
        assert contents(a_copy.home) == before
    (a_copy.folder / "export" / "notes.txt").unlink()
    assert a_copy.command("export", "first", "--to", a_copy.folder.absolute() / "export").code == 0
    mine.rename(a_copy.home / "away")
    mine.mkdir()
    assert a_copy.command("export", "first", "--to", mine).code == 0
    assert contents(mine) == contents(a_copy.folder / "export") == contents(a_copy.home / "away")


AFTERWARDS = {  # what is done with a run after pretraining, and words of what is printed
    "glue": (["glue", "first"], "probe tasks, not GLUE"),
    "glue on a folder": (["glue", "first", "--glue-dir", "glue"], "3 of 9 GLUE numbers"),
    "frozen": (["glue", "first", "--protocol", "frozen", "--no-baseline"], "probe tasks, not GLUE"),
    "report": (["report", "first"], "report.html"),
    "export": (["export", "first"], "export"),
    "predict": (["predict", "first", TWO], "mask 2 of 2"),
    "finetune": (["finetune", "first", "mine.csv"], "mine/export"),
}


@pytest.mark.parametrize("what", AFTERWARDS.values(), ids=AFTERWARDS)
def test_folder_of_a_run_is_all_that_is_needed(what, a_copy, glue):
    """Another place, an empty cache, no text: as on another machine."""
    argv, words = what
    values = json.loads((a_copy.folder / "run.json").read_text())
    (a_copy.folder / "run.json").write_text(json.dumps(values | dict(source="files:gone.jsonl")))
    shutil.rmtree(a_copy.folder / "export")
    (a_copy.home / "mine.csv").write_text("text,label\n" + "".join(f"text {i},{i % 2}\n" for i in range(60)))
    said = command(*argv, cwd=a_copy.home, cache=a_copy.home / "cache")
    assert said.code == 0 and words in said.out, said.err
    assert not (a_copy.home / "cache").exists()


def test_pretrained_run_is_finished_elsewhere(a_copy):
    """What follows pretraining reads neither text nor cache, and says the same of the model."""
    before = RunRecord.read(a_copy.folder / "record.json")
    for name in ("record.json", "report.html", "report.md"):
        (a_copy.folder / name).unlink()
    shutil.rmtree(a_copy.folder / "glue")
    shutil.rmtree(a_copy.folder / "export")
    said = command("run", *a_copy.tiny.options(), "--name", "first", cwd=a_copy.home, cache=a_copy.home / "cache")
    after = RunRecord.read(a_copy.folder / "record.json")
    assert said.code == 0 and not (a_copy.home / "cache").exists()
    assert [r["scores"] for r in after.results] == [r["scores"] for r in before.results]
    assert replace(after, results=[]) == replace(before, results=[])


@pytest.mark.parametrize(
    "name, verb", [("tokenizer.json", "export"), ("tokenizer.json", "glue"), ("probe.jsonl", "glue")]
)
@pytest.mark.parametrize("harm", ["damaged", "missing"])
def test_files_that_a_run_took_along_are_checked(name, verb, harm, a_copy):
    path = a_copy.folder / name
    path.write_text(path.read_text().replace("the", "teh")) if harm == "damaged" else path.unlink()
    before = contents(a_copy.home)
    result = a_copy.command(verb, "first")
    assert (result.code, len(lines(result.err))) == (2, 1) and contents(a_copy.home) == before
    assert f"{name} is missing or damaged; copy it from corpus-" in result.err


def test_folder_of_another_version_is_refused(a_copy):
    values = json.loads((a_copy.folder / "run.json").read_text())
    del values["schema"]
    (a_copy.folder / "run.json").write_text(json.dumps(values))
    for argv in (["run", *a_copy.tiny.options(), "--name", "first"], ["export", "first"], ["glue", "first"]):
        result = a_copy.command(*argv)
        assert (result.code, len(lines(result.err))) == (2, 1), argv
        assert "run.json is of another version of cramming_nb; choose another --name" in result.err
    assert a_copy.command("report", "first").code == 0  # which reads the record alone


def test_report_again(a_copy):
    before = {name: (a_copy.folder / name).read_text() for name in ("report.html", "report.md")}
    for name in before:
        (a_copy.folder / name).unlink()
    result = a_copy.command("report", "runs/first")  # a folder will do for a name
    assert result.code == 0 and "report.html" in result.out
    assert Page((a_copy.folder / "report.html").read_text()).text == Page(before["report.html"]).text
    assert (a_copy.folder / "report.md").read_text() == before["report.md"]
    result = a_copy.command("report", "first", "--markdown")
    assert (result.code, result.out) == (0, before["report.md"])


def test_report_of_several(a_copy):
    there = contents(a_copy.home)
    shutil.copy(a_copy.folder / "record.json", a_copy.home / "other.json")
    (a_copy.home / "bad.json").write_text((a_copy.folder / "record.json").read_text()[:999])
    result = a_copy.command("report", "first", "other.json", "bad.json", "nosuch")
    assert result.code == 0 and [line.startswith("cram: left out: ") for line in lines(result.err)] == [True, True]
    assert "bad.json" in lines(result.err)[0] and "nosuch" in lines(result.err)[1]
    assert {name: text for name, text in contents(a_copy.home).items() if name in there} == there
    page = Page((a_copy.home / "report.html").read_text())
    assert page.open == [] and page.text.count("20ktok") >= 4
    assert (a_copy.home / "report.md").read_text().startswith("# 1: tiny, 20ktok, seed 0 beside 2: tiny, 20ktok")
    result = a_copy.command("report", "first", "other.json", "--to", "mine.md")
    assert result.code == 0 and (a_copy.home / "mine.md").read_text() == (a_copy.home / "report.md").read_text()
    for argv in (["bad.json"], ["bad.json", "nosuch"], ["first", "--to", "mine.pdf"], []):
        result = a_copy.command("report", *argv)
        assert result.code == 2 and all(line.startswith("cram: ") for line in lines(result.err)), argv
        assert len(lines(result.err)) == (3 if len(argv) == 2 and "first" not in argv else 1)


def test_glue_on_probes_finds_what_is_there(finished):
    before = contents(finished.home)
    result = finished.command("glue", "first")
    assert result.code == 0 and result.out.strip() in finished.said.out
    assert contents(finished.home) == before


def test_glue_folder_on_a_pretrained_run(a_copy, glue):
    result = a_copy.command("glue", "first", "--glue-dir", glue, "--finetune-seeds", "2")
    assert result.code == 0, result.err
    assert "3 of 9 GLUE numbers" in result.out
    assert re.search(r"^\| \| stsb \| rte \| cola \| mean \|$", result.out, re.M)
    with_intervals = re.findall(r"\d \(-?\d+\.\d–-?\d+\.\d\)", result.out)
    assert len(with_intervals) == 20  # four lines, each of three medians and two means


def test_run_with_a_glue_folder(a_copy, glue):
    for name in ("record.json", "report.html"):
        (a_copy.folder / name).unlink()
    result = a_copy.command("run", *a_copy.tiny.options(), "--name", "first", "--glue-dir", glue)
    assert result.code == 0 and "3 of 9 GLUE numbers" in result.out
    record = RunRecord.read(a_copy.folder / "record.json")
    assert {r["task"] for r in record.results} == {"cola", "stsb", "rte"}
    assert {r["train_rows"] for r in record.results} == {24}
    assert "3 of 9 GLUE numbers" in Page((a_copy.folder / "report.html").read_text()).text


def test_finished_run_does_not_ignore_another_glue_folder(a_copy, glue):
    result = a_copy.command("run", *a_copy.tiny.options(), "--name", "first", "--glue-dir", glue)
    if result.code == 0:
        assert "3 of 9 GLUE numbers" in result.out
    else:
        assert (result.code, len(lines(result.err))) == (2, 1) and "--glue-dir" in result.err


def test_scores_belong_to_the_rows_they_were_made_on(a_copy, glue):
    first = a_copy.command("glue", "first", "--glue-dir", glue)
    rows = [json.loads(line) for line in (glue / "STS-B" / "dev.jsonl").read_text().splitlines()]
    write_jsonl(glue / "STS-B" / "dev.jsonl", [row | dict(label=5 - row["label"]) for row in rows])
    second = a_copy.command("glue", "first", "--glue-dir", glue)
    assert second.code == 0 and first.out != second.out


def test_corpus_is_built_once(finished, tmp_path):
    before = contents(finished.tiny.cache)
    result = command("data", "inspect", *finished.tiny.options()[:3], cwd=tmp_path, cache=finished.tiny.cache)
    assert result.code == 0 and "[SEP]" in result.out and "| filter | 240 |" in result.out
    after = contents(finished.tiny.cache)
    assert after == before


def test_same_rows_from_another_build(finished, record, tmp_path):
    result = command("data", "build", *finished.tiny.options()[:3], "--data-dir", tmp_path / "mine", cwd=tmp_path)
    (manifest,) = (tmp_path / "mine").glob("corpus-*/manifest.json")
    assert result.code == 0 and json.loads(manifest.read_text())["files"] == record.corpus["files"]
