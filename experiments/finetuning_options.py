"""Three options of fine-tuning that cost no pretraining, one at a time, on training rows of five GLUE tasks.

python experiments/finetuning_options.py OUT.json RUN --glue-dir GLUE

The run's model is fine-tuned with three seeds on a sample of each task's training rows, and scored on up to 1,000
others. The development rows are never read. What OUT.json has is not done again; `--show` prints the differences.

Expected before the first run: the decay over layers changes the mean of five tasks by less than a point, since there
are two layers; the exchanged sentences add about a point on STS-B and nothing on MRPC; twice the epochs add two points
on STS-B, one on MRPC, and nothing on RTE, where such a model guesses.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from cramming_nb.app.run import load_run, tokenizer_of
from cramming_nb.app.scores import compare
from cramming_nb.engine.hardware import Hardware
from cramming_nb.glue import TASKS, TaskData, encoder_weights, finetune_task, for_task
from cramming_nb.tasks import Folder

LEARNED = dict(stsb=1500, mrpc=600, cola=1500, sst2=1500, rte=300)  # rows of each task, drawn at random
MOST_SCORED = 1000
TRIALS = {  # what each changes in the recipe's protocol, and on which tasks
    "as it is": ({}, tuple(LEARNED)),
    "layer decay 0.8": (dict(layer_decay=0.8), tuple(LEARNED)),
    "exchanged sentences": (dict(swap=True), ("stsb", "mrpc")),
    "twice the epochs": (dict(epochs=10), ("stsb", "mrpc", "rte")),
}


def sample(folder: str, name: str) -> TaskData:
    """A task with some training rows to learn from, and others to score."""
    task = TASKS[name]
    rows = Folder(folder).rows(task, "train")
    drawn = [rows[number] for number in np.random.default_rng(0).permutation(len(rows))]
    learned = len(rows) // 2 if len(rows) < 2 * LEARNED[name] else LEARNED[name]
    return TaskData(task, drawn[:learned], {name: drawn[learned:][:MOST_SCORED]})


def show(results: list[dict]):
    """Each trial less the protocol as it is, in points, with 95 % intervals over rows and seeds."""
    for trial, (_, tasks) in TRIALS.items():
        ours, theirs = (
            [r for r in results if r["trial"] == wanted and r["task"] in tasks] for wanted in (trial, "as it is")
        )
        if ours and trial != "as it is":
            for column, numbers in compare(ours, theirs).items():
                print("{:20} {:5} {:+.1f} ({:+.1f} to {:+.1f})".format(trial, column, *numbers))


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--glue-dir", required=True)
    parser.add_argument("--tasks", nargs="+", default=list(LEARNED), choices=list(LEARNED))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--show", action="store_true", help="print the differences, and run nothing")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = json.loads(asked.out.read_text())["results"] if asked.out.exists() else []
    if asked.show:
        show(results)
        return
    run, hardware = load_run(asked.run), Hardware.detect()
    weights, done = encoder_weights(asked.run / "checkpoints"), {(r["trial"], r["task"], r["seed"]) for r in results}
    about = dict(run=run.folder.name, budget=run.budget, machine=hardware.name)
    for seed, name, trial in ((s, n, t) for s in range(asked.seeds) for n in asked.tasks for t in TRIALS):
        changes, tasks = TRIALS[trial]
        if name not in tasks or (trial, name, seed) in done:
            continue
        data = sample(asked.glue_dir, name)
        protocol = for_task(replace(run.recipe.protocol, **changes), name, {name: data})
        given = run.recipe.architecture, weights, tokenizer_of(run), data, protocol, seed, hardware
        what = dict(trial=trial, task=name, init="pretrained", seed=seed, data=data.digest)
        results.append(what | finetune_task(*given))
        asked.out.write_text(json.dumps(about | dict(results=results)) + "\n")
        print(trial, name, seed, results[-1]["scores"], f"{results[-1]['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
