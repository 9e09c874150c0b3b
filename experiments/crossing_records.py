"""The records of the crossing: finished runs of records/lab/crossing.yaml, fine-tuned on GLUE, and frozen.

python experiments/crossing_records.py GLUE OUT_FOLDER RUN [RUN ...] [--no-baseline] [--frozen] [--pairs BLIMP]

Each run is fine-tuned once on each task of the folder GLUE, by the protocol that `pocket` has now, and so is the
same model with random weights, unless this is not wanted or a record in OUT_FOLDER has scored these already. With --frozen, linear models
also read the frozen features, alone and together with a bag of words. With --pairs, it also judges
the minimal pairs of BLiMP. OUT_FOLDER gets the record of each run with these scores. The command resumes.
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from blimp import main as judge_minimal_pairs

from cramming_nb.app.finetuning import evaluate
from cramming_nb.app.frozen import frozen_scores
from cramming_nb.app.records import RunRecord, record_key
from cramming_nb.app.run import Run, hardware_of, load_run, tokenizer_of
from cramming_nb.glue import Protocol, load_glue
from cramming_nb.recipes import load_recipe


def known_baseline(record: RunRecord, out: Path, digests: dict[str, str]) -> list[dict]:
    """The scores of random weights from a scored run that differs in its budget only; empty if there is none.

    `digests` are those of the tasks; other rows have other scores.
    """

    def causes(record: RunRecord) -> tuple:
        tokenizer = record.corpus["files"]["tokenizer.json"]["sha256"]
        return record.recipe["architecture"] | {"init": "normal"}, record.recipe["protocol"], tokenizer, record.seed

    for path in sorted(out.glob("crossing_*.json")):
        known = RunRecord.read(path)
        if causes(known) == causes(record):
            found = [result for result in known.results if result["init"] == "random"]
            if {result["task"]: result["data"] for result in found} == digests:
                return found
    return []


def glue_results(run: Run, record: RunRecord, glue: str, out: Path, baseline: bool) -> list[dict]:
    """The scores of a run on the tasks of a folder, and on request those of the same model with random weights."""
    data, protocol = load_glue(glue), Protocol(**record.recipe["protocol"])
    known = known_baseline(record, out, {name: task.digest for name, task in data.items()}) if baseline else []
    scored = evaluate(
        data,
        run.recipe.architecture,
        run.folder / "checkpoints",
        str(run.folder / "tokenizer.json"),
        protocol,
        run.folder / "crossing",
        hardware_of(run),
        range(run.seed, run.seed + 1),
        baseline=baseline and not known,
    )
    return scored + known


def frozen_results(run: Run, glue: str) -> list[dict]:
    """The scores of a run's frozen features, alone and together with a bag of words."""
    arch, checkpoints = run.recipe.architecture, run.folder / "checkpoints"
    kept = run.folder / "crossing" / "frozen"
    scored = frozen_scores(
        load_glue(glue), arch, checkpoints, tokenizer_of(run), kept, hardware_of(run), range(0), progress=False
    )
    return [result | dict(seed=run.seed) for result in scored]


def record_name(record: RunRecord) -> str:
    """The name of a record's file: size, minutes and seed."""
    minutes = record.budget.split("@")[0]
    return f"{record.recipe['name'].replace(' ', '_')}-{minutes}-{record.seed}"


def main(argv: list[str] | None = None):
    """Read the command line, fine-tune, and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("glue", help="folder of GLUE tasks")
    parser.add_argument("out", type=Path, help="folder of records")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--no-baseline", action="store_true", help="leave random weights out")
    parser.add_argument("--frozen", action="store_true", help="score the frozen features as well")
    parser.add_argument("--pairs", help="folder of BLiMP's paradigms")
    args = parser.parse_args(argv)
    protocol = load_recipe("pocket").protocol
    for folder in args.runs:
        run, record = load_run(folder), RunRecord.read(folder / "record.json")
        recipe = asdict(replace(run.recipe, protocol=protocol))
        key = record_key(recipe, record.budget, record.seed, record.corpus)
        record = replace(record, key=key, recipe=recipe)
        results = glue_results(run, record, args.glue, args.out, not args.no_baseline)
        record = replace(record, results=results + (frozen_results(run, args.glue) if args.frozen else []))
        name = record_name(record)
        if args.pairs:
            judge_minimal_pairs(
                [str(args.out / "blimp" / f"{name}.json"), str(folder / "export"), "--pairs", args.pairs]
            )
        path = args.out / f"{name}.json"
        path.write_text(json.dumps(asdict(record), indent=1) + "\n")
        RunRecord.read(path)  # it is valid


if __name__ == "__main__":
    main()
