"""What must hold for any text, any schedule, any micro-batch."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import sentence
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cramming_nb.corpus import pack, shuffled_documents, split_documents
from cramming_nb.data import clean
from cramming_nb.objective import ObjectiveConfig, mask_rows, num_predicted
from cramming_nb.schedule import (
    LR_SCHEDULES,
    ScheduleConfig,
    batch_rows,
    lr_factor,
    mask_rate,
    micro_batch_for,
    row_length,
    schedule_fraction,
)
from cramming_nb.tokenizer import NORMALIZERS, SEP, SPECIAL_TOKENS, TOKENIZERS, WordEncoder, train_tokenizer

quick = settings(max_examples=60, deadline=None, derandomize=True)
TEXT = """The quick brown fox jumps over the lazy dog, and the dog (who was asleep) doesn't mind it at all; "why?" asks
the fox. Ünïcödé naïve café, 42 straße, Ελλάδα και Россия, [MASK] and [SEP] are words here. """


@pytest.fixture(scope="module", params=[(m, n) for m in TOKENIZERS for n in NORMALIZERS], ids="-".join)
def tokenizer(request):
    model, normalizer = request.param
    rng = random.Random(0)
    tokenizer = train_tokenizer([TEXT] * 5 + [sentence(rng) for _ in range(500)], 150, model, normalizer)
    tokenizer.encode_special_tokens = True  # as the corpus does: "[MASK]" in a text is a word
    return tokenizer


words = st.lists(st.one_of(st.sampled_from(TEXT.split()), st.text(max_size=8)), max_size=30)
separators = st.sampled_from([" ", "\n", "\t", "\r\n", "  ", "\xa0", "\u2003", "\u2028", "\x85", "\u3000"])


@given(words=words, separator=separators)
@example(words=["a", "b"], separator="\xa0")
@example(words=["``", "''", "e\u0301", "\u0301", "ﬁ", "ΣΑΣ", "漢字", "a" * 101, "[MASK]", "##a", "▁a"], separator=" ")
@quick
def test_words_give_the_pieces_of_the_whole_text(tokenizer, words, separator):
    text = clean(separator.join(words))
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    ids, lengths, _ = WordEncoder(tokenizer)([text])
    assert ids.tolist() == whole and lengths == [len(whole)]


@given(documents=st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=12), length=st.integers(1, 16))
@quick
def test_packing_keeps_every_token_in_order(documents, length):
    streams = [np.array([*(n + 5 for n in d), SEP], np.uint16) for d in documents]
    stream = [token for part in streams for token in part.tolist()]
    rows = np.concatenate([np.zeros((0, length), np.uint16), *pack(streams, length)])
    assert rows.shape == (len(stream) // length, length) and rows.dtype == np.uint16
    assert rows.ravel().tolist() == stream[: rows.size]


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=40), seed=st.integers(0, 2**32))
@example(lengths=[1] * 5000, seed=0)  # more than are shuffled in one piece
@quick
def test_a_shuffle_keeps_every_document_whole(lengths, seed):
    documents = [[1000 + number] * n + [SEP] for number, n in enumerate(lengths)]  # a word of its own for each
    ids, sizes = np.concatenate(documents).astype(np.uint16), np.array(lengths) + 1
    shuffled = np.concatenate(list(shuffled_documents(ids, sizes, np.random.default_rng(seed))))
    again = np.concatenate(list(shuffled_documents(ids, sizes, np.random.default_rng(seed))))
    assert shuffled.dtype == np.uint16 and (shuffled == again).all()
    ends = np.flatnonzero(shuffled == SEP) + 1
    found = [part.tolist() for part in np.split(shuffled, ends[:-1])]
    assert sorted(found) == sorted(documents)
    if len(lengths) == 5000:
        assert (shuffled != ids).any()


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=3, max_size=60),
    heldout=st.floats(0.001, 0.3),
    probe=st.floats(0.001, 0.3),
    seed=st.integers(0, 2**32),
)
@quick
def test_splits_have_the_sizes_asked_for(sizes, heldout, probe, seed):
    sizes = np.array(sizes)
    prints = np.random.default_rng(seed).permutation(1 << 16)[: len(sizes)].astype(np.uint64)
    split = split_documents(prints, sizes, heldout, probe)
    assert len(split) == len(sizes) and set(split) <= {0, 1, 2}
    assert (split == 1).any() and (split == 2).any()
    asked, largest = sizes.sum() * np.array([heldout, probe]), sizes.max()
    got = [sizes[split == 1].sum(), sizes[split == 2].sum()]
    assert np.abs(got - asked).max() <= largest
    again = split_documents(prints[::-1], sizes[::-1], heldout, probe)[::-1]
    assert (again == split).all()  # by what a document is, not where it stands


def test_no_share_for_probes_takes_no_held_out_document():
    split = split_documents(np.arange(20, dtype=np.uint64), np.full(20, 100), heldout=0.1, probe=0)
    assert split.tolist() == [1, 1] + [0] * 18


def test_long_document_is_held_out_last():
    sizes = np.array([900] + [100] * 99)  # the first is most of what is to be held out, by its print the first choice
    split = split_documents(np.arange(100, dtype=np.uint64), sizes, 0.1, 0.05)
    assert split[0] == 0 and (split[1:12] == 1).all()
    sizes[0] = 20_000  # more than its whole share
    assert split_documents(np.arange(100, dtype=np.uint64), sizes, 0.1, 0.05)[0] == 0


def test_no_document_is_in_two_splits(tmp_path):
    from cramming_nb.corpus import CorpusConfig, get_corpus

    letters = "abcdefghij"
    names = [f"{a}x{b}" for a in letters for b in letters]  # a word of its own for each document
    docs = [dict(text=f"{name} and then " * 20, id=name, source="s") for name in names]
    config = CorpusConfig(vocab_size=120, seq_length=16, filter_threshold=0, heldout=0.2, probe=0.2)
    corpus = get_corpus(docs, config, tmp_path, progress=False)
    texts = [" ".join(corpus.tokenizer.decode_batch(rows[:].tolist())) for rows in (corpus.rows, corpus.heldout)]
    texts.append(" ".join(doc["text"] for doc in corpus.probe_documents()))
    found = [{name for name in names if f" {name} " in text} for text in texts]
    assert not found[0] & found[1] and not found[0] & found[2] and not found[1] & found[2]
    assert min(map(len, found)) >= 10 and sum(map(len, found)) >= 98


@given(
    rows=st.integers(1, 24),
    length=st.integers(4, 40),
    micro=st.integers(1, 24),
    seed=st.integers(0, 2**31),
    first=st.integers(0, 2**33),
    config=st.builds(ObjectiveConfig, st.floats(0.1, 0.6), st.booleans(), st.booleans()),
)
@quick
def test_masks_do_not_depend_on_the_micro_batch(rows, length, micro, seed, first, config):
    ids = torch.from_numpy(np.random.default_rng(seed).integers(0, 200, (rows, length)))
    numbers, epochs = first + torch.arange(rows), torch.arange(rows) // 3
    whole = mask_rows(ids, numbers, epochs, seed, config, 200)
    parts = [
        mask_rows(*block, seed, config, 200)
        for block in zip(ids.split(micro), numbers.split(micro), epochs.split(micro), strict=True)
    ]
    for one, many in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(one, torch.cat(many))
    masked, at, labels, weights = whole
    assert at.shape == (rows, num_predicted(config, length))
    assert torch.equal(ids.gather(1, at), labels)
    counted = torch.zeros_like(ids, dtype=torch.bool).scatter(1, at, weights.bool())
    assert torch.equal(masked[~counted], ids[~counted])  # what is not predicted stays
    if not config.exact:
        assert not (counted & (ids < len(SPECIAL_TOKENS))).any()


fractions = st.floats(0, 1)


@given(t=fractions, warmup=st.floats(0, 1), horizon=st.floats(1, 100), name=st.sampled_from(list(LR_SCHEDULES)))
@quick
def test_learning_rate_is_a_share_of_its_peak(t, warmup, horizon, name):
    assert 0 <= lr_factor(ScheduleConfig(name, warmup, horizon=horizon), t) <= 1


@pytest.mark.parametrize("name", sorted({*LR_SCHEDULES} - {"one_cycle"}))
@given(warmup=st.floats(0.001, 1))
@quick
def test_first_step_of_a_warm_up_moves_the_weights(name, warmup):
    config = ScheduleConfig(name, warmup)
    assert 0 < lr_factor(config, 0.0) < lr_factor(config, min(warmup, 0.1) / 2)


@given(t=fractions, name=st.sampled_from(list(LR_SCHEDULES)), horizon=st.floats(1, 100))
@quick
def test_a_run_inside_a_longer_plan_sees_the_start_of_that_plan(t, name, horizon):
    plan = ScheduleConfig(name, warmup=0.1, cooldown=0.2)
    inside = replace(plan, horizon=horizon)
    assert lr_factor(inside, t) == lr_factor(plan, t / horizon)
    assert batch_rows(inside, t, 128) == batch_rows(plan, t, 128)
    assert mask_rate(inside, t, 0.25) == mask_rate(plan, t, 0.25)
    assert row_length(inside, t, 128) == row_length(plan, t, 128)


@given(spent=fractions, later=fractions, first=fractions)
@quick
def test_schedules_run_from_the_first_step_to_the_end_of_the_budget(spent, later, first):
    spent, later = sorted((spent, later))
    assert 0 <= schedule_fraction(spent, first) <= schedule_fraction(later, first) <= 1
    assert schedule_fraction(1.0, first) == 1
    assert schedule_fraction(spent, 0.0) == spent  # where nothing came before the first step
    assert first >= 1 or schedule_fraction(first, first) == 0


@given(t=fractions, size=st.integers(1, 9000), start=st.integers(0, 9000), ramp=fractions, unit=st.integers(1, 9000))
@quick
def test_growing_batch_is_whole_micro_batches_up_to_its_size(t, size, start, ramp, unit):
    config = ScheduleConfig(batch_size=size, batch_start=start, batch_ramp=ramp)
    rows = batch_rows(config, t, unit)
    assert rows == size or (rows < size and rows % unit == 0 and rows >= min(size, max(unit, start)))
    assert t < ramp or rows == size


@given(share=st.integers(1, 9000), largest=st.integers(1, 9000))
@quick
def test_micro_batches_fit_and_pad_less_than_a_row_each(share, largest):
    rows = micro_batch_for(share, largest)
    rounds = -(-share // rows)
    assert 1 <= rows <= min(share, largest)
    assert rounds == -(-share // largest) and 0 <= rounds * rows - share < rounds


@pytest.mark.parametrize("name", LR_SCHEDULES)
def test_learning_rate_reaches_its_peak(name):
    assert max(LR_SCHEDULES[name](i / 1000) for i in range(1001)) == pytest.approx(1, abs=1e-9)
