"""The model of `cram predict --demo`: the text that it may learn from, and the files that come with the package.

python experiments/demo_model.py text OUT_FOLDER CORPUS.jsonl.zst [CORPUS.jsonl.zst ...]
python experiments/demo_model.py model RUN_FOLDER TEXT.jsonl.zst [TEXT.jsonl.zst ...]

`text` keeps the documents whose field `license` lets a model that learned from them be passed on, and writes
OUT_FOLDER/free-1.jsonl.zst, one file for each corpus. `cram run pocket` on these files makes a run. `model` writes the
model of that run to cramming_nb/app/demo: weights in 16 bits, tokenizer, record, and a card that counts the documents
of the files by their field `source`.
"""

import argparse
import json
import shutil
from collections import Counter
from pathlib import Path

import pyarrow

from cramming_nb.app.export import DEMO, load_checkpointed, model_card, write_model
from cramming_nb.app.records import RunRecord, Table
from cramming_nb.app.run import load_run, tokenizer_of
from cramming_nb.engine.tables import read_rows

LICENCES = ("CC-BY-SA-3.0", "CC-BY-4.0", "CC0-1.0", "public-domain")
WIKIPEDIA = "English Wikipedia, by its contributors"
SOURCES = {
    "wikipedia_en_core2015": f"{WIKIPEDIA} (core articles, 2015)",
    "wikipedia_en_2014": f"{WIKIPEDIA} (2014)",
    "wikipedia_en_2021": f"{WIKIPEDIA} (2021)",
    "books_public_domain": "novels and other books (ELTeC, Project Gutenberg, Standard Ebooks and others)",
    "us_gov_web": "web pages of the government of the United States",
    "medquad_nih_qa": "MedQuAD (Ben Abacha and Demner-Fushman 2019): answers of the National Institutes of Health",
    "cia_factbook": "The World Factbook",
    "openstax_textbooks": "Principles of Economics and Introduction to Anthropology, OpenStax",
    "us_presidential_speeches": "speeches of presidents of the United States",
}
LICENCE = """\
The model may be passed on under [CC BY-SA 3.0](https://creativecommons.org/licenses/by-sa/3.0/), the licence of
Wikipedia's text. The package around it has a licence of its own. All text that the model and its tokenizer learned from:"""
HOW = """\
`experiments/demo_model.py` chose the text by these licences. The model was then trained with

    {command}

on one thread of a processor that other programs shared. Ten minutes are counted in tokens here: what two quiet cores
read in that time. `record.json` is the record of that run. The weights were rounded to 16 bits afterwards, and are read
as 32."""


def choose_text(out: Path, corpora: list[Path]):
    """Write the documents whose licence is one of `LICENCES` into one file for each corpus."""
    out.mkdir(parents=True, exist_ok=True)
    for number, corpus in enumerate(corpora, 1):
        target = pyarrow.OSFile(str(out / f"free-{number}.jsonl.zst"), "wb")
        with target, pyarrow.CompressedOutputStream(target, "zstd") as file:
            for _, row in read_rows(str(corpus)):
                if row["license"] in LICENCES:
                    file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def text_table(texts: list[Path]) -> Table:
    """Documents and megabytes of the texts, by source and licence."""
    documents, size = Counter(), Counter()
    for path in texts:
        for _, row in read_rows(str(path)):
            kind = row["source"], row["license"]
            documents[kind] += 1
            size[kind] += len(row["text"].encode()) / 1e6
    rows = [(SOURCES[kind[0]], kind[1], f"{documents[kind]:,}", f"{size[kind]:.1f}") for kind, _ in size.most_common()]
    return Table(rows, ("text", "licence", "documents", "MB"))


def write_demo(folder: Path, texts: list[Path]):
    """Write the model of a finished run into `DEMO`, which is replaced."""
    run, record = load_run(folder), RunRecord.read(folder / "record.json")
    weights = load_checkpointed(folder / "checkpoints", run.recipe.architecture).state_dict()
    card = model_card(record, sum(weight.numel() for weight in weights.values()), as_bert=False)
    command = f"cram run {record.recipe['name']} --source '{run.source}' --budget {record.budget} --seed {record.seed}"
    made = ["## Licence", LICENCE, text_table(texts).to_markdown(), "## How it was made", HOW.format(command=command)]
    head, use = card.replace("---\n", "---\nlicense: cc-by-sa-3.0\n", 1).split("## Use")
    shutil.rmtree(DEMO, ignore_errors=True)
    DEMO.mkdir()
    halves = {name: weight.half() for name, weight in weights.items()}
    card = "\n\n".join([head.rstrip(), *made, f"## Use{use}"])
    write_model(halves, tokenizer_of(run), run.recipe.architecture, card, DEMO)
    (DEMO / "record.json").write_text(record.to_json(), encoding="utf-8")


def main(argv: list[str] | None = None):
    """Read the command line, and choose the text or write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("text", "model"))
    parser.add_argument("folder", type=Path, help="folder to write the text to, or folder of a finished run")
    parser.add_argument("files", type=Path, nargs="+", help="corpora to choose from, or the chosen text")
    args = parser.parse_args(argv)
    (choose_text if args.what == "text" else write_demo)(args.folder, args.files)


if __name__ == "__main__":
    main()
