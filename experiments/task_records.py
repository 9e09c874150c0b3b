"""Scores of finished runs on training rows that were held back: frozen on five GLUE tasks, and fine-tuned on STS-B.

python experiments/task_records.py OUT.json RUN [RUN ...] --glue-dir GLUE [--how frozen tuned]

A fifth of each task's training rows is scored, and at most 6,000 of the others are learned from. The development rows
are never read. STS-B is fine-tuned twice more: by the first token's state, which is what the paper's classifier reads,
and by batches of 32 at half the rate. What OUT.json has is not done again.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

from cramming_nb.app.frozen import at_most, encoder_to_read, score_frozen
from cramming_nb.app.run import Run, load_run, tokenizer_of
from cramming_nb.engine.hardware import Hardware
from cramming_nb.glue import TASKS, TaskData, encoder_weights, finetune_task, for_task, hold_back
from cramming_nb.tasks import Folder

FROZEN = ("cola", "sst2", "stsb", "rte", "mrpc")
MOST_ROWS = 6000
TUNED = {"tuned": {}, "first token": dict(pooling="first"), "batch 32": dict(batch_size=32, lr=1.5e-4)}


def held_back(folder: str, name: str) -> TaskData:
    """A task that is learned from and scored on training rows."""
    rows = Folder(folder).rows(TASKS[name], "train")
    return at_most(hold_back(TaskData(TASKS[name], rows, {}), 0.2), MOST_ROWS)


def scores_of(run: Run, how: str, data: TaskData, hardware: Hardware) -> dict:
    """The result of one task, `frozen` or fine-tuned as TUNED says."""
    arch, weights, tokenizer = run.recipe.architecture, encoder_weights(run.folder / "checkpoints"), tokenizer_of(run)
    if how == "frozen":
        encoder = encoder_to_read(arch, weights, hardware, 0)
        return score_frozen(data, encoder, tokenizer, hardware.device, together=False)["frozen"]
    protocol = for_task(replace(run.recipe.protocol, **TUNED[how]), data.task.name, {data.task.name: data})
    return finetune_task(arch, weights, tokenizer, data, protocol, run.seed, hardware)


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--glue-dir", required=True)
    parser.add_argument("--how", nargs="*", default=["frozen", *TUNED], choices=["frozen", *TUNED])
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    hardware, rows = Hardware.detect(), json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    done = {(row["run"], row["how"], row["task"]) for row in rows}
    jobs = [(how, name) for how in asked.how for name in (FROZEN if how == "frozen" else ("stsb",))]
    for how, name in jobs:
        data = held_back(asked.glue_dir, name)
        for folder in asked.runs:
            if (folder.name, how, name) in done:
                continue
            run = load_run(folder)
            result = scores_of(run, how, data, hardware)
            about = dict(run=folder.name, recipe=run.recipe.name, how=how, task=name, seed=run.seed, data=data.digest)
            rows.append(about | dict(score=round(100 * result["scores"][name], 2), seconds=round(result["seconds"])))
            write(asked.out, rows)
            print(rows[-1], flush=True)


def write(out: Path, rows: list[dict]):
    """The rows, and the scores of each recipe in the order of the seeds: `frozen` is the mean of the tasks."""
    seeds = sorted({row["seed"] for row in rows})
    stsb, frozen = {}, {}
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        own = [row for row in rows if row["recipe"] == recipe]
        for how in TUNED:
            scores = {row["seed"]: row["score"] for row in own if row["how"] == how}
            name = recipe if how == "tuned" else f"{recipe}, {how}"
            if set(scores) == set(seeds):
                stsb[name] = [scores[seed] for seed in seeds]
        of_seed = [[row["score"] for row in own if row["how"] == "frozen" and row["seed"] == seed] for seed in seeds]
        if all(len(scores) == len(FROZEN) for scores in of_seed):
            frozen[recipe] = [round(mean(scores), 3) for scores in of_seed]
    out.write_text(json.dumps(dict(seeds=seeds, stsb=stsb, frozen=frozen, rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
