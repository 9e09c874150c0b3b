"""How often a model prefers the grammatical one of two sentences: BLiMP (Warstadt et al. 2020), without fine-tuning.

python experiments/blimp.py OUT.json RUN/export --pairs BLIMP [--first 50]

BLIMP holds a .jsonl file a paradigm, with sentence_good, sentence_bad, field and linguistics_term. A sentence's score is
its pseudo-log-likelihood (Salazar et al. 2020): the sum, over its pieces, of the log probability of each where it alone
is hidden. Chance is one half.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

import torch
from tqdm import tqdm

from cramming_nb.app.export import load_model


@torch.no_grad()
def pseudo_likelihoods(model, tokenizer, sentences: list[str], rows: int = 512) -> list[float]:
    """The pseudo-log-likelihood of each sentence, in nats."""
    pieces = [torch.tensor(encoded.ids) for encoded in tokenizer.encode_batch(sentences, add_special_tokens=False)]
    mask, scores = tokenizer.token_to_id("[MASK]"), torch.zeros(len(sentences), dtype=torch.float64)
    for length in sorted({len(ids) for ids in pieces}):
        of = torch.tensor([i for i, ids in enumerate(pieces) if len(ids) == length])
        for some in of.split(max(1, rows // length)):
            ids = torch.stack([pieces[i] for i in some]).repeat_interleave(length, 0)  # [sentences x length, length]
            hidden = torch.arange(length).repeat(len(some))[:, None]
            logits = model(ids.scatter(1, hidden, mask), hidden).view(len(ids), -1)
            found = logits.log_softmax(-1).gather(1, ids.gather(1, hidden))
            scores[some] = found.view(len(some), length).sum(1).double()
    return scores.tolist()


def preferred(model, tokenizer, pairs: list[dict]) -> list[bool]:
    """Whether each pair's good sentence scores higher than its bad one."""
    good, bad = (
        pseudo_likelihoods(model, tokenizer, [pair[f"sentence_{which}"] for pair in pairs]) for which in ("good", "bad")
    )
    return [g > b for g, b in zip(good, bad, strict=True)]


def paradigms_in(folder: Path, first: int) -> dict[str, list[dict]]:
    """The first pairs of each paradigm in a folder, by the paradigm's name."""
    return {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()[:first]]
        for path in sorted(folder.glob("*.jsonl"))
    }


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a .json file")
    parser.add_argument("model", type=Path, help="an exported folder")
    parser.add_argument("--pairs", type=Path, required=True, help="folder of .jsonl files, one a paradigm")
    parser.add_argument("--first", type=int, default=50, help="pairs of each paradigm")
    a = parser.parse_args(argv)
    model, tokenizer = load_model(a.model)
    paradigms, terms = {}, defaultdict(list)
    for name, pairs in tqdm(paradigms_in(a.pairs, a.first).items(), "BLiMP", unit="paradigm"):
        paradigms[name] = mean(preferred(model, tokenizer, pairs))
        terms[pairs[0]["linguistics_term"]].append(paradigms[name])
    found = dict(
        mean=mean(paradigms.values()), terms={t: mean(v) for t, v in terms.items()}, paradigms=paradigms, first=a.first
    )
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['mean']:.1%} of {len(paradigms)} paradigms of {a.first} pairs")


if __name__ == "__main__":
    main()
