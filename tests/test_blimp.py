"""Minimal pairs: the score of a sentence, and what is kept of them."""

import json

import pytest
import torch
from blimp import main, pseudo_likelihoods

from cramming_nb.app.export import load_model


def test_score_is_the_sum_over_single_masks(finished):
    model, tokenizer = load_model(finished.folder / "export")
    text = " ".join(tokenizer.decode([i]) for i in range(20, 25))
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids])
    expected = 0.0
    with torch.no_grad():
        for place in range(ids.shape[1]):
            hidden = ids.clone()
            hidden[0, place] = tokenizer.token_to_id("[MASK]")
            logits = model(hidden, torch.tensor([[place]])).view(-1)
            expected += logits.log_softmax(-1)[ids[0, place]].item()
    other = text + " " + text  # a longer one beside it moves nothing
    assert pseudo_likelihoods(model, tokenizer, [other, text, text])[1:] == [pytest.approx(expected, abs=1e-3)] * 2


def test_record_of_pairs(finished, tmp_path):
    (tmp_path / "pairs").mkdir()
    pair = dict(sentence_good="the the the", sentence_bad="qzx qzx qzx qzx qzx qzx", linguistics_term="length")
    for name in ("one", "two"):
        (tmp_path / "pairs" / f"{name}.jsonl").write_text(f"{json.dumps(pair)}\n" * 3)
    main(
        [
            str(tmp_path / "out.json"),
            str(finished.folder / "export"),
            "--pairs",
            str(tmp_path / "pairs"),
            "--first",
            "2",
        ]
    )
    found = json.loads((tmp_path / "out.json").read_text())
    assert found == dict(mean=1.0, terms=dict(length=1.0), paradigms=dict(one=1.0, two=1.0), first=2)
