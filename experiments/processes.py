"""Is a run on two CPU cores faster as two processes of one thread? The record records/bench/processes.json.

python experiments/processes.py [--rounds N] [--budget 40s]

`pocket` is pretrained on the documentation of Python, as one process of two threads and as two processes of one
thread that exchange gradients, in turns. The record holds tokens a second of both for each round; the time of
compiling, validation and checkpoints is not counted. The machine should do nothing else.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cramming_nb.app.records import environment
from cramming_nb.app.run import read_run
from cramming_nb.engine.hardware import Hardware
from cramming_nb.engine.hooks import step_seconds

RECORD = Path(__file__).resolve().parents[1] / "records/bench/processes.json"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WAYS = {  # name: (threads of each process, how it is started)
    "one process of two threads": (2, []),
    "two processes of one thread": (1, TORCHRUN),
}


def tokens_per_second(way: str, budget: str, folder: Path, number: int) -> float:
    """The speed of the steps of one run; `number` is the name of its folder."""
    threads, start = WAYS[way]
    command = [sys.executable, *start, "-m", "cramming_nb.app.cli", "pretrain", "pocket", "--source", "machine:python"]
    command += ["--budget", budget, "--name", str(number), "--data-dir", str(folder / "data")]
    command += ["--set", "training.compile=always"]
    environ = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{way}: {done.stderr.strip().splitlines()[-1]}")
    found = read_run(folder / "runs" / str(number))["pretraining"]
    return found["spent"]["tokens"] / step_seconds(found["shares"])


def main():
    """Read the command line, measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", default="40s")
    options = parser.parse_args()
    speeds = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        names = itertools.count()
        tokens_per_second("one process of two threads", "5s", Path(folder), next(names))  # makes the corpus
        for _ in range(options.rounds):
            for way in WAYS:
                speed = tokens_per_second(way, options.budget, Path(folder), next(names))
                speeds[way].append(round(speed))
                print(way, round(speed), flush=True)
    record = dict(environment=environment(Hardware.detect()), tokens_per_second=speeds)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
