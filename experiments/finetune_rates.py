"""Does the best rate of fine-tuning depend on the optimizer and the masks of pretraining? STS-B on held-back rows.

python experiments/finetune_rates.py OUT.json --source TEXT --glue-dir GLUE [--work FOLDER]

`pocket` is pretrained on 6 million tokens as it is, and with Muon and 40 % masks. Each model is fine-tuned for two
epochs at three rates, on four fifths of the training rows, and scored on the others.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from cramming_nb.budget import Budget
from cramming_nb.corpus import get_corpus
from cramming_nb.engine.hardware import Hardware
from cramming_nb.glue import encoder_weights, finetune_task, for_task, hold_back, load_glue
from cramming_nb.recipes import change, load_recipe
from cramming_nb.training import Learner, pretrain

ARMS = {
    "adamw": {},
    "muon, 40 % masks": {"optimizer.name": "muon", "optimizer.lr": 6e-3, "objective.mlm_probability": 0.4},
}
RATES = (1e-4, 3e-4, 1e-3)


def one_arm(a: argparse.Namespace, arm: str) -> dict:
    """Pretrain one arm and fine-tune it at each rate."""
    r, hardware, tasks = change(load_recipe("pocket"), ARMS[arm]), Hardware.detect(), load_glue(a.glue_dir, ("stsb",))
    corpus = get_corpus(a.source, r.corpus, a.work / "data")
    parts = r.architecture, r.objective, r.optimizer, r.schedule, r.training
    learner, folder = Learner(corpus, *parts, hardware), a.work / arm.split(",")[0]
    outcome = pretrain(learner, Budget.parse("6Mtok"), folder)
    hidden = [weight for name, weight in learner.model.named_parameters() if "blocks.0" in name and weight.ndim == 2]
    size = (sum(w.detach().float().pow(2).sum() for w in hidden) / sum(w.numel() for w in hidden)).sqrt().item()
    weights, data, scores = encoder_weights(folder / "checkpoints"), hold_back(tasks["stsb"], 0.2), {}
    for rate in RATES:
        protocol = for_task(replace(r.protocol, lr=rate, epochs=2), "stsb", tasks)
        result = finetune_task(r.architecture, weights, corpus.tokenizer, data, protocol, 0, hardware)
        scores[f"{rate:g}"] = 100 * result["scores"]["stsb"]
        print(arm, f"{rate:g}", f"{scores[f'{rate:g}']:.1f}", flush=True)
    return dict(heldout_loss=outcome["heldout_loss"], weight_rms=size, stsb=scores)


def main(argv: list[str] | None = None):
    """Read the command line, and write a record after each arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a .json file")
    parser.add_argument("--source", required=True, help="a text, as `cram run` reads it")
    parser.add_argument("--glue-dir", type=Path, required=True, help="a folder with STS-B")
    parser.add_argument("--work", type=Path, default=Path("runs/rates"), help="folder for the corpus and checkpoints")
    a, found = parser.parse_args(argv), {}
    for arm in ARMS:
        found[arm] = one_arm(a, arm)
        a.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
