"""The length of the texts on which a model was trained, and what is said of longer ones."""

import warnings
from typing import Any

import models
import pytest
import tiny
import torch
import transformers

import attnmech as am
from attnmech.basics.messages import LongTextWarning

LONG = torch.arange(90)[None] % 40


def rotary(**scaled: Any) -> Any:
    config = models.llama(layers=1).config
    config.rope_parameters = {"rope_type": "default", "rope_theta": 100.0, **scaled}
    return transformers.LlamaForCausalLM(config)


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
TRAINED = {
    "default": (lambda: rotary(), 64),
    "linear": (lambda: rotary(rope_type="linear", factor=4.0), 256),
    "dynamic": (lambda: rotary(rope_type="dynamic", factor=2.0), 128),
    "yarn": (lambda: rotary(rope_type="yarn", factor=4.0, original_max_position_embeddings=16), 64),
    "yarn beyond": (lambda: rotary(rope_type="yarn", factor=4.0, original_max_position_embeddings=64), 256),
    "longrope": (lambda: rotary(rope_type="longrope", factor=4.0, original_max_position_embeddings=16, **FACTORS), 64),
    "llama3": (
        lambda: rotary(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
        64,
    ),
    "by kind of layer": (lambda: tiny.model_of("gemma3_text"), 128),
    "inside a model of images": (lambda: tiny.model_of("gemma3"), 128),
    "a decoder with pictures, whose tower has a table": (lambda: tiny.merging("llava"), 128),
    "sinusoids": (lambda: tiny.model_of("xglm"), 128),
    "ALiBi": (lambda: models.bloom(), None),
    "ALiBi in place of rotation": (lambda: models.falcon(alibi=True), None),
    "relative": (lambda: tiny.model_of("t5"), None),
    "a table": (lambda: models.gpt2(), None),
}  # fmt: skip


@pytest.mark.parametrize("name", list(TRAINED))
def test_the_trained_length_is_that_of_the_text(name: str) -> None:
    make, length = TRAINED[name]
    model = am.load(models.randomised(make()))
    assert model.trained_length == length
    if length is None and model.architecture.position_limit is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            am.attention_focus(model, LONG, **({"stack": "encoder"} if "encoder" in model.stacks else {}))


def said(record: pytest.WarningsRecorder) -> list[str]:
    return [str(warning.message) for warning in record if warning.category is LongTextWarning]


CALLS = {
    "run": lambda model: model.run(LONG),
    "loss": lambda model: model.loss(LONG),
    "report": lambda model: am.report(model, LONG),
    "focus": lambda model: am.attention_focus(model, LONG),
    "sweep": lambda model: am.ablate_heads(model, [LONG[0], LONG[0, :5]], heads=[(1, 1)]),
    "several passes": lambda model: am.null_attention(model, [LONG[0], LONG[0, :80]]),
    "generate": lambda model: model.generate(LONG[:, :60], 10, points=["pattern"]),
}


@pytest.mark.parametrize("call", list(CALLS))
def test_a_call_warns_once(call: str) -> None:
    with pytest.warns(LongTextWarning) as record:
        CALLS[call](models.hooked("llama"))
    (sentence,) = said(record)
    assert f"has {70 if call == 'generate' else 90} tokens" in sentence
    assert "trained on texts of at most 64" in sentence
    assert "truncate" not in sentence


def test_a_corpus_is_cut_at_the_trained_length() -> None:
    model, texts = models.hooked("llama"), [LONG[0, :9], LONG[0], LONG[0, 1:]]
    with pytest.warns(LongTextWarning, match="document 1 has 90 tokens.* or give truncate=True to cut it") as record:
        am.attention_focus(model, iter(texts))
    assert len(said(record)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut = am.attention_focus(model, iter(texts), truncate=True)
        short = am.attention_focus(model, iter([text[:64] for text in texts]))
        am.head_types(model)  # its random texts fit
    assert (cut.truncated, short.truncated) == (2, 0)
    assert torch.equal(cut["entropy"].mean, short["entropy"].mean)
