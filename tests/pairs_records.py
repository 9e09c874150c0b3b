"""How our recipes read sentence pairs: scores on training rows that were held back.

python tests/pairs_records.py GLUE OUT.json RUN [RUN ...]

Each finished run is fine-tuned on the pair tasks of GLUE that the folder has, its pairs read joint,
apart and both ways. The scores are of a tenth of the training rows, which are not trained on. The
development rows are never scored. The command resumes.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from cramming_nb.finetuning import evaluate
from cramming_nb.glue import PAIR_VIEWS, TASKS, TaskData, hold_back
from cramming_nb.run import corpus_trained_on, hardware_of, load_run
from cramming_nb.tasks import Folder


def held_back_tasks(folder: str) -> dict[str, TaskData]:
    """The pair tasks of a folder, scored on a tenth of their training rows."""
    place = Folder(folder)
    tasks = {}
    for task in TASKS.values():
        if task.pair and place.has(task):
            tasks[task.name] = hold_back(TaskData(task, place.rows(task, "train"), {}))
    return tasks


def scores_of_run(folder: Path, tasks: dict[str, TaskData], out: Path) -> list[dict]:
    """The held-back scores of one run, for each task and each way to read its pairs."""
    run = load_run(folder)
    tokenizer = str(corpus_trained_on(run).folder / "tokenizer.json")
    rows = []
    for pairs in PAIR_VIEWS:
        protocol = replace(run.recipe.protocol, pairs=pairs)
        results = evaluate(tasks, run.recipe.architecture, run.folder / "checkpoints", tokenizer,
                           protocol, out.with_suffix("") / folder.name / pairs, hardware_of(run),
                           range(run.seed, run.seed + 1), baseline=False)
        for result in results:
            (column, score), = result["scores"].items()
            rows.append(dict(run=folder.name, task=column, pairs=pairs, score=round(100 * score, 2)))
    return rows


def main():
    """Read the command line, fine-tune, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("glue")
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+", type=Path)
    args = parser.parse_args()
    tasks = held_back_tasks(args.glue)
    found = [row for run in args.runs for row in scores_of_run(run, tasks, args.out)]
    held = {name: sum(map(len, data.dev.values())) for name, data in tasks.items()}
    args.out.write_text(json.dumps(dict(held_back_rows=held, scores=found), indent=1) + "\n")


if __name__ == "__main__":
    main()
