"""What a model predicts at each kind of hidden position: records/lab/hidden.json.

python experiments/mask_records.py RUN [RUN ...]

A position that is to be predicted shows [MASK], a random token, or its own. The record has, for each recipe and seed, the
mean held-out loss at each of the three kinds under the usual masks, and at all these positions when every one of them
shows [MASK]. The sequences and the positions are those of the run's own validation.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cramming_nb.app.export import load_model
from cramming_nb.app.records import RunRecord
from cramming_nb.app.run import corpus_of, load_run
from cramming_nb.objective import mask_rows, num_predicted
from cramming_nb.training import HELDOUT_MASKS, HELDOUT_SEED, heldout_rows

HIDDEN = Path(__file__).resolve().parents[1] / "records/lab/hidden.json"


def kinds(length: int) -> dict[str, slice]:
    """Which of the positions that `mask_rows` returns show what."""
    count = num_predicted(HELDOUT_MASKS, length)
    masked, random = round(0.8 * count), round(0.1 * count)
    return {
        "masked": slice(masked),
        "random": slice(masked, masked + random),
        "kept": slice(masked + random, count),
        "all": slice(count),
    }


@torch.no_grad()
def losses(model, vocab_size: int, batches: Iterable, keep_random: bool) -> Tensor:
    """The loss at each predicted position, in nats [sequences, positions]."""
    config, found = replace(HELDOUT_MASKS, keep_random=keep_random), []
    for batch in batches:
        ids, rows, epochs = map(torch.from_numpy, batch)
        seen, positions, labels, _ = mask_rows(ids, rows, epochs, HELDOUT_SEED, config, vocab_size)
        logits = model(seen, positions).reshape(labels.numel(), -1)
        found.append(cross_entropy(logits.float(), labels.flatten(), reduction="none").view_as(labels))
    return torch.cat(found)


def hidden_losses(folder: Path) -> tuple[RunRecord, dict[str, float]]:
    """A finished run's record, and its mean held-out loss at each kind of position, in nats."""
    run, record = load_run(folder), RunRecord.read(folder / "record.json")
    model, _ = load_model(folder / "export")
    corpus = corpus_of(run)
    rows = heldout_rows(corpus, run.recipe.training.heldout_rows)
    batches = [
        (corpus.heldout[part].astype(np.int64), part, np.zeros_like(part))
        for part in np.array_split(rows, -(-len(rows) // 32))
    ]
    vocab_size = corpus.tokenizer.get_vocab_size()
    usual, only_masks = (losses(model, vocab_size, batches, keep) for keep in (True, False))
    found = {kind: usual[:, of].mean().item() for kind, of in kinds(run.recipe.corpus.seq_length).items()}
    validated = record.pretraining["heldout_loss"]
    if abs(found["all"] - validated) > 0.01:  # the run's number format rounds otherwise
        raise SystemExit(f"{folder}: the loss is {found['all']:.3f} here, and was {validated:.3f} in the run")
    return record, found | {"only masks": only_masks.mean().item()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs of two million tokens")
    parser.add_argument("--out", type=Path, default=HIDDEN)
    args = parser.parse_args()
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    for folder in args.runs:
        record, found = hidden_losses(folder)
        of_recipe = known.setdefault(record.recipe["name"], {})
        of_recipe[str(record.seed)] = {kind: round(loss, 4) for kind, loss in found.items()}
        print(record.recipe["name"], record.seed, of_recipe[str(record.seed)])
        args.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
