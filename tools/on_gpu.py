"""A day on a GPU: everything that needs one, in one command that can be given again.

python tools/on_gpu.py OUT --text TEXT.jsonl.zst --glue-dir GLUE [--minutes 9]

It does, in this order: build the text's rows; run the tests marked gpu; bench the training step at full size; pretrain
crammed-v2 and then our recipe sprint at full size for eight minutes each, compiled, in batches of at most 512
sequences, fine-tune each on the tasks of GLUE, and the same from random weights. The first pretraining is stopped by
SIGTERM on its way, and goes on.

It begins nothing that will not fit into `--minutes`. When they are over it stops what is running, with its work saved.
The same command then goes on from there, as long as the folder `--work` stays. OUT gets what is known so far, after
each part: at most eight flat files (summary.md, results.json, tests.txt, and of each recipe its record and its log).

Run it in the repository's root. It needs torch, numpy, safetensors, tokenizers, tqdm, pyyaml, joblib, matplotlib,
pyarrow, scikit-learn and scipy, and for parts of it transformers (two baselines of the bench, the export) and pytest
(the tests). It does without an installed package, datasets, tyro and nvidia-ml-py; without the last there is no energy
in the records.
"""

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NEEDED = "torch numpy safetensors tokenizers tqdm yaml joblib matplotlib pyarrow sklearn scipy".split()
LEAST = dict(text=30, tests=90, bench=300, run=90)  # seconds that should be left to begin a part
STOPPED = 128 + signal.SIGTERM  # what a process returns that was asked to stop, and saved its work
GRACE = 45  # seconds that a process has to save its work
MOST_SEQUENCES = 512  # in a batch: larger ones leave too few steps in minutes


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for what comes back")
    parser.add_argument("--text", required=True, help="a file, or a pattern of files, that the source `files:` reads")
    parser.add_argument("--glue-dir", type=Path, help="GLUE tasks; without it, probe tasks")
    parser.add_argument("--minutes", type=float, default=9.0, help="when to stop")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/on_gpu"), help="folder for rows, checkpoints and results"
    )
    parser.add_argument("--recipes", nargs="*", default=["crammed-v2", "sprint"])
    parser.add_argument("--budget", default="8m", help="of each pretraining")
    parser.add_argument("--compile", default="always", help="training.compile of each recipe")
    parser.add_argument("--finetune-seeds", type=int, default=1)
    parser.add_argument("--size", default="full", help="of the training bench")
    parser.add_argument("--rounds", type=int, default=5, help="of the training bench")
    parser.add_argument("--rows", type=int, default=256, help="of the training bench; halved where memory runs out")
    parser.add_argument("--without-gpu", action="store_true", help="go on where PyTorch finds no GPU")
    parser.add_argument("--skip", nargs="*", default=[], choices=["tests", "bench", "kill"], help="parts to leave out")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # a process of its own does one part
    return parser.parse_args(argv)


# What the processes do


def run_of(a: argparse.Namespace, recipe: str):
    """The run of a recipe."""
    from cramming_nb.app.run import Run
    from cramming_nb.recipes import change, load_recipe

    found = load_recipe(recipe)
    changes = {"training.compile": a.compile}
    if found.schedule.batch_size > MOST_SEQUENCES:
        changes |= {"schedule.batch_size": MOST_SEQUENCES, "schedule.batch_ramp": 0.0}
    changed = change(found, changes)
    options = dict(glue_dir=a.glue_dir, finetune_seeds=a.finetune_seeds, data_dir=a.work / "data", progress=False)
    return Run(changed, f"files:{a.text}", a.budget, 0, a.work / Path(recipe).stem, **options)


def build_text(a: argparse.Namespace) -> dict:
    """Build the rows of all recipes."""
    from cramming_nb.app.run import corpus_of
    from cramming_nb.glue import load_glue

    tasks = load_glue(a.glue_dir) if a.glue_dir else {}
    corpora = {Path(recipe).stem: corpus_of(run_of(a, recipe), tasks) for recipe in a.recipes}
    return {name: dict(rows=len(corpus.rows), tokens=math.prod(corpus.rows.shape)) for name, corpus in corpora.items()}


def bench(a: argparse.Namespace) -> dict:
    """Our training step and the baselines, in turns."""
    from cramming_nb.engine.errors import UserError
    from cramming_nb.lab.bench import bench_table, bench_train

    rows, result = a.rows, None
    while result is None:
        try:
            result = bench_train(a.size, a.rounds, rows, progress=False)
        except UserError as error:
            if "out of memory" not in str(error) or rows < 2:
                raise
            rows //= 2
            print(f"out of memory; the bench goes on with {rows} sequences at a time", flush=True)
    print(bench_table(result), flush=True)
    return result


def train_and_tune(a: argparse.Namespace, recipe: str) -> dict:
    """A recipe's pretraining, fine-tuning and record."""
    from cramming_nb.app.run import execute, summary
    from cramming_nb.engine.checkpoint import Interrupted

    try:
        record = execute(run_of(a, recipe))
    except Interrupted as stop:
        sys.exit(128 + stop.signum)
    print(summary(record), flush=True)
    return dict(key=record.key)


def do_part(a: argparse.Namespace):
    """Do one part in this process, and leave its result in the work folder."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # pretraining has a handler of its own
    kind, _, recipe = a.part.partition(":")
    parts = dict(text=build_text, bench=bench)
    result = train_and_tune(a, recipe) if kind == "run" else parts[kind](a)
    write(part_file(a, a.part), result)


def part_file(a: argparse.Namespace, part: str) -> Path:
    """Where a part leaves its result."""
    return a.work / "results" / f"{part.replace(':', '-').replace('/', '_')}.json"


def write(path: Path, value: object):
    """Write JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".part").write_text(json.dumps(value, indent=1))
    path.with_suffix(".part").replace(path)


# The plan


class Day:
    """The parts, one after the other, until the time is over; knows what is done."""

    def __init__(self, a: argparse.Namespace):
        self.a, self.begun = a, time.monotonic()
        self.status = {}  # of each part: what came of it in this call
        self.state = a.work / "results" / "state.json"
        self.kept = json.loads(self.state.read_text()) if self.state.exists() else dict(seconds={}, kill=None)

    def left(self) -> float:
        """Seconds until this call should stop."""
        return 60 * self.a.minutes - (time.monotonic() - self.begun)

    def do(self, part: str, missing: str = ""):
        """Do a part, unless it is done, cannot be done, or will not fit."""
        if part_file(self.a, part).exists():
            self.status[part] = "done before"
            if json.loads(part_file(self.a, part).read_text()).get("exit_code"):
                self.status[part] = "failed before; its output says why"
        elif missing:
            self.status[part] = f"left out: {missing}"
        elif self.left() < LEAST[part.partition(":")[0]]:
            self.status[part] = "not begun: too little time is left; give the same command again"
        else:
            self.status[part] = "under way"
            self.collect()
            self.status[part] = self.begin(part)
        self.collect()

    def begin(self, part: str) -> str:
        """Do a part in a process of its own; says what came of it."""
        begun = time.monotonic()
        code = self.test() if part == "tests" else self.start(part)
        seconds = self.kept["seconds"]
        seconds[part] = seconds.get(part, 0.0) + time.monotonic() - begun
        write(self.state, self.kept)
        if code == STOPPED:
            return "stopped and saved; the same command goes on from there"
        return "done" if code == 0 else f"failed with exit code {code}; its output says why"

    def start(self, part: str) -> int:
        """Run this file for one part; where it is the first pretraining, stop it on its way and go on."""
        call = [sys.executable, __file__, *sys.argv[1:], "--part", part]
        if part == f"run:{self.a.recipes[0]}" and not self.kept["kill"] and "kill" not in self.a.skip:
            code = self.kill_on_its_way(call, self.a.work / Path(self.a.recipes[0]).stem / "log.jsonl")
            if code != STOPPED or self.left() < GRACE:
                return code
        return self.wait(subprocess.Popen(call, cwd=ROOT))

    def wait(self, process: subprocess.Popen) -> int:
        """The exit code of a process, which is stopped when the time is over."""
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(max(0.0, self.left()))
            return stop(process)
        finally:
            if process.poll() is None:  # this process is being ended itself
                stop(process)

    def kill_on_its_way(self, call: list[str], log: Path) -> int:
        """Stop a run by SIGTERM once a fifth of its budget is spent; returns its exit code, and keeps what was seen."""
        process = subprocess.Popen(call, cwd=ROOT)
        while process.poll() is None and spent(log) < 0.2 and self.left() > 0:
            time.sleep(0.1)
        if process.poll() is not None:
            return process.returncode
        begun = time.monotonic()
        code = stop(process)
        steps = [line["steps"] for line in lines(log) if "steps" in line]
        self.kept["kill"] = dict(
            fraction=spent(log), steps=max(steps, default=0), exit_code=code, seconds=time.monotonic() - begun
        )
        write(self.state, self.kept)
        return code

    def test(self) -> int:
        """The tests marked gpu; their output is kept."""
        path = self.a.work / "results" / "tests.txt"
        call = [sys.executable, "-m", "pytest", "-m", "gpu", "--durations=20", "tests/test_gpu.py"]
        with open(path, "w") as output:
            process = subprocess.Popen(call, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            code = self.wait(process)
        if code in (0, 1):  # all were run; 1 is pytest's code for tests that failed
            write(part_file(self.a, "tests"), dict(exit_code=code, last=path.read_text().strip().splitlines()[-1:]))
        return code

    # What comes back

    def collect(self):
        """Write to OUT all that is known."""
        out = self.a.out
        out.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            shutil.copy(self.a.work / "results" / "tests.txt", out)
        parts = {}
        for path in (self.a.work / "results").glob("*.json"):
            if path != self.state:
                parts[path.stem] = json.loads(path.read_text())
        for recipe in self.a.recipes:
            folder, name = self.a.work / Path(recipe).stem, Path(recipe).stem
            for file in ("record.json", "log.jsonl"):
                with contextlib.suppress(OSError):
                    shutil.copy(folder / file, out / f"{name}.{file}")
            parts[f"run-{name}"] = self.run_so_far(folder)
        result = dict(status=self.status, machine=machine(), parts=parts) | self.kept
        write(out / "results.json", result)
        (out / "summary.md").write_text(summary_of(result))

    def run_so_far(self, folder: Path) -> dict:
        """What is known of a run: its pretraining, or its last log line, and the scores that are there."""
        found = {}
        with contextlib.suppress(OSError, ValueError):
            found["pretraining"] = json.loads((folder / "pretraining.json").read_text())
        if log := lines(folder / "log.jsonl"):
            found["last"] = next((line for line in reversed(log) if "steps" in line), log[-1])
        for path in sorted((folder / "glue").glob("*.json")):
            with contextlib.suppress(ValueError, KeyError):
                result = json.loads(path.read_text())
                entry = {name: result[name] for name in ("task", "init", "seed", "scores", "seconds")}
                found.setdefault("scores", []).append(entry)
        return found


def stop(process: subprocess.Popen) -> int:
    """Ask a process to save its work and end; one that does not in time is killed."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def lines(log: Path) -> list[dict]:
    """The whole lines of a log."""
    found = []
    for line in log.read_bytes().splitlines() if log.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def spent(log: Path) -> float:
    """The fraction of its budget that a run has spent, by its log, after its first steps."""
    return max((line["fraction"] for line in lines(log) if line.get("steps")), default=0.0)


def machine() -> dict:
    """What this is, without loading torch in this process."""
    versions = {}
    for name in ("torch", "triton", "transformers", "tokenizers", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return dict(python=sys.version.split()[0], cores=os.cpu_count(), versions=versions)


def summary_of(result: dict) -> str:
    """The results for a reader, in Markdown."""
    text = ["# On a GPU", "", "| part | state | seconds so far |", "|---|---|--:|"]
    for part, state in result["status"].items():
        text.append(f"| {part} | {state} | {result['seconds'].get(part, 0):,.0f} |")
    parts = result["parts"]
    if kill := result["kill"]:
        text += ["", f"Stopped by SIGTERM at {kill['fraction']:.0%} of the budget, after {kill['steps']:,} steps; it took "
                 f"{kill['seconds']:.1f} s to save, exit code {kill['exit_code']}."]  # fmt: skip
    if "tests" in parts:
        text += ["", f"Tests: {' '.join(parts['tests']['last'])}"]
    if "bench" in parts:
        from cramming_nb.lab.bench import bench_table

        text += ["", "```", bench_table(parts["bench"]), "```"]
    for name, run in parts.items():
        if name.startswith("run-") and run:
            text += ["", f"## {name.removeprefix('run-')}", "", *about_run(run)]
    return "\n".join(text) + "\n"


def about_run(run: dict) -> list[str]:
    """A run so far, in lines of Markdown."""
    text = []
    if p := run.get("pretraining"):
        text.append(
            f"Held-out loss {p['heldout_loss']:.3f} nats after {p['spent']['tokens']:,} tokens and {p['spent']['steps']:,} "
            f"steps at {p['tokens_per_second']:,.0f} tokens/s; {'compiled' if p['compiled'] else 'not compiled'}, "
            f"{p['micro_batch_size']} sequences at a time, {p['peak_memory'] / 1e9:.1f} GB; MFU {p['mfu'] or float('nan'):.0%}; "
            f"lost {p['shares'].get('lost', 0):.1f} s."
        )
    elif last := run.get("last"):
        text.append(
            f"{last.get('fraction', 0):.0%} of the budget: {last['tokens']:,} tokens, training loss {last.get('loss')}."
        )
    if scores := run.get("scores"):
        text += ["", "| task | from random weights | pretrained | seconds |", "|---|--:|--:|--:|"]
        for task in dict.fromkeys(entry["task"] for entry in scores):
            cells = {}
            for init in ("random", "pretrained"):
                found = [e for e in scores if (e["task"], e["init"]) == (task, init)]
                cells[init] = ", ".join(f"{100 * s:.1f}" for e in found for s in e["scores"].values()) or "–"
            seconds = sum(e["seconds"] for e in scores if e["task"] == task)
            text.append(f"| {task} | {cells['random']} | {cells['pretrained']} | {seconds:,.0f} |")
    return text


def finds_gpu() -> bool:
    """Whether PyTorch finds a GPU; asked in a process of its own, which gives all memory back."""
    call = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.call([sys.executable, "-c", call]) == 0


def main() -> int:
    """Do as much of the day as fits."""
    a = arguments()
    if a.part:
        do_part(a)
        return 0
    if missing := [name for name in NEEDED if not find_spec(name)]:
        print(f"missing packages: {', '.join(missing)}", file=sys.stderr)
        return 2
    if not a.without_gpu and not finds_gpu():
        print("PyTorch finds no GPU: is its build the one for this GPU, and its driver loaded?", file=sys.stderr)
        return 2
    day = Day(a)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # what is running is ended by `wait`
    day.do("text")
    day.do("tests", "asked for" if "tests" in a.skip else "" if find_spec("pytest") else "pytest is missing")
    day.do("bench", "asked for" if "bench" in a.skip else "")
    for recipe in a.recipes:
        day.do(f"run:{recipe}")
    print((a.out / "summary.md").read_text())
    failed = [part for part, state in day.status.items() if state.startswith("failed")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
