"""First embeddings from counts: what they are made of, when they are made, and that they are the same each time."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import command
from safetensors.torch import load_file
from test_distribution import Ranks
from test_resume import BUDGET, kill_and_resume, learned, newest

from cramming_nb import counts, training
from cramming_nb.architecture import INITS, MaskedLM
from cramming_nb.corpus import Corpus
from cramming_nb.engine.clock import Clock
from cramming_nb.engine.hardware import Hardware
from cramming_nb.recipes import load_recipe
from cramming_nb.tokenizer import MASK
from cramming_nb.training import Learner, prepare

COUNTS = ["--set", "architecture.init=counts"]


def some_rows(vocab_size: int, shape: tuple, seed: int = 0) -> np.ndarray:
    """Token ids that become rarer, as those of a language do; the last tenth of them never occurs."""
    chances = 1 / np.arange(1, vocab_size - vocab_size // 10 + 1)
    return np.random.default_rng(seed).choice(len(chances), shape, p=chances / chances.sum()).astype(np.uint16)


def plain_counts(rows: np.ndarray, vocab_size: int, window: int) -> np.ndarray:
    found = np.zeros((vocab_size, vocab_size))
    for row in rows:
        for i, token in enumerate(row):
            for j, other in enumerate(row):
                found[token, other] += 0 < abs(i - j) <= window
    return found


def plain_information(found: np.ndarray) -> np.ndarray:
    """Positive PMI by its definition, [vocabulary, vocabulary]."""
    joint, tokens = found / found.sum(), found.sum(1)
    chance, context = tokens / tokens.sum(), tokens**0.75 / (tokens**0.75).sum()
    expected = np.outer(chance, context)
    return np.log(np.maximum(joint, expected) / np.where(expected, expected, 1), where=expected > 0, out=0 * joint)


@pytest.mark.parametrize("window, length", [(1, 12), (4, 12), (4, 3), (20, 12)])
def test_sparse_counts_are_plain_ones(window, length):
    rows = some_rows(50, (30, length))
    parts = [rows[:7], rows[7:8], rows[8:]]
    found = counts.count_pairs(parts, 50, window)
    assert np.array_equal(found.toarray(), plain_counts(rows, 50, window))
    plain = plain_information(plain_counts(rows, 50, window))
    assert np.abs(counts.positive_pmi(found).toarray() - plain).max() < 1e-5 and (plain > 0).sum() > 50


def test_vectors_are_the_plain_decomposition_up_to_a_rotation():
    rows = some_rows(60, (40, 32))
    plain = plain_information(plain_counts(rows, 60, counts.WINDOW))
    u, s, _ = np.linalg.svd(plain)
    for width in (60, 80):  # all there is, and more: then the approximation is exact
        vectors = counts.count_vectors(rows, 60, width, seed=3)
        ours, exact = vectors @ vectors.T, (u * s**2) @ u.T
        assert vectors.shape == (60, width) and np.abs(ours / ours.max() - exact / exact.max()).max() < 1e-4
    few = counts.factors(counts.positive_pmi(counts.count_pairs([rows], 60)), 16)
    found, best = np.square(few).sum(), np.square(s[:16]).sum()
    assert 0.98 * best < found < 1.0001 * best


def test_vectors_have_the_size_and_the_rotation_that_is_asked_for():
    rows = some_rows(60, (40, 32))
    first, again, other = (counts.count_vectors(rows, 60, 16, seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again) and np.abs(first - other).max() > 0.01
    assert np.allclose(first @ first.T, other @ other.T, atol=1e-6)
    found = first.any(1)
    assert found.sum() == 54 and np.square(first[found]).sum(1).mean() == pytest.approx(counts.LENGTH**2, rel=1e-5)


def test_text_of_one_token_gives_no_vectors():
    assert not counts.count_vectors(np.full((4, 8), 3, np.uint16), 20, 8, 0)[4:].any()


@pytest.mark.parametrize("length", [32, 128])
@pytest.mark.parametrize("number, tokens", [(1000, 10**9), (63, 10**9), (5000, 40_000), (5000, 1)])
def test_sample_is_spread_evenly_and_no_larger_than_asked(number, tokens, length):
    rows = np.repeat(np.arange(number)[:, None], length, 1)
    seen = np.concatenate([part[:, 0] for part in counts.sampled_rows(rows, tokens)])
    assert len(seen) == len(set(seen)) and (np.diff(seen) > 0).all()
    if tokens >= rows.size:
        assert len(seen) == number
    else:
        assert len(seen) * length < tokens + counts.SPAN * length
        gaps = np.diff(seen[:: counts.SPAN])
        assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1


def test_a_large_vocabulary_takes_little_memory():
    """As a table of 32-bit numbers the counts alone would take 4.3 GB."""
    rows = some_rows(32768, (1 << 13, 128))
    tracemalloc.start()
    vectors = counts.count_vectors(rows, 32768, 64, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.7e9, peak
    assert vectors.shape == (32768, 64) and vectors.any(1).sum() > 20_000


@pytest.fixture(scope="module")
def make(tiny):
    """Makes learners of the tiny recipe with parts of their architecture changed, their clocks running."""
    assert command("data", "build", *tiny.options()[:3], cache=tiny.cache).code == 0
    corpus, r = Corpus(next(tiny.cache.glob("corpus-*"))), load_recipe(str(tiny.recipe))
    arch = replace(r.architecture, vocab_size=r.corpus.vocab_size, max_length=r.corpus.seq_length)

    def learner(seed: int = 0, objective: str = "mlm", **changes) -> Learner:
        objective = replace(r.objective, name=objective)
        parts = replace(arch, **changes), objective, r.optimizer, r.schedule, r.training
        learner = Learner(corpus, *parts, Hardware.detect(torch.float32), seed)
        learner.clock = Clock().start()
        return learner

    return learner


def tensors(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in learner.model.named_parameters()}


@pytest.mark.parametrize("objective", ["mlm", "rtd"])
@pytest.mark.parametrize("changes", [{}, dict(embedding_size=8), dict(tie_embeddings=False)], ids=str)
def test_embedding_and_decoder_are_replaced_and_nothing_else(make, changes, objective):
    learner = make(init="counts", objective=objective, **changes)
    before, random = tensors(learner), torch.get_rng_state()
    prepare(learner)
    after, masters = tensors(learner), learner.optimizer.named
    name = "encoder.embedding.weight"
    width = changes.get("embedding_size", 32)
    expected = torch.from_numpy(counts.count_vectors(learner.corpus.rows, 400, width, 0))
    seen = expected.any(1)
    assert seen.sum() == len(np.unique(learner.corpus.rows)) < 400 and not seen[MASK]
    replaced = {name, "decoder", "generator.decoder"} & after.keys()
    assert len(replaced) == 2 - changes.get("tie_embeddings", True)
    for weight in replaced:
        assert torch.equal(after[weight][seen], expected[seen])
        assert torch.equal(after[weight][~seen], before[weight][~seen])
    assert all(torch.equal(after[n], before[n]) for n in after if n not in replaced)
    assert all(torch.equal(after[n], masters[n]) for n in after)
    assert torch.equal(torch.get_rng_state(), random)
    assert learner.clock.shares["counts"] > 0


@pytest.mark.parametrize("init", [name for name in INITS if name != "counts"])
def test_other_first_weights_are_as_they_were(make, init, monkeypatch):
    monkeypatch.setattr(training, "count_vectors", None)  # not to be called
    learner = make(init=init)
    before = tensors(learner)
    prepare(learner)
    assert all(torch.equal(before[name], weight) for name, weight in tensors(learner).items())
    assert "counts" not in learner.clock.shares


def test_nothing_is_counted_where_a_model_is_built_again(make, monkeypatch):
    monkeypatch.setattr(training, "count_vectors", None)
    learner = make(init="counts")
    torch.manual_seed(0)
    same = MaskedLM(replace(learner.model.encoder.arch, init="normal"))
    assert all(torch.equal(weight, tensors(learner)[name]) for name, weight in same.named_parameters())
    learner.state.spent.steps = 1  # as in a run that goes on
    prepare(learner)
    assert all(torch.equal(weight, tensors(learner)[name]) for name, weight in same.named_parameters())


def test_killed_run_ends_in_the_same_bits(tiny, tmp_path):
    more = [*COUNTS, "training.checkpoint_fraction=0.04", "training.validations=20"]
    options = ["pretrain", *tiny.options(BUDGET), "--name", "run", *more]
    for home in ("whole", "killed"):
        (tmp_path / home).mkdir()
    assert command(*options, cwd=tmp_path / "whole", cache=tiny.cache).code == 0
    folder, _ = kill_and_resume(2, tmp_path / "killed", tiny, options)
    assert learned(folder) == learned(tmp_path / "whole" / "runs" / "run")


def test_two_processes_begin_with_the_same_bits(tiny, tmp_path):
    """At a learning rate of zero, the last checkpoint holds the first weights."""
    found = []
    for name in ("alone", "together"):
        options = ["pretrain", *tiny.options("2step"), "--name", name, *COUNTS, "optimizer.lr=0"]
        if name == "alone":
            assert command(*options, cwd=tmp_path, cache=tiny.cache).code == 0
        else:
            job = Ranks(*options, cwd=tmp_path, cache=tiny.cache)
            assert job.end() == [0, 0], job.output.read_text()
        found.append(load_file(newest(tmp_path / "runs" / name) / "tensors.safetensors"))
    name = "master.encoder.embedding.weight"
    assert torch.equal(found[0][name], found[1][name]) and found[0][name].std() > 0.01
