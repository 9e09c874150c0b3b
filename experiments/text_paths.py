"""Seconds, memory and disk of four ways from a text to ordered rows, each in a process of its own.

    python experiments/text_paths.py TEXT.jsonl ... --rounds 2 > records/bench/text_paths.json

`ours` is chapter 4. `arrow` is one pass of `map` over a table of `datasets`, with the tokenizer's
`encode_batch`; `arrow, words cut once` the same with our cut of distinct words. `reference` is
written after the paper's code (the bench's `reference_rows`) and reads the first file alone.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from cramming_nb.corpus import (
    CorpusConfig,
    corpus_tokenizer,
    first_copies,
    get_corpus,
    order_rows,
    pack_rows,
    sample_documents,
    shuffled_documents,
    split_documents,
)
from cramming_nb.data import clean_batch
from cramming_nb.engine.sources import file_documents
from cramming_nb.tokenizer import SEP, count_words, tokenise

CONFIG = CorpusConfig(vocab_size=32768, filter_threshold=0.3)
CORES = len(os.sched_getaffinity(0))


def ours(files: list[str], folder: Path):
    get_corpus(" + ".join(f"files:{file}" for file in files), CONFIG, folder, progress=False)


def encoded(texts: list[str], tokenizer: str, words: bool) -> dict:
    """Token ids, lengths and costs of texts: a word at a time, or by `encode_batch`."""
    if words:
        ids, lengths, costs = tokenise(texts, tokenizer)
        return dict(tokens=np.split(ids.astype(np.uint16), np.cumsum(lengths)[:-1]), length=lengths, cost=costs)
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(tokenizer).encode_batch(texts, add_special_tokens=False)
    tokens = [np.array([*encoding.ids, SEP], np.uint16) for encoding in found]
    lengths = [len(ids) for ids in tokens]
    return dict(tokens=tokens, length=lengths, cost=lengths)


def arrow(files: list[str], folder: Path, words: bool = False):
    import datasets

    datasets.disable_progress_bars()
    several = dict(batched=True, num_proc=CORES)
    parts = dict(paths=list(files))
    data = datasets.Dataset.from_generator(
        file_documents, gen_kwargs=parts, cache_dir=str(folder), num_proc=min(CORES, len(files)))
    data = data.map(clean_batch, batch_size=256, **several)
    prints, sizes = (data.data.column(name).to_numpy() for name in ("fingerprint", "characters"))
    unique = first_copies(prints)
    chosen = unique[sample_documents(sizes[unique], CONFIG.sample)]
    tokenizer, path = corpus_tokenizer(count_words(data.select(chosen)["text"]), CONFIG), str(folder / "t.json")
    tokenizer.save(path)
    work = dict(tokenizer=path, words=words)
    tokens = data.map(lambda batch, **work: encoded(batch["text"], **work), fn_kwargs=work,
                      remove_columns=data.column_names, new_fingerprint=f"tokens-{words}", **several)
    lengths, costs = (tokens.data.column(name).to_numpy() for name in ("length", "cost"))
    kept = unique[costs[unique] < CONFIG.filter_threshold * sizes[unique]]
    train = kept[split_documents(prints[kept], sizes[kept], CONFIG.heldout, CONFIG.probe) == 0]
    flat = np.concatenate([chunk.flatten().to_numpy() for chunk in tokens.data.column("tokens").chunks])
    ids, rng = flat[np.repeat(np.isin(np.arange(len(lengths)), train), lengths)], np.random.default_rng(89)
    stream = shuffled_documents(ids, lengths[train], rng)
    counts = pack_rows(folder / "packed.npy", stream, int(lengths[train].sum()), CONFIG)
    order_rows(folder / "packed.npy", folder / "train.npy", CONFIG.order, tokenizer, counts)


def reference(files: list[str], folder: Path):
    from cramming_nb.lab.baselines import reference_rows

    reference_rows(Path(files[0]), CONFIG.vocab_size, CORES)()


WAYS = {"ours": ours, "arrow, words cut once": lambda files, folder: arrow(files, folder, True),
        "arrow": arrow, "reference": reference}


def memory(pid: int) -> int:
    """Bytes that a process and its descendants hold and that the system cannot take back."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        kilobytes = sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return 0
    return 1024 * kilobytes + sum(map(memory, children))


def on_disk(folder: Path) -> int:
    sizes = []
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except OSError:  # renamed or removed meanwhile
            continue
    return sum(sizes)


def watched(way: str, files: list[str]) -> dict:
    """Run a way in this process: seconds, and the most memory and disk, in megabytes."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        tempfile.tempdir = os.environ["HF_DATASETS_CACHE"] = folder  # the reference writes beside its text
        peak, done = [0, 0], threading.Event()

        def watch():
            while not done.wait(0.3):
                peak[:] = max(peak[0], memory(os.getpid())), max(peak[1], on_disk(Path(folder)))

        watcher = threading.Thread(target=watch)
        watcher.start()
        begun = time.perf_counter()
        WAYS[way](files, Path(folder))
        seconds = time.perf_counter() - begun
        done.set()
        watcher.join()
        left = on_disk(Path(folder)) // 10**6
    return dict(way=way, seconds=round(seconds, 1), memory=peak[0] // 10**6, disk=peak[1] // 10**6, left=left)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="+", help="JSON lines, plain for the reference")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        print(json.dumps(watched(given.way, given.text)))
        return
    found = []
    for _ in range(given.rounds):
        for way in given.ways:
            command = [sys.executable, __file__, *given.text, "--way", way]
            said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            found.append(json.loads(said.splitlines()[-1]))
            print(found[-1], file=sys.stderr)
    megabytes = sum(Path(path).stat().st_size for path in given.text) // 10**6
    print(json.dumps(dict(megabytes=megabytes, files=len(given.text), cores=CORES, vocab_size=CONFIG.vocab_size,
                          runs=found), indent=1))


if __name__ == "__main__":
    main()
