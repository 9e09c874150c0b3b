"""Is the order of words known? The probe `order` of finished runs: records/lab/order_*.json.

python experiments/order_records.py OUT_FOLDER RUN [RUN ...] [--seeds 2]

Each run is fine-tuned on the probe made from its own text, with several seeds. OUT_FOLDER gets the record of each run
with these scores, under the name of its folder. The command resumes.
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from cramming_nb.app.finetuning import evaluate
from cramming_nb.app.records import RunRecord
from cramming_nb.app.run import hardware_of, load_run, tasks_of


def order_results(folder: Path, seeds: int) -> list[dict]:
    """The scores of a run on the probe of word order, one for each seed."""
    run = load_run(folder)
    return evaluate(
        {"order": tasks_of(run, {})["order"]},
        run.recipe.architecture,
        folder / "checkpoints",
        str(folder / "tokenizer.json"),
        run.recipe.protocol,
        folder / "order",
        hardware_of(run),
        range(seeds),
        baseline=False,
    )


def main(argv: list[str] | None = None):
    """Read the command line, fine-tune, and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of records")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--seeds", type=int, default=2, help="fine-tunings of each run")
    args = parser.parse_args(argv)
    for folder in args.runs:
        record = RunRecord.read(folder / "record.json")
        record = replace(record, results=order_results(folder, args.seeds))
        path = args.out / f"{folder.name}.json"
        path.write_text(json.dumps(asdict(record), indent=1) + "\n")
        RunRecord.read(path)  # it is valid


if __name__ == "__main__":
    main()
