"""How well models predict whole words, whatever their tokenizer: records/lab/text.json.

python experiments/word_loss.py OUT.json TEXT RUN [RUN ...] [--pairs BLIMP]

TEXT is a .jsonl file with the fields `text` and `source`, which no run has read (also as .zst). Losses per token of two
tokenizers cannot be compared, but those of words can. A word's loss is the sum over its pieces. Each piece is predicted
from the rest of its sentence and from the word's pieces before it, while it and those after it are masked (Kauf and
Ivanova 2023). A model that splits words into more pieces is told more about their length; that is not made up for.

The record has the mean loss of each run by kind of text, in nats a word, and with --pairs the share of BLiMP's minimal
pairs that it decides as people do. Runs that the record has are skipped.
"""

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path

import torch
from blimp import paradigms_in, preferred
from tqdm import tqdm

from cramming_nb.app.export import load_model
from cramming_nb.app.records import RunRecord
from cramming_nb.engine.sources import documents

KINDS = {"wikipedia": "encyclopedia", "books": "books", "dialogue": "dialogues"}  # begin of a source -> kind
SENTENCES = 300  # of each kind
LENGTHS = range(40, 200)  # of a sentence, in characters


def kind_of(source: str) -> str:
    """The kind of text of a source."""
    return next((kind for begin, kind in KINDS.items() if source.startswith(begin)), "other")


def sentences_by_kind(path: str) -> dict[str, list[str]]:
    """The same number of sentences of each kind of text, spread over the documents of a file."""
    of_kind = defaultdict(list)  # kind -> for each document, its sentences
    for document in documents(f"files:{path}", progress=False):
        found = re.split(r"(?<=[.!?])\s+", document["text"])
        plain = [s for s in found if len(s) in LENGTHS and s.isascii() and "\n" not in s]
        if plain:
            of_kind[kind_of(document["source"])].append(plain)
    chosen = {}
    for kind, groups in sorted(of_kind.items()):
        deepest = max(map(len, groups))
        in_turn = [group[i] for i in range(deepest) for group in groups if i < len(group)]  # one of each document
        chosen[kind] = list(dict.fromkeys(in_turn))[:SENTENCES]
    return chosen


@torch.no_grad()
def word_losses(model, tokenizer, sentence: str) -> tuple[float, int]:
    """The sum of the losses of a sentence's words in nats, and the number of its words."""
    encoded = tokenizer.encode(sentence, add_special_tokens=False)
    ids, words = torch.tensor(encoded.ids), torch.tensor(encoded.word_ids)
    places = torch.arange(len(ids))
    same_word = words[:, None] == words[None, :]  # [pieces, pieces]
    masked = same_word & (places[None, :] >= places[:, None])  # row i predicts piece i
    rows = torch.where(masked, tokenizer.token_to_id("[MASK]"), ids)
    logits = model(rows, places[:, None]).view(len(ids), -1)
    chances = logits.log_softmax(-1)[places, ids].double()
    return -chances.sum().item(), len(set(encoded.word_ids))


def scores(folder: Path, sentences: dict[str, list[str]], pairs: Path | None, first: int = 50) -> dict:
    """What a finished run scores: nats a word of each kind of text, and its share of minimal pairs."""
    record = RunRecord.read(folder / "record.json")
    model, tokenizer = load_model(folder / "export")
    found = dict(name=record.recipe["name"], seed=record.seed, budget=record.budget, words={})
    for kind, some in sentences.items():
        sums = [word_losses(model, tokenizer, sentence) for sentence in some]
        found["words"][kind] = round(sum(loss for loss, _ in sums) / sum(words for _, words in sums), 4)
    if pairs:
        shares = [sum(preferred(model, tokenizer, some)) / len(some) for some in paradigms_in(pairs, first).values()]
        found["pairs"] = round(100 * sum(shares) / len(shares), 2)
    return found


def main(argv: list[str] | None = None):
    """Read the command line, score the runs that the record lacks, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a .json file")
    parser.add_argument("text", help="a .jsonl file that no run has read")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--pairs", type=Path, help="folder of BLiMP's paradigms")
    args = parser.parse_args(argv)
    sentences = sentences_by_kind(args.text)
    known = json.loads(args.out.read_text()) if args.out.exists() else []
    for folder in tqdm(args.runs, "runs", unit="run"):
        record = RunRecord.read(folder / "record.json")
        if (record.recipe["name"], record.seed) not in {(row["name"], row["seed"]) for row in known}:
            known.append(scores(folder, sentences, args.pairs))
            args.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
