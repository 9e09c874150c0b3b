"""How fast the recipes of a list are beside its first one, measured in turns: records/lab/ratios.json.

python experiments/ratio_records.py records/lab/changes.yaml [MORE.yaml ...] [--only NAME ...] [--same]

Each recipe whose step differs from that of the first entry is timed beside it, a few at a time. The record
holds one ratio a round: tokens a second of the recipe over those of the first entry. A recipe that the
record has is not measured again. The machine should do nothing else.

All are timed in one process, which builds a recipe for each of its turns and frees it afterwards. Equal
processes differ in speed by several per cent for as long as they live, so recipes with a process each could
not be compared to better than that: `--same` measures it with five copies of one recipe (same_step.json).
"""

import argparse
import gc
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

from cramming_nb.engine.hardware import DTYPES, Hardware
from cramming_nb.lab.bench import interleave, recipe_steps, step_fields
from cramming_nb.lab.experiments import read_list
from cramming_nb.recipes import Recipe

RATIOS = Path(__file__).resolve().parents[1] / "records/lab/ratios.json"
SAME = RATIOS.with_name("same_step.json")
AT_A_TIME = 6  # recipes that are timed beside the first one
ROUNDS = 6


def different_steps(lists: list[Path]) -> dict[str, Recipe]:
    """The first recipe of the lists, and one for each other that takes other steps, by name."""
    recipes = [entry.changed() for path in lists for entry in read_list(path)]
    first = recipes[0]
    others = {recipe.name: recipe for recipe in recipes if step_fields(recipe) != step_fields(first)}
    return {first.name: first, **others}


def tokens_per_turn(recipe: Recipe) -> int:
    """Tokens that one turn of `recipe_steps` trains on."""
    return 8 * recipe.schedule.batch_size * recipe.corpus.seq_length


def one_turn(recipe: Recipe, hardware: Hardware) -> float:
    """Seconds of eight steps of a recipe that is built for them, in memory that the process has held before."""
    work = recipe_steps(recipe, hardware)
    seconds = hardware.device.seconds(work)
    del work
    gc.collect()
    return seconds


def measure(recipes: dict[str, Recipe], rounds: int) -> dict[str, list[float]]:
    """Tokens a second of each recipe over those of the first one, in every round."""
    hardware = {name: Hardware.detect(DTYPES[recipe.training.dtype]) for name, recipe in recipes.items()}
    turns = {name: partial(one_turn, recipe, hardware[name]) for name, recipe in recipes.items()}
    seconds = interleave(turns, rounds, progress=True)
    speeds = {name: [tokens_per_turn(recipe) / turn for turn in seconds[name]] for name, recipe in recipes.items()}
    first, *others = speeds
    return {name: [round(a / b, 4) for a, b in zip(speeds[name], speeds[first], strict=True)] for name in others}


@cache
def kept_work(recipe: Recipe, hardware: Hardware) -> Callable[[], None]:
    """The steps of a recipe, which a process builds once."""
    return recipe_steps(recipe, hardware)


def turn_of_process(recipe: Recipe, hardware: Hardware) -> float:
    """Seconds of eight steps of a recipe, in a process that keeps it from turn to turn."""
    return hardware.device.seconds(kept_work(recipe, hardware))


def measure_same(recipe: Recipe, copies: int = 5, rounds: int = 3) -> dict[str, list[list[float]]]:
    """Seconds of equal steps, one list a copy: of copies in one process, and of copies with a process each."""
    hardware = Hardware.detect(DTYPES[recipe.training.dtype])
    names = [str(copy) for copy in range(copies)]
    one = interleave({name: partial(one_turn, recipe, hardware) for name in names}, rounds, progress=True)
    with ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1, get_context("spawn"))) for _ in names]
        turns = [lambda pool=pool: pool.submit(turn_of_process, recipe, hardware).result() for pool in pools]
        each = interleave(dict(zip(names, turns, strict=True)), rounds, progress=True)
    kinds = {"one process": one, "a process each": each}
    return {kind: [[round(turn, 3) for turn in turns] for turns in found.values()] for kind, found in kinds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lists", nargs="+", type=Path)
    parser.add_argument("--only", nargs="+", help="names of recipes; default: all")
    parser.add_argument("--out", type=Path, default=RATIOS)
    parser.add_argument("--same", action="store_true", help="time five copies of the first recipe, and nothing else")
    options = parser.parse_args()

    (first, baseline), *others = different_steps(options.lists).items()
    if options.same:
        SAME.write_text(json.dumps(measure_same(baseline), indent=1) + "\n")
        return
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    wanted = options.only or [name for name, _ in others]
    missing = [(name, recipe) for name, recipe in others if name in wanted and name not in known]
    for start in range(0, len(missing), AT_A_TIME):
        group = dict(missing[start : start + AT_A_TIME])
        known |= measure({first: baseline, **group}, ROUNDS)
        options.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
