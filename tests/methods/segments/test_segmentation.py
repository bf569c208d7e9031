"""Sentences and lines of texts in many scripts, for every kind of tokenizer."""

from itertools import pairwise

import pytest
from tokenizing import LACKING, WHOLE, batch_of, wordpiece

from attnmech.methods.segments.segmentation import Segmented
from attnmech.model.parts.pieces import text_of

SENTENCES = [
    ["The keys are old.", " They cost 3.14!", " Is attnmech.py here?"],
    ["“It rains.”", " He said: «Go!»", " (Then he left.)", " So."],
    ["« Il part. »", " Elle boit…", " Peut-être."],
    ["Er sagt: „Ja.“", " Dann geht er."],
    ["今天下雨。", "他说：“好。”", "“行！”", "３．１４是数！", "对吗?", "对"],
    ["本です．", "次「はい。」", "終"],
    ["यह सच है।", " वह गया॥", "वह आया।"],
    ["هل أنت هنا؟", " نعم۔", "لا."],
    ["Այո։", " Ոչ։"],
    ["ጥሩ።", "ነው።"],
    ["Τι\u037e", " Ναι."],
    ["Hm...", " Yes?!", " 😀!", " No"],
]


def segments(tokenizer: object, text: str, kind: str) -> list[str]:
    batch = batch_of(tokenizer, text)
    (starts,) = Segmented.of(batch, kind).starts
    (special,) = batch.is_special.tolist()
    own = ["" if no_text else token for token, no_text in zip(text_of(batch)[0], special, strict=True)]
    return ["".join(own[start:end]) for start, end in pairwise(starts)]


@pytest.mark.parametrize("name", WHOLE)
def test_sentences_end_where_their_marks_do(name: str) -> None:
    for sentences in SENTENCES:
        found = segments(WHOLE[name](), "".join(sentences), "sentence")
        # A token of its own for the space before a sentence stands at the end of the sentence before.
        assert [segment.strip() for segment in found] == [sentence.strip() for sentence in sentences]
        assert "".join(found).strip() == "".join(sentences)


@pytest.mark.parametrize("name", LACKING)
def test_marks_that_the_vocabulary_lacks_end_sentences(name: str) -> None:
    for sentences in (SENTENCES[5], *SENTENCES[7:10], ["यह सच।", "वह गया॥", "वह"]):
        own = segments(LACKING[name]("x", "।"), " ".join(sentences), "sentence")
        assert ["".join(segment.split()) for segment in own] == ["".join(sentence.split()) for sentence in sentences]


@pytest.mark.parametrize("name", WHOLE)
def test_lines_end_at_every_line_break(name: str) -> None:
    lines = ["\nOne. Two", "\r\n\r\n你好", "\u2028 three\n"]
    found = [segment.strip() for segment in segments(WHOLE[name](), "".join(lines), "line")]
    assert found == [line.strip() for line in lines]


def test_without_spaces_every_mark_ends_a_sentence_but_one_in_a_number() -> None:
    tokenizer = wordpiece("it", "is", "3", ".", "14", "yes", "!", '"')
    assert segments(tokenizer, 'It is 3.14. "Yes!" It is', "sentence") == ['itis3.14."', 'yes!"', "itis"]
