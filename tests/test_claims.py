"""The table of claims: every row leads somewhere, rests on something, and says no more than its records."""

import json
import math
import re
from functools import cache
from pathlib import Path

import book
import pytest
import yaml

from cramming_nb.recipes import diff

ROOT = Path(__file__).resolve().parents[1]
NBS = ROOT / "nbs"
ROWS = yaml.safe_load((ROOT / "records/claims.yaml").read_text())
GROUPS = {"rules", "implementation", "data", "architecture", "objective", "training", "fine-tuning", "results"}
WITHOUT_RUNS = {"stated", "computed", "not built", "needs a GPU"}
WITH_RUNS = {"agrees with the paper", "contradicts the paper", "equivalent", "undecided", "not run yet"}
FIELDS = set("id group claim section numbers where expects expected tests beside verdict basis output note".split())

# The claims of the paper by section: rules, implementation, data, architecture, training, GLUE, ablation, longer, rest.
AUDIT = {"R": 6, "I": 3, "D": 17, "A": 32, "T": 18, "G": 10, "B": 2, "L": 1, "X": 1}


@cache
def cells(notebook: str, kind: str) -> list[dict]:
    """The cells of a notebook in nbs/ that are of a kind."""
    return [c for c in json.loads((NBS / notebook).read_text())["cells"] if c["cell_type"] == kind]


@cache
def anchors(notebook: str) -> set[str]:
    """What a link to a page may end with: labels of figures and sections, and headings as pandoc names them."""
    found = set()
    for cell in cells(notebook, "code"):
        found |= set(re.findall(r"(?m)^#\| label: (\S+)", "".join(cell["source"])))
    for cell in cells(notebook, "markdown"):
        for heading in re.findall(r"(?m)^#+ (.+)$", "".join(cell["source"])):
            given = re.search(r"\{#([\w-]+)", heading)
            words = re.sub(r"[^\w\s.-]", "", heading).strip().lower().replace(" ", "-")
            found.add(given[1] if given else words)
    return found


@cache
def printed(notebook: str) -> str:
    """What the code cells of a notebook have printed, and the labels of their figures."""
    parts = []
    for cell in cells(notebook, "code"):
        parts += re.findall(r"(?m)^#\| label: (\S+)", "".join(cell["source"]))
        for output in cell["outputs"]:
            texts = [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if k.startswith("text/"))]
            parts += ["".join(text) for text in texts]
    return "\n".join(parts)


@pytest.fixture(scope="module")
def page():
    """The names that the page of the lab defines: its cells are executed as a script."""
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(NBS / "lab")
        for cell in cells("lab/claims.ipynb", "code"):
            exec("".join(cell["source"]), names)
    plt.close("all")
    return names


def test_every_claim_of_the_audit_has_one_row():
    ids = [row["id"] for row in ROWS]
    assert len(ids) == len(set(ids))
    audited = {f"{letter}{n}" for letter, count in AUDIT.items() for n in range(1, count + 1)}
    assert audited - set(ids) == set()
    assert {re.match(r"[A-Z]\d+", i)[0] for i in ids} == audited  # others are parts of these: A12b


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_row_is_complete(row):
    assert set(row) <= FIELDS and row["group"] in GROUPS
    for field in ("claim", "section", "where"):
        assert isinstance(row[field], str) and row[field]
    if "tests" in row:
        assert row["expects"] in {"better", "no better", "worse", "no different"}
        assert row.get("verdict", "agrees with the paper") in WITH_RUNS and "basis" not in row
        assert "beside" not in row
    else:
        assert row["verdict"] in WITHOUT_RUNS and row["basis"]
    for number in row.get("numbers", []):
        assert number["says"] and number["from"] in {"v1", "model card", "code", "ICML version"}
        assert number.get("second_hand", False) == (number["from"] == "ICML version")
    assert "|" not in "".join(str(row.get(field, "")) for field in ("claim", "basis", "note"))  # ends a cell


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_link_leads_to_a_section(row):
    notebook, anchor = row["where"].split("#")
    assert (NBS / notebook).exists() and anchor in anchors(notebook), f"{row['where']}: there is no such place"


@pytest.mark.parametrize("row", [r for r in ROWS if r.get("verdict") == "computed"], ids=lambda row: row["id"])
def test_computed_row_has_its_calculation(row):
    assert row["output"] in printed(row["where"].split("#")[0])


def test_every_row_gets_a_verdict(page):
    assert set(page["judgements"]) == {row["id"] for row in ROWS}
    for row in ROWS:
        judged = page["judgements"][row["id"]]
        assert judged.verdict in (WITH_RUNS if "tests" in row else WITHOUT_RUNS)
        assert judged.verdict in page["COLORS"] and page["basis"](row)


def test_undecided_row_names_runs_that_would_decide_it(page):
    for row in ROWS:
        judged = page["judgements"][row["id"]]
        if judged.verdict in ("undecided", "not run yet"):
            assert (judged.verdict == "undecided") == bool(judged.difference)
            if judged.verdict == "undecided" and judged.difference.decides and not judged.decided_by:
                reason = "longer runs" if judged.plateau else "more seeds than we have planned"
                assert reason in page["basis"](row)
                continue
            assert judged.decided_by, f"{row['id']}: no list plans three seeds of both sides"
            assert ".yaml: " in page["basis"](row)


def test_arms_are_entries_of_the_lists_and_differ_from_their_baseline(page):
    recipes = {(e.name, e.budget): e.changed() for entries in page["lists"].values() for e in entries}
    for row in ROWS:
        beside = [row["beside"]] if "beside" in row else []
        for test in row.get("tests", []) + beside:
            assert set(test) <= {"arm", "baseline", "budget", "metric", "values"}
            if "values" in test:
                continue
            arm, baseline = page["as_list"](test["arm"]), page["as_list"](test["baseline"])
            budget = test.get("budget", "3m")
            missing = [name for name in arm + baseline if (name, budget) not in recipes]
            assert not missing, f"{row['id']}: no list has {missing} with budget {budget}"
            assert page["same_sequences"](arm, baseline, budget), row["id"]
            assert diff(recipes[arm[0], budget], recipes[baseline[0], budget]), row["id"]
            for names in (arm, baseline):  # several names are one recipe
                assert all(not diff(recipes[names[0], budget], recipes[name, budget]) for name in names)


def test_a_name_is_in_one_list(page):
    files = {}
    for file, entries in page["lists"].items():
        for entry in entries:
            assert files.setdefault(entry.name, file) == file


def put(page, monkeypatch, **losses):
    """Give entries of the lists invented losses: name -> {seed: nats}."""
    runs = {}
    some = page["runs"]["pocket", "3m"][0]
    for name, by_seed in losses.items():
        runs[name.replace("_", " "), "3m"] = [
            page["RunRecord"](**vars(some) | dict(seed=s, pretraining=some.pretraining | dict(heldout_loss=loss)))
            for s, loss in by_seed.items()
        ]
    for key, records in runs.items():
        monkeypatch.setitem(page["runs"], key, records)


def test_records_that_arrive_change_the_verdict(page, monkeypatch):
    row = next(row for row in ROWS if row["id"] == "T2") | {"verdict": "contradicts the paper"}
    for name in ("mask 15", "mask 40", "mask 0.15", "mask 0.4"):
        for budget in ("3m", "2Mtok"):
            monkeypatch.setitem(page["runs"], (name, budget), [])
    with pytest.raises(ValueError, match="says contradicts the paper, its records say not run yet"):
        page["judge"](row)
    put(page, monkeypatch, mask_40={1: 4.20}, mask_15={1: 4.26})
    with pytest.raises(ValueError, match="says contradicts the paper, its records say undecided"):
        page["judge"](row)
    low = {1: 4.20, 2: 4.21, 3: 4.19}
    put(page, monkeypatch, mask_40=low, mask_15={s: x + 0.06 + 0.002 * s for s, x in low.items()})
    assert page["judge"](row).verdict == "contradicts the paper"


def test_a_verdict_that_its_records_do_not_support_fails(page, monkeypatch):
    row = next(row for row in ROWS if row["id"] == "A19")
    assert page["judge"](row).verdict == row["verdict"] == "agrees with the paper"
    with pytest.raises(ValueError, match="its records say agrees with the paper"):
        page["judge"](row | {"verdict": "equivalent"})
    put(page, monkeypatch, pocket={0: 4.19, 1: 4.20})  # two seeds are not enough
    with pytest.raises(ValueError, match="its records say undecided"):
        page["judge"](row)


def test_a_comparison_beside_a_row_is_shown_and_gives_no_verdict(page):
    (row,) = [row for row in ROWS if row["id"] == "T3"]
    judged = page["judge"](row)
    assert judged.difference.decides and judged.difference.high < 0
    assert judged.verdict == row["verdict"] == "needs a GPU" and not book.found(judged)
    basis = page["basis"](row)
    assert "without a verdict: `mask 25` against `mask 15`: -0." in basis and "scored under masks of 25 %" in basis


BASE = {1: 4.20, 2: 4.21, 3: 4.19, 4: 4.22, 5: 4.18}


@pytest.mark.parametrize(
    "expects, gaps, word",
    [
        ("better", [-0.05, -0.06, -0.05, -0.04, -0.05], "agrees with the paper"),
        ("better", [0.05, 0.06, 0.05, 0.04, 0.05], "contradicts the paper"),
        ("no better", [0.05, 0.06, 0.05, 0.04, 0.05], "agrees with the paper"),
        ("no better", [-0.05, -0.06, -0.05, -0.04, -0.05], "contradicts the paper"),
        ("no different", [0.05, 0.06, 0.05, 0.04, 0.05], "contradicts the paper"),
        ("no different", [0.001, -0.002, 0.003, 0.0, -0.001], "equivalent"),
        ("better", [0.06, -0.05, 0.02, -0.04, 0.01], "undecided"),
    ],
)
def test_verdict_of_a_difference(page, expects, gaps, word):
    arm = {seed: loss + gap for (seed, loss), gap in zip(BASE.items(), gaps, strict=True)}
    found = page["difference"](arm, BASE)
    assert found.pairs == 5 and found.decides
    assert page["verdict"](expects, found.low, found.high) == word


def test_seeds_that_are_shared_are_paired(page):
    far_apart = {1: 4.0, 2: 4.5, 3: 5.0}
    paired = page["difference"]({s: x - 0.05 + 0.001 * s for s, x in far_apart.items()}, far_apart)
    apart = page["difference"]({s + 10: x - 0.05 + 0.001 * s for s, x in far_apart.items()}, far_apart)
    assert paired.high < 0 < apart.high and (paired.pairs, apart.pairs) == (3, 0)


def test_fewer_than_three_seeds_decide_nothing(page):
    found = page["difference"]({1: 3.0, 2: 3.0}, BASE, page["noise"])
    assert found.high < 0 and not found.decides


def test_a_slower_arm_loses_what_the_text_is_worth_that_it_does_not_read(page, monkeypatch):
    monkeypatch.setitem(page["ratios"], "dropout", [0.8, 0.81, 0.79])
    monkeypatch.setitem(page["text_is_worth"], "2Mtok", 0.5)
    gap = page["Difference"](0.01, 0.0, 0.02, 3, (3, 3))
    slower = page["at_equal_time"](gap, ["dropout"], ["as it is"], "2Mtok")
    assert slower.mean == pytest.approx(0.01 - 0.5 * math.log(0.8), abs=1e-4)
    assert slower.high - slower.low > gap.high - gap.low  # the speed is not known exactly
    assert (slower.mean - slower.low) == pytest.approx(slower.high - slower.mean)
    assert page["at_equal_time"](gap, ["as it is"], ["dropout"], "2Mtok").mean < 0
    same_steps = page["at_equal_time"](gap, ["adam epsilon 1e-6"], ["as it is"], "2Mtok")
    assert same_steps == gap
    assert page["at_equal_time"](gap, ["dropout"], ["as it is"], "7Mtok") is None  # no slope is known there


def test_every_change_has_a_prediction_and_its_speed(page):
    """Where a change that has run takes other steps, they have been timed; what takes the same steps has no record."""
    for name in page["changes"]:
        differs = page["step_fields"](page["recipes"][name, "2Mtok"]) != page["pace_of_baseline"]
        assert (name in page["ratios"]) == differs, name
    assert set(page["ratios"]) <= set(page["predicted"]) | {"deep pre-norm"}  # the baseline of a change
    lists = [page["lists"][file] for file in ("changes.yaml", "masks.yaml")]
    changed = {entry.name for entries in lists for entry in entries if entry.budget == "2Mtok"}
    assert changed - set(page["predicted"]) == {"as it is", "deep pre-norm"}
    for found in page["ratios"].values():
        assert len(found) >= 5 and all(0.1 < ratio < 10 for ratio in found)


def test_the_changes_that_other_pages_show_are_those_of_the_records(page):
    shown = json.loads((ROOT / "records/changes.json").read_text())
    assert shown == page["changes"], "python tools/book.py verdicts writes the file"
    assert all(found["pairs"] >= 3 for found in shown.values())
    verdicts = json.loads((ROOT / "records/verdicts.json").read_text())
    assert verdicts == {row["id"]: page["judgements"][row["id"]].verdict for row in ROWS if "tests" in row}


def test_losses_on_other_sequences_are_not_compared(page):
    with pytest.raises(AssertionError, match="other held-out sequences"):
        page["compare"](dict(arm="mask 40", baseline="pocket"))


@pytest.mark.parametrize("path", book.notebooks(), ids=lambda path: path.stem)
def test_a_chapter_quotes_the_verdict_that_the_records_support(page, path):
    for cell in cells(path.relative_to(NBS), "markdown"):
        text = "".join(cell["source"])
        assert text == book.quotations(text, page["judgements"]), "python tools/book.py verdicts mends this"


def test_stale_quotations_are_brought_up_to_date(page):
    judged = {claim: page["judgements"][claim] for claim in ("A19", "T3", "T7")}
    links = {claim: f"(lab/claims.ipynb#claim-{claim})" for claim in judged}
    stale = (
        f"[undecided]{links['A19']}, [agrees with the paper]{links['T7']} (−0.100 nats, 95 % −0.200 to −0.050), "
        f"[agrees with the paper]{links['T3']} (−0.136 nats, 95 % −0.144 to −0.128), [T3]{links['T3']}"
    )
    assert book.quotations(stale, judged) == (
        f"[{judged['A19'].verdict}]{links['A19']}, "
        f"[{judged['T7'].verdict}]{links['T7']}{book.found(judged['T7'])}, "
        f"[needs a GPU]{links['T3']}, [T3]{links['T3']}"
    )


CHAPTERS = {"data", "architecture", "objective", "training", "fine-tuning"}


def test_every_claim_that_runs_can_decide_is_quoted_in_its_chapter():
    there = {path.name: book.claims_quoted(path) for path in book.notebooks()}
    silent = {}
    for row in ROWS:
        notebook = row["where"].split("#")[0]
        if row["group"] in CHAPTERS and "tests" in row and not notebook.startswith("lab/"):
            if row["id"] not in there[notebook]:
                silent.setdefault(notebook, []).append(row["id"])
    assert not silent
