"""Labels of tokens against the text's UTF-8 bytes: for byte-level tokenizers, byte fallback, and neither."""

import re
from random import Random
from typing import Any

import models
import pytest
import torch
from tokenizing import WHOLE, byte_level, sentencepiece

from attnmech.model.inputs.encoder import Encoder
from attnmech.model.parts.pieces import read_piece, texts_of_pieces

KEEPING = [name for name in WHOLE if not name.startswith(("llama", "unigram"))]
"""The tokenizers that put no space before a text."""

CHARACTERS = "aZ 7.\n\t\\éßñ你好世界مرحباשלוםनमस्ते\u0301\u0300\u200d👩👧🙂🏽\ufe0f\ufffd\u3000\U0010ffff▁Ġä"


def labels_of(tokenizer: Any, text: str) -> tuple[str, ...]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return texts_of_pieces([read_piece(tokenizer, token) for token in ids])


def bytes_claimed(label: str) -> bytes:
    """The bytes that a label assigns to its token."""
    held = b""
    for part in re.finditer(r"(.)\[([\d,]+)/(\d)\]|.", label, re.DOTALL):
        whole = (part[1] or part[0]).encode()
        if part[1]:
            assert len(whole) == int(part[3])
            whole = bytes(whole[int(place) - 1] for place in part[2].split(","))
        held += whole
    return held


@pytest.mark.parametrize("name", KEEPING)
def test_labels_hold_the_bytes_of_the_text(name: str) -> None:
    tokenizer, random, parts = WHOLE[name](), Random(0), 0
    for _ in range(200):
        text = "".join(random.choices(CHARACTERS, k=random.randint(1, 12)))
        labels = labels_of(tokenizer, text)
        assert b"".join(map(bytes_claimed, labels)) == text.encode()
        parts += any("/" in label for label in labels)
    assert parts > 20


def test_whole_characters_are_shown_whole() -> None:
    assert labels_of(byte_level(400), "hello 你好 Noël 👩‍👧") == ("hello", " 你好", " Noël", " 👩‍👧")


def test_parts_of_a_character_name_it_and_their_bytes() -> None:
    tokenizer = byte_level(257)
    assert labels_of(tokenizer, " 你é") == (" ", "你[1/3]", "你[2/3]", "你[3/3]", "é[1/2]", "é[2/2]")
    assert labels_of(tokenizer, "👩") == ("👩[1/4]", "👩[2/4]", "👩[3/4]", "👩[4/4]")
    assert texts_of_pieces(["a", b" \xe4\xbd", b"\xa0\xe5\xa5", b"\xbd."]) == (
        "a",
        " 你[1,2/3]",
        "你[3/3]好[1,2/3]",
        "好[3/3].",
    )


@pytest.mark.parametrize(
    ("pieces", "labels"),
    [
        ([b"\xe4\xbd"], (r"\xe4\xbd",)),
        ([b"\xe4\xbd", "a", b"\xa0"], (r"\xe4\xbd", "a", r"\xa0")),
        ([b"\xff", b"\xe4", b"\xbd\xa0"], (r"\xff", "你[1/3]", "你[2,3/3]")),
        ([b"a\xe4\xbd", b"\xe4\xbd\xa0"], (r"a\xe4\xbd", "你")),
        ([b"\xed\xa0\x80", b"\xc0\x80"], (r"\xed\xa0\x80", r"\xc0\x80")),
        ([], ()),
    ],
)
def test_bytes_of_no_character_are_shown_as_bytes(pieces: list[str | bytes], labels: tuple[str, ...]) -> None:
    assert texts_of_pieces(pieces) == labels


def test_sentencepieces_fallback_is_read_and_its_words_stay() -> None:
    assert labels_of(sentencepiece("▁h", "é你"), "h é世你") == (" h", " ", "é", "世[1/3]", "世[2/3]", "世[3/3]", "你")


def test_slow_sentencepiece_does_not_decode_bytes_but_they_are_read() -> None:
    class Slow:
        """Imitates transformers' slow SentencePiece tokenizers, which decode a byte as its name."""

        added_tokens_decoder, unk_token_id = range(0), 0
        names = ("<unk>", *(f"<0x{byte:02X}>" for byte in range(256)))

        def convert_ids_to_tokens(self, token: int) -> str:
            return self.names[token]

        def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
            return [self.names.index(token) for token in tokens]

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(self.names[token] for token in ids)

    assert texts_of_pieces([read_piece(Slow(), 1 + byte) for byte in "é~".encode()]) == ("é[1/2]", "é[2/2]", "~")


def test_names_that_look_like_bytes_are_text_elsewhere() -> None:
    tokenizer = models.tokenizer(words=("[UNK]", "[PAD]", "<0xE4>", "é", "Ġthe", "ä½ł", "naïve"))
    assert [read_piece(tokenizer, token) for token in range(2, 8)] == [
        "<0xE4>", "é", "Ġthe", "ä½ł", "naïve", "<7>",
    ]  # fmt: skip


def test_added_tokens_are_their_text() -> None:
    tokenizer = byte_level(257)
    tokenizer.add_tokens(["café", "Ġx", "▁▁"])
    assert labels_of(tokenizer, "é café<|end|>é") == ("é[1/2]", "é[2/2]", " ", "café", "<|end|>", "é[1/2]", "é[2/2]")


def test_a_cut_text_keeps_its_labels() -> None:
    batch = Encoder(byte_level(257), 257, None, {}, None, torch.device("cpu")).encode(["a你", "ab"])
    assert batch.tokens == (("a", "你[1/3]", "你[2/3]", "你[3/3]"), ("a", "b", "<|end|>", "<|end|>"))
    assert batch.part(2, 2).tokens[0] == ("你[2/3]", "你[3/3]")
    assert batch.texts_of is not None
    assert batch.texts_of(batch.ids[0, 1:3].tolist()) == (r"\xe4", r"\xbd")
