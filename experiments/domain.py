"""Is it worth cramming a model on the text of one field? The record of a worked example.

python experiments/domain.py WORK OUT.json --general 'files:texts/*.jsonl.zst'

The field is the documentation of ten Python packages, as it is installed on this machine. The task
is to name the package that the first paragraph of a docstring belongs to, from 10, 100 or 1000
labelled paragraphs. Five arms take part:

    own        pretrained on the field's text, but for the modules that are scored
    general    pretrained on the text of --general, with the same recipe, budget and seeds
    random     the same model without pretraining
    counting   counting words
    constant   the same answer to every row

WORK is a folder for texts and runs. The same command again continues; OUT.json is written anew after
every step. Settings for few labels are chosen on rows of the labelled part, never on scored rows.
"""

import argparse
import hashlib
import json
import re
import sys
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path
from statistics import mean
from sysconfig import get_paths

import numpy as np
import torch
from tokenizers import Tokenizer

from cramming_nb.app.counting import CountingConfig, bag_of_words, same_answer
from cramming_nb.app.run import Run, corpus_of, hardware_of, locked, pretrain_run
from cramming_nb.data import words_of
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.files import write_text
from cramming_nb.engine.sources import machine_packages, package_files, read_docstrings, stdlib_files
from cramming_nb.glue import Task, TaskData, accuracy, encoder_weights, finetune_task
from cramming_nb.recipes import change, load_recipe

PACKAGES = ("torch", "scipy", "sympy", "scikit-learn", "pandas", "networkx", "python", "numpy",
            "matplotlib", "huggingface-hub")
NAMED = re.compile(  # a paragraph that names one of the packages is left out
    r"\b(py)?torch|scipy|sympy|scikit|sklearn|pandas|networkx|numpy|matplotlib|pyplot|hugging|python"
    r"|\b(np|pd|plt|nx|hf|sp|mpl)\b", re.IGNORECASE)
TASK = Task("package", "", False, PACKAGES, accuracy)
LABELS = (10, 100, 1000)                   # labelled rows in all, the same number of each package
SCORED, HELD_BACK = 80, 40                 # rows of each package to score, and to choose settings on
PARTS = {"scored": 0.15, "held back": 0.25, "labelled": 1.0}  # of the modules, cumulative
EPOCHS = {10: (10, 30, 100), 100: (5, 15, 45), 1000: (5, 10, 20)}  # tried for each number of labels
STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0)  # values of `C` tried for counting words
CHOICE_DRAWS = {10: 3, 100: 2, 1000: 1}    # draws of labels to choose the epochs on
CHOICE_SEED = 1000                         # of the first of them; scored draws are 0, 1 and so on
BUDGET = "3m@38972tok/s"                   # three minutes at the rated speed: 7 million tokens

# Written down on 24 November 2026, before any model was trained. Percent of the scored rows.
PREDICTED = {
    "own": {10: 30, 100: 55, 1000: 72},
    "general": {10: 20, 100: 42, 1000: 65},
    "random": {10: 17, 100: 38, 1000: 63},
    "counting": {10: 25, 100: 48, 1000: 72},
    "constant": {10: 10, 100: 10, 1000: 10},
}


# Rows

def part_of(module: str) -> str:
    """The part that a module belongs to, decided by a hash of its name."""
    share = int(hashlib.sha256(module.encode()).hexdigest()[:8], 16) / 2**32
    return next(part for part, end in PARTS.items() if share < end)


def read_modules(packages: tuple = PACKAGES) -> list[dict]:
    """The modules of some packages, each with the docstrings that no earlier module has."""
    places = []
    for package in packages:
        if package == "python":
            root, files = get_paths()["stdlib"], stdlib_files()
        else:
            root, files = distribution(package).locate_file(""), package_files(package)
        places += [(package, str(Path(file).relative_to(root)), file) for file in files]
    modules, seen = [], set()
    for (package, name, _), found in zip(
        places, read_docstrings([place[2] for place in places]), strict=True
    ):
        new = [text for text in dict.fromkeys(found) if text not in seen]
        seen.update(new)
        if new:
            module = f"{package}/{name}"
            modules.append(dict(module=module, package=package, part=part_of(module), texts=new))
    return modules


def first_paragraph(text: str) -> str | None:
    """The first paragraph of a docstring; None if it is too short or long, or names a package."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph if 8 <= len(words_of(paragraph)) <= 60 and not NAMED.search(paragraph) else None


def grams(text: str, n: int = 5) -> set[tuple]:
    """The runs of five words in a text."""
    words = words_of(text)
    return set(zip(*(words[start:] for start in range(n)), strict=False))


def repeated_shares(rows: list[tuple], texts: list[str]) -> np.ndarray:
    """For each row, the share of its runs of five words that occur in some texts."""
    of_row = [grams(text) for text, _, _ in rows]
    wanted, found = set().union(*of_row), set()
    for text in texts:
        found |= wanted & grams(text)
    return np.array([len(row & found) / len(row) for row in of_row])


def labelled_rows(modules: list[dict]) -> list[tuple]:
    """Rows (paragraph, None, number of the package); each paragraph occurs once."""
    rows, seen = [], set()
    for module in modules:
        for paragraph in filter(None, map(first_paragraph, module["texts"])):
            if paragraph.lower() not in seen:
                seen.add(paragraph.lower())
                rows.append((paragraph, None, PACKAGES.index(module["package"])))
    return rows


def draw(rows: list[tuple], each: int, seed: int) -> list[tuple]:
    """Random rows, the same number of each package; a larger draw of a seed holds the smaller one."""
    rng, drawn = np.random.default_rng(seed), []
    for label, package in enumerate(PACKAGES):
        found = [row for row in rows if row[2] == label]
        if len(found) < each:
            raise UserError(f"{package}: {len(found)} rows, {each} are needed; install its whole text")
        drawn += [found[i] for i in rng.permutation(len(found))[:each]]
    return drawn


def make_rows(modules: list[dict]) -> tuple[dict[str, list[tuple]], dict]:
    """The rows of each part, and how many there were before near-duplicates were left out.

    A row to score is left out if more than half of its runs of five words occur in the text that is
    pretrained on; a row to choose on, if they occur in the modules that rows to learn from are of.
    """
    of_part = {part: [m for m in modules if m["part"] == part] for part in PARTS}
    texts = {part: [text for m in of_part[part] for text in m["texts"]] for part in PARTS}
    rows = {part: labelled_rows(of_part[part]) for part in PARTS}
    counts = {f"{part} rows": len(found) for part, found in rows.items()}
    known = {"scored": texts["held back"] + texts["labelled"], "held back": texts["labelled"]}
    for part, others in known.items():
        shares = repeated_shares(rows[part], others)
        rows[part] = [row for row, share in zip(rows[part], shares, strict=True) if share <= 0.5]
        counts[f"{part} rows without near-duplicates"] = len(rows[part])
    rows["scored"] = draw(rows["scored"], SCORED, seed=0)
    rows["held back"] = draw(rows["held back"], HELD_BACK, seed=0)
    return rows, counts


def prepare(work: Path) -> tuple[dict[str, list[tuple]], dict]:
    """The rows of each part and facts about them; the private text is left in own.jsonl."""
    path = work / "modules.jsonl"
    packages = machine_packages(",".join(PACKAGES))
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(json.dumps(module) + "\n" for module in read_modules()))
    modules = [json.loads(line) for line in path.read_text().splitlines()]
    rows, counts = make_rows(modules)
    own = work / "own.jsonl"
    if not own.exists():
        documents = [dict(text="\n\n".join(m["texts"]), id=m["module"], source=m["package"])
                     for m in modules if m["part"] != "scored"]
        write_text(own, "".join(json.dumps(document) + "\n" for document in documents))
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
    modules_of = {part: sum(m["part"] == part for m in modules) for part in PARTS}
    return rows, dict(packages=packages, modules=modules_of, counts=counts, digest=digest)


# Arms

class Example:
    """The rows, the runs and the record of the worked example."""

    def __init__(self, work: Path, out: Path, general: str, budget: str):
        self.work, self.out, self.budget = work, out, budget
        self.sources = {"own": f"files:{work / 'own.jsonl'}", "general": general}
        self.rows, facts = prepare(work)
        self.record = json.loads(out.read_text()) if out.exists() else dict(
            what="percent of scored rows whose package is named correctly", **facts,
            labels=LABELS, scored=SCORED * len(PACKAGES), held_back=HELD_BACK * len(PACKAGES),
            budget=budget, predicted=PREDICTED, pretraining=[], choice=[], results=[])
        if (self.record["digest"], self.record["budget"]) != (facts["digest"], budget):
            raise UserError(f"{out} is of other rows or another budget; name another file")
        self.runs = {}

    def add(self, to: str, **values: object):
        """Add a line to a list of the record, and write the record."""
        self.record[to].append(values)
        write_text(self.out, json.dumps(self.record, indent=1) + "\n")
        print(to, *values.values(), flush=True)

    def missing(self, kind: str, **values: object) -> bool:
        """Whether a list of the record has no line with these values."""
        return not any(values.items() <= line.items() for line in self.record[kind])

    def pretrain(self, arm: str, seed: int):
        """Pretrain a model of an arm, or find it finished."""
        recipe = change(load_recipe("pocket"), {"training.compile": "never"})
        run = Run(recipe, self.sources[arm], self.budget, seed, self.work / f"{arm}-{seed}",
                  self.work / "data", progress=False)
        corpus = corpus_of(run)
        with locked(run, corpus):
            outcome = pretrain_run(run, corpus)
        if outcome["stopped"]:
            sys.exit("stopped; the same command continues")
        self.runs[arm, seed] = run, str(corpus.folder / "tokenizer.json")
        if self.missing("pretraining", arm=arm, seed=seed):
            sequences, length = corpus.manifest["files"]["train"]["shape"]
            self.add("pretraining", arm=arm, seed=seed, tokens=outcome["spent"]["tokens"],
                     text_tokens=sequences * length, heldout_loss=outcome["heldout_loss"],
                     unigram_entropy=outcome["unigram_entropy"])

    def answer(self, arm: str, seed: int, labels: int, number: int, on: str, setting) -> float:
        """The score of an arm, in percent, with a draw of labels, on the rows of a part."""
        train = draw(self.rows["labelled"], labels // len(PACKAGES), number)
        data = TaskData(TASK, train, {TASK.name: self.rows[on]})
        if arm == "constant":
            result = same_answer(data)
        elif arm == "counting":
            result = bag_of_words(data, number, replace(CountingConfig(), C=setting))
        else:
            run, tokenizer = self.runs["own" if arm == "random" else arm, seed]
            weights = None if arm == "random" else encoder_weights(run.folder / "checkpoints")
            protocol = replace(run.recipe.protocol, epochs=setting)
            result = finetune_task(run.recipe.architecture, weights, Tokenizer.from_file(tokenizer),
                                   data, protocol, 1000 * seed + number, hardware_of(run))
        return round(100 * result["scores"][TASK.name], 2)

    def choose(self, arm: str, labels: int) -> float | int | None:
        """The setting of an arm for a number of labels with the best mean on held-back rows."""
        if arm == "constant":
            return None
        values = STRENGTHS if arm == "counting" else EPOCHS[labels]
        for number in range(CHOICE_SEED, CHOICE_SEED + CHOICE_DRAWS[labels]):
            for value in values:
                about = dict(arm=arm, labels=labels, draw=number, setting=value)
                if self.missing("choice", **about):
                    score = self.answer(arm, 0, labels, number, "held back", value)
                    self.add("choice", **about, score=score)
        tried = {value: [] for value in values}
        for line in self.record["choice"]:
            if (line["arm"], line["labels"]) == (arm, labels):
                tried[line["setting"]].append(line["score"])
        return max(values, key=lambda value: mean(tried[value]))

    def score(self, arm: str, seed: int, draws: range):
        """Score an arm on each draw of each number of labels."""
        for number in draws:
            for labels in LABELS:
                about = dict(arm=arm, seed=seed, labels=labels, draw=number)
                if self.missing("results", **about):
                    setting = self.choose(arm, labels)
                    score = self.answer(arm, seed, labels, number, "scored", setting)
                    self.add("results", **about, setting=setting, score=score)


def main(argv: list[str] | None = None):
    """Read the command line, and do what is left to do."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="a folder for texts and runs")
    parser.add_argument("out", type=Path, help="the record, a .json file")
    parser.add_argument("--general", required=True, help="a source of general text, as `cram` reads it")
    parser.add_argument("--seeds", type=int, default=2, help="pretrainings on each text")
    parser.add_argument("--draws", type=int, default=5, help="draws of labelled rows")
    parser.add_argument("--budget", default=BUDGET, help="of each pretraining")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    a = parser.parse_args(argv)
    torch.set_num_threads(a.threads)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    example = Example(a.work, a.out, a.general, a.budget)
    for arm in ("constant", "counting"):
        example.score(arm, 0, range(a.draws))
    for seed in range(a.seeds):
        for arm in example.sources:
            example.pretrain(arm, seed)
        for number in range(a.draws):
            for arm in ("own", "general", "random"):
                example.score(arm, seed, range(number, number + 1))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"domain.py: {error}", file=sys.stderr)
        sys.exit(2)
