"""The paper's decisions as cards: python tools/cards.py draws records/cards.yaml into the pages that show them.

A cell that begins with `::: {#card-ID .decision}` holds one card, `::: {#cards-CHAPTER .decisions}` an overview of a
chapter. The command writes the rest of such cells; it changes no other. Chapter 1 computes the table of all cards.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import book
import nbformat
import yaml

from cramming_nb.architecture import Architecture, flops_per_token, parameters_by_part
from cramming_nb.recipes import RECIPES, Recipe, change

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "records"
PAPER = RECIPES["crammed-v2"]
SYMBOLS = {  # what a verdict is on a card; the rest of them, such as `needs a GPU`, are –
    "agrees with the paper": "●",
    "computed": "■",
    "contradicts the paper": "○",
    "equivalent": "=",
    "undecided": "?",
}
PLACE = re.compile(r"::: \{#(cards?)-([\w-]+) \.decisions?\}")


@dataclass(frozen=True)
class Card:
    """One decision, as records/cards.yaml has it; the head of that file explains the fields."""

    id: str
    chapter: str
    decision: str
    bert: str
    paper: str
    section: str
    why: str
    cost: str
    says: str
    switch: str
    claims: list[str]
    changes: dict[str, str]
    base: str = ""
    note: str = ""
    by: str = ""
    at: str = ""
    ours: bool = False
    worth: dict[str, str] = field(default_factory=dict)
    switches: dict[str, object] = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "switches", settings(self.switch))


def settings(text: str) -> dict[str, object]:
    """The fields and values of FIELD=VALUE ..."""
    pairs = (word.split("=") for word in text.split())
    return {name: yaml.safe_load(value) for name, value in pairs}


CARDS = {card["id"]: Card(**card) for card in yaml.safe_load((RECORDS / "cards.yaml").read_text())}
CHANGES = json.loads((RECORDS / "changes.json").read_text())
CLAIMS = {row["id"]: row.get("verdict") for row in yaml.safe_load((RECORDS / "claims.yaml").read_text())}
VERDICTS = CLAIMS | json.loads((RECORDS / "verdicts.json").read_text())


def signed(number: float) -> str:
    """A number of nats with its sign, as it is printed."""
    text = f"{number:+.2f}".replace("-", "−")
    return "0.00" if text[1:] == "0.00" else text


def step_flops(recipe: Recipe) -> float:
    """FLOPs of a recipe for each token that it trains on."""
    return flops_per_token(recipe.architecture, recipe.objective.mlm_probability)


def weights(arch: Architecture) -> int:
    """Trained parameters."""
    return sum(parameters_by_part(arch).values())


def flops(text: str) -> str:
    """What a change of the paper's recipe does to the FLOPs of a step."""
    percent = round(100 * step_flops(change(PAPER, settings(text))) / step_flops(PAPER) - 100)
    return f"{abs(percent)} % {'more' if percent > 0 else 'fewer'} FLOPs" if percent else "as many FLOPs"


def extra_weights(text: str) -> str:
    """What a change of the paper's recipe does to the number of weights."""
    extra = weights(change(PAPER, settings(text)).architecture) - weights(PAPER.architecture)
    count = f"{abs(extra) / 1e6:.1f} million" if abs(extra) > 1e6 else f"{abs(extra):,}"
    return f"{count} {'more' if extra > 0 else 'fewer'} weights"


def speed(name: str) -> str:
    """The measured speed of a change's steps, against those of what it changes."""
    percent = round(100 * CHANGES[name]["speed"] - 100)
    return f"{abs(percent)} % {'faster' if percent > 0 else 'slower'}" if percent else "as fast"


def heldout(name: str) -> float:
    """The mean held-out loss of the runs of one entry of the lab."""
    records = [json.loads(path.read_text()) for path in sorted((RECORDS / "lab").glob(f"{name}-*.json"))]
    return fmean(record["pretraining"]["heldout_loss"] for record in records)


def loss(name: str) -> str:
    """The same, as it is printed."""
    return f"{heldout(name):.2f} nats"


def gap(name: str) -> dict[str, float] | None:
    """The difference in loss that a change made, at equal time where that is known; None on the plateau."""
    found = CHANGES[name]
    return None if found["plateau"] else found["equal_time"] or found["equal_text"]


def effect(name: str) -> str:
    """What a change did to the held-out loss, with its interval."""
    return with_interval(gap(name))


def at_equal_text(name: str) -> str:
    """The same after the same number of tokens, whatever the speed."""
    return with_interval(CHANGES[name]["equal_text"])


def with_interval(found: dict[str, float]) -> str:
    """A difference in loss, as it is printed."""
    mean, low, high = (signed(found[end]) for end in ("mean", "low", "high"))
    return f"{mean} nats ({low} to {high})"


MARKERS = {"flops": flops, "weights": extra_weights, "speed": speed, "loss": loss, "effect": effect, "text": at_equal_text}


def filled(text: str) -> str:
    """The text with its markers, such as {speed 1 head}, replaced by what they stand for."""
    return re.sub(r"\{(\w+) ([^}]+)\}", lambda marker: MARKERS[marker[1]](marker[2]), text)


def measured(card: Card) -> list[str]:
    """What undoing a decision did to the held-out loss, a phrase for each way of undoing it."""
    phrases = []
    for name, words in card.changes.items():
        if found := gap(name):
            mean, low, high = (signed(found[end]) for end in ("mean", "low", "high"))
            phrases.append(f"{words} {mean} ({low} to {high})")
        else:
            phrases.append(f"{words}: still on the plateau")
    return phrases


def symbol(claim: str) -> str:
    """What the records say to a claim of the paper, as one sign."""
    return SYMBOLS.get(VERDICTS[claim], "–")


def claims_page(chapter: str) -> str:
    """The page of claims, as a link from a chapter."""
    return "../" * chapter.count("/") + "lab/claims.ipynb"


def verdicts(card: Card) -> str:
    """The verdicts on a card's claims: a symbol each, with a link."""
    page = claims_page(card.chapter)
    return " ".join(f"[{symbol(claim)} {claim}]({page}#claim-{claim})" for claim in card.claims)


def evidence(card: Card) -> str:
    """The paper's number, ours at equal time, and the verdicts."""
    parts = [f"Paper: {card.says}"] if card.says else []
    if card.changes:
        origin = f", in {card.base}" if card.base else ""
        parts.append(f"If changed{origin}: {'; '.join(measured(card))}.")
    if card.note:
        parts.append(card.note)
    if card.claims:
        parts.append(verdicts(card))
    return filled(" ".join(parts))


def draw(card: Card) -> str:
    """A card as a table."""
    title = f"{card.decision} (ours)" if card.ours else card.decision
    switch = card.by or "`" + "`, `".join(card.switch.split()) + "`"
    paper = f"{card.paper} (section {card.section})" if card.section else card.paper
    return f"""::: {{#card-{card.id} .decision}}
| | {title} |
|---|---|
| **BERT** | {card.bert} |
| **The paper** | {paper} |
| **Why** | {card.why} |
| **Cost** | {filled(card.cost)} |
| **Evidence** | {evidence(card)} |
| **Switch** | {switch} |
:::"""


def level(name: str) -> float | None:
    """The held-out loss with a change less that of `pocket`; of an entry of the lab, its loss; None on the plateau."""
    if name not in CHANGES:
        return heldout(name)
    return found["mean"] if (found := gap(name)) else None


def worth(card: Card) -> float | None:
    """How far the loss rises when a decision is undone, in nats, as in the table of chapter 1; None if unknown."""
    if card.worth:
        undone, kept = (level(card.worth[side]) if side in card.worth else 0 for side in ("undone", "kept"))
        return undone - kept
    found = [effect for name in card.changes if (effect := level(name)) is not None]
    return max(found, key=abs, default=None)


def undone(card: Card) -> str:
    """What a decision is worth, as an overview shows it; in parentheses if another recipe than `pocket` shows it."""
    if worth(card) is None:
        return "plateau" if any(CHANGES[name]["plateau"] for name in card.changes) else ""
    return f"({signed(worth(card))})" if card.base else signed(worth(card))


def overview(chapter: str) -> str:
    """The cards of a chapter as a table, with a link to each; without the column of nats where none is known."""
    cards = [card for card in CARDS.values() if card.chapter == chapter]
    known = any(map(undone, cards))
    rows = ["| decision | undone, nats | our verdicts |", "| --- | --: | --- |"]
    if not known:
        rows = ["| decision | our verdicts |", "| --- | --- |"]
    for card in cards:
        nats = f"| {undone(card)} " if known else ""
        symbols = " ".join(symbol(claim) for claim in card.claims)
        rows.append(f"| [{card.decision}](#card-{card.id}) {nats}| {symbols} |")
    return "\n".join([f"::: {{#cards-{chapter} .decisions}}", *rows, ":::"])


def drawn(source: str) -> str:
    """What a cell should say: a card or an overview is drawn, any other cell is as it was."""
    place = PLACE.match(source)
    if not place:
        return source
    kind, name = place.groups()
    return draw(CARDS[name]) if kind == "card" else overview(name)


def main():
    """Bring the cards on every page up to date, and name the pages that changed."""
    for path in book.notebooks():
        notebook = nbformat.read(path, as_version=4)
        before = [cell.source for cell in notebook.cells]
        for cell in notebook.cells:
            cell.source = drawn(cell.source)
        if before != [cell.source for cell in notebook.cells]:
            nbformat.write(notebook, path)
            book.nbdev("clean", "--fname", path)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
