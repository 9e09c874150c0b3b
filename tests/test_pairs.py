"""Ways to read a sentence pair: what the head reads, equal bits where nothing changes, and rows that are held back."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_glue import SMALL, hardware, plain_answers, plain_loop, some_rows, word_rows, word_tokenizer

from cramming_nb.app.finetuning import evaluate, finetuning_bytes, result_paths
from cramming_nb.app.run import load_run
from cramming_nb.architecture import NUM_FEATURES, Encoder, SequenceClassifier, pair_features
from cramming_nb.engine.errors import UserError
from cramming_nb.engine.hardware import DEVICES
from cramming_nb.glue import (
    PAIR_VIEWS,
    REFERENCE,
    TASKS,
    FineTuner,
    Protocol,
    Targets,
    TaskData,
    collate,
    encode,
    for_task,
    hold_back,
    load_glue,
    row_lengths,
)
from cramming_nb.recipes import RECIPES, change, load_recipe

CPU = DEVICES["cpu"]
CLS, SEP = 2, 3


def task_data(name: str, count: int = 24) -> TaskData:
    rows = word_rows(count, TASKS[name].pair, 6 if name == "stsb" else 2)
    return TaskData(TASKS[name], rows, {name: word_rows(9, TASKS[name].pair)})


def tuner(name: str, pairs: str = "joint", seed: int = 0, **changes) -> FineTuner:
    protocol = Protocol(lr=1e-2, batch_size=8, epochs=2, pairs=pairs, **changes)
    return FineTuner(SMALL, None, word_tokenizer(), task_data(name), protocol, seed, hardware())


def test_views_of_a_pair():
    tokenizer, rows = word_tokenizer(), word_rows(5, pair=True)
    joint, apart, both = (encode(tokenizer, rows, 16, pairs=pairs) for pairs in PAIR_VIEWS)
    for (ab,), (a, b), three in zip(joint, apart, both, strict=True):
        assert ab == a + b[1:] and a[0] == b[0] == CLS and a[-1] == b[-1] == SEP
        assert three == (ab, a, b)
    assert encode(tokenizer, rows, 16) == joint
    short = encode(tokenizer, rows, 5, pairs="both")
    assert {len(sequence) for views in short for sequence in views} == {5}  # each view has the limit to itself


@pytest.mark.parametrize("views", NUM_FEATURES)
def test_shapes(views):
    pooled = torch.randn(4, views, 16)
    assert pair_features(pooled).shape == (4, 16 * NUM_FEATURES[views])
    model = SequenceClassifier(Encoder(SMALL), 3, views)
    assert model.head[0].in_features == 16 * NUM_FEATURES[views]
    encoded = [([2, 5, 3],) * views, ([2, 6, 7, 8, 3],) * views]
    tokens, attention_mask = collate(encoded, CPU, 5)
    assert tokens.shape == attention_mask.shape == (2 * views, 5)
    assert row_lengths(encoded).tolist() == [3, 5]
    assert model(tokens, attention_mask).shape == (2, 3)


def test_features_are_the_published_ones():
    joint, u, v = torch.randn(3, 4, 16)
    four = torch.cat([u, v, abs(u - v), u * v], 1)
    assert torch.equal(pair_features(torch.stack([u, v], 1)), four)
    assert torch.equal(pair_features(torch.stack([joint, u, v], 1)), torch.cat([joint, four], 1))
    assert torch.equal(pair_features(joint[:, None]), joint)


def test_views_of_a_row_stay_together():
    """The head reads of each row what the encoder makes of that row's own sequences."""
    torch.manual_seed(0)
    model = SequenceClassifier(Encoder(SMALL), 2, views=3).eval()
    encoded = encode(word_tokenizer(), word_rows(6, pair=True), 16, pairs="both")
    with torch.no_grad():
        logits = model(*collate(encoded, CPU))
        for row, views in enumerate(encoded):
            pooled = []
            for sequence in views:
                ids, mask = collate([(sequence,)], CPU)
                pooled.append(model.pool(model.encoder(ids, attention_mask=mask), mask))
            joint, u, v = pooled
            expected = model.head(torch.cat([joint, u, v, abs(u - v), u * v], 1))
            torch.testing.assert_close(logits[row : row + 1], expected, rtol=0, atol=1e-5)


def test_swapped_sentences():
    """u and v change places; their distance and product stay, and so does a head that reads nothing else."""
    torch.manual_seed(0)
    model = SequenceClassifier(Encoder(SMALL), 2, views=2).eval()
    rows = word_rows(6, pair=True)
    swapped = [(second, first, label) for first, second, label in rows]
    of = {}
    for name, given in dict(rows=rows, swapped=swapped).items():
        tokens, attention_mask = collate(encode(word_tokenizer(), given, 16, pairs="apart"), CPU)
        with torch.no_grad():
            pooled = model.pool(model.encoder(tokens, attention_mask=attention_mask), attention_mask)
            of[name] = pair_features(pooled.unflatten(0, (-1, 2))).view(6, 4, 16).unbind(1)
    (u, v, distance, product), (u2, v2, distance2, product2) = of["rows"], of["swapped"]
    for one, other in ((u, v2), (v, u2), (distance, distance2), (product, product2)):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert not torch.allclose(u, u2, atol=1e-2)
    encoded = [encode(word_tokenizer(), given, 16, pairs="apart") for given in (rows, swapped)]
    with torch.no_grad():
        model.head[0].weight[:, :32] = 0  # u and v are not read
        one, other = (model(*collate(given, CPU)) for given in encoded)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("pairs", PAIR_VIEWS)
def test_padding_changes_nothing(pairs, pooling):
    torch.manual_seed(0)
    model = SequenceClassifier(Encoder(replace(SMALL, pooling=pooling)), 2, PAIR_VIEWS[pairs]).eval()
    encoded = encode(word_tokenizer(), word_rows(6, pair=True), 16, pairs=pairs)
    with torch.no_grad():
        alone = torch.cat([model(*collate([views], CPU)) for views in encoded])
        tokens, attention_mask = collate(encoded, CPU)
        room = (0, 16 - tokens.shape[1])
        wider = torch.nn.functional.pad(tokens, room), torch.nn.functional.pad(attention_mask, room)
        for given in ((tokens, attention_mask), wider):
            torch.testing.assert_close(model(*given), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pairs", ["apart", "both"])
def test_single_sentences_are_read_as_before(pairs):
    """Same bits: sequences, batches, weights and answers of a task of single sentences."""
    before, now = tuner("cola"), tuner("cola", pairs)
    assert now.train_ids == before.train_ids and now.model.views == 1
    assert all((a == b).all() for a, b in zip(before.batches, now.batches, strict=True))
    before.train(), now.train()
    for name, weight in before.optimizer.named.items():
        assert torch.equal(now.optimizer.named[name], weight), name
    rows = word_rows(9)
    assert (before.predict(rows) == now.predict(rows)).all()


@pytest.mark.parametrize("pairs", ["apart", "both"])
@pytest.mark.parametrize("name", ["rte", "stsb"])
def test_fast_fine_tuning_is_the_plain_one(name, pairs):
    """Batches of similar length end with the weights of the plain loop."""
    fast, data = tuner(name, pairs, seed=5, weight_decay=0.1), task_data(name)
    encoded = encode(word_tokenizer(), data.train, 16, pairs=pairs)
    torch.manual_seed(5)
    own = Targets(data, fast.protocol)
    model = SequenceClassifier(Encoder(SMALL), own.num_labels, PAIR_VIEWS[pairs])
    plain_loop(model, encoded, own, fast.batches, fast.protocol)
    fast.train()
    for parameter, weight in model.named_parameters():
        torch.testing.assert_close(fast.optimizer.named[parameter].detach(), weight.detach(), rtol=0, atol=1e-5)
    rows = data.dev[name]
    expected = plain_answers(model, encode(word_tokenizer(), rows, 16, pairs=pairs), own)
    np.testing.assert_allclose(fast.predict(rows), expected, atol=1e-3)


def test_buckets_go_by_the_longest_view():
    lengths = np.array([30, 10] * 200)
    rows = [(" ".join(["w9"] * (n - 2)), "w8", row % 2) for row, n in enumerate(lengths)]
    rows = [(b, a, label) if row % 3 else (a, b, label) for row, (a, b, label) in enumerate(rows)]
    data = TaskData(TASKS["rte"], rows, {"rte": rows[:4]})
    arch = replace(SMALL, max_length=64)
    given = (arch, None, word_tokenizer(), data, Protocol(batch_size=8, pairs="apart"), 0, hardware())
    made = FineTuner(*given)
    assert (row_lengths(made.train_ids) == lengths).all()
    assert all(len(set(lengths[batch])) == 1 for batch in made.batches)


def test_what_makes_no_sense_is_refused():
    for pairs in ("apart", "both"):
        with pytest.raises(UserError, match=f"protocol.pairs '{pairs}'.*always_pairs=false") as refused:
            replace(REFERENCE, pairs=pairs)
        assert "\n" not in str(refused.value)
        with pytest.raises(UserError, match="always_pairs"):
            change(RECIPES["pocket"], {"protocol.pairs": pairs, "protocol.always_pairs": True})
    with pytest.raises(UserError, match="joint, apart, both"):
        Protocol(pairs="crossed")


def test_more_views_need_more_memory():
    needed = [finetuning_bytes(SMALL, Protocol(pairs=pairs), torch.float32) for pairs in PAIR_VIEWS]
    assert needed == sorted(set(needed))


# --- results on disk

def three_tasks() -> dict[str, TaskData]:
    pairs, singles = [("a", "b", 0), ("c", "d", 1)], [("a", None, 0), ("c", None, 1)]
    return dict(
        rte=TaskData(TASKS["rte"], pairs, {"rte": pairs}),
        cola=TaskData(TASKS["cola"], singles, {"cola": singles}, {"CoLA": singles}),
        mnli=TaskData(TASKS["mnli"], pairs, {"mnli": pairs, "mnli-mm": pairs}),
    )


def test_results_of_other_readings_have_other_files(tmp_path):
    """Only for tasks of pairs: those of single sentences are the same results."""
    jobs = [(name, "pretrained", 0) for name in three_tasks()]
    found = [result_paths(tmp_path, jobs, three_tasks(), Protocol(pairs=pairs), tmp_path) for pairs in PAIR_VIEWS]
    files = {name: {paths[name, "pretrained", 0] for paths in found} for name in three_tasks()}
    assert {name: len(paths) for name, paths in files.items()} == dict(rte=3, cola=1, mnli=3)
    data = three_tasks()
    assert for_task(Protocol(pairs="apart"), "cola", data) == Protocol()
    assert for_task(Protocol(pairs="apart"), "rte", data).pairs == "apart"


def test_old_recipes_read_pairs_together(tmp_path):
    (tmp_path / "old.yaml").write_text("protocol: {epochs: 3}\n")
    assert load_recipe(str(tmp_path / "old.yaml")).protocol == Protocol(epochs=3, pairs="joint")
    apart = {name for name, recipe in RECIPES.items() if recipe.protocol.pairs == "apart"}
    assert apart == {"pocket", "sprint"}  # the paper's recipes, and ours for a day, read pairs as the paper does
    assert {recipe.protocol.pairs for name, recipe in RECIPES.items() if name not in apart} == {"joint"}
    mine = change(RECIPES["pocket"], {"protocol.pairs": "both"})
    (tmp_path / "mine.yaml").write_text(mine.to_yaml())
    assert load_recipe(str(tmp_path / "mine.yaml")).protocol.pairs == "both"


def results(finished, data: dict, folder, pairs: str, threads: int = 1, **changes) -> list[dict]:
    recipe = load_run(finished.folder).recipe
    found = evaluate(
        data, recipe.architecture, finished.folder / "checkpoints",
        str(finished.folder / "export" / "tokenizer.json"), replace(recipe.protocol, pairs=pairs, **changes),
        folder, hardware(threads=threads), progress=False,
    )  # fmt: skip
    return [{key: value for key, value in result.items() if key != "seconds"} for result in found]


def test_baseline_has_the_same_head(finished, glue, tmp_path, monkeypatch):
    """With and without pretraining, the first layer of the head is as wide as the features."""
    heads, really = {}, FineTuner.train

    def train(self):
        heads.setdefault(self.model.views, []).append(tuple(self.model.head[0].weight.shape))
        really(self)

    monkeypatch.setattr(FineTuner, "train", train)
    data = load_glue(glue, ("rte", "cola"))
    for pairs in PAIR_VIEWS:
        found = results(finished, data, tmp_path, pairs)
        assert [(r["task"], r["init"]) for r in found] == [
            (name, init) for name in ("rte", "cola") for init in ("pretrained", "random")
        ]
    assert heads == {1: 4 * [(32, 32)], 2: 2 * [(32, 128)], 3: 2 * [(32, 160)]}  # CoLA once for all three


@pytest.mark.parametrize("pairs", ["both", pytest.param("apart", marks=pytest.mark.slow)])
def test_several_at_a_time(pairs, finished, glue, tmp_path):
    data = load_glue(glue, ("rte", "cola"))
    together = results(finished, data, tmp_path / "together", pairs, threads=2)
    assert together == results(finished, data, tmp_path / "in_turn", pairs)


def test_test_rows_are_answered(finished, glue, tmp_path):
    """By the pretrained model only, which reads pairs as the protocol says."""
    rows = some_rows("rte")
    data = dict(rte=TaskData(TASKS["rte"], rows, {"rte": rows}, {"RTE": rows[:5]}))
    found = results(finished, data, tmp_path, "apart")
    assert [(r["init"], len(r.get("predictions", {}).get("RTE", []))) for r in found] == [
        ("pretrained", 5), ("random", 0)]  # fmt: skip


# --- rows that are held back


def numbered(name: str, count: int) -> TaskData:
    labels = TASKS[name].labels
    share = [0] * 6 + [1] * 3 + [2]  # classes of different sizes
    rows = [(f"a {n}", f"b {n}", float(n % 6) if labels is None else share[n % 10] % len(labels)) for n in range(count)]
    return TaskData(TASKS[name], rows, {"old": rows[:3]}, {"test": rows[:3]})


@pytest.mark.parametrize("name", ["mnli", "rte", "stsb"])
@pytest.mark.parametrize("share", [0.1, 0.25])
def test_held_back_rows(name, share):
    """Disjoint, complete, in order, the same each time; nothing of the development and test rows."""
    data = numbered(name, 1000)
    found = hold_back(data, share)
    (column,) = found.dev
    held = found.dev[column]
    assert column == name and found.task is data.task and not found.tests
    assert not set(found.train) & set(held) and {*found.train, *held} == set(data.train)
    assert found.train == sorted(found.train, key=data.train.index) and len(held) == 1000 * share
    again, other = hold_back(data, share), hold_back(data, share, seed=1)
    assert (again.train, again.dev, again.digest) == (found.train, found.dev, found.digest)
    assert other.dev != found.dev and len({data.digest, found.digest, other.digest}) == 3
    if data.task.labels:
        for label in {row[2] for row in data.train}:
            of_class = sum(row[2] == label for row in data.train)
            assert sum(row[2] == label for row in held) == round(share * of_class)


def test_development_rows_decide_nothing_held_back():
    data = numbered("rte", 100)
    other = TaskData(data.task, data.train, {"old": data.train[50:]})
    assert hold_back(data).dev == hold_back(other).dev and hold_back(data).digest == hold_back(other).digest


@pytest.mark.parametrize(("share", "rows"), [(0, 100), (1, 100), (-0.1, 20), (1.5, 20), (0.1, 3)])
def test_too_little_to_hold_back(share, rows):
    with pytest.raises(UserError, match=f"rte: {rows} training rows.*none to score") as refused:
        hold_back(numbered("rte", rows), share)
    assert "\n" not in str(refused.value)


def test_held_back_results_are_results_of_their_own(finished, glue, tmp_path):
    data = load_glue(glue, ("rte",))
    held = {name: hold_back(task, share=0.25) for name, task in data.items()}
    (whole, _), (part, _) = results(finished, data, tmp_path, "joint"), results(finished, held, tmp_path, "joint")
    assert part["data"] != whole["data"] and part["train_rows"] < whole["train_rows"]
    assert part["dev_rows"] == {"rte": whole["train_rows"] - part["train_rows"]}
    assert len(list(tmp_path.glob("rte-*.json"))) == 4 and json.dumps(part)
