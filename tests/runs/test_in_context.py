"""Tokens of answers where they stand in a text, against the tokens of the whole text."""

import warnings
from functools import cache
from typing import Any

import models
import pytest
import torch
import transformers
from comparing import refuses
from tokenizing import LACKING, byte_level, sentencepiece, wordpiece

import attnmech as am
from attnmech.errors import InputError
from attnmech.methods.function_heads.result import prompts_of
from attnmech.model.inputs.encoders import tokenized
from attnmech.model.parts.pieces import Tokenized
from attnmech.runs.answers import AnswerWarning, answer_ids, answer_tokens

WORDS = ("▁the", "▁cat", "▁Tom", "Tom", "▁sat", "A:", "▁A:")
TOKENIZERS: dict[str, Any] = {
    "llama": lambda: sentencepiece(*WORDS),
    "llama 2": lambda: sentencepiece(*WORDS, prepends=True),
    "byte-level": lambda: byte_level(400),
}


@cache
def with_tokenizer(name: str) -> am.HookedModel:
    """A small Llama with one of the tokenizers."""
    return small(TOKENIZERS[name]())


def small(tokenizer: Any) -> am.HookedModel:
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 3}
    config = transformers.LlamaConfig(vocab_size=512, max_position_embeddings=128, **sizes)
    return am.load(transformers.LlamaForCausalLM(config).eval(), tokenizer=tokenizer)


def strip(model: am.HookedModel, ids: list[int]) -> list[int]:
    return [token for token in ids if token not in model.encoder.special]


def names(model: am.HookedModel, ids: Any) -> list[str]:
    return list(model.tokenizer.convert_ids_to_tokens([int(token) for token in ids]))


def prompt(model: am.HookedModel, inputs: Any) -> list[Tokenized]:
    return tokenized(model.encoder, model.encode(inputs))


@pytest.mark.parametrize("name", ["llama", "llama 2"])
def test_an_answer_is_the_token_after_its_text(name: str) -> None:
    model = with_tokenizer(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text, answer, expected in (
            ("the cat", " Tom", "▁Tom"),
            ("the cat\n", "Tom", "Tom"),
            ('the "', "Tom", "Tom"),
            ("the 你", " sat", "▁sat"),
        ):
            scored = answer_ids(model, "answers", answer, 1, prompt(model, text))
            assert names(model, scored) == [expected]
            assert model.encode(text + answer).ids[0].tolist() == [*model.encode(text).ids[0].tolist(), int(scored)]
    with pytest.raises(InputError, match="joins 'Tom' with the space at the end of its text"):
        answer_ids(model, "answers", "Tom", 1, prompt(model, "the "))
    with pytest.warns(AnswerWarning, match="both 'Tom'"):
        answer_ids(model, "answers", "Tom", 1, prompt(model, "the cat"))
    assert names(model, answer_ids(model, "tokens", " Tom", 1)) == ["▁Tom"]  # a token of the vocabulary


@pytest.mark.parametrize("known", [True, False], ids=["text", "ids"])
@pytest.mark.parametrize("name", LACKING)
def test_an_answer_is_the_token_after_characters_that_the_vocabulary_lacks(name: str, known: bool) -> None:
    words = ("▁the", "▁Tom", "Tom", "▁sat") if name == "unigram" else ("the", "Tom", "tom", "sat", ".")
    model, scored = small(LACKING[name](*words)), 0
    for text in ("the 你", "the 你。", "the ☃ the", "你", "the।"):
        for answer in (" Tom", "Tom", " sat", "."):
            ids, whole = (strip(model, model.encode(part).ids[0].tolist()) for part in (text, text + answer))
            if whole[:-1] == ids and whole[-1] != model.encoder.unknown:
                before = prompt(model, text if known else torch.tensor(ids))
                assert names(model, answer_ids(model, "answers", answer, 1, before)) == names(model, whole[-1:])
                end = answer_tokens(model, answer, 1, prompt(model, text + answer if known else torch.tensor(whole)))
                assert end.tolist() == [whole[-1:]]
                scored += 1
    assert scored > 4
    refuses("lacks characters of ' 你'", answer_tokens, model, " 你", 1, prompt(model, "the 你"))
    with pytest.raises(InputError, match="lacks characters of '你'"):
        prompts_of(model, [("the", "你"), ("sat", "Tom"), ("Tom", "sat")], 2, 3, "{x} {y} ", 0, None)


def test_a_sweep_takes_the_token_that_stands_in_the_text() -> None:
    model = with_tokenizer("llama 2")
    known = model.tokenizer.get_vocab()
    by_text = am.ablate_heads(model, ["the cat\n"], [(0, 0)], metric="logit_difference", answers="Tom", against=" sat")
    by_id = am.ablate_heads(
        model, ["the cat\n"], [(0, 0)], metric="logit_difference", answers=known["Tom"], against=known["▁sat"]
    )
    assert torch.equal(by_text.before, by_id.before)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_whole_answer_is_the_end_of_its_text(name: str) -> None:
    model = with_tokenizer(name)
    for text, answer in (("the cat", " Tom sat"), ("the\n", "Tom"), ('A: "', "你"), ("the ", "cat")):
        end = answer_tokens(model, answer, 1, prompt(model, text + answer))[0].tolist()
        assert model.encode(text + answer).ids[0].tolist()[-len(end) :] == end
        assert model.tokenizer.decode(end).strip() == answer.strip()
    effects = am.ablate_heads(model, ["the cat Tom"], [(0, 0)], metric="log_probability", answers=" Tom")
    assert effects.before.isfinite().all()


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("template", ["{x}:\n{y}\n\n", "{x} : {y}\n", '"{x}" is "{y}".\n', "{x}\t{y}|"])
def test_the_scored_token_of_a_prompt_is_the_first_of_its_answer(name: str, template: str) -> None:
    model = with_tokenizer(name)
    pairs = [("the", "Tom"), ("cat", "sat"), ("Tom", "你"), ("sat", "été")]
    prompts = prompts_of(model, pairs, 2, 4, template, 0, None)
    for (question, answer), ids, token in zip(pairs, prompts.right, prompts.answers, strict=True):
        assert int(ids[-1]) == token
        ends = template.partition("{y}")[0].format(x=question)
        examples = model.tokenizer.decode(ids[:-1], skip_special_tokens=True)
        assert examples.strip().endswith(ends.strip())  # the whole question, and no more
        if answer.isascii():
            assert model.tokenizer.decode([token]).strip(' "\t') and answer.startswith(
                model.tokenizer.decode([token]).strip(' "\t')
            )


def test_a_tokenizer_without_spaces_takes_the_word() -> None:
    tokenizer = wordpiece("the", "cat", "sat", "##s")
    hooked = am.load(models.fresh("bert"), tokenizer=tokenizer)
    ids = torch.tensor(tokenizer("the cat", add_special_tokens=False)["input_ids"])
    for answer in (" sat", "sat"):
        assert names(hooked, answer_ids(hooked, "answers", answer, 1, prompt(hooked, ids))) == ["sat"]
    refuses(r"'dog' becomes 1: \['\[UNK\]'\]", answer_ids, hooked, "answers", "dog", 1, prompt(hooked, ids))
