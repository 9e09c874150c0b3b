"""The worked example of one field: how rows are split and drawn, and what its record and its page say."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

import domain
import nbformat
import numpy as np
import pytest
from scipy import stats

from cramming_nb.engine.errors import UserError

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "records" / "domain" / "package.json"
NEURAL = ("own", "general", "random")


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads(RECORD.read_text())


# Rows

WORDS = "red green blue tall short wide thin old new warm cold dry wet loud calm".split()


def sentence(rng: np.random.Generator, *subject: str) -> str:
    return " ".join([*subject, *rng.choice(WORDS, 14 - len(subject))]) + "."


def made_modules(count: int = 60) -> list[dict]:
    """Modules of two packages whose docstrings share no run of words but by chance."""
    rng, modules = np.random.default_rng(0), []
    for package, subject in (("torch", "tensor"), ("scipy", "signal")):
        for number in range(count):
            name = f"{package}/module_{number}.py"
            texts = [sentence(rng, subject, f"word{number}x{i}") + "\n\n" + sentence(rng) for i in range(8)]
            modules.append(dict(module=name, package=package, part=domain.part_of(name), texts=texts))
    return modules


@pytest.fixture
def small(monkeypatch):
    """The example with two packages, few rows and few settings."""
    packages = ("torch", "scipy")
    monkeypatch.setattr(domain, "PACKAGES", packages)
    monkeypatch.setattr(domain, "TASK", domain.replace(domain.TASK, labels=packages))
    monkeypatch.setattr(domain, "SCORED", 20)
    monkeypatch.setattr(domain, "HELD_BACK", 10)
    monkeypatch.setattr(domain, "LABELS", (4, 20))
    monkeypatch.setattr(domain, "EPOCHS", {4: (1, 2), 20: (1,)})
    monkeypatch.setattr(domain, "CHOICE_DRAWS", {4: 1, 20: 1})
    monkeypatch.setattr(domain, "STRENGTHS", (1.0, 10.0))
    monkeypatch.setattr(domain, "read_modules", made_modules)


def test_each_module_has_one_part_and_each_part_its_share():
    parts = [domain.part_of(f"package/module_{number}.py") for number in range(2000)]
    for part, share in {"scored": 0.15, "held back": 0.10, "labelled": 0.75}.items():
        assert parts.count(part) / len(parts) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    "text, found",
    [
        ("Return the sum of all\nvalues in a given array.\n\nMore.", "Return the sum of all values in a given array."),
        ("Too short.", None),
        ("word " * 61, None),
        ("Return the sum of all values in a numpy array.", None),
        ("Return the sum of all values with np.sum of it.", None),
        ("Return a copy of this array as a PyTorch tensor.", None),
    ],
)
def test_a_row_is_the_first_paragraph_unless_it_names_a_package(text, found):
    assert domain.first_paragraph(text) == found


def test_near_duplicates_are_not_scored(small):
    modules = made_modules()
    rows, counts = domain.make_rows(modules)
    copied, _, _ = rows["scored"][0]
    reader = next(m for m in modules if m["part"] == "labelled")
    reader["texts"].append(f"A longer text that has, in its middle, this: {copied} And it goes on.")
    fewer, fewer_counts = domain.make_rows(modules)
    assert copied not in [text for text, _, _ in fewer["scored"]]
    name = "scored rows without near-duplicates"
    assert fewer_counts[name] == counts[name] - 1


def test_draws_are_balanced_and_the_larger_holds_the_smaller(small):
    rows, _ = domain.make_rows(made_modules())
    few, many, other = (domain.draw(rows["labelled"], each, seed) for each, seed in ((2, 0), (9, 0), (9, 1)))
    assert set(few) < set(many) != set(other)
    assert [label for _, _, label in many] == [0] * 9 + [1] * 9
    with pytest.raises(UserError, match="torch: .* rows, 10000 are needed"):
        domain.draw(rows["labelled"], 10_000, 0)


# The script

@pytest.fixture
def arguments(small, tmp_path) -> list[str]:
    rng = np.random.default_rng(1)
    lines = [json.dumps(dict(text=" ".join(sentence(rng) for _ in range(20)))) for _ in range(200)]
    (tmp_path / "general.jsonl").write_text("\n".join(lines))
    return [str(tmp_path / "work"), str(tmp_path / "out.json"), "--general", f"files:{tmp_path}/general.jsonl",
            "--seeds", "1", "--draws", "2", "--budget", "4ktok"]


def test_the_script_makes_a_record_and_resumes(arguments, monkeypatch):
    recipe = domain.load_recipe("pocket")
    changes = {"corpus.vocab_size": 70, "corpus.filter_threshold": 0.0, "corpus.heldout": 0.1,
               "architecture.hidden_size": 16, "architecture.num_heads": 2, "architecture.ffn_size": 32,
               "architecture.classifier_size": 16, "schedule.batch_size": 8, "training.micro_batch_size": 8}
    monkeypatch.setattr(domain, "load_recipe", lambda name: domain.change(recipe, changes))
    domain.main(arguments)
    out = Path(arguments[1])
    found = json.loads(out.read_text())
    lines = [(r["arm"], r["labels"], r["draw"]) for r in found["results"]]
    arms = ("constant", "counting", *NEURAL)
    assert sorted(lines) == sorted((arm, n, draw) for arm in arms for n in (4, 20) for draw in (0, 1))
    assert {r["score"] for r in found["results"] if r["arm"] == "constant"} == {50.0}
    own = Path(arguments[0], "own.jsonl").read_text()
    rows, _ = domain.make_rows(made_modules())
    assert not any(text in own for text, _, _ in rows["scored"])

    removed = found["results"].pop()
    out.write_text(json.dumps(found))
    domain.main(arguments)
    assert json.loads(out.read_text())["results"][-1] == removed
    with pytest.raises(UserError, match="another budget"):
        domain.main([*arguments, "--budget", "8ktok"])


# The record and the page

def scores(record: dict, arm: str, labels: int) -> list[float]:
    of_draw = defaultdict(list)
    for result in record["results"]:
        if (result["arm"], result["labels"]) == (arm, labels):
            of_draw[result["draw"]].append(result["score"])
    return [mean(found) for _, found in sorted(of_draw.items())]


def test_the_record_is_complete_and_of_the_rules_in_the_script(record):
    assert record["predicted"] == {arm: {str(n): x for n, x in of.items()} for arm, of in domain.PREDICTED.items()}
    assert record["labels"] == list(domain.LABELS)
    assert (record["scored"], record["held_back"]) == (10 * domain.SCORED, 10 * domain.HELD_BACK)
    lines = {(r["arm"], r["seed"], r["labels"], r["draw"]) for r in record["results"]}
    assert len(lines) == len(record["results"])
    seeds = {run["seed"] for run in record["pretraining"]}
    draws = {result["draw"] for result in record["results"]}
    assert {(run["arm"], run["seed"]) for run in record["pretraining"]} == {
        (arm, seed) for arm in ("own", "general") for seed in seeds}
    for arm in domain.PREDICTED:
        for seed in seeds if arm in NEURAL else {0}:
            assert lines >= {(arm, seed, labels, draw) for labels in domain.LABELS for draw in draws}
    assert len({run["tokens"] for run in record["pretraining"]}) == 1  # all have the same budget


def test_settings_are_those_that_held_back_rows_chose(record):
    tried = defaultdict(lambda: defaultdict(list))
    for line in record["choice"]:
        assert line["draw"] >= domain.CHOICE_SEED
        tried[line["arm"], line["labels"]][line["setting"]].append(line["score"])
    for result in record["results"]:
        if result["arm"] != "constant":
            of = tried[result["arm"], result["labels"]]
            values = domain.STRENGTHS if result["arm"] == "counting" else domain.EPOCHS[result["labels"]]
            assert tuple(of) == values
            assert result["setting"] == max(values, key=lambda value: mean(of[value]))


def outputs() -> str:
    """What the cells of the page show, as text."""
    page = nbformat.read(ROOT / "nbs" / "13a_domain.ipynb", as_version=4)
    shown = [output.get("data", {}) for cell in page.cells for output in cell.get("outputs", [])]
    return "\n".join(data.get("text/markdown", data.get("text/plain", "")) for data in shown)


def test_the_page_shows_what_the_record_says(record):
    text = outputs()
    for arm in ("own", "general", "random", "counting"):
        for labels in record["labels"]:
            found = scores(record, arm, labels)
            spread = stats.t.ppf(0.975, len(found) - 1) * np.std(found, ddof=1) / len(found) ** 0.5
            cell = f"{mean(found):.1f} ({mean(found) - spread:.1f}–{mean(found) + spread:.1f})"
            assert f"{cell}, *{record['predicted'][arm][str(labels)]}*" in text
    for one, two in (("own", "counting"), ("own", "random"), ("own", "general")):
        for labels in record["labels"]:
            gaps = np.subtract(scores(record, one, labels), scores(record, two, labels))
            spread = stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / len(gaps) ** 0.5
            cell = f"{gaps.mean():+.1f} ({gaps.mean() - spread:+.1f} to {gaps.mean() + spread:+.1f})"
            assert cell.replace("-", "−") in text
