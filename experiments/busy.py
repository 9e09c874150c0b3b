"""What other programs cost a run on two cores: the record records/bench/busy.json.

python experiments/busy.py [--rounds N] [--seconds S]

`pocket` is pretrained on the documentation of Python in turns, each time in a process of its own: on two threads that
wait for each other in three ways, and on one; alone, beside one program that computes without a pause, and beside two.
The record holds tokens a second, by the number of programs. The machine should do nothing else.
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
from cramming_nb.app.run import read_run
from cramming_nb.engine.hardware import Hardware
from cramming_nb.engine.hooks import step_seconds

RECORD = Path(__file__).resolve().parents[1] / "records/bench/busy.json"
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # how a thread waits for another one, as libgomp reads it
WAYS = {  # what a run gets of these, and its threads
    "two threads, 300,000 turns": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "300000"},  # libgomp's default
    "two threads, 1,000 turns": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "1000"},  # the package's default
    "two threads, asleep at once": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
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
    """The speed of the steps of one run."""
    environ = {key: value for key, value in os.environ.items() if key not in WAITING} | WAYS[way]
    command = [sys.executable, "-m", "cramming_nb.app.cli", "pretrain", "pocket", "--source", "machine:python"]
    command += ["--budget", f"{seconds}s", "--name", name, "--data-dir", str(folder / "data")]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{way}: {done.stderr.strip().splitlines()[-1]}")
    found = read_run(folder / "runs" / name)["pretraining"]
    return found["spent"]["tokens"] / step_seconds(found["shares"])


def main():
    """Read the command line, measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=20)
    options = parser.parse_args()
    speeds = {way: [[], [], []] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        tokens_per_second("one thread", 2, Path(folder), "corpus")
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
