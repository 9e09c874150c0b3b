"""First embeddings from counts, with other windows and other powers of the singular values: records/lab/counts_options.json.

python experiments/counts_options.py TEXT.jsonl.zst [--steps 244]

The recipe `pocket` trains on the same sequences with the same masks, from random vectors and from vectors of each kind,
one seed after the other. What was expected before the runs is in the record. 244 steps read a million tokens. What the
record has is not done again.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from muon_split import heldout_loss, take_steps
from sklearn.utils.extmath import randomized_svd

from cramming_nb.architecture import MaskedLM
from cramming_nb.corpus import Corpus, get_corpus
from cramming_nb.counts import count_pairs, positive_pmi, sampled_rows
from cramming_nb.optimizer import Optimizer
from cramming_nb.recipes import Recipe, load_recipe

RECORD = Path(__file__).resolve().parents[1] / "records/lab/counts_options.json"
KINDS = {  # tokens to each side that are the context, and the power of the singular values
    "random": None,
    "window 4": (4, 0.5),
    "window 1": (1, 0.5),
    "window 2": (2, 0.5),
    "window 8": (8, 0.5),
    "power 0": (4, 0.0),
    "power 1": (4, 1.0),
}
SETTINGS = {
    "recipe": "pocket",
    "seeds": [1, 2, 3],
    "predicted": {"random": 0.18, "window 1": 0.05, "window 2": 0.0, "window 8": 0.01, "power 0": 0.0, "power 1": 0.02},
}


def vectors_of(rows: np.ndarray, recipe: Recipe, window: int, power: float, seed: int) -> torch.Tensor:
    """As `count_vectors` makes them, [vocabulary, width], with another window or power."""
    arch = recipe.architecture
    counts = count_pairs(sampled_rows(rows), arch.vocab_size, window)
    left, values, _ = randomized_svd(positive_pmi(counts), arch.hidden_size, n_iter=2, random_state=0)
    turned, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((arch.hidden_size, arch.hidden_size)))
    vectors = left * values**power @ turned
    found = np.asarray(counts.sum(1)) > 0
    vectors[~found] = 0.0
    return torch.from_numpy(vectors * (arch.init_std / np.sqrt(np.square(vectors[found]).mean()))).float()


def train(recipe: Recipe, corpus: Corpus, seed: int, kind: tuple | None, steps: int) -> float:
    """The held-out loss after a run."""
    torch.manual_seed(seed)
    model = MaskedLM(replace(recipe.architecture, dropout=0.0), "explicit")
    if kind:
        vectors = vectors_of(corpus.rows, recipe, *kind, seed)
        seen = vectors.any(1)
        with torch.no_grad():
            model.encoder.embedding.weight[seen] = vectors[seen]
    take_steps(model, Optimizer(model, recipe.optimizer), recipe, corpus, seed, steps, recipe.optimizer.lr)
    return heldout_loss(model, recipe, corpus)


def main():
    """Train what the record lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=244)
    given = parser.parse_args()
    recipe = load_recipe(SETTINGS["recipe"])
    recipe = replace(recipe, architecture=replace(recipe.architecture, vocab_size=recipe.corpus.vocab_size))
    corpus = get_corpus(f"files:{given.text}", recipe.corpus, progress=False)
    about = SETTINGS | {"steps": given.steps, "text": given.text.name, "torch": torch.__version__}
    losses = json.loads(RECORD.read_text())["heldout_loss"] if RECORD.exists() else {name: [] for name in KINDS}
    for number, seed in enumerate(SETTINGS["seeds"]):
        for name, kind in KINDS.items():
            if len(losses[name]) > number:
                continue
            losses[name].append(round(train(recipe, corpus, seed, kind, given.steps), 4))
            print(seed, name, losses[name][-1], flush=True)
            RECORD.write_text(json.dumps(about | {"heldout_loss": losses}, indent=1) + "\n")


if __name__ == "__main__":
    main()
