"""The loss a word, which compares models with different tokenizers."""

import json

import pytest
import torch
from word_loss import main, sentences_by_kind, word_losses

from cramming_nb.app.export import load_model


def test_pieces_see_the_word_before_them_and_not_after_them(finished):
    model, tokenizer = load_model(finished.folder / "export")
    text = "the qzxvq the"
    encoded = tokenizer.encode(text, add_special_tokens=False)
    ids, words = torch.tensor(encoded.ids), encoded.word_ids
    assert words.count(1) > 1  # the second word has several pieces
    expected = 0.0
    with torch.no_grad():
        for place, word in enumerate(words):
            hidden = ids.clone()
            for other in range(place, len(ids)):
                if words[other] == word:
                    hidden[other] = tokenizer.token_to_id("[MASK]")
            logits = model(hidden[None], torch.tensor([[place]])).view(-1)
            expected -= logits.log_softmax(-1)[ids[place]].item()
    assert word_losses(model, tokenizer, text) == (pytest.approx(expected, abs=1e-3), 3)


def document(source, text):
    return json.dumps(dict(source=source, text=text)) + "\n"


@pytest.fixture
def unseen(tmp_path):
    """A file with two kinds of text."""
    path = tmp_path / "unseen.jsonl"
    sentence = "This sentence, number {}, is long enough to be taken by the script."
    path.write_text(
        document("wikipedia_en", " ".join(map(sentence.format, range(3))) + " Short.")
        + document("wikipedia_fr", sentence.format(7) + " Cette phrase a un caractère qui n'est pas de l'ASCII.")
        + document("dialogue_x", sentence.format(9))
    )
    return path


def test_sentences_are_spread_over_documents(unseen):
    found = sentences_by_kind(str(unseen))
    numbers = {kind: [text.split()[3] for text in some] for kind, some in found.items()}
    assert numbers == {"encyclopedia": ["0,", "7,", "1,", "2,"], "dialogues": ["9,"]}


def test_a_known_run_is_not_scored_again(finished, unseen, tmp_path):
    out = tmp_path / "out.json"
    main([str(out), str(unseen), str(finished.folder)])
    (row,) = json.loads(out.read_text())
    assert set(row["words"]) == {"dialogues", "encyclopedia"} and "pairs" not in row
    assert all(0 < loss < 40 for loss in row["words"].values())
    out.write_text(json.dumps([row | dict(words={})]))
    main([str(out), str(unseen), str(finished.folder)])
    assert json.loads(out.read_text()) == [row | dict(words={})]
