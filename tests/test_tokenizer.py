"""What the tokenizer makes of scripts without spaces, of accents, and of one text in any order."""

import random
import unicodedata

import pytest
from tokenizers import Tokenizer

from cramming_nb.engine.errors import UserError
from cramming_nb.tokenizer import (
    NORMALIZERS,
    TOKENIZERS,
    UNK,
    deleted_characters,
    encoder_of,
    save_tokenizer,
    tokenise,
    train_tokenizer,
)

THAI = "".join(map(chr, [*range(0xE01, 0xE2F), *range(0xE31, 0xE3A)]))  # consonants, vowels and marks


def phrases(shortest: int, longest: int, count: int = 60) -> str:
    """Thai in phrases of some lengths, in letters, with a space after each."""
    rng = random.Random(0)
    return " ".join("".join(rng.choices(THAI, k=rng.randint(shortest, longest))) for _ in range(count))


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("model", TOKENIZERS)
def test_long_runs_of_letters_are_read_alike_everywhere(model, tmp_path):
    text = phrases(20, 220)
    assert max(map(len, text.split())) > 200
    tokenizer = train_tokenizer([text], 200, model, "unicode")
    whole = encoded(tokenizer, text)
    save_tokenizer(tokenizer, tmp_path, max_length=128)
    path = str(tmp_path / "tokenizer.json")
    ids, _, costs = tokenise([text], path)
    encoder_of.cache_clear()
    assert encoded(Tokenizer.from_file(path), text) == whole == ids[:-1].tolist()
    assert UNK not in whole
    assert costs == [len(whole)]


def test_long_runs_of_letters_in_transformers(tmp_path):
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast
    text = phrases(20, 220)
    tokenizer = train_tokenizer([text], 200, normalizer="unicode")
    save_tokenizer(tokenizer, tmp_path, max_length=1 << 20)
    assert fast.from_pretrained(tmp_path)(text)["input_ids"] == tokenizer.encode(text).ids


@pytest.mark.parametrize("texts", [[phrases(101, 220)], []], ids=["long runs only", "nothing"])
@pytest.mark.parametrize("model", TOKENIZERS)
def test_text_without_a_word_to_learn_from(model, texts):
    with pytest.raises(UserError, match="no word of at most 100 letters to learn from; separate its words"):
        train_tokenizer(texts, 200, model, "unicode")


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_an_accent_is_not_lost_in_any_form(form):
    words = [unicodedata.normalize(form, word) for word in ("déjà", "été", "œuvre", "garçon", "你好")]
    assert deleted_characters(NORMALIZERS["paper"](), words).tolist() == [0, 0, 1, 0, 2]
    assert deleted_characters(NORMALIZERS["unicode"](), words).tolist() == [0] * 5


@pytest.mark.parametrize("model", ["wordpiece", "bpe"])
def test_one_text_gives_one_tokenizer_in_any_order(model):
    rng = random.Random(1)
    texts = [" ".join("".join(rng.choices("abcdefgh", k=rng.randint(1, 8))) for _ in range(40)) for _ in range(50)]
    trained = [train_tokenizer(some, 200, model).to_str() for some in (texts, texts, texts[::-1])]
    assert len(set(trained)) == 1
