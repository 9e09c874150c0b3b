"""Do encoders trained to find replaced tokens serve tasks better? Scores on training rows that were held back.

python experiments/replaced_records.py GLUE OUT.json RUN [RUN ...] [--ways frozen tuned] [--corpus FOLDER]

Each finished run is scored on STS-B, CoLA and SST-2 (12,000 of its rows, drawn at random), once by linear models on
its frozen vectors and once fine-tuned with its recipe's protocol. A part of the training rows is held back and scored:
a fifth, and a third of SST-2's. The development rows are never read. With the folder of their corpus, the record also
says how well discriminators find replaced tokens in held-out text. What OUT.json has is not done again; the last line
printed is the run with the best mean.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from tokenizers import Tokenizer

from cramming_nb.app.frozen import at_most, encoder_to_read, score_frozen
from cramming_nb.app.run import Run, load_run
from cramming_nb.corpus import Corpus
from cramming_nb.engine.checkpoint import load_checkpoint
from cramming_nb.engine.hardware import Hardware
from cramming_nb.glue import TASKS, TaskData, encoder_weights, finetune_task, for_task, hold_back
from cramming_nb.objective import mask_rows
from cramming_nb.optimizer import evaluation_weights
from cramming_nb.replaced import ReplacedTokens, replacement_draws, sample_tokens
from cramming_nb.tasks import Folder
from cramming_nb.training import heldout_rows

HELD = dict(stsb=0.2, cola=0.2, sst2=1 / 3)  # share of the rows that is scored
MOST = 12_000  # rows of a task


def held_back_tasks(folder: str) -> dict[str, TaskData]:
    """The tasks, scored on a part of their training rows."""
    place, tasks = Folder(folder), {}
    for name, share in HELD.items():
        whole = TaskData(TASKS[name], place.rows(TASKS[name], "train"), {})
        tasks[name] = hold_back(at_most(whole, MOST), share)
    return tasks


def frozen(run: Run, tasks: dict[str, TaskData], name: str, hardware: Hardware) -> dict:
    """What a linear model scores on the vectors of the run's encoder."""
    encoder = encoder_to_read(run.recipe.architecture, encoder_weights(run.folder / "checkpoints"), hardware, 0)
    tokenizer = Tokenizer.from_file(str(run.folder / "tokenizer.json"))
    return score_frozen(tasks[name], encoder, tokenizer, hardware.device, together=False)["frozen"]


def tuned(run: Run, tasks: dict[str, TaskData], name: str, hardware: Hardware) -> dict:
    """What the run's encoder scores, fine-tuned with the protocol of its recipe; the seed is the run's."""
    weights = encoder_weights(run.folder / "checkpoints")
    tokenizer = Tokenizer.from_file(str(run.folder / "tokenizer.json"))
    protocol = for_task(run.recipe.protocol, name, tasks)
    return finetune_task(run.recipe.architecture, weights, tokenizer, tasks[name], protocol, run.seed, hardware)


WAYS = dict(frozen=frozen, tuned=tuned)


@torch.no_grad()
def discriminator(run: Run, corpus: Corpus, rows: int = 256) -> dict:
    """How well a run's discriminator finds what its generator replaced in held-out text: area under the ROC curve."""
    from sklearn.metrics import roc_auc_score

    model = ReplacedTokens(run.recipe.architecture).eval()
    found = load_checkpoint(run.folder / "checkpoints")
    model.load_state_dict(evaluation_weights(found[0]), strict=False)  # the shared table has one name of its two
    numbers = heldout_rows(corpus, rows)
    ids, rows = torch.from_numpy(corpus.heldout[numbers].astype(np.int64)), torch.from_numpy(numbers)
    masked, positions, _, _ = mask_rows(ids, rows, 0 * rows, 0, run.recipe.objective, run.recipe.corpus.vocab_size)
    draws = replacement_draws(rows, 0 * rows, 0, positions, ids.shape[1])
    sampled = sample_tokens(model.logits(model.hidden(masked, positions), positions), draws)
    seen = ids.scatter(1, positions, sampled)
    wrong = (seen != ids).flatten()
    area = roc_auc_score(wrong, model.detect(seen, ids).flatten())
    return dict(run=name_of(run), replaced=round(wrong.float().mean().item(), 4), area=round(area, 4))


def name_of(run: Run) -> str:
    """What a run is called in the record."""
    return f"{run.recipe.name}, seed {run.seed}"


def best(scores: list[dict]) -> str:
    """The run with the highest mean over ways and tasks."""
    of_run = defaultdict(list)
    for row in scores:
        of_run[row["run"]].append(row["score"])
    return max(of_run, key=lambda run: mean(of_run[run]))


def main(argv: list[str] | None = None):
    """Read the command line, score, and write the record row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("glue", help="folder of GLUE tasks")
    parser.add_argument("out", type=Path, help="the record, a JSON file")
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--corpus", type=Path, help="folder of the runs' corpus")
    asked = parser.parse_args(argv)
    hardware, tasks = Hardware.detect(torch.float32), held_back_tasks(asked.glue)
    record = json.loads(asked.out.read_text()) if asked.out.exists() else dict(rows={}, scores=[])
    found = record["scores"]
    done = {(row["run"], row["way"], row["task"]) for row in found}
    record["rows"] = {name: [len(data.train), len(next(iter(data.dev.values())))] for name, data in tasks.items()}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for way, name, folder in ((w, t, r) for w in asked.ways for t in tasks for r in asked.runs):
        run = load_run(folder)
        about = dict(run=name_of(run), way=way, task=name)
        if tuple(about.values()) in done:
            continue
        begun = time.process_time()
        score = next(iter(WAYS[way](run, tasks, name, hardware)["scores"].values()))
        found.append(about | dict(score=round(100 * score, 2), seconds=round(time.process_time() - begun)))
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
        print(found[-1], flush=True)
    if asked.corpus:
        replaced = [run for run in map(load_run, asked.runs) if run.recipe.objective.name == "rtd"]
        record["discriminators"] = [discriminator(run, Corpus(asked.corpus)) for run in replaced]
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
    print(best(found))


if __name__ == "__main__":
    main()
