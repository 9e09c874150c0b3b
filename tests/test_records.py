"""Records are read, damaged ones and those of another version refused, and a key identifies a run."""

import copy
import html
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cramming_nb.app.records import (
    RunRecord,
    beside,
    differences,
    facts,
    key_numbers,
    plain,
    plot_curve,
    read_record,
    record_key,
    report,
    score_differences,
    scores,
    verdict,
)
from cramming_nb.engine.errors import UserError
from cramming_nb.glue import NINE

# Three minutes of `pocket` on the text of the machine
STORED = Path(__file__).parents[1] / "records" / "cram" / "machine-3m-0.json"


@pytest.fixture
def data() -> dict:
    return json.loads(STORED.read_text())


def test_stored_record_is_read(data):
    record = RunRecord.read(STORED)
    assert record.schema == 2
    assert record.gain == record.pretraining["unigram_entropy"] - record.pretraining["heldout_loss"]
    assert json.loads(record.to_json()) == data
    assert record.name in record._repr_markdown_()


def test_stored_record_still_makes_a_report():
    record = RunRecord.read(STORED)
    page = report(record)
    assert f"{record.pretraining['heldout_loss']:.3f}" in page and page.count("<img ") == 2


def measured(data: dict, **found) -> RunRecord:
    """The record with other values in `pretraining`, as of a run with several processes."""
    other = copy.deepcopy(data)
    other["pretraining"].update(found)
    return read_record(other)


def cells(record: RunRecord) -> dict[str, str]:
    """What the report of several runs says first about a run, by name."""
    return {row[0]: row[1] for row in beside([record], facts).rows}


RATES = {  # of the machine, measured along a run: what is said of the share that the run used
    (): ("not known", "seconds went into steps, in which the model learns.\n"),
    (2e12,): ("40%", "They used 40% of the machine's matrix rate.\n"),
    (1.9e12, 2e12, 2.2e12): ("40%", "They used 40% of the machine's matrix rate.\n"),
    (1.6e12, 2e12, 4e12): ("unclear", "varied by a factor of 2.5 meanwhile, so how well the steps used it is unclear.\n"),
}


@pytest.mark.parametrize("rates", RATES)
def test_what_is_uncertain_is_said_in_words(rates, data):
    cell, sentence = RATES[rates]
    record = measured(data, mfu=0.4 if rates else None, matrix_rate=2e12, matrix_rates=list(rates))
    assert cells(record)["share of the matrix rate (MFU)"] == cell and f"| {cell} |" in record._repr_markdown_()
    assert sentence in report(record, markdown=True)
    assert html.escape(sentence.strip(), quote=False) in report(record).replace("&#39;", "'")


def test_samples_show_what_a_model_knows_and_what_not(data):
    """Three that are guessed, the surest first, and three that are not; and how often the first guess is right."""
    record = read_record(data)
    record.samples = [
        dict(text=f"number {i} is [MASK].", word="good", fills=[("good" if i % 2 else "bad", i / 100), ("so", 0.001)])
        for i in range(20)
    ]
    text = report(record, markdown=True)
    assert "Of 20 words its first guess is right for 10, and one of its first five for 10." in text
    shown = [int(number) for number in re.findall(r"\| number (\d+) is", text)]
    assert shown[:3] == [19, 11, 1] and [number % 2 for number in shown[3:]] == [0, 0, 0]
    assert report(record).count("<mark>good</mark>") == 6


def test_the_way_on_names_the_run_and_can_be_typed(data):
    record = read_record(data)
    record.samples = [dict(text="it's the\n[MASK] of $HOME.", word="end", fills=[])]
    text = report(record, markdown=True, run="mine")
    (line,) = re.findall(r"^    (cram predict .*)$", text, re.M)
    assert shlex.split(line) == ["cram", "predict", "mine", "it's the [MASK] of $HOME."]
    assert "    cram finetune mine labels.csv\n    cram glue mine --glue-dir" in text


def test_every_stored_record_makes_a_report(data):
    for path in sorted(Path(STORED).parents[1].glob("*.json")):
        if path.name.startswith("pocket"):
            assert report(RunRecord.read(path), markdown=True).startswith("# pocket")


def test_memory_and_energy_are_those_of_all_devices(data):
    four = measured(data, devices=4, peak_memory=10**9, peak_memory_total=3 * 10**9, joules=3.6e6)
    assert cells(four)["peak memory"] == "1.0 GB"
    assert cells(four)["peak memory of all 4 processes"] == "3.0 GB"
    assert cells(four)["energy of all devices"] == "1 kWh"
    one = measured(data, devices=1, peak_memory=10**9, peak_memory_total=10**9, joules=None)
    alone = cells(one)
    assert alone["peak memory"] == "1.0 GB" and not any("all" in name for name in alone)


def test_the_machine_of_a_report_has_driver_and_power_limit(data):
    other = copy.deepcopy(data)
    facts = dict(driver="580.1", cuda="13.0", triton="3.7.1", power_limit=350.0, devices=8)
    other["environment"] |= facts
    text = report(read_record(other), markdown=True)
    for name in ("driver", "power_limit", "devices"):
        assert f"| {name} | {facts[name]} |" in text


def without(*path):
    def change(data):
        for name in path[:-1]:
            data = data[name]
        del data[path[-1]]

    return change


def with_(value, *path):
    def change(data):
        for name in path[:-1]:
            data = data[name]
        data[path[-1]] = value

    return change


FIELDS = "key recipe budget seed corpus environment provenance pretraining results samples".split()
WRONG = {
    **{f"no {name}": (without(name), name) for name in FIELDS},
    **{f"{name} of another kind": (with_(1.5, name), name) for name in FIELDS},
    **{
        f"no pretraining.{n}": (without("pretraining", n), n)
        for n in ("curve", "heldout_loss", "spent", "shares", "mfu")
    },
    "no schema": (without("schema"), "schema None"),
    "older schema": (with_(1, "schema"), "schema 1; this version reads schema 2"),
    "newer schema": (with_(3, "schema"), "schema 3"),
    "unknown field": (with_(1, "colour"), "colour"),
    "corpus without files": (without("corpus", "files"), "files"),
    "rows without hash": (without("corpus", "files", "train", "sha256"), "sha256"),
    "loss no number": (with_("low", "pretraining", "heldout_loss"), "heldout_loss"),
    "no loss": (with_(None, "pretraining", "heldout_loss"), "heldout_loss"),
    "share no number": (with_("much", "pretraining", "mfu"), "mfu"),
    "result without scores": (without("results", 0, "scores"), "scores"),
    "another recipe": (with_(1.0, "recipe", "optimizer", "lr"), "key"),
    "another budget": (with_("24h", "budget"), "key"),
    "another key": (with_("0" * 64, "key"), "key"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_record_is_refused(wrong, data):
    change, word = wrong
    change(data)
    with pytest.raises(UserError, match=word) as error:
        read_record(data, "some.json")
    assert str(error.value).startswith("some.json: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", '"record"', "\x00"])
def test_file_that_is_no_record(text, tmp_path):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(UserError, match="record.json: (not a record|cannot be read).*put a good copy in its place"):
        RunRecord.read(tmp_path / "record.json")


def key(data: dict) -> str:
    return record_key(data["recipe"], data["budget"], data["seed"], data["corpus"])


DECIDES = {
    "recipe": with_(1.0, "recipe", "optimizer", "lr"),
    "recipe's name": with_("mine", "recipe", "name"),
    "budget": with_("24h", "budget"),
    "seed": with_(1, "seed"),
    "rows": with_("0" * 64, "corpus", "files", "train", "sha256"),
    "held-out rows": with_("0" * 64, "corpus", "files", "heldout", "sha256"),
}
DOES_NOT = {
    "machine": with_("another", "environment", "processor"),
    "versions of the text": with_(dict(python="3"), "corpus", "identity", "packages"),
    "timing of stages": with_(9.0, "corpus", "stages", 0, "seconds"),
    "timing of pretraining": with_(dict(step=1.0), "pretraining", "shares"),
    "speed": with_(1.0, "pretraining", "tokens_per_second"),
    "results": with_([], "results"),
    "order of fields": lambda data: data.update(recipe=dict(reversed(data["recipe"].items()))),
}


@pytest.mark.parametrize("change", DECIDES.values(), ids=DECIDES)
def test_key_changes_with_what_decides_a_run(change, data):
    other = copy.deepcopy(data)
    change(other)
    assert key(other) != key(data) == data["key"]


@pytest.mark.parametrize("change", DOES_NOT.values(), ids=DOES_NOT)
def test_key_stays_with_what_does_not(change, data):
    other = copy.deepcopy(data)
    change(other)
    assert key(other) == key(data)
    assert read_record(other).key == data["key"]


def other(data: dict) -> RunRecord:
    """The same run as another recipe, with a larger rate and better scores."""
    changed = copy.deepcopy(data)
    changed["recipe"]["optimizer"]["lr"] *= 2
    changed["recipe"]["name"] = "other"
    changed["key"] = key(changed)
    for result in changed["results"]:
        result["scores"] = {column: score + 0.05 for column, score in result["scores"].items()}
    return read_record(changed)


def test_report_of_two_says_what_differs_and_by_how_much(data):
    one, two = RunRecord.read(STORED), other(data)
    ((field, before, after),) = differences([one, two]).rows
    assert (field, after / before) == ("optimizer.lr", 2)
    found = {name: change for name, change in score_differences([one, two]).rows}
    assert set(found) == {*(c for r in data["results"] for c in r["scores"]), "mean"}
    assert all(change.startswith("+5.0") for change in found.values())
    text = report(one, two, markdown=True)
    assert "| optimizer.lr |" in text and "+5.0" in text and "## What differs" in text
    assert report(one, two).count("<img ") == 2  # the curves, by tokens and by seconds


def with_rows_drawn_again(init: str, **means: float) -> list[dict]:
    """Results of tasks with these scores, and replicates that vary by a point."""
    rng = np.random.default_rng(len(init))
    return [
        dict(task=task, init=init, seed=0, scores={task: mean}, replicates={task: rng.normal(mean, 0.01, 200).tolist()})
        for task, mean in means.items()
    ]


def test_a_model_is_compared_with_its_baselines_in_words():
    results = [
        *with_rows_drawn_again("counting", stsb=0.7, rte=0.55, cola=0.12),
        *with_rows_drawn_again("random", stsb=0.5, rte=0.53, cola=0.0),
        *with_rows_drawn_again("pretrained", stsb=0.71, rte=0.55, cola=0.12),
    ]
    said = verdict(results)
    assert "scores 46.0 on average" in said
    assert "not clearly different from a bag of words" in said and "11.7 points above the same model" in said


def test_lines_that_lack_a_task_have_no_number_that_is_none(data):
    """Where the model, its baselines and the model without pretraining were not scored on the same tasks."""
    results = [
        *with_rows_drawn_again("counting", stsb=0.7, rte=0.55, cola=0.12),
        *with_rows_drawn_again("random", rte=0.53),
        *with_rows_drawn_again("pretrained", stsb=0.3, rte=0.55),
    ]
    record = replace(read_record(data), results=results)
    assert ("42.5", "mean score of 2 GLUE tasks") in key_numbers(record).rows
    said = verdict(results)
    assert "scores 42.5 on average" in said and "20.0 points below a bag of words" in said
    assert "without pretraining on 1 of the tasks" in said
    assert "nan" not in said + report(record, markdown=True)
    assert verdict([*with_rows_drawn_again("counting", stsb=0.7)]) == ""


def test_report_of_three_and_of_the_same_run_twice(data):
    one, two = RunRecord.read(STORED), other(data)
    assert len(differences([one, two, one]).head) == 4
    assert differences([one, one]).rows == []
    assert "What differs" not in report(one, one) and "beside" in report(one, one)


def glue(data: dict, columns: tuple) -> RunRecord:
    """The record with made-up scores in these columns."""
    results = []
    for column in columns:
        for init, score in (("random", 0.3), ("pretrained", 0.6)):
            result = dict(task=column, init=init, seed=0, scores={column: score})
            results.append(result | dict(intervals={column: [score - 0.1, score + 0.1]}))
    return replace(read_record(data), results=results)


def test_papers_rows_stand_beside_glue_only(data):
    five = ("sst2", "stsb", "rte", "mrpc", "cola")
    rows = {row[0]: row[1:] for row in scores([glue(data, five)]).rows}
    assert scores([glue(data, five)]).head[-4:] == tuple(
        f"{name} (paper)" for name in ("no pretraining", "crammed v1", "crammed v2", "BERT-base")
    )
    assert rows["rte"][-4:] == ("47.3", "53.8", "58.5", "59.2")
    assert rows["mean of these 5"][-1] == f"{(91.9 + 86.7 + 59.2 + 89.3 + 56.5) / 5:.1f}"
    assert "5 of 9" in report(glue(data, five), markdown=True)
    nine = {row[0]: row[1:] for row in scores([glue(data, NINE)]).rows}
    assert nine["mean"][-3:] == ("78.6", "80.7", "80.9")
    for columns in (("order", "source"), ("order", "nothing")):
        record = glue(data, columns)
        assert "(paper)" not in report(record) + report(record, markdown=True)


def test_numbers_of_the_page_are_those_of_the_markdown(data):
    """One way of drawing: each row of each table is in both."""
    page, text = report(read_record(data)), report(read_record(data), markdown=True)
    rows = re.findall(r"<tr>\s*((?:<td[^>]*>.*?</td>)+)\s*</tr>", page)
    assert len(rows) > 20
    for row in rows:
        cells = [re.sub(r"</?small>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        assert "| " + " | ".join(plain(html.unescape(cell)) for cell in cells) + " |" in text


@pytest.mark.parametrize("names, below", [(["short"], False), (["s" * 80], True), ([f"run {i}" for i in range(9)], True)])
def test_a_long_legend_stands_below_the_curves(names, below):
    record = RunRecord.read(STORED)
    records = [replace(record, recipe=record.recipe | dict(name=name)) for name in names]
    ax = plot_curve(records)
    ax.figure.draw_without_rendering()
    assert bool(ax.figure.legends) == below and (ax.get_legend() is None) == below
    assert ax.get_window_extent().width > 0.7 * ax.figure.bbox.width
    for legend in ax.figure.legends:
        box = legend.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= ax.figure.bbox.width and box.y1 < ax.get_window_extent().y0
