"""The cards of decisions agree with records, recipes and pages."""

import json
import re

import pytest
import yaml

pytest.importorskip("nbformat")
import book
import cards

from cramming_nb.recipes import RECIPES, flat

PAGES = {
    path.relative_to(book.NBS).with_suffix("").as_posix(): json.loads(path.read_text())["cells"]
    for path in book.notebooks()
}
CELLS = {page: ["".join(cell["source"]) for cell in found] for page, found in PAGES.items()}
named = pytest.mark.parametrize("name", cards.CARDS)


@pytest.mark.parametrize("page", CELLS)
def test_pages_show_what_the_file_says(page):
    for source in CELLS[page]:
        assert source == cards.drawn(source), "python tools/cards.py brings the cards up to date"


@named
def test_a_card_is_shown_once_in_its_chapter(name):
    """Or told there, in a section that the file names."""
    card = cards.CARDS[name]
    places = [page for page, sources in CELLS.items() for s in sources if s.startswith(f"::: {{#card-{name} ")]
    assert places == ([] if card.at else [card.chapter])
    assert not card.at or any(f"{{#{card.at}}}" in source for source in CELLS[card.chapter])


@named
def test_the_switch_is_what_the_paper_chose(name):
    card, paper = cards.CARDS[name], flat(RECIPES["crammed-v2"])
    assert set(card.switches) <= set(paper)
    chosen = {field: paper[field] for field in card.switches}
    assert (chosen == card.switches) != card.ours


LISTS = [yaml.safe_load(path.read_text()) for path in (cards.RECORDS / "lab").glob("*.yaml")]
FLIPPED = {entry["name"]: set(entry.get("set", {})) for entries in LISTS for entry in entries}


@named
def test_a_change_beside_a_card_flips_its_switch(name):
    card = cards.CARDS[name]
    assert set(card.changes) <= set(cards.CHANGES)
    for change in card.changes:
        assert FLIPPED[change] & set(card.switches), change


@named
def test_claims_of_a_card_have_a_verdict(name):
    assert all(cards.VERDICTS[claim] in book.VERDICTS for claim in cards.CARDS[name].claims)


@named
def test_a_card_is_short(name):
    words = re.sub(r"\]\([^)]*\)", "]", cards.draw(cards.CARDS[name])).split()
    assert len(words) <= 150, len(words)


def test_markers_say_what_recipes_and_records_say():
    assert cards.flops("architecture.activation=gelu") == "18 % more FLOPs"
    assert cards.flops("objective.mlm_probability=0.15") == "3 % fewer FLOPs"
    assert cards.flops("architecture.num_heads=1") == "as many FLOPs"
    assert cards.extra_weights("architecture.tie_embeddings=false") == "25.2 million more weights"
    percent = round(100 * cards.CHANGES["dropout"]["speed"] - 100)
    assert cards.speed("dropout") == f"{-percent} % slower"
    record = json.loads((cards.RECORDS / "lab/w1_mixing-3m-0.json").read_text())
    assert cards.loss("w1_mixing-3m") == f"{record['pretraining']['heldout_loss']:.2f} nats"
    with pytest.raises(KeyError):
        cards.filled("{price 3}")


def test_what_ended_on_the_plateau_shows_no_number():
    assert cards.CHANGES["plain sinusoids"]["plateau"] and cards.gap("plain sinusoids") is None
    assert "plain sinusoids: still on the plateau" in cards.measured(cards.CARDS["positions"])


def shown_worth(name: str) -> float | None:
    """What chapter 1 should say that a card is worth: the loss without its decision less that with it."""
    card = cards.CARDS[name]
    if not card.worth:
        found = [cards.gap(change)["mean"] for change in card.changes if cards.gap(change)]
        return max(found, key=abs, default=None)
    sides = {}
    for side, entry in card.worth.items():
        if entry in cards.CHANGES:
            sides[side] = cards.gap(entry)["mean"]
        else:
            record = json.loads((cards.RECORDS / f"lab/{entry}-0.json").read_text())
            sides[side] = record["pretraining"]["heldout_loss"]
    return sides.get("undone", 0) - sides.get("kept", 0)


def table_of_chapter_1(label: str) -> list[str]:
    """The rows of one of the two tables of decisions in chapter 1."""
    (table,) = [cell for cell in PAGES["01_budget"] if f"#| label: {label}" in "".join(cell["source"])]
    return "".join(table["outputs"][0]["data"]["text/markdown"]).splitlines()[2:]


def test_the_first_chapter_shows_all_cards_those_worth_most_first():
    lines = [*table_of_chapter_1("tbl-decisions"), *table_of_chapter_1("tbl-unmeasured")]
    by_link = {f"{card.chapter}.ipynb#{card.at or f'card-{name}'}": name for name, card in cards.CARDS.items()}
    order = []
    for line in lines:
        link, *numbers, symbols, _, _ = [cell.strip() for cell in line.split("|")[1:-1]]
        target = re.match(r"\[[^]]+\]\(([^)]*)\)", link)[1]
        name = by_link[target if ".ipynb" in target else f"01_budget.ipynb{target}"]
        expected = shown_worth(name)
        if expected is not None:
            assert [number.strip("()") for number in numbers] == [cards.signed(expected)], name
        else:
            assert numbers in ([], ["plateau"]), name
        assert symbols == " ".join(cards.symbol(claim) for claim in cards.CARDS[name].claims), name
        order.append(name)
    assert sorted(order) == sorted(cards.CARDS)
    worth = [found for name in order if (found := shown_worth(name)) is not None]
    assert worth == sorted(worth, reverse=True) and len(worth) >= 20
    assert [shown_worth(name) for name in order[: len(worth)]] == worth


@named
def test_an_overview_and_the_first_chapter_show_the_same_worth(name):
    card = cards.CARDS[name]
    (row,) = [line for line in cards.overview(card.chapter).splitlines() if f"(#card-{name})" in line]
    _, *numbers, _ = [cell.strip() for cell in row.split("|")[1:-1]]  # no column where none is known
    number, worth = "".join(numbers), shown_worth(name)
    if worth is None:
        assert number in ("", "plateau")
    else:
        assert number == (f"({cards.signed(worth)})" if card.base else cards.signed(worth))


def test_a_symbol_for_every_verdict():
    assert set(book.DECIDED) <= set(cards.SYMBOLS) <= set(book.VERDICTS)
    assert len({cards.SYMBOLS[verdict] for verdict in (*book.DECIDED, "undecided")}) == 4


def test_a_change_of_a_record_changes_the_card(monkeypatch):
    before = cards.draw(cards.CARDS["gates"])
    found = cards.CHANGES["no gates"] | dict(equal_time=dict(mean=0.5, low=0.4, high=0.6))
    monkeypatch.setitem(cards.CHANGES, "no gates", found)
    assert "plain GELU +0.50 (+0.40 to +0.60)" in cards.draw(cards.CARDS["gates"]) != before
