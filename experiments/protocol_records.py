"""How our recipes fine-tune: scores on training rows that were held back.

python experiments/protocol_records.py GLUE OUT.json RUN [RUN ...]

Each finished run is fine-tuned on four tasks of GLUE (SST-2, the largest, is left out), once with each
protocol of TRIALS. The scores are of a tenth of the training rows, which are not trained on. The
development rows are never scored. The command resumes.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from cramming_nb.app.finetuning import evaluate
from cramming_nb.app.run import Run, hardware_of, load_run
from cramming_nb.glue import TASKS, TaskData, hold_back
from cramming_nb.tasks import Folder

TRIALS = {  # what a trial changes in the protocol of `pocket` as of version 0.1
    "joint": dict(pairs="joint"),
    "apart": dict(pairs="apart"),
    "both": dict(pairs="both"),
    "apart, rate 1e-4": dict(pairs="apart", lr=1e-4),
    "apart, rate 1e-3": dict(pairs="apart", lr=1e-3),
    "apart, ten epochs": dict(pairs="apart", epochs=10),
}
BASE = dict(pairs="joint", lr=3e-4, epochs=5)
PAIRS_ONLY = ("joint", "both")  # trials that differ from "apart" on sentence pairs only
LEFT_OUT = ("sst2",)


def held_back_tasks(folder: str, pairs_only: bool) -> dict[str, TaskData]:
    """The tasks of a folder, scored on a tenth of their training rows."""
    place = Folder(folder)
    tasks = {}
    for task in TASKS.values():
        wanted = task.pair or not pairs_only
        if wanted and task.name not in LEFT_OUT and place.has(task):
            tasks[task.name] = hold_back(TaskData(task, place.rows(task, "train"), {}))
    return tasks


def scores_of_trial(run: Run, trial: str, glue: str, out: Path) -> list[dict]:
    """The held-back scores of one run with one protocol, a row for each task."""
    results = evaluate(
        held_back_tasks(glue, trial in PAIRS_ONLY),
        run.recipe.architecture,
        run.folder / "checkpoints",
        str(run.folder / "tokenizer.json"),
        replace(run.recipe.protocol, **{**BASE, **TRIALS[trial]}),
        out.with_suffix("") / run.folder.name / trial.replace(", ", "-").replace(" ", "-"),
        hardware_of(run),
        range(run.seed, run.seed + 1),
        baseline=False,
    )
    rows = []
    for result in results:
        column, score = next(iter(result["scores"].items()))
        about = dict(run=run.folder.name, trial=trial, task=column)
        rows.append(about | dict(score=round(100 * score, 2), seconds=round(result["seconds"])))
    return rows


def main():
    """Read the command line, fine-tune, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("glue", help="folder of GLUE tasks")
    parser.add_argument("out", type=Path, help="the record, a JSON file")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--trials", nargs="+", default=list(TRIALS), choices=list(TRIALS), metavar="TRIAL")
    args = parser.parse_args()
    found = []
    for folder in args.runs:
        run = load_run(folder)
        for trial in args.trials:
            found += scores_of_trial(run, trial, args.glue, args.out)
    held = {
        name: sum(map(len, data.dev.values())) for name, data in held_back_tasks(args.glue, pairs_only=False).items()
    }
    args.out.write_text(json.dumps(dict(held_back_rows=held, scores=found), indent=1) + "\n")


if __name__ == "__main__":
    main()
