"""GLUE's files as they come: rows from JSON lines, from the official tables or from the hub; and the archive that the benchmark's server takes.

A `task` is a `Task` of chapter 11. What is wrong with a file is said in one line that names the file, the line and the mend.
"""

import json, os, re, zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from .budget import UserError
from .data import hub_revision, hub_spec
from .stages import whole


# Rows

def lines(path: Path) -> Iterator[tuple[str, str]]:
    "Each line of a file that is not blank, after where it stands; the line ends that Unicode has besides are text."
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        try: text = line.decode()
        except UnicodeDecodeError: raise UserError(f"{path}, line {number}: not UTF-8; save the file as UTF-8") from None
        if text.strip(): yield f"{path}, line {number}", text

def json_rows(path: Path) -> Iterator[tuple[str, dict]]:
    "The rows of a file of JSON lines."
    for where, line in lines(path):
        try: yield where, json.loads(line)
        except json.JSONDecodeError as error: raise UserError(f"{where}: not JSON ({error.msg}); is the file cut off?") from None

def table_rows(path: Path, names: tuple = ()) -> Iterator[tuple[str, dict]]:
    "The whole rows of a table with tabs between cells, in which quotes mean nothing; `names` are its columns if it has no header."
    for number, (where, line) in enumerate(lines(path)):
        cells = line.split("\t")
        if number == 0 and (not names or "sentence" in cells): names = tuple(cell.strip().lower() for cell in cells)
        elif len(cells) >= len(names): yield where, dict(zip(names, cells))

def rows_of(found: Iterable[tuple[str, dict]], task, labelled: bool, what: str) -> list[tuple]:
    "Rows (sentence, second or None, label as a number); without labels, their number instead. A row without words is left out."
    rows, columns, known = [], None, {}
    for where, row in found:
        if not isinstance(row, dict) or row.keys() != known:
            known = dict.fromkeys(row) if isinstance(row, dict) else {}
            columns = max((c if labelled else c[:-1] for c in task.layouts), key=lambda c: len(known.keys() & set(c)) - len(c))
            if missing := [c for c in columns if c not in known]:
                raise UserError(f"{where}: no column {missing[0]!r}; {task.name} needs {', '.join(columns[:-1])}{' and ' * (len(columns) > 1)}{columns[-1]}")
            known = row.keys()
        texts, label = [str(row[c] if row[c] is not None else "") for c in columns[:1 + task.pair]], row[columns[-1]]
        if labelled and not "".join(texts).strip(): continue
        try: number = task.number(label) if labelled else len(rows)
        except (TypeError, ValueError): raise UserError(f"{where}: label {label!r}; {task.name} has {', '.join(map(str, task.labels or ['numbers from 0 to 5']))}") from None
        rows.append((texts[0], texts[1] if task.pair else None, number))
    if not rows: raise UserError(f"{what} is empty, or none of its rows is whole; copy it again")
    return rows


# Where the rows are

class Folder:
    "Tasks in a folder, as TASK/train.jsonl or TASK/train.tsv."
    wanted = "expected folders such as CoLA/ with train.jsonl or train.tsv"
    def __init__(self, name: str): self.root = Path(name)
    def has(self, task) -> bool: return (self.root / task.folder).is_dir()

    def rows(self, task, split: str, labelled: bool = True) -> list[tuple]:
        folder = self.root / task.folder
        for path in (folder / f"{split}.jsonl", folder / f"{split}.tsv"):
            if path.is_file(): return rows_of(json_rows(path) if path.suffix == ".jsonl" else table_rows(path, task.header if labelled else ()), task, labelled, str(path))
        if not labelled: return []
        raise UserError(f"{folder}: {split}.jsonl is missing, and so is {split}.tsv; add one, or remove the folder to leave {task.name} out")

class Hub:
    "Tasks of a dataset on the hub, or of a folder that is laid out like one, each a configuration of its own."
    wanted = "expected configurations such as cola"
    def __init__(self, spec: str):
        self.name, self.revision, *more = hub_spec(spec).values()
        if any(more): raise UserError(f"hub:{spec}: write hub:DATASET[@REVISION], such as hub:nyu-mll/glue; all of its tasks are read")
        if not os.path.isdir(self.name): self.revision = hub_revision(self.name, self.revision)
        self.tasks = self.ask("get_dataset_config_names")

    def ask(self, what: str, *names, **options):
        "An answer of `datasets` on this dataset, or a line that says why there is none."
        import datasets
        try: return getattr(datasets, what)(self.name, *names, revision=self.revision, **options)
        except Exception as error: raise UserError(f"hub:{':'.join((self.name, *names))}: {(str(error).splitlines() or [type(error).__name__])[0]}; check the name and the network") from None

    def has(self, task) -> bool: return task.name in self.tasks

    def rows(self, task, split: str, labelled: bool = True) -> list[tuple]:
        what, found = f"hub:{self.name}/{task.name}:{split}", self.ask("load_dataset", task.name, split=split.replace("dev", "validation").replace("diagnostic", "test"), streaming=os.path.isdir(self.name))
        return rows_of(((f"{what}, row {number}", row) for number, row in enumerate(found, 1)), task, labelled, what)


# The archive

ARCHIVE = {"CoLA": ("cola", "test", 1063), "SST-2": ("sst2", "test", 1821), "MRPC": ("mrpc", "test", 1725), "STS-B": ("stsb", "test", 1379),
           "MNLI-m": ("mnli", "test_matched", 9796), "MNLI-mm": ("mnli", "test_mismatched", 9847), "QNLI": ("qnli", "test", 5463), "QQP": ("qqp", "test", 390965),
           "RTE": ("rte", "test", 3000), "WNLI": ("wnli", "test", 146), "AX": ("mnli", "diagnostic", 1104)}  # file: task, test rows, their official number

def write_archive(path: Path, predictions: dict[str, list[float]], tasks: dict):
    "A zip archive of one table for each entry of `predictions`, named as in ARCHIVE: labels as words or numbers, or values within the scale."
    said = lambda task, value: task.labels[int(value)] if task.labels else f"{min(max(value, 0.0), 5.0):.3f}"
    with whole(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, values in predictions.items():
            archive.writestr(f"{name}.tsv", "index\tprediction\n" + "".join(f"{i}\t{said(tasks[ARCHIVE[name][0]], value)}\n" for i, value in enumerate(values)))

def check_table(name: str, text: str, task) -> Iterator[str]:
    "What is wrong with one table of an archive."
    words, (head, *rows) = "|".join(map(str, task.labels or [r"[0-4](\.\d+)?", r"5(\.0+)?"])), text.splitlines() or [""]
    if head != "index\tprediction": yield f"{name}.tsv: the header is not index, tab, prediction"
    if len(rows) != ARCHIVE[name][2]: yield f"{name}.tsv: {len(rows):,} rows; the test set has {ARCHIVE[name][2]:,}"
    wrong = (row for number, row in enumerate(rows) if row.split("\t")[0] != str(number) or not re.fullmatch(words, row.partition("\t")[2]))
    if row := next(wrong, None): yield f"{name}.tsv: {row!r} is not the next index, a tab and a label of {task.name}"

def check_archive(path: Path, tasks: dict) -> list[str]:
    "What the benchmark's server would object to in an archive; nothing where all is well."
    try:
        with zipfile.ZipFile(path) as archive: found = {name: archive.read(name).decode("utf-8", "replace") for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile) as error: return [f"{path.name} cannot be read ({error})"]
    wrong = [f"{name} does not belong here" for name in found if name.removesuffix(".tsv") not in ARCHIVE or not name.endswith(".tsv")]
    if missing := [name for name in ARCHIVE if f"{name}.tsv" not in found]: wrong.append(f"missing: {', '.join(missing)}")
    return wrong + [line for name, (task, *_) in ARCHIVE.items() if f"{name}.tsv" in found for line in check_table(name, found[f"{name}.tsv"], tasks[task])]
