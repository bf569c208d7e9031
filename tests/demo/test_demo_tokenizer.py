"""The tokenizer restores every text, and a word of the language is one token."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from attnmech.demo import words
from attnmech.demo.grammar import document
from attnmech.demo.text import PARAGRAPH
from attnmech.demo.tokenizer import BOS, EOS, FIRST_WORD, PAD, build_tokenizer, token_ids

TOKENIZER = build_tokenizer()
anything = st.text(st.characters(exclude_categories=["Cs"]))
near_the_language = st.lists(
    st.sampled_from([*words.vocabulary(), " ", "\n", "s", "<s>", "<0x41>", "▁", "Ġ", "é", "e\u0301", "🙂"])
).map("".join)


@given(anything | near_the_language)
@example("")
@example(" The  boats ,are\r\n\t ( new ) .\u00a0")
@example("<s> <pad></s><reserved 270><0x41>▁the")
@example("\x00\ufeff\u200bﬁ №")
def test_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True) == text
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


@given(st.integers(min_value=0, max_value=2**32))
def test_a_word_of_a_document_is_one_token(seed: int) -> None:
    text = document(Random(seed))
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode(text.text)) == [BOS, *text.words]


def test_ids_are_laid_out_as_specials_bytes_reserved_words() -> None:
    vocabulary = TOKENIZER.get_vocab()
    assert sorted(vocabulary.values()) == list(range(len(TOKENIZER)))
    assert token_ids(TOKENIZER, [PAD, BOS, EOS, "<0x00>", "<0xFF>"]) == [0, 1, 2, 3, 258]
    assert {token for token, number in vocabulary.items() if number >= FIRST_WORD} == set(words.vocabulary())


def test_unknown_words_become_bytes() -> None:
    assert TOKENIZER.tokenize(" boaty") == [
        "<0x20>",
        *(f"<0x{byte:02X}>" for byte in b"bo"),
        "a",
        "<0x74>",
        "<0x79>",
    ]
    assert TOKENIZER.tokenize("é") == ["<0xC3>", "<0xA9>"]


@pytest.mark.parametrize("kind", [AutoTokenizer, PreTrainedTokenizerFast])
def test_survives_a_folder_without_network(
    kind: type[PreTrainedTokenizerFast], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    TOKENIZER.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path)
    text = PARAGRAPH + " <s>  ▁(é)\n"
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.decode(loaded.encode(text), skip_special_tokens=True) == text
    assert (loaded.pad_token, loaded.bos_token, loaded.eos_token) == (PAD, BOS, EOS)


def test_the_paragraph_is_in_the_language() -> None:
    tokens = TOKENIZER.encode(PARAGRAPH)
    assert 45 <= len(tokens) <= 70
    assert min(tokens[1:]) >= FIRST_WORD
