"""What other programs cost a run on two cores: the record records/bench/busy.json.

python experiments/busy.py [--rounds N] [--seconds S]

`pocket` is pretrained on the documentation of Python in turns: with two threads, with two that sleep while they wait,
with one, and as a run with a budget in time chooses them; alone, beside one program that computes without a pause,
and beside two. The record holds tokens a second, by the number of programs. The machine should do nothing else.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from cramming_nb.app.records import environment
from cramming_nb.engine.hardware import Hardware
from cramming_nb.training import step_seconds

RECORD = Path(__file__).resolve().parents[1] / "records/bench/busy.json"
FIXED = "4000tok/s"  # a budget on a rated clock: the threads stay as they are
WAYS = {  # name: (environment, rate of the clock)
    "two": ({"OMP_NUM_THREADS": "2"}, FIXED),
    "two, asleep while they wait": ({"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}, FIXED),
    "one": ({"OMP_NUM_THREADS": "1"}, FIXED),
    "as a run chooses": ({"OMP_NUM_THREADS": "2"}, ""),
}


@contextmanager
def busy_programs(count: int):
    """So many programs that compute until the block ends."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def tokens_per_second(way: str, seconds: int, folder: Path, name: str) -> float:
    """The speed of the micro-batches and steps of one run."""
    environ, rate = WAYS[way]
    budget = f"{seconds}s@{rate}" if rate else f"{seconds}s"
    command = [sys.executable, "-m", "cramming_nb.app.cli", "pretrain", "pocket", "--source", "machine:python"]
    command += ["--budget", budget, "--name", name, "--data-dir", str(folder / "data")]
    done = subprocess.run(command, cwd=folder, env=os.environ | environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{way}: {done.stderr.strip().splitlines()[-1]}")
    found = json.loads((folder / "runs" / name / "pretraining.json").read_text())
    return found["spent"]["tokens"] / step_seconds(found["shares"])


def main():
    """Read the command line, measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=25)
    options = parser.parse_args()
    speeds = {way: [[], [], []] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        tokens_per_second("one", 2, Path(folder), "corpus")
        for number in range(options.rounds):
            for count in range(3):
                for at, way in enumerate(WAYS):
                    with busy_programs(count):
                        speed = tokens_per_second(way, options.seconds, Path(folder), f"{number}-{count}-{at}")
                    speeds[way][count].append(round(speed))
                    print(count, way, round(speed), flush=True)
    record = dict(environment=environment(Hardware.detect()), tokens_per_second=speeds)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
