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
    "as the paper": "●",
    "computed": "●",
    "opposite here": "○",
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


def loss(name: str) -> str:
    """The mean held-out loss of the runs of one entry of the lab."""
    records = [json.loads(path.read_text()) for path in sorted((RECORDS / "lab").glob(f"{name}-*.json"))]
    return f"{fmean(record['pretraining']['heldout_loss'] for record in records):.2f} nats"


def gap(name: str) -> dict[str, float] | None:
    """The difference in loss that a change made, at equal time where that is known; None on the plateau."""
    found = CHANGES[name]
    return None if found["plateau"] else found["equal_time"] or found["equal_text"]


def effect(name: str) -> str:
    """What a change did to the held-out loss, with its interval."""
    mean, low, high = (signed(gap(name)[end]) for end in ("mean", "low", "high"))
    return f"{mean} nats ({low} to {high})"


MARKERS = {"flops": flops, "weights": extra_weights, "speed": speed, "loss": loss, "effect": effect}


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
        origin = f" from {card.base}" if card.base else ""
        parts.append(f"Undone{origin}: {'; '.join(measured(card))}.")
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


def undone(card: Card) -> str:
    """The largest difference in loss that undoing a decision made, in nats; nothing if none is known.

    Where no change undoes it: what chapter 1 says that it is worth.
    """
    found = [one["mean"] for name in card.changes if (one := gap(name))]
    if not found and set(card.worth.values()) & set(CHANGES):
        sides = {side: gap(name)["mean"] for side, name in card.worth.items()}
        found = [sides.get("undone", 0) - sides.get("kept", 0)]
    return signed(max(found, key=abs)) if found else ""


def overview(chapter: str) -> str:
    """The cards of a chapter as a table, with a link to each."""
    rows = ["| decision | undone, nats | our verdicts |", "| --- | --: | --- |"]
    for card in CARDS.values():
        if card.chapter == chapter:
            symbols = " ".join(symbol(claim) for claim in card.claims)
            rows.append(f"| [{card.decision}](#card-{card.id}) | {undone(card)} | {symbols} |")
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
