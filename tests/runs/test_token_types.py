"""Types of tokens against the types of the characters that they hold, for every kind of tokenizer."""

from typing import Any

import pytest
import torch
from tokenizing import CHATS, LACKING, WHOLE, batch_of, byte_level, chatting, sentencepiece, unigram, wordpiece

from attnmech.methods.drift.word_types import WORD_TYPES, word_types
from attnmech.runs.token_types import TOKEN_TYPES, token_types, type_of

TYPES = {
    "sentence end": [".", "?!", "…", "。", "．", "！", "।", "؟", "۔", "։", "።", "។", ".”", "?»", "。」", '."'],
    "comma": [",", "，", "、", "،", "՝", "፣", ",”"],
    "other mark": ["😀", "👩🏽‍🚀", "❤️", "—", "“", "”", "«", "：", "₹", "(", "["],
    "number": ["7", "٣", "३", "７", "½", "Ⅷ", "7️⃣"],
    "word": ["naïve", "नमस्ते", "مرحبا", "e\u0301te", "你", "می\u200cخواهم"],
}


def types_of(tokenizer: Any, text: str) -> list[str]:
    return [TOKEN_TYPES[number] for number in token_types(batch_of(tokenizer, text))[0].tolist()]


@pytest.mark.parametrize("name", WHOLE)
def test_tokens_have_the_type_of_their_characters(name: str) -> None:
    tokenizer = WHOLE[name]()
    for kind, texts in TYPES.items():
        for text in texts:
            before = len(batch_of(tokenizer, "x").tokens[0]) - name.startswith("byt5")
            found = types_of(tokenizer, f"x {text} y")[before:]
            tokens = batch_of(tokenizer, f"x {text} y").tokens[0][before:]
            inside = [own for own, token in zip(found, tokens, strict=True) if token.strip() and token.strip() != "y"]
            inside = [own for own in inside if own != "special"]
            # A tokenizer without the token ".”" has one for each mark.
            expected = {kind, "other mark"} if len(text) > 1 and kind in ("sentence end", "comma") else {kind}
            assert inside and kind in inside and set(inside) <= expected, (text, tokens, found)


@pytest.mark.parametrize("name", LACKING)
def test_what_the_vocabulary_lacks_has_the_type_of_its_characters(name: str) -> None:
    tokenizer = LACKING[name]("x", "y")
    for kind, texts in TYPES.items():
        for text in texts:
            if len(text) > 1 and kind not in ("number", "word"):
                continue
            batch = batch_of(tokenizer, f"x {text} y x {text} y")
            names = [TOKEN_TYPES[number] for number in token_types(batch)[0].tolist()]
            unknown = [own for own, token in zip(names, batch.tokens[0], strict=True) if "unk" in token.lower()]
            # Some split it further: an accent or a joiner has the type of what it belongs to.
            assert len(unknown) >= 2 and set(unknown) == {kind}, (text, batch.tokens, names)
            assert not set(batch.ids[0].tolist()[1:-1]) & batch.special
            alone = token_types(batch_of(tokenizer, batch.ids))[0].tolist()
            # Without the text, it counts as a word.
            assert [TOKEN_TYPES[number] for number in alone].count("word") >= len(unknown)


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("whole", [byte_level, sentencepiece])
def test_what_only_the_vocabulary_marks_as_special_is_special(name: str, whole: Any) -> None:
    tokenizer, marks = chatting(name, whole(290) if whole is byte_level else whole())
    chat = [{"role": "user", "content": "hello you."}, {"role": "assistant", "content": "yes"}]
    batch = batch_of(tokenizer, chat)
    assert batch.ids[0].tolist() == list(tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"])
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    assert batch_of(tokenizer, rendered).ids.tolist() == batch.ids.tolist()
    is_mark = [token.strip() in marks for token in batch.tokens[0]]
    assert sum(is_mark) > 2 and batch.is_special[0].tolist() == is_mark
    types = [TOKEN_TYPES[number] for number in token_types(batch)[0].tolist()]
    assert [name == "special" for name in types[1:]] == is_mark[1:]


def test_emoji_are_no_numbers() -> None:
    assert types_of(byte_level(257), "a😀😀")[1:] == ["other mark"] * 8


def test_pieces_of_words_are_read_without_the_signs_of_their_tokenizer() -> None:
    tokenizer = wordpiece("the", "key", "##ी", "##s", "##7", "in", "##sane", ".", "#")
    assert types_of(tokenizer, "the keyी keys the7 ☃ # .")[1:] == [
        "word", "word", "word", "word", "word", "word", "number", "other mark", "other mark", "sentence end", "special"
    ]  # fmt: skip
    batch = batch_of(tokenizer, "the insane in # the")
    assert [WORD_TYPES[number] for number in word_types(batch)[0, 1:-1].tolist()] == [
        "function word", "content word", "content word", "function word", "other mark", "function word"
    ]  # fmt: skip
    words = types_of(unigram("▁Hi", "▁हाँ", "।", "。", "▁7"), "Hi 7 हाँ। Hi。")
    assert words[1:] == ["number", "word", "sentence end", "word", "sentence end"]


def test_ids_without_a_text_are_no_numbers() -> None:
    ids = torch.tensor([[5, 17, 3]])
    assert [TOKEN_TYPES[number] for number in token_types(batch_of(None, ids))[0].tolist()][1:] == ["other"] * 2
    tokenizer = byte_level(257)
    beyond = torch.tensor([[5, len(tokenizer) + 3]])
    assert TOKEN_TYPES[int(token_types(batch_of(tokenizer, beyond))[0, 1])] == "other"


def test_a_cut_character_has_no_type_of_its_own() -> None:
    batch = batch_of(byte_level(257), "a你b")
    assert [TOKEN_TYPES[number] for number in token_types(batch.part(0, 3))[0].tolist()][1:] == ["other"] * 2


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ै।", "sentence end"),
        (" ूँ।", "sentence end"),
        ("\u064e؟", "sentence end"),
        ("‼️", "sentence end"),
        ("\u0301,", "comma"),
        ("ै", "word"),
    ],
)
def test_a_mark_that_shares_a_token_with_an_accent_keeps_its_type(text: str, kind: str) -> None:
    assert TOKEN_TYPES[type_of(text)] == kind
