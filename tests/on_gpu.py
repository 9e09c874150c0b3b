"""One call on a machine with a GPU: the training bench at full size, then a crammed run with GLUE after it.

python tests/on_gpu.py OUT --text TEXT.jsonl.zst --glue-dir GLUE [--recipe crammed-v2] [--budget 5m] [--finetune-seeds 1]

Run it in the repository's root; it needs neither `datasets` nor `tyro`, nor an installed package. Rows are built there,
and only what is small comes back, as few flat files in OUT: bench-train.json, record.json, report.html, report.md and
log.jsonl. Each file is written as soon as it is known, so that a call that is cut off leaves what it had.
"""

import argparse
import json
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cramming_nb.bench import SIZES, bench_train, table
from cramming_nb.recipes import load_recipe
from cramming_nb.run import Run, execute, summary


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for what comes back")
    parser.add_argument("--text", required=True, help="a file that the source `files:` reads")
    parser.add_argument("--glue-dir", type=Path, help="GLUE tasks; without it, probe tasks")
    parser.add_argument("--work", type=Path, default=Path("on_gpu"), help="folder for rows and checkpoints")
    parser.add_argument("--recipe", default="crammed-v2")
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--finetune-seeds", type=int, default=1)
    parser.add_argument("--size", choices=SIZES, default="full", help="of the training bench")
    parser.add_argument("--rounds", type=int, default=5, help="of the training bench; 0 leaves it out")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a call that is cut off leaves what it had
    begun = time.perf_counter()
    if a.rounds:
        found = bench_train(a.size, a.rounds, progress=False)
        (a.out / "bench-train.json").write_text(json.dumps(found, indent=1))
        print(f"{table(found)}\n{time.perf_counter() - begun:.0f} s so far", flush=True)
    folder, options = (
        a.work / "run",
        dict(glue_dir=a.glue_dir, finetune_seeds=a.finetune_seeds, data_dir=a.work / "data"),
    )
    run = Run(load_recipe(a.recipe), f"files:{a.text}", a.budget, 0, folder, **options)
    try:
        print(summary(execute(run)), f"{time.perf_counter() - begun:.0f} s in all", sep="\n\n")
    finally:
        for name in ("record.json", "report.html", "report.md", "log.jsonl", "pretraining.json"):
            if (folder / name).exists():
                shutil.copy(folder / name, a.out)


if __name__ == "__main__":
    main()
