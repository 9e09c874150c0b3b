"""Records outlive the version that wrote them: an old one is read, a wrong one refused, a key says what was run."""

import copy
import json
from pathlib import Path

import pytest

from cramming_nb.budget import UserError
from cramming_nb.records import RunRecord, record_key, report, validate

STORED = Path(__file__).parent / "data" / "record-v1.json"  # 20 seconds of `pocket`, by version 0.1.0
STORED_KEY = "b8f44ca3410e6dc6ec2fa4df976e815c867ab60e69ea40d00df840263fc73229"


@pytest.fixture
def data() -> dict:
    return json.loads(STORED.read_text())


def test_stored_record_is_read(data):
    record = RunRecord.read(STORED)
    assert record.schema == 1 and record.key == STORED_KEY
    assert record.gain == record.pretraining["unigram_entropy"] - record.pretraining["heldout_loss"]
    assert json.loads(record.to_json()) == data
    assert record.name in record._repr_markdown_()


def test_stored_record_still_makes_a_report():
    record = RunRecord.read(STORED)
    page = report(record)
    assert f"{record.pretraining['heldout_loss']:.3f}" in page and page.count("<img ") >= 3


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
    "newer schema": (with_(2, "schema"), "schema 2"),
    "unknown field": (with_(1, "colour"), "colour"),
    "corpus without files": (without("corpus", "files"), "files"),
    "rows without hash": (without("corpus", "files", "train", "sha256"), "sha256"),
    "loss no number": (with_("low", "pretraining", "heldout_loss"), "heldout_loss"),
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
        validate(data, "some.json")
    assert str(error.value).startswith("some.json: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", '"record"', "\x00"])
def test_file_that_is_no_record(text, tmp_path):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(UserError, match="not a record"):
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
    "machine": with_(dict(processor="another"), "environment"),
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
    assert validate(other).key == data["key"]
