"""GLUE as it comes and as it goes: the official tables, the hub, protocols, seeds, interruption, and the archive for the server."""

import json
import math
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GLUE_ROWS, Killable, contents, forget_pretraining, lines, write_jsonl
from devices import Killer, LittleMemory, TwoDevices
from sklearn.metrics import f1_score
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import get_cosine_schedule_with_warmup

from cramming_nb import glue as chapter
from cramming_nb.app import finetuning
from cramming_nb.app.finetuning import plan_workers
from cramming_nb.app.records import RunRecord
from cramming_nb.app.run import load_run
from cramming_nb.app.scores import ScoreTable, compare, other_rows, write_submission
from cramming_nb.architecture import Architecture, Encoder, SequenceClassifier
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.hardware import DEVICES, Device, Hardware
from cramming_nb.glue import (
    NINE,
    PAIR_VIEWS,
    PAPER_SCORES,
    PROTOCOLS,
    REFERENCE,
    TASKS,
    FineTuner,
    Protocol,
    Targets,
    TaskData,
    accuracy,
    collate,
    constant_answer,
    encode,
    epoch_batches,
    f1,
    for_task,
    learning_rate,
    load_glue,
    missing_tests,
    pearson,
    percentiles,
    replicates,
    row_lengths,
    score_predictions,
)
from cramming_nb.optimizer import parameter_groups
from cramming_nb.tasks import ARCHIVE, write_archive
from cramming_nb.tokenizer import CLS, MASK, PAD, SEP, train_tokenizer

PAIR = ("The lamp is gone.", "There is no lamp.")
TABLES = {  # folder: (columns of train and dev, a row, columns of test, what is read)
    "CoLA": (None, ["gj04", "1", "", 'He said "lamp.'], ["index", "sentence"], ('He said "lamp.', None, 1)),
    "SST-2": (["sentence", "label"], ["a fine lamp", "0"], ["index", "sentence"], ("a fine lamp", None, 0)),
    "MRPC": (
        ["\ufeffQuality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
        ["1", "7", "8", *PAIR],
        ["index", "#1 ID", "#2 ID", "#1 String", "#2 String"],
        (*PAIR, 1),
    ),
    "STS-B": (
        "index genre filename year old_index source1 source2 sentence1 sentence2 score".split(),
        ["0", "news", "f", "2012", "1", "a", "b", *PAIR, "3.800"],
        "index genre filename year old_index source1 source2 sentence1 sentence2".split(),
        (*PAIR, 3.8),
    ),
    "QQP": (
        "id qid1 qid2 question1 question2 is_duplicate".split(),
        ["1", "2", "3", *PAIR, "0"],
        ["id", "question1", "question2"],
        (*PAIR, 0),
    ),
    "MNLI": (
        "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse sentence1 sentence2 label1 gold_label".split(),
        ["0", "1", "2", "fiction", "( a )", "( b )", "(S a)", "(S b)", *PAIR, "neutral", "contradiction"],
        "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse sentence1 sentence2".split(),
        (*PAIR, 2),
    ),
    "QNLI": (
        ["index", "question", "sentence", "label"],
        ["0", *PAIR, "not_entailment"],
        ["index", "question", "sentence"],
        (*PAIR, 1),
    ),
    "RTE": (
        ["index", "sentence1", "sentence2", "label"],
        ["0", *PAIR, "entailment"],
        ["index", "sentence1", "sentence2"],
        (*PAIR, 0),
    ),
    "WNLI": (
        ["index", "sentence1", "sentence2", "label"],
        ["0", *PAIR, "1"],
        ["index", "sentence1", "sentence2"],
        (*PAIR, 1),
    ),
}


def write_table(path: Path, *rows: list[str]):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def official(tmp_path) -> Path:
    """A folder with all tasks as the benchmark distributes them, each of one row."""
    for task in TASKS.values():
        head, row, test_head, _ = TABLES[task.folder]
        for split in ("train", *task.dev):
            write_table(tmp_path / task.folder / f"{split}.tsv", *([head] if head else []), row)
        cells = dict(zip(head or ["source", "label", "mark", "sentence"], row, strict=True)) | dict(index="0", id="0")
        for _, split, _ in (a for a in ARCHIVE.values() if a[0] == task.name and a[1] != "diagnostic"):
            write_table(tmp_path / task.folder / f"{split}.tsv", test_head, [cells[c] for c in test_head])
    write_table(tmp_path / "diagnostic" / "diagnostic.tsv", ["index", "sentence1", "sentence2"], ["0", *PAIR])
    return tmp_path


def test_official_tables(official):
    found = load_glue(official, tuple(TASKS), tests=True)
    for name, data in found.items():
        row = TABLES[TASKS[name].folder][3]
        assert data.train == [row] and list(data.dev.values()) == [[row]] * len(TASKS[name].dev), name
        assert [rows[0][:2] for rows in data.tests.values()] == [row[:2]] * len(data.tests)
    assert {name for data in found.values() for name in data.tests} == set(ARCHIVE)
    assert list(load_glue(official)) == [name for name in TASKS if name != "wnli"]


def test_rows_of_the_hub(official, monkeypatch, tmp_path):
    """The hub has numbers for labels, and names of its own for columns."""
    asked = []

    def load_dataset(name, config, split, revision, streaming):
        asked.append((name, revision, split))
        both = dict(premise=PAIR[0], hypothesis=PAIR[1]) if config == "mnli" else dict(sentence=PAIR[0])
        return [both | dict(label=1, idx=0)]

    monkeypatch.setattr("datasets.get_dataset_config_names", lambda name, revision: ["mnli", "sst2", "ax"])
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("cramming_nb.tasks.hub_revision", lambda name, revision: f"commit of {revision}")
    found = load_glue("hub:nyu-mll/glue@v1")
    assert found["mnli"].dev == {"mnli": [(*PAIR, 1)], "mnli-mm": [(*PAIR, 1)]} and found["sst2"].train == [
        (PAIR[0], None, 1)
    ]
    assert {(name, revision) for name, revision, _ in asked} == {("nyu-mll/glue", "commit of v1")}
    assert [split for _, _, split in asked[:3]] == ["train", "validation_matched", "validation_mismatched"]


def test_the_hub_cannot_be_reached(monkeypatch):
    def unreachable(*a, **k):
        raise ConnectionError("no route\nat all")

    monkeypatch.setattr("cramming_nb.tasks.hub_revision", lambda *a: "0")
    monkeypatch.setattr("datasets.get_dataset_config_names", unreachable)
    with pytest.raises(UserError, match="hub:nyu-mll/glue: no route; check the name and the network"):
        load_glue("hub:nyu-mll/glue")


COLA = "CoLA/train.tsv"
BAD_TABLES = {  # name: (file, bytes, words of the complaint)
    "no header": (
        "RTE/train.tsv",
        "0\ta\tb\tentailment\n1\ta\tb\tentailment",
        "no column 'sentence1'",
        "sentence2 and label",
    ),
    "commas": ("SST-2/dev.tsv", "sentence,label\na lamp,1", "no column 'sentence'", "sentence and label"),
    "too few columns": (COLA, "1\tThe lamp.\n0\tLamp the.", "CoLA", "none of its rows is whole"),
    "header only": ("QNLI/dev.tsv", "index\tquestion\tsentence\tlabel\n", "empty"),
    "label": ("MNLI/dev_matched.tsv", "sentence1\tsentence2\tgold_label\na\tb\t-", "line 2", "'-'", "contradiction"),
    "out of scale": ("STS-B/train.tsv", "sentence1\tsentence2\tscore\na\tb\t6", "'6'", "from 0 to 5"),
    "not UTF-8": ("SST-2/train.tsv", b"sentence\tlabel\na l\xe4mp\t1", "line 2", "UTF-8"),
    "blank lines": ("WNLI/dev.tsv", "\n\n", "empty"),
    "a column twice": (
        "SST-2/dev.tsv",
        "sentence\tlabel\tlabel\na lamp\t1\t0",
        "line 1: two columns",
        "'label'; rename",
    ),
    "another header": (COLA, "text\tlabel\nThe lamp.\t1", "cola needs sentence and label"),
    "a tab in a text": ("SST-2/dev.tsv", "sentence\tlabel\na\tlamp\t1", "none of its rows is whole: sst2 needs"),
    "a digit of another script": ("STS-B/train.tsv", "sentence1\tsentence2\tscore\na\tb\t\u0663", "from 0 to 5"),
    "an underscore": ("STS-B/train.tsv", "sentence1\tsentence2\tscore\na\tb\t0_1", "'0_1'", "from 0 to 5"),
    "rows without words": ("SST-2/dev.tsv", "sentence\tlabel\n \t1", "empty"),
}


@pytest.mark.parametrize("what", BAD_TABLES.values(), ids=BAD_TABLES)
def test_malformed_table(what, official):
    name, content, *words = what
    (official / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as said:
        load_glue(official, tuple(TASKS))
    assert str(official / name) in str(said.value) and "\n" not in str(said.value)
    assert not [word for word in words if word not in str(said.value)], said.value


@pytest.mark.parametrize("sentence", [["a lamp"], {"a": "lamp"}, True])
def test_a_sentence_of_another_type(sentence, official):
    path = official / "SST-2" / "dev.jsonl"
    path.write_text(json.dumps(dict(sentence="a lamp", label=1)) + "\n" + json.dumps(dict(sentence=sentence, label=0)))
    with pytest.raises(UserError, match="dev.jsonl, line 2: .* in column 'sentence'; write text"):
        load_glue(official, ("sst2",))


def test_a_header_in_capitals_and_a_tab_at_the_end(official):
    (official / COLA).write_text("Sentence \tLabel\t\nsentence\t1\nLamp the.\t0\t\n")
    assert load_glue(official, ("cola",))["cola"].train == [("sentence", None, 1), ("Lamp the.", None, 0)]


def test_folders_of_other_names_are_named(tmp_path):
    for name in ("sst-2", "cola"):
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match="expected folders such as CoLA/ .*; found cola, sst-2$"):
        load_glue(tmp_path)


def test_what_stands_in_the_place_of_a_file_is_named(official):
    (official / "SST-2" / "dev.tsv").rename(official / "SST-2" / "dev.tsv.gz")
    (official / "SST-2" / "dev.jsonl").mkdir()
    with pytest.raises(UserError, match=r"found: dev.jsonl, dev.tsv.gz, no such file"):
        load_glue(official, ("sst2",))


BAD_OPTIONS = {  # name: (more of the command, words of the line)
    "task unknown": ("--tasks colla", "'colla'", "cola"),
    "task missing": ("--tasks mrpc", "no MRPC", "mrpc"),
    "protocol": ("--protocol rule", "'rule'", "rules, reference"),
    "no test rows": ("--submission", "no test rows", "test.tsv"),
    "no seeds": ("--seeds 0", "0", "1 or more"),
}


@pytest.mark.parametrize("what", BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_leave_a_run_alone(what, a_copy, glue):
    more, *words = what
    before = contents(a_copy.folder)
    said = a_copy.command("glue", "first", "--glue-dir", glue, *more.split())
    (line,) = lines(said.err)
    assert said.code == 2 and contents(a_copy.folder) == before
    assert not [word for word in words if word not in line], line


def test_incomplete_submission_is_refused_before_fine_tuning(a_copy, glue):
    write_jsonl(glue / "RTE" / "test.jsonl", [dict(sentence1="Rain fell.", sentence2="It was wet.")])
    before = contents(a_copy.home)
    said = a_copy.command("glue", "first", "--glue-dir", glue, "--submission")
    (line,) = lines(said.err)
    assert said.code == 2 and contents(a_copy.home) == before
    for words in ("CoLA (test: 0 of 1,063 rows)", "RTE (test: 1 of 3,000 rows)", "WNLI (test: 0", "AX", "--tasks"):
        assert words in line


def test_submission_needs_all_tasks(official, monkeypatch):
    found = load_glue(official, tests=True)
    assert list(found) == list(TASKS) and len(missing_tests(found)) == len(ARCHIVE)
    for file, (task, split, _) in list(ARCHIVE.items()):
        monkeypatch.setitem(ARCHIVE, file, (task, split, 1))
    assert missing_tests(found) == []


def test_run_that_is_still_pretrained_is_not_scored(a_copy, glue):
    (a_copy.folder / "record.json").unlink()
    forget_pretraining(a_copy.folder)
    before = contents(a_copy.folder)
    for more in ([], ["--glue-dir", glue]):
        said = a_copy.command("glue", "first", *more)
        (line,) = lines(said.err)
        assert said.code == 2 and "not pretrained yet; finish it with `cram run`" in line
    assert contents(a_copy.folder) == before


def test_options_that_need_tasks(a_copy):
    said = a_copy.command("glue", "first", "--submission")
    assert said.code == 2 and "--glue-dir" in said.err


def write_glue(folder: Path, name: str, train: list[dict], dev: list[dict], test: list[dict] = ()):
    (folder / name).mkdir(exist_ok=True)
    splits = dict(train=train, dev=dev, dev_matched=dev, dev_mismatched=dev, test=test, test_matched=test)
    for split, rows in splits.items():
        if rows and (("_" in split) == (name == "MNLI") or split == "train"):
            write_jsonl(folder / name / f"{split}.jsonl", list(rows))


@pytest.mark.parametrize("protocol", ["rules", "reference", "frozen"])
def test_the_table_of_the_paper_can_be_filled(protocol, a_copy, official):
    """All nine numbers and their mean, for each protocol, from the benchmark's own files."""
    for path in official.glob("*/*.tsv"):
        if path.stem == "train":  # several rows, so that there are some to hold back
            head, *rows = path.read_text().splitlines(keepends=True)
            rows = rows or [head]
            path.write_text(("" if path.parent.name == "CoLA" else head) + "".join(rows * 20))
    said = a_copy.command("glue", "first", "--glue-dir", official, "--protocol", protocol, "--no-baseline")
    assert said.code == 0, said.err
    table = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in said.out.splitlines() if line[:1] == "|"}
    head, line = table[""], table["frozen" if protocol == "frozen" else "pretrained"]
    assert [cell.strip() for cell in head] == [*NINE, "mean"] and len(line) == 10
    assert not [cell for cell in line if "–" == cell.strip()]
    assert "9 of 9 GLUE numbers" in said.out and "mean with MNLI counted once" in said.out


def test_table_says_what_is_not_official(a_copy, glue):
    rows = [row | dict(label=1) for row in GLUE_ROWS["cola"]]
    write_glue(glue, "CoLA", [*rows, dict(sentence=" ", label=0)], GLUE_ROWS["cola"])
    said = a_copy.command("glue", "first", "--glue-dir", glue, "--tasks", "cola")
    assert said.code == 0, said.err
    assert "1 of 9 GLUE numbers; missing: mnli, mnli-mm, sst2, stsb, rte, qnli, qqp, mrpc" in said.out
    assert "CoLA has 24 of 8,551 training rows and 24 of 1,043 dev rows" in said.out
    assert "cola: one class in training in 2 of 2 fine-tunings" in said.out
    assert "cola: the same answer to every row in 2 of 2 fine-tunings" in said.out
    assert "nan" not in said.out.lower() and "| pretrained | 0.0 (0.0–0.0) | 0.0 (0.0–0.0) |" in said.out


def test_results_join_the_record_of_a_finished_run(a_copy, glue):
    argv = ["glue", "first", "--glue-dir", glue, "--tasks", "rte", "--seeds", "2"]
    assert a_copy.command(*argv).code == 0
    record = RunRecord.read(a_copy.folder / "record.json")
    assert [(r["init"], r["seed"]) for r in record.results if r["task"] == "rte"] == [
        ("constant", 0), ("counting", 0), ("pretrained", 0), ("random", 0), ("pretrained", 1), ("random", 1),
    ]  # fmt: skip
    assert {"order", "rte"} <= {r["task"] for r in record.results}
    assert "1 of 9 GLUE numbers" in (a_copy.folder / "report.html").read_text()
    before = contents(a_copy.folder)
    assert a_copy.command(*argv).code == 0 and contents(a_copy.folder) == before
    other = a_copy.command(*argv, "--protocol", "bert-base")
    assert other.code == 0 and RunRecord.read(a_copy.folder / "record.json") == record  # not by the run's own protocol


def test_baseline_that_was_left_out_is_added(a_copy, glue):
    assert a_copy.command("glue", "first", "--glue-dir", glue, "--no-baseline").code == 0

    def random() -> set[str]:
        results = RunRecord.read(a_copy.folder / "record.json").results
        return {r["task"] for r in results if r["init"] == "random"} & {"cola", "rte", "stsb"}

    assert random() == set()
    argv = ["run", *a_copy.tiny.options(), "--name", "first", "--glue-dir", glue]
    assert a_copy.command(*argv).code == 0 and random() == {"cola", "rte", "stsb"}


def test_probes_beside_glue(a_copy, glue):
    (a_copy.folder / "record.json").unlink()
    argv = ["run", *a_copy.tiny.options(), "--name", "first", "--glue-dir", glue, "--probes"]
    said = a_copy.command(*argv)
    assert said.code == 0 and "3 of 9 GLUE numbers" in said.out and "probe tasks, not GLUE" in said.out
    assert {r["task"] for r in RunRecord.read(a_copy.folder / "record.json").results} >= {"order", "cola"}
    assert a_copy.command(*argv).out == said.out


def test_seeds_of_two_runs_differ(a_copy, glue, monkeypatch):
    """Fine-tuning seeds begin at 1000 times the run's own."""
    seen = []
    monkeypatch.setattr("cramming_nb.app.run.evaluate", lambda *a: seen.append(a[7]) or [])
    settings = json.loads((a_copy.folder / "run.json").read_text())
    for seed in (0, 3):
        (a_copy.folder / "run.json").write_text(json.dumps(settings | dict(seed=seed)))
        a_copy.command("glue", "first", "--glue-dir", glue, "--finetune-seeds", "2")
    assert [list(seeds) for seeds in seen] == [[0, 1], [3000, 3001]]


def test_glue_does_not_build_the_corpus_again(a_copy, glue, monkeypatch):
    monkeypatch.setattr("cramming_nb.app.run.get_corpus", lambda *a, **k: pytest.fail("the corpus is built again"))
    assert a_copy.command("glue", "first", "--glue-dir", glue, "--tasks", "rte").code == 0


def test_another_checkpoint_is_scored_anew(a_copy, glue):
    call = ("glue", "first", "--glue-dir", glue, "--tasks", "rte", "--no-baseline")

    def found() -> set[str]:
        return {p.name for p in (a_copy.folder / "glue").glob("rte-pretrained-*.json")}

    assert a_copy.command(*call).code == 0
    (before,) = found()
    newest = max((a_copy.folder / "checkpoints").glob("step-*"))
    newest.rename(newest.with_name(f"step-{int(newest.name[5:]) + 1:08}"))
    assert a_copy.command(*call).code == 0
    assert len(found()) == 2 and before in found()


THREE = ("entailment", "neutral", "contradiction")


def encoder_of(tuner: FineTuner) -> dict[str, torch.Tensor]:
    """The encoder's weights, copied, by name."""
    weights = {name: weight.detach().clone() for name, weight in tuner.optimizer.named.items()}
    return {name.removeprefix("encoder."): w for name, w in weights.items() if name.startswith("encoder.")}


def plain_loop(model: SequenceClassifier, encoded: list, targets: Targets, batches: list, protocol: Protocol):
    """Fine-tuning as everyone writes it."""
    weights = dict(model.named_parameters())
    no_decay = [weights.pop(name) for name in parameter_groups(model)["no_decay"]]
    groups = [
        dict(params=no_decay, weight_decay=0.0),
        dict(params=list(weights.values()), weight_decay=protocol.weight_decay),
    ]
    optimizer = torch.optim.AdamW(groups, protocol.lr, betas=(0.9, 0.98), eps=1e-6)
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(protocol, step / len(batches))
        logits = model.train()(*collate([encoded[row] for row in batch], DEVICES["cpu"]))
        targets.loss(logits, torch.from_numpy(targets.values[batch])).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_answers(model: SequenceClassifier, encoded: list, targets: Targets) -> np.ndarray:
    with torch.no_grad():
        return targets.answers(model.eval()(*collate(encoded, DEVICES["cpu"]))).numpy()


def hardware(dtype: torch.dtype = torch.float32, device: Device | None = None, threads: int = 1) -> Hardware:
    return Hardware(device or DEVICES["cpu"], dtype, "explicit", threads, "")


def word_tokenizer(words: int = 64) -> Tokenizer:
    """A tokenizer of whole words w4, w5, …, with [CLS] and [SEP]."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(4, words))])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def word_rows(count: int, pair: bool = False, highest: int = 2) -> list[tuple]:
    """Rows of three to six words of the first thirty, with labels below `highest`."""
    rng = np.random.default_rng(0)

    def text() -> str:
        return " ".join(f"w{i}" for i in rng.integers(4, 30, rng.integers(3, 7)))

    return [(text(), text() if pair else None, n % highest) for n in range(count)]


SMALL = Architecture(
    vocab_size=64, max_length=16, hidden_size=16, num_layers=1, num_heads=2, ffn_size=32, dropout=0.0, classifier_size=8
)


@pytest.mark.parametrize("name", ["stsb", "cola"])
def test_reference_is_the_published_procedure(name):
    """First token, pair template, raw targets, random full batches, AdamW, and a cosine after CoLA's warm-up."""
    task = TASKS[name]
    rows = {"stsb": word_rows(33, pair=True, highest=6), "cola": word_rows(80)}
    data = {n: TaskData(TASKS[n], rows[n], {n: rows[n][:4]}) for n in rows}
    protocol = for_task(replace(REFERENCE, batch_size=4, lr=1e-2), name, data)
    tuner = FineTuner(SMALL, None, word_tokenizer(), data[name], protocol, 0, hardware())
    epochs = np.split(np.array(tuner.batches), 5)
    assert all(epoch.shape == (len(rows[name]) // 4, 4) for epoch in epochs)  # 33 rows: one is left out
    assert all(len(np.unique(epoch)) == epoch.size for epoch in epochs)
    lengths = row_lengths(tuner.train_ids)
    widths = [np.ptp(lengths[batch]) for batch in tuner.batches]
    assert np.mean(widths) > 1.5  # not by length

    torch.manual_seed(0)
    model = SequenceClassifier(Encoder(replace(SMALL, pooling="first")), len(task.labels or [0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.0)
    warmup = int(0.1 * 5 * (80 // 4))  # steps of CoLA
    schedule = get_cosine_schedule_with_warmup(optimizer, warmup, len(tuner.batches))
    texts = [(first, second or "") for first, second, _ in rows[name]]
    ids = [(encoding.ids,) for encoding in word_tokenizer().encode_batch(texts)]
    for batch in tuner.batches:
        logits = model(*collate([ids[i] for i in batch], DEVICES["cpu"]))
        labels = torch.tensor([rows[name][i][2] for i in batch])
        if task.labels:
            loss = F.cross_entropy(logits, labels)
        else:
            loss = F.mse_loss(logits.squeeze(), labels.float())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    tuner.train()
    learned = encoder_of(tuner)
    for parameter, weight in model.encoder.named_parameters():
        torch.testing.assert_close(learned[parameter], weight.detach(), rtol=0, atol=1e-4)
    with torch.no_grad():
        logits = model.eval()(*collate(ids[:4], DEVICES["cpu"]))
    expected = logits.argmax(1) if task.labels else logits[:, 0]
    np.testing.assert_allclose(tuner.predict(rows[name][:4]), expected.numpy(), atol=1e-3)


@pytest.mark.parametrize("protocol", ["rules", "reference"])
@pytest.mark.parametrize("name", ["cola", "rte", "stsb"])
def test_fast_fine_tuning_is_the_plain_one(name, protocol):
    """One sentence, two sentences and a regression end with the weights and answers of the plain loop."""
    rows = dict(cola=word_rows(30), rte=word_rows(30, pair=True), stsb=word_rows(30, pair=True, highest=6))[name]
    data = TaskData(TASKS[name], rows, {name: rows[:7]})
    chosen = for_task(
        replace(PROTOCOLS[protocol], lr=1e-2, batch_size=8, epochs=2, weight_decay=0.1), name, {name: data}
    )
    tuner = FineTuner(SMALL, None, word_tokenizer(), data, chosen, 5, hardware())
    if protocol == "reference":
        rng = np.random.default_rng(5)
        expected = [row for _ in range(chosen.epochs) for row in rng.permutation(30)[:24]]
        assert np.concatenate(tuner.batches).tolist() == expected
    torch.manual_seed(5)
    arch = SMALL if chosen.pooling == "recipe" else replace(SMALL, pooling=chosen.pooling)
    own, ids = Targets(data, chosen), encode(word_tokenizer(), rows, 16, chosen.always_pairs)
    model = SequenceClassifier(Encoder(arch), own.num_labels)
    plain_loop(model, ids, own, tuner.batches, chosen)
    tuner.train()
    for parameter, weight in model.encoder.named_parameters():
        torch.testing.assert_close(encoder_of(tuner)[parameter], weight.detach(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(tuner.predict(rows[:7]), plain_answers(model, ids[:7], own), atol=1e-3)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_learning_rates_decay_over_the_layers(norm):
    """The first step moves each weight by its layer's share; ELECTRA's exponents are 0, and 2 from the top layer on."""
    arch = replace(SMALL, num_layers=2, norm_placement=norm, final_norm=norm == "pre", neighbor_mixing=2)
    data, moved = TaskData(TASKS["cola"], word_rows(16), {}), []
    for decay in (0.5, 1.0):
        protocol = Protocol(layer_decay=decay, lr=0.01)
        tuner = FineTuner(arch, None, word_tokenizer(), data, protocol, 0, hardware())
        before = {name: weight.detach().clone() for name, weight in tuner.optimizer.named.items()}
        for t in (0.1, 0.2):  # the rate is set anew for each step
            tuner.step(tuner.batches[0], t)
            if t == 0.1:
                moved.append({n: (w.detach() - before[n]).norm().item() for n, w in tuner.optimizer.named.items()})
        rates = {group["lr"] for optimizer in tuner.optimizer.optimizers for group in optimizer.param_groups}
        assert max(rates) == learning_rate(protocol, 0.2) and len(rates) == (4 if decay < 1 else 1)
    shares = {"head": 1, "encoder.final_norm": 1, "encoder.blocks.1": 2**-2, "encoder.blocks.0": 2**-3}
    for name, distance in moved[0].items():
        share = next((of for start, of in shares.items() if name.startswith(start)), 2**-4)
        assert distance == pytest.approx(moved[1][name] * share, rel=1e-3), name


@pytest.mark.parametrize("pairs", PAIR_VIEWS)
def test_sentences_of_symmetric_pairs_are_exchanged(pairs):
    protocol, rows = Protocol(swap=True, pairs=pairs, epochs=3, batch_size=8), word_rows(20, pair=True)
    data = TaskData(TASKS["mrpc"], rows, {})
    tuner = FineTuner(SMALL, None, word_tokenizer(), data, protocol, 0, hardware())
    epochs = np.split(np.concatenate(tuner.batches), 3)
    assert [sorted(epoch - order) for epoch, order in zip(epochs, (0, 20, 0), strict=True)] == 3 * [list(range(20))]
    exchanged = [(b, a, label) for a, b, label in rows]
    assert tuner.train_ids == tuner.encode(rows) + tuner.encode(exchanged)
    tuner.train()
    assert tuner.predict(rows).tolist() == tuner.predict(exchanged).tolist()
    rte = FineTuner(SMALL, None, word_tokenizer(), replace(data, task=TASKS["rte"]), protocol, 0, hardware())
    assert len(rte.train_ids) == 20 and max(map(max, rte.batches)) == 19  # an entailment has a direction


def test_small_tasks_get_more_epochs():
    data = {name: TaskData(TASKS[name], word_rows(rows), {}) for name, rows in (("rte", 100), ("cola", 2000))}
    found = {name: for_task(Protocol(fewest_steps=70), name, data) for name in data}
    assert found == dict(rte=Protocol(epochs=12), cola=Protocol())
    assert found["rte"].breaches == ["12 epochs"]


def some_rows(name: str) -> list[tuple]:
    return word_rows(12, TASKS[name].pair, 6 if name == "stsb" else 2)


def targets(name: str, **changes) -> Targets:
    rows = some_rows(name)
    return Targets(TaskData(TASKS[name], rows, {name: rows}), replace(Protocol(), **changes))


def test_targets_of_a_regression():
    raw, standard = targets("stsb", standardize=False), targets("stsb")
    assert raw.values.tolist() == [n % 6 for n in range(12)]
    assert standard.values.mean() == pytest.approx(0, abs=1e-6) and standard.values.std() == pytest.approx(1)
    for one in (raw, standard):  # what is answered has the scale of the task
        logits = torch.from_numpy(one.values)[:, None]
        np.testing.assert_allclose(one.answers(logits), raw.values, atol=1e-5)
    assert targets("sst2").values.tolist() == targets("sst2", standardize=False).values.tolist()


def test_a_single_sentence_as_a_pair():
    tokenizer = word_tokenizer()
    for name, more in {"sst2": [3], "rte": []}.items():
        rows = some_rows(name)
        alone, paired = encode(tokenizer, rows, 16), encode(tokenizer, rows, 16, always_pairs=True)
        assert all(pair == [*row, *more] for (row,), (pair,) in zip(alone, paired, strict=True))


def test_pooling_of_a_protocol():
    rows = word_rows(12)
    data = TaskData(TASKS["sst2"], rows, {"sst2": rows})

    def answers(pooling: str, arch: Architecture) -> list:
        given = (arch, None, word_tokenizer(), data, Protocol(pooling=pooling), 0, hardware())
        tuner = FineTuner(*given)
        return tuner.model.eval()(*tuner.collate(tuner.train_ids)).tolist()

    mean, first = (replace(SMALL, pooling=pooling) for pooling in ("mean", "first"))
    assert answers("recipe", mean) == answers("mean", first) != answers("first", mean) == answers("recipe", first)
    with pytest.raises(UserError, match="recipe, mean, first"):
        Protocol(pooling="max")


def test_learning_rate_after_and_beneath_the_warmup():
    late, rules = (Protocol(lr=1.0, warmup=0.5, late_schedule=late) for late in (True, False))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, 10, 20)
    for step in range(20):
        assert learning_rate(late, step / 20) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert learning_rate(rules, 0.5) == pytest.approx(0.5)  # the cosine is half-way down


@pytest.mark.parametrize("rows", [3, 4, 9])
def test_last_batch(rows):
    lengths, rng = np.full(rows, 5), np.random.default_rng(0)
    for by_length in (True, False):
        kept, dropped = (
            epoch_batches(lengths, Protocol(batch_size=4, drop_last=drop, by_length=by_length), rng)
            for drop in (False, True)
        )
        assert sorted(np.concatenate(kept)) == list(range(rows))
        assert [len(batch) for batch in dropped] == ([4] * (rows // 4) or [rows])  # never nothing


def test_padding_is_not_longer_than_the_model_reads():
    class Wide(Device):
        pad_multiple = 8

    arch = replace(SMALL, max_length=12, position="learned")
    rows = [(" ".join(["w9"] * 20), None, n % 2) for n in range(4)]
    data = TaskData(TASKS["sst2"], rows, {"sst2": rows})
    tuner = FineTuner(arch, None, word_tokenizer(), data, Protocol(batch_size=4), 0, hardware(device=Wide()))
    tuner.step(tuner.batches[0])
    ids = [([2, 5, 3],), ([2, 3],)]
    for limit, expected in ((16, 8), (5, 5), (2, 3)):
        tokens, attention_mask = collate(ids, Wide(), limit)
        assert tokens.shape == (2, expected) and attention_mask.sum(1).tolist() == [3, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_number_format_reaches_the_model(dtype, finished, glue, tmp_path, monkeypatch):
    seen = []

    class Spy(FineTuner):
        def train(self):
            super().train()
            weights = self.optimizer.named.values()
            seen.append(({w.dtype for w in self.model.parameters()}, {w.dtype for w in weights}))
            assert self.optimizer.loss_scale.value == (2**16 if dtype == torch.float16 else 1)
            assert all(w.isfinite().all() for w in weights)

    monkeypatch.setattr(chapter, "FineTuner", Spy)
    (result,) = evaluate(finished, glue, tmp_path / "results", hardware(dtype), ("rte",), baseline=False)
    assert seen == [({dtype}, {torch.float32})] and 0 <= result["scores"]["rte"] <= 1


def test_float16_skips_what_overflows():
    rows = word_rows(8)
    data = TaskData(TASKS["sst2"], rows, {"sst2": rows})
    tuner = FineTuner(SMALL, None, word_tokenizer(), data, Protocol(lr=1e-2), 0, hardware(torch.float16))

    before = encoder_of(tuner)
    tuner.optimizer.loss_scale.value.fill_(2.0**40)
    tuner.step(tuner.batches[0])
    assert all(torch.equal(weight, before[name]) for name, weight in encoder_of(tuner).items())
    assert tuner.optimizer.skipped == 1 and tuner.optimizer.loss_scale.value == 2.0**39
    tuner.optimizer.loss_scale.value.fill_(2.0**10)
    tuner.step(tuner.batches[0])
    assert any(not torch.equal(weight, before[name]) for name, weight in encoder_of(tuner).items())


def evaluate(finished, glue: Path, folder: Path, where: Hardware, names: tuple = (), **options) -> list[dict]:
    """Results of fine-tuning the finished run on some tasks, without what depends on the clock."""
    recipe = load_run(finished.folder).recipe
    found = finetuning.evaluate(
        load_glue(glue, names), recipe.architecture, finished.folder / "checkpoints",
        str(finished.folder / "export" / "tokenizer.json"), recipe.protocol, folder, where, progress=False, **options,
    )  # fmt: skip
    return [{key: value for key, value in result.items() if key != "seconds"} for result in found]


def test_several_at_a_time_on_two_devices(finished, glue, tmp_path):
    device = TwoDevices(tmp_path / "notes")
    together = evaluate(finished, glue, tmp_path / "together", hardware(device=device, threads=2), seeds=range(2))
    assert device.selected() == [0, 1] and len(together) == 12
    assert together == evaluate(finished, glue, tmp_path / "in_turn", hardware(), seeds=range(2))


@pytest.fixture
def forked(monkeypatch):
    """Worker processes are forked from a server that has loaded torch: no wait for imports."""
    monkeypatch.setattr(finetuning, "multiprocessing", SimpleNamespace(get_context=lambda method: Killable.server))


def test_too_little_memory_for_four(finished, glue, tmp_path, capsys, forked):
    device = LittleMemory(tmp_path / "notes")
    together = evaluate(finished, glue, tmp_path / "together", hardware(device=device, threads=4))
    assert capsys.readouterr().out == "too little memory for 4 fine-tunings at a time; going on with 2\n"
    assert device.selected() == [0, 0, 0, 1, 1, 1] and len(together) == 6
    assert together == evaluate(finished, glue, tmp_path / "in_turn", hardware())


def test_processes_that_the_system_kills(finished, glue, tmp_path, capsys, forked):
    device = Killer(tmp_path / "notes")
    found = evaluate(finished, glue, tmp_path / "results", hardware(device=device, threads=2), ("rte",))
    reasons = "(out of memory, or a script without the `if __name__ == '__main__'` guard)"
    assert capsys.readouterr().out == f"a process ended early, of 2 at a time {reasons}; going on with 1\n"
    assert [result["init"] for result in found] == ["pretrained", "random"]


def test_too_little_memory_for_one(finished, glue, tmp_path):
    class Full(Device):
        def put(self, array: np.ndarray):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(UserError, match="too little memory for one fine-tuning"):
        evaluate(finished, glue, tmp_path / "results", hardware(device=Full()), ("rte",))
    assert not list((tmp_path / "results").iterdir())


@pytest.mark.parametrize(
    ("free", "threads", "jobs", "expected"),
    [
        (None, 1, 90, (1, 1, 1)),  # devices, processes on each, threads of each
        (None, 16, 90, (2, 4, 2)),
        (None, 16, 1, (1, 1, 16)),
        (25, 16, 90, (2, 2, 4)),
        (5, 16, 90, (2, 1, 8)),
    ],
)
def test_plan_of_workers(free, threads, jobs, expected):
    class Machine(Device):
        finetune_jobs = 4

        def count(self) -> int:
            return min(2, threads)

        def free_memory(self) -> int | None:
            return free

    plan = plan_workers(hardware(device=Machine(), threads=threads), jobs, bytes_each=10)
    assert (plan.devices, plan.per_device, plan.threads) == expected


def test_carried_warmup():
    data = {name: TaskData(task, range(task.rows[0]), {}) for name, task in TASKS.items()}
    shares = {name: for_task(PROTOCOLS["reference"], name, data).warmup for name in data}
    expected = dict(mnli=0.0022, qqp=0.0023, qnli=0.008, sst2=0.013, stsb=0.15, mrpc=0.23, rte=0.34, cola=0.1)
    assert {n: shares[n] for n in expected} == pytest.approx(expected, rel=0.05)
    assert for_task(PROTOCOLS["rules"], "rte", data) == PROTOCOLS["rules"]
    tiny = {**data, "rte": TaskData(TASKS["rte"], range(20), {})}
    assert for_task(PROTOCOLS["reference"], "rte", tiny).warmup == 1


def archive_in(folder: Path) -> Path:
    """An archive that is in order."""
    rng, path = np.random.default_rng(0), folder / "submission.zip"
    labels = {name: len(TASKS[task].labels or []) for name, (task, *_) in ARCHIVE.items()}
    answers = {
        name: (rng.integers(0, labels[name], rows) if labels[name] else rng.uniform(-1, 7, rows)).tolist()
        for name, (_, _, rows) in ARCHIVE.items()
    }
    write_archive(path, answers, TASKS)
    return path


def test_archive_in_order(tmp_path):
    archive = archive_in(tmp_path)
    with zipfile.ZipFile(archive) as found:
        assert sorted(found.namelist()) == sorted(f"{name}.tsv" for name in ARCHIVE)
        tables = {name: found.read(name).decode().splitlines() for name in found.namelist()}
    assert {table[0] for table in tables.values()} == {"index\tprediction"}
    values = [float(row.split("\t")[1]) for row in tables["STS-B.tsv"][1:]]
    assert (min(values), max(values)) == (0, 5)
    for name, words in {"MNLI-m": set(THREE), "RTE": set(THREE[:1]) | {"not_entailment"}, "WNLI": {"0", "1"}}.items():
        assert {row.split("\t")[1] for row in tables[f"{name}.tsv"][1:]} == words


def test_submission(a_copy, glue):
    """The answers of the seed with the median score, in the words of the server; what is missing is said."""
    for name, test in {"RTE": ["sentence1", "sentence2"], "STS-B": ["sentence1", "sentence2"]}.items():
        write_jsonl(glue / name / "test.jsonl", [dict.fromkeys(test, "Rain fell.") for _ in range(5)])
    argv = [
        "glue",
        "first",
        "--glue-dir",
        glue,
        "--submission",
        "--seeds",
        "3",
        "--no-baseline",
        "--tasks",
        "rte",
        "stsb",
    ]
    said = a_copy.command(*argv)
    assert said.code == 0, said.err
    assert "missing: CoLA" in said.out and "RTE.tsv: 5 rows; the test set has 3,000" in said.out
    results = [
        json.loads(p.read_text())
        for p in (a_copy.folder / "glue").glob("rte-pretrained-*")
        if "predictions" in p.read_text()
    ]
    chosen = sorted(results, key=lambda r: (r["scores"]["rte"], r["seed"]))[1]
    with zipfile.ZipFile(a_copy.folder / "glue" / "submission.zip") as archive:
        assert set(archive.namelist()) == {"RTE.tsv", "STS-B.tsv"}
        answers = [row.split("\t")[1] for row in archive.read("RTE.tsv").decode().splitlines()[1:]]
        values = [float(row.split("\t")[1]) for row in archive.read("STS-B.tsv").decode().splitlines()[1:]]
    assert answers == [TASKS["rte"].labels[int(p)] for p in chosen["predictions"]["RTE"]]
    assert len(values) == 5 and all(0 <= value <= 5 for value in values)
    assert not [r for r in RunRecord.read(a_copy.folder / "record.json").results if "predictions" in r]
    a_copy.command("glue", "first", "--glue-dir", glue, "--tasks", "rte", "--no-baseline")  # test rows decide no score
    record = RunRecord.read(a_copy.folder / "record.json")
    assert len([r for r in record.results if (r["task"], r["init"]) == ("rte", "pretrained")]) == 3


def test_only_the_pretrained_model_is_submitted(tmp_path):
    def result(init: str, score: float, answer: int) -> dict:
        return dict(task="rte", init=init, scores=dict(rte=score), predictions=dict(RTE=[answer]))

    results = [result("counting", 0.5, 1), result("random", 0.6, 1), result("pretrained", 0.7, 0)]
    write_submission(results, tmp_path / "submission.zip")
    with zipfile.ZipFile(tmp_path / "submission.zip") as archive:
        assert archive.read("RTE.tsv").decode().split() == ["index", "prediction", "0", "entailment"]


def test_answers_that_are_no_numbers_are_objected_to(tmp_path):
    answers = dict(task="stsb", init="pretrained", scores=dict(stsb=0.0), predictions={"STS-B": [1.0, math.nan]})
    objections = write_submission([answers], tmp_path / "submission.zip")
    assert [line for line in objections if line.startswith("STS-B.tsv: answers that are no numbers")]


@pytest.mark.parametrize("label", [None, [1], True, "one", 7, math.nan])
def test_what_is_no_number_is_no_label_of_a_regression(label):
    with pytest.raises(ValueError):
        TASKS["stsb"].number(label)
    assert [TASKS["stsb"].number(good) for good in (3, 3.8, "3.800")] == [3, 3.8, 3.8]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_answer_that_is_not_finite_scores_0_and_is_noted(wrong):
    data = TaskData(TASKS["stsb"], [("a", "b", 1.0), ("c", "d", 2.0)], {"stsb": [("a", "b", i / 10) for i in range(9)]})
    predicted = np.append(np.arange(8.0), wrong)
    assert pearson(predicted, np.arange(9.0)) == 0
    result = score_predictions(data, {"stsb": predicted})
    assert result["scores"] == {"stsb": 0} and np.isfinite(result["replicates"]["stsb"]).all()
    assert result["notes"] == ["stsb: an answer that is no finite number"]


def test_special_token_within_a_text_is_text():
    """In fine-tuning as in the corpus; afterwards, the tokenizer reads them as before."""
    texts = ["what does [SEP] do", "the [MASK] and the [PAD]", "[CLS] is first"]
    tokenizer = train_tokenizer(texts, 60)
    rows = [(text, None, 0) for text in texts] + [(texts[0], texts[1], 0)]
    special = [[i for i in ids if i in (PAD, CLS, SEP, MASK)] for (ids,) in encode(tokenizer, rows, 64)]
    assert special == [[CLS, SEP]] * 3 + [[CLS, SEP, SEP]]
    assert MASK in tokenizer.encode("the [MASK]").ids


@pytest.mark.parametrize("answered", [0, 0.01, 0.5, 1])
@pytest.mark.parametrize("asked", [0, 0.01, 0.5, 1])
def test_f1_is_that_of_scikit_learn(answered, asked):
    """To the last bit, also where nothing is answered 1, or labelled 1."""
    rng = np.random.default_rng(0)
    predicted, labels = (rng.random((20, 300)) < share for share in (answered, asked))
    for one, other in zip(predicted.astype(int), labels.astype(float), strict=True):
        assert f1(one, other) == f1_score(other, one, zero_division=0)


def invented(right: np.ndarray, column: str, seed: int = 0) -> dict:
    """A result of a model that is right on these rows."""
    labels = np.ones(len(right))
    scores = {column: accuracy(right, labels)}
    return dict(
        task=column,
        init="pretrained",
        seed=seed,
        scores=scores,
        replicates={column: replicates(accuracy, right, labels)},
    )


def test_comparison_is_paired():
    rng = np.random.default_rng(0)
    weak = (rng.random(500) < 0.7).astype(float)
    strong = np.where(rng.random(500) < 0.08, 1.0, weak)
    found = compare([invented(strong, "sst2"), invented(weak, "rte")], [invented(weak, "sst2"), invented(weak, "rte")])
    assert found["rte"] == (0, 0, 0)
    difference, low, high = found["sst2"]
    assert 0 < low < difference < high and difference == pytest.approx(100 * (strong - weak).mean())
    assert found["mean"][0] == pytest.approx(difference / 2)
    one, two = (np.array(invented(r, "sst2")["replicates"]["sst2"]) for r in (strong, weak))
    assert high - low < 100 * np.ptp(np.quantile(one, [0.025, 0.975])) / 2  # narrower than either alone
    assert low == pytest.approx(100 * np.quantile(one - two, 0.025))


def test_columns_of_different_rows_are_not_compared():
    """Neither the column nor a mean that holds it; results without a checksum are compared as before."""
    right = np.arange(300) % 4 > 0.0

    def results(**rows) -> list[dict]:
        return [invented(right, column) | (dict(data=data) if data else {}) for column, data in rows.items()]

    ours = results(sst2="a", rte="b", cola="c")
    other = results(sst2="a", rte="x", cola="c")
    assert list(compare(ours, other)) == ["sst2", "cola", "mean"] and other_rows(ours, other) == ["rte"]
    assert list(compare(ours, results(sst2="a", rte=None, cola="c"))) == ["sst2", "rte", "cola", "mean"]
    assert list(compare([*ours, *results(cola="y")], ours)) == ["sst2", "rte", "mean"]
    with pytest.raises(UserError, match=r"share no task without sst2, rte \(other rows\); score both on the same"):
        compare(ours, results(sst2="x", rte="y"))


def test_baselines_have_lines_of_their_own():
    """Any number of named baselines, before random weights and the pretrained model; each can be compared with."""
    rows = [("a", None, 1), ("b", None, 1), ("c", None, 0), ("d", None, 1)]
    tasks = {"sst2": TaskData(TASKS["sst2"], rows, {"sst2": rows[1:]})}
    answers = {
        "pretrained": np.array([1, 0, 1]),
        "random": np.array([1, 1, 0]),
        "always no": np.zeros(3),
        "constant": constant_answer(tasks["sst2"])["sst2"],
    }
    about = dict(task="sst2", seed=0, data=tasks["sst2"].digest)
    results = [
        score_predictions(tasks["sst2"], {"sst2": answer}) | about | dict(init=init) for init, answer in answers.items()
    ]
    table = ScoreTable(results)
    assert table.inits == ["always no", "constant", "random", "pretrained"]
    assert [round(table.value(init), 1) for init in table.inits] == [33.3, 66.7, 33.3, 100.0]
    text = table._repr_markdown_()
    names = [line.split(" | ")[0].strip("| ") for line in text.splitlines()[2:]]
    assert names == ["always no", "majority baseline", "no pretraining", "pretrained"]
    assert "the same answer" not in table.coverage()  # of fine-tunings only
    stuck = results[0] | dict(notes=["sst2: the same answer to every row"])
    assert "sst2: the same answer to every row in 1 of 2 fine-tunings" in ScoreTable([stuck, *results[1:]]).coverage()
    assert compare(results, results, ("pretrained", "constant"))["mean"][0] == pytest.approx(100 / 3)


def test_constant_answer():
    similar = TaskData(TASKS["stsb"], [("a", "b", 1.0), ("a", "c", 4.0)], {"stsb": [("a", "d", 2.0)] * 3})
    assert constant_answer(similar)["stsb"].tolist() == [2.5] * 3
    rows = [("a", "b", 2), ("a", "c", 0), ("a", "d", 2)]
    entailed = TaskData(TASKS["mnli"], rows, {"mnli": rows, "mnli-mm": rows[:1]})
    assert {column: a.tolist() for column, a in constant_answer(entailed).items()} == {
        "mnli": [2, 2, 2],
        "mnli-mm": [2],
    }


def test_interval_covers_the_truth():
    """Of 95 % intervals of models that are right on 80 % of all rows there are, about 95 % hold 80."""
    rng = np.random.default_rng(0)
    tables = [ScoreTable([invented((rng.random(400) < 0.8).astype(float), "sst2")]) for _ in range(200)]
    cells = [percentiles(table.resampled_values("pretrained", "sst2")) for table in tables]
    assert 0.9 < np.mean([low <= 80 <= high for low, high in cells]) <= 0.99


def test_more_seeds_narrow_what_seeds_spread():
    rng = np.random.default_rng(0)
    runs = [
        invented((np.arange(300) < 300 * rate).astype(float), "rte", s)
        for s, rate in enumerate(rng.normal(0.6, 0.05, 40))
    ]
    width = {n: np.ptp(percentiles(ScoreTable(runs[:n]).resampled_values("pretrained", "rte"))) for n in (5, 40)}
    assert width[40] < width[5]


def test_official_means():
    rows = [
        dict(init="pretrained", scores=dict(zip(NINE, np.array(row) / 100, strict=True)))
        for row in PAPER_SCORES.values()
    ]
    found = [
        {which: round(ScoreTable([row]).value("pretrained", which), 1) for which in ScoreTable([row]).weights}
        for row in rows
    ]
    assert [means["mean"] for means in found[:4]] == [45.5, 78.6, 80.7, 80.9]
    assert [m["mean with MNLI counted once"] for m in found[2:4]] == pytest.approx([80.27, 80.65], abs=0.06)
    assert "wnli" not in ScoreTable([dict(init="random", scores=dict(wnli=0.5, rte=0.6))]).weights["mean"]


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[1].glob("records/pocket-*.json")), ids=lambda p: p.stem)
def test_records_without_replicates_still_show(path):
    table = ScoreTable(RunRecord.read(path).results)
    if all("replicates" not in r for r in table.results):
        assert "(" in table.cell("pretrained", table.columns[0]) and "(" not in table.cell("pretrained")
    assert "of 9 GLUE numbers" in table.coverage()
