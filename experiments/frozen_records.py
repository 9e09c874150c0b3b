"""What the frozen protocol costs, and how it ranks models beside fine-tuning.

python experiments/frozen_records.py OUT.json RUN [RUN ...] --glue-dir GLUE [--tasks rte mrpc ...]

For each run and task: the frozen score, the processor seconds of encoding and of fitting on one thread, and the
fine-tuned score where the run's record has one. What OUT.json has is not done again.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from cramming_nb.app.frozen import MOST_ROWS, FrozenTask, at_most, decided, encoder_to_read, frozen_features, graded
from cramming_nb.app.run import load_run
from cramming_nb.engine.hardware import Hardware
from cramming_nb.glue import encode, encoder_weights, load_glue, score_predictions


def measure(run: Path, data, hardware: Hardware) -> dict:
    """The frozen score of one task, and the processor seconds that it took."""
    arch = load_run(run).recipe.architecture
    tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
    encoder = encoder_to_read(arch, encoder_weights(run / "checkpoints"), hardware, 0)
    begun, data = time.process_time(), at_most(data, MOST_ROWS)
    rows = {"train": data.train, **data.dev}
    features = {}
    for name, of_split in rows.items():
        encoded = encode(tokenizer, of_split, arch.max_length, pairs="both")
        features[name] = frozen_features(encoder, encoded, hardware.device)
    encoding, begun = time.process_time() - begun, time.process_time()
    task = FrozenTask(data, features.pop("train"))
    model = task.fit()
    predicted = {name: decided(data.task, task.classes, graded(model, of)) for name, of in features.items()}
    scores = score_predictions(data, predicted)["scores"]
    return dict(scores=scores, C=task.C, encoding=encoding, fitting=time.process_time() - begun)


def fine_tuned(run: Path, task: str) -> list[float]:
    """The scores of the run's own fine-tunings on a task; none where its record has none."""
    path = run / "record.json"
    results = json.loads(path.read_text())["results"] if path.exists() else []
    return [r["scores"][task] for r in results if (r["task"], r["init"]) == (task, "pretrained")]


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--glue-dir", type=Path, required=True)
    parser.add_argument("--tasks", nargs="*", default=())
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    hardware = Hardware.detect()
    found = json.loads(asked.out.read_text())["scores"] if asked.out.exists() else []
    done = {(row["run"], row["task"]) for row in found}
    for name, data in load_glue(asked.glue_dir, tuple(asked.tasks)).items():
        for run in asked.runs:
            if (run.name, name) in done:
                continue
            row = dict(run=run.name, task=name, fine_tuned=fine_tuned(run, name), **measure(run, data, hardware))
            found.append(row)
            asked.out.write_text(json.dumps(dict(machine=hardware.name, scores=found), indent=1) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
