"""Models that read pictures or sound among their tokens: their text is read, anything else is refused."""

from typing import Any

import models
import pytest
import tiny
import torch
from comparing import refuses
from tokenizers import AddedToken

import attnmech as am
from attnmech.errors import InputError

IMAGE, BEGIN, END = 33, 40, 41
KINDS = {
    "gemma3": {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END},
    "llava": {"image_token_index": IMAGE},
    "internvl": {"image_token_id": IMAGE},
    "smolvlm": {"image_token_id": IMAGE},
    "mistral3": {"image_token_index": IMAGE},
    "qwen3_vl": {"video_token_id": IMAGE, "vision_end_token_id": END},
    "qwen2_vl": {"image_token_id": IMAGE, "vision_start_token_id": BEGIN},
    "qwen2_5_vl": {"video_token_id": IMAGE, "vision_end_token_id": END},
    "aya_vision": {"image_token_index": IMAGE},
    "idefics3": {"image_token_id": IMAGE},
    "llava_next": {"image_token_index": IMAGE},
    "paligemma": {"image_token_index": IMAGE},
    "qwen2_audio": {"audio_token_index": IMAGE},
    "voxtral": {"audio_token_id": IMAGE},
}
LENGTH = 60
"""Longer than the position table of any tower: 16 to 50 patches."""


def texts() -> torch.Tensor:
    known = torch.tensor([token for token in range(10, tiny.ONE["vocab"]) if token not in (IMAGE, BEGIN, END)])
    return known[torch.randint(len(known), (2, LENGTH), generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_read_as_by_transformers_and_placeholders_are_refused(kind: str) -> None:
    plain = tiny.merging(kind, **KINDS[kind])
    model = am.load(plain)
    assert not model.refused and model.certificate.ok
    assert model.architecture.position_limit is None and model.further_embeddings == ()
    ids = texts()
    acts = model.run(ids, points=["pattern", "logits"])
    prompts = {"token_type_ids": torch.zeros_like(ids)} if kind == "paligemma" else {}
    with torch.no_grad():
        torch.testing.assert_close(acts.logits, plain(ids).logits, atol=1e-4, rtol=0)
        theirs = models.in_attention(plain, "eager")(ids, output_attentions=True, **prompts)
    torch.testing.assert_close(acts.logits, theirs.logits, atol=2e-5, rtol=0)
    for layer, pattern in enumerate(theirs.attentions):
        torch.testing.assert_close(acts["pattern", layer], pattern, atol=1e-5, rtol=0)
    for token in KINDS[kind].values():
        held = ids.clone()
        held[1, 7] = token
        for inputs in (held, list(held), {"input_ids": held}, iter([held])):
            call = am.attention_focus if not isinstance(inputs, torch.Tensor | list | dict) else am.residual_updates
            refuses(f"holds token {token}, which stands for a", call, model, inputs)
        refuses(r"which stands for a.*eave", model.generate, held[1:], 2)
    hidden = torch.ones_like(held)
    hidden[1, :8] = 0
    model.run({"input_ids": held, "attention_mask": hidden})  # as padding, a placeholder stands for nothing


@pytest.fixture(scope="module")
def spoken() -> am.HookedModel:
    """A model of images with a tokenizer, which names its placeholders in three ways."""
    tokenizer = models.tokenizer(has_bos=True)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<img>", "<|fast|>"]})
    tokenizer.add_tokens([AddedToken("<soft>"), AddedToken("ultrasound")])
    tokenizer._set_model_specific_special_tokens({"audio_token": "here"})
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% elif part['type'] == 'image' %} <soft> {% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    soft = tokenizer.convert_tokens_to_ids("<soft>")
    return am.load(tiny.merging("llava", image_token_index=soft), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ("the <soft> keys", ("'<soft>'", "an image")),
        (["a dog", "the <img> keys"], ("'<img>'", "an image")),
        ("the keys are here", ("'here'", "a sound")),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "the keys"}]}], ('"image": ...',)),
        ([{"role": "user", "content": [{"type": "video", "path": "a.mp4"}]}], ("films are not read",)),
        ([{"role": "user", "content": "a"}, {"role": "b", "content": [{"type": "input_audio"}]}], ('"audio": ...',)),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}], ('"image": ...',)),
        ([{"role": "user", "content": [{"image": "a.png"}]}], ("without its processor", "AutoProcessor")),
    ],
)  # fmt: skip
def test_what_stands_for_a_picture_is_named(spoken: am.HookedModel, inputs: Any, words: tuple[str, ...]) -> None:
    for call in (spoken.run, spoken.generate, lambda texts: am.attention_focus(spoken, iter([texts]))):
        with pytest.raises(InputError) as caught:
            call(inputs)
        message = str(caught.value)
        assert "text" in message or "chat" in message or "films" in message
        assert "\n" not in message
        assert all(word in message for word in words), message


def test_other_special_tokens_and_text_in_parts_are_read(spoken: am.HookedModel) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "the <|fast|> ultrasound"}]}]
    batch = spoken.encode(chat)
    assert batch.tokens[0][1:] == ("the", "<|fast|>", "ultrasound")
    with torch.no_grad():
        torch.testing.assert_close(spoken.run(chat).logits, spoken.original(batch.ids).logits, atol=2e-5, rtol=0)


def test_a_tower_is_not_part_of_the_text_stack() -> None:
    plain = tiny.merging("llava", image_token_index=IMAGE)
    plain.model.vision_tower.to(torch.bfloat16)
    model = am.load(plain)
    assert model.dtype == torch.float32 and model.certificate.ok
    ids = texts()[:1, :9]
    sources = am.decompose_by_source(model, ids)
    assert "position embedding" not in sources.sources and float(sources.residual.max()) < 1e-4
    plain.config.text_config.eos_token_id = int(model.run(ids).logits[0, -1].argmax())
    assert model.generate(ids, 5, points=["q"]).ids.shape[1] == ids.shape[1] + 1


def test_zeros_that_change_the_output_are_refused() -> None:
    """GPT-2 embeds token types by its token embedding, so zeros add the row of token 0."""
    plain, ids = models.fresh("gpt2"), torch.tensor([[11, 12, 13]])
    zeros = torch.zeros_like(ids)
    with torch.no_grad():
        assert (plain(ids, token_type_ids=zeros).logits - plain(ids).logits).abs().max() > 1e-2
    refuses("got token_type_ids as well", am.load(plain).run, {"input_ids": ids, "token_type_ids": zeros})
