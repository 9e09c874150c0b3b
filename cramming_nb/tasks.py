"""GLUE's files: rows from JSON lines, from the official tables or from the hub, and the archive
that the benchmark's server takes.

A `task` is a `Task` of chapter 10. An error names the file and the line, says what is wrong, and
how to mend it.
"""

import json
import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from .engine.errors import UserError, placed
from .engine.sources import hub_revision, parse_hub
from .engine.tables import each_once
from .engine.files import atomic_write

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
HALF = re.compile("[\ud800-\udfff]")  # half of a character, which no text may hold


# Rows

def lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a file that are not blank, each after its place in the file.

    Bytes are split, and not text: Unicode has line ends that may stand inside a sentence.
    """
    content = path.read_bytes().removeprefix(BYTE_ORDER_MARK)
    for number, line in enumerate(content.splitlines(), 1):
        place = f"{path}, line {number}"
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise UserError(f"{place}: not UTF-8; save the file as UTF-8") from None
        if text.strip():
            yield place, text


def json_rows(path: Path) -> Iterator[tuple[str, dict]]:
    """The rows of a file of JSON lines, each after its place."""
    for place, line in lines(path):
        try:
            with placed(place):
                row = json.loads(line, object_pairs_hook=each_once)
            yield place, row
        except json.JSONDecodeError as error:
            raise UserError(f"{place}: not JSON ({error.msg}); is the file cut off?") from None
        except (ValueError, RecursionError):
            raise UserError(f"{place}: JSON with a number too long, or nested too deeply") from None


def table_rows(path: Path, columns: tuple = ()) -> Iterator[tuple[str, dict]]:
    """The rows of a table with tabs between its cells, each after its place.

    Quotation marks mean nothing. `columns` names the columns of a table without a header. A row
    with fewer cells than columns was cut off, and one with more has a tab in a text: both are
    left out.
    """
    for number, (place, line) in enumerate(lines(path)):
        cells = line.split("\t")
        names = tuple(cell.strip().lower() for cell in line.rstrip().split("\t"))
        if number == 0 and (not columns or {"sentence", "label"} <= set(names)):
            columns = names
            if twice := [name for name, times in Counter(names).items() if times > 1]:
                raise UserError(f"{place}: two columns have the name {twice[0]!r}; rename one")
        elif len(cells) >= len(columns) and not "".join(cells[len(columns):]).strip():
            yield place, dict(zip(columns, cells))


def best_layout(row: dict, task, labelled: bool) -> tuple:
    """The task's names for its columns that fit a row best, without the label's if unlabelled."""
    layouts = task.layouts if labelled else [layout[:-1] for layout in task.layouts]
    return max(layouts, key=lambda layout: len(row.keys() & set(layout)) - len(layout))


def needs(task, columns: tuple) -> str:
    """Which columns a task needs, in words."""
    *others, last = columns
    before = f"{', '.join(others)} and " if others else ""
    return f"{task.name} needs {before}{last}"


def columns_of(row: dict, task, labelled: bool, place: str) -> tuple:
    """The names that a row has for the task's columns; UserError where one is missing."""
    columns = best_layout(row, task, labelled)
    missing = [column for column in columns if column not in row]
    if missing:
        raise UserError(f"{place}: no column {missing[0]!r}; {needs(task, columns)}")
    return columns


def rows_of(found: Iterable[tuple[str, dict]], task, labelled: bool, source: str) -> list[tuple]:
    """Rows as (sentence, second sentence or None, label as a number), from (place, row).

    Where there are no labels, rows are numbered instead. A labelled row without words is left out.
    `source` is named where there is no row at all.
    """
    rows, columns, known = [], (), None
    for place, row in found:
        if not isinstance(row, dict):
            row = {}
        if row.keys() != known:
            columns, known = columns_of(row, task, labelled, place), row.keys()
        texts = [sentence_of(row[column], column, place) for column in columns[:1 + task.pair]]
        if any(HALF.search(text) for text in texts):
            raise UserError(f"{place}: half of a character (a surrogate); write all of it")
        first, second = (*texts, None)[:2]
        if not labelled:
            rows.append((first, second, len(rows)))
        elif (first + (second or "")).strip():
            rows.append((first, second, label_number(row[columns[-1]], task, place)))
    if not rows:
        wanted = needs(task, best_layout({}, task, labelled))
        raise UserError(f"{source} is empty, or none of its rows is whole: {wanted}; copy it again")
    return rows


def sentence_of(value: object, column: str, place: str) -> str:
    """A cell as text; UserError for a list, an object, true or false."""
    if isinstance(value, bool | list | dict):
        kind = type(value).__name__
        raise UserError(f"{place}: {kind} in column {column!r}; write text between quotes")
    return "" if value is None else str(value)


def label_number(label: object, task, place: str) -> int | float:
    """The label as the number a model learns; UserError where the task has no such label."""
    try:
        return task.number(label)
    except (TypeError, ValueError):
        known = ", ".join(map(str, task.labels)) if task.labels else "numbers from 0 to 5"
        raise UserError(f"{place}: label {label!r}; {task.name} has {known}") from None


# Where the rows are

class Folder:
    """Tasks in a folder, as TASK/train.jsonl or TASK/train.tsv."""

    def __init__(self, name: str):
        self.root = Path(name)

    @property
    def wanted(self) -> str:
        """What a folder should hold, and which folders it has instead."""
        paths = self.root.iterdir() if self.root.is_dir() else ()
        folders = [path.name for path in paths if path.is_dir()]
        found = f"; found {', '.join(sorted(folders)[:6])}" if folders else ""
        return f"expected folders such as CoLA/ with train.jsonl or train.tsv{found}"

    def has(self, task) -> bool:
        """Whether the task is there."""
        return (self.root / task.folder).is_dir()

    def rows(self, task, split: str, labelled: bool = True) -> list[tuple]:
        """The rows of a split, as `rows_of` gives them; none if an unlabelled split is missing."""
        folder = self.root / task.folder
        as_json, as_table = folder / f"{split}.jsonl", folder / f"{split}.tsv"
        if as_json.is_file():
            return rows_of(json_rows(as_json), task, labelled, str(as_json))
        if as_table.is_file():
            columns = task.header if labelled else ()
            return rows_of(table_rows(as_table, columns), task, labelled, str(as_table))
        if not labelled:
            return []
        others = ", ".join(sorted(path.name for path in folder.glob(f"{split}.*")))
        found = f" (found: {others}, no such file)" if others else ""
        raise UserError(f"{folder}: {split}.jsonl is missing, and so is {split}.tsv{found}; "
                        f"add one, or remove the folder to leave {task.name} out")


class Hub:
    """Tasks of a dataset on the hub, or of a folder laid out like one; each is a configuration."""

    wanted = "expected configurations such as cola"

    def __init__(self, spec: str):
        found = parse_hub(spec)
        self.name, self.revision = found["path"], found["revision"] or None
        if found["config"] or found["split"]:
            raise UserError(f"hub:{spec}: write hub:DATASET[@REVISION], such as hub:nyu-mll/glue; "
                            "all of its tasks are read")
        self.is_local = os.path.isdir(self.name)
        if not self.is_local:
            self.revision = hub_revision(self.name, self.revision or "")
        self.tasks = self.ask("get_dataset_config_names")

    def ask(self, function: str, *names: str, **options):
        """Call a function of `datasets` on this dataset; an error becomes one line."""
        import datasets
        try:
            return getattr(datasets, function)(self.name, *names, revision=self.revision, **options)
        except Exception as error:
            spec = ":".join((self.name, *names))
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"hub:{spec}: {reason}; check the name and the network") from None

    def has(self, task) -> bool:
        """Whether the dataset has a configuration of the task's name."""
        return task.name in self.tasks

    def rows(self, task, split: str, labelled: bool = True) -> list[tuple]:
        """The rows of a split, as `rows_of` gives them."""
        source = f"hub:{self.name}/{task.name}:{split}"
        split_there = split.replace("dev", "validation").replace("diagnostic", "test")
        found = self.ask("load_dataset", task.name, split=split_there, streaming=self.is_local)
        placed = ((f"{source}, row {number}", row) for number, row in enumerate(found, 1))
        return rows_of(placed, task, labelled, source)


# The archive

ARCHIVE = {  # file: (task, test split, the official number of its rows)
    "CoLA": ("cola", "test", 1063),
    "SST-2": ("sst2", "test", 1821),
    "MRPC": ("mrpc", "test", 1725),
    "STS-B": ("stsb", "test", 1379),
    "MNLI-m": ("mnli", "test_matched", 9796),
    "MNLI-mm": ("mnli", "test_mismatched", 9847),
    "QNLI": ("qnli", "test", 5463),
    "QQP": ("qqp", "test", 390965),
    "RTE": ("rte", "test", 3000),
    "WNLI": ("wnli", "test", 146),
    "AX": ("mnli", "diagnostic", 1104),
}
TABLE_HEADER = "index\tprediction"


def answer(task, value: float) -> str:
    """A prediction as the server wants it: a label's word or number, or a value from 0 to 5."""
    if task.labels:
        return str(task.labels[int(value)])
    return f"{min(max(value, 0.0), 5.0):.3f}"


def write_archive(path: Path, predictions: dict[str, list[float]], tasks: dict):
    """Write a zip archive of one table for each entry of `predictions`, named as in ARCHIVE."""
    with atomic_write(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, values in predictions.items():
            task = tasks[ARCHIVE[name][0]]
            rows = [f"{index}\t{answer(task, value)}" for index, value in enumerate(values)]
            archive.writestr(f"{name}.tsv", "\n".join([TABLE_HEADER, *rows]) + "\n")
