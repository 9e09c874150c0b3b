"""Each value of the files that commands read back, changed to another type or taken out: refused in one line, or used."""

import copy
import json
import math
import shutil

import pytest
from conftest import command, forget_pretraining
from test_bad_input import refused
from test_faults_of_entries import table_of

from cramming_nb.app import labels, records, run
from cramming_nb.app.export import classify, fill_mask, load_model
from cramming_nb.corpus import Corpus, filter_note
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.options import MISSING, NUMBER, require


def places(value: object, start: tuple = ()) -> list[tuple]:
    """Where the values in a value of JSON stand; of a list, that of its first entry."""
    keys = value if isinstance(value, dict) else range(min(1, len(value))) if isinstance(value, list) else ()
    return [place for key in keys for place in [(*start, key), *places(value[key], (*start, key))]]


def changed(data: dict, place: tuple, *new: object) -> dict:
    """A copy with a new value in a place, or with none."""
    data = copy.deepcopy(data)
    within = data
    for key in place[:-1]:
        within = within[key]
    if new:
        within[place[-1]] = new[0]
    else:
        del within[place[-1]]
    return data


def use_all(path, use, news=((), (None,), ({"a": None},))):
    """Use a file in all its changes; the number of those that are refused."""
    data = json.loads(path.read_text())
    count = 0
    for place in places(data):
        for new in news:
            path.write_text(json.dumps(changed(data, place, *new)))
            try:
                use()
            except UserError as error:
                assert path.name in str(error) and "\n" not in str(error), (place, new)
                count += 1
            except Exception as error:
                raise AssertionError(f"{place} {new}: {error!r}") from error
    return count


def test_a_record(finished, tmp_path, monkeypatch):
    """Its key is made to fit, as another version might write it."""
    path = tmp_path / "record.json"
    data = json.loads((finished.folder / "record.json").read_text())
    data["results"] = data["results"][:2]
    data["provenance"]["plan"] = dict(predicted=3.0, error=0.1)
    path.write_text(json.dumps(data))
    monkeypatch.setattr(records, "record_key", lambda *decisive: data["key"])
    news = [(None,), ({"a": None},), (0,), (10**400,)]
    use_all(path, lambda: run.summary(records.RunRecord.read(path)), [()])
    assert use_all(path, lambda: records.report(records.RunRecord.read(path), markdown=True), news) > 100


def test_a_run(a_copy):
    def use():
        found = run.load_run(a_copy.folder)
        run.provenance_of(found, run.read_run(a_copy.folder))

    assert use_all(a_copy.folder / "run.json", use) > 100


def test_an_export(a_copy):
    folder = a_copy.folder / "export"
    news = [(), (None,), ({"a": None},), (-1,), (math.nan,), ([],)]
    assert use_all(folder / "config.json", lambda: fill_mask(*load_model(folder), "the [MASK] of it"), news) > 100


def test_a_classifier(a_copy):
    """Its configuration, and what is found again of its making."""
    table = table_of(a_copy.home, ["ab"[i % 2] for i in range(60)])
    again = ("finetune", "first", table, "--epochs", "1")
    assert a_copy.command(*again).code == 0
    folder = a_copy.folder / "t"
    news = [(), (None,), ({"a": None},), (-1,), (math.nan,), ([],)]
    path = folder / "export" / "config.json"
    text = path.read_text()
    assert use_all(path, lambda: classify(folder / "export", ["the end of it"]), news) > 100
    path.write_text(text)

    def use():
        kept = labels.read_kept(folder / "results.json")
        labels.ClassifierResult(folder, **{name: kept[name] for name in kept if name not in ("key", "file")}).report()

    path = folder / "results.json"
    text = path.read_text()
    assert use_all(path, use, [(), (None,), ({"a": None},), ([],), ([3],)]) > 50
    path.write_text(text.replace('"init": "both"', '"init": "frozen"'))
    refused(a_copy.command(*again), "results.json: field 'results' has", "instead of constant, counting", "; delete it")


def test_a_corpus(tiny, finished, tmp_path):
    folder = shutil.copytree(next(tiny.cache.glob("corpus-*")), tmp_path / "corpus-0123456789abcdef")

    def use():
        corpus = Corpus(folder)
        corpus.verify()
        corpus._repr_markdown_()
        filter_note(corpus.manifest)

    assert use_all(folder / "manifest.json", use) > 30
    for damage in ("5", "[" * 100_000, '{"files": 5}', '{"identity": {}}'):
        (folder / "manifest.json").write_text(damage)
        assert folder.name in command("data", "list", "--data-dir", tmp_path, cwd=tmp_path).out


def test_a_run_that_began_keeps_its_place(a_copy):
    """What a run that is not pretrained lacks is no fault; where it is pretrained, it is one."""
    forget_pretraining(a_copy.folder)
    assert run.read_run(a_copy.folder)["pretraining"] is None
    path = a_copy.folder / "run.json"
    path.write_text(path.read_text().replace('"begun"', '"pretrained"'))
    refused(a_copy.command("glue", "first"), "run.json: field 'pretraining' is missing or no dict; put it back")


KINDS = dict(a=[[str, NUMBER]], b=({...: int, "c": str}, MISSING), d=(int, type(None)))


@pytest.mark.parametrize("fields, words", {
    '{"a": [["x", 1], ["y", 0.5]], "b": {"c": "z", "e": 1}, "d": null}': "",
    '{"a": [], "d": 1}': "",
    '{"a": [["x", 1], ["y"]], "d": 1}': "a: 2: field 2 is missing or no number",
    '{"a": [["x", 1, 2]], "d": 1}': "a: 1: field 3 is missing or no part of it",
    '{"a": [["x", true]], "d": 1}': "a: 1: field 2 is missing or no number",
    '{"a": [], "b": {"c": "z", "e": "z"}, "d": 1}': "b: field 'e' is missing or no int",
    '{"a": [], "b": {"e": 1}, "d": 1}': "b: field 'c' is missing or no str",
    '{"a": [], "b": null, "d": 1}': "field 'b' is missing or no dict",
    '{"a": []}': "field 'd' is missing or no int or null",
    '[1]': "field 'a' is missing or no list",
}.items())  # fmt: skip
def test_kinds(fields, words):
    if not words:
        require("file", json.loads(fields), KINDS)
        return
    with pytest.raises(UserError) as error:
        require("file", json.loads(fields), KINDS)
    assert str(error.value) == f"file: {words}"


@pytest.mark.parametrize("damage", ["null", "3", '"x"', "[]", "NaN", "[" * 100_000], ids=lambda damage: damage[:4])
def test_state_of_a_checkpoint_that_is_no_object(damage, a_copy):
    """As if it were cut off: the checkpoint before it is taken."""
    newest = sorted((a_copy.folder / "checkpoints").glob("step-*"))[-1]
    (newest / "state.json").write_text(damage)
    done = a_copy.command("predict", "first", "the [MASK] of it")
    assert done.code == 0 and "%" in done.out
