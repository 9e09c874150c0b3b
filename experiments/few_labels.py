"""Does pretraining pay where labels are few? The five GLUE tasks with 100 and 1,000 labelled rows: records/lab/few_labels.json.

python experiments/few_labels.py GLUE OUT.json RUN [RUN ...] [--draws 3]

Each draw takes some rows of the training set of each task. Four arms learn from them, and are scored on the whole
development set: the finished runs, the same models with random weights, counting words, and the same answer to every
row. The protocol is that of `pocket`, but for its epochs: with few labels they are those that the example of one field
(experiments/domain.py) chose on rows of its own. The command resumes.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from cramming_nb.app.counting import bag_of_words, same_answer
from cramming_nb.app.run import Run, hardware_of, load_run
from cramming_nb.engine.files import write_text
from cramming_nb.glue import TaskData, encoder_weights, finetune_task, for_task, load_glue
from cramming_nb.recipes import load_recipe

EPOCHS = {100: 45, 1000: 10}  # number of labels -> passes over them
# Written down before any of this was fine-tuned: mean of the five tasks, in percent.
PREDICTED = {"pretrained": {100: 46, 1000: 56}, "random": {100: 43, 1000: 53}, "counting": {100: 44, 1000: 54}}


def draw(data: TaskData, labels: int, number: int) -> TaskData:
    """The task with some of its training rows; a larger draw of a number holds the smaller one."""
    order = np.random.default_rng(number).permutation(len(data.train))
    return replace(data, train=[data.train[i] for i in order[:labels]], tests={})


class Learner:
    """A finished run that is fine-tuned, or the same model with random weights."""

    def __init__(self, run: Run):
        self.run, self.hardware = run, hardware_of(run)
        self.weights = encoder_weights(run.folder / "checkpoints")
        self.tokenizer = Tokenizer.from_file(str(run.folder / "export" / "tokenizer.json"))

    def score(self, tasks: dict[str, TaskData], name: str, init: str, labels: int, number: int) -> dict:
        """Fine-tune on a draw of a task; the result of `finetune_task`."""
        protocol = replace(load_recipe("pocket").protocol, epochs=EPOCHS[labels])
        weights = self.weights if init == "pretrained" else None
        seed = 1000 * self.run.seed + number
        return finetune_task(
            self.run.recipe.architecture,
            weights,
            self.tokenizer,
            draw(tasks[name], labels, number),
            for_task(protocol, name, tasks),
            seed,
            self.hardware,
        )


def main(argv: list[str] | None = None):
    """Read the command line, and do what the record lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("glue", help="folder of GLUE tasks")
    parser.add_argument("out", type=Path, help="a .json file")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--draws", type=int, default=3, help="draws of labelled rows")
    args = parser.parse_args(argv)
    tasks = load_glue(args.glue)
    record = json.loads(args.out.read_text()) if args.out.exists() else dict(predicted=PREDICTED, epochs=EPOCHS, scores=[])
    known = {tuple(row[key] for key in ("init", "seed", "draw", "labels", "task")) for row in record["scores"]}
    learners = {run.seed: Learner(run) for run in map(load_run, args.runs)}
    arms = [("constant", 0), ("counting", 0), *((init, seed) for seed in learners for init in ("pretrained", "random"))]
    todo = [
        (init, seed, number, labels, name)
        for labels in EPOCHS
        for number in range(args.draws)
        for init, seed in arms
        for name in tasks
    ]
    for job in tqdm([job for job in todo if job not in known], "few labels", unit="task"):
        init, seed, number, labels, name = job
        if init == "constant":
            result = same_answer(draw(tasks[name], labels, number))
        elif init == "counting":
            result = bag_of_words(draw(tasks[name], labels, number), number)
        else:
            result = learners[seed].score(tasks, name, init, labels, number)
        score = round(100 * result["scores"][name], 2)
        record["scores"].append(dict(init=init, seed=seed, draw=number, labels=labels, task=name, score=score))
        write_text(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
