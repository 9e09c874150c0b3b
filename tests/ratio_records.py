"""How fast the recipes of a list are beside its first one, measured in turns: records/lab/ratios.json.

python tests/ratio_records.py records/lab/changes.yaml [MORE.yaml ...] [--only NAME ...]

Each recipe whose step differs from that of the first entry is timed beside it, a few at a time. The record
holds one ratio a round: tokens a second of the recipe over those of the first entry. A recipe that the
record has is not measured again. The machine should do nothing else.
"""

import argparse
import json
from contextlib import ExitStack
from pathlib import Path

from cramming_nb.bench import Implementation, interleave, pace, recipe_steps
from cramming_nb.experiments import read_list
from cramming_nb.hardware import DTYPES, Hardware
from cramming_nb.recipes import Recipe

RATIOS = Path(__file__).resolve().parents[1] / "records/lab/ratios.json"
AT_A_TIME = 6  # recipes that are timed beside the first one; each holds about a gigabyte
ROUNDS = 9


def different_steps(lists: list[Path]) -> dict[str, Recipe]:
    """The first recipe of the lists, and one for each other that takes other steps, by name."""
    recipes = [entry.changed() for path in lists for entry in read_list(path)]
    first = recipes[0]
    others = {recipe.name: recipe for recipe in recipes if pace(recipe) != pace(first)}
    return {first.name: first, **others}


def tokens_per_turn(recipe: Recipe) -> int:
    """Tokens that one turn of `recipe_steps` trains on."""
    return 8 * recipe.schedule.batch_size * recipe.corpus.seq_length


def measure(recipes: dict[str, Recipe], rounds: int) -> dict[str, list[float]]:
    """Tokens a second of each recipe over those of the first one, in every round."""
    with ExitStack() as stack:
        steps = {}
        for name, recipe in recipes.items():
            hardware = Hardware.detect(DTYPES[recipe.training.dtype])
            steps[name] = stack.enter_context(Implementation(recipe_steps, recipe, hardware))
        seconds = interleave(steps, rounds, progress=True)
    speeds = {name: [tokens_per_turn(recipe) / turn for turn in seconds[name]] for name, recipe in recipes.items()}
    first, *others = speeds
    return {name: [round(a / b, 4) for a, b in zip(speeds[name], speeds[first], strict=True)] for name in others}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lists", nargs="+", type=Path)
    parser.add_argument("--only", nargs="+", help="names of recipes; default: all")
    parser.add_argument("--out", type=Path, default=RATIOS)
    options = parser.parse_args()

    (first, baseline), *others = different_steps(options.lists).items()
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    wanted = options.only or [name for name, _ in others]
    missing = [(name, recipe) for name, recipe in others if name in wanted and name not in known]
    for start in range(0, len(missing), AT_A_TIME):
        group = dict(missing[start : start + AT_A_TIME])
        known |= measure({first: baseline, **group}, ROUNDS)
        options.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
