"""Is the order of words known? The probe `order` of finished runs: records/lab/order_scores.json.

python experiments/order_scores.py OUT.json RUN [RUN ...] [--seeds 3]

Each run is fine-tuned on the probe made from its own text, once for each seed. OUT.json gets these scores in percent,
with their 95 % intervals, under the name of the run's record. The command resumes.
"""

import argparse
import json
from pathlib import Path

from crossing_records import record_name

from cramming_nb.app.finetuning import evaluate
from cramming_nb.app.records import RunRecord
from cramming_nb.app.run import hardware_of, load_run, tasks_of


def order_results(folder: Path, seeds: int) -> list[dict]:
    """The results of a run on the probe of word order, one for each seed."""
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


def in_percent(result: dict) -> dict:
    """The score of a result and its interval, in percent."""
    low, high = result["intervals"]["order"]
    values = dict(score=result["scores"]["order"], low=low, high=high)
    return dict(seed=result["seed"]) | {name: round(100 * value, 2) for name, value in values.items()}


def main(argv: list[str] | None = None):
    """Read the command line, fine-tune, and add the scores to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file of scores")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--seeds", type=int, default=3, help="fine-tunings of each run")
    args = parser.parse_args(argv)
    for folder in args.runs:
        scored = [in_percent(result) for result in order_results(folder, args.seeds)]
        found = json.loads(args.out.read_text()) if args.out.exists() else {}
        name = record_name(RunRecord.read(folder / "record.json"))
        args.out.write_text(json.dumps(found | {name: scored}, indent=1) + "\n")


if __name__ == "__main__":
    main()
