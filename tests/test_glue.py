"""GLUE as it comes and as it goes: the official tables, the hub, protocols, seeds, interruption, and the archive for the server."""

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GLUE_ROWS, contents, lines, write_jsonl
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from cramming_nb import glue as chapter
from cramming_nb.architecture import Architecture, Encoder, SequenceClassifier
from cramming_nb.budget import UserError
from cramming_nb.glue import NINE, PROTOCOLS, TASKS, ScoreTable, accuracy, compare, load_glue, replicates
from cramming_nb.hardware import DEVICES, Hardware
from cramming_nb.optimizer import Optimizer, OptimizerConfig
from cramming_nb.records import RunRecord
from cramming_nb.tasks import ARCHIVE, check_archive, write_archive

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


BAD_OPTIONS = {  # name: (more of the command, words of the line)
    "task unknown": ("--tasks colla", "'colla'", "cola"),
    "task missing": ("--tasks mrpc", "no MRPC", "mrpc"),
    "protocol": ("--protocol rule", "'rule'", "rules, reference"),
    "no MNLI": ("--protocol mnli-first", "needs MNLI", "MNLI/"),
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


def test_options_that_need_tasks(a_copy):
    said = a_copy.command("glue", "first", "--submission")
    assert said.code == 2 and "--glue-dir" in said.err


def write_glue(folder: Path, name: str, train: list[dict], dev: list[dict], test: list[dict] = ()):
    (folder / name).mkdir(exist_ok=True)
    splits = dict(train=train, dev=dev, dev_matched=dev, dev_mismatched=dev, test=test, test_matched=test)
    for split, rows in splits.items():
        if rows and (("_" in split) == (name == "MNLI") or split == "train"):
            write_jsonl(folder / name / f"{split}.jsonl", list(rows))


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
        ("pretrained", 0), ("random", 0), ("pretrained", 1), ("random", 1),
    ]  # fmt: skip
    assert {"order", "rte"} <= {r["task"] for r in record.results}
    assert "1 of 9 GLUE numbers" in (a_copy.folder / "report.html").read_text()
    before = contents(a_copy.folder)
    assert a_copy.command(*argv).code == 0 and contents(a_copy.folder) == before
    other = a_copy.command(*argv, "--protocol", "bert-base")
    assert other.code == 0 and RunRecord.read(a_copy.folder / "record.json") == record  # not by the run's own protocol


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
    monkeypatch.setattr("cramming_nb.run.evaluate", lambda *a: seen.append(a[7]) or [])
    settings = json.loads((a_copy.folder / "run.json").read_text())
    for seed in (0, 3):
        (a_copy.folder / "run.json").write_text(json.dumps(settings | dict(seed=seed)))
        a_copy.command("glue", "first", "--glue-dir", glue, "--finetune-seeds", "2")
    assert [list(seeds) for seeds in seen] == [[0, 1], [3000, 3001]]


def test_glue_does_not_build_the_corpus_again(a_copy, glue, monkeypatch):
    monkeypatch.setattr("cramming_nb.run.get_corpus", lambda *a, **k: pytest.fail("the corpus is built again"))
    assert a_copy.command("glue", "first", "--glue-dir", glue, "--tasks", "rte").code == 0


def test_another_checkpoint_is_scored_anew(a_copy, glue):
    call = ("glue", "first", "--glue-dir", glue, "--tasks", "rte", "--no-baseline")

    def found() -> set[str]:
        return {p.name for p in (a_copy.folder / "glue").glob("rte-*.json")}

    assert a_copy.command(*call).code == 0
    (before,) = found()
    newest = max((a_copy.folder / "checkpoints").glob("step-*"))
    newest.rename(newest.with_name(f"step-{int(newest.name[5:]) + 1:08}"))
    assert a_copy.command(*call).code == 0
    assert len(found()) == 2 and before in found()


def test_mnli_first(a_copy, glue, monkeypatch):
    """The small tasks start from MNLI's encoder of their seed; after an interruption too, with the same scores."""
    rows = [dict(sentence1=f"Rain fell {i}.", sentence2="It was wet.", label=THREE[i % 3]) for i in range(24)]
    write_glue(glue, "MNLI", rows, rows[:12])
    argv = ["glue", "first", "--glue-dir", glue, "--protocol", "mnli-first", "--tasks", "mnli", "rte", "cola"]
    given, really = [], chapter.finetune

    def finetune(arch, weights, tokenizer, data, *more, **options):
        given.append((data.task.name, weights))
        return really(arch, weights, tokenizer, data, *more, **options)

    monkeypatch.setattr(chapter, "finetune", finetune)
    said = a_copy.command(*argv)
    assert said.code == 0, said.err
    assert [name for name, _ in given[-2:]] == ["rte", "rte"] and all(weights for _, weights in given[-2:])
    started, plain = given[-2][1], next(weights for name, weights in given if name == "cola" and weights)
    assert any(not np.array_equal(started[n], plain[n]) for n in plain)
    scores = {p.name: json.loads(p.read_text())["scores"] for p in (a_copy.folder / "glue").glob("rte-*.json")}
    for path in [*(a_copy.folder / "glue").glob("rte-*"), *(a_copy.folder / "glue").glob(".encoder-*")]:
        path.unlink()
    assert a_copy.command(*argv).out == said.out
    assert {p.name: json.loads(p.read_text())["scores"] for p in (a_copy.folder / "glue").glob("rte-*.json")} == scores


THREE = ("entailment", "neutral", "contradiction")


def test_a_part_of_the_embedding_learns_as_the_whole_would():
    """Only rows of the task are optimised, from sparse gradients; dense AdamW on all rows gives the same weights."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w1"))
    words.pre_tokenizer = WhitespaceSplit()
    rng = np.random.default_rng(0)
    rows = [(" ".join(f"w{i}" for i in rng.integers(2, 30, 5)), None, n % 2) for n in range(24)]
    arch = Architecture(
        vocab_size=64, hidden_size=16, num_layers=1, num_heads=2, ffn_size=32, dropout=0.0, classifier_size=8
    )
    data, protocol = chapter.TaskData(TASKS["sst2"], rows, {"sst2": rows[:4]}), chapter.Protocol(lr=1e-2, batch_size=4)
    tuner = chapter.FineTuner(arch, None, words, data, protocol, 0, Hardware(DEVICES["cpu"], torch.float32, "explicit", 1, ""))
    torch.manual_seed(0)
    whole = SequenceClassifier(Encoder(arch), 2)
    dense = Optimizer(whole, OptimizerConfig(lr=1e-2, eps=1e-6, weight_decay=0.0, clip=0.0))
    for batch in tuner.batches[:12]:
        tuner.step(batch)
        logits = whole(*chapter.collate([tuner.ids[i] for i in batch], "cpu"))
        dense.backward(F.cross_entropy(logits, tuner.targets[batch]))
        dense.accumulate()
        dense.step(tuner.optimizer.optimizers[0].param_groups[0]["lr"])
    learned = tuner.encoder()
    assert len(tuner.rows) < 40 and learned["embedding.weight"].shape == (64, 16)
    for name, weight in whole.encoder.named_parameters():
        torch.testing.assert_close(learned[name], weight.detach(), rtol=0, atol=1e-4)


def test_carried_warmup():
    data = {name: chapter.TaskData(task, range(task.rows[0]), {}) for name, task in TASKS.items()}
    shares = {name: chapter.for_task(PROTOCOLS["reference"], name, data).warmup for name in data}
    expected = dict(mnli=0.0022, qqp=0.0023, qnli=0.008, sst2=0.013, stsb=0.15, mrpc=0.23, rte=0.34, cola=0.1)
    assert {n: shares[n] for n in expected} == pytest.approx(expected, rel=0.05)
    assert chapter.for_task(PROTOCOLS["rules"], "rte", data) == PROTOCOLS["rules"]
    tiny = {**data, "rte": chapter.TaskData(TASKS["rte"], range(20), {})}
    assert chapter.for_task(PROTOCOLS["reference"], "rte", tiny).warmup == 1


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    """An archive that is in order."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("archive") / "submission.zip"
    labels = {name: len(TASKS[task].labels or []) for name, (task, *_) in ARCHIVE.items()}
    answers = {
        name: (rng.integers(0, labels[name], rows) if labels[name] else rng.uniform(-1, 7, rows)).tolist()
        for name, (_, _, rows) in ARCHIVE.items()
    }
    write_archive(path, answers, TASKS)
    return path


def test_archive_in_order(archive):
    assert check_archive(archive, TASKS) == []
    with zipfile.ZipFile(archive) as found:
        assert sorted(found.namelist()) == sorted(f"{name}.tsv" for name in ARCHIVE)
        tables = {name: found.read(name).decode().splitlines() for name in found.namelist()}
    assert {table[0] for table in tables.values()} == {"index\tprediction"}
    values = [float(row.split("\t")[1]) for row in tables["STS-B.tsv"][1:]]
    assert (min(values), max(values)) == (0, 5)
    for name, words in {"MNLI-m": set(THREE), "RTE": set(THREE[:1]) | {"not_entailment"}, "WNLI": {"0", "1"}}.items():
        assert {row.split("\t")[1] for row in tables[f"{name}.tsv"][1:]} == words


BROKEN = {  # name: (file, what is done to its text, words of the objection)
    "gone": ("CoLA", lambda text: None, "missing: CoLA"),
    "header": ("RTE", lambda text: text.replace("index\t", "id\t"), "RTE.tsv", "header"),
    "row lost": ("SST-2", lambda text: text.rsplit("\n", 2)[0] + "\n", "SST-2.tsv", "1,820 rows", "1,821"),
    "row twice": ("AX", lambda text: text + text.splitlines()[-1] + "\n", "AX.tsv", "1,105 rows"),
    "order": ("MRPC", lambda text: text.replace("\n0\t", "\n5\t", 1), "MRPC.tsv", "'5\\t", "next index"),
    "number for a word": ("QNLI", lambda text: text.replace("not_entailment", "1"), "QNLI.tsv", "\\t1'", "qnli"),
    "word for a number": ("WNLI", lambda text: text.replace("\t1", "\tyes"), "WNLI.tsv", "\\tyes'"),
    "scale": ("STS-B", lambda text: text.replace("\n0\t", "\n0\t9", 1), "STS-B.tsv", "stsb"),
    "cut": ("RTE", lambda text: text[:-12], "RTE.tsv: '2999", "label of rte"),
    "empty": ("CoLA", lambda text: "", "CoLA.tsv", "header"),
}


@pytest.mark.parametrize("what", BROKEN.values(), ids=BROKEN)
def test_broken_archive(what, archive, tmp_path):
    name, change, *words = what
    with zipfile.ZipFile(archive) as found, zipfile.ZipFile(tmp_path / "broken.zip", "w") as broken:
        for file in found.namelist():
            text = found.read(file).decode()
            if (text := change(text) if file == f"{name}.tsv" else text) is not None:
                broken.writestr(file, text)
    said = " ".join(check_archive(tmp_path / "broken.zip", TASKS))
    assert not [word for word in words if word not in said], said


def test_archive_with_more_in_it(archive, tmp_path):
    path = Path(shutil.copy(archive, tmp_path / "more.zip"))
    with zipfile.ZipFile(path, "a") as more:
        more.writestr("notes.txt", "dear server")
    assert check_archive(path, TASKS) == ["notes.txt does not belong here"]
    path.write_bytes(path.read_bytes()[:100])
    assert "cannot be read" in check_archive(path, TASKS)[0]


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
    assert len([r for r in RunRecord.read(a_copy.folder / "record.json").results if r["task"] == "rte"]) == 3


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


def test_interval_covers_the_truth():
    """Of 95 % intervals of models that are right on 80 % of all rows there are, about 95 % hold 80."""
    rng = np.random.default_rng(0)
    tables = [ScoreTable([invented((rng.random(400) < 0.8).astype(float), "sst2")]) for _ in range(200)]
    cells = [chapter.percentiles(table.medians("pretrained", "sst2")) for table in tables]
    assert 0.9 < np.mean([low <= 80 <= high for low, high in cells]) <= 0.99


def test_more_seeds_narrow_what_seeds_spread():
    rng = np.random.default_rng(0)
    runs = [
        invented((np.arange(300) < 300 * rate).astype(float), "rte", s)
        for s, rate in enumerate(rng.normal(0.6, 0.05, 40))
    ]
    width = {n: np.ptp(chapter.percentiles(ScoreTable(runs[:n]).medians("pretrained", "rte"))) for n in (5, 40)}
    assert width[40] < width[5]


def test_official_means():
    rows = [
        dict(init="pretrained", scores=dict(zip(NINE, np.array(row) / 100, strict=True)))
        for row in chapter.PAPER_SCORES.values()
    ]
    found = [
        {which: round(ScoreTable([row]).mean("pretrained", which), 1) for which in ScoreTable([row]).weights}
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
