"""How many training rows does the frozen protocol need? SST-2, scored on a tenth of its training rows.

python experiments/frozen_rows.py OUT.json RUN --glue-dir GLUE

A tenth of the training rows is held back. Of the others, more and more are learned from, drawn with two seeds. The
development rows are never read. `fitting` is in processor seconds of one thread, and so is `encoding`, of all rows.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from cramming_nb.app.frozen import FrozenTask, decided, encoder_to_read, frozen_features, graded
from cramming_nb.app.run import load_run, tokenizer_of
from cramming_nb.engine.hardware import Hardware
from cramming_nb.glue import TASKS, TaskData, encode, encoder_weights, hold_back
from cramming_nb.tasks import Folder

ROWS = (5_000, 10_000, 20_000, 60_000)


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--glue-dir", required=True)
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    run, hardware = load_run(asked.run), Hardware.detect()
    encoder = encoder_to_read(run.recipe.architecture, encoder_weights(asked.run / "checkpoints"), hardware, 0)
    task = TASKS["sst2"]
    data = hold_back(TaskData(task, Folder(asked.glue_dir).rows(task, "train"), {}))
    (held,) = data.dev.values()
    begun, features = time.process_time(), []
    for rows in (data.train, held):
        encoded = encode(tokenizer_of(run), rows, run.recipe.architecture.max_length)
        features.append(frozen_features(encoder, encoded, hardware.device))
    encoding, found = time.process_time() - begun, []
    for count in ROWS:
        for seed in (0, 1):
            drawn = np.random.default_rng(seed).permutation(len(data.train))[:count]
            begun = time.process_time()
            learned = FrozenTask(replace(data, train=[data.train[row] for row in drawn]), features[0][drawn])
            predicted = decided(task, learned.classes, graded(learned.fit(), features[1]))
            score = 100 * task.metric(predicted, np.array([label for *_, label in held]))
            row = dict(rows=len(drawn), seed=seed, score=round(score, 2), fitting=time.process_time() - begun)
            found.append(row)
            print(row, flush=True)
    about = dict(run=run.folder.name, machine=hardware.name, held_back=len(held), encoding=encoding)
    asked.out.write_text(json.dumps(about | dict(scores=found), indent=1) + "\n")


if __name__ == "__main__":
    main()
