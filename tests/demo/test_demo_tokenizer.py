"""The tokenizer restores every text, and a word of the language is one token."""

from random import Random

from hypothesis import example, given
from hypothesis import strategies as st
from language import words
from language.grammar import document
from language.tokenizer import BOS, EOS, PAD, build_tokenizer, token_ids
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from attnmech.demo import model_folder
from attnmech.demo.text import FIRST_WORD, PARAGRAPH

TOKENIZER = PreTrainedTokenizerFast.from_pretrained(model_folder())
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


def test_the_shipped_tokenizer_is_that_of_this_grammar() -> None:
    built = build_tokenizer()
    assert built.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    assert (built.special_tokens_map, built.padding_side) == (TOKENIZER.special_tokens_map, TOKENIZER.padding_side)
    assert AutoTokenizer.from_pretrained(model_folder()).encode("<s>  ▁(é)") == built.encode("<s>  ▁(é)")


def test_the_paragraph_is_in_the_language() -> None:
    tokens = TOKENIZER.encode(PARAGRAPH)
    assert 45 <= len(tokens) <= 70
    assert min(tokens[1:]) >= FIRST_WORD
