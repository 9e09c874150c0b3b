"""The records of the baseline that counts words: how its settings were chosen, and what it scores on GLUE.

python experiments/counting_records.py choose GLUE OUT.json   settings by cross-validation on the training rows
python experiments/counting_records.py score GLUE OUT.json    the default settings on the development rows

`choose` never reads a development row. It changes one setting at a time, and keeps the value with the best mean.
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from cramming_nb.app.counting import CountingConfig, bag_of_words, first_sentences, fit_counts, same_answer
from cramming_nb.glue import TASKS, TaskData, load_glue
from cramming_nb.tasks import Folder

VALUES = {  # in the order in which they are tried
    "words": (1, 2, 3),
    "characters": (0, 4),
    "min_rows": (1, 2),
    "shared": (False, True),
    "differing": (False, True),
    "C": (1.0, 3.0, 10.0),
    "alpha": (0.3, 1.0, 3.0),
}
START = CountingConfig(words=2, characters=0, min_rows=1, shared=True, differing=True, C=3.0, alpha=1.0)
FOR_PAIRS = ("shared", "differing")


def training_rows(folder: str) -> dict[str, TaskData]:
    """The training rows of the tasks in a folder, and no others."""
    place = Folder(folder)
    found = [task for task in TASKS.values() if place.has(task)]
    return {task.name: TaskData(task, place.rows(task, "train"), {}) for task in found}


def containing_rows(rows: list[tuple]) -> np.ndarray:
    """For each row, the number of the longest row whose first sentence contains its own.

    A row that no other contains has its own number. Only whole words count, in any case.
    """
    texts = [f" {' '.join(first.lower().split())} " for first in first_sentences(rows)]
    container = np.arange(len(rows))
    rows_with = {}  # word: the rows so far that have it and that no other row contains
    for number in sorted(range(len(rows)), key=lambda number: -len(texts[number])):
        words = set(texts[number].split())
        candidates = min((rows_with.get(word, []) for word in words), key=len, default=[])
        found = [other for other in candidates if texts[number] in texts[other]]
        if found:
            container[number] = found[0]
            continue
        for word in words:
            rows_with.setdefault(word, []).append(number)
    return container


def held_back_score(data: TaskData, config: CountingConfig, folds: int = 3, seed: int = 0,
                    together: bool = True) -> float:
    """The score on training rows by models that were fitted without them, in percent.

    Only rows that no other row contains are scored. With `together`, a row and the rows it
    contains are in the same fold; without it, folds are random.
    """
    rows = data.train
    container = containing_rows(rows)
    whole = np.flatnonzero(container == np.arange(len(rows)))
    rng = np.random.default_rng(seed)
    if together:
        fold_of = np.zeros(len(rows), dtype=int)
        fold_of[whole] = rng.permutation(len(whole)) % folds
        fold_of = fold_of[container]
    else:
        fold_of = rng.permutation(len(rows)) % folds
    predicted = np.zeros(len(rows))
    for fold in range(folds):
        held_back = [row for row in whole if fold_of[row] == fold]
        kept = [rows[row] for row in np.flatnonzero(fold_of != fold)]
        model = fit_counts(data.task, kept, config, seed)
        predicted[held_back] = model.predict([rows[row] for row in held_back])
    labels = np.array([row[2] for row in rows])
    return 100 * data.task.metric(predicted[whole], labels[whole])


def deciding(data: TaskData, config: CountingConfig) -> dict:
    """The settings that a task's score depends on."""
    settings = asdict(config)
    del settings["C" if data.task.labels is None else "alpha"]
    if not data.task.pair:
        settings = {name: value for name, value in settings.items() if name not in FOR_PAIRS}
    return settings


def choose(tasks: dict[str, TaskData], values: dict[str, tuple] = VALUES, start: CountingConfig = START) -> dict:
    """Change one setting at a time; every trial, the best settings, and what random folds would have said of them."""
    known, trials = {}, []

    def trial(config: CountingConfig) -> float:
        scores = {}
        for name, data in tasks.items():
            key = (name, *deciding(data, config).items())
            if key not in known:
                known[key] = held_back_score(data, config)
            scores[name] = round(known[key], 2)
        mean = sum(scores.values()) / len(scores)
        if all(other["settings"] != asdict(config) for other in trials):
            trials.append(dict(settings=asdict(config), scores=scores, mean=round(mean, 2)))
            print(f"{mean:.2f}", scores, asdict(config), flush=True)
        return mean

    best, best_mean = start, trial(start)
    for name, choices in values.items():
        for value in choices:
            config = replace(best, **{name: value})
            mean = trial(config)
            if mean > best_mean:
                best, best_mean = config, mean
    random_folds = {name: round(held_back_score(data, best, together=False), 2) for name, data in tasks.items()}
    return dict(
        what="scores in percent on held-back training rows that no other row contains; three folds, with a row and "
        "the rows it contains in one fold",
        trials=trials,
        chosen=asdict(best),
        random_folds=random_folds,
    )


def score(folder: str) -> dict:
    """The results of the default settings and of the same answer to every row, on the development rows."""
    tasks = load_glue(folder)
    results = [make(data) for data in tasks.values() for make in (bag_of_words, same_answer)]
    return dict(
        what="development scores of counting words, and of the same answer to every row",
        settings=asdict(CountingConfig()),
        results=results,
    )


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["choose", "score"])
    parser.add_argument("glue", help="folder with CoLA/, SST-2/ and so on")
    parser.add_argument("out", type=Path, help="a .json file")
    a = parser.parse_args(argv)
    begun = time.perf_counter()
    found = choose(training_rows(a.glue)) if a.what == "choose" else score(a.glue)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{a.out}, {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
