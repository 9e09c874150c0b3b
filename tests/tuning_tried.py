"""Two ideas for faster fine-tuning, measured: records/bench/tuning_tried.json.

python tests/tuning_tried.py GLUE TOKENIZER.json [--rounds 7]

GLUE is a folder of tasks, and the tokenizer that of a run of `pocket`.

1. Encode a sentence once where it repeats in its batch. Which share of the sentences of a batch is a repetition?
2. Compile the model, once for each length to which batches are padded. How much faster is a step, in turns with the
   plain one, and after how many steps are the seconds of compiling won back?
"""

import argparse
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from tokenizers import Tokenizer

from cramming_nb.finetuning import FineTuner, padded_length
from cramming_nb.glue import load_glue
from cramming_nb.hardware import Device, Hardware
from cramming_nb.recipes import load_recipe

RECORD = Path(__file__).resolve().parents[1] / "records/bench/tuning_tried.json"


def repeated_share(tuner: FineTuner) -> float:
    """Of the sentences in the batches of a fine-tuning, the share that stood in the same batch already."""
    sentences = repeated = 0
    for batch in tuner.batches:
        found = Counter(tuple(view) for row in batch for view in tuner.train_ids[row])
        sentences += found.total()
        repeated += found.total() - len(found)
    return repeated / sentences


def seconds_of_step(tuner: FineTuner, batch: np.ndarray) -> float:
    """Seconds of one step of fine-tuning."""
    start = time.perf_counter()
    tuner.step(batch)
    return time.perf_counter() - start


class Dense(Device):
    """A CPU on which the gradient of an embedding is dense: torch's compiler cannot handle sparse ones."""

    sparse_embedding = False


def compiled_against_plain(plain: FineTuner, compiled: FineTuner, length: int, batch: np.ndarray, rounds: int) -> dict:
    """Median seconds of a step, plain and compiled, in turns, and the seconds of the first compiled step."""
    tuners = {"plain": plain, "compiled": compiled}
    seconds = {name: [] for name in tuners}
    for number in range(-1, rounds):  # the first does not count
        for name, tuner in tuners.items():
            taken = seconds_of_step(tuner, batch)
            if number < 0:
                first = taken  # in the end that of the compiled one
            else:
                seconds[name].append(taken)
    gain = median(seconds["plain"]) - median(seconds["compiled"])
    found = dict(length=length, compiling=first) | {name: median(values) for name, values in seconds.items()}
    return found | dict(steps_to_win_back=first / gain if gain > 0 else None)


def main(argv: list[str] | None = None):
    """Measure both, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("glue", help="folder of GLUE tasks")
    parser.add_argument("tokenizer", help="a tokenizer.json")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # as each of several fine-tunings at a time
    recipe, tokenizer, hardware = load_recipe("pocket"), Tokenizer.from_file(args.tokenizer), Hardware.detect()
    shares, steps, examples = {}, Counter(), {}
    for name, task in load_glue(args.glue).items():
        tuner = FineTuner(recipe.architecture, None, tokenizer, task, recipe.protocol, 0, hardware)
        shares[name] = repeated_share(tuner)
        for batch in tuner.batches:
            length = padded_length([tuner.train_ids[row] for row in batch], tuner.device, tuner.max_length)
            steps[name, length] += 1
            examples.setdefault((name, length), batch)
        if name == "stsb":
            pairs, stsb = tuner, task
    lengths = sorted(length for name, length in steps if name == "stsb")
    chosen = [lengths[round(part * (len(lengths) - 1))] for part in (0.2, 0.4, 0.6)]
    dense = replace(hardware, device=Dense())
    compiled = FineTuner(recipe.architecture, None, tokenizer, stsb, recipe.protocol, 0, dense)
    compiled.model = torch.compile(compiled.model, dynamic=False)
    found = [compiled_against_plain(pairs, compiled, n, examples["stsb", n], args.rounds) for n in chosen]
    for entry in found:
        entry["steps_of_this_length"] = steps["stsb", entry["length"]]
    result = dict(
        repeated=shares,
        task_compiled="stsb",
        lengths={name: len([1 for of, _ in steps if of == name]) for name in shares},
        steps={name: sum(count for (of, _), count in steps.items() if of == name) for name in shares},
        compiled=found,
        machine=dict(name=hardware.name, dtype=str(hardware.dtype).removeprefix("torch."), threads=1),
    )
    RECORD.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
