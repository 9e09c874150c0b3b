"""How much faster a step of `pocket` gets on an AMD processor when MKL takes its AVX2 code: records/bench/amd.json.

python experiments/mkl_on_amd.py LIBRARY [--rounds N]

LIBRARY is the small library of the page "Where it runs" (AMD processors). Steps with and without it are timed in
turns, each turn in a process of its own. The record holds one ratio a round: steps a second with the library over
those without it.
The machine should do nothing else.
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

from cramming_nb.app.records import environment
from cramming_nb.engine.hardware import DTYPES, Hardware
from cramming_nb.lab.bench import interleave, recipe_steps, take_turn
from cramming_nb.recipes import load_recipe

RECORD = Path(__file__).resolve().parents[1] / "records/bench/amd.json"


def seconds_of_steps(library: Path | None) -> float:
    """Seconds of steps of `pocket` in a new process, which loads `library` before all others."""
    recipe = load_recipe("pocket")
    hardware = Hardware.detect(DTYPES[recipe.training.dtype])
    if library:
        os.environ["LD_PRELOAD"] = str(library)
    else:
        os.environ.pop("LD_PRELOAD", None)
    # `watch_children` makes it a new process, not a fork of one that has loaded MKL already.
    return take_turn(recipe_steps, recipe, hardware, watch_children=True).seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    machine = environment(Hardware.detect())
    if "AMD" not in machine["processor"]:
        sys.exit(f"{machine['processor']}: not a processor of AMD; there is nothing to measure")
    if not options.library.is_file():
        sys.exit(f"{options.library}: no such file; the page 'Where it runs' says how to make it")

    libraries = {"with": options.library.resolve(), "without": None}
    work = {name: partial(seconds_of_steps, library) for name, library in libraries.items()}
    seconds = interleave(work, options.rounds, progress=True)
    ratios = [round(b / a, 3) for a, b in zip(seconds["with"], seconds["without"], strict=True)]
    record = dict(environment=machine, ratios=ratios)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(ratios)


if __name__ == "__main__":
    main()
