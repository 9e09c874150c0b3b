"""How fast text becomes rows, against the path of the reference code, and how much memory that takes.

python tests/bench_data.py FILES... [--rounds 2] [--megabytes 50] [--memory 8] [--vocab-size 8192]

FILES are JSON lines with a column `text`, .zst or not; so many megabytes of them are read. Both paths go from files to
ordered rows with the filter on, tokenizer training included, on the same number of processes, one after the other in
each round. The reference's path is written after its description: documents through `datasets.map` as Python lists, a
second tokenisation for the filter, chained grouping by 1,024 documents. --memory N measures ours again on N times the text.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from cramming_nb.corpus import CorpusConfig, get_corpus
from cramming_nb.data import documents
from cramming_nb.stages import Local

THRESHOLD, LENGTH = 0.3, 128


def ours(text: Path, folder: Path, vocab_size: int, processes: int) -> dict:
    config = CorpusConfig(vocab_size=vocab_size, filter_threshold=THRESHOLD, seq_length=LENGTH)
    corpus = get_corpus(f"files:{text}", config, folder, progress=False, engine=Local(processes))
    return dict(rows=len(corpus.rows), stages={s["stage"]: s["seconds"] for s in corpus.manifest["stages"]})


def reference(text: Path, folder: Path, vocab_size: int, processes: int) -> dict:
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    from cramming_nb.tokenizer import paper_normalizer

    datasets.disable_progress_bars()
    marks, at = {}, [time.perf_counter()]

    def lap(name: str):
        at.append(time.perf_counter())
        marks[name] = at[-1] - at[-2]

    data = datasets.load_dataset("json", data_files=str(text), split="train", cache_dir=str(folder))
    data = data.remove_columns([c for c in data.column_names if c != "text"]).shuffle(seed=89)
    lap("read")

    trained = Tokenizer(models.WordPiece(unk_token="<unk>"))
    trained.normalizer, trained.pre_tokenizer = paper_normalizer(), pre_tokenizers.Whitespace()
    specials = ["<pad>", "<s>", "</s>", "<unk>", "<cls>", "<sep>", "<mask>"]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=specials, show_progress=False)
    texts = (data[i : i + 4096]["text"] for i in range(0, len(data), 4096))
    trained.train_from_iterator(texts, trainer, length=len(data))
    trained.post_processor = processors.TemplateProcessing(
        single="$A <sep>", special_tokens=[("<sep>", trained.token_to_id("<sep>"))]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, unk_token="<unk>", pad_token="<pad>")
    lap("tokenizer")

    def stays(batch: dict) -> list[bool]:
        found = tokenizer(batch["text"], add_special_tokens=True)["input_ids"]
        return [len(ids) < THRESHOLD * len(text) for ids, text in zip(found, batch["text"], strict=True)]

    data = data.filter(stays, batched=True, batch_size=1024, num_proc=processes)
    lap("filter")

    def tokenise(batch: dict) -> dict:
        return tokenizer(batch["text"], return_attention_mask=False, return_token_type_ids=False)

    data = data.map(tokenise, batched=True, batch_size=1024, num_proc=processes, remove_columns=["text"])
    lap("tokenise")

    def group(batch: dict) -> dict:
        ids = list(itertools.chain(*batch["input_ids"]))
        return dict(input_ids=[ids[i : i + LENGTH] for i in range(0, len(ids) // LENGTH * LENGTH, LENGTH)])

    data = data.map(group, batched=True, batch_size=1024, num_proc=processes)
    lap("pack")

    stop = trained.token_to_id(".")
    counts = data.map(
        lambda batch: dict(stops=[row.count(stop) for row in batch["input_ids"]]),
        batched=True,
        batch_size=1024,
        num_proc=processes,
        remove_columns=data.column_names,
    )["stops"]
    order = sorted(range(len(data)), key=list(counts).__getitem__, reverse=True)
    data.select(order).flatten_indices().save_to_disk(str(folder / "rows"))
    lap("order")
    return dict(rows=len(data), stages=marks)


PATHS = dict(ours=ours, reference=reference)


def resident(pid: int) -> int:
    """Bytes that a process and its children hold, shared pages divided among them."""
    total, queue = 0, [pid]
    while queue:
        at = queue.pop()
        try:
            total += sum(
                int(s.split()[1])
                for s in Path(f"/proc/{at}/smaps_rollup").read_text().splitlines()
                if s.startswith("Pss:")
            )
            queue += [
                int(child) for t in Path(f"/proc/{at}/task").iterdir() for child in (t / "children").read_text().split()
            ]
        except (OSError, ValueError):
            continue
    return total * 1024


def measured(name: str, text: Path, vocab_size: int, processes: int) -> dict:
    """Run one path in a process of its own: its seconds, start and imports left out, and its peak memory."""
    with tempfile.TemporaryDirectory(dir=text.parent) as folder:
        call = [sys.executable, __file__, "--one", name, str(text), folder, str(vocab_size), str(processes)]
        env = os.environ | dict(HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=folder)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        process = subprocess.Popen(call, stdout=subprocess.PIPE, text=True, env=env)
        peak = [0]

        def watch():
            while process.poll() is None:
                peak[0] = max(peak[0], resident(process.pid))
                time.sleep(0.1)

        watcher = threading.Thread(target=watch)
        watcher.start()
        out = process.communicate()[0]
        watcher.join()
        if process.returncode:
            sys.exit(f"{name} failed")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return json.loads(out.splitlines()[-1]) | dict(peak_megabytes=round(peak[0] / 1e6), cpu_seconds=cpu)


def write_text(path: Path, files: list[str], characters: float):
    """Documents of the files, from the first on again where they do not suffice, marked so that no two are the same."""
    written, again = 0, 0
    with open(path, "w") as out:
        while written < characters:
            for doc in itertools.chain.from_iterable(documents(f"files:{file}", False) for file in files):
                out.write(json.dumps(dict(text=f"{doc['text']} {again}" if again else doc["text"])) + "\n")
                written += len(doc["text"])
                if written >= characters:
                    break
            again += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=50)
    parser.add_argument(
        "--memory", type=float, default=8, help="times the text for the second measurement of memory; 0: none"
    )
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--processes", type=int, default=2)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.jsonl")
        write_text(text, a.files, a.megabytes * 1e6)
        rounds = []
        for i in range(a.rounds):
            names = list(PATHS)[:: 1 if i % 2 == 0 else -1]
            rounds.append({name: measured(name, text, a.vocab_size, a.processes) for name in names})
            print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
        ratios = [r["reference"]["seconds"] / r["ours"]["seconds"] for r in rounds]
        found = dict(megabytes=a.megabytes, ratio=dict(reference=statistics.median(ratios)), rounds=ratios)
        found["seconds"] = {name: statistics.median(r[name]["seconds"] for r in rounds) for name in PATHS}
        found["cpu_ratio"] = statistics.median(r["reference"]["cpu_seconds"] / r["ours"]["cpu_seconds"] for r in rounds)
        found["peak_megabytes"] = {name: max(r[name]["peak_megabytes"] for r in rounds) for name in PATHS}
        if a.memory:
            write_text(text, a.files, a.memory * a.megabytes * 1e6)
            more = measured("ours", text, a.vocab_size, a.processes)
            found["more_text"] = more | dict(
                times=a.memory, memory_ratio=more["peak_megabytes"] / found["peak_megabytes"]["ours"]
            )
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        name, text, folder, vocab_size, processes = sys.argv[2:]
        begun = time.perf_counter()
        found = PATHS[name](Path(text), Path(folder), int(vocab_size), int(processes))
        print(json.dumps(found | dict(seconds=time.perf_counter() - begun)))
    else:
        multiprocessing.freeze_support()
        main()
