"""Scores of our fine-tuning beside those of the plain one, from the same checkpoint, with the same seeds.

python experiments/equal_scores.py OUT.json RUN --glue-dir GLUE [--tasks mrpc cola stsb] [--seeds 3] [--jobs 2]

Plain is what others do: float32, and batches of random rows. What OUT.json has is not done again.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import joblib
import numpy as np
import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from cramming_nb.app.run import load_run
from cramming_nb.engine.hardware import Hardware
from cramming_nb.glue import FineTuner, encoder_weights, for_task, load_glue


def fine_tuner(how: str, *given, seed: int) -> FineTuner:
    """What fine-tunes in the `plain` way, or as `ours` does."""
    arch, weights, tokenizer, data, protocol = given
    if how == "plain":
        protocol, hardware = replace(protocol, by_length=False), Hardware.detect(torch.float32)
    else:
        hardware = Hardware.detect()
    return FineTuner(arch, weights, tokenizer, data, protocol, seed, hardware)


def score(how: str, task: str, seed: int, run: Path, glue_dir: Path) -> dict:
    """What one fine-tuning scores on the task's first development set."""
    torch.set_num_threads(1)
    recipe, data = load_run(run).recipe, load_glue(glue_dir)
    tokenizer = Tokenizer.from_file(str(run / "export" / "tokenizer.json"))
    given = (
        recipe.architecture,
        encoder_weights(run / "checkpoints"),
        tokenizer,
        data[task],
        for_task(recipe.protocol, task, data),
    )
    begun = time.perf_counter()
    tuner = fine_tuner(how, *given, seed=seed)
    tuner.device.prepare(next(tuner.model.parameters()).dtype)
    tuner.train()
    rows = next(iter(data[task].dev.values()))
    found = data[task].task.metric(tuner.predict(rows), np.array([row[2] for row in rows]))
    return dict(how=how, task=task, seed=seed, score=found, seconds=time.perf_counter() - begun)


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a .json file")
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--glue-dir", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["mrpc", "cola", "stsb"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    a = parser.parse_args(argv)
    kept = json.loads(a.out.read_text()) if a.out.exists() else dict(run=a.run.name, scores=[])
    if kept["run"] != a.run.name:
        parser.error(f"{a.out} is of the run {kept['run']}; name another file")
    found = kept["scores"]
    known = {(f["how"], f["task"], f["seed"]) for f in found}
    wanted = [(how, task, seed) for seed in range(a.seeds) for task in a.tasks for how in ("plain", "ours")]
    work = [joblib.delayed(score)(*job, a.run, a.glue_dir) for job in wanted if job not in known]
    results = joblib.Parallel(a.jobs, return_as="generator_unordered")(work)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    for one in tqdm(results, "fine-tuning", total=len(work)):
        found.append(one)
        kept = dict(run=a.run.name, scores=sorted(found, key=lambda f: (f["task"], f["seed"], f["how"])))
        a.out.write_text(json.dumps(kept, indent=1) + "\n")
    for task in a.tasks:
        of = {how: [f["score"] for f in found if (f["how"], f["task"]) == (how, task)] for how in ("plain", "ours")}
        print(
            task,
            *(f"{how} {np.mean(scores):.1%} ({min(scores):.1%} to {max(scores):.1%})" for how, scores in of.items()),
        )


if __name__ == "__main__":
    main()
